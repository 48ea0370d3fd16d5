"""The read set of a call: what it, or a policy on its behalf, has seen of files must still be there when it writes."""

from __future__ import annotations

import errno
import os
import stat

from ringfence.participants import CallInfo
from ringfence_workspace.history.stat_cache import Stamp, stamp_of
from ringfence_workspace.transaction.records import is_below, rebased
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.state import State

_HASHED_BYTES = 1 << 20


class ReadSet:
    """By path, what the call has read, and what it has left there itself."""

    def __init__(self, files: Confined) -> None:
        self.unsure = False
        """Whether an opaque call runs: whatever changed may have been changed by it."""
        self.left: dict[str, State | None] = {}
        """What the call has put at paths last; None: it has left nothing there."""
        self._files = files
        self._call: CallInfo | None = None
        self._read: dict[str, tuple[Stamp, str]] = {}

    def note(self, call: CallInfo, place: str, found: os.stat_result, sha256: str) -> None:
        """The call has read a file; ``found`` is from before that."""
        outermost = call
        while outermost.parent is not None:
            outermost = outermost.parent
        if self._call is not None and self._call is not outermost:
            self._read.clear()
        self._call = outermost
        self._read[place] = (stamp_of(found), sha256)

    def wrote(self, place: str, state: State | None) -> None:
        self._read.pop(place, None)
        self.left[place] = state

    def moved(self, old: str, new: str | None) -> None:
        """A directory has another path now, or (None) is gone."""
        for known in [path for path in self.left if is_below(path, old)]:
            state = self.left.pop(known)
            if new is not None:
                self.left[rebased(known, old, new)] = state
        for known in [path for path in self._read if is_below(path, old)]:
            del self._read[known]

    def clear(self) -> None:
        self._call = None
        self._read.clear()
        self.left.clear()

    def check(self, place: str, found: os.stat_result | None, *, read: bool = True) -> None:
        """Raises OSError (ESTALE) where somebody else has changed a path since the call wrote it, or since it read it
        (unless that does not matter: ``read``)."""
        if self.unsure:
            return
        if place in self.left:
            state = self.left[place]
            if not self.is_left(place, state, found) or (state is not None and not self._has_content(place, state)):
                raise stale(place)
        elif read and found is not None and place in self._read:
            stamp, sha256 = self._read[place]
            # Another ctime alone may come from a name of the same inode elsewhere: the bytes decide.
            if stamp != stamp_of(found) and self._sha256(place) != sha256:
                raise stale(place)

    def is_left(self, place: str, state: State | None, found: os.stat_result | None) -> bool:
        """Whether a path has what the call has left there. A new time alone is no save."""
        if state is None or found is None:
            return state is None and found is None
        if state.is_directory:
            return stat.S_ISDIR(found.st_mode) and state.inode in (0, found.st_ino)
        if state.fits(found):
            return True
        return stat.S_ISREG(found.st_mode) and state.same_content(lambda: self._sha256(place))

    def _has_content(self, place: str, state: State) -> bool:
        """Whether nobody has saved as many bytes, and put the time back. It is not looked at in a large file."""
        return state.sha256 is None or state.size > _HASHED_BYTES or self._sha256(place) in (None, state.sha256)

    def _sha256(self, place: str) -> str | None:
        try:
            return self._files.hash_file(place)
        except OSError:
            return None


def relinked(place: str, error: OSError) -> OSError:
    """The error to raise for one at a resolved place, where a link can only just have come."""
    if error.errno != errno.ELOOP:
        return error
    said = "was changed by somebody else in the very instant that it was looked at; nothing is changed, read it again"
    return OSError(errno.ESTALE, said, place)


def written_meanwhile(place: str) -> OSError:
    return OSError(
        errno.ESTALE,
        "is open in another program, which wrote into it during this call; nothing is changed, read it again",
        place,
    )


def stale(place: str) -> OSError:
    return OSError(
        errno.ESTALE,
        "was changed by somebody else after this call had looked at it; nothing is changed, read it again",
        place,
    )
