"""Writing deeds down before they are done, with the times of the directories that they change."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Sequence

from ringfence_sandbox.calls.call_journal import CallJournal
from ringfence_sandbox.calls.directory_times import DirectoryTimes
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.records import Deed, Identity, Kind


class DeedLog:
    """The deeds of one workspace, as the journal gets them: numbered, and in the order in which they will be done."""

    def __init__(self, files: Confined, journal: CallJournal, times: DirectoryTimes) -> None:
        self.touched: set[str] = set()
        """The directories whose times are noted: those since are the call's own."""
        self._files = files
        self._journal = journal
        self._times = times
        self._announced: deque[Deed] = deque()
        self._seqs = itertools.count()

    def next_seq(self) -> int:
        return next(self._seqs)

    def note_next(self, deed: Deed, above: int | None) -> list[Deed]:
        """`note` a single deed, unless it is the one that was announced to come next."""
        if self._announced and self._announced[0] is deed:
            self._announced.popleft()
            return [deed]
        self.give_up_announced()
        return self.note((deed,), above)

    def note(self, deeds: Sequence[Deed], above: int | None = None) -> list[Deed]:
        """Write down deeds before they are done, with the times of the directories that they change. ``above`` is the
        one that the path of a single deed is in, if it is open."""
        noted: list[Deed] = []
        for deed in deeds:
            for place in deed.places():
                directory = place.rpartition("/")[0]
                if directory not in self.touched:
                    noted += self._times_before(directory, above)
            noted.append(deed)
        texts: list[str] = []
        for one in noted:
            one.seq = next(self._seqs)
            texts.append(one.to_json())
        self._journal.write(*texts)
        return noted

    def announce(self, deeds: Sequence[Deed]) -> list[Deed]:
        """`note` deeds that will be done next, in this order; of what is noted, the times of directories."""
        self.give_up_announced()
        times = [one for one in self.note(deeds) if one.kind == "times"]
        self._announced.extend(deeds)
        return times

    def announced(self, kind: Kind, place: str) -> Deed | None:
        """The deed that was announced to come next, if it is this one."""
        deed = self._announced[0] if self._announced else None
        return deed if deed is not None and (deed.kind, deed.path) == (kind, place) else None

    def give_up_announced(self) -> None:
        """Something else is done first, so that the order would not be that of the journal."""
        while self._announced:
            self._journal.note_undone([self._announced.popleft()])

    def _times_before(self, directory: str, opened: int | None) -> list[Deed]:
        """What to note of a directory before the first deed that changes it."""
        self.touched.add(directory)
        found = self._files.look(directory) if opened is None else os.fstat(opened)
        if found is None:
            return []
        self._times.met(found)
        times = found.st_atime_ns, found.st_mtime_ns
        return [Deed("times", directory, new=Identity.of(found), atime_ns=times[0], mtime_ns=times[1])]
