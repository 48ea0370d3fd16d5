"""A plan that a model makes for itself: kept in the session, changed by four tools, rolled back with a failed call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Self, get_args

from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError
from ringfence.prompt.section import Section
from ringfence.prompt.tool import Tool, ToolContext, ToolExample
from ringfence.runtime.reducers import ReducerContext, Replace, replace_latest
from ringfence.runtime.session import Session
from ringfence.runtime.slices import SliceView
from ringfence.runtime.tool_result import ToolResult

StepStatus = Literal["pending", "in_progress", "done"]
PlanStatus = Literal["active", "completed"]
MAX_TITLE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PlanStep:
    step_id: int
    """From 1. A plan never uses a number twice."""
    title: str
    status: StepStatus = "pending"


@dataclass(frozen=True, slots=True)
class Plan:
    """An objective and the steps to it. ``completed`` once every step is done, until another one is added."""

    objective: str
    status: PlanStatus = "active"
    steps: tuple[PlanStep, ...] = ()

    def render(self) -> str:
        lines = [f"Objective: {self.objective}", f"Status: {self.status}"]
        lines += [f"{step.step_id}. [{step.status}] {step.title}" for step in self.steps]
        return "\n".join(lines)


# What a model sends, and what a program may dispatch to the session as an event


@dataclass(frozen=True, slots=True)
class SetupPlan:
    objective: str = field(metadata={"description": "What is to be achieved, in 1 to 500 characters."})
    initial_steps: tuple[str, ...] = field(
        default=(), metadata={"description": "The titles of the steps, in order; each of 1 to 500 characters."}
    )


@dataclass(frozen=True, slots=True)
class AddStep:
    steps: tuple[str, ...] = field(
        metadata={"description": "The titles of the steps to add at the end; each of 1 to 500 characters."}
    )


@dataclass(frozen=True, slots=True)
class UpdateStep:
    step_id: int = field(metadata={"description": "The number of the step, as the plan shows it."})
    title: str | None = field(default=None, metadata={"description": "A new title; left out, the title stays."})
    status: StepStatus | None = field(default=None, metadata={"description": "Left out, the status stays."})


@dataclass(frozen=True, slots=True)
class ReadPlan:
    pass


# What becomes of a plan


def set_up(plan: Plan | None, event: SetupPlan) -> Plan:
    """A new plan, whatever there was before; its steps are numbered from 1."""
    objective = _text(event.objective, "objective")
    return Plan(objective, steps=_numbered(event.initial_steps, "initial_steps", after=0))


def with_steps(plan: Plan | None, event: AddStep) -> Plan:
    """The plan with steps at its end. It is active then, also if it was completed."""
    plan = _existing(plan)
    if not event.steps:
        raise ToolValidationError("steps is empty: give the title of at least one step")
    # No step is ever taken out, so the highest number in the plan is the highest it has used.
    last = max((step.step_id for step in plan.steps), default=0)
    return replace(plan, status="active", steps=plan.steps + _numbered(event.steps, "steps", after=last))


def with_update(plan: Plan | None, event: UpdateStep) -> Plan:
    """The plan with one step's title or status changed, completed if that was the last step to be done."""
    plan = _existing(plan)
    if plan.status != "active":
        raise ToolValidationError("the plan is completed: add a step, or set up a new plan")
    if event.title is None and event.status is None:
        raise ToolValidationError("nothing to change: give a title, a status or both")
    if event.status is not None and event.status not in get_args(StepStatus):
        raise ToolValidationError(f"status is one of {', '.join(get_args(StepStatus))}, not {event.status!r}")
    index = next((n for n, step in enumerate(plan.steps) if step.step_id == event.step_id), None)
    if index is None:
        there_are = ", ".join(str(step.step_id) for step in plan.steps) or "none"
        raise ToolValidationError(f"there is no step {event.step_id}; the plan's steps are: {there_are}")
    step = plan.steps[index]
    changed = PlanStep(
        step.step_id,
        step.title if event.title is None else _text(event.title, "title"),
        event.status or step.status,
    )
    steps = (*plan.steps[:index], changed, *plan.steps[index + 1 :])
    return replace(plan, status="completed" if all(step.status == "done" for step in steps) else "active", steps=steps)


def _existing(plan: Plan | None) -> Plan:
    if plan is None:
        raise ToolValidationError("there is no plan yet: call planning_setup_plan first")
    return plan


def _numbered(titles: Iterable[str], field_name: str, *, after: int) -> tuple[PlanStep, ...]:
    return tuple(PlanStep(after + n, _text(title, f"{field_name}[{n - 1}]")) for n, title in enumerate(titles, start=1))


def _text(value: str, field_name: str) -> str:
    stripped = value.strip()
    if not 1 <= len(stripped) <= MAX_TITLE_CHARACTERS:
        raise ToolValidationError(f"{field_name} has {len(stripped)} characters; use 1 to {MAX_TITLE_CHARACTERS}")
    return stripped


