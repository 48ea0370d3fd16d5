"""The paths that git ignores, by the rules of gitignore(5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ringfence.filesystem.paths import directories_above
from ringfence.filesystem.search import compiled_glob
from ringfence.participants import Change

IGNORE_FILE = ".gitignore"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a ``.gitignore``."""

    matches: Callable[[str], object]
    for_names: bool
    """Whether it matches a name alone, and not the path below the directory of its file."""
    ignores: bool
    directories_only: bool


Rules: TypeAlias = tuple[tuple[int, tuple[Rule, ...]], ...]
"""The rules of directories, from the root down; the last that matches decides. Each with the place in a path where
names below its directory begin. The rules of one directory are in reverse order."""


def is_ignored(rules: Rules, path: str, name: str, *, is_directory: bool) -> bool:
    """Whether a path is ignored. Its parent must not be."""
    for skip, own in reversed(rules):
        for rule in own:
            if (is_directory or not rule.directories_only) and rule.matches(name if rule.for_names else path[skip:]):
                return rule.ignores
    return False


def parse_rules(content: bytes) -> tuple[Rule, ...]:
    """Return the rules of an ignore file, the last one first."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    return tuple(rule for line in reversed(lines) if line.strip() and (rule := _parse_rule(line)) is not None)


def _parse_rule(line: str) -> Rule | None:
    """Parse a line as gitignore(5) says. Return None for a comment or a line that matches nothing."""
    line = line.removeprefix("\ufeff").removesuffix("\r")
    if line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    pattern = _strip_spaces(line if ignores else line[1:])
    if pattern.startswith(("\\#", "\\!")):
        pattern = pattern[1:]
    bare = pattern.removesuffix("/")
    try:
        matches = compiled_glob(bare.replace("[^", "[!")).matches
    except ValueError:
        return None
    return Rule(matches, "/" not in bare, ignores, directories_only=bare != pattern)


def _strip_spaces(pattern: str) -> str:
    """Strip the spaces at the end. A space after a backslash stays."""
    stripped = pattern.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(stripped) < len(pattern) else stripped


def _nothing(path: str) -> bool:
    return False


class IgnoredPaths:
    """The paths of a tree that ignore files ignore and git does not track.

    Rules are read when they are first needed, and then kept.
    """

    def __init__(
        self,
        read: Callable[[str], bytes | None],
        *,
        tracks: Callable[[str], bool] = _nothing,
        excluded: bytes = b"",
        base: str = "",
    ) -> None:
        """``read`` returns the bytes of a file of the repository, or None if there is none. ``tracks`` says whether
        git's index has a path. Both get paths from the root of the repository. ``excluded`` has the rules of
        ``.git/info/exclude``. ``base`` is the path of the tree in the repository."""
        self._read = read
        self._tracks = tracks
        self._base = f"{base}/" if base else ""
        first = parse_rules(excluded)
        self._below: dict[str, Rules | None] = {"": self._with_own(((0, first),) if first else (), "")}
        """The rules for what is in a directory. None for an ignored directory."""

    @property
    def has_all(self) -> bool:
        """Whether the tree itself is ignored, such as a project in a home directory that is a repository."""
        return self._rules_in(self._base.rstrip("/")) is None

    def has(self, path: str, *, is_directory: bool = False) -> bool:
        """Whether a path is ignored, and not tracked."""
        if not path:  # the root
            return False
        path = self._base + path
        above, _, name = path.rpartition("/")
        rules = self._rules_in(above)
        return (rules is None or is_ignored(rules, path, name, is_directory=is_directory)) and not self._tracks(path)

    def has_change(self, change: Change) -> bool:
        """Whether a changed path is ignored as what it was and as what it is."""
        versions = [version for version in (change.before, change.after) if version is not None]
        return all(self.has(change.path, is_directory=version.kind == "directory") for version in versions)

    def split(self, changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
        """Return the changes of paths that are not ignored, and those of ignored paths."""
        shown: list[Change] = []
        ignored: list[Change] = []
        for change in changes:
            (ignored if self.has_change(change) else shown).append(change)
        return shown, ignored

    def has_rules_at(self, path: str) -> bool:
        """Whether a path is an ignore file with an effect: no directory above it is ignored."""
        above, _, name = (self._base + path).rpartition("/")
        return name == IGNORE_FILE and self._rules_in(above) is not None

    def _rules_in(self, directory: str) -> Rules | None:
        if directory not in self._below:
            for place in (*reversed([*directories_above(directory)]), directory):
                if place not in self._below:
                    above, _, name = place.rpartition("/")
                    rules = self._below[above]
                    self._below[place] = None if rules is None else self._enter(rules, place, name)
        return self._below[directory]

    def _enter(self, rules: Rules, directory: str, name: str) -> Rules | None:
        """Return the rules in a directory from those in its parent. None: it is ignored."""
        return None if is_ignored(rules, directory, name, is_directory=True) else self._with_own(rules, directory)

    def _with_own(self, rules: Rules, directory: str) -> Rules:
        prefix = f"{directory}/" if directory else ""
        own = parse_rules(self._read(f"{prefix}{IGNORE_FILE}") or b"")
        return (*rules, (len(prefix), own)) if own else rules
