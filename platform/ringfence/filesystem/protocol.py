"""What every filesystem offers, and the values it answers with.

Paths are POSIX, relative to the root: ``""``, ``"."`` and ``"/"`` are the root, and every spelling of a path is one
path. Names are kept as they are, blanks included; names that are not UTF-8 are `str` with surrogate escapes. Files
are bytes: nothing rewrites a byte that it was not asked to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from typing import Self

    from ringfence.participants import CallInfo, Change

WriteMode = Literal["create", "overwrite", "append"]

DEFAULT_READ_LIMIT = 2000
"""Lines that `Filesystem.read` returns where no limit is given."""
READ_ENTIRE_FILE = -1
"""The limit that means: all of it."""
MAX_GREP_MATCHES = 1000
MAX_WRITE_LENGTH = 48_000
"""Characters that the tools take in one text of one call. A `Filesystem` itself writes any length."""
MAX_TEXT_BYTES = 256 << 20
"""Of a file that the tools read or edit, or that is searched on disk, since all of it comes into memory. A `Filesystem`
itself reads any length."""


@dataclass(frozen=True, slots=True)
class FileStat:
    """``size_bytes`` is 0 for a directory; ``mode`` has the permission bits. A symlink answers for its target."""

    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int
    created_at: datetime
    modified_at: datetime
    mode: int = 0o644
    is_symlink: bool = False
    """True where the path itself is a symlink; the rest then describes what it leads to."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One name of a directory. A link that leads nowhere, or out of the root, is neither file nor directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool
    size_bytes: int = 0
    is_symlink: bool = False


@dataclass(frozen=True, slots=True)
class GlobMatch:
    """A path that a pattern fits."""

    path: str
    is_file: bool


@dataclass(frozen=True, slots=True)
class GrepMatch:
    """The first match of a line. ``match_start`` and ``match_end`` count characters of ``line_content``."""

    path: str
    line_number: int
    """From 1."""
    line_content: str
    match_start: int
    match_end: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Lines of a text file, as they are."""

    content: str
    path: str
    total_lines: int
    offset: int
    """The first line returned, from 0."""
    limit: int
    """How many lines were returned."""
    truncated: bool
    """Whether lines follow."""


@dataclass(frozen=True, slots=True)
class ReadBytesResult:
    """Bytes of a file."""

    content: bytes
    path: str
    size_bytes: int
    """Of the whole file."""
    offset: int
    limit: int
    """How many bytes were returned."""
    truncated: bool


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write has written."""

    path: str
    bytes_written: int
    mode: WriteMode


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FilesystemSnapshot:
    """A state of one filesystem to go back to. It keeps what it needs alive; dropping it is releasing it."""

    snapshot_id: str
    created_at: datetime
    commit_ref: str
    root_path: str
    git_dir: str | None = None
    tag: str | None = None