# The session


def keep_plan(session: Session) -> None:
    """Let `session` hold one plan: SetupPlan, AddStep and UpdateStep change it, a Plan replaces it. Twice is once."""
    session[Plan].register(Plan, replace_latest)
    session[Plan].register(SetupPlan, _on_setup)
    session[Plan].register(AddStep, _on_add)
    session[Plan].register(UpdateStep, _on_update)


def _on_setup(view: SliceView[Plan], event: SetupPlan, *, context: ReducerContext) -> Replace[Plan]:
    return Replace((set_up(view.latest(), event),))


def _on_add(view: SliceView[Plan], event: AddStep, *, context: ReducerContext) -> Replace[Plan]:
    return Replace((with_steps(view.latest(), event),))


def _on_update(view: SliceView[Plan], event: UpdateStep, *, context: ReducerContext) -> Replace[Plan]:
    return Replace((with_update(view.latest(), event),))


# The section


class PlanningStrategy(Enum):
    """How the model is told to go about its work; the value's text is in `MINDSETS`."""

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
    """Tools to keep a plan in `session`, where ``session[Plan].latest()`` is the plan or None."""

    def __init__(
        self,
        *,
        session: Session,
        strategy: PlanningStrategy = PlanningStrategy.REACT,
        accepts_overrides: bool = False,
    ) -> None:
        """``accepts_overrides``: whether the texts of the section and its tools may be replaced from outside."""
        keep_plan(session)
        self.session = session
        self.strategy = strategy
        super().__init__(
            title="Planning",
            key="planning.tools",
            tools=_PlanTools(session).tools(accepts_overrides),
            accepts_overrides=accepts_overrides,
        )

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return f"{GUIDANCE}\n\n{MINDSETS[self.strategy]}"

    def clone(self, **changes: Any) -> Self:
        """The same section; with ``session``, one that keeps its plan there."""
        session = changes.get("session", self.session)
        return type(self)(session=session, strategy=self.strategy, accepts_overrides=self.accepts_overrides)


class _PlanTools:
    """The handlers. Each answers with the plan as it is to be; it is the executor that applies a result's value to the
    session, once and only if the call succeeds. So a failed call leaves the plan as it was."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def tools(self, accepts_overrides: bool) -> tuple[Tool[Any, Any], ...]:
        return (
            Tool[SetupPlan, Plan](
                name="planning_setup_plan",
                description="Start a plan: the objective and, if known, the first steps. Replaces any earlier plan.",
                handler=self._set_up,
                accepts_overrides=accepts_overrides,
                examples=(
                    ToolExample(
                        "Start with an objective and two steps",
                        SetupPlan("Make the parser accept empty lines", ("Reproduce the failure", "Repair the parser")),
                        Plan(
                            "Make the parser accept empty lines",
                            steps=(PlanStep(1, "Reproduce the failure"), PlanStep(2, "Repair the parser")),
                        ),
                    ),
                ),
            ),
            Tool[AddStep, Plan](
                name="planning_add_step",
                description="Add one or more steps at the end of the plan.",
                handler=self._add,
                accepts_overrides=accepts_overrides,
            ),
            Tool[UpdateStep, Plan](
                name="planning_update_step",
                description="Change the status or the title of one step of the plan.",
                handler=self._update,
                accepts_overrides=accepts_overrides,
            ),
            Tool[ReadPlan, Plan](
                name="planning_read_plan",
                description="Show the plan: objective, status and steps.",
                handler=self._read,
                accepts_overrides=accepts_overrides,
                read_only=True,
            ),
        )

    def _set_up(self, params: SetupPlan, *, context: ToolContext) -> ToolResult[Plan]:
        plan = set_up(self._plan(context), params)
        return ToolResult.ok(plan, f"Plan set up with {_steps(len(plan.steps))}.")

    def _add(self, params: AddStep, *, context: ToolContext) -> ToolResult[Plan]:
        plan = with_steps(self._plan(context), params)
        return ToolResult.ok(plan, f"Added {_steps(len(params.steps))}.")

    def _update(self, params: UpdateStep, *, context: ToolContext) -> ToolResult[Plan]:
        plan = with_update(self._plan(context), params)
        done = " The plan is completed." if plan.status == "completed" else ""
        return ToolResult.ok(plan, f"Step {params.step_id} updated.{done}")

    def _read(self, params: ReadPlan, *, context: ToolContext) -> ToolResult[Plan]:
        plan = _existing(self._plan(context))
        return ToolResult.ok(plan, f"The plan has {_steps(len(plan.steps))}.")

    def _plan(self, context: ToolContext) -> Plan | None:
        if context.session is not self._session:
            raise ToolValidationError(
                "this planning section keeps its plan in another session; use section.clone(session=...) for this one"
            )
        return context.session[Plan].latest()


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
