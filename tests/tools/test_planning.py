from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringfence import ToolValidationError
from ringfence.adapters import ToolExecutor
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Session, ToolInvoked
from ringfence_tools import (
    AddStep,
    Plan,
    PlanningStrategy,
    PlanningToolsSection,
    PlanStep,
    ReadPlan,
    SetupPlan,
    UpdateStep,
)

TOOLS = ("planning_setup_plan", "planning_add_step", "planning_update_step", "planning_read_plan")


def fail(params: SetupPlan, *, context: ToolContext) -> ToolResult[Plan]:
    """Changes the plan by an event, and then fails."""
    context.session.dispatch(params)
    assert context.session[Plan].latest() is not None
    return ToolResult.error("no")


class Planner:
    def __init__(self) -> None:
        self.session = Session()
        self.section = PlanningToolsSection(session=self.session)
        failing = Tool[SetupPlan, Plan](name="fail", description="Fail.", handler=fail)
        other = MarkdownSection(title="Other", key="other", template="Do it.", tools=[failing])
        self.prompt = Prompt(PromptTemplate(ns="tests", key="planning", sections=[self.section, other]))

    def call(self, name: str, **arguments: Any) -> ToolResult[Any]:
        return ToolExecutor(prompt=self.prompt, session=self.session).call(name, arguments)

    @property
    def plan(self) -> Plan | None:
        return self.session[Plan].latest()

    def setup(self, *steps: str) -> ToolResult[Any]:
        return self.call("planning_setup_plan", objective="Ship it", initial_steps=steps)

    def update(self, step_id: int, **arguments: Any) -> ToolResult[Any]:
        return self.call("planning_update_step", step_id=step_id, **arguments)


@pytest.fixture
def planner() -> Iterator[Planner]:
    planner = Planner()
    with planner.prompt.resources:
        yield planner


def test_a_plan_is_set_up(planner: Planner) -> None:
    result = planner.setup("one", " two ")
    assert planner.plan == Plan("Ship it", "active", (PlanStep(1, "one"), PlanStep(2, "two")))
    assert (result.value, result.message) == (planner.plan, "Plan set up with 2 steps.")
    assert planner.call("planning_setup_plan", objective=" " + "x" * 500 + " ").success
    assert planner.session[Plan].all() == (Plan("x" * 500, "active", ()),)


def test_steps_are_added_at_the_end_with_new_numbers(planner: Planner) -> None:
    planner.setup("one", "two")
    result = planner.call("planning_add_step", steps=["three", "four"])
    assert planner.plan is not None
    assert [(step.step_id, step.title) for step in planner.plan.steps[2:]] == [(3, "three"), (4, "four")]
    assert result.message == "Added 2 steps."


def test_a_step_gets_a_status_and_a_title(planner: Planner) -> None:
    planner.setup("one", "two")
    planner.update(2, status="in_progress")
    result = planner.update(2, title="second")
    assert planner.plan is not None
    assert planner.plan.steps == (PlanStep(1, "one"), PlanStep(2, "second", "in_progress"))
    assert result.message == "Step 2 updated."


def test_a_plan_is_completed_when_all_steps_are_done(planner: Planner) -> None:
    planner.setup("one", "two")
    planner.update(1, status="done")
    assert planner.plan is not None
    assert planner.plan.status == "active"
    result = planner.update(2, status="done")
    assert planner.plan.status == "completed"
    assert result.message == "Step 2 updated. The plan is completed."


def test_a_completed_plan_is_active_again_with_a_new_step(planner: Planner) -> None:
    planner.setup("one")
    planner.update(1, status="done")
    assert not planner.update(1, status="pending").success
    planner.call("planning_add_step", steps=["two"])
    assert planner.plan == Plan("Ship it", "active", (PlanStep(1, "one", "done"), PlanStep(2, "two")))


def test_the_model_reads_the_whole_plan(planner: Planner) -> None:
    planner.setup("one", "two")
    planner.update(1, status="done")
    before = planner.plan
    result = planner.call("planning_read_plan")
    assert (result.value, result.message) == (before, "The plan has 2 steps.")
    assert planner.session[Plan].all() == (before,)
    assert planner.session[ToolInvoked].all()[-1].rendered_output == (
        "Objective: Ship it\nStatus: active\n1. [done] one\n2. [pending] two"
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("planning_setup_plan", {"objective": "  "}, "objective has 0 characters"),
    ("planning_setup_plan", {"objective": "x" * 501}, "objective has 501 characters"),
    ("planning_setup_plan", {"objective": "x", "initial_steps": ["a", " "]}, "initial_steps[1] has 0 characters"),
    ("planning_setup_plan", {"objective": "x", "initial_steps": "a"}, "initial_steps"),
    ("planning_add_step", {"steps": []}, "at least one step"),
    ("planning_add_step", {"steps": ["x" * 501]}, "steps[0] has 501 characters"),
    ("planning_update_step", {"step_id": 9, "status": "done"}, "there is no step 9; the plan's steps are: 1, 2"),
    ("planning_update_step", {"step_id": 1}, "give a title, a status or both"),
    ("planning_update_step", {"step_id": 1, "status": "finished"}, "status"),
    ("planning_update_step", {"step_id": 1, "title": ""}, "title has 0 characters"),
    ("planning_read_plan", {"verbose": True}, "verbose"),
]


