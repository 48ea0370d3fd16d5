"""The process under which a workspace's commands run on this machine: it ends what they leave behind.

It is started as ``python3 -I -S -B supervisor.py SOCKET``, where SOCKET is the number of a descriptor. It needs the
standard library and nothing else. `host_commands.py` is its owner's end, and takes the definitions of the messages from
here.

What a command starts and leaves becomes a child of this process, however it went away: it is a subreaper
(PR_SET_CHILD_SUBREAPER). The process that asks for commands is none, and so keeps its own children. When its owner
ends, for whatever reason, the socket ends: then this process ends all that it has started, and itself.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

# From the owner. With RUN comes a file of JSON as the first descriptor: {argv, env, seconds, own_session,
# leave_running, and under "descriptors" the names of the further ones: cwd, stdin, stdout, stderr, heartbeat}.
RUN = b"R"
KILL = b"K"  # end the command that runs now; ignored when it has ended already
# To the owner: READY once, then for each command {code, timed_out, leftovers, unended, problem} as JSON.
READY = b"READY"
LONGEST_ANSWER = 8192

HEARTBEAT = struct.Struct("<Q")  # nanoseconds since 1970, at the start of the file that came with a command
HEARTBEAT_SECONDS = 1.0  # the owner may be stopped while a command runs, and killed
GRACE_SECONDS = 0.2  # what is left of a command when its main process has exited may go on for so long
ENDING_SECONDS = 10.0  # what is still there after so long cannot be ended
TIMEOUT_EXIT_CODE = 124
_NOT_STARTED, _NOT_FOUND = 126, 127  # a shell's exit codes for what it cannot start
_MOST_DESCRIPTORS = 6
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTOU)
"""From the terminal, they are for the command alone."""


class Supervisor:
    """Runs one command at a time, until its owner goes away."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._libc = ctypes.CDLL(None, use_errno=True)
        if self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self._waking, waked = os.pipe()  # readable when a process may have ended
        os.set_blocking(self._waking, False)
        os.set_blocking(waked, False)
        signal.set_wakeup_fd(waked, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # so that the wakeup descriptor is written
        self._events = select.poll()
        self._events.register(owner, select.POLLIN)
        self._events.register(self._waking, select.POLLIN)

    def serve(self) -> None:
        """Answer the owner, until a command has left something running. EOFError: the owner is gone."""
        is_last = False
        while not is_last:
            message = self._receive(None)
            if message is None:
                self._reap()
            elif message[0] == RUN:
                is_last = self._run(message[1])

    def _receive(self, seconds: float | None) -> tuple[bytes, list[int]] | None:
        """The owner's next message; None after so many seconds, or when something else is to be looked at."""
        ready = self._events.poll(None if seconds is None else int(min(max(0.0, seconds), 3600.0) * 1000) + 1)
        if all(place != self._owner.fileno() for place, _ in ready):
            return None
        descriptors = array.array("i")
        space = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
        message, ancillary, _, _ = self._owner.recvmsg(16, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        if not message:
            raise EOFError("the owner closed the stream")
        return message, list(descriptors)

    def _run(self, descriptors: list[int]) -> bool:
        """Run a command to its end; whether it is the last one."""
        with open(descriptors[0], "rb") as file:
            command: dict[str, Any] = json.load(file)
        given = dict(zip(command["descriptors"], descriptors[1:], strict=True))
        heartbeat = given.pop("heartbeat", None)
        answer: dict[str, object] = {"code": 0, "timed_out": False, "leftovers": 0, "unended": 0, "problem": ""}
        process = 0
        try:
            process = self._start(command, given)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            words = (error.strerror or str(error)) + (f": {error.filename}"[:1000] if error.filename else "")
            answer |= {"code": _NOT_FOUND if missing else _NOT_STARTED, "problem": words}
        finally:
            for descriptor in given.values():
                os.close(descriptor)
        is_last = False
        if process:
            status, killed = self._watch(process, command, heartbeat)
            has_ended = status is not None
            is_last = has_ended and command["leave_running"]
            if not is_last:
                answer["leftovers"], answer["unended"] = self.end(process)
            answer["timed_out"] = not has_ended and not killed
            answer["code"] = TIMEOUT_EXIT_CODE if answer["timed_out"] else _exit_code(status)
        if heartbeat is not None:
            os.close(heartbeat)
        self._owner.send(json.dumps(answer).encode())
        return is_last or bool(answer["unended"])

    def _start(self, command: dict[str, Any], given: dict[str, int]) -> int:
        """Its process. OSError: it cannot be started, and nothing of it is left."""
        arguments = [_encoded(word) for word in command["argv"]]
        environment = {_encoded(name): _encoded(value) for name, value in command["env"].items()}
        reading, writing = os.pipe()
        owner = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                self._become(arguments, environment, given, owner, own_session=command["own_session"])
            except OSError as error:
                name = arguments[0] if error.filename is not None else b""  # not the last place where it was looked for
                os.write(writing, b"%d %b" % (error.errno or 0, name[:1000]))
            finally:
                os._exit(_NOT_STARTED)
        os.close(writing)
        with open(reading, "rb") as file:
            problem = file.read()  # ends with the `exec`
        if not problem:
            return process
        os.waitpid(process, 0)
        number, _, name = problem.partition(b" ")
        raise OSError(int(number), os.strerror(int(number)), os.fsdecode(name) or None)

    def _become(
        self,
        arguments: list[bytes],
        environment: dict[bytes, bytes],
        given: dict[str, int],
        owner: int,
        *,
        own_session: bool,
    ) -> None:
        """In the child: be the command."""
        if own_session:
            os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should somebody kill this process's parent
        if os.getppid() != owner:
            os._exit(_NOT_STARTED)
        os.fchdir(given["cwd"])
        for name, place in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            if name in given:
                os.dup2(given[name], place)
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.execvpe(arguments[0], arguments, environment)  # noqa: S606 - it is what was asked for

    def _watch(self, process: int, command: dict[str, Any], heartbeat: int | None) -> tuple[int | None, bool]:
        """Wait for the end of a command; its wait status, None if it has to be ended, and whether the owner asked."""
        status: int | None = None
        until = time.monotonic() + command["seconds"]
        while True:
            ended, others = self._reap()
            now = time.monotonic()
            if status is None and process in ended:
                status = ended[process]
                until = now + GRACE_SECONDS
                if command["leave_running"]:
                    return status, False
            if now >= until or not others:
                return status, False
            if heartbeat is not None:
                with suppress(OSError):  # a call that is taken for ended early leaves more behind, and loses nothing
                    os.pwrite(heartbeat, HEARTBEAT.pack(time.time_ns()), 0)
            message = self._receive(min(until - now, HEARTBEAT_SECONDS))
            if message is not None and message[0] == KILL:
                return status, status is None

    def _reap(self) -> tuple[dict[int, int], bool]:
        """The wait statuses of those that have ended, and whether any other is left."""
        with suppress(BlockingIOError):
            while os.read(self._waking, 4096):
                pass
        ended: dict[int, int] = {}
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended, False
            if process == 0:
                return ended, True
            ended[process] = status

    def end(self, main: int = 0) -> tuple[int, int]:
        """End all that runs below this process. Return how many were ended, ``main`` not counted, and how many could
        not be."""
        patience = time.monotonic() + ENDING_SECONDS
        count = 0
        while True:
            ended, others = self._reap()
            count += sum(process != main and _was_ended(status) for process, status in ended.items())
            if not others:
                return count, 0
            found = descendants(os.getpid())
            if time.monotonic() > patience:
                return count, len(found)
            for process, parent in found.items():
                _kill(process, parent)
            select.select([self._waking], [], [], 0.005)


def descendants(ancestor: int) -> dict[int, int]:
    """What runs below a process, each with its parent. What has ended and was not reaped is not among it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := parent_of(int(name))):
            children.setdefault(parent, []).append(int(name))
    found: dict[int, int] = {}
    waiting = [ancestor]
    while waiting:
        above = waiting.pop()
        for process in children.get(above, ()):
            found[process] = above
            waiting.append(process)
    return found


def parent_of(process: int) -> int:
    """The parent of a running process; 0 where there is none."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return 0 if words[0] in (b"Z", b"X") else int(words[1])
    except (OSError, IndexError, ValueError):
        return 0


def _kill(process: int, parent: int) -> None:
    """Kill a process that is still that child of its parent."""
    with suppress(OSError):  # it has ended, or is another user's
        handle = os.pidfd_open(process)
        try:
            if parent_of(process) == parent:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _was_ended(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _exit_code(status: int | None) -> int:
    """As a shell would say it; None is a process that was ended here."""
    if status is None:
        return 128 + signal.SIGKILL
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main(arguments: list[str]) -> int:
    owner = socket.socket(fileno=int(arguments[0]))
    owner.set_inheritable(False)
    supervisor = Supervisor(owner)
    owner.send(READY)
    try:
        with suppress(EOFError, ConnectionError):
            supervisor.serve()
            return 0
        supervisor.end()
        return 0
    except BaseException:
        supervisor.end()
        raise


if __name__ == "__main__":
    code = 71
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)
