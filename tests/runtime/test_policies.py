"""The two policies that come with the project, through the whole of a tool call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ringfence import PromptValidationError
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    BasePolicy,
    MarkdownSection,
    PolicyDecision,
    PolicyState,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    RequireCleanTestsPolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import CallInfo, Session, tool_transaction
from ringfence.runtime.policy import ALLOW, PathHashes
from ringfence_sandbox import HostFilesystem
from ringfence_workspace.transaction.changes import HASHED_BYTES


@dataclass(frozen=True)
class At:
    file_path: str
    content: str = ""


@dataclass(frozen=True)
class Two:
    source: str
    target: str


@dataclass(frozen=True)
class Said:
    text: str

    def render(self) -> str:
        return self.text


def files_of(context: ToolContext) -> Filesystem:
    assert context.filesystem is not None
    return context.filesystem


def read_file(params: At, *, context: ToolContext) -> ToolResult[Said]:
    return ToolResult.ok(Said(files_of(context).read(params.file_path.strip()).content))


def read_nothing(params: At, *, context: ToolContext) -> ToolResult[Said]:
    return ToolResult.ok(Said(files_of(context).read(params.file_path, offset=1000).content))


def write_file(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).write(params.file_path.strip(), params.content)
    return ToolResult.ok(Said("written"))


def write_and_fail(params: At, *, context: ToolContext) -> ToolResult[Said]:
    write_file(params, context=context)
    return ToolResult.error("failed after the write")


def rm(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).delete(params.file_path, recursive=True)
    return ToolResult.ok(Said("gone"))


def move(params: Two, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).move(params.source, params.target, overwrite=True)
    return ToolResult.ok(Said("moved"))


def touch_all(params: At, *, context: ToolContext) -> ToolResult[Said]:
    return write_file(At("a.txt", "all"), context=context)


TOOLS: list[Tool[Any, Any]] = [
    Tool[At, Said](name=name, description="A tool.", handler=handler)
    for name, handler in (
        ("read_file", read_file),
        ("write_file", write_file),
        ("rm", rm),
        ("edit_file", write_and_fail),
    )
]
TOOLS.append(Tool[Two, Said](name="move", description="A tool.", handler=move))
TOOLS.append(Tool[At, Said](name="stamp", description="A tool.", handler=touch_all, writes=lambda params: ["a.txt"]))
TOOLS.append(Tool[At, Said](name="nowhere", description="A tool.", handler=touch_all, writes=lambda params: []))


@contextmanager
def agent(
    *tools: Tool[Any, Any], files: Filesystem | None = None, session: Session | None = None, key: str = "rbw"
) -> Iterator[Callable[..., ToolResult[Any]]]:
    section = MarkdownSection(
        title="Files", key="files", template="Use them.", tools=[*TOOLS, *tools], policies=[ReadBeforeWritePolicy()]
    )
    prompt = Prompt(PromptTemplate(ns="tests", key=key, sections=[section]))
    prompt.bind(resources={Filesystem: files} if files is not None else {})
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session or Session())
        yield lambda name, *values: executor.call(
            name,
            {"source": values[0], "target": values[1]}
            if name == "move"
            else dict(zip(("file_path", "content"), values, strict=False)),
        )


@pytest.fixture
def files() -> InMemoryFilesystem:
    files = InMemoryFilesystem()
    files.write("a.txt", "one\n")
    files.write("dir/b.txt", "two\n")
    return files


def test_an_existing_file_must_be_read_first(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        denied = call("write_file", "a.txt", "x")
        assert not denied.success
        assert "read_before_write" in denied.message
        assert "a.txt" in denied.message
        assert files.read("a.txt").content == "one\n"
        call("read_file", "a.txt")
        assert call("write_file", "a.txt", "x").success


def test_own_writes_count_as_known(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("write_file", "new.txt", "x")
        assert call("write_file", "new.txt", "y").success
        assert call("rm", "new.txt").success


def test_a_stale_read_is_no_read(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("read_file", "a.txt")
        files.write("a.txt", "somebody else\n")
        denied = call("write_file", "a.txt", "x")
        assert "has changed since" in denied.message
        call("read_file", "a.txt")
        assert call("write_file", "a.txt", "x").success


def test_what_was_overwritten_by_the_session_is_not_known_again_when_it_comes_back(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("read_file", "a.txt")
        call("write_file", "a.txt", "mine\n")
        files.write("a.txt", "one\n")
        assert not call("write_file", "a.txt", "x").success


def test_the_same_bytes_again_are_not_stale(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("read_file", "a.txt")
        files.write("a.txt", "one\n")
        assert call("write_file", "a.txt", "x").success


@pytest.mark.parametrize(
    "spelling", ["./a.txt", "//a.txt", "/a.txt", "dir/../a.txt", " a.txt ", "link", "dir/up/a.txt"]
)
def test_every_spelling_of_a_path_is_one_path(files: InMemoryFilesystem, spelling: str) -> None:
    files.symlink("link", "a.txt")
    files.symlink("dir/up", "..")
    with agent(files=files) as call:
        assert not call("write_file", spelling, "x").success
        call("read_file", "a.txt")
        assert call("write_file", spelling, "x").success
        assert files.read("a.txt").content == "x"


@pytest.mark.parametrize("target", ["a.txt", "dir", "dir/b.txt", ""])
def test_rm_is_a_write(files: InMemoryFilesystem, target: str) -> None:
    with agent(files=files) as call:
        assert not call("rm", target).success
        assert files.exists("a.txt")
        assert files.exists("dir/b.txt")


def test_a_directory_may_be_removed_when_all_its_files_are_known(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("read_file", "dir/b.txt")
        call("write_file", "dir/own.txt", "x")
        assert call("rm", "dir").success


@pytest.mark.parametrize(("source", "target"), [("a.txt", "new.txt"), ("own.txt", "a.txt"), ("dir", "elsewhere")])
def test_move_is_a_write_of_its_source_and_of_a_target_that_exists(
    files: InMemoryFilesystem, source: str, target: str
) -> None:
    with agent(files=files) as call:
        call("write_file", "own.txt", "x")
        assert not call("move", source, target).success
        call("read_file", "a.txt")
        call("read_file", "dir/b.txt")
        assert call("move", source, target).success


def test_a_moved_file_is_known_where_it_is_now(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        call("read_file", "a.txt")
        call("move", "a.txt", "c.txt")
        assert call("write_file", "c.txt", "x").success


def test_any_tool_that_declares_its_writes_is_governed(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        assert not call("stamp", "whatever").success
        call("read_file", "a.txt")
        assert call("stamp", "whatever").success


def test_targets_that_cannot_be_told_are_denied(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        assert "does not know" in call("nowhere", "a.txt").message


def appended(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files = files_of(context)
    before = files.read(params.file_path).content if files.exists(params.file_path) else ""
    files.write(params.file_path, before + params.content)
    return ToolResult.ok(Said(files.read(params.file_path).content))


def call_of_write_file(params: At, *, context: ToolContext) -> ToolResult[Said]:
    call = ToolExecutor(prompt=context.prompt, session=context.session).call
    return call("write_file", {"file_path": params.file_path, "content": params.content})


def write_and_look(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).write(params.file_path, params.content)
    return ToolResult.ok(Said(files_of(context).read(params.file_path).content))


UNDECLARED = (
    Tool[At, Said](name="look_after", description="A tool.", handler=write_and_look),
    Tool[At, Said](name="overwrite", description="A tool.", handler=write_file),
    Tool[At, Said](name="remove", description="A tool.", handler=rm),
    Tool[At, Said](name="misled", description="A tool.", handler=write_file, writes=lambda params: ["elsewhere.txt"]),
    Tool[At, Said](name="none_there", description="A tool.", handler=write_file, writes=lambda params: None),
)


@pytest.mark.parametrize("name", [tool.name for tool in UNDECLARED])
@pytest.mark.parametrize("target", ["a.txt", "./a.txt", "link"])
def test_a_tool_that_does_not_declare_what_it_writes_is_denied_what_it_has_done(
    files: InMemoryFilesystem, name: str, target: str
) -> None:
    files.symlink("link", "a.txt")
    with agent(*UNDECLARED, files=files) as call:
        if (name, target) == ("remove", "link"):
            assert call(name, target).success  # the link itself, in which nothing can be read
            return
        assert "a.txt without having read it" in call(name, target, "blind").message
        assert files.read("a.txt").content == "one\n"
        call("read_file", "a.txt")
        assert call(name, target, "seen").success
        if name != "remove":
            assert call(name, target, "its own write is known").success


def test_a_directory_removed_by_such_a_tool_had_files_that_nobody_read(files: InMemoryFilesystem) -> None:
    with agent(*UNDECLARED, files=files) as call:
        assert "dir/b.txt" in call("remove", "dir").message
        assert files.exists("dir/b.txt")


@pytest.mark.parametrize("name", ["overwrite", "remove"])
def test_a_file_that_is_too_large_to_be_hashed_is_not_changed_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", HASHED_BYTES + 1)
    with HostFilesystem(tmp_path) as files, agent(*UNDECLARED, files=files) as call:
        assert "large without having read it" in call(name, "large", "blind").message
        assert files.stat("large").size_bytes == HASHED_BYTES + 1


class Notes(InMemoryFilesystem):
    """Another resource with files, beside the prompt's own."""


