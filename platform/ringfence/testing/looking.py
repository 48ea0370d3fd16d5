"""Helpers with which the contract suites examine a filesystem."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Protocol

from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change

BAD_BYTE_NAME = "caf\udce9.txt"
"""A name that is not UTF-8: the byte 0xE9 stands alone in it."""


FOLLOWING: dict[str, Callable[[Filesystem, str], object]] = {
    "read": lambda fs, path: fs.read(path),
    "read_bytes": lambda fs, path: fs.read_bytes(path),
    "content_hash": lambda fs, path: fs.content_hash(path),
    "stat": lambda fs, path: fs.stat(path),
    "list": lambda fs, path: fs.list(path),
    "chmod": lambda fs, path: fs.chmod(path, 0o600),
}
"""What needs something at a path, and goes through a link."""
CHANGES: dict[str, Callable[[Filesystem], object]] = {
    "write": lambda fs: fs.write("a.txt", "b"),
    "write new": lambda fs: fs.write("new", "b"),
    "write_bytes": lambda fs: fs.write_bytes("a.txt", b"b", mode="append"),
    "delete": lambda fs: fs.delete("a.txt"),
    "mkdir": lambda fs: fs.mkdir("new"),
    "move": lambda fs: fs.move("a.txt", "b.txt"),
    "chmod": lambda fs: fs.chmod("a.txt", 0o600),
    "symlink": lambda fs: fs.symlink("link", "a.txt"),
    "restore": lambda fs: fs.restore(fs.snapshot()),
}
"""A change of every kind, where there is a file "a.txt"."""


class HasPath(Protocol):
    @property
    def path(self) -> str: ...


class FilesystemAbilities:
    """What a backend can do; one that cannot says so in the class of its tests, and the tests of it are skipped."""

    symlinks = True
    permission_bits = True
    any_bytes_in_names = True
    depth = 1_500
    """The number of directories that the backend can nest."""

    def need(self, able: bool, what: str) -> None:
        if not able:
            raise unittest.SkipTest(f"this filesystem has no {what}")

    def all_refuse(
        self, kind: type[BaseException], uses: Mapping[str, Callable[..., object]], *arguments: object
    ) -> None:
        """Each of `uses`, by its method, raises `kind`; without those that the backend is not able to."""
        needed = {"symlink": self.symlinks, "chmod": self.permission_bits}
        for name, use in uses.items():
            if needed.get(name, True):
                with refused(kind):
                    raise AssertionError(f"{name} of {arguments[1:]!r} gave {use(*arguments)!r}")


@contextmanager
def refused(*kinds: type[BaseException], saying: str = "") -> Generator[None]:
    """The block raises one of `kinds`, with the words `saying` in its message."""
    raised = None
    try:
        yield
    except kinds as error:
        raised = error
    assert raised is not None, f"this should have raised {' or '.join(kind.__name__ for kind in kinds)}"
    assert saying in str(raised), f"{raised!r} does not say {saying!r}"


def paths(found: Iterable[HasPath]) -> list[str]:
    return [item.path for item in found]


def kinds(changes: Iterable[Change]) -> list[tuple[str, str]]:
    return [(change.kind, change.path) for change in changes]


def tree_of(filesystem: Filesystem) -> dict[str, object]:
    """The state that a rollback must restore, by path: kinds, bytes, permission bits, times and link targets."""
    found: dict[str, object] = {}
    waiting = [""]
    while waiting:
        for entry in filesystem.list(waiting.pop()):
            if entry.is_symlink:
                found[entry.path] = filesystem.readlink(entry.path)
                continue
            stat = filesystem.stat(entry.path)
            content = filesystem.read_bytes(entry.path).content if stat.is_file else None
            found[entry.path] = (content, stat.mode, stat.modified_at)
            if stat.is_directory:
                waiting.append(entry.path)
    return found
