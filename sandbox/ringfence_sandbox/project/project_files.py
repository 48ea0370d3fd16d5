"""The files of a project that say what it needs, read as they are: no link is followed out of the project."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from ringfence.filesystem.paths import escape_path
from ringfence_sandbox.project.artefacts import LockError

UV_LOCK = "uv.lock"
NPM_LOCK = "package-lock.json"
_MOST_BYTES = 64 << 20


def read_project_file(root: str, path: str) -> bytes | None:
    """The content of a file of the project; None where there is none.

    Raises:
        LockError: it or a directory on the way is a symbolic link, or it is no regular file, or too large.
    """
    parts = inside(path).parts
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = below
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(parts[-1], flags, dir_fd=directory), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise LockError(f"{escape_path(path)} is no regular file of at most {_MOST_BYTES >> 20} MiB")
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(
            f"{escape_path(path)} cannot be read: {error.strerror}. Symbolic links are not followed: put the file there"
        ) from None
    finally:
        os.close(directory)


def inside(path: str) -> PurePosixPath:
    """A relative path of the project. LockError: it leads out."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.parts or "\0" in path:
        raise LockError(f"{escape_path(path)!r} is not a path inside of the project")
    return found


def locks(root: str) -> Sequence[str]:
    """The names of the locks at the top of a project: uv's or, without it, requirements with hashes; and npm's."""
    names = sorted(name for name in os.listdir(root) if name.startswith("requirements") and name.endswith(".txt"))
    hashed = [name for name in names if b"--hash=" in (read_project_file(root, name) or b"")]
    python = [UV_LOCK] if os.path.lexists(os.path.join(root, UV_LOCK)) else hashed
    return [*python, *([NPM_LOCK] if os.path.lexists(os.path.join(root, NPM_LOCK)) else [])]


def unlocked(root: str, locks: Sequence[str]) -> Sequence[str]:
    """The files that say what the project needs without naming hashes, beside its locks."""
    python = [name for name in locks if name != NPM_LOCK]
    files = {"requirements.txt": python, "package.json": NPM_LOCK in locks}
    return [name for name, locked in files.items() if not locked and os.path.lexists(os.path.join(root, name))]


def fingerprints(root: str, paths: Sequence[str]) -> Mapping[str, str]:
    """The hash of each file; "" for one that is not there or cannot be read."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            content = read_project_file(root, path)
        except LockError:
            content = None
        found[path] = "" if content is None else hashlib.sha256(content).hexdigest()
    return found
