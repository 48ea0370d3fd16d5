"""Processes known again over reboots and reused numbers: those of a call, which may outlive who started them, and the
owners of containers and mounts."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass

from ringfence.errors import RestoreFailedError
from ringfence_workspace.tree.kernel import boot_id
from ringfence_workspace.tree.state import Json

PATIENCE_SECONDS = 10.0
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
        """Kill it if it lives, and wait for its end.

        Raises:
            RestoreFailedError: it could not be proved to have ended; says what to run.
        """
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
        return [self.name, self.pid, self.start_ticks, self.boot_id]


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
