"""The paths that git ignores, by the rules of gitignore(5)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias, runtime_checkable

from ringfence.filesystem.paths import directories_above
from ringfence.filesystem.search import compiled_glob
from ringfence.participants import Change

IGNORE_FILE = ".gitignore"
CACHE_TAG = "CACHEDIR.TAG"
"""The name of the file that marks a directory as a cache."""
CACHE_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
"""The beginning of that file, by its specification."""


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """One line of a ``.gitignore``."""

    matches: Callable[[str], object]
    for_names: bool
    """Whether it matches a name alone, and not the path below the directory of its file."""
    ignores: bool
    directories_only: bool


Rules: TypeAlias = tuple[tuple[int, tuple[IgnoreRule, ...]], ...]
"""The rules of directories, from the root down; the last that matches decides. Each with the place in a path where
names below its directory begin. The rules of one directory are in reverse order."""


def is_ignored(rules: Rules, path: str, name: str, *, is_directory: bool) -> bool:
    """Whether a path is ignored. Its parent must not be."""
    for skip, own in reversed(rules):
        for rule in own:
            if (is_directory or not rule.directories_only) and rule.matches(name if rule.for_names else path[skip:]):
                return rule.ignores
    return False


def parse_rules(content: bytes) -> tuple[IgnoreRule, ...]:
    """Return the rules of an ignore file, the last one first."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    return tuple(rule for line in reversed(lines) if line.strip() and (rule := _parse_rule(line)) is not None)


def _parse_rule(line: str) -> IgnoreRule | None:
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
    return IgnoreRule(matches, "/" not in bare, ignores, directories_only=bare != pattern)


def _strip_spaces(pattern: str) -> str:
    """Strip the spaces at the end. A space after a backslash stays."""
    stripped = pattern.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(stripped) < len(pattern) else stripped


@dataclass(frozen=True, slots=True)
class RepositoryRules:
    """What git ignores and tracks in the repository of a tree, besides the ignore files of the tree."""

    base: str
    """The path of the tree in the repository."""
    read_above: Callable[[str], bytes | None]
    """Returns the bytes of a file of the repository, or None if there is none."""
    tracks: Callable[[str], bool]
    """Whether git's index has a path of the repository, or any path in a directory whose name ends with a "/"."""
    excluded: bytes
    """The rules of ``.git/info/exclude``."""


@runtime_checkable
class InRepository(Protocol):
    """The optional protocol of a filesystem whose tree is in a git repository."""

    @property
    def repository_rules(self) -> RepositoryRules | None:
        """None: it is in none."""
        ...


def ignores_itself(directory: str, read: Callable[[str], bytes | None]) -> bool:
    """Whether a directory ignores all that is in it, as those of pytest, mypy, Ruff and venv do.

    It has an ignore file whose one rule is ``*``, or the tag of a cache. ``read`` returns the bytes of a file, or None
    if there is none.
    """
    lines = (read(f"{directory}/{IGNORE_FILE}") or b"").split(b"\n")
    if [line.strip() for line in lines if line.strip() and not line.startswith(b"#")] == [b"*"]:
        return True
    return (read(f"{directory}/{CACHE_TAG}") or b"").startswith(CACHE_SIGNATURE)


def _nothing(path: str) -> bool:
    return False


def _no_file(path: str) -> None:
    return None


