"""Whether a command in the background, or anything that it started, may still run: what the kernel says of processes.

A process that began before the command did is not of it. Another one may be, if it has the agent's mark in its
environment or comes from the agent's process. So may one that comes from none that is older than the command: when its
parent ends, a process gets the first one of the machine as parent, or the service manager of its user. Such a one is
not of it if it works elsewhere, and its environment can be read and has no mark. What an older service did for the
command is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringfence_guard.kept_calls import SessionKey

TICKS = os.sysconf("SC_CLK_TCK")
"""Of the clock by which the starts of processes are told, in a second."""
_MARKS: Mapping[str, tuple[bytes, bytes]] = {
    "claude": (b"CLAUDECODE=", b"CLAUDE_CODE_SESSION_ID="),
    "codex": (b"CODEX_THREAD_ID=", b"CODEX_SESSION_ID="),
    "gemini": (b"GEMINI_CLI=", b""),
    "qwen": (b"QWEN_CODE=", b"QWEN_CODE_SESSION_ID="),
}
"""What each agent puts into the environment of its commands, and beside it the session."""
AGENT_MARKS = (*(mark.rstrip(b"=").decode() for mark, _ in _MARKS.values()), "OPENCODE")
"""The variables of the environment by which a command of an agent is known. opencode has no session beside it."""
_ADOPTING = (b"systemd", b"init")
_OF_KERNEL = 0x200000
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class _Process:
    number: int
    parent: int
    started: float
    name: bytes


def may_live(session: SessionKey, since: float, agent: int, root: str, proc: Path = PROC) -> bool:
    """Whether something may live that a session's commands in a root have started since a time, in seconds since the
    machine was started. ``agent`` is its process."""
    # A process that is passed on in the middle of one look is there in the next.
    return not agent or any(_lives(session, since, agent, root, proc) for _ in range(2))


def may_be_left(session: SessionKey, since: float, until: float, agent: int, root: str, proc: Path = PROC) -> bool:
    """Whether a call that began at a time may have left something that goes on. ``until`` is when the hook of its end
    was started. ``agent`` is the agent's process.

    What still comes from the agent is its own: a server, or another hook. What cannot be looked into is none of the
    user's."""
    found = {one.number: one for one in _processes(proc)}
    return any(
        not _comes_from(one, found, agent)
        and _is_adopted(one, found, since)
        and _works_for(proc, one.number, session, root)
        for one in found.values()
        if since - 2 / TICKS <= one.started <= until and one.number != os.getpid()
    )


def _works_for(proc: Path, process: int, session: SessionKey, root: str) -> bool:
    """Whether a process works in the root, or has the mark, or no environment at all."""
    try:
        place = os.readlink(proc / str(process) / "cwd")
    except OSError:
        return False
    is_inside = f"{place}/".startswith(f"{root}/")
    return is_inside or not _environment(proc, process) or _has_mark(proc, process, session)


def _lives(session: SessionKey, since: float, agent: int, root: str, proc: Path) -> bool:
    found = {one.number: one for one in _processes(proc)}
    younger = [one for one in found.values() if one.started >= since - 2 / TICKS]
    return not found or any(
        _has_mark(proc, one.number, session)
        or _comes_from(one, found, agent)
        or (_is_adopted(one, found, since) and not _is_elsewhere(proc, one.number, session, root))
        for one in younger
        if one.number not in (agent, os.getpid())
    )


def _processes(proc: Path) -> Iterator[_Process]:
    """All that have not ended, but for those of the kernel."""
    with suppress(OSError):
        for name in os.listdir(proc):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    head, _, tail = _read(f"{proc}/{name}/stat").rpartition(b")")
                    words = tail.split()
                    if words[0] not in b"ZX" and not int(words[6]) & _OF_KERNEL:
                        yield _Process(int(name), int(words[1]), int(words[19]) / TICKS, head.partition(b"(")[2])


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _has_mark(proc: Path, process: int, session: SessionKey) -> bool:
    """Whether a process has the environment of a session's command. That of another user cannot be read."""
    agent, name = session
    mark, variable = _MARKS.get(agent, (b"", b""))
    words = _environment(proc, process)
    own = [word for word in words if variable and word.startswith(variable)]
    return any(mark and word.startswith(mark) for word in words) and own in ([], [variable + name.encode()])


def _environment(proc: Path, process: int) -> Sequence[bytes]:
    try:
        return [word for word in (proc / str(process) / "environ").read_bytes().split(b"\0") if word]
    except OSError:
        return ()


def _is_elsewhere(proc: Path, process: int, session: SessionKey, root: str) -> bool:
    """Whether a process without the mark would have it if it were of the session's commands."""
    try:
        place = os.readlink(proc / str(process) / "cwd")
    except OSError:
        return False
    is_inside = f"{place}/".startswith(f"{root}/")
    return session[0] in _MARKS and bool(_environment(proc, process)) and not is_inside


def _is_adopted(one: _Process, found: Mapping[int, _Process], since: float) -> bool:
    """Whether a process comes from none that is older than the command, but for those that get the children of one
    that has ended."""
    for _ in range(len(found)):
        if one.parent == 0:  # from outside of the container
            return one.number == 1
        above = found.get(one.parent)
        if above is None or above.number == 1 or above.name in _ADOPTING:
            return True
        if above.started < since - 2 / TICKS:
            return False
        one = above
    return True


def _comes_from(one: _Process | None, found: Mapping[int, _Process], agent: int) -> bool:
    for _ in range(len(found)):
        if one is None or one.number == agent:
            break
        one = found.get(one.parent)
    return one is not None and one.number == agent
