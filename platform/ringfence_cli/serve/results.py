"""Tools and what they answer, in the words of the Model Context Protocol."""

from __future__ import annotations

import json
from typing import Any, cast

from mcp_types import CallToolResult, TextContent, ToolAnnotations
from mcp_types import Tool as ToolDescription

from ringfence import serde
from ringfence.adapters.tool_executor import ToolCallResult
from ringfence.prompt.tool import Tool
from ringfence.runtime.tool_result import bounded

MAX_STRUCTURED_CHARACTERS = 200_000
"""Of a structured result as JSON. (The text beside it has its own bound.)"""
ADDITIVE = frozenset({"checkpoint"})
"""Tools that change something, and take nothing away."""
IDEMPOTENT = frozenset({"write_file", "rm", "restore"})
"""Tools of which a second call with the same arguments changes nothing more."""
ITEMS = "items"
"""The key of a result that is a list: a structured result is an object."""
MESSAGE = "message"
"""The key of what the tool said, unless the result has one of that name."""
CUT = "[the structured result was cut: ask for a smaller part]"
_NO_PARAMS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


def described(tool: Tool[Any, Any]) -> ToolDescription:
    """A tool as clients are told of it."""
    annotations = ToolAnnotations(
        title=tool.name.replace("_", " ").capitalize(),
        read_only_hint=tool.read_only,
        destructive_hint=not tool.read_only and tool.name not in ADDITIVE,
        idempotent_hint=tool.read_only or tool.name in IDEMPOTENT,
        open_world_hint=False,
    )
    params = serde.schema(tool.params_type, extra="forbid") if tool.params_type is not None else _NO_PARAMS
    return ToolDescription(
        name=tool.name,
        title=annotations.title,
        # Clients may defer tools and find them by these words alone, beside tools of their own with the same names.
        description=f"{tool.description} (In the ringfence workspace; a call that fails changes nothing.)",
        input_schema=params,
        output_schema=_output_schema(tool),
        annotations=annotations,
    )


def _output_schema(tool: Tool[Any, Any]) -> dict[str, object] | None:
    if tool.result_type in (None, str):  # a text has no structure
        return None
    schema = serde.schema(tool.result_type)
    if tool.result_container == "array":
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        listed = {"type": "array", "items": schema}
        schema = {"type": "object", "properties": {ITEMS: listed}, "required": [ITEMS], **definitions}
    properties = cast("dict[str, object]", schema.setdefault("properties", {}))
    properties.setdefault(MESSAGE, {"type": "string", "description": "What the tool says of it."})
    return schema


def called(answer: ToolCallResult, tool: Tool[Any, Any] | None) -> CallToolResult:
    """How a call ended, for the client: what the model reads, and the value where there is one."""
    receipt = answer.receipt
    about = {"ringfence/outcome": receipt.outcome, "ringfence/receipt": receipt.receipt_id}
    if receipt.commit is not None:
        about["ringfence/commit"] = receipt.commit
    text = answer.text
    structured: dict[str, Any] | None = None
    if answer.result.success and tool is not None and tool.result_type not in (None, str):
        dumped = serde.dump_any(answer.result.value)
        found = dumped if tool.result_container == "object" else {ITEMS: dumped}
        structured, cut = fitted(cast("dict[str, Any]", found))
        said = bounded(answer.result.message)
        if cut:
            said, text = f"{said}\n{CUT}", f"{text}\n{CUT}"
        # Some clients show a model the structured result alone.
        structured = {MESSAGE: said, **structured}
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=structured,
        is_error=not answer.result.success,
        _meta=about,
    )


def failed(message: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=bounded(message))], is_error=True)


def fitted(value: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A value of JSON that is small enough, and whether it had to be cut. Texts and lists are cut, and say so where
    they can, so that it is still what its schema says."""
    room = 10_000
    cut = False
    while len(json.dumps(value, ensure_ascii=False)) > MAX_STRUCTURED_CHARACTERS and room:
        value = _cut(value, room)
        room //= 4
        cut = True
    return value, cut


def _cut(value: Any, room: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= room else f"{value[:room]}[... {len(value) - room:,} more characters]"
    if isinstance(value, list):
        return [_cut(item, room) for item in cast("list[Any]", value)[:room]]
    if isinstance(value, dict):
        items = list(cast("dict[str, Any]", value).items())[:room]
        return {key: _cut(item, room) for key, item in items}
    return value
