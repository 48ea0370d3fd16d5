"""What is taken for what a field declares: pydantic's core schema, tightened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from ringfence.serde.nodes import Node, called, members, rebuilt

# Guards only refuse: the conversion stays pydantic's, so that a union can tell a value that
# fits as it is from one that has to be converted.


def strict_schema(node: Node, coerce: bool) -> Any:
    # JSON has only text for the keys of an object, so those are always coerced.
    out = rebuilt(node, lambda key, each: strict_schema(each, coerce or key == "keys_schema"))
    kind = out["type"]
    if kind == "float":
        out.setdefault("allow_inf_nan", False)
    elif kind in ("datetime", "time", "timedelta"):
        out["microseconds_precision"] = "error"
    elif kind == "dataclass":
        out["config"] = {**out.get("config", {}), "val_json_bytes": "base64"}
    elif kind == "union":
        # Numbers for labels, so that an error's location says which member it is about.
        out["choices"] = [(each, str(number)) for number, each in enumerate(members(out))]
    if kind == "str" or (kind in ("int", "float", "bool") and not coerce):
        return {**out, "strict": True}
    guard = _GUARDS.get(kind)
    if kind == "literal":
        guard = _one_of(out["expected"], {})
    elif kind == "enum":
        names = {name: member.value for name, member in out["cls"].__members__.items()}
        values = [member.value for member in out["members"]]
        texts = {str(value): value for value in values if type(value) in (int, float)}
        guard = _one_of(values, names | texts if coerce else {})
    return out if guard is None else called("before", guard, out)


def _refused(kind: Any, **context: object) -> Exception:
    from pydantic_core import PydanticKnownError

    return PydanticKnownError(kind, context or None)


def _guard(error: str, types: tuple[type, ...], text: str) -> Callable[[Any], object]:
    matches = re.compile(text, re.DOTALL).fullmatch

    def guard(value: Any) -> object:
        kind = value.__class__
        if kind in types or (kind is str and matches(value)):
            return value
        if kind is not bool and isinstance(value, types):
            return value
        raise _refused(error)

    return guard


def _no_object(value: Any) -> object:
    """For a NamedTuple, which is a list in JSON and in the schema."""
    if isinstance(value, Mapping):
        raise _refused("tuple_type")
    return value


INTEGER = r"[+-]?[0-9]+"
NUMBER = r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_NO_TIMESTAMP = r"(?![+-]?[0-9.]+([eE][+-]?[0-9]+)?$).*"
_TIMES = (date, time, timedelta)
_GUARDS = {
    "int": _guard("int_type", (int, float), INTEGER),
    "float": _guard("float_type", (float, int), NUMBER),
    "bool": _guard("bool_type", (bool, int), "(?i:true|false|yes|no|on|off|1|0)"),
    "decimal": _guard("decimal_type", (Decimal, int, float), NUMBER),
    "date": _guard("date_type", _TIMES, _NO_TIMESTAMP),
    "datetime": _guard("datetime_type", _TIMES, _NO_TIMESTAMP),
    "time": _guard("time_type", _TIMES, _NO_TIMESTAMP),
    "timedelta": _guard("time_delta_type", _TIMES, _NO_TIMESTAMP),
    "named-tuple": _no_object,
    "call": _no_object,
}


def _one_of(values: Sequence[object], texts: Mapping[str, object]) -> Callable[[Any], object] | None:
    """For a literal or an enum. Python has True == 1 == 1.0, JSON only the latter; ``texts`` stand for values too."""
    if not texts and all(isinstance(each, str) for each in values):
        return None

    def guard(value: Any) -> object:
        if type(value) is str and value not in values:
            if value in texts:
                return texts[value]
        else:
            same = (each for each in values if isinstance(each, bool) is isinstance(value, bool))
            if not isinstance(value, (int, float)) or value in same:
                return value
        raise _refused("literal_error", expected="")

    return guard
