"""The workspace of a run: the files of a directory, with or without commands, or a copy in memory."""

from __future__ import annotations

import itertools
import os
import re
import stat
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.errors import ToolValidationError
from ringfence.escapes import escape_path
from ringfence.filesystem.diff import patch_of
from ringfence.filesystem.hidden import HiddenFiles, HidesFiles
from ringfence.filesystem.ignored import IGNORE_FILE, IgnoredPaths
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.paths import (
    GIT_ADVICE,
    check_names_are_utf8,
    directories_above,
    resolve_model_path,
    resolve_nofollow,
)
from ringfence.filesystem.protocol import Filesystem, GlobMatch
from ringfence.participants import Change, Step
from ringfence.policies.effects import HiddenFilesPolicy, git_refusal
from ringfence.prompt.section import Section
from ringfence.runtime.context import ToolContext
from ringfence.runtime.policy import BasePolicy, PolicyDecision
from ringfence.runtime.tool import Itself, Tool
from ringfence.secrets import Secrets
from ringfence.session.session import Session
from ringfence_sandbox import HostFilesystem, OwnChanges, Repository, Workspace
from ringfence_tools.contents import LeftOut
from ringfence_tools.mounts import HostMount, mount_all
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.write_back import write_back
from ringfence_tools.sections import VfsToolsSection

if TYPE_CHECKING:
    from ringfence_sandbox import Detect, PodmanSandbox

MAX_BYTES = 1 << 30
GIT = ".git"
NO_HIDE = ", unless --no-hide is given"
HIDDEN = f"hidden: no tool and no command can read or change it{NO_HIDE}"
_MAGIC, _ESCAPED = r"([*?\[\]{}\\])", r"\\\1"


class RunWorkspace(Protocol):
    """The workspace of an agent. Its constructor opens it."""

    directory: Path
    mount_point: str
    """The prefix that a model may put before paths."""
    left_out: Sequence[LeftOut]
    """What of the directory is not covered, and why; paths are relative to it."""
    refused: Mapping[str, str]
    """Paths that an agent must not write, with the reasons. Paths below them count, too."""
    secrets: Secrets
    """What is masked in all that leaves the run."""
    is_part: str
    """Why the changes cover only the part since the resume. Empty: they cover the whole run."""
    with_ignored: bool
    """Whether changes of ignored paths are shown like all others."""
    allows_git: bool
    """Whether commands may change git's own data, but for hooks and settings."""

    @property
    def ignored(self) -> IgnoredPaths:
        """The paths that git ignored at the start of the run, whether they are shown or not."""
        ...

    @property
    def filesystem(self) -> Filesystem: ...

    @property
    def history(self) -> Workspace | None:
        """The history on disk; None in memory."""
        ...

    def left_out_since(self) -> Sequence[LeftOut]:
        """Return the paths that the run changed and that are not covered."""
        ...

    def own_changes(self) -> OwnChanges:
        """Return the changes of the run and their patch for ``git apply``. Those of ignored paths are apart."""
        ...

    def own_steps(self) -> Sequence[Step]:
        """Return the steps of the run, oldest first. In memory: the step that applied the changes."""
        ...

    def section(self, session: Session, *, shared_session: bool = False) -> Section[Any]:
        """The tools that an agent works with here. ``shared_session`` is as in `VfsToolsSection`."""
        ...

    def apply(self, changes: Sequence[Change]) -> None:
        """Write the changes to the directory in one transaction. Does nothing for a workspace on disk.

        Raises WorkspaceConflictError, WorkspaceLockedError, OSError, ValueError and RestoreFailedError.
        """
        ...

    def close(self) -> None: ...


def protect_path(workspace: RunWorkspace, file: Path, reason: str) -> None:
    """Keep the agent from writing a file that the run writes for its user."""
    root, real = (Path(os.path.realpath(path)) for path in (workspace.directory, file))
    if real.is_relative_to(root):
        workspace.refused = {**workspace.refused, real.relative_to(root).as_posix(): reason}


