"""The hold: the directory in the root in which displaced files wait for the end of a call.

It is made with the first change of an opening, emptied at the end of each call, and removed when the workspace is
closed. No path of the workspace can have its name. What is in it has a number, its slot, for a name, but for a
``.gitignore`` that hides it from git. A rollback finds a file there by its inode.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ringfence.escapes import escape_path
from ringfence_workspace.tree.confined import HOLDING_PREFIX, Confined, open_file
from ringfence_workspace.tree.kernel import abilities, failpoint, lstat, open_within, set_mode
from ringfence_workspace.tree.new_files import create, make_directory
from ringfence_workspace.tree.places import state_directory_of
from ringfence_workspace.tree.state import Json, State

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o700
_COPIED_BYTES = 1 << 20
_IGNORE = ".gitignore"
_STORE = "user.ringfence.store"
"""The attribute of a holding directory that names its store, for who opens the root with another one."""

Note = Callable[[Mapping[str, Json]], None]
"""Writes a record to the log."""


@dataclass(frozen=True, slots=True)
class HoldHandle:
    """The open holding directory, if there is one, and how to make one."""

    held: HoldDirectory | None
    make: Callable[[], HoldDirectory]


class HoldDirectory:
    """An open holding directory."""

    def __init__(self, files: Confined, name: str) -> None:
        """FileNotFoundError where it is not there."""
        self.name = name
        self._files = files
        self.descriptor = os.open(name, _OPEN, dir_fd=files.root)
        self.slots = 0
        """How many have been given."""
        self._taken: Set[str] = frozenset()
        """Names that are no slots to be given: those of an earlier process, and what a program has put there."""
        self.displaced: dict[str, tuple[str, State]] = {}
        """By place, the path and the state of a file of the tree when it came here."""
        self.used = False
        """Whether anything may be in it."""

    @classmethod
    def make(cls, files: Confined, note: Note, store: str) -> HoldDirectory:
        """Make one under a new name, which the log has first."""
        name = HOLDING_PREFIX + secrets.token_hex(8)
        with _same_root_times(files, name, note):
            files.reserve(name)
            try:
                make_directory(files.root, name, _MODE)
            except OSError as error:
                files.reserve(name, ends=True)
                code = error.errno or errno.EACCES
                if code not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                words = (
                    f"the root of the workspace cannot be written ({os.strerror(code)}), and what a call replaces "
                    "waits there for its end: give this user the right to write in it"
                )
                raise OSError(code, words) from error
            try:
                made = cls(files, name)
            except OSError:  # too many files are open, say
                os.rmdir(name, dir_fd=files.root)
                files.reserve(name, ends=True)
                raise
            made._hide_from_git()
            with suppress(OSError):  # not every filesystem has such attributes
                os.setxattr(made.descriptor, _STORE, os.fsencode(store))
            return made

    def _hide_from_git(self) -> None:
        # It may have the file, or the disk be full: then git sees it.
        with suppress(OSError), open(create(self.descriptor, _IGNORE), "wb") as file:
            file.write(b"*\n")

    @classmethod
    def found(cls, files: Confined, name: str, last: int) -> HoldDirectory:
        """Open one again. It is made anew if it was removed, or replaced by something else. ``last`` is the greatest
        slot that was given: none is given twice. OSError."""
        _have(files, name)
        found = cls(files, name)
        found.slots = last + 1
        found._go_on()
        return found

    def find_again(self) -> None:
        """Have this one be what `found` finds. OSError."""
        _have(self._files, self.name)
        # Opened anew also where it is the same one: btrfs lists in an open directory only what was in it then.
        descriptor = os.open(self.name, _OPEN, dir_fd=self._files.root)
        os.close(self.descriptor)
        self.descriptor = descriptor
        self._go_on()

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether it is in the root under its name."""
        there = lstat(self._files.root, self.name)
        return there is not None and os.path.samestat(there, os.fstat(self.descriptor))

    def _go_on(self) -> None:
        """Give no slot of which something is there."""
        self.used = True
        self._hide_from_git()
        self._taken = {name.partition(".")[0] for name in os.listdir(self.descriptor)}

    def new_slot(self) -> int:
        """A number for what is made in it, or comes there."""
        while str(self.slots) in self._taken:
            self.slots += 1
        self.slots += 1
        self.used = True
        return self.slots - 1

    def place(self, slot: int) -> str:
        """The path below the root of what is in a slot."""
        return f"{self.name}/{slot}"

    def discard(self, first: int) -> None:
        """Remove the files that are in this slot and those after it, for the room that they take."""
        for slot in range(first, self.slots):
            if self.look(slot) is not None:
                failpoint("unlink")
                with suppress(OSError):
                    os.unlink(str(slot), dir_fd=self.descriptor)

    def inodes(self, *, below: bool = False) -> dict[int, list[str]]:
        """The places of what is directly in it, by inode; of what is ``below`` that, too."""
        found: dict[int, list[str]] = {}
        for place, status in self.entries(below=below):
            found.setdefault(status.st_ino, []).append(place)
        return found

    def written(self) -> dict[str, str]:
        """The displaced files that a program which had them open has written into since: by place, the path of each. A
        change of bytes alone, within a tick of the clock, is not noticed."""
        found: dict[str, str] = {}
        for place, (path, was) in self.displaced.items():
            here = lstat(self.descriptor, place[len(self.name) + 1 :])
            if here is not None and here.st_ino == was.inode and not was.fits(here):
                found[place] = path
        return found

    def look(self, slot: int) -> os.stat_result | None:
        return lstat(self.descriptor, str(slot))

    def new_link(self, place: str) -> int:
        """The slot of another name of what is at a place in the workspace."""
        slot = self.new_slot()
        failpoint("link")
        with self._files.parent(place) as (at, name):
            os.link(name, str(slot), src_dir_fd=at, dst_dir_fd=self.descriptor, follow_symlinks=False)
        return slot

    def keep(self, place: str, directory: str) -> str | None:
        """Copy what is at a place in it, with all that is below, out to a host directory, so that it can be looked at.
        The path of the copy; None where there was nothing."""
        found = self._files.look(place)
        if found is None:
            return None
        failpoint("keep")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        kept = os.path.join(directory, place.removeprefix(HOLDING_PREFIX).replace("/", "-"))
        if stat.S_ISREG(found.st_mode):
            with self._files.parent(place) as (at, name):
                source, _ = open_file(at, name, kept)
            with os.fdopen(source, "rb") as original, open(kept, "wb") as copy:
                shutil.copyfileobj(original, copy, _COPIED_BYTES)
        elif stat.S_ISLNK(found.st_mode):
            with suppress(FileExistsError):
                os.symlink(self._files.read_link(place), kept)
        elif stat.S_ISDIR(found.st_mode):
            root = os.path.realpath(f"/proc/self/fd/{self._files.root}")
            shutil.copytree(os.path.join(root, place), kept, symlinks=True, dirs_exist_ok=True)
        return kept

    def entries(self, *, below: bool = True) -> Iterator[tuple[str, os.stat_result]]:
        """What is held, directories before what is in them: places in the workspace, and what is there."""
        waiting = [self.name] if self.is_in_place else []
        while waiting:
            place = waiting.pop()
            if place == self.name:  # opened anew: btrfs lists in an open directory only what was in it then
                descriptor = os.open(".", _OPEN, dir_fd=self.descriptor)
            else:
                descriptor = self._files.open_directory(place)
            try:
                found = {name: lstat(descriptor, name) for name in os.listdir(descriptor)}
            finally:
                os.close(descriptor)
            for name, status in found.items():
                if status is not None and (place, name) != (self.name, _IGNORE):
                    yield f"{place}/{name}", status
                    if below and stat.S_ISDIR(status.st_mode):
                        waiting.append(f"{place}/{name}")

    def empty(self, *, but: str = _IGNORE) -> list[str]:
        """Remove all that is in it ``but`` one file; in words what would not go."""
        if not self.used:
            return []
        self.used = False
        self.displaced.clear()
        try:
            left = _empty(self.descriptor, but)
        except FileNotFoundError:  # somebody has removed it
            left = []
        except OSError as error:
            left = [str(error)]
        return [_left_words(self.name, left)] if left else []

    def remove(self, note: Note) -> list[str]:
        """Remove it with all that is in it, and close it; in words what would not go."""
        self.used = True
        left = self.empty(but="")
        if not left and self.is_in_place:
            try:
                with _same_root_times(self._files, self.name, note):
                    failpoint("rmdir")
                    os.rmdir(self.name, dir_fd=self._files.root)
            except OSError as error:
                left = [_left_words(self.name, [str(error)])]
        if not left:
            self._files.reserve(self.name, ends=True)
        self.close()
        return left


