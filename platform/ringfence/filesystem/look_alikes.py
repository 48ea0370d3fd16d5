r"""Names that look alike and are different: composed or decomposed letters, other blanks, invisible characters.

``café`` may have one character at its end or two, and the name of a screenshot may have U+202F before "AM". Nobody sees
the difference, and a model writes the plain form.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress

from ringfence.escapes import escape_path
from ringfence.filesystem.protocol import Filesystem

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_QUOTES = dict.fromkeys(range(0x2018, 0x201C), "'") | dict.fromkeys(range(0x201C, 0x2020), '"')
_SELECTORS = dict.fromkeys(range(0xFE00, 0xFE10))
_PLAIN = _FULL_WIDTH | _QUOTES | _SELECTORS
_BLANKS_AROUND = re.compile("(?:^|(?<=/)) +| +(?=/|$)")
_BY_CATEGORY = {"Zs": " ", "Cf": "", "Pd": "-"}


def look_alikes(filesystem: Filesystem, path: str) -> tuple[str, ...]:
    """Return the existing paths that look like a normal path that does not exist, sorted.

    The first missing name of the path is compared with the names in its directory. That one directory is listed.
    """
    here, name = _first_missing(filesystem, path)
    wanted = appearance(name)
    with suppress(OSError, ValueError):
        return tuple(
            match.path
            for match in filesystem.glob("*", path=here)
            if (found := match.path.rpartition("/")[2]) != name and appearance(found) == wanted
        )
    return ()


def _first_missing(filesystem: Filesystem, path: str) -> tuple[str, str]:
    """Return the nearest directory above a path that exists, and the name below it."""
    here, _, name = path.rpartition("/")
    while here and not filesystem.exists(here):
        here, _, name = here.rpartition("/")
    return here, name


def appearance(name: str) -> str:
    """Return a form that is the same for all names that look like this one."""
    if not name.isascii():
        name = "".join(map(_plain, unicodedata.normalize("NFC", name.translate(_PLAIN))))
        name = unicodedata.normalize("NFC", name)  # an invisible character may have stood between the two parts
    return name.strip(" ")


def _plain(character: str) -> str:
    return character if character.isascii() else _BY_CATEGORY.get(unicodedata.category(character), character)


def display_exactly(path: str) -> str:
    r"""Return `escape_path` of a path, where characters that could be mistaken are ``\xNN`` too. Tools take it back."""
    return _BLANKS_AROUND.sub(lambda found: "\\x20" * len(found[0]), "".join(map(_exactly, escape_path(path))))


def _exactly(character: str) -> str:
    is_plain = character.isascii() or (
        appearance(character) == character == unicodedata.normalize("NFD", character)
        and not unicodedata.combining(character)
    )
    return character if is_plain else "".join(f"\\x{byte:02x}" for byte in character.encode())
