"""From dataclasses to JSON."""

from __future__ import annotations

import base64
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from ringfence.serde.adapters import AliasGenerator, name_of
from ringfence.serde.problems import encodable, path_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_INT_BITS = 14_000  # about 4,200 digits; Python turns no more than 4,300 into text
MAX_DEPTH = 200  # pydantic gives up at 255 levels, so that what is dumped can be parsed


@overload
def dump(
    obj: DataclassInstance,
    *,
    exclude_none: bool = False,
    by_alias: bool = True,
    computed: bool = False,
    alias_generator: AliasGenerator | None = None,
) -> dict[str, object]: ...
@overload
def dump(
    obj: object,
    *,
    exclude_none: bool = False,
    by_alias: bool = True,
    computed: bool = False,
    alias_generator: AliasGenerator | None = None,
) -> object: ...
def dump(
    obj: object,
    *,
    exclude_none: bool = False,
    by_alias: bool = True,
    computed: bool = False,
    alias_generator: AliasGenerator | None = None,
) -> object:
    """``obj`` as what `json.dumps` takes, at every depth; ``parse`` takes it back.

    Dataclasses become dicts by their run-time type: ``exclude_none`` leaves out their fields that are None,
    ``by_alias=False`` has their names for keys, ``alias_generator`` makes keys for fields without an alias, and
    ``computed`` adds the attributes that a class names in ``__computed__``, which ``parse`` does not take. Enums become
    their values, dates ISO 8601, bytes base64, sets sorted lists. JSON has no NaN and no infinities: they become the
    strings "NaN", "Infinity" and "-Infinity", which no float field takes back. Lone surrogates, which stand for bytes
    of file names that are not UTF-8, become their escape as six characters (``\\udcff``), so that the text can be
    encoded. Raises TypeError for what has no JSON form, and ValueError for an object that contains itself or is nested
    more than 200 levels deep and for keys that would become one; both say where.
    """
    try:
        return _plain(obj, _style(exclude_none, by_alias, computed, alias_generator), 0)
    except _NotDumpable as problem:
        where = path_text(reversed(problem.path))
        raise problem.kind(f"{where}: {problem.message}" if where else problem.message) from None


def dump_any(obj: object, *, exclude_none: bool = False) -> object:
    """``dump`` for what must not fail: where it would, what has no JSON form becomes its repr, cut to a bounded length,
    and so does what contains itself or is nested too deeply."""
    try:
        return dump(obj, exclude_none=exclude_none)
    except Exception:
        return _lenient(obj, frozenset())


def _lenient(value: Any, around: frozenset[int]) -> Any:
    try:
        if id(value) in around or len(around) > MAX_DEPTH:
            return f"<{type(value).__name__} again>" if id(value) in around else _short_repr(value)
        inside = around | {id(value)}
        kind: type[Any] = value.__class__
        if (attributes := _PLAIN.attributes(kind)) is not None:
            return {key: _lenient(getattr(value, name), inside) for name, key in attributes}
        if issubclass(kind, Mapping):
            return {str(key): _lenient(item, inside) for key, item in dict(value).items()}
        if issubclass(kind, (list, tuple, set, frozenset)):
            return [_lenient(item, inside) for item in [*value]]
        return dump(value)
    except Exception:  # whatever its own methods do
        return _short_repr(value)


def _short_repr(value: object) -> str:
    try:
        return encodable(reprlib.repr(value))
    except Exception:
        return f"<{type(value).__name__}>"


class _NotDumpable(Exception):
    """Collects, on its way out, where in the object the problem is."""

    def __init__(self, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.path: list[str | int] = []


@dataclass(frozen=True, slots=True)
class _Style:
    exclude_none: bool
    attributes: Callable[[type], tuple[tuple[str, str], ...] | None]
    """The attributes of a dataclass that are dumped and the keys they have in JSON; None for another class."""


@lru_cache(maxsize=64)
def _style(exclude_none: bool, by_alias: bool, computed: bool, alias_generator: AliasGenerator | None) -> _Style:
    @lru_cache(maxsize=1024)
    def attributes(cls: type) -> tuple[tuple[str, str], ...] | None:
        if not is_dataclass(cls):
            return None
        key = alias_generator or str
        found = [(field.name, field.metadata.get("alias") or key(field.name)) for field in fields(cls)]
        if computed:
            found += [(name, key(name)) for name in getattr(cls, "__computed__", ())]
        return tuple(found if by_alias else [(name, name) for name, _ in found])

    return _Style(exclude_none, attributes)


_PLAIN = _style(False, True, False, None)


def _plain(value: Any, style: _Style, depth: int) -> Any:
    kind = value.__class__
    if kind is str:
        return encodable(value)
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise _NotDumpable(ValueError, "an integer of thousands of digits")
        return value
    if kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else _NOT_FINITE[str(value)]
    if depth > MAX_DEPTH:
        raise _NotDumpable(ValueError, f"a {kind.__name__} that contains itself, or is nested too deeply")
    if (attributes := style.attributes(kind)) is not None:
        pairs = [(key, getattr(value, name)) for name, key in attributes]
        return _object([pair for pair in pairs if pair[1] is not None] if style.exclude_none else pairs, style, depth)
    if kind is dict:
        return _object([(_key_text(key), item) for key, item in value.items()], style, depth)
    if kind is list or kind is tuple:
        return _array(value, style, depth)
    for types, simpler in _FORMS:
        if isinstance(value, types):
            out = _plain(simpler(value), style, depth + 1)
            return _sorted(out) if types is Set else out
    raise _NotDumpable(TypeError, f"the type {name_of(kind)} has no JSON form")


def _duration(value: timedelta) -> str:
    span = abs(value)
    return f"{'' if value == span else '-'}P{span.days}DT{span.seconds}.{span.microseconds:06}S"


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_FORMS: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    # What a value is dumped as. The first that fits counts: an enum may be a string too, and a string is a sequence.
    (Enum, attrgetter("value")),
    (int, int),
    (float, float),
    ((str, UUID, Decimal, PurePath), str),
    ((bytes, bytearray, memoryview), lambda value: base64.b64encode(value).decode()),
    ((date, time), lambda value: value.isoformat()),
    (timedelta, _duration),
    (Mapping, dict),
    (Set, list),
    (Sequence, list),
)


def _object(pairs: Sequence[tuple[str, Any]], style: _Style, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    key = ""
    try:
        for key, item in pairs:
            out[key] = _plain(item, style, depth + 1)
    except _NotDumpable as problem:
        problem.path.append(key)
        raise
    if len(out) != len(pairs):
        raise _NotDumpable(ValueError, "two keys become the same text in JSON")
    return out


def _array(items: Iterable[Any], style: _Style, depth: int) -> list[Any]:
    out: list[Any] = []
    try:
        for item in items:
            out.append(_plain(item, style, depth + 1))  # noqa: PERF401 (its length is where a problem is)
    except _NotDumpable as problem:
        problem.path.append(len(out))
        raise
    return out


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _key_text(key: object) -> str:
    text = _plain(key, _PLAIN, 0)
    if type(text) in (list, dict):
        raise _NotDumpable(TypeError, f"the type {name_of(type(key))} cannot be a key in JSON")
    return text if isinstance(text, str) else json.dumps(text)
