"""Processes known again over reboots and reused numbers: those of a call, which may outlive who started them, and the
owners of containers and mounts."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from ringfence.errors import RestoreFailedError
from ringfence_workspace.tree.kernel import boot_id
from ringfence_workspace.tree.state import Json

PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.01
CALL_VARIABLE = "RINGFENCE_CALL"
"""In the environment of a command on this machine: the id of the call that it belongs to."""
OWNER_LABEL = "io.ringfence.owner"
"""Of a container: whose it is."""


@dataclass(frozen=True, slots=True)
class CallProcess:
    """A process whose end is the end of all that an opaque call started, such as a container's first."""

    name: str
    """For people."""
    pid: int
    start_ticks: int
    """When it started, in clock ticks since the start of the machine: field 22 of /proc/<pid>/stat."""
    boot_id: str
    """Of the machine: /proc/sys/kernel/random/boot_id."""
    call_id: str = ""
    """Of a supervisor: the call that it runs a command for, whose processes have this id in their environment. It ends
    them itself when its owner has ended."""

    @classmethod
    def running(cls, pid: int, name: str) -> CallProcess:
        """The process that has a pid now. ProcessLookupError where there is none."""
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(name, pid, ticks, boot_id())

    @property
    def lives(self) -> bool:
        """Whether it still runs. After another start of the machine it does not, whatever has its pid."""
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks

    def end(self) -> None:
        """Kill it if it lives, and wait for its end. Of a supervisor, also end what it started.

        Raises:
            RestoreFailedError: it could not be proved to have ended; says what to run.
        """
        if self.call_id:
            self._end_supervised()
        else:
            self._kill()

    def _end_supervised(self) -> None:
        """Let a supervisor end what it has started, and itself; then end what is left of its call."""
        until = monotonic() + PATIENCE_SECONDS
        with suppress(OSError):
            if self.lives:  # somebody may have stopped it
                os.kill(self.pid, signal.SIGCONT)
        while self.lives and monotonic() < until:
            sleep(_LOOK_SECONDS)
        self._kill()
        if self.boot_id != boot_id():
            return
        until = monotonic() + PATIENCE_SECONDS
        while found := processes_of_call(self.call_id):
            if monotonic() > until:
                raise self._failed(TimeoutError(f"process {found[0]} did not end"))
            for pid in found:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            sleep(_LOOK_SECONDS)

    def _kill(self) -> None:
        if not self.lives:
            return
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError) as error:
            raise self._failed(error) from error
        try:
            if not self.lives:  # its pid went to another process just before
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            ended = waiting.poll(PATIENCE_SECONDS * 1000)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            os.close(handle)
        if not ended:
            raise self._failed(TimeoutError(f"it did not end within {PATIENCE_SECONDS:.0f} s"))

    def _failed(self, error: BaseException) -> RestoreFailedError:
        what = (
            f"{self.name} (process {self.pid}), which an interrupted call started, may still change files; run "
            f"`kill -9 {self.pid}` (a paused container has to go on for that: `podman unpause`) and open the workspace "
            "again"
        )
        return RestoreFailedError([(what, error)])

    def to_json(self) -> Json:
        return [self.name, self.pid, self.start_ticks, self.boot_id, *([self.call_id] if self.call_id else [])]


def processes_of_call(call_id: str) -> list[int]:
    """The processes that have the id of a call in their environment. This one is not among them."""
    wanted = f"{CALL_VARIABLE}={call_id}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # it has ended, or is another user's
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the start of the machine. None where there is no such process, or
    only what is left of an ended one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
        return None if words[0] in ("Z", "X") else int(words[19])
    except (OSError, IndexError, ValueError):
        return None


def written(owner: CallProcess) -> str:
    """As it stands in labels and names."""
    return f"{owner.pid}-{owner.start_ticks}-{owner.boot_id}"


def own_label() -> str:
    return written(CallProcess.running(os.getpid(), "the owner"))


def owner_of(label: str) -> CallProcess | None:
    """Whom a label names; None for what is none."""
    pid, _, rest = label.partition("-")
    ticks, _, boot = rest.partition("-")
    return (
        CallProcess("the owner", int(pid), int(ticks), boot) if pid.isdecimal() and ticks.isdecimal() and boot else None
    )


def is_orphan(label: str) -> bool:
    """Whether its owner has ended. What names no owner belongs to somebody else."""
    owner = owner_of(label)
    return owner is not None and not owner.lives
