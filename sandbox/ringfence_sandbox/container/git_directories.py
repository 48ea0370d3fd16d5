"""Git's directories outside of a workspace, without which no git command works in its container.

A linked worktree, a submodule and a clone with a separate directory have a file ``.git`` that names git's directory. A
shared clone names the objects that it borrows. The container has these directories where the names lead in it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ringfence.escapes import escape_path
from ringfence.filesystem.hidden import HEAD_BYTES, HiddenFiles
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_workspace.history.ignored_files import GIT, Repository, file_content, git_link

_SYSTEM = frozenset("bin dev etc lib lib32 lib64 libx32 proc run sbin sys usr".split()) | {WORKSPACE.strip("/")}
"""Directories of a container in which nothing of the host is shown."""
_PARENTS = frozenset("boot home media mnt node_modules opt root srv tmp var".split())
"""Directories of a container in which something of the host can be, and that it does not replace."""
_MAX_ALTERNATES = 32
_OF_FILES = frozenset(
    "autocrlf bare eol filemode ignorecase precomposeunicode repositoryformatversion symlinks".split()
)
"""The settings of a submodule that a container gets: how files are compared, and nothing of remotes."""


class Shown(NamedTuple):
    """A directory of git's, and its path in the container."""

    source: str
    target: str
    name: str
    """The path that it would have in an ordinary workspace, by which files are hidden."""


class Cover(NamedTuple):
    """A path of the container that shows something else than the host has there."""

    target: str
    is_directory: bool = False
    content: str = ""


class _NotShownError(Exception):
    """A directory of git's that the container cannot have."""


@dataclass(frozen=True, slots=True)
class GitDirectories:
    """The directories of git that a workspace needs and does not contain."""

    shown: tuple[Shown, ...] = ()
    config: Cover | None = None
    """The settings of a submodule. Git's own name a directory of files that the container has elsewhere."""
    problem: str = ""
    """Why no git command works in the container. Empty: nothing is known to be wrong."""

    @classmethod
    def of(
        cls, root: str, rule: HiddenFiles | None = None, *, copied_from: str | os.PathLike[str] | None = None
    ) -> GitDirectories:
        """Find the directories of the workspace ``root``, unless ``rule`` hides its ``.git``. A copy is in no
        repository: what it was ``copied_from`` may be."""
        if rule is not None and (rule.hides(GIT) or rule.hides(GIT, is_directory=True)):
            return cls()
        git = Path(root, GIT)
        link = os.readlink(git) if git.is_symlink() else git_link(git)
        if link is None and not os.path.lexists(git / "HEAD"):
            repository = Repository(root if copied_from is None else os.fspath(copied_from))
            where = f"DIR is in the repository {escape_path(repository.top)}: give that as DIR, or do without git"
            return cls(problem=f"no git command works in the container: {where}" if repository.base else "")
        try:
            return cls._found(root, link or GIT)
        except (_NotShownError, OSError, ValueError) as error:
            return cls(problem=f"git commands fail in the container: {error}")

    @classmethod
    def _found(cls, root: str, link: str) -> GitDirectories:
        own = _MappedPath(root, WORKSPACE)
        git = own.at(link)
        shared = file_content(Path(git.host, "commondir"))
        common = git if shared is None else git.at(os.fsdecode(shared).strip())
        if not os.path.lexists(os.path.join(git.host, "HEAD")) or not _has(common.host, "objects", "refs"):
            raise _NotShownError(f"DIR/.git leads to {escape_path(git.host)}, which is no directory of git's")
        wanted = [Shown(*common, GIT), Shown(*git, GIT)]
        wanted += [Shown(*place, f"{GIT}/objects") for place in _alternates(common.at("objects"))]
        shown: list[Shown] = []
        for one in wanted:
            if not any(_contains(above, one) for above in (Shown(*own, ""), *shown)):
                _check(one, root)
                shown.append(one)
        config = _without_worktree(common) if shared is None and shown and shown[0].target == common.inside else None
        return cls(tuple(shown), config)

    def within(self, places: Collection[str]) -> GitDirectories:
        """Those of the directories that can be mounted."""
        return replace(self, shown=tuple(one for one in self.shown if one.source in places))

    def covers(self, rule: HiddenFiles | None) -> Sequence[Cover]:
        """What is shown otherwise than it is: files that ``rule`` would hide in an ordinary workspace, and `config`."""
        found = [] if rule is None else [cover for one in self.shown for cover in _hidden_in(one, rule)]
        if self.config is not None and not any(_is_in(self.config.target, one.target) for one in found):
            found += [self.config] * any(_is_in(self.config.target, one.target) for one in self.shown)
        return found


