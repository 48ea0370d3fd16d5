"""What a tool must be to be constructed, and what it knows then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ringfence import PromptValidationError
from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolExample, ToolResult
from ringfence.runtime import Budget, BudgetTracker, Deadline, Heartbeat, Session


@dataclass(frozen=True)
class Params:
    text: str = field(metadata={"description": "What to say."})


@dataclass(frozen=True)
class Result:
    said: str


@dataclass(frozen=True)
class Other:
    value: int


def say(params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result(params.text))


def make(**changes: Any) -> Tool[Params, Result]:
    return Tool[Params, Result](**{"name": "say", "description": "Say it.", "handler": say, **changes})


def test_types_come_from_the_type_arguments() -> None:
    tool = make()
    assert (tool.params_type, tool.result_type, tool.result_container) == (Params, Result, "object")
    assert tool.decode({"text": "a"}) == Params("a")


def test_types_come_from_the_handlers_annotations_where_arguments_are_left_out() -> None:
    tool = Tool(name="say", description="Say it.", handler=say)
    assert (tool.params_type, tool.result_type) == (Params, Result)


def test_no_types_at_all_are_refused() -> None:
    with pytest.raises(PromptValidationError, match=r"Tool\[Params, Result\]"):
        Tool(name="say", description="Say it.", handler=lambda params, *, context: ToolResult.ok(Result("a")))


def test_a_tool_with_type_arguments_is_a_plain_tool_and_a_value() -> None:
    assert type(make()) is Tool
    assert make() == make()
    assert replace(make(handler=None), name="other").params_type is Params


@pytest.mark.parametrize("name", ["", "Say", "say it", "say\n", "ä", "a" * 65, "say.it", " say"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(PromptValidationError) as caught:
        make(name=name)
    assert caught.value.placeholder == name


@pytest.mark.parametrize("description", ["", "   ", "é", "a" * 201])
def test_a_bad_description_is_refused(description: str) -> None:
    with pytest.raises(PromptValidationError):
        make(description=description)


@pytest.mark.parametrize(
    "types", [(dict, Result), (Params, int), (int, Result), (Params, tuple[Result, Other]), (Params, Result | None)]
)
def test_types_of_other_shapes_are_refused(types: tuple[Any, Any]) -> None:
    with pytest.raises(PromptValidationError):
        Tool[types[0], types[1]](name="say", description="Say it.", handler=None)


@pytest.mark.parametrize("kind", [list[Result], Sequence[Result], tuple[Result, ...]])
def test_a_result_may_be_many_of_one_dataclass(kind: Any) -> None:
    tool = Tool[Params, kind](name="say", description="Say it.", handler=None)
    assert (tool.result_type, tool.result_container) == (Result, "array")


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        (Mapping[str, int], {"a": 1}, ["a"]),
        (dict[str, int], {"a": 1}, "a"),
        (Sequence[str], ("a", "b"), "ab"),
        (list[int | str], [1, "a"], {"a": 1}),
        (str, "a", 1),
    ],
)
def test_a_result_may_be_a_mapping_a_sequence_or_text(kind: Any, value: object, other: object) -> None:
    def answer(params: Params, *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(value if params.text == "fits" else other, "answered")

    example = ToolExample("An answer.", Params("fits"), value)
    tool = Tool[Params, kind](name="answer", description="Answer.", handler=answer, examples=(example,))
    prompt = Prompt(PromptTemplate(ns="t", key="r", sections=[MarkdownSection(title="T", template="T", tools=[tool])]))
    executor = ToolExecutor(prompt=prompt, session=Session())
    with prompt.resources:
        assert executor.call("answer", {"text": "fits"}).value == value
        assert not executor.call("answer", {"text": "other"}).success


def positional_context(params: Params, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


class Callable_:
    def __call__(self, params: Params, *, context: ToolContext) -> ToolResult[Result]:
        return ToolResult.ok(Result("x"))

    def method(self, params: Params, *, context: ToolContext) -> ToolResult[Result]:
        return ToolResult.ok(Result("x"))


def with_extra(prefix: str, params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result(prefix))


@pytest.mark.parametrize(
    "handler",
    [
        say,
        positional_context,
        Callable_(),
        Callable_().method,
        functools.partial(with_extra, "p"),
        lambda params, **kw: ToolResult.ok(Result("x")),
        lambda params, *, context, extra=1: ToolResult.ok(Result("x")),
    ],
)
def test_a_handler_may_be_anything_that_takes_params_and_context(handler: Any) -> None:
    assert make(handler=handler).handler is handler


def no_context(params: Params) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


def no_params(*, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


async def asynchronous(params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


def generator(params: Params, *, context: ToolContext) -> Any:
    yield ToolResult.ok(Result("x"))


def wrong_params(params: Other, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


def wrong_result(params: Params, *, context: ToolContext) -> ToolResult[Other]:
    return ToolResult.ok(Other(1))


@pytest.mark.parametrize(
    "handler", [no_context, no_params, asynchronous, generator, wrong_params, wrong_result, "say", 3]
)
def test_a_handler_that_cannot_work_is_refused(handler: Any) -> None:
    with pytest.raises(PromptValidationError):
        make(handler=handler)


@pytest.mark.parametrize(
    "example",
    [
        ToolExample("", Params("a"), Result("a")),
        ToolExample("x" * 201, Params("a"), Result("a")),
        ToolExample("fits", Other(1), Result("a")),
        ToolExample("fits", None, Result("a")),
        ToolExample("fits", Params("a"), None),
        ToolExample("fits", Params("a"), [Result("a")]),
    ],
)
def test_an_example_that_does_not_fit_is_refused(example: Any) -> None:
    with pytest.raises(PromptValidationError):
        make(examples=(example,))


def test_an_example_of_an_array_result_is_a_sequence() -> None:
    example = ToolExample("Two.", None, (Result("a"), Result("b")))
    tool = Tool[None, list[Result]](name="all", description="All.", handler=None, examples=[example])
    assert tool.examples == (example,)


def test_a_tool_without_params_takes_no_arguments() -> None:
    tool = Tool[None, Result](name="now", description="Now.", handler=None)
    assert tool.decode({}) is None
    assert tool.decode("{}") is None
    with pytest.raises(ValueError, match="takes no arguments"):
        tool.decode({"tz": "UTC"})


def test_wrap_takes_everything_from_the_function() -> None:
    def look_up(params: Params, *, context: ToolContext) -> ToolResult[Result]:
        """Look it up.

        Args:
            params: what to look up.
        """
        return ToolResult.ok(Result(params.text))

    tool = Tool.wrap(look_up)
    assert (tool.name, tool.description, tool.params_type) == ("look_up", "Look it up.", Params)


@dataclass(frozen=True)
class Short:
    text: str = field(metadata={"max_length": 3})


def test_an_example_that_the_tool_would_refuse_is_refused() -> None:
    example = ToolExample(description="Too long.", input=Short("four"), output=Result("x"))
    with pytest.raises(PromptValidationError, match="a call like its example is refused: text: "):
        Tool[Short, Result](name="short", description="Short.", handler=None, examples=(example,))


def undocumented(params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result("x"))


def too_much(params: Params, more: int, *, context: ToolContext) -> ToolResult[Result]:
    """Too much."""
    return ToolResult.ok(Result("x"))


def unannotated(params, *, context):  # type: ignore[no-untyped-def]
    """Unannotated."""
    return ToolResult.ok(Result("x"))


@pytest.mark.parametrize("function", [undocumented, too_much, unannotated])
def test_wrap_refuses_a_function_that_does_not_say_enough(function: Callable[..., Any]) -> None:
    with pytest.raises(PromptValidationError):
        Tool.wrap(function)


def test_a_handler_is_called_with_a_context_that_a_test_makes() -> None:
    session, adapter = Session(), ScriptedAdapter([])
    prompt = Prompt(PromptTemplate[None](ns="tests", key="context"))
    deadline, tracker, heartbeat = Deadline.after(60), BudgetTracker(Budget(max_total_tokens=5)), Heartbeat()
    context = ToolContext(
        prompt=prompt,
        rendered_prompt=None,
        adapter=adapter,
        session=session,
        deadline=deadline,
        budget_tracker=tracker,
        heartbeat=heartbeat,
    )
    assert (context.prompt, context.rendered_prompt, context.adapter, context.session) == (
        prompt, None, adapter, session,
    )  # fmt: skip
    assert (context.deadline, context.budget_tracker, context.heartbeat) == (deadline, tracker, heartbeat)
    assert context.event_bus is session.dispatcher
    assert (context.changes, context.reads) == ((), {})
    with prompt.resources:
        plain = ToolContext(prompt, None, None, session)
        plain.beat()
        assert (plain.deadline, plain.budget_tracker, plain.filesystem) == (None, None, None)
    with pytest.raises(TypeError, match="deadline is a Deadline"):
        ToolContext(prompt, None, None, session, deadline=60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
