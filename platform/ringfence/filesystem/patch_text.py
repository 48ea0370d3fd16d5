"""The parser of patches. It reads unified diffs, and the form that begins with *** Begin Patch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from ringfence.filesystem.edits import utf8
from ringfence.filesystem.hunk_text import (
    EACH_LINE,
    HUNK_NUMBERS,
    KINDS,
    bad_line,
    is_end_of_file,
    is_no_newline,
    parse_heading,
    parse_hunk_lines,
    stated_line,
)
from ringfence.filesystem.patch import FilePatch, Hunk
from ringfence.filesystem.v4a import BEGIN, END, begins_v4a, parse_v4a

_GIT = b"diff --git "
_END = b"\0"
"""The sentinel after the last line. No part of a patch begins with it."""

_EXTENDED = re.compile(
    rb"(old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to"
    rb"|similarity index|dissimilarity index|index) (.*)",
    re.DOTALL,
)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_C_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_C_LETTERS = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))
_FILE_MODE = re.compile(rb"(?:100|120)[0-7]{3}")
_EPOCH = re.compile(rb"(?:1970-01-01|1969-12-31) ")


_NO_PATCHES = (
    (re.compile(rb"@@"), "this hunk belongs to no file: put '--- a/PATH' and '+++ b/PATH' before it"),
    (re.compile(rb"diff --c(c|ombined) "), "this is the combined diff of a merge: give one against a single side"),
    (re.compile(rb"GIT binary patch$|Binary files .* differ$", re.S), "binary files cannot be patched: leave it out"),
)
"""Lines of patches that cannot be applied, and the advice for each of them."""

_LOST_HEADER = re.compile(
    rb"(old|new|deleted file|new file) mode \d{6}\s*$|(rename|copy) (from|to) \S|\*\*\* (Move to: |End of File\s*$)"
)
_LOST_CHANGE = re.compile(rb"[+-](?! \S|[+-]*\s*$)|\\ ")
"""Lines that begin as those of a hunk do. The points of a list and rules such as ``---`` are text."""
_MAIL = re.compile(rb"From \S+ \w{3} \w{3} [ \d]\d ")
_VERSION = re.compile(rb"\d+\.\d+")
"""The line below the ``-- `` that ends a mail of git."""


class _Text(Enum):
    """What text outside of files may have, so that no part of a change is taken for text."""

    OF_MAIL = "anything"
    ANYWHERE = "no changed line"
    BELOW_HUNK = "no changed line, and no list"


def parse_patch(patch: str | bytes) -> tuple[FilePatch, ...]:
    """Parse a patch into its files, in order. Text around them, such as a mail or a fence, is ignored.

    Parts from ``*** Begin Patch``, or from a line such as ``*** Add File: PATH``, to ``*** End Patch`` are read by
    `parse_v4a`. All others are read as unified diffs, which may stand between these two lines, too. A header or a
    changed line outside of a file is an error, since ignoring it would lose a part of the change.

    The counts in a hunk's header are used if they fit its lines. Otherwise the lines are counted, and the header may be
    only ``@@``. An empty line in a hunk is a context line. If the headers end with ``\\r\\n``, the line ends of the
    whole patch come from its transport and not from the files.

    Raises:
        ValueError: The text has neither form, has changes that belong to no file, or is a binary or combined diff. The
            message names the line.
    """
    return _Parser(utf8(patch, "the patch") if isinstance(patch, str) else patch).files()


class _Parser:
    def __init__(self, patch: bytes) -> None:
        self.lines = patch.removesuffix(b"\n").split(b"\n")
        self.at = 0
        self._text = _Text.ANYWHERE
        self._is_fenced = self._is_wrapped = False
        """Whether the text is in a Markdown fence, and between the first and last line of the other form."""
        self._is_miscounted = False
        """Whether the counts of the last hunk do not fit its lines."""
        first = next((at for at, line in enumerate(self.lines) if self._begins_file(at) or begins_v4a(line)), 0)
        if self.lines[first].endswith(b"\r"):
            self.lines = [line.removesuffix(b"\r") for line in self.lines]
        # An empty context line of a file with CRLF.
        self.lines = [b" \r" if line == b"\r" else line for line in self.lines]

    def files(self) -> tuple[FilePatch, ...]:
        files: list[FilePatch] = []
        while self.at < len(self.lines):
            if self._begins_file(self.at):
                files.append(self._file())
                self._text = _Text.BELOW_HUNK
            elif self.lines[self.at].rstrip() == BEGIN and self._begins_file(self._not_blank(self.at + 1)):
                self._is_wrapped = True
                self.at += 1
            elif begins_v4a(self.lines[self.at]):
                parsed, self.at = parse_v4a(self.lines, self.at)
                files += parsed
                self._text, self._is_wrapped = _Text.ANYWHERE, False
            else:
                self._pass_text()
        if self._is_wrapped:
            raise ValueError("the patch is cut off: its last line is '*** End Patch'")
        if not files:
            raise ValueError("the patch names no file: begin each with the lines '--- a/PATH' and '+++ b/PATH'")
        return tuple(files)

    def _pass_text(self) -> None:
        """Pass over a line that belongs to no file. Raises ValueError if this would lose a part of the change."""
        line = self.lines[self.at]
        if self._is_signature(self.at):
            self.at += 2
            return
        for pattern, words in _NO_PATCHES:
            if pattern.match(line):
                raise bad_line(self.at, words)
        if _MAIL.match(line):
            self._text = _Text.OF_MAIL
        elif line.rstrip() == END:
            self._text, self._is_wrapped = _Text.ANYWHERE, False
        elif line.startswith(b"```"):
            # Below a hunk with other counts than its header says, it may be a line of the hunk.
            if self._is_fenced and not self._is_miscounted:
                self._text = _Text.ANYWHERE
            self._is_fenced = not self._is_fenced
        elif self._text is not _Text.OF_MAIL:
            if _LOST_HEADER.match(line):
                raise bad_line(
                    self.at, "this header belongs to no file: put it directly below the first line of its file"
                )
            if _LOST_CHANGE.match(line) or (self._text is _Text.BELOW_HUNK and line.startswith((b"+", b"-"))):
                raise bad_line(self.at, f"this line is in no hunk: check the lines before it; {EACH_LINE}")
        self.at += 1

    def _is_signature(self, at: int) -> bool:
        return self._line(at).rstrip() == b"--" and _VERSION.match(self._line(at + 1)) is not None

    def _line(self, at: int) -> bytes:
        return self.lines[at] if at < len(self.lines) else _END

    def _begins_file(self, at: int) -> bool:
        line = self._line(at)
        return line.startswith(_GIT) or (line.startswith(b"--- ") and self._line(at + 1).startswith(b"+++ "))

    def _not_blank(self, at: int) -> int:
        """The index of the first line from `at` on that is not blank."""
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
            raise bad_line(first, f"nothing is said about what to change in {target}: add its hunks, from '@@' on")
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
            raise bad_line(first, "this is the combined diff of a merge: give one against a single side")
        numbers = HUNK_NUMBERS.match(header)
        end = None
        if numbers is not None:
            old, new = (1 if count is None else int(count) for count in (numbers[2], numbers[4]))
            end = self._after_counted(first + 1, old, new)
        self._is_miscounted = numbers is not None and end is None
        self.at = self._after_uncounted(first + 1) if end is None else end
        body = parse_hunk_lines(self.lines, first + 1, self.at)
        if not body:
            raise bad_line(first, f"this hunk has no lines: {EACH_LINE}")
        shown = (numbers[0] if numbers is not None else header[:60]).decode(errors="replace")
        anchors = tuple(filter(None, (parse_heading(header),)))
        at_end = is_end_of_file(self._line(self.at))
        self.at += at_end
        return Hunk(shown, stated_line(numbers, body), body, anchors, at_end, is_unified=True)

    def _after_counted(self, at: int, old: int, new: int) -> int | None:
        """The index after a hunk with these numbers of old and new lines. None if its lines do not fit the numbers."""
        while old > 0 or new > 0:
            kind = self._line(at)[:1]
            if not is_no_newline(self._line(at)):
                if kind not in KINDS:
                    return None
                old -= kind != b"+"
                new -= kind != b"-"
            at += 1
        at += is_no_newline(self._line(at))
        # No more lines of this hunk may follow.
        following = self._not_blank(at)
        more = self._line(following).startswith((b" ", b"-", b"+", b"\\ ")) and not self._is_signature(following)
        return at if old == new == 0 and (not more or self._begins_file(following)) else None

    def _after_uncounted(self, at: int) -> int:
        """The index after a hunk with lines recognised by their first letters. Blank lines after it are no part."""
        first = at
        while at < len(self.lines) and not self._begins_file(at):
            line = self.lines[at]
            if line.startswith((b"@@", b"diff ", b"Index: ", b"```", b"*** ")) or self._is_signature(at):
                break
            if line[:1] not in KINDS and not is_no_newline(line):
                if at > first and not self.lines[at - 1].strip():
                    break  # text below an empty line
                raise bad_line(at, f"{EACH_LINE}; this one does not")
            at += 1
        while at > first and not self.lines[at - 1]:
            at -= 1
        return at


def _mode(first: int, text: bytes | None) -> int | None:
    if text is None:
        return None
    if not _FILE_MODE.fullmatch(text):
        words = f"{text.decode(errors='replace')!r} is not a file mode, such as 100644; a submodule cannot be patched"
        raise bad_line(first, words)
    return int(text, 8)


def _paths(
    first: int,
    pair: tuple[bytes, bytes] | None,
    header: tuple[bytes | None, bytes | None] | None,
    extended: Mapping[bytes, bytes],
) -> tuple[str | None, str | None]:
    """Source and target of a patch, from the ``diff --git``, ``---`` and ``+++`` lines and git's other lines."""
    if (moved := _moved_paths(extended)) is not None:
        return moved
    old, new = header or (None, None)
    if old is None and new is None:
        raise bad_line(first, "it cannot be told which file this is: add the lines '--- a/PATH' and '+++ b/PATH'")
    if pair is not None and (old not in (None, pair[0]) or new not in (None, pair[1])):
        raise bad_line(first, "the 'diff --git' line and the lines below it name different files")
    source, target = _without_prefixes(*(pair or (old, new)))
    if old is not None and new is not None and source != target:
        raise bad_line(first, "two different files are named: name one twice, or say 'rename from' and 'rename to'")
    if old is None or b"new file mode" in extended:
        source = None
    if new is None or b"deleted file mode" in extended:
        target = None
    return _text(source), _text(target)


