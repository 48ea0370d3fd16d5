"""Questions of a person's commands to the guard of a directory."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ringfence_guard import hook_client
from ringfence_guard.settings import guard_directory

ANSWER_SECONDS = 120.0


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


def stop_guard(root: Path) -> bool:
    """Stop the guard of a root, and wait until it has let go of the files. Return whether there was one.

    Raises GuardRefusedError.
    """
    if ask_guard(root, {"kind": "stop"}, starts=False) is None:
        return False
    with open(guard_directory(root) / "guard.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return True
