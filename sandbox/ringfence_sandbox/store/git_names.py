"""Names of a workspace as git trees can hold them: what git takes for `.git` is written under an escape."""

from __future__ import annotations

import re

from ringfence.filesystem.paths import is_dotgit

_MARK = b"~rf~"
_SUSPECT = re.compile(rb"[.gG\x80-\xff]|.*\\", re.DOTALL)
"""How a name must begin, or what it must have, to be looked at more closely; nearly none does."""


def escaped(name: bytes) -> bytes:
    """The name for a git tree. Different names stay different, and `unescaped` gives the name back."""
    if not (name.startswith(_MARK) or (_SUSPECT.match(name) and is_dotgit(name))):
        return name
    return _MARK + name.replace(b"%", b"%25").replace(b"\\", b"%5C")


def unescaped(name: bytes) -> bytes:
    if not name.startswith(_MARK):
        return name
    return name[len(_MARK) :].replace(b"%5C", b"\\").replace(b"%25", b"%")