def test_the_files_of_another_resource_are_not_changed_unread(files: InMemoryFilesystem) -> None:
    def note(params: At, *, context: ToolContext) -> ToolResult[Said]:
        context.resources.get(Notes).write(params.file_path, params.content)
        return ToolResult.ok(Said("noted"))

    notes = Notes()
    notes.write("a.txt", "one\n")
    section = MarkdownSection(
        title="N", key="n", template="N.", tools=[*TOOLS, Tool[At, Said](name="note", description="N.", handler=note)]
    )
    prompt = Prompt(PromptTemplate(ns="tests", key="two", sections=[section], policies=[ReadBeforeWritePolicy()]))
    with prompt.bind(resources={Filesystem: files, Notes: notes}).resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        call("read_file", {"file_path": "a.txt"})  # the same path and bytes, of other files
        assert "a.txt without" in call("note", {"file_path": "a.txt", "content": "x"}).message
        assert notes.read("a.txt").content == "one\n"
        assert call("note", {"file_path": "new", "content": "x"}).success
        assert call("note", {"file_path": "new", "content": "its own write is known"}).success


class PassedOn:
    """A filesystem that is none itself, and passes on what is asked of it."""

    def __init__(self, files: Filesystem) -> None:
        self.files = files

    def for_call(self, call: CallInfo) -> PassedOn:
        return PassedOn(self.files.for_call(call))


