"""What an agent's hook runs: hand its event to the guard of the directory, and print the answer.

The interpreter runs this file alone, with ``-I -S``: it imports nothing but the standard library. Where there is no
guard and none can be started, or it does not answer in time, a call is denied before it runs.
"""

from __future__ import annotations

import _socket  # socket imports enum and selectors, which is half of the time of an event
import os
import sys
import time

TYPE_CHECKING = False  # typing takes as long to import as all else here
if TYPE_CHECKING:
    from typing import Any

CALL_VARIABLE = "RINGFENCE_CALL"
"""In the environment of a command that ringfence runs."""
BEFORE = ("PreToolUse", "BeforeTool", "tool.execute.before")
ENDS = ("SessionEnd", "Stop", "session.idle")
START_SECONDS = 30.0
"""How long a guard may take to open its directory. The first event of a session waits for it."""
SHELLS = ("sh", "bash", "dash", "zsh", "env")
PROJECT_VARIABLES = ("CLAUDE_PROJECT_DIR", "GEMINI_PROJECT_DIR", "QWEN_PROJECT_DIR")
AGAIN = "run `ringfence guard install` again"


class NoGuardError(Exception):
    """No guard answers, and why."""


class NoAnswerError(OSError):
    """A guard has ended before it answered."""


def root_of(cwd: str, state: str) -> str:
    """The directory that was guarded by itself and has the one that an agent works in; else the repository of that;
    where there is none, the directory."""
    there = next((os.environ[name] for name in PROJECT_VARIABLES if os.environ.get(name)), cwd)
    above = os.path.realpath(there)
    while not os.path.exists(os.path.join(directory_of(state, above), "settings.json")):
        if above == os.path.dirname(above):
            return repository_of(there)
        above = os.path.dirname(above)
    return above


def repository_of(directory: str) -> str:
    """The repository that a directory is in, or else the directory itself."""
    above = real = os.path.realpath(directory)
    while not os.path.lexists(os.path.join(above, ".git")):
        if above == os.path.dirname(above):
            return real
        above = os.path.dirname(above)
    return above


def directory_of(state: str, root: str) -> str:
    """Where the guard of a directory has its socket."""
    import hashlib

    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]
    return os.path.join(state, "stores", name, "guard")


def is_inside_call(state: str, root: str, directory: str) -> bool:
    """Whether this is a part of a call of `ringfence exec` over the root, or over one above or around the agent. What
    the agent changes is a part of that transaction then, and is no step of its own."""
    stores, is_call = [os.path.dirname(directory)], CALL_VARIABLE in os.environ
    if is_call:  # an agent may keep it from its hooks: then only `ringfence exec` is known, and over the root alone
        for place in (os.path.realpath(root), os.getcwd()):
            while place != os.path.dirname(place):
                stores.append(os.path.dirname(directory_of(state, place)))
                place = os.path.dirname(place)
    holders = (holder_of(store, "" if is_call else "`ringfence exec`") for store in stores)
    return any(is_above(holder) for holder in holders if holder)


def holder_of(store: str, program: str) -> int:
    """The process that has the workspace of a store open, by a program if one is named; 0 where none has."""
    try:
        with open(os.path.join(store, "holder"), errors="replace") as file:
            text = file.read()
            words = text.split()
            if words[:1] != ["process"] or program not in text:
                return 0
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(words[1])
    except (OSError, ValueError):
        pass
    return 0


def is_above(wanted: int) -> bool:
    """Whether a process has started this one, or one that did."""
    process = os.getppid()
    for _ in range(1000):
        if process in (0, wanted):
            break
        process = parent_of(process)
    return process == wanted


def parent_of(process: int) -> int:
    """The process that started one; 0 for one that is gone."""
    try:
        with open(f"/proc/{process}/stat", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def connect(directory: str, deadline: float) -> _socket.socket:
    """Connect to a guard that runs. Raises OSError."""
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(f"/proc/self/fd/{folder}/socket")  # a path of any length
        except BaseException:
            connection.close()
            raise
    finally:
        os.close(folder)
    return connection


def start(directory: str, state: str, root: str, deadline: float) -> _socket.socket:
    """Start the guard of a directory, or wait for one that another event starts. Raises NoGuardError and OSError."""
    import fcntl  # most events find a guard
    import subprocess

    os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)  # the mode is of the last one alone
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.path.join(directory, "start.lock"), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _sleep(deadline)
        try:
            return connect(directory, deadline)
        except OSError:
            pass
        said = os.path.join(directory, "guard.log")
        with open(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-m", "ringfence_guard", root],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "RINGFENCE_STATE_DIR": state},
                start_new_session=True,
            )
        try:
            while True:
                try:
                    return connect(directory, deadline)
                except OSError:
                    if process.poll() is not None:
                        with open(said, errors="replace") as log:
                            lines = log.read().strip().splitlines() or ["it ended at once"]
                        raise NoGuardError(f"the guard did not start: {lines[-1]}") from None
                    _sleep(deadline)
        finally:
            if process.returncode is None:
                process.returncode = 0  # it outlives this process, of which Popen would warn


