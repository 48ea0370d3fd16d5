"""Patches of single files, and their exact application to a file's bytes."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ringfence.filesystem.edits import check_same_encoding, line_end_at
from ringfence.filesystem.encodings import as_utf8, from_utf8
from ringfence.filesystem.near_misses import NearMisses, quote_line

REGULAR, EXECUTABLE, SYMLINK = 0o100644, 0o100755, 0o120000
"""The modes of files in git."""

LineKind = Literal[" ", "-", "+"]
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Hunk:
    """Context lines, old lines and new lines, each with its line end.

    Only the last old and the last new line may have none. This says that the file ends there without a newline. A hunk
    whose lines all have one says nothing about the end of the file.
    """

    header: str
    start: int | None
    """The line of the old file, from 1, at which the hunk states to begin. None if it states no line.

    Of a hunk that only adds lines, it is the line above them, or 0.
    """
    lines: tuple[tuple[LineKind, bytes], ...]
    anchors: tuple[bytes, ...] = ()
    """Lines of the file that stand above the hunk or in it, in order. Blanks around them do not count."""
    at_end: bool = False
    """Whether the hunk's last old line is the last line of the file."""
    is_unified: bool = False
    """Whether an anchor that is not in the file counts for nothing. A unified diff may have any heading."""
    at_start: bool = False
    """Whether the hunk's first old line is the first line of the file."""
    is_exact: bool = False
    """Whether the hunk has to quote lines of a file that has any."""

    @property
    def old(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != "+"]

    @property
    def new(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != "-"]

    @property
    def marks_end(self) -> bool:
        """Whether the hunk says that the file ends without a newline, before or after it."""
        return any(not line.endswith(b"\n") for _, line in self.lines)

    @property
    def index(self) -> int:
        """The stated place as an index from 0. A hunk without old lines states the line before its place."""
        start = self.start or 0
        return start if not self.old else max(start - 1, 0)


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The part of a patch for one file. Paths are as in the patch, without git's ``a/`` and ``b/``.

    A patch without a ``source`` creates the file, and one without a ``target`` deletes it. A ``source`` and a
    ``target`` that differ mean a rename, or a copy. The modes are git's modes, or None if the patch has none.
    """

    source: str | None
    target: str | None
    hunks: tuple[Hunk, ...] = ()
    old_mode: int | None = None
    new_mode: int | None = None
    copy: bool = False
    whole: bool = False
    """Whether the patch deletes the file regardless of its content."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path in (self.source, self.target) if path is not None))

    def count(self, kind: LineKind) -> int:
        return sum(one == kind for hunk in self.hunks for one, _ in hunk.lines)

    def as_in_git(self) -> FilePatch:
        """Return the patch with unified hunks that fit only where git lets them, so that it does not go in twice.

        A hunk that begins at the first line belongs there, and one without context below at the end of the file.
        """
        return replace(self, hunks=tuple(_as_in_git(hunk) if hunk.is_unified else hunk for hunk in self.hunks))


def _as_in_git(hunk: Hunk) -> Hunk:
    has_context_below = bool(hunk.lines) and hunk.lines[-1][0] == " "
    return replace(
        hunk,
        at_start=hunk.start is not None and hunk.start <= 1,
        at_end=hunk.at_end or not has_context_below,
        is_exact=True,
    )


@dataclass(frozen=True, slots=True)
class Patched:
    """A file after its hunks. With ``problems``, the file is unchanged."""

    content: bytes
    shifts: tuple[int, ...] = ()
    """The distance in lines of each hunk from its stated place. It is positive below and negative above that place."""
    problems: tuple[str, ...] = ()
    """One message for each hunk that does not fit, with the searched place and the text there."""


