"""The evaluation loop: ask the model, run the tools it calls, ask again, until it answers."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import uuid4

from ringfence import serde
from ringfence.adapters.model import (
    Conversation,
    EvaluationEnded,
    EvaluationStarted,
    Message,
    MessageAdded,
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
from ringfence.adapters.written_calls import why_no_answer
from ringfence.errors import (
    ContextWindowExceededError,
    DeadlineExceededError,
    EvaluationPhase,
    OutputParseError,
    PromptError,
    PromptEvaluationError,
    VisibilityExpansionRequired,
)
from ringfence.limits import (
    Budget,
    BudgetExceededError,
    BudgetTracker,
    Deadline,
    Heartbeat,
    RunContext,
    RunOptions,
    TokenUsage,
)
from ringfence.participants import current_call
from ringfence.prompt.disclosure import OPEN_SECTIONS
from ringfence.prompt.rendering import parse_output
from ringfence.runtime.context import Rendering
from ringfence.runtime.tool import Tool
from ringfence.runtime.tool_executor import ToolCallResult, ToolExecutor, check_arguments
from ringfence.secrets import MaskedStream
from ringfence.session.events import PromptExecuted, PromptRendered, PromptResponse, RenderedTools, ToolSchema
from ringfence.session.session import Session
from ringfence.session.tool_result import sendable
from ringfence.session.visibility import SetVisibilityOverride, VisibilityOverrides

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")

MAX_TURNS = 200
"""The default limit of turns of one evaluation. It ends the evaluation of a model that goes in circles."""
MAX_INVALID_ANSWERS = 2
"""The number of consecutive requests for another final answer, after an answer that does not parse."""


FIRST_REPEAT = 3
REPEATED = "[You made this call {} times and always had this answer; no file has changed meanwhile. Do something else.]"
NO_ANSWERS = {
    "call": (
        "the model wrote a tool call as text: its server does not read the calls of this model",
        "You wrote a tool call as text, which ran nothing. Call the tool itself, or if all is done, say what was done.",
    ),
    "reasoning": (
        "the model answered with nothing but its reasoning",
        "You answered with nothing but your reasoning. Go on, or if all is done, say what was done.",
    ),
}
"""Why a text is no final answer, and what the model is told, by what the text is."""


def tool_schema(tool: Tool[Any, Any], rendered: Rendering) -> ToolSchema:
    """The schema of a tool as the model sees it, with the descriptions of the rendered prompt."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.params_type is not None:
        parameters = serde.schema(tool.params_type, extra="forbid")
    for field, text in rendered.tool_param_descriptions.get(tool.name, {}).items():
        parameters["properties"][field]["description"] = text
    inputs = [example.input for example in tool.examples if example.input is not None]
    examples = tuple(cast("dict[str, object]", serde.dump(each)) for each in inputs)
    return ToolSchema(tool.name, tool.description, parameters, examples)