for _name in {*dir(Filesystem), "lock"} - {"for_call"}:
    if not _name.startswith("_"):
        setattr(PassedOn, _name, property(lambda self, name=_name: getattr(self.files, name)))


def test_what_is_read_through_a_filesystem_that_passes_everything_on_is_known(files: InMemoryFilesystem) -> None:
    passed_on: Any = PassedOn(files)
    with agent(files=passed_on) as call:
        assert "has not been read" in call("write_file", "a.txt", "x").message
        call("read_file", "a.txt")
        assert call("write_file", "a.txt", "x").success
        assert call("rm", "a.txt").success


def test_a_handler_that_reads_what_it_changes_has_read_it(files: InMemoryFilesystem) -> None:
    tool = Tool[At, Said](name="append", description="A tool.", handler=appended)
    with agent(tool, files=files) as call:
        assert call("append", "a.txt", "two\n").success
        assert call("append", "new.txt", "one\n").success
        files.write("a.txt", "by somebody else\n")
        assert call("append", "a.txt", "three\n").success
        assert files.read("a.txt").content == "by somebody else\nthree\n"


def chmod(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).chmod(params.file_path, 0o755)
    return ToolResult.ok(Said("done"))


def moved_after_a_look(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).read(params.file_path)
    return move(Two(params.file_path, "c.txt"), context=context)


@pytest.mark.parametrize(("handler", "now_at"), [(appended, "a.txt"), (moved_after_a_look, "c.txt"), (chmod, "a.txt")])
def test_what_a_handler_has_made_of_a_file_that_only_it_has_read_is_not_known(
    files: InMemoryFilesystem, handler: Callable[..., ToolResult[Said]], now_at: str
) -> None:
    with agent(Tool[At, Said](name="own", description="A tool.", handler=handler), files=files) as call:
        assert call("own", "a.txt", "two\n").success
        assert "has not been read" in call("write_file", now_at, "blind").message
        call("read_file", now_at)
        assert call("write_file", now_at, "seen").success


