"""The calls of a workspace or a run in one line of time, newest first, made as far as somebody looks."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ringfence.escapes import display_path
from ringfence_sandbox import LogEntry
from ringfence_tools.printable import one_line
from ringfence_view.call_records import NOT_KEPT, ROLLED_BACK, CallRecord, CallWords, without_parents
from ringfence_view.spending import describe_usage

MAX_PATHS = 20
NO_REASON = "the history has no reason: receipts have it, which `run` and `exec` write with --receipts FILE"
OUTCOMES = (
    "not_kept", "committed", "ok", "denied", "rejected", "rolled_back", "failed", "interrupted", "doubtful", "external",
    "approved",
)  # fmt: skip
"""What a timeline can be filtered by. "not_kept" is any of `NOT_KEPT`."""
_SAFE = re.compile(r"[\w-]{1,80}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One call, or one change by somebody else. ``key`` is its place in links.

    What a receipt says is there after `with_words`: a timeline is made of many, and few are shown.
    """

    key: str
    outcome: str
    title: str
    at: datetime
    number: int | None = None
    aborted: int | None = None
    commit: str = ""
    seconds: float | None = None
    summary: str = ""
    command: str = ""
    """What the history has of a call besides its tool and its paths."""
    paths: tuple[str, ...] = ()
    more_paths: int = 0
    ignored_paths: int = 0
    client: str = ""
    names: tuple[str, ...] = ()
    reason: str = ""
    approved_by: str = ""
    spent: str = ""
    """Tokens and cost of the turn that asked for this call, and maybe for the ones after it."""
    record: CallRecord | None = None

    @property
    def is_rolled_back(self) -> bool:
        """Whether it had changed something. A policy may deny a call for what it has changed."""
        return self.outcome in ROLLED_BACK or (
            self.outcome == "denied" and (self.aborted is not None or bool(self.paths or self.more_paths))
        )

    @property
    def is_kept(self) -> bool:
        return self.outcome not in NOT_KEPT

    def matches(self, outcome: str) -> bool:
        return (
            not outcome
            or outcome == self.outcome
            or (outcome == "not_kept" and not self.is_kept)
            or (outcome == "approved" and self.record is not None and self.record.is_approved)
        )

    @property
    def text(self) -> str:
        """What a search looks through."""
        return "\n".join(
            (self.key, self.title, self.summary, self.command, *self.paths, self.client, *self.names, self.reason)
        )


class Timeline:
    """Entries that are made when they are needed. A change of what they come from needs a new timeline."""

    def __init__(self, entries: Iterator[TimelineEntry]) -> None:
        self._rest = entries
        self._made: list[TimelineEntry] = []
        self._at: dict[str, int] = {}

    def after(self, key: str | None) -> Iterator[TimelineEntry]:
        """The entries after one, or all. Raises LookupError if there is none of that key."""
        at = 0 if key is None else self._place(key) + 1
        while at < len(self._made) or self._make():
            yield self._made[at]
            at += 1

    def find(self, key: str) -> TimelineEntry:
        """Raises LookupError if there is none of that key."""
        return self._made[self._place(key)]

    def _place(self, key: str) -> int:
        while key not in self._at:
            if not self._make():
                raise LookupError(f"there is no entry {one_line(key, 80)!r}, or not any more")
        return self._at[key]

    def _make(self) -> bool:
        entry = next(self._rest, None)
        if entry is not None and entry.key not in self._at:
            self._at[entry.key] = len(self._made)
            self._made.append(entry)
        return entry is not None


def merged_entries(
    history: Iterator[LogEntry], aborted: Sequence[LogEntry], records: Sequence[CallRecord]
) -> Iterator[TimelineEntry]:
    """Yield all of them, newest first. A receipt and the step of its call are one entry."""
    others = _without_step(aborted, records)
    by_commit = {record.commit: record for record in records if record.commit}
    seen: set[str] = set()
    other = next(others, None)
    waiting: list[TimelineEntry] = []
    for entry in history:
        while other is not None and _entry_end(other) >= entry.created_at:
            waiting.append(other)
            other = next(others, None)
        if (record := by_commit.get(entry.commit)) is not None:
            seen.add(record.receipt_id)
        if waiting:
            # A receipt whose step is still to come waits for it: a step is made while its call runs.
            ready = [one for one in waiting if not _can_come(one, by_commit, entry.created_at)]
            waiting = [one for one in waiting if _can_come(one, by_commit, entry.created_at)]
            yield from _unseen(ready, seen)
        yield of_log(entry, record)
    yield from _unseen(itertools.chain(waiting, [] if other is None else [other], others), seen)


