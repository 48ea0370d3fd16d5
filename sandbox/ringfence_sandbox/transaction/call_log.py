"""What the calls of one workspace write into its log."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.places import root_record
from ringfence_sandbox.disk.state import Json
from ringfence_sandbox.store.log import Log
from ringfence_sandbox.store.store import commit_record


class CallLog:
    """The log, as the calls of one opening write to it. One that only looks has none (`file` is None)."""

    def __init__(self, files: Confined, file: Log | None) -> None:
        self.file = file
        self.label: tuple[str, str] = ("", "")
        """The id and tool of the call that runs."""
        self._began_ns = 0
        self._root: Mapping[str, Json] | None = root_record(files.root)
        """To be written with the next record, if it is not written yet."""
        if file is not None:
            file.head["root"] = self._root

    @property
    def begun(self) -> bool:
        """Whether anything of the call is written."""
        return self.file is not None and self.file.busy

    def write(self, *records: Mapping[str, Json], blob: bytes = b"", wait: bool = True) -> None:
        assert self.file is not None, "a read-only filesystem changes nothing"
        if not self.file.busy:
            self.file.check_there()
            call_id, tool = self.label
            self._began_ns = time.time_ns()
            first: list[Mapping[str, Json]] = [{"begin": call_id, "tool": tool, "at": self._began_ns}]
            if self._root is not None:
                first.insert(0, self._root)
            records = (*first, *records)
        self.file.append(*records, blob=blob)
        if wait:
            self.file.flush()
        self.file.busy = True
        self._root = None

    def write_hold(self, record: Mapping[str, Json]) -> None:
        """Without a wait for the disk: until the next record there is nothing in it that anybody could miss."""
        self.write(record, wait=False)

    def name_hold(self, name: str | None) -> None:
        """Have a new log begin with the name of the holding directory: files may come there before its next record."""
        if self.file is not None:
            self.file.head.pop("holding", None)
            if name is not None:
                self.file.head["holding"] = {"holding": name}

    def name(self, position: int) -> str:
        """A name for the call that runs, or the one in it that began at a position, which no other has."""
        assert self.file is not None
        return self.file.name(self._began_ns, position)

    def note(self, record: Mapping[str, Json]) -> None:
        """Write down what makes a repeated rollback cheaper, if there is room."""
        if self.file is not None and self.file.busy:
            self.file.note(record)

    def note_removal(self, record: Mapping[str, Json]) -> None:
        """Write down that the hold is about to go, if there is room."""
        assert self.file is not None, "a read-only filesystem has none"
        self.file.note(record)

    def commit(self, step: str | None) -> None:
        """The commit point: with this record the call is committed, and the commit of its step is the newest."""
        assert self.file is not None
        self.file.check_there()
        self.file.append({"commit": self.label[0], **(commit_record(step) if step is not None else {})})
        self.file.flush()

    def end(self, *, committed: bool) -> None:
        """A call that has begun has ended."""
        assert self.file is not None
        self.file.note({"end": self.label[0], "committed": committed})
        self.file.busy = False
