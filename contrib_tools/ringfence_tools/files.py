"""The tools that a model works on files with. They take the filesystem from the call's context: any backend will do."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ringfence.errors import ToolValidationError
from ringfence.filesystem.edits import replace_exact
from ringfence.filesystem.patch import parse_patch
from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import MAX_WRITE_LENGTH, FileEntry, Filesystem
from ringfence.prompt.tool import ContentOf, Itself, Tool, ToolContext
from ringfence.runtime.tool_result import ToolResult
from ringfence_tools.handlers import (
    MAX_LISTED,
    Unrendered,
    check_below_root,
    check_length,
    check_size,
    explain_errors,
    format_count,
    format_path,
    is_directory,
    require_existing,
)
from ringfence_tools.patching import ApplyPatch, PatchedFiles, PatchHandler, written_by
from ringfence_tools.reading import FileText, ReadFile, ReadHandler
from ringfence_tools.searching import FoundLines, FoundPaths, Glob, Grep, SearchHandlers


@dataclass(frozen=True, slots=True)
class ListDirectory:
    path: str | None = field(
        default=None, metadata={"description": "The directory, relative to the root; left out, the root."}
    )


@dataclass(frozen=True, slots=True)
class FileInfo:
    path: str
    kind: Literal["file", "directory", "symlink"]
    size_bytes: int = 0
    """0 for a directory; of a symlink, what it leads to."""
    leads_to: str | None = None
    """A symlink's target."""


@dataclass(frozen=True, slots=True)
class Listing:
    path: str
    entries: tuple[FileInfo, ...]
    left_out: int = 0
    """Entries for which there was no room."""

    def render(self) -> str:
        sizes = [f"{entry.size_bytes:,}" if entry.kind == "file" else "-" for entry in self.entries]
        width = max(map(len, sizes), default=0)
        lines = [
            f"{entry.kind:<9}  {size:>{width}}  {_format_entry(entry)}"
            for entry, size in zip(self.entries, sizes, strict=True)
        ]
        if self.left_out:
            lines.append(f"[{self.left_out:,} more entries: use glob for a part of them]")
        return "\n".join(lines)


def _format_entry(entry: FileInfo) -> str:
    name = entry.path.rpartition("/")[2]
    if entry.kind == "directory":
        return f"{name}/"
    return name if entry.leads_to is None else f"{name} -> {entry.leads_to}"


@dataclass(frozen=True, slots=True)
class WriteFile:
    file_path: str = field(metadata={"description": "The file, relative to the root; its directories are made."})
    content: str = field(metadata={"description": f"All of the new content, at most {MAX_WRITE_LENGTH:,} characters."})

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
    file_path: str = field(metadata={"description": "The file, relative to the root."})
    old_string: str = field(
        metadata={"description": "The text to replace, exactly as it is in the file, without line numbers."}
    )
    new_string: str = field(metadata={"description": "The text to put there; empty to remove the old one."})
    replace_all: bool = field(
        default=False, metadata={"description": "Replace every occurrence; else old_string must occur once."}
    )

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
    """Where they begin in the file as it is now, from 1; the first thousand."""


@dataclass(frozen=True, slots=True)
class Move:
    source: str = field(metadata={"description": "The file, symlink or directory to move."})
    target: str = field(metadata={"description": "Its new path, name included. A file there is replaced."})

    def __post_init__(self) -> None:
        check_below_root("source", self.source)
        check_below_root("target", self.target)


@dataclass(frozen=True, slots=True)
class MovedFile(Unrendered):
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    path: str = field(metadata={"description": "The file, symlink or directory."})
    recursive: bool = field(default=False, metadata={"description": "Remove a directory with everything in it."})

    def __post_init__(self) -> None:
        check_below_root("path", self.path)


@dataclass(frozen=True, slots=True)
class RemovedFiles(Unrendered):
    path: str
    entries: int
    """How many files, links and directories are gone."""


