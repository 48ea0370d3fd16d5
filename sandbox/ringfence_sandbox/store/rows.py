"""The rows of a directory's objects: encoded entries in the order of their keys, as one piece of bytes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

OID_BYTES = 20
_OFFSETS = "Q"


class Rows:
    """Never changed: `edited` gives new ones, which share with these what they can.

    A history has the rows of many directories in memory. So they are no objects of their own, each of which the garbage
    collector would look at: ``joined`` has them one after the other.
    """

    __slots__ = ("_ends", "joined", "keys")

    def __init__(self, keys: Sequence[bytes], joined: bytes, ends: array[int]) -> None:
        """``ends`` has where each ends in what is ``joined``."""
        self.keys = tuple(keys)
        self.joined = joined
        self._ends = ends

    @classmethod
    def of(cls, keys: Sequence[bytes], items: Sequence[bytes]) -> Rows:
        return cls(keys, b"".join(items), array(_OFFSETS, accumulate(map(len, items))))

    @property
    def items(self) -> list[bytes]:
        return [self.joined[start:end] for start, end in pairwise((0, *self._ends))]

    def get(self, key: bytes) -> bytes | None:
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return None
        return self.joined[self._ends[place - 1] if place else 0 : self._ends[place]]

    def edited(self, edits: Mapping[bytes, bytes | None], start: int = 0) -> Edited:
        """With these entries set, or (None) taken out; pieces count from ``start`` bytes before the first row."""
        if not edits:
            return Edited(self, [])
        if not self.keys:
            new = {key: item for key, item in sorted(edits.items()) if item is not None}
            rows = Rows.of([*new], [*new.values()])
            return Edited(rows, [(start, 0, rows.joined)])
        old, old_keys, ends = self.joined, self.keys, self._ends
        parts: list[bytes] = []
        pieces: list[tuple[int, int, bytes]] = []
        places: list[tuple[int, int, bytes, int]] = []
        done = at = 0
        moved = False
        for key, item in sorted(edits.items()) if len(edits) > 1 else edits.items():
            place = bisect_left(old_keys, key, done)
            there = place < len(old_keys) and old_keys[place] == key
            if item is None and not there:
                continue
            begin = ends[place - 1] if place else 0
            end = ends[place] if there else begin
            new = item or b""
            parts += (old[at:begin], new)
            pieces.append((start + begin, end - begin, new))
            places.append((place, place + there, key, len(new)))
            moved = moved or item is None or len(new) != end - begin
            done, at = place + there, end
        parts.append(old[at:])
        joined = b"".join(parts)
        return Edited(self._moved(places, joined) if moved else Rows(old_keys, joined, ends), pieces)

    def _moved(self, places: Iterable[tuple[int, int, bytes, int]], joined: bytes) -> Rows:
        """The rows that are ``joined`` now. Of each that is new: where it comes among the old rows, the next of those,
        its key and its length (0: none)."""
        keys: list[bytes] = []
        ends = array(_OFFSETS)
        done = by = 0
        for place, after, key, length in places:
            keys += self.keys[done:place]
            ends.extend([end + by for end in self._ends[done:place]])
            if length:
                keys.append(key)
                ends.append((ends[-1] if ends else 0) + length)
            by = (ends[-1] if ends else 0) - (self._ends[after - 1] if after else 0)
            done = after
        keys += self.keys[done:]
        ends.extend([end + by for end in self._ends[done:]])
        return Rows(keys, joined, ends)


class Edited(NamedTuple):
    """Rows that some were edited to, and what was replaced of what had been joined: where, how many bytes, and by
    what."""

    rows: Rows
    pieces: list[tuple[int, int, bytes]]


EMPTY_ROWS = Rows.of((), ())


def tree_rows(raw: bytes) -> Rows:
    """The rows of a git tree."""
    keys: list[bytes] = []
    ends = array(_OFFSETS)
    at, end = 0, len(raw)
    while at < end:
        blank = raw.index(b" ", at)
        zero = raw.index(b"\0", blank)
        name = raw[blank + 1 : zero]
        keys.append(name + b"/" if raw[at:blank] == b"40000" else name)
        at = zero + 1 + OID_BYTES
        ends.append(at)
    return Rows(keys, raw, ends)
