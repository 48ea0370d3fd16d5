"""Questions of a person's commands to the guard of a directory."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence_guard import hook_client
from ringfence_guard.left_processes import AGENT_MARKS
from ringfence_guard.settings import guard_directory

if TYPE_CHECKING:
    import _socket

ANSWER_SECONDS = 120.0
WRITE = "write"
"""The kind of question that `person_writes` asks."""


class GuardRefusedError(ValueError):
    """The guard did not do what it was asked, and says why."""


def guarded_root(directory: Path) -> Path:
    """The directory whose guard an agent meets that works in this one."""
    real = Path(os.path.realpath(directory))
    for above in (real, *real.parents):
        if (guard_directory(above) / "settings.json").exists():
            return above
    return Path(hook_client.repository_of(str(real)))


def ask_guard(root: Path, question: Mapping[str, Any], *, starts: bool = True) -> dict[str, Any] | None:
    """Ask the guard of a root. With ``starts``, one is started if there is none; else the answer is None then.

    Raises:
        GuardRefusedError: it refuses, or cannot be started.
    """
    directory, deadline = str(guard_directory(root)), time.monotonic() + ANSWER_SECONDS
    state = str(guard_directory(root).parent.parent.parent)
    try:
        try:
            connection = hook_client.connect(directory, deadline)
        except OSError:
            if not starts:
                return None
            connection = hook_client.start(directory, state, str(root), deadline)
        with closing(connection):
            line = json.dumps(dict(question)).encode() + b"\n"
            answer: dict[str, Any] = json.loads(hook_client.exchange(connection, line, deadline))
    except (hook_client.NoGuardError, OSError, ValueError) as error:
        raise GuardRefusedError(str(error)) from error
    if answer.get("exit_code"):
        raise GuardRefusedError(str(answer.get("stderr", "")).strip())
    return answer


def check_person(environment: Mapping[str, str], directories: Sequence[Path]) -> None:
    """Raise GuardRefusedError if an agent runs this process. It is no boundary: a command can leave both out.

    An agent is known by what it puts into the environment of its commands, and by the guards of these directories,
    where they run: they know the processes of their agents.
    """
    if marks := [name for name in AGENT_MARKS if name in environment]:
        raise GuardRefusedError(
            f"an agent's command may not do this: run it in a terminal of your own, or unset {' and '.join(marks)}"
        )
    for root in dict.fromkeys(map(guarded_root, directories)):
        with person_writes(root, ()):
            pass


@contextmanager
def person_writes(root: Path, paths: Sequence[Path]) -> Generator[None]:
    """Have the guard of a root, if one runs, know that what the block writes at these paths is no call's.

    Raises:
        GuardRefusedError: a call has changed one of the files, or this process is an agent's own. Where nothing was
            entered, nothing is to be written.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        connection = hook_client.connect(str(guard_directory(root)), deadline)
    except OSError:  # none runs
        yield
        return
    with closing(connection):
        question = {"kind": WRITE, "paths": [*map(str, paths)]}
        connection.sendall(json.dumps(question).encode() + b"\n")
        _check_line(connection)
        yield
        with suppress(OSError):  # it has ended, and the next one takes what is changed for a person's
            connection.sendall(b"\n")
            _check_line(connection)


def _check_line(connection: _socket.socket) -> None:
    line = bytearray()
    while not line.endswith(b"\n") and (part := connection.recv(1 << 16)):
        line += part
    answer: dict[str, Any] = json.loads(line or b"{}")
    if "refused" in answer:
        raise GuardRefusedError(answer["refused"])


def stop_guard(root: Path) -> bool:
    """Stop the guard of a root, and wait until it has let go of the files. Return whether there was one.

    Raises GuardRefusedError.
    """
    if ask_guard(root, {"kind": "stop"}, starts=False) is None:
        return False
    with open(guard_directory(root) / "guard.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return True
