"""The first process of a sandbox: it runs the host's commands one after the other, and ends what they leave behind.

This file is mounted into the container and started there as ``python3 -I -S -B executor.py SOCKET [PORT]``. It needs
Python 3.9, the standard library and nothing else. At a PORT of 127.0.0.1 it listens for the host. `channel.py` is the
host's end and takes the definitions of the messages from here.

It connects to the host's socket once, which keeps messages apart. What a command prints does not pass through here:
with RUN come the container's ends of its pipes. So a flood costs no memory in this process, a reader that stops
reading stops the command, and all that the host believes is a number of bytes.

Being the first process of a PID namespace is what makes the end of a command certain: ``kill(-1, SIGKILL)`` reaches
everything in it at once, processes that are being forked included, and orphans come here to be reaped. When this
process ends, for whatever reason, the kernel ends all others; so whenever something is wrong, it ends.
"""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from itertools import filterfalse
from typing import Any

# From the host: a kind and a number. With RUN and LOOK comes a file of JSON as the first descriptor.
MESSAGE = struct.Struct("<BI")
RUN = 1  # the number of a command: {argv, cwd, env, seconds, and under "descriptors" which further ones come with it}
KILL = 2  # the number of a command: end it now; ignored when it has ended already
LOOK = 3  # a list of paths: is each of them covered by something empty and read-only?
# To the host: a kind, and what is said here.
ANSWER = struct.Struct("<B")
READY = 16  # commands can be run; and as a descriptor, the socket that listens at the PORT
REFUSED = 17  # text: why none can
ENDED = 18  # OUTCOME, then text: why the command could not be started. Every process that it started has ended
COVERED = 19  # the first path of a LOOK that is not covered; empty if all are

HEARTBEAT = struct.Struct("<Q")  # nanoseconds since 1970, at the start of the file that came with a command
# number, exit code, timed out, nanoseconds, how many processes the out-of-memory killer took, how many had to be ended,
# whether it is the last command: then this process ends, too
OUTCOME = struct.Struct("<IB?QII?")
LONGEST_ANSWER = 8192

