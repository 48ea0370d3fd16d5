"""System calls that the standard library does not have, and what stands in for them where the kernel has not either."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import re
import stat
import struct
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_OPENAT2 = 437  # the same on every architecture
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "riscv64": 276}
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_RESOLVE_ONE_MOUNT = 0x01
_RESOLVE_WITHIN = 0x02 | 0x04 | 0x08  # NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_HOW = struct.Struct("=QQQ")
IS_LINUX = sys.platform == "linux"
PATH_ONLY: int = getattr(os, "O_PATH", os.O_RDONLY)
"""To open a directory only to go on from there. Only Linux needs no permission to read it."""
OVERLAY = 0x794C7630
"""The number of overlayfs among the kinds of filesystems."""
_STATX_BTIME = 0x800
_AT_EMPTY_PATH = 0x1000
_AT_SYMLINK_NOFOLLOW = 0x100
_NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})
_NO_HARD_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_BEFORE_EXCHANGE = ".old"
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
"""As `os.fsencode` has them, which looks first whether it is given a text."""

_PLAIN = re.compile(rb"[\w/.+-]+")
"""A path that the kernel writes as it is."""

_hooks: list[Callable[[str], None]] = []


def failpoint(name: str) -> None:
    """Mark a system call that changes something, which comes next: where tests count, fail and kill."""
    for hook in _hooks:
        hook(name)


@contextmanager
def injected(hook: Callable[[str], None]) -> Generator[None]:
    """Have a hook called with the name of every `failpoint` of this process, while it lasts."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)


@cache
def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def raised(path: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path)


