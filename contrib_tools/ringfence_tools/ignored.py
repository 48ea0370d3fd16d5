"""What a model's search leaves out unless it names it: git's own data, and what ``.gitignore`` files name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import Filesystem
from ringfence.filesystem.search import compiled_glob

GIT = ".git"
MAX_RULES = 10_000
"""Of one ``.gitignore``."""
MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of a ``.gitignore``."""

    matches: Callable[[str], object]
    of_name: bool
    """Whether it is asked about a name alone, and not about the path below the directory of its file."""
    ignores: bool
    directories_only: bool


_Rules: TypeAlias = tuple[tuple[int, tuple[_Rule, ...]], ...]
"""The rules of directories, from the root down; the last that matches decides. Each with the place in a path where
names below its directory begin. Empty where a search goes through everything."""


class Ignored:
    """What git ignores below one directory, for one search.

    A directory that is ignored and named, by the path that is searched or by a segment of the pattern, is searched
    whole, without git's own data in it. Rules are read from the filesystem, in the directories that have matches.
    """

    def __init__(self, filesystem: Filesystem, top: str, pattern: str | None) -> None:
        self._filesystem = filesystem
        self._named = frozenset((pattern or "").split("/"))
        self._skip = len(top) + 1 if top else 0
        self._below: dict[str, _Rules | None] = {}
        self._left_out: dict[str, None] = {}
        self._at_top = self._with_own(((0, ()),), "")
        directory = ""
        for name in top.split("/") if top else ():
            directory = f"{directory}/{name}" if directory else name
            ignored = _ignores(self._at_top, directory, name, is_directory=True)
            self._at_top = () if ignored else self._with_own(self._at_top, directory)

    def has(self, path: str, *, is_directory: bool = False) -> bool:
        """Whether a path below the top is left out."""
        rules, start = self._at_top, self._skip
        while (end := path.find("/", start)) != -1:
            directory = path[:end]
            if directory not in self._below:
                self._below[directory] = self._entered(rules, directory, path[start:end])
            below = self._below[directory]
            if below is None:
                return True
            rules, start = below, end + 1
        name = path[start:]
        if not name or name in self._named or not _ignores(rules, path, name, is_directory=is_directory):
            return False
        self._note(path, name)
        return True

    def describe(self) -> str:
        """Name what was left out, for the model; empty if that was nothing but git's own data."""
        if not self._left_out:
            return ""
        names = ", ".join(escape_path(path) for path in list(self._left_out)[:MAX_NAMED])
        more = len(self._left_out) - MAX_NAMED
        others = f" and {more:,} more" if more > 0 else ""
        return f"; left out, as git ignores them: {names}{others} (name one in path to look there)"

    def _entered(self, rules: _Rules, directory: str, name: str) -> _Rules | None:
        """The rules for what is in a directory; None where all of it is left out."""
        if not _ignores(rules, directory, name, is_directory=True):
            return self._with_own(rules, directory)
        if name in self._named:
            return ()
        self._note(directory, name)
        return None

    def _note(self, path: str, name: str) -> None:
        if name != GIT:  # which everybody expects
            self._left_out[path] = None

    def _with_own(self, rules: _Rules, directory: str) -> _Rules:
        if not rules:
            return rules
        prefix = f"{directory}/" if directory else ""
        lines: list[str] = []
        with suppress(OSError):  # as a search, since a model has not read a file whose rules were looked at
            found = self._filesystem.grep(r"\S", path=f"{prefix}.gitignore", max_matches=MAX_RULES)
            lines = [match.line_content for match in found]
        own = tuple(rule for line in reversed(lines) if (rule := _rule(line)) is not None)
        return (*rules, (len(prefix), own)) if own else rules


def _ignores(rules: _Rules, path: str, name: str, *, is_directory: bool) -> bool:
    """Whether a path is ignored whose parent is not."""
    if name == GIT:
        return True
    for skip, own in reversed(rules):
        below = path[skip:]
        for rule in own:
            if (is_directory or not rule.directories_only) and rule.matches(name if rule.of_name else below):
                return rule.ignores
    return False


def _rule(line: str) -> _Rule | None:
    """As gitignore(5) has it; None for a comment, and for a line that matches nothing."""
    line = line.removeprefix("\ufeff").removesuffix("\r")
    if line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    pattern = _without_ending_spaces(line if ignores else line[1:])
    if pattern.startswith(("\\#", "\\!")):
        pattern = pattern[1:]
    directories_only = pattern.endswith("/")
    pattern = pattern.removesuffix("/")
    try:
        glob = compiled_glob(pattern.replace("[^", "[!"))
    except ValueError:
        return None
    of_name = "/" not in pattern
    return _Rule(glob.matches, of_name, ignores, directories_only)


def _without_ending_spaces(pattern: str) -> str:
    """Without the spaces at its end, but for one that a backslash keeps."""
    stripped = pattern.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(stripped) < len(pattern) else stripped
