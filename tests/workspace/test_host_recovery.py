"""A workspace whose opener is killed at each system call that changes something; see `docs/understand/recovery.md`."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured_tree import capture_tree, lasting
from effort import SEED, amount, kill_points
from failpoints import injected
from kernels import NO_LINKS, on_each_kernel
from killing import killed_at

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem


def build(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_bytes(b"one\r\ntwo")
    (root / "d/b.txt").write_text("b")
    (root / "d/e/c.txt").write_text("c")
    os.link(root / "d/b.txt", root / "d/hard")
    os.symlink("../a.txt", root / "d/link")
    (root / "m").mkdir()
    (root / "m/x").write_text("x")
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).write_text("odd")
    os.chmod(root / "d/e/c.txt", 0o640)
    for path in ("d/e/c.txt", "d/e", "d", "m", "empty", "a.txt", ""):
        os.utime(root / path, ns=(10**18, 10**18 + len(path)))


def write_one(fs: HostFilesystem) -> None:
    fs.write("a.txt", "three")


def create_in_new_directories(fs: HostFilesystem) -> None:
    fs.write("n/o/p.txt", "new")


def delete_a_directory(fs: HostFilesystem) -> None:
    fs.delete("d", recursive=True)


def delete_a_directory_it_made(fs: HostFilesystem) -> None:
    fs.mkdir("n")
    fs.delete("n", recursive=True)


def move_over(fs: HostFilesystem) -> None:
    fs.move("m/x", "a.txt", overwrite=True)


def move_over_and_chmod(fs: HostFilesystem) -> None:
    fs.move("m/x", "a.txt", overwrite=True)
    fs.chmod("a.txt", 0o600)


def move_over_another_name(fs: HostFilesystem) -> None:
    fs.move("d/hard", "d/b.txt", overwrite=True)


def everything(fs: HostFilesystem) -> None:
    fs.write("a.txt", "three")
    fs.write("a.txt", " four", mode="append")
    fs.write("d/b.txt", "through one of two names")
    fs.chmod("d/hard", 0o600)
    fs.chmod("d/e", 0o700)
    fs.write("n/o/p.txt", "new")
    fs.move("m", "n/m")
    fs.write("n/m/x", "moved and changed")
    fs.delete("d/e", recursive=True)
    fs.symlink("d/e/now", "../b.txt")
    fs.move("caf\udce9", "d/link", overwrite=True)
    fs.delete("empty")
    fs.mkdir("empty/no/more")
    fs.delete("a.txt")


CALLS: dict[str, Callable[[HostFilesystem], None]] = {
    one.__name__: one
    for one in (
        write_one,
        create_in_new_directories,
        delete_a_directory,
        delete_a_directory_it_made,
        move_over,
        move_over_and_chmod,
        move_over_another_name,
        everything,
    )
}


class Case:
    """A tree to change, again and again from its beginning."""

    def __init__(self, path: Path, can: Any = None) -> None:
        self.path = path
        self.can = can
        self.number = 0

    def fresh(self) -> None:
        self.number += 1
        self.root = self.path / str(self.number) / "root"
        self.root.mkdir(parents=True)
        self.store = self.root.parent / "store"
        build(self.root)
        self.before = capture_tree(self.root)

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store, can=self.can)

    def committed(self, change: Callable[[HostFilesystem], None]) -> Callable[[Callable[[str], None]], None]:
        def work(before: Callable[[str], None]) -> None:
            with injected(before), self.open() as fs, held_call(fs) as call:
                change(fs.for_call(call))
                call.commit()

        return work

    def rolled_back(self, change: Callable[[HostFilesystem], None]) -> Callable[[Callable[[str], None]], None]:
        def work(before: Callable[[str], None]) -> None:
            with injected(before), self.open() as fs, held_call(fs) as call:
                change(fs.for_call(call))
                call.rollback()

        return work

    def after(self, change: Callable[[HostFilesystem], None]) -> dict[str, tuple[object, ...]]:
        self.fresh()
        assert not killed_at(-1, self.committed(change))
        return lasting(capture_tree(self.root))


@on_each_kernel
def case(tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    return Case(tmp_path, request.param)


def test_a_call_that_is_killed_after_others_finds_its_own_holding_directory(case: Case) -> None:
    case.fresh()

    def work(before: Callable[[str], None]) -> None:
        with case.open() as fs:
            for number in range(9):
                with held_call(fs, call_id=f"call-{number}") as call:
                    fs.for_call(call).write("a.txt", str(number))
                    if number == 8:
                        before("the end")
                    call.commit()

    assert killed_at(0, work)
    with case.open() as fs:
        assert fs.recovered is not None
        assert fs.recovered.conflicts == ()
    assert (case.root / "a.txt").read_text() == "7"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_killed_anywhere_is_undone_or_done(case: Case, name: str) -> None:
    change = CALLS[name]
    after = case.after(change)
    outcomes: set[str] = set()
    for point in kill_points(9 if name == "everything" else 5):
        case.fresh()
        if not killed_at(point, case.committed(change)):
            break
        with case.open() as fs:
            recovered = fs.recovered
        now = capture_tree(case.root)
        if now == case.before:
            outcomes.add("before")
            assert recovered is None or recovered.outcome == "rolled back", point
        else:
            outcomes.add("after")
            assert lasting(now) == after, point
            assert recovered is None or recovered.outcome == "finished", point
        assert recovered is None or recovered.conflicts == (), point
        with case.open() as fs:
            assert fs.recovered is None, point
    assert outcomes == {"before", "after"}


@pytest.mark.parametrize("name", CALLS)
def test_a_rollback_killed_anywhere_is_completed(case: Case, name: str) -> None:
    for point in kill_points(9 if name == "everything" else 5):
        case.fresh()
        killed = killed_at(point, case.rolled_back(CALLS[name]))
        with case.open() as fs:
            recovered = fs.recovered
        assert capture_tree(case.root) == case.before, (point, recovered)
        if not killed:
            break
        assert (
            recovered is None
            or (recovered.outcome, recovered.conflicts) == ("rolled back", ())
            or (recovered.outcome == "finished" and not recovered.conflicts)
        ), point


@pytest.mark.parametrize("end", ["committed", "rolled_back"])
def test_a_call_killed_anywhere_where_there_are_neither_exchanges_nor_hard_links(tmp_path: Path, end: str) -> None:
    case = Case(tmp_path, NO_LINKS)
    after = case.after(everything)
    for point in kill_points(11):
        case.fresh()
        killed = killed_at(point, getattr(case, end)(everything))
        with case.open() as fs:
            assert fs.recovered is None or fs.recovered.conflicts == (), point
        now = capture_tree(case.root)
        assert now == case.before or (end == "committed" and lasting(now) == after), point
        if not killed:
            return


def test_what_somebody_saved_where_an_exchange_without_links_was_cut_off_stays(tmp_path: Path) -> None:
    case = Case(tmp_path, NO_LINKS)
    there: set[str] = set()
    for point in kill_points(1):
        case.fresh()
        if not killed_at(point, case.committed(write_one)):
            break
        place = case.root / "a.txt"
        there.add(place.read_text() if place.exists() else "nothing")
        save_anew(place)
        with case.open() as fs:
            kept = [path.read_bytes() for path in case.store.glob("kept/*")]
            assert fs.recovered is None or not fs.recovered.conflicts or kept == [b"one\r\ntwo"], point
        assert place.read_text() == "person", point
    assert there == {"one\ntwo", "nothing", "three"}


def reopened(case: Case) -> Callable[[Callable[[str], None]], None]:
    def work(before: Callable[[str], None]) -> None:
        with injected(before):
            case.open().close()

    return work


@pytest.mark.parametrize("end", ["committed", "rolled_back"])
def test_a_recovery_killed_anywhere_is_done_again(case: Case, end: str) -> None:
    after = case.after(everything)
    for point in kill_points(41, start=5):
        again = 0
        while True:
            case.fresh()
            if not killed_at(point, getattr(case, end)(everything)):
                assert point > 5, "nothing was killed"
                return
            if not killed_at(again, reopened(case)):
                break
            killed_at(again // 2, reopened(case))
            case.open().close()
            now = capture_tree(case.root)
            assert now == case.before or (end == "committed" and lasting(now) == after), (point, again)
            again += amount(prove=1, test=17)


# What somebody else did in between


def killed_before_the_end(case: Case, change: Callable[[HostFilesystem], None]) -> None:
    """Leaves a call with all of its deeds done, and no commit."""
    case.fresh()

    def work(before: Callable[[str], None]) -> None:
        with case.open() as fs, held_call(fs) as call:
            change(fs.for_call(call))
            before("the end")

    assert killed_at(0, work)
    assert capture_tree(case.root) != case.before


def test_an_edit_between_the_crash_and_the_recovery_stays(case: Case) -> None:
    killed_before_the_end(case, everything)
    (case.root / "d/b.txt").write_text("person")
    (case.root / "theirs.txt").write_text("person")
    with case.open() as fs:
        recovered = fs.recovered
    assert recovered is not None
    assert (recovered.outcome, recovered.conflicts) == ("rolled back", ("d/b.txt",))
    assert (case.root / "d/b.txt").read_text() == (case.root / "theirs.txt").read_text() == "person"
    assert (case.root / "a.txt").read_bytes() == b"one\r\ntwo"
    [kept] = (case.store / "kept").iterdir()
    assert kept.read_text() == "b"


def test_what_came_in_the_way_of_a_move_back_after_the_crash_stays_and_what_was_moved_is_named(case: Case) -> None:
    for again in kill_points(5):
        killed_before_the_end(case, lambda fs: fs.move("a.txt", "m/moved"))
        (case.root / "a.txt").write_text("person")
        killed = killed_at(again, reopened(case))
        with case.open() as fs:
            recovered = fs.recovered
        assert (case.root / "a.txt").read_text() == "person"
        assert (case.root / "m/moved").read_bytes() == b"one\r\ntwo"
        if recovered is not None and recovered.outcome == "rolled back":
            assert (recovered.conflicts, recovered.notes) == (
                ("a.txt",),
                ("what was moved from a.txt is still at m/moved",),
            ), again
        if not killed:
            return


def write_several(fs: HostFilesystem) -> None:
    for path in ("a.txt", "d/b.txt", "d/e/c.txt", "d/new.txt", "m/x", "a.txt"):
        fs.write(path, f"the call's {path}")


def save_in_place(path: Path) -> None:
    path.write_text("person")


def save_anew(path: Path) -> None:
    path.with_name("saving").write_text("person")
    path.with_name("saving").replace(path)


@pytest.mark.parametrize("save", [save_in_place, save_anew])
@pytest.mark.parametrize("path", ["a.txt", "d/new.txt"])
def test_an_edit_after_a_killed_rollback_stays(case: Case, path: str, save: Callable[[Path], None]) -> None:
    saved_over: set[str] = set()
    for point in kill_points(4):
        case.fresh()
        if not killed_at(point, case.rolled_back(write_several)):
            break
        place = case.root / path
        saved_over.add(place.read_text() if place.exists() else "nothing")
        save(place)
        case.open().close()
        assert place.read_text() == "person", point
        now = capture_tree(case.root)
        assert now.keys() == case.before.keys() | {path}, point
        for other in case.before.keys() - {path, "d/hard"}:
            assert now[other].lasting == case.before[other].lasting, (point, other)
    assert saved_over > {f"the call's {path}"}


def saved_over(case: Case, point: int) -> bool:
    """Leave a rollback that met a person's save, killed at a system call, or a recovery that did."""
    case.fresh()

    def work(before: Callable[[str], None]) -> None:
        with injected(before), case.open() as fs, held_call(fs) as call:
            fs.for_call(call).write("a.txt", "the call's")
            (case.root / "a.txt").write_text("person")
            call.rollback()

    return killed_at(point, work)