def _moved_paths(extended: Mapping[bytes, bytes]) -> tuple[str | None, str | None] | None:
    """Source and target of a renamed or copied file."""
    for kind in (b"rename", b"copy"):
        if kind + b" from" in extended and kind + b" to" in extended:
            return _text(unquoted(extended[kind + b" from"])), _text(unquoted(extended[kind + b" to"]))
    return None


def _without_prefixes(old: bytes | None, new: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Remove git's ``a/`` and ``b/`` from two names.

    Equal names have no prefixes. Names that differ only in their first letter have prefixes, which need not be a and b.
    """
    if old is None or new is None:
        return old and old.removeprefix(b"a/"), new and new.removeprefix(b"b/")
    if old != new and old[1:2] == b"/" == new[1:2]:
        return old[2:], new[2:]
    return old, new


def _halves(names: bytes) -> tuple[bytes, bytes] | None:
    """Split a ``diff --git`` line into its two names. Return None if they are not names of one file.

    The line does not mark blanks within a name. The two names of one file have equal lengths.
    """
    middle = len(names) // 2
    if names[middle : middle + 1] != b" " or len(names) % 2 == 0:
        return None
    one, other = unquoted(names[:middle]), unquoted(names[middle + 1 :])
    source, target = _without_prefixes(one, other)
    return (one, other) if source == target else None


def _name(raw: bytes) -> tuple[bytes | None, bytes]:
    """The name in a ``---`` or ``+++`` line, or None for no file, and the rest of the line, such as a time."""
    quoted = _QUOTED.match(raw)
    if quoted is not None:
        return unquoted(quoted[0]), raw[quoted.end() :].strip()
    name, _, rest = raw.partition(b"\t")
    return (None if name.strip() == b"/dev/null" else name), rest.strip()


def unquoted(name: bytes) -> bytes:
    """A name of a patch as it is, which git may have quoted."""
    return _C_ESCAPE.sub(_character, name[1:-1]) if _QUOTED.fullmatch(name) else name


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8) & 0xFF if len(escape[1]) == 3 else _C_LETTERS[escape[1][0]]])


def _text(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "surrogateescape")