class LoopAdapter(ABC):
    """The base class of adapters that run the evaluation loop. A subclass implements `respond`.

    Events name the adapter by its optional attributes ``provider`` and ``model``, both strings.
    """

    max_turns: int = MAX_TURNS
    max_repeats: int | None = None
    """How often a call may be made with the same answer, while nothing changes. The evaluation then ends."""
    tool_choice: ToolChoice = "auto"
    """The tool choice of the first request. "none" holds for all requests.

    Later requests use "auto" otherwise: a model that always had to call a tool could not end.
    """

    @abstractmethod
    def respond(self, request: Request) -> Turn:
        """Send one request and return the model's turn. Raises PromptEvaluationError when the provider fails."""

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
        """See `ProviderAdapter.evaluate`."""
        check_arguments(prompt, session)
        options = RunOptions.of_evaluation(
            deadline=deadline,
            budget=budget,
            budget_tracker=budget_tracker,
            heartbeat=heartbeat,
            run_context=run_context,
        )
        run = _Evaluation(self, prompt, session, options)
        with prompt.resources, run.published():
            run.check_deadline("request")
            run.render()
            run.check_tool_choice()
            run.resume()
            invalid_answers = 0
            for number in range(1, self.max_turns + 1):
                turn = run.ask(number)
                if turn.ended == "refused":
                    raise run.failure(f"the model refused: {turn.text or 'it did not say why'}", "response")
                if turn.tool_calls:
                    invalid_answers = 0
                    run.add(Message("assistant", turn.text, turn))
                    run.call_tools(turn.tool_calls)
                    continue
                cause = None
                if turn.ended == "cut":
                    why = "the final answer was cut off at the provider's limit: allow it more tokens"
                    advice = f"Your answer was cut off at {_limit_of(turn)}: give a shorter one."
                elif not turn.text.strip() and turn.parsed is None:
                    why = "the model answered nothing: neither text nor a tool call"
                    advice = "You answered nothing. Go on, or if all is done, say what was done."
                elif (none := run.why_no_answer(turn)) is not None:
                    why, advice = none
                else:
                    try:
                        return run.finish(turn)
                    except OutputParseError as error:
                        cause = error
                        why = f"the final answer is not what the prompt declares: {error}"
                        advice = f"Your answer is not what was asked for: {error}. Answer again."
                if invalid_answers == MAX_INVALID_ANSWERS:
                    raise run.failure(why, "response") from cause
                invalid_answers += 1
                if turn.text.strip():  # providers reject an empty message
                    run.add(Message("assistant", turn.text, turn))
                run.add(Message("user", advice))
            turns = f"{self.max_turns} turn{'s' if self.max_turns != 1 else ''}"
            raise run.failure(f"{turns} without a final answer", "budget")


