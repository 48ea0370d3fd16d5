"""How the text of a section is made: templates, fences, examples of tool calls."""

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
from ringfence.prompt.tool import Tool
from ringfence.runtime.tool_result import render_value


def placeholders(template: str) -> frozenset[str]:
    return frozenset(Template(template).get_identifiers())


def expand(template: str, params: Any, path: SectionPath) -> str:
    """A template's text with ``$name`` and ``${name}`` replaced by the fields of `params`, as they are.

    Raises:
        PromptRenderError: a placeholder that is no field, or a ``$`` that begins none.
    """
    kind: type[Any] | None = params.__class__ if params is not None else None
    values = {field.name: getattr(params, field.name) for field in fields(kind)} if kind is not None else {}
    try:
        return Template(textwrap.dedent(template).strip()).substitute(values).strip()
    except KeyError as error:
        name = str(error.args[0])
        message = f"section {'.'.join(path)}: the params have no {name!r} for the placeholder ${name}"
        raise PromptRenderError(message, section_path=path, dataclass_type=kind, placeholder=name) from None
    except ValueError as error:
        message = f"section {'.'.join(path)}: {error}; write $$ for a dollar sign"
        raise PromptRenderError(message, section_path=path, dataclass_type=kind) from None


def examples_of(tools: Iterable[Tool[Any, Any]]) -> str:
    """The calls that tools give as examples; empty where they give none."""
    found = [_tool_examples(tool) for tool in tools if tool.examples]
    return "\n".join(["Examples of tool calls:", "", *found]) if found else ""


def _tool_examples(tool: Tool[Any, Any]) -> str:
    """A tool's examples as an item of a list."""
    lines = [f"- {tool.name}: {tool.description}"]
    for example in tool.examples:
        asked = "null" if example.input is None else json.dumps(serde.dump(example.input), ensure_ascii=False, indent=2)
        lines += [f"  - {example.description}", "    input:", fenced(asked, "json")]
        if example.output is not None:
            lines += ["    output:", fenced(render_value(example.output))]
    return "\n".join(lines)


def fenced(text: str, language: str = "") -> str:
    """`text`, indented, in a fence that nothing inside of it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return textwrap.indent(f"{fence}{language}\n{text}\n{fence}", "    ")
