"""The protocol of filesystems, and the values that their methods return.

Paths are POSIX paths, relative to the root: ``""``, ``"."`` and ``"/"`` are the root. Paths with one normal form are
equal. Names are unchanged, blanks included. Names that are not UTF-8 are `str` with surrogate escapes. Files are bytes,
and no method changes a byte that it was not asked to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from typing import Self

    from ringfence.participants import CallInfo, Change

WriteMode = Literal["create", "overwrite", "append"]

DEFAULT_READ_LIMIT = 2000
"""The number of lines that `Filesystem.read` returns by default."""
READ_ENTIRE_FILE = -1
"""The limit of `Filesystem.read` for all lines."""
MAX_GREP_MATCHES = 1000
MAX_WRITE_LENGTH = 48_000
"""The longest text argument of a tool call, in characters. A `Filesystem` itself has no limit."""
MAX_TEXT_BYTES = 256 << 20
"""The largest file that the tools read or edit, or that is searched on disk: it is loaded into memory whole.

A `Filesystem` itself reads any length.
"""


@dataclass(frozen=True, slots=True)
class FileStat:
    """The properties of a path, or of its target if it is a symlink.

    ``size_bytes`` is 0 for a directory. ``mode`` has the permission bits.
    """

    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int
    created_at: datetime
    modified_at: datetime
    mode: int = 0o644
    is_symlink: bool = False
    """Whether the path itself is a symlink. The other fields then describe its target."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a directory. A dangling link, or one out of the root, is neither file nor directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int = 0
    is_symlink: bool = False


@dataclass(frozen=True, slots=True)
class GlobMatch:
    """A path that matches a glob pattern."""

    path: str
    is_file: bool


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """The first match of a line. ``match_start`` and ``match_end`` count characters of ``line_content``."""

    path: str
    line_number: int
    """The number of the line, from 1."""
    line_content: str
    match_start: int
    match_end: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Unchanged lines of a text file."""

    content: str
    path: str
    total_lines: int
    offset: int
    """The index of the first returned line, from 0."""
    limit: int
    """The number of returned lines."""
    truncated: bool
    """Whether the file has lines after the returned ones."""


@dataclass(frozen=True, slots=True)
class ReadBytesResult:
    """Bytes of a file."""

    content: bytes
    path: str
    size_bytes: int
    """The size of the whole file."""
    offset: int
    limit: int
    """The number of returned bytes."""
    truncated: bool


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a write."""

    path: str
    bytes_written: int
    mode: WriteMode


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FilesystemSnapshot:
    """A state of one filesystem that `restore` can return to. It is released when the object is deleted."""

    snapshot_id: str
    created_at: datetime
    commit_ref: str
    root_path: str
    git_dir: str | None = None
    tag: str | None = None


