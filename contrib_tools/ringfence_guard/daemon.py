"""The guard of one directory: it has the workspace open, and answers hooks and commands on a Unix socket.

A connection is one line of JSON in each direction. Only processes of the same user are answered.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, cast

import ringfence
from ringfence.errors import RingfenceError, WorkspaceLockedError
from ringfence.failures import describe_error
from ringfence_guard.answers import format_answer
from ringfence_guard.calls import HOOK_SECONDS, GuardedCalls
from ringfence_guard.connection import WRITE
from ringfence_guard.events import AgentName, HookEvent, parse_event
from ringfence_guard.guard_log import GuardLog
from ringfence_guard.guarded_workspace import open_guarded
from ringfence_guard.judging import ChosenPolicies
from ringfence_guard.left_processes import TICKS
from ringfence_guard.settings import make_guard_directory

SOCKET = "socket"
MAX_LINE = 64 << 20
"""The most bytes of a question. An event has the whole result of its call."""
QUESTION_SECONDS = 10.0
"""How long a question may take to come whole."""
IDLE_SECONDS = 600.0
"""How long a guard stays after the last session has ended."""
POLL_SECONDS = 1.0
RELEASE_QUESTION = b'{"kind": "release"}\n'
"""What `Workspace.open` asks."""
WRITE_QUESTION = json.dumps({"kind": WRITE})[:-1].encode()
"""How the question of `person_writes` begins."""
LOCK_SECONDS = 5.0
"""How long somebody else may take to lock a workspace that was handed over, and another guard to end."""
LOCK_POLL_SECONDS = 0.02


class SessionProcesses:
    """Which process runs each session, so that the death of an agent is seen."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._descriptors)

    def watch(self, session: tuple[str, str], process: int, started: int = 0) -> int:
        """Watch a process from now on, and return when it started. Return 0 for one that is unknown, or watched, or
        gone already: then another one may have its number, which did not start when it did."""
        with self._lock, suppress(OSError, ValueError):
            if session not in self._descriptors and process > 1:
                descriptor = os.pidfd_open(process)
                found = _start_of(process)
                if found and started in (0, found):
                    self._descriptors[session] = descriptor
                    return found
                os.close(descriptor)
        return 0

    def forget(self, session: tuple[str, str]) -> None:
        with self._lock:
            descriptor = self._descriptors.pop(session, None)
            if descriptor is not None:
                os.close(descriptor)

    def dead(self) -> list[tuple[str, str]]:
        """The sessions whose process has ended since the last time."""
        with self._lock:
            poll = select.poll()
            for descriptor in self._descriptors.values():
                poll.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(0)}
            found = [session for session, descriptor in self._descriptors.items() if descriptor in ended]
        for session in found:
            self.forget(session)
        return found


