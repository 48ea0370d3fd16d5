"""Paths: their normal form, their display form, and the resolution of paths that a model wrote."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ringfence.errors import ToolValidationError
from ringfence.escapes import unescaped

if TYPE_CHECKING:
    from ringfence.filesystem.protocol import Filesystem


MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096

# The common case in one match: a path in normal form, with names and a length below all limits.
_PLAIN = re.compile(r"(?!\.{1,2}(?:/|\Z))[ -.0-~]{1,255}(?:/(?!\.{1,2}(?:/|\Z))[ -.0-~]{1,255})*\Z")


def normalise(path: str) -> str:
    """Return the normal form of `path`, relative to the root. The root itself is "".

    Empty and "." components are removed. ".." removes the component before it, even a link: ``a/../b`` is ``b``. The
    normal form does not depend on the files.

    Raises:
        PermissionError: The path leaves the root.
        ValueError: The path has a NUL, cannot be encoded, or exceeds the limits of an operating system.
        TypeError: The path is no text.
    """
    try:
        return _short(path) if len(path) <= MAX_NAME_BYTES else _normal(path)
    except TypeError:
        raise TypeError(f"a path is a text, from the root of the workspace, not {path!r}") from None


def _normal(path: str) -> str:
    if len(path) <= MAX_PATH_BYTES and _PLAIN.match(path):
        return path
    names: list[str] = []
    for name in one_encoding(path).split("/"):
        if name == "..":
            if not names:
                raise outside(path)
            names.pop()
        elif name not in ("", "."):
            names.append(name)
    normal = "/".join(names)
    _check_lengths(normal)
    return normal


# Only short paths are cached: a model may write paths of any length.
_short = lru_cache(maxsize=1 << 15)(_normal)


def one_encoding(path: str, what: str = "path") -> str:
    """Return the one text for the bytes of a path. Raises ValueError for text that no path can contain.

    ``what`` is the noun of the message, such as "pattern".
    """
    if "\0" in path:
        raise ValueError(f"a {what} cannot have a NUL: {path!r}")
    # Surrogate escapes can encode the bytes of valid UTF-8: they name the same file as the characters.
    try:
        return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"a {what} cannot have the lone surrogate {path[error.start]!r}: {path!r}") from None


def check_names_are_utf8() -> None:
    """Raise ValueError if Python's encoding of file names is not UTF-8. Some names could not be written or restored."""
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise ValueError(
            f"names of files have to be UTF-8, and Python takes them for {encoding} here: set PYTHONUTF8=1 in the "
            "environment, or a locale with UTF-8"
        )


def _check_lengths(normal: str) -> None:
    encoded = normal.encode("utf-8", "surrogateescape")
    if len(encoded) > MAX_PATH_BYTES:
        raise ValueError(f"a path has at most {MAX_PATH_BYTES} bytes, this one has {len(encoded)}: {normal[:80]!r}...")
    for name in encoded.split(b"/"):
        if len(name) > MAX_NAME_BYTES:
            begin = name[:40].decode("utf-8", "replace")
            raise ValueError(f"a name in a path has at most {MAX_NAME_BYTES} bytes, {begin!r}... has {len(name)}")


