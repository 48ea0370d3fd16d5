"""From JSON to dataclasses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_origin

from ringfence.serde.adapters import AliasGenerator, Extra, name_of
from ringfence.serde.problems import Layout, shown_value
from ringfence.serde.rules import core_schema
from ringfence.serde.strictness import strict_schema

T = TypeVar("T")
Decoder = Callable[[Mapping[str, object] | str | bytes], T]


def parse(
    cls: type[T],
    data: Mapping[str, object] | str | bytes,
    *,
    extra: Extra = "ignore",
    coerce: bool = True,
    alias_generator: AliasGenerator | None = None,
) -> T:
    """An instance of the dataclass ``cls`` from a mapping or from the text of a JSON object.

    ``extra`` says what happens to keys that are no fields, at every depth; ``alias_generator`` makes keys of the names
    of fields that have no ``alias``. Raises TypeError when ``cls`` is not a dataclass that can be parsed or ``data`` is
    none of these, and ValueError, with every problem and where it is (``edits[2].count: expected an integer (got
    "many")``), when the data does not fit.
    """
    return _decoder(cls, extra, coerce, alias_generator)(data)


def decoder(
    cls: type[T], *, extra: Extra = "forbid", coerce: bool = True, alias_generator: AliasGenerator | None = None
) -> Decoder[T]:
    """``parse`` for one class with all that can be known beforehand compiled: for whoever parses it often.

    Raises TypeError when ``cls`` is not a dataclass that can be parsed.
    """
    return _decoder(cls, extra, coerce, alias_generator)


def read_json(text: str | bytes) -> dict[str, object]:
    """The object that a JSON text holds.

    Raises ValueError for anything else, for a key that occurs twice, and for NaN and Infinity.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        try:  # mostly there are no blanks around an object, and to look for them takes longer than all else
            value, end = _scan_once(text, 0)
        except StopIteration:
            value, end = None, -1
        if end != len(text):
            value = STRICT_JSON.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not acceptable JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object (got {shown_value(value)})")
    return value  # pyright: ignore[reportUnknownVariableType]  # JSON has only text for keys


def clone(obj: T, /, **changes: object) -> T:
    """A copy of a dataclass instance with some fields changed, checked like parsed data but without coercion.

    What the fields hold is not copied. Raises TypeError and ValueError like ``parse``.
    """
    cls = type(obj)
    if not is_dataclass(obj):
        raise TypeError(f"cannot clone {cls.__name__}: it is not a dataclass")
    values = {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
    return _decoder(cls, "forbid", False, None)(values | changes)


@lru_cache(maxsize=1024)
def _decoder(cls: type[Any], extra: Extra, coerce: bool, alias_generator: AliasGenerator | None) -> Decoder[Any]:
    from pydantic_core import SchemaValidator, ValidationError

    if extra not in ("forbid", "ignore"):
        raise ValueError(f"extra must be 'forbid' or 'ignore', not {extra!r}")
    origin = get_origin(cls) or cls
    if not (isinstance(origin, type) and is_dataclass(origin)):
        raise TypeError(f"expected a dataclass, got {name_of(cls)}")
    core = strict_schema(core_schema(cls, alias_generator), coerce)
    validate = SchemaValidator(core).validate_python
    layout = Layout(core, {node["ref"]: node for node in core.get("definitions", ())})

    def decode(data: Mapping[str, object] | str | bytes) -> Any:
        if type(data) is not dict:
            data = read_json(data) if type(data) is str else _mapping(data)
        try:
            return validate(data, extra=extra, by_alias=True, by_name=True)
        except ValidationError as error:
            problems = error.errors(include_url=False)
        raise ValueError(layout.explain(problems))

    return decode


def _mapping(data: object) -> dict[str, object]:
    if isinstance(data, (str, bytes)):
        return read_json(data)
    if isinstance(data, Mapping):
        return {**data}
    raise TypeError(f"expected a mapping or the text of a JSON object, got {type(data).__name__}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"not acceptable JSON: the key {shown_value(twice)} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"not valid JSON: {name}")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
"""Refuses a key that occurs twice, NaN and Infinity, all of them with ValueError."""
_scanner: Any = STRICT_JSON  # the types of the standard library leave its scanner out
_scan_once: Callable[[str, int], tuple[object, int]] = _scanner.scan_once
"""The value at a place and where it ends; StopIteration where none begins."""
