"""What the entries come to, by project."""

from collections import Counter
from collections.abc import Iterable

from timesheet.duration import format_duration
from timesheet.entries import Entry


def totals(entries: Iterable[Entry]) -> dict[str, int]:
    """The minutes of each project, the longest first; of the same length by name."""
    found: Counter[str] = Counter()
    for entry in entries:
        found[entry.project] += entry.minutes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def render(entries: Iterable[Entry]) -> str:
    """A line for each project, and one for all of them."""
    found = totals(entries)
    width = max(map(len, [*found, "total"]))
    lines = [f"{project:<{width}}  {format_duration(minutes)}" for project, minutes in found.items()]
    lines.append(f"{'total':<{width}}  {format_duration(sum(found.values()))}")
    return "".join(f"{line}\n" for line in lines)
