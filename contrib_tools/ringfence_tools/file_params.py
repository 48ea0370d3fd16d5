"""What a model sends to the file tools. What is wrong whatever the files are is said before the call begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringfence.errors import ToolValidationError
from ringfence.filesystem.patch import parse_patch
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_WRITE_LENGTH


@dataclass(frozen=True, slots=True)
class ListDirectory:
    path: str | None = field(
        default=None, metadata={"description": "The directory, relative to the root; left out, the root."}
    )


@dataclass(frozen=True, slots=True)
class ReadFile:
    file_path: str = field(metadata={"description": "The file, relative to the root."})
    offset: int = field(default=0, metadata={"description": "How many lines to skip."})
    limit: int = field(
        default=DEFAULT_READ_LIMIT, metadata={"description": f"How many lines to read, at most {DEFAULT_READ_LIMIT}."}
    )

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ToolValidationError(f"offset is the number of lines to skip, it cannot be {self.offset}")
        if self.limit <= 0:
            raise ToolValidationError(f"limit is the number of lines to read, it cannot be {self.limit}")


@dataclass(frozen=True, slots=True)
class WriteFile:
    file_path: str = field(metadata={"description": "The file, relative to the root; its directories are made."})
    content: str = field(metadata={"description": f"All of the new content, at most {MAX_WRITE_LENGTH:,} characters."})

    def __post_init__(self) -> None:
        _below_the_root("file_path", self.file_path)
        check_length("content", len(self.content), "write the first part, then add the rest with edit_file")


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
        _below_the_root("file_path", self.file_path)
        for name, text in (("old_string", self.old_string), ("new_string", self.new_string)):
            check_length(name, len(text), "make several smaller edits")
        if not self.old_string:
            raise ToolValidationError("old_string is empty: quote the text to replace (write_file makes a new file)")
        if self.old_string == self.new_string:
            raise ToolValidationError("old_string and new_string are the same: there is nothing to change")


@dataclass(frozen=True, slots=True)
class ApplyPatch:
    patch: str = field(
        metadata={
            "description": "A unified diff: for each file '--- a/PATH' and '+++ b/PATH' (/dev/null to create or delete)"
            ", then hunks that begin with '@@ -START,COUNT +START,COUNT @@'; lines around a change quoted exactly."
        }
    )

    def __post_init__(self) -> None:
        check_length("patch", len(self.patch), "apply it in several patches")
        try:
            parse_patch(self.patch)
        except ValueError as error:
            raise ToolValidationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Move:
    source: str = field(metadata={"description": "The file, symlink or directory to move."})
    target: str = field(metadata={"description": "Its new path, name included. A file there is replaced."})

    def __post_init__(self) -> None:
        _below_the_root("source", self.source)
        _below_the_root("target", self.target)


@dataclass(frozen=True, slots=True)
class Glob:
    pattern: str = field(
        metadata={
            "description": "Such as *.py (in one directory) or **/*.py (at any depth); * does not cross a '/', no {}."
        }
    )
    path: str | None = field(
        default=None, metadata={"description": "The directory that the pattern is relative to; left out, the root."}
    )
    glob: str | None = field(default=None, metadata={"description": "Only names that match this, too."})

    def __post_init__(self) -> None:
        if not self.pattern.strip():
            raise ToolValidationError("pattern is blank: **/* finds everything")


@dataclass(frozen=True, slots=True)
class Grep:
    pattern: str = field(
        metadata={
            "description": "A regular expression (RE2: no look-around, no back-references); \\Q...\\E is literal."
        }
    )
    path: str | None = field(
        default=None, metadata={"description": "The directory or file to search; left out, everything."}
    )
    glob: str | None = field(
        default=None, metadata={"description": "Only files that match, such as *.py (any directory) or src/**/*.py."}
    )

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ToolValidationError("pattern is empty: it would match every line")


@dataclass(frozen=True, slots=True)
class Remove:
    path: str = field(metadata={"description": "The file, symlink or directory."})
    recursive: bool = field(default=False, metadata={"description": "Remove a directory with everything in it."})

    def __post_init__(self) -> None:
        _below_the_root("path", self.path)


def _below_the_root(name: str, path: str) -> None:
    if all(part in ("", ".") for part in path.split("/")):
        raise ToolValidationError(f"{name} is the root of the workspace, which stays: name what is in it")


def check_length(name: str, characters: int, what_to_do: str) -> None:
    if characters > MAX_WRITE_LENGTH:
        most = f"{MAX_WRITE_LENGTH:,}"
        raise ToolValidationError(f"{name} has {characters:,} characters, one call takes {most}: {what_to_do}")
