"""What a guard knows of calls that have not ended, kept in a file: after a kill the next guard goes on with it.

Each state is a line, and the last whole line holds. A new file in the place of an old one waits for the disk on some
filesystems, which takes longer than all else that a guard does in an event.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, time
from typing import Any, TypeAlias, cast

from ringfence_guard.events import HookEvent

FILE = "open.jsonl"
MOST_BYTES = 1 << 20
"""How long the file gets before a new one is begun."""
SessionKey: TypeAlias = "tuple[str, str]"
"""The agent and its session."""


def boot_time() -> float:
    """Seconds since the machine was started. Nobody sets this clock, and it goes on in a suspension."""
    return clock_gettime(CLOCK_BOOTTIME)


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call that has begun."""

    event: HookEvent
    mark: str
    """The look that it began with; of a call that may change any file, that of its group."""
    paths: tuple[str, ...] | None
    """The files that it names, in the workspace."""
    verdict: str = ""
    """What became of a part of it that had to be settled before its end."""
    began: float = field(default_factory=time)
    record_bytes: int = 0
    """How long the agent's record of the session was."""
    boot: float = field(default_factory=boot_time)
    """When it began, in seconds since the machine was started."""

    def to_json(self) -> dict[str, Any]:
        event = {one.name: getattr(self.event, one.name) for one in fields(HookEvent) if one.name != "result"}
        own = {name: getattr(self, name) for name in ("mark", "paths", "verdict", "began", "record_bytes", "boot")}
        return {"event": event, **own}

    @staticmethod
    def of_json(held: Mapping[str, Any]) -> OpenCall:
        given = dict(held["event"])
        given["paths"] = None if given["paths"] is None else tuple(given["paths"])
        paths = None if held["paths"] is None else tuple(held["paths"])
        mark, verdict, began = str(held["mark"]), str(held["verdict"]), float(held["began"])
        more = int(held.get("record_bytes", 0)), float(held.get("boot", 0.0))
        return OpenCall(HookEvent(**given), mark, paths, verdict, began, *more)


@dataclass(eq=False, slots=True)
class CallGroup:
    """Calls that may change any file and overlap: one step."""

    mark: str
    open: list[OpenCall] = field(default_factory=list[OpenCall])
    ended: list[OpenCall] = field(default_factory=list[OpenCall])
    failed: int | None = None
    """The exit code of a command that failed."""
    start: float | None = None
    """Files that changed last before that are not of its one call."""
    verdict: str = ""
    is_settled: bool = False
    unheard: list[OpenCall] = field(default_factory=list[OpenCall])
    """Calls whose end cannot carry the verdict: it did not wait longer, or never comes."""


@dataclass(eq=False, slots=True)
class KeptCalls:
    """The calls of agents that have not ended, by what is written of them."""

    files: list[OpenCall] = field(default_factory=list[OpenCall])
    mark: str = ""
    """The look that the calls began with that may change any file."""
    open: list[OpenCall] = field(default_factory=list[OpenCall])
    ended: list[OpenCall] = field(default_factory=list[OpenCall])
    failed: int | None = None
    loose: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    detached: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    since: dict[SessionKey, float] = field(default_factory=dict[SessionKey, float])
    pending: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    processes: dict[SessionKey, tuple[int, int]] = field(default_factory=dict[SessionKey, tuple[int, int]])
    """The process of each agent, and when it started: after a reboot another one may have its number."""
    look: str = ""
    """The look since which a change may be of a command in the background."""
    settled: list[list[str]] = field(default_factory=list[list[str]])
    """Calls that were settled before their end was told, by actor and id."""

    def to_line(self) -> bytes:
        held = {
            "files": [call.to_json() for call in self.files],
            "mark": self.mark,
            "open": [call.to_json() for call in self.open],
            "ended": [call.to_json() for call in self.ended],
            "failed": self.failed,
            "look": self.look,
            "settled": self.settled,
            **{name: [[*key, value] for key, value in getattr(self, name).items()] for name in _BY_SESSION},
        }
        return json.dumps(held).encode() + b"\n"

    @staticmethod
    def of_line(line: bytes) -> KeptCalls:
        """Raises ValueError, TypeError and KeyError for a line that is not whole."""
        held: Mapping[str, Any] = json.loads(line)
        calls = {name: [OpenCall.of_json(one) for one in held[name]] for name in ("files", "open", "ended")}
        by_session = {
            name: {
                (str(agent), str(session)): value for agent, session, value in cast("Sequence[Any]", held.get(name, []))
            }
            for name in _BY_SESSION
        }
        by_session["processes"] = {key: (int(one), int(at)) for key, (one, at) in by_session["processes"].items()}
        more = {"failed": held["failed"], "look": str(held.get("look", ""))}
        more["settled"] = [[*map(str, one)] for one in held.get("settled", [])]
        return KeptCalls(mark=str(held["mark"]), **more, **calls, **cast("Any", by_session))


class KeptCallsFile:
    """The file of one guard in a directory. There is one guard of it at a time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._last = b""
        self._bytes = MOST_BYTES
        """How long the file is; a guard begins a new one, since the last line may be cut."""

    def load(self) -> KeptCalls:
        """Return what was saved last. What cannot be read is nothing: then the changes are somebody else's."""
        with suppress(OSError):
            for line in reversed(self._path.read_bytes().splitlines()):
                with suppress(ValueError, TypeError, KeyError):
                    return KeptCalls.of_line(line)
        return KeptCalls()

    def save(self, kept: KeptCalls) -> None:
        """Write a state that is another one than the last. Raises OSError."""
        line = kept.to_line()
        if line == self._last:
            return
        is_new = self._bytes + len(line) > MOST_BYTES
        path = self._path.with_suffix(".new") if is_new else self._path
        self._bytes = (0 if is_new else self._bytes) + len(line)
        self._last = line
        try:
            with open(
                os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_new else os.O_APPEND), 0o600), "wb"
            ) as file:
                file.write(line)
            if is_new:
                path.replace(self._path)
        except OSError:
            self._last, self._bytes = b"", MOST_BYTES  # a line may be cut
            raise


_BY_SESSION = ("loose", "detached", "since", "pending", "processes")
