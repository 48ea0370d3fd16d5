"""Unified diffs: read as git, diff and models write them, and applied to a file's bytes exactly."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ringfence.filesystem.edits import best_place, describe_difference, line_end_at, quote_line, utf8

REGULAR, EXECUTABLE, SYMLINK = 0o100644, 0o100755, 0o120000
"""The modes that git gives to files."""

_GIT = b"diff --git "
_END = b"\0"
"""Stands after the last line, and begins nothing."""

LineKind = Literal[" ", "-", "+"]
_EACH_LINE = "each line of a hunk begins with ' ' (stays), '-' (goes) or '+' (comes)"
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
MAX_LISTED = 20
_FILE_MODE = re.compile(rb"(?:100|120)[0-7]{3}")
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
        return sum(one == kind for hunk in self.hunks for one, _ in hunk.lines)


_NO_PATCHES = (
    (re.compile(rb"@@"), "this hunk belongs to no file: put '--- a/PATH' and '+++ b/PATH' before it"),
    (re.compile(rb"\*\*\* Begin Patch"), "not a unified diff: begin files with '--- a/PATH' and '+++ b/PATH'"),
    (re.compile(rb"diff --c(c|ombined) "), "this is the combined diff of a merge: give one against a single side"),
    (re.compile(rb"GIT binary patch$|Binary files .* differ$", re.S), "binary files cannot be patched: leave it out"),
)
"""What is no part of a patch that can be applied, and what to do about it."""


def parse_patch(patch: str | bytes) -> tuple[FilePatch, ...]:
    """The files of a unified diff, in its order. Text around them, such as a mail's or a fence's, is passed over.

    The counts in a hunk's header are believed where they fit its lines, else its lines are counted; a header may say
    no more than ``@@``. An empty line in a hunk is one that stays. Where even the headers end with ``\\r\\n``, that
    is how the patch came here, and says nothing about the files.

    Raises:
        ValueError: not a unified diff, or a binary or combined one; names the line of the patch.
    """
    return _Parser(utf8(patch, "the patch") if isinstance(patch, str) else patch).files()


class _Parser:
    def __init__(self, patch: bytes) -> None:
        self.lines = patch.removesuffix(b"\n").split(b"\n")
        self.at = 0
        header = next((line for at, line in enumerate(self.lines) if self._begins_file(at)), b"")
        if header.endswith(b"\r"):
            self.lines = [line.removesuffix(b"\r") for line in self.lines]
        # An empty line that stays, of a file with CRLF.
        self.lines = [b" \r" if line == b"\r" else line for line in self.lines]

    def files(self) -> tuple[FilePatch, ...]:
        files: list[FilePatch] = []
        after_hunk = False
        while self.at < len(self.lines):
            if self._begins_file(self.at):
                files.append(self._file())
                after_hunk = True
                continue
            line = self.lines[self.at]
            if line.startswith((b"```", b"From ")) or line.rstrip() == b"--":
                after_hunk = False
            if after_hunk and line.startswith((b"+", b"-")):
                # Were it passed over, a part of the change would be lost without a word.
                raise _bad(self.at, "this line is in no hunk: check what is before it, and the counts of its hunk")
            for pattern, words in _NO_PATCHES:
                if pattern.match(line):
                    raise _bad(self.at, words)
            self.at += 1
        if not files:
            raise ValueError("the patch names no file: begin each with the lines '--- a/PATH' and '+++ b/PATH'")
        return tuple(files)

    def _line(self, at: int) -> bytes:
        return self.lines[at] if at < len(self.lines) else _END

    def _begins_file(self, at: int) -> bool:
        line = self._line(at)
        return line.startswith(_GIT) or (line.startswith(b"--- ") and self._line(at + 1).startswith(b"+++ "))

    def _not_blank(self, at: int) -> int:
        """The first line from `at` on that is not blank."""
        while not self._line(at).strip():
            at += 1
        return at

    def _file(self) -> FilePatch:
        first = self.at
        pair: tuple[bytes, bytes] | None = None
        extended: dict[bytes, bytes] = {}
        if self.lines[first].startswith(_GIT):
            pair = _halves(self.lines[first].removeprefix(_GIT))
            self.at += 1
            while match := _EXTENDED.match(self._line(self.at)):
                extended[match[1]] = match[2]
                self.at += 1
        emptied = False
        names: tuple[bytes | None, bytes | None] | None = pair
        if self._begins_file(self.at) and not self._line(self.at).startswith(_GIT):
            old, _ = _name(self._line(self.at)[4:])
            new, time = _name(self._line(self.at + 1)[4:])
            names, emptied = (old, new), _EPOCH.match(time) is not None
            self.at += 2
        source, target = _paths(first, pair, names, extended)
        hunks = self._hunks()
        if emptied and not any(hunk.new for hunk in hunks):
            target = None
        index_mode = extended.get(b"index", b"").partition(b" ")[2] or None
        old_mode = _mode(first, extended.get(b"old mode") or extended.get(b"deleted file mode") or index_mode)
        new_mode = _mode(first, extended.get(b"new mode") or extended.get(b"new file mode") or index_mode)
        binary = self._line(self.at).startswith((b"GIT binary patch", b"Binary files "))
        if source == target and not hunks and old_mode == new_mode and not binary:
            raise _bad(first, f"nothing is said about what to change in {target}: add its hunks, from '@@' on")
        return FilePatch(source, target, hunks, old_mode, new_mode, copy=b"copy from" in extended)

    def _hunks(self) -> tuple[Hunk, ...]:
        hunks: list[Hunk] = []
        while self._line(following := self._not_blank(self.at)).startswith(b"@@"):
            self.at = following
            hunks.append(self._hunk())
        return tuple(hunks)

    def _hunk(self) -> Hunk:
        first, header = self.at, self.lines[self.at]
        if header.startswith(b"@@@"):
            raise _bad(first, "this is the combined diff of a merge: give one against a single side")
        numbers = _HUNK.match(header)
        end = None
        if numbers is not None:
            old, new = (1 if count is None else int(count) for count in (numbers[2], numbers[4]))
            end = self._after_counted(first + 1, old, new)
        self.at = self._after_uncounted(first + 1) if end is None else end
        body: list[tuple[LineKind, bytes]] = []
        for line in self.lines[first + 1 : self.at]:
            if not line.startswith(b"\\"):
                body.append((_KINDS[line[:1]], line[1:] + b"\n"))
            elif body:
                body[-1] = (body[-1][0], body[-1][1].removesuffix(b"\n"))
        if not body:
            raise _bad(first, f"this hunk has no lines: {_EACH_LINE}")
        shown = (numbers[0] if numbers is not None else header[:60]).decode(errors="replace")
        return Hunk(shown, int(numbers[1]) if numbers is not None else None, tuple(body))

    def _after_counted(self, at: int, old: int, new: int) -> int | None:
        """The line after a hunk of so many old and new lines; None if its lines are not so many."""
        while old > 0 or new > 0:
            kind = self._line(at)[:1]
            if kind != b"\\":
                if kind not in _KINDS:
                    return None
                old -= kind != b"+"
                new -= kind != b"-"
            at += 1
        at += self._line(at).startswith(b"\\")
        # What follows may be anything but more lines of this hunk. "-- " begins the signature of a mail.
        following = self._not_blank(at)
        more = self._line(following).startswith((b" ", b"-", b"+")) and self._line(following).rstrip() != b"--"
        return at if old == new == 0 and (not more or self._begins_file(following)) else None

    def _after_uncounted(self, at: int) -> int:
        """The line after a hunk whose lines are counted by their first letters. Blank lines at its end are not its
        own."""
        first = at
        while at < len(self.lines) and not self._begins_file(at):
            line = self.lines[at]
            if line.startswith((b"@@", b"diff ", b"Index: ", b"```", b"*** End")) or line == b"-- ":
                break
            if line[:1] not in _KINDS and not line.startswith(b"\\"):
                raise _bad(at, f"{_EACH_LINE}; this one does not")
            at += 1
        while at > first and not self.lines[at - 1].strip():
            at -= 1
        return at


def _bad(at: int, words: str) -> ValueError:
    return ValueError(f"line {at + 1} of the patch: {words}")


def _mode(first: int, text: bytes | None) -> int | None:
    if text is None:
        return None
    if not _FILE_MODE.fullmatch(text):
        words = f"{text.decode(errors='replace')!r} is not a file mode, such as 100644; a submodule cannot be patched"
        raise _bad(first, words)
    return int(text, 8)


def _paths(
    first: int,
    pair: tuple[bytes, bytes] | None,
    header: tuple[bytes | None, bytes | None] | None,
    extended: Mapping[bytes, bytes],
) -> tuple[str | None, str | None]:
    """The source and the target, from the ``diff --git`` line, the ``---`` and ``+++`` lines and git's other lines."""
    for kind in (b"rename", b"copy"):
        if kind + b" from" in extended and kind + b" to" in extended:
            return _text(_unquoted(extended[kind + b" from"])), _text(_unquoted(extended[kind + b" to"]))
    old, new = header or (None, None)
    if old is None and new is None:
        raise _bad(first, "it cannot be told which file this is: add the lines '--- a/PATH' and '+++ b/PATH'")
    if pair is not None and (old not in (None, pair[0]) or new not in (None, pair[1])):
        raise _bad(first, "the 'diff --git' line and the lines below it name different files")
    source, target = _without_prefixes(*(pair or (old, new)))
    if old is not None and new is not None and source != target:
        raise _bad(first, "two different files are named: name one twice, or say 'rename from' and 'rename to'")
    if old is None or b"new file mode" in extended:
        source = None
    if new is None or b"deleted file mode" in extended:
        target = None
    return _text(source), _text(target)


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
    if names[middle : middle + 1] != b" " or len(names) % 2 == 0:
        return None
    one, other = _unquoted(names[:middle]), _unquoted(names[middle + 1 :])
    source, target = _without_prefixes(one, other)
    return (one, other) if source == target else None


