"""Every way in which a program changes a tree of files, each as a function of the root and a source of chance."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import shutil
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16
_RENAME_EXCHANGE, _CURRENT, _FOLLOW = 2, -100, 0x400
_X86 = platform.machine() == "x86_64"
_RENAMEAT2 = 316 if _X86 else 276
_IO_SETUP, _IO_DESTROY, _IO_GETEVENTS, _IO_SUBMIT = (206, 207, 208, 209) if _X86 else (0, 1, 4, 2)
_IO_URING_SETUP, _IO_URING_ENTER = 425, 426

_HOLD = ".ringfence-hold-"

Change = Callable[[Path, Random], None]


def files_of(root: Path) -> list[Path]:
    return [path for path in _below(root) if path.is_file() and not path.is_symlink()]


def _directories(root: Path) -> list[Path]:
    return [path for path in _below(root) if path.is_dir() and not path.is_symlink()]


def _below(root: Path) -> list[Path]:
    """All that is in a tree, but for where displaced files wait."""
    return sorted(path for path in root.rglob("*") if not path.relative_to(root).parts[0].startswith(_HOLD))


def _file(root: Path, random: Random) -> Path:
    return random.choice(files_of(root) or [_made(root, random)])


def _made(root: Path, random: Random) -> Path:
    path = _free(root, random)
    path.write_bytes(random.randbytes(random.randrange(1, 200)))
    return path


def _free(root: Path, random: Random) -> Path:
    return random.choice([root, *_directories(root)]) / f"new{random.randrange(10**9)}"


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR) -> Generator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    found: int = LIBC.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def write(root: Path, random: Random) -> None:
    _file(root, random).write_bytes(random.randbytes(100))


def append(root: Path, random: Random) -> None:
    with _opened(_file(root, random), os.O_WRONLY | os.O_APPEND) as file:
        os.write(file, random.randbytes(3))


def pwrite(root: Path, random: Random) -> None:
    with _opened(_file(root, random)) as file:
        os.pwrite(file, random.randbytes(4), random.randrange(50))


def make(root: Path, random: Random) -> None:
    _made(root, random)


def map_shared(root: Path, random: Random) -> None:
    """Write through a mapping whose descriptor is closed."""
    path = _file(root, random)
    os.truncate(path, max(64, path.stat().st_size))
    with _opened(path) as file:
        mapping = mmap.mmap(file, 64)
    mapping[random.randrange(60)] = random.randrange(256)
    mapping.close()


def map_in_a_child(root: Path, random: Random) -> None:
    """Write through a mapping in a child that is killed while it has it."""
    path, at, byte = _file(root, random), random.randrange(60), random.randrange(256)
    os.truncate(path, max(64, path.stat().st_size))
    child = os.fork()
    if child == 0:
        try:
            file = os.open(path, os.O_RDWR)
            mapping = mmap.mmap(file, 64)
            os.close(file)
            mapping[at] = byte
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    os.waitpid(child, 0)


def map_and_sync(root: Path, random: Random) -> None:
    path = _file(root, random)
    os.truncate(path, max(64, path.stat().st_size))
    with _opened(path) as file, mmap.mmap(file, 64) as mapping:
        mapping[0] = random.randrange(256)
        mapping.flush()
        mapping[1] = random.randrange(256)


def truncate(root: Path, random: Random) -> None:
    os.truncate(_file(root, random), random.randrange(300))


def truncate_open(root: Path, random: Random) -> None:
    with _opened(_file(root, random), os.O_WRONLY | os.O_TRUNC):
        pass


def allocate(root: Path, random: Random) -> None:
    with _opened(_file(root, random)) as file:
        os.posix_fallocate(file, 0, random.randrange(1, 9000))


def punch(root: Path, random: Random) -> None:
    mode = random.choice([_PUNCH_HOLE | _KEEP_SIZE, _ZERO_RANGE])
    with _opened(_file(root, random)) as file:
        LIBC.fallocate(file, mode, ctypes.c_long(random.randrange(20)), ctypes.c_long(random.randrange(1, 50)))


def copy_range(root: Path, random: Random) -> None:
    one, other, at = _file(root, random), _file(root, random), random.randrange(40)
    with _opened(one, os.O_RDONLY) as source, _opened(other) as target, suppress(OSError):  # ranges that overlap
        os.copy_file_range(source, target, 50, 0, at)


def send(root: Path, random: Random) -> None:
    with _opened(_file(root, random), os.O_RDONLY) as source, _opened(_file(root, random)) as target:
        os.sendfile(target, source, 0, 60)


def splice(root: Path, random: Random) -> None:
    come, go = os.pipe()
    try:
        os.write(go, random.randbytes(30))
        with _opened(_file(root, random)) as target:
            _call(275 if _X86 else 76, come, None, target, None, ctypes.c_size_t(30), 0)
    finally:
        os.close(come)
        os.close(go)


def write_by_aio(root: Path, random: Random) -> None:
    """Linux's own asynchronous writes."""
    context, content = ctypes.c_ulong(0), ctypes.create_string_buffer(random.randbytes(40), 40)
    _call(_IO_SETUP, 1, ctypes.byref(context))
    try:
        with _opened(_file(root, random)) as file:
            block = struct.pack("=QIiHhIQQqQII", 0, 0, 0, 1, 0, file, ctypes.addressof(content), 40, 2, 0, 0, 0)
            request = ctypes.create_string_buffer(block, len(block))
            pointer = ctypes.c_void_p(ctypes.addressof(request))
            _call(_IO_SUBMIT, context, ctypes.c_long(1), ctypes.byref(pointer))
            done = ctypes.create_string_buffer(32)
            _call(_IO_GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(1), done, None)
    finally:
        _call(_IO_DESTROY, context)


