"""From a tree of sections to the text and the tools that a model gets."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal

from typing_extensions import TypeVar

from ringfence.errors import PromptError, PromptRenderError, SectionPath, SectionVisibility
from ringfence.prompt.disclosure import disclosure_tools, how_to_see
from ringfence.prompt.section import Section
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.prompt.text import placeholders
from ringfence.prompt.tool import Tool

if TYPE_CHECKING:
    from ringfence.prompt.overrides import PromptDescriptor
    from ringfence.prompt.policy import Policy
    from ringfence.prompt.prompt import PromptTemplate
    from ringfence.runtime.limits import Deadline
    from ringfence.runtime.session import Session

OutputT = TypeVar("OutputT", default=None)


@dataclass(frozen=True)
class RenderedPrompt(Generic[OutputT]):
    """What a model is given; ``str()`` is the text."""

    text: str
    tools: tuple[Tool[Any, Any], ...] = ()
    """Of the sections that are enabled and shown in full, in the order of their declaration."""
    structured_output: StructuredOutput | None = None
    tool_param_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """By tool, by field of its params: what the field is for."""
    deadline: Deadline | None = None
    """By when the evaluation that this was rendered for has to have ended; `Prompt.render` knows of none."""
    template: PromptTemplate[Any] | None = field(default=None, repr=False, compare=False)
    """What it is a rendering of."""

    def __post_init__(self) -> None:
        described = {tool: MappingProxyType(dict(texts)) for tool, texts in self.tool_param_descriptions.items()}
        object.__setattr__(self, "tool_param_descriptions", MappingProxyType(described))

    def __str__(self) -> str:
        return self.text

    @property
    def descriptor(self) -> PromptDescriptor | None:
        """What of the prompt overrides can replace; None for what is no rendering of a template."""
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


@dataclass(frozen=True, slots=True)
class SectionReplacement:
    """What overrides say in the place of a section's own words, or of its tools'; None leaves those. A literal body is
    no template."""

    body: str | None = None
    summary: str | None = None
    visibility: SectionVisibility | None = None
    literal: bool = False


@dataclass(frozen=True, slots=True)
class SectionNode:
    """A section at its place in a template.

    The number is the same in every rendering: where a section before it is disabled, there is a gap.
    """

    section: Section[Any]
    path: SectionPath
    number: str
    tools: tuple[Tool[Any, Any], ...]
    policies: tuple[Policy, ...]
    children: tuple[SectionNode, ...]
    replaced: SectionReplacement | None = None
    param_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """By tool, what overrides say that the fields of its params are for."""

    @property
    def summary(self) -> str | None:
        other = self.replaced.summary if self.replaced is not None else None
        return self.section.summary if other is None else other

    def is_enabled(self, params: Any, session: Session | None) -> bool:
        """What `Section.is_enabled` says. PromptRenderError where that raises."""
        with _Blame(self, "its enabled predicate raised"):
            return self.section.is_enabled(params, session=session)

    def visibility(self, params: Any, session: Session | None) -> SectionVisibility:
        """What `Section.effective_visibility` says, or an override of it."""
        if self.replaced is None:
            return self.section.effective_visibility(params, session=session, path=self.path)
        return self.section.effective_visibility(
            params, session=session, path=self.path, override=self.replaced.visibility, summary=self.summary
        )

    @property
    def depth(self) -> int:
        return len(self.path) - 1

    def walk(self) -> Iterator[SectionNode]:
        """This node and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class SectionParams:
    """Where sections get their params from: what is bound, their own defaults, others' defaults for the type."""

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
            return copy.copy(default)  # the section may do with it what it likes
        required = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
        if required:
            raise PromptRenderError(
                f"section {'.'.join(node.path)} needs its params ({', '.join(required)}): "
                f"bind them with Prompt.bind({kind.__name__}(...))",
                section_path=node.path,
                dataclass_type=kind,
            )
        with _Blame(node, f"its params, {kind.__name__}(), could not be made"):
            return kind()


@dataclass(frozen=True, slots=True)
class ShownSection:
    """A section that is part of one rendering."""

    node: SectionNode
    params: Any
    visibility: SectionVisibility


def shown_sections(
    nodes: Iterable[SectionNode], params: SectionParams, session: Session | None
) -> Iterator[ShownSection]:
    """The enabled sections in order; below one that is summarised there are none.

    Raises PromptRenderError for a predicate that raises, and for params that are needed and missing.
    """
    for node in nodes:
        section = node.section
        missing: PromptRenderError | None = None
        try:
            values = params.of(node)
        except PromptRenderError as error:  # only matters if the section turns out to need them
            values, missing = None, error
        if missing and section.enabled is not None and section.enabled.takes_params:
            raise missing
        if not node.is_enabled(values, session):
            continue
        if missing and not isinstance(section.visibility, SectionVisibility) and section.visibility.takes_params:
            raise missing
        visibility = node.visibility(values, session)
        if missing and (visibility is SectionVisibility.FULL or placeholders(node.summary or "")):
            raise missing
        yield ShownSection(node, values, visibility)
        if visibility is SectionVisibility.FULL:
            yield from shown_sections(node.children, params, session)


def render(
    shown: Iterable[ShownSection], params: SectionParams, template: PromptTemplate[Any], session: Session | None
) -> RenderedPrompt[Any]:
    """The rendering of these sections, free of side effects."""
    sections = list(shown)
    tools = tools_of(sections, params, session)
    return RenderedPrompt(
        text=text_of(sections, params, session),
        tools=tools,
        structured_output=template.structured_output,
        tool_param_descriptions=_descriptions(sections, tools),
        template=template,
    )


def tools_of(
    sections: Iterable[ShownSection], params: SectionParams, session: Session | None
) -> tuple[Tool[Any, Any], ...]:
    """The tools of the sections shown in full, and after them those that open or read the others."""
    shown = list(sections)
    declared = (tool for one in shown if one.visibility is SectionVisibility.FULL for tool in one.node.tools)
    return (*declared, *disclosure_tools(shown, params, session))


def text_of(sections: Iterable[ShownSection], params: SectionParams, session: Session | None) -> str:
    return "\n\n".join(_text(one, params, session) for one in sections)


def _text(one: ShownSection, params: SectionParams, session: Session | None) -> str:
    node = one.node
    with _Blame(node, "it could not be rendered"):
        if node.replaced is None:
            text = node.section.render(
                one.params, node.depth, node.number, path=node.path, visibility=one.visibility, session=session
            )
        else:
            text = node.section.render_override(one.params, node, visibility=one.visibility, session=session)
        if one.visibility is SectionVisibility.FULL:
            return text
        return f"{text}\n\n{how_to_see(node, params, session)}"


def _descriptions(sections: Iterable[ShownSection], tools: Iterable[Tool[Any, Any]]) -> dict[str, Mapping[str, str]]:
    said = {name: texts for one in sections for name, texts in one.node.param_descriptions.items()}
    found = {tool.name: {**tool.described, **said.get(tool.name, {})} for tool in tools}
    return {name: texts for name, texts in found.items() if texts}


class _Blame:
    """Turns what a section's own code raises into an error that names the section."""

    def __init__(self, node: SectionNode, what: str) -> None:
        self._node = node
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, PromptError):
            raise PromptRenderError(
                f"section {'.'.join(self._node.path)}: {self._what}: {type(error).__name__}: {error}",
                section_path=self._node.path,
                dataclass_type=self._node.section.params_type,
            ) from error
