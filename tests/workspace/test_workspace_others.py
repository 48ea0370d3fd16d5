"""What people do to the files while an agent works on them: theirs in the history, and never lost."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from effort import kill_points
from failpoints import injected

from ringfence import (
    Filesystem,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    Receipt,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.adapters import ToolExecutor
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools import VfsToolsSection

LINES = "".join(f"line {n}\n" for n in range(1, 10))


def tools(workspace: Workspace, *policies: object) -> tuple[Prompt[object], ToolExecutor]:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=workspace.filesystem)
    prompt = Prompt(PromptTemplate(ns="test", key="others", sections=[section], policies=policies))
    return prompt, ToolExecutor(prompt=prompt, session=session)


def theirs(root: Path, name: str = "a.txt", line: str = "line 8\n") -> None:
    path = root / name
    path.write_text(path.read_text().replace(line, "theirs\n"))


def test_an_undo_keeps_the_edit_of_a_person(workspace: Workspace, root: Path) -> None:
    prompt, executor = tools(workspace)
    theirs(root)
    with prompt.resources:
        assert executor.call("read_file", {"file_path": "a.txt"}).success
        edit = {"file_path": "a.txt", "old_string": "line 2\n", "new_string": "ours\n"}
        assert executor.call("edit_file", edit).success
    assert [(entry.kind, entry.paths) for entry in workspace.log()][:2] == [
        ("step", ("a.txt",)),
        ("external", ("a.txt",)),
    ]
    changed = [line for line in workspace.show(1).patch.splitlines() if line[:1] in b"+-" and line[1:2] != line[:1]]
    assert changed == [b"-line 2", b"+ours"]
    assert workspace.undo().outcomes == {"a.txt": "restored"}
    assert (root / "a.txt").read_text() == LINES.replace("line 8\n", "theirs\n")


def test_the_bits_of_a_directory_that_a_call_made_a_file_in_stay_a_person_s(workspace: Workspace, root: Path) -> None:
    (root / "d").chmod(0o700)
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("d/new", "ours\n")
        held.commit()
    assert workspace.steps()[-1].paths == ("d/new",)
    assert workspace.undo().outcomes == {"d/new": "removed"}
    assert (root / "d").stat().st_mode & 0o777 == 0o700
    assert [entry.paths for entry in workspace.log() if entry.kind == "external"] == [("d",)]


def to_a_file(fs: HostFilesystem) -> None:
    fs.delete("d", recursive=True)
    fs.write("d", "a file now")


@pytest.mark.parametrize(
    "change",
    [lambda fs: fs.delete("d", recursive=True), lambda fs: fs.move("d", "e"), to_a_file],
    ids=["deleted", "moved", "made a file"],
)
def test_what_a_person_had_taken_from_a_directory_does_not_come_back_with_it(
    workspace: Workspace, root: Path, change: Callable[[HostFilesystem], object]
) -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("d/e/c.txt", "c\n")
        held.commit()
    shutil.rmtree(root / "d/e")
    with held_call(workspace.filesystem, call_id="call-2") as held:
        change(workspace.filesystem.for_call(held))
        held.commit()
    assert not {"d/e", "d/e/c.txt"} & {*workspace.steps()[-1].paths}
    workspace.undo()
    assert os.listdir(root / "d") == ["b.txt"]


def same_size_and_time(root: Path) -> None:
    found = (root / "a.txt").stat()
    (root / "a.txt").write_text(LINES.replace("line 8", "LINE 8"))
    os.utime(root / "a.txt", ns=(found.st_atime_ns, found.st_mtime_ns))


def exchanged(root: Path) -> None:
    (root / "editor's").write_text("theirs")
    os.replace(root / "editor's", root / "a.txt")


CHANGES: dict[str, Callable[[HostFilesystem], object]] = {
    "write": lambda fs: fs.write("a.txt", "ours"),
    "delete": lambda fs: fs.delete("a.txt"),
    "move": lambda fs: fs.move("a.txt", "c.txt"),
    "move over": lambda fs: fs.move("d/b.txt", "a.txt", overwrite=True),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("edit", [theirs, same_size_and_time, exchanged])
def test_a_call_that_has_looked_at_a_file_does_not_write_over_a_later_edit(
    workspace: Workspace, root: Path, edit: Callable[[Path], None], name: str
) -> None:
    with held_call(workspace.filesystem) as held:
        fs = workspace.filesystem.for_call(held)
        fs.read("a.txt")
        edit(root)
        edited = (root / "a.txt").read_bytes()
        if name == "move":
            CHANGES[name](fs)  # what is moved is not lost
            assert (root / "c.txt").read_bytes() == edited
        else:
            with pytest.raises(OSError, match="changed by somebody else") as caught:
                CHANGES[name](fs)
            assert caught.value.errno == errno.ESTALE
            assert held.changed() == []
        held.rollback()
    assert (root / "a.txt").read_bytes() == edited
    workspace.close()
    assert sorted(os.listdir(root)) == ["a.txt", "d"]


@pytest.mark.parametrize("name", ["write", "delete", "move over"])
def test_an_edit_between_two_writes_of_a_call_is_not_written_over(workspace: Workspace, root: Path, name: str) -> None:
    with held_call(workspace.filesystem) as held:
        fs = workspace.filesystem.for_call(held)
        fs.write("a.txt", "ours\n")
        (root / "a.txt").write_text("theirs\n")
        with pytest.raises(OSError, match="changed by somebody else"):
            CHANGES[name](fs)
        assert held.rollback().conflicts == ("a.txt",)
    assert (root / "a.txt").read_text() == "theirs\n"


def test_what_the_call_itself_changed_is_not_taken_for_somebody_else_s(workspace: Workspace, root: Path) -> None:
    os.link(root / "a.txt", root / "twin")
    with held_call(workspace.filesystem) as held:
        fs = workspace.filesystem.for_call(held)
        for path in ("a.txt", "twin", "d/b.txt"):
            fs.read(path)
        fs.write("twin", "apart")
        fs.chmod("d/b.txt", 0o600)
        fs.write("d/b.txt", "b2")
        fs.read("d/b.txt")
        fs.move("d", "e")
        fs.write("d/b.txt", "b3")
        fs.write("d/b.txt", "b4")
        fs.write("a.txt", "ours")
        held.commit()
    assert (root / "a.txt").read_text() == "ours"


def test_times_alone_make_nothing_stale(workspace: Workspace, root: Path) -> None:
    with held_call(workspace.filesystem) as held:
        fs = workspace.filesystem.for_call(held)
        fs.read("a.txt")
        os.utime(root / "a.txt")
        fs.write("a.txt", "ours")
        held.commit()
    assert (root / "a.txt").read_text() == "ours"


class Person:
    """A policy that stands for a person: it saves a file in the moment between the other policies and the handler."""

    name = "person"

    def __init__(self, root: Path, save: Callable[[Path], object] = theirs) -> None:
        self.root = root
        self.save = save

    def check(self, tool: object, params: object, *, context: object) -> PolicyDecision:
        if getattr(tool, "name", "") != "read_file":
            self.save(self.root)
        return PolicyDecision.allow()

    def on_result(self, tool: object, params: object, result: object, *, context: object) -> None: ...


def test_an_edit_between_the_policy_and_the_handler_fails_the_call(workspace: Workspace, root: Path) -> None:
    prompt, executor = tools(workspace, Person(root))
    with prompt.resources:
        assert executor.call("read_file", {"file_path": "a.txt"}).success
        answer = executor.call("write_file", {"file_path": "a.txt", "content": "ours"})
    assert not answer.success
    assert "changed by somebody else" in answer.message
    assert (root / "a.txt").read_text() == LINES.replace("line 8\n", "theirs\n")
    assert workspace.steps() == []


def led_elsewhere(root: Path) -> None:
    (root / "theirs").write_text("theirs\n")
    (root / "link").unlink()
    (root / "link").symlink_to("theirs")


@pytest.mark.parametrize(
    ("save", "name", "arguments"),
    [
        (lambda root: (root / "new").write_text("theirs\n"), "write_file", {"file_path": "new", "content": "ours"}),
        (lambda root: (root / "new").write_text("theirs\n"), "rm", {"path": "new"}),
        (lambda root: (root / "new").write_text("theirs\n"), "move", {"source": "a.txt", "target": "new"}),
        (lambda root: (root / "d/new").write_text("theirs\n"), "rm", {"path": "d", "recursive": True}),
        (led_elsewhere, "edit_file", {"file_path": "link", "old_string": "theirs", "new_string": "ours"}),
    ],
    ids=["written", "removed", "moved over", "in a directory", "behind a link"],
)
def test_what_somebody_makes_between_the_policy_and_the_handler_is_not_changed_unread(
    workspace: Workspace, root: Path, save: Callable[[Path], object], name: str, arguments: dict[str, object]
) -> None:
    (root / "link").symlink_to("a.txt")
    prompt, executor = tools(workspace, Person(root, save))
    with prompt.resources:
        for path in ("a.txt", "d/b.txt"):
            assert executor.call("read_file", {"file_path": path}).success
        assert "not as it had been read" in executor.call(name, arguments).message
    assert [path.read_text() for path in root.glob("**/*") if path.name in ("new", "theirs")] == ["theirs\n"]
    assert workspace.steps() == []


@pytest.mark.parametrize("name", CHANGES)
def test_an_edit_of_the_same_size_and_time_is_not_lost(workspace: Workspace, root: Path, name: str) -> None:
    with held_call(workspace.filesystem, call_id="call-1") as held:
        workspace.filesystem.for_call(held).write("a.txt", LINES)
        workspace.filesystem.for_call(held).write("new", "ours\n")
        held.commit()
    same_size_and_time(root)
    theirs = (root / "a.txt").read_text()
    with held_call(workspace.filesystem, call_id="call-2") as held:
        CHANGES[name](workspace.filesystem.for_call(held))
        held.commit()
    workspace.undo()
    assert (root / "a.txt").read_text() == theirs


@pytest.mark.parametrize("name", ["write", "delete", "move over"])
def test_an_edit_of_the_same_size_and_time_in_a_call_fails_it(workspace: Workspace, root: Path, name: str) -> None:
    with held_call(workspace.filesystem) as held:
        fs = workspace.filesystem.for_call(held)
        fs.write("a.txt", LINES)
        fs.write("new", "ours\n")
        same_size_and_time(root)
        theirs = (root / "a.txt").read_text()
        with pytest.raises(OSError, match="changed by somebody else"):
            CHANGES[name](fs)
        assert held.rollback().conflicts == ("a.txt",)
    assert (root / "a.txt").read_text() == theirs


@dataclass(frozen=True)
class Nothing:
    pass


def test_the_receipt_names_conflicts_of_the_rollback(workspace: Workspace, root: Path) -> None:
    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        assert context.filesystem is not None
        context.filesystem.write("a.txt", "ours\n")
        context.filesystem.write("d/b.txt", "ours\n")
        (root / "a.txt").write_text("theirs, made while the call ran\n")
        return ToolResult.error("it did not work out")

    section = MarkdownSection(
        title="Own",
        key="own",
        template="Use it.",
        tools=[Tool[Nothing, None](name="own", description="One's own.", handler=handler)],
    )
    session, prompt = Session(), Prompt(PromptTemplate(ns="test", key="own", sections=[section]))
    prompt.bind(resources={Filesystem: workspace.filesystem})
    with prompt.resources:
        assert not ToolExecutor(prompt=prompt, session=session).call("own", {}).success
    (receipt,) = session[Receipt].all()
    assert (receipt.outcome, receipt.conflicts) == ("failed", ("a.txt",))
    assert (root / "d/b.txt").read_text() == "b\n"


@pytest.mark.parametrize("name", ["write", "delete", "move over"])
def test_a_write_by_a_program_with_the_file_open_fails_the_call(workspace: Workspace, root: Path, name: str) -> None:
    with (root / "a.txt").open("a") as program, held_call(workspace.filesystem) as held:
        CHANGES[name](workspace.filesystem.for_call(held))
        program.write("theirs\n")
        program.flush()
        with pytest.raises(OSError, match="is open in another program") as caught:
            held.commit()
        assert caught.value.errno == errno.ESTALE
        held.rollback()
    assert (root / "a.txt").read_text() == LINES + "theirs\n"
    assert workspace.steps() == []


def test_a_write_into_a_directory_that_the_call_has_deleted_goes_with_it(workspace: Workspace, root: Path) -> None:
    with (root / "d/b.txt").open("a") as program, held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).delete("d", recursive=True)
        program.write("theirs\n")
        program.flush()
        held.commit()
    assert not (root / "d").exists()


def test_a_write_into_a_replaced_file_is_kept(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (root / "a.txt").open("a") as program, HostFilesystem(root, store=tmp_path / "s") as fs:
        with held_call(fs) as held:
            fs.for_call(held).write("a.txt", "ours\n")
            snapshot = fs.snapshot()  # which keeps what it is about to go back to
            held.commit()
        program.write("theirs\n")
        program.flush()
        del snapshot
        fs.write("d/b.txt", "another\n")
    assert (root / "a.txt").read_text() == "ours\n"
    (kept,) = (tmp_path / "s/kept").iterdir()
    assert kept.read_text() == LINES + "theirs\n"
    assert f"a program that had a.txt open wrote into it after a call had replaced it: {kept}" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.write("a.txt", "ours"),
        lambda files: files.move("d/b.txt", "a.txt", overwrite=True),
        lambda files: files.move("a.txt", "new"),
        lambda files: files.delete("a.txt"),
    ],
    ids=["write", "move over", "move", "delete"],
)
def test_a_file_removed_during_a_change_is_the_error(root: Path, change: Callable[[HostFilesystem], object]) -> None:
    left = -1

    def before(operation: str) -> None:
        nonlocal left
        if left == 0:
            (root / "a.txt").unlink(missing_ok=True)
        left -= 1

    with injected(before), Workspace.open(root, store=root.parent / "store") as workspace:
        for moment in itertools.count():
            (root / "a.txt").write_text("theirs")
            (root / "d/b.txt").write_text("b")
            (root / "new").unlink(missing_ok=True)
            left = moment
            try:
                change(workspace.filesystem)
            except OSError as error:
                assert (error.filename, error.errno in (errno.ESTALE, errno.ENOENT)) == ("a.txt", True)
                assert (root / "d/b.txt").read_text() == "b"
            if left >= 0:
                break  # it took fewer moments
    assert moment > 3


def replaced_by_a_person(root: Path) -> None:
    """As editors save: a new file takes the place of what is there."""
    (root / "saved~").write_text("theirs\n")
    (root / "saved~").rename(root / "a.txt")


STEPS: dict[str, Callable[[HostFilesystem], object]] = {
    "written": lambda fs: fs.write("a.txt", "ours\n"),
    "removed": lambda fs: fs.delete("a.txt"),
    "a link": lambda fs: (fs.delete("a.txt"), fs.symlink("a.txt", "d/b.txt")),
    "moved over": lambda fs: fs.move("d/b.txt", "a.txt", overwrite=True),
    "moved away": lambda fs: fs.move("a.txt", "d/moved"),
    "made and moved": lambda fs: (fs.delete("a.txt"), fs.mkdir("a.txt"), fs.move("d/b.txt", "a.txt/b")),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("way", ["undo", "restore"])
def test_a_save_during_an_undo_or_a_restore_stays(tmp_path: Path, name: str, way: str) -> None:
    for at in kill_points(3):
        root = tmp_path / str(at) / "root"
        (root / "d").mkdir(parents=True)
        (root / "a.txt").write_text("before\n")
        (root / "d/b.txt").write_text("b\n")
        left = [10_000]

        def person(_: str, root: Path = root, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0 and not (root / "a.txt").is_dir():
                replaced_by_a_person(root)

        with injected(person), Workspace.open(root, store=tmp_path / str(at) / "store") as workspace:
            with held_call(workspace.filesystem) as held:
                STEPS[name](workspace.filesystem.for_call(held))
                held.commit()
            made = (root / "a.txt").is_dir()
            left[0] = at + 1
            try:
                workspace.undo() if way == "undo" else workspace.restore(0)
            except OSError as error:
                assert "by somebody else" in str(error) or isinstance(error, FileExistsError)
            if left[0] > 0:
                break
            assert made or (root / "a.txt").read_text() == "theirs\n"
    assert at > 3


def saved_in(new: Path) -> Path:
    (new / "theirs").write_text("theirs\n")
    return new / "theirs"


def made_a_file(new: Path) -> Path:
    new.rename(new.with_name("moved"))
    new.write_text("theirs\n")
    return new


@pytest.mark.parametrize("save", [saved_in, made_a_file])
@pytest.mark.parametrize("way", ["undo", "restore"])
def test_a_save_in_a_directory_that_an_undo_removes_stays(
    tmp_path: Path, save: Callable[[Path], Path], way: str
) -> None:
    for at in kill_points(2, start=1):
        new, saved, left = tmp_path / str(at) / "root/new", list[Path](), [10_000]
        new.parent.mkdir(parents=True)

        def person(_: str, new: Path = new, saved: list[Path] = saved, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0 and new.exists():
                saved.append(save(new))

        with injected(person), Workspace.open(new.parent, store=tmp_path / str(at) / "store") as workspace:
            with held_call(workspace.filesystem) as held:
                workspace.filesystem.for_call(held).mkdir("new")
                held.commit()
            left[0] = at
            with suppress(OSError):
                workspace.undo() if way == "undo" else workspace.restore(0)
        if not saved:  # it was gone by then
            break
        assert saved[0].read_text() == "theirs\n"
    assert at > 3
