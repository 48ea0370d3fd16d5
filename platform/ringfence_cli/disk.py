"""A directory's files as they are: every step is on disk when it is committed, and can be undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ringfence.participants import Change
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools.contents import LeftOut


class DiskWorkspace:
    """A workspace on disk for the length of a task."""

    def __init__(self, directory: Path) -> None:
        """Raises what `Workspace.open` does."""
        self.directory = directory
        self.opened = Workspace.open(directory)
        self.mount_point = self.opened.root
        self.left_out: Sequence[LeftOut] = [
            LeftOut(path, f"{reason}: its content before the first change is not in the history")
            for path, reason in sorted(self.opened.left_out.items())
        ]
        self.refused: Mapping[str, str] = {}
        self._start = self.opened.newest
        self._steps_before = len(self.opened.steps())

    @property
    def filesystem(self) -> HostFilesystem:
        return self.opened.filesystem

    def changes(self) -> Sequence[Change]:
        return self.opened.since(self._start)[0]

    def patch(self, changes: Sequence[Change]) -> bytes:
        return self.opened.since(self._start)[1]

    def steps(self) -> int:
        return len(self.opened.steps()) - self._steps_before

    def close(self) -> None:
        self.opened.close()
