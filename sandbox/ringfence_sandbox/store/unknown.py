"""What a commit of the history does not know of its tree. Unknown is not absent: what was there and could not be read,
or was too much, stays in the commit's state as it was last known, if it was, and is named here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MOST_NAMED = 10_000
"""Of more, no names are kept, and of nothing that a state does not have can be said that it was not there."""
_TOO_MANY = "too many to name"
_ALL_BELOW = frozenset({"unreadable", "mounted", "too deep", "hidden"})
"""Reasons why a directory is unknown: with all that is in it, whatever becomes known of itself."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why each path is not known, by path; the reason holds for everything below it. The nearest one above counts: an
    empty one says that the path is known again, below a directory that is not."""

    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of_scan(cls, excluded: Mapping[str, str]) -> Unknown:
        """What a scan has left out, by path, with the reasons."""
        if len(excluded) <= MOST_NAMED:
            return cls(dict(sorted(excluded.items()))) if excluded else NOTHING
        return cls({"": _TOO_MANY})

    def why(self, path: str, *, there: bool = True) -> str | None:
        """Why a path is not known, None if it is. ``there``: the commit has a state of it."""
        reasons = self.reasons
        if not reasons:
            return None
        for at in _up(path):
            if at in reasons:
                return reasons[at] or None
        return None if there else reasons.get("")

    def knowing(self, kinds: Mapping[str, str | None]) -> Unknown:
        """After these paths were found to be of these kinds, or (None) not to be there, with all that is below."""
        if not self.reasons:
            return NOTHING
        gone = {path for path, kind in kinds.items() if kind is None}
        reasons = {
            path: reason
            for path, reason in self.reasons.items()
            if not (path in kinds and not (kinds[path] == "directory" and reason in _ALL_BELOW))
            and gone.isdisjoint(_up(path))
        }
        left = Unknown(reasons)
        reasons |= {path: "" for path, kind in kinds.items() if kind != "directory" and left.why(path) is not None}
        return Unknown(reasons)

    def new_since(self, before: Unknown) -> Iterator[str]:
        """The paths that this has to say of, and that were known before."""
        return (path for path, reason in self.reasons.items() if path and reason and before.why(path) is None)

    def to_bytes(self) -> bytes:
        return json.dumps({"unknown": dict(sorted(self.reasons.items()))}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Unknown:
        return cls(json.loads(data)["unknown"])


NOTHING = Unknown()


def _up(path: str) -> Iterator[str]:
    """A path and those that it is in, but not the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
