"""JSON Schemas for the strict modes of providers: closed objects, every property required."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

WORDED_KEYWORDS = (
    "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "format", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "contentEncoding",
    "not",
)  # fmt: skip
"""Keywords that not every provider takes: a model reads them in the description, and parsing checks them anyway."""
KEPT_KEYWORDS = frozenset(
    {"type", "description", "enum", "const", "anyOf", "items", "properties", "required", "$ref", "$defs"}
)
DROPPED_KEYWORDS = frozenset({*WORDED_KEYWORDS, "oneOf", "discriminator", "additionalProperties", "title", "examples"})


class _NotStrictError(ValueError):
    """The schema has a part that no strict mode takes, such as an object with keys of any name."""


def strict_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """`schema` for a strict mode, or None where there is no such thing. What may be left out has to be given there."""
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


def _strict(node: Mapping[str, Any]) -> dict[str, Any]:
    if "oneOf" in node:
        node = {**node, "anyOf": node["oneOf"]}
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            out[key] = {name: _strict(each) for name, each in value.items()}
        elif key == "items":
            out[key] = _strict(value)
        elif key == "anyOf":
            out[key] = [_strict(each) for each in value]
        elif key in KEPT_KEYWORDS:
            out[key] = value
        elif key not in DROPPED_KEYWORDS:
            raise _NotStrictError(key)
    if not out.keys() & {"type", "enum", "const", "anyOf", "$ref"}:
        raise _NotStrictError("anything at all")
    if "$ref" in out:  # nothing may stand beside a reference
        out = {key: value for key, value in out.items() if key in ("$ref", "$defs")}
    elif words := [f"{key}: {json.dumps(node[key], ensure_ascii=False)}" for key in WORDED_KEYWORDS if key in node]:
        out["description"] = f"{out.get('description', '')} ({', '.join(words)})".strip()
    if out.get("type") == "object":
        if node.get("additionalProperties", False) is not False or "properties" not in out:
            raise _NotStrictError("an object with keys of any name")
        out["required"] = list(cast("dict[str, Any]", out["properties"]))
        out["additionalProperties"] = False
    if out.get("type") == "array" and "items" not in out:
        raise _NotStrictError("a list of anything")
    return out
