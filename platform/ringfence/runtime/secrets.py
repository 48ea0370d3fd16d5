"""Secrets: values that commands may use, and that nobody is shown."""

from __future__ import annotations

import base64
import html
import json
import logging
import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar, cast
from urllib.parse import quote, quote_plus
from uuid import UUID

from ringfence.filesystem.hidden import HidesFiles

ValueT = TypeVar("ValueT")

SHORTEST = 8
"""Characters of a value that is masked. A shorter one stands in too many other words."""
_NAME = re.compile(r"\s*(?:export\s+)?([A-Za-z_][\w.-]*)\s*")
_PLAIN = re.compile(
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
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_WITHOUT_TEXT = (int, float, datetime, UUID, type)
"""Types of common values that have no secret in them."""
_LINE_ENDS = b"\r\n"
_LEFT_OUT = "[left out: it could not be searched for secrets]"


@dataclass(frozen=True, slots=True)
class _Needle:
    """One form of one value. Base64 may be broken into lines anywhere."""

    text: str
    data: bytes
    mask: str
    wraps: bool
    pattern: re.Pattern[bytes]


class Secrets:
    """The secrets of a run, by name. In every text and bytes that `mask` gets, ``[NAME]`` takes the place of a value.

    Masked are values of 8 characters and more: as they are, as JSON, HTML and URLs quote them, in base64 at any offset,
    and each long line of a value of several lines. Any thread may use it.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """``variables`` are for the environment of commands, and are masked."""
        self.variables: Mapping[str, str] = {}
        self.shown: frozenset[str] = frozenset()
        """The masks that have taken the place of a value somewhere."""
        self._needles: tuple[_Needle, ...] = ()
        self._values: set[str] = set()
        self.give(variables or {})

    def __bool__(self) -> bool:
        return bool(self._needles)

    def give(self, variables: Mapping[str, str]) -> None:
        """Add variables for the environment of commands, and mask their values."""
        self.variables = {**self.variables, **variables}
        for name, value in variables.items():
            self.add(name, value)

    def add(self, name: str, value: str) -> None:
        """Mask one more value. One of fewer than 8 characters is ignored."""
        if value in self._values:
            return
        self._values.add(value)
        known = {needle.text for needle in self._needles}
        found = {text: wraps for text, wraps in _forms(value) if len(text) >= SHORTEST and text not in known}
        added = [_needle(text, f"[{name}]", wraps) for text, wraps in found.items()]
        self._needles = tuple(sorted((*self._needles, *added), key=lambda needle: -len(needle.text)))

    def add_settings(self, content: bytes, public: bytes = b"") -> None:
        """Mask the values of the lines ``KEY=VALUE`` of a file, but for those that are in ``public``, its published
        sample, and for words that every project has, unless the key is that of a secret."""
        known = _settings(public).values()
        for name, value in _settings(content).items():
            if value not in known and not _is_plain(name, value):
                self.add(name, value)

    def add_hidden(self, filesystem: HidesFiles) -> None:
        """Mask the values of the lines ``KEY=VALUE`` of a filesystem's hidden files."""
        for file in filesystem.hidden_files():
            self.add_settings(file.head, file.public)

    def expect_masks(self) -> None:
        """Take all masks as shown: in a conversation that goes on, an earlier process may have shown any."""
        self.shown = frozenset(needle.mask for needle in self._needles)

    def mask(self, value: ValueT) -> ValueT:
        """Return the value with all secrets in it masked: in texts, bytes, paths, dataclasses and collections.

        The very value is returned if there is none in it. Another object with one in its repr becomes that, masked.
        """
        return self._mask(value) if self._needles else value

    def masks_in(self, value: object) -> list[str]:
        """Return the masks in a value that have been shown, and those of the secrets in it."""
        text = repr(self.mask(value))
        return [mask for mask in sorted(self.shown) if mask in text]

    def open_end(self, data: bytes) -> int:
        """Return where in a piece of a stream a secret may begin that goes on in the next piece; else its length."""
        cut = len(data)
        for needle in self._needles:
            ends, length = _LINE_ENDS if needle.wraps else b"", len(needle.data)
            tail = data[-2 * length :].translate(None, ends)
            begun = next((n for n in range(min(length - 1, len(tail)), 0, -1) if tail.endswith(needle.data[:n])), 0)
            at = len(data)
            while begun:
                at -= 1
                begun -= data[at] not in ends
            cut = min(cut, at)
        spanning = True
        while spanning:  # a whole one must not be cut in two because its end could begin another one
            starts = [
                found.start()
                for needle in self._needles
                for found in needle.pattern.finditer(data, max(0, cut - 2 * len(needle.data)))
                if found.start() < cut < found.end()
            ]
            cut, spanning = min([cut, *starts]), bool(starts)
        return cut

    def _mask(self, value: Any) -> Any:
        try:
            return self._mask_parts(value)
        except Exception:  # it is nested too deeply, or its class does not let it be copied
            return _LEFT_OUT

    def _mask_parts(self, value: Any) -> Any:
        if isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            masked = self._mask_bytes(data)
            return value if masked is data else masked.decode("utf-8", "surrogatepass")
        if isinstance(value, bytes | bytearray | memoryview):
            data = bytes(cast("bytes", value))
            masked = self._mask_bytes(data)
            return value if masked is data else masked
        if isinstance(value, Mapping):
            mapping = cast("Mapping[Any, Any]", value)
            items = {self._mask(key): self._mask(item) for key, item in mapping.items()}
            same = all(key in items and items[key] is item for key, item in mapping.items())
            return mapping if same else items
        kind: Any = type(value)
        if issubclass(kind, _COLLECTIONS):
            masked = [self._mask(item) for item in value]
            if all(map(lambda a, b: a is b, masked, value)):
                return value
            return getattr(kind, "_make", kind)(masked)  # a NamedTuple takes its fields one by one
        if isinstance(value, PurePath):
            text = str(value)
            masked = self._mask(text)
            return value if masked is text else type(value)(masked)
        if is_dataclass(value) and not isinstance(value, type):
            changed = {
                field.name: masked
                for field in fields(value)
                if (masked := self._mask(held := getattr(value, field.name, None))) is not held
            }
            if changed:
                value = copy(value)
                for name, masked in changed.items():
                    object.__setattr__(value, name, masked)
            return value
        # Its repr may be shown, and cut: then a part of a secret would be.
        text = "" if value is None or isinstance(value, _WITHOUT_TEXT) else repr(value)
        masked = self._mask(text)
        return value if masked is text else masked

    def _mask_bytes(self, data: bytes) -> bytes:
        if len(data) < SHORTEST:
            return data
        flat = data.translate(None, _LINE_ENDS)
        for needle in self._needles:
            if needle.data in data or (needle.wraps and needle.data in flat):
                data = needle.pattern.sub(needle.mask.encode().replace(b"\\", b"\\\\"), data)
                self.shown |= {needle.mask}
        return data


@contextmanager
def masked_logs(secrets: Secrets) -> Generator[None]:
    """Mask the secrets in what this process logs, with the texts of exceptions, until the block ends."""
    make, formatter = logging.getLogRecordFactory(), logging.Formatter()

    def make_masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if secrets:
            text = secrets.mask(formatter.formatException(record.exc_info)) if record.exc_info else None
            record.__dict__.update(msg=secrets.mask(record.getMessage()), args=(), exc_text=text, exc_info=None)
        return record

    logging.setLogRecordFactory(make_masked)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


class MaskedStream:
    """Masks the secrets in a stream that comes in pieces: also one that stands in two of them."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held = b""

    def take(self, data: bytes) -> bytes:
        """Return what can be shown now. The beginning of a secret is held back until the next piece."""
        data = self._held + data
        cut = self._secrets.open_end(data)
        self._held = data[cut:]
        return self._secrets.mask(data[:cut])

    def end(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return self._secrets.mask(held)


def _needle(text: str, mask: str, wraps: bool) -> _Needle:
    data = text.encode("utf-8", "surrogateescape")
    between = b"[\r\n]*" if wraps else b""
    pattern = re.compile(between.join(re.escape(data[at : at + 1]) for at in range(len(data))))
    return _Needle(text, data, mask, wraps, pattern)


def _is_plain(name: str, value: str) -> bool:
    """Whether a setting is no secret, by its value, and unless its name is that of a secret."""
    if _PLAIN.fullmatch(value):
        return True
    is_named_secret = _PHRASE.fullmatch(value) or _SECRET_NAME.search(_SOUNDS_ALIKE.sub("", name))
    if is_named_secret and not _NAME_OF_ANOTHER_THING.fullmatch(name) and not _FILE_NAME.fullmatch(value):
        return False
    return _PLAIN_CHARACTERS.fullmatch(value) is not None and all(
        _WORD.fullmatch(word) for word in re.findall("[A-Za-z0-9]+", value)
    )


def _settings(content: bytes) -> dict[str, str]:
    """Return the values of the lines ``KEY=VALUE``, without quotation marks and comments."""
    found: dict[str, str] = {}
    for line in content.decode("utf-8", "surrogateescape").splitlines():
        key, equals, value = line.partition("=")
        if equals and (name := _NAME.fullmatch(key)):
            value = value.strip()
            end = value.find(value[0], 1) if value[:1] in ("'", '"') else -1
            found[name[1]] = value[1:end] if end > 0 else value.split(" #")[0].rstrip()
    return found


def _forms(value: str) -> Iterator[tuple[str, bool]]:
    """Yield each form of a value, and whether it may be broken into lines."""
    if len(value) < SHORTEST:
        return
    lines = [line.strip() for line in value.splitlines() if not line.startswith("-----")]
    for text in dict.fromkeys((value, value.strip(), *(lines if len(lines) > 1 else ()))):
        if len(text) < SHORTEST:
            continue
        yield text, False
        yield from ((form, False) for form in (html.escape(text), json.dumps(text)[1:-1], repr(text)[1:-1]))
        yield json.dumps(text, ensure_ascii=False)[1:-1], False
        for quoting in (quote, partial(quote, safe=""), quote_plus):
            quoted = quoting(text, errors="surrogateescape")
            yield quoted, False
            yield re.sub("%..", lambda found: found[0].lower(), quoted), False
    data = value.encode("utf-8", "surrogateescape")
    for offset in range(3):
        bits = (offset + len(data)) * 8
        # Without the characters that also depend on the bytes before and after it.
        encoded = base64.b64encode(b"\0" * offset + data)[-(-offset * 8 // 6) : bits // 6].decode()
        yield encoded, True
        yield encoded.translate({ord("+"): "-", ord("/"): "_"}), True
