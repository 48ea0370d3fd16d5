"""A patch as HTML, with a part for each file that can be folded."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence_cli.printable import plural
from ringfence_cli.report_html import line, text
from ringfence_cli.workspace import line_counts

HEADER = b"diff --git "
MAX_FILE_LINES = 2_000
MAX_LINE_CHARACTERS = 1_000
MAX_CHARACTERS = 3_000_000
"""Of HTML, for the whole patch."""
OPENED_LINES = 400
"""Files are open until so many lines are shown."""


def diff(patch: bytes) -> str:
    """A patch larger than anybody reads is cut, and the page says where."""
    found: list[str] = []
    room, opened, left = MAX_CHARACTERS, 0, 0
    for part in files_of(patch):
        opened += len(part)
        piece = _file(part, opened <= OPENED_LINES) if room > 0 else ""
        room -= len(piece)
        if room >= 0 and piece:
            found.append(piece)
        else:
            left += 1
    if left:
        found.append(f"<p>There is no room for {plural(left, 'more file')}.</p>")
    return "".join(found)


def files_of(patch: bytes) -> Iterator[list[bytes]]:
    """The lines of each file's part. (Those of content begin with a blank or a sign, so none looks like a header.)"""
    part: list[bytes] = []
    for one in patch.removesuffix(b"\n").split(b"\n") if patch else ():
        if one.startswith(HEADER) and part:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _file(lines: list[bytes], opened: bool) -> str:
    added, removed = line_counts(b"\n".join(lines))
    rest = len(lines) - MAX_FILE_LINES
    more = f'<p class="dim">and {plural(rest, "more line")}</p>' if rest > 0 else ""
    body = "".join(_lines(lines[:MAX_FILE_LINES]))
    summary = f"<code>{line(name_of(lines[0]))}</code> +{added:,} -{removed:,}"
    return f"<details{' open' if opened else ''}><summary>{summary}</summary><pre>{body}</pre>{more}</details>"


def name_of(header: bytes) -> str:
    """The path in ``diff --git a/PATH b/PATH``, or both where they differ."""
    both = header.removeprefix(HEADER).decode("utf-8", "surrogateescape")
    one, other = both[: len(both) // 2], both[len(both) // 2 + 1 :]
    return one[2:] if one[2:] == other[2:] else both


def _lines(lines: list[bytes]) -> Iterator[str]:
    kind = "head"
    for one in lines:
        if one.startswith(b"@@ "):
            kind = ""
        said = text(one.decode("utf-8", "surrogateescape"), MAX_LINE_CHARACTERS)
        yield f'<span class="{kind or _kind(one)}">{said}\n</span>'


def _kind(one: bytes) -> str:
    return {b"@": "hunk", b"+": "add", b"-": "del"}.get(one[:1], "same")
