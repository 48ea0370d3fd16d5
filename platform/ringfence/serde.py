"""Dataclasses to JSON and back, and their JSON Schema, on pydantic's `TypeAdapter`.

Parsing is pydantic's strict JSON mode: a list stands for a tuple or a set, text for an enum's value, a date, a UUID, a
path or (as base64) bytes, and nothing is converted with loss. One thing is more generous: with ``coerce=True`` text
that is a JSON number, ``true`` or ``false`` stands for it where a number or a boolean is declared.

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
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
from weakref import WeakKeyDictionary

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
        ValueError: the data does not fit. The message has every problem and its place: ``edits[2].count: expected an
            integer (got "many")``.
    """
    return decoder(cls, extra=extra, coerce=coerce)(data)


def decoder(cls: type[T], *, extra: Extra = "forbid", coerce: bool = True) -> Decoder[T]:
    """`parse` for one class, compiled: for a caller that parses it often.

    Raises TypeError for a class that is not a dataclass or cannot be parsed.
    """
    from pydantic import ValidationError
    from pydantic_core import PydanticSerializationError, to_json

    _check_extra(extra)
    if not _is_dataclass_type(cls):
        raise TypeError(f"expected a dataclass, got {name_of(cls)}")
    adapter = _adapter(cls)
    validate = adapter.validator.validate_json

    def decode(data: Mapping[str, object] | str | bytes) -> T:
        try:  # most tool calls are flat, and this takes a third of the time
            flat = isinstance(data, dict) and _SCALARS.issuperset(map(type, data.values()))
            text = to_json(data) if flat else _as_text(data)
        except PydanticSerializationError:  # a lone surrogate
            text = _as_text(data)
        try:
            return validate(text, strict=True, extra=extra, by_alias=True, by_name=True)
        except ValidationError as error:
            problems = error.errors(include_url=False)
        value = json.loads(text)
        if coerce and _convert_texts(value, problems):
            try:
                return validate(json.dumps(value), strict=True, extra=extra, by_alias=True, by_name=True)
            except ValidationError as error:
                problems = error.errors(include_url=False)
        raise ValueError(format_errors(problems, value, schema(cls)))

    return decode


def schema(cls: type[object], *, extra: Extra = "ignore") -> dict[str, object]:
    """The JSON Schema (2020-12) of what ``parse`` takes without coercion; yours to change.

    ``extra="forbid"`` puts ``additionalProperties: false`` into every object. Types inside of ``cls`` are in ``$defs``.
    Raises TypeError for a type that has no schema.
    """
    _check_extra(extra)
    kept = _kept_with(cls)
    if f"schema {extra}" not in kept:
        kept[f"schema {extra}"] = json.dumps(_trim(_schema(cls), extra == "forbid"))
    return json.loads(kept[f"schema {extra}"])


def _schema(cls: type[object]) -> dict[str, Any]:
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
    return found


@cache
def _schema_generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

        def field_is_present(self, field: Any) -> bool:
            return field.get("init", True) and super().field_is_present(field)

    return Generator


