from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from captured_tree import tree_of
from hypothesis import given
from hypothesis import strategies as st
from patches import differences
from running_calls import CallState, participant_of, within

from ringfence.errors import CallEndedError, ParticipantBusyError
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.filesystem.edits import line_window
from ringfence.filesystem.tree import MemoryDirectory, MemoryFile, Node, Savepoint, Tree
from ringfence.runtime import CallInfo, Transaction
from ringfence.testing import HeldCall, held_call

DAY = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)


class Days:
    """A clock of which each look is a day later."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        self.now += DAY
        return int(self.now.timestamp()) * 10**9


def nodes() -> int:
    gc.collect()
    return sum(type(thing) in (MemoryFile, MemoryDirectory) for thing in gc.get_objects())


def in_threads(*work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    return threads


def test_it_is_a_filesystem_and_takes_part_in_transactions_itself() -> None:
    filesystem = InMemoryFilesystem()
    assert isinstance(filesystem, Filesystem)
    assert participant_of(filesystem) is filesystem
    assert filesystem.durable is False
    assert {filesystem: 1}[filesystem.for_call(CallInfo("1", "a test"))] == 1
    assert InMemoryFilesystem() != filesystem


def test_new_files_and_directories_have_the_usual_bits() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.write("d/a.txt", "x")
    assert (filesystem.stat("d").mode, filesystem.stat("d/a.txt").mode) == (0o755, 0o644)


def test_what_is_written_is_copied() -> None:
    filesystem, content = InMemoryFilesystem(), bytearray(b"abc")
    filesystem.write_bytes("a", content)
    content[0] = 0
    assert filesystem.read_bytes("a").content == b"abc"


def test_all_permission_bits_can_be_set_of_the_root_too() -> None:
    filesystem = InMemoryFilesystem()
    before = filesystem.snapshot()
    for mode in (0, 0o7777):
        filesystem.chmod("/", mode)
        assert filesystem.stat("").mode == mode
    [change] = filesystem.changes(before)
    assert (change.path, change.kind, change.after and change.after.mode) == ("", "modified", 0o7777)


# Times


def test_times_come_from_the_clock() -> None:
    clock = Days()
    filesystem = InMemoryFilesystem(clock=clock)
    filesystem.write("a.txt", "x")
    made = filesystem.stat("a.txt")
    assert made.created_at == made.modified_at
    filesystem.write("a.txt", "y")
    changed = filesystem.stat("a.txt")
    assert changed.created_at == made.created_at
    assert changed.modified_at == clock.now > made.modified_at


def test_only_writing_changes_a_time() -> None:
    filesystem = InMemoryFilesystem(clock=Days())
    filesystem.write("a.txt", "x")
    before = filesystem.stat("a.txt").modified_at
    filesystem.chmod("a.txt", 0o600)
    filesystem.read("a.txt")
    filesystem.move("a.txt", "d/b.txt")
    assert filesystem.stat("d/b.txt").modified_at == before


def test_a_directory_has_the_time_of_its_last_new_or_lost_name() -> None:
    filesystem = InMemoryFilesystem(clock=Days())
    filesystem.write("d/a.txt", "x")
    times = [filesystem.stat("d").modified_at]
    filesystem.write("d/a.txt", "y")
    assert filesystem.stat("d").modified_at == times[0]
    filesystem.write("d/b.txt", "y")
    times.append(filesystem.stat("d").modified_at)
    filesystem.delete("d/a.txt")
    times.append(filesystem.stat("d").modified_at)
    assert times == sorted(set(times))


def test_a_time_that_no_datetime_holds_is_the_nearest_one() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.load("future", b"", mtime_ns=10**30)
    filesystem.load("past", b"", mtime_ns=-(10**30))
    assert filesystem.stat("future").modified_at.year == 9999
    assert filesystem.stat("past").modified_at.year == 1


# Loading


def test_what_is_loaded_has_the_bits_and_times_it_is_given() -> None:
    filesystem = InMemoryFilesystem()
    day = int(START.timestamp()) * 10**9
    filesystem.load_directory("bin", mode=0o700, mtime_ns=day)
    filesystem.load("bin/run", b"x", mode=0o755, mtime_ns=day + 1000)
    filesystem.load_symlink("run", "bin/run", mtime_ns=day)
    filesystem.load_directory("bin", mode=0o711, mtime_ns=day)
    stat = filesystem.stat("run")
    assert (stat.mode, stat.modified_at, stat.is_symlink) == (0o755, START + timedelta(microseconds=1), True)
    assert (filesystem.stat("bin").mode, filesystem.stat("bin").modified_at) == (0o711, START)


def test_a_read_only_filesystem_can_be_loaded() -> None:
    filesystem = InMemoryFilesystem(read_only=True)
    filesystem.load("d/a.txt", b"x")
    filesystem.load_directory("e")
    filesystem.load_symlink("link", "d/a.txt")
    assert filesystem.read("link").content == "x"
    with pytest.raises(PermissionError):
        filesystem.write("d/a.txt", "y")


def test_loading_replaces_its_own_kind_only() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.load("a", b"x")
    filesystem.load("a", b"y")
    filesystem.mkdir("d")
    with pytest.raises(IsADirectoryError):
        filesystem.load("d", b"x")
    for load in (lambda: filesystem.load_directory("a"), lambda: filesystem.load_symlink("a", "d")):
        with pytest.raises(FileExistsError):
            load()
    assert filesystem.read("a").content == "y"


def test_what_a_call_loads_is_kept_or_rolled_back_with_it() -> None:
    filesystem = InMemoryFilesystem()
    with held_call(filesystem) as call:
        filesystem.for_call(call).load("b.txt", b"x")
        assert call.commit() is None  # no history, no step
    assert filesystem.exists("b.txt")
    with held_call(filesystem) as call:
        filesystem.for_call(call).load("a.txt", b"x")
        call.rollback()
    assert not filesystem.exists("a.txt")


# Cost


class Untouchable(dict[str, Node]):
    """Entries of a directory that nothing may look into."""

    def refuse(self, *arguments: object) -> Any:
        raise AssertionError("this directory has nothing to do with the change")

    get = keys = items = values = copy = __getitem__ = __iter__ = refuse


def test_what_is_not_changed_is_neither_copied_nor_looked_at() -> None:
    tree = Tree(time.time_ns)
    for path in ("quiet/a", "busy/quiet/b", "busy/c"):
        tree.put(path, MemoryFile(b"x", 0o644, 0, 0))
    for path in ("quiet", "busy/quiet"):
        tree.changeable(path).entries = Untouchable()
    before = tree.freeze()
    tree.put("busy/c", MemoryFile(b"y", 0o644, 0, 0))
    assert [change.path for change in differences(before, tree.root)] == ["busy/c"]
    tree.go_back(before)
    tree.put("busy/d/e", MemoryFile(b"y", 0o644, 0, 0))
    assert [change.path for change in differences(before, tree.root)] == ["busy/d", "busy/d/e"]


class Counted(dict[str, Node]):
    copies = 0

    def copy(self) -> dict[str, Node]:
        Counted.copies += 1
        return super().copy()


@pytest.mark.parametrize("kept", [True, False])
def test_a_call_copies_no_directory_whether_it_is_kept_or_rolled_back(kept: bool) -> None:
    tree = Tree(time.time_ns)
    tree.put("d/e/a", MemoryFile(b"x", 0o644, 0, 0))
    copies, before = Counted.copies, tree.changeable("d/e")
    before.entries = Counted(before.entries)
    savepoint = tree.savepoint(outermost=True)
    assert tree.overwrite("d/e/a", b"y")
    tree.put("d/e/b/c", MemoryFile(b"z", 0o644, 0, 0))
    assert [change.path for change in tree.changes(savepoint)] == ["d/e/a", "d/e/b", "d/e/b/c"]
    (tree.release if kept else tree.roll_back)(savepoint)
    assert tree.find("d/e")[1] is before
    assert Counted.copies == copies


@pytest.mark.parametrize("frozen", [True, False])
def test_a_call_that_moves_a_directory_and_changes_it_rolls_back(frozen: bool) -> None:
    filesystem = InMemoryFilesystem()
    for path in ("d/a", "d/e/b", "f/a"):
        filesystem.write(path, path)
    before = tree_of(filesystem)
    with held_call(filesystem) as call:
        handle = filesystem.for_call(call)
        handle.write("d/a", "early")
        handle.move("d", "g/h")
        handle.write("g/h/e/b", "late")
        _ = handle.snapshot() if frozen else None
        handle.delete("f", recursive=True)
        handle.move("g/h", "f")
        handle.chmod("f/e", 0o700)
        handle.delete("f/a")
        assert [(change.kind, change.path) for change in call.changed()] == [
            ("deleted", "d"),
            ("deleted", "d/a"),
            ("deleted", "d/e"),
            ("deleted", "d/e/b"),
            ("deleted", "f/a"),
            ("created", "f/e"),
            ("created", "f/e/b"),
            ("created", "g"),
        ]
        call.rollback()
    assert tree_of(filesystem) == before


def test_a_file_that_a_call_overwrites_again_and_again_is_kept_once() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.write("a.txt", "x")
    before = nodes()
    with held_call(filesystem) as call:
        for number in range(100):
            filesystem.for_call(call).write("a.txt", str(number))
        assert nodes() == before + 1
        call.rollback()
    assert filesystem.read("a.txt").content == "x"


def test_a_thousand_transactions_leave_nothing_behind() -> None:
    filesystem = InMemoryFilesystem()
    for number in range(100):
        filesystem.write(f"d{number % 10}/{number}", "x")
    before = nodes()
    for number in range(1000):
        with held_call(filesystem) as call:
            filesystem.for_call(call).write(f"d{number % 10}/{number % 100}", str(number))
            filesystem.snapshot()
            _ = call.commit() if number % 3 else call.rollback()
    assert nodes() == before


class EndsItsCall(InMemoryFilesystem):
    """Its call has ended when it has given its savepoint: as where another thread ends it in that moment."""

    def begin(self, call: CallInfo) -> Savepoint:
        savepoint = super().begin(call)
        call.state = CallState.ROLLED_BACK
        return savepoint


def test_a_call_that_ends_while_a_filesystem_joins_it_leaves_no_log_behind() -> None:
    filesystem = EndsItsCall()
    filesystem.write("a.txt", "x")
    call = Transaction("call", "a test", None)
    call.begin()
    with pytest.raises(CallEndedError):
        call.join(filesystem)
    before = nodes()
    filesystem.write("a.txt", "y")
    assert nodes() == before
    assert filesystem.lock.holder is None


def test_a_snapshot_that_nobody_keeps_is_gone() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.write("d/a.txt", "x")
    before = nodes()
    kept = filesystem.snapshot()
    filesystem.write("d/a.txt", "y")
    assert nodes() == before + 3  # the root, d and a.txt as they were
    assert kept.snapshot_id
    del kept
    assert nodes() == before


def test_what_was_answered_before_is_not_answered_after_a_change() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.write("d/a.txt", "x")
    for content in ("one", "two"):
        filesystem.write("d/a.txt", content)
        assert filesystem.read("d/a.txt").content == content
        assert filesystem.read_bytes("d/a.txt").content == content.encode()
    filesystem.move("d", "e")
    assert filesystem.read("e/a.txt").path == filesystem.read_bytes("e/a.txt").path == "e/a.txt"
    assert [match.path for match in filesystem.glob("*/*")] == [entry.path for entry in filesystem.list("e")]


# Calls and threads


def test_a_fork_and_its_source_go_on_each_for_itself() -> None:
    files = InMemoryFilesystem()
    files.write("src/a.txt", "a\n")
    files.write("src/b.txt", "b\n")
    twin = files.fork()
    files.write("src/a.txt", "of the source\n")
    twin.write("src/a.txt", "of the fork\n")
    third = twin.fork()
    twin.delete("src/b.txt")
    files.mkdir("empty")
    assert [one.read("src/a.txt").content for one in (files, twin, third)] == [
        "of the source\n",
        "of the fork\n",
        "of the fork\n",
    ]
    assert [one.exists("src/b.txt") for one in (files, twin, third)] == [True, False, True]
    assert [one.exists("empty") for one in (files, twin, third)] == [True, False, False]
    assert files != twin


def test_a_fork_made_in_a_call_keeps_what_the_call_rolls_back() -> None:
    files = InMemoryFilesystem()
    files.write("src/a.txt", "before\n")
    with held_call(files) as held:
        files.for_call(held).write("src/a.txt", "in the call\n")
        twin = files.fork()
        twin.write("src/b.txt", "while the call is open\n")
        held.rollback()
    assert (files.read("src/a.txt").content, files.exists("src/b.txt")) == ("before\n", False)
    assert (twin.read("src/a.txt").content, twin.exists("src/b.txt")) == ("in the call\n", True)


def test_a_fork_copies_nothing() -> None:
    files = InMemoryFilesystem()
    for number in range(300):
        files.write(f"{number % 10}/{number}.txt", "x")
    before = nodes()
    twins = [files.fork() for _ in range(100)]
    assert nodes() < before + 2 * len(twins)


def test_a_snapshot_taken_in_a_call_outlives_its_rollback() -> None:
    filesystem = InMemoryFilesystem()
    with held_call(filesystem) as call:
        filesystem.for_call(call).write("a.txt", "x")
        snapshot = filesystem.for_call(call).snapshot()
        call.rollback()
    filesystem.restore(snapshot)
    assert filesystem.read("a.txt").content == "x"


def test_a_snapshot_does_not_wait_for_a_call() -> None:
    filesystem = InMemoryFilesystem(patience_seconds=0.0)
    with held_call(filesystem) as call:
        before = filesystem.snapshot()
        filesystem.for_call(call).write("a.txt", "x")
        assert len(filesystem.changes(before)) == 1
        call.commit()
        assert filesystem.for_call(call).snapshot().snapshot_id != before.snapshot_id


def test_what_waits_too_long_is_told_who_holds_the_filesystem() -> None:
    filesystem = InMemoryFilesystem(patience_seconds=0.01)
    with held_call(filesystem, call_id="the holder"), pytest.raises(ParticipantBusyError, match="the holder"):
        filesystem.write("a.txt", "x")


def test_a_rollback_waits_for_a_change_that_is_under_way() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def clock() -> int:
        if threading.current_thread() is writer:
            entered.set()
            go_on.wait(10)
        return 0

    writer = threading.current_thread()
    go_on.set()
    filesystem = InMemoryFilesystem(clock=clock)
    go_on.clear()
    with held_call(filesystem) as call:
        handle = filesystem.for_call(call)
        writer = threading.Thread(target=lambda: handle.write("d/late.txt", "x"), daemon=True)
        writer.start()
        assert entered.wait(10)
        [rollback] = in_threads(call.rollback)
        rollback.join(0.05)
        assert rollback.is_alive()
        go_on.set()
        rollback.join(10)
        writer.join(10)
    assert len(filesystem.list()) == 0


def test_changes_of_many_threads_are_all_made() -> None:
    filesystem = InMemoryFilesystem()

    def work(name: str) -> None:
        for number in range(100):
            filesystem.write("log", f"{name}\n", mode="append")
            filesystem.write(f"{name}/{number}", "x")
            filesystem.snapshot()

    for thread in in_threads(*(lambda name=name: work(name) for name in "abcd")):
        thread.join(60)
    assert filesystem.read("log").total_lines == 400
    assert len(filesystem.glob("*/*")) == 400


def test_looking_is_possible_while_something_changes() -> None:
    filesystem = InMemoryFilesystem()
    problems: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                assert len(filesystem.list("d")) == len(filesystem.glob("d/*"))
                filesystem.grep("x")
                filesystem.changes(before)
        except AssertionError:
            pass  # the directory changed between the two looks
        except BaseException as error:
            problems.append(error)

    filesystem.mkdir("d")
    before = filesystem.snapshot()
    threads = in_threads(look, look)
    for number in range(1500):
        filesystem.write(f"d/{number % 70}", "x")
        if number % 3 == 0:
            filesystem.delete(f"d/{number % 70}")
    done.set()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert [entry.path for entry in filesystem.list("d")] == [match.path for match in filesystem.glob("d/*")]


def test_a_handle_belongs_to_its_call_whatever_call_runs() -> None:
    filesystem, mine, other = InMemoryFilesystem(), HeldCall("mine"), HeldCall("other")
    with within(other):
        filesystem.for_call(mine).write("a.txt", "x")
    assert mine.participant.lock is filesystem.lock
    assert filesystem.lock.holder is mine
    mine.rollback()
    mine.release()
    assert not filesystem.exists("a.txt")


# Lines


@given(st.text(alphabet="ab\n\r é", max_size=40), st.integers(0, 12), st.one_of(st.none(), st.integers(-1, 12)))
def test_a_window_is_what_splitting_at_newlines_gives(text: str, offset: int, limit: int | None) -> None:
    lines = text.split("\n")
    kept = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    expected = kept[offset:] if limit in (None, -1) else kept[offset : offset + limit]
    for encoding in ("utf-8", "utf-16"):
        answer = line_window(text.encode(encoding), offset, limit, encoding, "a.txt")
        assert answer == ("".join(expected), len(expected), len(kept))


def test_a_window_of_a_long_file_decodes_nothing_else() -> None:
    content = b"\xff\n" * 1000 + b"here\n" + b"\xff\n" * 1000
    assert line_window(content, 1000, 1, "utf-8", "a.txt") == ("here\n", 1, 2001)
    with pytest.raises(ValueError, match="a.txt is not utf-8"):
        line_window(content, 999, 1, "utf-8", "a.txt")


class Watched(bytes):
    """Bytes that count how many of them are copied, and may be gone through as a whole only until they are sealed."""

    copied = 0
    sealed = False

    def _gone_through(self, method: str, *arguments: Any) -> Any:
        assert not self.sealed, method
        return getattr(super(), method)(*arguments)

    def count(self, *arguments: Any) -> int:
        return self._gone_through("count", *arguments)

    def split(self, *arguments: Any) -> list[bytes]:
        return self._gone_through("split", *arguments)

    def decode(self, *arguments: Any) -> str:
        return self._gone_through("decode", *arguments)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 1
        return found


def test_reading_one_line_of_a_large_file_costs_what_the_line_does() -> None:
    filesystem = InMemoryFilesystem()
    content = Watched(b"a line of some length, as in a log\n" * 60_000)
    filesystem.load("large.log", content)
    filesystem.read("large.log", limit=1)  # which counts the lines, once
    content.sealed, content.copied = True, 0
    for offset in (0, 30_000, 59_999):
        result = filesystem.read("large.log", offset=offset, limit=1)
        assert (result.total_lines, result.content) == (60_000, "a line of some length, as in a log\n")
    assert content.copied < len(content) / 10
