"""The tools that a model works on files with. They take the filesystem from the call's context: any backend will do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringfence.errors import ToolValidationError
from ringfence.filesystem.edits import replace_exact
from ringfence.filesystem.patch import parse_patch
from ringfence.filesystem.paths import escape_path, escape_text
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_GREP_MATCHES, FileEntry, Filesystem, GrepMatch
from ringfence.filesystem.search import ALTERNATIVES, LITERALLY, path_filter
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.prompt.tool_types import ContentOf, Itself
from ringfence.runtime.tool_result import ToolResult, kept_result
from ringfence_tools.file_params import (
    ApplyPatch,
    EditFile,
    Glob,
    Grep,
    ListDirectory,
    Move,
    ReadFile,
    Remove,
    WriteFile,
)
from ringfence_tools.file_reading import kept_lines, long_lined_output, numbered, too_large, unusual_file
from ringfence_tools.file_results import (
    MAX_LISTED,
    MAX_MATCH_CHARACTERS,
    EditedFile,
    FileInfo,
    FileText,
    FoundLine,
    FoundLines,
    FoundPaths,
    Listing,
    MovedFile,
    PatchedFiles,
    RemovedFiles,
    WrittenFile,
    count,
    fitting,
)
from ringfence_tools.ignored import Ignored
from ringfence_tools.patching import patch_files, written_by

MAX_NEAR_NAMES = 5
MAX_SEARCHED = 100_000
"""Lines that a search goes through where most of them are ignored."""


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


class _FileTools:
    """The handlers."""

    def __init__(self, mount_point: str | None) -> None:
        self._mount_point = mount_point

    def _open(self, context: ToolContext, text: str | None) -> tuple[Filesystem, str]:
        """The call's filesystem, and the path in it that the model means; None is the root."""
        filesystem = context.filesystem
        if filesystem is None:
            raise ToolValidationError("no filesystem is bound to this prompt, so there are no files to work on")
        return filesystem, context.resolve_path(text or "", mount_point=self._mount_point)

    def _below(self, filesystem: Filesystem, path: str, pattern: str) -> str:
        """A pattern as it is below a directory, where it begins with that directory's own path as a model sees it.
        A "/" stays in front of it, by which a filter knows that it is not for names at any depth."""
        mount = filesystem.root if self._mount_point is None else self._mount_point
        directory = f"{mount.rstrip('/')}/{path}".rstrip("/")
        return pattern.removeprefix(directory) if pattern.startswith(f"{directory}/") else pattern

    def ls(self, params: ListDirectory, *, context: ToolContext) -> ToolResult[Listing]:
        filesystem, path = self._open(context, params.path)
        try:
            found = filesystem.list(path)
        except FileNotFoundError:
            raise ToolValidationError(missing(filesystem, path)) from None
        except NotADirectoryError:
            is_file = filesystem.exists(path)
            said = f"{_name(path)} is a file: read it with read_file" if is_file else missing(filesystem, path)
            raise ToolValidationError(said) from None
        entries = tuple(_info(filesystem, entry) for entry in found[:MAX_LISTED])
        directories = sum(entry.is_directory for entry in found)
        others = len(found) - directories
        listing = Listing(_name(path), entries, left_out=len(found) - len(entries))
        return ToolResult.ok(listing, f"{_name(path)}: {count(directories, 'directory')}, {count(others, 'file')}")

    def read_file(self, params: ReadFile, *, context: ToolContext) -> ToolResult[FileText]:
        filesystem, path = self._open(context, params.file_path)
        if (kept := kept_result(context.session, path)) is not None and not filesystem.exists(path):
            return kept_lines(path, kept, params)
        if (printed := long_lined_output(filesystem, path)) is not None:
            return kept_lines(path, printed, params, "a command printed")
        try:
            _check_size(filesystem, path)
            try:
                read = filesystem.read(path, offset=params.offset, limit=min(params.limit, DEFAULT_READ_LIMIT))
            except ValueError:  # not UTF-8, and the path has been looked at before
                return unusual_file(filesystem, path, params)
        except (FileNotFoundError, NotADirectoryError):
            raise ToolValidationError(missing(filesystem, path)) from None
        except IsADirectoryError:
            raise ToolValidationError(f"{_name(path)} is a directory: list it with ls") from None
        if "\0" in read.content:
            return unusual_file(filesystem, path, params)
        return numbered(path, read.content, params.offset, read.total_lines)

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
            raise ToolValidationError(f"{_name(path)} is a directory: name a file in it") from None
        except NotADirectoryError:
            raise ToolValidationError(_below_a_file(path)) from None
        action = "created" if created else "replaced"
        value = WrittenFile(_name(path), written.bytes_written, created)
        return ToolResult.ok(value, f"{action} {_name(path)} ({count(written.bytes_written, 'byte')})")

    def edit_file(self, params: EditFile, *, context: ToolContext) -> ToolResult[EditedFile]:
        filesystem, path = self._open(context, params.file_path)
        try:
            _check_size(filesystem, path)
            content = filesystem.read_bytes(path).content
        except (FileNotFoundError, NotADirectoryError):
            raise ToolValidationError(missing(filesystem, path)) from None
        except IsADirectoryError:
            raise ToolValidationError(f"{_name(path)} is a directory, only files can be edited") from None
        try:
            edit = replace_exact(content, params.old_string, params.new_string, replace_all=params.replace_all)
        except ValueError as error:
            raise ToolValidationError(f"{_name(path)} was not changed: {error}") from None
        filesystem.write_bytes(path, edit.content)
        lines = ", ".join(map(str, edit.lines[:20])) + (", ..." if edit.count > 20 else "")
        said = f"line {lines}" if edit.count == 1 else f"{edit.count:,} places, at lines {lines}"
        value = EditedFile(_name(path), edit.count, edit.lines[:MAX_LISTED])
        return ToolResult.ok(value, f"edited {_name(path)}: {said}")

    def apply_patch(self, params: ApplyPatch, *, context: ToolContext) -> ToolResult[PatchedFiles]:
        filesystem, _ = self._open(context, "")
        patched = patch_files(
            filesystem,
            parse_patch(params.patch),
            find=lambda name: self._open(context, name)[1],
            missing=lambda path: missing(filesystem, path),
        )
        return ToolResult.ok(patched, f"patched {count(len(patched.files), 'file')}")

    def move(self, params: Move, *, context: ToolContext) -> ToolResult[MovedFile]:
        filesystem, source = self._open(context, params.source)
        _, target = self._open(context, params.target)
        if source == target:
            raise ToolValidationError(f"{_name(source)} is there already: source and target are the same")
        if not filesystem.exists(source):
            raise ToolValidationError(missing(filesystem, source))
        if _is_directory(filesystem, target):
            name = source.rpartition("/")[2]
            inside = _name(f"{target}/{name}".lstrip("/"))
            raise ToolValidationError(
                f"{_name(target)} is a directory: target is the new path itself, such as {inside}"
            )
        try:
            filesystem.move(source, target, overwrite=True)
        except NotADirectoryError:
            there = f"{_name(target)} is a file, which a directory does not replace: name another target"
            raise ToolValidationError(there if filesystem.exists(target) else _below_a_file(target)) from None
        except ValueError as error:
            raise ToolValidationError(str(error)) from None
        return ToolResult.ok(MovedFile(_name(source), _name(target)), f"moved {_name(source)} to {_name(target)}")

    def glob(self, params: Glob, *, context: ToolContext) -> ToolResult[FoundPaths]:
        filesystem, path = self._open(context, params.path)
        if not filesystem.exists(path):
            raise ToolValidationError(missing(filesystem, path))
        if not _is_directory(filesystem, path):
            raise ToolValidationError(f"{_name(path)} is not a directory: glob looks below one")
        pattern = self._below(filesystem, path, params.pattern)
        try:
            wanted = path_filter(self._below(filesystem, path, params.glob)) if params.glob is not None else None
            found = filesystem.glob(pattern, path=path)
        except ValueError as error:
            raise ToolValidationError(f"the pattern cannot be used: {error}") from None
        skip = len(path) + 1 if path else 0
        ignored = Ignored(filesystem, path, pattern)
        paths = [
            escape_path(match.path) + ("" if match.is_file or not _is_directory(filesystem, match.path) else "/")
            for match in found
            if (wanted is None or wanted(match.path[skip:]))
            and not ignored.has(match.path, is_directory=not match.is_file)
        ]
        kept = fitting(paths[:MAX_LISTED])
        value = FoundPaths(_name(path), params.pattern, tuple(paths[:kept]), left_out=len(paths) - kept)
        said = f"{count(len(paths), 'path')} below {_name(path)} for {escape_text(params.pattern)}"
        said += "" if paths else _braces(params.pattern, params.glob)
        return ToolResult.ok(value, said + ignored.said())

    def grep(self, params: Grep, *, context: ToolContext) -> ToolResult[FoundLines]:
        filesystem, path = self._open(context, params.path)
        if params.glob is not None:
            params = replace(params, glob=self._below(filesystem, path, params.glob))
        try:
            _check_size(filesystem, path)
            ignored = Ignored(filesystem, path, params.glob)
            found, all_found = _grep(filesystem, path, params, ignored)
        except (FileNotFoundError, NotADirectoryError):
            raise ToolValidationError(missing(filesystem, path)) from None
        except ValueError as error:
            # What a program would say by an argument, a model says in the pattern.
            said = str(error).replace(LITERALLY, r"what stands between \Q and \E is taken as it is")
            raise ToolValidationError(f"the search cannot be made: {said}") from None
        lines = [
            FoundLine(escape_path(match.path), match.line_number, _around(match)) for match in found[:MAX_GREP_MATCHES]
        ]
        kept = fitting(line.render() for line in lines)
        cut = kept < len(found) or not all_found
        value = FoundLines(_name(path), params.pattern, tuple(lines[:kept]), cut)
        files = len({line.path for line in value.matches})
        first = "the first " if cut else ""
        none = f"no line but in ignored files, of which there are more than {MAX_SEARCHED:,}," if cut else "no line"
        said = f"{first}{count(kept, 'line')} in {count(files, 'file')}" if kept else f"{none} in {_name(path)}"
        said += f" for {escape_text(params.pattern)}{'' if kept else _braces(params.glob)}"
        return ToolResult.ok(value, said + ignored.said())

    def rm(self, params: Remove, *, context: ToolContext) -> ToolResult[RemovedFiles]:
        filesystem, path = self._open(context, params.path)
        if not path:
            raise ToolValidationError("the root cannot be removed: name what in it should go")
        if not filesystem.exists(path):
            raise ToolValidationError(missing(filesystem, path))
        entries = 1
        if _is_directory(filesystem, path) and not filesystem.stat(path).is_symlink:
            entries += len(filesystem.glob("**", path=path))
            if entries > 1 and not params.recursive:
                raise ToolValidationError(
                    f"{_name(path)} is a directory that is not empty: set recursive to remove it all"
                )
        filesystem.delete(path, recursive=params.recursive)
        many = f", {count(entries, 'entry')} in all" if entries > 1 else ""
        return ToolResult.ok(RemovedFiles(_name(path), entries), f"removed {_name(path)}{many}")


