"""Tool calls of an asynchronous framework, which may ask for several at once and give up on any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.adapters.tool_executor import ToolExecutor


class CallsInOrder:
    """Runs the calls of one executor one after the other, in the order in which they are asked for, beside the loop."""

    def __init__(self, executor: ToolExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringfence-calls")

    async def answer(self, name: str, arguments: Mapping[str, object] | str, call_id: str | None) -> str:
        """What the model is to read. Raises what `ToolExecutor.execute` raises.

        A call that has begun cannot be taken out of its thread. So who is cancelled meanwhile waits for its end: when
        this returns, in whatever way, nothing of the call runs.
        """
        # In the context of who asks, so that it is known which call this one is nested in.
        run = copy_context().run
        running = self._threads.submit(run, self._executor.execute, name, arguments, call_id=call_id)
        try:
            return (await asyncio.shield(asyncio.wrap_future(running))).text
        except asyncio.CancelledError:
            running.cancel()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([asyncio.wrap_future(running)])
            raise
