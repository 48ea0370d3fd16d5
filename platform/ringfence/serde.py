"""Dataclasses to JSON and back, and their JSON Schema, on pydantic's `TypeAdapter`.

Parsing is pydantic's strict JSON mode: a list stands for a tuple or a set, text for an enum's value, a date, a UUID, a
path or (as base64) bytes, and nothing is converted with loss. Two things are more generous with ``coerce=True``. Text
that is a JSON number, ``true`` or ``false`` stands for it where a number or a boolean is declared. And null stands for
a key that is left out, where the field has a default and does not admit None: models write it so.

A field's ``metadata`` may have what `pydantic.Field` takes: ``description``, ``alias``, ``ge``, ``gt``, ``le``, ``lt``,
``min_length``, ``max_length``, ``pattern`` ...; so may an ``Annotated[int, pydantic.Field(ge=1)]``. A field with an
alias is found by that or by its name. `pydantic.dataclasses` are taken like those of the standard library, and bring
their validators and ``computed_field`` with them.

Annotations are resolved in the module of the class, and in the function that defines it while that one runs.
pydantic takes 70 to 130 ms to import, so it is imported when a class is first parsed or described.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, overload
from uuid import UUID

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

__all__ = ["STRICT_JSON", "decoder", "dump", "dump_any", "parse", "read_json", "schema"]

T = TypeVar("T")
Extra = Literal["forbid", "ignore"]
Decoder = Callable[[Mapping[str, object] | str | bytes], T]

MAX_PROBLEMS = 20
MAX_DEPTH = 200
MAX_INT_BITS = 14_000  # about 4,200 digits; Python turns no more than 4,300 into text


def parse(cls: type[T], data: Mapping[str, object] | str | bytes, *, extra: Extra = "ignore", coerce: bool = True) -> T:
    """An instance of the dataclass ``cls`` from a mapping or from the text of a JSON object.

    ``extra`` says what happens to unknown keys, at every depth.

    Raises:
        TypeError: ``cls`` is not a dataclass that can be parsed, or ``data`` is none of these.
        ValueError: the data does not fit. The message has every problem and its place: ``edits[2].count: expected a
            valid integer (got "many")``.
    """
    return decoder(cls, extra=extra, coerce=coerce)(data)


def decoder(cls: type[T], *, extra: Extra = "forbid", coerce: bool = True) -> Decoder[T]:
    """`parse` for one class, compiled: for a caller that parses it often.

    Raises TypeError for a class that is not a dataclass or cannot be parsed.
    """
    from pydantic import ValidationError
    from pydantic_core import PydanticSerializationError, to_json

    if not _is_dataclass_type(cls):
        raise TypeError(f"expected a dataclass, got {name_of(cls)}")
    validate = _adapter(cls).validator.validate_json

    def decode(data: Mapping[str, object] | str | bytes) -> T:
        if isinstance(data, (str, bytes)):
            read_json(data)
            text = data
        elif isinstance(data, (dict, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]  # a dict is found sooner
            try:
                text = to_json(data, bytes_mode="base64", fallback=dump)
            except PydanticSerializationError as error:  # such as for a lone surrogate, half of a character
                raise ValueError(f"not acceptable as JSON: {encodable(str(error))}") from None
        else:
            raise TypeError(f"expected a mapping or the text of a JSON object, got {type(data).__name__}")
        try:
            return validate(text, strict=True, extra=extra, by_alias=True, by_name=True)
        except ValidationError as error:
            problems = error.errors(include_url=False)
        value = json.loads(text)
        if coerce and _convert(value, problems, cls):
            try:
                return validate(json.dumps(value), strict=True, extra=extra, by_alias=True, by_name=True)
            except ValidationError as error:
                problems = error.errors(include_url=False)
        raise ValueError(describe_problems(problems, value, schema(cls)))

    return decode


def _convert(value: Any, problems: Sequence[Any], cls: type[Any]) -> bool:
    """Put numbers and booleans where strict parsing refused their text, and leave out each null for an optional key.

    Return whether there were any.
    """
    is_converted = _leave_out_nulls(value, problems, cls)
    for problem in problems:
        given, kinds = problem["input"], _KINDS_OF_TEXT.get(problem["type"], ())
        converted: object = int(given) if isinstance(given, float) and given.is_integer() else None
        if isinstance(given, str) and kinds:
            try:
                converted = STRICT_JSON.decode(given.lower())
            except (ValueError, RecursionError):
                continue
        if type(converted) in kinds:
            *around, last = _data_path(value, problem)
            holder = value
            for part in around:
                holder = holder[part]
            holder[last] = converted
            is_converted = True
    return is_converted


def _leave_out_nulls(value: Any, problems: Sequence[Any], cls: type[Any]) -> bool:
    paths = [_data_path(value, problem) for problem in problems if problem["input"] is None]
    whole = schema(cls) if paths else {}
    is_left_out = False
    for path in filter(None, paths):
        *around, last = path
        nodes = [node for node in _nodes(whole, whole, around) if last in node.get("properties", ())]
        if any(last not in node.get("required", ()) for node in nodes):
            holder = value
            for part in around:
                holder = holder[part]
            is_left_out = holder.pop(last, value) is None or is_left_out
    return is_left_out


_KINDS_OF_TEXT: Mapping[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


def read_json(text: str | bytes) -> dict[str, object]:
    """The object that a JSON text holds.

    Raises ValueError for anything else, for a key that occurs twice, and for NaN and Infinity.
    """
    try:
        text = (text if isinstance(text, str) else text.decode()).strip(" \t\r\n")
        value, end = STRICT_JSON.raw_decode(text)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not acceptable JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object (got {show_value(value)})")
    return cast("dict[str, object]", value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"not acceptable JSON: the key {show_value(twice)} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"not valid JSON: {name}")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
"""Refuses a key that occurs twice, NaN and Infinity, all of them with ValueError."""


# The adapter of a class and its schema


def _kept(make: Callable[[type[Any]], T]) -> Callable[[type[Any]], T]:
    """Keep what was made for a dataclass on the class itself, since a cache elsewhere would keep the class alive."""
    name = f"__ringfence{make.__name__}__"

    def get(cls: type[Any]) -> T:
        try:
            return cls.__dict__[name]
        except KeyError:
            made = make(cls)
        if isinstance(cls, type) and is_dataclass(cls):  # pyright: ignore[reportUnnecessaryIsInstance]  # Box[int]
            type.__setattr__(cls, name, made)
        return made

    return get


@_kept
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # pydantic takes a configuration for the type around a dataclass, which then holds inside.
    kind = cast("type[Any]", cls | None if _is_dataclass_type(cls) else cls)
    config = ConfigDict(val_json_bytes="base64", ser_json_bytes="base64", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=config)
        if not adapter.pydantic_complete:
            adapter.rebuild(_types_namespace=_enclosing_locals(cls))
    except Exception as error:  # of pydantic for a type, of pydantic-core for a pattern that is no regular expression
        reason = " ".join(str(error).split()).partition(" For further information")[0]
        if isinstance(error, NameError):
            reason += "; define it at module level, or parse while the function that defines it runs"
        raise TypeError(f"{name_of(cls)} cannot be parsed: {reason}") from None
    return adapter


def _enclosing_locals(cls: type[Any]) -> dict[str, Any]:
    """The local names of the running functions of the modules of ``cls``: its annotations may name them."""
    modules = {each.__module__ for each in (cls, *get_args(cls))}
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in modules and frame.f_locals is not frame.f_globals:
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return found


def schema(cls: type[object], *, extra: Extra = "ignore") -> dict[str, object]:
    """The JSON Schema (2020-12) of what ``parse`` takes without coercion; yours to change.

    ``extra="forbid"`` puts ``additionalProperties: false`` into every object. Types inside of ``cls`` are in ``$defs``.
    Raises TypeError for a type that has no schema.
    """

    def tidy(node: dict[str, object]) -> dict[str, object]:
        is_object = node.get("type") == "object" and "properties" in node
        if (is_object or "enum" in node) and isinstance(node.get("title"), str):
            del node["title"]  # the name of the class
        if is_object and extra == "forbid":
            node["additionalProperties"] = False
        return node

    return json.loads(_schema_text(cls), object_hook=tidy)


@_kept
def _schema_text(cls: type[object]) -> str:
    from pydantic import PydanticUserError

    try:
        found: dict[str, Any] = _adapter(cls).json_schema(schema_generator=_schema_generator())
    except PydanticUserError as error:
        raise TypeError(f"{name_of(cls)} has no JSON Schema: {error.message.splitlines()[0]}") from None
    if _is_dataclass_type(cls):  # `_adapter` made it optional
        found |= found.pop("anyOf")[0]
    if "$ref" in found:  # providers want an object at the root
        name = found.pop("$ref").removeprefix("#/$defs/")
        root = found["$defs"][name]
        if f'"#/$defs/{name}"' not in json.dumps(found):
            del found["$defs"][name]
        found = {**root, **{key: value for key, value in found.items() if value}}
    return json.dumps(found)


@cache
def _schema_generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

        def field_is_present(self, field: Any) -> bool:
            return field.get("init", True) and super().field_is_present(field)

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    return Generator


def _is_dataclass_type(cls: object) -> bool:
    origin = get_origin(cls) or cls
    return isinstance(origin, type) and is_dataclass(origin)


def name_of(cls: object) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)


# Error messages


def describe_problems(problems: Sequence[Any], value: object, schema: Mapping[str, object]) -> str:
    """One line for pydantic's errors: the place of each in ``value``, pydantic's message, and what is there."""
    sentences = list(dict.fromkeys(_sentence(problem, value, schema) for problem in problems))
    more = len(sentences) - MAX_PROBLEMS
    return "; ".join(sentences[:MAX_PROBLEMS]) + (f"; and {more} more problems" if more > 0 else "")


_UNKNOWN_KEY = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
_OF_THE_CLASS = frozenset({"value_error", "assertion_error"})
_WITHOUT_INPUT = _UNKNOWN_KEY | _OF_THE_CLASS | {"missing", "json_invalid"}


def _sentence(problem: Any, value: object, schema: Mapping[str, object]) -> str:
    path = _data_path(value, problem)
    if problem["type"] in _UNKNOWN_KEY:
        text = _unknown_key(str(path[-1]), _known_keys(schema, path[:-1]))
    elif problem["type"] in _OF_THE_CLASS:
        text = str(problem["ctx"]["error"])
    else:
        text = problem["msg"].replace("Input should be", "expected", 1)
    where = path_text(path)
    got = "" if problem["type"] in _WITHOUT_INPUT else f" (got {show_value(problem['input'])})"
    return (f"{where}: " if where else "") + text + got


def _unknown_key(key: str, known: Sequence[str]) -> str:
    around = [name for name in known if len(key) > 2 and key in name]  # "file" is not nearer to "title"
    near = around or get_close_matches(key[:100], known, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"unknown key{hint}" + (f" (known: {', '.join(known)})" if known else "")


def _data_path(value: Any, problem: Any) -> list[str | int]:
    """The place of a problem in the data. Its location has pydantic's labels of union members and keys, too."""
    path: list[str | int] = []
    location: tuple[Any, ...] = problem["loc"]
    for depth, part in enumerate(location, 1):
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(cast("list[Any]", value))
        is_here = is_index or (isinstance(value, dict) and part in value)
        if is_here or (depth == len(location) and problem["type"] == "missing"):
            path.append(part)
        if is_here:
            value = cast("Any", value)[part]
    return path


