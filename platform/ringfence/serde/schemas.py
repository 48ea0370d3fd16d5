"""The JSON Schema of a dataclass."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any

from ringfence.serde.adapters import AliasGenerator, Extra, name_of
from ringfence.serde.dumping import dump
from ringfence.serde.rules import WORDS, core_schema
from ringfence.serde.strictness import INTEGER, NUMBER


def schema(
    cls: type[object], *, extra: Extra = "ignore", alias_generator: AliasGenerator | None = None
) -> dict[str, object]:
    """The JSON Schema (2020-12) of what ``parse`` takes without coercion; yours to change.

    ``extra="forbid"`` puts ``additionalProperties: false`` into every object. Dataclasses inside of ``cls`` are in
    ``$defs``. Raises TypeError for a type that has no schema.
    """
    found: dict[str, object] = json.loads(_schema_text(cls, extra, alias_generator))
    return found


@lru_cache(maxsize=1024)
def _schema_text(cls: type[object], extra: Extra, alias_generator: AliasGenerator | None) -> str:
    from pydantic import PydanticUserError

    if extra not in ("forbid", "ignore"):
        raise ValueError(f"extra must be 'forbid' or 'ignore', not {extra!r}")
    try:
        found = _schema_generator()().generate(core_schema(cls, alias_generator))
    except PydanticUserError as error:
        raise TypeError(f"{name_of(cls)} has no JSON Schema: {error.message.splitlines()[0]}") from None
    if "$ref" in found:
        # A recursive class is a reference to itself, but providers want an object at the root.
        found = {**found["$defs"][found.pop("$ref").removeprefix("#/$defs/")], **found}
    return json.dumps(_trimmed(found, extra == "forbid"))


@cache
def _schema_generator() -> Any:
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import PydanticSerializationError

    class Generator(GenerateJsonSchema):
        def field_is_present(self, field: Any) -> bool:
            return field.get("init", True) and super().field_is_present(field)

        def get_default_value(self, schema: Any) -> Any:
            empty: dict[Any, Any] = {list: [], tuple: [], set: [], frozenset: [], dict: {}}
            factory = schema.get("default_factory")
            return empty[factory] if factory in empty else super().get_default_value(schema)

        def encode_default(self, dft: Any) -> Any:
            try:
                return dump(dft)
            except (TypeError, ValueError) as error:
                raise PydanticSerializationError(str(error)) from None

        def emit_warning(self, kind: Any, detail: str) -> None:
            """A default without a JSON form is left out, and that is all."""

        def function_after_schema(self, schema: Any) -> dict[str, Any]:
            return super().function_after_schema(schema) | schema.get("metadata", {}).get(WORDS, {})

        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            text = {"type": "string", "pattern": f"^{NUMBER}$"}
            found = super().decimal_schema(schema)
            return {**found, "anyOf": [text if each["type"] == "string" else each for each in found["anyOf"]]}

        def dict_schema(self, schema: Any) -> dict[str, Any]:
            found = super().dict_schema(schema)
            text = _KEYS.get(schema.get("keys_schema", {}).get("type"))
            return found if text is None else {**found, "propertyNames": {"pattern": f"^{text}$"}}

        def bytes_schema(self, schema: Any) -> dict[str, Any]:
            return {"type": "string", "contentEncoding": "base64"}

    return Generator


_KEYS = {"int": INTEGER, "float": NUMBER, "decimal": NUMBER}
"""What text stands for a key that is none, by its type."""


def _trimmed(node: Any, forbid: bool) -> Any:
    """Without titles, which only repeat the names, and closed to other keys where those are forbidden."""
    kind = node.__class__
    if kind is list:
        return [_trimmed(each, forbid) for each in node]
    if kind is not dict:
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            out[key] = {name: _trimmed(each, forbid) for name, each in value.items()}
        elif key != "title":
            out[key] = value if key in ("default", "enum", "const", "examples") else _trimmed(value, forbid)
    if forbid and "properties" in out:
        out["additionalProperties"] = False
    return out
