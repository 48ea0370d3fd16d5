"""Taking what changed in a workspace back to the host directory that it was mounted from: all of it, or nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringfence.errors import WorkspaceConflictError
from ringfence.filesystem.paths import check_names_are_utf8
from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change
from ringfence.runtime.interrupts import Interrupts
from ringfence_sandbox.disk.confined import sha256_of
from ringfence_tools.host_tree import DIRECTORY, READ, directory, split, target_within
from ringfence_tools.write_out import GONE, RWX, Plan, WriteOut, above, changes_mode


@dataclass(frozen=True, slots=True)
class WriteBack:
    """The paths that were created, modified or deleted on disk, sorted; and the displaced originals that could not be
    removed afterwards, as they are named now (none, unless somebody got in the way)."""

    paths: tuple[str, ...]
    left_over: tuple[str, ...] = ()


def write_back(filesystem: Filesystem, root: str | os.PathLike[str], changes: Sequence[Change]) -> WriteBack:
    """Make the host directory `root` what `filesystem` is, for the paths in `changes`; nothing else is touched.

    `changes` is ``filesystem.changes(since)``, where ``since`` is the state in which `root` was mounted. Every path is
    looked at first: its kind, bytes or link target must be what they were then (its permission bits only where they
    change), and nothing where there was nothing; a directory that goes must hold nothing that the workspace did not
    have. A file is replaced by a new one under its name, so another name of the old one (a hard link) keeps the old
    bytes; owner, extended attributes and, unless they changed, permission bits are kept. What is new has the
    permission bits of the workspace less the umask.

    Until the end every displaced original stands beside its path under a hidden name (``.ringfence-*``). Any failure
    puts all of them back, the very files that were there. Only if the process is killed in between do they stay.

    Raises:
        WorkspaceConflictError: something on disk is not what it was; nothing was written.
        ValueError: a path that leads out, a filesystem that is not in the state that `changes` describes, or names that
            Python does not take for UTF-8.
        OSError: it could not be written (permission, space); all is as it was.
        RestoreFailedError: it could not be written, and not everything could be put back.
    """
    check_names_are_utf8()
    plan = Plan(changes)
    top = os.open(root, DIRECTORY)
    try:
        look = _Look(top, os.path.realpath(root), plan)
        if conflicts := look.conflicts():
            raise WorkspaceConflictError(conflicts)
        return WriteBack(tuple(plan.changes), tuple(_write(WriteOut(top, filesystem, plan), look)))
    finally:
        os.close(top)


def _write(writing: WriteOut, look: _Look) -> list[str]:
    """All or nothing; Ctrl-C counts until all is in place, and then when everything is tidied up."""
    interrupts = Interrupts()
    try:
        try:
            interrupts.allow()
            writing.run()
            if conflicts := look.conflicts_among_displaced(writing.where):
                raise WorkspaceConflictError(conflicts)
            interrupts.hold()
        except BaseException as error:
            interrupts.hold()
            writing.undo(error)
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, f"{error.strerror} (all is as it was before)", error.filename) from error
            raise
        return writing.drop()
    finally:
        interrupts.remove()


class _Look:
    """Compares what is on disk with what a plan expects there. It only reads."""

    def __init__(self, top: int, root: str, plan: Plan) -> None:
        self._top = top
        self._root = root
        self._plan = plan

    def conflicts(self) -> list[str]:
        """The paths that are not as they were before the changes, sorted."""
        found: list[str] = []
        for path, change in self._plan.changes.items():
            if change.before is not None:
                found.extend(self._differing(change, path))
            elif not self._is_free(path):
                found.append(path)
        return sorted(found)

    def conflicts_among_displaced(self, where: Callable[[str], str]) -> list[str]:
        """The same for what has been taken out of its place, and is at ``where(path)`` now."""
        plan = self._plan
        moved = [path for path in plan.changes if path in plan.gone or path in plan.replaced]
        return [differing for path in moved for differing in self._differing(plan.changes[path], where(path))]

    def _differing(self, change: Change, at_path: str) -> list[str]:
        parent, name = split(at_path)
        try:
            with directory(self._top, parent) as at:
                if not self._is_as_before(change, at, name or "."):
                    return [change.path]
                if change.path in self._plan.gone and stat.S_ISDIR(os.lstat(name, dir_fd=at).st_mode):
                    with directory(at, name) as inside:
                        below = [f"{change.path}/{entry}" for entry in os.listdir(inside)]
                    return [path for path in below if path not in self._plan.gone]
        except OSError as error:
            if error.errno not in GONE:
                raise
            return [change.path]
        return []

    def _is_as_before(self, change: Change, at: int, name: str) -> bool:
        before = change.before
        assert before is not None
        found = os.lstat(name, dir_fd=at)
        if changes_mode(change) and (found.st_mode ^ before.mode) & RWX:
            return False
        if before.kind == "directory":
            return stat.S_ISDIR(found.st_mode)
        if before.kind == "file":
            return stat.S_ISREG(found.st_mode) and _hash(at, name) == before.content_hash
        if not stat.S_ISLNK(found.st_mode):
            return False
        target = os.readlink(name, dir_fd=at)
        return before.target in (target, target_within(self._root, change.path, target))

    def _is_free(self, path: str) -> bool:
        """Whether nothing is there, and every directory on the way is, or will be made. (What the mount left out is
        not free: a new ``.git/hooks/x`` must not get into a ``.git`` that the workspace has never seen.)"""
        parent, name = split(path)
        kept = next((up for up in above(path) if not self._plan.makes_directory(up)), "")
        try:
            with directory(self._top, parent) as at:
                os.lstat(name, dir_fd=at)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return self._is_directory(kept)
        return False

    def _is_directory(self, path: str) -> bool:
        try:
            with directory(self._top, path):
                return True
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False


def _hash(at: int, name: str) -> str:
    descriptor = os.open(name, READ, dir_fd=at)
    try:
        return sha256_of(descriptor)
    finally:
        os.close(descriptor)
