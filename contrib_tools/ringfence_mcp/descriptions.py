"""What a client is told of the tools. A model gets all of it with every request, so it is short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import mcp_types as types

from ringfence import serde
from ringfence.runtime.tool import Tool

ADDITIVE = frozenset({"checkpoint"})
"""Tools that change something and remove nothing."""
STRUCTURED = frozenset({"history", "undo", "restore"})
"""Tools of ours with structured results, since a program acts on steps and outcomes. The reference has their keys."""
_WRITING = "write_file edit_file apply_patch move rm checkpoint shell_execute evaluate_python"
TEXT_ONLY = frozenset(f"ls read_file glob grep diff {_WRITING}".split())
"""Tools of ours whose text says everything. Claude Code and Codex show a model a structured result in place of the
text: that of `ls` is three times as long, that of `grep` 1.6 times."""
USUAL = frozenset("read_file write_file edit_file apply_patch glob grep shell_execute".split())
"""Tools that a model should have without a search for them."""
LONG = frozenset({"read_file", "grep", "shell_execute"})
ITEMS = "items"
"""The key of a result that is a list. MCP requires an object."""
MESSAGE = "message"
"""The key of the tool's message, unless the result has a field of that name."""
_NO_PARAMS: dict[str, object] = {"type": "object", "properties": {}}


def with_hints(tools: Iterable[types.Tool], client: str, max_answer: int) -> list[types.Tool]:
    """Add what Claude Code wants to know: to load the usual tools at once, and to show long answers."""
    if not client.startswith("claude"):
        return list(tools)
    size = {"anthropic/maxResultSizeChars": max_answer}
    return [
        tool.model_copy(update={"meta": {"anthropic/alwaysLoad": True, **(size if tool.name in LONG else {})}})
        if tool.name in USUAL
        else tool
        for tool in tools
    ]


def is_structured(tool: Tool[Any, Any]) -> bool:
    """Return whether the results of a tool have structured content. A text has none, and neither have
    the tools of `TEXT_ONLY`."""
    return tool.result_type not in (None, str) and tool.name not in TEXT_ONLY


def describe_tool(tool: Tool[Any, Any]) -> types.Tool:
    """Describe a tool for ``tools/list``. Hints that nobody uses, or that the protocol assumes, are left out."""
    params = serde.schema(tool.params_type) if tool.params_type is not None else _NO_PARAMS
    hints = types.ToolAnnotations(
        read_only_hint=True if tool.read_only else None,
        destructive_hint=False if tool.name in ADDITIVE else None,
        open_world_hint=False if tool.name in ADDITIVE else None,  # of Codex's approval, where the others do not decide
    )
    return types.Tool(
        name=tool.name,
        description=tool.description,  # clients put the name of the server before that of the tool
        input_schema=_shortened(params),
        output_schema=_output_schema(tool),
        annotations=hints if hints.model_dump(exclude_none=True) else None,
    )


def _shortened(schema: Any) -> Any:
    """Leave out of a schema the defaults that say nothing, and null for what may be left out."""
    if isinstance(schema, list):
        return [_shortened(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    node = {key: _shortened(value) for key, value in cast("dict[str, Any]", schema).items()}
    if not node.get("default", True):
        del node["default"]
        rest = [kind for kind in node.pop("anyOf", ()) if kind != {"type": "null"}]
        node |= rest[0] if len(rest) == 1 else {"anyOf": rest} if rest else {}
    return node


def _output_schema(tool: Tool[Any, Any]) -> dict[str, object] | None:
    if tool.result_type is None or tool.name in STRUCTURED or not is_structured(tool):
        return None
    schema = serde.schema(tool.result_type)
    if tool.result_container == "array":
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        items = {"type": "array", "items": schema}
        schema = {"type": "object", "properties": {ITEMS: items}, "required": [ITEMS], **definitions}
    cast("dict[str, object]", schema.setdefault("properties", {})).setdefault(MESSAGE, {"type": "string"})
    return schema
