"""The copy of a tree that a fork begins with: reflinks where the filesystem has them, else bytes, and never an inode.

The tree is walked by directory descriptors, so that no link is followed, whoever exchanges what meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ringfence_workspace.forks.file_copy import copy_steadily, has_same_owner_and_mode
from ringfence_workspace.forks.shared_directories import SHARED
from ringfence_workspace.history.entries import Entry, Meta, blob_id
from ringfence_workspace.history.stat_cache import Stamp, stamp_of
from ringfence_workspace.history.steady_reads import closing, open_at
from ringfence_workspace.tree.extended_attributes import attributes_of, give_attributes
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE, is_linked_worktree
from ringfence_workspace.tree.new_files import create, give, make, make_directory, make_symlink

MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

IsLeftOut = Callable[[int, str, str, os.stat_result], str | None]
"""Why something is left out: the descriptor of its directory, its name there, its path, and its status. Of what is
`SHARED` the copy has an empty directory."""


class EarlierState(NamedTuple):
    """What of the tree is to be as an earlier commit has it, instead of as it is."""

    entries: Mapping[str, Entry | None]
    content: Callable[[str], bytes]
    """The bytes of an object id."""


@dataclass(slots=True)
class CopiedTree:
    """What a copy is, beside the commit that its source is."""

    stamps: dict[str, dict[str, Stamp]] = field(default_factory=dict[str, "dict[str, Stamp]"])
    """By directory and name, of all that is certainly as the commit has it."""
    attributes: dict[str, dict[str, bytes]] = field(default_factory=dict[str, "dict[str, bytes]"])
    changes: dict[str, Entry | None] = field(default_factory=dict[str, "Entry | None"])
    """What differs from the commit because it is a copy: link numbers, links that were rewritten, owners."""
    contents: list[bytes] = field(default_factory=list[bytes])
    """The targets of the links that were rewritten."""
    files: list[str] = field(default_factory=list[str])
    unsure: list[str] = field(default_factory=list[str])
    """The copied files and links that may not be as the commit has them: somebody may have changed them meanwhile."""
    unsure_directories: list[str] = field(default_factory=list[str])
    """The directories from which somebody may have taken something meanwhile."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """By path why it is not in the copy."""
    rewritten: list[str] = field(default_factory=list[str])
    """The absolute symlinks into the source, which lead into the copy now."""


class TreeCopy:
    """Copies the tree at ``source`` into the empty directory ``target``, which nobody else knows yet."""

    def __init__(
        self,
        source: int,
        target: int,
        *,
        known: Mapping[str, Mapping[str, Stamp]],
        entry: Callable[[str], Entry | None],
        is_left_out: IsLeftOut,
        moved: tuple[str, str],
        earlier: EarlierState,
    ) -> None:
        """``known`` has the stamps of what is as the newest commit has it, ``entry`` what the commit of the copy has at
        a path. ``moved`` are the paths of the source and of the copy."""
        self.made = CopiedTree()
        self._source = source
        self._target = target
        self._known = known
        self._entry = entry
        self._is_left_out = is_left_out
        self._moved = moved
        self._earlier = earlier
        self._added: dict[str, list[str]] = {}
        for path in earlier.entries:
            if path:
                above, _, name = path.rpartition("/")
                self._added.setdefault(above, []).append(name)
        self._device = os.fstat(source).st_dev
        self._links: dict[tuple[int, int], list[str]] = {}
        """The copied names of each file of several."""
        self._made_links: dict[tuple[int, str | None], list[str]] = {}
        """The same of what is made from an earlier state."""

    def copy(self) -> CopiedTree:
        """Copy everything. Raises OSError where the root cannot be read, or the copy not be written."""
        self._directory(self._source, self._target, "", os.fstat(self._source))
        for paths in (*self._links.values(), *self._made_links.values()):
            self._number(paths)
        return self.made

    # -- directories

    def _directory(self, source: int | None, target: int, path: str, status: os.stat_result | None) -> None:
        """Fill the directory ``target``. ``source`` is what it is a copy of; None: an earlier state."""
        prefix = f"{path}/" if path else ""
        entries, added = self._earlier.entries, self._added.get(path, ())
        known = self._known.get(path, {})
        stamps: dict[str, Stamp] = {}
        for name in () if source is None else os.listdir(source):
            if added and prefix + name in entries:
                continue
            assert source is not None
            try:
                now = os.lstat(name, dir_fd=source)
            except FileNotFoundError:
                continue
            self._one(source, target, name, prefix + name, now, known.get(name), stamps)
        for name in added:
            self._make(source, target, name, prefix + name, stamps)
        self.made.stamps[path] = stamps
        self._finish(source, target, path, status, known.get(""), stamps)

    def _finish(
        self,
        source: int | None,
        target: int,
        path: str,
        status: os.stat_result | None,
        known: Stamp | None,
        stamps: dict[str, Stamp],
    ) -> None:
        """Give a directory what it has of bits, owner, time and attributes, now that nothing comes into it any more."""
        wanted = self._earlier.entries.get(path)
        if wanted is not None:
            meta = wanted.meta
        else:
            assert status is not None, "it is a copy"
            meta = Meta.of(status)
        attributes = attributes_of(source) if source is not None else {}
        if attributes:
            with suppress(OSError):
                give_attributes(target, attributes)
            self.made.attributes[path] = attributes
        given = meta if path else meta._replace(mode=0o700)
        self._give_directory(target, given)
        if not path:  # it is renamed, which changes its stamp
            self.made.unsure_directories.append(path)
            self.made.changes[path] = Entry("directory", Meta.of(os.fstat(target)))
            return
        self._check_owner(path, meta, os.fstat(target))
        if wanted is not None or (status is not None and known == stamp_of(status)):
            stamps[""] = stamp_of(os.fstat(target))
        else:
            self.made.unsure_directories.append(path)

    def _give_directory(self, target: int, meta: Meta) -> None:
        found = os.fstat(target)
        if (found.st_uid, found.st_gid) != (meta.uid, meta.gid):
            with suppress(PermissionError):
                os.fchown(target, meta.uid, meta.gid)
        if stat.S_IMODE(os.fstat(target).st_mode) != meta.mode:
            os.fchmod(target, meta.mode)
        os.utime(target, ns=(found.st_atime_ns, meta.mtime_ns))

    def _check_owner(self, path: str, meta: Meta, made: os.stat_result) -> None:
        """Note what could not be given to its owner."""
        if (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (meta.uid, meta.gid, meta.mode):
            return
        entry = self.made.changes.get(path) or self._entry(path)
        if entry is not None and (entry.kind != "symlink" or (made.st_uid, made.st_gid) != (meta.uid, meta.gid)):
            own = Meta.of(made)
            self.made.changes[path] = entry._replace(meta=own._replace(link=entry.meta.link))

    # -- what is there

    def _one(
        self,
        source: int,
        target: int,
        name: str,
        path: str,
        now: os.stat_result,
        known: Stamp | None,
        stamps: dict[str, Stamp],
    ) -> None:
        why = self._is_left_out(source, name, path, now)
        if why is not None:
            self.made.left_out[path] = why
            if why == SHARED:
                self._empty_directory(target, name, path, now)
        elif stat.S_ISDIR(now.st_mode):
            self._subdirectory(source, target, name, path)
        elif stat.S_ISREG(now.st_mode) or stat.S_ISLNK(now.st_mode):
            self._leaf(source, target, name, path, now, known, stamps)
        else:
            self.made.left_out[path] = "special file"

    def _empty_directory(self, target: int, name: str, path: str, now: os.stat_result) -> None:
        make_directory(target, name)
        with closing(open_at(name, target, _DIRECTORY)) as made:
            self._give_directory(made, Meta.of(now))
            there = os.fstat(made)
        self.made.stamps[path] = {"": stamp_of(there)}
        self.made.changes[path] = Entry("directory", Meta.of(there))

    def _subdirectory(self, source: int, target: int, name: str, path: str) -> None:
        if path.count("/") + 1 >= MAX_DEPTH:
            self.made.left_out[path] = "too deep"
            return
        try:
            descriptor = open_at(name, source, _DIRECTORY)
        except PermissionError:
            self.made.left_out[path] = "unreadable"
            return
        except (FileNotFoundError, NotADirectoryError):
            return
        with closing(descriptor):
            status = os.fstat(descriptor)
            if is_linked_worktree(descriptor):
                self.made.left_out[path] = LINKED_WORKTREE
                return
            make_directory(target, name)
            with closing(open_at(name, target, _DIRECTORY)) as below:
                self._directory(descriptor, below, path, status)

    def _leaf(
        self,
        source: int,
        target: int,
        name: str,
        path: str,
        now: os.stat_result,
        known: Stamp | None,
        stamps: dict[str, Stamp],
    ) -> None:
        """Copy a file or a symlink, or make it another name of one that is copied."""
        others = self._links.setdefault((now.st_dev, now.st_ino), []) if now.st_nlink > 1 else None
        if others:
            os.link(others[0], name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
            if others[0] in self.made.rewritten:  # a link has other names, too
                self._rewritten(path, os.readlink(name, dir_fd=target))
            others.append(path)
            if known is not None and known == stamp_of(now):
                stamps[name] = known
            else:
                self.made.unsure.append(path)
            return
        if stat.S_ISLNK(now.st_mode):
            made = self._symlink(source, target, name, path, now)
        else:
            made = self._file(source, target, name, path)
        if made is None:
            return
        self.made.files.append(path)
        now, there = made
        if known == stamp_of(now):
            stamps[name] = stamp_of(there)
        else:
            self.made.unsure.append(path)
        if others is not None:
            others.append(path)
        if not has_same_owner_and_mode(now, there):
            self._check_owner(path, Meta.of(now), there)

    def _symlink(
        self, source: int, target: int, name: str, path: str, now: os.stat_result
    ) -> tuple[os.stat_result, os.stat_result] | None:
        try:
            leads_to = os.readlink(name, dir_fd=source)
        except OSError:  # it became something else just now
            return None
        moved = self._moved_target(leads_to)
        if moved is not None:
            leads_to = moved
            self._rewritten(path, leads_to)
        make_symlink(target, name, os.fsencode(leads_to))
        give(target, name, Meta.of(now))
        return now, os.lstat(name, dir_fd=target)

    def _moved_target(self, leads_to: str) -> str | None:
        """Where a link into the source leads in the copy. None: it does not lead into the source."""
        old, new = self._moved
        return new + leads_to[len(old) :] if leads_to == old or leads_to.startswith(f"{old}/") else None

    def _rewritten(self, path: str, leads_to: str) -> None:
        """Note that the link at a path has another target than the commit says."""
        self.made.rewritten.append(path)
        content = os.fsencode(leads_to)
        self.made.contents.append(content)
        if (entry := self._entry(path)) is not None and entry.kind == "symlink":
            self.made.changes[path] = entry._replace(oid=blob_id(content))

    def _file(self, source: int, target: int, name: str, path: str) -> tuple[os.stat_result, os.stat_result] | None:
        """Copy a file; its status, and that of the copy. None where it is left out."""
        try:
            original = open_at(name, source, _FILE)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO):
                raise
            self.made.left_out[path] = "unreadable"
            return None
        try:
            found = os.fstat(original)
            if not stat.S_ISREG(found.st_mode):
                return None
            descriptor = create(target, name, stat.S_IMODE(found.st_mode))
            try:
                found = copy_steadily(original, descriptor, found)
                return found, self._give_file(original, descriptor, path, found)
            finally:
                os.close(descriptor)
        finally:
            os.close(original)

    def _give_file(self, original: int, descriptor: int, path: str, found: os.stat_result) -> os.stat_result:
        attributes = attributes_of(original)
        os.utime(descriptor, ns=(found.st_atime_ns, found.st_mtime_ns))
        there, mode = os.fstat(descriptor), stat.S_IMODE(found.st_mode)
        if has_same_owner_and_mode(there, found) and not attributes:
            return there
        if (there.st_uid, there.st_gid) != (found.st_uid, found.st_gid):
            try:
                os.fchown(descriptor, found.st_uid, found.st_gid)
            except PermissionError:
                mode &= ~(stat.S_ISUID | stat.S_ISGID)
        if attributes:
            with suppress(OSError):
                give_attributes(descriptor, attributes)
            self.made.attributes[path] = attributes
        os.fchmod(descriptor, mode)
        return os.fstat(descriptor)

    # -- what was there earlier

    def _make(self, source: int | None, target: int, name: str, path: str, stamps: dict[str, Stamp]) -> None:
        """Make what an earlier commit has at a path."""
        entry = self._earlier.entries[path]
        if entry is None:
            return
        if entry.kind == "directory":
            descriptor: int | None = None
            with suppress(FileNotFoundError, NotADirectoryError):
                descriptor = None if source is None else open_at(name, source, _DIRECTORY)
            make_directory(target, name)
            try:
                with closing(open_at(name, target, _DIRECTORY)) as below:
                    self._directory(descriptor, below, path, None)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            return
        assert entry.oid is not None, "a file has an object id"
        others = self._made_links.setdefault((entry.meta.link, entry.oid), []) if entry.meta.link else None
        if others:
            os.link(others[0], name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
            if others[0] in self.made.rewritten:
                self._rewritten(path, os.readlink(name, dir_fd=target))
        else:
            content = self._earlier.content(entry.oid)
            moved = self._moved_target(os.fsdecode(content)) if entry.kind == "symlink" else None
            if moved is not None:
                content = os.fsencode(moved)
                self._rewritten(path, moved)
            make(target, name, entry.kind, content, entry.meta)
            self.made.files.append(path)
        if others is not None:
            others.append(path)
        there = os.lstat(name, dir_fd=target)
        stamps[name] = stamp_of(there)
        self._check_owner(path, entry.meta, there)

    # -- several names of one file

    def _number(self, paths: Sequence[str]) -> None:
        """Give the names of one file the number that it has here, and the stamps of now that all names are made."""
        for path in paths:
            above, _, name = path.rpartition("/")
            with closing(os.open(above or ".", _DIRECTORY, dir_fd=self._target)) as directory:
                there = os.lstat(name, dir_fd=directory)
            stamps = self.made.stamps[above]
            if name not in stamps:
                continue
            stamps[name] = stamp_of(there)
            entry = self.made.changes.get(path) or self._entry(path)
            if entry is not None:
                number = there.st_ino if there.st_nlink > 1 else 0
                self.made.changes[path] = entry._replace(meta=entry.meta._replace(link=number))
