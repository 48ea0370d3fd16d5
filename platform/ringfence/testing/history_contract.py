"""The part of the filesystem contract that is about snapshots, changes and tool calls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from ringfence.errors import CallEndedError, SnapshotRestoreError
from ringfence.filesystem.protocol import Filesystem, FilesystemSnapshot
from ringfence.participants import CURRENT_CALL, CallInfo, participant_of
from ringfence.testing.calls import HeldCall, held_call
from ringfence.testing.looking import CHANGES, FilesystemAbilities, kinds, refused, tree_of


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def change_everything(fs: Filesystem) -> None:
    """Some change of every kind to the files of `filled`."""
    fs.write("a.txt", "changed")
    fs.write("d/b.txt", "more", mode="append")
    fs.write("new/place/c.txt", "new")
    fs.delete("d/e", recursive=True)
    fs.move("move/me", "moved/me")
    fs.delete("kind")
    fs.write("kind/is/directory", "x")


def filled(fs: Filesystem) -> dict[str, object]:
    for path in ("a.txt", "d/b.txt", "d/e/f.txt", "move/me/x", "kind", "untouched/g.txt"):
        fs.write(path, path)
    fs.mkdir("empty")
    return tree_of(fs)


class HistoryContract(FilesystemAbilities):
    # Snapshots

    def test_restore_brings_everything_back(self, fs: Filesystem) -> None:
        before = filled(fs)
        snapshot = fs.snapshot()
        change_everything(fs)
        assert tree_of(fs) != before
        fs.restore(snapshot)
        assert tree_of(fs) == before
        assert len(fs.changes(snapshot)) == 0

    def test_a_snapshot_says_what_it_is(self, fs: Filesystem) -> None:
        one, two = fs.snapshot(tag="before"), fs.snapshot()
        assert (one.tag, two.tag) == ("before", None)
        assert one.snapshot_id != two.snapshot_id
        assert one.root_path == fs.root
        assert one.created_at.tzinfo is not None
        assert one.created_at <= two.created_at

    def test_a_snapshot_of_something_else_is_refused(self, fs: Filesystem, read_only_fs: Filesystem) -> None:
        fs.write("a.txt", "x")
        made_up = FilesystemSnapshot("made up", datetime(2026, 1, 1, tzinfo=UTC), "0" * 40, fs.root)
        for snapshot in (read_only_fs.snapshot(), made_up):
            with refused(SnapshotRestoreError):
                fs.restore(snapshot)
            with refused(SnapshotRestoreError):
                fs.changes(snapshot)
        assert fs.read("a.txt").content == "x"

    # Changes

    def test_changes_are_what_differs_and_nothing_else(self, fs: Filesystem) -> None:
        filled(fs)
        before = fs.snapshot()
        assert len(fs.changes(before)) == 0
        change_everything(fs)
        assert kinds(fs.changes(before)) == [
            ("modified", "a.txt"),
            ("modified", "d/b.txt"),
            ("deleted", "d/e"),
            ("deleted", "d/e/f.txt"),
            ("modified", "kind"),
            ("created", "kind/is"),
            ("created", "kind/is/directory"),
            ("deleted", "move/me"),
            ("deleted", "move/me/x"),
            ("created", "moved"),
            ("created", "moved/me"),
            ("created", "moved/me/x"),
            ("created", "new"),
            ("created", "new/place"),
            ("created", "new/place/c.txt"),
        ]

    def test_a_change_has_both_versions(self, fs: Filesystem) -> None:
        fs.write("a.txt", "one")
        before = fs.snapshot()
        fs.write("a.txt", "three")
        fs.mkdir("d")
        [file, directory] = fs.changes(before)
        assert file.before is not None
        assert file.after is not None
        assert (file.before.kind, file.before.size, file.before.content_hash) == ("file", 3, sha256("one"))
        assert (file.after.kind, file.after.size, file.after.content_hash) == ("file", 5, sha256("three"))
        assert file.before.mode == fs.stat("a.txt").mode
        assert directory.before is None
        assert directory.after is not None
        assert (directory.after.kind, directory.after.size, directory.after.content_hash) == ("directory", 0, None)

    def test_what_comes_back_to_what_it_was_is_no_change(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "one")
        before = fs.snapshot()
        fs.write("d/a.txt", "two")
        fs.write("d/b.txt", "two")
        fs.write("d/a.txt", "one")
        fs.delete("d/b.txt")
        fs.move("d", "e")
        fs.move("e", "d")
        assert len(fs.changes(before)) == 0

    def test_snapshots_are_restored_in_any_order_and_changes_reach_over_many(self, fs: Filesystem) -> None:
        snapshots, trees = [fs.snapshot()], [tree_of(fs)]
        for number in range(4):
            fs.write(f"d/{number}", "x")
            snapshots.append(fs.snapshot())
            trees.append(tree_of(fs))
        for old, snapshot in enumerate(snapshots):
            for new, other in enumerate(snapshots):
                fs.restore(other)
                assert tree_of(fs) == trees[new]
                found = [change for change in fs.changes(snapshot) if change.path != "d"]
                expected = [("created", f"d/{number}") for number in range(old, new)]
                expected += [("deleted", f"d/{number}") for number in range(new, old)]
                assert kinds(found) == expected, (old, new)
                fs.write("d/meanwhile", "x")

    def test_permission_bits_are_changes(self, fs: Filesystem) -> None:
        self.need(self.permission_bits, "permission bits")
        fs.write("d/a.txt", "one")
        fs.chmod("d", 0o755)
        fs.chmod("d/a.txt", 0o644)
        before = fs.snapshot()
        fs.chmod("d", 0o700)
        fs.chmod("d/a.txt", 0o755)
        assert kinds(fs.changes(before)) == [("modified", "d"), ("modified", "d/a.txt")]
        assert [change.before.mode for change in fs.changes(before) if change.before] == [0o755, 0o644]
        assert [change.after.mode for change in fs.changes(before) if change.after] == [0o700, 0o755]
        fs.restore(before)
        assert (fs.stat("d").mode, fs.stat("d/a.txt").mode) == (0o755, 0o644)

    def test_changes_go_by_path(self, fs: Filesystem) -> None:
        before = fs.snapshot()
        for path in ("a/b", "a.txt", "a-b", "A", "a/B/c"):
            fs.write(path, "x")
        found = [change.path for change in fs.changes(before)]
        assert found == sorted(found)
        assert len(found) == 7

    # Tool calls

    def test_a_rolled_back_call_leaves_no_trace(self, fs: Filesystem) -> None:
        before = filled(fs)
        with held_call(fs) as call:
            change_everything(fs.for_call(call))
            assert len(call.changed()) == 15
            report = call.rollback()
        assert report.conflicts == ()
        assert tree_of(fs) == before

    def test_a_committed_call_is_kept(self, fs: Filesystem) -> None:
        filled(fs)
        before = fs.snapshot()
        with held_call(fs) as call:
            change_everything(fs.for_call(call))
            after = tree_of(fs)
            call.commit()
        assert tree_of(fs) == after
        fs.restore(before)
        assert fs.read("a.txt").content == "a.txt"

    def test_a_call_inside_a_call_rolls_back_to_its_own_beginning(self, fs: Filesystem) -> None:
        with held_call(fs) as outer:
            fs.for_call(outer).write("outer.txt", "x")
            with held_call(fs, call_id="inner", parent=outer) as inner:
                fs.for_call(inner).write("outer.txt", "y")
                fs.for_call(inner).write("inner.txt", "y")
                inner.rollback()
            assert fs.read("outer.txt").content == "x"
            assert not fs.exists("inner.txt")
            fs.for_call(outer).write("outer.txt", "z", mode="append")
            outer.commit()
        assert fs.read("outer.txt").content == "xz"

    def test_an_outer_rollback_takes_an_inner_commit_along(self, fs: Filesystem) -> None:
        before = filled(fs)
        with held_call(fs) as outer:
            for number in range(3):
                with held_call(fs, call_id=f"inner {number}", parent=outer) as inner:
                    fs.for_call(inner).write(f"{number}/a.txt", "x")
                    inner.commit()
            assert kinds(outer.changed())[0] == ("created", "0")
            outer.rollback()
        assert tree_of(fs) == before

    def test_restoring_inside_a_call_is_a_change_like_any_other(self, fs: Filesystem) -> None:
        fs.write("a.txt", "one")
        snapshot = fs.snapshot()
        fs.write("a.txt", "two")
        with held_call(fs) as call:
            fs.for_call(call).restore(snapshot)
            assert kinds(call.changed()) == [("modified", "a.txt")]
            call.rollback()
        assert fs.read("a.txt").content == "two"

    def test_code_of_a_call_may_use_the_filesystem_directly(self, fs: Filesystem) -> None:
        with held_call(fs) as call:
            before = CURRENT_CALL.set(call)
            fs.write("a.txt", "x")
            CURRENT_CALL.reset(before)
            assert kinds(call.changed()) == [("created", "a.txt")]
            call.rollback()
        assert not fs.exists("a.txt")

    def test_the_handle_of_a_call_works_in_any_thread(self, fs: Filesystem) -> None:
        with held_call(fs) as call:
            in_thread(lambda: fs.for_call(call).write("a.txt", "x")).join()
            assert kinds(call.changed()) == [("created", "a.txt")]
            call.commit()

    def test_a_handle_is_the_same_filesystem(self, fs: Filesystem, read_only_fs: Filesystem) -> None:
        handle = fs.for_call(CallInfo("call-1", "a test"))
        assert handle == fs
        assert hash(handle) == hash(fs)
        assert handle != read_only_fs
        assert handle.root == fs.root
        mine, its = participant_of(fs), participant_of(handle)
        assert mine is not None
        assert its is not None
        assert mine.lock is its.lock

    def test_a_call_that_has_ended_changes_nothing_more(self, fs: Filesystem) -> None:
        with held_call(fs) as call:
            handle = fs.for_call(call)
            handle.write("a.txt", "x")
            call.commit()
            self.all_refuse(CallEndedError, CHANGES, handle)
        with refused(CallEndedError):
            handle.write("b.txt", "x")
        assert handle.read("a.txt").content == "x"
        assert [entry.name for entry in fs.list()] == ["a.txt"]

    def test_a_change_from_outside_waits_until_the_call_has_ended(self, fs: Filesystem) -> None:
        with held_call(fs) as call:
            fs.for_call(call).write("a.txt", "call")
            outside = in_thread(lambda: fs.write("a.txt", " outside", mode="append"))
            outside.join(0.05)
            assert outside.is_alive()
            assert fs.read("a.txt").content == "call"
            call.commit()
        outside.join(10)
        assert fs.read("a.txt").content == "call outside"

    def test_a_change_through_a_call_that_does_not_take_part_yet_makes_it_take_part(self, fs: Filesystem) -> None:
        call = HeldCall()
        fs.for_call(call).write("a.txt", "x")
        assert kinds(call.changed()) == [("created", "a.txt")]
        call.rollback()
        call.release()
        assert not fs.exists("a.txt")

    # What a call has read

    def test_reads_are_recorded_with_the_hash_of_the_whole_file_until_the_call_ends(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "one\ntwo\n")
        fs.write("b.bin", "three")
        fs.write("empty", "")
        fs.write("late", "x")
        with held_call(fs) as call:
            handle = fs.for_call(call)
            handle.read("./d//a.txt", offset=1, limit=1)
            handle.read_bytes("b.bin", limit=1)
            handle.read("empty")
            reads = {"d/a.txt": sha256("one\ntwo\n"), "b.bin": sha256("three"), "empty": sha256("")}
            assert reads_of(call) == reads
            call.rollback()
            handle.read("late")
            assert reads_of(call) == reads

    def test_a_read_through_a_link_is_a_read_of_the_file(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("d/a.txt", "x")
        fs.symlink("way", "d")
        fs.symlink("link", "way/a.txt")
        with held_call(fs) as call:
            fs.for_call(call).read("link")
            assert reads_of(call) == {"d/a.txt": sha256("x")}
            call.rollback()

    def test_looking_is_not_reading(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x\n")
        with held_call(fs) as call:
            handle = fs.for_call(call)
            handle.stat("a.txt")
            handle.exists("a.txt")
            handle.content_hash("a.txt")
            handle.list()
            handle.glob("*")
            handle.grep("x")
            handle.resolve("a.txt")
            handle.read("a.txt", limit=0)
            handle.read("a.txt", offset=5)
            handle.read_bytes("a.txt", limit=0)
            fs.read("a.txt")
            assert reads_of(call) == {}
            call.rollback()

    def test_a_nested_call_notes_what_goes_through_the_outer_handle(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x")
        with held_call(fs) as outer:
            with held_call(fs, call_id="inner", parent=outer) as inner:
                before = CURRENT_CALL.set(inner)
                fs.for_call(outer).read("a.txt")
                fs.for_call(outer).write("b.txt", "x")
                CURRENT_CALL.reset(before)
                assert reads_of(inner) == {"a.txt": sha256("x")}
                inner.rollback()
            assert reads_of(outer) == {}
            assert not fs.exists("b.txt")
            outer.commit()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def reads_of(call: CallInfo) -> dict[str, str]:
    assert len(call.reads) <= 1
    return {path: content_hash for reads in call.reads.values() for path, content_hash in reads.items()}
