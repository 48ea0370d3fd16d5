"""The tools over files. They take the filesystem from the call's context, so they work with every backend."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path, escape_path
from ringfence.filesystem.edits import replace_exact
from ringfence.filesystem.encodings import BEGINNING_BYTES, WideEncoding, check_encoding, wide_encoding
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_WRITE_LENGTH, FileEntry, Filesystem
from ringfence.runtime.context import ToolContext
from ringfence.runtime.kept_results import kept_result
from ringfence.runtime.tool import ContentOf, Itself, Tool, Written
from ringfence.session.tool_result import ToolResult
from ringfence_sandbox import is_output
from ringfence_tools.handlers import (
    MAX_LISTED,
    PATH_ERRORS,
    FileHandlers,
    Unrendered,
    check_below_root,
    check_length,
    check_size,
    count_fitting_lines,
    describe_twins,
    explain,
    is_directory,
    require_existing,
)
from ringfence_tools.patching import PatchHandler, list_writes
from ringfence_tools.printable import plural
from ringfence_tools.searching import SearchHandlers

MAX_LINE_CHARACTERS = 2_000
_LONG_LINE = re.compile(rb"[^\n]{%d}" % (MAX_LINE_CHARACTERS + 1))
BYTE_ORDER_MARK = "\ufeff"
NOT_UTF8 = (
    "the file is not UTF-8: other bytes are shown as \\xNN, and stay as they are when other text is edited. To read "
    "them, name the encoding"
)


@dataclass(frozen=True, slots=True)
class ListDirectory:
    path: str | None = None


@dataclass(frozen=True, slots=True)
class FileInfo:
    path: str
    kind: Literal["file", "directory", "symlink"]
    size_bytes: int = 0
    """The size of a file. 0 for a directory. For a symlink, the size of its target."""
    leads_to: str | None = None
    """The target of a symlink; else None."""


@dataclass(frozen=True, slots=True)
class FileListing:
    path: str
    entries: tuple[FileInfo, ...]
    left_out: int = 0
    """The number of entries that are not listed for lack of room."""

    def render(self) -> str:
        sizes = [f"{entry.size_bytes:,}" if entry.kind == "file" else "-" for entry in self.entries]
        width = max(map(len, sizes), default=0)
        lines: list[str] = []
        for entry, size in zip(self.entries, sizes, strict=True):
            end = "/" if entry.kind == "directory" else "" if entry.leads_to is None else f" -> {entry.leads_to}"
            lines.append(f"{entry.kind:<9}  {size:>{width}}  {entry.path.rpartition('/')[2]}{end}")
        if self.left_out:
            lines.append(f"[{self.left_out:,} more entries: use glob for a part of them]")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ReadFile:
    file_path: str = field(metadata={"description": "Relative to the root."})
    offset: int = field(default=0, metadata={"description": "Lines to skip."})
    limit: int = field(default=DEFAULT_READ_LIMIT, metadata={"description": "At most 2000 lines."})
    encoding: str | None = field(
        default=None, metadata={"description": "Of a file that is not UTF-8, UTF-16 or UTF-32, such as cp1252."}
    )

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ToolValidationError(f"offset is the number of lines to skip, it cannot be {self.offset}")
        if self.limit <= 0:
            raise ToolValidationError(f"limit is the number of lines to read, it cannot be {self.limit}")
        if self.encoding is not None:
            try:
                check_encoding(self.encoding)
            except ValueError as error:
                raise ToolValidationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class FileText:
    """Lines of a text file, or kind, size and hash of a binary file."""

    path: str
    content: str
    """The lines, each with its number before it, from 1. "" for a binary file."""
    offset: int
    """The number of lines before the first one shown."""
    limit: int
    """The number of lines shown."""
    total_lines: int
    notes: tuple[str, ...] = ()
    """Remarks for the model: lines that follow, unusual line ends, another encoding than UTF-8."""
    kind: str = "text"
    """"text", or the guessed type of a binary file."""
    size_bytes: int | None = None
    sha256: str | None = None

    def count_whole(self) -> int:
        """The number of lines before the first one that is cut. A line that is not is at most as long as the limit."""
        if len(self.content) > MAX_LINE_CHARACTERS:
            for number, line in enumerate(self.content.split("\n")):
                if len(line.partition(" | ")[2]) > MAX_LINE_CHARACTERS:
                    return number
        return self.limit

    def lines_shown(self) -> tuple[range, int] | None:
        if self.size_bytes is not None:
            return None  # a binary file is known by its hash
        return range(self.offset, self.offset + self.count_whole()), self.total_lines

    def render(self) -> str:
        if self.size_bytes is not None:
            return f"kind: {self.kind}\nsize: {plural(self.size_bytes, 'byte')}\nsha256: {self.sha256}"
        return "\n".join((self.content, *(f"[{note}]" for note in self.notes))) if self.notes else self.content


@dataclass(frozen=True, slots=True)
class WriteFile:
    file_path: str = field(metadata={"description": "Its directories are made."})
    content: str = field(metadata={"description": f"At most {MAX_WRITE_LENGTH:,} characters."})

    def __post_init__(self) -> None:
        check_below_root("file_path", self.file_path)
        check_length("content", len(self.content), "write the first part, then add the rest with edit_file")


@dataclass(frozen=True, slots=True)
class WrittenFile(Unrendered):
    path: str
    size_bytes: int
    created: bool


@dataclass(frozen=True, slots=True)
class EditFile:
    file_path: str
    old_string: str = field(metadata={"description": "Exactly as it is in the file, without line numbers."})
    new_string: str
    replace_all: bool = False

    def __post_init__(self) -> None:
        check_below_root("file_path", self.file_path)
        for name, text in (("old_string", self.old_string), ("new_string", self.new_string)):
            check_length(name, len(text), "make several smaller edits")
        if not self.old_string:
            raise ToolValidationError("old_string is empty: quote the text to replace (write_file makes a new file)")
        if self.old_string == self.new_string:
            raise ToolValidationError("old_string and new_string are the same: there is nothing to change")


@dataclass(frozen=True, slots=True)
class EditedFile(Unrendered):
    path: str
    replacements: int
    lines: tuple[int, ...]
    """The lines of the edited file where the replacements begin, from 1. At most a thousand."""


@dataclass(frozen=True, slots=True)
class MoveParams:
    source: str
    target: str = field(metadata={"description": "The new path, name included. A file there is replaced."})

    def __post_init__(self) -> None:
        check_below_root("source", self.source)
        check_below_root("target", self.target)


@dataclass(frozen=True, slots=True)
class MovedFile(Unrendered):
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    path: str
    recursive: bool = field(default=False, metadata={"description": "A directory with all that is in it."})

    def __post_init__(self) -> None:
        check_below_root("path", self.path)


@dataclass(frozen=True, slots=True)
class RemovedFiles(Unrendered):
    path: str
    entries: int
    """The number of files, links and directories that were removed."""


class _FileTools(SearchHandlers, PatchHandler, FileHandlers):
    """The handlers of the nine tools, each named as its tool."""

    def ls(self, params: ListDirectory, *, context: ToolContext) -> ToolResult[FileListing]:
        filesystem, path = self._open(context, params.path)
        try:
            found = filesystem.list(path)
        except PATH_ERRORS as error:
            raise explain(error, filesystem, path, ": read it with read_file") from None
        entries = tuple(_file_info(filesystem, entry) for entry in found[:MAX_LISTED])
        directories = sum(entry.is_directory for entry in found)
        listing = FileListing(display_path(path), entries, left_out=len(found) - len(entries))
        counts = f"{plural(directories, 'directory')}, {plural(len(found) - directories, 'file')}"
        return ToolResult.ok(listing, f"{listing.path}: {counts}")

    def read_file(self, params: ReadFile, *, context: ToolContext) -> ToolResult[FileText]:
        filesystem, path = self._open(context, params.file_path)
        limit = min(params.limit, DEFAULT_READ_LIMIT)
        if path.startswith(".ringfence"):
            if (kept := kept_result(context.session, path)) is not None and not filesystem.exists(path):
                return _show_output(path, kept, params.offset, limit, "a call answered", context)
            if (printed := _find_long_lined_output(filesystem, path)) is not None:
                return _show_output(path, printed, params.offset, limit, "a command printed", context)
        check_size(filesystem, path)
        try:
            if params.encoding is not None:
                return _show_decoded(filesystem, path, params.offset, limit, params.encoding, context)
            read = filesystem.read(path, offset=params.offset, limit=limit)
        except PATH_ERRORS as error:
            raise explain(error, filesystem, path, ": list it with ls") from None
        except ToolValidationError:
            raise
        except ValueError:  # not UTF-8: a bad path has raised above
            return _show_unusual_file(filesystem, path, params.offset, limit, context)
        if "\0" in read.content:
            return _show_unusual_file(filesystem, path, params.offset, limit, context)
        return _show_lines(path, read.content, params.offset, read.total_lines, context)

    def write_file(self, params: WriteFile, *, context: ToolContext) -> ToolResult[WrittenFile]:
        filesystem, path = self._open(context, params.file_path)
        shown = escape_path(path) or "/"
        content = params.content.encode()
        created = not filesystem.exists(path)
        twins = describe_twins(filesystem, path) if created else ""
        try:
            if not path:
                raise IsADirectoryError
            filesystem.write_bytes(path, content)
        except IsADirectoryError:
            raise ToolValidationError(f"{shown} is a directory: name a file in it") from None
        except NotADirectoryError:
            raise ToolValidationError(_describe_file_above(path)) from None
        action = "created" if created else "replaced"
        size = "1 byte" if len(content) == 1 else f"{len(content):,} bytes"
        return ToolResult(f"{action} {shown} ({size}){twins}", WrittenFile(shown, len(content), created))

    def edit_file(self, params: EditFile, *, context: ToolContext) -> ToolResult[EditedFile]:
        filesystem, path = self._open(context, params.file_path)
        check_size(filesystem, path)
        try:
            content = filesystem.read_bytes(path).content
        except PATH_ERRORS as error:
            raise explain(error, filesystem, path, ", only files can be edited") from None
        shown = display_path(path)
        try:
            edit = replace_exact(content, params.old_string, params.new_string, replace_all=params.replace_all)
        except ValueError as error:
            raise ToolValidationError(f"{shown} was not changed: {error}") from None
        filesystem.write_bytes(path, edit.content)
        lines = ", ".join(map(str, edit.lines[:20])) + (", ..." if edit.count > 20 else "")
        places = f"line {lines}" if edit.count == 1 else f"{edit.count:,} places, at lines {lines}"
        return ToolResult.ok(EditedFile(shown, edit.count, edit.lines[:MAX_LISTED]), f"edited {shown}: {places}")

    def move(self, params: MoveParams, *, context: ToolContext) -> ToolResult[MovedFile]:
        filesystem, source = self._open(context, params.source)
        _, target = self._open(context, params.target)
        moved = MovedFile(display_path(source), display_path(target))
        if source == target:
            raise ToolValidationError(f"{moved.source} is there already: source and target are the same")
        require_existing(filesystem, source)
        if is_directory(filesystem, target):
            inside = display_path(f"{target}/{source.rpartition('/')[2]}".lstrip("/"))
            raise ToolValidationError(f"{moved.target} is a directory: target is the new path itself, such as {inside}")
        twins = describe_twins(filesystem, target, source)
        try:
            filesystem.move(source, target, overwrite=True)
        except NotADirectoryError:
            there = f"{moved.target} is a file, which a directory does not replace: name another target"
            raise ToolValidationError(there if filesystem.exists(target) else _describe_file_above(target)) from None
        except ValueError as error:
            raise ToolValidationError(str(error)) from None
        return ToolResult.ok(moved, f"moved {moved.source} to {moved.target}{twins}")

    def rm(self, params: Remove, *, context: ToolContext) -> ToolResult[RemovedFiles]:
        filesystem, path = self._open(context, params.path)
        shown = display_path(path)
        require_existing(filesystem, path)
        entries = 1
        if is_directory(filesystem, path) and not filesystem.stat(path).is_symlink:
            entries += len(filesystem.glob("**", path=path))
            if entries > 1 and not params.recursive:
                raise ToolValidationError(f"{shown} is a directory that is not empty: set recursive to remove it all")
        filesystem.delete(path, recursive=params.recursive)
        many = f", {plural(entries, 'entry')} in all" if entries > 1 else ""
        return ToolResult.ok(RemovedFiles(shown, entries), f"removed {shown}{many}")


def file_tools(*, mount_point: str | None = None, accepts_overrides: bool = False) -> tuple[Tool[Any, Any], ...]:
    """Return the nine tools. ``mount_point`` is as in `VfsToolsSection`."""
    tools = _FileTools(mount_point)
    descriptions: dict[Callable[..., ToolResult[Any]], str] = {
        tools.ls: "List a directory: names, kinds, sizes.",
        tools.read_file: "Read a text file, or a part, with line numbers. Of a binary file: kind, size, hash.",
        tools.write_file: "Create a file, or replace all of one that was read. To change a part: edit_file.",
        tools.edit_file: "Replace text in a file that was read. old_string must occur once, or set replace_all.",
        tools.apply_patch: "Apply a patch to many files: change, create, delete, rename. All of it or nothing.",
        tools.move: "Move or rename a file, symlink or directory.",
        tools.glob: "Find files and directories. What git ignores, only if it is named.",
        tools.grep: "Search text files. What git ignores, only if it is named.",
        tools.rm: "Remove a file, symlink or directory.",
    }
    writes: dict[Callable[..., ToolResult[Any]], Callable[[Any], Iterable[Written]]] = {
        tools.write_file: lambda params: (ContentOf(params.file_path),),
        tools.edit_file: lambda params: (ContentOf(params.file_path, whole=False),),
        tools.apply_patch: list_writes,
        tools.move: lambda params: (Itself(params.source, whole=False), Itself(params.target)),
        tools.rm: lambda params: (Itself(params.path, whole=False),),
    }
    return tuple(
        Tool(
            handler.__name__,
            description,
            handler,
            accepts_overrides=accepts_overrides,
            read_only=handler not in writes,
            writes=writes.get(handler),
        )
        for handler, description in descriptions.items()
    )


def _describe_file_above(path: str) -> str:
    return f"{display_path(path)} cannot be: a file stands where it has a directory"


def _file_info(filesystem: Filesystem, entry: FileEntry) -> FileInfo:
    path = escape_path(entry.path)
    if not entry.is_symlink:
        return FileInfo(path, "directory" if entry.is_directory else "file", entry.size_bytes)
    with suppress(OSError, ValueError):  # the link was removed or replaced meanwhile
        return FileInfo(path, "symlink", entry.size_bytes, escape_path(filesystem.readlink(entry.path)))
    return FileInfo(path, "symlink", entry.size_bytes)


def _show_lines(
    path: str, text: str, offset: int, total: int, context: ToolContext, notes: tuple[str, ...] = ()
) -> ToolResult[FileText]:
    """Return numbered lines as an answer. ``text`` begins after ``offset`` lines of a file that has ``total`` lines."""
    shown = escape_path(path)
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        text = text.removeprefix(BYTE_ORDER_MARK)
        notes += ("the file begins with a byte order mark, which is not shown",)
    lines = text.split("\n")
    ended = not lines[-1]
    if ended:
        lines.pop()
    if "\r\n" in text:
        # If the last line has no newline, a "\r" at its end belongs to the line.
        whole = lines if ended else lines[:-1]
        bare = [line.removesuffix("\r") for line in whole]
        every = all(line.endswith("\r") for line in whole)
        notes += ("lines end with CRLF" if every else "some lines end with CRLF, some with LF",)
        lines[: len(bare)] = bare
    if not lines:
        where = "it is empty" if total == 0 else f"no lines from offset {offset}: it has {plural(total, 'line')}"
        return ToolResult(f"{shown}: {where}", FileText(shown, "", offset, 0, total))
    if max(map(len, lines)) > MAX_LINE_CHARACTERS:
        lines = [line if len(line) <= MAX_LINE_CHARACTERS else _cut(line) for line in lines]
    width = len(str(offset + len(lines)))
    # (A format such as {number:>{width}} takes three times as long.)
    numbered = [f"{str(number).rjust(width)} | {line}" for number, line in enumerate(lines, offset + 1)]
    kept = count_fitting_lines(numbered, context)
    last = offset + kept
    if last < total:
        notes += (f"{plural(total - last, 'line')} left: read on with offset={last}",)
    elif not ended:
        notes += ("no newline at the end of the file",)
    value = FileText(shown, "\n".join(numbered[:kept]), offset, kept, total, notes)
    return ToolResult(f"{shown}: lines {offset + 1} to {last} of {total:,}", value)


def _cut(line: str) -> str:
    return f"{line[:MAX_LINE_CHARACTERS]} [... {len(line) - MAX_LINE_CHARACTERS:,} more characters in this line]"


def _show_output(
    path: str, text: str, offset: int, limit: int, what: str, context: ToolContext
) -> ToolResult[FileText]:
    """Return lines of a stored output as an answer. Long lines are folded, so that the model can read all of them."""
    lines = text.split("\n")
    folded = [
        line[at : at + MAX_LINE_CHARACTERS] for line in lines for at in range(0, len(line) or 1, MAX_LINE_CHARACTERS)
    ]
    notes = (f"this is no file of the workspace, but all that {what}",)
    if len(folded) > len(lines):
        notes += (f"lines of more than {MAX_LINE_CHARACTERS:,} characters go on in the next",)
    window = "".join(f"{line}\n" for line in folded[offset : offset + limit])
    return _show_lines(path, window, offset, len(folded), context, notes)


def _find_long_lined_output(filesystem: Filesystem, path: str) -> str | None:
    """Return the stored output of a command if it has lines that are too long to show; else None."""
    if is_output(path):
        with suppress(OSError):
            content = filesystem.read_bytes(path).content
            return content.decode("utf-8", "backslashreplace") if _LONG_LINE.search(content) else None
    return None


def _show_decoded(
    filesystem: Filesystem, path: str, offset: int, limit: int, encoding: str | WideEncoding, context: ToolContext
) -> ToolResult[FileText]:
    """Return lines of a file in a given encoding. Raises ToolValidationError for a file that is no such text."""
    codec = encoding if isinstance(encoding, str) else encoding.codec
    try:
        read = filesystem.read(path, offset=offset, limit=limit, encoding=codec)
    except ValueError:
        raise ToolValidationError(
            f"{display_path(path)} is not {codec} text: leave out encoding, or try another"
        ) from None
    notes: tuple[str, ...]
    if isinstance(encoding, WideEncoding):
        notes = (f"the file is {encoding}: edit_file and apply_patch keep that, write_file writes UTF-8",)
    elif check_encoding(codec).startswith("utf"):
        notes = ()
    else:
        notes = (f"decoded as {codec}: edit_file and apply_patch take its ASCII text alone, write_file writes UTF-8",)
    text = read.content
    if "\0" in text:
        text, notes = text.replace("\0", "\\x00"), (*notes, "NULs are shown as \\x00")
    return _show_lines(path, text, offset, read.total_lines, context, notes)


def _show_unusual_file(
    filesystem: Filesystem, path: str, offset: int, limit: int, context: ToolContext
) -> ToolResult[FileText]:
    """Return a file that is not UTF-8 as an answer: lines with escapes or, for a binary file, its size and hash."""
    beginning = filesystem.read_bytes(path, limit=BEGINNING_BYTES)
    encoding = wide_encoding(beginning.content, whole=not beginning.truncated)
    if encoding is not None:
        with suppress(ToolValidationError):  # its beginning misled
            return _show_decoded(filesystem, path, offset, limit, encoding, context)
    if b"\0" not in beginning.content:
        # This encoding has one character for each byte, so the lines are those of any other one.
        read = filesystem.read(path, offset=offset, limit=limit, encoding="latin-1")
        if "\0" not in read.content:
            text = read.content.encode("latin-1").decode(errors="backslashreplace")
            return _show_lines(path, text, offset, read.total_lines, context, (NOT_UTF8,))
    kind = mimetypes.guess_type(path)[0] or ""
    kind = "binary" if kind.startswith("text/") else kind or "binary"
    digest, size = filesystem.content_hash(path), beginning.size_bytes
    value = FileText(escape_path(path), "", 0, 0, 0, kind=kind, size_bytes=size, sha256=digest)
    return ToolResult.ok(value, f"{escape_path(path)} is not text")
