"""How the contract suites look at a filesystem."""

from __future__ import annotations

import unittest
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change

UseT = TypeVar("UseT")

BAD_BYTE_NAME = "caf\udce9.txt"
"""A name that is not UTF-8: the byte 0xE9 stands alone in it."""


class HasPath(Protocol):
    @property
    def path(self) -> str: ...


class FilesystemAbilities:
    """What a backend can do; one that cannot says so in the class of its tests, and the tests of it are skipped."""

    symlinks = True
    permission_bits = True
    any_bytes_in_names = True
    depth = 1_500
    """How many directories it has within each other."""

    def need(self, able: bool, what: str) -> None:
        if not able:
            raise unittest.SkipTest(f"this filesystem has no {what}")

    def able(self, uses: Mapping[str, UseT]) -> dict[str, UseT]:
        """Those of `uses`, by the method that each is of, for which the backend has what they need."""
        needed = {"symlink": self.symlinks, "chmod": self.permission_bits}
        return {name: use for name, use in uses.items() if needed.get(name, True)}


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
    """All that a rollback must bring back, by path: kinds, bytes, permission bits, times, link targets."""
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
