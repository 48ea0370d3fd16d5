"""What a call, or a policy on its behalf, has seen of files: what it decided on must still be there when it writes."""

from __future__ import annotations

import errno
import hashlib
import os

from ringfence.participants import CallInfo
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.records import Deed, Identity
from ringfence_sandbox.scan.stat_cache import Stamp, stamp_of


class Seen:
    """The files that the running call has looked into, by place, as they were then."""

    def __init__(self, files: Confined) -> None:
        self._files = files
        self.unsure = False
        """Whether an opaque call runs: whatever changed may have been changed by it."""
        self._call: CallInfo | None = None
        self._known: dict[str, tuple[Stamp | Identity, str]] = {}
        self._vacated: set[str] = set()
        """Where the call has left nothing: what is found there is somebody else's."""

    def note(self, call: CallInfo, place: str, found: os.stat_result, sha256: str) -> None:
        """``found`` is from before the bytes were read."""
        outermost = call
        while outermost.parent is not None:
            outermost = outermost.parent
        if self._call is not None and self._call is not outermost:
            self.clear()
        self._call = outermost
        self._known[place] = (stamp_of(found), sha256)

    def expect(self, place: str, found: os.stat_result | None, sha256: str = "") -> None:
        """`note` for a call that goes by what the history has of a path: it is what is there, None for nothing."""
        if found is None:
            self._vacated.add(place)
        else:
            self._known[place] = (stamp_of(found), sha256)

    def note_own(self, place: str, identity: Identity | None) -> None:
        """The call itself has given the path a file: what somebody makes of that is not to be written over either."""
        if identity is not None and identity.sha256 is not None:
            self._known[place] = (identity, identity.sha256)
        else:
            self._known.pop(place, None)

    def note_deed(self, deed: Deed) -> None:
        """A deed was done: what it took from a path, and what it put there."""
        if deed.kind in ("take", "rmdir", "move"):
            self._vacated.add(deed.path)
        filled = deed.to if deed.kind == "move" else deed.path if deed.kind in ("put", "mkdir", "swap") else ""
        if filled in self._vacated:
            self._vacated.discard(filled)
            if deed.new is None or deed.new.is_directory:
                below = f"{filled}/"
                self._vacated = {one for one in self._vacated if not one.startswith(below)}

    def forget_vacated(self) -> None:
        """An operation was taken back half way."""
        self._vacated.clear()

    def clear(self) -> None:
        self._call = None
        self._known.clear()
        self._vacated.clear()

    def forget(self, place: str) -> None:
        """The call itself has changed what is at a place, or below it."""
        if self._known.pop(place, None) is not None:  # a file
            return
        below = f"{place}/"
        for known in [known for known in self._known if known.startswith(below)]:
            del self._known[known]

    def check(self, place: str, found: os.stat_result) -> None:
        """Raises OSError (ESTALE) where somebody else has changed the file at a place since it was looked into."""
        known = self._known.get(place)
        if place in self._vacated and not self.unsure:
            raise stale(place)
        if known is None or self.unsure or known[0] == stamp_of(found):
            return
        if isinstance(known[0], Identity) and known[0].fits(found):
            return
        try:
            # Another ctime alone may come from a name of the same inode elsewhere: the bytes decide.
            content, _ = self._files.read_file(place)
        except OSError:
            content = None
        if content is None or hashlib.sha256(content).hexdigest() != known[1]:
            raise stale(place)

    def check_displaced(self, place: str, expected: object, displaced: object) -> None:
        """The same, after the exchange: what was taken away is what was looked at just before."""
        if place in self._known and not self.unsure and expected != displaced:
            raise stale(place)


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
