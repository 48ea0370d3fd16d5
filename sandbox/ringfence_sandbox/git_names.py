"""Names of a workspace as git trees can hold them: what git takes for `.git` is written under an escape."""

from __future__ import annotations

import re

_MARK = b"~rf~"
_DOTGIT_NTFS = re.compile(rb"(?:^|\\)(?:\.git|git~1)[. ]*(?:[\\:]|$)", re.IGNORECASE)
"""As git sees it on NTFS: with dots and blanks after it, streams, the short name, a backslash before."""
_SUSPECT = re.compile(rb"[.gG\x80-\xff]|.*\\", re.DOTALL)
"""How a name must begin, or what it must have, to be looked at more closely; nearly none does."""
_HFS_IGNORES = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
_NOT_TEXT = re.compile("[\ud800-\udfff\ufffe\uffff]")


def escaped(name: bytes) -> bytes:
    """The name for a git tree. Different names stay different, and `unescaped` gives the name back."""
    if not (name.startswith(_MARK) or (_SUSPECT.match(name) and is_dotgit(name))):
        return name
    return _MARK + name.replace(b"%", b"%25").replace(b"\\", b"%5C")


def unescaped(name: bytes) -> bytes:
    if not name.startswith(_MARK):
        return name
    return name[len(_MARK) :].replace(b"%5C", b"\\").replace(b"%25", b"%")


def is_dotgit(name: bytes) -> bool:
    """Whether git, on any system, takes this name for `.git`."""
    if _DOTGIT_NTFS.search(name):
        return True
    text = name.decode("utf-8", "surrogateescape")
    # git stops reading where a name is no text, so that such a rest does not make it another name.
    text = _NOT_TEXT.split(text, maxsplit=1)[0].translate(_HFS_IGNORES)
    return text.lower() == ".git"