@pytest.mark.parametrize(("tool", "arguments", "said"), BAD)
def test_bad_input_is_told_and_leaves_the_plan_as_it_was(
    planner: Planner, tool: str, arguments: dict[str, Any], said: str
) -> None:
    planner.setup("one", "two")
    before = planner.plan
    result = planner.call(tool, **arguments)
    assert not result.success
    assert said in result.message
    assert planner.plan is before


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("planning_add_step", {"steps": ["one"]}),
        ("planning_update_step", {"step_id": 1, "status": "done"}),
        ("planning_read_plan", {}),
    ],
)
def test_without_a_plan_the_model_is_told_to_make_one(planner: Planner, tool: str, arguments: dict[str, Any]) -> None:
    result = planner.call(tool, **arguments)
    assert not result.success
    assert "planning_setup_plan first" in result.message
    assert planner.session[Plan].all() == ()


def test_a_failed_call_takes_its_plan_back(planner: Planner) -> None:
    planner.setup("one")
    before = planner.plan
    assert not planner.call("fail", objective="Sabotage").success
    assert planner.plan is before


# -- events from programs


def test_an_event_that_does_not_fit_leaves_the_plan() -> None:
    session = Session()
    PlanningToolsSection(session=session)
    session.dispatch(SetupPlan("Ship it"))
    (failure,) = session.dispatch(UpdateStep(7, title="x")).errors
    assert isinstance(failure.error, ToolValidationError)
    assert session[Plan].latest() == Plan("Ship it")
    session.dispatch(AddStep(("one",)))
    (failure,) = session.dispatch(UpdateStep(1, status="lost")).errors  # pyright: ignore[reportArgumentType]
    assert "pending, in_progress, done" in str(failure.error)


def test_two_sections_on_one_session_apply_an_event_once() -> None:
    session = Session()
    PlanningToolsSection(session=session)
    PlanningToolsSection(session=session, strategy=PlanningStrategy.PLAN_ACT_REFLECT)
    session.dispatch(SetupPlan("Ship it", ("one",)))
    session.dispatch(AddStep(("two",)))
    session.dispatch(UpdateStep(1, status="done"))
    assert session[Plan].all() == (Plan("Ship it", "active", (PlanStep(1, "one", "done"), PlanStep(2, "two"))),)


# -- the section


def rendered(strategy: PlanningStrategy) -> str:
    section = PlanningToolsSection(session=Session(), strategy=strategy)
    return Prompt(PromptTemplate(ns="tests", key="planning", sections=[section])).render().text


def test_the_section_explains_its_tools() -> None:
    text = rendered(PlanningStrategy.REACT)
    assert text.startswith("## 1. Planning (planning.tools)")
    assert all(f"`{name}`" in text for name in TOOLS)


def test_only_the_mindset_differs_between_strategies() -> None:
    texts = [set(rendered(strategy).split("\n\n")) for strategy in PlanningStrategy]
    shared = set.intersection(*texts)
    assert len(texts) == 3
    assert all(len(text - shared) == 1 for text in texts)
    assert len(set.union(*texts) - shared) == 3


def test_the_tools_are_declared_as_the_contract_has_them() -> None:
    tools = {tool.name: tool for tool in PlanningToolsSection(session=Session()).tools()}
    assert {name: tool.params_type for name, tool in tools.items()} == dict(
        zip(TOOLS, (SetupPlan, AddStep, UpdateStep, ReadPlan), strict=True)
    )
    assert {name for name, tool in tools.items() if tool.read_only} == {"planning_read_plan"}
    assert {tool.result_type for tool in tools.values()} == {Plan}


@pytest.mark.parametrize("accepts", [False, True])
def test_overrides_are_accepted_on_request(accepts: bool) -> None:
    section = PlanningToolsSection(session=Session(), accepts_overrides=accepts)
    assert {section.accepts_overrides, *(tool.accepts_overrides for tool in section.tools())} == {accepts}
    assert not PlanningToolsSection(session=Session()).accepts_overrides


def test_a_clone_keeps_its_plan_in_the_session_it_is_given(planner: Planner) -> None:
    planner.setup("one")
    other = Session()
    section = planner.section.clone(session=other)
    prompt = Prompt(PromptTemplate(ns="tests", key="clone", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=other)
        executor.call("planning_setup_plan", {"objective": "Mine"})
    assert other[Plan].latest() == Plan("Mine")
    assert planner.plan is not None
    assert planner.plan.objective == "Ship it"


def test_a_section_of_another_session_says_so(planner: Planner) -> None:
    result = ToolExecutor(prompt=planner.prompt, session=Session()).call("planning_read_plan", {})
    assert not result.success
    assert "clone(session=" in result.message
