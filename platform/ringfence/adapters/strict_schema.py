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
"""Keywords that some providers reject. They move into the description, and parsing checks them."""
KEPT_KEYWORDS = frozenset(
    {"type", "description", "enum", "const", "anyOf", "items", "properties", "required", "$ref", "$defs"}
)
DROPPED_KEYWORDS = frozenset({*WORDED_KEYWORDS, "oneOf", "discriminator", "additionalProperties", "title", "examples"})


class _NotStrictError(ValueError):
    """Raised for a schema that no strict mode accepts, such as an object with keys of any name."""


def strict_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """Convert `schema` for a strict mode. Optional properties become required. Return None if it is impossible."""
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


def _strict(node: Mapping[str, Any]) -> dict[str, Any]:
    if "oneOf" in node:
        node = {**node, "anyOf": node["oneOf"]}
    out = _strict_keywords(node)
    if not out.keys() & {"type", "enum", "const", "anyOf", "$ref"}:
        raise _NotStrictError("anything at all")
    if "$ref" in out:  # strict modes reject other keywords beside a reference
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


def _strict_keywords(node: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a schema that a strict mode takes, with the schemas in them converted."""
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
    return out
