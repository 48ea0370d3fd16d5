"""What a transaction on disk offers to whatever keeps the history of a workspace."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ringfence_sandbox.calls.differences import IN_TREE
from ringfence_sandbox.disk.records import Json

if TYPE_CHECKING:
    from ringfence.participants import Change, Step
    from ringfence.runtime.receipts import Receipt
    from ringfence_sandbox.calls.differences import Differences
    from ringfence_sandbox.store.commits import PreparedStep
    from ringfence_sandbox.store.entries import Entry, Pending
    from ringfence_sandbox.store.unknown import Unknown

logger = logging.getLogger(__name__)


@contextmanager
def noting_failure(notes: list[str]) -> Generator[None]:
    """Around keeping what a rollback removes: the rollback goes on whatever fails, which is logged and noted."""
    try:
        yield
    except Exception as error:  # no space or memory, or a programming error
        words = "the changes that were rolled back could not be kept"
        if isinstance(error, OSError):
            logger.warning(words, exc_info=True)
        else:
            logger.exception(words)
        notes.append(f"{words}: {error}")


class ChangedFiles(Protocol):
    """What a call changed, by path, with the bytes on either side."""

    @property
    def changes(self) -> Sequence[Change]: ...

    @property
    def scanned(self) -> ScannedStates | None:
        """What two scans found, for a call that no deeds tell of."""
        ...

    def before(self, path: str) -> bytes:
        """The bytes that the file at `path` had before the call. FileNotFoundError where there was none."""
        ...

    def known_before(self, path: str) -> bytes | None:
        """These bytes, if they need not be read for it."""
        return None

    def after(self, path: str) -> bytes:
        """The bytes that the call left at `path`."""
        ...

    def found(self, path: str) -> os.stat_result | None:
        """What was found at `path` when the changes were told, if that is known, and so are the bytes."""
        return None

    def moved(self, path: str) -> str | None:
        """Where what was at `path` before the call is now, if it is in the tree and elsewhere."""
        return None

    @property
    def made_again(self) -> Sequence[str]:
        """The paths that have what they had before the call, in another file with another time."""
        return ()


@dataclass(frozen=True, slots=True)
class ScannedStates:
    """The new states of all that differs since a commit that is prepared (None: since the newest one)."""

    states: Mapping[str, Entry | Pending | None]
    since: PreparedStep | None
    unknown: Unknown


class DeedsChanges(ChangedFiles):
    """What deeds changed; the bytes are read from where they lie now."""

    def __init__(self, changes: Sequence[Change], differences: Differences, written: Mapping[str, bytes]) -> None:
        """``written`` has bytes by their sha256."""
        self._changes = changes
        self._differences = differences
        after = ((change.path, change.after.content_hash) for change in changes if change.after is not None)
        self._written = {path: written[sha256] for path, sha256 in after if sha256 is not None and sha256 in written}

    @property
    def changes(self) -> Sequence[Change]:
        return self._changes

    @property
    def scanned(self) -> None:
        return None

    def before(self, path: str) -> bytes:
        where = self._differences.where(path)
        if where is None:
            raise FileNotFoundError(path)
        try:
            return self._differences.read(where)
        except PermissionError:
            words = "cannot be read, so its content could not be kept: it stays as it is"
            raise PermissionError(errno.EACCES, words, path) from None

    def known_before(self, path: str) -> bytes | None:
        return self._differences.known_content(path)

    def after(self, path: str) -> bytes:
        """As they were written, where they are still in memory."""
        written = self._written.get(path)
        return self._differences.read((IN_TREE, path)) if written is None else written

    def moved(self, path: str) -> str | None:
        where = self._differences.where(path)
        return where[1] if where is not None and where[0] == IN_TREE and where[1] != path else None

    @property
    def made_again(self) -> Sequence[str]:
        return self._differences.made_again

    def found(self, path: str) -> os.stat_result | None:
        return self._differences.looked.get(path) if path in self._written else None


@dataclass(frozen=True, slots=True)
class RolledBackCall:
    """A call that is about to be taken back. ``begun`` tells it from others of the same id, also after a crash."""

    call_id: str
    tool: str
    begun: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """What goes into the commit record, and the step that the call becomes with it."""

    payload: Mapping[str, Json] = field(default_factory=dict[str, Json])
    blob: bytes = b""
    step: Step | None = None


class History(Protocol):
    """Keeps steps. Nothing that `record` did counts until the commit record is written: that is the commit point."""

    def record(self, changed: ChangedFiles, receipt: Receipt) -> Recorded:
        """Prepare the step of a call that changed files. What it raises makes the call fail and roll back."""
        ...

    def committed(self, recorded: Recorded) -> None:
        """The commit record is written. Must not fail for want of anything."""
        ...

    def ended_without_step(self) -> None:
        """What the open call had done so far is taken back, or has changed no file. Must not fail."""
        ...

    def rolling_back(self, changed: ChangedFiles, call: RolledBackCall) -> Sequence[str]:
        """Keep what a call changed, which is about to be taken back; what was not kept, in words. OSError. It may be
        asked for the same call again."""
        ...

    def recovered(self, payload: Mapping[str, object], blob: bytes) -> None:
        """A commit record that the journal had when it was opened, oldest first; it may have been seen before."""
        ...

    def damage(self) -> Sequence[str]:
        """What was found to be lost of what was kept, in words."""
        ...

    def content(self, payload: Mapping[str, object], path: str) -> bytes | None:
        """The bytes that the step of a commit record left at a path; None where they are not kept."""
        ...

    def sealed(self) -> bool:
        """Whether everything recorded is kept elsewhere, so that the journal may start anew."""
        ...
