"""Whose something is that outlives its process: known again over reboots and reused numbers."""

from __future__ import annotations

import os

from ringfence_sandbox.disk.call_process import CallProcess

OWNER_LABEL = "io.ringfence.owner"
"""Of a container: whose it is."""


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
