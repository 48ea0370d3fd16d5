"""Progressive disclosure: the tools with which a model asks for sections that it sees in summary only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ringfence.errors import (
    PromptRenderError,
    SectionPath,
    SectionVisibility,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.runtime.tool_result import ToolResult

if TYPE_CHECKING:
    from ringfence.prompt.rendering import SectionNode, SectionParams, ShownSection
    from ringfence.runtime.session import Session

MAX_KEYS_SAID = 20
OPEN_SECTIONS = "open_sections"
READ_SECTION = "read_section"
RESERVED_TOOL_NAMES = frozenset({OPEN_SECTIONS, READ_SECTION})
"""The tools with which a model asks for sections that are summarised."""


@dataclass(frozen=True, slots=True)
class OpenSections:
    section_keys: tuple[str, ...] = field(
        metadata={"min_length": 1, "description": "The sections to open, each as its summary names it."}
    )
    reason: str = field(metadata={"description": "What they are needed for."})


@dataclass(frozen=True, slots=True)
class ReadSection:
    section_key: str = field(metadata={"description": "The section to read, as its summary names it."})


@dataclass(frozen=True, slots=True)
class SectionText:
    content: str

    def render(self) -> str:
        return self.content


@dataclass(frozen=True, slots=True)
class Place:
    """An enabled section somewhere in a prompt, and the summarised ones on the way to it, itself included."""

    node: SectionNode
    closed: tuple[SectionPath, ...]


def places(
    nodes: Iterable[SectionNode], params: SectionParams, session: Session | None, closed: tuple[SectionPath, ...] = ()
) -> Iterator[Place]:
    """Every enabled section, those too that are hidden below a summarised one; depth first."""
    for node in nodes:
        values: Any = None
        try:
            values = params.of(node)
        except PromptRenderError:  # whoever renders it says so
            section = node.section
            if section.enabled is not None and section.enabled.takes_params:
                continue
        if not node.is_enabled(values, session):
            continue
        visibility = node.visibility(values, session)
        on_the_way = (*closed, node.path) if visibility is SectionVisibility.SUMMARY else closed
        yield Place(node, on_the_way)
        yield from places(node.children, params, session, on_the_way)


def disclosure_tools(
    shown: Sequence[ShownSection], params: SectionParams, session: Session | None
) -> tuple[Tool[Any, Any], ...]:
    """What a model needs to get at the summarised ones among these sections."""
    closed = [one.node for one in shown if one.visibility is SectionVisibility.SUMMARY]
    with_tools = [has_tools(node, params, session) for node in closed]
    return (*([_opening()] if any(with_tools) else []), *([_reading()] if not all(with_tools) else []))


def how_to_see(node: SectionNode, params: SectionParams, session: Session | None) -> str:
    """What a summary ends with: how the model gets the rest of the section."""
    key = ".".join(node.path)
    below = [".".join(place.node.path) for place in places(node.children, params, session)]
    kept = ", ".join(f"`{name}`" for name in below[:MAX_KEYS_SAID])
    inside = f" Below it: {kept}{', ...' if len(below) > MAX_KEYS_SAID else ''}." if below else ""
    if has_tools(node, params, session):
        return f'This is a summary. To get the section and its tools, call `open_sections` with "{key}".{inside}'
    return f'This is a summary. To read the section, call `read_section` with "{key}".{inside}'


def has_tools(node: SectionNode, params: SectionParams, session: Session | None) -> bool:
    return bool(node.tools) or any(place.node.tools for place in places(node.children, params, session))


def open_sections(params: OpenSections, *, context: ToolContext) -> ToolResult[None]:
    known = _by_key(context)
    wanted: dict[SectionPath, SectionVisibility] = {}
    for key in params.section_keys:
        for place in _found(known, key):
            wanted |= dict.fromkeys(place.closed, SectionVisibility.FULL)
    if not wanted:
        raise ToolValidationError(f"open already: {', '.join(params.section_keys)}")
    raise VisibilityExpansionRequired(
        "the model asked for sections in full",
        requested_overrides=wanted,
        reason=params.reason,
        section_keys=params.section_keys,
    )


def read_section(params: ReadSection, *, context: ToolContext) -> ToolResult[SectionText]:
    found = _found(_by_key(context), params.section_key)
    hidden = [place.node for place in found if place.closed]
    if not hidden:
        raise ToolValidationError(f"{params.section_key} is not summarised: it is in the instructions")
    texts = [context.prompt.render_section(node, session=context.session) for node in hidden]
    return ToolResult.ok(SectionText("\n\n".join(texts)), f"section {params.section_key}")


def _by_key(context: ToolContext) -> dict[str, list[Place]]:
    known: dict[str, list[Place]] = {}
    for place in context.prompt.places(session=context.session):
        # Keys may have dots themselves, so that two sections can go by one name; then both are meant.
        known.setdefault(".".join(place.node.path), []).append(place)
    return known


def _found(known: dict[str, list[Place]], key: str) -> list[Place]:
    found = known.get(key.strip().strip("`\"'").lower())
    if found is None:
        closed = [name for name, there in known.items() if any(place.closed for place in there)]
        said = ", ".join(closed[:MAX_KEYS_SAID]) or "none"
        raise ToolValidationError(f"there is no section {key!r}; summarised are: {said}")
    return found


# Made when they are first needed: a tool compiles its params, which loads what `import ringfence` does not.


@cache
def _opening() -> Tool[Any, Any]:
    return Tool[OpenSections, None](
        name=OPEN_SECTIONS,
        description="Open sections that you see in summary: you get them in full, with their tools. Call it first.",
        handler=open_sections,
        accepts_overrides=False,
        read_only=True,
    )


@cache
def _reading() -> Tool[Any, Any]:
    return Tool[ReadSection, SectionText](
        name=READ_SECTION,
        description="Read a section that you see in summary, without opening it.",
        handler=read_section,
        accepts_overrides=False,
        read_only=True,
    )