def filesystem_type(descriptor: int) -> int:
    """The number of the kind of filesystem that something is on; 0 where that is not known."""
    buffer = ctypes.create_string_buffer(512)
    if libc().fstatfs(descriptor, buffer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def free_bytes(directory: str | Path) -> int:
    """What an ordinary user may still write on the disk that a directory is on."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the kernel may be asked for. Switching something off makes the code for older kernels run instead."""

    openat2: bool
    renameat2: bool
    tmpfile: bool
    links: bool = True
    """Hard links."""
    filesystem_type: Callable[[int], int] = filesystem_type
    """Of what a descriptor is of, the number that `statfs` gives."""


@cache
def abilities() -> Abilities:
    """What this kernel has. A filesystem may still refuse; that is found out call by call."""
    if not IS_LINUX:
        return Abilities(False, False, False, filesystem_type=lambda descriptor: 0)
    has_openat2 = False
    try:
        os.close(open_within(_root_for_probing(), "proc", os.O_PATH | os.O_CLOEXEC))
        has_openat2 = True
    except FileNotFoundError:
        has_openat2 = True
    except OSError as error:
        has_openat2 = error.errno not in (errno.ENOSYS, errno.EPERM)
    return Abilities(has_openat2, platform.machine() in _RENAMEAT2, hasattr(os, "O_TMPFILE"))


@cache
def _root_for_probing() -> int:
    return os.open("/", os.O_PATH | os.O_CLOEXEC)


@cache
def _how(flags: int, one_mount: bool) -> bytes:
    return _HOW.pack(flags, 0, _RESOLVE_WITHIN | (_RESOLVE_ONE_MOUNT if one_mount else 0))


def open_within(directory: int, path: str, flags: int, *, one_mount: bool = False) -> int:
    """Open what is at `path` below a directory; a link anywhere on the way, or at its end, is an OSError (ELOOP), and
    with ``one_mount`` so is what is mounted there (EXDEV)."""
    name = path.encode(_ENCODING, _ERRORS)
    descriptor: int = libc().syscall(_OPENAT2, directory, name, _how(flags, one_mount), _HOW.size)
    if descriptor < 0:
        raise raised(path)
    return descriptor


def birth_ns(descriptor: int, name: str = "") -> int | None:
    """When an inode was made, in nanoseconds since 1970; None where the filesystem does not know."""
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_SYMLINK_NOFOLLOW | (0 if name else _AT_EMPTY_PATH)
    try:
        if libc().statx(descriptor, os.fsencode(name), flags, _STATX_BTIME, buffer) != 0:
            return None
    except AttributeError:  # a C library older than the call
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return int(seconds * 1_000_000_000 + nanoseconds) if mask & _STATX_BTIME else None


def sync_filesystem(descriptor: int) -> None:
    """Wait until all of a filesystem is on its disk."""
    if libc().syncfs(descriptor) != 0:
        raise raised("syncfs")


class Renames:
    """Renames that replace nothing, and exchanges of two names; each of them atomic where the kernel can."""

    def __init__(self, can: Abilities) -> None:
        self._number: Final = _RENAMEAT2.get(platform.machine()) if can.renameat2 else None
        self._links = can.links

    def rename(self, source: int, old: str, target: int, new: str) -> None:
        """Rename; FileExistsError where something is at the new name."""
        failpoint("rename")
        if self._call(source, old, target, new, _RENAME_NOREPLACE):
            return
        if self._link(source, old, target, new):
            failpoint("unlink")
            os.unlink(old, dir_fd=source)
            return
        # Of a directory, or where there are no links. What came to the new name since this look is replaced; a
        # directory only if it is empty.
        if exists(target, new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)

    def exchange(self, tree: int, name: str, holding: int, slot: str) -> None:
        """Exchange what has a name in the tree with what is held; there is always one of the two at the name."""
        failpoint("exchange")
        if self._call(tree, name, holding, slot, _RENAME_EXCHANGE):
            return
        old = next(free for n in itertools.count() if not exists(holding, free := f"{slot}{_BEFORE_EXCHANGE}{n}"))
        if not self._link(tree, name, holding, old):
            os.rename(name, old, src_dir_fd=tree, dst_dir_fd=holding)  # for a moment none of the two is at the name
        try:
            failpoint("rename")
            os.rename(slot, name, src_dir_fd=holding, dst_dir_fd=tree)
        except OSError:
            with suppress(FileExistsError):
                self.rename(holding, old, tree, name)
            raise
        failpoint("rename")
        os.rename(old, slot, src_dir_fd=holding, dst_dir_fd=holding)
        with suppress(FileNotFoundError):  # of one file, two names: none was renamed
            os.unlink(old, dir_fd=holding)

    def _link(self, source: int, old: str, target: int, new: str) -> bool:
        """False where nothing there, or no directory, may have two names."""
        if not self._links:
            return False
        try:
            os.link(old, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_HARD_LINK:
                raise
            return False
        return True

    def _call(self, source: int, old: str, target: int, new: str, flags: int) -> bool:
        """False where the kernel or the filesystem has no such rename."""
        if self._number is None:
            return False
        was, will_be = old.encode(_ENCODING, _ERRORS), new.encode(_ENCODING, _ERRORS)
        if libc().syscall(self._number, source, was, target, will_be, flags) == 0:
            return True
        error = raised(new)
        if error.errno in _NOT_HERE:
            return False
        raise error


def exists(directory: int, name: str) -> bool:
    """Whether a directory has a name, link or not."""
    return lstat(directory, name) is not None


def lstat(directory: int, name: str) -> os.stat_result | None:
    """What a directory has at a name; None for nothing."""
    try:
        return os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None


def mounts_below(path: str) -> list[str]:
    """What is mounted below a host directory, or on it; nothing where the kernel does not say."""
    found: list[str] = []
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as table:
        lines, plain = table.readlines(), os.fsencode(path)
        for line in lines:
            if _PLAIN.fullmatch(plain) and plain not in line:
                continue
            raw = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
            place = os.fsdecode(raw)
            if f"{place}/".startswith(f"{path}/"):
                found.append(place)
    return found


def set_mode(directory: int, name: str, mode: int) -> None:
    """Change the permission bits of a file or directory, never of what a link leads to."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


@cache
def boot_id() -> str:
    """What changes when the machine starts anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


# A fork copies every descriptor, whatever another thread is about to do with it. But a child must not have a copy of
# the locks and streams that are to end with this process. So who makes or closes one of these does so ``with FORKS:``,
# noting in the same block what the child is to close; a fork waits for the end of the block.
FORKS = threading.RLock()
"""Re-entrant, since a signal's handler may fork within the block. Nothing in one waits for anybody else."""


def _release_forks() -> None:
    with suppress(RuntimeError):  # Ctrl-C came in its place
        FORKS.release()


def _release_forks_in_child() -> None:
    try:
        FORKS.release()
    except RuntimeError:  # likewise: a thread has it that there is not in the child
        FORKS._at_fork_reinit()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# Before those of who notes things, which go on with it in the child.
os.register_at_fork(before=FORKS.acquire, after_in_parent=_release_forks, after_in_child=_release_forks_in_child)
