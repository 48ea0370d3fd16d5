"""The first process of a sandbox: it runs the host's commands one after the other, and ends what they leave behind.

This file is mounted into the container and started there as ``python3 -I -S -B executor.py SOCKET``. It needs Python
3.9, the standard library and nothing else. `channel.py` is the host's end and takes the definitions of the
frames from here.

It connects to the host's socket once. A frame is a kind (one byte), a length (four bytes, little endian) and that many
bytes. What a command prints does not pass through here: with STARTED go the host's ends of the command's pipes. So a
flood costs no memory in this process, and a reader that stops reading stops the command.

Being the first process of a PID namespace is what makes the end of a command certain: ``kill(-1, SIGKILL)`` reaches
everything in it at once, processes that are being forked included, and orphans come here to be reaped. When this
process ends, for whatever reason, the kernel ends all others; so whenever something is wrong, it ends.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
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

PROTOCOL = 5
HEADER = struct.Struct("<BI")
LONGEST = 4 * 1024 * 1024  # bytes of a frame's payload; Linux takes at most half of it as arguments

# From the host.
# RUN_HEAD, then the directory, the arguments and the environment ("NAME=value", or "NAME" to take one out), each ended
# by a zero byte; and as a descriptor, where there is one, the file to stamp while the command runs
RUN = 1
KILL = 2  # NUMBER: end this command now; ignored when it has ended already
LOOK = 3  # paths, each ended by a zero byte: is each of them covered by something empty and read-only?
LISTEN = 4  # NUMBER: a port of 127.0.0.1 to listen at, for connections that the host accepts
# To the host.
READY = 16  # NUMBER: the version of the protocol
REFUSED = 17  # text: why no command can run here
# NUMBER, and as descriptors: the reading ends of stdout, stderr and the report, then the writing end of stdin
STARTED = 18
FAILED = 19  # FAILED_HEAD, then text: the command could not be started
COVERED = 21  # the first path of a LOOK that is not covered; empty if all are
LISTENING = 22  # and as a descriptor, the listening socket
ENDED = 20  # OUTCOME: every process that the command started has ended

NUMBER = struct.Struct("<I")
STAMP = struct.Struct("<Q")  # nanoseconds since 1970
# number, whether there is stdin, whether there is a report, milliseconds, how many arguments, how many names
RUN_HEAD = struct.Struct("<I??QII")
FAILED_HEAD = struct.Struct("<Ii")  # number, errno
OUTCOME = struct.Struct("<IB?QII?")  # number, exit code, timed out, nanoseconds, how many processes the out-of-memory
# killer took, how many had to be ended, whether it is the last command: then this process ends, too

GRACE_SECONDS = 0.2  # what is left of a command when its main process has exited may go on for so long
REPORT = 19  # the descriptor that a command may say something on to the host; above those that a script would use
STAMP_SECONDS = 1.0  # while a command runs: its host may be stopped meanwhile, and killed
ENDING_SECONDS = 10.0  # when something is still there after so long, ending this process is what is left
TIMEOUT_EXIT_CODE = 124
BACKLOG = 256  # connections that wait to be accepted

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the inode that the kernel gives to the namespace of the machine itself
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_OUTPUT_BUFFER = 256 * 1024
_F_SETPIPE_SZ = 1031
_ALWAYS_LAST = 1000  # of oom_score_adj: the out-of-memory killer takes these first
_SPARE = 8  # of so many parts of the memory, one is enough for the next command
_COUNTED = (
    ("memory.current", "memory.max", "memory.stat"),  # of cgroups of version 2, and then of version 1
    ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.stat"),
)
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class RefusedError(Exception):
    """No command can run here; the text says what is missing."""


def first_frame(received: bytearray, longest: int) -> tuple[int, bytes] | None:
    """The kind and the payload of the first frame, which is taken off; None where it is not there whole yet.

    Raises ValueError for a payload of more bytes than ``longest``.
    """
    if len(received) < HEADER.size:
        return None
    kind, length = HEADER.unpack_from(received)
    if length > longest:
        raise ValueError("a frame is too long")
    end = HEADER.size + length
    if len(received) < end:
        return None
    payload = bytes(received[HEADER.size : end])
    del received[:end]
    return kind, payload


def taken(stream: socket.socket, most: int) -> tuple[bytes, list[int], bool]:
    """What is there of a stream: bytes, up to ``most`` descriptors that no other program inherits, and whether there
    was no room for all of them. (`socket.recv_fds` takes flags, and does nothing with them.)"""
    descriptors = array.array("i")
    data, ancillary, flags, _ = stream.recvmsg(
        65536, socket.CMSG_LEN(most * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, list(descriptors), bool(flags & socket.MSG_CTRUNC)


class HostError(Exception):
    """The host is gone, or sent what is no frame."""


class Link:
    """The stream to the host."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._received = bytearray()
        self._stamped: int | None = None
        self._events = select.poll()
        self._events.register(stream, select.POLLIN)

    def wake_for(self, descriptor: int) -> None:
        """Let `receive` return when this is readable."""
        self._events.register(descriptor, select.POLLIN)

    def send(self, kind: int, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        frame = HEADER.pack(kind, len(payload)) + payload
        # Few and small: they fit into the socket's buffer even if the host does not read for a while.
        sent = socket.send_fds(self._stream, [frame], list(descriptors)) if descriptors else self._stream.send(frame)
        if sent != len(frame):
            raise HostError("a frame was sent in part")

    def receive(self, seconds: float | None) -> tuple[int, bytes] | None:
        """The host's next frame; None after so many seconds, or when something else is to be looked at."""
        frame = self._complete()
        if frame is not None:
            return frame
        ready = self._events.poll(None if seconds is None else int(min(max(0.0, seconds), 3600.0) * 1000) + 1)
        if all(place != self._stream.fileno() for place, _ in ready):
            return None
        received, descriptors, _ = taken(self._stream, 1)
        if not received:
            raise HostError("the host closed the stream")
        for descriptor in descriptors:
            close_all([] if self._stamped is None else [self._stamped])
            self._stamped = descriptor
        self._received += received
        return self._complete()

    def stamp(self) -> None:
        """Write the time on the file that came with the last command, if one did."""
        if self._stamped is not None:
            with suppress(OSError):  # a call that is taken for ended early leaves more behind, and loses nothing
                os.pwrite(self._stamped, STAMP.pack(time.time_ns()), 0)

    def _complete(self) -> tuple[int, bytes] | None:
        try:
            return first_frame(self._received, LONGEST)
        except ValueError:
            raise HostError("a frame is too long") from None


class Command:
    """What the host asked to be run."""

    def __init__(self, payload: bytes) -> None:
        self.number, self.has_stdin, self.has_report, milliseconds, arguments, names = RUN_HEAD.unpack_from(payload)
        self.timeout_seconds: float = milliseconds / 1000
        words = payload[RUN_HEAD.size :].split(b"\0")
        if arguments < 1 or len(words) != 1 + arguments + names + 1 or words.pop():
            raise HostError("a command is malformed")
        self.directory = words[0]
        self.arguments = words[1 : 1 + arguments]
        self.environment: dict[bytes, bytes | None] = {}
        for word in words[1 + arguments :]:
            name, equals, value = word.partition(b"=")
            if not name:
                raise HostError("a variable of the environment is malformed")
            self.environment[name] = value if equals else None


class Children:
    """The processes of the command that runs: started here, reaped here, ended here."""

    def __init__(self, base_environment: dict[bytes, bytes]) -> None:
        self._base_environment = base_environment
        self._own_score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self._score = os.pread(self._own_score, 16, 0).strip()
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        self._to_default = tuple({*ignored, signal.SIGPIPE, signal.SIGCHLD})
        self._waking, waked = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(waked, False)
        signal.set_wakeup_fd(waked, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # so that the wakeup descriptor is written

    def fileno(self) -> int:
        """Readable when a process may have ended."""
        return self._waking

    def start(self, command: Command) -> tuple[int, tuple[int, ...]]:
        """Its process and the host's ends of its pipes.

        Raises:
            OSError: it cannot be started; nothing of it is left.
        """
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for writes in (False, False, *([False] * command.has_report), *([True] * command.has_stdin)):
                reading, writing = os.pipe()
                ours.append(writing if writes else reading)
                theirs.append(reading if writes else writing)
                if not writes:
                    _widen(writing)
            process = self._spawn(command, theirs)
        except BaseException:
            close_all(ours)
            raise
        finally:
            close_all(theirs)
        return process, tuple(ours)

    def _spawn(self, command: Command, pipes: list[int]) -> int:
        # The directory and the score are inherited. Nothing else runs at this moment that could make use of either.
        given = {**self._base_environment, **command.environment}
        environment = {name: value for name, value in given.items() if value is not None}
        streams: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, pipes[0], 1),
            (os.POSIX_SPAWN_DUP2, pipes[1], 2),
            (os.POSIX_SPAWN_DUP2, pipes[-1], 0)
            if command.has_stdin
            else (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        ]
        if command.has_report:
            streams.append((os.POSIX_SPAWN_DUP2, pipes[2], REPORT))
        os.chdir(command.directory)
        try:
            os.pwrite(self._own_score, b"%d" % _ALWAYS_LAST, 0)
            try:
                return os.posix_spawn(
                    _found(command.arguments[0], environment),
                    command.arguments,
                    environment,
                    file_actions=streams,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=self._to_default,
                )
            finally:
                os.pwrite(self._own_score, self._score, 0)
        finally:
            os.chdir("/")

    def reap(self) -> tuple[dict[int, int], bool]:
        """The wait statuses of those that have ended, and whether any other is left."""
        while _drained(self._waking):
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

    def end(self, main: int) -> int:
        """End every process but this one; when they are gone, return how many were ended, ``main`` not counted."""
        patience = time.monotonic() + ENDING_SECONDS
        count = 0
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:  # the kernel knows of no other process in this namespace, not even an unreaped
                return count
            except PermissionError:  # there are some, and none of them is ours to end
                pass
            ended, _ = self.reap()
            count += sum(process != main and _was_ended(status) for process, status in ended.items())
            if time.monotonic() > patience:
                raise RefusedError("processes do not end")
            if not ended:
                select.select([self._waking], [], [], 0.005)


class Memory:
    """What the cgroup of this container says of its memory. Commands cannot write there."""

    def __init__(self) -> None:
        counter = next(filter(os.path.exists, _counters()), "")
        version_1 = os.path.basename(counter) == "memory.oom_control"
        self._counter = _opened(counter)
        self._used, self._most, self._kinds = (
            _opened(os.path.join(os.path.dirname(counter), name)) for name in _COUNTED[version_1]
        )

    def kills(self) -> int:
        """How many processes of this container the out-of-memory killer has taken."""
        return _counted(self._counter, b"oom_kill")

    def is_used_up(self) -> bool:
        """Whether what is held while no command runs, such as files in /tmp, leaves too little for another one."""
        most = _counted(self._most)
        used = _counted(self._used) - _counted(self._kinds, b"active_file") - _counted(self._kinds, b"inactive_file")
        return 0 < most - most // _SPARE < used


class Executor:
    """Runs one command at a time, until the host goes away."""

    def __init__(self, link: Link, children: Children, memory: Memory) -> None:
        self._link = link
        self._children = children
        self._memory = memory
        self._kills = memory.kills()
        self._own = _own_state()
        link.wake_for(children.fileno())

    def serve(self) -> None:
        """Raises HostError when the host is gone, RefusedError when no other command may run here."""
        while True:
            frame = self._link.receive(None)
            if frame is None:
                self._children.reap()  # somebody else's, who entered the container from outside
            elif frame[0] == RUN:
                self._run(Command(frame[1]))
            elif frame[0] == LOOK:
                self._link.send(COVERED, next(filterfalse(_is_covered, frame[1].split(b"\0")[:-1]), b""))
            elif frame[0] == LISTEN:
                self._listen(NUMBER.unpack(frame[1])[0])
            elif frame[0] != KILL:  # of a command that has ended meanwhile
                raise HostError("a frame is of no kind")

    def _listen(self, port: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            listener.listen(BACKLOG)
            self._link.send(LISTENING, b"", (listener.fileno(),))

    def _run(self, command: Command) -> None:
        begun = time.monotonic_ns()
        try:
            process, pipes = self._children.start(command)
        except OSError as error:
            text = (error.strerror or str(error)).encode(errors="replace")
            if error.filename is not None:
                text += b": " + os.fsencode(error.filename)[:1000]
            self._link.send(FAILED, FAILED_HEAD.pack(command.number, error.errno or 0) + text)
            return
        try:
            self._link.send(STARTED, NUMBER.pack(command.number), pipes)
        finally:
            close_all(pipes)
        status, killed = self._watch(command, process)
        took = time.monotonic_ns() - begun
        left = self._children.end(process)
        before, self._kills = self._kills, self._memory.kills()
        code = TIMEOUT_EXIT_CODE if status is None and not killed else _exit_code(status)
        # Where nobody was killed for want of memory, it may be full of what the kernel can let go of.
        used_up = self._kills > before and self._memory.is_used_up()
        last = used_up or _own_state() != self._own
        outcome = (command.number, code, status is None and not killed, took, self._kills - before, left, last)
        self._link.send(ENDED, OUTCOME.pack(*outcome))
        if last:  # while nothing else runs here
            raise RefusedError("a command used up the memory, or changed the limits or the priority of the executor")

    def _watch(self, command: Command, process: int) -> tuple[int | None, bool]:
        """Wait for the end of a command; its wait status, None if it has to be ended, and whether the host asked to."""
        status: int | None = None
        until = time.monotonic() + command.timeout_seconds
        while True:
            ended, others = self._children.reap()
            now = time.monotonic()
            if status is None and process in ended:
                status = ended[process]
                until = now + GRACE_SECONDS
            if now >= until or not others:
                return status, False
            self._link.stamp()
            frame = self._link.receive(min(until - now, STAMP_SECONDS))
            if frame is None:
                continue
            if frame[0] != KILL:
                raise HostError("a frame came that cannot come during a command")
            if NUMBER.unpack(frame[1])[0] == command.number:
                return status, status is None


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
    for directory in environment.get(b"PATH", _DEFAULT_PATH.encode()).split(b":"):
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


def _counters() -> list[str]:
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


def _widen(pipe: int) -> None:
    """Make a pipe hold more: fewer turns a megabyte. Where the user has too many already, it stays as it is."""
    with suppress(OSError):
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _OUTPUT_BUFFER)


def _drained(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""


def close_all(descriptors: list[int] | tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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


def _shut_off() -> None:
    """Deny commands of the same user this process's memory and descriptors, and setuid programs another user."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise RefusedError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def _base_environment() -> dict[bytes, bytes]:
    """The image's environment, as the container was started with it."""
    environment = {name: value for name, value in os.environb.items() if not name.startswith(b"RINGFENCE_")}
    environment.setdefault(b"PATH", _DEFAULT_PATH.encode())
    return environment


def main(arguments: list[str]) -> int:
    # First of all: elsewhere kill(-1) would end the machine.
    if os.getpid() != 1 or os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE:
        sys.stderr.write("this is only for the first process of a container\n")
        return 64
    if len(arguments) != 1:
        sys.stderr.write("usage: executor.py SOCKET\n")
        return 64
    _stand_alone()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(arguments[0])
    link = Link(stream)
    try:
        memory = Memory()
        children = Children(_base_environment())
        _shut_off()
        executor = Executor(link, children, memory)
    except (RefusedError, OSError) as error:
        link.send(REFUSED, str(error).encode(errors="replace")[:1000])
        return 69
    link.send(READY, NUMBER.pack(PROTOCOL))
    try:
        executor.serve()
    except HostError:
        return 0
    except RefusedError:
        return 70
    return 0


if __name__ == "__main__":
    code = 71
    try:
        code = main(sys.argv[1:])
    finally:
        os._exit(code)  # no interpreter's end: whatever happened, the namespace ends now