def read_json(text: str | bytes) -> dict[str, object]:
    """The object that a JSON text holds.

    Raises ValueError for anything else, for a key that occurs twice, and for NaN and Infinity.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        try:  # most texts have no blanks around the object, and looking for them takes longer than the rest
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
_scanner: Any = STRICT_JSON  # the types of the standard library leave its scanner out
_scan_once: Callable[[str, int], tuple[object, int]] = _scanner.scan_once
"""The value at a place and where it ends; StopIteration where none begins."""


# The adapter of a class


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter

    kept = _kept_with(cls)
    if "adapter" in kept:
        return kept["adapter"]
    # pydantic takes a configuration for the type around a dataclass, which then holds inside.
    kind = cast("type[Any]", cls | None if _is_dataclass_type(cls) else cls)
    config = ConfigDict(val_json_bytes="base64", ser_json_bytes="base64", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind, config=config)
        if not adapter.pydantic_complete:
            adapter.rebuild(_types_namespace=_enclosing_locals(cls))
    except PydanticUndefinedAnnotation as error:
        advice = "define it at module level, or parse while the function that defines it runs"
        raise TypeError(f"{name_of(cls)} cannot be parsed: {error.message}; {advice}") from None
    except PydanticUserError as error:
        raise TypeError(f"{name_of(cls)} cannot be parsed: {error.message.splitlines()[0]}") from None
    except Exception as error:  # pydantic-core's SchemaError, such as for a pattern that is no regular expression
        raise TypeError(f"{name_of(cls)} cannot be parsed: {' '.join(str(error).split())}") from None
    kept["adapter"] = adapter
    return adapter


def _kept_with(cls: type[Any]) -> dict[str, Any]:
    """What was compiled for a dataclass: kept on the class itself, since a cache elsewhere would keep the class alive.
    Nothing is kept for other types."""
    if not isinstance(cls, type) or not is_dataclass(cls):  # pyright: ignore[reportUnnecessaryIsInstance]  # Box[int]
        return {}
    if "__ringfence_serde__" not in vars(cls):
        type.__setattr__(cls, "__ringfence_serde__", {})
    return vars(cls)["__ringfence_serde__"]


def _enclosing_locals(cls: type[Any]) -> dict[str, Any]:
    """The local names of the running functions in which ``cls`` was defined: its annotations may name them."""
    functions: set[tuple[str, str]] = set()
    for each in (get_origin(cls) or cls, *get_args(cls)):
        scopes = name_of(each).split(".<locals>")
        functions |= {(each.__module__, ".<locals>".join(scopes[:depth])) for depth in range(1, len(scopes))}
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) in functions:
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return found


def _is_dataclass_type(cls: object) -> bool:
    origin = get_origin(cls) or cls
    return isinstance(origin, type) and is_dataclass(origin)


def name_of(cls: object) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)


def _check_extra(extra: str) -> None:
    if extra not in ("forbid", "ignore"):
        raise ValueError(f"extra must be 'forbid' or 'ignore', not {extra!r}")


_SCALARS = frozenset({str, int, bool, type(None)})


def _as_text(data: object) -> str | bytes:
    """``data`` as JSON text that `read_json` would take."""
    if isinstance(data, (str, bytes)):
        read_json(data)
        return data if isinstance(data, str) else data.decode()
    if not isinstance(data, Mapping):
        raise TypeError(f"expected a mapping or the text of a JSON object, got {type(data).__name__}")
    mapping = cast("Mapping[str, object]", data)
    try:
        return _ENCODER.encode(mapping if isinstance(mapping, dict) else {**mapping})
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _convert_texts(value: Any, problems: Sequence[Any]) -> bool:
    """Put numbers and booleans where strict parsing refused their text; say whether there were any."""
    is_converted = False
    for problem in problems:
        kinds = _KINDS_OF_TEXT.get(problem["type"])
        converted = None if kinds is None else _converted(problem["input"])
        if kinds is not None and type(converted) in kinds:
            *around, last = _data_path(value, problem)
            holder = value
            for part in around:
                holder = holder[part]
            holder[last] = converted
            is_converted = True
    return is_converted


_KINDS_OF_TEXT: Mapping[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}


def _converted(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return STRICT_JSON.decode(value.lower()) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None


def _trim(node: Any, forbid: bool) -> Any:
    """A schema without titles, which only repeat names, and closed to other keys if those are forbidden."""
    if isinstance(node, list):
        return [_trim(each, forbid) for each in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", node).items():
        if key in ("properties", "$defs"):
            out[key] = {name: _trim(each, forbid) for name, each in value.items()}
        elif key != "title":
            out[key] = value if key in ("default", "enum", "const", "examples") else _trim(value, forbid)
    if forbid and "properties" in out:
        out["additionalProperties"] = False
    return out


# Error messages


def format_errors(problems: Sequence[Any], value: object, schema: Mapping[str, object]) -> str:
    """One line for pydantic's errors, for a model that can only change ``value``.

    The places are those of ``value``; pydantic's labels of union members are left out, and what several members
    expected in one place is said once.
    """
    # Items that do not fit are not counted: then "too short" says nothing.
    around = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    problems = [each for each in problems if each["type"] != "too_short" or each["loc"] not in around]
    expected: dict[tuple[str, str], list[str]] = {}
    more = ""
    for number, problem in enumerate(problems):
        if len(expected) == MAX_PROBLEMS:
            more = f"; and {len(problems) - number} more problems"
            break
        path = _data_path(value, problem)
        got = "" if problem["type"] in _WITHOUT_INPUT else f" (got {show_value(problem['input'])})"
        words = expected.setdefault((path_text(path), got), [])
        if (message := _message(problem, path, schema)) not in words:
            words.append(message)
    return "; ".join(_sentence(where, words, got) for (where, got), words in expected.items()) + more


_UNKNOWN_KEY = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
_WITHOUT_INPUT = _UNKNOWN_KEY | {"missing", "json_invalid", "value_error", "assertion_error"}


def _message(problem: Any, path: Sequence[str | int], schema: Mapping[str, object]) -> str:
    kind: str = problem["type"]
    if kind in _UNKNOWN_KEY:
        return _unknown_key(str(path[-1]), _known_keys(schema, path[:-1]))
    if kind == "missing":
        return "required, but missing"
    if kind == "json_invalid" and "hex escape" in problem["ctx"]["error"]:
        return "not acceptable JSON: a lone surrogate, half of a character that no text has"
    if kind == "json_invalid":
        return f"not acceptable JSON: {problem['ctx']['error']}"
    if kind in ("value_error", "assertion_error"):  # raised by the class itself
        return str(problem["ctx"]["error"])
    if kind == "dataclass_type" and (keys := _known_keys(schema, path)):
        return f"expected an object with the keys {', '.join(keys)}"
    if kind in ("literal_error", "enum"):
        return f"expected {problem['ctx']['expected']}"
    text = re.sub(r"\ba valid (?=(\w))", lambda found: "an " if found[1] in "aeio" else "a ", problem["msg"])
    text = re.sub(r"^Input should be (?=an? )", "expected ", text)
    return re.sub(r"^\w+ (?=should )| after validation", "", text)


def _sentence(where: str, words: Sequence[str], got: str) -> str:
    """Expectations of one place are joined: "expected a string or an array (got 3)"."""
    kinds = [each.removeprefix("expected ") for each in words if each.startswith("expected ")]
    parts = [f"expected {' or '.join(kinds)}"] if kinds else []
    parts += [each for each in words if not each.startswith("expected ")]
    return (f"{where}: " if where else "") + ", or ".join(parts) + got


def _unknown_key(key: str, known: Sequence[str]) -> str:
    around = [name for name in known if len(key) > 2 and key in name]  # "file" is not nearer to "title"
    near = around or get_close_matches(key[:100], known, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"unknown key{hint}" + (f" (known: {', '.join(known)})" if known else "")


def _data_path(value: Any, problem: Any) -> list[str | int]:
    """The place of a problem in the data. Its location has pydantic's labels of union members and keys, too."""
    path: list[str | int] = []
    location: tuple[Any, ...] = problem["loc"] or (None,)
    *around, last = location
    for part in around:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = cast("Any", value)[part]
            path.append(part)
    is_missing = problem["type"] == "missing"
    if (isinstance(value, dict) and last in value) or (isinstance(value, list) and isinstance(last, int)) or is_missing:
        path.append(last)
    return path