class MemoryWorkspace:
    """A copy of a directory's files in memory. The directory changes only by `apply`."""

    def __init__(self, directory: Path, *, store: Path | None = None, hide: HiddenFiles | None = None) -> None:
        """``store`` keeps the history of what is applied. ``hide`` is the rule by which files are left out as hidden.

        Raises ValueError for a directory that cannot be loaded, or is too large.
        """
        check_names_are_utf8()
        self.directory = directory
        self._store = store
        self._hide = hide
        try:  # held, so that no other directory can come to have its number
            self._copied = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{escape_path(str(directory))} cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._copied)
        self.filesystem = InMemoryFilesystem()
        self.secrets = Secrets()
        # Looked at first, before gigabytes are read that there is no room for.
        if _size(directory) > MAX_BYTES:
            raise ValueError(
                f"{escape_path(str(directory))} holds more than the {MAX_BYTES >> 30} GiB of a workspace in memory: "
                "name a smaller directory in it"
            )
        # A path, so that no name can be taken for a URL.
        with HostFilesystem(directory, read_only=True, hide=hide) as view:
            hidden = view.hidden_paths
            self.secrets.add_hidden(view)
            if view.hidden is not None:
                self.filesystem.hide(view.hidden, hidden)
        unwanted = (GIT, *(f"/{re.sub(_MAGIC, _ESCAPED, path)}" for path in hidden))
        mount = HostMount(os.path.abspath(directory), exclude_glob=unwanted, max_bytes=MAX_BYTES)
        try:
            (preview,) = mount_all(self.filesystem, [mount])
        except ToolValidationError as error:
            raise ValueError(str(error)) from None
        self.left_out: Sequence[LeftOut] = preview.left_out
        """What of the directory is not here, and why; paths are relative to it."""
        if os.path.lexists(directory / GIT):
            self.left_out = (LeftOut(GIT, "git's own data: an agent works on the files"), *preview.left_out)
        self.left_out = (*(LeftOut(path, HIDDEN) for path in hidden), *self.left_out)
        self.refused: Mapping[str, str] = {left.path: left.reason for left in self.left_out}
        self.mount_point = os.path.abspath(directory)
        self.is_part = ""
        self.with_ignored = self.allows_git = False
        rules = {found.path: self.filesystem.read_bytes(found.path).content for found in self._ignore_files()}
        self.ignored = Repository(str(directory)).ignored(rules.get)
        self.history = None
        self._loaded = self.filesystem.snapshot()
        self._session: Session | None = None
        self._steps: Sequence[Step] = ()
        """The steps that `apply` made on disk."""

    def _ignore_files(self) -> Iterator[GlobMatch]:
        return (found for found in self.filesystem.glob(f"**/{IGNORE_FILE}") if found.is_file)

    def own_changes(self) -> OwnChanges:
        changes, ignored = self.filesystem.changes(self._loaded), list[Change]()
        if not self.with_ignored:
            changes, ignored = self.ignored.split(changes)
        now = self.filesystem.snapshot()
        self.filesystem.restore(self._loaded)
        try:
            before = {
                change.path: self.filesystem.read_bytes(change.path).content
                for change in changes
                if change.before is not None and change.before.kind == "file"
            }
        finally:
            self.filesystem.restore(now)
        patch = patch_of(changes, before.__getitem__, lambda path: self.filesystem.read_bytes(path).content)
        return OwnChanges(changes, patch, (), ignored)

    def left_out_since(self) -> Sequence[LeftOut]:
        return ()

    def own_steps(self) -> Sequence[Step]:
        return self._steps

    def section(self, session: Session, *, shared_session: bool = False) -> Section[Any]:
        self._session = session
        return VfsToolsSection(
            session=session,
            filesystem=self.filesystem,
            mount_point=self.mount_point,
            shared_session=shared_session,
        )

    def apply(self, changes: Sequence[Change]) -> None:
        try:
            is_there = os.path.samestat(os.stat(self.directory), os.fstat(self._copied))
        except OSError:
            is_there = False
        if not is_there:
            raise ValueError(f"{escape_path(str(self.directory))} is not the directory any more that was copied")
        step = write_back(
            self.filesystem, self.directory, changes, session=self._session, store=self._store, hide=self._hide
        )
        self._steps = () if step is None else (step,)

    def close(self) -> None:
        """Do nothing: a copy in memory holds nothing open."""


