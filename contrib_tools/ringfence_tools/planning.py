"""A plan that a model makes for itself: kept in the session, changed by four tools, rolled back with a failed call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Self, get_args

from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError
from ringfence.prompt.section import Section
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool, ToolExample
from ringfence.session.items import Replace
from ringfence.session.reducers import ReducerContext, replace_latest
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult
from ringfence.session.views import SliceView
from ringfence_tools.printable import plural

StepStatus = Literal["pending", "in_progress", "done"]
PlanStatus = Literal["active", "completed"]
MAX_TITLE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PlanStep:
    step_id: int
    """Numbers begin at 1. A plan never uses a number twice."""
    title: str
    status: StepStatus = "pending"


@dataclass(frozen=True, slots=True)
class Plan:
    """An objective and its steps. A plan is ``completed`` while every step is done."""

    objective: str
    status: PlanStatus = "active"
    steps: tuple[PlanStep, ...] = ()

    def render(self) -> str:
        lines = [f"Objective: {self.objective}", f"Status: {self.status}"]
        lines += [f"{step.step_id}. [{step.status}] {step.title}" for step in self.steps]
        return "\n".join(lines)


# A model sends these as params. A program may dispatch them to the session as events. `apply` returns the new plan.


@dataclass(frozen=True, slots=True)
class SetupPlan:
    objective: str = field(metadata={"description": "What is to be achieved, in 1 to 500 characters."})
    initial_steps: tuple[str, ...] = field(
        default=(), metadata={"description": "The titles of the steps, in order; each of 1 to 500 characters."}
    )

    def apply(self, plan: Plan | None) -> Plan:
        """Return a new plan. It replaces the one before."""
        objective = _strip(self.objective, "objective")
        return Plan(objective, steps=_number(self.initial_steps, "initial_steps", after=0))


@dataclass(frozen=True, slots=True)
class AddStep:
    steps: tuple[str, ...] = field(
        metadata={"description": "The titles of the steps to add at the end; each of 1 to 500 characters."}
    )

    def apply(self, plan: Plan | None) -> Plan:
        """Return the plan with more steps at its end. A completed plan becomes active."""
        plan = _require(plan)
        if not self.steps:
            raise ToolValidationError("steps is empty: give the title of at least one step")
        # Steps are never removed, so the last one has the highest number.
        last = plan.steps[-1].step_id if plan.steps else 0
        return replace(plan, status="active", steps=plan.steps + _number(self.steps, "steps", after=last))


@dataclass(frozen=True, slots=True)
class UpdateStep:
    step_id: int = field(metadata={"description": "The number of the step, as the plan shows it."})
    title: str | None = field(default=None, metadata={"description": "A new title; left out, the title stays."})
    status: StepStatus | None = field(default=None, metadata={"description": "Left out, the status stays."})

    def apply(self, plan: Plan | None) -> Plan:
        """Return the plan with another title or status of one step. It is completed if every step is done."""
        plan = _require(plan)
        if plan.status != "active":
            raise ToolValidationError("the plan is completed: add a step, or set up a new plan")
        if self.title is None and self.status is None:
            raise ToolValidationError("nothing to change: give a title, a status or both")
        if self.status is not None and self.status not in get_args(StepStatus):
            raise ToolValidationError(f"status is one of {', '.join(get_args(StepStatus))}, not {self.status!r}")
        steps = {step.step_id: step for step in plan.steps}
        if (step := steps.get(self.step_id)) is None:
            known = ", ".join(map(str, steps)) or "none"
            raise ToolValidationError(f"there is no step {self.step_id}; the plan's steps are: {known}")
        title = step.title if self.title is None else _strip(self.title, "title")
        steps[self.step_id] = PlanStep(self.step_id, title, self.status or step.status)
        done = all(step.status == "done" for step in steps.values())
        return replace(plan, status="completed" if done else "active", steps=tuple(steps.values()))


@dataclass(frozen=True, slots=True)
class ReadPlan:
    pass


def _require(plan: Plan | None) -> Plan:
    if plan is None:
        raise ToolValidationError("there is no plan yet: call planning_setup_plan first")
    return plan


def _number(titles: Sequence[str], field_name: str, *, after: int) -> tuple[PlanStep, ...]:
    return tuple(PlanStep(after + n, _strip(title, f"{field_name}[{n - 1}]")) for n, title in enumerate(titles, 1))


def _strip(value: str, field_name: str) -> str:
    stripped = value.strip()
    if not 1 <= len(stripped) <= MAX_TITLE_CHARACTERS:
        raise ToolValidationError(f"{field_name} has {len(stripped)} characters; use 1 to {MAX_TITLE_CHARACTERS}")
    return stripped


def _change_plan(
    view: SliceView[Plan], event: SetupPlan | AddStep | UpdateStep, *, context: ReducerContext
) -> Replace[Plan]:
    return Replace((event.apply(view.latest()),))


class PlanningStrategy(Enum):
    """The way in which a model is told to work. `MINDSETS` has the text of each."""

    REACT = "react"
    PLAN_ACT_REFLECT = "plan_act_reflect"
    GOAL_DECOMPOSE_ROUTE_SYNTHESISE = "goal_decompose_route_synthesise"


GUIDANCE = """\
Keep a plan for work that takes more than a step or two. It is kept between turns, and whoever watches can read it.