@runtime_checkable
class Filesystem(Protocol):
    """The files of a workspace.

    All methods raise the built-in exceptions: FileNotFoundError, FileExistsError, IsADirectoryError,
    NotADirectoryError, PermissionError (outside of the root, or read-only) and ValueError. Reads and writes follow
    links inside the root. A link out of the root raises PermissionError, and a dangling link FileNotFoundError.
    """

    @property
    def root(self) -> str:
        """The path of the workspace on the host, or "/" for a workspace in memory."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every change raises PermissionError."""
        ...

    def for_call(self, call: CallInfo) -> Self:
        """Return an object for the same files whose operations belong to `call`, in any thread."""
        ...

    def resolve(self, path: str) -> str:
        """Normalise `path` and follow its links, as far as the path exists. The root is "".

        Two paths with equal results are one file. A missing path raises nothing. A path out of the root raises
        PermissionError, and a circle of links raises OSError (ELOOP).
        """
        ...

    def content_hash(self, path: str) -> str:
        """The sha256 of a file's bytes, in hex. The call does not count as a read of the file."""
        ...

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Read lines ``offset`` to ``offset + limit`` as text. The limit None means 2,000 lines, and -1 all lines.

        A line ends with \\n or \\r\\n and keeps its end. Bytes that do not decode raise ValueError: use `read_bytes`.
        A negative offset raises ValueError too.
        """
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Read bytes ``offset`` to ``offset + limit``. The limit None means all bytes to the end."""
        ...

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a text in UTF-8 as `write_bytes` does. Newlines are not translated."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Create a file, replace its content or append to it. Its permission bits stay. An error changes nothing.

        Mode "create" raises FileExistsError if the path exists, even as a link. The root raises ValueError.
        """
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or a directory. The target of a link stays.

        A directory that is not empty raises IsADirectoryError, unless ``recursive`` is set. The root raises
        PermissionError.
        """
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. ``exist_ok`` permits an existing directory, or a link to one.

        Any other existing path raises FileExistsError.
        """
        ...

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, link or directory; links are not followed. ``target`` is the new path itself, its parents
        are made. FileExistsError for an existing target unless ``overwrite``, which replaces files and links only
        (IsADirectoryError), and not by a directory (NotADirectoryError). ValueError for a directory into itself."""
        ...

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits, 0 to 0o7777, of a path. A link is followed."""
        ...

    def symlink(self, path: str, target: str) -> None:
        """Make a symlink at ``path``, and its parents. An existing path raises FileExistsError.

        ``target`` is stored unchanged. It is relative to the link's directory.
        """
        ...

    def readlink(self, path: str) -> str:
        """The target of a link, unchanged. Raises ValueError for a path that is no link."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the path exists inside the root. A link exists even if its target does not."""
        ...

    def stat(self, path: str) -> FileStat:
        """The properties of a path. The ``path`` of the result is the normal form, or "/" for the root."""
        ...

    def list(self, path: str = "") -> Sequence[FileEntry]:
        """The entries of a directory, sorted by the code points of their names."""
        ...

    def glob(self, pattern: str, *, path: str = "") -> Sequence[GlobMatch]:
        """Return the paths below ``path`` that match a glob pattern, sorted.

        ``*`` does not match "/", and ``**`` does. A leading dot has no special meaning. Links to directories are not
        followed. A missing ``path`` has no matches. A pattern that ends with "/" matches only directories. A pattern
        with ".." raises ValueError.
        """
        ...

    def grep(
        self,
        pattern: str,
        *,
        path: str = "",
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
        literal: bool = False,
    ) -> Sequence[GrepMatch]:
        """Return the first match of every matching line, in the order of paths and lines.

        Binary files and links are skipped. Text in UTF-16 and UTF-32 is searched. A result of ``max_matches`` matches
        may be incomplete. ``path`` is an existing directory or file. ``line_content`` of a line of more than 500
        characters is the part around the match.

        ``pattern`` is a regular expression in RE2's dialect, or with ``literal`` a plain text. ``glob`` selects files:
        without a "/" it is matched against their names, and otherwise against their paths below ``path``.

        Raises ValueError for a pattern that does not parse. Raises TimeoutError for a pattern whose search takes more
        than a minute of processor time, or could take it for a single line.
        """
        ...

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Return the current state for `restore`, in O(1)."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Restore the state of a snapshot. Snapshots can be restored in any order.

        A snapshot of another filesystem raises SnapshotRestoreError. A filesystem on disk also raises it if an opaque
        call has changed files since the snapshot, or ran when it was taken, or still runs.
        """
        ...

    def changes(self, since: FilesystemSnapshot) -> Sequence[Change]:
        """The differences between ``since`` and now, sorted by path. A directory comes before its content."""
        ...


_WRITE_MODES = frozenset(get_args(WriteMode))


def check_write_mode(mode: str) -> None:
    """Raise ValueError for a mode that is no `WriteMode`."""
    if mode not in _WRITE_MODES:
        raise ValueError(f"mode is one of {', '.join(sorted(_WRITE_MODES))}, not {mode!r}")


def check_permission_bits(mode: int) -> None:
    """Raise ValueError for a mode that is not made of permission bits."""
    if mode & ~0o7777:
        raise ValueError(f"mode has the permission bits, from 0 to 0o7777, it cannot be {mode:#o}")


def check_bytes_asked(offset: int, limit: int | None) -> None:
    """Raise ValueError for an offset or a limit that is no number of bytes."""
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"offset and limit count bytes, they cannot be negative: {offset}, {limit}")


def encode_text(text: str) -> bytes:
    """Encode a text in UTF-8. Raises ValueError for a text that cannot be encoded."""
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text cannot be written as UTF-8: it has the lone surrogate {text[error.start]!r} at "
            f"character {error.start}; write_bytes takes any bytes"
        ) from None
