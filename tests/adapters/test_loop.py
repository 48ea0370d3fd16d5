"""The evaluation loop, driven by a model that is written down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ringfence import Filesystem, InMemoryFilesystem
from ringfence.adapters import (
    Conversation,
    Message,
    ModelTurn,
    PromptEvaluationError,
    ScriptedAdapter,
    ToolCall,
    ToolExecutor,
    Turn,
)
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import (
    Budget,
    BudgetTracker,
    Deadline,
    PromptExecuted,
    PromptRendered,
    Receipt,
    RenderedTools,
    Session,
    ToolInvoked,
)


@dataclass(frozen=True)
class Echo:
    text: str = "x"

    def render(self) -> str:
        return f"<{self.text}>"


@dataclass(frozen=True)
class Verdict:
    good: bool
    reason: str = ""


def echo(params: Echo, *, context: ToolContext) -> ToolResult[Echo]:
    if context.filesystem is not None:
        context.filesystem.write("log", params.text, mode="append")
    return ToolResult.ok(params, message="echoed") if params.text != "fail" else ToolResult.error("no")


TOOL = Tool[Echo, Echo](name="echo", description="Echo.", handler=echo)


def prompt(output: Any = None, **options: Any) -> Prompt[Any]:
    section = MarkdownSection(title="Task", key="task", template="Echo things.", tools=[TOOL])
    template = PromptTemplate[output] if output is not None else PromptTemplate
    return Prompt(template(ns="tests", key="loop", name="looping", sections=[section], **options))


def calls(*texts: Any) -> dict[str, Any]:
    return {"text": "thinking", "tool_calls": [{"name": "echo", "arguments": {"text": text}} for text in texts]}


def test_the_model_is_sent_the_prompt_its_own_turns_and_every_answer() -> None:
    adapter = ScriptedAdapter([calls("a", "fail"), {"text": "done"}])
    adapter.evaluate(prompt(), session=Session())
    first, second = adapter.requests
    assert [m["role"] for m in first["messages"]] == ["system"]
    assert "Echo things." in first["messages"][0]["content"]
    (tool,) = first["tools"]
    assert tool["function"]["name"] == "echo"
    assert tool["function"]["parameters"]["additionalProperties"] is False
    _, assistant, one, two = second["messages"]
    assert assistant["content"] == "thinking"
    ids = [c["id"] for c in assistant["tool_calls"]]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in (one, two)] == [
        ("tool", ids[0], "echoed\n\n<a>"),
        ("tool", ids[1], "no"),
    ]


def test_a_structured_output_is_parsed() -> None:
    adapter, session = ScriptedAdapter([{"text": '```json\n{"good": true}\n```'}]), Session()
    response = adapter.evaluate(prompt(Verdict), session=session)
    assert (response.output, response.text) == (Verdict(good=True), None)
    assert session[Verdict].latest() == Verdict(good=True)
    schema = adapter.requests[0]["response_format"]["json_schema"]["schema"]
    assert set(schema["properties"]) == {"good", "reason"}


def test_a_script_that_has_run_out_says_so() -> None:
    with pytest.raises(PromptEvaluationError, match="no turn left.* calls none"):
        ScriptedAdapter([calls("a")]).evaluate(prompt(), session=Session())


def test_requests_share_what_they_have_in_common_so_that_a_long_conversation_is_kept_once() -> None:
    adapter = ScriptedAdapter([*[calls("again")] * 20, {"text": "done"}])
    adapter.evaluate(prompt(), session=Session())
    assert [len(request["messages"]) for request in adapter.requests] == list(range(1, 42, 2))
    for part, distinct in (("messages", 40 + 21), ("tools", 1)):  # instructions are rendered for each request
        assert len({id(one) for request in adapter.requests for one in request[part]}) == distinct


def test_a_model_that_goes_in_circles_is_stopped() -> None:
    adapter = ScriptedAdapter(lambda conversation: calls("again"), max_turns=5)
    with pytest.raises(PromptEvaluationError, match="5 turns") as caught:
        adapter.evaluate(prompt(), session=Session())
    assert caught.value.phase == "budget"
    assert len(adapter.requests) == 5


def test_a_function_sees_the_conversation_so_far() -> None:
    def model(conversation: Any) -> dict[str, Any]:
        last = conversation[-1]
        return calls("a") if last["role"] == "system" else {"text": f"got {last['content']!r}"}

    assert ScriptedAdapter(model).evaluate(prompt(), session=Session()).text == "got 'echoed\\n\\n<a>'"


def test_a_script_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"tool_calls": [{"name": "echo", "arguments": "{}"}]}\n\n{"text": "dõne"}\n', encoding="utf-8")
    assert ScriptedAdapter(path).evaluate(prompt(), session=Session()).text == "dõne"
    assert ScriptedAdapter(str(path)).evaluate(prompt(), session=Session()).text == "dõne"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"txt": "a"}', "txt"),
        ('{"tool_calls": [{"arguments": {}}]}', "name"),
        ('{"tool_calls": [{"name": "a", "arguments": 3}]}', "arguments"),
        ('{"tool_calls": {}}', "tool_calls"),
        ('{"usage": {"tokens": 1}}', "tokens"),
        ('{"usage": {"input_tokens": "1"}}', "whole numbers"),
        ('{"text": 3}', "text"),
    ],
)
def test_a_malformed_script_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        ScriptedAdapter(path)
    assert said in str(caught.value)


START = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_deadline_of_a_budget_is_looked_at_before_each_tool_call() -> None:
    now, session = [START], Session()

    def slow(event: ToolInvoked) -> None:
        now[0] += timedelta(seconds=9)

    session.dispatcher.subscribe(ToolInvoked, slow)
    budget = Budget(deadline=Deadline(START + timedelta(seconds=5), START, lambda: now[0]))
    with pytest.raises(PromptEvaluationError) as caught:
        ScriptedAdapter([calls("a", "b")]).evaluate(prompt(), session=session, budget=budget)
    assert caught.value.phase == "tool"
    assert [invoked.result.success for invoked in session[ToolInvoked].all()] == [True, False]


def test_a_limit_of_tokens_that_nobody_counts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    turns = [calls("a"), calls("b"), {"text": "done"}]
    ScriptedAdapter(turns).evaluate(prompt(), session=Session(), budget=Budget(max_total_tokens=1))
    assert len(caplog.records) == 1
    caplog.clear()
    told = [{**turn, "usage": {"input_tokens": 1, "output_tokens": 1}} for turn in turns]
    ScriptedAdapter(told).evaluate(prompt(), session=Session(), budget=Budget(max_total_tokens=100))
    ScriptedAdapter(turns).evaluate(prompt(), session=Session(), budget=Budget(deadline=Deadline.after(60)))
    assert not caplog.text


@pytest.mark.parametrize("usage", [{}, {"usage": {"input_tokens": 1, "output_tokens": 1}}])
@pytest.mark.parametrize("around", [False, True])
def test_a_limit_of_cost_with_a_model_of_unknown_cost_ends_at_its_first_turn(usage: Any, around: bool) -> None:
    tracker = BudgetTracker(Budget(max_cost_usd=1.0))
    if around:
        tracker = BudgetTracker(Budget(max_total_tokens=100), parent=tracker)
    session = Session()
    with pytest.raises(PromptEvaluationError, match="nobody knows what a turn of scripted costs") as caught:
        adapter = ScriptedAdapter([{**calls("a"), **usage}, {"text": "done"}])
        adapter.evaluate(prompt(), session=session, budget_tracker=tracker)
    assert caught.value.phase == "budget"
    assert not session[ToolInvoked].all()


def test_a_turn_that_breaks_the_budget_runs_no_tool() -> None:
    turns = [{**calls("a"), "usage": {"input_tokens": 40, "output_tokens": 2}} for _ in range(5)]
    session = Session()
    with pytest.raises(PromptEvaluationError):
        ScriptedAdapter(turns).evaluate(prompt(), session=session, budget=Budget(max_total_tokens=100))
    assert len(session[ToolInvoked].all()) == 2


def test_events_say_what_was_rendered_offered_and_answered() -> None:
    session, heard = Session(), []
    for kind in (PromptRendered, RenderedTools, ModelTurn, ToolInvoked, PromptExecuted):
        session.dispatcher.subscribe(kind, heard.append)
    ScriptedAdapter([calls("a"), {"text": "done"}]).evaluate(prompt(), session=session)
    assert [type(event).__name__ for event in heard] == [
        "PromptRendered",
        "RenderedTools",
        "ModelTurn",
        "ToolInvoked",
        "ModelTurn",
        "PromptExecuted",
    ]
    assert len(session[ToolInvoked].all()) == 1


def test_an_observer_that_fails_does_not_end_the_evaluation() -> None:
    session = Session()
    for kind in (PromptRendered, RenderedTools, ModelTurn, ToolInvoked, PromptExecuted):
        session.dispatcher.subscribe(kind, lambda event: 1 / 0)
    assert ScriptedAdapter([calls("a"), {"text": "done"}]).evaluate(prompt(), session=session).text == "done"


def test_a_handler_finds_the_deadline_and_the_descriptor_in_the_rendering() -> None:
    seen: list[ToolContext] = []

    def look(params: None, *, context: ToolContext) -> ToolResult[None]:
        seen.append(context)
        return ToolResult("seen")

    tool = Tool[None, None](name="look", description="Look.", handler=look)
    looking = Prompt[None](ns="t", key="t", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    late, soon = Deadline.after(600), Deadline.after(60)
    turns = [{"tool_calls": [{"name": "look"}]}, {"text": "done"}]
    tracker = BudgetTracker(Budget(deadline=soon))
    ScriptedAdapter(turns).evaluate(looking, session=Session(), deadline=late, budget_tracker=tracker)
    with looking.resources:
        ToolExecutor(prompt=looking, session=Session(), deadline=late).call("look", {})
    rendered = [context.rendered_prompt for context in seen if context.rendered_prompt is not None]
    assert [one.deadline for one in rendered] == [soon, late]
    assert [one.descriptor for one in rendered] == [looking.descriptor] * 2
    plain = looking.render()
    assert (plain.deadline, plain.descriptor) == (None, looking.descriptor)


def answers(adapter: ScriptedAdapter) -> list[str]:
    return [message["content"] for message in adapter.requests[-1]["messages"] if message["role"] == "tool"]


def test_from_the_third_equal_call_with_an_equal_answer_the_model_is_told_how_often() -> None:
    turns = [calls("fail"), calls("fail", "a"), calls("fail"), calls("a"), calls("a", "fail"), {"text": "done"}]
    adapter = ScriptedAdapter(turns)
    adapter.evaluate(prompt(), session=Session())
    told = [answer[:25] for answer in answers(adapter)]
    assert told == [
        *("no", "no", "echoed\n\n<a>", "[You made this call 3 tim", "echoed\n\n<a>"),
        *("[You made this call 3 tim", "[You made this call 4 tim"),
    ]
    assert answers(adapter)[-1].endswith("]\n\nno")


def test_a_call_is_not_repeated_where_a_file_changed_meanwhile() -> None:
    files = prompt().bind(resources={Filesystem: InMemoryFilesystem()})
    adapter = ScriptedAdapter([*[calls("fail", "fail", "a")] * 4, {"text": "done"}])
    adapter.evaluate(files, session=Session())
    assert not any("You made this call" in answer for answer in answers(adapter))


def test_a_model_that_repeats_itself_is_stopped_where_there_is_a_limit() -> None:
    adapter, session = ScriptedAdapter(lambda conversation: calls("fail")), Session()
    adapter.max_repeats = 4
    with pytest.raises(PromptEvaluationError, match="echo was called 4 times alike") as caught:
        adapter.evaluate(prompt(), session=session)
    assert caught.value.phase == "budget"
    assert len(session[ToolInvoked].all()) == 4


CALL = '{"name": "echo", "arguments": {"text": "a"}}'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{CALL}</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        f"<tool_call>{CALL}",
        f"<think>I should echo.</think>\n<tool_call>{CALL}</tool_call>",
        "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        f"[TOOL_CALLS][{CALL}]",
        '[TOOL_CALLS]echo[ARGS]{"text": "a"}',
        "<function=echo><parameter=text>a</parameter></function>",
        f"<|tool_call|>[{CALL}]",
        f"<|tool_calls_section_begin|><|tool_call_begin|>{CALL}<|tool_call_end|>",
        f"<\uff5ctool\u2581calls\u2581begin\uff5c>{CALL}<\uff5ctool\u2581calls\u2581end\uff5c>",
        f"<|python_tag|>{CALL}",
        f"```json\n{CALL}\n```",
        f"```\n[{CALL}, {CALL}]\n```",
        CALL,
        CALL.replace("arguments", "parameters"),
        f'{{"type": "function", "function": {CALL}}}',
        "<think>I am done.</think>",
        "<think>I have not come to an end",
        "<thinking>Hm.</thinking>\n\n",
    ],
)
def test_a_call_as_text_or_reasoning_alone_is_asked_for_again_and_is_no_answer(text: str) -> None:
    adapter = ScriptedAdapter([{"text": text}, calls("a"), {"text": "done"}])
    assert adapter.evaluate(prompt(), session=Session()).text == "done"
    told = adapter.requests[1]["messages"][-1]
    assert (told["role"], "say what was done" in told["content"]) == ("user", True)
    with pytest.raises(PromptEvaluationError) as caught:
        ScriptedAdapter([{"text": text}] * 3).evaluate(prompt(), session=Session())
    assert caught.value.phase == "response"


@pytest.mark.parametrize(
    "text",
    [
        f"The model wrote <tool_call>{CALL}</tool_call> and stopped.",
        f"<tool_call>{CALL}</tool_call> is how a call is written.",
        f"It is called so:\n```json\n{CALL}\n```",
        f"```json\n{CALL}\n```\nis how it is called.",
        CALL.replace("echo", "another"),
        '{"name": "echo", "version": 1}',
        '["echo"]',
        "[]",
        "{}",
        "7",
        "<think>Hm.</think> All done.",
        "All done. <think>",
        "<html></html>",
    ],
)
def test_an_answer_that_quotes_a_call_is_an_answer(text: str) -> None:
    assert ScriptedAdapter([{"text": text}]).evaluate(prompt(), session=Session()).text == text


def test_a_call_as_text_is_an_answer_where_there_are_no_tools() -> None:
    bare = Prompt[None](ns="t", key="t", sections=[MarkdownSection(title="T", template="x")])
    assert ScriptedAdapter([{"text": CALL}]).evaluate(bare, session=Session()).text == CALL


def test_the_last_call_of_a_cut_answer_does_not_run_when_the_conversation_goes_on_later() -> None:
    turn = Turn("", (ToolCall("one", "echo", {"text": "a"}), ToolCall("two", "echo", {"text": "b"})), ended="cut")
    session = Session()
    session[Conversation].seed(Conversation("looping", (Message("assistant", "", turn),)))
    ScriptedAdapter([{"text": "done"}]).evaluate(prompt(), session=session)
    assert [receipt.outcome for receipt in session[Receipt].all()] == ["committed", "rejected"]


@pytest.mark.parametrize(
    "result",
    [
        ToolResult.ok(Echo("v"), message="m"),
        ToolResult("", Echo("v")),
        ToolResult("m", Echo("v"), success=False),
        ToolResult("m", Echo("v"), exclude_value_from_context=True),
        ToolResult[Echo]("m"),
    ],
)
def test_the_event_of_a_call_has_what_the_model_was_sent(result: ToolResult[Echo]) -> None:
    tool = Tool[None, Echo](name="act", description="Act.", handler=lambda params, *, context: result)
    acting = Prompt[None](ns="t", key="t", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    adapter, session = ScriptedAdapter([{"tool_calls": [{"name": "act"}]}, {"text": "done"}]), Session()
    adapter.evaluate(acting, session=session)
    invoked = session[ToolInvoked].latest()
    assert invoked is not None
    sent = [text for text in (invoked.result.message, invoked.rendered_output) if text]
    assert adapter.requests[1]["messages"][-1]["content"] == "\n\n".join(sent)
    assert invoked.result == result
