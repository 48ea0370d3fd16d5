"""How changes of a tree are found: by scans of all of it, or of what a watch has named."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ringfence.participants import Detection
from ringfence_workspace.history.entries import Entry
from ringfence_workspace.history.scan import ScanResult, filesystem_clock, kernel_clock, watches_nothing
from ringfence_workspace.history.stat_cache import StatCache
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.watch import MORE_WATCHES, REPORTING, Events, Watch, most_watches

logger = logging.getLogger(__name__)

Detect: TypeAlias = Literal["auto", "watch", "scan"]
"""Whether a tree is watched: where it can be, in any case, or never."""
_COOKIE = "watch"
"""In a store, the file whose events show how far the queue was read."""


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """What a workspace may watch, and how often the watch is checked."""

    watches: int | None = None
    """The most directories that are watched. None: half of the watches that the user may have."""
    looks_before_audit: int = 1_000
    """After so many looks at what was named, a scan of the whole tree checks the watch."""


DEFAULT_DETECTION_LIMITS = DetectionLimits()


class Detector:
    """The watch of one workspace, and whether it may be gone by.

    It is armed by the first scan of the whole tree after it is ``wanted``.
    """

    def __init__(
        self,
        files: Confined,
        store: str,
        detect: Detect,
        filesystem_type: Callable[[int], int],
        limits: DetectionLimits,
    ) -> None:
        self.how: Detection = "scan"
        """How the newest look was made."""
        self.wanted = detect == "watch"
        self.calling = False
        """Whether programs of a call may have been in the hold since the newest look."""
        self.doubt = ""
        """Why the newest look was a scan of the whole tree, in words."""
        self._files = files
        self._cookie = os.path.join(store, _COOKIE)
        self._detect: Detect = detect
        self._filesystem_type = filesystem_type
        self._limits = limits
        self._watch: Watch | None = None
        self._is_armed = False
        self._is_off = detect == "scan"
        self._was_closed = False
        self._looks = 0

    def clock(self, root: int) -> int:
        """Now, by the clock that stamps the files of the tree, in nanoseconds."""
        return filesystem_clock(root) if self._watch is None else kernel_clock(root)

    def close(self) -> None:
        """Watch nothing any more."""
        self._is_armed = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def begin(self, *, outermost: bool) -> None:
        """The look before a call of programs comes next."""
        self.wanted = True
        if outermost:
            self.calling = False

    def add_events(self, cache: StatCache) -> bool:
        """Have the cache be unsure of all that has had an event. Whether a look at what it is unsure of is enough."""
        events = self._events(cache)
        if events is None:
            return False
        for path, names in events.names.items():
            cache.unsure.setdefault(path, set()).update(names)
        return cache.complete

    def _events(self, cache: StatCache) -> Events | None:
        """What has had an event since the last time. None: only a scan of the whole tree can tell."""
        watch = self._watch
        if watch is None or not self._is_armed:
            self.doubt = "nothing is watched"
            return None
        events = watch.drain(calling=self.calling)
        if watch.failure is not None:
            self._fail(watch.failure)
            return None
        if events is None:
            self.doubt = watch.doubt
            return None
        for path, name in events.strangers:
            if name not in cache.folders.get(path, ()) and name not in cache.unsure.get(path, ()):
                self.doubt = "a file was written that had been removed"
                return None
        return events

    def enter(self, descriptor: int, path: str) -> None:
        """Watch a directory that a look at what was named enters."""
        if self._watch is not None:
            self._watch.enter(descriptor, path)

    def guard(self, cache: StatCache, hold: int | None) -> None:
        """A call of programs begins: what it does in the hold, which is open if there is one, is a doubt."""
        if self._watch is None or not self._is_armed:
            return
        if hold is not None:
            self._watch.guard(hold)
        self._is_armed = self.add_events(cache)  # what happened in the hold until now was our own doing
        self.calling = True

    def looked(self, found: ScanResult) -> None:
        """A look at what was named is done."""
        self.how, self.doubt = "watch", ""
        self._looks += 1
        self._end(found)

    @contextmanager
    def scanning(self) -> Generator[Callable[[int, str], None]]:
        """Around a scan of the whole tree, which calls what this gives for each directory.

        Raises:
            OSError: the tree is to be watched in any case, and cannot be.
        """
        if self.how != "audit-failed":
            self.how = "scan"
        self._is_armed = False
        if self.wanted and not self._is_off and self._watch is None and not self._was_closed:
            self._open()
        if self._watch is None:
            yield watches_nothing
            return
        self._watch.begin()
        yield self._watch.enter
        self._watch.end()
        self._is_armed = True

    def scanned(self, found: ScanResult) -> None:
        """A scan of the whole tree is done."""
        self._looks = 0
        self._was_closed = found.closed
        self._end(found)

    def _end(self, found: ScanResult) -> None:
        if self._watch is not None and self._watch.failure is not None:
            self._fail(self._watch.failure)
        elif found.closed:  # by what is in there, anything may be changed that has another name there
            self.close()

    def _open(self) -> None:
        most = most_watches() if self._limits.watches is None else self._limits.watches
        try:
            if self._filesystem_type(self._files.root) not in REPORTING:
                raise OSError(errno.EOPNOTSUPP, "this filesystem does not tell of all changes")
            self._watch = Watch(self._cookie, self._files.is_reserved, most=most)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Never watch this opening of the workspace again."""
        self.close()
        self._is_off, self.doubt = True, f"the tree is not watched: {error.strerror}"
        advice = f"; for more watches: {MORE_WATCHES}" if error.errno == errno.ENOSPC else ""
        if self._detect == "watch":
            raise OSError(error.errno, f"{self.doubt}{advice}") from error
        if advice:
            logger.warning("%s, so each command scans it%s", self.doubt, advice)

    @property
    def has_to_audit(self) -> bool:
        """Whether a scan of the whole tree is to check the watch now."""
        return self._is_armed and self._looks >= self._limits.looks_before_audit

    def audit(
        self, cache: StatCache, found: ScanResult, audited: ScanResult, before: Callable[[str], Entry | None]
    ) -> None:
        """Compare what a look at what was named has found, and what a scan of the whole tree has found after it.

        The two become one, the first. What has had an event meanwhile tells nothing. ``before`` gives the state that
        the tree is compared with.
        """
        events = self._events(cache)
        for path, state in audited.changes.items() if events is not None else ():
            folder, _, name = path.rpartition("/")
            is_named = events is not None and (name in events.names.get(folder, ()) or path in events.names)
            if path not in found.changes and not is_named and not _is_only_link(before(path), state):
                self._audit_failed(path)
        if events is None:
            self._is_armed = False  # the next scan tells
        else:
            for path, names in events.names.items():
                cache.unsure.setdefault(path, set()).update(names)
        found.changes |= audited.changes
        found.stamps |= audited.stamps
        found.excluded, found.closed = audited.excluded, audited.closed
        found.read += audited.read
        self._looks = 0

    def _audit_failed(self, path: str) -> None:
        if self.how != "audit-failed":
            logger.warning(
                "%s was changed, and the watch had not seen it: from now on each command scans the tree", path
            )
        self.close()
        self._is_off, self.how = True, "audit-failed"


def _is_only_link(old: Entry | None, new: Entry | None) -> bool:
    """Whether a file has only got or lost a name outside of the tree."""
    if old is None or new is None:
        return False
    return old == new._replace(meta=new.meta._replace(link=old.meta.link))
