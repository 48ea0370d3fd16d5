"""Paths and messages for display: without characters that act on a terminal or that a reader rejects."""

from __future__ import annotations

import re

# Characters that a terminal or a JSON reader may reject, and a backslash that would look like an escape.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")
_UNSHOWABLE = re.compile(rf"{_CONTROL.pattern}|\\(?=x[0-9a-fA-F]{{2}})")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


def escape_path(path: str) -> str:
    r"""Return `path` for display. Control characters and bytes that are not UTF-8 become ``\xNN``.

    A backslash that would look like an escape becomes ``\x5c``: different paths are always displayed differently.
    """
    return _UNSHOWABLE.sub(_escaped, path)


def display_path(path: str) -> str:
    """Return `escape_path` of a path, or a name for the root."""
    return escape_path(path) or "/"


def escape_text(text: str) -> str:
    """Escape a message as `escape_path` does, except for backslashes: paths in the message are escaped already."""
    return _CONTROL.sub(_escaped, text)


_VERBS = ("is ", "was ", "has ", "cannot ")


def path_message(path: str, words: str, joint: str = ": ") -> str:
    """Join a displayed path and words about it to a message.

    Words in lower case continue the sentence ("is outside of the workspace root"). Others follow `joint` ("Is a
    directory").
    """
    return f"{path} {words}" if words.startswith(_VERBS) else f"{path}{joint}{words}"


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode("utf-8", "surrogateescape"))


def unescaped(text: str) -> str:
    r"""Undo `escape_path`. An escaped "/" or NUL stays escaped, since no name can contain one."""
    if "\\x" not in text:
        return text
    return _ESCAPE.sub(_byte, text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def _byte(match: re.Match[bytes]) -> bytes:
    byte = bytes.fromhex(match[1].decode())
    return match[0] if byte in b"\0/" else byte