def apply_patch(patch: FilePatch, content: bytes | None) -> Patched:
    """Return the file after the patch. A deleted file has the content b"".

    ``content`` is the content of the source, or of a file at the path to create. None stands for no file. A patch that
    only adds lines may create a file without a header for that, as ``diff -N`` writes it. A file in UTF-16 or UTF-32
    stays one.
    """
    if patch.source is None:
        if content is not None:
            return Patched(content, problems=("it is to be created, but it exists already",))
    elif content is None and (not patch.hunks or any(hunk.old for hunk in patch.hunks)):
        return Patched(b"", problems=("there is no such file",))
    if patch.whole:
        return Patched(b"")
    utf8, encoding = as_utf8(content or b"")
    patched = _apply_hunks(utf8, patch.hunks)
    if patched.problems:
        return patched
    if patch.target is None:
        if patched.content:
            left = _count_lines(split_lines(patched.content))
            return Patched(content or b"", problems=(f"it is to be deleted, but has {left} more than the patch",))
        return patched
    try:
        _check_encoding(utf8, patch.hunks)
    except ValueError as error:
        return Patched(content or b"", problems=(str(error),))
    return replace(patched, content=from_utf8(patched.content, encoding))


def _check_encoding(content: bytes, hunks: Sequence[Hunk]) -> None:
    """Raise ValueError where the new lines are UTF-8 and the file is not."""
    try:
        lines = [(kind, line.decode()) for hunk in hunks for kind, line in hunk.lines]
    except UnicodeDecodeError:  # the patch has the bytes of the file's encoding
        return
    check_same_encoding(content, "".join(line for kind, line in lines if kind == "+"), "a new line")


def _apply_hunks(content: bytes, hunks: Sequence[Hunk]) -> Patched:
    """Apply all hunks, or none of them if there are problems.

    Every old line must match, at the stated place or in the only one where the hunk fits. Line ends are the only
    difference that is allowed: a hunk with ``\\n`` fits a file with ``\\r\\n``, or one with ``\\r`` alone. The file's
    line ends then stay, and new lines get them. A byte order mark stays unless the hunks have one.
    """
    lines = [line for hunk in hunks for _, line in hunk.lines]
    if content.startswith(BOM_UTF8) and not any(BOM_UTF8 in line for line in lines):
        patched = _apply_hunks(content.removeprefix(BOM_UTF8), hunks)
        return replace(patched, content=BOM_UTF8 + patched.content if patched.content or patched.problems else b"")
    if b"\r" in content and b"\n" not in content and not any(b"\r" in _bare(line) for line in lines):
        patched = _apply_hunks(content.replace(b"\r", b"\n"), hunks)
        return replace(patched, content=patched.content.replace(b"\r\n", b"\n").replace(b"\n", b"\r"))
    file = _File(content, patch_has_cr=any(b"\r" in line for line in lines))
    result = _Result(file)
    shifts: list[int] = []
    problems: list[str] = []
    end, drift = 0, 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at = file.find(hunk, end, drift)
        except ValueError as error:
            problems.append(f"hunk {number} ({hunk.header}) {error}")
            continue
        if hunk.start is not None:
            drift = at - hunk.index
        shifts.append(drift if hunk.start is not None else 0)
        result.keep(end, at)
        result.put(hunk, at)
        end = at + len(hunk.old)
    if problems:
        return Patched(content, problems=tuple(problems))
    result.keep(end, len(file.lines))
    return Patched(result.join(), tuple(shifts))