# Searching


def _grep(filesystem: Filesystem, path: str, params: Grep, ignored: Ignored) -> tuple[Sequence[GrepMatch], bool]:
    """The lines that are not ignored, one more than is shown where there are more; whether these are all there are."""
    most = MAX_GREP_MATCHES + 1
    while True:
        found = filesystem.grep(params.pattern, path=path, glob=params.glob, max_matches=most)
        asked = [match for match in found if not ignored.has(match.path)]
        if len(found) < most:
            return asked, True
        if len(asked) > MAX_GREP_MATCHES or most >= MAX_SEARCHED:
            return asked, False
        most *= 10


# Words


def _check_size(filesystem: Filesystem, path: str) -> None:
    """Raises ToolValidationError for a file that is too large. What there is none of is not said here: a command's
    output can be read and is in no directory."""
    try:
        size = filesystem.stat(path).size_bytes
    except OSError:
        return
    if (reason := too_large(size)) is not None:
        raise ToolValidationError(f"{_name(path)}: {reason}")


def _name(path: str) -> str:
    return escape_path(path) or "/"


def missing(filesystem: Filesystem, path: str) -> str:
    """A message for a path that does not exist, with near names from its directory and the one above.

    The whole workspace is not searched, since a call holds its locks meanwhile."""
    if filesystem.exists(path):
        return f"{_name(path)} is a symlink that leads nowhere"
    name = path.rpartition("/")[2]
    here = path
    while here:
        here = here.rpartition("/")[0]
        if _is_directory(filesystem, here):
            break
    wanted = path[len(here) :].lstrip("/").partition("/")[0]
    names = {entry.name: entry.path for entry in filesystem.list(here)}
    hints = [names[near] for near in difflib.get_close_matches(wanted, names, n=MAX_NEAR_NAMES)]
    one_up = f"{here.rpartition('/')[0]}/{name}".lstrip("/")
    if here and filesystem.exists(one_up):
        hints.insert(0, one_up)
    meant = f"; did you mean {' or '.join(map(_name, hints[:MAX_NEAR_NAMES]))}?" if hints else ""
    return f"there is no {_name(path)}{meant}"


