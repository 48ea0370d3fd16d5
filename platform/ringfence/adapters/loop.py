"""The evaluation loop: ask the model, run the tools it calls, ask again, until it answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

from ringfence import serde
from ringfence.adapters.core import (
    Conversation,
    EvaluationEnded,
    EvaluationStarted,
    Message,
    MessageAdded,
    Model,
    ModelAnswered,
    ModelRequested,
    ModelRetry,
    ModelText,
    ModelTurn,
    PromptResponse,
    ProviderAdapter,
    Request,
    ToolCall,
    ToolChoice,
    Turn,
)
from ringfence.adapters.shortening import shortened
from ringfence.adapters.tool_executor import ToolExecutor, check_arguments
from ringfence.errors import (
    BudgetExceededError,
    ContextWindowExceededError,
    DeadlineExceededError,
    EvaluationPhase,
    OutputParseError,
    PromptError,
    PromptEvaluationError,
    VisibilityExpansionRequired,
)
from ringfence.participants import current_call
from ringfence.prompt.disclosure import OPEN_SECTIONS
from ringfence.prompt.feedback import FeedbackContext, Feedbacks
from ringfence.prompt.structured_output import parse_output
from ringfence.prompt.tool import Tool
from ringfence.runtime.events import PromptExecuted, PromptRendered, RenderedTools, ToolSchema
from ringfence.runtime.limits import Budget, BudgetTracker, Deadline, Heartbeat, RunContext, RunOptions, TokenUsage
from ringfence.runtime.session import Session
from ringfence.runtime.visibility import SetVisibilityOverride, VisibilityOverrides

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")

MAX_TURNS = 200
"""Turns of one evaluation; a model that goes in circles ends here."""
MAX_ASKED_AGAIN = 2
"""How often in a row a model is asked for another final answer, if the one it gave is none."""


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
    end. In a tool's handler the limits of its call hold, too; a ``budget_tracker`` that is given says itself what it is
    a part of.

    Raises: what `ProviderAdapter.evaluate` raises.
    """
    check_arguments(prompt, session)
    options = RunOptions.of_evaluation(
        deadline=deadline,
        budget=budget,
        budget_tracker=budget_tracker,
        heartbeat=heartbeat,
        run_context=run_context,
    )
    with prompt.resources:
        evaluation = _Evaluation(model, adapter, prompt, session, options, max_turns, tool_choice)
        return evaluation.run()