def _left_words(name: str, left: Sequence[str]) -> str:
    return f"{name} could not be removed whole ({', '.join(left[:5])}): the next opening tries again"


@contextmanager
def _same_root_times(files: Confined, name: str, note: Note) -> Generator[None]:
    """Have the root keep its times while a holding directory comes or goes. The log has them first, for a kill."""
    root = os.fstat(files.root)
    note({"holding": name, "times": [root.st_atime_ns, root.st_mtime_ns]})
    try:
        yield
    finally:
        failpoint("utime")
        with suppress(PermissionError):  # another user's root
            os.utime(files.root, ns=(root.st_atime_ns, root.st_mtime_ns))


def _have(files: Confined, name: str) -> None:
    """Make a holding directory of that name, unless it is there. The root keeps its times."""
    root, found = os.fstat(files.root), lstat(files.root, name)
    if found is not None and stat.S_ISDIR(found.st_mode):
        if stat.S_IMODE(found.st_mode) != _MODE:
            failpoint("chmod")
            set_mode(files.root, name, _MODE)
        return
    if found is not None:
        failpoint("unlink")
        os.unlink(name, dir_fd=files.root)
    make_directory(files.root, name, _MODE)
    with suppress(PermissionError):  # another user's root
        os.utime(files.root, ns=(root.st_atime_ns, root.st_mtime_ns))


