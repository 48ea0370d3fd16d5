"""What the page of a batch is about: its ledger, and the calls of each task."""

from __future__ import annotations

import re
from pathlib import Path
from threading import RLock

from ringfence_batch import Ledger, LedgerError, Summary, summarize
from ringfence_view.sources import CallSource

_KEPT = 16
"""The tasks whose calls are kept for the next request."""
_ID = re.compile(r"[\w.][\w.-]{0,99}", re.ASCII)


def is_batch(directory: Path) -> bool:
    """Whether a directory has the results of a batch."""
    return (directory / "batch.json").is_file() and (directory / "tasks").is_dir()


class BatchSource:
    """The batch in a directory, which may run. Any thread may use it."""

    def __init__(self, out: Path) -> None:
        """Raises LedgerError."""
        self._ledger = Ledger(out)
        self._lock = RLock()
        self._calls: dict[str, CallSource] = {}
        self.is_running = False
        self.summary: Summary
        self.refresh()

    def refresh(self) -> bool:
        """Look for news. Return whether there is any. Raises LedgerError."""
        before = self.version if hasattr(self, "summary") else ""
        is_running, summary = self._ledger.is_driven(), summarize(self._ledger)
        with self._lock:
            self.is_running, self.summary = is_running, summary
            return self.version != before

    @property
    def version(self) -> str:
        with self._lock:
            rows = tuple((row.id, row.outcome, row.attempts, row.directory) for row in self.summary.rows)
            return str(hash((rows, tuple(self.summary.running), self.is_running)))

    def calls(self, task_id: str) -> CallSource:
        """The calls of the attempt of a task that gave its result, or else of the newest.

        Raises LookupError if there is no such task, or nothing was written of it yet.
        """
        attempt = self._attempt(task_id)
        with self._lock:
            found = self._calls.pop(str(attempt), None)
            if found is None:
                patch = attempt / "patch.diff"
                title = f"{task_id}, attempt {attempt.name}"
                found = CallSource(None, attempt / "receipts.jsonl", title, patch=patch, parent="../../")
            self._calls[str(attempt)] = found
            for old in [*self._calls][:-_KEPT]:
                del self._calls[old]
            return found

    def _attempt(self, task_id: str) -> Path:
        if not _ID.fullmatch(task_id) or task_id not in self._ledger.ids():
            raise LookupError("there is no such task")
        try:
            result = self._ledger.result(task_id)
            place = self._ledger.directory(task_id) / "attempts"
        except LedgerError as error:
            raise LookupError(str(error)) from None
        attempts = [result.attempt] if result is not None else _numbers(place)
        for number in attempts:
            if (place / str(number) / "receipts.jsonl").is_file():
                return place / str(number)
        raise LookupError("no call of this task is known yet")


def _numbers(place: Path) -> list[int]:
    try:
        return sorted((int(one.name) for one in place.iterdir() if one.name.isdecimal()), reverse=True)
    except OSError:
        return []
