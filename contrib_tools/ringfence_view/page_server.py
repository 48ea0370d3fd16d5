"""The page of a run or a batch, served by a process beside the command that works. It ends with that command."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from ringfence_view.app import serve_view, view_app
from ringfence_view.batch_server import batch_app
from ringfence_view.batch_source import BatchSource
from ringfence_view.questions import Questions
from ringfence_view.sources import CallSource


def main() -> None:
    """Serve until standard input ends. Its first line is a request of `ringfence_cli.page_process`. The
    others are about questions, whose answers go to standard output."""
    request: Mapping[str, Any] = json.loads(sys.stdin.buffer.readline())
    answers = os.dup(1)
    os.dup2(2, 1)  # what else is printed is no answer
    questions = Questions(answers) if request.get("can_answer") else None
    with socket.socket(fileno=int(request["listening"])) as listening:
        anyio.run(_serve, _app(request, questions), listening, questions)
    os._exit(0)  # a thread may still read standard input


def _app(request: Mapping[str, Any], questions: Questions | None) -> Any:
    token = str(request["token"])
    if (out := _path(request.get("batch"))) is not None:
        return batch_app(BatchSource(out), token)
    calls = CallSource(_path(request["directory"]), _path(request["receipts"]), str(request["title"]))
    return view_app(calls, token, can_write=bool(request["can_write"]), questions=questions)


async def _serve(app: Any, listening: socket.socket, questions: Questions | None) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(serve_view, app, listening)
        while line := await to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
            if questions is not None:
                questions.take(line)
        group.cancel_scope.cancel()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


if __name__ == "__main__":
    main()