def test_what_only_a_handler_has_read_is_not_known_in_the_place_of_what_was_known(files: InMemoryFilesystem) -> None:
    with agent(Tool[At, Said](name="own", description="A tool.", handler=moved_after_a_look), files=files) as call:
        call("write_file", "c.txt", "mine")
        assert call("own", "a.txt").success
        assert "has not been read" in call("write_file", "c.txt", "blind").message
        assert files.read("c.txt").content == "one\n"


def test_what_a_handler_has_made_of_a_file_that_the_model_has_read_is_known(files: InMemoryFilesystem) -> None:
    with agent(Tool[At, Said](name="append", description="A tool.", handler=appended), files=files) as call:
        call("read_file", "a.txt")
        assert call("append", "a.txt", "two\n").success
        assert call("write_file", "a.txt", "seen").success


def test_what_a_handler_does_through_calls_is_governed_as_theirs(files: InMemoryFilesystem) -> None:
    tool = Tool[At, Said](name="through", description="A tool.", handler=call_of_write_file)
    with agent(tool, files=files) as call:
        assert "has not been read" in call("through", "a.txt", "blind").message
        call("read_file", "a.txt")
        assert call("through", "a.txt", "seen").success
        assert files.read("a.txt").content == "seen"


def beside_a_call(params: At, *, context: ToolContext) -> ToolResult[Said]:
    files_of(context).delete(params.file_path)
    return call_of_write_file(params, context=context)


def after_a_chmod_by_a_call(params: At, *, context: ToolContext) -> ToolResult[Said]:
    assert ToolExecutor(prompt=context.prompt, session=context.session).call("chmod", {"file_path": "a.txt"}).success
    return write_file(params, context=context)


def test_a_call_that_changes_permissions_does_not_answer_for_the_content(files: InMemoryFilesystem) -> None:
    handlers = {"chmod": chmod, "own": after_a_chmod_by_a_call}
    tools = [Tool[At, Said](name=name, description="A tool.", handler=made) for name, made in handlers.items()]
    with agent(*tools, files=files) as call:
        assert "a.txt without having read it" in call("own", "a.txt", "blind").message
        assert files.read("a.txt").content == "one\n"


def in_a_part(params: At, *, context: ToolContext) -> ToolResult[Said]:
    with tool_transaction(context.session, context.resources):
        return write_file(params, context=context)


def in_a_part_that_reads(params: At, *, context: ToolContext) -> ToolResult[Said]:
    with tool_transaction(context.session, context.resources):
        return appended(params, context=context)


def test_what_a_handler_does_beside_its_calls_or_in_a_part_of_itself_is_governed(files: InMemoryFilesystem) -> None:
    handlers = {"beside": beside_a_call, "part": in_a_part, "reads": in_a_part_that_reads}
    tools = [Tool[At, Said](name=name, description="A tool.", handler=made) for name, made in handlers.items()]
    with agent(*tools, files=files) as call:
        for name in ("beside", "part"):
            assert "a.txt without having read it" in call(name, "a.txt", "blind").message
        assert files.read("a.txt").content == "one\n"
        assert call("reads", "a.txt", "two\n").success
        call("read_file", "a.txt")
        assert call("part", "a.txt", "seen").success


def test_a_tool_that_is_known_to_declare_its_writes_writes_nothing_else_beside_its_calls(
    files: InMemoryFilesystem,
) -> None:
    def beside(params: At, *, context: ToolContext) -> ToolResult[Said]:
        call = ToolExecutor(prompt=context.prompt, session=context.session).call
        assert call("write_file", {"file_path": "other.txt", "content": "x"}).success
        return touch_all(params, context=context)

    policy = ReadBeforeWritePolicy(write_tools={"write_file", "beside"})
    tool = Tool[At, Said](name="beside", description="A tool.", handler=beside)
    section = MarkdownSection(title="F", key="f", template="F.", tools=[*TOOLS, tool], policies=[policy])
    prompt = Prompt(PromptTemplate(ns="tests", key="beside", sections=[section])).bind(resources={Filesystem: files})
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        assert "not as it had been read" in call("beside", {"file_path": "new.txt"}).message
        call("read_file", {"file_path": "a.txt"})
        assert call("beside", {"file_path": "new.txt"}).success