def _known_keys(schema: Mapping[str, Any], path: Sequence[str | int]) -> list[str]:
    """The keys that the schema has for the object at ``path``."""
    nodes: list[Any] = [schema]
    for part in (*path, None):
        nodes = [option for node in nodes for option in _options(schema, node)]
        if part is not None:
            nodes = [inner for node in nodes if (inner := _inside(node, part)) is not None]
    return list(dict.fromkeys(key for node in nodes for key in node.get("properties", ())))


def _options(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
    for option in node.get("anyOf", node.get("oneOf", ())):
        yield from _options(schema, option)
    yield node


def _inside(node: Mapping[str, Any], part: str | int) -> Any:
    if isinstance(part, int):
        return node.get("items")
    found: Any = node.get("properties", {}).get(part, node.get("additionalProperties"))
    return cast("Any", found) if isinstance(found, dict) else None


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
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and len(part) <= 60:
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
    try:
        return _plain(obj, exclude_none, 0)
    except _NotDumpable as problem:
        where = path_text(reversed(problem.path))
        raise problem.kind(f"{where}: {problem.message}" if where else problem.message) from None


def dump_any(obj: object, *, exclude_none: bool = False) -> object:
    """``dump`` for what must not fail: what has no JSON form becomes its repr, cut to a bounded length, and so does
    what contains itself or is nested too deeply."""
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
        if (attributes := _attributes(kind)) is not None:
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


_known_attributes: WeakKeyDictionary[type, tuple[tuple[str, str], ...] | None] = WeakKeyDictionary()


def _attributes(cls: type) -> tuple[tuple[str, str], ...] | None:
    """The attributes of a dataclass and the keys that they have in JSON; None for another class."""
    try:
        return _known_attributes[cls]
    except KeyError:
        found = None
        if is_dataclass(cls):
            found = tuple((each.name, each.metadata.get("alias") or each.name) for each in fields(cls))
        _known_attributes[cls] = found
        return found


def _plain(value: Any, exclude_none: bool, depth: int) -> Any:
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
    if "__pydantic_serializer__" in kind.__dict__:  # with aliases and computed fields of its own
        return _adapter(kind).dump_python(value, mode="json", by_alias=True, exclude_none=exclude_none)
    if (attributes := _attributes(kind)) is not None:
        pairs = [(key, getattr(value, name)) for name, key in attributes]
        pairs = [pair for pair in pairs if pair[1] is not None] if exclude_none else pairs
        return _object(pairs, exclude_none, depth)
    if kind is dict:
        return _object([(_key_text(key), item) for key, item in value.items()], exclude_none, depth)
    if kind is list or kind is tuple:
        return _array(value, exclude_none, depth)
    for types, simpler in _FORMS:
        if isinstance(value, types):
            out = _plain(simpler(value), exclude_none, depth + 1)
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


def _object(pairs: Sequence[tuple[str, Any]], exclude_none: bool, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    key = ""
    try:
        for key, item in pairs:
            out[key] = _plain(item, exclude_none, depth + 1)
    except _NotDumpable as problem:
        problem.path.append(key)
        raise
    if len(out) != len(pairs):
        raise _NotDumpable(ValueError, "two keys become the same text in JSON")
    return out


def _array(items: Iterable[Any], exclude_none: bool, depth: int) -> list[Any]:
    out: list[Any] = []
    try:
        for item in items:
            out.append(_plain(item, exclude_none, depth + 1))  # noqa: PERF401 (its length is where a problem is)
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
    text = _plain(key, False, 0)
    if type(text) in (list, dict):
        raise _NotDumpable(TypeError, f"the type {name_of(type(key))} cannot be a key in JSON")
    return text if isinstance(text, str) else json.dumps(text)


_ENCODER = json.JSONEncoder(default=dump, allow_nan=False)
