"""Mounting: files of the host, or of other storage, are copied once into a workspace in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from ringfence.errors import ToolValidationError
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.paths import escape_path, normalise
from ringfence_sandbox import unfinished_calls
from ringfence_tools.contents import (
    Contents,
    LeftOut,
    Mounted,
    MountedDirectory,
    MountedFile,
    MountedLink,
    Selection,
    directories_above,
)
from ringfence_tools.host_files import collect_directory, collect_file, is_within

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://|::)")
LOCAL_URL = re.compile(r"(?:file|local)://")
ARCHIVES = frozenset({"zip", "tar", "libarchive"})
"""Kinds of storage inside one file of another storage that do no more than read that file."""


@dataclass(frozen=True, slots=True)
class HostMount:
    """What to copy into a workspace, and where to.

    `host_path` is a directory or file of the host, or an fsspec URL: ``s3://bucket/dir``, ``memory://dir``,
    ``zip://::archive.zip``. `mount_path` is where a directory's content, or the file itself, is in the workspace; with
    a "/" at its end, it is the directory that a file is put into. Without it, that is the root.

    The patterns follow the rules of `Filesystem.glob` and are relative to `host_path`. Files that match an include
    pattern are taken, or all where there is none; but none that matches an exclude pattern, or is in a directory that
    does. `max_bytes` bounds the sum of the files' sizes.

    A workspace on disk in which a tool call was killed cannot be mounted before it has been recovered. Of one with
    a store of its own (``Workspace.open(root, store=...)``) that is not known here: open it so before.

    A link that leads to another place of what is mounted is a link in the workspace too, or with `follow_symlinks` what
    it leads to. Any other is left out.
    """

    host_path: str | os.PathLike[str]
    mount_path: str | None = None
    include_glob: tuple[str, ...] = ()
    exclude_glob: tuple[str, ...] = ()
    max_bytes: int | None = None
    follow_symlinks: bool = False


@dataclass(frozen=True, slots=True)
class HostMountPreview:
    """What a mount put into the workspace."""

    host_path: str
    resolved_host: str
    """The real path on the host, or the URL."""
    mount_path: str
    """The path in the workspace: "" for the root."""
    entries: tuple[str, ...]
    """The names at the top, sorted; of a directory with a "/" after it."""
    is_directory: bool
    left_out: tuple[LeftOut, ...] = ()
    """What is missing although no pattern said so: links that lead out or nowhere, sockets, what could not be read."""
    excluded: int = 0
    """How many paths the patterns kept out; a directory counts once, with all that is in it."""
    files: int = 0
    size: int = 0
    """Bytes of all files."""


def mount_all(
    filesystem: InMemoryFilesystem,
    mounts: Iterable[HostMount],
    allowed_host_roots: Iterable[str | os.PathLike[str]] | None = None,
) -> tuple[HostMountPreview, ...]:
    """Copy what `mounts` name into `filesystem`: all of it, or nothing if there is anything wrong.

    Content, permission bits and modification times are kept, empty directories too. `allowed_host_roots` are the host
    directories (and URLs) below which mounts have to be, links resolved; None allows what the mounts name.

    Raises:
        ToolValidationError: a mount that cannot be made, and what to do about it.
    """
    roots = None if allowed_host_roots is None else _Roots(allowed_host_roots)
    collected = [_collect(mount, roots) for mount in mounts]
    layout = _Layout(filesystem)
    for one in collected:
        layout.add(one)
    layout.load()
    return tuple(one.preview for one in collected)


# -- from where


class _Roots:
    def __init__(self, roots: Iterable[str | os.PathLike[str]]) -> None:
        self._urls: list[str] = []
        self._directories: list[str] = []
        for root in roots:
            if _is_url(root):
                self._urls.append(str(root).rstrip("/"))
                continue
            try:
                self._directories.append(os.path.realpath(root, strict=True))
            except OSError as error:
                raise ToolValidationError(
                    f"the allowed host root {os.fspath(root)!r} {_describe_error(error)}"
                ) from error

    def check(self, real_path: str) -> None:
        if not any(is_within(root, real_path) for root in self._directories):
            raise ToolValidationError(
                f"it is not below an allowed host root ({', '.join(self._directories) or 'there are none'}): "
                "mount something that is, or add its directory to allowed_host_roots"
            )

    def check_url(self, url: str) -> None:
        *archives, stored = url.split("::")
        unknown = [one for one in archives if one.partition(":")[0] not in ARCHIVES]
        if not unknown and not _is_url(stored):
            return self.check(os.path.realpath(LOCAL_URL.sub("", stored)))
        inside = any(stored == root or stored.startswith(f"{root}/") for root in self._urls)
        if unknown or not inside or ".." in stored.split("/"):
            raise ToolValidationError(
                "it is not below an allowed host root: add the URL that it begins with to allowed_host_roots"
            )
        return None


def _is_url(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, str) and URL.match(path) is not None and LOCAL_URL.match(path) is None


def _describe_error(error: OSError) -> str:
    return "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be used: {error.strerror or error}"


@dataclass(frozen=True, slots=True)
class _Collected:
    preview: HostMountPreview
    below: str
    """The directory of the workspace that the paths in `contents` are relative to."""
    contents: Contents


def _collect(mount: HostMount, roots: _Roots | None) -> _Collected:
    host_path = os.fspath(mount.host_path)
    try:
        if not host_path or "\0" in host_path:
            raise ValueError("host_path is empty, or has a NUL: name a file, a directory or a URL")
        target = normalise(mount.mount_path or "")
        contents = Contents(Selection(mount.include_glob, mount.exclude_glob), mount.max_bytes)
        if _is_url(mount.host_path):
            resolved, is_directory = host_path, _collect_url(host_path, roots, contents)
        else:
            resolved, is_directory = _collect_host(LOCAL_URL.sub("", host_path), mount, roots, contents)
    except (ValueError, PermissionError) as error:
        raise ToolValidationError(f"{escape_path(host_path)!r} cannot be mounted: {error}") from error
    below = target
    if is_directory:
        contents.take_directories()
    elif target and not str(mount.mount_path).endswith("/"):
        below, _, name = target.rpartition("/")
        contents.entries = dict.fromkeys([name], *contents.entries.values()) if contents.entries else {}
    return _Collected(_preview(host_path, resolved, target, is_directory, contents), below, contents)


def _preview(host_path: str, resolved: str, target: str, is_directory: bool, contents: Contents) -> HostMountPreview:
    top = {path.partition("/")[0] for path in contents.entries if path}
    return HostMountPreview(
        host_path=host_path,
        resolved_host=resolved,
        mount_path=target,
        entries=tuple(
            f"{name}/" if isinstance(contents.entries[name], MountedDirectory) else name for name in sorted(top)
        ),
        is_directory=is_directory,
        left_out=tuple(sorted(contents.left_out, key=attrgetter("path"))),
        excluded=contents.excluded,
        files=sum(isinstance(mounted, MountedFile) for mounted in contents.entries.values()),
        size=contents.size,
    )


def _collect_host(host_path: str, mount: HostMount, roots: _Roots | None, contents: Contents) -> tuple[str, bool]:
    """The real path, and whether that is a directory."""
    try:
        resolved = os.path.realpath(host_path, strict=True)
        if roots is not None:
            roots.check(resolved)
        for call in unfinished_calls(resolved):
            if not call.is_running:
                raise ToolValidationError(str(call))
        is_directory = os.path.isdir(resolved)
        if is_directory:
            collect_directory(resolved, contents, follow_symlinks=mount.follow_symlinks)
        elif os.path.isfile(resolved):
            collect_file(resolved, os.path.basename(os.path.abspath(host_path)), contents)
        else:
            raise ToolValidationError("it is neither a file nor a directory")
    except OSError as error:
        raise ToolValidationError(f"it {_describe_error(error)}") from error
    if not is_directory and contents.left_out:
        raise ToolValidationError(contents.left_out[0].reason)
    return resolved, is_directory


def _collect_url(url: str, roots: _Roots | None, contents: Contents) -> bool:
    if roots is not None:
        roots.check_url(url)
    from ringfence_tools.stored_files import collect_url  # fsspec, which most mounts do not need

    try:
        return collect_url(url, contents)
    except ToolValidationError:
        raise
    except Exception as error:  # whatever library is behind the URL
        raise ToolValidationError(f"{type(error).__name__}: {error}") from error


# -- into the workspace


class _Layout:
    """What is to be where, looked at as a whole before any of it is loaded."""

    def __init__(self, filesystem: InMemoryFilesystem) -> None:
        self._filesystem = filesystem
        self._was_empty = not filesystem.list("")
        self._places: dict[str, tuple[Mounted, str]] = {}

    def add(self, collected: _Collected) -> None:
        source = collected.preview.host_path
        below = collected.below
        for path in (below, *directories_above(below)) if below else ():
            self._put(path, MountedDirectory(0o755, None), source)
        prefix = f"{below}/" if below else ""
        for path, mounted in collected.contents.entries.items():
            self._put(prefix + path if path else below, mounted, source)

    def _put(self, path: str, mounted: Mounted, source: str) -> None:
        there, other = self._places.get(path, (None, "what the workspace has already"))
        is_directory = isinstance(mounted, MountedDirectory)
        if there is None and not self._was_empty and self._filesystem.exists(path):
            if not (is_directory and self._is_directory(path)):
                raise self._collision(path, other, source)
            return
        if there is not None and not (is_directory and isinstance(there, MountedDirectory)):
            raise self._collision(path, other, source)
        if there is None or there.mtime_ns is None:
            self._places[path] = (mounted, source)

    def _is_directory(self, path: str) -> bool:
        return self._filesystem.resolve(path) == path and self._filesystem.stat(path).is_directory

    @staticmethod
    def _collision(path: str, one: str, other: str) -> ToolValidationError:
        return ToolValidationError(
            f"{escape_path(path)!r} would come from both {escape_path(one)} and {escape_path(other)}: "
            "give one of them another mount_path"
        )

    def load(self) -> None:
        directories: list[tuple[str, MountedDirectory]] = []
        for path, (mounted, _) in self._places.items():
            if isinstance(mounted, MountedFile):
                self._filesystem.load(path, mounted.content, mode=mounted.mode, mtime_ns=mounted.mtime_ns)
            elif isinstance(mounted, MountedLink):
                self._filesystem.load_symlink(path, mounted.target, mtime_ns=mounted.mtime_ns)
            else:
                directories.append((path, mounted))
        # What is put into a directory changes its time, so they come last, each after those in it.
        for path, mounted in sorted(directories, reverse=True):
            if path or mounted.mtime_ns is not None:
                self._filesystem.load_directory(path, mode=mounted.mode, mtime_ns=mounted.mtime_ns)