def saved_over_after_a_kill(case: Case, point: int) -> bool:
    killed_before_the_end(case, lambda fs: fs.write("a.txt", "the call's"))
    (case.root / "a.txt").write_text("person")
    return killed_at(point, reopened(case))


@pytest.mark.parametrize("saved", [saved_over, saved_over_after_a_kill])
def test_the_state_before_a_conflict_survives_any_kill(case: Case, saved: Callable[[Case, int], bool]) -> None:
    for point in kill_points(4):
        killed = saved(case, point)
        case.open().close()
        there = [case.root / "a.txt", *case.store.glob("kept/*")]
        assert b"one\r\ntwo" in [path.read_bytes() for path in there], point
        if not killed:
            assert there[0].read_text() == "person"
            return


@pytest.mark.parametrize("path", ["d", "m", ""])
def test_a_directory_changed_after_a_rollback_was_killed_keeps_its_time(case: Case, path: str) -> None:
    later = time.time_ns() + 60 * 10**9
    for point in kill_points(19):
        case.fresh()
        if not killed_at(point, case.rolled_back(everything)):
            break
        known = {place: one.inode for place, one in case.before.items() if one.kind == oct(stat.S_IFDIR)}
        [place] = [where for where, one in capture_tree(case.root).items() if one.inode == known[path]]
        os.utime(case.root / place, ns=(later, later))
        case.open().close()
        now = capture_tree(case.root)
        assert now[path].mtime_ns == later, point
        for other in known.keys() - {path}:
            assert now[other] == case.before[other], (point, other)


