"""The tools ``glob`` and ``grep``. What git ignores is left out of an answer unless it is named.

What git ignores here is what it ignores in the diff of a run: a tracked file never is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path, escape_path, escape_text
from ringfence.filesystem.ignored import IgnoredPaths, InRepository, Rules, is_ignored
from ringfence.filesystem.protocol import MAX_GREP_MATCHES, Filesystem, GrepMatch
from ringfence.filesystem.search import ALTERNATIVES, LITERALLY, path_filter
from ringfence.runtime.context import ToolContext
from ringfence.session.tool_result import ToolResult
from ringfence_tools.handlers import (
    MAX_LISTED,
    PATH_ERRORS,
    FileHandlers,
    check_size,
    count_fitting_lines,
    explain,
    is_directory,
    require_existing,
)
from ringfence_tools.printable import plural

MAX_MATCH_CHARACTERS = 400
"""The most characters of a line that grep found."""
MAX_SEARCHED = 100_000
"""Lines that a search goes through where most of them are ignored."""
GIT = ".git"
WHOLE: Rules = ((0, ()),)
"""The rules of a directory that is searched whole."""
MAX_RULES = 10_000
"""The most rules of one ``.gitignore``."""
MAX_NAMED = 3
"""The most ignored paths that an answer names."""


@dataclass(frozen=True, slots=True)
class GlobParams:
    pattern: str = field(metadata={"description": "*.py (one directory) or **/*.py (any depth); no {}."})
    path: str | None = field(default=None, metadata={"description": "Where the pattern begins."})
    glob: str | None = field(default=None, metadata={"description": "Only names that match, too."})

    def __post_init__(self) -> None:
        if not self.pattern.strip():
            raise ToolValidationError("pattern is blank: **/* finds everything")


@dataclass(frozen=True, slots=True)
class Grep:
    pattern: str = field(metadata={"description": "RE2: no look-around or back-references; \\Q...\\E is literal."})
    path: str | None = field(default=None, metadata={"description": "A directory or file."})
    glob: str | None = field(
        default=None, metadata={"description": "Only such files: *.py (any directory) or src/**/*.py."}
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
    """The line without its newline. A long line is cut around the match."""

    def render(self) -> str:
        return f"{self.path}:{self.line_number}: {self.line}"


@dataclass(frozen=True, slots=True)
class FoundLines:
    path: str
    pattern: str
    matches: tuple[FoundLine, ...]
    cut: bool = False
    """Whether more lines match."""

    def render(self) -> str:
        more = ["[there are more: use a narrower pattern, path or glob]"] if self.cut else []
        return "\n".join((*(match.render() for match in self.matches), *more))


class SearchHandlers(FileHandlers):
    def glob(self, params: GlobParams, *, context: ToolContext) -> ToolResult[FoundPaths]:
        filesystem, path = self._open(context, params.path)
        require_existing(filesystem, path)
        if not is_directory(filesystem, path):
            raise ToolValidationError(f"{display_path(path)} is not a directory: glob looks below one")
        pattern = self._relative_to(filesystem, path, params.pattern)
        try:
            wanted = None if not params.glob else path_filter(self._relative_to(filesystem, path, params.glob))
            found = filesystem.glob(pattern, path=path)
        except ValueError as error:
            raise ToolValidationError(f"the pattern cannot be used: {error}") from None
        skip = len(path) + 1 if path else 0
        ignored = Ignored(filesystem, path, pattern)
        paths = [
            escape_path(match.path) + ("" if match.is_file or not is_directory(filesystem, match.path) else "/")
            for match in found
            if (wanted is None or wanted(match.path[skip:]))
            and not ignored.has(match.path, is_directory=not match.is_file)
        ]
        kept = count_fitting_lines(paths[:MAX_LISTED], context)
        value = FoundPaths(display_path(path), params.pattern, tuple(paths[:kept]), left_out=len(paths) - kept)
        message = f"{plural(len(paths), 'path')} below {display_path(path)} for {escape_text(params.pattern)}"
        message += "" if paths else _explain_braces(params.pattern, params.glob)
        return ToolResult.ok(value, message + ignored.describe())

    def grep(self, params: Grep, *, context: ToolContext) -> ToolResult[FoundLines]:
        filesystem, path = self._open(context, params.path)
        glob = None if not params.glob else self._relative_to(filesystem, path, params.glob)
        check_size(filesystem, path)
        try:
            ignored = Ignored(filesystem, path, glob)
            found, complete = _grep(filesystem, path, params.pattern, glob, ignored)
        except PATH_ERRORS as error:
            raise explain(error, filesystem, path) from None
        except ValueError as error:
            # What a program would say by an argument, a model says in the pattern.
            problem = str(error).replace(LITERALLY, r"what stands between \Q and \E is taken as it is")
            raise ToolValidationError(f"the search cannot be made: {problem}") from None
        lines = [
            FoundLine(escape_path(match.path), match.line_number, _cut_around_match(match))
            for match in found[:MAX_GREP_MATCHES]
        ]
        kept = count_fitting_lines((line.render() for line in lines), context)
        cut = kept < len(found) or not complete
        value = FoundLines(display_path(path), params.pattern, tuple(lines[:kept]), cut)
        if kept:
            files = plural(len({line.path for line in value.matches}), "file")
            message = f"{'the first ' if cut else ''}{plural(kept, 'line')} in {files}"
        else:
            ignored_only = f" but in ignored files, of which there are more than {MAX_SEARCHED:,}," if cut else ""
            message = f"no line{ignored_only} in {value.path}"
        message += f" for {escape_text(params.pattern)}{'' if kept else _explain_braces(params.glob)}"
        return ToolResult.ok(value, message + ignored.describe())

    def _relative_to(self, filesystem: Filesystem, path: str, pattern: str) -> str:
        """A pattern as it is below a directory, where it begins with that directory's own path as a model sees it.
        A "/" stays in front of it, by which a filter knows that it is not for names at any depth."""
        mount = filesystem.root if self._mount_point is None else self._mount_point
        directory = f"{mount.rstrip('/')}/{path}".rstrip("/")
        return pattern.removeprefix(directory) if pattern.startswith(f"{directory}/") else pattern


def _grep(
    filesystem: Filesystem, path: str, pattern: str, glob: str | None, ignored: Ignored
) -> tuple[Sequence[GrepMatch], bool]:
    """The lines that are not ignored, one more than is shown where there are more; whether these are all there are."""
    most = MAX_GREP_MATCHES + 1
    while True:
        found = filesystem.grep(pattern, path=path, glob=glob, max_matches=most)
        kept = [match for match in found if not ignored.has(match.path)]
        if len(found) < most or len(kept) > MAX_GREP_MATCHES or most >= MAX_SEARCHED:
            return kept, len(found) < most
        most *= 10


def _explain_braces(*globs: str | None) -> str:
    """Return a hint for globs with braces that have found nothing; else an empty text."""
    if any(ALTERNATIVES.search(glob or "") for glob in globs):
        return "; braces are not expanded: call it once for each alternative"
    return ""


def _cut_around_match(match: GrepMatch) -> str:
    """Return the line. A long line is cut around the match."""
    line = match.line_content
    if len(line) <= MAX_MATCH_CHARACTERS:
        return line
    start = max(0, min(match.match_start - MAX_MATCH_CHARACTERS // 4, len(line) - MAX_MATCH_CHARACTERS))
    end = start + MAX_MATCH_CHARACTERS
    return f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"


class Ignored(IgnoredPaths):
    """The paths that git ignores below one directory, for one search.

    A directory that is ignored and named, by the path that is searched or by a segment of the pattern, is searched
    whole, without git's own data in it.
    """

    def __init__(self, filesystem: Filesystem, top: str, pattern: str | None) -> None:
        rules = filesystem.repository_rules if isinstance(filesystem, InRepository) else None
        super().__init__(partial(_rules_at, filesystem), repository=rules)
        self._top = f"{top}/"
        self._named = frozenset((pattern or "").split("/"))
        self._left_out: dict[str, None] = {}
        if self.has_all:  # such as a project in a home directory that is a repository
            super().__init__(partial(_rules_at, filesystem))

    def has(self, path: str, *, is_directory: bool = False) -> bool:
        path = self._base + path
        above, _, name = path.rpartition("/")
        rules = self._rules_in(above)
        if rules is not None and (
            self._is_named(path, name) or not _is_left_out(rules, path, name, is_directory=is_directory)
        ):
            return False
        if GIT not in path.split("/") and self._tracks(path):
            return False
        if rules is not None:
            self._left_out[path] = None
        return True

    def describe(self) -> str:
        """Name what was left out, for the model; empty if that was nothing but git's own data."""
        found = (path[len(self._base) :] for path in self._left_out if path.startswith(self._base))
        paths = [escape_path(path) for path in found if path.rpartition("/")[2] != GIT]
        if not paths:
            return ""
        more = f" and {len(paths) - MAX_NAMED:,} more" if len(paths) > MAX_NAMED else ""
        return f"; left out, as git ignores them: {', '.join(paths[:MAX_NAMED])}{more} (name one in path to look there)"

    def _enter(self, rules: Rules, directory: str, name: str) -> Rules | None:
        if not _is_left_out(rules, directory, name, is_directory=True):
            return rules if rules is WHOLE else self._with_own(rules, directory)
        if self._is_named(directory, name):
            return WHOLE
        self._left_out[directory] = None
        return None

    def _is_named(self, path: str, name: str) -> bool:
        in_tree = path.startswith(self._base)
        return in_tree and (name in self._named or self._top.startswith(f"{path[len(self._base) :]}/"))


def _is_left_out(rules: Rules, path: str, name: str, *, is_directory: bool) -> bool:
    return name == GIT or is_ignored(rules, path, name, is_directory=is_directory)


def _rules_at(filesystem: Filesystem, path: str) -> bytes | None:
    """Return the lines of an ignore file by a search: a read would count as the model's own."""
    with suppress(OSError):
        found = filesystem.grep(r"\S", path=path, max_matches=MAX_RULES)
        return "\n".join(match.line_content for match in found).encode("utf-8", "surrogateescape")
    return None
