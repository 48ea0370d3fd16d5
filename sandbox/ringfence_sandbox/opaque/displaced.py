"""What typed calls have displaced while a program runs that can reach it: stored and brought back as the tree is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from ringfence_sandbox.disk.confined import is_reserved
from ringfence_sandbox.disk.state import Json
from ringfence_sandbox.transaction.hold import Holding


@dataclass(frozen=True, slots=True)
class Displaced:
    """The name of a holding directory, and its slots, each with the path that it is of."""

    holding: str = ""
    slots: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def by(cls, holding: Holding | None) -> Displaced:
        return cls(holding.name, {**holding.paths}) if holding is not None and holding.paths else cls()

    def has(self, place: str) -> bool:
        """Whether a place in the workspace is one of these, or below one."""
        return self._slot(place) in self.slots

    def hides(self, place: str) -> bool:
        """Whether it is in a holding directory, and none of these."""
        return is_reserved(place) and not self.has(place)

    def said(self, place: str) -> str:
        """A place by the path that it is of."""
        if not self.has(place):
            return place
        below = place.split("/", 2)[2:]
        return "/".join([self.slots[self._slot(place)], *below])

    def _slot(self, place: str) -> int:
        holding, _, rest = place.partition("/")
        slot = rest.partition("/")[0]
        return int(slot) if holding == self.holding and slot.isdecimal() else -1

    def to_json(self) -> Json:
        return [self.holding, [[slot, path] for slot, path in self.slots.items()]]

    @classmethod
    def from_json(cls, value: object) -> Displaced:
        if value is None:  # a journal from before this was noted
            return cls()
        holding, slots = cast("tuple[str, list[tuple[int, str]]]", value)
        return cls(holding, dict(slots))
