"""Opaque calls whose process is killed at each system call that changes a file; see `docs/understand/recovery.md`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from captured_tree import CapturedPath, capture_tree, lasting
from effort import SEED, amount, kill_points
from killing import killed_at

from ringfence.errors import RestoreFailedError
from ringfence.testing import held_call
from ringfence_sandbox import CallProcess, HostFilesystem, ScanLimits, Workspace
from ringfence_sandbox.disk.kernel import boot_id
from ringfence_sandbox.opaque.owner_stamp import GRACE_NS

DAMAGE = """
    printf changed > a.txt; echo new > d/n1; ln d/n1 n2; rm d/e/c.txt; mv m moved; mkdir -p x/y; echo y > x/y/z
    rm d/link; ln -s elsewhere d/link; chmod 700 d; touch -d 2001-01-01 d/b.txt; mv d/big big2; rm -rf empty
    rm hard1; cp hard2 c; mv c hard2; touch -r a.txt x
"""
OF_DISPLACED = {
    "overwrites": "for file in $(find .ringfence-hold-* -type f); do echo more >> $file; done",
    "removes": "rm -r .ringfence-hold-*",
    "replaces": "for held in .ringfence-hold-*; do mv $held t; echo x > $held; done",
}
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


def shape(root: Path) -> dict[str, CapturedPath]:
    return {path: replace(one, inode=0) for path, one in capture_tree(root).items()}


class Case:
    """A tree to damage, again and again from its beginning."""

    def __init__(self, path: Path, *, history: bool = False) -> None:
        self.path = path
        self.history = history
        self.damage = DAMAGE
        self.number = 0

    def fresh(self) -> None:
        self.number += 1
        self.root = self.path / str(self.number) / "root"
        self.root.mkdir(parents=True)
        self.store = self.root.parent / "store"
        build(self.root)
        self.before = shape(self.root)

    def run(self, before: Before, end: str, *, typed: bool = False) -> None:
        if self.history:
            opened = Workspace.open(self.root, store=self.store, before=before)
            fs = opened.filesystem
        else:
            opened = fs = HostFilesystem(self.root, store=self.store, before=before)
        with opened, held_call(fs, call_id="outer", opaque=not typed) as call:
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

    def reopened(self, before: Before = lambda name: None) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store, before=before)


@pytest.fixture(params=[False, True], ids=["without a history", "with a history"])
def case(tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    return Case(tmp_path, history=request.param)


@pytest.mark.parametrize("typed", [False, True], ids=["alone", "in a typed call"])
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
        with case.reopened() as fs:
            recovered = fs.recovered
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
        with case.reopened() as fs:
            assert fs.recovered is None, point
        if not killed:
            break
    assert outcomes == ({"before", "after"} if end == "commit" else {"before"})


@pytest.mark.parametrize("name", OF_DISPLACED)
def test_what_a_program_did_to_what_typed_changes_displaced_is_mended_by_recovery(case: Case, name: str) -> None:
    def damaged(before: Before) -> None:
        case.run(lambda at: before(at) if at == "damaged" else None, "commit", typed=True)

    case.damage = OF_DISPLACED[name]
    outcomes: set[bool] = set()
    for again in kill_points(23):
        case.fresh()
        assert killed_at(0, damaged)
        killed = killed_at(again, lambda before: case.reopened(before).close())
        with case.reopened() as fs:
            assert fs.recovered is None or fs.recovered.conflicts == (), (again, fs.recovered)
        now = shape(case.root)
        assert now == case.before, (again, _differing(now, case.before))
        outcomes.add(killed)
        if not killed:
            break
    assert outcomes == {True, False}


def _differing(one: dict[str, CapturedPath], other: dict[str, CapturedPath]) -> list[object]:
    return [
        (path, one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)
    ]


@pytest.mark.parametrize("typed", [False, True], ids=["alone", "in a typed call"])
def test_a_recovery_of_an_opaque_call_killed_anywhere_is_done_again(case: Case, typed: bool) -> None:
    def damaged(before: Before) -> None:
        case.run(lambda name: before(name) if name == "damaged" else None, "commit", typed=typed)

    for again in kill_points(31):
        case.fresh()
        assert killed_at(0, damaged)
        killed = killed_at(again, lambda before: case.reopened(before).close())
        killed_at(again // 2, lambda before: case.reopened(before).close())
        case.reopened().close()
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
        with HostFilesystem(case.root, store=case.store) as fs, held_call(fs, opaque=True):
            subprocess.run(["sh", "-ec", script], cwd=case.root, check=True)
            before("the end")

    assert killed_at(0, work)


def test_what_changes_long_after_the_owner_was_killed_is_somebody_elses(case: Case) -> None:
    killed_after(case, "echo call > a.txt; mkdir n; echo call > n/f; echo call > d/b.txt; rm d/e/c.txt; rm hard1")
    time.sleep(3.3)
    (case.root / "d/b.txt").write_text("person")
    (case.root / "n/theirs").write_text("person")
    (case.root / "theirs").mkdir()
    (case.root / "hard1").write_text("person")
    os.chmod(case.root / "d/big", 0o600)
    with case.reopened() as fs:
        recovered = fs.recovered
    assert recovered is not None
    assert recovered.conflicts == ("d/b.txt", "d/big", "hard1", "n", "n/theirs", "theirs")
    for path in ("d/b.txt", "n/theirs", "hard1"):
        assert (case.root / path).read_text() == "person"
    now = shape(case.root)
    assert now["d/big"].mode == 0o600
    assert "n/f" not in now
    for path in ("a.txt", "d/e/c.txt", "d/e"):
        assert now[path] == case.before[path]
    with case.reopened() as fs:
        assert fs.recovered is None


@pytest.mark.prove
def test_a_directory_changed_long_after_the_owner_was_killed_keeps_its_time(case: Case) -> None:
    killed_after(case, "echo call > d/n; rm d/b.txt; echo call > empty/n; rm a.txt")
    time.sleep(3.3)
    later = time.time_ns() + 60 * 10**9
    for path in ("d", "empty", ""):
        os.utime(case.root / path, ns=(later, later))
    case.reopened().close()
    now = shape(case.root)
    assert {place: one.mtime_ns for place, one in now.items() if one != case.before[place]} == {
        "d": later,
        "empty": later,
        "": later,
    }


def test_a_time_to_come_that_a_program_gave_a_directory_is_taken_back_when_it_was_killed(case: Case) -> None:
    killed_after(case, "echo call > d/n; touch -d 2099-01-01 . d d/e empty")
    case.reopened().close()
    assert shape(case.root) == case.before


@pytest.mark.prove
def test_a_file_above_the_limit_is_not_lost_if_somebody_saves_in_its_place_after_a_recovery_was_killed(
    tmp_path: Path,
) -> None:
    case, limits = Case(tmp_path), ScanLimits(max_file_bytes=200)
    for again in range(10_000):
        case.fresh()
        root, store, content = case.root, case.store, (case.root / "d/big").read_bytes()

        def moved(before: Before, root: Path = root, store: Path = store) -> None:
            opened = Workspace.open(root, store=store, limits=limits)
            with opened as workspace, held_call(workspace.filesystem, opaque=True):
                subprocess.run(["sh", "-ec", "mv d/big moved; echo call > a.txt"], cwd=root, check=True)
                before("the end")

        def reopened(before: Before, root: Path = root, store: Path = store) -> None:
            Workspace.open(root, store=store, limits=limits, before=before).close()

        assert killed_at(0, moved)
        (store / "alive").write_bytes(struct.pack("<Q", time.time_ns() - GRACE_NS + 20_000_000))
        killed = killed_at(again, reopened)
        time.sleep(0.05)
        if not killed:
            return
        if not (root / "d/big").exists():
            (root / "d/big").write_text("person")
        with Workspace.open(root, store=store, limits=limits) as workspace:
            recovered = workspace.recovered
        there = [*root.rglob("*"), *store.glob("kept/*")]
        assert [path for path in there if path.is_file() and path.read_bytes() == content], (again, recovered)


def test_a_file_above_the_limit_is_not_lost_if_somebody_saves_while_it_comes_back_and_that_is_killed(
    tmp_path: Path,
) -> None:
    case, limits = Case(tmp_path), ScanLimits(max_file_bytes=200)
    for point in range(10_000):
        case.fresh()
        root, store, content = case.root, case.store, (case.root / "d/big").read_bytes()

        def moved(before: Before, root: Path = root, store: Path = store) -> None:
            waiting, saved = ["rename"], list[str]()

            def hook(name: str) -> None:
                if (root / "moved").exists() and name in waiting:
                    saved.append(waiting.pop())
                    (root / "d/big").write_text("person")
                if saved:
                    before(name)

            with (
                HostFilesystem(root, store=store, limits=limits, before=hook) as fs,
                held_call(fs, opaque=True) as call,
            ):
                subprocess.run(["sh", "-ec", "mv d/big moved; echo call > a.txt"], cwd=root, check=True)
                assert call.rollback().conflicts == ("d/big",)

        killed = killed_at(point, moved)
        HostFilesystem(root, store=store, limits=limits).close()
        there = [*root.rglob("*"), *store.glob("kept/*")]
        assert [path for path in there if path.is_file() and path.read_bytes() == content], point
        if not killed:
            assert (root / "d/big").read_text() == "person"
            return


@pytest.mark.parametrize("around", ["an opaque call", "a typed call"])
def test_a_file_above_the_limit_that_a_rollback_has_copied_back_outlives_a_kill_after_that(
    tmp_path: Path, around: str
) -> None:
    case, limits, opaque = Case(tmp_path), ScanLimits(max_file_bytes=200), around == "an opaque call"
    place = "d/big" if opaque else "moved"
    met = False
    for point in range(10_000):
        case.fresh()
        root, store = case.root, case.store

        def copied_back(before: Before, root: Path = root, store: Path = store) -> None:
            opened = HostFilesystem(root, store=store, limits=limits, before=before)
            with opened as fs, held_call(fs, call_id="outer", opaque=opaque) as outer:
                if not opaque:
                    fs.for_call(outer).move("d/big", place)
                with held_call(fs, call_id="inner", parent=outer, opaque=True) as inner:
                    (root / place).unlink()
                    inner.rollback()
                before("the end")

        killed = killed_at(point, copied_back)
        there = (root / "d/big").exists() or (root / place).exists()
        with HostFilesystem(root, store=store, limits=limits) as fs:
            recovered = fs.recovered
        if there:
            assert _differing(shape(root), case.before) == [], (point, recovered)
        met |= killed and there
        if not killed:
            break
    assert met


def test_the_owner_is_seen_alive_for_as_long_as_the_call_runs(case: Case) -> None:
    case.fresh()
    with HostFilesystem(case.root, store=case.store) as fs, held_call(fs, opaque=True) as call:
        first = (case.store / "alive").read_bytes()[:8]
        time.sleep(1.5)
        second = (case.store / "alive").read_bytes()[:8]
        assert struct.unpack("<Q", second) > struct.unpack("<Q", first)
        call.commit()
        time.sleep(1.2)
        assert (case.store / "alive").read_bytes()[:8] == second


def test_what_a_call_had_made_is_kept_when_recovery_takes_it_back(case: Case) -> None:
    killed_after(case, "echo call > n; echo call > a.txt")
    with Workspace.open(case.root, store=case.store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.notes == ("taken back: a.txt, n; what they were is kept as aborted/1",)
        assert workspace.aborted()[0].paths == ("a.txt", "n")
        assert b"+call" in workspace.aborted_step(1).patch
    assert shape(case.root) == case.before
    store = ["git", "--git-dir", str(case.store / "history")]
    subprocess.run([*store, "fsck", "--full", "--strict"], check=True, capture_output=True)


def test_without_its_store_an_open_call_is_not_touched_and_opening_says_what_to_do(case: Case) -> None:
    killed_after(case, "echo call > a.txt")
    (case.store / "history").rename(case.store / "gone")
    damaged = shape(case.root)
    with pytest.raises(RestoreFailedError, match=r"move .*journal away"):
        case.reopened()
    assert shape(case.root) == damaged
    shutil.rmtree(case.store / "history")
    (case.store / "gone").rename(case.store / "history")
    case.reopened().close()
    assert shape(case.root) == case.before


def test_another_tree_is_left_alone(case: Case) -> None:
    killed_after(case, "echo call > a.txt")
    case.root.rename(case.root.with_name("old"))
    case.root.mkdir()
    build(case.root)
    anew = shape(case.root)
    with case.reopened() as fs:
        assert fs.recovered is not None
        assert fs.recovered.outcome == "set aside"
    assert shape(case.root) == anew
    with case.reopened() as fs:
        assert fs.recovered is None


# Processes


def with_process(case: Case, *, boot: str | None = None, ticks: int = 0) -> int:
    """Leaves an open call with a process on record that goes on writing; its pid."""
    case.fresh()
    pid_file = case.root.parent / "pid"
    script = 'i=0; while sleep 0.01; do i=$((i+1)); echo $i > a.txt; echo $i > "n$i"; done'

    def work(before: Before) -> None:
        with HostFilesystem(case.root, store=case.store) as fs, held_call(fs, opaque=True) as call:
            writer = subprocess.Popen(["sh", "-c", script], cwd=case.root, start_new_session=True)
            pid_file.write_text(str(writer.pid))
            process = CallProcess.running(writer.pid, "the writer")
            process = replace(process, start_ticks=process.start_ticks + ticks, boot_id=boot or process.boot_id)
            fs.for_call(call).note_process(process)
            time.sleep(0.1)
            before("the end")

    assert killed_at(0, work)
    return int(pid_file.read_text())


def test_a_process_of_the_call_that_still_lives_is_ended_first(case: Case) -> None:
    pid = with_process(case)
    assert CallProcess.running(pid, "").lives
    with case.reopened() as fs:
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
        case.reopened().close()
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
    assert noted.boot_id == boot_id()
    process.kill()
    assert noted.end() is None, "also where nobody has waited for it yet"
    process.wait()
    noted.end()


LOOPING = """
import sys
from pathlib import Path
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
    git = ["git", "--git-dir", str(store / "history"), "fsck", "--full", "--strict"]
    subprocess.run(git, check=True, capture_output=True)


@pytest.mark.parametrize("lost", [False, True])
def test_a_killed_call_that_the_journal_has_lost_is_said(case: Case, lost: bool) -> None:
    case.fresh()
    assert killed_at(0, lambda before: case.run(lambda at: before(at) if at == "damaged" else None, "commit"))
    if lost:
        (case.store / "journal").unlink()
    with case.reopened() as fs:
        assert fs.recovered is not None
        assert any("the journal that knew of it is lost" in note for note in fs.recovered.notes) == lost
    with case.reopened() as fs:
        assert fs.recovered is None or ".ringfence-hold-" in fs.recovered.notes[0]
