"""A watch names what programs change: what is found by it is what a scan of all files finds."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tree_changes
from captured_tree import CapturedPath, capture_tree, shape
from counting import count_calls
from effort import SEED, amount
from kernels import on_filesystem

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import Tool, ToolContext, ToolResult, ToolsSection
from ringfence.runtime import Change, Receipt
from ringfence_tools import VfsToolsSection
from ringfence_workspace import DetectionLimits, HostFilesystem, Workspace

ROUNDS = amount(prove=20_000, test=60)
OFTEN = DetectionLimits(looks_before_audit=4)
IN_PLACE = {*tree_changes.SMALL} - {tree_changes.make_without_a_name, tree_changes.come_and_go}
"""Changes after which the watch has no doubt. Of a file that had no name, or has none any more, nothing tells what else
it was."""
BY_OTHERS = [one for one in tree_changes.EVERY if one is not tree_changes.write_in_the_hold]
"""What people do between calls: the hold is none of their business, and is used then by the workspace itself."""


@dataclass(frozen=True)
class Nothing:
    pass


class World:
    """A workspace with a tool that runs a program: what a test does in its place."""

    def __init__(self, files: HostFilesystem, executor: ToolExecutor) -> None:
        self.files = files
        self.program: Callable[[], object] = lambda: None
        self.fails = False
        self._executor = executor

    @property
    def doubt(self) -> str:
        """Why the newest look was a scan."""
        assert self.files.history is not None
        return self.files.history.detector.doubt

    def run(self, program: Callable[[], object] = lambda: None, *, fails: bool = False) -> Receipt:
        self.program, self.fails = program, fails
        receipt = self._executor.execute("program", {}).receipt
        assert receipt.outcome == ("failed" if fails else "committed"), receipt.message
        return receipt


@contextmanager
def opened(root: Path, limits: DetectionLimits = OFTEN, **options: Any) -> Generator[World]:
    def run(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        world.program()
        return ToolResult.error("it failed") if world.fails else ToolResult.ok(None)

    tool = Tool[Nothing, None](name="program", description="Run it.", handler=run, opaque=True)
    with HostFilesystem(root, detection_limits=limits, **options) as files:
        session = Session()
        sections = [
            VfsToolsSection(session=session, filesystem=files),
            ToolsSection(title="Program", key="program", tools=[tool]),
        ]
        prompt = Prompt(PromptTemplate(ns="tests", key="watch", sections=sections))
        with prompt.resources:
            world = World(files, ToolExecutor(prompt=prompt, session=session))
            yield world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for directory in ("d/e", "f", "deep/down/there"):
        (root / directory).mkdir(parents=True)
    for n in range(12):
        (root / random_place(n) / f"file{n}").write_bytes(b"content\n" * (n + 8))
    os.link(root / "file0", root / "d/another")
    os.symlink("file0", root / "link")
    return root


def random_place(n: int) -> str:
    return ["", "d", "d/e", "f"][n % 4]


def content(found: CapturedPath | None) -> tuple[object, ...] | None:
    if found is None:
        return None
    return found.kind, 0 if found.kind == "0o120000" else found.mode, found.content


def version(change: Change, *, after: bool) -> tuple[object, ...] | None:
    found = change.after if after else change.before
    if found is None:
        return None
    kind = {"file": "0o100000", "directory": "0o40000", "symlink": "0o120000"}[found.kind]
    return kind, 0 if found.target is not None else found.mode, found.target or found.content_hash or ""


def changed(before: dict[str, CapturedPath], after: dict[str, CapturedPath]) -> dict[str, object]:
    paths = {path for path in {*before, *after} if content(before.get(path)) != content(after.get(path))}
    return {path: (content(before.get(path)), content(after.get(path))) for path in paths}


def told(receipt: Receipt) -> dict[str, object]:
    return {change.path: (version(change, after=False), version(change, after=True)) for change in receipt.changes}


def some(random: Random) -> list[tree_changes.Change]:
    return random.choices(tree_changes.EVERY if random.random() < 0.2 else tree_changes.SMALL, k=random.randrange(1, 4))


def test_every_change_of_programs_is_found_as_by_a_scan(root: Path) -> None:
    random = Random(SEED)
    detections: Counter[str | None] = Counter()
    with opened(root) as world:

        def change() -> None:
            for one in changes:
                one(root, random)

        for _ in range(ROUNDS):
            changes, before = some(random), capture_tree(root)
            if random.random() < 0.2:
                was = shape(root)
                world.run(change, fails=True)
                assert shape(root) == was, changes
                continue
            receipt = world.run(change)
            after = capture_tree(root)
            assert told(receipt) == changed(before, after), (changes, receipt.detection)
            detections[receipt.detection] += 1
            if random.random() < 0.2 or len(after) > 80:  # by somebody else
                random.choice(BY_OTHERS)(root, random)
                for path in tree_changes.files_of(root)[50:]:
                    path.unlink()
        assert world.files.history is not None
        world.run(lambda: None)
        tip = world.files.history.store.tip
    assert detections.keys() <= {"watch", "scan"}
    assert detections["watch"] > detections["scan"]
    with Workspace.open(root, detect="scan") as workspace:
        assert workspace.filesystem.history is not None
        assert workspace.filesystem.history.store.tip == tip, "no scan finds anything that the watch had not"


@pytest.mark.parametrize("change", tree_changes.EVERY, ids=lambda change: change.__name__)
def test_each_way_to_change_a_tree_is_found(root: Path, change: tree_changes.Change) -> None:
    random = Random(1)
    with opened(root, DetectionLimits(looks_before_audit=2)) as world:
        world.run(lambda: (root / "d/e/given").write_text("a file"))
        for _ in range(2):
            before = capture_tree(root)
            receipt = world.run(lambda: change(root, random))
            assert told(receipt) == changed(before, capture_tree(root))
            expected = {"watch"} if change in IN_PLACE else {"watch", "scan"}
            assert receipt.detection in expected, world.doubt
        receipt = world.run()
        assert (receipt.changes, receipt.detection) == ((), "watch"), world.doubt


# A doubt is a scan


def test_an_overflow_of_the_queue_is_a_scan(root: Path) -> None:
    queue = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with opened(root) as world:
        world.run()
        assert world.run().detection == "watch"

        def write_often() -> None:
            names = [root / "file0", root / "d/file1"]
            descriptors = [os.open(name, os.O_WRONLY) for name in names]
            for n in range(queue + 10):  # events that are not the same as the one before
                os.pwrite(descriptors[n % 2], b"%d" % n, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            (root / "f/after").write_text("of which there is no event")

        before = capture_tree(root)
        receipt = world.run(write_often)
        assert receipt.detection == "scan"
        assert "ran over" in world.doubt
        assert told(receipt) == changed(before, capture_tree(root))
        world.run()
        assert world.run().detection == "watch"


@pytest.mark.parametrize("watches", [0, 3])
def test_where_the_watches_run_out_the_tree_is_scanned_and_the_log_says_what_to_raise(
    root: Path, caplog: pytest.LogCaptureFixture, watches: int
) -> None:
    with opened(root, DetectionLimits(watches=watches)) as world:
        for n in range(3):
            receipt = world.run((root / f"new{n}").touch)
            assert (receipt.detection, [change.path for change in receipt.changes]) == ("scan", [f"new{n}"])
    [said] = [record.getMessage() for record in caplog.records if "inotify" in record.getMessage()]
    assert "sysctl fs.inotify.max_user_watches" in said


def test_a_watch_that_was_asked_for_and_cannot_be_is_an_error(root: Path) -> None:
    with opened(root, DetectionLimits(watches=3), detect="watch") as world, pytest.raises(AssertionError) as raised:
        world.run()
    assert "sysctl fs" in str(raised.value)
    with pytest.raises(ValueError, match="'auto', 'watch', 'scan'"), opened(root, detect="fanotify"):
        pass


def test_a_scan_that_was_asked_for_is_one(root: Path) -> None:
    with opened(root, detect="scan") as world:
        assert [world.run().detection for _ in range(3)] == ["scan"] * 3


@pytest.mark.parametrize("kind", [0x6969, 0x65735546, 0x794C7630], ids=["nfs", "fuse", "overlay"])
def test_a_filesystem_that_does_not_tell_of_all_changes_is_scanned(root: Path, kind: int) -> None:
    can = on_filesystem(lambda descriptor: kind)
    with opened(root, can=can, only_this_host=True) as world:
        assert [world.run().detection for _ in range(3)] == ["scan"] * 3


def test_a_tree_with_a_linked_worktree_is_scanned(root: Path) -> None:
    (root / "wt").mkdir()
    (root / "wt/.git").write_text(f"gitdir: {root}/.git/worktrees/wt\n")
    with opened(root) as world:
        assert [world.run().detection for _ in range(3)] == ["scan"] * 3
        shutil.rmtree(root / "wt")
        assert [world.run().detection for _ in range(3)][-1] == "watch"


def test_a_process_watches_one_workspace_and_scans_the_others(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with opened(other) as second, opened(root) as first:
        first.run()
        second.run()
        assert (first.run().detection, second.run().detection) == ("watch", "scan")
    with opened(other) as second:
        second.run()
        assert second.run().detection == "watch"


def test_a_change_that_the_watch_has_not_seen_turns_it_off_and_the_receipts_say_so(root: Path, tmp_path: Path) -> None:
    with opened(root) as world:
        world.run()
        os.link(root / "f/file3", tmp_path / "outside")
        (tmp_path / "outside").write_text("through a name that is not watched")
        receipts = [world.run() for _ in range(8)]
        assert (receipts[0].detection, receipts[-1].detection) == ("watch", "audit-failed")
        assert all(receipt.changes == () for receipt in receipts), "it is somebody else's change"
        receipt = world.run((root / "new").touch)
        assert (receipt.detection, [change.path for change in receipt.changes]) == ("audit-failed", ["new"])
        assert world.files.history is not None
    with Workspace.open(root) as workspace:
        assert "f/file3" in {path for entry in workspace.log() for path in entry.paths}


# What is known otherwise


def test_a_file_of_several_names_is_found_by_any_of_them(root: Path, tmp_path: Path) -> None:
    os.link(root / "f/file3", tmp_path / "outside")
    with opened(root) as world:
        world.run()
        receipt = world.run(lambda: (tmp_path / "outside").write_text("through a name that is not watched"))
        assert (receipt.detection, [change.path for change in receipt.changes]) == ("watch", ["f/file3"])
        receipt = world.run(lambda: (root / "file0").write_text("of two names"))
        assert (receipt.detection, [change.path for change in receipt.changes]) == ("watch", ["d/another", "file0"])


def test_hidden_files_and_links_to_them_stay_hidden(root: Path) -> None:
    (root / ".env").write_text("SECRET=1")
    with opened(root, hide=HiddenFiles()) as world:
        world.run()
        receipt = world.run(lambda: os.link(root / ".env", root / "d/copy"))
        assert receipt.changes == () or receipt.changes[0].after is None or not receipt.changes[0].after.content_hash
        (root / "d/copy").unlink()
        world.run()
        receipt = world.run(lambda: os.symlink("file3", root / "f/.env"))
        assert [world.run().detection for _ in range(2)] == ["scan", "watch"]
        assert set(world.files.hidden_paths) == {".env", "f/file3"}
        receipt = world.run(lambda: (root / ".env").write_text("SECRET=2"))
        assert (receipt.detection, [change.path for change in receipt.changes]) == ("watch", [".env"])


def test_what_typed_calls_and_people_change_between_programs_is_found(root: Path) -> None:
    with opened(root) as world:
        world.run()
        world.files.write("f/file3", "by a tool")
        (root / "d/file1").write_text("by a person")
        before = capture_tree(root)
        receipt = world.run(lambda: (root / "d/file1").write_text("by a program"))
        assert told(receipt) == changed(before, capture_tree(root))
        assert receipt.detection == "watch", world.doubt


# What it costs


def calls_made(world: World, program: Callable[[], object], *, fails: bool = False) -> int:
    """How many calls of functions, those of C included, a call makes."""
    world.run(program, fails=fails)
    return count_calls(lambda: world.run(program, fails=fails))


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
def test_a_call_costs_the_same_in_a_tree_of_any_size(tmp_path: Path, *, fails: bool) -> None:
    counts: list[int] = []
    for number in (20, 2_000):
        root = tmp_path / str(number)
        for n in range(number):
            place = root / f"d{n // 20}"
            place.mkdir(parents=True, exist_ok=True)
            (place / str(n)).write_bytes(b"content")
            os.utime(place / str(n), ns=(10**18, 10**18))
        with opened(root, DetectionLimits()) as world:
            world.run()
            time.sleep(0.05)  # until what was written just now is told by its times
            world.run()
            calls = [calls_made(world, lambda: None)]
            change = partial((root / "d0/1").write_bytes, b"other")
            calls.append(calls_made(world, change, fails=fails))
            assert world.run().detection == "watch", world.doubt
            counts.append(sum(calls))
    assert counts[1] < 1.2 * counts[0]
