"""A model that hands work to a child prompt."""

from __future__ import annotations

import contextvars
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from tool_values import Delegated

from ringfence import EffectPolicy, PromptValidationError, ToolPolicy
from ringfence.adapters import PromptEvaluationError, Request, ScriptedAdapter, ToolExecutor, Turn
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import (
    MarkdownSection,
    PathPolicy,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
    ToolsSection,
)
from ringfence.runtime import (
    Budget,
    BudgetTracker,
    Change,
    Deadline,
    Receipt,
    Session,
    ToolInvoked,
    final_receipts,
    tool_transaction,
)
from ringfence_sandbox import Workspace
from ringfence_tools import Delegate, DelegatedTask, DelegationSection, VfsToolsSection


@dataclass(frozen=True)
class Verdict:
    good: bool


Policies = Sequence[ToolPolicy | EffectPolicy]


class World:
    """An outer prompt with two children, all of them on the same files."""

    def __init__(self, share: float = 0.5, lead: Policies = (), child: Policies = ()) -> None:
        self.session = Session()
        self.files = InMemoryFilesystem()
        task = MarkdownSection[DelegatedTask](title="Your task", key="task", template="Do this: $task")
        workspace = VfsToolsSection(session=self.session, filesystem=self.files)
        writer = PromptTemplate(ns="tests", key="writer", sections=[task, workspace], policies=child)
        judge = PromptTemplate[Verdict](ns="tests", key="judge", sections=[task])
        section = DelegationSection(
            [Delegate("writer", "Writes files.", writer), Delegate("judge", "Judges.", judge)], share=share
        )
        own_task = MarkdownSection(title="Lead", key="lead", template="Lead.")
        own = VfsToolsSection(session=self.session, filesystem=self.files)
        sections = [own_task, section, own]
        self.prompt = Prompt(PromptTemplate(ns="tests", key="lead", sections=sections, policies=lead))

    def run(self, *turns: dict[str, Any], **options: Any) -> tuple[str | None, ScriptedAdapter]:
        adapter = ScriptedAdapter(turns)
        return adapter.evaluate(self.prompt, session=self.session, **options).text, adapter

    @property
    def written(self) -> dict[str, str]:
        found = [match.path for match in self.files.glob("**") if match.is_file]
        return {path: self.files.read(path).content for path in found}


def delegate(to: str = "writer", task: str = "write a.txt") -> dict[str, Any]:
    return {"tool_calls": [{"name": "delegate", "arguments": {"to": to, "task": task}}]}


def write(path: str, **usage: float) -> dict[str, Any]:
    call = {"name": "write_file", "arguments": {"file_path": path, "content": "x"}}
    return {"tool_calls": [call], **({"usage": usage} if usage else {})}


REFUSED = {"text": "I must not.", "ended": "refused"}
DONE = {"text": "Done."}


def test_a_child_works_in_the_session_and_on_the_files_of_the_call() -> None:
    world = World()
    text, adapter = world.run(delegate(), write("a.txt"), {"text": "Written."}, DONE)
    assert (text, world.written) == ("Done.", {"a.txt": "x"})
    assert "Do this: write a.txt" in adapter.requests[1]["messages"][0]["content"]
    assert adapter.requests[3]["messages"][-1]["content"] == "writer is done\n\nWritten."
    inner, outer = world.session[Receipt].all()
    assert (inner.tool, outer.tool) == ("write_file", "delegate")
    assert list(outer.inner) == [inner.call_id]


def test_a_typed_answer_comes_back_as_json() -> None:
    world = World()
    world.run(delegate("judge"), {"text": '{"good": true}'}, DONE)
    value = world.session[Delegated].latest()
    assert value == Delegated("judge", None, Verdict(good=True))
    assert value.render() == '{"good": true}'


@pytest.mark.parametrize("ends", [[{"text": ""}] * 3, [REFUSED]])
def test_a_child_that_fails_takes_back_its_own_work_only(ends: list[dict[str, Any]]) -> None:
    world = World()
    text, adapter = world.run(write("mine.txt"), delegate(), write("a.txt"), write("b.txt"), *ends, DONE)
    assert (text, world.written) == ("Done.", {"mine.txt": "x"})
    assert "what it did is undone" in adapter.requests[-1]["messages"][-1]["content"]
    assert [invoked.result.success for invoked in world.session[ToolInvoked].all()][-1] is False


@dataclass(frozen=True)
class Script:
    text: str


def script_tool(root: Path) -> Tool[Script, None]:
    def run(params: Script, *, context: ToolContext) -> ToolResult[None]:
        subprocess.run(["sh", "-ec", params.text], cwd=root, check=True)
        return ToolResult.ok(None)

    return Tool[Script, None](name="run", description="Run a script.", handler=run, opaque=True)


