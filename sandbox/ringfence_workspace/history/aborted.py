"""What rollbacks took away: written down at once, and a commit beside the history when somebody asks for it.

A rollback waits for one record of the log, with the states of the paths and behind them the bytes. The commits are made
of these records when they are looked at, and before the log is sealed. Who only looks makes them in memory. They are
the same, whoever makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, cast

from ringfence_workspace.history.commits import CommitInfo, CommitRecord, PreparedStep
from ringfence_workspace.history.entries import Entry, Kind, Meta
from ringfence_workspace.history.log import LogRecord
from ringfence_workspace.history.objects import HistoryObjects
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.tree.state import Json

_PREFIX = "aborted/"
"""Before the numbers of aborted calls among all names that a store keeps."""
MOST_ABORTED = 50
"""Older ones are dropped."""


class KeptCommits(Protocol):
    """Of a store, what keeps commits; see `Store`."""

    objects: HistoryObjects
    states: CommitStates

    @property
    def tip(self) -> str | None: ...

    def add_blob(self, content: bytes) -> str: ...

    def prepare(
        self, changes: Mapping[str, Entry | None], info: CommitInfo, *, after: PreparedStep | None = None
    ) -> PreparedStep: ...

    def commit(self, commit: str) -> CommitRecord: ...

    def kept(self, *, all_made: bool = True) -> dict[str, str]: ...

    def keep(self, name: str, commit: str) -> None: ...

    def unkeep(self, name: str) -> None: ...


class AbortedCalls:
    """Of one store."""

    def __init__(self, store: KeptCommits, records: Sequence[LogRecord]) -> None:
        """``records`` are those of its log, as it was opened."""
        self._store = store
        self._newest = max(self._kept(), default=0)
        self._written_down: list[LogRecord] = []
        for record in records:
            if "aborted" in record.values and _number(record) > self._newest:
                self._add(record)

    def _add(self, record: LogRecord) -> None:
        self._written_down = [*self._written_down, record][-MOST_ABORTED:]
        self._newest = _number(record)

    def _kept(self) -> dict[int, str]:
        """The commits that are made, by number, oldest first."""
        kept = self._store.kept(all_made=False)
        found = {name.removeprefix(_PREFIX): commit for name, commit in kept.items() if name.startswith(_PREFIX)}
        return {number: found[str(number)] for number in sorted(int(name) for name in found if name.isdigit())}

    def commits(self) -> dict[int, str]:
        """The commits that have what rollbacks took away, by number, oldest first."""
        self.make_commits()
        return self._kept()

    def knows(self, begun: str) -> bool:
        """Whether the newest is of the call that ``begun`` distinguishes from all others."""
        if self._written_down:
            return self._written_down[-1].values["begun"] == begun
        newest = next(reversed(self._kept().values()), None)
        return newest is not None and self._store.commit(newest).message.info.begun == begun

    def write_down(
        self, left: Mapping[str, Entry | None], contents: Mapping[str, bytes], *, tool: str, call_id: str, begun: str
    ) -> None:
        """Have the log know what a call left by path, after the newest commit. ``contents`` has the bytes of files and
        the targets of symlinks that have no object id. OSError."""
        rows: list[Json] = [_row(path, entry, contents.get(path)) for path, entry in left.items()]
        call: dict[str, Json] = {"tool": tool, "call": call_id, "begun": begun, "at": datetime.now(UTC).isoformat()}
        values: dict[str, Json] = {"aborted": self._newest + 1, **call, "parent": self._store.tip, "left": rows}
        blob, log = b"".join(contents[path] for path in left if path in contents), self._store.objects.log
        log.append(values, blob=blob)
        log.flush()
        self._add(LogRecord(values, blob))

    def keep(self, commit: str) -> str:
        """Keep a commit as the newest; its name. OSError."""
        self.make_commits()
        number = self._newest + 1
        self._keep(number, commit)
        self._newest = number
        return f"{_PREFIX}{number}"

    def _keep(self, number: int, commit: str) -> None:
        self._store.keep(f"{_PREFIX}{number}", commit)
        for old in [*self._kept()][:-MOST_ABORTED]:
            self._store.unkeep(f"{_PREFIX}{old}")

    def make_commits(self) -> None:
        """Make the commits of what is written down. OSError: the rest is made another time."""
        while self._written_down:
            record = self._written_down[0]
            commit = self._commit(record)
            if commit is not None:
                self._keep(_number(record), commit)
            del self._written_down[0]

    def _commit(self, record: LogRecord) -> str | None:
        """None where nothing differs, or where the store has lost what it came after."""
        values, store = record.values, self._store
        at, parent = datetime.fromisoformat(str(values["at"])), str(values["parent"])
        info = CommitInfo("aborted", at, str(values["tool"]), str(values["call"]), begun=str(values["begun"]))
        try:
            states = dict(self._states(parent, record))
            root, unknown = store.states.root(parent), store.states.unknown(parent)
            prepared = store.prepare(states, info, after=PreparedStep(parent, None, None, 0, root, (), unknown))
        except (LookupError, ValueError):
            return None
        return prepared.commit if prepared.changed else None

    def _states(self, parent: str, record: LogRecord) -> Iterator[tuple[str, Entry | None]]:
        at = 0
        for row in cast("list[list[object]]", record.values["left"]):
            path, kind, mode, uid, gid, mtime_ns, oid, size = cast(
                "tuple[str, Kind | None, int, int, int, int, str | None, int | None]", row
            )
            if size is not None:
                oid, at = self._store.add_blob(record.blob[at : at + size]), at + size
            if kind is not None:
                yield path, Entry(kind, Meta(mode, uid, gid, mtime_ns), oid)
            elif self._store.states.entry(parent, path) is not None:
                yield path, None


def _row(path: str, entry: Entry | None, content: bytes | None) -> list[Json]:
    if entry is None:
        return [path, None, 0, 0, 0, 0, None, None]
    meta, size = entry.meta, None if content is None else len(content)
    return [path, entry.kind, meta.mode, meta.uid, meta.gid, meta.mtime_ns, entry.oid, size]


def _number(record: LogRecord) -> int:
    return cast("int", record.values["aborted"])