class DiskWorkspace:
    """A workspace on disk for the length of a task."""

    def __init__(
        self,
        directory: Path,
        *,
        store: Path | None = None,
        hide: HiddenFiles | None = None,
        progress: Callable[[int], None] | None = None,
        detect: Detect = "auto",
    ) -> None:
        """``store``, ``hide`` and ``detect`` are as for `Workspace.open`, which says what is raised."""
        self.directory = directory
        self.history = Workspace.open(directory, store=store, hide=hide, progress=progress, detect=detect)
        self.mount_point = self.history.root
        self.left_out: Sequence[LeftOut] = [
            LeftOut(
                path,
                HIDDEN
                if reason == "hidden"
                else f"{reason}: its content before the first change is not in the history",
            )
            for path, reason in sorted(self.history.left_out.items())
        ]
        self.refused: Mapping[str, str] = {}
        # Of those that the log shows: a resume looks for it there, and a newer one has changed nothing but times.
        self.start = self.history.log(1)[0].commit
        """The commit with which the files are compared."""
        self.is_part = ""
        """Why the comparison begins at the resume. Empty: it begins at the start of the run."""
        self.with_ignored = self.allows_git = False
        self._ignored: tuple[str, IgnoredPaths] | None = None
        self._sessions: Collection[str] = ()
        """The session ids of all parts of the run."""
        self.secrets = Secrets()
        self.secrets.add_hidden(self.filesystem)
        self.sandbox: PodmanSandbox | None = None
        """Where commands run, if they do."""
        self._place = Place()

    def start_container(
        self, place: Place, progress: Callable[[str], None] | None = None, *, project: Path | None = None
    ) -> None:
        """Start a container over the files. ``progress`` gets lines while an image is built. ``project`` is as for
        `PodmanSandbox`. Raises SandboxUnavailableError."""
        from ringfence_sandbox import PodmanSandbox

        self.secrets.give(place.secret_values())
        sandbox = PodmanSandbox(
            self.directory,
            filesystem=self.filesystem,
            image=place.image,
            limits=place.limits(),
            network=place.network or "none",
            secrets=self.secrets,
            progress=progress,
            project=project,
        )
        try:
            sandbox.start()
        except BaseException:
            sandbox.close()
            raise
        if sandbox.git_problem:
            self.left_out = [*self.left_out, LeftOut(GIT, sandbox.git_problem)]
        self.sandbox, self.mount_point, self._place = sandbox, sandbox.mount_point, place

    @property
    def filesystem(self) -> HostFilesystem:
        return self.history.filesystem

    def own_changes(self) -> OwnChanges:
        ignored = None if self.with_ignored else self.ignored
        own = self.history.own_since(self.start, self._sessions, without=self.refused, ignored=ignored)
        return replace(own, changes=[change for change in own.changes if not is_git_data(change.path)])

    @property
    def ignored(self) -> IgnoredPaths:
        if self._ignored is None or self._ignored[0] != self.start:  # a resume moves the start
            self._ignored = self.start, self.history.ignored_at(self.start)
        return self._ignored[1]

    def left_out_since(self) -> Sequence[LeftOut]:
        unclear = self.history.unclear_since(self.start)
        beside = {path: f"{reason}: what became of it is not in the patch" for path, reason in unclear.items()}
        for path, reason in self.history.left_out_since.items():
            if reason == "hidden":  # no call changes it
                continue
            beside[path] = f"{reason}: what commands did to it is not in the history, nor in the patch"
        return [LeftOut(path, reason) for path, reason in sorted(beside.items()) if path not in self.refused]

    def own_steps(self) -> Sequence[Step]:
        """The steps of the run, oldest first."""
        return [step for step in self.history.steps() if step.session_id in self._sessions]

    def go_on_from(self, start: str, sessions: Collection[str]) -> None:
        """Count the steps of earlier parts as own ones. `start` is the commit before them, unless `gc` dropped it."""
        self.secrets.expect_masks()
        known = itertools.takewhile(lambda entry: not entry.apart, self.history.log())
        if any(entry.commit == start for entry in known):
            self.start, self._sessions = start, (*sessions, *self._sessions)
        else:
            self.is_part = "`gc` has dropped steps of this run"

    def changed_by_others(self, start: str, sessions: Collection[str]) -> Sequence[str]:
        """Return the external changes since the last step of `sessions` or, if there is none, since `start`."""
        paths: set[str] = set()
        for entry in self.history.log():
            if entry.session_id in sessions or entry.commit == start or entry.apart:
                break
            paths.update(entry.paths)
        # Without files that the run writes for its user, and without `.git`: even `git status` changes that.
        return sorted(path for path in paths if path not in self.refused and not is_git_data(path))

    def section(self, session: Session, *, shared_session: bool = False) -> Section[Any]:
        self._sessions = (*self._sessions, str(session.session_id))
        if self.sandbox is None:
            return VfsToolsSection(
                session=session,
                filesystem=self.filesystem,
                mount_point=self.mount_point,
                shared_session=shared_session,
            )
        from ringfence_tools.shell import LONGEST_SECONDS, PodmanSandboxSection

        return PodmanSandboxSection(
            session=session,
            sandbox=self.sandbox,
            keep_environment=self._place.keep_environment and not shared_session,
            shared_session=shared_session,
            longest_seconds=self._place.command_seconds or LONGEST_SECONDS,
        )

    def apply(self, changes: Sequence[Change]) -> None:
        """Do nothing: the changes are on disk already."""

    def close(self) -> None:
        try:
            if self.sandbox is not None:
                self.sandbox.close()
        finally:
            self.history.close()


