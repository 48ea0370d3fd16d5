"""Which step wrote each line of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ringfence.filesystem.diff import LineMatcher
from ringfence_sandbox import LogEntry, Workspace
from ringfence_tools.printable import one_line, printable

MAX_BLAMED_BYTES = 2_000_000
MAX_LINE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class BlamedLine:
    number: int
    text: str
    who: str
    key: str
    """The timeline's key of the entry that wrote it; empty for what the oldest one had found."""


def blame(
    workspace: Workspace, path: str, entries: Iterable[LogEntry], mask: Callable[[str], str]
) -> Sequence[BlamedLine]:
    """The lines of a file, masked, as the newest of these entries has it, which come newest first.

    Raises LookupError where it is no file there, ValueError where it is too large.
    """
    *line, oldest = entries
    versions = [oldest, *reversed([entry for entry in line if path in entry.paths])]
    text: list[bytes] = []
    writers: list[LogEntry] = []
    for entry in versions:
        content = workspace.read_at(entry.commit, path) or b""
        if len(content) > MAX_BLAMED_BYTES:
            raise ValueError(f"{one_line(path, 200)} is too large: it has more than {MAX_BLAMED_BYTES:,} bytes")
        now = content.splitlines(keepends=True)
        found: list[LogEntry] = []
        for kind, a, b, c, d in LineMatcher(None, text, now).get_opcodes():
            found += writers[a:b] if kind == "equal" else [entry] * (d - c)
        text, writers = now, found
    if workspace.read_at(versions[-1].commit, path) is None:
        raise LookupError(f"{one_line(path, 200)} is no file after its newest step")
    return [
        BlamedLine(
            number,
            printable(mask(part.decode("utf-8", "surrogateescape").rstrip("\r\n"))[:MAX_LINE_CHARACTERS]),
            _name(writer, is_oldest=writer is oldest),
            "" if writer is oldest else f"step-{writer.number}" if writer.number else f"change-{writer.commit[:16]}",
        )
        for number, (part, writer) in enumerate(zip(text, writers, strict=True), 1)
    ]


def _name(entry: LogEntry, *, is_oldest: bool) -> str:
    if is_oldest:
        return "as it was found"
    return (
        f"step {entry.number}, {one_line(entry.tool, 40)}"
        if entry.number
        else one_line(entry.tool, 40) or "somebody else"
    )
