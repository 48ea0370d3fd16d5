"""Write the changes of a workspace in memory to the directory that was mounted, in one transaction."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence, Set

from ringfence.errors import WorkspaceConflictError
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change, Step
from ringfence.session.session import Session
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools.host_files import target_within

RWX = 0o777
"""No set-user-id, set-group-id or sticky bit is written."""
CONFLICTS = frozenset({errno.ESTALE, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})
"""The errors of a write if somebody else changed the tree after the check."""


def write_back(
    filesystem: Filesystem,
    root: str | os.PathLike[str],
    changes: Sequence[Change],
    *,
    session: Session | None = None,
    store: str | os.PathLike[str] | None = None,
    hide: HiddenFiles | None = None,
) -> Step | None:
    """Write the paths in `changes` from `filesystem` to the directory `root`, in one transaction.

    `changes` is ``filesystem.changes(since)``, where ``since`` is the state in which `root` was mounted. It is one
    step of the workspace on disk, which ``undo`` reverses and which opening recovers after a crash. A new path has the
    permission bits of the workspace less the umask. ``session`` is the one that the step bears, and
    ``store`` where the history is, and ``hide`` the rule by which files are hidden, as for `Workspace.open`.

    Raises:
        WorkspaceConflictError: a path on disk is not what it was when it was mounted; nothing was written.
        WorkspaceLockedError: another process has the workspace.
        ValueError: a path that leads out, or a filesystem that is not in the state that `changes` describes.
        OSError: a write failed, and all is as it was.
        RestoreFailedError: a write failed, and the rollback, too.
    """
    changes = sorted(changes, key=lambda change: change.path)
    for change in changes:
        if change.path and not {"", ".", ".."}.isdisjoint(change.path.split("/")):
            raise ValueError(f"{change.path!r} is not a path of something in a workspace")
    if not changes:
        return None
    with Workspace.open(root, store=store, hide=hide) as workspace:
        disk = workspace.filesystem
        try:
            with workspace.transaction("apply", session=session, opaque=False):
                if conflicts := sorted(_conflicts(disk, changes)):
                    raise WorkspaceConflictError(conflicts)
                _write(disk, changes, _new_contents(filesystem, changes))
        except OSError as error:
            if error.errno not in CONFLICTS:
                raise
            raise WorkspaceConflictError([str(error.filename)]) from error
        return workspace.steps()[-1]


def _is_replaced(change: Change) -> bool:
    """Whether the path has another kind, or a link another target."""
    before, after = change.before, change.after
    return before is not None and after is not None and (before.kind, before.target) != (after.kind, after.target)


def _is_new(change: Change) -> bool:
    return change.after is not None and (change.before is None or _is_replaced(change))


def _is_removed(change: Change) -> bool:
    return change.before is not None and (change.after is None or _is_replaced(change))


def _has_other_mode(change: Change) -> bool:
    """Whether a file or directory that stays has other permission bits (those of a link mean nothing)."""
    before, after = change.before, change.after
    if before is None or after is None or _is_replaced(change):
        return False
    return after.kind != "symlink" and before.mode != after.mode


def _conflicts(disk: HostFilesystem, changes: Sequence[Change]) -> Iterator[str]:
    """Yield the paths that are on disk not as they were before the changes."""
    removed = {change.path for change in changes if _is_removed(change)}
    made = {change.path for change in changes if _is_new(change) and change.after and change.after.kind == "directory"}
    for change in changes:
        try:
            if not _is_as_before(disk, change, made):
                yield change.path
            elif change.path in removed and change.before is not None and change.before.kind == "directory":
                # Of files that were not mounted, such as a device, nobody else would have a copy.
                yield from {entry.path for entry in disk.list(change.path)} - removed
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            yield change.path


def _is_as_before(disk: HostFilesystem, change: Change, made: Set[str]) -> bool:
    path, before = change.path, change.before
    parent = path.rpartition("/")[0]
    while parent in made and before is None:
        parent = parent.rpartition("/")[0]
    if disk.resolve(parent) != parent or not disk.stat(parent).is_directory:
        return False
    if before is None:
        return not disk.exists(path)
    if before.kind == "symlink":
        target = disk.readlink(path)
        return before.target in (target, target_within(disk.root, path, target))
    found = disk.stat(path)
    if found.is_symlink or (_has_other_mode(change) and (found.mode ^ before.mode) & RWX):
        return False
    if before.kind == "directory":
        return found.is_directory
    return found.is_file and disk.content_hash(path) == before.content_hash


def _new_contents(filesystem: Filesystem, changes: Sequence[Change]) -> dict[str, bytes]:
    """Return the bytes of new and changed files by path."""
    contents: dict[str, bytes] = {}
    for change in changes:
        after = change.after
        if after is None or after.kind != "file":
            continue
        if change.before is None or change.before.content_hash != after.content_hash or _is_new(change):
            content = filesystem.read_bytes(change.path).content
            if hashlib.sha256(content).hexdigest() != after.content_hash:
                raise ValueError(f"{change.path} is not what the changes say: take them again")
            contents[change.path] = content
    return contents


def _write(disk: HostFilesystem, changes: Sequence[Change], contents: Mapping[str, bytes]) -> None:
    for change in reversed(changes):
        if _is_removed(change):
            disk.delete(change.path)
    for change in changes:
        path, after = change.path, change.after
        if path in contents:
            if not _is_new(change) and not disk.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            mode = "create" if _is_new(change) else "overwrite"
            disk.write_bytes(path, contents[path], mode=mode, create_parents=False)
        elif after is not None and _is_new(change):
            if after.target is not None:
                disk.symlink(path, after.target)
            else:
                disk.mkdir(path, parents=False, exist_ok=False)
    _set_modes(disk, changes)


def _set_modes(disk: HostFilesystem, changes: Sequence[Change]) -> None:
    umask = os.umask(0o077)
    os.umask(umask)
    for change in reversed(changes):  # a directory last: its bits may forbid to write in it
        after = change.after
        if after is None or after.kind == "symlink" or not (_is_new(change) or _has_other_mode(change)):
            continue
        mode = after.mode & RWX & ~(umask if _is_new(change) else 0)
        if disk.stat(change.path).mode & RWX != mode:
            disk.chmod(change.path, mode)
