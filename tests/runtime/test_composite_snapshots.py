"""Snapshots of a session and its resources together: gone back to whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from captured_tree import tree_of

from ringfence.adapters import ToolExecutor
from ringfence.errors import SnapshotRestoreError
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, Tool, ToolContext, ToolHandler, ToolResult
from ringfence.resources import Binding, Snapshotable
from ringfence.runtime import (
    CompositeSnapshot,
    Session,
    Snapshot,
    SnapshotMetadata,
    create_snapshot,
    restore_snapshot,
    tool_transaction,
)
from ringfence_sandbox import HostFilesystem, Workspace


@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class Rows:
    rows: tuple[object, ...]


class Table(Snapshotable[Rows]):
    def __init__(self) -> None:
        self.rows: list[object] = []

    def snapshot(self, *, tag: str | None = None) -> Rows:
        return Rows(tuple(self.rows))

    def restore(self, snapshot: Rows) -> None:
        self.rows = list(snapshot.rows)


class World:
    """A session, files and a table, each of which holds what `become` says."""

    def __init__(self, files: Filesystem, prompt: Prompt[None]) -> None:
        self.session, self.files, self.prompt, self.resources = Session(), files, prompt, prompt.resources

    def call(self) -> ToolResult[Any]:
        return ToolExecutor(prompt=self.prompt, session=self.session).call("act", {}, call_id="c")

    @property
    def table(self) -> Table:
        return self.resources.get(Table)

    def become(self, text: str) -> None:
        self.files.write("a.txt", text)
        self.files.delete("new", recursive=True) if self.files.exists("new") else self.files.mkdir("new")
        self.session[Line].seed(Line(text))
        self.table.rows = [text]

    @property
    def holds(self) -> tuple[Any, ...]:
        names = [entry.name for entry in self.files.list()]
        return self.files.read("a.txt").content, names, self.session[Line].all(), self.table.rows

    def snapshot(self, tag: str | None = None) -> CompositeSnapshot:
        return create_snapshot(self.session, self.resources, tag=tag)

    def restore(self, snapshot: CompositeSnapshot) -> None:
        restore_snapshot(self.session, self.resources, snapshot)


@contextmanager
def world(
    files: Filesystem | None = None, act: ToolHandler[None, None] | None = None, *, opaque: bool = False
) -> Iterator[World]:
    files = InMemoryFilesystem() if files is None else files
    tool = Tool[None, None](name="act", description="Act.", handler=act, opaque=opaque)
    prompt = Prompt[None](ns="t", key="t", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    prompt.bind(resources={Filesystem: files, Table: Binding(Table, lambda resolver: Table())})
    with prompt.resources:
        made = World(files, prompt)
        made.become("first")
        yield made


@pytest.fixture(params=["memory", "disk", "workspace"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    if request.param == "memory":
        yield InMemoryFilesystem()
    elif request.param == "disk":
        with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as disk:
            yield disk
    else:
        with Workspace.open(tmp_path / "root", store=tmp_path / "store") as workspace:
            yield workspace.filesystem


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()


def test_everything_goes_back_together_as_often_as_it_is_asked(files: Filesystem) -> None:
    with world(files) as here:
        snapshot, before = here.snapshot("here"), here.holds
        assert snapshot.metadata == SnapshotMetadata("here")
        for text in ("second", "third"):
            here.become(text)
            here.restore(snapshot)
            assert here.holds == before


def test_in_the_history_it_is_a_step_and_taking_a_snapshot_is_none(tmp_path: Path) -> None:
    with Workspace.open(tmp_path / "root", store=tmp_path / "store") as workspace, world(workspace.filesystem) as here:
        snapshot = here.snapshot()
        assert not workspace.steps()
        here.become("second")
        here.restore(snapshot)
        assert [(step.tool, step.paths) for step in workspace.steps()] == [("restore_snapshot", ("a.txt", "new"))]


def test_what_cannot_go_back_takes_the_others_along(files: Filesystem) -> None:
    class Stubborn(Table):
        def restore(self, snapshot: Rows) -> None:
            if snapshot.rows == ("first",):
                raise OSError("no")
            super().restore(snapshot)

    with world(files) as here:
        snapshot = here.snapshot()
        here.table.__class__ = Stubborn
        here.become("second")
        before = here.holds
        with pytest.raises(OSError, match="no"):
            here.restore(snapshot)
        assert here.holds == before


def test_a_session_that_does_not_know_the_slices_is_left_alone(files: Filesystem) -> None:
    with world(files) as here:
        snapshot = here.snapshot()
        here.become("second")
        here.session, known = Session(), here.session
        with pytest.raises(SnapshotRestoreError, match="Line"):
            here.restore(snapshot)
        here.session = known
        assert here.holds[0] == "second"


def test_a_resource_that_is_not_bound_is_said_before_anything_changes() -> None:
    with world() as here:
        snapshot = here.snapshot()
        here.become("second")
        before = here.holds
        for resources in (None, Prompt[None](ns="t", key="other").resources):
            if resources is None:
                with pytest.raises(SnapshotRestoreError, match="nothing is bound"):
                    restore_snapshot(here.session, resources, snapshot)
            else:
                with resources, pytest.raises(SnapshotRestoreError, match="nothing is bound"):
                    restore_snapshot(here.session, resources, snapshot)
        assert here.holds == before


def test_outside_of_the_block_there_is_nothing_to_take() -> None:
    with world() as here:
        pass
    with pytest.raises(RuntimeError, match="within"):
        here.snapshot()


def test_in_a_handler_it_is_part_of_the_call(files: Filesystem) -> None:
    taken: list[CompositeSnapshot] = []

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        here.become("second")
        taken.append(create_snapshot(context.session, context.resources, tag="within"))
        here.become("third")
        restore_snapshot(context.session, context.resources, taken[-1])
        return ToolResult.error(here.files.read("a.txt").content)

    with world(files, act) as here:
        before = here.holds
        assert here.call().message == "second"
        assert here.holds == before
        assert taken[0].metadata == SnapshotMetadata("within", "c", "act")


def test_one_that_was_taken_in_a_call_that_failed_can_be_gone_back_to(files: Filesystem) -> None:
    taken: list[CompositeSnapshot] = []

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        here.become("second")
        taken.append(create_snapshot(context.session, context.resources))
        return ToolResult.error("no")

    with world(files, act) as here:
        assert not here.call().success
        here.restore(taken[0])
        assert here.holds == ("second", ["a.txt"], (Line("second"),), ["second"])


def test_a_handler_takes_back_a_part_of_what_it_did(files: Filesystem) -> None:
    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        here.become("second")
        with suppress(KeyError), tool_transaction(context.session, context.resources):
            here.become("third")
            raise KeyError
        return ToolResult("half of it")

    with world(files, act) as here:
        assert here.call().success
        assert here.holds == ("second", ["a.txt"], (Line("second"),), ["second"])


@pytest.fixture
def opaque(tmp_path: Path) -> Iterator[World]:
    """Whose tool writes a file by itself, or only looks."""

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        if here.session[Line].latest() != Line("look"):
            (tmp_path / "root" / "made").write_text("made")
        return ToolResult("done")

    root, store = tmp_path / "root", tmp_path / "store"
    with Workspace.open(root, store=store) as workspace, world(workspace.filesystem, act, opaque=True) as here:
        yield here


def test_what_a_program_has_changed_since_is_not_passed_over(opaque: World) -> None:
    snapshot, files = opaque.snapshot(), opaque.files.snapshot()
    assert opaque.call().success
    before = opaque.holds
    for ask in (
        lambda: opaque.restore(snapshot),
        lambda: opaque.files.restore(files),
        lambda: opaque.files.changes(files),
    ):
        with pytest.raises(SnapshotRestoreError, match="a tool has changed files by itself"):
            ask()
    assert opaque.holds == before
    later = opaque.snapshot()
    opaque.files.write("a.txt", "later")
    opaque.restore(later)
    assert opaque.holds == before


def test_a_program_that_has_changed_nothing_is_in_no_one_s_way(opaque: World) -> None:
    opaque.session[Line].seed(Line("look"))
    snapshot = opaque.snapshot()
    before = opaque.holds
    assert opaque.call().success
    opaque.files.write("a.txt", "later")
    opaque.restore(snapshot)
    assert opaque.holds == before


def test_a_program_that_was_taken_back_is_in_no_one_s_way(opaque: World) -> None:
    snapshot = opaque.snapshot()
    before = opaque.holds
    with suppress(KeyError), tool_transaction(opaque.session, opaque.resources, opaque=True):
        assert opaque.call().success
        raise KeyError
    opaque.files.write("a.txt", "later")
    opaque.restore(snapshot)
    assert opaque.holds == before


def test_while_a_program_may_change_files_nothing_goes_back(tmp_path: Path) -> None:
    taken: list[CompositeSnapshot] = []

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        (tmp_path / "root/made").write_text("made")
        taken.append(create_snapshot(context.session, context.resources))
        restore_snapshot(context.session, context.resources, taken[0])
        return ToolResult("done")

    disk = HostFilesystem(tmp_path / "root", store=tmp_path / "store")
    with disk, world(disk, act, opaque=True) as here:
        taken.append(here.snapshot())
        before = here.holds
        assert "a tool has changed files by itself" in here.call().message
        with pytest.raises(SnapshotRestoreError, match="in the call that took it"):
            here.restore(taken[1])
        assert here.holds == before
        here.become("second")
        here.restore(taken[0])
        assert here.holds == before


@pytest.mark.parametrize("text", ["look", "act"])
def test_one_of_a_failed_call_in_which_a_program_ran_is_refused(opaque: World, text: str) -> None:
    taken: list[CompositeSnapshot] = []
    opaque.session[Line].seed(Line(text))
    before = opaque.holds
    with suppress(KeyError), tool_transaction(opaque.session, opaque.resources, opaque=True):
        assert opaque.call().success
        opaque.files.write("more", "which goes with what the program has made")
        taken.append(opaque.snapshot())
        raise KeyError
    with pytest.raises(SnapshotRestoreError):
        opaque.restore(taken[0])
    assert opaque.holds == before


def in_place(root: Path) -> None:
    (root / "a.txt").write_text("longer than it was")


def made_anew(root: Path) -> None:
    (root / "new").rmdir()


@pytest.mark.parametrize("change", [in_place, made_anew])
def test_where_a_rollback_has_made_files_anew_going_back_is_refused(
    opaque: World, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    snapshot = opaque.snapshot()
    opaque.files.chmod("a.txt", 0o600)
    opaque.files.chmod("new", 0o700)
    before = tree_of(opaque.files)
    with suppress(KeyError), tool_transaction(opaque.session, opaque.resources, opaque=True):
        change(tmp_path / "root")
        raise KeyError
    with pytest.raises(SnapshotRestoreError, match="by itself"):
        opaque.restore(snapshot)
    assert tree_of(opaque.files) == before


def test_a_program_that_has_changed_the_time_of_a_file_is_not_passed_over(opaque: World, tmp_path: Path) -> None:
    snapshot = opaque.snapshot()
    with tool_transaction(opaque.session, opaque.resources, opaque=True):
        os.utime(tmp_path / "root/a.txt", (1, 1))
    with pytest.raises(SnapshotRestoreError, match="by itself"):
        opaque.restore(snapshot)
    assert opaque.files.stat("a.txt").modified_at.year == 1970


def test_the_times_of_directories_come_with_it_and_go_with_the_call(files: Filesystem) -> None:
    taken: list[CompositeSnapshot] = []
    trees: list[dict[str, object]] = []

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        if taken:
            here.restore(taken[0])
            return ToolResult.error(str(tree_of(files) == trees[1]))
        here.become("second")
        files.write("d/e", "e")
        taken.append(here.snapshot())
        trees.append(tree_of(files))
        return ToolResult.error("no")

    with world(files, act) as here:
        trees.append(tree_of(files))
        here.call()
        assert (tree_of(files), here.call().message) == (trees[0], "True")
        assert tree_of(files) == trees[0]


def test_it_is_of_one_moment_though_a_call_runs() -> None:
    begun, asked = threading.Event(), threading.Event()
    taken: list[CompositeSnapshot] = []

    def act(params: None, *, context: ToolContext) -> ToolResult[None]:
        here.become("half")
        begun.set()
        asked.wait()
        return ToolResult.error("no")

    def take() -> None:
        asked.set()
        taken.append(here.snapshot())

    with world(None, act) as here:
        before = here.holds
        threads = [threading.Thread(target=here.call), threading.Thread(target=take)]
        threads[0].start()
        begun.wait()
        threads[1].start()
        for thread in threads:
            thread.join()
        here.become("second")
        here.restore(taken[0])
        assert here.holds == before


def test_a_snapshot_of_a_session_needs_no_types_where_the_process_has_had_its_slices() -> None:
    session = Session()
    session.dispatch(Line("x"))
    text = session.snapshot().to_json()
    assert Snapshot.from_json(text) == session.snapshot()
    with pytest.raises(SnapshotRestoreError, match="not known here"):
        Snapshot.from_json(text.replace(f"{__name__}:Line", f"{__name__}:Never"))
    with pytest.raises(SnapshotRestoreError, match="does not know"):
        Session().restore(Snapshot.from_json(text))
