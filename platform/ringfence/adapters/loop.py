"""The evaluation loop: ask the model, run the tools it calls, ask again, until it answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

from ringfence import serde
from ringfence.adapters.model import (
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
    Request,
    ToolCall,
    ToolChoice,
    Turn,
)
from ringfence.adapters.tool_executor import ToolExecutor, check_arguments
from ringfence.errors import (
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
from ringfence.prompt.tool import ProviderAdapter, Tool
from ringfence.runtime.events import PromptExecuted, PromptRendered, PromptResponse, RenderedTools, ToolSchema
from ringfence.runtime.limits import (
    Budget,
    BudgetExceededError,
    BudgetTracker,
    Deadline,
    Heartbeat,
    RunContext,
    RunOptions,
    TokenUsage,
)
from ringfence.runtime.reducers import SetVisibilityOverride, VisibilityOverrides
from ringfence.runtime.session import Session

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")

MAX_TURNS = 200
"""Turns of one evaluation; a model that goes in circles ends here."""
MAX_INVALID_ANSWERS = 2
"""How often in a row a model is asked for another final answer, if the one it gave is none."""


def tool_schema(tool: Tool[Any, Any], rendered: RenderedPrompt[Any]) -> ToolSchema:
    """A tool as a model sees it: the schema of its params, with the descriptions that the rendering has."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.params_type is not None:
        parameters = serde.schema(tool.params_type, extra="forbid")
    for field, text in rendered.tool_param_descriptions.get(tool.name, {}).items():
        parameters["properties"][field]["description"] = text
    inputs = [example.input for example in tool.examples if example.input is not None]
    examples = tuple(cast("dict[str, object]", serde.dump(each)) for each in inputs)
    return ToolSchema(tool.name, tool.description, parameters, examples)


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
        check_arguments(prompt, session)
        options = RunOptions.of_evaluation(
            deadline=deadline,
            budget=budget,
            budget_tracker=budget_tracker,
            heartbeat=heartbeat,
            run_context=run_context,
        )
        return evaluate_with(
            self,
            self,
            prompt,
            session=session,
            options=options,
            max_turns=self.max_turns,
            tool_choice=self.tool_choice,
        )


def evaluate_with(
    model: Model,
    adapter: ProviderAdapter,
    prompt: Prompt[OutputT],
    *,
    session: Session,
    options: RunOptions,
    max_turns: int = MAX_TURNS,
    tool_choice: ToolChoice = "auto",
) -> PromptResponse[OutputT]:
    """Evaluate `prompt` with `model`; `adapter` is what tool handlers get for nested evaluations.

    A ``tool_choice`` other than "none" is the first request's only: a model that always had to call a tool could not
    end.

    Raises: what `ProviderAdapter.evaluate` raises.
    """
    with prompt.resources:
        return _Evaluation(model, adapter, prompt, session, options, max_turns, tool_choice).run()


