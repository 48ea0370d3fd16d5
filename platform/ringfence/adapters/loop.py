"""The evaluation loop: ask the model, run the tools it calls, ask again, until it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

from ringfence import serde
from ringfence.adapters.core import (
    Message,
    Model,
    ModelText,
    ModelTurn,
    PromptResponse,
    ProviderAdapter,
    Request,
    ToolCall,
    ToolChoice,
    Turn,
)
from ringfence.adapters.tool_executor import ToolExecutor
from ringfence.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    EvaluationPhase,
    OutputParseError,
    PromptEvaluationError,
)
from ringfence.prompt.structured_output import parse_output
from ringfence.prompt.tool import Tool
from ringfence.runtime.events import PromptExecuted, PromptRendered, RenderedTools, RunContext, ToolSchema
from ringfence.runtime.limits import Budget, BudgetTracker, Deadline, Heartbeat, TokenUsage
from ringfence.runtime.session import Session

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt

OutputT = TypeVar("OutputT")

MAX_TURNS = 200
"""Turns of one evaluation; a model that goes in circles ends here."""


def tool_schema(tool: Tool[Any, Any], rendered: RenderedPrompt[Any]) -> ToolSchema:
    """A tool as a model is told of it: the schema of its params, with the descriptions that the rendering has."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.params_type is not None:
        parameters = serde.schema(tool.params_type, extra="forbid")
    for field, text in rendered.tool_param_descriptions.get(tool.name, {}).items():
        parameters["properties"][field]["description"] = text
    given = [example.input for example in tool.examples if example.input is not None]
    examples = tuple(cast("dict[str, object]", serde.dump(each)) for each in given)
    return ToolSchema(tool.name, tool.description, parameters, examples)


def evaluate_with(
    model: Model,
    adapter: ProviderAdapter,
    prompt: Prompt[OutputT],
    *,
    session: Session,
    deadline: Deadline | None = None,
    budget: Budget | None = None,
    budget_tracker: BudgetTracker | None = None,
    heartbeat: Heartbeat | None = None,
    run_context: RunContext | None = None,
    max_turns: int = MAX_TURNS,
    tool_choice: ToolChoice = "auto",
) -> PromptResponse[OutputT]:
    """Evaluate `prompt` with `model`; `adapter` is what tool handlers get for nested evaluations.

    A ``tool_choice`` other than "none" is the first request's only: a model that always had to call a tool could not
    end.

    Raises: what `ProviderAdapter.evaluate` raises.
    """
    if budget_tracker is None and budget is not None:
        budget_tracker = BudgetTracker(budget)
    with prompt.resources:
        evaluation = _Evaluation(
            model, adapter, prompt, session, deadline, budget_tracker, heartbeat, run_context, max_turns, tool_choice
        )
        return evaluation.run()


class LoopAdapter(Model, Protocol):
    """A provider's adapter that is its own model: it has `respond`, and the loop does the rest."""

    max_turns: int
    tool_choice: ToolChoice

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
        """As `ProviderAdapter.evaluate`."""
        return evaluate_with(
            self,
            self,
            prompt,
            session=session,
            deadline=deadline,
            budget=budget,
            budget_tracker=budget_tracker,
            heartbeat=heartbeat,
            run_context=run_context,
            max_turns=self.max_turns,
            tool_choice=self.tool_choice,
        )