@pytest.mark.parametrize("ends", [{"text": "Done."}, REFUSED])
def test_a_child_that_runs_programs_is_delegated_to_by_a_call_that_is_rolled_back_as_one(
    tmp_path: Path, ends: dict[str, Any]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        session, files = Session(), workspace.filesystem
        tools = ToolsSection(title="Run", key="run", tools=[script_tool(root)])
        task = MarkdownSection[DelegatedTask](title="Your task", key="task", template="Do this: $task")
        own = VfsToolsSection(session=session, filesystem=files)
        writer = PromptTemplate(ns="tests", key="writer", sections=[task, own, tools])
        section = DelegationSection([Delegate("writer", "Writes files.", writer)])
        lead = PromptTemplate(
            ns="tests", key="lead", sections=[section, VfsToolsSection(session=session, filesystem=files)]
        )
        assert [tool.opaque for node in lead.walk() for tool in node.tools if tool.name == "delegate"] == [True]
        run = {"tool_calls": [{"name": "run", "arguments": {"text": "echo x > b.txt"}}]}
        ScriptedAdapter([delegate(), write("a.txt"), run, ends, DONE]).evaluate(Prompt(lead), session=session)
    is_kept = ends is not REFUSED
    assert sorted(path.name for path in root.iterdir()) == (["a.txt", "b.txt"] if is_kept else [])
    outcomes = {one.tool: one.outcome for one in session[Receipt].all()}
    assert outcomes["run"] == ("committed" if is_kept else "rolled_back")


class Asked:
    """A policy of both kinds that notes what it is asked, and allows it."""

    name = "asked"

    def __init__(self) -> None:
        self.notes: list[tuple[str, ...]] = []

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        self.notes.append(("before", tool.name))
        return PolicyDecision.allow()

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        self.notes.append(("effects", tool.name, *(change.path for change in changes)))
        return PolicyDecision.allow()

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        self.notes.append(("result", tool.name))


def test_the_policies_of_the_lead_look_at_the_delegating_call_and_at_the_sum_of_what_calls_within_it_changed() -> None:
    asked = Asked()
    remove = {"tool_calls": [{"name": "rm", "arguments": {"path": "a.txt"}}]}
    World(lead=[asked]).run(delegate(), write("a.txt"), write("b.txt"), remove, DONE, DONE)
    assert asked.notes == [("before", "delegate"), ("effects", "delegate", "b.txt"), ("result", "delegate")]


DENIED = PathPolicy(deny=["a.txt"])


@pytest.mark.parametrize(("world", "stays"), [(World(lead=[DENIED]), {}), (World(child=[DENIED]), {"b.txt": "x"})])
def test_a_denial_takes_back_all_of_a_child_s_work_where_the_lead_has_the_policy_and_one_call_where_the_child_has_it(
    world: World, stays: dict[str, str]
) -> None:
    world.run(delegate(), write("a.txt"), write("b.txt"), DONE, DONE)
    assert world.written == stays


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (delegate("nobody"), "writer, judge"),
        (delegate(task=" "), "characters"),
        (delegate(task="x" * 20_001), "20,000"),
    ],
)
def test_what_cannot_be_delegated_is_an_answer(call: dict[str, Any], said: str) -> None:
    text, adapter = World().run(call, DONE)
    assert text == "Done."
    assert said in adapter.requests[1]["messages"][-1]["content"]


def test_a_child_gets_a_share_of_the_tokens_that_are_left() -> None:
    world, tracker = World(share=0.5), BudgetTracker(Budget(max_total_tokens=1000))
    first = {**delegate(), "usage": {"input_tokens": 200}}  # 800 are left, so the child may use 400
    text, adapter = world.run(
        first, write("a.txt", input_tokens=300), write("b.txt", input_tokens=300), DONE, budget_tracker=tracker
    )
    assert (text, world.written) == ("Done.", {})
    assert "budget" in adapter.requests[3]["messages"][-1]["content"]
    assert tracker.consumed.input_tokens == 800


def test_a_child_gets_a_share_of_the_money_that_is_left() -> None:
    world, tracker = World(share=0.5), BudgetTracker(Budget(max_cost_usd=1.0))
    first = {**delegate(), "usage": {"cost_usd": 0.2}}  # the child may cost 0.40
    done = {**DONE, "usage": {"cost_usd": 0.1}}
    text, _ = world.run(first, write("a.txt", cost_usd=0.3), write("b.txt", cost_usd=0.3), done, budget_tracker=tracker)
    assert (text, world.written) == ("Done.", {})
    assert tracker.consumed.cost_usd == pytest.approx(0.9)