class _Evaluation(Generic[OutputT]):
    """The state of one evaluation, and the steps of its loop."""

    rendered: RenderedPrompt[OutputT]
    tools: Sequence[ToolSchema]
    executor: ToolExecutor

    def __init__(self, adapter: LoopAdapter, prompt: Prompt[OutputT], session: Session, options: RunOptions) -> None:
        self.adapter = adapter
        self.prompt = prompt
        self.session = session
        self.options = options
        self.tracker = options.budget_tracker
        self.id = uuid4()
        self.outer_call = current_call()
        self.name = prompt.name or f"{prompt.ns}:{prompt.key}"
        self.provider: str = getattr(adapter, "provider", type(adapter).__name__)
        self.model: str | None = getattr(adapter, "model", None)
        self.usage = TokenUsage()
        self.messages: list[Message] = []
        """The conversation, without the instructions."""
        self.expansions_left = sum(1 for _ in prompt.template.walk())
        self.repeats = Counter[bytes]()
        """How often each call had its answer since a call last changed a file."""

    @contextmanager
    def published(self) -> Generator[None]:
        """Publish the start of the evaluation, and at the end its response or its error."""
        notify, session_id, context = self.session.notify, self.session.session_id, self.options.run_context
        notify(EvaluationStarted(self.id, self.name, self.provider, self.model, session_id, context))
        try:
            yield
        except BaseException as error:
            notify(EvaluationEnded(self.id, self.usage, error))
            raise
        notify(EvaluationEnded(self.id, self.usage))

    def render(self) -> None:
        """Render the prompt with the current state of the session, and offer the tools of the rendering."""
        prompt, session, options = self.prompt, self.session, self.options
        deadline = self.nearest_deadline()
        self.rendered = prompt.render(session=session, deadline=deadline)
        if session.secrets:
            self.rendered = replace(self.rendered, text=session.secrets.mask(self.rendered.text))
        self.executor = ToolExecutor(
            prompt=prompt,
            session=session,
            adapter=self.adapter,
            deadline=deadline,
            budget_tracker=self.tracker,
            heartbeat=options.heartbeat,
            rendered_prompt=self.rendered,
            run_context=options.run_context,
        )
        self.tools = tuple(tool_schema(tool, self.rendered) for tool in self.rendered.tools)
        if session.secrets:
            self.tools = session.secrets.mask(self.tools)
        rendered = PromptRendered(
            prompt_ns=prompt.ns,
            prompt_key=prompt.key,
            prompt_name=prompt.name,
            adapter=type(self.adapter).__name__,
            session_id=session.session_id,
            render_inputs=prompt.params,
            rendered_prompt=self.rendered.text,
            descriptor=prompt.descriptor if prompt.overrides_store is not None else None,
            run_context=options.run_context,
        )
        session.dispatch(rendered)
        session.dispatch(
            RenderedTools(
                prompt.ns,
                prompt.key,
                self.tools,
                rendered.event_id,
                session_id=session.session_id,
                run_context=options.run_context,
            )
        )

    def check_tool_choice(self) -> None:
        choice = self.adapter.tool_choice
        if choice not in ("auto", "none", "required", *({"name": tool.name} for tool in self.tools)):
            choices = '"auto", "none", "required" or {"name": a tool on offer}'
            raise self.failure(f"there is no tool choice {choice!r}: it is {choices}", "request")

    def resume(self) -> None:
        """Continue the session's conversation for this evaluation. Unanswered calls of its last turn run first."""
        resumed = self.session[Conversation].latest()
        if resumed is not None and resumed.prompt_name == self.name:
            self.session[Conversation].clear()
            self.messages += resumed.messages
            self.call_tools(resumed.unanswered())
            if resumed.news:
                self.add(Message("user", resumed.news))

    def ask(self, number: int) -> Turn:
        """Ask the model for the next turn. A conversation that exceeds the context window is shortened for good."""
        attempt = 1
        while True:
            self.beat()
            self.check_deadline("request")
            self.check_budget()
            if self.outer_call is not None and self.outer_call.ended:  # a thread of its handler still runs
                raise self.failure("the tool call whose handler evaluates this has ended", "request")
            try:
                turn = self.request_turn(number)
                break
            except ContextWindowExceededError:
                shorter = shorten(self.messages)
                if shorter is None:
                    raise
            self.messages, left_out = shorter
            attempt += 1
            why = f"the conversation is too long for the model, and goes on without {left_out}"
            self.report(ModelRetry(self.name, number, why, attempt, 0.0))
        if turn.usage is not None:
            self.usage += turn.usage
            if self.tracker is not None:
                self.tracker.record_cumulative(self.id, self.usage)
        if number == 1 and self.usage.total_tokens is None and self.tracker is not None:
            budget, who = self.tracker.budget, self.model or self.provider
            if any((budget.max_total_tokens, budget.max_input_tokens, budget.max_output_tokens)):
                logger.warning("%s reports no token counts: the limit of tokens holds nothing back", who)
        self.session.notify(ModelTurn(self.name, number, turn))
        self.check_budget()  # after the event with the turn's cost
        self.check_cost_is_known(turn)
        return turn

    def check_cost_is_known(self, turn: Turn) -> None:
        is_known = turn.usage is not None and turn.usage.cost_usd is not None
        if self.tracker is not None and self.tracker.limits_cost and not is_known:
            who = self.model or self.provider
            raise self.failure(f"the cost is limited, and nobody knows what a turn of {who} costs", "budget")

    def request_turn(self, number: int) -> Turn:
        output, choice = self.rendered.structured_output, self.adapter.tool_choice
        on_text, flush = self.report_text(number)
        request = Request(
            self.name,
            (Message("system", self.rendered.text), *self.messages),
            self.tools,
            output_schema=output.schema() if output is not None else None,
            deadline=self.nearest_deadline(),
            tool_choice=choice if number == 1 or choice == "none" else "auto",
            on_text=on_text,
            on_retry=lambda why, attempt, seconds: self.report(ModelRetry(self.name, number, why, attempt, seconds)),
        )
        notify, session_id = self.session.notify, self.session.session_id
        notify(ModelRequested(self.id, number, request, self.provider, self.model, session_id))
        try:
            turn = _clean(self.adapter.respond(request), self.messages)
            if self.session.secrets:
                turn = self.session.secrets.mask(turn)
            flush()
        except BaseException as error:
            notify(ModelAnswered(self.id, number, None, error))
            raise
        notify(ModelAnswered(self.id, number, turn))
        return turn

    def call_tools(self, calls: Sequence[ToolCall]) -> None:
        """Run the calls and add their answers. Calls that open sections run first: other calls may use their tools."""
        begun = len(self.messages)
        turn = next(message.turn for message in reversed(self.messages) if message.turn is not None) if calls else None
        unfinished = turn.tool_calls[-1].call_id if turn is not None and turn.ended == "cut" else None
        for call in sorted(calls, key=lambda call: call.name != OPEN_SECTIONS):
            try:
                why = CUT_CALL.format(_limit_of(turn)) if turn is not None and call.call_id == unfinished else None
                ended = self.executor.execute(call.name, call.arguments, call_id=call.call_id, rejection=why)
            except VisibilityExpansionRequired as expansion:
                if self.expansions_left == 0:
                    raise
                self.expansions_left -= 1
                self.add(self.open_sections(call, expansion))
                continue
            text = self.count_repeat(call, ended)
            self.add(Message("tool", text, call_id=call.call_id, failed=not ended.result.success))
        places = {call.call_id: place for place, call in enumerate(calls)}
        self.messages[begun:] = sorted(self.messages[begun:], key=lambda answer: places[answer.call_id])

    def count_repeat(self, call: ToolCall, ended: ToolCallResult) -> str:
        """Return the answer to a call. It begins with how often the call had this answer, from the third time on.

        Raises PromptEvaluationError if it was too often.
        """
        if ended.receipt.changes and ended.receipt.outcome == "committed":
            self.repeats.clear()
            return ended.text
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(serde.dump_any(call.arguments))
        said = "\0".join((call.name, arguments, ended.text)).encode("utf-8", "surrogatepass")
        known = hashlib.sha256(said).digest()  # answers may be long
        self.repeats[known] += 1
        count, limit = self.repeats[known], self.adapter.max_repeats
        if limit is not None and count >= limit:
            what = sendable(call.name)
            raise self.failure(f"{what} was called {count} times alike, and had the same answer each time", "budget")
        return f"{REPEATED.format(count)}\n\n{ended.text}" if count >= FIRST_REPEAT else ended.text

    def open_sections(self, call: ToolCall, expansion: VisibilityExpansionRequired) -> Message:
        """Render the prompt again with the requested sections in full, and return the answer to the call."""
        before = self.session[VisibilityOverrides].all()
        for path, visibility in expansion.requested_overrides.items():
            self.session.dispatch(SetVisibilityOverride(path, visibility))
        try:
            self.render()
        except PromptError as error:
            self.session[VisibilityOverrides].seed(before)
            return Message("tool", f"that cannot be shown: {error}", call_id=call.call_id, failed=True)
        paths = ", ".join(".".join(path) for path in expansion.requested_overrides)
        return Message("tool", f"opened: {paths}; your instructions and tools have them now", call_id=call.call_id)

    def why_no_answer(self, turn: Turn) -> tuple[str, str] | None:
        """Return why the text of a turn is no final answer, and what the model is told. None for an answer."""
        if self.rendered.structured_output is not None:  # it is parsed
            return None
        why = why_no_answer(turn.text, {tool.name for tool in self.tools})
        return NO_ANSWERS[why] if why is not None else None

    def finish(self, turn: Turn) -> PromptResponse[OutputT]:
        """Return the response of a turn without tool calls, and publish it. Raises OutputParseError."""
        if self.rendered.structured_output is None:
            response = PromptResponse[OutputT](self.name, text=turn.text)
        else:
            response = PromptResponse(self.name, output=parse_output(self.rendered, turn.text, parsed=turn.parsed))
        self.check_deadline("response")
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

    def add(self, message: Message) -> None:
        if self.session.secrets and message.turn is None:  # news for a resumed run are masked nowhere else
            message = self.session.secrets.mask(message)
        self.messages.append(message)
        self.session.notify(MessageAdded(self.name, message))

    def report_text(self, number: int) -> tuple[Callable[[str, int], None], Callable[[], None]]:
        """Return a function that reports a piece of a turn, and one that reports what it holds back at the end.

        Held back is what may be the beginning of a secret: one that comes in several pieces is masked, too.
        """
        streams: dict[int, MaskedStream] = {}

        def show(data: bytes, attempt: int) -> None:
            self.report(ModelText(self.name, number, data.decode("utf-8", "surrogatepass"), attempt))

        def report(text: str, attempt: int) -> None:
            if secrets := self.session.secrets:
                stream = streams.setdefault(attempt, MaskedStream(secrets))
                show(stream.take(text.encode("utf-8", "surrogatepass")), attempt)
            else:
                self.report(ModelText(self.name, number, text, attempt))

        def flush() -> None:
            for attempt in sorted(streams)[-1:]:  # the others are void
                if held := streams[attempt].end():
                    show(held, attempt)

        return report, flush

    def report(self, event: ModelText | ModelRetry) -> None:
        self.beat()
        self.session.notify(event)

    def beat(self) -> None:
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()

    def nearest_deadline(self) -> Deadline | None:
        """The earlier one of the evaluation's deadline and the budget's."""
        deadlines = (self.options.deadline, self.tracker.budget.deadline if self.tracker is not None else None)
        return min((each for each in deadlines if each is not None), key=Deadline.remaining, default=None)

    def check_deadline(self, phase: EvaluationPhase) -> None:
        if self.options.deadline is not None and self.options.deadline.expired:
            raise self.failure("the deadline has passed", phase) from DeadlineExceededError("the deadline has passed")

    def check_budget(self) -> None:
        if self.tracker is not None:
            try:
                self.tracker.check()
            except BudgetExceededError as error:
                raise self.failure(str(error), "budget") from error

    def failure(self, why: str, phase: EvaluationPhase) -> PromptEvaluationError:
        return PromptEvaluationError(why, prompt_name=self.name, phase=phase)


