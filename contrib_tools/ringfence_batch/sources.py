"""Fresh copies of what tasks work on: a directory, an archive, a URL, or a revision of a git repository."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from ringfence_batch.archives import ARCHIVES, check_archive, trust, unpack_archive
from ringfence_batch.task import BatchTask
from ringfence_sandbox import checkout_revision, resolve_revision
from ringfence_tools.contents import LeftOut

NO_SOURCE = f"it is no directory, and no archive that ends in {', '.join(ARCHIVES)}"


class SourceError(ValueError):
    """The workspace of a task is not there, is damaged, or is none."""


def copy_source(task: BatchTask, into: Path) -> None:
    """Copy the workspace of a task to `into`, which does not exist yet. The source itself stays as it is.

    Raises:
        SourceError: there is no such source, or it is damaged.
        OSError: the copy cannot be written, or a server does not answer.
    """
    try:
        local = local_source(task)
        if local is None:
            _fetch(task.workspace, into)
        elif task.revision is not None:
            checkout_revision(str(local), task.revision, into)
        else:
            _copy(local, into)
    except Exception as error:  # of fsspec, its protocols and three kinds of archives: each has errors of its own
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise
        reason = str(error) or type(error).__name__
        raise SourceError(f"the workspace {task.workspace} cannot be copied: {reason}") from error


def check_source(task: BatchTask) -> None:
    """Look for a workspace that is on the disk of this machine, and read all of an archive.

    Raises:
        SourceError: it is not there, it is damaged, or it is none.
    """
    local = local_source(task)
    if local is None:
        return
    if not local.exists():
        raise SourceError(f"there is no workspace {local}")
    try:
        if task.revision is not None:
            resolve_revision(local, task.revision)
        elif local.is_dir():
            os.scandir(local).close()
        elif local.name.endswith(ARCHIVES):
            check_archive(local)
        else:
            raise SourceError(NO_SOURCE)
    except Exception as error:  # three kinds of archives and git: each has errors of its own
        reason = str(error) or type(error).__name__
        raise SourceError(f"the workspace {local} cannot be used: {reason}") from error


def describe_left_out(task: BatchTask, tree: Path) -> Sequence[LeftOut]:
    """Return what the repository of a task's revision has and its copy has not."""
    if task.revision is None:
        return ()
    found = [LeftOut(".git", "the copy of a revision is without it: no git command works there")]
    for place, directories, files in os.walk(tree):
        if not directories and not files and place != str(tree):  # else git has no empty directory
            path = Path(place).relative_to(tree).as_posix()
            found.append(LeftOut(path, "a submodule, which is an empty directory in the copy of a revision"))
    return found


def local_source(task: BatchTask) -> Path | None:
    """Return the place of a workspace that is on the disk of this machine, also by a ``file:`` URL."""
    url = urlsplit(task.workspace)
    if url.scheme == "file":
        return Path(unquote(url.path))
    return None if url.scheme else Path(task.workspace)


def pack_source(task: BatchTask, into: Path) -> None:
    """Pack the workspace of a task into a file, which is there whole or not at all. It has what `copy_source` copies.

    Raises:
        SourceError: there is no such source, or it is damaged.
        OSError: the pack cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=into.parent) as place:
        copy_source(task, Path(place, "tree"))
        with tarfile.open(Path(place, "pack"), "w") as pack:
            pack.add(Path(place, "tree"), ".", filter=_of_anybody)
        Path(place, "pack").replace(into)


def _of_anybody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The files are those of whoever unpacks them, as those of a copy are."""
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return member


def unpack_source(pack: Path, into: Path) -> None:
    """Unpack what `pack_source` has packed to `into`, which does not exist yet. Raises OSError."""
    with tarfile.open(pack) as packed:
        trust(packed).extractall(into)  # noqa: S202  # links that lead outside are part of a tree


def _copy(source: Path, into: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, into, symlinks=True, ignore=_special)
    elif source.name.endswith(ARCHIVES):
        unpack_archive(source, into)
    else:
        raise SourceError(NO_SOURCE)


def _special(directory: str, names: list[str]) -> list[str]:
    """Sockets, pipes and devices, which are no content."""
    there = ((name, Path(directory, name)) for name in names)
    return [name for name, path in there if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _fetch(url: str, into: Path) -> None:
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    filesystem, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(url))  # pyright: ignore[reportUnknownMemberType]
    if not filesystem.exists(path):
        raise FileNotFoundError(f"there is nothing at {url}")
    if filesystem.isdir(path):
        filesystem.get(path.rstrip("/") + "/", str(into), recursive=True)
        return
    with tempfile.TemporaryDirectory(dir=into.parent) as place:
        local = Path(place, path.rstrip("/").rpartition("/")[2])
        filesystem.get_file(path, str(local))
        _copy(local, into)
