"""The rendering of a template's sections to the text and the tools for a model."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol

from typing_extensions import TypeVar

from ringfence import serde
from ringfence.errors import OutputParseError, SectionVisibility
from ringfence.prompt.disclosure import describe_access, disclosure_tools
from ringfence.prompt.location import SectionLocation, blame
from ringfence.prompt.section import join_paragraphs
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.runtime.tool import Tool, ToolExample
from ringfence.session.tool_result import render_value

if TYPE_CHECKING:
    from ringfence.limits import Deadline
    from ringfence.prompt.descriptor import PromptDescriptor
    from ringfence.session.session import Session

OutputT = TypeVar("OutputT", default=None)


class RenderedTemplate(Protocol):
    """What a rendering needs of its template besides the sections."""

    @property
    def structured_output(self) -> StructuredOutput | None: ...
    @property
    def descriptor(self) -> PromptDescriptor: ...


@dataclass(frozen=True)
class RenderedPrompt(Generic[OutputT]):
    """The text and the tools for a model. ``str()`` returns the text."""

    text: str
    tools: tuple[Tool[Any, Any], ...] = ()
    """The tools of enabled sections that are shown in full, in the order of their declaration."""
    structured_output: StructuredOutput | None = None
    tool_param_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """The descriptions of params, by the name of the tool and the name of the field."""
    deadline: Deadline | None = None
    """The deadline of the evaluation that this was rendered for."""
    template: RenderedTemplate | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        described = {tool: MappingProxyType(dict(texts)) for tool, texts in self.tool_param_descriptions.items()}
        object.__setattr__(self, "tool_param_descriptions", MappingProxyType(described))

    def __str__(self) -> str:
        return self.text

    @property
    def descriptor(self) -> PromptDescriptor | None:
        """The texts of the prompt that overrides can replace. None without a template."""
        return self.template.descriptor if self.template is not None else None

    @property
    def output_type(self) -> type[Any] | None:
        """The dataclass of the answer, or of its items; None where the answer is text."""
        return self.structured_output.dataclass_type if self.structured_output else None

    @property
    def container(self) -> Literal["object", "array"] | None:
        return self.structured_output.container if self.structured_output else None

    @property
    def allow_extra_keys(self) -> bool:
        return self.structured_output is not None and self.structured_output.allow_extra_keys


def render(
    locations: Iterable[SectionLocation],
    template: RenderedTemplate,
    session: Session | None,
    deadline: Deadline | None = None,
) -> RenderedPrompt[Any]:
    """Render the visible ones of these sections, free of side effects."""
    visible = [inner for location in locations for inner in location.walk_visible()]
    tools = offered_tools(visible)
    return RenderedPrompt(
        text=render_text(visible, session),
        tools=tools,
        structured_output=template.structured_output,
        tool_param_descriptions={tool.name: texts for tool in tools if (texts := tool.described)},
        deadline=deadline,
        template=template,
    )


def offered_tools(visible: Sequence[SectionLocation]) -> tuple[Tool[Any, Any], ...]:
    """The tools of the sections shown in full, then those that open or read the others."""
    full = (location for location in visible if location.visibility is SectionVisibility.FULL)
    return (*(tool for location in full for tool in location.node.tools), *disclosure_tools(visible))


def render_text(visible: Iterable[SectionLocation], session: Session | None) -> str:
    return "\n\n".join(_text(location, session) for location in visible)


def _text(location: SectionLocation, session: Session | None) -> str:
    node = location.node
    if location.missing is not None and location.visibility is SectionVisibility.FULL:
        raise location.missing
    with blame(node, "it could not be rendered"):
        text = node.section.render(
            location.params,
            len(node.path) - 1,
            node.number,
            path=node.path,
            visibility=location.visibility,
            session=session,
        )
        if location.visibility is SectionVisibility.SUMMARY:
            return join_paragraphs(text, describe_access(location))
        return join_paragraphs(text, format_examples(node.tools))


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


def parse_output(rendered: RenderedPrompt[OutputT], text: str, *, parsed: object = None) -> OutputT:
    """The value of a model's final answer to `rendered`; ``parsed`` is the JSON value where the provider decoded it.

    Raises:
        OutputParseError: the answer does not fit, or the prompt declares no output type.
    """
    output = rendered.structured_output
    if output is None:
        raise OutputParseError("the prompt declares no output type, its answer is text")
    return output.parse(text) if parsed is None else output.parse_value(parsed)
