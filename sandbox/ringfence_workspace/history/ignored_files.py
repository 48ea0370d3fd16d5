"""The paths of a tree that git ignores: by the ignore files of a state of the tree, and git's index."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path

from ringfence.filesystem.ignored import IgnoredPaths, RepositoryRules
from ringfence_workspace.history.commits import BY_PEOPLE, CommitRecord
from ringfence_workspace.history.history_views import LogEntry
from ringfence_workspace.history.store import Store

GIT = ".git"
MAX_BYTES = 1 << 30
MAX_MARK_BYTES = 1 << 16
"""The size above which no file marks its directory as one that ignores itself."""


class Repository:
    """The repository of a tree. Nothing of its configuration is read. A tree without a repository has none."""

    def __init__(self, root: str) -> None:
        self._top, self._git = _found(Path(os.path.realpath(root)))
        base = os.path.relpath(os.path.realpath(root), self._top)
        self.base = "" if base == os.curdir else base
        """The path of the tree in the repository. Empty: it is the repository's root, or has none."""

    @property
    def top(self) -> str:
        """The root of the repository. The tree itself, if it has none."""
        return str(self._top)

    @property
    def outside(self) -> str | None:
        """A directory outside of the tree in which git keeps refs and objects: of a linked worktree, a submodule, or a
        directory of a repository. None: there is none."""
        if self._git is None:
            return None
        tree = Path(self._top, self.base).resolve()
        for place in (self._common(self._git), self._git):
            real = place.resolve()
            if real != tree and tree not in real.parents:
                return str(real)
        return None

    @staticmethod
    def _common(git: Path) -> Path:
        return git / (file_content(git / "commondir") or b".").decode(errors="surrogateescape").strip()

    def ignored(self, read: Callable[[str], bytes | None]) -> IgnoredPaths:
        """Return the ignored paths of the tree. ``read`` returns the bytes of a file of the tree as the run found
        it, or None if there is none."""
        rules = self.rules
        if rules is None:
            return IgnoredPaths(read)
        found = IgnoredPaths(read, repository=replace(rules, tracks=self._tracked(read)))
        return IgnoredPaths(read) if found.has_all else found

    @property
    def rules(self) -> RepositoryRules | None:
        """The rules as they are now. None for a tree without a repository."""
        if self._git is None:
            return None
        excluded = file_content(self._common(self._git) / "info" / "exclude") or b""
        return RepositoryRules(self.base, self._read_above, self._is_in_index, excluded)

    def _read_above(self, path: str) -> bytes | None:
        return file_content(self._top / path)

    def _is_in_index(self, path: str) -> bool:
        return _has(self._index, path)

    def _tracked(self, read: Callable[[str], bytes | None]) -> Callable[[str], bool]:
        """Whether git's index has a path, now or as the run found it: a command may have taken a path out of it."""
        is_in_tree = self._git == self._top / GIT and not self.base

        @cache
        def indexes() -> Sequence[Collection[str] | None]:
            found = read(f"{GIT}/index") if is_in_tree else None
            return (self._index,) if found is None else (self._index, _indexed(found))

        def has_any(path: str) -> bool:
            return any(_has(index, path) for index in indexes())

        return has_any

    @cached_property
    def _index(self) -> Collection[str] | None:
        """The paths in the index. None if it cannot be read: then no path may be taken for ignored."""
        assert self._git is not None, "without a repository nobody asks"
        path = self._git / "index"
        try:
            found = os.stat(path)
        except OSError:
            return () if not os.path.lexists(path) else None
        return _index_of(path, (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@lru_cache(maxsize=2)
def _index_of(path: Path, stamp: tuple[int, ...]) -> Collection[str] | None:
    """The paths in the index that has this stamp. None if it cannot be read."""
    content = file_content(path)
    return None if content is None else _indexed(content)


def _has(index: Collection[str] | None, path: str) -> bool:
    """Whether an index has a path. One that cannot be read may have it."""
    if index is None:
        return True
    return any(one.startswith(path) for one in index) if path.endswith("/") else path in index


@lru_cache(maxsize=2)
def _indexed(content: bytes) -> Collection[str] | None:
    """The paths in an index of these bytes. None if it cannot be read."""
    from dulwich.index import read_index_dict

    try:
        return {os.fsdecode(path) for path in read_index_dict(io.BytesIO(content))}
    except Exception:  # of a format that dulwich does not read
        return None


def _found(root: Path) -> tuple[Path, Path | None]:
    """Return the root of the repository and its directory of data; as git, none of another user above the tree."""
    for top in (root, *root.parents):
        git = top / GIT
        if (link := git_link(git)) is not None:
            git = top / link
        with suppress(OSError):
            if (git / "HEAD").exists() and (top == root or top.stat().st_uid == root.stat().st_uid):
                return top, git
    return root, None


def git_link(path: Path) -> str | None:
    """Return where a file ``.git`` says that git's data are, as in a worktree or a submodule. None: it is no such."""
    content = file_content(path) or b""
    return os.fsdecode(content.removeprefix(b"gitdir: ").strip()) if content.startswith(b"gitdir: ") else None


def file_content(path: Path, most: int = MAX_BYTES) -> bytes | None:
    """Return the bytes of a regular file of the host. None if it has more than ``most``."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size <= most:
                return file.read()
    return None


class IgnoredSince:
    """The ignored paths after a commit: by the ignore files that it has, and what programs left since in new
    directories that ignore themselves."""

    def __init__(self, store: Store, repository: Repository, start: str) -> None:
        self._store = store
        self._ignored = repository.ignored(partial(file_at, store, start))
        self._is_new = cache(partial(is_new_since, store, start))

    def in_step(self, record: CommitRecord) -> IgnoredPaths:
        """The ignored paths of what one commit changed."""
        return self._ignored if _is_typed(record) else self.at(record.commit)

    def at(self, commit: str, records: Iterable[CommitRecord] = ()) -> IgnoredPaths:
        """The ignored paths of what ``records`` changed together, the last of them being ``commit``."""
        typed = cache(partial(typed_paths, self._store, records))
        return self._ignored.made_since(self._is_new, _last_read(self._store, commit), lambda path: path in typed())


class IgnoredInHistory:
    """The ignored paths of the commits of a history. A session has those of its start."""

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._repository = Repository(root)
        self._known: dict[str, IgnoredSince] = {}

    def of(self, record: CommitRecord) -> IgnoredPaths:
        return self._since(record.commit).in_step(record)

    def _since(self, commit: str) -> IgnoredSince:
        start = self._start(self._store.commit(commit))
        if start not in self._known:
            self._known[start] = IgnoredSince(self._store, self._repository, start)
        return self._known[start]

    def _start(self, record: CommitRecord) -> str:
        """The commit whose ignore files count for one."""
        session, named = record.message.info.session_id, record.message.links.session_start
        if named and self._store.has(named):
            return named
        return (session and self._starts.get(session)) or record.parent or record.commit

    @cached_property
    def _starts(self) -> Mapping[str, str]:
        """By session, what was there before it began, of all that the history has."""
        records = [*self._store.commits()]
        return {record.message.info.session_id: record.parent or record.commit for record in records}

    def without(self, entry: LogEntry) -> LogEntry:
        if entry.kind == "baseline":
            return entry
        ignored = self.of(self._store.commit(entry.commit))
        hidden = self._among(ignored, entry.paths, entry.commit, entry.commit)
        paths = tuple(path for path in entry.paths if path not in hidden)
        return replace(entry, paths=paths, ignored=len(entry.paths) - len(paths))

    def among(self, paths: Iterable[str], commit: str, now: str) -> Set[str]:
        """Return which of the paths are ignored by the rules for a commit. They are of ``now``, or of before it."""
        return self._among(self._since(commit).at(now), paths, commit, now)

    def _among(self, ignored: IgnoredPaths, paths: Iterable[str], commit: str, now: str) -> Set[str]:
        states, before = self._store.states, self._store.commit(commit).parent

        def is_hidden(path: str) -> bool:
            if ignored.has(path) or not ignored.has(path, is_directory=True):
                return ignored.has(path)
            found = (states.entry(one, path) for one in (now, before) if one is not None)
            return {entry.kind for entry in found if entry is not None} == {"directory"}

        return {path for path in paths if is_hidden(path)}


def _is_typed(record: CommitRecord) -> bool:
    """Whether file tools made a commit, and no program, person or undo."""
    info = record.message.info
    return info.kind in ("step", "aborted") and not info.opaque and info.tool not in BY_PEOPLE


def typed_paths(store: Store, records: Iterable[CommitRecord]) -> Set[str]:
    """Return the paths that file tools changed."""
    return {path for record in records if _is_typed(record) for path in store.step_of(record).paths}


def is_new_since(store: Store, commit: str, path: str) -> bool:
    """Whether nothing was at a path at a commit: no directory, no file and no link."""
    return store.states.entry(commit, path) is None


def _last_read(store: Store, commit: str) -> Callable[[str], bytes | None]:
    """Read files at a commit; of a directory that it removed, as they were before."""
    before = store.commit(commit).parent

    def read(path: str) -> bytes | None:
        is_gone = before is not None and store.states.folder(commit, path.rpartition("/")[0]) is None
        return file_at(store, before if is_gone and before is not None else commit, path)

    return read


def on_disk(root: str, path: str) -> bytes | None:
    """Return the bytes of a file that may mark its directory as one that ignores itself. None for a link, which git
    does not follow."""
    place = Path(root) / path
    return None if place.is_symlink() else file_content(place, MAX_MARK_BYTES)


def file_at(store: Store, commit: str, path: str) -> bytes | None:
    """Return the bytes of a file at a commit. None for a path that is no file, or that the commit does not know."""
    entry = store.states.entry(commit, path)
    return store.states.content(entry.oid) if entry is not None and entry.kind == "file" and entry.oid else None