NO_GIT = GitDirectories()


class _MappedPath(NamedTuple):
    """A path on the host, and where the container looks for the same."""

    host: str
    inside: str

    def at(self, path: str) -> _MappedPath:
        return _MappedPath(
            os.path.realpath(os.path.join(self.host, path)), os.path.normpath(os.path.join(self.inside, path))
        )


def _is_in(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def _has(directory: str, *names: str) -> bool:
    return all(os.path.isdir(os.path.join(directory, name)) for name in names)


def _alternates(objects: _MappedPath) -> Sequence[_MappedPath]:
    """The directories of objects that one borrows from, also indirectly."""
    found: list[_MappedPath] = []
    waiting = [objects]
    while waiting and len(found) <= _MAX_ALTERNATES:
        place = waiting.pop(0)
        for line in (file_content(Path(place.host, "info", "alternates")) or b"").splitlines():
            other = place.at(os.fsdecode(line))
            if not line or line.startswith(b"#") or other in found or not os.path.isdir(other.host):
                continue  # git goes on without one that is gone
            if os.path.basename(other.host) != "objects" or not _has(other.host, "info", "pack"):
                raise _NotShownError(f"objects are borrowed from {escape_path(other.host)}, which has none of git's")
            found.append(other)
            waiting.append(other)
    return found


def _contains(above: Shown, one: Shown) -> bool:
    """Whether what is shown ``above`` has ``one`` where it is looked for."""
    inside = os.path.relpath(one.target, above.target)
    return inside.split("/")[0] != os.pardir and os.path.realpath(os.path.join(above.source, inside)) == one.source


def _check(one: Shown, root: str) -> None:
    where = escape_path(one.source)
    parts = one.target.strip("/").split("/")
    if parts[0] in _SYSTEM or (len(parts) == 1 and parts[0] in {*_PARENTS, ""}):
        raise _NotShownError(f"{where} would be at {escape_path(one.target)}, which is the container's own")
    if _is_in(one.source, root):
        raise _NotShownError(f"{where} is in DIR, and git's files name it by an absolute path")
    if _is_in(root, one.source):
        raise _NotShownError(f"{where}, which is git's own, contains DIR")
    if os.stat(one.source).st_uid != os.stat(root).st_uid:
        raise _NotShownError(f"{where} belongs to another user than DIR")
    try:
        f"{one.source}{one.target}".encode()
    except UnicodeEncodeError:
        raise _NotShownError(f"the name of {where} is not UTF-8") from None


def _without_worktree(common: _MappedPath) -> Cover | None:
    """The settings that say how files are compared, if git's own name the directory of files."""
    from dulwich.config import ConfigFile

    settings = ConfigFile.from_file(io.BytesIO(file_content(Path(common.host, "config")) or b""))
    if not settings.has_section((b"core",)) or b"worktree" not in settings[b"core",]:
        return None
    kept = ConfigFile()
    for section in settings.sections():
        for name, value in settings.items(section):
            if section == (b"extensions",) or (section == (b"core",) and name.decode().lower() in _OF_FILES):
                kept.set(section, name, value)
    written = io.BytesIO()
    kept.write_to_file(written)
    return Cover(f"{common.inside}/config", content=written.getvalue().decode())


def _hidden_in(one: Shown, rule: HiddenFiles) -> Iterator[Cover]:
    if rule.hides(one.name, is_directory=True):
        yield Cover(one.target, is_directory=True)
    if one.name != GIT:  # of objects git gives all names itself
        return
    for place, directories, files in os.walk(one.source):
        below = os.path.relpath(place, one.source)
        for name in [*directories, *files]:
            path, is_directory = os.path.normpath(os.path.join(below, name)), name in directories
            head = partial(_head, os.path.join(place, name))
            if rule.hides(f"{one.name}/{path}", head, is_directory=is_directory):
                yield Cover(f"{one.target}/{path}", is_directory)
                directories[:] = [other for other in directories if other != name]
        if below == os.curdir:
            directories[:] = [name for name in directories if name != "objects"]


def _head(path: str) -> bytes:
    return (file_content(Path(path)) or b"")[:HEAD_BYTES]
