"""The lines of a timesheet."""

import re
from dataclasses import dataclass
from datetime import date, datetime, time

LINE = re.compile(
    r"(?P<day>\d{4}-\d{2}-\d{2})\s+"
    r"(?P<start>\d{2}:\d{2})-(?P<end>\d{2}:\d{2})\s+"
    r"(?P<project>[\w-]+):\s*(?P<note>.*)"
)


class EntryError(ValueError):
    """A line that is no entry."""

    def __init__(self, number: int, line: str, reason: str) -> None:
        super().__init__(f"line {number}: {reason}: {line.strip()!r}")
        self.number = number


@dataclass(frozen=True)
class Entry:
    """Work on a project, from ``start`` to ``end`` of the day on which it began."""

    day: date
    start: time
    end: time
    project: str
    note: str = ""

    @property
    def minutes(self) -> int:
        start = datetime.combine(self.day, self.start)
        end = datetime.combine(self.day, self.end)
        return int((end - start).total_seconds()) // 60


def parse_entry(line: str, number: int = 1) -> Entry:
    """One line, such as ``2026-03-02 09:00-10:30 garden: plant the beans``. EntryError for what is none."""
    found = LINE.fullmatch(line.strip())
    if found is None:
        raise EntryError(number, line, "it is no entry")
    try:
        day = date.fromisoformat(found["day"])
        start, end = time.fromisoformat(found["start"]), time.fromisoformat(found["end"])
    except ValueError as error:
        raise EntryError(number, line, str(error)) from None
    return Entry(day, start, end, found["project"], found["note"])


def parse_entries(text: str) -> list[Entry]:
    """All entries of a file. Empty lines, and those that begin with ``#``, are left out."""
    return [
        parse_entry(line, number)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
