"""Reaching what is below a host directory by descriptors, so that no link swapped in on the way can lead out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
BENEATH = DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo swapped in must not block
CHUNK_BYTES = 1 << 26


@contextmanager
def directory(root: int, path: str) -> Generator[int]:
    """A descriptor of the directory at `path` ("" for the root itself) below the directory that `root` describes.

    Raises:
        NotADirectoryError, FileNotFoundError: a component is missing, or is no directory; a link is none.
    """
    current = os.open(".", DIRECTORY, dir_fd=root)
    try:
        for name in path.split("/") if path else ():
            below = os.open(name, BENEATH, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def split(path: str) -> tuple[str, str]:
    """A path's directory and name."""
    parent, _, name = path.rpartition("/")
    return parent, name


def read_regular(directory: int, name: str, most: int | None = None) -> tuple[bytes, os.stat_result] | None:
    """All bytes of a regular file and its stat, taken when it was opened; None if it is anything else.

    A file that changes while it is read gives what was read; of one with more than `most` bytes, it is a few more.
    """
    descriptor = os.open(name, READ, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        first = min(found.st_size, CHUNK_BYTES) if most is None else min(found.st_size, CHUNK_BYTES, most)
        content = os.read(descriptor, first + 1)
        if len(content) == found.st_size or (most is not None and len(content) > most):
            return content, found
        chunks, total = [content], len(content)
        while content and (most is None or total <= most) and (content := os.read(descriptor, CHUNK_BYTES)):
            chunks.append(content)
            total += len(content)
        return b"".join(chunks), found
    finally:
        os.close(descriptor)


def target_within(root: str, path: str, target: str) -> str | None:
    """What a link at `path` that says `target` has to say in a workspace made of `root` (a real path), to lead to
    the same place; None where that is not within `root`.

    That is `target` itself, except where it is absolute, or leaves `root` on the way and comes back.
    """
    parent = split(path)[0]
    start = os.path.join(root, parent)
    led_to = os.path.realpath(os.path.join(start, target))
    if not is_within(root, led_to):
        return None
    if not os.path.isabs(target):
        parts = target.split("/")
        if all(is_within(root, os.path.realpath(os.path.join(start, *parts[:n]))) for n in range(1, len(parts))):
            return target
    return os.path.relpath(led_to, os.path.realpath(start))


def is_within(root: str, path: str) -> bool:
    """Whether the real path `path` is `root`, or below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")
