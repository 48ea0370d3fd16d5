"""What the open call has changed, told from its deeds, and what of that is still in memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringfence.participants import Change
from ringfence_sandbox.calls.deed_runner import DeedRunner
from ringfence_sandbox.calls.differences import STAMP, Differences
from ringfence_sandbox.calls.history import DeedsChanges
from ringfence_sandbox.calls.states import Mark
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.records import Deed, Identity

_KEPT_WRITTEN_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What the deeds since a mark have changed. It holds until another deed comes after the last of them."""

    mark: Mark
    last_seq: int
    differences: Differences
    changes: list[Change]


class CallChanges:
    """Of one workspace: its calls come one after the other."""

    def __init__(self, files: Confined, runner: DeedRunner, deeds: Sequence[Deed]) -> None:
        """``deeds`` are those of the open call, and become more and fewer with it."""
        self.written = Written()
        self._files = files
        self._runner = runner
        self._deeds = deeds
        self._bytes: dict[str, bytes] = {}
        """What the call wrote, by its sha256."""
        self._bytes_size = 0
        self._compared: Comparison | None = None

    def keep_bytes(self, deed: Deed, content: bytes) -> None:
        """Remember what a deed wrote, for the history, as long as it is not too much: by its hash, since its path may
        have come to have something else when the call ends."""
        sha256 = None if deed.new is None else deed.new.sha256
        if sha256 is None or sha256 in self._bytes:
            return
        if self._bytes_size + len(content) <= _KEPT_WRITTEN_BYTES:
            self._bytes[sha256] = content
            self._bytes_size += len(content)

    def since(self, mark: Mark) -> Comparison | None:
        """What the deeds since a mark have changed; None where there are none. It is looked at once."""
        if len(self._deeds) <= mark.deeds:
            return None
        if (known := self.known_since(mark)) is not None:
            return known
        differences = self.over(reversed(self._deeds[mark.deeds :]))
        self._compared = Comparison(mark, self._deeds[-1].seq, differences, differences.changes())
        return self._compared

    def known_since(self, mark: Mark) -> Comparison | None:
        """The same if it was looked at, and still holds."""
        known = self._compared
        return known if known is not None and known.mark is mark and known.last_seq == self._deeds[-1].seq else None

    def unread_since(self, mark: Mark) -> Comparison:
        """The same without a file being read to be hashed: what was not written by the call has a stamp for a hash."""
        differences = Differences(self._files, self._runner.holding, self.written.hash_or_stamp)
        differences.undo(reversed(self._deeds[mark.deeds :]))
        return Comparison(mark, self._deeds[-1].seq, differences, differences.changes())

    def over(self, deeds: Iterator[Deed]) -> Differences:
        """The sketch that has gone back over deeds, given latest first."""
        differences = Differences(self._files, self._runner.holding, self.written.hash_of)
        differences.undo(deeds)
        return differences

    def for_history(self, compared: Comparison) -> DeedsChanges:
        return DeedsChanges(compared.changes, compared.differences, self._bytes)

    def look_again(self) -> None:
        """Deeds are being undone: what was found no longer holds."""
        self._compared = None

    def forget(self) -> None:
        """The call has ended. Somebody may now write other bytes into a file, of the same number, and put its time
        back."""
        self._bytes.clear()
        self._bytes_size = 0
        self.written.forget()
        self._compared = None


class Written:
    """The hashes of files that a call has written, found again as long as nothing about the file changes."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._hashes: OrderedDict[tuple[int, int, int], str] = OrderedDict()

    def note(self, identity: Identity) -> None:
        if identity.sha256 is not None:
            if len(self._hashes) >= self._most:
                self._hashes.popitem(last=False)
            self._hashes[identity.inode, identity.size, identity.mtime_ns] = identity.sha256

    def forget(self) -> None:
        self._hashes.clear()

    def hash_of(self, found: os.stat_result) -> str | None:
        return self._hashes.get((found.st_ino, found.st_size, found.st_mtime_ns))

    def hash_or_stamp(self, found: os.stat_result) -> str:
        """The hash, or instead of it what no other file has: it is the same as long as the file only moves."""
        return self.hash_of(found) or f"{STAMP}{found.st_ino} {found.st_size} {found.st_mtime_ns}"