def _without_step(aborted: Sequence[LogEntry], records: Sequence[CallRecord]) -> Iterator[TimelineEntry]:
    """Yield the calls of receipts, and what was rolled back without one, by when they ended, newest first."""
    by_call = {record.call_id: record for record in records if record.outcome != "committed"}
    rolled_back = [(entry, by_call.get(entry.call_id)) for entry in aborted]
    kept_as = {record.receipt_id: entry for entry, record in rolled_back if record is not None}
    alone = [of_aborted(entry) for entry, record in rolled_back if record is None]
    by_end = sorted(records, key=lambda record: _end(record.began_at, record.seconds), reverse=True)
    # A long file has many of them, and a page shows few.
    made = (of_record(record, kept_as.get(record.receipt_id)) for record in by_end)
    return heapq.merge(sorted(alone, key=_entry_end, reverse=True), made, key=_entry_end, reverse=True)


def _unseen(entries: Iterable[TimelineEntry], seen: Container[str]) -> Iterator[TimelineEntry]:
    """Yield those whose receipt has no step among the entries before."""
    return (one for one in entries if one.record is None or one.record.receipt_id not in seen)


def _can_come(entry: TimelineEntry, by_commit: Mapping[str, CallRecord], now: datetime) -> bool:
    return entry.record is not None and entry.record.commit in by_commit and entry.at <= now


def _entry_end(entry: TimelineEntry) -> datetime:
    return _end(entry.at, entry.seconds)


def _end(began_at: datetime, seconds: float | None) -> datetime:
    return began_at + timedelta(seconds=min(seconds or 0.0, 1e6))


def of_log(entry: LogEntry, record: CallRecord | None) -> TimelineEntry:
    """A step, a change by somebody else, or the beginning."""
    kind = {"baseline": "baseline", "external": "external"}.get(entry.kind, "committed")
    title = {"baseline": "as it was found", "external": entry.tool or "somebody else"}.get(entry.kind, entry.tool)
    paths = () if entry.kind == "baseline" else entry.paths
    return TimelineEntry(
        f"change-{entry.commit[:16]}" if entry.number is None else f"step-{entry.number}",
        kind,
        one_line(title, 80),
        entry.created_at if record is None else record.began_at,
        entry.number,
        commit=entry.commit,
        seconds=None if record is None else record.seconds,
        command=one_line(entry.title, 200),
        paths=_shown_paths(paths),
        more_paths=len(entry.paths) - len(paths[:MAX_PATHS]),
        ignored_paths=entry.ignored,
        client=one_line(entry.client, 80),
        names=entry.names,
        record=record,
    )


def of_aborted(entry: LogEntry) -> TimelineEntry:
    return TimelineEntry(
        f"aborted-{entry.number}",
        "rolled_back",
        one_line(entry.tool, 80),
        entry.created_at,
        aborted=entry.number,
        commit=entry.commit,
        paths=_shown_paths(entry.paths),
        more_paths=max(len(entry.paths) - MAX_PATHS, 0),
        reason=NO_REASON,
    )


def of_record(record: CallRecord, aborted: LogEntry | None = None) -> TimelineEntry:
    known = _SAFE.fullmatch(record.receipt_id)
    name = record.receipt_id if known else hashlib.sha256(record.receipt_id.encode("utf-8", "replace")).hexdigest()[:32]
    return TimelineEntry(
        f"call-{name}",
        record.shown_outcome,
        "",
        record.began_at,
        aborted=None if aborted is None else aborted.number,
        seconds=record.seconds,
        record=record,
    )


def with_words(entry: TimelineEntry, record: CallRecord, words: CallWords) -> TimelineEntry:
    """Return an entry with what its receipt says."""
    shown = replace(
        entry,
        summary=words.summary,
        approved_by=words.approved_by,
        spent=describe_usage(words.usage) if words.usage is not None and record.begins_turn else "",
    )
    if entry.title:  # the history says the rest
        return shown
    return replace(
        shown,
        title=words.tool,
        paths=words.paths,
        more_paths=words.more_paths,
        client=words.client,
        reason=words.reason,
    )


def _shown_paths(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(one_line(display_path(path), 200) for path in without_parents(paths[:MAX_PATHS]))