@dataclass(frozen=True, slots=True)
class _InvalidAnswer:
    """Why a turn without tool calls is no final answer: for the caller, and for the model, which may try again."""

    error: PromptEvaluationError
    advice: str


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
        self.tracker = options.budget_tracker
        self.max_turns = max_turns
        self.tool_choice: ToolChoice = tool_choice
        self.outer_call = current_call()
        self.evaluation_id = uuid4()
        self.provider: str = getattr(model, "provider", type(model).__name__)
        self.model_name: str | None = getattr(model, "model", None)
        self.usage = TokenUsage()
        self.expansions_left = sum(1 for _ in prompt.template.walk())
        self.name = prompt.name or f"{prompt.ns}:{prompt.key}"
        self.feedbacks = Feedbacks(prompt.template.feedback_providers, self.name)
        self.calls = 0

    def run(self) -> PromptResponse[OutputT]:
        notify, session_id, context = self.session.notify, self.session.session_id, self.options.run_context
        notify(EvaluationStarted(self.evaluation_id, self.name, self.provider, self.model_name, session_id, context))
        try:
            response = self._evaluate()
        except BaseException as error:
            notify(EvaluationEnded(self.evaluation_id, self.usage, error))
            raise
        notify(EvaluationEnded(self.evaluation_id, self.usage))
        return response

    def _evaluate(self) -> PromptResponse[OutputT]:
        self._check_deadline("request")
        self._render()
        conversation = [Message("system", self.rendered.text), *self._resumed_messages()]
        invalid_answers = 0
        for number in range(1, self.max_turns + 1):
            conversation[0] = Message("system", self.rendered.text)
            turn = self._ask(number, conversation)
            self.session.notify(ModelTurn(self.name, number, turn))
            self._check_budget()  # after observers know what the turn cost
            if turn.ended == "refused":
                raise self._failure(f"the model refused: {turn.text or 'it did not say why'}", "response")
            if turn.tool_calls:
                invalid_answers = 0
                conversation.append(self._add(Message("assistant", turn.text, turn)))
                conversation.extend(self._run_calls(turn.tool_calls))
                continue
            response = self._response(turn)
            if isinstance(response, PromptResponse):
                return self._finish(response)
            if invalid_answers == MAX_INVALID_ANSWERS:
                raise response.error
            invalid_answers += 1
            if turn.text.strip():  # a provider takes no empty message back
                conversation.append(self._add(Message("assistant", turn.text, turn)))
            conversation.append(self._add(Message("user", response.advice)))
        turns = f"{self.max_turns} turn{'s' if self.max_turns != 1 else ''}"
        raise self._failure(f"{turns} without a final answer", "budget")

    def _render(self) -> None:
        deadline = self._nearest_deadline()
        self.rendered = replace(self.prompt.render(session=self.session), deadline=deadline)
        self.executor = ToolExecutor(
            prompt=self.prompt,
            session=self.session,
            adapter=self.adapter,
            deadline=deadline,
            budget_tracker=self.tracker,
            heartbeat=self.options.heartbeat,
            rendered_prompt=self.rendered,
            run_context=self.options.run_context,
        )
        self.tools = tuple(tool_schema(tool, self.rendered) for tool in self.rendered.tools)
        prompt, session_id, context = self.prompt, self.session.session_id, self.options.run_context
        rendered = PromptRendered(
            prompt_ns=prompt.ns,
            prompt_key=prompt.key,
            prompt_name=prompt.name,
            adapter=type(self.adapter).__name__,
            session_id=session_id,
            render_inputs=prompt.params,
            rendered_prompt=self.rendered.text,
            descriptor=prompt.descriptor if prompt.overrides_store is not None else None,
            run_context=context,
        )
        self.session.dispatch(rendered)
        self.session.dispatch(
            RenderedTools(
                prompt.ns, prompt.key, self.tools, rendered.event_id, session_id=session_id, run_context=context
            )
        )

    def _resumed_messages(self) -> list[Message]:
        """The conversation that the session has for this evaluation to go on with, its last turn answered."""
        resumed = self.session[Conversation].latest()
        if resumed is None or resumed.prompt_name != self.name:
            return []
        self.session[Conversation].clear()
        messages = [*resumed.messages, *self._run_calls(resumed.unanswered())]
        return [*messages, self._add(Message("user", resumed.news))] if resumed.news else messages

    def _run_calls(self, calls: Sequence[ToolCall]) -> list[Message]:
        """The answers to the calls, in their order. Sections are opened first, so that the rest has their tools."""
        order = sorted(enumerate(calls), key=lambda numbered: numbered[1].name != OPEN_SECTIONS)
        answers = {place: self._add(self._run_call(call)) for place, call in order}
        return [answers[place] for place in range(len(answers))]

    def _run_call(self, call: ToolCall) -> Message:
        try:
            ended = self.executor.execute(call.name, call.arguments, call_id=call.call_id)
        except VisibilityExpansionRequired as expansion:
            if self.expansions_left == 0:
                raise
            self.expansions_left -= 1
            return self._open_sections(call, expansion)
        self.calls += 1
        context = FeedbackContext(self.prompt, self.session, self.calls, self.options.deadline)
        feedback = self.feedbacks.after(context)
        text = f"{ended.text}\n\n{feedback}" if feedback else ended.text
        return Message("tool", text, call_id=call.call_id, failed=not ended.result.success)

    def _open_sections(self, call: ToolCall, expansion: VisibilityExpansionRequired) -> Message:
        """Go on under instructions that have the requested sections in full."""
        before = self.session[VisibilityOverrides].all()
        for path, visibility in expansion.requested_overrides.items():
            self.session.dispatch(SetVisibilityOverride(path, visibility))
        try:
            self._render()
        except PromptError as error:
            self.session[VisibilityOverrides].seed(before)
            return Message("tool", f"that cannot be shown: {error}", call_id=call.call_id, failed=True)
        paths = ", ".join(".".join(path) for path in expansion.requested_overrides)
        return Message("tool", f"opened: {paths}; your instructions and tools have them now", call_id=call.call_id)

    def _ask(self, number: int, conversation: list[Message]) -> Turn:
        """The next turn. A conversation that the model has no room for is shorter from then on."""
        attempt = 1
        while True:
            attempt += 1
            try:
                return self._request_turn(number, conversation)
            except ContextWindowExceededError:
                shorter = shorten(conversation)
                if shorter is None:
                    raise
                conversation[:], left_out = shorter
                why = f"the conversation is too long for the model, and goes on without {left_out}"
                self._report(ModelRetry(self.name, number, why, attempt, 0.0))

    def _request_turn(self, number: int, conversation: list[Message]) -> Turn:
        self._beat()
        self._check_deadline("request")
        self._check_budget()
        if self.outer_call is not None and self.outer_call.ended:  # in a thread of its handler, which nothing else ends
            raise self._failure("the tool call whose handler evaluates this has ended", "request")
        output = self.rendered.structured_output
        request = Request(
            self.name,
            tuple(conversation),
            self.tools,
            output_schema=output.schema() if output is not None else None,
            deadline=self._nearest_deadline(),
            tool_choice=self.tool_choice if number == 1 or self.tool_choice == "none" else "auto",
            on_text=lambda text, attempt: self._report(ModelText(self.name, number, text, attempt)),
            on_retry=lambda why, attempt, seconds: self._report(ModelRetry(self.name, number, why, attempt, seconds)),
        )
        turn = _without_cut_arguments(self._respond(number, request))
        if turn.usage is not None:
            self.usage += turn.usage
            if self.tracker is not None:
                self.tracker.record_cumulative(self.evaluation_id, self.usage)
        if self.usage.total_tokens is None and number == 1 and self.tracker is not None:
            budget, who = self.tracker.budget, self.model_name or self.provider
            if any((budget.max_total_tokens, budget.max_input_tokens, budget.max_output_tokens)):
                logger.warning("%s reports no token counts: the limit of tokens holds nothing back", who)
        return turn

    def _respond(self, number: int, request: Request) -> Turn:
        notify, session_id = self.session.notify, self.session.session_id
        notify(ModelRequested(self.evaluation_id, number, request, self.provider, self.model_name, session_id))
        try:
            turn = self.model.respond(request)
        except BaseException as error:
            notify(ModelAnswered(self.evaluation_id, number, None, error))
            raise
        notify(ModelAnswered(self.evaluation_id, number, turn))
        return turn

    def _report(self, event: ModelText | ModelRetry) -> None:
        self._beat()
        self.session.notify(event)

    def _beat(self) -> None:
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()

    def _add(self, message: Message) -> Message:
        self.session.notify(MessageAdded(self.name, message))
        return message

    def _response(self, turn: Turn) -> PromptResponse[OutputT] | _InvalidAnswer:
        """The response that a turn without tool calls is, or why it is none."""
        if turn.ended == "cut":
            return _InvalidAnswer(
                self._failure("the final answer was cut off at the provider's limit: allow it more tokens", "response"),
                "Your answer was cut off at the limit of its length: give a shorter one.",
            )
        if not turn.text.strip() and turn.parsed is None:
            return _InvalidAnswer(
                self._failure("the model answered nothing: neither text nor a tool call", "response"),
                "You answered nothing. Go on, or if all is done, say what was done.",
            )
        if self.rendered.structured_output is None:
            return PromptResponse(self.name, text=turn.text)
        try:
            return PromptResponse(self.name, output=parse_output(self.rendered, turn.text, parsed=turn.parsed))
        except OutputParseError as error:
            failure = self._failure(f"the final answer is not what the prompt declares: {error}", "response")
            failure.__cause__ = error
            return _InvalidAnswer(failure, f"Your answer is not what was asked for: {error}. Answer again.")

    def _finish(self, response: PromptResponse[OutputT]) -> PromptResponse[OutputT]:
        self._check_deadline("response")
        self.session.dispatch(
            PromptExecuted(
                prompt_name=self.name,
                adapter=type(self.adapter).__name__,
                result=response,
                session_id=self.session.session_id,
                usage=self.usage,
                run_context=self.options.run_context,
            )
        )
        return response

    def _check_deadline(self, phase: EvaluationPhase) -> None:
        if self.options.deadline is not None and self.options.deadline.expired:
            raise self._failure("the deadline has passed", phase) from DeadlineExceededError("the deadline has passed")

    def _nearest_deadline(self) -> Deadline | None:
        """The evaluation's, or the budget's where that comes first."""
        deadlines = (self.options.deadline, self.tracker.budget.deadline if self.tracker is not None else None)
        return min((each for each in deadlines if each is not None), key=Deadline.remaining, default=None)

    def _check_budget(self) -> None:
        if self.tracker is not None:
            try:
                self.tracker.check()
            except BudgetExceededError as error:
                raise self._failure(str(error), "budget") from error

    def _failure(self, why: str, phase: EvaluationPhase) -> PromptEvaluationError:
        return PromptEvaluationError(why, prompt_name=self.name, phase=phase)


