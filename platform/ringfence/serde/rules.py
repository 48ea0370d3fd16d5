"""What a class says of its values beyond their types: the rules of its fields' metadata, and its own checks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field
from types import SimpleNamespace
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from ringfence.serde.adapters import AliasGenerator, enclosing_locals, name_of, type_adapter
from ringfence.serde.dumping import dump
from ringfence.serde.nodes import Node, called, members, rebuilt
from ringfence.serde.problems import shown_value

WORDS = "words of the schema"
"""The key of a node's metadata with what a schema says of it in addition."""

_NUMBERS = frozenset({"int", "float", "decimal"})
_BOUNDED = _NUMBERS | {"date", "datetime", "time", "timedelta"}
_SIZED = frozenset({"str", "bytes", "list", "tuple", "set", "frozenset", "dict"})
_TAKEN_BY = {
    "ge": _BOUNDED,
    "gt": _BOUNDED,
    "le": _BOUNDED,
    "lt": _BOUNDED,
    "multiple_of": _NUMBERS,
    "min_length": _SIZED,
    "max_length": _SIZED,
    "pattern": frozenset({"str"}),
}
"""The rules that pydantic has, and the nodes that take them."""
_OTHER_NAMES = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_length",
    "maxItems": "max_length",
    "regex": "pattern",
    "enum": "in",
    "lowercase": "lower",
    "uppercase": "upper",
    "validators": "validate",
    "transform": "convert",
}
_CASES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("strip", str.strip),
    ("lower", str.lower),
    ("upper", str.upper),
)
RULES = frozenset({*_TAKEN_BY, *_OTHER_NAMES, "strip", "lower", "upper", "in", "not_in", "validate", "convert"})


def core_schema(cls: type[Any], alias_generator: AliasGenerator | None = None) -> Any:
    """pydantic's core schema of a class with the rules worked in.

    Raises TypeError for a class that cannot be parsed, and for a rule that says nothing about the type of its field.
    """
    plain: Any = type_adapter(cls).core_schema
    return _ruled(plain, alias_generator)


def _ruled(node: Node, alias_generator: AliasGenerator | None) -> Node:
    out = rebuilt(node, lambda _, each: _ruled(each, alias_generator))
    if out["type"] != "dataclass":
        return out
    cls: type[Any] = out["cls"]
    fields = [_ruled_field(cls, each, alias_generator) for each in out["schema"]["fields"]]
    out["schema"] = {**out["schema"], "fields": fields}
    for name in ("__validate__", "__post_validate__"):
        if callable(check := getattr(cls, name, None)):
            out = called("after", _told(check, True), out)
    return out


def _ruled_field(cls: type[Any], node: Node, alias_generator: AliasGenerator | None) -> Node:
    declared: Field[Any] = cls.__dataclass_fields__[node["name"]]
    metadata = {**_of_annotation(cls, declared), **declared.metadata}
    if alias_generator is not None and "validation_alias" not in node:
        alias = alias_generator(node["name"])
        node = {**node, "validation_alias": alias, "serialization_alias": alias}
    rules = {_OTHER_NAMES.get(name, name): rule for name, rule in metadata.items() if name in RULES}
    if not rules:
        return node
    try:
        return {**node, "schema": _around(_bare(node["schema"]), rules)}
    except TypeError as error:
        raise TypeError(f"{name_of(cls)}.{node['name']}: {error}") from None


def _of_annotation(cls: type[Any], declared: Field[Any]) -> Mapping[str, Any]:
    """The rules that stand as a mapping in the `Annotated` of a field."""
    hint: Any = declared.type
    if isinstance(hint, str):
        if "Annotated" not in hint:
            return {}
        module = sys.modules.get(cls.__module__)
        names = {**(vars(module) if module is not None else {}), **enclosing_locals(cls)}
        hint = get_type_hints(SimpleNamespace(__annotations__={"it": hint}), names, include_extras=True)["it"]
    found: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *others = get_args(hint)
        for each in others:
            if isinstance(each, Mapping):
                found |= cast("Mapping[str, Any]", each)
    if _has_rules_within(hint):
        advice = "in an Annotated further inside, rules are written Annotated[int, pydantic.Field(ge=1)]"
        raise TypeError(f"{name_of(cls)}.{declared.name}: {advice}")
    return found