def test_a_directory_changed_during_a_call_that_is_killed_keeps_its_time(case: Case) -> None:
    def change(fs: HostFilesystem) -> None:
        fs.write("d/e/c.txt", "the call's")
        fs.write("d/b.txt", "the call's")
        os.utime(case.root / "d", ns=(case.number, case.number))
        fs.write("d/b.txt", "again")

    killed_before_the_end(case, change)
    case.open().close()
    assert (case.root / "d").stat().st_mtime_ns == case.number
    assert capture_tree(case.root) == case.before | {"d": capture_tree(case.root)["d"]}


def test_a_tree_that_was_cloned_anew_is_left_alone(case: Case) -> None:
    killed_before_the_end(case, everything)
    case.root.rename(case.root.with_name("old"))
    case.root.mkdir()
    build(case.root)
    anew = capture_tree(case.root)
    with case.open() as fs:
        recovered = fs.recovered
        assert recovered is not None
        assert recovered.outcome == "set aside"
        assert "log.000001.aside-1" in recovered.notes[-1]
        fs.write("a.txt", "x")
        fs.write("a.txt", "one\r\ntwo")
    assert lasting(capture_tree(case.root)) == lasting(anew)
    with case.open() as fs:
        assert fs.recovered is None


def test_lost_displaced_files_are_reported_and_the_rest_is_undone(case: Case) -> None:
    killed_before_the_end(case, everything)
    [held] = [path for path in case.root.iterdir() if path.name.startswith(".ringfence-hold-")]
    for path in held.iterdir():
        assert path.is_dir() or path.unlink() is None
    held.rename(case.root.parent / "taken away")
    with case.open() as fs:
        recovered = fs.recovered
    assert recovered is not None
    assert "a.txt" in recovered.conflicts
    assert "d/b.txt" not in recovered.conflicts, "the history has it"
    assert "lost" in recovered.notes[-1]
    assert (case.root / "m/x").exists()
    assert not any(path.name.startswith(".ringfence") for path in case.root.iterdir())


