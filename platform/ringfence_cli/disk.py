"""A directory's files as they are: every step is on disk when it is committed, and can be undone. With a container
over them, where one is started, commands run, too."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.errors import RestoreFailedError, WorkspaceLockedError
from ringfence.failures import describe_error
from ringfence.participants import Change, Step
from ringfence.prompt.section import Section
from ringfence.runtime.session import Session
from ringfence_cli.options import BusyError, NotStartedError
from ringfence_cli.recording import Recording
from ringfence_cli.terms import Place
from ringfence_cli.workspace import is_git_data
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_sandbox.scan.scan import Progress, told_nothing
from ringfence_sandbox.steps.own_changes import OwnChanges
from ringfence_tools.contents import LeftOut
from ringfence_tools.files import VfsToolsSection

if TYPE_CHECKING:
    from ringfence_sandbox import PodmanSandbox


class DiskWorkspace:
    """A workspace on disk for the length of a task."""

    def __init__(self, directory: Path, *, store: Path | None = None, progress: Progress = told_nothing) -> None:
        """Raises what `Workspace.open` does."""
        self.directory = directory
        self.history = Workspace.open(directory, store=store, progress=progress)
        self.mount_point = self.history.root
        self.left_out: Sequence[LeftOut] = [
            LeftOut(path, f"{reason}: its content before the first change is not in the history")
            for path, reason in sorted(self.history.left_out.items())
        ]
        self.refused: Mapping[str, str] = {}
        # Of those that the log shows: a resume looks for it there, and a newer one has changed nothing but times.
        self.start = self.history.log(1)[0].commit
        """The commit that what was changed is told from."""
        self.is_part = ""
        """Why that is not where the run began, but where it was resumed; empty if it is where it began."""
        self._sessions: Collection[str] = ()
        """Of all parts of the run: their steps are its own."""
        self.sandbox: PodmanSandbox | None = None
        """Where commands run, if they do."""
        self._place = Place()

    def start_container(self, place: Place) -> None:
        """Have commands run as well, in a container over the files. SandboxUnavailableError: they cannot."""
        from ringfence_sandbox import PodmanSandbox
        from ringfence_sandbox.container.isolation import WORKSPACE

        sandbox = PodmanSandbox(
            self.directory,
            filesystem=self.filesystem,
            image=place.image,
            limits=place.limits(),
            network=place.network or "none",
        )
        try:
            sandbox.start()
        except BaseException:
            sandbox.close()
            raise
        self.sandbox, self.mount_point, self._place = sandbox, WORKSPACE, place

    @property
    def filesystem(self) -> HostFilesystem:
        return self.history.filesystem

    def own_changes(self) -> OwnChanges:
        own = self.history.own_since(self.start, self._sessions, without=self.refused)
        return replace(own, changes=[change for change in own.changes if not is_git_data(change.path)])

    def left_out_since(self) -> Sequence[LeftOut]:
        unclear = self.history.unclear_since(self.start)
        beside = {path: f"{reason}: what became of it is not in the patch" for path, reason in unclear.items()}
        for path, reason in self.history.left_out_since.items():
            beside[path] = f"{reason}: what commands did to it is not in the history, nor in the patch"
        return [LeftOut(path, reason) for path, reason in sorted(beside.items()) if path not in self.refused]

    def steps(self) -> int:
        return len(self.own_steps())

    def own_steps(self) -> Sequence[Step]:
        """The steps of the run, oldest first."""
        return [step for step in self.history.steps() if step.session_id in self._sessions]

    def go_on_from(self, start: str, sessions: Collection[str]) -> None:
        """Tell what these sessions have changed, too, from the commit where they began, if the history goes so far."""
        known = itertools.takewhile(lambda entry: not entry.apart, self.history.log())
        if any(entry.commit == start for entry in known):
            self.start, self._sessions = start, (*sessions, *self._sessions)
        else:
            self.is_part = "`gc` has dropped steps of this run"

    def changed_by_others(self, start: str, sessions: Collection[str]) -> Sequence[str]:
        """The paths that others have changed since the last step of a run's sessions, or the commit where it began."""
        paths: set[str] = set()
        for entry in self.history.log():
            if entry.session_id in sessions or entry.commit == start or entry.apart:
                break
            paths.update(entry.paths)
        return sorted(filter(self._counts, paths))

    def _counts(self, path: str) -> bool:
        """Whether it is a file of the project: not one that a run writes for its user, nor git's own data, which as
        little as `git status` changes."""
        return path not in self.refused and not is_git_data(path)

    def section(self, session: Session) -> Section[Any]:
        self._sessions = (*self._sessions, str(session.session_id))
        if self.sandbox is None:
            return VfsToolsSection(session=session, filesystem=self.filesystem, mount_point=self.mount_point)
        from ringfence_tools.shell import LONGEST_SECONDS, PodmanSandboxSection

        return PodmanSandboxSection(
            session=session,
            sandbox=self.sandbox,
            keep_environment=self._place.keep_environment,
            longest_seconds=self._place.command_seconds or LONGEST_SECONDS,
        )

    def apply(self, changes: Sequence[Change]) -> Sequence[str]:
        return ()

    def close(self) -> None:
        try:
            if self.sandbox is not None:
                self.sandbox.close()
        finally:
            self.history.close()


def on_disk(directory: Path, *, quiet: bool = False) -> DiskWorkspace:
    """One that is opened for a command. NotStartedError: it cannot be, in words."""
    try:
        with Recording(quiet=quiet) as recording:
            return DiskWorkspace(directory, progress=recording)
    except WorkspaceLockedError as error:
        raise BusyError(str(error)) from None
    except RestoreFailedError as error:
        raise NotStartedError(str(error)) from None
    except (OSError, ValueError) as error:
        raise NotStartedError(f"the workspace cannot be opened: {describe_error(error)}") from None