def _name(raw: bytes) -> tuple[bytes | None, bytes]:
    """The name in a ``---`` or ``+++`` line, None for no file, and what stands after it: a time, perhaps."""
    quoted = _QUOTED.match(raw)
    if quoted is not None:
        return _unquoted(quoted[0]), raw[quoted.end() :].strip()
    name, _, rest = raw.partition(b"\t")
    return (None if name.strip() == b"/dev/null" else name), rest.strip()


def _unquoted(name: bytes) -> bytes:
    return _C_ESCAPE.sub(_character, name[1:-1]) if _QUOTED.fullmatch(name) else name


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8) & 0xFF if len(escape[1]) == 3 else _C_LETTERS[escape[1][0]]])


def _text(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Patched:
    """A file after its hunks or, where there are ``problems``, as it was."""

    content: bytes
    shifts: tuple[int, ...] = ()
    """For each hunk, how many lines below (negative: above) the stated place it was applied."""
    problems: tuple[str, ...] = ()
    """One for each hunk that does not fit: where it was looked for and what stands there."""


def apply_patch(patch: FilePatch, content: bytes | None) -> Patched:
    """What the file becomes, b"" if it is deleted. ``content`` is the source's, or what is there where one is to be
    created; None for no file. A patch that only adds lines may create a file without saying so, as ``diff -N`` does."""
    if patch.source is None:
        if content is not None:
            return Patched(content, problems=("it is to be created, but it exists already",))
    elif content is None and (not patch.hunks or any(hunk.old for hunk in patch.hunks)):
        return Patched(b"", problems=("there is no such file",))
    patched = _apply_hunks(content or b"", patch.hunks)
    if patch.target is None and patched.content and not patched.problems:
        left = _count_lines(split_lines(patched.content))
        return Patched(content or b"", problems=(f"it is to be deleted, but has {left} more than the patch",))
    return patched


def _apply_hunks(content: bytes, hunks: Sequence[Hunk]) -> Patched:
    """All of the hunks, or none and the problems.

    Every old line must be there, in its place or shifted as little as possible. Nothing is matched loosely but line
    ends: where a hunk fits apart from ``\\r\\n`` against ``\\n``, the file's own stay, and new lines get them. A byte
    order mark stays too, unless the hunks have one.
    """
    if content.startswith(BOM_UTF8) and not any(BOM_UTF8 in line for hunk in hunks for _, line in hunk.lines):
        patched = _apply_hunks(content.removeprefix(BOM_UTF8), hunks)
        return replace(patched, content=BOM_UTF8 + patched.content if patched.content or patched.problems else b"")
    file = _File(content)
    parts: list[bytes] = []
    shifts: list[int] = []
    problems: list[str] = []
    end, drift = 0, 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at = file.find(hunk, end, hunk.index + drift)
        except ValueError as error:
            problems.append(f"hunk {number} ({hunk.header}) {error}")
            continue
        if hunk.start is not None:
            drift = at - hunk.index
        shifts.append(drift if hunk.start is not None else 0)
        parts += (*file.lines[end:at], *file.replaced(hunk, at))
        end = at + len(hunk.old)
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


def _count_lines(lines: Sequence[bytes]) -> str:
    return f"{len(lines)} line{'' if len(lines) == 1 else 's'}"


class _File:
    """A file's lines, and where hunks fit among them."""

    def __init__(self, content: bytes) -> None:
        self.lines = split_lines(content)
        self._bare = [_bare(line) for line in self.lines]
        self._end = line_end_at(content, len(content))
        self._places: dict[bytes, list[int]] = defaultdict(list)
        for at, line in enumerate(self._bare):
            self._places[line].append(at)

    def find(self, hunk: Hunk, after: int, expected: int) -> int:
        """The index of the hunk's first line, not before ``after``. Raises ValueError with what is wrong."""
        old = hunk.old
        if not old:
            if self.lines:
                raise ValueError("only adds lines, and nothing shows where: quote lines around them as well")
            return 0
        places = self._fitting(old)
        allowed = sorted((at for at in places if at >= after), key=lambda at: (abs(at - expected), at))
        if not places:
            raise ValueError(self._describe_misfit(hunk, expected))
        if not allowed:
            above = f"fits at line {places[0] + 1}, above the hunk before it"
            raise ValueError(f"{above}: put hunks in the order of the file, once each")
        fits = f"fits at lines {', '.join(str(at + 1) for at in sorted(allowed[:MAX_LISTED]))}"
        if hunk.start is None and len(allowed) > 1:
            more = ", ..." if len(allowed) > MAX_LISTED else ""
            raise ValueError(f"{fits}{more}: say which in its header, or quote more of the lines around it")
        if len(allowed) > 1 and allowed[0] + allowed[1] == 2 * expected:
            raise ValueError(f"{fits}, two of them equally near to where it says: correct its line number")
        return allowed[0]

    def _fitting(self, old: Sequence[bytes]) -> list[int]:
        """Where the lines are, or else where they are apart from their line ends; in the order of the file."""
        bare = [_bare(line) for line in old]
        rarest = min(range(len(bare)), key=lambda i: len(self._places.get(bare[i], ())))
        exact: list[int] = []
        loose: list[int] = []
        for place in self._places.get(bare[rarest], ()):
            at, end = place - rarest, place - rarest + len(old)
            if at < 0 or self._bare[at:end] != bare:
                continue
            if self.lines[at:end] == old:
                exact.append(at)
            elif self.lines[end - 1].endswith(b"\n") == old[-1].endswith(b"\n"):
                loose.append(at)
        return exact or loose

    def replaced(self, hunk: Hunk, at: int) -> list[bytes]:
        """What stands instead of the hunk's old lines. One that fits apart from line ends takes over the file's."""
        if self.lines[at : at + len(hunk.old)] == hunk.old:
            return hunk.new
        result: list[bytes] = []
        end = _end(self.lines[at]) or self._end
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

    def _describe_misfit(self, hunk: Hunk, expected: int) -> str:
        misfit = f"does not fit, expected at line {expected + 1}:" if hunk.start is not None else "does not fit:"
        wanted = [_bare(line) for line in hunk.old]
        best = best_place(self._bare, wanted, near=expected)
        if best is None:
            return f"{misfit} none of its old lines is in the file, which has {_count_lines(self.lines)}"
        start, same = best
        at = next((at for at, line in enumerate(wanted, start) if self._bare[at : at + 1] != [line]), None)
        if at is None:  # all is there, but for the end of the last line
            if hunk.old[-1].endswith(b"\n"):
                marker = "'\\ No newline at end of file'"
                return f"{misfit} the last line of the file has no newline: the patch needs {marker} after it"
            return f"{misfit} line {start + len(wanted)} ends with a newline, the patch says that it has none"
        line = wanted[at - start].decode(errors="replace")
        found, differ = "the end of the file", ""
        if at < len(self._bare):
            there = self._bare[at].decode(errors="replace")
            found, differ = quote_line(there), describe_difference(line, there)
        nearest = f"the nearest place is line {start + 1} ({same} of {sum(map(bool, wanted))} lines the same)"
        words = f"{misfit} {nearest}, where line {at + 1} is\n{found}\nand the patch has\n{quote_line(line)}"
        return f"{words} (they differ in {differ})" if differ else words


def _end(line: bytes) -> bytes:
    return line[len(_bare(line)) :]
