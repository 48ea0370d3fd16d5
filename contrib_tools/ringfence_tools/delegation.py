"""A tool that hands a part of the work to a child prompt, in a nested transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from typing_extensions import TypeIs

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
from ringfence.escapes import display_path
from ringfence.failures import describe_error
from ringfence.limits import SHORTEST_DEADLINE, Budget, BudgetTracker, Deadline
from ringfence.participants import outside_of_calls
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.section import Section
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool
from ringfence.session.events import PromptResponse
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult, render_value
from ringfence_tools.candidates import MAX_NAMED, Candidates
from ringfence_tools.handlers import answer_room

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace

MakeTemplate: TypeAlias = "Callable[[Workspace, Session], PromptTemplate[Any]]"
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
    template: PromptTemplate[Any] | MakeTemplate
    """For a candidate, a function that makes the prompt over the files of the candidate."""


@dataclass(frozen=True, slots=True)
class Delegation:
    to: str = field(metadata={"description": "Who does it, by name."})
    task: str = field(metadata={"description": "What is to be done, with all that has to be known for it."})


@dataclass(frozen=True, slots=True)
class CandidateDelegation(Delegation):
    candidate: str = field(metadata={"description": "In which candidate, by the name that `fork_workspace` gave it."})


@dataclass(frozen=True, slots=True)
class Delegated:
    """The answer of a child: ``output`` if its prompt declares an output type, else ``text``."""

    to: str
    text: str | None = None
    output: object = None
    candidate: str = ""
    """The fork in which the child worked."""
    changed: tuple[str, ...] = ()
    """The first of the paths that are in the candidate not as at the fork; ``more_changed`` counts the others."""
    more_changed: int = 0
    patch: str = ""
    """What differs there from the fork on, without paths that git ignores; cut where it is long."""

    def render(self) -> str:
        answer = self.text if self.text is not None else render_value(self.output)
        if not self.candidate:
            return answer
        more = f" and {self.more_changed:,} more" if self.more_changed else ""
        paths = f"{', '.join(self.changed)}{more}" if self.changed else "nothing"
        parts = (answer, f"changed in the candidate {self.candidate}: {paths}", self.patch)
        return "\n\n".join(part for part in parts if part)


class DelegationSection(Section[None]):
    """The tool ``delegate`` over child prompts.

    A child works in the same session and with the same adapter. Its calls are nested transactions. If the child fails,
    its changes are rolled back and the model that delegated continues. A child may use ``share`` of the remaining time
    and tokens. If a child has an opaque tool, ``delegate`` is opaque, too: the prompt that delegates needs the
    workspace as well.

    With ``candidates`` a child works in a fork that the model has made with `fork_workspace` of a `HistoryToolsSection`
    in the same prompt, and in a session of its own with the values of this one. Its calls are one step of the fork. If
    the child fails, they are rolled back there. The files of the model that delegates change only by `promote`.
    """

    def __init__(
        self,
        delegates: Sequence[Delegate],
        *,
        share: float = 0.5,
        candidates: bool = False,
        key: str = "delegation",
        title: str = "Delegation",
    ) -> None:
        """With ``candidates`` the ``template`` of each delegate is a function: it is called with the fork and the
        session of the child.

        Raises:
            PromptValidationError: there are no delegates, two have one name, a child has no section for a
                `DelegatedTask`, a template is a function without ``candidates`` or none with them, or ``share`` is not
                above 0 and at most 1.
        """
        if not delegates:
            raise PromptValidationError("there is nobody to delegate to: give at least one Delegate")
        if not 0 < share <= 1:
            raise PromptValidationError(f"a share is a part of what is left, over 0 and at most 1; got {share}")
        self.delegates = {delegate.name: delegate for delegate in delegates}
        if len(self.delegates) < len(delegates):
            raise PromptValidationError("two delegates have one name")
        for delegate in delegates:
            if _is_made(delegate.template) is candidates:
                wanted = "a function that makes the prompt for a candidate" if candidates else "a PromptTemplate"
                raise PromptValidationError(f"the template of {delegate.name!r} is to be {wanted}")
            if _is_made(delegate.template):
                _check_has_task(delegate.name, delegate.template)
        self.share = share
        self.candidates = candidates
        tool: Tool[Any, Delegated] = (
            Tool[CandidateDelegation, Delegated](
                name="delegate",
                description="Have somebody else work in a candidate. If it fails, nothing of it is left.",
                handler=self._delegate_candidate,
                accepts_overrides=False,
            )
            if candidates
            else Tool[Delegation, Delegated](
                name="delegate",
                description="Hand a part of the work to somebody else. If it fails, nothing of it is left.",
                handler=self._delegate,
                opaque=any(_is_made(one.template) and _runs_programs(one.template) for one in delegates),
                accepts_overrides=False,
            )
        )
        super().__init__(title=title, key=key, tools=[tool], accepts_overrides=False)

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        known = "\n".join(f"- `{delegate.name}`: {delegate.description}" for delegate in self.delegates.values())
        where = ", each time in a candidate" if self.candidates else ""
        return f"With `delegate` you hand work that stands for itself to somebody else{where}. There are:\n\n{known}"

    def _delegate(self, params: Delegation, *, context: ToolContext) -> ToolResult[Delegated]:
        delegate = self._checked(params, context)
        assert _is_made(delegate.template), "it was checked"
        evaluate = partial(self._evaluate, params, delegate.template, context.session, context)
        return self._answered(delegate, context, lambda: _delegated(delegate, evaluate()))

    def _delegate_candidate(self, params: CandidateDelegation, *, context: ToolContext) -> ToolResult[Delegated]:
        delegate = self._checked(params, context)
        candidates = context.resources.get_optional(Candidates)
        if candidates is None:
            raise ToolValidationError("there are no candidates: the prompt has no HistoryToolsSection(candidates=True)")
        make_template = delegate.template
        assert not _is_made(make_template), "it was checked"
        session = context.session.clone(session_id=uuid4(), dispatcher=context.session.dispatcher)

        def work() -> Delegated:
            # The fork has a transaction of its own, and is no participant of the call of the source.
            with outside_of_calls(), candidates.opened(params.candidate) as fork:
                template = make_template(fork, session)
                _check_has_task(delegate.name, template)
                with fork.transaction("delegate", session=session, opaque=_runs_programs(template)):
                    response = self._evaluate(params, template, session, context)
                paths = [display_path(change.path) for change in fork.changes_since_fork()]
                patch = fork.patch().decode("utf-8", "backslashreplace")
            named = tuple(paths[:MAX_NAMED])
            return replace(
                _delegated(delegate, response),
                candidate=params.candidate,
                changed=named,
                more_changed=len(paths) - len(named),
                patch=patch[: answer_room(context) // 2],
            )

        return self._answered(delegate, context, work)

    def _checked(self, params: Delegation, context: ToolContext) -> Delegate:
        delegate = self.delegates.get(params.to)
        if delegate is None:
            raise ToolValidationError(f"there is no {params.to!r}; there are: {', '.join(self.delegates)}")
        if not params.task.strip() or len(params.task) > MAX_TASK_CHARACTERS:
            raise ToolValidationError(f"a task has 1 to {MAX_TASK_CHARACTERS:,} characters")
        if context.adapter is None:
            raise ToolValidationError("no model is connected that could do it")
        return delegate

    def _evaluate(
        self, params: Delegation, template: PromptTemplate[Any], session: Session, context: ToolContext
    ) -> PromptResponse[Any]:
        assert context.adapter is not None, "it was checked"
        deadline, tracker = self._limits(context)
        return context.adapter.evaluate(
            Prompt(template).bind(DelegatedTask(params.task)),
            session=session,
            deadline=deadline,
            budget_tracker=tracker,
            heartbeat=context.heartbeat,
            run_context=context.run_context,
        )

    def _answered(
        self, delegate: Delegate, context: ToolContext, work: Callable[[], Delegated]
    ) -> ToolResult[Delegated]:
        try:
            done = work()
        except (PromptEvaluationError, VisibilityExpansionRequired) as error:
            if isinstance(error.__cause__, RestoreFailedError):
                raise
            if context.deadline is not None and context.deadline.expired:  # no time is left to go on
                raise DeadlineExceededError(str(error)) from error
            return ToolResult.error(f"{delegate.name} failed, and what it did is undone: {describe_error(error)}")
        return ToolResult.ok(done, f"{delegate.name} is done")

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


def _delegated(delegate: Delegate, response: PromptResponse[Any]) -> Delegated:
    return Delegated(delegate.name, response.text, response.output)


def _is_made(template: PromptTemplate[Any] | MakeTemplate) -> TypeIs[PromptTemplate[Any]]:
    return isinstance(template, PromptTemplate)


def _check_has_task(name: str, template: PromptTemplate[Any]) -> None:
    if DelegatedTask not in template.params_types:
        raise PromptValidationError(
            f"the prompt of {name!r} has no section for its task: one with $task in its template and DelegatedTask for "
            "its params"
        )


def _runs_programs(template: PromptTemplate[Any]) -> bool:
    return any(tool.opaque for node in template.walk() for tool in node.tools)