def _known_keys(schema: Mapping[str, Any], path: Sequence[str | int]) -> list[str]:
    """The keys that the schema has for the object at ``path``."""
    return list(dict.fromkeys(key for node in _nodes(schema, schema, path) for key in node.get("properties", ())))


def _nodes(schema: Mapping[str, Any], node: Any, path: Sequence[str | int]) -> Iterator[Any]:
    """What the schema has for the place at ``path`` below ``node``: several nodes, where there is a union."""
    if node in (None, True, False):  # ``additionalProperties: true``
        return
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
    for option in node.get("anyOf", node.get("oneOf", ())):
        yield from _nodes(schema, option, path)
    if not path:
        yield node
    elif isinstance(path[0], int):
        yield from _nodes(schema, node.get("items"), path[1:])
    else:
        inner = node.get("properties", {}).get(path[0], node.get("additionalProperties"))
        yield from _nodes(schema, inner, path[1:])


def show_value(value: object) -> str:
    """A value for a message, as JSON where it is short and JSON."""
    if isinstance(value, str):
        short = value if len(value) <= 60 else f"{value[:40]}...{value[-15:]}"
        return encodable(json.dumps(short, ensure_ascii=False))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        text = reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"a very long {type(value).__name__}"
    return encodable(text if len(text) <= 100 else f"{text[:80]}...")


