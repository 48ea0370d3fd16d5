"""Unified diffs, written: such that ``git apply`` makes of one state exactly the other."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from ringfence.filesystem.patch import EXECUTABLE, REGULAR, SYMLINK, split_lines
from ringfence.participants import Change, FileVersion

CONTEXT_LINES = 3
MAX_COMPARED_LINES = 10_000
"""More lines without one in common that both files have just once are given whole, old and new."""
MAX_WEIGHED_LINES = 1_000
"""Up to here, lines that occur very often are compared like any other."""
BINARY_LINE_BYTES = 52
REVERSIBLE_BYTES = 1 << 20
"""Of a longer binary file only what it becomes is given: the patch can be applied, and not with ``git apply -R``."""

Opcode = tuple[str, int, int, int, int]
_TO_QUOTE = re.compile(rb'[\x00-\x1f\x7f"\\]')
_C_NAMES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


@dataclass(frozen=True, slots=True)
class FileState:
    """What git knows of a file: its bytes (of a symlink, its target) and its mode."""

    content: bytes
    mode: int = REGULAR


def patch_of(changes: Sequence[Change], before: Callable[[str], bytes], after: Callable[[str], bytes]) -> bytes:
    """The patch for a change set; ``before`` and ``after`` give the bytes of its files by path, and are only asked for
    those that differ. Directories, and permissions other than to execute, are nothing that a patch can hold. A file
    or link that is gone and one that is new and the same are a rename.

    Deletions and renames come first, so that a directory can take a file's place.
    """
    deleted: list[bytes] = []
    written: list[bytes] = []
    came = moved(changes)
    sources = {change.path for change in came.values()}
    for change in changes:
        old, new = _mode(change.before), _mode(change.after)
        if (old == new and (old is None or _same(change))) or change.path in sources:
            continue
        if (source := came.get(change.path)) is not None:
            deleted.append(rename_patch(source.path, change.path, modes=(_mode(source.before), new)))
            continue
        was = None if old is None else FileState(_content(change.path, change.before, before), old)
        now = None if new is None else FileState(_content(change.path, change.after, after), new)
        (deleted if now is None else written).append(unified_diff(change.path, was, now))
    return b"".join((*deleted, *written))


def moved(changes: Sequence[Change]) -> dict[str, Change]:
    """By the path of each file or link that is new, the change of one that is gone and was alike, if there is any: of
    several, as git has it, rather one of the same name. Not where one path is above the other, which no patch can say.
    """
    gone = [(known, one) for one in changes if one.after is None and (known := _known_by(one.before))]
    new = [(known, one) for one in changes if one.before is None and (known := _known_by(one.after))] if gone else []
    found: dict[str, Change] = {}
    for named in (True, False):
        taken = {source.path for source in found.values()}
        like: dict[tuple[str, str, str], list[Change]] = {}
        for known, change in reversed(gone):
            if change.path not in taken:
                like.setdefault((*known, _name(change.path) if named else ""), []).append(change)
        for known, change in new:
            if change.path in found:
                continue
            sources = like.get((*known, _name(change.path) if named else ""), [])
            for place in reversed(range(len(sources))):
                if not _one_above_the_other(change.path, sources[place].path):
                    found[change.path] = sources.pop(place)
                    break
    return found


def _known_by(version: FileVersion | None) -> tuple[str, str] | None:
    """The kind of a file or a link, and what says that another one is the same."""
    content = None if version is None else version.target if version.kind == "symlink" else version.content_hash
    return None if version is None or content is None else (version.kind, content)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _one_above_the_other(one: str, other: str) -> bool:
    return one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _mode(version: FileVersion | None) -> int | None:
    if version is None or version.kind == "directory":
        return None
    if version.kind == "symlink":
        return SYMLINK
    return EXECUTABLE if version.mode & 0o100 else REGULAR


def _same(change: Change) -> bool:
    one, other = change.before, change.after
    return (
        one is not None and other is not None and (one.content_hash, one.target) == (other.content_hash, other.target)
    )


def _content(path: str, version: FileVersion | None, read: Callable[[str], bytes]) -> bytes:
    if version is not None and version.kind == "symlink":
        return (version.target or "").encode("utf-8", "surrogateescape")
    return read(path)


def unified_diff(path: str, before: FileState | None, after: FileState | None) -> bytes:
    """One file's part of a patch, b"" if nothing differs. None is no file; bytes, since a file need not be UTF-8.

    A file with a NUL is binary: it is given whole, compressed, and what it was, too, unless that is long
    (`REVERSIBLE_BYTES`).
    """
    if before == after:
        return b""
    if before is not None and after is not None and (before.mode == SYMLINK) != (after.mode == SYMLINK):
        return unified_diff(path, before, None) + unified_diff(path, None, after)
    raw = path.encode("utf-8", "surrogateescape")
    lines = [b"diff --git %s %s\n" % (_quoted(b"a/" + raw), _quoted(b"b/" + raw))]
    if before is None and after is not None:
        lines.append(b"new file mode %o\n" % after.mode)
    elif before is not None and after is None:
        lines.append(b"deleted file mode %o\n" % before.mode)
    elif before is not None and after is not None and before.mode != after.mode:
        lines.append(b"old mode %o\nnew mode %o\n" % (before.mode, after.mode))
    old, new = (state.content if state is not None else b"" for state in (before, after))
    if old != new or before is None or after is None:
        binary = b"\0" in old or b"\0" in new
        lines.append(_index(before, after, 40 if binary else 7))
        lines += _binary(old, new) if binary else _text(raw, before, after)
    return b"".join(lines)


def rename_patch(old: str, new: str, *, modes: tuple[int | None, int | None] = (None, None)) -> bytes:
    """The part of a patch that gives a file another path, and maybe another mode, and says nothing of its bytes."""
    one, other = (path.encode("utf-8", "surrogateescape") for path in (old, new))
    lines = [b"diff --git %s %s\n" % (_quoted(b"a/" + one), _quoted(b"b/" + other))]
    if modes[0] != modes[1]:
        lines.append(b"old mode %o\nnew mode %o\n" % modes)
    lines.append(b"similarity index 100%\n")
    lines.append(b"rename from %s\nrename to %s\n" % (_quoted(one), _quoted(other)))
    return b"".join(lines)


def _index(before: FileState | None, after: FileState | None, digits: int) -> bytes:
    names = (_blob_name(state.content) if state is not None else "0" * 40 for state in (before, after))
    line = "..".join(name[:digits] for name in names)
    mode = f" {after.mode:o}" if before is not None and after is not None and before.mode == after.mode else ""
    return f"index {line}{mode}\n".encode()


def _blob_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _quoted(name: bytes) -> bytes:
    """A name as git takes it: as it is, or in quotes if it has something that cannot stand in a line of UTF-8."""
    try:
        name.decode()
        if _TO_QUOTE.search(name) is None:
            return name
        return b'"' + _TO_QUOTE.sub(lambda match: _escaped(match[0][0]), name) + b'"'
    except UnicodeDecodeError:
        return b'"' + b"".join(bytes([c]) if 0x20 <= c < 0x7F and c not in b'"\\' else _escaped(c) for c in name) + b'"'


def _escaped(character: int) -> bytes:
    letter = _C_NAMES.get(character)
    return b"\\%c" % letter if letter is not None else b"\\%03o" % character


def _text(raw: bytes, before: FileState | None, after: FileState | None) -> Iterator[bytes]:
    old, new = (split_lines(state.content) if state is not None else [] for state in (before, after))
    if not old and not new:
        return
    for sign, prefix, state in ((b"---", b"a/", before), (b"+++", b"b/", after)):
        name = _quoted(prefix + raw)
        # Where a name has a blank, a tab says that what follows is no part of it.
        yield b"%s %s\n" % (
            sign,
            b"/dev/null" if state is None else name + (b"\t" if b" " in raw and name[:1] != b'"' else b""),
        )
    for group in _groups(_opcodes(old, new), CONTEXT_LINES):
        yield b"@@ -%s +%s @@\n" % (_range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4]))
        for kind, i, j, k, m in group:
            if kind == "equal":
                yield from _marked(b" ", old[i:j])
            else:
                yield from _marked(b"-", old[i:j])
                yield from _marked(b"+", new[k:m])


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _range(start: int, end: int) -> bytes:
    count = end - start
    # Of no lines, the one before is named.
    return b"%d" % (start + 1) if count == 1 else b"%d,%d" % (start + 1 if count else start, count)


def _opcodes(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[Opcode]:
    """How the new lines are made of the old ones; no two in a row are "equal"."""
    i = k = 0
    equal = 0
    for at, new_at in (*_anchors(old, new), (len(old), len(new))):
        for kind, first, last, new_first, new_last in _between(old[i:at], new[k:new_at]):
            if kind == "equal":
                equal += last - first
                continue
            if equal:
                yield "equal", i + first - equal, i + first, k + new_first - equal, k + new_first
            equal = 0
            yield kind, i + first, i + last, k + new_first, k + new_last
        equal += at < len(old) or new_at < len(new)
        i, k = at + 1, new_at + 1
    if equal:
        yield "equal", len(old) - equal, len(old), len(new) - equal, len(new)


def _anchors(old: Sequence[bytes], new: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs of equal lines, in order: those at both ends, and between them the longest row of lines that both have just
    once. difflib alone takes the square of the number of changes."""
    top, shorter = 0, min(len(old), len(new))
    while top < shorter and old[top] == new[top]:
        top += 1
    bottom = 0
    while bottom < shorter - top and old[-1 - bottom] == new[-1 - bottom]:
        bottom += 1
    once, once_new = (
        {line: at for at, line in enumerate(lines[top : len(lines) - bottom], top) if times[line] == 1}
        for lines in (old, new)
        for times in [Counter(lines[top : len(lines) - bottom])]
    )
    ends: list[int] = []
    rows: list[tuple[int, int, int]] = []
    """(old line, new line, index of the one before it in the row or -1)"""
    last_of: list[int] = []
    for line, at in once.items():
        new_at = once_new.get(line)
        if new_at is None:
            continue
        length = bisect_left(ends, new_at)
        rows.append((at, new_at, last_of[length - 1] if length else -1))
        ends[length : length + 1] = [new_at]
        last_of[length : length + 1] = [len(rows) - 1]
    row: list[tuple[int, int]] = []
    here = last_of[-1] if last_of else -1
    while here >= 0:
        at, new_at, here = rows[here]
        row.append((at, new_at))
    first = [(n, n) for n in range(top)]
    return [*first, *reversed(row), *((len(old) - n, len(new) - n) for n in range(bottom, 0, -1))]