def file_tools(*, mount_point: str | None = None, accepts_overrides: bool = False) -> tuple[Tool[Any, Any], ...]:
    """The nine tools. ``mount_point`` is as in `VfsToolsSection`."""
    tools = _FileTools(mount_point)
    return (
        Tool[ListDirectory, Listing](
            name="ls",
            description="List a directory: names, kinds and sizes.",
            handler=tools.ls,
            accepts_overrides=accepts_overrides,
            read_only=True,
        ),
        Tool[ReadFile, FileText](
            name="read_file",
            description="Read a text file, or a part of it, with line numbers. Of a binary file, kind, size and hash.",
            handler=tools.read_file,
            accepts_overrides=accepts_overrides,
            read_only=True,
        ),
        Tool[WriteFile, WrittenFile](
            name="write_file",
            description="Create a file, or replace all of one that was read. For a change to a part use edit_file.",
            handler=tools.write_file,
            accepts_overrides=accepts_overrides,
            writes=lambda params: (ContentOf(params.file_path),),
        ),
        Tool[EditFile, EditedFile](
            name="edit_file",
            description="Replace text in a file that was read. old_string must occur once, or set replace_all.",
            handler=tools.edit_file,
            accepts_overrides=accepts_overrides,
            writes=lambda params: (ContentOf(params.file_path),),
        ),
        Tool[ApplyPatch, PatchedFiles](
            name="apply_patch",
            description="Apply a unified diff to many files: change, create, delete, rename. All of it or nothing.",
            handler=tools.apply_patch,
            accepts_overrides=accepts_overrides,
            writes=lambda params: dict.fromkeys(one for file in parse_patch(params.patch) for one in written_by(file)),
        ),
        Tool[Move, MovedFile](
            name="move",
            description="Move or rename a file, symlink or directory.",
            handler=tools.move,
            accepts_overrides=accepts_overrides,
            writes=lambda params: (Itself(params.source), Itself(params.target)),
        ),
        Tool[Glob, FoundPaths](
            name="glob",
            description="Find files and directories by their paths. What git ignores is only found where it is named.",
            handler=tools.glob,
            accepts_overrides=accepts_overrides,
            read_only=True,
        ),
        Tool[Grep, FoundLines](
            name="grep",
            description="Search text files for a regular expression. What git ignores, only where it is named.",
            handler=tools.grep,
            accepts_overrides=accepts_overrides,
            read_only=True,
        ),
        Tool[Remove, RemovedFiles](
            name="rm",
            description="Remove a file or symlink, or a directory (with what is in it if recursive is set).",
            handler=tools.rm,
            accepts_overrides=accepts_overrides,
            writes=lambda params: (Itself(params.path),),
        ),
    )