def test_what_children_use_counts_for_the_outer_budget() -> None:
    world = World(share=1.0)
    with pytest.raises(PromptEvaluationError) as caught:
        world.run(
            delegate(),
            {"text": "Written.", "usage": {"output_tokens": 90}},
            {**DONE, "usage": {"output_tokens": 20}},
            budget=Budget(max_output_tokens=100),
        )
    assert caught.value.phase == "budget"


class Watching(ScriptedAdapter):
    """Remembers the deadline of every request."""

    def __init__(self, turns: list[dict[str, Any]]) -> None:
        super().__init__(turns)
        self.deadlines: list[Deadline | None] = []

    def respond(self, request: Request) -> Turn:
        self.deadlines.append(request.deadline)
        return super().respond(request)


@pytest.mark.parametrize("of_budget", [False, True])
def test_a_child_gets_a_share_of_the_time_that_is_left(of_budget: bool) -> None:
    world, adapter, deadline = World(share=0.25), Watching([delegate(), {"text": "W."}, DONE]), Deadline.after(400)
    limits: Any = {"budget": Budget(deadline=deadline)} if of_budget else {"deadline": deadline}
    adapter.evaluate(world.prompt, session=world.session, **limits)
    outer, inner, _ = adapter.deadlines
    assert outer is not None
    assert inner is not None
    assert timedelta(seconds=90) < inner.remaining() <= timedelta(seconds=100)
    assert outer == deadline


@dataclass(frozen=True)
class Nothing:
    pass


def plain_lead(evaluate: Callable[[ToolContext, Prompt[Any]], object]) -> Prompt[Any]:
    """A prompt whose tool `merge_into_parent` evaluates a child, and names no limits."""

    def merge_into_parent(params: Nothing, *, context: ToolContext) -> ToolResult[Nothing]:
        child = MarkdownSection(title="Child", key="child", template="Child.")
        evaluate(context, Prompt(PromptTemplate(ns="tests", key="child", sections=[child])))
        return ToolResult.ok(Nothing())

    tool = Tool[Nothing, Nothing](name="hand_on", description="Hands on.", handler=merge_into_parent)
    lead = MarkdownSection(title="Lead", key="lead", template="Lead.", tools=[tool])
    return Prompt(PromptTemplate(ns="tests", key="lead", sections=[lead]))


def simply(context: ToolContext, child: Prompt[Any]) -> None:
    assert context.adapter is not None
    context.adapter.evaluate(child, session=context.session)


def within_a_transaction(context: ToolContext, child: Prompt[Any]) -> None:
    with tool_transaction(context.session):
        simply(context, child)


def with_a_longer_deadline(context: ToolContext, child: Prompt[Any]) -> None:
    assert context.adapter is not None
    context.adapter.evaluate(child, session=context.session, deadline=Deadline.after(4000))


HAND_ON = {"tool_calls": [{"name": "hand_on", "arguments": {}}]}


@pytest.mark.parametrize("evaluate", [simply, within_a_transaction, with_a_longer_deadline])
@pytest.mark.parametrize("of_budget", [False, True])
def test_the_deadline_of_a_call_holds_for_what_its_handler_evaluates(evaluate: Any, of_budget: bool) -> None:
    adapter, deadline = Watching([HAND_ON, {"text": "Child."}, DONE]), Deadline.after(400)
    limits: Any = {"budget": Budget(deadline=deadline)} if of_budget else {"deadline": deadline}
    adapter.evaluate(plain_lead(evaluate), session=Session(), **limits)
    assert adapter.deadlines == [deadline] * 3


def limits_within(
    how: Callable[[ToolContext], Any], **limits: Any
) -> list[tuple[Deadline | None, BudgetTracker | None]]:
    """Of two calls, the second made by the first one's handler with an executor of its own."""
    seen: list[tuple[Deadline | None, BudgetTracker | None]] = []

    def again(params: Nothing, *, context: ToolContext) -> ToolResult[Nothing]:
        seen.append((context.deadline, context.budget_tracker))
        if len(seen) < 2:
            how(context).call("again", {})
        return ToolResult.ok(Nothing())

    tool = Tool[Nothing, Nothing](name="again", description="Again.", handler=again)
    prompt = Prompt[None](ns="tests", key="again", sections=[ToolsSection(title="Again", tools=[tool])])
    with prompt.resources:
        ToolExecutor(prompt=prompt, session=Session(), **limits).call("again", {})
    return seen


def plain_executor(context: ToolContext, **limits: Any) -> ToolExecutor:
    return ToolExecutor(prompt=cast("Prompt[Any]", context.prompt), session=context.session, **limits)


def longer_executor(context: ToolContext) -> ToolExecutor:
    return plain_executor(context, deadline=Deadline.after(4000))


