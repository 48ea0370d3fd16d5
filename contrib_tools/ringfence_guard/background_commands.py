"""Commands that may go on after the end of their call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ringfence_guard.kept_calls import OpenCall, SessionKey


@dataclass(eq=False, slots=True)
class BackgroundCommands:
    """The command lines, by agent and session."""

    loose: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    detached: dict[SessionKey, list[str]] = field(default_factory=dict[SessionKey, list[str]])
    """Those of them of which the agent does not know that they go on."""

    since: dict[SessionKey, float] = field(default_factory=dict[SessionKey, float])
    """When the first of them began, in seconds since the machine was started."""
    look: str = ""
    """The look since which a change may be theirs. It knows what hidden files were, also for the next guard."""

    def __bool__(self) -> bool:
        return bool(self.loose)

    def add(self, call: OpenCall, *, has_left: bool = False) -> None:
        """Add a call whose command may go on. ``has_left`` says that its end was told, and something of it lives."""
        event, key = call.event, call.event.actor[:2]
        self.since[key] = min(call.boot, self.since.get(key, call.boot))
        known = event.is_background or has_left
        line = event.arguments if known else f"{event.arguments} (its end was never told)"
        self.loose.setdefault(key, []).append(line)
        if event.is_detached or has_left:
            self.detached.setdefault(key, []).append(event.arguments)

    def keep_detached(self, key: SessionKey) -> None:
        """The agent says that no command of the session runs any more: those that it does not know may."""
        self.loose.pop(key, None)
        if key in self.detached:
            self.loose[key] = [*self.detached[key]]

    def forget(self, key: SessionKey) -> None:
        self.loose.pop(key, None)
        self.detached.pop(key, None)
        self.since.pop(key, None)

    def lines(self) -> Iterator[str]:
        for lines in self.loose.values():
            yield from dict.fromkeys(lines)