def path_text(parts: Iterable[str | int]) -> str:
    """``edits[2].count``; the middle of a very long one is left out."""
    text = ""
    for part in parts:
        if isinstance(part, str) and part.isidentifier() and len(part) <= 60:
            text += f".{part}" if text else part
        else:
            text += f"[{show_value(part)}]"
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def encodable(text: str) -> str:
    if text.isascii():  # a flag of the string, so that the common case does not look at the characters
        return text
    return text.encode("utf-8", "backslashreplace").decode()


# Dump


@overload
def dump(obj: DataclassInstance, *, exclude_none: bool = False) -> dict[str, object]: ...
@overload
def dump(obj: object, *, exclude_none: bool = False) -> object: ...
def dump(obj: object, *, exclude_none: bool = False) -> object:
    """``obj`` as what `json.dumps` takes, at every depth; ``parse`` takes it back.

    Dataclasses become dicts by their run-time type: ``exclude_none`` leaves out their fields that are None. Enums
    become their values, dates ISO 8601, bytes base64, sets sorted lists. JSON has no NaN and no infinities: they become
    the strings "NaN", "Infinity" and "-Infinity", which no float field takes back. Lone surrogates, which stand for
    bytes of file names that are not UTF-8, become their escape as six characters (``\\udcff``), so that the text can
    be encoded.

    Raises:
        TypeError: a value without a JSON form, and where it is.
        ValueError: an object that contains itself, is nested more than 200 levels deep, or has two keys that would
            become one, and where it is.
    """
    dumper = _Dumper(exclude_none, lenient=False)
    try:
        return dumper.dump(obj)
    except (TypeError, ValueError) as error:
        where = path_text(reversed(dumper.path))
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}" if where else str(error)) from None