def _empty(top: int, but: str) -> list[str]:
    """Remove everything in a directory ``but`` one name, also from directories that were made unwritable; no link is
    followed. What would not go.

    Goes down and comes up again by names, so that no depth uses up the descriptors.
    """
    left: list[str] = []
    # Opened anew: btrfs lists in an open directory only what was in it when it was opened.
    opened = os.open(".", _OPEN, dir_fd=top)
    waiting: list[tuple[int, list[str]]] = [(opened, [name for name in os.listdir(opened) if name != but])]
    above: list[str] = []
    while waiting:
        descriptor, names = waiting[-1]
        if not names:
            waiting.pop()
            if waiting:
                name = above.pop()
                failpoint("rmdir")
                try:
                    os.rmdir(name, dir_fd=waiting[-1][0])
                except FileNotFoundError:
                    pass
                except OSError:
                    left.append(name)
            os.close(descriptor)
            continue
        name = names.pop()
        failpoint("unlink")
        try:
            os.unlink(name, dir_fd=descriptor)
        except OSError as error:
            found = lstat(descriptor, name)
            if found is None:
                continue
            if error.errno not in (errno.EISDIR, errno.EPERM) or not stat.S_ISDIR(found.st_mode):
                left.append(name)
                continue
            below = _into(descriptor, name, found.st_mode, left)
            if below is not None:
                waiting.append((below, os.listdir(below)))
                above.append(name)
    return left


def _into(descriptor: int, name: str, mode: int, left: list[str]) -> int | None:
    """Open a directory, unless something is mounted on it: what that has is not ours to remove."""
    try:
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(name, stat.S_IRWXU, dir_fd=descriptor)
        if abilities().openat2:
            return open_within(descriptor, name, _OPEN, one_mount=True)
        opened = os.open(name, _OPEN, dir_fd=descriptor)
        if os.fstat(opened).st_dev == os.fstat(descriptor).st_dev:
            return opened
        os.close(opened)
    except OSError:
        pass
    left.append(name)
    return None


def describe_unknown(files: Confined, name: str, store: str) -> str:
    """What to do about a holding directory with files in it that the log of a store does not know, in words."""
    root, owner = os.readlink(f"/proc/self/fd/{files.root}"), ""
    with suppress(OSError):  # what runs in the workspace can write anything there
        owner = os.fsdecode(os.getxattr(f"/proc/self/fd/{files.root}/{name}", _STORE, follow_symlinks=False))
    state = state_directory_of(owner, root) if owner != store else None
    if state is None:
        ran = "If it ran with another RINGFENCE_STATE_DIR, `ringfence recover` with that one takes it back"
    else:
        command = f"RINGFENCE_STATE_DIR={shlex.quote(escape_path(state))} ringfence recover {escape_path(root)}"
        ran = f"It ran with another state directory: end what has the root open now, and `{command}` takes it back"
    return (
        f"{name} in the root has displaced files of a call that the log does not know. {ran}. Else take out what "
        "you miss, and remove it"
    )


class DirectoryTimes:
    """The times that the call's own changes have left directories with, by inode. A directory with another one was
    changed by somebody else, and ``changed`` is called. (On the way of every file: one look before, and one after.)"""

    def __init__(self, files: Confined) -> None:
        self.files = files
        self.changed: Callable[[os.stat_result], None] = lambda _: None
        self._left: dict[int, int] = {}

    def before(self, directory: int) -> None:
        """The call is about to change an open directory."""
        self.observe(os.fstat(directory))

    def observe(self, found: os.stat_result) -> None:
        """Compare a directory, as it was found, with what the call has left."""
        if self._left.setdefault(found.st_ino, found.st_mtime_ns) != found.st_mtime_ns:
            self._left[found.st_ino] = found.st_mtime_ns
            self.changed(found)

    def after(self, directory: int) -> None:
        """The call has changed an open directory."""
        found = os.fstat(directory)
        self._left[found.st_ino] = found.st_mtime_ns

    def gave(self, inode: int, mtime_ns: int) -> None:
        """The call has given a directory a time."""
        self._left[inode] = mtime_ns

    def forget(self) -> None:
        """From here on nobody knows whose change is whose."""
        self._left.clear()


class ChangedDirectory:
    """For a ``with``: the directory that a path is in, open and about to change, and the name there."""

    __slots__ = ("_at", "_parent", "_times")

    def __init__(self, times: DirectoryTimes, path: str) -> None:
        self._parent = times.files.parent(path)
        self._times = times

    def __enter__(self) -> tuple[int, str]:
        self._at, name = self._parent.__enter__()
        self._times.before(self._at)
        return self._at, name

    def __exit__(self, *_: object) -> None:
        self._times.after(self._at)
        self._parent.__exit__()
