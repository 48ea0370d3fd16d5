"""A pydantic core schema as a tree to walk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Node = dict[str, Any]
"""A node of a pydantic core schema; what keys it has depends on its ``type``."""

_NESTED = frozenset(
    {"schema", "items_schema", "keys_schema", "values_schema", "choices", "fields", "definitions", "steps"}
    | {"lax_schema", "strict_schema", "json_schema", "python_schema", "extras_schema", "arguments_schema"}
)


def rebuilt(node: Node, change: Callable[[str, Node], Any]) -> Node:
    """The node with every node right inside of it changed; ``change`` is told the key that holds it, too."""
    return {key: _each(key, value, change) if key in _NESTED else value for key, value in node.items()}


def _each(key: str, value: Any, change: Callable[[str, Node], Any]) -> Any:
    """The same for whatever a key holds: a node, a list or dict of nodes, a labelled node; the rest as it is."""
    kind = value.__class__
    if kind is dict:
        if isinstance(value.get("type"), str):
            return change(key, value)
        return {name: _each(key, item, change) for name, item in value.items()}
    if kind is list:
        return [_each(key, item, change) for item in value]
    return tuple(_each(key, item, change) for item in value) if kind is tuple else value


def called(kind: str, function: Callable[[Any], object], node: Node, **more: object) -> Node:
    """The node with a function ``before`` or ``after`` it. What refers to the node means both."""
    reference = {"ref": node["ref"]} if "ref" in node else {}
    inner = {key: value for key, value in node.items() if key != "ref"}
    call = {"type": "no-info", "function": function}
    return {"type": f"function-{kind}", "function": call, "schema": inner, **reference, **more}


def members(union: Node) -> list[Node]:
    """Without the labels that they may have."""
    return [each[0] if type(each) is tuple else each for each in union["choices"]]
