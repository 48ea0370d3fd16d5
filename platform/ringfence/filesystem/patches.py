"""Patches, applied to a file's bytes: exactly, and with words for what does not fit."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ringfence.filesystem.edits import best_place, difference, line_end_at, shown_line
from ringfence.filesystem.patch_format import FilePatch, Hunk

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
