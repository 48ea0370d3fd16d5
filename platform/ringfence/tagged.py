"""Values to JSON and back with their types: what `dump` and `parse` cannot do where a field says `object`.

What has no JSON form of its own becomes an object with one key that begins with ``$``. Nothing is imported in reading:
dataclasses and enums are those that the reader names.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from weakref import ref

from ringfence.serde import name_of

MAX_DEPTH = 200

_TEXTS: dict[type[Any], tuple[str, Callable[[Any], str], Callable[[str], object]]] = {
    datetime: ("$datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("$date", date.isoformat, date.fromisoformat),
    time: ("$time", time.isoformat, time.fromisoformat),
    UUID: ("$uuid", str, UUID),
    Decimal: ("$decimal", str, Decimal),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
_READERS: dict[str, Callable[[Any], object]] = {
    **{tag: read for tag, _, read in _TEXTS.values()},
    "$float": float,
    "$timedelta": lambda parts: timedelta(*parts),
    "$path": Path,
    "$purepath": PurePosixPath,
}


MOVED = {
    "ringfence.prompt.policy": "ringfence.runtime.policy",
    "ringfence.runtime.events": "ringfence.session.events",
    "ringfence.runtime.limits": "ringfence.limits",
    "ringfence.runtime.receipts": "ringfence.receipts",
    "ringfence.runtime.reducers": "ringfence.session.visibility",
    "ringfence.runtime.tool_result": "ringfence.session.tool_result",
    "ringfence_sandbox.container.commands:ShellEnvironment": "ringfence_workspace.commands:ShellEnvironment",
    "ringfence_tools.agent_run": "ringfence_tools.runs.agent_run",
    "ringfence_tools.files:Listing": "ringfence_tools.files:FileListing",
    "ringfence_tools.files:Move": "ringfence_tools.files:MoveParams",
    "ringfence_tools.searching:Glob": "ringfence_tools.searching:GlobParams",
}
"""Where a module of earlier versions, or a type of one (``module:name``), is now: what they wrote can be read still."""


def type_id(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def known_type(name: str, types: Mapping[str, type[Any]]) -> type[Any] | None:
    """The type with this `type_id`, or with the one that it had in an earlier version."""
    if name in types:
        return types[name]
    module, _, qualname = name.partition(":")
    return types.get(MOVED.get(name, f"{MOVED.get(module, module)}:{qualname}"))


def encode(value: Any, depth: int = 0) -> Any:
    """What `json.dumps` takes, always the same for the same value.

    Raises:
        TypeError: a value without such a form (a function, an open file).
        ValueError: it contains itself, or is nested more than 200 levels deep.
    """
    kind: type[Any] = value.__class__
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > MAX_DEPTH:
        raise ValueError(f"a {kind.__name__} that contains itself, or is nested too deeply")
    if isinstance(value, Enum):
        return {"$enum": type_id(kind), "name": value.name}
    if is_dataclass(kind):
        held = {field.name: encode(getattr(value, field.name), depth + 1) for field in fields(kind)}
        return {"$type": type_id(kind), "fields": held}
    if kind in _TEXTS:
        tag, write, _ = _TEXTS[kind]
        return {tag: write(value)}
    if kind is timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, PurePath):
        return {"$path" if isinstance(value, Path) else "$purepath": str(value)}
    return _encode_collection(value, depth)


def _encode_collection(value: Any, depth: int) -> Any:
    kind: type[Any] = value.__class__
    if isinstance(value, Mapping):
        pairs = typing.cast("Mapping[object, object]", value).items()
        return {"$dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in pairs]}
    if kind not in (list, tuple) and not isinstance(value, Set):
        raise TypeError(f"the type {name_of(kind)} has no JSON form")
    items = [encode(item, depth + 1) for item in typing.cast("Iterable[object]", value)]
    if kind in (list, tuple):
        return items if kind is list else {"$tuple": items}
    return {"$set" if kind is set else "$frozenset": sorted(items, key=json.dumps)}


def decode(data: Any, types: Mapping[str, type[Any]]) -> Any:
    """The value again. ``types`` has the dataclasses and enums that may be in it, by `type_id`.

    Raises:
        ValueError: it is not what `encode` makes, or has a type that is not among these.
    """
    if isinstance(data, list):
        return [decode(item, types) for item in typing.cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    tagged = typing.cast("dict[str, Any]", data)
    tag = min(tagged, default="")
    content: Any = tagged.get(tag)
    try:
        if tag in _READERS:
            return _READERS[tag](content)
        match tag:
            case "$tuple":
                return tuple(decode(item, types) for item in content)
            case "$set" | "$frozenset":
                return (set if tag == "$set" else frozenset)(decode(item, types) for item in content)
            case "$dict":
                return {decode(key, types): decode(item, types) for key, item in content}
            case "$enum":
                return _known(content, types, Enum)[tagged["name"]]
            case "$type":
                return _instance(_known(content, types, None), tagged["fields"], types)
            case _:
                raise ValueError(f"unknown form {tag!r}")
    except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"not a value of the form {tag!r}: {error}") from None


def _known(name: object, types: Mapping[str, type[Any]], base: type[Any] | None) -> Any:
    kind = known_type(str(name), types)
    if kind is None or (base is not None and not issubclass(kind, base)) or (base is None and not is_dataclass(kind)):
        raise ValueError(f"the type {name} is not known here, or two types have this name")
    return kind


def _instance(kind: type[Any], held: Mapping[str, Any], types: Mapping[str, type[Any]]) -> Any:
    declared = {field.name: field for field in fields(kind)}
    if unknown := held.keys() - declared.keys():
        raise ValueError(f"{kind.__qualname__} has no field {', '.join(sorted(unknown))}")
    values = {name: decode(item, types) for name, item in held.items()}
    try:
        made = kind(**{name: value for name, value in values.items() if declared[name].init})
    except Exception as error:  # a class may refuse in its own words
        raise ValueError(f"no {kind.__qualname__} can be made of this: {error}") from error
    for name, value in values.items():
        if not declared[name].init:
            object.__setattr__(made, name, value)
    return made


_registered: dict[int, ref[type[Any]]] = {}
"""By id. A type that the program does not keep any more goes by itself."""


def register_type(kind: type[Any]) -> None:
    """Let `registered_types` have the type, for as long as the program keeps it."""
    key = id(kind)
    _registered[key] = ref(kind, lambda _: _registered.pop(key, None))


def registered_types() -> dict[str, type[Any]]:
    """The registered types by `type_id`. Of two types with one name neither is there: a reader has to name one."""
    kinds = [kind for one in list(_registered.values()) if (kind := one()) is not None]
    count = Counter(map(type_id, kinds))
    return {type_id(kind): kind for kind in kinds if count[type_id(kind)] == 1}


def types_within(kinds: Iterable[type[Any]]) -> dict[str, type[Any]]:
    """These dataclasses, and the dataclasses and enums that their fields declare, at every depth; by `type_id`."""
    found: dict[str, type[Any]] = {}
    waiting: list[Any] = list(kinds)
    while waiting:
        kind: Any = waiting.pop()
        waiting += typing.get_args(kind)
        kind = typing.get_origin(kind) or kind
        if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum)) and type_id(kind) not in found:
            found[type_id(kind)] = kind
            if is_dataclass(kind):
                waiting += _declared(kind)
    return found


def types_of(values: Iterable[object]) -> set[type[Any]]:
    """The dataclasses and enums of these values and of what they hold, at every depth."""
    found: set[type[Any]] = set()
    seen: dict[int, object] = {}  # by id; the value keeps its id taken
    waiting = list(values)
    while waiting:
        value: Any = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        kind: type[Any] = value.__class__
        if issubclass(kind, Enum):
            found.add(kind)
        elif is_dataclass(kind):
            found.add(kind)
            waiting += [getattr(value, field.name) for field in fields(kind)]
        elif isinstance(value, Mapping):
            waiting += itertools.chain.from_iterable(typing.cast("Mapping[object, object]", value).items())
        elif isinstance(value, list | tuple | Set):
            waiting += typing.cast("Iterable[object]", value)
    return found


def _declared(kind: type[Any]) -> list[Any]:
    """The types of a dataclass's fields; without those that are there for the type checker only."""
    found: list[Any] = []
    names = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    for field in fields(kind):
        # One by one, since a single name that cannot be resolved would hide all the others.
        with suppress(Exception):
            found += typing.get_type_hints(SimpleNamespace(__annotations__={field.name: field.type}), names).values()
    return found