def test_the_policy_of_a_section_and_that_of_the_prompt_agree_about_a_file_that_was_read(
    files: InMemoryFilesystem,
) -> None:
    section = MarkdownSection(title="F", key="f", template="F.", tools=TOOLS, policies=[ReadBeforeWritePolicy()])
    prompt = Prompt(PromptTemplate(ns="tests", key="both", sections=[section], policies=[ReadBeforeWritePolicy()]))
    with prompt.bind(resources={Filesystem: files}).resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        assert "has not been read" in call("write_file", {"file_path": "a.txt", "content": "x"}).message
        call("read_file", {"file_path": "a.txt"})
        assert call("write_file", {"file_path": "a.txt", "content": "x"}).success
        assert call("move", {"source": "a.txt", "target": "c.txt"}).success
        assert call("rm", {"file_path": "c.txt"}).success


def test_no_filesystem_means_no() -> None:
    with agent() as call:
        assert "no filesystem" in call("write_file", "a.txt", "x").message


def test_a_read_of_no_lines_or_one_that_failed_does_not_count(files: InMemoryFilesystem) -> None:
    def read_and_fail(params: At, *, context: ToolContext) -> ToolResult[Said]:
        read_file(params, context=context)
        raise OSError("lost")

    for handler in (read_nothing, read_and_fail):
        policy = ReadBeforeWritePolicy(read_tools={"peek"})
        peek = Tool[At, Said](name="peek", description="Peek.", handler=handler)
        section = MarkdownSection(title="F", key="f", template="x", tools=[*TOOLS, peek], policies=[policy])
        prompt = Prompt(PromptTemplate(ns="tests", key="peek", sections=[section])).bind(resources={Filesystem: files})
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=Session())
            executor.call("peek", {"file_path": "a.txt"})
            assert not executor.call("write_file", {"file_path": "a.txt", "content": "x"}).success


def test_a_write_that_was_rolled_back_is_not_known(files: InMemoryFilesystem) -> None:
    with agent(files=files) as call:
        assert "failed after" in call("edit_file", "new.txt", "mine").message
        files.write("new.txt", "mine")
        assert not call("write_file", "new.txt", "x").success


def test_what_is_known_of_one_filesystem_or_prompt_is_not_known_of_another(files: InMemoryFilesystem) -> None:
    other, session = InMemoryFilesystem(), Session()
    other.write("a.txt", "one\n")
    with agent(files=files, session=session) as call:
        call("read_file", "a.txt")
    with agent(files=other, session=session) as call:
        assert not call("write_file", "a.txt", "x").success
    with agent(files=files, session=session, key="another") as call:
        assert not call("write_file", "a.txt", "x").success
    with agent(files=files, session=session) as call:
        assert call("write_file", "a.txt", "x").success


def test_a_reset_forgets_what_was_read(files: InMemoryFilesystem) -> None:
    session = Session()
    with agent(files=files, session=session) as call:
        call("read_file", "a.txt")
        session.reset()
        assert not call("write_file", "a.txt", "x").success


def test_the_state_is_a_path_with_the_hash_of_its_bytes(files: InMemoryFilesystem) -> None:
    session = Session()
    with agent(files=files, session=session) as call:
        call("read_file", "./a.txt")
        state = session[PolicyState].latest()
        assert state is not None
        assert state.policy_name == "read_before_write"
        assert ("a.txt", files.content_hash("a.txt")) in state.invoked_keys


@pytest.mark.parametrize(
    ("lines", "said"),
    [("", ""), (" 0-1", "only the lines 1-1 of"), (" 0-0", "no line of"), (" ", "only a part of")],
)
def test_what_an_earlier_version_saved_as_known_counts(files: InMemoryFilesystem, lines: str, said: str) -> None:
    session = Session()
    with agent(files=files, session=session) as call:
        call("read_file", "a.txt")
        state = session[PolicyState].latest()
        assert state is not None
        session[PolicyState].seed(replace(state, invoked_keys={("a.txt", f"{files.content_hash('a.txt')}{lines}")}))
        written = call("write_file", "a.txt", "x")
        assert written.success == (not said)
        assert said in written.message


