"""Mounts: files of the host or of other storage, copied once into a workspace in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ringfence.errors import ToolValidationError
from ringfence.escapes import escape_path
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.paths import normalise
from ringfence_sandbox import Repository, unfinished_calls
from ringfence_tools.contents import Contents, LeftOut, MountedEntry, directories_above
from ringfence_tools.host_files import collect_directory, collect_file, is_within

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://|::)")
LOCAL_URL = re.compile(r"(?:file|local)://")
ARCHIVES = frozenset({"zip", "tar", "libarchive"})
"""Kinds of storage that only read one file of another storage, such as an archive."""


@dataclass(frozen=True, slots=True)
class HostMount:
    """A directory or file to copy into a workspace, and its path there.

    `host_path` is a directory or file of the host, or an fsspec URL: ``s3://bucket/dir``, ``memory://dir``,
    ``zip://::archive.zip``. `mount_path` is where a directory's content, or the file itself, is in the workspace; with
    a "/" at its end, it is the directory that a file is put into. Without it, that is the root.

    The patterns follow the rules of `Filesystem.glob` and are relative to `host_path`. A mount takes the files that
    match an include pattern. Without include patterns it takes all files. It takes no path that matches an exclude
    pattern, and nothing below such a path. `max_bytes` bounds the sum of the files' sizes.

    A workspace on disk in which a tool call was killed must be recovered before it is mounted. A mount cannot see this
    if the workspace has its own store (``Workspace.open(root, store=...)``). Open such a workspace first.

    A link to a path inside the mount stays a link. With `follow_symlinks` its target is copied in its place. Links
    that lead out are left out. So are paths that are more than 200 directories deep.
    """

    host_path: str | os.PathLike[str]
    mount_path: str | None = None
    include_glob: tuple[str, ...] = ()
    exclude_glob: tuple[str, ...] = ()
    max_bytes: int | None = None
    follow_symlinks: bool = False


@dataclass(frozen=True, slots=True)
class HostMountPreview:
    """The record of one mount."""

    host_path: str
    resolved_host: str
    """The real path on the host, or the URL."""
    mount_path: str
    """The path in the workspace: "" for the root."""
    entries: tuple[str, ...]
    """The sorted names at the top of the mount. A directory ends with "/"."""
    is_directory: bool
    left_out: tuple[LeftOut, ...] = ()
    """Paths that are missing for another reason than a pattern: links that lead out, sockets, unreadable files."""
    excluded: int = 0
    """The number of paths that the patterns excluded. A directory counts once."""
    files: int = 0
    size: int = 0
    """The sum of the files' sizes."""


def mount_all(
    filesystem: InMemoryFilesystem,
    mounts: Iterable[HostMount],
    allowed_host_roots: Iterable[str | os.PathLike[str]] | None = None,
) -> tuple[HostMountPreview, ...]:
    """Copy all `mounts` into `filesystem`, or none if one of them fails.

    The copy has the content, permission bits and modification times of the files, and empty directories.
    `allowed_host_roots` are directories and URLs. Every mount must be below one of them after links are resolved. None
    allows every mount.

    Raises:
        ToolValidationError: a mount cannot be made. The message says what to do.
    """
    roots = None if allowed_host_roots is None else [_resolve_root(root) for root in allowed_host_roots]
    collected = [_collect(mount, roots) for mount in mounts]
    was_empty = not filesystem.list("")
    places: dict[str, tuple[MountedEntry, str]] = {}
    for preview, entries in collected:
        for path, entry in entries.items():
            there, source = places.get(path, (None, "what the workspace has already"))
            if there is None and not was_empty and filesystem.exists(path):
                is_directory = filesystem.resolve(path) == path and filesystem.stat(path).is_directory
            elif there is None:
                places[path] = entry, preview.host_path
                continue
            else:
                is_directory = there.is_directory
                if there.mtime_ns is None:
                    places[path] = entry, preview.host_path
            if not is_directory or not entry.is_directory:
                raise ToolValidationError(
                    f"{escape_path(path)!r} would come from both {escape_path(source)} and "
                    f"{escape_path(preview.host_path)}: give one of them another mount_path"
                )
    _load(filesystem, {path: entry for path, (entry, _) in places.items()})
    previews = tuple(preview for preview, _ in collected)
    if was_empty and len(previews) == 1 and _is_whole(previews[0]):
        filesystem.repository_rules = Repository(previews[0].resolved_host).rules
    return previews


def _is_whole(preview: HostMountPreview) -> bool:
    """Whether a directory of the host is all of the filesystem."""
    return preview.is_directory and not preview.mount_path and not _is_url(preview.resolved_host)


