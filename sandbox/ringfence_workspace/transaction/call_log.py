"""What the calls of one workspace write into its log, and what its records amount to when it is opened again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from ringfence_workspace.call_process import CallProcess
from ringfence_workspace.history.log import Log, LogRecord
from ringfence_workspace.history.store import commit_record
from ringfence_workspace.transaction.records import Epoch, replayed
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import boot_id
from ringfence_workspace.tree.places import root_record
from ringfence_workspace.tree.state import Json


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

    def write(self, *records: Mapping[str, Json], blob: bytes = b"") -> None:
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
        self.file.flush()
        self.file.busy = True
        self._root = None

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


@dataclass(slots=True)
class Replay:
    """As `of` reads it from the records, oldest first."""

    root: Sequence[object] | None = None
    holdings: list[str] = field(default_factory=list[str])
    """All holding directories that the log names; the open call holds in the last."""
    root_times: tuple[int, int] | None = None
    """The times that the root is to keep, where the log ends with a holding directory about to come or to go."""
    call: tuple[str, str] | None = None
    ended: tuple[str, str] | None = None
    """The last call, where it has ended and was committed as a step: who made it has not closed the workspace since."""
    began_ns: int = 0
    """When the call began to change files, in nanoseconds since 1970."""
    committed: bool = False
    unclear: tuple[str, str] | None = None
    """The call that the log tells of where it is damaged: nobody knows how it ended."""
    epochs: list[Epoch] = field(default_factory=lambda: [Epoch()])
    """The undo log of the open call, without what was undone already."""
    step: str | None = None
    """The commit of the step, where the open call, or else the last one, was committed as one."""
    base: tuple[str, bytes] | None = None
    """Once an opaque call has begun: the commit with the tree before the open call, and what the log has besides."""
    kept: str | None = None
    """If it is being rolled back to there, the commit that has what it had changed."""
    conflicts: set[str] = field(default_factory=set[str])
    displaced: dict[str, str] = field(default_factory=dict[str, str])
    moved: dict[str, str] = field(default_factory=dict[str, str])
    """Conflicts of what was undone already."""
    processes: list[CallProcess] = field(default_factory=list[CallProcess])

    @property
    def has_changes(self) -> bool:
        return self.base is not None or any(not epoch.is_empty for epoch in self.epochs)

    @property
    def at(self) -> datetime:
        """When the call began."""
        return datetime.fromtimestamp(self.began_ns / 1e9, UTC)

    def is_of(self, root: int) -> bool:
        """Whether the log is about an opened root, as far as it says."""
        if self.root is None:
            return True
        inode, born, device, boot = self.root
        now = root_record(root)["root"]
        assert isinstance(now, list)
        return now[:2] == [inode, born] and (now[2] == device or boot != boot_id())

    @classmethod
    def of(cls, records: Sequence[LogRecord]) -> Replay:
        replay = cls()
        for record in records:
            if "set aside" in record.values:
                replay = cls()
            else:
                replay._add(record)
        return replay

    def _add(self, record: LogRecord) -> None:
        self.root_times = None
        if self._add_opaque(record):
            return
        match record.values:
            case {"root": [int(inode), (int() | None) as born, int(device), str(boot)]}:
                self.root = [inode, born, device, boot]
            case {"holding": str(name)}:
                self._add_holding(name, record.values)
            case {"begin": str(call_id), "tool": str(tool), "at": int(began_ns)}:
                self._begin((call_id, tool), began_ns)
            case {"damaged": int()}:  # files may wait in the hold of which no record is left
                self.unclear = None if self.committed else self.call
                self.call = self.ended = None
                self.epochs, self.holdings = [Epoch()], []
            case {"restored": int()}:
                self._add_conflicts(record.values)
                replayed(self.epochs, record.values)
            case {"commit": str()}:
                self.committed = True
                commit = record.values.get("oid")
                self.step = commit if isinstance(commit, str) else None
            case {"ref": str()}:
                pass
            case {"end": str()}:
                self.ended = self.call if self.committed and self.step is not None else None
                self.call, self.epochs = None, [Epoch()]
            case values:
                replayed(self.epochs, values)

    def _add_opaque(self, record: LogRecord) -> bool:
        """Whether it is a record of an opaque call."""
        match record.values:
            case {"opaque": str(commit)}:
                self.base = commit, record.blob
                self._add_conflicts(record.values)
            case {"taking back": (str() | None) as kept}:
                self.kept = kept
            case {"process": [str(name), int(pid), int(ticks), str(boot)]}:
                self.processes.append(CallProcess(name, pid, ticks, boot))
            case {"process": [str(name), int(pid), int(ticks), str(boot), str(call_id)]}:
                self.processes.append(CallProcess(name, pid, ticks, boot, call_id))
            case _:
                return False
        return True

    def _add_holding(self, name: str, values: Mapping[str, object]) -> None:
        if name not in self.holdings:
            self.holdings.append(name)
        if "times" in values:
            self.root_times = cast("tuple[int, int]", tuple(cast("list[int]", values["times"])))

    def _add_conflicts(self, values: Mapping[str, object]) -> None:
        self.conflicts.update(cast("list[str]", values.get("conflicts", [])))
        self.displaced.update(cast("dict[str, str]", values.get("displaced", {})))
        self.moved.update(cast("dict[str, str]", values.get("moved", {})))

    def _begin(self, call: tuple[str, str], began_ns: int) -> None:
        self.call, self.began_ns, self.committed = call, began_ns, False
        self.epochs, self.processes, self.base, self.kept = [Epoch()], [], None, None
        self.conflicts, self.displaced, self.moved = set(), {}, {}
