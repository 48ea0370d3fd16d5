"""The contract suite of adapters, for any provider."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ringfence.adapters.model import ModelTurn
from ringfence.errors import PromptEvaluationError
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.protocol import Filesystem
from ringfence.limits import Budget, BudgetTracker, Deadline, Heartbeat
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.provider_adapter import ProviderAdapter
from ringfence.prompt.section import MarkdownSection
from ringfence.receipts import Receipt
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool, ToolExample
from ringfence.session.events import PromptExecuted, PromptResponse, ToolInvoked
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult

Turns = Sequence[Mapping[str, Any]]

USED = {"input_tokens": 100, "output_tokens": 10, "cached_tokens": 40}


@dataclass(frozen=True)
class Note:
    text: str = "x"
    times: int = 1


@dataclass(frozen=True)
class Claim:
    title: str
    certain: bool = True


def note(params: Note, *, context: ToolContext) -> ToolResult[Note]:
    """Write first, so that a failure has something to roll back."""
    assert context.filesystem is not None
    context.filesystem.write("notes", params.text * params.times, mode="append")
    if params.text == "raise":
        raise OSError("the disk is on fire")
    return ToolResult.error("no such note") if params.text == "fail" else ToolResult.ok(params, "noted")


def nest(params: Note, *, context: ToolContext) -> ToolResult[Note]:
    """Evaluate a child prompt with the adapter and the session of the call."""
    assert context.adapter is not None
    response = context.adapter.evaluate(_prompt("child").bind(), session=context.session)
    return ToolResult.ok(Note(response.text or ""))


def _prompt(key: str, output: Any = None) -> Prompt[Any]:
    example = ToolExample(description="A note.", input=Note("milk"), output=Note("milk"))
    tools: list[Tool[Any, Any]] = [
        Tool[Note, Note](name="note", description="Write a note.", handler=note, examples=(example,)),
        Tool[Note, Note](name="nest", description="Ask a child.", handler=nest),
    ]
    section = MarkdownSection(title="Task", key="task", template="Write notes.", tools=tools)
    template: Any = PromptTemplate if output is None else PromptTemplate[output]
    return Prompt(template(ns="contract", key=key, sections=[section]))


def called(*texts: object) -> dict[str, Any]:
    return {"text": "so be it", "tool_calls": [_call("note", {"text": text}) for text in texts]}


def _call(name: str, arguments: object) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


class AdapterContract:
    """Subclass it in a test, as ``class TestMyAdapter(AdapterContract)``, with `adapter`."""

    def adapter(self, turns: Turns) -> AbstractContextManager[ProviderAdapter]:
        """An adapter whose model answers with these turns, which are as of a `ScriptedAdapter`."""
        raise NotImplementedError

    def evaluated(self, turns: Turns, output: Any = None, **options: Any) -> tuple[PromptResponse[Any], Session, str]:
        """Evaluate a prompt. Return the response, the session, and the text that the tools noted."""
        session, files = Session(), InMemoryFilesystem()
        prompt = _prompt("main", output).bind(resources={Filesystem: files})
        with self.adapter(turns) as adapter, prompt.resources:
            response = adapter.evaluate(prompt, session=session, **options)
        return response, session, files.read("notes").content if files.exists("notes") else ""

    def refused(self, turns: Turns, output: Any = None, **options: Any) -> PromptEvaluationError:
        try:
            response, _, _ = self.evaluated(turns, output, **options)
        except PromptEvaluationError as error:
            return error
        raise AssertionError(f"it was answered: {response}")

    def test_text_is_the_answer(self) -> None:
        response, session, notes = self.evaluated([{"text": "Done: é 🎉"}])
        assert (response.text, response.output, notes) == ("Done: é 🎉", None, "")
        assert session[PromptExecuted].latest() is not None

    def test_tools_run_until_there_is_an_answer(self) -> None:
        response, session, notes = self.evaluated([called("a"), called("b"), {"text": "Done."}])
        assert (response.text, notes) == ("Done.", "ab")
        assert [invoked.params for invoked in session[ToolInvoked].all()] == [Note("a"), Note("b")]

    def test_many_calls_of_one_turn_run_in_their_order(self) -> None:
        letters = "abcdefghijklmnopqrst"
        _, session, notes = self.evaluated([called(*letters), {"text": "Done."}])
        assert notes == letters
        assert len({receipt.call_id for receipt in session[Receipt].all()}) == len(letters)

    def test_each_call_of_a_turn_is_a_transaction_of_its_own(self) -> None:
        _, session, notes = self.evaluated([called("a", "fail", "b", "raise", "c"), {"text": "Done."}])
        assert notes == "abc"
        outcomes = [receipt.outcome for receipt in session[Receipt].all()]
        assert outcomes == ["committed", "failed", "committed", "failed", "committed"]

    def test_a_malformed_call_is_answered_and_changes_nothing(self) -> None:
        bad = [
            _call("delete_everything", {}),
            _call("no/such tool!", {"text": "a"}),
            _call("note", '{"text": "half'),
            _call("note", "[1, 2]"),
            _call("note", '{"text": "a", "text": "b"}'),
            _call("note", {"text": "a", "sudo": True}),
            _call("note", {"text": 3}),
            _call("note", '{"times": NaN}'),
        ]
        response, session, notes = self.evaluated([{"tool_calls": bad}, called("good"), {"text": "Done."}])
        assert (response.text, notes) == ("Done.", "good")
        assert [receipt.outcome for receipt in session[Receipt].all()] == ["rejected"] * len(bad) + ["committed"]

    def test_calls_with_one_id_are_distinguished(self) -> None:
        twins = {"tool_calls": [{**_call("note", {"text": text}), "id": "same"} for text in "ab"]}
        _, session, notes = self.evaluated([twins, twins, {"text": "Done."}])
        assert notes == "abab"
        assert len({invoked.params for invoked in session[ToolInvoked].all()}) == 2

    def test_a_nested_evaluation_is_part_of_the_call(self) -> None:
        turns = [{"tool_calls": [_call("nest", {})]}, {"text": "from the child"}, {"text": "Done."}]
        response, session, _ = self.evaluated(turns)
        assert response.text == "Done."
        assert [invoked.result.value for invoked in session[ToolInvoked].all()] == [Note("from the child")]

    def test_nothing_a_refusal_and_half_an_answer_are_none(self) -> None:
        refusal, half = {"text": "I must not.", "ended": "refused"}, {"text": "The thing is", "ended": "cut"}
        for turns, word in (([{"text": ""}] * 3, "nothing"), ([refusal], "refused"), ([half] * 3, "cut off")):
            error = self.refused(turns)
            assert error.phase == "response"
            assert word in str(error)

    def test_what_is_no_answer_is_asked_for_again(self) -> None:
        for none in ({"text": ""}, {"text": "The thing is", "ended": "cut"}):
            response, *_ = self.evaluated([called("a"), none, none, called("b"), none, {"text": "Done."}])
            assert response.text == "Done."
        response, *_ = self.evaluated([{"text": "no json"}, {"text": '{"title": "one"}'}], Claim)
        assert response.output == Claim("one")

    def test_the_last_call_of_an_answer_that_was_cut_off_never_runs(self) -> None:
        used = {"input_tokens": 100, "output_tokens": 4096}
        turns = [
            {"tool_calls": [_call("note", {"text": "a"}), _call("note", '{"text": "b')], "ended": "cut"},
            {"tool_calls": [_call("note", "")], "ended": "cut"},
            {"tool_calls": [_call("note", {})], "ended": "cut"},
            {"text": "First:", "tool_calls": [_call("note", {"text": "c"})], "ended": "cut", "usage": used},
            {"text": "Done."},
        ]
        response, session, notes = self.evaluated(turns)
        assert (response.text, notes) == ("Done.", "a")
        receipts = session[Receipt].all()
        assert [receipt.outcome for receipt in receipts] == ["committed", *["rejected"] * 4]
        assert all("cut off at the limit" in receipt.message for receipt in receipts[1:])
        assert "4,096 tokens" in receipts[-1].message

    def test_an_object_is_an_answer(self) -> None:
        response, session, _ = self.evaluated([called("a"), {"text": json.dumps({"title": "one"})}], Claim)
        assert (response.output, response.text) == (Claim("one"), None)
        assert session[Claim].latest() == Claim("one")

    def test_a_list_is_an_answer(self) -> None:
        items = [{"title": "one"}, {"title": "two", "certain": False}]
        response, _, _ = self.evaluated([{"text": json.dumps({"items": items})}], list[Claim])
        output: Any = response.output
        assert output == [Claim("one"), Claim("two", certain=False)]
        assert [finding.certain for finding in output] == [True, False]

    def test_an_answer_of_another_type_is_none(self) -> None:
        for text in ("no json", '{"titel": "one"}', "[]", '{"title": 1}'):
            assert self.refused([{"text": text}] * 3, Claim).phase == "response"

    def test_tokens_add_up_in_the_budget(self) -> None:
        tracker = BudgetTracker(Budget(max_total_tokens=10_000))
        turns = [{**called("a"), "usage": USED}, {"text": "Done.", "usage": USED}]
        _, session, _ = self.evaluated(turns, budget_tracker=tracker)
        both = tracker.consumed
        assert (both.input_tokens, both.output_tokens, both.cached_tokens) == (200, 20, 80)
        executed = session[PromptExecuted].latest()
        assert executed is not None
        assert executed.usage == both

    def test_a_budget_that_is_used_up_ends_the_evaluation(self) -> None:
        turns = [{**called("a"), "usage": USED}, {**called("b"), "usage": USED}, {"text": "Done."}]
        assert self.refused(turns, budget=Budget(max_total_tokens=150)).phase == "budget"

    def test_a_deadline_that_has_passed_ends_the_evaluation(self) -> None:
        deadline = Deadline.after(60)
        late = Deadline(deadline.expires_at, deadline.started_at, clock=lambda: deadline.expires_at)
        assert self.refused([{"text": "Done."}], deadline=late).phase == "request"

    def test_every_turn_beats_and_is_published(self) -> None:
        beats: list[int] = []
        heartbeat = Heartbeat()
        heartbeat.add_callback(lambda: beats.append(1))
        session, turns = Session(), list[ModelTurn]()
        session.dispatcher.subscribe(ModelTurn, turns.append)
        prompt = _prompt("main").bind(resources={Filesystem: InMemoryFilesystem()})
        with self.adapter([called("a"), {"text": "Done."}]) as adapter:
            adapter.evaluate(prompt, session=session, heartbeat=heartbeat)
        assert [(turn.number, turn.turn.text) for turn in turns] == [(1, "so be it"), (2, "Done.")]
        assert len(beats) >= 4
