"""How a path is spelled: one spelling inside, one that can be shown, and the way back from what a model wrote."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ringfence.errors import ToolValidationError

if TYPE_CHECKING:
    from ringfence.filesystem.protocol import Filesystem


MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096

# A path that is its own normal form, and so short that no limit can matter: the common case in one match.
_PLAIN = re.compile(r"(?!\.{1,2}(?:/|\Z))[ -.0-~]{1,255}(?:/(?!\.{1,2}(?:/|\Z))[ -.0-~]{1,255})*\Z")

# What a terminal or a JSON reader would choke on, and a backslash that would look like one of our escapes.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")
_UNSHOWABLE = re.compile(rf"{_CONTROL.pattern}|\\(?=x[0-9a-fA-F]{{2}})")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


def normalise(path: str) -> str:
    """The one spelling of `path`, relative to the root; "" for the root itself.

    Empty and "." components go, and ".." takes the component before it along, whatever that is: ``a/../b`` is
    ``b`` even where ``a`` is a link, since a path must have one identity without a look at the files.

    Raises:
        PermissionError: it leaves the root.
        ValueError: it has a NUL, cannot be encoded, or is longer than an operating system takes.
        TypeError: it is no text.
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


# Only short spellings are kept: a model may write paths of any length.
_short = lru_cache(maxsize=1 << 15)(_normal)


def one_encoding(path: str, what: str = "path") -> str:
    """The one text for the bytes of a path, or of ``what`` is compared with paths. Raises ValueError for what can be in
    none."""
    if "\0" in path:
        raise ValueError(f"a {what} cannot have a NUL: {path!r}")
    # Surrogate escapes that happen to spell valid UTF-8 are the same bytes, so the same file, as the characters.
    try:
        return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"a {what} cannot have the lone surrogate {path[error.start]!r}: {path!r}") from None


def check_names_are_utf8() -> None:
    """ValueError where names on disk have another encoding for Python than the UTF-8 that paths are in here: some could
    be neither written nor restored."""
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
    """ValueError for what no link can lead to."""
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
    """The built-in exception for an errno, with the operating system's words."""
    return OSError(code, os.strerror(code), path)


def directories_above(path: str) -> Iterator[str]:
    """The directories that a path is in, the nearest first; the root is left out."""
    while path := path.rpartition("/")[0]:
        yield path


def below_root(path: str) -> str:
    """The normal form of a path. Raises ValueError where it is the root's."""
    normal = normalise(path)
    if not normal:
        raise ValueError(f"{path!r} is the root, which is a directory; name a file below it")
    return normal


def escape_path(path: str) -> str:
    r"""`path` for a model, a terminal or JSON: bytes that are not UTF-8, and control characters, become ``\xNN``.

    A backslash that could be taken for such an escape becomes ``\x5c``, so no two paths are shown alike.
    """
    return _UNSHOWABLE.sub(_escaped, path)


def display_path(path: str) -> str:
    """`escape_path`, of the root too, whose permission bits may change."""
    return escape_path(path) or "/"


def escape_text(text: str) -> str:
    """Words with what `escape_path` escapes of a path, but for backslashes: a path that they quote has its own."""
    return _CONTROL.sub(_escaped, text)


_VERBS = ("is ", "was ", "has ", "cannot ")


def path_message(path: str, words: str, joint: str = ": ") -> str:
    """Words about a path that is shown: some go on a sentence ("is outside of the workspace root"), others, such as the
    system's ("Is a directory"), are one."""
    return f"{path} {words}" if words.startswith(_VERBS) else f"{path}{joint}{words}"


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode("utf-8", "surrogateescape"))


def unescaped(text: str) -> str:
    r"""The path that `escape_path` shows as `text`. An escaped "/" or NUL, which no name can have, stays as it is."""
    if "\\x" not in text:
        return text
    return _ESCAPE.sub(_byte, text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def _byte(match: re.Match[bytes]) -> bytes:
    byte = bytes.fromhex(match[1].decode())
    return match[0] if byte in b"\0/" else byte


def resolve_model_path(filesystem: Filesystem, text: str, *, mount_point: str | None = None) -> str:
    r"""The normal path that a model means by `text`; tools and policies both ask here, so that they agree.

    ``mount_point`` (such as "/workspace") is where the model sees the root: an absolute path below it loses it. None
    is where the filesystem says that its root is.
    Of the readings, the first that exists is meant: the exact text; with its ``\xNN`` escapes read back; without the
    blanks around it; both. Where none exists the path is new: blanks around it are dropped, since nobody means
    them, and in its names that do not exist a backslash stays a backslash.

    Raises:
        PermissionError: it leaves the root.
        ToolValidationError: it cannot be a path.
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
        # Blanks in front belong to a directory that has them in its name, even if the rest of the path is new.
        stripped = _below_mount(text.rstrip() if slash and filesystem.exists(top) else text.strip(), mount)
        return stripped if filesystem.exists(stripped) else _existing_names(filesystem, stripped)
    except ValueError as error:
        raise ToolValidationError(str(error)) from None


def is_link(filesystem: Filesystem, path: str) -> bool:
    """Also of one that leads nowhere, or out, of which nothing else can be asked."""
    try:
        filesystem.readlink(path)
    except (OSError, ValueError):
        return False
    return True


def resolve_nofollow(filesystem: Filesystem, path: str) -> str:
    """Where what is at a normal path is: links above it are followed, and not it. Raises as `Filesystem.resolve`."""
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
    # Name by name, so that a new file can be made in a directory whose name has to be escaped.
    if "\\x" not in path:
        return path
    here = ""
    for name in path.split("/"):
        literal, read_back = f"{here}{name}", f"{here}{unescaped(name)}"
        here = f"{read_back if not filesystem.exists(literal) and filesystem.exists(read_back) else literal}/"
    return here.rstrip("/")


_DOTGIT_NTFS = re.compile(rb"(?:^|\\)(?:\.git|git~1)[. ]*(?:[\\:]|$)", re.IGNORECASE)
"""As git sees it on NTFS: with dots and blanks after it, streams, the short name, a backslash before."""
_HFS_IGNORES = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
_NOT_TEXT = re.compile("[\ud800-\udfff\ufffe\uffff]")


def is_dotgit(name: bytes) -> bool:
    """Whether git, on any system, takes this name for `.git`."""
    if _DOTGIT_NTFS.search(name):
        return True
    text = name.decode("utf-8", "surrogateescape")
    # git stops reading where a name is no text, so that such a rest does not make it another name.
    text = _NOT_TEXT.split(text, maxsplit=1)[0].translate(_HFS_IGNORES)
    return text.lower() == ".git"
