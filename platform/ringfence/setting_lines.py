"""The lines ``KEY=VALUE`` of files with settings, and which of their values are secrets."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_SETTING = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_][\w.-]*)[ \t]*=[ \t]*(.*)$", re.MULTILINE)
_QUOTED = {
    quote: (
        re.compile(rf"{quote}([^{quote}]*){quote}"),
        re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL),
    )
    for quote in "\"'`"
}
"""A value in quotation marks, which may have several lines, without and with backslashes before characters."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
PLAIN = re.compile(
    "development|production|password|username|database|changeme|postgres(ql)?"
    r"|\$\{\w+\}|(\w+://)?(localhost|127\.0\.0\.1|0\.0\.0\.0)(:\d+)?(/[^@?]*)?",
    re.IGNORECASE,
)
"""Values that no secret has, or that everybody knows."""
_SECRET_NAME = re.compile("key|token|secret|pass|pwd|cred|auth|private|salt|sign|dsn|hook|cookie", re.IGNORECASE)
_SOUNDS_ALIKE = re.compile(
    "author(?!i)|(de|as)sign|signal|tokenizer|keycloak|keyboard|compass|passenger", re.IGNORECASE
)
_NAME_OF_ANOTHER_THING = re.compile(
    "(.*_)?(app|backend|bucket|cluster|dir|domain|endpoint|file|handler|hasher|header|host|model|name|path|project"
    "|project_id|provider|queue|realm|service|title|tokenizer|topic|type|ur[il]|user)",
    re.IGNORECASE,
)
"""A name of what a secret is for, or of where it is."""
_FILE_NAME = re.compile(r"[\w./-]+\.(json|ya?ml|txt|pem|key|crt|p12)", re.ASCII)
_PHRASE = re.compile("[A-Za-z]+([- ][A-Za-z]+){2,}")
_PLAIN_CHARACTERS = re.compile(r"[\w./:, +-]*|[\w.+-]+@[\w-]+(\.[\w-]+)+", re.ASCII)
_WORD = re.compile("[A-Za-z]{1,15}|[A-Za-z]{0,6}[0-9]{1,4}[A-Za-z]{0,4}")
"""A part of the name of a module, a path, a region, a date: a project is full of them."""


def settings_in(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the lines ``KEY=VALUE``, without quotation marks and comments.

    A value in quotation marks comes as it stands there, and as programs read it.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16", "replace") if is_wide else content.decode("utf-8", "surrogateescape")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for setting in _SETTING.finditer(text):
        quoted = dict.fromkeys(_in_quotes(text, setting.start(2))) if setting[2] else {}
        for value in quoted or (setting[2].split(" #")[0].rstrip(),):
            yield setting[1], value


def _in_quotes(text: str, at: int) -> Iterator[str]:
    for pattern in _QUOTED.get(text[at], ()):
        found = pattern.match(text, at)
        # Where the mark that ends it begins the value of another line, it is none that belongs to this one.
        if found is not None and not ("\n" in found[1] and _SETTING.fullmatch(found[1].rpartition("\n")[2])):
            yield found[1]
            yield re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), found[1], flags=re.DOTALL)


def is_plain(name: str, value: str) -> bool:
    """Whether a setting is no secret, by its value, and unless its name is that of a secret."""
    if PLAIN.fullmatch(value):
        return True
    if "\n" in value:
        return all(is_plain(name, line) for line in value.splitlines())
    is_named_secret = _PHRASE.fullmatch(value) or _SECRET_NAME.search(_SOUNDS_ALIKE.sub("", name))
    if is_named_secret and not _NAME_OF_ANOTHER_THING.fullmatch(name) and not _FILE_NAME.fullmatch(value):
        return False
    return _PLAIN_CHARACTERS.fullmatch(value) is not None and all(
        _WORD.fullmatch(word) for word in re.findall("[A-Za-z0-9]+", value)
    )