# Tool calls that every provider accepts

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CUT_CALL = "your answer was cut off at {} in this call, which did not run: write less at once, a long file in parts"
"""Its arguments may be a part of what the model meant, even where they are whole JSON: some servers close it."""


def _limit_of(turn: Turn) -> str:
    tokens = turn.usage.output_tokens if turn.usage is not None else None
    return f"the limit of {tokens:,} tokens" if tokens else "the limit of its length"


def _clean(turn: Turn, conversation: Sequence[Message]) -> Turn:
    """Return the turn with calls that can be sent back and with ids that are unique in the conversation."""
    known = {call.call_id for message in conversation if message.turn for call in message.turn.tool_calls}
    calls: list[ToolCall] = []
    for call in turn.tool_calls:
        # A provider's SDK does not check the types of these values.
        call_id, name, arguments = cast("tuple[Any, Any, Any]", (call.call_id, call.name, call.arguments))
        if not isinstance(call_id, str) or _ID.fullmatch(call_id) is None or call_id in known:
            call_id = f"call_{len(known) + 1}"
            while call_id in known:
                call_id += "x"
        known.add(call_id)
        if not isinstance(arguments, Mapping):
            arguments = sendable(arguments if isinstance(arguments, str) else json.dumps(arguments))
        calls.append(ToolCall(call_id, sendable(name) if isinstance(name, str) else "", cast("Any", arguments)))
    return replace(turn, tool_calls=tuple(calls))


