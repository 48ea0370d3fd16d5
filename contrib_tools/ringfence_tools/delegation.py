"""A tool that hands a part of the work to a child prompt, in a nested transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringfence.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    PromptValidationError,
    RestoreFailedError,
    SectionPath,
    SectionVisibility,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from ringfence.failures import describe_error
from ringfence.limits import SHORTEST_DEADLINE, Budget, BudgetTracker, Deadline
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.section import Section
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult, render_value

MAX_TASK_CHARACTERS = 20_000
LEAST_USD = 1e-6
"""The least that a child may cost: a budget of nothing is none."""


@dataclass(frozen=True, slots=True)
class DelegatedTask:
    """The params of a child prompt. One of its sections has ``$task`` in its template."""

    task: str


@dataclass(frozen=True, slots=True)
class Delegate:
    """A child prompt that gets work. The model that delegates reads ``name`` and ``description``."""

    name: str
    description: str
    template: PromptTemplate[Any]


@dataclass(frozen=True, slots=True)
class Delegation:
    to: str = field(metadata={"description": "Who does it, by name."})
    task: str = field(metadata={"description": "What is to be done, with all that has to be known for it."})


@dataclass(frozen=True, slots=True)
class Delegated:
    """The answer of a child: ``output`` if its prompt declares an output type, else ``text``."""

    to: str
    text: str | None = None
    output: object = None

    def render(self) -> str:
        return self.text if self.text is not None else render_value(self.output)


class DelegationSection(Section[None]):
    """The tool ``delegate`` over child prompts.

    A child works in the same session and with the same adapter. Its calls are nested transactions. If the child fails,
    its changes are rolled back and the model that delegated continues. A child may use ``share`` of the remaining time
    and tokens. If a child has an opaque tool, ``delegate`` is opaque, too: the prompt that delegates needs the
    workspace as well.
    """

    def __init__(
        self, delegates: Sequence[Delegate], *, share: float = 0.5, key: str = "delegation", title: str = "Delegation"
    ) -> None:
        """
        Raises:
            PromptValidationError: there are no delegates, two have one name, a child has no section for a
                `DelegatedTask`, or ``share`` is not above 0 and at most 1.
        """
        if not delegates:
            raise PromptValidationError("there is nobody to delegate to: give at least one Delegate")
        if not 0 < share <= 1:
            raise PromptValidationError(f"a share is a part of what is left, over 0 and at most 1; got {share}")
        self.delegates = {delegate.name: delegate for delegate in delegates}
        if len(self.delegates) < len(delegates):
            raise PromptValidationError("two delegates have one name")
        for delegate in delegates:
            if DelegatedTask not in delegate.template.params_types:
                raise PromptValidationError(
                    f"the prompt of {delegate.name!r} has no section for its task: one with $task in its template and "
                    "DelegatedTask for its params"
                )
        self.share = share
        tool = Tool[Delegation, Delegated](
            name="delegate",
            description="Hand a part of the work to somebody else. If it fails, nothing of it is left.",
            handler=self._delegate,
            opaque=any(_runs_programs(delegate.template) for delegate in delegates),
            accepts_overrides=False,
        )
        super().__init__(title=title, key=key, tools=[tool], accepts_overrides=False)

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        known = "\n".join(f"- `{delegate.name}`: {delegate.description}" for delegate in self.delegates.values())
        return f"With `delegate` you hand work that stands for itself to somebody else. There are:\n\n{known}"

    def _delegate(self, params: Delegation, *, context: ToolContext) -> ToolResult[Delegated]:
        delegate = self.delegates.get(params.to)
        if delegate is None:
            raise ToolValidationError(f"there is no {params.to!r}; there are: {', '.join(self.delegates)}")
        if not params.task.strip() or len(params.task) > MAX_TASK_CHARACTERS:
            raise ToolValidationError(f"a task has 1 to {MAX_TASK_CHARACTERS:,} characters")
        if context.adapter is None:
            raise ToolValidationError("no model is connected that could do it")
        deadline, tracker = self._limits(context)
        try:
            response = context.adapter.evaluate(
                Prompt(delegate.template).bind(DelegatedTask(params.task)),
                session=context.session,
                deadline=deadline,
                budget_tracker=tracker,
                heartbeat=context.heartbeat,
                run_context=context.run_context,
            )
        except (PromptEvaluationError, VisibilityExpansionRequired) as error:
            if isinstance(error.__cause__, RestoreFailedError):
                raise
            if context.deadline is not None and context.deadline.expired:  # no time is left to go on
                raise DeadlineExceededError(str(error)) from error
            return ToolResult.error(f"{delegate.name} failed, and what it did is undone: {describe_error(error)}")
        return ToolResult.ok(Delegated(delegate.name, response.text, response.output), f"{delegate.name} is done")

    def _limits(self, context: ToolContext) -> tuple[Deadline | None, BudgetTracker | None]:
        """Return the child's share of the time, tokens and cost that remain.

        Raises DeadlineExceededError if no time is left.
        """
        outer = context.budget_tracker
        ends = [limit for limit in (context.deadline, outer.budget.deadline if outer else None) if limit is not None]
        deadline = None
        if ends:
            nearest = min(ends, key=Deadline.remaining)
            if nearest.remaining() < SHORTEST_DEADLINE:
                raise DeadlineExceededError("there is no time left to delegate anything")
            seconds = max(nearest.remaining() * self.share, SHORTEST_DEADLINE).total_seconds()
            deadline = Deadline.after(seconds, clock=nearest.clock)
        if outer is None:
            return deadline, None
        budget, used = outer.budget, outer.consumed
        total = self._part(budget.max_total_tokens, used.total_tokens)
        inputs = self._part(budget.max_input_tokens, used.input_tokens)
        outputs = self._part(budget.max_output_tokens, used.output_tokens)
        money = budget.max_cost_usd
        if money is not None:
            money = max((money - (used.cost_usd or 0)) * self.share, LEAST_USD)
        return deadline, BudgetTracker(Budget(budget.deadline, total, inputs, outputs, money), parent=outer)

    def _part(self, limit: int | None, used: int | None) -> int | None:
        return None if limit is None else max(int((limit - (used or 0)) * self.share), 1)


def _runs_programs(template: PromptTemplate[Any]) -> bool:
    return any(tool.opaque for node in template.walk() for tool in node.tools)