def _between(old: Sequence[bytes], new: Sequence[bytes]) -> list[Opcode]:
    if not old and not new:
        return []
    lines = max(len(old), len(new))
    if not old or not new or lines > MAX_COMPARED_LINES:
        return [("replace", 0, len(old), 0, len(new))]
    return list(SequenceMatcher(None, old, new, autojunk=lines > MAX_WEIGHED_LINES).get_opcodes())


def _groups(opcodes: Iterator[Opcode], context: int) -> Iterator[list[Opcode]]:
    """The opcodes of one hunk each, with so many equal lines around them. (difflib's own wants a whole matcher.)"""
    group: list[Opcode] = []
    changed = False
    for kind, i, j, k, m in opcodes:
        if kind != "equal":
            group.append((kind, i, j, k, m))
            changed = True
        elif not changed:
            group = [(kind, max(i, j - context), j, max(k, m - context), m)]
        elif j - i > 2 * context:
            yield [*group, (kind, i, i + context, k, k + context)]
            group, changed = [(kind, j - context, j, m - context, m)], False
        else:
            group.append((kind, i, j, k, m))
    if changed:
        kind, i, j, k, m = group[-1]
        if kind == "equal":
            group[-1] = (kind, i, min(j, i + context), k, min(m, k + context))
        yield group


def _binary(old: bytes, new: bytes) -> Iterator[bytes]:
    yield b"GIT binary patch\n"
    for content in (new, old) if len(old) <= REVERSIBLE_BYTES else (new,):
        yield b"literal %d\n" % len(content)
        packed = zlib.compress(content)
        for start in range(0, len(packed), BINARY_LINE_BYTES):
            piece = packed[start : start + BINARY_LINE_BYTES]
            length = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[len(piece) - 1 : len(piece)]
            yield length + base64.b85encode(piece, pad=True) + b"\n"
        yield b"\n"