# Conversations that exceed the context window

SHORT = 400
"""The number of characters up to which the answer of a tool stays in a shortened conversation."""
ANSWER_LEFT_OUT = (
    "[left out: the conversation had become too long; if you still need it, ask for it again, less at once]"
)
TURNS_LEFT_OUT = (
    "[The earlier turns of this conversation are left out, since it had become too long. What you did in them is done:"
    " look at the files before you go on.]"
)


def shorten(messages: Sequence[Message]) -> tuple[list[Message], str] | None:
    """Return a shorter conversation and a description of what it lacks. Return None if nothing can be left out.

    The answers of tools are left out first, from the oldest on, until half of their text is gone. If all answers are
    short, the older half of the turns is left out.
    """
    long = [place for place, each in enumerate(messages) if each.role == "tool" and len(each.text) > SHORT]
    if long:
        found, left_out = list(messages), 0
        excess = sum(len(messages[place].text) for place in long) / 2
        while excess > 0:
            place = long[left_out]
            excess -= len(messages[place].text)
            found[place] = replace(messages[place], text=ANSWER_LEFT_OUT)
            left_out += 1
        return found, f"the answers to {left_out} earlier tool call{'s' if left_out > 1 else ''}"
    turns = [place for place, each in enumerate(messages) if each.role == "assistant"]
    left_out = len(turns) // 2
    if left_out == 0:
        return None
    return [Message("user", TURNS_LEFT_OUT), *messages[turns[left_out] :]], f"the {left_out} oldest turns of it"