# A damaged log


def write_three(fs: HostFilesystem) -> None:
    for path in ("a.txt", "d/e/c.txt", "m/x"):
        fs.write(path, "new")


def two_calls(case: Case) -> Path:
    """Leaves a call that was committed, and one with all of its changes made, and no commit; the log of both."""
    case.fresh()

    def work(before: Callable[[str], None]) -> None:
        with case.open() as fs:
            with held_call(fs, call_id="earlier") as call:
                write_three(fs.for_call(call))
                call.commit()
            with held_call(fs, call_id="later") as call:
                for path in ("a.txt", "d/b.txt", "empty/n"):
                    fs.for_call(call).write(path, "of a call that never ended")
                before("the end")

    assert killed_at(0, work)
    [log] = (case.store / "history").glob("log.??????")
    return log


def test_a_torn_log_is_cut_and_the_call_undone(case: Case) -> None:
    log = two_calls(case)
    log.write_bytes(log.read_bytes().rstrip(b"\0") + b"\xa5rec torn")
    with case.open() as fs:
        recovered = fs.recovered
    assert recovered is not None
    assert (recovered.outcome, recovered.call_id, recovered.conflicts) == ("rolled back", "later", ())
    assert "cut" in recovered.notes[0]
    assert (case.root / "a.txt").read_text() == "new"


def test_no_content_is_lost_whichever_byte_of_a_log_is_damaged(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(amount(prove=400, test=25)):
        log = two_calls(case)
        data = bytearray(log.read_bytes().rstrip(b"\0"))
        at = (SEED + number * 7919) % len(data)
        data[at] ^= 16
        log.write_bytes(data)
        try:
            with case.open() as fs:
                assert fs.recovered is not None, at
                stays = b"of a call that never ended" if "is damaged" in " ".join(fs.recovered.notes) else b"new"
                assert (case.root / "a.txt").read_bytes() in (stays, b"new"), at
        except ValueError as error:  # of its beginning nothing is left
            assert "move it away" in str(error)
        there = [path for place in (case.root, case.store) for path in place.rglob("*") if path.is_file()]
        contents = {path.read_bytes() for path in there}
        assert {b"new", b"b"} <= contents, at
