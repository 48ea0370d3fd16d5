"""Unified diffs: read as git, diff and models write them, and applied to a file's bytes exactly."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from ringfence.filesystem.edits import best_place, difference, line_end_at, shown_line, utf8

REGULAR, EXECUTABLE, SYMLINK, SUBMODULE = 0o100644, 0o100755, 0o120000, 0o160000
"""The modes that git has."""

LineKind = Literal[" ", "-", "+"]
_KINDS: dict[bytes, LineKind] = {b" ": " ", b"-": "-", b"+": "+", b"": " "}
# Longer numbers than any file's are none, and int() refuses very long ones.
_HUNK = re.compile(rb"@@ -(\d{1,18})(?:,(\d{1,18}))? \+(\d{1,18})(?:,(\d{1,18}))? @@")
_EXTENDED = re.compile(
    rb"(old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to"
    rb"|similarity index|dissimilarity index|index) (.*)",
    re.DOTALL,
)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_C_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_C_LETTERS = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))
_EPOCH = re.compile(rb"(?:1970-01-01|1969-12-31) ")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that stay, go and come, each with its line end (none where the file has no final newline)."""

    header: str
    start: int | None
    """The line, from 1, at which it says it begins in the old file; None where it does not say."""
    lines: tuple[tuple[LineKind, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != "+"]

    @property
    def new(self) -> list[bytes]:
        return [line for kind, line in self.lines if kind != "-"]

    @property
    def index(self) -> int:
        """The stated place, from 0. A hunk without old lines states the line before it."""
        start = self.start or 0
        return start if not self.old else max(start - 1, 0)


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file. Paths are as the patch has them, less git's ``a/`` and ``b/``.

    Without a ``source`` it creates, without a ``target`` it deletes; two that differ rename, or copy. The modes are
    git's, None where the patch does not say.
    """

    source: str | None
    target: str | None
    hunks: tuple[Hunk, ...] = ()
    old_mode: int | None = None
    new_mode: int | None = None
    copy: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path in (self.source, self.target) if path is not None))

    def count(self, kind: LineKind) -> int:
        return sum(said == kind for hunk in self.hunks for said, _ in hunk.lines)


def parse_patch(patch: str | bytes) -> tuple[FilePatch, ...]:
    """The files of a unified diff, in its order. Text around them, such as a mail's or a fence's, is passed over.

    The counts in a hunk's header are believed where they fit its lines, else its lines are counted; a header may say
    no more than ``@@``. An empty line in a hunk is one that stays. Where even the headers end with ``\\r\\n``, that
    is how the patch came here, and says nothing about the files.

    Raises:
        ValueError: not a unified diff, or a binary or combined one; names the line of the patch.
    """
    lines = (utf8(patch, "the patch") if isinstance(patch, str) else patch).removesuffix(b"\n").split(b"\n")
    header = next((line for at, line in enumerate(lines) if _begins_file(lines, at)), b"")
    if header.endswith(b"\r"):
        lines = [line.removesuffix(b"\r") for line in lines]
    lines = [b" \r" if line == b"\r" else line for line in lines]  # an empty line that stays, of a file with CRLF
    files: list[FilePatch] = []
    after_hunk = False
    at = 0
    while at < len(lines):
        line = lines[at]
        if _begins_file(lines, at):
            file, at = _file(lines, at)
            files.append(file)
            after_hunk = True
            continue
        if line.startswith((b"```", b"From ")) or line.rstrip() == b"--":
            after_hunk = False
        if after_hunk and line.startswith((b"+", b"-")):
            # Were it passed over, a part of the change would be lost without a word.
            raise _bad(
                at, "this line is in no hunk: begin each line of a hunk with ' ', '-' or '+', and check its counts"
            )
        if line.startswith(b"@@"):
            raise _bad(at, "this hunk belongs to no file: put '--- a/PATH' and '+++ b/PATH' before it")
        if line.startswith(b"*** Begin Patch"):
            raise _bad(at, "this is not a unified diff: begin each file with '--- a/PATH' and '+++ b/PATH'")
        if line.startswith(b"diff --c") and line.startswith((b"diff --cc ", b"diff --combined ")):
            raise _bad(at, "this is the combined diff of a merge: give one against a single side")
        if line == b"GIT binary patch" or (line.startswith(b"Binary files ") and line.endswith(b" differ")):
            raise _bad(at, "binary files cannot be patched: leave this one out")
        at += 1
    if not files:
        raise ValueError("the patch names no file: begin each with the lines '--- a/PATH' and '+++ b/PATH'")
    return tuple(files)


def _begins_file(lines: Sequence[bytes], at: int) -> bool:
    if lines[at].startswith(b"diff --git "):
        return True
    return lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ ")


def _bad(at: int, what: str) -> ValueError:
    return ValueError(f"line {at + 1} of the patch: {what}")


def _file(lines: Sequence[bytes], first: int) -> tuple[FilePatch, int]:
    """The file whose header begins at line `first`, and the line after its last hunk."""
    at = first
    pair: tuple[bytes, bytes] | None = None
    said: dict[bytes, bytes] = {}
    if lines[at].startswith(b"diff --git "):
        pair = _halves(lines[at].removeprefix(b"diff --git "))
        at += 1
        while at < len(lines) and (match := _EXTENDED.match(lines[at])):
            said[match[1]] = match[2]
            at += 1
    header: tuple[bytes, bytes] | None = None
    if at < len(lines) and not lines[at].startswith(b"diff ") and _begins_file(lines, at):
        header = lines[at][4:], lines[at + 1][4:]
        at += 2
    source, target = _paths(first, pair, header, said)
    hunks, at = _hunks(lines, at)
    if header is not None and _EPOCH.match(_name(header[1])[1]) and not any(hunk.new for hunk in hunks):
        target = None
    index_mode = said.get(b"index", b"").partition(b" ")[2] or None
    old_mode = _mode(first, said.get(b"old mode") or said.get(b"deleted file mode") or index_mode)
    new_mode = _mode(first, said.get(b"new mode") or said.get(b"new file mode") or index_mode)
    file = FilePatch(source, target, hunks, old_mode, new_mode, copy=b"copy from" in said)
    binary = at < len(lines) and lines[at].startswith((b"GIT binary patch", b"Binary files "))
    if source == target and not hunks and old_mode == new_mode and not binary:
        raise _bad(
            first, f"nothing is said about what to change in {target}: a hunk begins with a line '@@ -1,3 +1,4 @@'"
        )
    return file, at


def _mode(first: int, text: bytes | None) -> int | None:
    if text is None:
        return None
    try:
        mode = int(text, 8)
    except ValueError:
        raise _bad(first, f"{text.decode(errors='replace')!r} is not a file mode, such as 100644") from None
    if mode == SUBMODULE:
        raise _bad(first, "submodules cannot be patched: leave this one out")
    return mode


def _paths(
    first: int, pair: tuple[bytes, bytes] | None, header: tuple[bytes, bytes] | None, said: Mapping[bytes, bytes]
) -> tuple[str | None, str | None]:
    """The source and the target, from the ``diff --git`` line, the ``---`` and ``+++`` lines and git's other lines."""
    for kind in (b"rename", b"copy"):
        if kind + b" from" in said and kind + b" to" in said:
            return _text(_unquoted(said[kind + b" from"])), _text(_unquoted(said[kind + b" to"]))
    old, new = (_name(raw)[0] for raw in header) if header is not None else (None, None)
    if pair is not None:
        if (old is not None and old != pair[0]) or (new is not None and new != pair[1]):
            raise _bad(first, "the 'diff --git' line and the lines below it name different files")
        old, new = (pair[0] if header is None else old), (pair[1] if header is None else new)
        source, target = _without_prefixes(*pair)
    else:
        source, target = _without_prefixes(old, new)
    if old is not None and new is not None and source != target:
        raise _bad(first, "two different files are named: name one twice, or say 'rename from' and 'rename to'")
    if (header is None and pair is None) or (old is None and new is None):
        raise _bad(first, "it cannot be told which file this is: add the lines '--- a/PATH' and '+++ b/PATH'")
    created, deleted = old is None or b"new file mode" in said, new is None or b"deleted file mode" in said
    return None if created or source is None else _text(source), None if deleted or target is None else _text(target)


def _without_prefixes(old: bytes | None, new: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Names without git's ``a/`` and ``b/``. Two names that are the same have none; two that differ in their first
    letter only have some (git can be told to use others)."""
    if old is None or new is None:
        return old and old.removeprefix(b"a/"), new and new.removeprefix(b"b/")
    if old != new and old[1:2] == b"/" == new[1:2]:
        return old[2:], new[2:]
    return old, new


def _halves(names: bytes) -> tuple[bytes, bytes] | None:
    """The two names of a ``diff --git`` line if they are one file's. Blanks in them are not marked; but then the two
    have the same length."""
    middle = len(names) // 2
    one, other = _unquoted(names[:middle]), _unquoted(names[middle + 1 :])
    if names[middle : middle + 1] != b" " or len(names) % 2 == 0:
        return None
    stripped = _without_prefixes(one, other)
    return (one, other) if stripped[0] == stripped[1] else None


def _name(raw: bytes) -> tuple[bytes | None, bytes]:
    """The name in a ``---`` or ``+++`` line, None for no file, and what stands after it: a time, perhaps."""
    quoted = _QUOTED.match(raw)
    if quoted is not None:
        return _unquoted(quoted[0]), raw[quoted.end() :].strip()
    name, _, rest = raw.partition(b"\t")
    return (None if name.strip() == b"/dev/null" else name), rest.strip()


def _unquoted(name: bytes) -> bytes:
    if _QUOTED.fullmatch(name) is None:
        return name
    return _C_ESCAPE.sub(lambda match: _character(match[1]), name[1:-1])


def _character(escape: bytes) -> bytes:
    return bytes([int(escape, 8) & 0xFF if len(escape) == 3 else _C_LETTERS[escape[0]]])


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _hunks(lines: Sequence[bytes], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks: list[Hunk] = []
    while True:
        following = at
        while following < len(lines) and not lines[following].strip():
            following += 1
        if following == len(lines) or not lines[following].startswith(b"@@"):
            return tuple(hunks), at
        hunk, at = _hunk(lines, following)
        hunks.append(hunk)


def _hunk(lines: Sequence[bytes], at: int) -> tuple[Hunk, int]:
    first, header = at, lines[at]
    numbers = _HUNK.match(header)
    end: int | None = None
    if numbers is not None:
        old, new = (1 if count is None else int(count) for count in (numbers[2], numbers[4]))
        end = _after_counted(lines, at + 1, old, new)
    elif header.startswith(b"@@@"):
        raise _bad(at, "this is the combined diff of a merge: give one against a single side")
    if end is None:
        end = _after_uncounted(lines, at + 1)
    body: list[tuple[LineKind, bytes]] = []
    for line in lines[at + 1 : end]:
        if line.startswith(b"\\"):
            if body:
                body[-1] = (body[-1][0], body[-1][1].removesuffix(b"\n"))
        else:
            body.append((_KINDS[line[:1]], line[1:] + b"\n"))
    if not body:
        raise _bad(first, "this hunk has no lines: each begins with ' ' (stays), '-' (goes) or '+' (comes)")
    shown = (numbers[0] if numbers is not None else header[:60]).decode(errors="replace")
    return Hunk(shown, int(numbers[1]) if numbers is not None else None, tuple(body)), end


def _after_counted(lines: Sequence[bytes], at: int, old: int, new: int) -> int | None:
    """The line after a hunk of so many old and new lines; None if its lines are not so many."""
    while old > 0 or new > 0:
        kind = lines[at][:1] if at < len(lines) else b"?"
        if kind == b"\\":
            at += 1
            continue
        if kind not in _KINDS:
            return None
        old -= kind != b"+"
        new -= kind != b"-"
        at += 1
    if at < len(lines) and lines[at].startswith(b"\\"):
        at += 1
    if old < 0 or new < 0:
        return None
    # What follows may be anything but more lines of this hunk: then it was counted wrongly. "-- " begins the
    # signature of a mail.
    following = at
    while following < len(lines) and not lines[following].strip():
        following += 1
    if following == len(lines) or _begins_file(lines, following) or lines[following].rstrip() == b"--":
        return at
    return None if lines[following][:1] in (b" ", b"-", b"+") else at


def _after_uncounted(lines: Sequence[bytes], at: int) -> int:
    """The line after a hunk whose lines are counted by their first letters. Blank lines at its end are not its own."""
    first = at
    while at < len(lines):
        line = lines[at]
        if (
            _begins_file(lines, at)
            or line.startswith((b"@@", b"diff ", b"Index: ", b"```", b"*** End"))
            or line == b"-- "
        ):
            break
        if line[:1] not in _KINDS and not line.startswith(b"\\"):
            raise _bad(at, "each line of a hunk begins with ' ' (stays), '-' (goes) or '+' (comes); this one does not")
        at += 1
    while at > first and not lines[at - 1].strip():
        at -= 1
    return at


MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Patched:
    """A file after its hunks or, where there are ``problems``, as it was."""

    content: bytes
    shifts: tuple[int, ...] = ()
    """For each hunk, how many lines below (negative: above) the stated place it was applied."""
    problems: tuple[str, ...] = ()
    """One for each hunk that does not fit: where it was looked for and what stands there."""


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def apply_patch(patch: FilePatch, content: bytes | None) -> Patched:
    """What the file becomes, b"" if it is deleted. ``content`` is the source's, or what is there where one is to be
    created; None for no file. A patch that only adds lines may create a file without saying so, as ``diff -N`` does."""
    if patch.source is None:
        if content is not None:
            return Patched(content, problems=("it is to be created, but it exists already",))
    elif content is None and not (patch.hunks and not any(hunk.old for hunk in patch.hunks)):
        return Patched(b"", problems=("there is no such file",))
    patched = apply_hunks(content or b"", patch.hunks)
    if patch.target is None and patched.content and not patched.problems:
        left = len(split_lines(patched.content))
        return Patched(content or b"", problems=(f"it is to be deleted, but has {_lines(left)} more than the patch",))
    return patched


def apply_hunks(content: bytes, hunks: Sequence[Hunk]) -> Patched:
    """All of the hunks, or none and the problems.

    Every old line must be there, in its place or shifted as little as possible. Nothing is matched loosely but line
    ends: where a hunk fits apart from ``\\r\\n`` against ``\\n``, the file's own stay, and new lines get them. A byte
    order mark stays too, unless the hunks have one.
    """
    if content.startswith(BOM_UTF8) and not any(BOM_UTF8 in line for hunk in hunks for _, line in hunk.lines):
        patched = apply_hunks(content.removeprefix(BOM_UTF8), hunks)
        return replace(patched, content=BOM_UTF8 + patched.content if patched.content or patched.problems else b"")
    file = _File(content)
    parts: list[bytes] = []
    shifts: list[int] = []
    problems: list[str] = []
    end, drift = 0, 0
    for number, hunk in enumerate(hunks, 1):
        found = file.find(hunk, end, hunk.index + drift)
        if isinstance(found, str):
            problems.append(f"hunk {number} ({hunk.header}) {found}")
            continue
        if hunk.start is not None:
            drift = found - hunk.index
        shifts.append(drift if hunk.start is not None else 0)
        parts += (*file.lines[end:found], *file.replaced(hunk, found))
        end = found + len(hunk.old)
    if problems:
        return Patched(content, problems=tuple(problems))
    return Patched(b"".join((*parts, *file.lines[end:])), tuple(shifts))


def split_lines(content: bytes) -> list[bytes]:
    """The lines with their ends. (`bytes.splitlines` would also split at a lone ``\\r``.)"""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _bare(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


class _File:
    """A file's lines, and where hunks fit among them."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.lines = split_lines(content)
        self.bare = [_bare(line) for line in self.lines]
        self._places: dict[bytes, list[int]] = defaultdict(list)
        for at, line in enumerate(self.bare):
            self._places[line].append(at)

    def find(self, hunk: Hunk, after: int, expected: int) -> int | str:
        """The index of the hunk's first line, not before ``after``, or what is wrong."""
        old = hunk.old
        if not old:
            return 0 if not self.lines else "only adds lines, and nothing shows where: quote lines around them as well"
        bare = [_bare(line) for line in old]
        exact, loose = self._fitting(old, bare)
        for places in (exact, loose):
            allowed = sorted((at for at in places if at >= after), key=lambda at: (abs(at - expected), at))
            if not allowed:
                continue
            if hunk.start is None and len(allowed) > 1:
                return (
                    f"fits at lines {_listed(allowed)}: say which in its header, or quote more of the lines around it"
                )
            if len(allowed) > 1 and allowed[0] + allowed[1] == 2 * expected:
                return (
                    f"fits at lines {_listed(allowed[:2])}, both equally near to where it says: correct its line number"
                )
            return allowed[0]
        if places := [*exact, *loose]:
            return (
                f"fits at line {places[0] + 1}, above the hunk before it: put hunks in the order of the file, once each"
            )
        return self._misfit(hunk, old, bare, expected)

    def _fitting(self, old: Sequence[bytes], bare: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Where the lines are, exactly and apart from their line ends; in the order of the file."""
        rarest = min(range(len(bare)), key=lambda i: len(self._places.get(bare[i], ())))
        exact: list[int] = []
        loose: list[int] = []
        for place in self._places.get(bare[rarest], ()):
            at, end = place - rarest, place - rarest + len(old)
            if at < 0 or end > len(self.bare) or self.bare[at:end] != bare:
                continue
            if self.lines[at:end] == old:
                exact.append(at)
            elif self.lines[end - 1].endswith(b"\n") == old[-1].endswith(b"\n"):
                loose.append(at)
        return exact, loose

    def replaced(self, hunk: Hunk, at: int) -> list[bytes]:
        """What stands instead of the hunk's old lines. One that fits apart from line ends takes over the file's."""
        if self.lines[at : at + len(hunk.old)] == hunk.old:
            return hunk.new
        result: list[bytes] = []
        end = _end(self.lines[at]) or line_end_at(self.content, len(self.content))
        for kind, line in hunk.lines:
            if kind == "+":
                result.append(_bare(line) + end if line.endswith(b"\n") else line)
                continue
            own = self.lines[at]
            at += 1
            end = _end(own) or end
            if kind == " ":
                result.append(own)
        return result

    def _misfit(self, hunk: Hunk, old: Sequence[bytes], bare: Sequence[bytes], expected: int) -> str:
        said = f"does not fit, expected at line {expected + 1}: " if hunk.start is not None else "does not fit: "
        best = best_place(self.bare, bare, near=expected)
        if best is None:
            return f"{said}none of its old lines is in the file, which has {_lines(len(self.lines))}"
        start, same = best
        for at, line in enumerate(bare, start):
            there = self.bare[at] if at < len(self.bare) else None
            if there == line:
                continue
            nearest = f"the nearest place is line {start + 1} ({same} of {sum(map(bool, bare))} lines the same)"
            found = shown_line(there.decode(errors="replace")) if there is not None else "the end of the file"
            wanted = line.decode(errors="replace")
            words = difference(wanted, there.decode(errors="replace")) if there is not None else ""
            differ = f" (they differ in {words})" if words else ""
            return f"{said}{nearest}, where line {at + 1} is\n{found}\nand the patch has\n{shown_line(wanted)}{differ}"
        if old[-1].endswith(b"\n"):
            marker = "has no newline: the patch needs '\\ No newline at end of file' after it"
            return f"{said}the last line of the file {marker}"
        return f"{said}line {start + len(old)} ends with a newline, the patch says that it has none"


def _end(line: bytes) -> bytes:
    return line[len(_bare(line)) :]


def _listed(places: Sequence[int]) -> str:
    more = ", ..." if len(places) > MAX_LISTED else ""
    return ", ".join(str(at + 1) for at in sorted(islice(places, MAX_LISTED))) + more
