"""The tools ``glob`` and ``grep``. What git ignores is left out of an answer unless it is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ringfence.errors import ToolValidationError
from ringfence.filesystem.paths import escape_path, escape_text
from ringfence.filesystem.protocol import MAX_GREP_MATCHES, Filesystem, GrepMatch
from ringfence.filesystem.search import ALTERNATIVES, LITERALLY, path_filter
from ringfence.prompt.tool import ToolContext
from ringfence.runtime.tool_result import ToolResult
from ringfence_tools.handlers import (
    MAX_LISTED,
    FileHandlers,
    check_size,
    count_fitting_lines,
    explain_errors,
    format_count,
    format_path,
    is_directory,
    require_existing,
)

if TYPE_CHECKING:
    from ringfence_tools.ignored import Ignored

MAX_MATCH_CHARACTERS = 400
"""Of a line that grep found."""
MAX_SEARCHED = 100_000
"""Lines that a search goes through where most of them are ignored."""


@dataclass(frozen=True, slots=True)
class Glob:
    pattern: str = field(
        metadata={
            "description": "Such as *.py (in one directory) or **/*.py (at any depth); * does not cross a '/', no {}."
        }
    )
    path: str | None = field(
        default=None, metadata={"description": "The directory that the pattern is relative to; left out, the root."}
    )
    glob: str | None = field(default=None, metadata={"description": "Only names that match this, too."})

    def __post_init__(self) -> None:
        if not self.pattern.strip():
            raise ToolValidationError("pattern is blank: **/* finds everything")


@dataclass(frozen=True, slots=True)
class Grep:
    pattern: str = field(
        metadata={
            "description": "A regular expression (RE2: no look-around, no back-references); \\Q...\\E is literal."
        }
    )
    path: str | None = field(
        default=None, metadata={"description": "The directory or file to search; left out, everything."}
    )
    glob: str | None = field(
        default=None, metadata={"description": "Only files that match, such as *.py (any directory) or src/**/*.py."}
    )

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ToolValidationError("pattern is empty: it would match every line")


@dataclass(frozen=True, slots=True)
class FoundPaths:
    path: str
    pattern: str
    matches: tuple[str, ...]
    """Directories end with a "/"."""
    left_out: int = 0

    def render(self) -> str:
        more = [f"[{self.left_out:,} more: use a narrower pattern]"] if self.left_out else []
        return "\n".join((*self.matches, *more))


@dataclass(frozen=True, slots=True)
class FoundLine:
    path: str
    line_number: int
    line: str
    """Without its end; cut around the match if it is long."""

    def render(self) -> str:
        return f"{self.path}:{self.line_number}: {self.line}"


@dataclass(frozen=True, slots=True)
class FoundLines:
    path: str
    pattern: str
    matches: tuple[FoundLine, ...]
    cut: bool = False
    """Whether there are more."""

    def render(self) -> str:
        more = ["[there are more: use a narrower pattern, path or glob]"] if self.cut else []
        return "\n".join((*(match.render() for match in self.matches), *more))


class SearchHandlers(FileHandlers):
    def glob(self, params: Glob, *, context: ToolContext) -> ToolResult[FoundPaths]:
        filesystem, path = self._open(context, params.path)
        require_existing(filesystem, path)
        if not is_directory(filesystem, path):
            raise ToolValidationError(f"{format_path(path)} is not a directory: glob looks below one")
        pattern = self._below(filesystem, path, params.pattern)
        try:
            wanted = path_filter(self._below(filesystem, path, params.glob)) if params.glob is not None else None
            found = filesystem.glob(pattern, path=path)
        except ValueError as error:
            raise ToolValidationError(f"the pattern cannot be used: {error}") from None
        skip = len(path) + 1 if path else 0
        ignored = _read_ignored(filesystem, path, pattern)
        paths = [
            escape_path(match.path) + ("" if match.is_file or not is_directory(filesystem, match.path) else "/")
            for match in found
            if (wanted is None or wanted(match.path[skip:]))
            and not ignored.has(match.path, is_directory=not match.is_file)
        ]
        kept = count_fitting_lines(paths[:MAX_LISTED])
        value = FoundPaths(format_path(path), params.pattern, tuple(paths[:kept]), left_out=len(paths) - kept)
        message = f"{format_count(len(paths), 'path')} below {format_path(path)} for {escape_text(params.pattern)}"
        message += "" if paths else _explain_braces(params.pattern, params.glob)
        return ToolResult.ok(value, message + ignored.describe())

    def grep(self, params: Grep, *, context: ToolContext) -> ToolResult[FoundLines]:
        filesystem, path = self._open(context, params.path)
        if params.glob is not None:
            params = replace(params, glob=self._below(filesystem, path, params.glob))
        try:
            with explain_errors(filesystem, path):
                check_size(filesystem, path)
                ignored = _read_ignored(filesystem, path, params.glob)
                found, all_found = _grep(filesystem, path, params, ignored)
        except ValueError as error:
            # What a program would say by an argument, a model says in the pattern.
            problem = str(error).replace(LITERALLY, r"what stands between \Q and \E is taken as it is")
            raise ToolValidationError(f"the search cannot be made: {problem}") from None
        lines = [
            FoundLine(escape_path(match.path), match.line_number, _cut_around_match(match))
            for match in found[:MAX_GREP_MATCHES]
        ]
        kept = count_fitting_lines(line.render() for line in lines)
        cut = kept < len(found) or not all_found
        value = FoundLines(format_path(path), params.pattern, tuple(lines[:kept]), cut)
        files = len({line.path for line in value.matches})
        if kept:
            first = "the first " if cut else ""
            message = f"{first}{format_count(kept, 'line')} in {format_count(files, 'file')}"
        else:
            ignored_only = f" but in ignored files, of which there are more than {MAX_SEARCHED:,}," if cut else ""
            message = f"no line{ignored_only} in {format_path(path)}"
        message += f" for {escape_text(params.pattern)}{'' if kept else _explain_braces(params.glob)}"
        return ToolResult.ok(value, message + ignored.describe())

    def _below(self, filesystem: Filesystem, path: str, pattern: str) -> str:
        """A pattern as it is below a directory, where it begins with that directory's own path as a model sees it.
        A "/" stays in front of it, by which a filter knows that it is not for names at any depth."""
        mount = filesystem.root if self._mount_point is None else self._mount_point
        directory = f"{mount.rstrip('/')}/{path}".rstrip("/")
        return pattern.removeprefix(directory) if pattern.startswith(f"{directory}/") else pattern


def _read_ignored(filesystem: Filesystem, path: str, pattern: str | None) -> Ignored:
    from ringfence_tools.ignored import Ignored  # which a server's start does not need

    return Ignored(filesystem, path, pattern)


def _grep(filesystem: Filesystem, path: str, params: Grep, ignored: Ignored) -> tuple[Sequence[GrepMatch], bool]:
    """The lines that are not ignored, one more than is shown where there are more; whether these are all there are."""
    most = MAX_GREP_MATCHES + 1
    while True:
        found = filesystem.grep(params.pattern, path=path, glob=params.glob, max_matches=most)
        asked = [match for match in found if not ignored.has(match.path)]
        if len(found) < most:
            return asked, True
        if len(asked) > MAX_GREP_MATCHES or most >= MAX_SEARCHED:
            return asked, False
        most *= 10


def _explain_braces(*globs: str | None) -> str:
    """What to say of globs that have found nothing, where that may be why."""
    if not any(ALTERNATIVES.search(glob) for glob in globs if glob is not None):
        return ""
    return "; braces are not expanded: call it once for each alternative"


def _cut_around_match(match: GrepMatch) -> str:
    """The line, or of a long one the part around the match."""
    line = match.line_content
    if len(line) <= MAX_MATCH_CHARACTERS:
        return line
    start = max(0, min(match.match_start - MAX_MATCH_CHARACTERS // 4, len(line) - MAX_MATCH_CHARACTERS))
    end = start + MAX_MATCH_CHARACTERS
    return f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