def write_by_uring(root: Path, random: Random) -> None:
    """A write through a ring; a plain one where this process may have none."""
    parameters = ctypes.create_string_buffer(120)
    try:
        ring = _call(_IO_URING_SETUP, 1, parameters)
    except OSError as error:
        assert error.errno in (errno.ENOSYS, errno.EPERM, errno.ENOMEM), error
        pwrite(root, random)
        return
    content = ctypes.create_string_buffer(random.randbytes(40), 40)
    _, tail_at, mask_at, _, _, _, array_at, _ = struct.unpack_from("=8I", parameters, 40)
    try:
        with (
            mmap.mmap(ring, array_at + 4, offset=0) as queue,
            mmap.mmap(ring, 64, offset=0x10000000) as entries,
            _opened(_file(root, random)) as file,
        ):
            (tail,), (mask,) = struct.unpack_from("=I", queue, tail_at), struct.unpack_from("=I", queue, mask_at)
            entry = struct.pack("=BBHiQQIIQ", 23, 0, 0, file, 3, ctypes.addressof(content), 40, 0, 7)
            entries[: len(entry)] = entry
            struct.pack_into("=I", queue, array_at + 4 * (tail & mask), tail & mask)
            struct.pack_into("=I", queue, tail_at, tail + 1)
            _call(_IO_URING_ENTER, ring, 1, 1, 1, None, ctypes.c_size_t(0))
    finally:
        os.close(ring)


def rename(root: Path, random: Random) -> None:
    os.rename(_file(root, random), _free(root, random))


def rename_over(root: Path, random: Random) -> None:
    os.rename(_file(root, random), _file(root, random))


def save_as_editors_do(root: Path, random: Random) -> None:
    path = _file(root, random)
    new = path.with_name(path.name + ".tmp")
    new.write_bytes(random.randbytes(60))
    os.replace(new, path)


def exchange(root: Path, random: Random) -> None:
    one, other = os.fsencode(_file(root, random)), os.fsencode(_file(root, random))
    if one != other:
        _call(_RENAMEAT2, _CURRENT, one, _CURRENT, other, _RENAME_EXCHANGE)


def exchange_directories(root: Path, random: Random) -> None:
    one, other = random.choices(_directories(root) or [root], k=2)
    if not one.is_relative_to(other) and not other.is_relative_to(one):
        _call(_RENAMEAT2, _CURRENT, os.fsencode(one), _CURRENT, os.fsencode(other), _RENAME_EXCHANGE)


def link(root: Path, random: Random) -> None:
    os.link(_file(root, random), _free(root, random))


def write_by_another_name(root: Path, random: Random) -> None:
    """Write by a link that is made for it, and that goes."""
    new = _free(root, random)
    os.link(_file(root, random), new)
    new.write_bytes(random.randbytes(30))
    new.unlink()


def write_by_a_name_that_is_replaced(root: Path, random: Random) -> None:
    new = _free(root, random)
    os.link(_file(root, random), new)
    new.write_bytes(random.randbytes(30))
    os.rename(_made(root, random), new)


def write_by_a_name_in_a_new_directory(root: Path, random: Random) -> None:
    new = _free(root, random)
    new.mkdir()
    os.link(_file(root, random), new / "name")
    (new / "name").write_bytes(random.randbytes(30))
    shutil.rmtree(new)


def write_by_an_open_name_that_is_gone(root: Path, random: Random) -> None:
    new = _free(root, random)
    os.link(_file(root, random), new)
    with _opened(new) as file:
        new.unlink()
        os.write(file, random.randbytes(30))


def write_in_the_hold(root: Path, random: Random) -> None:
    """Write by a link in the directory where displaced files wait."""
    for hold in root.glob(f"{_HOLD}*"):
        os.link(_file(root, random), hold / "name")
        (hold / "name").write_bytes(random.randbytes(30))
        (hold / "name").unlink()


def unlink(root: Path, random: Random) -> None:
    _file(root, random).unlink()