def own_policies(workspace: RunWorkspace) -> list[BasePolicy]:
    """The policies that hold for every tool over a workspace."""
    hidden = isinstance(workspace.filesystem, HidesFiles) and workspace.filesystem.hidden is not None
    return [ProtectedPathsPolicy(workspace), *([HiddenFilesPolicy()] if hidden else [])]


class ProtectedPathsPolicy(BasePolicy):
    """Denies changes of `.git` and of paths that the workspace does not cover."""

    name = "off_limits"

    def __init__(self, workspace: RunWorkspace) -> None:
        self._workspace = workspace

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.writes is None:
            return PolicyDecision.allow()
        filesystem, mount_point = self._workspace.filesystem, self._workspace.mount_point
        for written in tool.writes(params) or ():
            named = written if isinstance(written, str) else written.path
            try:
                path = resolve_model_path(filesystem, named, mount_point=mount_point)
            except (PermissionError, ValueError):
                continue  # the tool says so itself
            with suppress(OSError):  # a link that leads out, or in a circle: the tool says so itself
                itself = isinstance(written, Itself)
                place = resolve_nofollow(filesystem, path) if itself else filesystem.resolve(path)
                if reason := self._refusal(path) or self._refusal(place):
                    return PolicyDecision.deny(reason)
        return PolicyDecision.allow()

    def _refusal(self, path: str) -> str | None:
        if is_git_data(path):
            return f"{escape_path(path)} is git's own data: {GIT_ADVICE}"
        for above in (path, *directories_above(path)):
            if (reason := self._workspace.refused.get(above)) is not None:
                return f"{escape_path(above)} is not part of the workspace ({reason}): write elsewhere"
        return None

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        """Check the changes: a command does not declare them before."""
        allows_git = self._workspace.allows_git and tool.opaque
        for change in changes:
            reason = git_refusal(change, allow_git=allows_git)
            if reason is None and not (allows_git and is_git_data(change.path)):
                reason = self._refusal(change.path)
            if reason:
                return PolicyDecision.deny(reason)
            if change.before is None or change.before.kind != "directory" or change.after is not None:
                continue
            # A hidden file is in the directory on disk, so applying could not remove the directory.
            for path, reason in self._workspace.refused.items():
                if path.startswith(f"{change.path}/"):
                    return PolicyDecision.deny(
                        f"{escape_path(path)} is not part of the workspace ({reason}): {escape_path(change.path)} "
                        "cannot move"
                    )
        return PolicyDecision.allow()


def is_git_data(path: str) -> bool:
    """Whether a path is git's own data. Hooks and settings there can name programs to run."""
    return any(name.casefold() == GIT for name in path.split("/"))


def _size(directory: Path) -> int:
    """Return the size of the regular files that would be loaded."""
    size = 0
    for parent, directories, files in os.walk(directory):
        if parent == str(directory) and GIT in directories:
            directories.remove(GIT)
        for name in files:
            with suppress(OSError):  # gone meanwhile
                found = os.lstat(os.path.join(parent, name))
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return size
