"""Calls of a workspace from asyncio: each is one hop to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from sys import exc_info
from typing import TYPE_CHECKING, TypeVar

from ringfence.limits import Cancellation
from ringfence.participants import CURRENT_CALL

if TYPE_CHECKING:
    from types import TracebackType

    from ringfence_workspace.workspace_calls import WorkspaceTransaction

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[[Cancellation], ResultT]) -> ResultT:
    """Do the work in a thread. If this task is cancelled, ``work`` is too, and has ended when this raises."""
    cancellation = Cancellation()
    running = asyncio.ensure_future(asyncio.to_thread(work, cancellation))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancellation.cancel()
        await _until_ended(running)
        raise


async def _until_ended(running: asyncio.Future[ResultT]) -> None:
    """Wait for the end of work, however often this task is cancelled meanwhile."""
    while not running.done():
        with suppress(asyncio.CancelledError, Exception):
            await asyncio.shield(running)


@asynccontextmanager
async def in_transaction(
    begin: Callable[[], AbstractContextManager[WorkspaceTransaction]],
) -> AsyncGenerator[WorkspaceTransaction]:
    """A transaction that begins and ends in a thread, around a block of this task."""
    loop, context, block = asyncio.get_running_loop(), copy_context(), begin()
    entering = loop.run_in_executor(None, context.run, block.__enter__)
    try:
        transaction = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await _until_ended(entering)
        if entering.exception() is None:
            await _end(loop, partial(_exit, context, block, exc_info()))
        raise
    token = CURRENT_CALL.set(context.get(CURRENT_CALL))
    try:
        try:
            yield transaction
        finally:
            CURRENT_CALL.reset(token)
    except BaseException:
        if not await _end(loop, partial(_exit, context, block, exc_info())):
            raise
    else:
        await _end(loop, partial(_exit, context, block, (None, None, None)))


def _exit(
    context: Context,
    block: AbstractContextManager[WorkspaceTransaction],
    raised: tuple[type[BaseException] | None, BaseException | None, TracebackType | None],
) -> bool | None:
    return context.run(block.__exit__, *raised)


async def _end(loop: asyncio.AbstractEventLoop, end: Callable[[], bool | None]) -> bool | None:
    """Commit or roll back in a thread, whether or not this task is cancelled meanwhile."""
    ending = loop.run_in_executor(None, end)
    await _until_ended(ending)
    return ending.result()
