"""Progressive disclosure: the tools with which a model asks for sections that it sees in summary only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError, VisibilityExpansionRequired
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import OPEN_SECTIONS, Tool
from ringfence.session.tool_result import ToolResult

if TYPE_CHECKING:
    from ringfence.prompt.location import SectionLocation
    from ringfence.session.session import Session

MAX_LISTED_KEYS = 20
READ_SECTION = "read_section"
RESERVED_TOOL_NAMES = frozenset({OPEN_SECTIONS, READ_SECTION})


class LocatesSections(Protocol):
    """A prompt, as far as its sections go."""

    def locate_sections(self, *, session: Session | None = None) -> Sequence[SectionLocation]: ...
    def render_section(self, location: SectionLocation, *, session: Session | None = None) -> str: ...


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


def disclosure_tools(visible: Iterable[SectionLocation]) -> tuple[Tool[Any, Any], ...]:
    """The tools that a model needs for the summarised ones among the visible sections."""
    summarised = [location for location in visible if location.visibility is SectionVisibility.SUMMARY]
    have_tools = {location.has_tools() for location in summarised}
    return (*([_opening_tool()] if True in have_tools else []), *([_reading_tool()] if False in have_tools else []))


def describe_access(location: SectionLocation) -> str:
    """The end of a summary: how the model gets the rest of the section."""
    key = _key(location)
    below = [f"`{_key(inner)}`" for child in location.children for inner in child.walk()]
    more = ", ..." if len(below) > MAX_LISTED_KEYS else ""
    inside = f" Below it: {', '.join(below[:MAX_LISTED_KEYS])}{more}." if below else ""
    if location.has_tools():
        return f'This is a summary. To get the section and its tools, call `{OPEN_SECTIONS}` with "{key}".{inside}'
    return f'This is a summary. To read the section, call `{READ_SECTION}` with "{key}".{inside}'


def open_sections(params: OpenSections, *, context: ToolContext) -> ToolResult[None]:
    """Handle `open_sections`: the loop opens the sections and renders the prompt again."""
    found = [one for key in params.section_keys for one in _find(key, context)]
    requested = {path: SectionVisibility.FULL for _, summarised in found for path in summarised}
    if not requested:
        raise ToolValidationError(f"open already: {', '.join(params.section_keys)}")
    raise VisibilityExpansionRequired(
        "the model asked for sections in full",
        requested_overrides=requested,
        reason=params.reason,
        section_keys=params.section_keys,
    )


def read_section(params: ReadSection, *, context: ToolContext) -> ToolResult[SectionText]:
    """Handle `read_section`."""
    hidden = [location for location, summarised in _find(params.section_key, context) if summarised]
    if not hidden:
        raise ToolValidationError(f"{params.section_key} is not summarised: it is in the instructions")
    prompt = _sections_of(context)
    texts = [prompt.render_section(location, session=context.session) for location in hidden]
    return ToolResult.ok(SectionText("\n\n".join(texts)), f"section {params.section_key}")


_Found = tuple["SectionLocation", tuple[SectionPath, ...]]
"""An enabled section, and the paths of the summarised ones down to it, itself included."""


def _find(key: str, context: ToolContext) -> list[_Found]:
    """The sections with a dotted key: of two whose keys have dots themselves, both are meant.

    Raises ToolValidationError for a key that no section has.
    """
    every = list(_walk(_sections_of(context).locate_sections(session=context.session)))
    wanted = key.strip().strip("`\"'").lower()
    if found := [one for one in every if _key(one[0]) == wanted]:
        return found
    hidden = [_key(location) for location, summarised in every if summarised]
    names = ", ".join(hidden[:MAX_LISTED_KEYS]) or "none"
    raise ToolValidationError(f"there is no section {key!r}; summarised are: {names}")


def _sections_of(context: ToolContext) -> LocatesSections:
    return cast("LocatesSections", context.prompt)


def _walk(locations: Iterable[SectionLocation], above: tuple[SectionPath, ...] = ()) -> Iterator[_Found]:
    for location in locations:
        is_summarised = location.visibility is SectionVisibility.SUMMARY
        summarised = (*above, location.node.path) if is_summarised else above
        yield location, summarised
        yield from _walk(location.children, summarised)


def _key(location: SectionLocation) -> str:
    return ".".join(location.node.path)


# Made when first needed: a tool compiles its params, which loads modules that `import ringfence` does not.


@cache
def _opening_tool() -> Tool[Any, Any]:
    return Tool[OpenSections, None](
        name=OPEN_SECTIONS,
        description="Open sections that you see in summary: you get them in full, with their tools. Call it first.",
        handler=open_sections,
        accepts_overrides=False,
        read_only=True,
    )


@cache
def _reading_tool() -> Tool[Any, Any]:
    return Tool[ReadSection, SectionText](
        name=READ_SECTION,
        description="Read a section that you see in summary, without opening it.",
        handler=read_section,
        accepts_overrides=False,
        read_only=True,
    )
