"""Whether the defaults of a dataclass are of the types of their fields."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field
from types import GenericAlias
from typing import Any

from ringfence.serde.adapters import name_of, type_adapter
from ringfence.serde.nodes import Node
from ringfence.serde.problems import shown_value

_PLAIN = {"str": str, "int": int, "bool": bool, "float": float}
_PLAIN_WORDS = re.compile(r"(?:\b(?:str|int|float|bool|None|tuple|list|dict|Sequence|Mapping)\b|[][, |.])+")


def is_plain(field: Field[Any]) -> bool:
    """Whether it is seen at once that a field is of JSON's own types, and its default, if there is one, of its type."""
    kind: object = field.type
    said = kind.__name__ if isinstance(kind, type) and not isinstance(kind, GenericAlias) else str(kind)
    if _PLAIN_WORDS.fullmatch(said) is None:
        return False
    name = "None" if field.default is None else type(field.default).__name__
    return field.default is MISSING or name in said.split(" | ")


def check_defaults(cls: type[Any]) -> None:
    """Raises TypeError where the default of a field is of another type than the field. Those that a function makes are
    not looked at, and neither are those of the dataclasses inside."""
    from pydantic_core import SchemaError, SchemaValidator, ValidationError

    core: Any = type_adapter(cls).core_schema
    definitions: list[Node] = core.get("definitions", [])
    for field in _fields(core, {node["ref"]: node for node in definitions}):
        node = field["schema"]
        if node["type"] != "default" or "default" not in node or _is_plainly(node["schema"], node["default"]):
            continue
        whole: Any = {"type": "definitions", "schema": node["schema"], "definitions": definitions}
        try:
            SchemaValidator(whole if definitions else node["schema"]).validate_python(node["default"], strict=True)
        except SchemaError:  # it refers to a class that has no validator of its own here
            continue
        except ValidationError as error:
            said = error.errors(include_url=False)[0]["msg"]
            given = shown_value(node["default"])
            raise TypeError(f"{name_of(cls)}.{field['name']}: its default {given} does not fit: {said}") from None


def _is_plainly(node: Node, default: object) -> bool:
    """Without a validator, which takes longer to make than all else."""
    if node["type"] == "nullable":
        return default is None or _is_plainly(node["schema"], default)
    return len(node) == 1 and type(default) is _PLAIN.get(node["type"])


def _fields(node: Node, definitions: dict[str, Node]) -> list[Node]:
    while node["type"] != "dataclass-args":
        node = definitions[node["schema_ref"]] if node["type"] == "definition-ref" else node["schema"]
    return node["fields"]