def _has_rules_within(hint: Any) -> bool:
    if isinstance(hint, Mapping):
        return bool(RULES & cast("Mapping[str, Any]", hint).keys())
    return any(map(_has_rules_within, get_args(hint)))


def _bare(node: Node) -> Node:
    """Without what pydantic puts around a type that does not take a rule: it fails, or says what no schema may say."""
    if node["type"] in ("default", "nullable"):
        return {**node, "schema": _bare(node["schema"])}
    said = node.get("metadata", {}).get("pydantic_js_updates", {})
    if node["type"] == "function-after" and said and said.keys() <= {*_TAKEN_BY, *_OTHER_NAMES}:
        return _bare(node["schema"])
    if node["type"] == "chain" and [each["type"] for each in node["steps"][1:]] == ["function-wrap"]:
        return _bare(node["steps"][0])
    return node


def _around(node: Node, rules: Mapping[str, Any]) -> Node:
    """First the text is changed, then the type and its bounds hold, then what is among the values, then functions."""
    if node["type"] in ("default", "nullable"):
        return {**node, "schema": _around(node["schema"], rules)}
    for name, rule in rules.items():
        if name in _TAKEN_BY:
            bounded = _bounded(node, name, rule)
            if bounded is None:
                raise TypeError(f"{name} says nothing about its type")
            node = bounded
    if changes := [change for name, change in _CASES if rules.get(name)]:
        if not _has_text(node):
            raise TypeError("strip, lower and upper are about text")
        node = called("before", _changing_text(changes), node)
    if "in" in rules:
        node = _among(node, rules["in"], True)
    if "not_in" in rules:
        node = _among(node, rules["not_in"], False)
    for name in ("validate", "convert"):
        found = rules.get(name, ())
        for function in cast("Iterable[Any]", (found,) if callable(found) else found):
            node = called("after", _told(function, name == "validate"), node)
    return node


def _bounded(node: Node, name: str, rule: Any) -> Node | None:
    """With the rule where a type takes it, in every member of a union that does; None where none does."""
    kind = node["type"]
    if kind in _TAKEN_BY[name]:
        return {**node, name: rule}
    if kind == "union":
        bounded = [(_bounded(each, name, rule), each) for each in members(node)]
        return {**node, "choices": [new or old for new, old in bounded]} if any(new for new, _ in bounded) else None
    if kind == "chain":
        last = _bounded(node["steps"][-1], name, rule)
        return last and {**node, "steps": [*node["steps"][:-1], last]}
    inside = [key for key in ("schema", "json_schema", "python_schema") if key in node]
    if kind in ("lax-or-strict", "dataclass", "definition-ref") or not inside:
        return None
    changed = {key: _bounded(node[key], name, rule) for key in inside}
    return {**node, **changed} if all(changed.values()) else None


def _has_text(node: Node) -> bool:
    if node["type"] == "union":
        return any(map(_has_text, members(node)))
    inner = node.get("schema") if node["type"].startswith("function-") else None
    return _has_text(inner) if inner else node["type"] in ("str", "enum", "literal")


def _changing_text(changes: Sequence[Callable[[str], str]]) -> Callable[[Any], object]:
    def changed(value: Any) -> object:
        if type(value) is str:
            for change in changes:
                value = change(value)
        return value

    return changed


def _among(node: Node, values: Iterable[object], wanted: bool) -> Node:
    from pydantic_core import PydanticCustomError

    allowed = [*values]
    known = [(isinstance(each, bool), each) for each in allowed]
    texts = [dump(each) for each in allowed]
    words = f"should be {'one' if wanted else 'none'} of {', '.join(map(shown_value, texts))}"

    def check(value: Any) -> object:
        if ((isinstance(value, bool), value) in known) is not wanted:
            raise PydanticCustomError("not_among", "{words}", {"words": words})
        return value

    said = {"enum": texts} if wanted else {"not": {"enum": texts}}
    return called("after", check, node, metadata={WORDS: said})


def _told(function: Callable[[Any], object], checks: bool) -> Callable[[Any], object]:
    """What it raises is about the value, whatever it is. A check may return nothing, or the value changed."""

    def call(value: Any) -> object:
        try:
            found = function(value)
        except (ValueError, AssertionError):
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return value if checks and found is None else found

    return call