class LoopAdapter(Model, Protocol):
    """A provider's adapter that is its own model: it has `respond`, and the loop does the rest."""

    max_turns: int = MAX_TURNS
    tool_choice: ToolChoice = "auto"

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


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Why a turn that calls no tool is no final answer: for who evaluates, and for the model, which may try again."""

    error: PromptEvaluationError
    said: str


class _Evaluation(Generic[OutputT]):
    def __init__(
        self,
        model: Model,
        adapter: ProviderAdapter,
        prompt: Prompt[OutputT],
        session: Session,
        options: RunOptions,
        max_turns: int,
        tool_choice: ToolChoice,
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.prompt = prompt
        self.session = session
        self.options = options
        self.deadline = options.deadline
        self.tracker = options.budget_tracker
        self.heartbeat = options.heartbeat
        self.run_context = options.run_context
        self.max_turns = max_turns
        self.tool_choice: ToolChoice = tool_choice
        self.around = current_call()
        self.evaluation_id = uuid4()
        self.provider: str = getattr(model, "provider", type(model).__name__)
        self.model_name: str | None = getattr(model, "model", None)
        self.usage = TokenUsage()
        self.expansions_left = sum(1 for _ in prompt.template.walk())
        self.name = prompt.name or f"{prompt.ns}:{prompt.key}"
        self.feedbacks = Feedbacks(prompt.template.feedback_providers, self.name)
        self.calls = 0

    def run(self) -> PromptResponse[OutputT]:
        session_id = self.session.session_id
        self.session.notify(
            EvaluationStarted(
                self.evaluation_id, self.name, self.provider, self.model_name, session_id, self.run_context
            )
        )
        try:
            response = self._evaluated()
        except BaseException as error:
            self.session.notify(EvaluationEnded(self.evaluation_id, self.usage, error))
            raise
        self.session.notify(EvaluationEnded(self.evaluation_id, self.usage))
        return response

    def _evaluated(self) -> PromptResponse[OutputT]:
        self._check_deadline("request")
        self._render()
        conversation = [Message("system", self.rendered.text), *self._begun()]
        asked_again = 0
        for number in range(1, self.max_turns + 1):
            conversation[0] = Message("system", self.rendered.text)
            turn = self._ask(number, conversation)
            self.session.notify(ModelTurn(self.name, number, turn))
            self._check_budget()  # now that everybody has heard what the turn cost
            if turn.ended == "refused":
                raise self._stopped(f"the model refused: {turn.text or 'it did not say why'}", "response")
            if turn.tool_calls:
                asked_again = 0
                conversation.append(self._said(Message("assistant", turn.text, turn)))
                conversation.extend(self._answers(turn.tool_calls))
                continue
            response = self._response(turn)
            if isinstance(response, PromptResponse):
                return self._finished(response)
            if asked_again == MAX_ASKED_AGAIN:
                raise response.error
            asked_again += 1
            if turn.text.strip():  # a provider takes no empty message back
                conversation.append(self._said(Message("assistant", turn.text, turn)))
            conversation.append(self._said(Message("user", response.said)))
        raise self._stopped(
            f"{self.max_turns} turn{'s' if self.max_turns != 1 else ''} without a final answer", "budget"
        )

    def _render(self) -> None:
        deadline = self._nearest_deadline()
        self.rendered = replace(self.prompt.render(session=self.session), deadline=deadline)
        self.executor = ToolExecutor(
            prompt=self.prompt,
            session=self.session,
            adapter=self.adapter,
            deadline=deadline,
            budget_tracker=self.tracker,
            heartbeat=self.heartbeat,
            rendered_prompt=self.rendered,
            run_context=self.run_context,
        )
        self.tools = tuple(tool_schema(tool, self.rendered) for tool in self.rendered.tools)
        self._say_rendered()

    def _begun(self) -> list[Message]:
        """The conversation that the session has for this evaluation to go on with, its last turn answered."""
        begun = self.session[Conversation].latest()
        if begun is None or begun.prompt_name != self.name:
            return []
        self.session[Conversation].clear()
        messages = [*begun.messages, *self._answers(begun.unanswered())]
        return [*messages, self._said(Message("user", begun.news))] if begun.news else messages

    def _answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        """To every tool call of a turn, in their order. Sections are opened first, so that the rest has their tools."""
        order = sorted(enumerate(calls), key=lambda numbered: numbered[1].name != OPEN_SECTIONS)
        answers: dict[int, Message] = {}
        for place, call in order:
            answers[place] = self._said(self._answer(call))
        return [answers[place] for place in range(len(answers))]

    def _answer(self, call: ToolCall) -> Message:
        try:
            answer = self.executor.execute(call.name, call.arguments, call_id=call.call_id)
        except VisibilityExpansionRequired as asked:
            if self.expansions_left == 0:
                raise
            self.expansions_left -= 1
            return self._opened(call, asked)
        self.calls += 1
        said = self.feedbacks.after(FeedbackContext(self.prompt, self.session, self.calls, self.deadline))
        text = f"{answer.text}\n\n{said}" if said else answer.text
        return Message("tool", text, call_id=call.call_id, failed=not answer.result.success)

    def _opened(self, call: ToolCall, asked: VisibilityExpansionRequired) -> Message:
        """The conversation goes on under instructions that have the sections that were asked for in full."""
        before = self.session[VisibilityOverrides].all()
        for path, visibility in asked.requested_overrides.items():
            self.session.dispatch(SetVisibilityOverride(path, visibility))
        try:
            self._render()
        except PromptError as error:
            self.session[VisibilityOverrides].seed(before)
            return Message("tool", f"that cannot be shown: {error}", call_id=call.call_id, failed=True)
        said = ", ".join(".".join(path) for path in asked.requested_overrides)
        return Message("tool", f"opened: {said}; your instructions and tools have them now", call_id=call.call_id)

    def _ask(self, number: int, conversation: list[Message]) -> Turn:
        """The next turn. What the model has no room for is left out of the conversation from then on."""
        attempt = 1
        while True:
            attempt += 1
            try:
                return self._asked(number, conversation)
            except ContextWindowExceededError:
                shorter = shortened(conversation)
                if shorter is None:
                    raise
                conversation[:], left_out = shorter
                why = f"the conversation is too long for the model, and goes on without {left_out}"
                self._heard(ModelRetry(self.name, number, why, attempt, 0.0))

    def _asked(self, number: int, conversation: list[Message]) -> Turn:
        if self.heartbeat is not None:
            self.heartbeat.beat()
        self._check_deadline("request")
        self._check_budget()
        if self.around is not None and self.around.ended:  # in a thread of its handler, which nothing else ends
            raise self._stopped("the tool call whose handler evaluates this has ended", "request")
        output = self.rendered.structured_output
        request = Request(
            self.name,
            tuple(conversation),
            self.tools,
            output_schema=output.schema() if output is not None else None,
            deadline=self._nearest_deadline(),
            tool_choice=self.tool_choice if number == 1 or self.tool_choice == "none" else "auto",
            on_text=lambda text, attempt: self._heard(ModelText(self.name, number, text, attempt)),
            on_retry=lambda why, attempt, seconds: self._heard(ModelRetry(self.name, number, why, attempt, seconds)),
        )
        turn = _without_cut_arguments(self._respond(number, request))
        if turn.usage is not None:
            self.usage += turn.usage
            if self.tracker is not None:
                self.tracker.record_cumulative(self.evaluation_id, self.usage)
        if self.usage.total_tokens is None and number == 1 and self.tracker is not None:
            budget, who = self.tracker.budget, self.model_name or self.provider
            if any((budget.max_total_tokens, budget.max_input_tokens, budget.max_output_tokens)):
                logger.warning("%s does not tell how many tokens it uses: the limit of tokens holds nothing back", who)
        return turn

    def _respond(self, number: int, request: Request) -> Turn:
        session_id = self.session.session_id
        self.session.notify(
            ModelRequested(self.evaluation_id, number, request, self.provider, self.model_name, session_id)
        )
        try:
            turn = self.model.respond(request)
        except BaseException as error:
            self.session.notify(ModelAnswered(self.evaluation_id, number, None, error))
            raise
        self.session.notify(ModelAnswered(self.evaluation_id, number, turn))
        return turn

    def _heard(self, event: ModelText | ModelRetry) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat()
        self.session.notify(event)

    def _said(self, message: Message) -> Message:
        self.session.notify(MessageAdded(self.name, message))
        return message

    def _response(self, turn: Turn) -> PromptResponse[OutputT] | _NoAnswer:
        """What a turn without tool calls says, if it is an answer."""
        if turn.ended == "cut":
            why = "the final answer was cut off at the provider's limit: allow it more tokens"
            return _NoAnswer(
                self._stopped(why, "response"),
                "Your answer was cut off at the limit of its length: give a shorter one.",
            )
        if not turn.text.strip() and turn.parsed is None:
            why = "the model answered nothing: neither text nor a tool call"
            return _NoAnswer(
                self._stopped(why, "response"), "You answered nothing. Go on, or if all is done, say what was done."
            )
        if self.rendered.structured_output is None:
            return PromptResponse(self.name, text=turn.text)
        try:
            return PromptResponse(self.name, output=parse_output(self.rendered, turn.text, parsed=turn.parsed))
        except OutputParseError as error:
            stopped = self._stopped(f"the final answer is not what the prompt declares: {error}", "response")
            stopped.__cause__ = error
            return _NoAnswer(stopped, f"Your answer is not what was asked for: {error}. Answer again.")

    def _finished(self, response: PromptResponse[OutputT]) -> PromptResponse[OutputT]:
        self._check_deadline("response")
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

    def _say_rendered(self) -> None:
        event = PromptRendered(
            prompt_ns=self.prompt.ns,
            prompt_key=self.prompt.key,
            prompt_name=self.prompt.name,
            adapter=type(self.adapter).__name__,
            session_id=self.session.session_id,
            render_inputs=self.prompt.params,
            rendered_prompt=self.rendered.text,
            descriptor=self.prompt.descriptor if self.prompt.overrides_store is not None else None,
            run_context=self.run_context,
        )
        self.session.dispatch(event)
        self.session.dispatch(
            RenderedTools(
                self.prompt.ns,
                self.prompt.key,
                self.tools,
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
