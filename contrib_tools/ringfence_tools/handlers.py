"""The common part of the file tools' handlers: filesystem and path of a call, limits of an answer, messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path
from ringfence.filesystem.look_alikes import display_exactly, look_alikes
from ringfence.filesystem.protocol import MAX_TEXT_BYTES, MAX_WRITE_LENGTH, Filesystem
from ringfence.runtime.context import ToolContext

MAX_LISTED = 1_000
"""The most entries or matches in one answer."""
MAX_CHARACTERS = 60_000
"""Of one answer's lines together, unless the call has a limit for its answer."""
RESERVED_CHARACTERS = 1_000
"""Of such a limit, for what is said besides the lines."""
MAX_LINES = 1_900
"""Of an answer with a limit, since opencode cuts at 2,000."""
MAX_NEAR_NAMES = 5
PATH_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors that `explain` turns into a message."""


class FileHandlers:
    """The base of classes whose methods handle calls of file tools."""

    def __init__(self, mount_point: str | None) -> None:
        self._mount_point = mount_point

    def _open(self, context: ToolContext, text: str | None) -> tuple[Filesystem, str]:
        """Return the call's filesystem and the resolved path in it. The path None is the root."""
        filesystem = context.filesystem
        if filesystem is None:
            raise ToolValidationError("no filesystem is bound to this prompt, so there are no files to work on")
        return filesystem, context.resolve_path(text or "", mount_point=self._mount_point)


class Unrendered:
    """The base of results that a model does not need to see: the message is enough."""

    __slots__ = ()

    def render(self) -> str:
        return ""


def answer_room(context: ToolContext) -> int:
    """Return how many bytes of lines fit into the answer of a call. (Codex and opencode count bytes.)"""
    limit = context.options.max_answer
    return MAX_CHARACTERS if limit is None else min(limit - RESERVED_CHARACTERS, MAX_CHARACTERS)


def count_fitting_lines(lines: Iterable[str], context: ToolContext) -> int:
    """Return how many of the lines fit into an answer. The first line always counts as fitting."""
    room, fit = answer_room(context), 0
    most = None if context.options.max_answer is None else MAX_LINES
    for line in lines:
        room -= (len(line) if line.isascii() else len(line.encode("utf-8", "surrogatepass"))) + 1
        if fit and (room < 0 or fit == most):
            break
        fit += 1
    return fit


def is_directory(filesystem: Filesystem, path: str) -> bool:
    try:
        return filesystem.stat(path).is_directory
    except OSError:
        return False


def explain(error: OSError, filesystem: Filesystem, path: str, advice: str = "") -> ToolValidationError:
    """Return the message for one of `PATH_ERRORS`: the path is missing or of the wrong kind."""
    if not isinstance(error, FileNotFoundError) and filesystem.exists(path):
        kind = "directory" if isinstance(error, IsADirectoryError) else "file"
        return ToolValidationError(f"{display_path(path)} is a {kind}{advice}")
    return ToolValidationError(describe_missing(filesystem, path))


def describe_missing(filesystem: Filesystem, path: str) -> str:
    """Return a message for a missing path, with similar names from its directory and the one above.

    The whole workspace is not searched, since a call holds its locks meanwhile."""
    if filesystem.exists(path):
        return f"{display_path(path)} is a symlink that leads nowhere"
    if alike := look_alikes(filesystem, path):
        names = " and ".join(map(display_exactly, alike[:MAX_NEAR_NAMES]))
        return (
            f"there is no {display_exactly(path)} in the workspace, but {names}, "
            f"which look{'s' * (len(alike) == 1)} the same: write the name with these escapes"
        )
    here = path
    while here and not is_directory(filesystem, here):
        here = here.rpartition("/")[0]
    wanted = path[len(here) :].lstrip("/").partition("/")[0]
    names = {entry.name: entry.path for entry in filesystem.list(here)}
    hints = [names[near] for near in difflib.get_close_matches(wanted, names, n=MAX_NEAR_NAMES)]
    one_up = f"{here.rpartition('/')[0]}/{path.rpartition('/')[2]}".lstrip("/")
    if here and filesystem.exists(one_up):
        hints.insert(0, one_up)
    meant = f"; did you mean {' or '.join(map(display_path, hints[:MAX_NEAR_NAMES]))}?" if hints else ""
    return f"there is no {display_path(path)} in the workspace{meant}"


def describe_twins(filesystem: Filesystem, path: str, source: str | None = None) -> str:
    """Return a remark for a path that is about to be made, if others look the same; else an empty text.

    ``source`` is what is moved to the path."""
    if filesystem.exists(path):
        return ""
    twins = [display_exactly(twin) for twin in look_alikes(filesystem, path) if twin != source]
    if not twins:
        return ""
    there = " and ".join(twins[:MAX_NEAR_NAMES])
    advice = "if that was meant, remove the new one, and write the name with these escapes"
    return f". Beside {display_exactly(path)} there is {there}, which looks the same: {advice}"


def require_existing(filesystem: Filesystem, path: str) -> None:
    if not filesystem.exists(path):
        raise ToolValidationError(describe_missing(filesystem, path))


def describe_excess_size(size: int) -> str | None:
    """Return why a file of this size is too large to read, or None."""
    if size <= MAX_TEXT_BYTES:
        return None
    most = f"more than the {MAX_TEXT_BYTES:,} that these tools take"
    return f"it has {size:,} bytes, {most}: leave it to a program that reads a part of it at a time"


def check_size(filesystem: Filesystem, path: str) -> None:
    """Raise ToolValidationError for a file that is too large. A missing file passes: a command's output can be read
    and is in no directory."""
    try:
        size = filesystem.stat(path).size_bytes
    except OSError:
        return
    if size > MAX_TEXT_BYTES:
        raise ToolValidationError(f"{display_path(path)}: {describe_excess_size(size)}")


def check_below_root(name: str, path: str) -> None:
    if {"", "."}.issuperset(path.split("/")):
        raise ToolValidationError(f"{name} is the root of the workspace, which stays: name what is in it")


def check_length(name: str, characters: int, advice: str) -> None:
    if characters > MAX_WRITE_LENGTH:
        raise ToolValidationError(
            f"{name} has {characters:,} characters, one call takes {MAX_WRITE_LENGTH:,}: {advice}"
        )