def _load(filesystem: InMemoryFilesystem, entries: Mapping[str, MountedEntry]) -> None:
    for path, entry in entries.items():
        if isinstance(entry.content, bytes):
            filesystem.load(path, entry.content, mode=_mode(entry, 0o644), mtime_ns=entry.mtime_ns)
        elif isinstance(entry.content, str):
            filesystem.load_symlink(path, entry.content, mtime_ns=entry.mtime_ns)
    # An entry that is put into a directory changes its time. So directories come last, the deepest first.
    for path in sorted((path for path, entry in entries.items() if entry.is_directory), reverse=True):
        if path or entries[path].mtime_ns is not None:
            filesystem.load_directory(path, mode=_mode(entries[path], 0o755), mtime_ns=entries[path].mtime_ns)


def _mode(entry: MountedEntry, usual: int) -> int:
    return usual if entry.mode is None else entry.mode


def _resolve_root(root: str | os.PathLike[str]) -> str:
    if _is_url(root):
        return str(root).rstrip("/")
    try:
        return os.path.realpath(root, strict=True)
    except OSError as error:
        raise ToolValidationError(f"the allowed host root {os.fspath(root)!r} {_describe_error(error)}") from error


def _check_allowed(place: str, roots: Sequence[str]) -> None:
    """Raise ToolValidationError for a path or a URL that is below none of the roots."""
    *archives, stored = place.split("::") if _is_url(place) else [place]
    if not _is_url(stored):
        stored = os.path.realpath(LOCAL_URL.sub("", stored))
    known = all(archive.partition(":")[0] in ARCHIVES for archive in archives)
    if not known or ".." in stored.split("/") or not any(is_within(root, stored) for root in roots):
        raise ToolValidationError(
            f"it is not below an allowed host root ({', '.join(roots) or 'there are none'}): mount something that is, "
            "or add its directory, or what its URL begins with, to allowed_host_roots"
        )


def _is_url(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, str) and URL.match(path) is not None and LOCAL_URL.match(path) is None


def _describe_error(error: OSError) -> str:
    return "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be used: {error.strerror or error}"


def _collect(mount: HostMount, roots: Sequence[str] | None) -> tuple[HostMountPreview, Mapping[str, MountedEntry]]:
    """Return the record of a mount and its entries by path in the workspace."""
    host_path = os.fspath(mount.host_path)
    try:
        if not host_path or "\0" in host_path:
            raise ValueError("host_path is empty, or has a NUL: name a file, a directory or a URL")
        target = normalise(mount.mount_path or "")
        contents = Contents(mount.include_glob, mount.exclude_glob, mount.max_bytes)
        if _is_url(mount.host_path):
            resolved, is_directory = host_path, _collect_url(host_path, roots, contents)
        else:
            resolved, is_directory = _collect_host(LOCAL_URL.sub("", host_path), mount, roots, contents)
    except (ValueError, PermissionError) as error:
        raise ToolValidationError(f"{escape_path(host_path)!r} cannot be mounted: {error}") from error
    below = target
    if is_directory:
        contents.drop_unwanted_directories()
    elif target and not str(mount.mount_path).endswith("/"):
        below, _, name = target.rpartition("/")
        contents.entries = dict.fromkeys([name], *contents.entries.values()) if contents.entries else {}
    top = {path.partition("/")[0] for path in contents.entries if path}
    preview = HostMountPreview(
        host_path=host_path,
        resolved_host=resolved,
        mount_path=target,
        entries=tuple(f"{name}/" if contents.entries[name].is_directory else name for name in sorted(top)),
        is_directory=is_directory,
        left_out=tuple(sorted(contents.left_out, key=attrgetter("path"))),
        excluded=contents.excluded,
        files=sum(isinstance(entry.content, bytes) for entry in contents.entries.values()),
        size=contents.size,
    )
    if not below:
        return preview, contents.entries
    above = dict.fromkeys((below, *directories_above(below)), MountedEntry(None))
    return preview, above | {f"{below}/{path}".rstrip("/"): entry for path, entry in contents.entries.items()}


def _collect_host(
    host_path: str, mount: HostMount, roots: Sequence[str] | None, contents: Contents
) -> tuple[str, bool]:
    """Return the real path and whether it is a directory."""
    try:
        resolved = os.path.realpath(host_path, strict=True)
        if roots is not None:
            _check_allowed(resolved, roots)
        for call in unfinished_calls(resolved):
            if not call.is_running:
                raise ToolValidationError(str(call))
        if os.path.isdir(resolved):
            collect_directory(resolved, contents, follow_symlinks=mount.follow_symlinks)
            return resolved, True
        if not os.path.isfile(resolved):
            raise ToolValidationError("it is neither a file nor a directory")
        collect_file(resolved, os.path.basename(os.path.abspath(host_path)), contents)
        return resolved, False
    except OSError as error:
        raise ToolValidationError(f"it {_describe_error(error)}") from error


def _collect_url(url: str, roots: Sequence[str] | None, contents: Contents) -> bool:
    if roots is not None:
        _check_allowed(url, roots)
    from ringfence_tools.stored_files import collect_url  # fsspec, which most mounts do not need

    try:
        return collect_url(url, contents)
    except ToolValidationError:
        raise
    except Exception as error:  # whatever library is behind the URL
        raise ToolValidationError(f"{type(error).__name__}: {error}") from error
