"""Commands on this machine, under a supervisor that ends what they leave: the owner's end of `supervisor.py`."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.errors import RingfenceError
from ringfence_workspace import supervisor as protocol
from ringfence_workspace.call_process import CALL_VARIABLE, CallProcess
from ringfence_workspace.commands import CommandExit
from ringfence_workspace.pipes import OnOutput, Pipes
from ringfence_workspace.tree.kernel import FORKS

if TYPE_CHECKING:
    from ringfence.limits import Cancellation
    from ringfence_workspace.commands import CommandRequest

_SCRIPT = Path(protocol.__file__)
_START_SECONDS = 30.0
_PATIENCE_SECONDS = protocol.ENDING_SECONDS + 5
_LOOK_SECONDS = 0.05
"""How often a cancellation is looked for."""
_GIT_SETTINGS = {"gc.auto": "0", "maintenance.auto": "false"}
"""For the git of a command: it leaves no process behind that packs objects, and moves none."""


class SupervisorLostError(RingfenceError, RuntimeError):
    """The supervisor of a command ended before the command did, because somebody ended it."""


class HostCommands:
    """The supervisor of one opened workspace, started by the first command. Commands run one at a time."""

    def __init__(self) -> None:
        self._running: _SupervisorProcess | None = None
        self._turn = threading.Lock()

    def run(
        self,
        request: CommandRequest,
        *,
        directory: int,
        call_id: str,
        note: Callable[[CallProcess], int],
        on_output: OnOutput | None,
        cancellation: Cancellation | None = None,
        leave_running: bool = False,
        in_terminal: bool = False,
        inherits_input: bool = False,
    ) -> CommandExit:
        """Run a command. When it returns, or raises, all that the command has started has ended.

        ``directory`` is a descriptor of where it begins. ``note`` gets the supervisor, and gives the descriptor of the
        liveness file. Without ``on_output`` the command has the standard streams of this process, and its input too.
        With ``inherits_input`` it has that input though its output is taken. ``in_terminal``: it also stays in the
        session of this process, and so reads from its terminal.

        Raises:
            SupervisorLostError: somebody ended the supervisor. What it had started was ended, as far as it was found.
            OSError: the supervisor cannot be started.
        """
        with self._turn:
            process = self._process(in_terminal=in_terminal)
            heartbeat = note(CallProcess(f"the supervisor of {request.argv[0]}", *process.identity, call_id))
            try:
                return process.run(
                    request,
                    {
                        "argv": request.argv,
                        "env": command_environment(request.env, call_id),
                        "seconds": request.timeout_seconds,
                        "own_session": not in_terminal,
                        "leave_running": leave_running,
                    },
                    directory,
                    heartbeat,
                    on_output,
                    cancellation,
                    inherits_input=inherits_input,
                )
            except BaseException:
                self._end(process)
                CallProcess("the supervisor", *process.identity, call_id).end()
                raise
            finally:
                if leave_running or in_terminal or process.is_spent:
                    self._end(process)

    def _process(self, *, in_terminal: bool) -> _SupervisorProcess:
        running = self._running
        if running is not None and (in_terminal or not running.is_usable()):
            self._end(running)
        if self._running is None:
            self._running = _SupervisorProcess(own_session=not in_terminal)
        return self._running

    def _end(self, process: _SupervisorProcess) -> None:
        process.close()
        if self._running is process:
            self._running = None

    def close(self) -> None:
        """End the supervisor."""
        if self._running is not None:
            self._end(self._running)


class _SupervisorProcess:
    """One supervisor that runs. It ends with the socket, and so with this process."""

    def __init__(self, *, own_session: bool) -> None:
        if not sys.executable:
            raise FileNotFoundError("there is no Python interpreter to start: sys.executable is empty")
        self._own = _inherited()
        self.is_spent = False
        with FORKS:
            self._socket, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _sockets.add(self._socket)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_SCRIPT), str(inner.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if own_session else None,
                stderr=subprocess.DEVNULL if own_session else None,
                pass_fds=(inner.fileno(),),
                cwd="/",
                start_new_session=own_session,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            inner.close()
        try:
            known = CallProcess.running(self._process.pid, "")
            self.identity = known.pid, known.start_ticks, known.boot_id
            if not _is_ready(self._socket, _START_SECONDS) or self._socket.recv(16) != protocol.READY:
                raise SupervisorLostError("the supervisor of commands does not start: see what ends new processes here")
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether it runs, and a command of it would begin with what this process has now."""
        return not self.is_spent and self._process.poll() is None and self._own == _inherited()

    def run(
        self,
        request: CommandRequest,
        message: dict[str, Any],
        directory: int,
        heartbeat: int,
        on_output: OnOutput | None,
        cancellation: Cancellation | None,
        *,
        inherits_input: bool,
    ) -> CommandExit:
        begun = time.monotonic()
        if on_output is None:
            given = {"cwd": directory, "stdin": 0, "stdout": 1, "stderr": 2, "heartbeat": heartbeat}
            self._send(message, given)
            return self._attend(None, None, begun, request.timeout_seconds, cancellation)
        with Pipes(request.stdin, report=False) as pipes:
            own = {"stdin": 0} if inherits_input else {}
            self._send(message, {"cwd": directory, **pipes.inner, **own, "heartbeat": heartbeat})
            pipes.close_inner()
            return self._attend(pipes, on_output, begun, request.timeout_seconds, cancellation)

    def _send(self, message: dict[str, Any], given: Mapping[str, int]) -> None:
        self.is_spent = True  # until it has answered
        file = os.memfd_create("command")
        try:
            os.pwrite(file, json.dumps({**message, "descriptors": [*given]}).encode(), 0)
            socket.send_fds(self._socket, [protocol.RUN], [file, *given.values()])
        except OSError as error:
            raise SupervisorLostError(f"the supervisor of commands has ended: {error.strerror}") from None
        finally:
            os.close(file)

    def _attend(
        self,
        pipes: Pipes | None,
        on_output: OnOutput | None,
        begun: float,
        seconds: float,
        cancellation: Cancellation | None,
    ) -> CommandExit:
        """Hand on output and input until the command has ended."""
        events = select.poll() if pipes is None else pipes.events
        stream = self._socket.fileno()
        events.register(stream, select.POLLIN)
        limit = begun + seconds + _PATIENCE_SECONDS
        while True:
            wait = limit - time.monotonic() if cancellation is None else _LOOK_SECONDS
            ready = [descriptor for descriptor, _ in events.poll(min(max(0.0, wait), 3600.0) * 1000)]
            for descriptor in ready:
                if descriptor != stream and pipes is not None and on_output is not None:
                    pipes.serve(descriptor, on_output)
            if stream in ready:
                ended = self._outcome(begun)
                if pipes is not None and on_output is not None:
                    pipes.drain(on_output)
                return ended
            if cancellation is not None and cancellation.cancelled:
                with suppress(OSError):  # it has ended, which the next look finds
                    self._socket.send(protocol.KILL)
                limit, cancellation = min(limit, time.monotonic() + _PATIENCE_SECONDS), None
            if time.monotonic() > limit:
                raise SupervisorLostError("the supervisor of commands does not answer")

    def _outcome(self, begun: float) -> CommandExit:
        try:
            answer = self._socket.recv(protocol.LONGEST_ANSWER)
        except OSError:
            answer = b""
        if not answer:
            raise SupervisorLostError("the supervisor of the command was ended, and the command with it")
        found = json.loads(answer)
        self.is_spent = bool(found["unended"])
        return CommandExit(
            found["code"],
            found["timed_out"],
            duration_seconds=time.monotonic() - begun,
            leftovers=found["leftovers"],
            problem=found["problem"],
            unended=found["unended"],
        )

    def close(self) -> None:
        """End it, and with it what it has started."""
        with FORKS:
            _sockets.discard(self._socket)
            self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_SECONDS)
            return
        self._process.kill()
        self._process.wait()


def command_environment(given: Mapping[str, str], call_id: str) -> dict[str, str]:
    """The environment of a command: this process's, with what is given, and the settings for git."""
    found = {**os.environ, **given, CALL_VARIABLE: call_id}
    count = int(text) if (text := found.get("GIT_CONFIG_COUNT", "0")).isdecimal() else 0
    for name, value in _GIT_SETTINGS.items():
        found[f"GIT_CONFIG_KEY_{count}"], found[f"GIT_CONFIG_VALUE_{count}"] = name, value
        count += 1
    found["GIT_CONFIG_COUNT"] = str(count)
    return found


def _inherited() -> Sequence[object]:
    """What a command takes over from the process that starts it, besides environment and streams."""
    import resource

    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        status = [line for line in file if line.startswith(("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "Seccomp:"))]
    return [limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), status]


def _is_ready(readable: socket.socket, seconds: float) -> bool:
    events = select.poll()
    events.register(readable, select.POLLIN)
    return bool(events.poll(seconds * 1000))


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork() -> None:
    for one in [*_sockets]:
        one.close()  # so that the stream ends with the parent


os.register_at_fork(after_in_child=_after_fork)
