"""What is put together wrongly is refused where it is put together, in words that lead to what was meant."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringfence import (
    Filesystem,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    PromptValidationError,
    ScriptedAdapter,
    Session,
    Tool,
    ToolContext,
    ToolExecutor,
    ToolResult,
)
from ringfence.failures import describe_error
from ringfence.prompt import PathPolicy, PolicyDecision, ProtectedFilesPolicy, ReadBeforeWritePolicy
from ringfence.runtime import Budget, BudgetTracker, Replace, reducer
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools import VfsToolsSection
from ringfence_tools.printable import why

untyped: Any = "abc"


@dataclass(frozen=True)
class Nothing:
    path: str = "a.txt"


def handler(params: Any, *, context: ToolContext) -> Any:
    return ToolResult("done")


@dataclass(frozen=True)
class Function:
    key: Callable[[int], int]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Function, "Function has no JSON Schema"),
    ],
)
def test_params_that_no_call_could_fit(params: type[Any], words: str) -> None:
    with pytest.raises(PromptValidationError, match=words):
        Tool[params, None](name="a", description="d", handler=handler)


@dataclass(frozen=True)
class Node:
    name: str | None = None
    place: Path = Path("/")
    ratio: float = 1
    below: tuple[Node, ...] = ()
    seen: Sequence[str] = field(default_factory=list[str])


def test_defaults_that_fit_are_taken_of_recursive_params_too() -> None:
    assert Tool[Node, None](name="a", description="d", handler=handler).decode({}) == Node()


def template(policies: Sequence[Any] = ()) -> PromptTemplate[None]:
    tool = Tool[Nothing, None](name="a", description="d", handler=None)
    return PromptTemplate(
        ns="n", key="k", sections=[MarkdownSection(title="T", template="x", tools=[tool])], policies=policies
    )


def test_what_is_no_prompt_and_no_session() -> None:
    wrong: Any = template()
    nobody: Any = None
    adapter = ScriptedAdapter([{"text": "Done."}])
    for make in (
        lambda: ToolExecutor(prompt=wrong, session=Session()),
        lambda: adapter.evaluate(wrong, session=Session()),
    ):
        with pytest.raises(TypeError, match=r"PromptTemplate, not a Prompt: write Prompt\(template\)"):
            make()
    for make in (
        lambda: ToolExecutor(prompt=Prompt(template()), session=nobody),
        lambda: adapter.evaluate(Prompt(template()), session=nobody),
    ):
        with pytest.raises(TypeError, match="the session is a NoneType, not a Session"):
            make()


class Misspelt:
    name = "mine"

    def check_effect(self, *arguments: Any, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("no")


def test_a_misspelt_method_of_a_policy_is_named() -> None:
    with pytest.raises(TypeError, match="check_effect "):
        template([Misspelt()])


@pytest.mark.parametrize("kind", [ProtectedFilesPolicy, ReadBeforeWritePolicy, PathPolicy])
def test_a_class_in_the_place_of_a_policy(kind: Any) -> None:
    said = rf"the class {kind.__name__} in .* is no policy yet: write {kind.__name__}\(\.*\)"
    with pytest.raises(TypeError, match=said):
        template([kind])
    with pytest.raises(TypeError, match=said):
        MarkdownSection(title="T", template="x", policies=[kind])


TOOL = Tool[Nothing, None](name="a", description="d", handler=None)
PART = MarkdownSection(title="T", template="x")


@pytest.mark.parametrize("name", ["deadline", "budget", "budget_tracker", "heartbeat"])
def test_a_limit_that_is_a_number(name: str) -> None:
    wrong: Any = {name: 5}
    adapter = ScriptedAdapter([{"text": "Done."}])
    with pytest.raises(TypeError, match=rf"{name} is a {name.title().replace('_', '')}, not 5"):
        adapter.evaluate(Prompt(template()), session=Session(), **wrong)
    if name != "budget":
        with pytest.raises(TypeError, match=rf"{name} is a "):
            ToolExecutor(prompt=Prompt(template()), session=Session(), **wrong)


def test_a_budget_beside_a_tracker_of_another_one() -> None:
    budget, other = Budget(max_total_tokens=5), Budget(max_total_tokens=6)
    adapter = ScriptedAdapter([{"text": "Done."}])
    with pytest.raises(ValueError, match="two budgets: give one of them"):
        adapter.evaluate(Prompt(template()), session=Session(), budget=budget, budget_tracker=BudgetTracker(other))
    assert not adapter.requests
    adapter.evaluate(Prompt(template()), session=Session(), budget=budget, budget_tracker=BudgetTracker(budget))


def test_a_durability_that_there_is_not(tmp_path: Path) -> None:
    wrong: Any = "Power"
    for make in (Workspace.open, HostFilesystem):
        with pytest.raises(ValueError, match="durability is one of 'process', 'power', not 'Power'"):
            make(tmp_path, durability=wrong)


def test_a_workspace_and_a_path_in_the_place_of_a_filesystem(tmp_path: Path) -> None:
    path: Any = str(tmp_path)
    with pytest.raises(TypeError, match=rf"filesystem is .*Workspace.open\(path\).filesystem.*, not '{tmp_path}'"):
        VfsToolsSection(session=Session(), filesystem=path)
    with Workspace.open(tmp_path) as opened:
        workspace: Any = opened
        with pytest.raises(TypeError, match=r"filesystem is a Filesystem.*, not .*Workspace"):
            VfsToolsSection(session=Session(), filesystem=workspace)
        with pytest.raises(TypeError, match=r"Workspace.* is no Filesystem: .*; give its .filesystem"):
            Prompt(template()).bind(resources={Filesystem: workspace})


def test_a_tool_without_a_handler_does_not_suggest_itself() -> None:
    prompt = Prompt(template())
    with prompt.resources:
        message = ToolExecutor(prompt=prompt, session=Session()).call("a", {}).message
    assert message == "it is only described, and nothing runs the tool 'a'; there are: none"


@dataclass(frozen=True)
class Sum:
    total: int

    @reducer(on=Nothing)
    def add(self, event: Nothing) -> Replace[Sum]:
        return Replace((Sum(self.total + 1),))


def test_an_initial_value_that_is_not_made_by_a_function() -> None:
    session, wrong = Session(), Sum(5)
    made: Any = wrong
    with pytest.raises(TypeError, match=r"initial is what makes the first Sum, such as lambda: Sum\(...\)"):
        session.install(Sum, initial=made)
    session.install(Sum, initial=lambda: wrong)
    session.dispatch(Nothing())
    assert session[Sum].latest() == Sum(6)


def test_half_a_surrogate_pair_is_told_without_a_way_that_a_model_has_not() -> None:
    session = Session()
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[VfsToolsSection(session=session)]))
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=session).call
        message = call("write_file", {"file_path": "a.txt", "content": "x\ud800"}).message
    assert "write_bytes" not in message
    assert "surrogate" in message


def test_an_error_that_says_its_kind_says_it_once() -> None:
    assert describe_error(AttributeError("AttributeError: no such thing")) == "AttributeError: no such thing"


def test_a_path_that_an_error_quotes_is_escaped_once() -> None:
    assert (
        describe_error(ValueError("a path cannot have a NUL: " + repr("a\0b") + "\n"))
        == r"a path cannot have a NUL: 'a\x00b'\x0a"
    )
    assert describe_error(OSError(1, "no\tway", r"a\x0ab")) == r"a\x5cx0ab: no\x09way"


@pytest.mark.parametrize(
    "words", ["is outside of the workspace root", "was changed", "has no parent", "cannot be read"]
)
def test_words_that_go_on_a_sentence_about_a_path_follow_it_at_once(words: str) -> None:
    assert describe_error(PermissionError(13, words, "a.txt")) == f"a.txt {words}"
    assert describe_error(PermissionError(13, "Is a directory", "a.txt")) == "a.txt: Is a directory"
    assert describe_error(PermissionError(13, "the root cannot be moved", "")) == "the root cannot be moved"


@pytest.mark.parametrize(
    ("error", "said", "limit"),
    [
        (OSError(errno.EMFILE, "Too many open files", "a.txt"), "a.txt: Too many open files: ", "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "Too many open files in system: ", "fs.file-max"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily un", "ulimit -u"),
        (RuntimeError("can't start new thread"), "can't start new thread: ", "ulimit -u"),
    ],
)
def test_a_limit_of_the_system_is_named_with_what_raises_it(error: Exception, said: str, limit: str) -> None:
    assert describe_error(error).startswith(said)
    assert (f"`{limit}`" in describe_error(error), f"`{limit}`" in why(error)) == (True, True)
    assert describe_error(ExceptionGroup("unhandled errors in a TaskGroup", [error])) == describe_error(error)
