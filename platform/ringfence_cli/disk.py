"""A directory's files as they are: every step is on disk when it is committed, and can be undone. With a container
over them where commands run, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.participants import Change
from ringfence.prompt.section import Section
from ringfence.runtime.session import Session
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools.contents import LeftOut
from ringfence_tools.files import VfsToolsSection

if TYPE_CHECKING:
    from ringfence_sandbox.isolation import Network


class DiskWorkspace:
    """A workspace on disk for the length of a task."""

    def __init__(self, directory: Path, *, store: Path | None = None) -> None:
        """Raises what `Workspace.open` does."""
        self.directory = directory
        self.opened = Workspace.open(directory, store=store)
        self.mount_point = self.opened.root
        self.left_out: Sequence[LeftOut] = [
            LeftOut(path, f"{reason}: its content before the first change is not in the history")
            for path, reason in sorted(self.opened.left_out.items())
        ]
        self.refused: Mapping[str, str] = {}
        self.start = self.opened.newest
        """The commit that what was changed is told from."""
        self.is_part = ""
        """Why that is not where the run began, but where it was resumed; empty if it is where it began."""
        self._steps_before = len(self.opened.steps())

    @property
    def filesystem(self) -> HostFilesystem:
        return self.opened.filesystem

    def changes(self) -> Sequence[Change]:
        return self.opened.changes_since(self.start, without=self.refused)

    def patch(self, changes: Sequence[Change]) -> bytes:
        return self.opened.patch_since(self.start, without=self.refused)

    def left_out_since(self) -> Sequence[LeftOut]:
        return [
            LeftOut(path, f"{reason}: what commands did to it is not in the history, nor in the patch")
            for path, reason in sorted(self.opened.left_out_since.items())
        ]

    def steps(self) -> int:
        return len(self.opened.steps()) - self._steps_before

    def go_on_from(self, start: str, sessions: Collection[str]) -> None:
        """Tell what was changed from the commit where a run began, if its sessions alone have changed files since, but
        for the run's own files, which are refused."""
        steps = 0
        for entry in self.opened.log():
            if entry.commit == start:
                self.start = start
                self._steps_before -= steps
                return
            steps += entry.number is not None
            if entry.session_id not in sessions and not self.refused.keys() >= {*entry.paths}:
                self.is_part = "files were changed by others since the run began"
                return
        self.is_part = "`gc` has dropped steps of this run"

    def section(self, session: Session) -> Section[Any]:
        return VfsToolsSection(session=session, filesystem=self.filesystem, mount_point=self.mount_point)

    def close(self) -> None:
        self.opened.close()


class PodmanWorkspace(DiskWorkspace):
    """A workspace on disk, and a container over it that runs from the start."""

    def __init__(
        self,
        directory: Path,
        *,
        image: str | None = None,
        network: Network = "none",
        keep_environment: bool = False,
        store: Path | None = None,
    ) -> None:
        """Raises what `Workspace.open` does, and SandboxUnavailableError where commands cannot be run."""
        from ringfence_sandbox.isolation import WORKSPACE
        from ringfence_sandbox.podman import PodmanSandbox

        super().__init__(directory, store=store)
        try:
            self.sandbox = PodmanSandbox(directory, filesystem=self.filesystem, image=image, network=network)
            try:
                self.sandbox.start()
            except BaseException:
                self.sandbox.close()
                raise
        except BaseException:
            super().close()
            raise
        self.mount_point = WORKSPACE
        self._keep_environment = keep_environment

    def section(self, session: Session) -> Section[Any]:
        from ringfence_tools.shell import PodmanSandboxSection

        return PodmanSandboxSection(session=session, sandbox=self.sandbox, keep_environment=self._keep_environment)

    def close(self) -> None:
        try:
            self.sandbox.close()
        finally:
            super().close()
