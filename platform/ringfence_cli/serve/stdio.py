"""MCP over standard input and output, a message a line.

The SDK's own transport reads on a thread that nothing can interrupt, so that a server would outlive its Ctrl-C; it
drops what is no message without a word, and takes lines of any length.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from ringfence_cli.serve.clients import Clients

MAX_LINE_BYTES = 16 << 20
CHUNK = 1 << 16
ATOMIC = 4096
"""Bytes that a pipe which is ready to be written to takes at once."""
LAST_SECONDS = 5.0
"""For the client to read the last answers in."""
REFUSAL_SECONDS = 5.0
"""For a client that is not served to ask for anything in, and to go."""

Outgoing = MemoryObjectSendStream[SessionMessage]
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Read = MemoryObjectReceiveStream[SessionMessage | Exception]


async def serve(server: Server[Clients]) -> None:
    """Until the client closes our standard input, or goes away."""
    async with _messages() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def refuse(why: str) -> None:
    """Tell a client why it is not served, in answer to whatever it asks: few show what is on standard error."""
    with anyio.move_on_after(REFUSAL_SECONDS):
        async with _messages() as (read, write), read, write:
            refusals = _Refusals(write)
            async for received in read:
                if isinstance(received, SessionMessage) and isinstance(received.message, JSONRPCRequest):
                    await refusals.send(INTERNAL_ERROR, why, received.message.id)


@asynccontextmanager
async def _messages() -> AsyncGenerator[tuple[Read, Outgoing]]:
    """What the client says, and where answers go. Whoever has these closes them."""
    with _own_streams() as (source, target):
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception]()
        write, outgoing = anyio.create_memory_object_stream[SessionMessage]()
        async with anyio.create_task_group() as group:
            group.start_soon(_read, source, incoming, write.clone())
            group.start_soon(_write, target, outgoing, group.cancel_scope)
            yield read, write
            # Answers that are left are for a client that has closed our standard input, and may read no more.
            group.cancel_scope.deadline = anyio.current_time() + LAST_SECONDS


@contextmanager
def _own_streams() -> Generator[tuple[int, int]]:
    """Descriptors of the two, for the protocol alone: whoever else reads gets nothing, and who writes, writes to
    standard error."""
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    try:
        yield source, target
    finally:
        os.dup2(source, 0)
        os.dup2(target, 1)
        os.close(source)
        os.close(target)


class _Refusals:
    """Answers to what is no message. A client that does not read them is still listened to, for its end."""

    def __init__(self, answers: Outgoing) -> None:
        self._answers = answers
        self._patience_seconds = LAST_SECONDS

    async def send(self, code: int, message: str, request: str | int | None = None) -> None:
        error = JSONRPCError(jsonrpc="2.0", id=request, error=ErrorData(code=code, message=message))
        with anyio.move_on_after(self._patience_seconds) as waiting:
            await self._answers.send(SessionMessage(error))
        self._patience_seconds = 0.001 if waiting.cancelled_caught else LAST_SECONDS


async def _read(source: int, incoming: Incoming, answers: Outgoing) -> None:
    buffer = bytearray()
    skipping = False
    refusals = _Refusals(answers)
    async with incoming, answers:
        while data := await _some(source):
            buffer += data
            *lines, rest = buffer.split(b"\n") if b"\n" in data else (buffer,)
            for line in lines:
                if not skipping and line.strip():
                    await _take(bytes(line), incoming, refusals)
                skipping = False
            if len(rest) > MAX_LINE_BYTES:
                if not skipping:
                    await refusals.send(INVALID_REQUEST, f"a message has at most {MAX_LINE_BYTES:,} bytes")
                skipping, rest = True, bytearray()
            buffer = rest


async def _take(line: bytes, incoming: Incoming, refusals: _Refusals) -> None:
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError as error:
        found = error.errors()[0]
        # Half of a surrogate pair is no JSON, and some clients write it, and a number of thousands of digits is JSON
        # that nobody reads; who asked so waits for an answer by its id.
        asked = _id(line)
        if found["type"] == "json_invalid":
            await refusals.send(PARSE_ERROR, f"this line cannot be read: {found['msg']}", asked)
        else:
            await refusals.send(INVALID_REQUEST, "this line is no JSON-RPC message", asked)
        return
    # What has an id asks for an answer, and would wait for ever if it passed for a notification.
    if isinstance(message, JSONRPCNotification) and b'"id"' in line and "id" in _loaded(line):
        await refusals.send(INVALID_REQUEST, "the id of a request is a text or a whole number")
        return
    await incoming.send(SessionMessage(message))


def _id(line: bytes) -> str | int | None:
    """The id of a request that is otherwise not one."""
    try:
        match _loaded(line):
            case {"id": str() | int() as found} if not isinstance(found, bool):
                str(found).encode()  # half of a surrogate pair could not be sent back
                return found
            case _:
                return None
    except (ValueError, RecursionError):
        return None


def _loaded(line: bytes) -> Any:
    return json.loads(line, parse_int=_whole_number)


def _whole_number(digits: str) -> int | None:
    """None for one of more digits than Python makes a number of."""
    try:
        return int(digits)
    except ValueError:
        return None


async def _some(source: int) -> bytes:
    """What there is to read; nothing at the end, and when whoever writes is gone."""
    with suppress(PermissionError):  # a file, which can always be read
        await anyio.wait_readable(source)
    try:
        return os.read(source, CHUNK)
    except OSError:
        return b""


async def _write(
    target: int, outgoing: MemoryObjectReceiveStream[SessionMessage], everything: anyio.CancelScope
) -> None:
    async with outgoing, anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, target, everything)
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await _put(target, text.encode() + b"\n")
            except OSError:  # nobody reads any more
                everything.cancel()
        group.cancel_scope.cancel()


async def _cancel_on_disconnect(target: int, everything: anyio.CancelScope) -> None:
    """Ends everything when nobody reads any more: whoever asked would take for undone what a call does after that."""
    with suppress(PermissionError):  # a file
        await anyio.wait_readable(target)  # an error is something to read; what a terminal or a socket has is none
        waiting = select.poll()
        waiting.register(target, 0)
        if waiting.poll(0):
            everything.cancel()


async def _put(target: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        with suppress(PermissionError):  # a file, which can always be written to
            await anyio.wait_writable(target)
        rest = rest[os.write(target, rest[:ATOMIC]) :]