class _FileTools(ReadHandler, SearchHandlers, PatchHandler):
    """The handlers."""

    def ls(self, params: ListDirectory, *, context: ToolContext) -> ToolResult[Listing]:
        filesystem, path = self._open(context, params.path)
        with explain_errors(filesystem, path):
            try:
                found = filesystem.list(path)
            except NotADirectoryError:
                if not filesystem.exists(path):
                    raise
                raise ToolValidationError(f"{format_path(path)} is a file: read it with read_file") from None
        entries = tuple(_file_info(filesystem, entry) for entry in found[:MAX_LISTED])
        directories = sum(entry.is_directory for entry in found)
        others = len(found) - directories
        listing = Listing(format_path(path), entries, left_out=len(found) - len(entries))
        counts = f"{format_count(directories, 'directory')}, {format_count(others, 'file')}"
        return ToolResult.ok(listing, f"{listing.path}: {counts}")

    def write_file(self, params: WriteFile, *, context: ToolContext) -> ToolResult[WrittenFile]:
        filesystem, path = self._open(context, params.file_path)
        created = not filesystem.exists(path)
        try:
            params.content.encode()
        except UnicodeEncodeError as error:
            raise ToolValidationError(
                f"the content cannot be written: character {error.start} is {params.content[error.start]!r}, half of a "
                "surrogate pair, which no text has"
            ) from None
        try:
            if not path:
                raise IsADirectoryError
            written = filesystem.write(path, params.content)
        except IsADirectoryError:
            raise ToolValidationError(f"{format_path(path)} is a directory: name a file in it") from None
        except NotADirectoryError:
            raise ToolValidationError(_describe_file_above(path)) from None
        action = "created" if created else "replaced"
        value = WrittenFile(format_path(path), written.bytes_written, created)
        return ToolResult.ok(value, f"{action} {format_path(path)} ({format_count(written.bytes_written, 'byte')})")

    def edit_file(self, params: EditFile, *, context: ToolContext) -> ToolResult[EditedFile]:
        filesystem, path = self._open(context, params.file_path)
        with explain_errors(filesystem, path, if_directory="is a directory, only files can be edited"):
            check_size(filesystem, path)
            content = filesystem.read_bytes(path).content
        try:
            edit = replace_exact(content, params.old_string, params.new_string, replace_all=params.replace_all)
        except ValueError as error:
            raise ToolValidationError(f"{format_path(path)} was not changed: {error}") from None
        filesystem.write_bytes(path, edit.content)
        lines = ", ".join(map(str, edit.lines[:20])) + (", ..." if edit.count > 20 else "")
        places = f"line {lines}" if edit.count == 1 else f"{edit.count:,} places, at lines {lines}"
        value = EditedFile(format_path(path), edit.count, edit.lines[:MAX_LISTED])
        return ToolResult.ok(value, f"edited {format_path(path)}: {places}")

    def move(self, params: Move, *, context: ToolContext) -> ToolResult[MovedFile]:
        filesystem, source = self._open(context, params.source)
        _, target = self._open(context, params.target)
        if source == target:
            raise ToolValidationError(f"{format_path(source)} is there already: source and target are the same")
        require_existing(filesystem, source)
        if is_directory(filesystem, target):
            name = source.rpartition("/")[2]
            inside = format_path(f"{target}/{name}".lstrip("/"))
            raise ToolValidationError(
                f"{format_path(target)} is a directory: target is the new path itself, such as {inside}"
            )
        try:
            filesystem.move(source, target, overwrite=True)
        except NotADirectoryError:
            there = f"{format_path(target)} is a file, which a directory does not replace: name another target"
            raise ToolValidationError(there if filesystem.exists(target) else _describe_file_above(target)) from None
        except ValueError as error:
            raise ToolValidationError(str(error)) from None
        moved = MovedFile(format_path(source), format_path(target))
        return ToolResult.ok(moved, f"moved {moved.source} to {moved.target}")

    def rm(self, params: Remove, *, context: ToolContext) -> ToolResult[RemovedFiles]:
        filesystem, path = self._open(context, params.path)
        if not path:
            raise ToolValidationError("the root cannot be removed: name what in it should go")
        require_existing(filesystem, path)
        entries = 1
        if is_directory(filesystem, path) and not filesystem.stat(path).is_symlink:
            entries += len(filesystem.glob("**", path=path))
            if entries > 1 and not params.recursive:
                raise ToolValidationError(
                    f"{format_path(path)} is a directory that is not empty: set recursive to remove it all"
                )
        filesystem.delete(path, recursive=params.recursive)
        many = f", {format_count(entries, 'entry')} in all" if entries > 1 else ""
        return ToolResult.ok(RemovedFiles(format_path(path), entries), f"removed {format_path(path)}{many}")


def _describe_file_above(path: str) -> str:
    return f"{format_path(path)} cannot be: a file stands where it has a directory"


def _file_info(filesystem: Filesystem, entry: FileEntry) -> FileInfo:
    if entry.is_symlink:
        with suppress(OSError, ValueError):  # it is gone, or no link any more
            return FileInfo(
                escape_path(entry.path), "symlink", entry.size_bytes, escape_path(filesystem.readlink(entry.path))
            )
        return FileInfo(escape_path(entry.path), "symlink", entry.size_bytes)
    return FileInfo(escape_path(entry.path), "directory" if entry.is_directory else "file", entry.size_bytes)
