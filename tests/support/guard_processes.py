"""The guard of a directory as a process, and the client that an agent's hook runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringfence_guard import client_path, guard_directory

Run = Callable[..., subprocess.CompletedProcess[str]]
BASH = {"tool_name": "Bash", "tool_use_id": "c1"}
RESULT = {"stdout": "", "stderr": "", "interrupted": False, "isImage": False, "noOutputExpected": False}


@contextmanager
def hooks(root: Path, state: Path) -> Generator[Run]:
    """Runs the client as Claude Code would. A guard that it started is ended."""

    def run(name: str, *options: str, agent: str = "claude", **event: Any) -> subprocess.CompletedProcess[str]:
        given = {"hook_event_name": name, "session_id": "s", "cwd": str(root), "prompt_id": "p", **event}
        return subprocess.run(
            [sys.executable, "-I", "-S", client_path(), agent, "--state", str(state), *options],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "CLAUDE_PID": str(os.getpid())},
        )

    yield run
    if (guard_directory(root) / "socket").exists():
        asked(root, {"kind": "stop"})


@contextmanager
def connected(root: Path) -> Generator[socket.socket]:
    """A connection to the guard of a root."""
    with socket.socket(socket.AF_UNIX) as connection:
        folder = os.open(guard_directory(root), os.O_PATH)
        connection.connect(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
        yield connection


def asked(root: Path, question: dict[str, Any]) -> Any:
    """What the guard answers to a question; None for an event to which it has nothing to say."""
    with connected(root) as connection:
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile() as file:
            text = file.read()
            return None if text.startswith("0 0\n") else json.loads(text)


def guard_process(root: Path) -> int:
    """The number of the process."""
    return asked(root, {"kind": "status"})["status"]["process"]
