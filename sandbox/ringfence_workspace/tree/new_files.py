"""Making files, links and directories: what is in them, and what they have of bits, owners, times and attributes.

Everything new in a workspace is made here, under a name of its own, before it takes the place of something else.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from ringfence_workspace.tree.confined import open_file, read_file
from ringfence_workspace.tree.extended_attributes import attributes_of, give_attributes
from ringfence_workspace.tree.kernel import failpoint
from ringfence_workspace.tree.state import Kind

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAMELESS = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_NOT_FOR_OTHER_BYTES = frozenset({"security.capability"})
_HASHED_BYTES = 1 << 20
"""What is longer is not read to be appended to; the kernel copies it, or shares its blocks."""


class Metadata(Protocol):
    """Permission bits (up to 0o7777), owner, and the time of the last change."""

    @property
    def mode(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...

    @property
    def mtime_ns(self) -> int: ...


class Given(NamedTuple):
    """Whether something has got its owner, and all of its extended attributes: some are only root's to give."""

    owner: bool
    attributes: bool = True


def make(
    at: int,
    name: str,
    kind: Kind,
    content: bytes,
    meta: Metadata,
    attributes: Mapping[str, bytes] | None = None,
    *,
    sync: bool = False,
) -> Given:
    """Make a file of these bytes, or a symlink to what they name, at a free name in the directory `at`. ``attributes``
    are the only ones that a file has then; ``sync``: it is on the disk.

    Raises:
        OSError: it could not be made, and nothing is at the name.
    """
    if kind == "symlink":
        make_symlink(at, name, content)
        return give(at, name, meta)
    descriptor = create(at, name)
    try:
        write_all(descriptor, content)
        given = give(at, name, meta, attributes)
        if sync:
            sync_file(descriptor)
    except OSError:  # there is not much room, perhaps
        with suppress(OSError):
            os.unlink(name, dir_fd=at)
        raise
    finally:
        os.close(descriptor)
    return given


def create(at: int, name: str, mode: int = 0o600) -> int:
    """A descriptor of a new, empty file. ``mode`` saves who wants these permission bits setting them."""
    failpoint("create")
    return os.open(name, _NEW, mode & 0o777, dir_fd=at)


def create_nameless(above: int, at: int, name: str) -> int | None:
    """The same, as if it were made in the directory `above`: with its group and its default ACL. None where that has
    no nameless files, which that takes."""
    failpoint("create")
    try:
        descriptor = os.open(".", _NAMELESS, 0o666, dir_fd=above)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        return None
    try:
        failpoint("link")
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=at)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_for(above: int, at: int, name: str) -> int:
    """The same without its default ACL, which works everywhere."""
    descriptor = create(at, name)
    directory = os.fstat(above)
    os.fchmod(descriptor, 0o666 & ~_umask())
    if directory.st_mode & stat.S_ISGID:
        with suppress(PermissionError):
            os.fchown(descriptor, -1, directory.st_gid)
    return descriptor


def make_symlink(at: int, name: str, target: bytes) -> None:
    failpoint("symlink")
    os.symlink(os.fsdecode(target), name, dir_fd=at)


def make_directory(at: int, name: str, mode: int = 0o700) -> None:
    failpoint("mkdir")
    os.mkdir(name, mode, dir_fd=at)


def sync_file(descriptor: int) -> None:
    """Have what was written to a file survive a loss of power."""
    failpoint("fsync file")
    os.fsync(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of the bytes at the file's place."""
    written = os.write(descriptor, content)
    if written == len(content):
        return
    rest = memoryview(content)[written:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def copy_and_append(at: int, name: str, place: str, descriptor: int, more: bytes) -> str | None:
    """The file at a name, and `more` behind it, into a new file; the sha256 of it all, unless it is long."""
    original, found = open_file(at, name, place)
    try:
        if found.st_size <= _HASHED_BYTES:
            content, _ = read_file(at, name, place)
            write_all(descriptor, content)
            write_all(descriptor, more)
            return hashlib.sha256(content + more).hexdigest()
        rest = found.st_size
        while rest and (copied := os.copy_file_range(original, descriptor, rest)):
            rest -= copied
        write_all(descriptor, more)
        return None
    finally:
        os.close(original)


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """From where to where a file has bytes: between are holes, which are in no block."""
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there are no more
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def copy_metadata(descriptor: int, at: int, name: str, found: os.stat_result, mode: int | None) -> os.stat_result:
    """Give a new file the owner, extended attributes and permission bits (or ``mode``) of the one that was found at a
    name, as far as that is permitted. What it is like then."""
    bits = stat.S_IMODE(found.st_mode) if mode is None else mode
    ours = os.fstat(descriptor)
    alike = stat.S_IMODE(ours.st_mode) == bits
    if (found.st_uid, found.st_gid) != (ours.st_uid, ours.st_gid):
        alike = False
        try:
            os.fchown(descriptor, found.st_uid, found.st_gid)
        except PermissionError:
            bits &= ~(stat.S_ISUID | stat.S_ISGID)
    try:
        if give_attributes(descriptor, attributes_to_copy(at, name), but=_NOT_FOR_OTHER_BYTES):
            alike = False
    except OSError:
        alike = False
    if alike:
        return ours
    os.fchmod(descriptor, bits)
    return os.fstat(descriptor)


def attributes_to_copy(at: int, name: str) -> dict[str, bytes]:
    """The extended attributes that a file at a name keeps with other bytes."""
    return attributes_of(f"/proc/self/fd/{at}/{name}", but=_NOT_FOR_OTHER_BYTES)


def give(at: int, name: str, meta: Metadata, attributes: Mapping[str, bytes] | None = None) -> Given:
    """Give what is at a name this metadata, as far as it differs, and ``attributes`` as the only extended ones; never
    what a link leads to."""
    if attributes is None:
        return Given(_give_metadata(at, name, meta))
    target = f"/proc/self/fd/{at}/{name}"
    with suppress(OSError):
        give_attributes(target, attributes)  # while it may be written
    owner = _give_metadata(at, name, meta)
    try:
        give_attributes(target, attributes)  # a new owner may have cost some
    except OSError:
        return Given(owner, attributes=False)
    return Given(owner)


def _give_metadata(at: int, name: str, meta: Metadata) -> bool:
    """Whether the owner, too: where only root could, the bits that make a program another user's are left out."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        here = os.fstat(descriptor)
        link = stat.S_ISLNK(here.st_mode)
        # A link's own descriptor cannot be gone through, so it is named; it is never followed.
        target, where = (name, at) if link else (f"/proc/self/fd/{descriptor}", None)
        mode, owned = meta.mode, True
        if (here.st_uid, here.st_gid) != (meta.uid, meta.gid):
            failpoint("chown")
            try:
                os.chown(target, meta.uid, meta.gid, dir_fd=where, follow_symlinks=not link)
            except PermissionError:
                mode, owned = mode & ~(stat.S_ISUID | stat.S_ISGID), False
        if not link and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            failpoint("chmod")
            os.chmod(target, mode)
        if here.st_mtime_ns != meta.mtime_ns:
            failpoint("utime")
            with suppress(PermissionError):
                os.utime(target, ns=(here.st_atime_ns, meta.mtime_ns), dir_fd=where, follow_symlinks=not link)
        return owned
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
