"""What a guard knows of calls that have not ended, kept in a file: after a kill the next guard goes on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any, TypeAlias, cast

from ringfence_guard.events import HookEvent

FILE = "open.json"
SessionKey: TypeAlias = "tuple[str, str]"
"""The agent and its session."""


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

    def to_json(self) -> dict[str, Any]:
        event = asdict(replace(self.event, result=None))
        return {"event": event, "mark": self.mark, "paths": self.paths, "verdict": self.verdict, "began": self.began}

    @staticmethod
    def of_json(held: Mapping[str, Any]) -> OpenCall:
        given = dict(held["event"])
        given["paths"] = None if given["paths"] is None else tuple(given["paths"])
        paths = None if held["paths"] is None else tuple(held["paths"])
        return OpenCall(HookEvent(**given), str(held["mark"]), paths, str(held["verdict"]), float(held["began"]))


@dataclass(eq=False, slots=True)
class CallGroup:
    """Calls that may change any file and overlap: one step."""

    mark: str
    open: list[OpenCall] = field(default_factory=list[OpenCall])
    ended: list[OpenCall] = field(default_factory=list[OpenCall])
    failed: int | None = None
    """The exit code of a command that failed."""
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
    pending: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    processes: dict[SessionKey, tuple[int, int]] = field(default_factory=dict[SessionKey, tuple[int, int]])
    """The process of each agent, and when it started: after a reboot another one may have its number."""

    def save(self, directory: Path) -> None:
        """Raises OSError."""
        held = {
            "files": [call.to_json() for call in self.files],
            "mark": self.mark,
            "open": [call.to_json() for call in self.open],
            "ended": [call.to_json() for call in self.ended],
            "failed": self.failed,
            **{name: [[*key, value] for key, value in getattr(self, name).items()] for name in _BY_SESSION},
        }
        new = directory / f"{FILE}.new"
        new.write_text(json.dumps(held))
        new.replace(directory / FILE)

    @staticmethod
    def load(directory: Path) -> KeptCalls:
        """Return what was saved. What cannot be read is nothing: then the changes are somebody else's."""
        found = KeptCalls()
        with suppress(OSError, ValueError, TypeError, KeyError):
            held: Mapping[str, Any] = json.loads((directory / FILE).read_text())
            calls = {name: [OpenCall.of_json(one) for one in held[name]] for name in ("files", "open", "ended")}
            by_session = {
                name: {(str(agent), str(session)): value for agent, session, value in cast("Sequence[Any]", held[name])}
                for name in _BY_SESSION
            }
            by_session["processes"] = {key: (int(one), int(at)) for key, (one, at) in by_session["processes"].items()}
            found = KeptCalls(mark=str(held["mark"]), failed=held["failed"], **calls, **cast("Any", by_session))
        return found


_BY_SESSION = ("loose", "detached", "pending", "processes")
