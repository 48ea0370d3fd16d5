"""Unified diffs, read: as git and diff write them, and as models do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ringfence.filesystem.edits import utf8

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