class GuardServer:
    """Answers on a socket until it is stopped, or nobody has asked anything for a while."""

    def __init__(self, root: str, calls: GuardedCalls, chosen: ChosenPolicies, idle_seconds: float) -> None:
        self._root, self._calls, self._chosen = root, calls, chosen
        self._idle_seconds = idle_seconds
        self._program = _program()
        self._sessions = SessionProcesses()
        self._stopped = threading.Event()
        self._active = 0
        self._used = monotonic()
        self._next_look = 0.0
        self._count = threading.Lock()
        self._reading = threading.Lock()
        self._asking: set[socket.socket] = set()
        """The connections whose question has not come whole."""
        self._last_events: dict[str, str] = {}
        self._commands: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "undo": self._undo,
            "stop": self._stop,
        }

    def stop(self) -> None:
        self._stopped.set()

    def run(self, listening: socket.socket) -> None:
        """Serve until the end; then wait for what is being answered."""
        for (agent, session), known in self._calls.watched_sessions.items():  # of a guard that was killed
            if not self._sessions.watch((agent, session), *known):
                self._end_session(agent, session)
        listening.settimeout(POLL_SECONDS)
        threads: list[threading.Thread] = []
        while not self._stopped.is_set() and not self._is_idle():
            if _program() != self._program:
                _say("ringfence was upgraded or removed: this guard ends, and the next event starts another one")
                break
            for agent, session in self._sessions.dead():
                self._end_session(agent, session)
            self._end_background()
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                with self._count:
                    self._asking.add(connection)
                thread = threading.Thread(target=self._answer, args=(connection,))
                thread.start()
                threads = [*(one for one in threads if one.is_alive()), thread]
        with self._count:
            for connection in self._asking:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
        for thread in threads:
            thread.join()

    def _end_background(self) -> None:
        """Look whether commands in the background have ended, and take a small part of the time for that."""
        began = monotonic()
        if began >= self._next_look:
            try:
                self._calls.end_background()
            except (RingfenceError, OSError, ValueError) as error:
                _say(describe_error(error))
            self._next_look = monotonic() + max(POLL_SECONDS, 50 * (monotonic() - began))

    def _is_idle(self) -> bool:
        return not len(self._sessions) and not self._active and monotonic() > self._used + self._idle_seconds

    def _end_session(self, agent: str, session: str) -> None:
        try:
            self._calls.end_session(agent, session)
        except (RingfenceError, OSError, ValueError) as error:
            _say(describe_error(error))

    def _answer(self, connection: socket.socket) -> None:
        with self._count:
            self._active += 1
        try:
            with connection, suppress(OSError):
                process, user = _peer(connection)
                if user == os.getuid():
                    line = self._line(connection)
                    if line == RELEASE_QUESTION:
                        self._release(connection)
                    elif line.startswith(WRITE_QUESTION):
                        self._let_write(connection, json.loads(line), process)
                    else:
                        connection.sendall(self._respond(line, _start_of(process) / TICKS))
        finally:
            with self._count:
                self._asking.discard(connection)
                self._active -= 1
                self._used = monotonic()

    def _line(self, connection: socket.socket) -> bytes:
        """The question. Raises OSError for one that is too long, or does not come whole in time."""
        until = monotonic() + QUESTION_SECONDS
        received = bytearray()
        try:
            while not received.endswith(b"\n"):
                connection.settimeout(max(0.01, until - monotonic()))
                part = connection.recv(1 << 16)
                if not part or len(received) > MAX_LINE or monotonic() > until:
                    raise OSError("the question was cut off")
                received += part
        finally:
            with self._count:
                self._asking.discard(connection)
        connection.settimeout(QUESTION_SECONDS)
        return bytes(received)

    def _release(self, connection: socket.socket) -> None:
        """Hand the workspace over. Who asked closes the connection when it has the lock."""

        def wait() -> None:
            connection.sendall(b'{"released": true}\n')
            connection.settimeout(LOCK_SECONDS)
            with suppress(TimeoutError):
                connection.recv(1)

        try:
            holder = self._calls.lend(wait)
        except (RingfenceError, OSError, ValueError) as error:
            _say(describe_error(error))
            holder = f"`ringfence guard`, which cannot close it: {describe_error(error)}"
        if holder:
            connection.sendall(json.dumps({"holder": holder}).encode() + b"\n")

    def _let_write(self, connection: socket.socket, asked: Mapping[str, Any], process: int) -> None:
        """Let a person's command write settings while calls go on. It sends a line when it has."""

        def wait() -> None:
            connection.sendall(b'{"ready": true}\n')
            connection.settimeout(LOCK_SECONDS)
            with suppress(TimeoutError):
                connection.recv(1)

        agents = {known for known, _ in self._calls.watched_sessions.values()}
        try:
            if not agents.isdisjoint(_processes_above(process)):
                refusal = "an agent runs this: install and uninstall are for people, in a terminal of their own"
            else:
                refusal = self._calls.let_write(asked["paths"], wait)
        except (RingfenceError, OSError, ValueError) as error:
            _say(describe_error(error))
            refusal = describe_error(error)
        connection.sendall(json.dumps({"refused": refusal} if refusal else {}).encode() + b"\n")

    def _respond(self, line: bytes, hooked_at: float) -> bytes:
        """To a hook, its exit code and the length of its output, and both outputs; to a command, an object."""
        is_event = line.startswith(b'{"kind": "event"')
        answer = self._answer_to(line, hooked_at)
        if not is_event:
            return json.dumps(answer).encode() + b"\n"
        stdout = str(answer.get("stdout", "")).encode(errors="replace")
        stderr = str(answer.get("stderr", "")).encode(errors="replace")
        return f"{answer.get('exit_code', 0)} {len(stdout)}\n".encode() + stdout + stderr

    def _answer_to(self, line: bytes, hooked_at: float) -> dict[str, Any]:
        try:
            question: object = json.loads(line)
            if not isinstance(question, dict):
                raise TypeError("a question is an object")
            given = cast("dict[str, Any]", question)
            if given.get("kind") == "event":
                return self._take_event(given, hooked_at)
            return self._commands[given["kind"]](given)
        except (RingfenceError, OSError, ValueError, LookupError, TypeError) as error:
            text = str(error) if type(error) is LookupError else describe_error(error)
            _say(text)
            return {"stderr": f"ringfence guard: {text}\n", "exit_code": 2}

    def _take_event(self, given: Mapping[str, Any], hooked_at: float) -> dict[str, Any]:
        event = parse_event(cast("AgentName", given["agent"]), given.get("payload"))
        event = replace(event, hooked_at=hooked_at)
        session = event.actor[:2]
        self._last_events[event.agent] = event.name
        if event.session_id:
            process = int(given.get("process") or 0)
            if started := self._sessions.watch(session, process):
                self._calls.watched(session, process, started)
        try:
            if event.phase == "before":
                self._refresh()
            answer = self._calls.handle(event, patience_seconds=float(given.get("seconds") or HOOK_SECONDS))
        except (RingfenceError, OSError, ValueError) as error:
            return self._failed(event, error)
        if event.phase == "session_end":
            self._sessions.forget(session)
        output = format_answer(event, answer)
        return {"stdout": output.stdout, "stderr": output.stderr, "exit_code": output.exit_code}

    def _refresh(self) -> None:
        """Judge by what a person has chosen meanwhile. Raises ValueError where that cannot be understood."""
        with self._reading:
            if self._chosen.read():
                self._calls.judge_by(self._chosen.policies, self._chosen.settings)

    @staticmethod
    def _failed(event: HookEvent, error: Exception) -> dict[str, Any]:
        """A call that cannot be watched is denied before it runs."""
        words = f"ringfence guard: {describe_error(error)}"
        _say(words)
        if event.phase in ("before", "after", "failed"):
            return {"stderr": f"{words}\n", "exit_code": 2}
        return {}

    # Commands of a person.

    def _status(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._calls.settle_proved()
        calls = [f"{event.agent} {event.tool}: {event.arguments}" for event in self._calls.open_calls]
        status = {
            "root": self._root,
            "process": os.getpid(),
            "sessions": len(self._sessions),
            "open_calls": calls,
            "last_events": self._last_events,
        }
        return {"status": status}

    def _undo(self, given: Mapping[str, Any]) -> dict[str, Any]:
        paths: Sequence[str] | None = given.get("paths")
        self._calls.open(LOCK_SECONDS)
        n, by, dry_run = int(given.get("n") or 1), str(given.get("by") or ""), bool(given.get("dry_run"))
        return {"text": self._calls.undo(n, by, paths, dry_run=dry_run)}

    def _stop(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._calls.settle_all()
        finally:
            self.stop()
        return {"text": "stopped"}


def serve(root: str, idle_seconds: float = IDLE_SECONDS) -> int:
    """Guard a directory until nobody needs it any more. Return the exit code of the process.

    There is one guard of a directory: a second one ends, unless the first one does soon.
    """
    directory = make_guard_directory(root)
    with ExitStack() as stack:
        lock = stack.enter_context(open(directory / "guard.lock", "w"))
        if not _locked(lock):
            return 0
        try:
            chosen = ChosenPolicies(root)
            calls = GuardedCalls(
                root,
                GuardLog(directory),
                open_workspace=partial(open_guarded, root),
                policies=chosen.policies,
                settings=chosen.settings,
                state=directory,
            )
            stack.callback(calls.close)
            with suppress(WorkspaceLockedError):  # it is opened when it is needed
                calls.open()
        except (RingfenceError, OSError, ValueError) as error:
            _say(describe_error(error))
            return 2
        server = GuardServer(root, calls, chosen, idle_seconds)

        def stop(number: int, frame: object) -> None:
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        os.chdir(directory)  # the path of a socket is short
        Path(SOCKET).unlink(missing_ok=True)
        before = os.umask(0o177)
        listening.bind(SOCKET)
        os.umask(before)
        stack.callback(Path(SOCKET).unlink, missing_ok=True)
        listening.listen(64)
        server.run(listening)
    return 0


def _locked(lock: IO[str]) -> bool:
    """Whether this is the guard of the directory, now or soon: the one before may be about to end."""
    until = monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > until:
                return False
            sleep(LOCK_POLL_SECONDS)
        else:
            return True


def _program() -> tuple[tuple[int, int], ...]:
    """Which program this is, by its files."""
    found: list[tuple[int, int]] = []
    for file in (__file__, ringfence.__file__):
        with suppress(OSError):
            one = os.stat(file)
            found.append((one.st_ino, one.st_mtime_ns))
    return tuple(found)


def _say(text: str) -> None:
    """Write to the file that a client reads if no guard starts."""
    with suppress(OSError):  # there may be no space
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _start_of(process: int) -> int:
    """When a process started, in ticks since the machine did; 0 for one that is gone."""
    return int((_stat_of(process) or [b"0"] * 20)[19])


def _processes_above(process: int) -> Iterator[int]:
    """The processes that a process was started by, from the nearest."""
    while process > 1 and (found := _stat_of(process)):
        yield (process := int(found[1]))


def _stat_of(process: int) -> Sequence[bytes]:
    """What the kernel says of a process, from its state on; nothing for one that is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return text.rpartition(b")")[2].split()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user."""
    form = "3i"
    held = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
    process, user, _ = struct.unpack(form, held)
    return process, user