def _without_cut_arguments(turn: Turn) -> Turn:
    """In a turn that was cut off the last call's arguments may lack their end. A text shows that: it is no JSON then.
    An object, and an empty text, look whole, so the call is rejected."""
    if turn.ended != "cut" or not turn.tool_calls:
        return turn
    *calls, last = turn.tool_calls
    if last.arguments and isinstance(last.arguments, str):
        return turn
    return replace(turn, tool_calls=(*calls, replace(last, arguments="{ cut off at the limit of tokens")))


# A conversation that is too long for its model

SHORT = 400
"""Characters of a tool's answer that are not worth leaving out."""
ANSWER_LEFT_OUT = (
    "[left out: the conversation had become too long; if you still need it, ask for it again, less at once]"
)
TURNS_LEFT_OUT = (
    "[The earlier turns of this conversation are left out, since it had become too long. What you did in them is done:"
    " look at the files before you go on.]"
)


def shorten(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    """A shorter conversation, and in words what it lacks; None where nothing can go.

    The answers of tools go first, from the oldest until half of their text is gone. When they are all short, the older
    half of the turns goes.
    """
    return _without_answers(conversation) or _without_turns(conversation)


def _without_answers(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    long = [place for place, each in enumerate(conversation) if each.role == "tool" and len(each.text) > SHORT]
    if not long:
        return None
    found, left_out = list(conversation), 0
    room = sum(len(conversation[place].text) for place in long) / 2
    for place in long:
        if room <= 0:
            break
        room -= len(conversation[place].text)
        found[place] = replace(conversation[place], text=ANSWER_LEFT_OUT)
        left_out += 1
    return found, f"the answers to {left_out} earlier tool call{'s' if left_out > 1 else ''}"


def _without_turns(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    instructions, *others = conversation
    turns = [place for place, each in enumerate(others) if each.role == "assistant"]
    if len(turns) < 2:
        return None
    left_out = len(turns) // 2
    rest = others[turns[left_out] :]
    return [instructions, Message("user", TURNS_LEFT_OUT), *rest], f"the {left_out} oldest turns of it"
