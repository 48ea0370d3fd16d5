"""The tree of a prompt's sections: checked when it is put together, located anew for every rendering."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ringfence.errors import PromptError, PromptRenderError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.section import Section, SectionFunction, SectionOverride
from ringfence.prompt.structured_output import is_dataclass_type
from ringfence.prompt.text import find_placeholders
from ringfence.prompt.tool import Tool

if TYPE_CHECKING:
    from ringfence.prompt.policy import Policy
    from ringfence.runtime.session import Session


@dataclass(frozen=True, slots=True)
class SectionNode:
    """A section at its place in a template.

    The number is the same in every rendering: a disabled section leaves a gap.
    """

    section: Section[Any]
    path: SectionPath
    number: str
    tools: tuple[Tool[Any, Any], ...]
    policies: tuple[Policy, ...]
    children: tuple[SectionNode, ...]
    override: SectionOverride | None = None
    param_descriptions: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """By tool, by field of its params: the descriptions that overrides replace."""

    @property
    def summary(self) -> str:
        replaced = self.override.summary if self.override is not None else None
        return (self.section.summary if replaced is None else replaced) or ""

    def is_enabled(self, params: Any, session: Session | None) -> bool:
        with blame(self, "its enabled predicate raised"):
            return self.section.is_enabled(params, session=session)

    def visibility(self, params: Any, session: Session | None) -> SectionVisibility:
        with blame(self, "its visibility selector raised"):
            return self.section.effective_visibility(params, session=session, path=self.path, override=self.override)

    def walk(self) -> Iterator[SectionNode]:
        """This node and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


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


# Putting a tree together


def place_sections(
    sections: Iterable[Section[Any]], above: SectionPath = (), number_above: str = ""
) -> Iterator[SectionNode]:
    """The nodes of sections below ``above``, each checked by itself.

    Raises:
        TypeError: something among the sections that is none.
        PromptValidationError: keys, params, placeholders, tools or policies that cannot be right.
    """
    keys: set[str] = set()
    for position, section in enumerate(sections, 1):
        if not isinstance(section, Section):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not type
            raise TypeError(f"{section!r} among the sections is no Section")
        path = (*above, section.key)
        if section.key in keys:
            refuse(f"two sections are called {'.'.join(path)}", path)
        keys.add(section.key)
        _check_params(section, path)
        number = f"{number_above}{position}"
        children = tuple(place_sections(section.children, path, f"{number}."))
        node = SectionNode(section, path, number, section.tools(), section.policies(), children)
        _check_tools(node)
        yield node


def _check_params(section: Section[Any], path: SectionPath) -> None:
    kind: type[Any] | None = section.params_type
    where = f"section {'.'.join(path)}"
    names: set[str] = set()
    if kind is not None:
        if not is_dataclass_type(kind):
            refuse(f"the params of {where} must be a dataclass, not {kind!r}", path)
        if section.default_params is not None and type(section.default_params) is not kind:
            refuse(f"default_params of {where} must be of type {kind.__name__}", path, kind=kind)
        names = {one.name for one in fields(kind)}
    problem = f"{kind.__name__} has no such field" if kind is not None else "the section has no params"
    for name in sorted(section.placeholder_names() - names):
        refuse(f"the placeholder ${name} of {where}: {problem}", path, kind=kind, placeholder=name)


def _check_tools(node: SectionNode) -> None:
    where = f"section {'.'.join(node.path)}"
    kind: Any = node.section.params_type
    for tool in node.tools:
        if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not type
            params = kind.__name__ if kind is not None else "no params"
            message = f"{tool!r} among the tools of {where} ({params}) is no Tool: write Tool[Params, Result](name=...)"
            refuse(message, node.path, kind=kind, placeholder=getattr(tool, "__name__", repr(tool)))
    if node.policies and not any(one.tools for one in node.walk()):
        names = ", ".join(policy.name for policy in node.policies)
        refuse(f"{where} has policies ({names}) and no tools: put them where the tools are", node.path)


def check_tool_names(nodes: Iterable[SectionNode], reserved: frozenset[str]) -> dict[str, Tool[Any, Any]]:
    """All tools by name, depth first. Raises PromptValidationError for a name that is reserved or there twice."""
    tools: dict[str, Tool[Any, Any]] = {}
    owners: dict[str, SectionPath] = {}
    for node in nodes:
        for tool in node.tools:
            where = f"in section {'.'.join(node.path)}"
            kind: Any = tool.params_type
            if tool.name in reserved:
                refuse(f"the tool name {tool.name!r} {where} is reserved", node.path, kind=kind, placeholder=tool.name)
            if tool.name in tools:
                other = f"in section {'.'.join(owners[tool.name])}"
                params = kind.__name__ if kind is not None else "no params"
                message = f"two tools are called {tool.name!r}: one {other}, one {where} ({params})"
                refuse(message, node.path, kind=kind, placeholder=tool.name)
            tools[tool.name], owners[tool.name] = tool, node.path
    return tools


def refuse(message: str, path: SectionPath, *, kind: type | None = None, placeholder: str | None = None) -> None:
    raise PromptValidationError(message, section_path=path, dataclass_type=kind, placeholder=placeholder)


# Locating the sections of one rendering


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
    """Why the section has no params, where nothing that it shows needs them."""

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
        if not node.is_enabled(values, session):
            continue
        visibility = node.visibility(values, session)
        full = visibility is SectionVisibility.FULL
        if missing and not hidden and (full or find_placeholders(node.summary)):
            raise missing
        children = locate_sections(node.children, params, session, hidden=hidden or not full)
        located.append(SectionLocation(node, values, visibility, children, missing))
    return tuple(located)