def _below_a_file(path: str) -> str:
    return f"{_name(path)} cannot be: a file stands where it has a directory"


def _braces(*globs: str | None) -> str:
    """What to say of globs that have found nothing, where that may be why."""
    if not any(ALTERNATIVES.search(glob) for glob in globs if glob is not None):
        return ""
    return "; braces are not expanded: call it once for each alternative"


def _is_directory(filesystem: Filesystem, path: str) -> bool:
    try:
        return filesystem.stat(path).is_directory
    except OSError:
        return False


def _info(filesystem: Filesystem, entry: FileEntry) -> FileInfo:
    if entry.is_symlink:
        with suppress(OSError, ValueError):  # it is gone, or no link any more
            return FileInfo(
                escape_path(entry.path), "symlink", entry.size_bytes, escape_path(filesystem.readlink(entry.path))
            )
        return FileInfo(escape_path(entry.path), "symlink", entry.size_bytes)
    return FileInfo(escape_path(entry.path), "directory" if entry.is_directory else "file", entry.size_bytes)


def _around(match: GrepMatch) -> str:
    """The line, or of a long one the part around the match."""
    line = match.line_content
    if len(line) <= MAX_MATCH_CHARACTERS:
        return line
    start = max(0, min(match.match_start - MAX_MATCH_CHARACTERS // 4, len(line) - MAX_MATCH_CHARACTERS))
    end = start + MAX_MATCH_CHARACTERS
    return f"{'...' if start else ''}{line[start:end]}{'...' if end < len(line) else ''}"
