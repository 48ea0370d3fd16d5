"""The records of calls in the journal: begin, undo records, commit and end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.places import root_record
from ringfence_sandbox.disk.state import Json
from ringfence_sandbox.transaction.changes import Recorded
from ringfence_sandbox.transaction.journal import Journal

_NEW_JOURNAL_BYTES = 1 << 22


class CallLog:
    """The journal of one workspace, as its calls write it. One that only looks has none (`file` is None)."""

    def __init__(self, files: Confined, file: Journal | None, *, power: bool) -> None:
        self.file = file
        self.label: tuple[str, str] = ("", "")
        """The id and tool of the call that runs."""
        self.begun = False
        """Whether anything of it is written."""
        self._files = files
        self._power = power
        self._began_ns = 0
        self._root_record: Mapping[str, Json] = root_record(files.root)
        """To be written with the next record, if it is not written yet."""
        self._know_boot()

    def _know_boot(self) -> None:
        """Have the journal say on disk which root and which boot of the machine it is about, before anything else."""
        if self._power and self.file is not None:
            self.file.append(self._root_record)
            self.file.flush()
            self._root_record = {}

    @property
    def store(self) -> str:
        assert self.file is not None, "a read-only filesystem has no journal"
        return os.path.dirname(self.file.path)

    def write(self, *records: Mapping[str, Json], blob: bytes = b"", wait: bool = True) -> None:
        assert self.file is not None, "a read-only filesystem changes nothing"
        if not self.begun:
            self.file.check_there()
            call_id, tool = self.label
            self._began_ns = time.time_ns()
            first: list[Mapping[str, Json]] = [{"begin": call_id, "tool": tool, "at": self._began_ns}]
            if self._root_record:
                first.insert(0, self._root_record)
            records = (*first, *records)
        self.file.append(*records, blob=blob)
        if wait:
            self.file.flush()
        self.begun = True
        self._root_record = {}

    def named(self, position: int) -> str:
        """A name for the call that runs, or the one in it that began at a position, which no other has."""
        assert self.file is not None
        return self.file.named(self._began_ns, position)

    def note(self, record: Mapping[str, Json]) -> None:
        """Write down what makes a repeated rollback cheaper, if there is room."""
        if self.file is not None and self.begun:
            self.file.note(record)

    def commit(self, recorded: Recorded | None) -> None:
        """The commit point: with this record the call is committed."""
        assert self.file is not None
        self.file.check_there()
        payload = dict(recorded.payload) if recorded is not None else None
        blob = recorded.blob if recorded is not None else b""
        self.file.append({"commit": self.label[0], "payload": payload}, blob=blob)
        self.file.flush()

    def end(self, *, committed: bool) -> bool:
        """A call that has begun has ended; whether the journal is long enough by now to be started anew."""
        assert self.file is not None
        self.begun = False
        self.file.note({"end": self.label[0], "committed": committed})
        return self.file.size_bytes > _NEW_JOURNAL_BYTES

    def reset(self, *, again: bool) -> None:
        """Start anew, and ``again`` go on with it."""
        if self.file is not None:
            with suppress(OSError):
                self._root_record = root_record(self._files.root)
                self.file.reset()
                if again:
                    self._know_boot()