def dump_any(obj: object, *, exclude_none: bool = False) -> object:
    """``dump`` for what must not fail: what has no JSON form becomes its repr, cut to a bounded length, and so does
    what contains itself or is nested too deeply."""
    return _Dumper(exclude_none, lenient=True).dump(obj)


class _Dumper:
    __slots__ = ("around", "exclude_none", "lenient", "path")

    def __init__(self, exclude_none: bool, *, lenient: bool) -> None:
        self.exclude_none = exclude_none
        self.lenient = lenient
        self.around: set[int] = set()  # the ids of the values around the one that is dumped
        self.path: list[str | int] = []  # where an error was, innermost first

    def dump(self, value: Any) -> Any:
        kind = value.__class__
        if kind is str:
            return encodable(value)
        if kind is bool or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else _NOT_FINITE[str(value)]
        if kind is int and value.bit_length() <= MAX_INT_BITS:
            return value
        key = id(value)
        try:
            if key in self.around or len(self.around) > MAX_DEPTH:
                if self.lenient and key in self.around:
                    return f"<{kind.__name__} again>"
                raise ValueError(f"a {kind.__name__} that contains itself, or is nested too deeply")
            self.around.add(key)
            try:
                return self._dump_inside(value, kind)
            finally:
                self.around.discard(key)
        except Exception:
            if self.lenient:  # whatever its own methods do
                return _short_repr(value)
            raise

    def _dump_inside(self, value: Any, kind: type[Any]) -> Any:
        is_array = kind in (list, tuple)
        if is_array:
            pairs: list[tuple[Any, Any]] = list(enumerate(cast("Sequence[object]", value)))
        elif kind is dict:
            pairs = [(_key_text(key), item) for key, item in value.items()]
        elif "__pydantic_serializer__" in kind.__dict__:  # with aliases and computed fields of its own
            return _adapter(kind).dump_python(value, mode="json", by_alias=True, exclude_none=self.exclude_none)
        elif is_dataclass(kind):
            pairs = [(key, getattr(value, name)) for name, key in _attributes(kind)]
            if self.exclude_none:
                pairs = [pair for pair in pairs if pair[1] is not None]
        else:
            return self._dump_simpler(value, kind)
        out: dict[Any, Any] = {}
        for key, item in pairs:
            try:
                out[key] = self.dump(item)
            except Exception:
                self.path.append(key)
                raise
        if len(out) != len(pairs):
            raise ValueError("two keys become the same text in JSON")
        return list(out.values()) if is_array else out

    def _dump_simpler(self, value: Any, kind: type[Any]) -> Any:
        if kind is int:
            raise ValueError("an integer of thousands of digits")
        for types, simpler in _FORMS:
            if isinstance(value, types):
                out = self.dump(simpler(value))
                return _sorted(out) if types is Set else out
        raise TypeError(f"the type {name_of(kind)} has no JSON form")


@_kept
def _attributes(cls: type[Any]) -> tuple[tuple[str, str], ...]:
    """The attributes of a dataclass and the keys that they have in JSON."""
    return tuple((each.name, each.metadata.get("alias") or each.name) for each in fields(cls))


def _short_repr(value: object) -> str:
    try:
        return encodable(reprlib.repr(value))
    except Exception:
        return f"<{type(value).__name__}>"


def _key_text(key: object) -> str:
    if key.__class__ is str:
        return encodable(cast("str", key))
    text = dump(key)
    if isinstance(text, (list, dict)):
        raise TypeError(f"the type {name_of(type(key))} cannot be a key in JSON")
    return text if isinstance(text, str) else json.dumps(text)


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


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