def split_lines(content: bytes) -> list[bytes]:
    """Split bytes into lines with their ends. (`bytes.splitlines` would also split at a lone ``\\r``.)"""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _bare(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _count_lines(lines: Sequence[bytes]) -> str:
    return f"{len(lines)} line{'' if len(lines) == 1 else 's'}"


def _list_lines(indices: Sequence[int]) -> str:
    more = ", ..." if len(indices) > MAX_LISTED else ""
    return f"lines {', '.join(str(at + 1) for at in indices[:MAX_LISTED])}{more}"


class _File:
    """The lines of a file. It finds the places that hunks fit."""

    def __init__(self, content: bytes, *, patch_has_cr: bool) -> None:
        self.lines = split_lines(content)
        self.end = line_end_at(content, len(content)) if b"\n" in content else b""
        """The last line end of the file, or b"" if it has none."""
        # A patch without any \r says nothing about the line ends of a file that has only \r\n.
        self._ends_are_own = not patch_has_cr and 0 < content.count(b"\n") == content.count(b"\r\n")
        self._near_misses = NearMisses(content)
        self._described = 0
        self._bare = [_bare(line) for line in self.lines]
        self._places: dict[bytes, list[int]] = defaultdict(list)
        for at, line in enumerate(self._bare):
            self._places[line].append(at)

    def find(self, hunk: Hunk, after: int, drift: int) -> int:
        """Return the index of the hunk's first line, not before ``after``.

        ``drift`` is the distance in lines of the hunk before from its stated place. If it is not 0, stated places count
        for nothing.

        Raises:
            ValueError: The hunk fits nowhere, or in several places and not at the one that it states.
        """
        below = self._below(hunk)
        if not hunk.old:
            return self._insertion(hunk, after, below, drift)
        places = self._fitting(hunk)
        if not places:
            raise ValueError(self._describe_misfit(hunk, hunk.index + drift))
        if hunk.at_start and places[0] != 0:
            raise ValueError(f"does not fit: it belongs at the first line, but its lines are at line {places[0] + 1}")
        places = places[:1] if hunk.at_start else places
        if hunk.at_end or hunk.marks_end:
            places = [self._last(hunk, places)]
        # The hunk may have its anchors as lines of its own, too.
        allowed = [at for at in places if at >= after and at + len(hunk.old) >= below]
        if not allowed:
            what = "what its header names" if hunk.anchors else "the hunk before it"
            above = f"fits at line {places[0] + 1}, above {what}"
            raise ValueError(f"{above}: put hunks in the order of the file, once each")
        if hunk.start is not None and not drift and hunk.index in allowed:
            return hunk.index
        if len(allowed) > 1:
            fits = f"fits at {_list_lines(allowed)}"
            raise ValueError(f"{fits}: quote more of the lines around it, or state its line as in '@@ -3 +3 @@'")
        return allowed[0]

    def _insertion(self, hunk: Hunk, after: int, below: int, drift: int) -> int:
        """Return the index before which a hunk without old lines adds its lines."""
        if hunk.is_exact and self.lines:
            raise ValueError("only adds lines, and quotes none around them: make the patch with lines of context")
        if hunk.at_end or not self.lines:
            at = len(self.lines)
        elif hunk.anchors and not hunk.is_unified:
            at = below
            if len(lines := list(self._like(hunk.anchors[0], 0))) > 1:
                raise ValueError(
                    f"only adds lines, below one that is at {_list_lines(lines)}: quote lines around them as well"
                )
        elif hunk.start is None or drift:
            raise ValueError("only adds lines, and nothing shows where: quote lines around them as well")
        else:
            at = hunk.index
        if at < after:
            raise ValueError(
                f"adds lines above line {at + 1}, above the hunk before it: put hunks in the order of the file"
            )
        if at > len(self.lines) or (hunk.marks_end and at < len(self.lines)):
            raise ValueError(
                f"adds lines below line {at}, but the file has {_count_lines(self.lines)}: quote lines around them"
            )
        return at

    def _below(self, hunk: Hunk) -> int:
        """Return the index below the hunk's anchors: the first line that is like the first one, and so on."""
        below = 0
        for anchor in hunk.anchors:
            at = next(self._like(anchor, below), None)
            if at is not None:
                below = at + 1
            elif not hunk.is_unified:
                named = quote_line(anchor.decode(errors="replace"))
                raise ValueError(f"is below a line that is not in the file, or not in this order:\n{named}")
        return below

    def _like(self, anchor: bytes, start: int) -> Iterator[int]:
        """Yield the indices of the lines that equal an anchor but for blanks around them."""
        return (at for at in range(start, len(self._bare)) if self._bare[at].strip() == anchor)

    def _fitting(self, hunk: Hunk) -> list[int]:
        """Return the indices at which the old lines match apart from line ends, in order."""
        bare = [_bare(line) for line in hunk.old]
        rarest = min(range(len(bare)), key=lambda i: len(self._places.get(bare[i], ())))
        starts = [place - rarest for place in self._places.get(bare[rarest], ()) if place >= rarest]
        return [at for at in starts if self._bare[at : at + len(bare)] == bare]

    def _last(self, hunk: Hunk, places: Sequence[int]) -> int:
        """Return the place at the end of the file. Raises ValueError if the hunk does not end as the file does."""
        at = len(self.lines) - len(hunk.old)
        if at not in places:
            said = "it belongs at the end of the file" if hunk.at_end else "the file ends after it without a newline"
            raise ValueError(f"does not fit: the patch says that {said}, but its lines are at line {places[0] + 1}")
        if self.lines[-1].endswith(b"\n") and not hunk.old[-1].endswith(b"\n"):
            raise ValueError(
                f"does not fit: line {len(self.lines)} ends with a newline, the patch says that it has none"
            )
        return at

    def replaced(self, hunk: Hunk, at: int) -> list[bytes]:
        """Return the lines that replace the hunk's old lines. A hunk with other line ends gets the file's line ends."""
        exact = self._has_ends(hunk, at)
        result: list[bytes] = []
        end = (_end(self.lines[at]) if at < len(self.lines) else b"") or self.end
        for kind, line in hunk.lines:
            if kind == "+":
                result.append(line if exact or not line.endswith(b"\n") else _bare(line) + end)
                continue
            own = self.lines[at]
            at += 1
            end = _end(own) or end
            if kind == " ":
                result.append(own)
        return result

    def _has_ends(self, hunk: Hunk, at: int) -> bool:
        """Whether the hunk's old lines have the line ends of the file, so that those of its new lines are meant."""
        pairs = [
            (_end(own), _end(line)) for own, line in zip(self.lines[at : at + len(hunk.old)], hunk.old, strict=True)
        ]
        known = [own == given for own, given in pairs if own and given]
        return all(known) if known else not self._ends_are_own

    def _describe_misfit(self, hunk: Hunk, expected: int) -> str:
        miss = f"does not fit, expected at line {expected + 1}" if hunk.start is not None else "does not fit"
        self._described += 1
        if self._described > MAX_LISTED:  # each takes a look at the whole file
            return miss
        old, new = (b"\n".join(map(_bare, lines)).decode(errors="replace") for lines in (hunk.old, hunk.new))
        if all(kind != "+" for kind, _ in hunk.lines):
            new = ""
        return self._near_misses.describe(
            miss, old, new, names=("the patch", "Its result"), whole_lines=True, near=expected
        )


class _Result:
    """The lines of a file after its hunks. No two of them are ever joined."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._last_is_new = False
        self._newline: bool | None = None
        """Whether the file ends with a newline, if a hunk says it."""

    def keep(self, start: int, end: int) -> None:
        if start < end:
            self._lines += self._file.lines[start:end]
            self._last_is_new = False

    def put(self, hunk: Hunk, at: int) -> None:
        kinds = [kind for kind, _ in hunk.lines if kind != "-"]
        if kinds:
            self._lines += self._file.replaced(hunk, at)
            self._last_is_new = kinds[-1] == "+"
        if hunk.marks_end:
            self._newline = not hunk.new or hunk.new[-1].endswith(b"\n")

    def join(self) -> bytes:
        """Return the file. Without a mark, a new last line ends as the old one did, and one that stays is unchanged."""
        lines, old = self._lines, self._file.lines
        if not lines:
            return b""
        newline = self._newline
        if newline is None and self._last_is_new and old:
            newline = old[-1].endswith(b"\n")
        above = self._file.end or next((_end(line) for line in lines if _end(line)), b"\n")
        for at, line in enumerate(lines):
            if not line.endswith(b"\n") and (newline or at + 1 < len(lines)):
                lines[at] = line + above
            above = _end(lines[at]) or above
        if newline is False:
            lines[-1] = _bare(lines[-1])
        return b"".join(lines)


def _end(line: bytes) -> bytes:
    return line[len(_bare(line)) :]
