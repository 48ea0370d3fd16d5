"""Writing the files in which the state of workspaces is kept: whole, or not at all, and with words for what fails."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ringfence_sandbox.disk.places import ELSEWHERE


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Generator[BinaryIO, None, None]:
    """A new file for `path`, which stands there, synced, when the block has ended without an error.

    The directory is the caller's to sync. Without ``sync`` a loss of power may leave something else there.
    """
    beside = path.with_name(f"tmp_{path.name}")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise not_written(error, str(path)) from error
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync_directory(path: str | Path) -> None:
    """Have the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_once(path: str, content: str) -> str:
    """The path of a file with this content, whose name has the content's hash in it: written if it is not there."""
    if not os.path.exists(path):
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)  # also for who is not us in a container that has it mounted
        os.replace(file.name, path)
    return path


def kept_damaged(path: str, content: bytes) -> str:
    """The path of a copy of what a file of a store was before a part of it is cut off; an earlier one that is the same,
    if there is one. OSError: it could not be written."""
    copies = (f"{path}.damaged-{n}" for n in itertools.count(1))
    copy = next(copy for copy in copies if not os.path.exists(copy) or Path(copy).read_bytes() == content)
    try:
        with open(copy, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise not_written(error, copy) from error
    return copy


def not_written(error: OSError, path: str) -> OSError:
    """The error of a file of a store, with the file's name and what to do, where the system's says neither."""
    if error.errno is None or error.strerror != os.strerror(error.errno):
        return error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    words = f"{os.strerror(error.errno)}: here the history is kept; {'make room, or ' if full else ''}{ELSEWHERE}"
    return OSError(error.errno, words, error.filename or path)