def test_path_hashes_know_what_makes_them_of_an_earlier_version() -> None:
    first = PathHashes([("a", "1"), ("b", "2")])
    second = first.updated({"c": "3"})
    third = second.updated({"a": None, "b": "4"})
    assert (second.since(first), third.since(second)) == ({"c": "3"}, {"a": None, "b": "4"})
    assert third.since(first) == {"a": None, "b": "4", "c": "3"}
    assert first.since(third) == {"a": "1", "b": "2", "c": None}


def done(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult("done")


def broken(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.error("broken")


def chain(policies: list[Any], **handlers: Any) -> Prompt[Any]:
    tools = [Tool[None, None](name=name, description="A step.", handler=handler) for name, handler in handlers.items()]
    section = MarkdownSection(title="Steps", key="steps", template="Do.", tools=tools)
    return Prompt(PromptTemplate(ns="tests", key="chain", sections=[section], policies=policies))


def test_a_tool_waits_for_the_tools_it_depends_on_to_have_succeeded() -> None:
    policy = SequentialDependencyPolicy({"deploy": {"test", "build"}, "build": frozenset({"lint"})})
    prompt = chain([policy], lint=done, test=broken, build=done, deploy=done)
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=Session())
        assert "build, test" in executor.call("deploy", {}).message
        assert "lint" in executor.call("build", {}).message
        executor.call("lint", {})
        assert executor.call("build", {}).success
        executor.call("test", {})
        assert executor.call("deploy", {}).message.endswith(": test")


@pytest.mark.parametrize("dependencies", [{"a": {"a"}}, {"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"a"}}])
def test_tools_that_wait_for_each_other_are_refused(dependencies: dict[str, set[str]]) -> None:
    with pytest.raises(PromptValidationError, match="wait for each other"):
        SequentialDependencyPolicy(dependencies)


def sections(policies: list[Any], elsewhere: list[Any], **handlers: Any) -> Prompt[Any]:
    """A section with the tool `deploy` and its policies, and another one with the tools of the handlers."""
    own = MarkdownSection(
        title="Deploying",
        template="Deploy.",
        tools=[Tool[None, None](name="deploy", description="Deploy.", handler=done)],
        policies=policies,
    )
    tools = [Tool[None, None](name=name, description="A step.", handler=handler) for name, handler in handlers.items()]
    other = MarkdownSection(title="Steps", template="Do.", tools=tools, policies=elsewhere)
    return Prompt[None](ns="tests", key="sections", sections=[own, other])


@pytest.mark.parametrize(
    "policy", [SequentialDependencyPolicy({"deploy": {"test"}}), RequireCleanTestsPolicy("test", before=["deploy"])]
)
def test_a_policy_of_a_section_hears_of_the_tools_of_another_one(policy: Any) -> None:
    outcomes = iter([broken, done])
    prompt = sections([policy], [], test=lambda params, *, context: next(outcomes)(params, context=context))
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        for succeeds in (False, True):
            assert not call("deploy", {}).success
            assert call("test", {}).success is succeeds
        assert call("deploy", {}).success


def write_a(params: None, *, context: ToolContext) -> ToolResult[None]:
    assert context.filesystem is not None
    context.filesystem.write("a.txt", "x")
    return ToolResult("written")


def test_a_change_by_another_section_s_tool_makes_tests_stale(files: InMemoryFilesystem) -> None:
    prompt = sections([RequireCleanTestsPolicy("test", before=["deploy"])], [], test=done, write=write_a)
    with prompt.bind(resources={Filesystem: files}).resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        assert [call(name, {}).success for name in ("test", "deploy", "write", "deploy")] == [True, True, True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequentialDependencyPolicy({"deploy": "test"}),
        lambda: ReadBeforeWritePolicy(read_tools="read_file"),
        lambda: ReadBeforeWritePolicy(write_tools="write_file"),
    ],
)
def test_a_text_is_not_taken_for_a_list_of_tools(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"put it in brackets"):
        make()


def test_a_link_out_of_the_workspace_may_be_removed_but_not_written_through(files: InMemoryFilesystem) -> None:
    files.symlink("out", "/etc/passwd")
    with agent(files=files) as call:
        assert not call("write_file", "out", "x").success
        assert call("rm", "out").success


def test_a_link_in_a_circle_may_be_moved_and_removed(files: InMemoryFilesystem) -> None:
    files.symlink("link", "link")
    with agent(files=files) as call:
        assert not call("write_file", "link", "x").success
        assert call("move", "link", "other").success
        assert call("rm", "other").success


class Counted(SequentialDependencyPolicy):
    """Overrides `applies_to`, and counts how often a hook is called."""

    def __init__(self) -> None:
        super().__init__({"b": {"a"}})
        self.calls: list[str] = []

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        self.calls.append(f"check {tool.name}")
        return super().check(tool, params, context=context)

    def applies_to(self, tool: Tool[Any, Any], hook: str) -> bool:
        return hook == "check" and tool.name == "b"


def test_a_hook_is_called_for_the_tools_that_it_applies_to() -> None:
    policy = Counted()
    prompt = chain([policy], a=done, b=done)
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        assert call("a", {}).success
        assert not call("b", {}).success
    assert policy.calls == ["check b"]


@pytest.mark.parametrize(
    "name", ["on_results", "checks", "check_effect", "validates", "apply_to", "observes_all_tool", "observe_all_tools"]
)
def test_a_misspelt_hook_is_an_error_when_the_class_is_made(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        type("Misspelt", (BasePolicy,), {"name": "misspelt", name: True if "observe" in name else lambda self: None})


class Structural:
    name = "structural"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return ALLOW

    def on_result(self, tool: Tool[Any, Any], params: Any, result: Any, *, context: ToolContext) -> None:
        return None


def bound(policy: Any) -> PromptTemplate[Any]:
    return PromptTemplate(ns="tests", key="bound", policies=[policy])


@pytest.mark.parametrize("name", ["check_effect", "observes_all_tool", "observes_all_tools", "validate", "applies_to"])
def test_a_class_without_the_base_has_none_of_its_optional_hooks(name: str) -> None:
    bound(Structural())
    policy = Structural()
    setattr(policy, name, (lambda: None) if name == "check_effect" else True)
    with pytest.raises(TypeError, match=name):
        bound(policy)


def test_a_policy_that_overrides_no_hook_is_an_error_when_it_is_bound() -> None:
    with pytest.raises(TypeError, match="no policy"):
        bound(type("Empty", (BasePolicy,), {"name": "empty"})())


class NobodyReads(ReadBeforeWritePolicy):
    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("nothing is read here") if tool.name == "read_file" else ALLOW


def test_a_check_that_overrides_another_is_asked_about_every_tool() -> None:
    prompt = chain([NobodyReads()], read_file=done)
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=Session())
        assert "nothing is read here" in executor.call("read_file", {}).message


class NothingChanges(ReadBeforeWritePolicy):
    def check_effects(self, *_: Any, **__: Any) -> PolicyDecision:
        return PolicyDecision.deny("nothing changes here")


def test_a_look_at_effects_that_overrides_another_is_asked_about_every_tool(files: InMemoryFilesystem) -> None:
    section = MarkdownSection(title="F", key="f", template="F.", tools=TOOLS, policies=[NothingChanges()])
    prompt = Prompt(PromptTemplate(ns="tests", key="own", sections=[section])).bind(resources={Filesystem: files})
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=Session()).call
        assert "nothing changes here" in call("write_file", {"file_path": "new.txt"}).message


def test_a_receipt_names_the_policies_that_had_not_to_be_asked() -> None:
    prompt = chain([ReadBeforeWritePolicy(), SequentialDependencyPolicy({"b": {"a"}})], a=done, b=done)
    with prompt.resources:
        receipt = ToolExecutor(prompt=prompt, session=Session()).execute("a", {}).receipt
    verdicts = [(verdict.policy, verdict.allowed, verdict.reason) for verdict in receipt.policies]
    assert verdicts == [("read_before_write", True, None), ("sequential_dependency", True, None)]
