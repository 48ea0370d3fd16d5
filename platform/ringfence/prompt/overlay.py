"""A prompt's tree of sections with overrides put in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast, get_origin

from ringfence import serde
from ringfence.errors import PromptValidationError, SectionVisibility
from ringfence.prompt.overrides import (
    PromptOverride,
    SectionOverride,
    TaskExampleOverride,
    ToolExampleOverride,
    ToolOverride,
)
from ringfence.prompt.rendering import SectionNode, SectionReplacement
from ringfence.prompt.task_examples import TaskExample
from ringfence.prompt.text import placeholders
from ringfence.prompt.tool import Tool, ToolExample

logger = logging.getLogger(__name__)


def apply_overrides(nodes: Iterable[SectionNode], override: PromptOverride) -> tuple[SectionNode, ...]:
    """The same tree with what fits of an override; what turns out not to is left out and logged."""
    sections = {one.path: one for one in override.sections}
    tools = {one.name: one for one in override.tools}
    tasks = {(one.path, one.index): one for one in override.task_examples}
    return tuple(_overlaid(node, sections, tools, tasks) for node in nodes)


def _overlaid(
    node: SectionNode,
    sections: Mapping[tuple[str, ...], SectionOverride],
    tools: Mapping[str, ToolOverride],
    tasks: Mapping[tuple[tuple[str, ...], int], TaskExampleOverride],
) -> SectionNode:
    children: list[SectionNode] = []
    for index, child in enumerate(node.children):
        task = tasks.get((node.path, index))
        if task is not None and isinstance(child.section, TaskExample):
            if task.remove:
                continue
            text = child.section.text(task.objective, task.outcome)
            child = replace(child, replaced=SectionReplacement(body=text, literal=True))
        children.append(_overlaid(child, sections, tools, tasks))
    replaced, section = node.replaced, sections.get(node.path)
    if section is not None:
        replaced = _replaced(node, section)
    if replaced is None and any(tool.name in tools for tool in node.tools):
        replaced = SectionReplacement()
    return replace(
        node,
        children=tuple(children),
        replaced=replaced,
        tools=tuple(_tool(tool, tools[tool.name]) if tool.name in tools else tool for tool in node.tools),
        param_descriptions={
            tool.name: tools[tool.name].param_descriptions for tool in node.tools if tool.name in tools
        },
    )


def _replaced(node: SectionNode, one: SectionOverride) -> SectionReplacement | None:
    kind: type[Any] | None = node.section.params_type
    known = {field.name for field in fields(kind)} if kind is not None else set[str]()
    unknown = (placeholders(one.body or "") | placeholders(one.summary or "")) - known
    if unknown:
        _left_out(f"section {'.'.join(one.path)}", f"its params have no {', '.join(sorted(unknown))}")
        return None
    if one.visibility is SectionVisibility.SUMMARY and one.summary is None and node.section.summary is None:
        _left_out(f"section {'.'.join(one.path)}", "it is to be summarised, but there is no summary")
        return None
    return SectionReplacement(one.body, one.summary, one.visibility)


def _tool(tool: Tool[Any, Any], one: ToolOverride) -> Tool[Any, Any]:
    described = tool if one.description is None else replace(tool, description=one.description)
    examples: list[ToolExample[Any, Any] | None] = list(tool.examples)
    for example in one.examples:
        try:
            before = None if example.index is None else tool.examples[example.index]
            made = None if example.remove else _example(tool, example, before)
            if made is not None:
                tool.check_example(made)
        except (ValueError, TypeError, PromptValidationError) as error:
            _left_out(f"example {example.index} of tool {tool.name}", str(error))
            continue
        if example.index is None:
            examples.append(made)
        else:
            examples[example.index] = made
    kept = tuple(example for example in examples if example is not None)
    return described if kept == tool.examples else replace(described, examples=kept)


def _example(
    tool: Tool[Any, Any], one: ToolExampleOverride, before: ToolExample[Any, Any] | None
) -> ToolExample[Any, Any]:
    description, asked, answered = "", None, None
    if before is not None:
        description, asked, answered = before.description, before.input, before.output
    if one.input is not None:
        asked = _parsed(tool.params_type, one.input)
    if one.output is not None and tool.result_container == "array":
        items = cast("list[object]", one.output) if isinstance(one.output, list) else [one.output]
        answered = tuple(_parsed(tool.result_type, item) for item in items)
    elif one.output is not None:
        answered = _parsed(tool.result_type, one.output)
    return ToolExample(one.description or description, asked, answered)


def _parsed(kind: type[Any] | None, value: object) -> Any:
    if kind is None:
        raise TypeError("there is no type for a value")
    if not is_dataclass(get_origin(kind) or kind):
        return value
    return serde.parse(kind, cast("Mapping[str, object]", value), extra="forbid")


def _left_out(what: str, why: str) -> None:
    logger.warning("the override of %s is left out: %s", what, why)
