"""Schemas for the strict modes of providers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ringfence import serde
from ringfence.adapters.strict_schema import strict_schema


@dataclass(frozen=True)
class Inner:
    count: int = field(default=3, metadata={"ge": 1, "description": "How many."})
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    more: tuple[Inner, ...] = ()
    maybe: int | None = None
    again: Outer | None = None


@dataclass(frozen=True)
class Open:
    env: dict[str, str]


@dataclass(frozen=True)
class Anything:
    value: Any


def objects_in(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for each in node for found in objects_in(each)]
    if not isinstance(node, dict):
        return []
    own = [node] if node.get("type") == "object" else []
    return own + [found for each in node.values() for found in objects_in(each)]


def test_every_object_is_closed_and_every_property_required() -> None:
    strict = strict_schema(serde.schema(Outer, extra="forbid"))
    found = objects_in(strict)
    assert len(found) >= 3
    for node in found:
        assert node["additionalProperties"] is False
        assert node["required"] == list(node["properties"])


def test_what_cannot_be_said_is_said_in_words() -> None:
    strict = strict_schema(serde.schema(Inner))
    assert strict is not None
    assert strict["properties"]["count"] == {"type": "integer", "description": "How many. (default: 3, minimum: 1)"}


@pytest.mark.parametrize("kind", [Open, Anything])
def test_some_have_no_strict_form(kind: type[Any]) -> None:
    assert strict_schema(serde.schema(kind)) is None


def test_the_given_schema_is_not_changed() -> None:
    given_schema = serde.schema(Outer, extra="forbid")
    strict_schema(given_schema)
    assert given_schema == serde.schema(Outer, extra="forbid")