class _Evaluation(Generic[OutputT]):
    def __init__(
        self,
        model: Model,
        adapter: ProviderAdapter,
        prompt: Prompt[OutputT],
        session: Session,
        deadline: Deadline | None,
        tracker: BudgetTracker | None,
        heartbeat: Heartbeat | None,
        run_context: RunContext | None,
        max_turns: int,
        tool_choice: ToolChoice,
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.prompt = prompt
        self.session = session
        self.deadline = deadline
        self.tracker = tracker
        self.heartbeat = heartbeat
        self.run_context = run_context
        self.max_turns = max_turns
        self.tool_choice: ToolChoice = tool_choice
        self.evaluation_id = uuid4()
        self.usage = TokenUsage()
        self.name = prompt.name or f"{prompt.ns}:{prompt.key}"

    def run(self) -> PromptResponse[OutputT]:
        self._check_deadline("request")
        rendered = self.prompt.render(session=self.session)
        executor = ToolExecutor(
            prompt=self.prompt,
            session=self.session,
            adapter=self.adapter,
            deadline=self.deadline,
            budget_tracker=self.tracker,
            heartbeat=self.heartbeat,
            rendered_prompt=rendered,
            run_context=self.run_context,
        )
        tools = tuple(tool_schema(tool, rendered) for tool in rendered.tools)
        self._say_rendered(rendered, tools)
        conversation = [Message("system", rendered.text)]
        for number in range(1, self.max_turns + 1):
            turn = self._ask(number, conversation, tools, rendered)
            self.session.notify(ModelTurn(self.name, number, turn))
            if turn.ended == "refused":
                raise self._stopped(f"the model refused: {turn.text or 'it did not say why'}", "response")
            if not turn.tool_calls:
                return self._finish(turn, rendered)
            conversation.append(Message("assistant", turn.text, turn))
            conversation.extend(_answer(executor, call) for call in turn.tool_calls)
        raise self._stopped(f"{self.max_turns} turns without a final answer", "response")

    def _ask(
        self, number: int, conversation: list[Message], tools: tuple[ToolSchema, ...], rendered: RenderedPrompt[OutputT]
    ) -> Turn:
        if self.heartbeat is not None:
            self.heartbeat.beat()
        self._check_deadline("request")
        self._check_budget()
        output = rendered.structured_output
        request = Request(
            self.name,
            tuple(conversation),
            tools,
            output_schema=output.schema() if output is not None else None,
            deadline=self._nearest_deadline(),
            tool_choice=self.tool_choice if number == 1 or self.tool_choice == "none" else "auto",
            on_text=lambda text, attempt: self._heard(ModelText(self.name, number, text, attempt)),
        )
        turn = _without_cut_arguments(self.model.respond(request))
        if turn.usage is not None:
            self.usage += turn.usage
            if self.tracker is not None:
                self.tracker.record_cumulative(self.evaluation_id, self.usage)
                self._check_budget()
        return turn

    def _heard(self, text: ModelText) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat()
        self.session.notify(text)

    def _finish(self, turn: Turn, rendered: RenderedPrompt[OutputT]) -> PromptResponse[OutputT]:
        self._check_deadline("response")
        if turn.ended == "cut":
            raise self._stopped(
                "the final answer was cut off at the provider's limit: allow it more tokens", "response"
            )
        if not turn.text.strip() and turn.parsed is None:
            raise self._stopped("the model answered nothing: neither text nor a tool call", "response")
        if rendered.structured_output is None:
            response: PromptResponse[OutputT] = PromptResponse(self.name, text=turn.text)
        else:
            try:
                output = parse_output(rendered, turn.text, parsed=turn.parsed)
            except OutputParseError as error:
                raise PromptEvaluationError(
                    f"the final answer is not what the prompt declares: {error}",
                    prompt_name=self.name,
                    phase="response",
                ) from error
            response = PromptResponse(self.name, output=output)
        self.session.dispatch(
            PromptExecuted(
                prompt_name=self.name,
                adapter=type(self.adapter).__name__,
                result=response,
                session_id=self.session.session_id,
                usage=self.usage,
                run_context=self.run_context,
            )
        )
        return response

    def _say_rendered(self, rendered: RenderedPrompt[OutputT], tools: tuple[ToolSchema, ...]) -> None:
        event = PromptRendered(
            prompt_ns=self.prompt.ns,
            prompt_key=self.prompt.key,
            prompt_name=self.prompt.name,
            adapter=type(self.adapter).__name__,
            session_id=self.session.session_id,
            render_inputs=self.prompt.params,
            rendered_prompt=rendered.text,
            run_context=self.run_context,
        )
        self.session.dispatch(event)
        self.session.dispatch(
            RenderedTools(
                self.prompt.ns,
                self.prompt.key,
                tools,
                event.event_id,
                session_id=self.session.session_id,
                run_context=self.run_context,
            )
        )

    def _check_deadline(self, phase: EvaluationPhase) -> None:
        if self.deadline is not None and self.deadline.expired:
            raise self._stopped("the deadline has passed", phase) from DeadlineExceededError("the deadline has passed")

    def _nearest_deadline(self) -> Deadline | None:
        """The evaluation's, or the budget's where that comes first."""
        of_budget = self.tracker.budget.deadline if self.tracker is not None else None
        if self.deadline is None or of_budget is None:
            return self.deadline or of_budget
        return min(self.deadline, of_budget, key=Deadline.remaining)

    def _check_budget(self) -> None:
        if self.tracker is not None:
            try:
                self.tracker.check()
            except BudgetExceededError as error:
                raise PromptEvaluationError(str(error), prompt_name=self.name, phase="budget") from error

    def _stopped(self, why: str, phase: EvaluationPhase) -> PromptEvaluationError:
        return PromptEvaluationError(why, prompt_name=self.name, phase=phase)


def _without_cut_arguments(turn: Turn) -> Turn:
    """In a turn that was cut off the last call's arguments may lack their end. Text is seen to be no JSON then; what a
    provider has decoded, and no text at all, cannot be told from arguments that are whole, so it is rejected."""
    if turn.ended != "cut" or not turn.tool_calls:
        return turn
    *calls, last = turn.tool_calls
    if last.arguments and isinstance(last.arguments, str):
        return turn
    return replace(turn, tool_calls=(*calls, replace(last, arguments="{ cut off at the limit of tokens")))


def _answer(executor: ToolExecutor, call: ToolCall) -> Message:
    answer = executor.execute(call.name, call.arguments, call_id=call.call_id)
    return Message("tool", answer.text, call_id=call.call_id, failed=not answer.result.success)
