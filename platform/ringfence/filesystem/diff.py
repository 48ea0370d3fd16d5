"""The writer of unified diffs. ``git apply`` turns the old state into exactly the new one."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import TypeAlias

from ringfence.filesystem.patch import EXECUTABLE, REGULAR, SYMLINK, split_lines
from ringfence.participants import Change, FileVersion

CONTEXT_LINES = 3
MAX_COMPARED_LINES = 10_000
"""The limit of lines that are compared between two anchors (`_anchors`). Longer stretches are replaced whole."""
MAX_WEIGHED_LINES = 1_000
"""The number of lines up to which frequent lines are compared like all others."""
BINARY_LINE_BYTES = 52
REVERSIBLE_BYTES = 1 << 20
"""The longest binary file whose patch has the old bytes too. A longer file's patch cannot be reverted by git."""

_Row: TypeAlias = "tuple[int, int, _Row | None]"
_TO_QUOTE = re.compile(rb'[\x00-\x1f\x7f"\\]')
_NOT_ASCII = re.compile(rb'[^\x20-\x7e]|["\\]')
_C_NAMES = dict(zip(b'\a\b\t\n\v\f\r"\\', b'abtnvfr"\\', strict=True))


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as git knows it: its bytes and its mode. The bytes of a symlink are its target."""

    content: bytes
    mode: int = REGULAR


def patch_of(changes: Sequence[Change], before: Callable[[str], bytes], after: Callable[[str], bytes]) -> bytes:
    """Return the patch for a change set.

    ``before`` and ``after`` return the bytes of a file by its path. They are called only for files whose bytes differ.
    The patch leaves out directories, all permissions except to execute, and files whose bytes are not known: pipes, and
    what is too large. A deleted file and an equal new file become a rename. Links become renames too. Deletions and
    renames come first: a directory can then take a file's place.
    """
    first: list[bytes] = []
    written: list[bytes] = []
    sources = moved(changes)
    gone = {source.path for source in sources.values()}
    for change in changes:
        path, old, new = change.path, _mode(change.before), _mode(change.after)
        if (
            path in gone
            or has_unknown_bytes(change)
            or (old == new and _identity(change.before) == _identity(change.after))
        ):
            continue
        if (source := sources.get(path)) is not None:
            first.append(rename_patch(source.path, path, modes=(_mode(source.before), new)))
            continue
        was = None if old is None else FileState(_content(path, change.before, before), old)
        now = None if new is None else FileState(_content(path, change.after, after), new)
        (first if now is None else written).append(unified_diff(path, was, now))
    return b"".join((*first, *written))


def has_unknown_bytes(change: Change) -> bool:
    """Whether it is of something that no history has the bytes of."""
    return any(
        one is not None and one.kind == "file" and one.content_hash is None for one in (change.before, change.after)
    )


def moved(changes: Sequence[Change]) -> dict[str, Change]:
    """Map the path of each new file or link to the change that deleted an equal one: the two are a rename.

    Of several equal deleted files, one with the same name is taken, as git does. A path below the other is no rename,
    since a patch cannot express it.
    """
    gone = [(known, one) for one in changes if one.after is None and (known := _identity(one.before))]
    new = [(known, one) for one in changes if one.before is None and (known := _identity(one.after))]
    found: dict[str, Change] = {}
    for same_name in (True, False):
        taken = {source.path for source in found.values()}
        alike: defaultdict[tuple[object, ...], list[Change]] = defaultdict(list)
        for known, one in reversed(gone):
            if one.path not in taken:
                alike[known, same_name and _name(one.path)].append(one)
        for known, one in new:
            sources = [] if one.path in found else alike[known, same_name and _name(one.path)]
            for place in reversed(range(len(sources))):
                if not _is_above(one.path, sources[place].path) and not _is_above(sources[place].path, one.path):
                    found[one.path] = sources.pop(place)
                    break
    return found


def _identity(version: FileVersion | None) -> tuple[str, str] | None:
    """The key by which files or links are equal: kind and content. None for what cannot be renamed."""
    if version is None or version.kind == "directory":
        return None
    content = version.content_hash if version.kind == "file" else version.target or ""
    return None if content is None else (version.kind, content)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _is_above(directory: str, path: str) -> bool:
    return path.startswith(f"{directory}/")


def _mode(version: FileVersion | None) -> int | None:
    if version is None or version.kind == "directory":
        return None
    if version.kind == "symlink":
        return SYMLINK
    return EXECUTABLE if version.mode & 0o100 else REGULAR


def _content(path: str, version: FileVersion | None, read: Callable[[str], bytes]) -> bytes:
    if version is not None and version.kind == "symlink":
        return (version.target or "").encode("utf-8", "surrogateescape")
    return read(path)


def unified_diff(path: str, before: FileState | None, after: FileState | None) -> bytes:
    """Return one file's part of a patch, or b"" if nothing differs. None stands for no file.

    A file with a NUL is binary. Its patch has the new bytes, compressed, and the old ones up to `REVERSIBLE_BYTES`.
    """
    if before == after:
        return b""
    if before is not None and after is not None and (before.mode == SYMLINK) != (after.mode == SYMLINK):
        return unified_diff(path, before, None) + unified_diff(path, None, after)
    raw = path.encode("utf-8", "surrogateescape")
    lines = [_header(raw, raw, before and before.mode, after and after.mode)]
    old, new = (state.content if state is not None else b"" for state in (before, after))
    if old != new or before is None or after is None:
        binary = b"\0" in old or b"\0" in new
        lines.append(_index(before, after, 40 if binary else 7))
        lines += _binary(old, new) if binary else _text(raw, before, after)
    return b"".join(lines)


def rename_patch(old: str, new: str, *, modes: tuple[int | None, int | None] = (None, None)) -> bytes:
    """Return the part of a patch that renames a file and keeps its bytes. ``modes`` are the old and the new one."""
    one, other = (path.encode("utf-8", "surrogateescape") for path in (old, new))
    renamed = b"similarity index 100%%\nrename from %s\nrename to %s\n" % (_quoted(one), _quoted(other))
    return _header(one, other, *modes) + renamed


def _header(old: bytes, new: bytes, old_mode: int | None, new_mode: int | None) -> bytes:
    line = b"diff --git %s %s\n" % (_quoted(b"a/" + old), _quoted(b"b/" + new))
    if old_mode == new_mode:
        return line
    if old_mode is None:
        return line + b"new file mode %o\n" % new_mode
    if new_mode is None:
        return line + b"deleted file mode %o\n" % old_mode
    return line + b"old mode %o\nnew mode %o\n" % (old_mode, new_mode)


def _index(before: FileState | None, after: FileState | None, digits: int) -> bytes:
    names = (_blob_name(state.content) if state is not None else "0" * 40 for state in (before, after))
    line = "..".join(name[:digits] for name in names)
    mode = f" {after.mode:o}" if before is not None and after is not None and before.mode == after.mode else ""
    return f"index {line}{mode}\n".encode()


def _blob_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _quoted(name: bytes) -> bytes:
    """Quote a name as git does, if it has bytes that cannot stand in a line of UTF-8. Other names are unchanged."""
    try:
        name.decode()
        escaped = _TO_QUOTE.sub(_escaped, name)
    except UnicodeDecodeError:
        escaped = _NOT_ASCII.sub(_escaped, name)
    return name if escaped == name else b'"%s"' % escaped


def _escaped(match: re.Match[bytes]) -> bytes:
    code = match[0][0]
    return b"\\%c" % _C_NAMES[code] if code in _C_NAMES else b"\\%03o" % code


def _text(raw: bytes, before: FileState | None, after: FileState | None) -> Iterator[bytes]:
    old, new = (split_lines(state.content) if state is not None else [] for state in (before, after))
    if not old and not new:
        return
    for sign, prefix, state in ((b"---", b"a/", before), (b"+++", b"b/", after)):
        name = _quoted(prefix + raw)
        # A tab marks the end of a name with a blank.
        yield b"%s %s\n" % (
            sign,
            b"/dev/null" if state is None else name + (b"\t" if b" " in raw and name[:1] != b'"' else b""),
        )
    yield from hunks_of(old, new)


def hunks_of(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the lines of the hunks that turn one list of lines into the other."""
    for group in LineMatcher(None, old, new).get_grouped_opcodes(CONTEXT_LINES):
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
    # An empty range names the line before it.
    return b"%d" % (start + 1) if count == 1 else b"%d,%d" % (start + 1 if count else start, count)