def make_without_a_name(root: Path, random: Random) -> None:
    with _opened(root, os.O_TMPFILE | os.O_RDWR) as file:
        os.write(file, random.randbytes(50))
        new = os.fsencode(_free(root, random))
        assert LIBC.linkat(_CURRENT, b"/proc/self/fd/%d" % file, _CURRENT, new, _FOLLOW) == 0


def symlink(root: Path, random: Random) -> None:
    os.symlink(random.choice(["nowhere", "a", ".."]), _free(root, random))


def replace_by_symlink(root: Path, random: Random) -> None:
    path = _file(root, random)
    path.unlink()
    os.symlink("a", path)


def mkdir(root: Path, random: Random) -> None:
    _free(root, random).mkdir()


def mkdir_and_fill(root: Path, random: Random) -> None:
    new = _free(root, random)
    (new / "x/y").mkdir(parents=True)
    (new / "x/y/z").write_bytes(random.randbytes(20))


def rmdir(root: Path, random: Random) -> None:
    for directory in _directories(root)[::-1]:
        with suppress(OSError):
            directory.rmdir()
            return


def remove_tree(root: Path, random: Random) -> None:
    directories = [path for path in _directories(root) if path.parent != root]
    if directories:
        shutil.rmtree(random.choice(directories))


def move_directory(root: Path, random: Random) -> None:
    directories = _directories(root)
    if directories:
        old = random.choice(directories)
        new = _free(root, random)
        if not new.is_relative_to(old):
            os.rename(old, new)


def rename_above(root: Path, random: Random) -> None:
    """Rename a directory, write below it, and rename it back."""
    old = root / "deep"
    if not old.is_dir():
        (old / "down/there").mkdir(parents=True)
        (old / "down/there/file").write_bytes(b"file")
        return
    os.rename(old, root / "elsewhere")
    _made(root / "elsewhere", random)
    if random.random() < 0.5:
        os.rename(root / "elsewhere", old)
    elif not old.exists():
        shutil.copytree(root / "elsewhere", old, symlinks=True)
        shutil.rmtree(root / "elsewhere")


def chmod(root: Path, random: Random) -> None:
    os.chmod(_file(root, random), random.choice([0o600, 0o644, 0o755, 0o4755, 0o400]))


def chmod_directory(root: Path, random: Random) -> None:
    for directory in _directories(root)[:1]:
        os.chmod(directory, random.choice([0o700, 0o755, 0o1777]))


def chown(root: Path, random: Random) -> None:
    if os.geteuid() == 0:
        os.chown(_file(root, random), random.randrange(3), random.randrange(3))


def set_times(root: Path, random: Random) -> None:
    os.utime(_file(root, random), ns=(random.randrange(10**18), random.randrange(10**18)))


def set_attribute(root: Path, random: Random) -> None:
    os.setxattr(_file(root, random), "user.test", random.randbytes(5))


def remove_attribute(root: Path, random: Random) -> None:
    with suppress(OSError):
        os.removexattr(_file(root, random), "user.test")


def keep_times(root: Path, random: Random) -> None:
    """Write other bytes of the same number, and put the time of the last change back."""
    path = _file(root, random)
    was = path.stat()
    with _opened(path) as file:
        os.pwrite(file, random.randbytes(min(5, was.st_size)), 0)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def come_and_go(root: Path, random: Random) -> None:
    _made(root, random).unlink()


def read(root: Path, random: Random) -> None:
    for path in files_of(root):
        path.read_bytes()


def many(root: Path, random: Random) -> None:
    """Make and remove files by the thousand."""
    directory = random.choice([root, *_directories(root)])
    new = f"many{random.randrange(10**9)}"
    names = [directory / f"{new}-{n}" for n in range(random.choice([50, 1500]))]
    for name in names:
        name.write_bytes(b"many")
    for name in names[3:]:
        name.unlink()


SMALL: list[Change] = [
    write, append, pwrite, make, map_shared, map_in_a_child, map_and_sync, truncate, truncate_open, allocate, punch,
    copy_range, send, splice, write_by_aio, write_by_uring, rename, rename_over, save_as_editors_do, exchange, link,
    unlink, make_without_a_name, symlink, replace_by_symlink, chmod, chmod_directory, chown, set_times, set_attribute,
    remove_attribute, keep_times, come_and_go, read,
]  # fmt: skip
"""Those that leave the directories as they are, and each file reached by its own names."""
OTHERS: list[Change] = [
    exchange_directories, write_by_another_name, write_by_a_name_that_is_replaced, write_by_a_name_in_a_new_directory,
    write_by_an_open_name_that_is_gone, write_in_the_hold, mkdir, mkdir_and_fill, rmdir, remove_tree, move_directory,
    rename_above, many,
]  # fmt: skip
"""Those after which only a scan of the whole tree can tell what changed."""
EVERY = [*SMALL, *OTHERS]