def check_link_target(target: str) -> None:
    """Raise ValueError for a text that cannot be the target of a link."""
    try:
        size = len(target.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise ValueError(f"a link's target cannot have a lone surrogate: {target[:80]!r}") from None
    if not target or "\0" in target or size > MAX_PATH_BYTES:
        raise ValueError(f"a link's target has 1 to {MAX_PATH_BYTES} bytes and no NUL, not {target[:80]!r}")


def outside(path: str) -> PermissionError:
    """The error for a path that leads out of the root."""
    return PermissionError(errno.EACCES, "is outside of the workspace root", path)


def os_error(code: int, path: str) -> OSError:
    """The built-in exception for an errno, with the operating system's message."""
    return OSError(code, os.strerror(code), path)


def directories_above(path: str) -> Iterator[str]:
    """Yield the directories above a path, the nearest first, without the root."""
    while path := path.rpartition("/")[0]:
        yield path


def below_root(path: str) -> str:
    """Return the normal form of a path. Raises ValueError for the root."""
    normal = normalise(path)
    if not normal:
        raise ValueError(f"{path!r} is the root, which is a directory; name a file below it")
    return normal


def resolve_model_path(filesystem: Filesystem, text: str, *, mount_point: str | None = None) -> str:
    r"""Return the normal path that a model means by `text`. Tools and policies share this function.

    ``mount_point`` (such as "/workspace") is the path at which the model sees the root. It is removed from an absolute
    path. The default is the filesystem's ``root``.

    Four readings are tried, and the first one that exists is returned: the exact text, the text with ``\xNN``
    unescaped, the text without the blanks around it, and both. If none exists, the path is new. A new path loses the
    blanks around it, and a backslash in a new name stays a backslash.

    Raises:
        PermissionError: The path leaves the root.
        ToolValidationError: The text cannot be a path.
    """
    mount = filesystem.root if mount_point is None else mount_point
    try:
        exact = _below_mount(text, mount)
        if filesystem.exists(exact) or ("\\x" not in text and text == text.strip()):
            return exact
        meant = _existing_names(filesystem, exact)
        if meant != exact and filesystem.exists(meant):
            return meant
        top, slash, _ = exact.partition("/")
        # Leading blanks stay if they belong to the name of an existing directory.
        stripped = _below_mount(text.rstrip() if slash and filesystem.exists(top) else text.strip(), mount)
        return stripped if filesystem.exists(stripped) else _existing_names(filesystem, stripped)
    except ValueError as error:
        raise ToolValidationError(str(error)) from None


def is_link(filesystem: Filesystem, path: str) -> bool:
    """Whether a path is a link, even a dangling one or one that leads out of the root."""
    try:
        filesystem.readlink(path)
    except (OSError, ValueError):
        return False
    return True


def resolve_nofollow(filesystem: Filesystem, path: str) -> str:
    """Resolve the links above a normal path, but not a link at the path itself. Raises as `Filesystem.resolve` does."""
    above, slash, name = path.rpartition("/")
    return f"{filesystem.resolve(above)}/{name}".lstrip("/") if slash else path


def _below_mount(text: str, mount_point: str) -> str:
    normal = normalise(text)
    if not text.startswith("/"):
        return normal
    mount = normalise(mount_point)
    if normal == mount:
        return ""
    return normal.removeprefix(f"{mount}/") if mount else normal


def _existing_names(filesystem: Filesystem, path: str) -> str:
    # Each name is tried on its own: a new file may be in a directory whose name is displayed with escapes.
    if "\\x" not in path:
        return path
    here = ""
    for name in path.split("/"):
        literal, read_back = f"{here}{name}", f"{here}{unescaped(name)}"
        here = f"{read_back if not filesystem.exists(literal) and filesystem.exists(read_back) else literal}/"
    return here.rstrip("/")


_DOTGIT_NTFS = re.compile(rb"(?:^|\\)(?:\.git|git~1)[. ]*(?:[\\:]|$)", re.IGNORECASE)
"""Matches the names of `.git` on NTFS: its short name, trailing dots and blanks, streams, and a leading backslash."""
_HFS_IGNORES = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
_NOT_TEXT = re.compile("[\ud800-\udfff\ufffe\uffff]")


GIT_ADVICE = (
    "leave commits, stashes, branches and the index to people; `git restore FILE` and write_file bring files back"
)


def is_dotgit(name: bytes) -> bool:
    """Whether git, on any system, takes this name for `.git`."""
    if _DOTGIT_NTFS.search(name):
        return True
    text = name.decode("utf-8", "surrogateescape")
    # git ignores the rest of a name after bytes that are no text.
    text = _NOT_TEXT.split(text, maxsplit=1)[0].translate(_HFS_IGNORES)
    return text.lower() == ".git"
