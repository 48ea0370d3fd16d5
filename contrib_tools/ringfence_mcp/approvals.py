"""Approvals over MCP: the person at the client of a call decides before it is kept.

Since 2026-07-28 a question is the result of a request, and the client repeats the request with the answer. The call
waits on its thread in between.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import anyio
import mcp_types as types
from anyio import from_thread
from anyio.abc import TaskGroup
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError

from ringfence.limits import Cancellation
from ringfence.policies.approval import Approval, ApprovalRequest
from ringfence.session.tool_result import bounded
from ringfence_mcp.identity import identity_of
from ringfence_mcp.progress import cancel_on_disconnect, report_progress
from ringfence_mcp.questions import Answer, Elicitation, answer_in, ask, asking_result, elicitation_of
from ringfence_tools.printable import MAX_REASON_CHARACTERS, one_line, printable
from ringfence_tools.runs.asking import question_lines

CANNOT_ASK = "this client cannot ask a person (MCP calls it elicitation), so it counts as a no"
WAITING = "waiting for approval of {tool} (call {call_id}): nothing was changed. Try again when a person has answered"
ANSWERED = "this question was answered before: nothing more was changed. Call the tool again"
TIMED_OUT = "the time of this question is over, and its call was rolled back. Call the tool again"
UNKNOWN = "no question of this call has this requestState: nothing was changed. Call the tool again without it"
MALFORMED = "the answer of the client is malformed, so it counts as a no: its `choice` is none of {}"
MAX_DIFF_LINES, MAX_OUTPUT_LINES, MAX_CHARACTERS = 100, 20, 10_000
MAX_COLUMNS = 72
"""Of the text of a question: few enough for the form of a client at a narrow terminal."""
LOOK_SECONDS = 0.1
"""How often a waiting call looks whether it was cancelled."""
MAX_ENDED = 100
"""The number of questions whose end is remembered."""

Context: TypeAlias = ServerRequestContext[Any, Any]
Running: TypeAlias = Callable[[Cancellation], AbstractContextManager[object]]
"""A block in which the server cancels a cancellation when it stops."""
Handler: TypeAlias = Callable[[Context, types.CallToolRequestParams, Cancellation], Awaitable[types.CallToolResult]]


@dataclass(eq=False)
class Rounds:
    """A call that takes several requests of its client."""

    name: str
    arguments: object
    ended: deque[tuple[str, str]]
    """The states of questions that are not open any more, and what a late answer to them is told."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    news: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is a question or a result."""
    question: types.InputRequiredResult | None = None
    result: types.CallToolResult | Exception | None = None
    state: str = ""
    choices: Sequence[str] = ()
    answer: Answer = field(default_factory=lambda: Answer(None))
    answered: anyio.Event = field(default_factory=anyio.Event)

    async def ask(self, text: str, choices: Sequence[str]) -> Answer:
        self.state, self.choices, self.answered = secrets.token_urlsafe(32), choices, anyio.Event()
        self.question = asking_result(text, choices, self.state)
        self.news.set()
        try:
            await self.answered.wait()
        finally:
            if self.state and not self.cancellation.cancelled:
                self.ended.append((self.state, TIMED_OUT))
            self.state = ""
        return self.answer

    def go_on(self, params: types.CallToolRequestParams) -> bool:
        """Take the answer in a repeated request. Return False if it answers no question of this call."""
        state, self_state = params.request_state or "", self.state
        same = (params.name, params.arguments or {}) == (self.name, self.arguments or {})
        if not (self_state and same and hmac.compare_digest(state.encode(), self_state.encode())):
            return False
        self.ended.append((self.state, ANSWERED))
        self.state, self.question, self.news = "", None, anyio.Event()
        self.answer = answer_in(params, self.choices)
        self.answered.set()
        return True


