"""The rendering of a template's sections to the text and the tools for a model."""

from __future__ import annotations

import copy
import json
import re
import textwrap
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal

from typing_extensions import TypeVar

from ringfence import serde
from ringfence.errors import PromptError, PromptRenderError, SectionVisibility
from ringfence.prompt.disclosure import describe_access, disclosure_tools
from ringfence.prompt.section import Section, SectionFunction, SectionNode, find_placeholders, join_paragraphs
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.prompt.tool import Tool, ToolExample
from ringfence.runtime.tool_result import render_value

if TYPE_CHECKING:
    from ringfence.prompt.overrides import PromptDescriptor
    from ringfence.prompt.prompt import PromptTemplate
    from ringfence.runtime.limits import Deadline
    from ringfence.runtime.session import Session

OutputT = TypeVar("OutputT", default=None)


@contextmanager
def blame(node: SectionNode, what: str) -> Generator[None]:
    """Turn an exception of a section's own code into a PromptRenderError that names the section."""
    try:
        yield
    except PromptError:
        raise
    except Exception as error:
        raise PromptRenderError(
            f"section {'.'.join(node.path)}: {what}: {type(error).__name__}: {error}",
            section_path=node.path,
            dataclass_type=node.section.params_type,
        ) from error


@dataclass(frozen=True, slots=True)
class SectionParams:
    """The sources of sections' params: what is bound, their own defaults, other sections' defaults for the type."""

    bound: Mapping[type[Any], Any]
    defaults: Mapping[type[Any], Any]

    def of(self, node: SectionNode) -> Any:
        """The params of a section; None for a section without. Raises PromptRenderError where there is no source."""
        section, kind = node.section, node.section.params_type
        if kind is None:
            return None
        if kind in self.bound:
            return self.bound[kind]
        default = section.default_params if section.default_params is not None else self.defaults.get(kind)
        if default is not None:
            return copy.copy(default)  # a section that changes it must not change the next rendering
        required = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
        if required:
            raise PromptRenderError(
                f"section {'.'.join(node.path)} needs its params ({', '.join(required)}): "
                f"bind them with Prompt.bind({kind.__name__}(...))",
                section_path=node.path,
                dataclass_type=kind,
            )
        with blame(node, f"its params, {kind.__name__}(), could not be made"):
            return kind()


@dataclass(frozen=True, slots=True)
class SectionLocation:
    """An enabled section in one rendering, with the enabled sections below it."""

    node: SectionNode
    params: Any
    visibility: SectionVisibility
    children: tuple[SectionLocation, ...]
    missing: PromptRenderError | None = None
    """The error for missing params, if the shown text of the section does not need them."""

    def walk(self) -> Iterator[SectionLocation]:
        """This location and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def walk_visible(self) -> Iterator[SectionLocation]:
        """This location and, unless it is summarised, the visible ones below it."""
        yield self
        if self.visibility is SectionVisibility.FULL:
            for child in self.children:
                yield from child.walk_visible()

    def has_tools(self) -> bool:
        return any(location.node.tools for location in self.walk())


def is_enabled(node: SectionNode, params: Any, session: Session | None) -> bool:
    with blame(node, "its enabled predicate raised"):
        return node.section.is_enabled(params, session=session)


def is_surely_disabled(node: SectionNode, params: SectionParams) -> bool:
    """Whether a section is disabled whatever the session and the params that are still missing."""
    section = node.section
    if section.enabled is None or section.enabled.takes_session or type(section).is_enabled is not Section.is_enabled:
        return False
    try:
        values = params.of(node)
    except PromptRenderError:
        return False
    return not is_enabled(node, values, None)


def locate_sections(
    nodes: Sequence[SectionNode], params: SectionParams, session: Session | None, *, hidden: bool = False
) -> tuple[SectionLocation, ...]:
    """The enabled sections. ``hidden`` are those below a summarised one: they may lack the params that they need.

    Raises PromptRenderError for a predicate or selector that raises, and for missing params of a visible section.
    """
    located: list[SectionLocation] = []
    for node in nodes:
        values, missing = None, None
        try:
            values = params.of(node)
        except PromptRenderError as error:  # matters only if the section needs them
            missing = error
        functions = (node.section.enabled, node.section.visibility)
        if missing and any(isinstance(one, SectionFunction) and one.takes_params for one in functions):
            if hidden:
                continue
            raise missing
        if not is_enabled(node, values, session):
            continue
        with blame(node, "its visibility selector raised"):
            visibility = node.section.effective_visibility(values, session=session, path=node.path)
        full = visibility is SectionVisibility.FULL
        if missing and not hidden and (full or find_placeholders(node.section.summary)):
            raise missing
        children = locate_sections(node.children, params, session, hidden=hidden or not full)
        located.append(SectionLocation(node, values, visibility, children, missing))
    return tuple(located)


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
    """The deadline of the evaluation that this was rendered for; `Prompt.render` sets none."""
    template: PromptTemplate[Any] | None = field(default=None, repr=False, compare=False)

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
    locations: Iterable[SectionLocation], template: PromptTemplate[Any], session: Session | None
) -> RenderedPrompt[Any]:
    """Render the visible ones of these sections, free of side effects."""
    visible = [inner for location in locations for inner in location.walk_visible()]
    tools = offered_tools(visible)
    return RenderedPrompt(
        text=render_text(visible, session),
        tools=tools,
        structured_output=template.structured_output,
        tool_param_descriptions={tool.name: texts for tool in tools if (texts := tool.described)},
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
