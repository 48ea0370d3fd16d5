"""What the file tools answer, and how a model reads it. Paths are as `ringfence.filesystem.paths.shown` has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Action = Literal["created", "modified", "deleted", "renamed", "copied"]

MAX_LISTED = 1_000
"""Entries or matches in one answer."""
MAX_LINE_CHARACTERS = 2_000
MAX_MATCH_CHARACTERS = 400
"""Of a line that grep found."""
MAX_CHARACTERS = 60_000
"""Of one answer's lines together; a line that is begun is ended."""


def count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def fitting(lines: Iterable[str]) -> int:
    """How many of the lines, at least one if there are any, one answer has room for."""
    room = MAX_CHARACTERS
    fit = 0
    for line in lines:
        room -= len(line) + 1
        if fit and room < 0:
            break
        fit += 1
    return fit


@dataclass(frozen=True, slots=True)
class FileInfo:
    path: str
    kind: Literal["file", "directory", "symlink"]
    size_bytes: int = 0
    """0 for a directory; of a symlink, what it leads to."""
    leads_to: str | None = None
    """A symlink's target."""


@dataclass(frozen=True, slots=True)
class Listing:
    path: str
    entries: tuple[FileInfo, ...]
    left_out: int = 0
    """Entries for which there was no room."""

    def render(self) -> str:
        sizes = [f"{entry.size_bytes:,}" if entry.kind == "file" else "-" for entry in self.entries]
        width = max(map(len, sizes), default=0)
        lines = [
            f"{entry.kind:<9}  {size:>{width}}  {_listed_name(entry)}"
            for entry, size in zip(self.entries, sizes, strict=True)
        ]
        if self.left_out:
            lines.append(f"[{self.left_out:,} more entries: use glob for a part of them]")
        return "\n".join(lines)


def _listed_name(entry: FileInfo) -> str:
    name = entry.path.rpartition("/")[2]
    if entry.kind == "directory":
        return f"{name}/"
    return name if entry.leads_to is None else f"{name} -> {entry.leads_to}"


@dataclass(frozen=True, slots=True)
class FileText:
    """Lines of a file, or what is known of one that is not text."""

    path: str
    content: str
    """Each line after its number, from 1; "" for a binary file."""
    offset: int
    """How many lines are before these."""
    limit: int
    """How many lines these are."""
    total_lines: int
    notes: tuple[str, ...] = ()
    """What cannot be seen in the lines: what is left, unusual line ends, an encoding."""
    kind: str = "text"
    """Of a file that is not text: what it seems to be."""
    size_bytes: int | None = None
    sha256: str | None = None

    def render(self) -> str:
        facts = [f"kind: {self.kind}", f"size: {count(self.size_bytes, 'byte')}"] if self.size_bytes is not None else []
        facts += [f"sha256: {self.sha256}"] if self.sha256 is not None else []
        return "\n".join((*facts, *([self.content] if self.content else ()), *(f"[{note}]" for note in self.notes)))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    path: str
    size_bytes: int
    created: bool

    def render(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class EditedFile:
    path: str
    replacements: int
    lines: tuple[int, ...]
    """Where they begin in the file as it is now, from 1; the first thousand."""

    def render(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class PatchedFile:
    path: str
    action: Action
    added: int
    removed: int
    source: str | None = None
    """Where a renamed or copied file comes from."""
    shifts: tuple[int, ...] = ()
    """For each hunk, how many lines below (negative: above) the stated place it was applied."""

    def render(self) -> str:
        came = f" from {self.source}" if self.source is not None else ""
        moved = [
            f"hunk {number} {count(abs(lines), 'line')} {'below' if lines > 0 else 'above'}"
            for number, lines in enumerate(self.shifts, 1)
            if lines
        ]
        where = f"; found {', '.join(moved)} the line in its header" if moved else ""
        return f"{self.action} {self.path}{came} (+{self.added} -{self.removed}{where})"


@dataclass(frozen=True, slots=True)
class PatchedFiles:
    files: tuple[PatchedFile, ...]

    def render(self) -> str:
        return "\n".join(file.render() for file in self.files)


@dataclass(frozen=True, slots=True)
class MovedFile:
    source: str
    target: str

    def render(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class FoundPaths:
    path: str
    pattern: str
    matches: tuple[str, ...]
    """Directories end with a "/"."""
    left_out: int = 0

    def render(self) -> str:
        more = [f"[{self.left_out:,} more: use a narrower pattern]"] if self.left_out else []
        return "\n".join((*self.matches, *more))


@dataclass(frozen=True, slots=True)
class FoundLine:
    path: str
    line_number: int
    line: str
    """Without its end; cut around the match if it is long."""

    def render(self) -> str:
        return f"{self.path}:{self.line_number}: {self.line}"


@dataclass(frozen=True, slots=True)
class FoundLines:
    path: str
    pattern: str
    matches: tuple[FoundLine, ...]
    cut: bool = False
    """Whether there are more."""

    def render(self) -> str:
        more = ["[there are more: use a narrower pattern, path or glob]"] if self.cut else []
        return "\n".join((*(match.render() for match in self.matches), *more))


@dataclass(frozen=True, slots=True)
class RemovedFiles:
    path: str
    entries: int
    """How many files, links and directories are gone."""

    def render(self) -> str:
        return ""