@runtime_checkable
class Filesystem(Protocol):
    """A workspace's files.

    All methods raise the built-in exceptions: FileNotFoundError, FileExistsError, IsADirectoryError,
    NotADirectoryError, PermissionError (outside of the root, or read-only) and ValueError. Writing and reading
    follow links inside the root; a link out of it is a PermissionError and a dangling one a FileNotFoundError.
    """

    @property
    def root(self) -> str:
        """Where the workspace is: a host path, or "/" for one in memory."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether every change is refused, with a PermissionError."""
        ...

    def for_call(self, call: CallInfo) -> Self:
        """The same filesystem for code that `call` runs, in any thread: what goes through it belongs to the call."""
        ...

    def resolve(self, path: str) -> str:
        """The one spelling of `path`: normalised, links followed as far as it exists; "" for the root.

        Equal results are one file. Never raises for a path that does not exist. PermissionError if it leaves the root,
        OSError (ELOOP) for links in a circle.
        """
        ...

    def content_hash(self, path: str) -> str:
        """The sha256 of a file's bytes, in hex. Does not count as a read."""
        ...

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Lines ``offset`` to ``offset + limit`` as text; None means 2,000 lines and -1 all of them.

        A line ends with \\n or \\r\\n and keeps its end, so reading all of a file gives its exact text.
        ValueError for what does not decode (read_bytes is the way), or for a negative offset.
        """
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Bytes ``offset`` to ``offset + limit``; None means to the end."""
        ...

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """`write_bytes` of the text in UTF-8, byte for byte: newlines are not translated."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The file replaced or appended to as a whole; its permission bits stay. Checks come before any effect.

        "create" is for a path where nothing is yet, not even a link (FileExistsError). ValueError for the root.
        """
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a directory; one that is not empty only with ``recursive``
        (IsADirectoryError). The root is a PermissionError."""
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. ``exist_ok`` is about a directory, or a link to one; anything else there is a
        FileExistsError."""
        ...

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file, link or directory; links are not followed. ``target`` is the new path itself, its parents
        are made. FileExistsError for an existing target unless ``overwrite``, which replaces files and links only
        (IsADirectoryError), and not by a directory (NotADirectoryError). ValueError for a directory into itself."""
        ...

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits, 0 to 0o7777, of what `path` leads to."""
        ...

    def symlink(self, path: str, target: str) -> None:
        """Make a link at ``path`` that leads to ``target``, taken as it is (relative to the link's directory). Its
        parents are made. FileExistsError where something is."""
        ...

    def readlink(self, path: str) -> str:
        """The target of a link as it was given; ValueError for what is no link."""
        ...

    def exists(self, path: str) -> bool:
        """False outside of the root too; true for a link, wherever it leads."""
        ...

    def stat(self, path: str) -> FileStat:
        """What `path` leads to; the ``path`` of the answer is the normal one, "/" for the root."""
        ...

    def list(self, path: str = "") -> Sequence[FileEntry]:
        """The names of a directory, sorted by code point."""
        ...

    def glob(self, pattern: str, *, path: str = "") -> Sequence[GlobMatch]:
        """Paths below ``path`` that match, sorted: ``*`` does not cross "/", ``**`` does, a leading dot is a character
        like any other. Links to directories are not descended into. A missing ``path`` has no matches. A pattern that
        ends with "/" matches directories only; ".." in one is a ValueError."""
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
        """The first match of every matching line, in order of path and line; binary files and links are passed over.

        As many as ``max_matches`` means that there may be more. ``path`` is a directory or a file that exists. Of a
        line beyond 500 characters, ``line_content`` is the part around the match.

        The dialect is RE2's, which takes linear time; ``literal`` looks for the text itself. ``glob`` without a "/"
        is matched against names, else against the path below ``path``. ValueError for a pattern that does not parse;
        TimeoutError for one that keeps the processor busy for a minute, or could with one line.
        """
        ...

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """The state now, to `restore`; in O(1)."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Go back to a snapshot, in any order. SnapshotRestoreError for one of another filesystem, and on disk where an
        opaque call has changed files since, or ran when it was taken, or runs."""
        ...

    def changes(self, since: FilesystemSnapshot) -> Sequence[Change]:
        """What differs between ``since`` and now, by path: a directory's own entry comes before what is in it."""
        ...


@runtime_checkable
class AnnouncedWrites(Protocol):
    """What a filesystem may have besides, where many files at once can be made safe for less than each on its own."""

    def announce(self, writes: Mapping[str, bytes]) -> None:
        """`write_bytes` is about to be given these contents, in this order. Nothing changes, and nothing is promised.

        Raises OSError where a file could not be made ready, as the write would.
        """
        ...


_WRITE_MODES = frozenset(get_args(WriteMode))


def check_write_mode(mode: str) -> None:
    """Raises ValueError for what is no `WriteMode`."""
    if mode not in _WRITE_MODES:
        raise ValueError(f"mode is one of {', '.join(sorted(_WRITE_MODES))}, not {mode!r}")


def check_permission_bits(mode: int) -> None:
    """Raises ValueError for what are no permission bits."""
    if mode & ~0o7777:
        raise ValueError(f"mode has the permission bits, from 0 to 0o7777, it cannot be {mode:#o}")


def check_bytes_asked(offset: int, limit: int | None) -> None:
    """Raises ValueError for what are no numbers of bytes."""
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"offset and limit count bytes, they cannot be negative: {offset}, {limit}")


def encode_text(text: str) -> bytes:
    """The UTF-8 of a text. Raises ValueError for one that no file can hold."""
    try:
        return str.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text cannot be written as UTF-8: it has the lone surrogate {text[error.start]!r} at "
            f"character {error.start}; write_bytes takes any bytes"
        ) from None
