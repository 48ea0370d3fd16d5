"""The directories that the container of a fork has from the fork's source, to be read."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.filesystem.hidden import HiddenFiles
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.hidden_tree import HiddenTree, Inode
from ringfence_workspace.tree.kernel import abilities

LOOK = "import os, sys; [print(found.st_dev, found.st_ino) for found in map(os.stat, sys.argv[1:])]"
"""A program of Python that prints which directories it finds at paths, for `SharedDirectory.is_seen`."""


@dataclass(frozen=True, slots=True)
class SharedDirectory:
    """A directory at the same path in the source of a fork, which may have become another one since it was found."""

    path: str
    root: str
    """The root of the workspace that has it."""
    inode: Inode

    @classmethod
    def found(cls, path: str, root: str) -> SharedDirectory:
        """The directory that is there now. SandboxUnavailableError where none is, or a link leads to it."""
        try:
            with _opened(root) as files:
                descriptor = files.open_directory(path)
                try:
                    status = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise SandboxUnavailableError(
                f"the fork shares {escape_path(path)} with {escape_path(root)}, and there it is no directory now "
                f"({error.strerror}): make it there, or make a fork that shares nothing"
            ) from error
        return cls(path, root, (status.st_dev, status.st_ino))

    @property
    def place(self) -> str:
        return os.path.join(self.root, self.path)

    @property
    def target(self) -> str:
        return f"{WORKSPACE}/{self.path}"

    def mount(self, places: Mapping[str, str]) -> dict[str, Any]:
        """How a container gets it, which is started with ``places``. Raises SandboxUnavailableError."""
        if self.place not in places:
            raise SandboxUnavailableError(f"{escape_path(self.place)} cannot be mounted for the users of a container")
        return {"type": "bind", "source": places[self.place], "target": self.target, "read_only": True}

    def hidden(self, rule: HiddenFiles | None) -> Sequence[str]:
        """What is hidden in it, by path from the root. Raises SandboxUnavailableError where all of it is."""
        if rule is None:
            return ()
        if rule.hides(self.path, is_directory=True):
            raise SandboxUnavailableError(f"the fork shares {escape_path(self.path)}, which is hidden now")
        with _opened(self.root) as files:
            return [path for path in HiddenTree(files, rule, self.path).covers() if path.startswith(f"{self.path}/")]


@contextmanager
def _opened(root: str) -> Generator[Confined]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Confined(descriptor, abilities())
    finally:
        os.close(descriptor)


def all_found(shared: Mapping[str, str]) -> Sequence[SharedDirectory]:
    """The directories that a fork shares, by path the root of the workspace that has it. SandboxUnavailableError."""
    return [SharedDirectory.found(path, root) for path, root in shared.items()]


def check_seen(shared: Sequence[SharedDirectory], printed: bytes) -> None:
    """Check by what `LOOK` has printed that a container has just these: one may have become a link to another place
    while it was mounted. SandboxUnavailableError."""
    expected = [f"{device} {number}" for device, number in (one.inode for one in shared)]
    if printed.decode(errors="replace").splitlines() != expected:
        listed = ", ".join(escape_path(one.place) for one in shared)
        raise SandboxUnavailableError(f"the container has something else than {listed}, which the fork shares")