- `planning_setup_plan` states the objective and the first steps. Called again, it starts over with a new plan.
- `planning_add_step` adds steps at the end, when you find out about more to do.
- `planning_update_step` marks a step `in_progress` when you begin it and `done` once it really is, or rewords it.
- `planning_read_plan` shows the plan as it stands.

Steps keep their numbers. The plan is completed when all of its steps are done."""

MINDSETS = {
    PlanningStrategy.REACT: """\
Go forward in short rounds: think about what you know and what is missing, make the one tool call that helps most, look
at what came back, and let that decide the next round. Bring the plan up to date whenever a round has taught you
something.""",
    PlanningStrategy.PLAN_ACT_REFLECT: """\
Write down the whole outline before you change anything. Then carry it out step by step, and pause after each: did it
do what it was meant to, and does the rest of the outline still fit? Correct the plan before you go on.""",
    PlanningStrategy.GOAL_DECOMPOSE_ROUTE_SYNTHESISE: """\
Begin with the goal in your own words, and with how you will know that it is reached. Break it into parts that can be
solved on their own, choose for each the tools or sections that suit it, and solve them one by one. At the end put the
parts together, and hold the whole against the goal.""",
}


class PlanningToolsSection(Section[None]):
    """Tools for a plan in `session`. ``session[Plan].latest()`` is the plan or None."""

    def __init__(
        self,
        *,
        session: Session,
        strategy: PlanningStrategy = PlanningStrategy.REACT,
        accepts_overrides: bool = False,
    ) -> None:
        """``accepts_overrides``: whether the texts of the section and its tools may be replaced from outside."""
        # A plan replaces the one before. Registered twice on one session, an event is applied once.
        plans = session[Plan]
        plans.register(Plan, replace_latest)
        plans.register(SetupPlan, _change_plan)
        plans.register(AddStep, _change_plan)
        plans.register(UpdateStep, _change_plan)
        self.session = session
        self.strategy = strategy
        super().__init__(
            title="Planning",
            key="planning.tools",
            tools=_plan_tools(session, accepts_overrides),
            accepts_overrides=accepts_overrides,
        )

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return f"{GUIDANCE}\n\n{MINDSETS[self.strategy]}"

    def clone(self, **changes: Any) -> Self:
        """Return a copy of the section. ``session`` is the session of the copy."""
        session = changes.get("session", self.session)
        return type(self)(session=session, strategy=self.strategy, accepts_overrides=self.accepts_overrides)


def _plan_tools(session: Session, accepts_overrides: bool) -> tuple[Tool[Any, Any], ...]:
    """Return the tools. Each returns the new plan as its value. The executor dispatches the value to the session if
    the call succeeds, so a failed call leaves the plan as it was."""

    def latest(context: ToolContext) -> Plan | None:
        if context.session is not session:
            raise ToolValidationError(
                "this planning section keeps its plan in another session; use section.clone(session=...) for this one"
            )
        return session[Plan].latest()

    def set_up(params: SetupPlan, *, context: ToolContext) -> ToolResult[Plan]:
        plan = params.apply(latest(context))
        return ToolResult.ok(plan, f"Plan set up with {plural(len(plan.steps), 'step')}.")

    def add(params: AddStep, *, context: ToolContext) -> ToolResult[Plan]:
        return ToolResult.ok(params.apply(latest(context)), f"Added {plural(len(params.steps), 'step')}.")

    def update(params: UpdateStep, *, context: ToolContext) -> ToolResult[Plan]:
        plan = params.apply(latest(context))
        done = " The plan is completed." if plan.status == "completed" else ""
        return ToolResult.ok(plan, f"Step {params.step_id} updated.{done}")

    def read(params: ReadPlan, *, context: ToolContext) -> ToolResult[Plan]:
        plan = _require(latest(context))
        return ToolResult.ok(plan, f"The plan has {plural(len(plan.steps), 'step')}.")

    start = SetupPlan("Make the parser accept empty lines", ("Reproduce the failure", "Repair the parser"))
    return (
        Tool[SetupPlan, Plan](
            "planning_setup_plan",
            "Start a plan: the objective and, if known, the first steps. Replaces any earlier plan.",
            set_up,
            [ToolExample("Start with an objective and two steps", start, start.apply(None))],
            accepts_overrides,
        ),
        Tool[AddStep, Plan](
            "planning_add_step",
            "Add one or more steps at the end of the plan.",
            add,
            accepts_overrides=accepts_overrides,
        ),
        Tool[UpdateStep, Plan](
            "planning_update_step",
            "Change the status or the title of one step of the plan.",
            update,
            accepts_overrides=accepts_overrides,
        ),
        Tool[ReadPlan, Plan](
            "planning_read_plan",
            "Show the plan: objective, status and steps.",
            read,
            accepts_overrides=accepts_overrides,
            read_only=True,
        ),
    )