def _sleep(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise NoGuardError("the guard did not start in time")
    time.sleep(0.02)


def exchange(connection: _socket.socket, question: bytes, deadline: float) -> bytes:
    """Send one line, and return all that is answered. Raises NoAnswerError, and OSError."""
    parts: list[bytes] = []
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.sendall(question)
        while not parts or parts[-1]:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            parts.append(connection.recv(1 << 16))
    except (BrokenPipeError, ConnectionResetError):
        parts = []
    answer = b"".join(parts)
    if not answer:
        raise NoAnswerError("the guard has ended")
    return answer


def agent_process() -> int:
    """The process of the agent: the nearest above this one that is no shell."""
    if os.environ.get("CLAUDE_PID", "").isdecimal():
        return int(os.environ["CLAUDE_PID"])
    process = os.getppid()
    for _ in range(8):
        try:
            with open(f"/proc/{process}/stat", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return 0
        if name not in SHELLS:
            return process
        process = int(rest.split()[1])
    return 0


def option(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def main(words: list[str]) -> int:
    """Answer an event on standard input.

    The words are ``AGENT --state DIR [--root DIR --directory DIR] [--timeout SECONDS] [--if-unavailable allow]``.
    """
    deadline = time.monotonic() + 0.8 * float(option(words, "--timeout", "120"))
    event = b""
    try:
        event = sys.stdin.buffer.read()
        answer = answered(words, event, deadline)
        if answer is None:
            return 0
        head, _, texts = answer.partition(b"\n")
        code, length = map(int, head.split())
        sys.stdout.buffer.write(texts[:length])
        sys.stderr.buffer.write(texts[length:])
        return code
    except (NoGuardError, OSError, ValueError) as error:
        is_call = (
            not event or any(f'"{name}"'.encode() in event for name in BEFORE) or b'"hook_event_name"' not in event
        )
        if option(words, "--if-unavailable", "deny") == "allow" or not is_call:
            return 0
        sys.stderr.write(
            f"ringfence guard cannot watch this call, so it must not run: {error or type(error).__name__}. "
        )
        sys.stderr.write(f"A person can look at `ringfence guard status`, or {AGAIN}.\n")
        return 2


def answered(words: list[str], event: bytes, deadline: float) -> bytes | None:
    """The guard's answer: a line with the exit code and the length of standard output, and both outputs.

    None where there is none to be had and none is needed. Raises NoGuardError, OSError and ValueError.
    """
    state, root, directory = (option(words, name, "") for name in ("--state", "--root", "--directory"))
    if not root:
        root = root_of(str(parsed(event).get("cwd") or os.getcwd()), state)
        directory = directory_of(state, root)
    if is_inside_call(state, root, directory):
        return None
    line = event.replace(b"\n", b" ").replace(b"\r", b" ")
    for is_again in (False, True):
        try:
            connection = connect(directory, deadline)
        except OSError:
            if parsed(event).get("hook_event_name") in ENDS:
                return None  # nothing is begun for an end
            connection = start(directory, state, root, min(deadline, time.monotonic() + START_SECONDS))
        try:
            head = f'{{"kind": "event", "agent": "{words[0]}", "process": {agent_process()}, '
            head += f'"seconds": {deadline - time.monotonic():.3f}, "payload": '
            return exchange(connection, head.encode() + line + b"}\n", deadline)
        except NoAnswerError:  # the next guard goes on with what this one had begun
            if is_again:
                raise
        finally:
            connection.close()
    return None


def parsed(event: bytes) -> dict[str, Any]:
    """The event. It is parsed only where something of it is needed here. Raises ValueError."""
    import json

    found: Any = json.loads(event)
    if type(found) is not dict:
        raise ValueError("the event is no object")
    return found  # pyright: ignore[reportUnknownVariableType]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