GRACE_SECONDS = 0.2  # what is left of a command when its main process has exited may go on for so long
REPORT = 19  # the descriptor that a command may say something on to the host; above those that a script would use
HEARTBEAT_SECONDS = 1.0  # the host may be stopped while a command runs, and killed
ENDING_SECONDS = 10.0  # when something is still there after so long, ending this process is what is left
TIMEOUT_EXIT_CODE = 124
_NOT_STARTED, _NOT_FOUND = 126, 127  # a shell's exit codes for what it cannot start
_BACKLOG = 256  # connections that wait to be accepted
_MOST_DESCRIPTORS = 6

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the inode that the kernel gives to the namespace of the machine itself
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_ALWAYS_LAST = 1000  # of oom_score_adj: the out-of-memory killer takes these first
_SPARE = 8  # of so many parts of the memory, one is enough for the next command
_COUNTED = (
    ("memory.current", "memory.max", "memory.stat"),  # of cgroups of version 2, and then of version 1
    ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.stat"),
)
_DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def received(stream: socket.socket, longest: int, most: int) -> tuple[bytes, list[int], bool]:
    """A message, up to ``most`` descriptors that no other program inherits, and whether something of it was cut off.
    (`socket.recv_fds` takes flags, and does nothing with them.)"""
    descriptors = array.array("i")
    space = socket.CMSG_LEN(most * descriptors.itemsize) if most else 0
    data, ancillary, flags, _ = stream.recvmsg(longest, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, list(descriptors), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


class Executor:
    """Runs one command at a time, until the host goes away."""

    def __init__(self, host: socket.socket) -> None:
        self._host = host
        # The image's environment, as the container was started with it.
        self._environment = {name: value for name, value in os.environb.items() if not name.startswith(b"RINGFENCE_")}
        self._environment.setdefault(b"PATH", _DEFAULT_PATH)
        self._memory = Memory()
        self._kills = self._memory.kills()
        self._own = _own_state()
        self._score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        self._to_default = tuple({*ignored, signal.SIGPIPE, signal.SIGCHLD})
        self._waking, waked = os.pipe()  # readable when a process may have ended
        os.set_blocking(self._waking, False)
        os.set_blocking(waked, False)
        signal.set_wakeup_fd(waked, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # so that the wakeup descriptor is written
        self._events = select.poll()
        self._events.register(host, select.POLLIN)
        self._events.register(self._waking, select.POLLIN)

    def serve(self) -> None:
        """Answer the host, until a command has spoilt this process for the next one. EOFError: the host is gone."""
        is_last = False
        while not is_last:
            message = self._receive(None)
            if message is None:
                self._reap()  # somebody else's, who entered the container from outside
                continue
            kind, number, descriptors = message
            if kind == RUN:
                is_last = self._run(number, descriptors)
            elif kind == LOOK:
                self.answer(COVERED, next(filterfalse(_is_covered, map(_encoded, _content(descriptors[0]))), b""))
            elif kind != KILL:  # of a command that has ended meanwhile
                raise ValueError("a message is of no kind")

    def answer(self, kind: int, payload: bytes, *descriptors: int) -> None:
        # Few and small: they fit into the socket's buffer even if the host does not read for a while.
        socket.send_fds(self._host, [ANSWER.pack(kind) + payload], descriptors)

    def _receive(self, seconds: float | None) -> tuple[int, int, list[int]] | None:
        """The host's next message; None after so many seconds, or when something else is to be looked at."""
        ready = self._events.poll(None if seconds is None else int(min(max(0.0, seconds), 3600.0) * 1000) + 1)
        if all(place != self._host.fileno() for place, _ in ready):
            return None
        message, descriptors, _ = received(self._host, MESSAGE.size, _MOST_DESCRIPTORS)
        if not message:
            raise EOFError("the host closed the stream")
        kind, number = MESSAGE.unpack(message)
        return kind, number, descriptors

    def _run(self, number: int, descriptors: list[int]) -> bool:
        """Run a command to its end; whether it is the last one."""
        begun = time.monotonic_ns()
        command: dict[str, Any] = _content(descriptors[0])
        given = {name: descriptors[place] for place, name in enumerate(command["descriptors"], 1)}
        heartbeat = given.pop("heartbeat", None)
        code, problem, timed_out, kills, left, is_last = 0, b"", False, 0, 0, False
        try:
            process = self._start(command, given)
        except (OSError, ValueError) as error:
            process = 0
            code, problem = _not_started(error)
        finally:
            for descriptor in given.values():
                os.close(descriptor)
        if process:
            status, killed = self._watch(number, process, command["seconds"], heartbeat)
            left = self._end(process)
            before, self._kills = self._kills, self._memory.kills()
            kills = self._kills - before
            timed_out = status is None and not killed
            code = TIMEOUT_EXIT_CODE if timed_out else _exit_code(status)
            # Where nobody was killed for want of memory, it may be full of what the kernel can let go of.
            is_last = (kills > 0 and self._memory.is_used_up()) or _own_state() != self._own
        if heartbeat is not None:
            os.close(heartbeat)
        took = time.monotonic_ns() - begun
        self.answer(ENDED, OUTCOME.pack(number, code, timed_out, took, kills, left, is_last) + problem)
        return is_last

    def _start(self, command: dict[str, Any], pipes: dict[str, int]) -> int:
        """Its process.

        Raises:
            OSError, ValueError: it cannot be started; nothing of it is left.
        """
        # The directory and the score are inherited. Nothing else runs at this moment that could make use of either.
        changed = {_encoded(name): value for name, value in command["env"].items()}
        environment = {name: value for name, value in self._environment.items() if name not in changed}
        environment.update({name: _encoded(value) for name, value in changed.items() if value is not None})
        arguments = [_encoded(word) for word in command["argv"]]
        if not arguments:
            raise ValueError("a command has at least one argument: the program")
        places = {"stdin": 0, "stdout": 1, "stderr": 2, "report": REPORT}
        streams: list[Any] = [(os.POSIX_SPAWN_DUP2, pipes[name], places[name]) for name in pipes]
        if "stdin" not in pipes:
            streams.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        score = os.pread(self._score, 16, 0).strip()
        os.chdir(_encoded(command["cwd"]))
        try:
            os.pwrite(self._score, b"%d" % _ALWAYS_LAST, 0)
            return os.posix_spawn(
                _found(arguments[0], environment),
                arguments,
                environment,
                file_actions=streams,
                setsid=True,
                setsigmask=(),
                setsigdef=self._to_default,
            )
        finally:
            os.pwrite(self._score, score, 0)
            os.chdir("/")

    def _watch(self, number: int, process: int, seconds: float, heartbeat: int | None) -> tuple[int | None, bool]:
        """Wait for the end of a command; its wait status, None if it has to be ended, and whether the host asked to."""
        status: int | None = None
        until = time.monotonic() + seconds
        while True:
            ended, others = self._reap()
            now = time.monotonic()
            if status is None and process in ended:
                status = ended[process]
                until = now + GRACE_SECONDS
            if now >= until or not others:
                return status, False
            if heartbeat is not None:
                with suppress(OSError):  # a call that is taken for ended early leaves more behind, and loses nothing
                    os.pwrite(heartbeat, HEARTBEAT.pack(time.time_ns()), 0)
            message = self._receive(min(until - now, HEARTBEAT_SECONDS))
            if message is None:
                continue
            if message[0] != KILL:
                raise ValueError("a message came that cannot come during a command")
            if message[1] == number:
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

    def _end(self, main: int) -> int:
        """End every process but this one; when they are gone, return how many were ended, ``main`` not counted."""
        patience = time.monotonic() + ENDING_SECONDS
        count = 0
        while time.monotonic() < patience:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:  # the kernel knows of no other process in this namespace, not even an unreaped
                return count
            except PermissionError:  # there are some, and none of them is ours to end
                pass
            ended, _ = self._reap()
            count += sum(process != main and _was_ended(status) for process, status in ended.items())
            if not ended:
                select.select([self._waking], [], [], 0.005)
        raise TimeoutError("processes do not end")


class Memory:
    """What the cgroup of this container says of its memory. Commands cannot write there."""

    def __init__(self) -> None:
        events = next(filter(os.path.exists, _memory_events()), "")
        directory, name = os.path.split(events)
        self._events = _opened(events)
        self._used = [_opened(os.path.join(directory, one)) for one in _COUNTED[name == "memory.oom_control"]]

    def kills(self) -> int:
        """How many processes of this container the out-of-memory killer has taken."""
        return _counted(self._events, b"oom_kill")

    def is_used_up(self) -> bool:
        """Whether what is held while no command runs, such as files in /tmp, leaves too little for another one."""
        current, maximum, kinds = self._used
        most = _counted(maximum)
        used = _counted(current) - _counted(kinds, b"active_file") - _counted(kinds, b"inactive_file")
        return 0 < most - most // _SPARE < used


def _memory_events() -> list[str]:
    """Where the counter may be: cgroup version 2, then 1; as a container sees it, and as the machine does."""
    places: list[str] = []
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as groups:
        for line in groups:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if number == "0" and not controllers:
                places += [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
            elif "memory" in controllers.split(","):
                root = "/sys/fs/cgroup/memory"
                places += [f"{root}{path}/memory.oom_control", f"{root}/memory.oom_control"]
    return places


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _counted(counter: int | None, wanted: bytes = b"") -> int:
    """A number that the kernel counts, of that name where a file has several; 0 where it does not."""
    for line in os.pread(counter, 65536, 0).splitlines() if counter is not None else ():
        name, _, value = line.rpartition(b" ")
        if name == wanted and value.isdigit():
            return int(value)
    return 0


def _content(descriptor: int) -> Any:
    with open(descriptor, "rb") as file:
        return json.load(file)


def _encoded(text: str) -> bytes:
    """As the host has it, whatever the locale of the image."""
    return text.encode("utf-8", "surrogateescape")


def _is_covered(path: bytes) -> bool:
    """Whether something empty and read-only is mounted on a path of a tree that is not read-only.

    What this process cannot reach, no command of the same user can.
    """
    try:
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            return False
        return not os.listdir(path) if os.path.isdir(path) else os.path.getsize(path) == 0
    except PermissionError:
        return True
    except OSError:
        return False


def _not_started(error: OSError | ValueError) -> tuple[int, bytes]:
    """The exit code of a command that could not be started, and why."""
    if not isinstance(error, OSError):
        return _NOT_STARTED, str(error).encode(errors="replace")
    name = b"" if error.filename is None else b": " + os.fsencode(error.filename)[:1000]
    code = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_STARTED
    return code, (error.strerror or str(error)).encode(errors="replace") + name


def _was_ended(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _exit_code(status: int | None) -> int:
    """As a shell would say it; None is a process that was ended here."""
    if status is None:
        return 128 + signal.SIGKILL
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _found(name: bytes, environment: dict[bytes, bytes]) -> bytes:
    """Where a program is, as a shell would look for it."""
    if b"/" in name:
        return name
    denied = False
    for directory in environment.get(b"PATH", _DEFAULT_PATH).split(b":"):
        path = os.path.join(directory or b".", name)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            denied = True
    code = errno.EACCES if denied else errno.ENOENT
    raise OSError(code, os.strerror(code), name)


def _own_state() -> tuple[object, ...]:
    """What a process of the same user may change about this one without touching its memory."""
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    try:
        scheduler = os.sched_getscheduler(0)
    except OSError:  # musl has none
        scheduler = 0
    return limits, os.getpriority(os.PRIO_PROCESS, 0), scheduler, os.sched_getaffinity(0)


def _stand_alone() -> None:
    """Keep nothing of who started this, and nothing that a command could reach."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the one that listed them is closed already
                os.close(int(name))
    os.umask(0o022)
    os.chdir("/")
    # Python's own handler would let a command's SIGINT through to the first process; the kernel drops what has none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(nothing, place)
    os.close(nothing)


def _listening(port: int) -> int:
    """A descriptor for connections that the host accepts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener.detach()


def _shut_off() -> None:
    """Deny commands of the same user this process's memory and descriptors, and setuid programs another user."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def main(arguments: list[str]) -> int:
    # First of all: elsewhere kill(-1) would end the machine.
    if os.getpid() != 1 or os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE:
        sys.stderr.write("this is only for the first process of a container\n")
        return 64
    _stand_alone()
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.connect(arguments[0])
    try:
        executor = Executor(host)
        listening = [_listening(int(port)) for port in arguments[1:]]
        _shut_off()
    except OSError as error:
        host.send(ANSWER.pack(REFUSED) + str(error).encode(errors="replace")[:1000])
        return 69
    executor.answer(READY, b"", *listening)
    for descriptor in listening:
        os.close(descriptor)
    with suppress(EOFError):
        executor.serve()
    return 0


if __name__ == "__main__":
    code = 71
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)  # no interpreter's end: whatever happened, the namespace ends now