class LineMatcher(SequenceMatcher[bytes]):
    """A SequenceMatcher that compares only between anchors. Without them, its time is quadratic in the changes."""

    a: Sequence[bytes]
    b: Sequence[bytes]

    def get_matching_blocks(self) -> list[Match]:
        blocks: list[Match] = []
        i = k = 0
        for anchor in _anchors(self.a, self.b):
            between = _blocks(self.a[i : anchor.a], self.b[k : anchor.b])
            for block in (*(Match(i + start, k + new_start, size) for start, new_start, size in between), anchor):
                last = blocks[-1] if blocks else Match(0, 0, 0)
                if (last.a + last.size, last.b + last.size) == (block.a, block.b):
                    blocks[-1:] = [Match(last.a, last.b, last.size + block.size)]
                else:
                    blocks.append(block)
            i, k = anchor.a + anchor.size, anchor.b + anchor.size
        return blocks


def _blocks(old: Sequence[bytes], new: Sequence[bytes]) -> Sequence[Match]:
    lines = max(len(old), len(new))
    if not old or not new or lines > MAX_COMPARED_LINES:
        return ()
    return SequenceMatcher(None, old, new, autojunk=lines > MAX_WEIGHED_LINES).get_matching_blocks()


def _anchors(old: Sequence[bytes], new: Sequence[bytes]) -> list[Match]:
    """Return runs of equal lines in order: the common head and tail, and the longest chain of unique common lines."""
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
    # The longest increasing chain, by patience sorting. `ends` has the last new line of the best chain of each length.
    # A chain is (old line, new line, chain before).
    ends: list[int] = []
    rows: list[_Row] = []
    for line, at in once.items():
        if (new_at := once_new.get(line)) is not None:
            length = bisect_left(ends, new_at)
            ends[length : length + 1] = [new_at]
            rows[length : length + 1] = [(at, new_at, rows[length - 1] if length else None)]
    between: list[Match] = []
    row = rows[-1] if rows else None
    while row is not None:
        between.append(Match(row[0], row[1], 1))
        row = row[2]
    end = Match(len(old) - bottom, len(new) - bottom, bottom)
    return [Match(0, 0, top), *reversed(between), end]


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
