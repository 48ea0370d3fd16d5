"""Archives as workspaces. They come from elsewhere: what is in one goes nowhere but into its own directory."""

from __future__ import annotations

import os
import tarfile
import tempfile
import zipfile
from pathlib import Path

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
"""How the names of archives end."""


def unpack_archive(archive: Path, into: Path) -> None:
    """Unpack an archive to `into`, which does not exist yet. If all of it is in one directory, that is unpacked.

    Raises:
        ValueError, tarfile.TarError, zipfile.BadZipFile, EOFError: it is damaged, or leads out of its directory.
        OSError: it is damaged, or the files cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=into.parent) as place:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(place)  # noqa: S202  # it takes no names that lead elsewhere
        else:
            with tarfile.open(archive) as packed:
                _extract(packed, os.path.realpath(place))
        entries = list(Path(place).iterdir())
        root = entries[0] if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink() else Path(place)
        into.mkdir()
        for entry in list(root.iterdir()):
            entry.rename(into / entry.name)


def check_archive(archive: Path) -> None:
    """Read all of an archive. Raises as `unpack_archive` for one that is damaged."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            if (damaged := zipped.testzip()) is not None:
                raise ValueError(f"{damaged} in it is damaged")
    else:
        with tarfile.open(archive) as packed:
            for _member in packed:
                pass


def trust(packed: tarfile.TarFile) -> tarfile.TarFile:
    """Have an archive of our own extract all that is in it, on each version of Python.

    The filters of `tarfile` are not in the first versions of 3.11, and from 3.14 on one of them is the default.
    """
    packed.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    return packed


def _extract(packed: tarfile.TarFile, place: str) -> None:
    """Extract files, directories and links, as `tarfile.data_filter` does where there is one."""
    for member in trust(packed):
        member.name = member.name.lstrip("/")
        _refuse_outside(member.name, place, member)
        if member.issym() or member.islnk():
            if os.path.isabs(member.linkname):
                raise ValueError(f"{member.name} in it is a link to {member.linkname}")
            beside = os.path.dirname(member.name) if member.issym() else ""
            _refuse_outside(os.path.join(beside, member.linkname), place, member)
        elif member.isreg():
            member.mode = member.mode & 0o755 | 0o600
        elif member.isdir():
            member.mode = 0o755
        else:
            raise ValueError(f"{member.name} in it is a device or a pipe")
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        packed.extract(member, place)


def _refuse_outside(path: str, place: str, member: tarfile.TarInfo) -> None:
    """Raise ValueError for a path that leads out of the place, by the links that are there until now."""
    target = os.path.realpath(os.path.join(place, path))
    if os.path.commonpath((target, place)) != place:
        raise ValueError(f"{member.name} in it leads out of the archive")
