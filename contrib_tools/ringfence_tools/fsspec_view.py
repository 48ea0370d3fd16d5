"""A workspace as an fsspec filesystem. Libraries such as pandas and pyarrow can open its files."""

# fsspec has no types. What comes out of it is checked here where it is used; its own methods are called as they are.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import stringify_path, tokenize

from ringfence.filesystem.paths import is_link, os_error
from ringfence.filesystem.protocol import FileEntry, Filesystem, WriteMode

WRITE_MODES: Mapping[str, WriteMode] = {"wb": "overwrite", "ab": "append", "xb": "create"}
Info = dict[str, object]


class WorkspaceFileSystem(AbstractFileSystem):
    """``fsspec.filesystem("ringfence", filesystem=...)``, and paths such as ``ringfence://data/a.csv`` with
    ``storage_options={"filesystem": ...}``.

    With the filesystem of a tool call (``context.filesystem``), every write is part of the call. A file is written as a
    whole when it is closed. Names have no leading "/". `ls` gives a link to a directory the type "link", so that a walk
    does not go in circles. `info` describes the target of a link. A broken link has the type "other".
    """

    protocol = "ringfence"
    root_marker = ""
    cachable = False  # two workspaces may look alike to fsspec's instance cache

    def __init__(self, filesystem: Filesystem | None = None, **options: Any) -> None:
        if filesystem is None:
            raise TypeError('say which workspace: fsspec.filesystem("ringfence", filesystem=...)')
        super().__init__(**options)
        self._filesystem = filesystem

    @property
    def _fs_token(self) -> Any:
        # Views of one filesystem are equal. fsspec would compare reprs, which two filesystems may share.
        return tokenize(type(self).__qualname__, id(self._filesystem))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = stringify_path(path)
        for start in ("ringfence://", "ringfence::"):
            text = text.removeprefix(start)
        return "/".join(name for name in text.split("/") if name not in ("", "."))

    # -- looking

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self._filesystem.stat(path).is_directory:
            found = [_of_entry(entry) for entry in self._filesystem.list(path)]
        else:
            found = [self.info(path)]
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> Info:
        path = self._strip_protocol(path)
        stat = self._filesystem.stat(path)
        return {
            "name": path,
            "size": stat.size_bytes,
            "type": "directory" if stat.is_directory else "file" if stat.is_file else "other",
            "created": stat.created_at,
            "mtime": stat.modified_at,
            "mode": stat.mode,
            "islink": stat.is_symlink,
        }

    def lexists(self, path: str, **kwargs: Any) -> bool:
        return self._filesystem.exists(self._strip_protocol(path))

    def created(self, path: str) -> datetime:
        return self._filesystem.stat(self._strip_protocol(path)).created_at

    def modified(self, path: str) -> datetime:
        return self._filesystem.stat(self._strip_protocol(path)).modified_at

    # -- reading

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        if (start or 0) < 0 or (end or 0) < 0:
            start, end, _ = slice(start, end).indices(self._filesystem.stat(path).size_bytes)
        offset = start or 0
        limit = None if end is None else max(0, end - offset)
        return self._filesystem.read_bytes(path, offset=offset, limit=limit).content

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **options: Any
    ) -> Any:
        if mode == "rb":
            info = self.info(path)
            if info["type"] == "directory":
                raise os_error(errno.EISDIR, path)
            return FileReader(self, path, block_size=block_size, size=info["size"], **options)
        if mode not in WRITE_MODES:
            raise ValueError(f"mode {mode!r}: a workspace's files are opened with rb, {', '.join(WRITE_MODES)}")
        # Raise when the file is opened what the write would raise when it is closed.
        if self._filesystem.read_only:
            raise PermissionError(errno.EROFS, "the workspace is read-only", path)
        if self._filesystem.exists(path):
            if mode == "xb":
                raise os_error(errno.EEXIST, path)
            if self._filesystem.stat(path).is_directory:
                raise os_error(errno.EISDIR, path)
        return FileWriter(self._filesystem, path, WRITE_MODES[mode], autocommit=autocommit)

    # -- writing

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        self._filesystem.write_bytes(path, bytes(value), mode="create" if mode == "create" else "overwrite")

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        self._filesystem.write_bytes(path, b"", mode="overwrite" if truncate else "append")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self._filesystem.stat(path1).is_directory:
            self._filesystem.mkdir(path2)
        else:
            self._filesystem.write_bytes(path2, self._filesystem.read_bytes(path1).content)

    def copy(self, path1: Any, path2: Any, recursive: bool = False, **options: Any) -> None:
        path1, path2 = self._into(path1, path2, recursive and isinstance(path2, str) and self.isdir(path2))
        super().copy(path1, path2, recursive, **options)

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **options: Any) -> None:
        rpath, lpath = self._into(rpath, lpath, recursive and isinstance(lpath, str) and os.path.isdir(lpath))
        super().get(rpath, lpath, recursive, **options)

    def _into(self, source: Any, target: Any, into: bool) -> tuple[Any, Any]:
        """A directory goes into one that exists by its name, which fsspec loses where that has no "/" in it."""
        if into and isinstance(source, str) and not source.endswith("/"):
            name = self._strip_protocol(source)
            if name and "/" not in name and self.isdir(name):
                return f"{name}/", f"{target.rstrip('/')}/{name}"
        return source, target

    def mv(self, path1: Any, path2: Any, **options: Any) -> None:
        """As the shell's: into `path2` where that is a directory. A directory or file moves as one, links as links."""
        if not isinstance(path1, str) or not self.lexists(path1):
            super().mv(path1, path2, **options)  # a list, or a glob
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(target) and source != target:
            target = f"{target}/{source.rpartition('/')[2]}".lstrip("/")
        if source != target:
            self._filesystem.move(source, target, overwrite=True)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        self._filesystem.mkdir(self._strip_protocol(path), parents=create_parents, exist_ok=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._filesystem.mkdir(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        path = self._strip_protocol(path)
        if not self._is_own_directory(path):
            raise os_error(errno.ENOTDIR, path)
        if self._filesystem.list(path):
            raise os_error(errno.ENOTEMPTY, path)
        self._filesystem.delete(path)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if self._is_own_directory(path):
            raise IsADirectoryError(errno.EISDIR, "is a directory: use recursive=True", path)
        self._filesystem.delete(path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def rm(self, path: str | Sequence[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        by_depth = recursive and maxdepth is not None
        for found in reversed(self.expand_path(path, recursive=by_depth, maxdepth=maxdepth if by_depth else None)):
            if not recursive or not self._is_own_directory(found):
                self.rm_file(found)
            elif by_depth:
                self.rmdir(found)
            else:
                self._filesystem.delete(found, recursive=True)

    def _is_own_directory(self, path: str) -> bool:
        """Whether a path is a directory. A link to one is not. Raises FileNotFoundError if it does not exist."""
        if not self._filesystem.exists(path):
            raise os_error(errno.ENOENT, path)
        return not is_link(self._filesystem, path) and self._filesystem.stat(path).is_directory


def _of_entry(entry: FileEntry) -> Info:
    kind = "file" if entry.is_file else "other"
    if entry.is_directory:
        kind = "link" if entry.is_symlink else "directory"
    return {"name": entry.path, "size": entry.size_bytes, "type": kind, "islink": entry.is_symlink}


class FileReader(AbstractBufferedFile):
    """A file opened for reading. It reads only the ranges that are asked for."""

    def __init__(self, fs: WorkspaceFileSystem, path: str, **options: Any) -> None:
        self._modified_at = fs.modified(path)
        super().__init__(fs, path, "rb", **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self.fs.modified(self.path) != self._modified_at:
            raise OSError(errno.ESTALE, "changed while it was being read: open it again", self.path)
        return self.fs.cat_file(self.path, start, end)


class FileWriter(io.BytesIO):
    """A file opened for writing: kept here, and written as a whole when it is closed, or by `commit` of fsspec's
    transactions."""

    def __init__(self, filesystem: Filesystem, path: str, mode: WriteMode, *, autocommit: bool) -> None:
        super().__init__()
        self._filesystem = filesystem
        self.path = path
        self._mode: WriteMode = mode
        self._autocommit = autocommit
        appends = mode == "append" and filesystem.exists(path)
        self._before = filesystem.stat(path).size_bytes if appends else 0
        self._content: bytes | None = None

    def tell(self) -> int:
        return self._before + super().tell()

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        if self._autocommit:
            self._filesystem.write_bytes(self.path, content, mode=self._mode)
        else:
            self._content = content

    def commit(self) -> None:
        self.close()
        if self._content is not None:
            self._filesystem.write_bytes(self.path, self._content, mode=self._mode)

    def discard(self) -> None:
        self._autocommit = False
        self.close()