@pytest.mark.parametrize("how", [plain_executor, longer_executor])
def test_the_limits_of_a_call_hold_for_calls_that_its_handler_makes_with_an_executor_of_its_own(how: Any) -> None:
    deadline, tracker = Deadline.after(400), BudgetTracker(Budget(max_total_tokens=1))
    assert limits_within(how, deadline=deadline, budget_tracker=tracker) == [(deadline, tracker)] * 2


def test_a_call_whose_deadline_passes_makes_no_more_calls_with_an_executor_of_its_own() -> None:
    now = [datetime(2026, 1, 1, tzinfo=UTC)]

    def late(context: ToolContext) -> ToolExecutor:
        now[0] += timedelta(seconds=20)
        return plain_executor(context)

    with pytest.raises(PromptEvaluationError, match="the deadline had passed before again could run"):
        limits_within(late, deadline=Deadline.after(10, clock=lambda: now[0]))


def with_a_budget_of_its_own(context: ToolContext, child: Prompt[Any]) -> None:
    assert context.adapter is not None
    context.adapter.evaluate(child, session=context.session, budget=Budget(max_input_tokens=50))


@pytest.mark.parametrize("evaluate", [simply, within_a_transaction, with_a_budget_of_its_own])
def test_what_a_handler_evaluates_counts_for_the_budget_of_its_call(evaluate: Any) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    adapter = Watching([HAND_ON, {"text": "Child.", "usage": {"input_tokens": 30}}, DONE])
    adapter.evaluate(plain_lead(evaluate), session=Session(), budget_tracker=tracker)
    assert tracker.consumed.input_tokens == 30


def test_an_evaluation_in_a_thread_asks_nothing_more_when_its_call_has_ended() -> None:
    asked, go_on, threads, errors = threading.Event(), threading.Event(), list[threading.Thread](), list[str]()

    def answer(conversation: Any) -> dict[str, Any]:
        asked.set()
        assert go_on.wait(10)
        return HAND_ON

    def evaluate(session: Session, child: Prompt[Any]) -> None:
        try:
            ScriptedAdapter(answer).evaluate(child, session=session)
        except PromptEvaluationError as error:
            errors.append(str(error))

    def start(context: ToolContext, child: Prompt[Any]) -> None:
        run = contextvars.copy_context().run
        threads.append(threading.Thread(target=run, args=(evaluate, context.session, child)))
        threads[0].start()
        assert asked.wait(10)

    ScriptedAdapter([HAND_ON, DONE]).evaluate(plain_lead(start), session=Session())
    go_on.set()
    threads[0].join(10)
    assert errors
    assert "has ended" in errors[0]


def test_without_time_nothing_is_delegated() -> None:
    world, start = World(), Deadline.after(10)
    now = [start.started_at]
    deadline = Deadline(start.expires_at, start.started_at, clock=lambda: now[0])

    def late(conversation: Any) -> dict[str, Any]:
        now[0] = start.expires_at - timedelta(milliseconds=10)
        return delegate()

    with pytest.raises(PromptEvaluationError, match="no time left") as caught:
        ScriptedAdapter(late).evaluate(world.prompt, session=world.session, deadline=deadline)
    assert caught.value.phase == "tool"


def test_a_section_is_checked_when_it_is_made() -> None:
    blind = PromptTemplate(ns="t", key="k", sections=[MarkdownSection(title="T", key="t", template="No task.")])
    for delegates, share, said in (
        ([], 0.5, "at least one"),
        ([Delegate("a", "A.", blind)], 0.5, r"\$task"),
        ([Delegate("a", "A.", blind), Delegate("a", "A.", blind)], 0.5, "one name"),
        ([Delegate("a", "A.", blind)], 0.0, "share"),
        ([Delegate("a", "A.", blind)], 1.5, "share"),
    ):
        with pytest.raises(PromptValidationError, match=said):
            DelegationSection(delegates, share=share)


def test_a_call_that_was_taken_back_says_so_and_with_which_call() -> None:
    world = World()
    heard: list[Receipt] = []
    world.session.dispatcher.subscribe(Receipt, heard.append)
    world.run(delegate(), write("a.txt"), REFUSED, write("mine.txt"), DONE)
    first, outer, again, mine = heard
    assert (first.outcome, outer.outcome, mine.outcome) == ("committed", "failed", "committed")
    assert again == replace(first, outcome="rolled_back", rolled_back_by=outer.call_id)
    assert world.session[Receipt].all() == (first, outer, again, mine)
    assert final_receipts(heard) == (again, outer, mine)
    assert (again.to_json()["outcome"], again.to_json()["rolled_back_by"]) == ("rolled_back", outer.call_id)
