"""What the client of a server sees that cannot start. The packages of the protocol may be what is missing."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from time import monotonic

from ringfence_tools.runs.signals import Signals

REFUSAL_SECONDS = 5.0
"""The time a refused client has to send its requests and disconnect."""
INTERNAL_ERROR = -32603
CHUNK_BYTES = 1 << 16


def refuse(reason: str, signals: Signals) -> None:
    """Answer each request on standard input with the reason, since few clients show standard error.

    A person at a terminal and the clients of a server over HTTP send no requests there.
    """
    if os.isatty(0) or any(word.startswith("--http") for word in sys.argv):
        return
    with suppress(KeyboardInterrupt, OSError), signals.let_through():
        where = f"`ringfence serve`, started in {os.getcwd()}"
        until, rest = monotonic() + REFUSAL_SECONDS, b""
        while select.select([0], [], [], max(until - monotonic(), 0))[0] and (chunk := os.read(0, CHUNK_BYTES)):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                _answer(line, f"{where}: {reason}")


def _answer(line: bytes, reason: str) -> None:
    with suppress(ValueError, LookupError, TypeError, RecursionError):  # no request
        request = json.loads(line)
        error = {"code": INTERNAL_ERROR, "message": reason}
        if "method" in request:
            answer = {"jsonrpc": "2.0", "id": request["id"], "error": error}
            os.write(1, json.dumps(answer).encode() + b"\n")
