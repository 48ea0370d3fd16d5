"""Names that git keeps for itself."""

from __future__ import annotations

import re

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
