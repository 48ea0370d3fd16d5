"""The sections of one rendering: which are enabled, with which params, and how much of each is shown."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from ringfence.errors import PromptError, PromptRenderError, SectionVisibility
from ringfence.prompt.section import Section, SectionFunction, SectionNode, find_placeholders

if TYPE_CHECKING:
    from ringfence.session.session import Session


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