class Approvals:
    """The calls of one server, and the one of them that waits for a person."""

    def __init__(self) -> None:
        self._contexts: dict[Cancellation | None, Context] = {}
        self._rounds: dict[Cancellation | None, Rounds] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=MAX_ENDED)
        self._waiting: ApprovalRequest | None = None
        self._queued: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def tasks(self) -> AsyncGenerator[TaskGroup]:
        """A group for the calls that outlast their first request. At its end they are rolled back."""
        async with anyio.create_task_group() as group:
            try:
                yield group
            finally:
                for rounds in self._rounds.values():
                    rounds.cancellation.cancel()
                group.cancel_scope.cancel()

    async def acquire(self, turn: anyio.Lock) -> None:
        """Wait for the turn of a call. Raise MCPError if the call whose turn it is waits for a person."""
        while (waiting := self._waiting) is None:
            with anyio.CancelScope() as scope:
                self._queued.add(scope)
                try:
                    await turn.acquire()
                    return
                finally:
                    self._queued.discard(scope)
        message = WAITING.format(tool=waiting.tool, call_id=waiting.call_id)
        raise MCPError(code=types.INTERNAL_ERROR, message=message)

    async def answer(
        self, context: Context, params: types.CallToolRequestParams, cancellation: Cancellation, handle: Handler
    ) -> types.CallToolResult:
        """Run a call whose client can be asked meanwhile, if at all."""
        self._contexts[cancellation] = context
        try:
            return await handle(context, params, cancellation)
        finally:
            del self._contexts[cancellation]

    async def answer_in_rounds(
        self, context: Context, params: types.CallToolRequestParams, running: Running, handle: Handler
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Run a call up to its first question or its result, or go on with one that has asked."""
        if params.request_state is None:
            rounds = Rounds(params.name, params.arguments, self._ended)
            group: TaskGroup = context.lifespan_context.group
            group.start_soon(self._complete, rounds, running, partial(handle, context, params, rounds.cancellation))
        else:
            rounds = next((one for one in self._rounds.values() if one.go_on(params)), None)
            if rounds is None:
                from ringfence_mcp.clients import error_result

                why = next((why for state, why in self._ended if state == params.request_state), UNKNOWN)
                return error_result(why)
        news = rounds.news
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(report_progress, params.name, Cancellation(), context)  # the call goes on
                if context.request is not None:
                    group.start_soon(cancel_on_disconnect, context.request.receive, rounds.cancellation)
                await news.wait()
                group.cancel_scope.cancel()
        finally:
            if not news.is_set():  # the request was cancelled
                rounds.cancellation.cancel()
        if isinstance(rounds.result, Exception):
            raise rounds.result
        result = rounds.result or rounds.question
        assert result is not None
        return result

    async def _complete(
        self, rounds: Rounds, running: Running, handle: Callable[[], Awaitable[types.CallToolResult]]
    ) -> None:
        self._rounds[rounds.cancellation] = rounds
        try:
            with running(rounds.cancellation):
                rounds.result = await handle()
        except Exception as error:
            rounds.result = error
        finally:
            del self._rounds[rounds.cancellation]
            rounds.news.set()

    def ask(self, request: ApprovalRequest) -> Approval | None:
        """Ask the person at the client of a call, on the thread of the call."""
        context, cancellation = self._contexts.get(request.cancellation), request.cancellation
        how = elicitation_of(context) if context is not None else None
        if context is None or how is None or cancellation is None:
            return Approval(False, CANNOT_ASK)
        # Clients that cannot be told apart share a session: one must not answer for the others.
        choices = ("yes", "no", "always") if identity_of(context) is not None else ("yes", "no")
        question = partial(ask, context) if how is Elicitation.REQUEST else self._rounds[cancellation].ask
        answer = from_thread.run(self._wait, request, cancellation, partial(question, _text(request, choices), choices))
        if answer is None:
            return None
        if isinstance(answer, MCPError):
            reason = one_line(answer.error.message, MAX_REASON_CHARACTERS)
            return Approval(False, f"the client could not ask a person: {reason}")
        if answer.is_malformed:
            return Approval(False, MALFORMED.format(", ".join(choices)))
        if answer.choice in ("yes", "always"):
            return Approval(True, always=answer.choice == "always")
        return Approval.no(printable(answer.comment.strip()))

    async def _wait(
        self, request: ApprovalRequest, cancellation: Cancellation, question: Callable[[], Awaitable[Answer]]
    ) -> Answer | MCPError | None:
        """Ask, and refuse other calls meanwhile. None: nobody has answered in time, or the call was cancelled."""
        answer: Answer | MCPError | None = None

        async def look() -> None:
            while not cancellation.cancelled:
                await anyio.sleep(LOOK_SECONDS)
            group.cancel_scope.cancel()

        self._waiting = request
        for scope in self._queued:
            scope.cancel()
        try:
            with anyio.move_on_after(request.timeout_seconds):
                async with anyio.create_task_group() as group:
                    group.start_soon(look)
                    try:
                        answer = await question()
                    except MCPError as error:
                        answer = error
                    group.cancel_scope.cancel()
        finally:
            self._waiting = None
        return answer


def _text(request: ApprovalRequest, choices: Sequence[str]) -> str:
    lines = question_lines(request, most_diff=MAX_DIFF_LINES, most_output=MAX_OUTPUT_LINES, width=MAX_COLUMNS)
    always = f", always: {request.always}" if "always" in choices else ""
    end = f"{'Run' if request.before else 'Keep'} it? yes or no{always}. A no after {request.timeout_seconds:.0f} s."
    return f"{bounded(chr(10).join(text for text, _ in lines), MAX_CHARACTERS)}\n{end}"
