"""The answer to a client's first request, given before the packages of the protocol are loaded.

Loading them takes a second of processor time. Some clients begin without a server that has not answered soon. So the
usual first request, `initialize`, is answered here. Then the server handles the same bytes, and its own answer to them,
which is the same, is dropped. Whatever else comes first is left to the server.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, cast

from ringfence import __version__
from ringfence_tools.runs.reserved_stdout import send_stdout_to_stderr

NAME = "ringfence"
INSTRUCTIONS = """\
Tools for the files of a workspace: {directory}. Paths are relative to its root. Every call is a transaction: one that
fails, is denied or is cancelled has changed nothing, and says how to get it right. Read a file before you change,
move or remove it, and all of it before you replace it."""

VERSIONS = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"})
"""The revisions that begin with `initialize`. A client that asks for another one is answered by the server."""
CAPABILITIES = {"resources": {"listChanged": False, "subscribe": False}, "tools": {"listChanged": False}}
WAIT_SECONDS = 1.0
"""The time to wait for the first request. After it, loading delays no answer."""
MAX_REQUEST_BYTES = 1 << 16
MAX_ID = 1 << 53


@dataclass(frozen=True, slots=True)
class Begun:
    """What was read before the server runs, for the server to handle."""

    received: bytes = b""
    answered: str | int | None = None
    """The id of the request in it that has its answer."""


@contextmanager
def reserve_streams() -> Generator[tuple[int, int]]:
    """Take standard input and output for the protocol, and yield their descriptors.

    Other code reads nothing, and writes to standard error. So it stays after the block: what a tool has left in a
    buffer of Python or C is written when the process ends, and is no message.
    """
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    send_stdout_to_stderr()
    try:
        yield source, target
    finally:
        os.close(source)
        os.close(target)


def instructions_of(directory: Path) -> str:
    """Return what a client tells its model of the server."""
    from ringfence.escapes import escape_path

    return INSTRUCTIONS.format(directory=escape_path(os.path.realpath(directory)))


def answer_first(source: int, target: int, directory: Path) -> Begun:
    """Wait for the first request of the client at the two descriptors, and answer it if it is `initialize`."""
    received = _read_line(source)
    request = _initialize_request(received.partition(b"\n")[0]) if b"\n" in received else None
    if request is None:
        return Begun(received)
    result = {
        "capabilities": CAPABILITIES,
        "instructions": instructions_of(directory),
        "protocolVersion": request["params"]["protocolVersion"],
        "serverInfo": {"name": NAME, "version": __version__},
    }
    answer = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})
    with suppress(OSError):  # the client is gone, which the server sees too
        os.write(target, answer.encode() + b"\n")
    return Begun(received, request["id"])


def _read_line(source: int) -> bytes:
    """Read what comes up to the end of a line, within bounds of time and length."""
    received, until = b"", monotonic() + WAIT_SECONDS
    with suppress(OSError):
        while b"\n" not in received and len(received) < MAX_REQUEST_BYTES:
            if not select.select([source], [], [], max(until - monotonic(), 0))[0]:
                break
            if not (chunk := os.read(source, MAX_REQUEST_BYTES)):
                break
            received += chunk
    return received


def _initialize_request(line: bytes) -> dict[str, Any] | None:
    """Parse a well-formed request to initialize. Return None for anything else."""
    try:
        request: object = json.loads(line)
        json.dumps(request, ensure_ascii=False).encode()  # half of a surrogate pair could not be sent back
    except (ValueError, RecursionError):
        return None
    match request:
        case {
            "jsonrpc": "2.0",
            "id": str() | int() as number,
            "method": "initialize",
            "params": {
                "protocolVersion": str(version),
                "capabilities": dict(),
                "clientInfo": {"name": str(), "version": str()},
            },
        }:
            found = cast("dict[str, Any]", request)
            known = version in VERSIONS and all(
                isinstance(one, dict) for one in found["params"]["capabilities"].values()
            )
            is_id = isinstance(number, str) or (not isinstance(number, bool) and abs(number) < MAX_ID)
            return found if known and is_id else None
        case _:
            return None