class IgnoredPaths:
    """The paths of a tree that ignore files ignore and git does not track.

    Rules are read when they are first needed, and then kept. With `made_since`, they also are what programs left in
    directories that are new and ignore themselves.
    """

    def __init__(
        self,
        read: Callable[[str], bytes | None],
        *,
        repository: RepositoryRules | None = None,
    ) -> None:
        """``read`` returns the bytes of a file of the tree, or None if there is none."""
        self._read_tree = read
        self._read_above = _no_file if repository is None else repository.read_above
        self._tracks = _nothing if repository is None else repository.tracks
        excluded, base = (b"", "") if repository is None else (repository.excluded, repository.base)
        self._is_new_cache: Callable[[str], bool] = _nothing
        self._is_typed: Callable[[str], bool] = _nothing
        self._base = f"{base}/" if base else ""
        first = parse_rules(excluded)
        self._below: dict[str, Rules | None] = {"": self._with_own(((0, first),) if first else (), "")}
        """The rules for what is in a directory. None for an ignored directory."""

    @property
    def has_all(self) -> bool:
        """Whether the tree itself is ignored, such as a project in a home directory that is a repository."""
        return self._rules_in(self._base.rstrip("/")) is None

    def made_since(
        self,
        is_new: Callable[[str], bool],
        read: Callable[[str], bytes | None],
        is_typed: Callable[[str], bool] = _nothing,
    ) -> IgnoredPaths:
        """Return these paths with what programs left in directories that are new and ignore themselves.

        ``is_new`` says whether nothing was at a path when the ignore files were read. ``read`` returns the bytes
        of a file as it is later. ``is_typed`` says whether a file tool has written a path since: it is not ignored.
        All of them get paths of the tree.
        """

        def is_new_cache(directory: str) -> bool:
            is_one = is_new(directory) and ignores_itself(directory, read)
            place = self._base + directory
            # A tracked file may have been there that was removed earlier.
            return is_one and not self._tracks(place) and not self._tracks(f"{place}/")

        found = copy.copy(self)
        found._is_new_cache, found._is_typed = is_new_cache, is_typed
        return found

    def of_file_tools(self) -> IgnoredPaths:
        """Return those of these paths that count for the changes of file tools."""
        return self.made_since(_nothing, _no_file)

    def new_cache(self, path: str) -> str | None:
        """Return the directory of a path, or above it, that is new and ignores itself; None if there is none."""
        return next(self._new_caches(path, True, self._is_new_cache), None)

    def _new_caches(self, path: str, is_directory: bool, is_new_cache: Callable[[str], bool]) -> Iterator[str]:
        # A file or a link that gave way to such a directory, or took its place, is no part of it.
        own = (path,) if is_directory else ()
        return (place for place in (*reversed([*directories_above(path)]), *own) if place and is_new_cache(place))

    def has(self, path: str, *, is_directory: bool = False) -> bool:
        """Whether a path is ignored, and not tracked."""
        return self._has(path, is_directory, self._is_new_cache)

    def _has(self, path: str, is_directory: bool, is_new_cache: Callable[[str], bool]) -> bool:
        if not path:  # the root
            return False
        if any(self._new_caches(path, is_directory, is_new_cache)) and not self._is_typed(path):
            return True
        path = self._base + path
        above, _, name = path.rpartition("/")
        rules = self._rules_in(above)
        return (rules is None or is_ignored(rules, path, name, is_directory=is_directory)) and not self._tracks(path)

    def split(self, changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
        """Return the changes of paths that are not ignored, and those of ignored paths.

        A path is ignored as what it was and as what it is."""
        shown: list[Change] = []
        ignored: list[Change] = []
        # One directory has thousands of changes, and is looked at once.
        is_new_cache = cache(self._is_new_cache)
        for change in changes:
            kinds = {version.kind == "directory" for version in (change.before, change.after) if version is not None}
            is_ignored_one = all(self._has(change.path, is_directory, is_new_cache) for is_directory in kinds)
            (ignored if is_ignored_one else shown).append(change)
        return shown, ignored

    def has_rules_at(self, path: str) -> bool:
        """Whether a path is an ignore file with an effect: no directory above it was ignored."""
        above, _, name = (self._base + path).rpartition("/")
        return name == IGNORE_FILE and self._rules_in(above) is not None

    def _read(self, path: str) -> bytes | None:
        inside = path.startswith(self._base)
        return self._read_tree(path[len(self._base) :]) if inside else self._read_above(path)

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
