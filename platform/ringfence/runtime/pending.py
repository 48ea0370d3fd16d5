"""Transactions for tools that somebody else runs, and tells of: one hook before each call, one after it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass

from ringfence.runtime.session import Session
from ringfence.runtime.transaction import HasParticipants, tool_transaction


class _NotKept(Exception):
    """Leaves the block of a call that is to be rolled back."""


@dataclass(frozen=True, slots=True)
class _Pending:
    tool: str
    open: ExitStack
    context: Context
    """In which the block was entered, since hooks come on any thread."""


class PendingToolTracker:
    """A transaction from the hook before a tool call to the one after it, by the id of the call.

    The tools are taken for opaque: they change files by themselves, and what is changed between the two hooks is the
    call's. So one call runs at a time: another that is begun meanwhile waits for it, and raises ParticipantBusyError
    when that takes too long. Any thread may come with a hook.
    """

    def __init__(self, session: Session, resources: HasParticipants | None = None) -> None:
        """``resources`` are those that take part: ``prompt.resources``, say, within their block."""
        self._session = session
        self._resources = resources
        self._guard = threading.Lock()
        self._pending: dict[str, _Pending | None] = {}

    @property
    def pending_tool_executions(self) -> dict[str, str]:
        """The tools that run now, by call id."""
        with self._guard:
            return {call_id: one.tool for call_id, one in self._pending.items() if one is not None}

    def begin_tool_execution(self, call_id: str, tool: str) -> None:
        """Before a call. Raises ValueError for an id that is pending already, and what `tool_transaction` raises."""
        with self._guard:
            if call_id in self._pending:
                raise ValueError(f"the tool call {call_id} has begun already")
            self._pending[call_id] = None
        try:
            one = _Pending(tool, ExitStack(), copy_context())
            block = tool_transaction(self._session, self._resources, tag=tool, opaque=True)
            one.context.run(one.open.enter_context, block)
        except BaseException:
            with self._guard:
                del self._pending[call_id]
            raise
        with self._guard:
            self._pending[call_id] = one

    def end_tool_execution(self, call_id: str, *, success: bool) -> bool:
        """After a call: keep what it changed, or roll it back. Whether it was rolled back; False for an unknown id.

        Raises what `tool_transaction` raises at its end: what could not be kept has been rolled back then.
        """
        with self._guard:
            one = self._pending.get(call_id)
            if one is None:
                return False
            del self._pending[call_id]
        if success:
            one.context.run(one.open.close)
            return False
        try:
            one.context.run(_fail, one.open)
        except _NotKept:
            return True
        raise AssertionError("a block does not swallow what leaves it")

    def abort_tool_execution(self, call_id: str) -> bool:
        """Roll back a call whose end nobody will tell of. False for an unknown id."""
        return self.end_tool_execution(call_id, success=False)


def _fail(block: ExitStack) -> None:
    with block:
        raise _NotKept
