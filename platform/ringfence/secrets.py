"""Secrets: values that commands may use, and that nobody is shown."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import PurePath
from threading import Lock
from typing import Any, Protocol, TypeVar, cast
from uuid import UUID

from ringfence.participants import HiddenContent
from ringfence.secret_forms import SHORTEST, Search, search_of
from ringfence.setting_lines import is_plain, settings_in

ValueT = TypeVar("ValueT")

_BYTES = (bytes, bytearray, memoryview)
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_WITHOUT_TEXT = (int, float, datetime, UUID, type)
"""Types of common values that have no secret in them."""
_LEFT_OUT = "[left out: it could not be searched for secrets]"


class ListsHiddenFiles(Protocol):
    """A filesystem that can hide files."""

    def hidden_files(self) -> Iterable[HiddenContent]:
        """The hidden files that the host can read."""
        ...


class Secrets:
    """The secrets of a run, by name. In every text and bytes that `mask` gets, ``[NAME]`` takes the place of a value.

    Masked are values of 8 characters and more: as they are, as the usual languages, shells, JSON, HTML and URLs quote
    them, in base64 at any offset, each long line of a value of several lines, and the password in a URL. Any thread may
    use it.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """``variables`` are for the environment of commands, and are masked."""
        self.variables: Mapping[str, str] = {}
        self.shown: frozenset[str] = frozenset()
        """The masks that have taken the place of a value somewhere."""
        self._values: Mapping[str, str] = {}
        self._late: frozenset[str] = frozenset()
        """The values that a call may have chosen."""
        self._found: tuple[Mapping[str, str], Search | None] = (self._values, None)
        """The search for some values, and those. It is made when it is first needed."""
        self._adding = Lock()
        self.give(variables or {})

    def __bool__(self) -> bool:
        return bool(self._values)

    def give(self, variables: Mapping[str, str]) -> None:
        """Add variables for the environment of commands, and mask their values."""
        self.variables = {**self.variables, **variables}
        for name, value in variables.items():
            self.add(name, value)

    def add(self, name: str, value: str, *, late: bool = False) -> None:
        """Mask one more value; a ``late`` one not for people. One of fewer than 8 characters is ignored."""
        with self._adding:
            if not late:
                self._late -= {value}
            if len(value) < SHORTEST or value in self._values:
                return
            if late:
                self._late |= {value}
            self._values = {**self._values, value: f"[{name}]"}

    def add_settings(self, content: bytes, public: bytes = b"", *, late: bool = False) -> None:
        """Mask the values of the lines ``KEY=VALUE`` of a file, but for those that are in ``public``, its published
        sample, and for words that every project has, unless the key is that of a secret."""
        known = {value for _, value in settings_in(public)}
        for name, value in settings_in(content):
            if value not in known and not is_plain(name, value):
                self.add(name, value, late=late)

    def add_hidden(self, filesystem: ListsHiddenFiles, *, late: bool = False) -> None:
        """Mask the values of the lines ``KEY=VALUE`` of a filesystem's hidden files.

        ``late``: calls have run since it was opened. One of them may have made a hidden file, to choose what is masked.
        """
        for file in filesystem.hidden_files():
            self.add_settings(file.head, file.public, late=late)

    def for_people(self) -> Secrets:
        """Return those that no call can have chosen. Else a call could hide from a person what the person approves."""
        known = Secrets()
        known._values = {value: mask for value, mask in self._values.items() if value not in self._late}
        return known

    def expect_masks(self) -> None:
        """Take all masks as shown: in a conversation that goes on, an earlier process may have shown any."""
        self.shown = frozenset(self._values.values())

    def mask(self, value: ValueT) -> ValueT:
        """Return the value with all secrets in it masked: in texts, bytes, paths, dataclasses and collections.

        The very value is returned if there is none in it. Another object with one in its repr becomes that, masked.
        """
        return self._mask(value) if self._values else value

    def masks_in(self, value: object) -> list[str]:
        """Return the masks in a value that have been shown, and those of the secrets in it."""
        text = repr(self.mask(value))
        return [mask for mask in sorted(self.shown) if mask in text]

    def open_end(self, data: bytes) -> int:
        """Return where in a piece of a stream a secret may begin that goes on in the next piece; else its length."""
        search = self._search()
        return len(data) if search is None else search.open_end(data)

    def _search(self) -> Search | None:
        values, search = self._found
        if values is not self._values:
            values = self._values
            search = search_of(values)
            self._found = values, search
        return search

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
        if _is_one_of(value, _BYTES):
            data = bytes(value)
            masked = self._mask_bytes(data)
            return value if masked is data else masked
        if isinstance(value, Mapping):
            return self._mask_mapping(cast("Mapping[Any, Any]", value))
        if _is_one_of(value, _COLLECTIONS):
            return self._mask_collection(value)
        if isinstance(value, PurePath):
            text = str(value)
            masked = self._mask(text)
            return value if masked is text else type(value)(masked)
        if is_dataclass(value) and not isinstance(value, type):
            return self._mask_dataclass(value)
        # Its repr may be shown, and cut: then a part of a secret would be.
        text = "" if value is None or isinstance(value, _WITHOUT_TEXT) else repr(value)
        masked = self._mask(text)
        return value if masked is text else masked

    def _mask_mapping(self, mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
        items = {self._mask(key): self._mask(item) for key, item in mapping.items()}
        same = all(key in items and items[key] is item for key, item in mapping.items())
        return mapping if same else items

    def _mask_collection(self, value: Any) -> Any:
        masked = [self._mask(item) for item in value]
        if all(map(lambda a, b: a is b, masked, value)):
            return value
        make = getattr(value.__class__, "_make", value.__class__)  # a NamedTuple takes its fields one by one
        return make(masked)

    def _mask_dataclass(self, value: Any) -> Any:
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

    def _mask_bytes(self, data: bytes) -> bytes:
        if len(data) < SHORTEST:
            return data
        search = self._search()
        if search is None:
            return data
        masked, masks = search.masked(data)
        if masks:
            self.shown |= masks
        return masked


def _is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds)


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
