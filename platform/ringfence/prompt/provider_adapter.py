"""What evaluates prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from ringfence.limits import BudgetTracker

if TYPE_CHECKING:
    from ringfence.limits import Budget, Deadline, Heartbeat, RunContext
    from ringfence.prompt.prompt import Prompt
    from ringfence.session.events import PromptResponse
    from ringfence.session.session import Session

OutputT = TypeVar("OutputT")


@runtime_checkable
class ProviderAdapter(Protocol):
    """Evaluates prompts with some provider's model."""

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        *,
        session: Session,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Ask the model, run the tools it calls, until it gives its final answer.

        ``budget_tracker`` takes the place of ``budget`` where several evaluations share one, or to see what was used.

        Raises:
            PromptEvaluationError: with the phase in which the evaluation could not go on.
            VisibilityExpansionRequired: sections were asked for in full more often than there are any; before that the
                evaluation opens them in its session and goes on.
            ValueError: a budget, and a tracker of another one.
        """
        ...
