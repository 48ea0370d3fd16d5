"""Opaque calls whose process is killed at each system call that changes a file; see `docs/understand/recovery.md`."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import CapturedPath, capture_tree, lasting, shape
from effort import SEED, amount, kill_points
from failpoints import injected
from killing import killed_at
from real_git import fsck

from ringfence.testing import held_call
from ringfence_sandbox import CallProcess, ScanLimits, Workspace

DAMAGE = """
    printf changed > a.txt; echo new > d/n1; ln d/n1 n2; rm d/e/c.txt; mv m moved; mkdir -p x/y; echo y > x/y/z
    rm d/link; ln -s elsewhere d/link; chmod 700 d; touch -d 2001-01-01 d/b.txt; mv d/big big2; rm -rf empty
    rm hard1; cp hard2 c; mv c hard2; touch -r a.txt x
"""
OVERWRITE = "for file in $(find .ringfence-hold* -type f); do echo more >> $file; done"
Before = Callable[[str], None]


def build(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_bytes(b"one\r\ntwo")
    (root / "d/b.txt").write_text("b")
    (root / "d/e/c.txt").write_text("c")
    (root / "d/big").write_text("big" * 100)
    (root / "hard1").write_text("hard")
    os.link(root / "hard1", root / "hard2")
    os.link(root / "hard1", root / "d/hard3")
    os.symlink("../a.txt", root / "d/link")
    (root / "m").mkdir()
    (root / "m/x").write_text("x")
    os.chmod(root / "d/e/c.txt", 0o640)
    for path in ("d/e/c.txt", "d/e", "d", "m", "empty", "a.txt", ""):
        os.utime(root / path, ns=(10**18, 10**18 + len(path)))


class Case:
    """A tree to damage, again and again from its beginning."""

    damage = DAMAGE
    limits = ScanLimits()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0

    def fresh(self) -> None:
        self.number += 1
        self.root = self.path / str(self.number) / "root"
        self.root.mkdir(parents=True)
        self.store = self.root.parent / "store"
        build(self.root)
        self.before = shape(self.root)

    def open(self) -> Workspace:
        return Workspace.open(self.root, store=self.store, limits=self.limits)

    def reopen(self, before: Before) -> None:
        with injected(before):
            self.open().close()

    def run(self, before: Before, end: str, *, typed: bool = False) -> None:
        with injected(before), self.open() as workspace:
            fs = workspace.filesystem
            with held_call(fs, call_id="outer", opaque=True) as call:
                if typed:
                    files = fs.for_call(call)
                    files.write("a.txt", "typed")
                    files.write("early/new", "typed")
                    files.move("m/x", "d/moved")
                    files.write("d/e/c.txt", "typed")
                    files.delete("empty")
                with held_call(fs, call_id="inner", parent=call, opaque=True) as inner:
                    subprocess.run(["sh", "-ec", self.damage], cwd=self.root, check=True)
                    before("damaged")
                    fs.for_call(inner).write("d/b.txt", "typed within")
                    fs.for_call(inner).delete("x/y", recursive=True)
                    getattr(inner, end)()
                getattr(call, end)()

    def kill_after_damage(self, *, typed: bool) -> None:
        self.fresh()
        assert killed_at(
            0, lambda before: self.run(lambda at: before(at) if at == "damaged" else None, "commit", typed=typed)
        )

    def recover(self) -> Any:
        with self.open() as workspace:
            recovered = workspace.recovered
        with self.open() as workspace:
            assert workspace.recovered is None
        return recovered


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("typed", [False, True], ids=["alone", "after typed changes"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_opaque_call_killed_anywhere_is_undone_or_done(case: Case, end: str, typed: bool) -> None:
    case.fresh()
    case.run(lambda name: None, end, typed=typed)
    after = lasting(capture_tree(case.root))
    assert (shape(case.root) == case.before) == (end == "rollback")
    outcomes: set[str] = set()
    for point in kill_points(17):
        case.fresh()
        killed = killed_at(point, lambda before: case.run(before, end, typed=typed))
        recovered = case.recover()
        now = shape(case.root)
        if now == case.before:
            outcomes.add("before")
            assert recovered is None or recovered.outcome == "rolled back" or end == "rollback", point
        else:
            outcomes.add("after")
            assert end == "commit", (point, recovered, _differing(now, case.before))
            assert lasting(capture_tree(case.root)) == after, point
            assert recovered is None or recovered.outcome == "finished", point
        assert recovered is None or recovered.conflicts == (), (point, recovered)
        if not killed:
            break
    assert outcomes == ({"before", "after"} if end == "commit" else {"before"})


def _differing(one: dict[str, CapturedPath], other: dict[str, CapturedPath]) -> list[object]:
    return [
        (path, one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)
    ]


@pytest.mark.parametrize("damage", [DAMAGE, "rm -r .ringfence-hold*", OVERWRITE], ids=["", "removed", "overwritten"])
@pytest.mark.parametrize("typed", [False, True], ids=["alone", "after typed changes"])
def test_a_recovery_of_an_opaque_call_killed_anywhere_is_done_again(case: Case, typed: bool, damage: str) -> None:
    """Also where a program reached what typed changes had displaced."""
    if damage != DAMAGE and not typed:
        return
    case.damage = damage
    for again in kill_points(31):
        case.kill_after_damage(typed=typed)
        killed = killed_at(again, case.reopen)
        killed_at(again // 2, case.reopen)
        recovered = case.recover()
        assert recovered is None or recovered.conflicts == (), again
        now = shape(case.root)
        assert now == case.before, (again, _differing(now, case.before))
        if not killed:
            return
    pytest.fail("it never came to its end")


# What somebody else did


def killed_after(case: Case, script: str) -> None:
    """Leaves an opaque call in which a script has run."""
    case.fresh()

    def work(before: Before) -> None:
        with case.open() as workspace, held_call(workspace.filesystem, opaque=True):
            subprocess.run(["sh", "-ec", script], cwd=case.root, check=True)
            before("the end")

    assert killed_at(0, work)


def test_what_changes_long_after_the_owner_was_killed_is_somebody_elses(case: Case) -> None:
    """And nothing that the program did while its owner lived, however long that was."""
    killed_after(
        case,
        "echo call > a.txt; mkdir n; echo call > n/f; echo call > d/b.txt; rm d/e/c.txt; rm hard1; echo call > m/n; "
        "sleep 3.3; rm m/x",
    )
    time.sleep(3.3)
    (case.root / "d/b.txt").write_text("person")
    (case.root / "n/theirs").write_text("person")
    (case.root / "theirs").mkdir()
    (case.root / "hard1").write_text("person")
    os.chmod(case.root / "d/big", 0o600)
    later = time.time_ns() + 60 * 10**9
    os.utime(case.root / "m", ns=(later, later))
    recovered = case.recover()
    assert recovered is not None
    assert recovered.conflicts == ("d/b.txt", "d/big", "hard1", "n", "n/theirs", "theirs")
    for path in ("d/b.txt", "n/theirs", "hard1"):
        assert (case.root / path).read_text() == "person"
    now = shape(case.root)
    assert (now["d/big"].mode, now["m"].mtime_ns) == (0o600, later)
    assert now.keys().isdisjoint({"n/f", "m/n"})
    for path in ("a.txt", "d/e/c.txt", "d/e", "m/x"):
        assert now[path] == case.before[path]


@pytest.mark.parametrize("nameless", [True, False], ids=["files without a name", "as on NFS"])
def test_the_filesystem_may_have_another_clock(case: Case, monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    real_time, real_open = time.time_ns, os.open

    def open_named(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(time, "time_ns", lambda: real_time() - 60 * 10**9)
    if not nameless:
        monkeypatch.setattr(os, "open", open_named)
    killed_after(case, "echo call > a.txt; mkdir n; echo call > n/f; rm d/e/c.txt")
    assert case.recover().conflicts == ()
    assert shape(case.root) == case.before


def test_a_time_to_come_that_a_program_gave_a_directory_is_taken_back_when_it_was_killed(case: Case) -> None:
    killed_after(case, "echo call > d/n; touch -d 2099-01-01 . d d/e empty")
    case.open().close()
    assert shape(case.root) == case.before


def test_a_file_above_the_limit_is_not_lost_if_somebody_saves_in_its_place_while_it_comes_back(case: Case) -> None:
    case.limits = ScanLimits(max_file_bytes=200)
    met = False
    for point in kill_points(3):
        case.fresh()
        content, counted = (case.root / "d/big").read_bytes(), [0]

        def hook(name: str, point: int = point, counted: list[int] = counted) -> None:
            counted[0] += counted[0] > 0 or name == "moved"
            if counted[0] == point + 1 and not (case.root / "d/big").exists():
                (case.root / "d/big").write_text("person")

        with injected(hook), case.open() as workspace, held_call(workspace.filesystem, opaque=True) as call:
            subprocess.run(["sh", "-ec", "mv d/big moved; echo call > a.txt"], cwd=case.root, check=True)
            hook("moved")
            conflicts = call.rollback().conflicts
        there = [*case.root.rglob("*"), *case.store.glob("kept/*")]
        assert [path for path in there if path.is_file() and path.read_bytes() == content], point
        met |= conflicts == ("d/big",) and (case.root / "d/big").read_text() == "person"
        if counted[0] <= point:
            break
    assert met


@pytest.mark.parametrize("moved", [False, True])
def test_a_large_file_that_a_rollback_restored_survives_a_kill(case: Case, moved: bool) -> None:
    case.limits = ScanLimits(max_file_bytes=200)
    place = "moved" if moved else "d/big"
    met = False
    for point in kill_points(5):
        case.fresh()

        def brought_back(before: Before) -> None:
            with injected(before), case.open() as workspace:
                fs = workspace.filesystem
                with held_call(fs, call_id="outer", opaque=True) as outer:
                    if moved:
                        fs.for_call(outer).move("d/big", place)
                    with held_call(fs, call_id="inner", parent=outer, opaque=True) as inner:
                        (case.root / place).unlink()
                        inner.rollback()
                    before("the end")

        killed = killed_at(point, brought_back)
        there = (case.root / "d/big").exists() or (case.root / place).exists()
        recovered = case.recover()
        if there:
            assert _differing(shape(case.root), case.before) == [], (point, recovered)
        met |= killed and there
        if not killed:
            break
    assert met


@pytest.mark.parametrize("script", ["mv A A2", "mkdir n; mv A B n", "mv A t; mv B A; mv t B", "mv A A2; echo x > A"])
def test_large_files_of_one_size_and_time_are_told_apart(case: Case, script: str) -> None:
    case.limits = ScanLimits(max_file_bytes=200)
    case.fresh()
    for name in ("A", "B"):
        (case.root / name).write_text(name * 3000)
        os.utime(case.root / name, ns=(10**18, 10**18))
    case.before = shape(case.root)

    def work(before: Before) -> None:
        with case.open() as workspace, held_call(workspace.filesystem, opaque=True):
            subprocess.run(["sh", "-ec", script], cwd=case.root, check=True)
            before("the end")

    assert killed_at(0, work)
    assert case.recover().conflicts == ()
    assert _differing(shape(case.root), case.before) == []


def test_what_a_call_had_made_is_kept_when_recovery_takes_it_back(case: Case) -> None:
    killed_after(case, "echo call > n; echo call > a.txt")
    with case.open() as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.notes == ("rolled back: a.txt, n; what they were is kept as aborted/1",)
        assert workspace.aborted()[0].paths == ("a.txt", "n")
        assert b"+call" in workspace.aborted_step(1).patch
    assert shape(case.root) == case.before
    fsck(case.store / "history")


def test_without_its_log_an_opaque_call_is_somebody_elses_change_and_an_empty_hold_goes(case: Case) -> None:
    killed_after(case, "echo call > a.txt")
    (case.store / "history/log.000001").unlink()
    (case.root / ".ringfence-hold-0123456789abcdef").mkdir()
    assert "the log that knew of it is lost" in " ".join(case.recover().notes)
    assert (case.root / "a.txt").read_text() == "call\n"
    assert not [*case.root.glob(".ringfence*")]


# Processes


def with_process(case: Case, *, boot: str | None = None, ticks: int = 0) -> int:
    """Leaves an open call with a process on record that goes on writing; its pid."""
    case.fresh()
    pid_file = case.root.parent / "pid"
    script = 'i=0; while sleep 0.01; do i=$((i+1)); echo $i > a.txt; echo $i > "n$i"; done'

    def work(before: Before) -> None:
        with case.open() as workspace, held_call(workspace.filesystem, opaque=True) as call:
            writer = subprocess.Popen(["sh", "-c", script], cwd=case.root, start_new_session=True)
            pid_file.write_text(str(writer.pid))
            process = CallProcess.running(writer.pid, "the writer")
            process = replace(process, start_ticks=process.start_ticks + ticks, boot_id=boot or process.boot_id)
            workspace.filesystem.for_call(call).note_process(process)
            time.sleep(0.1)
            before("the end")

    assert killed_at(0, work)
    return int(pid_file.read_text())


def test_a_process_of_the_call_that_still_lives_is_ended_first(case: Case) -> None:
    pid = with_process(case)
    assert CallProcess.running(pid, "").lives
    with case.open() as fs:
        recovered = fs.recovered
    assert recovered is not None
    assert recovered.conflicts == ()
    with pytest.raises(ProcessLookupError):
        CallProcess.running(pid, "")
    assert shape(case.root) == case.before


@pytest.mark.parametrize("other", [{"boot": "another boot"}, {"ticks": 1}])
def test_a_process_that_only_has_the_same_number_is_left_alone(case: Case, other: dict[str, object]) -> None:
    pid = with_process(case, **other)  # pyright: ignore[reportArgumentType]
    try:
        case.open().close()
        assert CallProcess.running(pid, "").lives
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_cannot_be_ended_keeps_the_workspace_closed(case: Case) -> None:
    code = (
        "import sys; from ringfence_sandbox import CallProcess\n"
        "process = CallProcess.running(int(sys.argv[1]), 'the container x')\n"
        "import os; os.setuid(65534)\n"
        "process.end()\n"
    )
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        ended = subprocess.run(
            [sys.executable, "-c", code, str(sleeper.pid)], capture_output=True, text=True, timeout=60, check=False
        )
        assert sleeper.poll() is None
        sleeper.kill()
    assert "RestoreFailedError" in ended.stderr
    assert f"kill -9 {sleeper.pid}" in ended.stderr


def test_a_process_that_has_ended_is_no_obstacle(case: Case) -> None:
    process = subprocess.Popen(["sleep", "60"])
    noted = CallProcess.running(process.pid, "a sleeper")
    process.kill()
    assert noted.end() is None, "also where nobody has waited for it yet"
    process.wait()
    noted.end()


LOOPING = """
import sys
from pathlib import Path
from typing import Any
from ringfence.testing import held_call
from ringfence_sandbox import Workspace
root = Path(sys.argv[1])
with Workspace.open(root, store=sys.argv[2]) as workspace:
    print("ready", flush=True)
    for number in range(int((root / "0").read_text()) + 1, 10**6):
        with held_call(workspace.filesystem, opaque=True) as call:
            for name in range(8):
                path = root / str(name)
                path.unlink()
                (root / f"t{name}").write_text(str(number))
                (root / f"t{name}").rename(path)
            call.commit() if number % 3 == 0 else call.rollback()
"""


def test_a_process_killed_at_any_instant_leaves_the_state_before_or_after(tmp_path: Path) -> None:
    root, store = tmp_path / "root", tmp_path / "store"
    root.mkdir()
    for name in range(8):
        (root / str(name)).write_text("0")
    chance = random.Random(SEED)
    seen: set[str] = set()
    for _ in range(amount(prove=150, test=4)):
        with subprocess.Popen([sys.executable, "-c", LOOPING, root, store], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(chance.random() * 0.15)
            process.kill()
        with Workspace.open(root, store=store) as workspace:
            assert sorted(os.listdir(root)) == [str(name) for name in range(8)]
            [number] = {(root / str(name)).read_text() for name in range(8)}
            assert workspace.recovered is None or workspace.recovered.conflicts == ()
            assert int(number) % 3 == 0 or number in seen
            newest = next(entry for entry in workspace.log() if entry.kind != "external")
            assert newest.number is not None
            assert workspace.diff(newest.number) == b"", "the history has the tree as it is"
        seen.add(number)
    fsck(store / "history")
