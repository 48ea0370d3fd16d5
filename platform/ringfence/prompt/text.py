"""Text of sections: templates, fences, examples of tool calls."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from string import Template
from typing import Any

from ringfence import serde
from ringfence.errors import PromptRenderError, SectionPath
from ringfence.prompt.tool import Tool, ToolExample
from ringfence.runtime.tool_result import render_value


def find_placeholders(*templates: str | None) -> frozenset[str]:
    """The names that the templates mention; None stands for a template that is not there."""
    return frozenset(name for template in templates if template for name in Template(template).get_identifiers())


def expand(template: str, params: Any, path: SectionPath) -> str:
    """Replace ``$name`` and ``${name}`` in a template by the fields of `params`, as they are.

    Raises:
        PromptRenderError: a placeholder that is no field, or a ``$`` that begins none.
    """
    kind: type[Any] | None = params.__class__ if params is not None else None
    values = {field.name: getattr(params, field.name) for field in fields(kind)} if kind is not None else {}
    where = f"section {'.'.join(path)}"
    try:
        return Template(textwrap.dedent(template).strip()).substitute(values).strip()
    except KeyError as error:
        name = str(error.args[0])
        raise PromptRenderError(
            f"{where}: the params have no {name!r} for the placeholder ${name}",
            section_path=path,
            dataclass_type=kind,
            placeholder=name,
        ) from None
    except ValueError as error:
        message = f"{where}: {error}; write $$ for a dollar sign"
        raise PromptRenderError(message, section_path=path, dataclass_type=kind) from None


def join_paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def format_examples(tools: Iterable[Tool[Any, Any]]) -> str:
    """List the example calls of tools; empty where no tool has one."""
    lines: list[str] = []
    for tool in tools:
        if tool.examples:
            lines.append(f"- {tool.name}: {tool.description}")
        for example in tool.examples:
            lines += [f"  - {example.description}", *format_call(example, indent="    ", json_indent=2)]
    return "\n".join(["Examples of tool calls:", "", *lines]) if lines else ""


def format_call(example: ToolExample[Any, Any], *, indent: str, json_indent: int | None = None) -> list[str]:
    """The lines of an example's input, and of its output where it has one."""
    arguments: object = None if example.input is None else serde.dump(example.input)
    text = json.dumps(arguments, ensure_ascii=False, indent=json_indent)
    lines = [f"{indent}input:", fence(text, "json")]
    if example.output is not None:
        lines += [f"{indent}output:", fence(render_value(example.output))]
    return lines


def fence(text: str, language: str = "") -> str:
    """`text`, indented, in a fence that nothing inside of it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return textwrap.indent(f"{ticks}{language}\n{text}\n{ticks}", "    ")
