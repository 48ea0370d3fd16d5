"""What a model's search leaves out unless it names it: git's own data, and what ``.gitignore`` files name."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import Filesystem

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

GIT = ".git"
MAX_RULES = 10_000
"""Of one ``.gitignore``."""
MAX_NAMED = 3
_ALL_BELOW = re.compile(r"/\*\*(/?\s*)$")


_Rules: TypeAlias = "tuple[tuple[int, GitIgnoreSpec | None], ...]"
"""The rules of directories, from the root down; the last that matches decides. Each has the place in a path where names
below its directory begin. Empty where a search goes through everything."""


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
        self._at_top = self._with_own(((0, None),), "")
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
        with suppress(OSError):  # a search, which no policy counts as a read by the model
            found = self._filesystem.grep(r"\S", path=f"{prefix}.gitignore", max_matches=MAX_RULES)
            lines = [match.line_content for match in found]
        if not lines:
            return rules
        from pathspec import GitIgnoreSpec

        own = [pattern for line in lines if (pattern := _pattern(line)) is not None]
        return (*rules, (len(prefix), GitIgnoreSpec(own))) if own else rules


def _ignores(rules: _Rules, path: str, name: str, *, is_directory: bool) -> bool:
    """Whether a path is ignored whose parent is not."""
    if name == GIT:
        return True
    for skip, spec in reversed(rules):
        if spec is None:
            continue
        # re2 takes no surrogates. A rule's text has U+FFFD for such bytes as well.
        below = path[skip:].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        matched = spec.check_file(f"{below}/" if is_directory else below).include
        if matched is not None:
            return matched
    return False


def _pattern(line: str) -> GitIgnoreSpecPattern | None:
    """One line of a ``.gitignore``; None where it matches nothing. Classes such as ``[:alpha:]`` are not supported."""
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    if "[:" in line or "[[" in line:  # pathspec would make a wrong regular expression of it
        return None
    try:
        # What ends with "/**" is what is in a directory, and for pathspec the directory itself as well.
        line = _ALL_BELOW.sub(r"/**/*\1", line.removeprefix("\ufeff").removesuffix("\r"))
        pattern = GitIgnoreSpecPattern(line)
    except (ValueError, re.error):
        return None
    return None if pattern.include is None else pattern
