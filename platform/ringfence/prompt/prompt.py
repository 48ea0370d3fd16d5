"""Prompts: a template is the tree of sections, checked once; a prompt is a template with values and resources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType, NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from typing_extensions import TypeVar

from ringfence.errors import PromptValidationError, SectionPath, SectionVisibility
from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.descriptor import (
    LATEST,
    PromptDescriptor,
    PromptOverride,
    PromptOverridesStore,
    apply_overrides,
    describe_prompt,
)
from ringfence.prompt.disclosure import RESERVED_TOOL_NAMES
from ringfence.prompt.location import SectionLocation, SectionParams, is_surely_disabled, locate_sections
from ringfence.prompt.rendering import RenderedPrompt, render, render_text
from ringfence.prompt.section import Section, SectionNode, collect_tools, place_sections
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.resources import ResourceContext, ResourceRegistry, ResourceType
from ringfence.runtime.policy import BasePolicy, check_policy, observes_all_tools
from ringfence.runtime.type_arguments import TypeArguments

if TYPE_CHECKING:
    from ringfence.limits import Deadline
    from ringfence.participants import Snapshotable, Transactional
    from ringfence.runtime.policy import Policy
    from ringfence.runtime.tool import Tool
    from ringfence.session.session import Session

OutputT = TypeVar("OutputT", default=None)
SectionT = TypeVar("SectionT", bound=Section[Any])
ResourceT = TypeVar("ResourceT")


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTemplate(TypeArguments, Generic[OutputT]):
    """A tree of sections, their tools, policies and resources, and the type of the final answer.

    ``PromptTemplate[Answer](...)`` wants an answer of the dataclass Answer, ``PromptTemplate[list[Answer]]`` several.
    Without a type argument the answer is text.

    Raises:
        PromptValidationError: the tree cannot be right; ``section_path``, ``dataclass_type`` and ``placeholder`` name
            the part.
        TypeError: a section or policy that is none.
    """

    ns: str
    key: str
    name: str | None = None
    sections: Sequence[Section[Any]] = ()
    policies: Sequence[Policy] = ()
    """The policies of the tools of all sections. They run after the policies of a tool's own section."""
    allow_extra_keys: bool = False
    """Whether a structured answer may have keys that are no fields."""
    resources: ResourceRegistry = field(default_factory=ResourceRegistry)
    output: Any = field(default=None, repr=False)
    """The type of the answer, from the type argument. None for text."""

    structured_output: StructuredOutput | None = field(init=False)
    nodes: tuple[SectionNode, ...] = field(init=False, repr=False)
    """The top level of the tree of sections."""

    def __post_init__(self) -> None:
        where = f"the prompt {self.ns}:{self.key}"
        output = self.output or (self.type_arguments[0] if self.type_arguments else None)
        if output in (Any, NoneType):
            output = None
        if output is None and self.allow_extra_keys:
            raise PromptValidationError("allow_extra_keys is about a structured answer: write PromptTemplate[Answer]")
        if not self.ns.strip() or not self.key.strip():
            raise PromptValidationError(f"{where}: ns and key are texts that are not blank")
        values: dict[str, Any] = {
            "ns": self.ns.strip(),
            "key": self.key.strip(),
            "output": output,
            "structured_output": None if output is None else StructuredOutput.of(output, self.allow_extra_keys),
            "sections": tuple(self.sections),
            "policies": tuple(self.policies),
            "nodes": tuple(place_sections(self.sections)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for policy in self.policies:
            check_policy(policy, where)
        tools = collect_tools(self.walk(), RESERVED_TOOL_NAMES)
        for policy in chain(self.policies, *(node.policies for node in self.walk())):
            if isinstance(policy, BasePolicy):
                policy.validate(frozenset(tools))

    @property
    def descriptor(self) -> PromptDescriptor:
        """The texts of the prompt that overrides can replace."""
        return self._descriptor

    @cached_property
    def _descriptor(self) -> PromptDescriptor:
        return describe_prompt(self.ns, self.key, self.walk())

    def walk(self) -> Iterator[SectionNode]:
        """All sections at their places, depth first."""
        return chain.from_iterable(node.walk() for node in self.nodes)

    @property
    def params_types(self) -> frozenset[type[Any]]:
        """The dataclasses that `Prompt.bind` takes."""
        return frozenset(node.section.params_type for node in self.walk() if node.section.params_type is not None)

    @property
    def placeholders(self) -> Mapping[SectionPath, frozenset[str]]:
        return MappingProxyType({node.path: node.section.placeholder_names() for node in self.walk()})

    def find_section(self, kind: type[SectionT] | tuple[type[SectionT], ...]) -> SectionT:
        """The first section, depth first, of a type, or of one of several. Raises KeyError where there is none."""
        if kind == ():
            raise TypeError("no type of section to look for")
        for node in self.walk():
            if isinstance(node.section, kind):
                return node.section
        raise KeyError(f"the prompt {self.ns}:{self.key} has no section of type {kind}")


class PromptResources:
    """A prompt's resources: a context manager around the work, and inside of it the way to them.

    They are collected when the outermost block is entered: from the template, from the sections, depth first, and
    from `Prompt.bind`, the later ones winning. Entering again joins the open block.
    """

    def __init__(self, collect: Callable[[], ResourceRegistry]) -> None:
        self._collect = collect
        self._context: ResourceContext | None = None
        self._entering = threading.RLock()

    def __enter__(self) -> Self:
        with self._entering:
            if self._context is None or not self._context.is_open:
                self._context = ResourceContext(self._collect())
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        return self._context is not None and self._context.is_open

    @property
    def context(self) -> ResourceContext:
        """The live resources. Raises RuntimeError outside of the block."""
        context = self._context
        if context is None or not context.is_open:
            raise RuntimeError("resources live inside their context: use them within `with prompt.resources:`")
        return context

    @property
    def participants(self) -> tuple[Transactional, ...]:
        return self.context.participants

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """See `ResourceContext.snapshotable`."""
        return self.context.snapshotable()

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`; raises what `ResourceContext.get` raises."""
        return self.context.get(protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The resource bound to `protocol`, or None if `protocol` is not bound. Raises as `get` does."""
        return self.context.get_optional(protocol)


class Prompt(TypeArguments, Generic[OutputT]):
    """A template with params and resources bound to it: what an adapter evaluates.

    ``Prompt(template)``, or all at once for a prompt that is used in one place: ``Prompt(ns=..., key=...,
    sections=[...])``.
    """

    @overload
    def __init__(
        self,
        template: PromptTemplate[OutputT],
        *,
        overrides_store: PromptOverridesStore | None = None,
        overrides_tag: str = LATEST,
    ) -> None: ...
    @overload
    def __init__(
        self,
        template: None = None,
        *,
        ns: str,
        key: str,
        name: str | None = None,
        sections: Sequence[Section[Any]] = (),
        policies: Sequence[Policy] = (),
        allow_extra_keys: bool = False,
        resources: ResourceRegistry = ...,
        output: Any = None,
        overrides_store: PromptOverridesStore | None = None,
        overrides_tag: str = LATEST,
    ) -> None: ...
    def __init__(
        self,
        template: PromptTemplate[OutputT] | None = None,
        *,
        overrides_store: PromptOverridesStore | None = None,
        overrides_tag: str = LATEST,
        **parts: Any,
    ) -> None:
        """``parts`` are those of a `PromptTemplate`, where none is given.

        With a store, every rendering has the overrides that it has for this prompt under the tag.

        Raises what `PromptTemplate` raises, and TypeError for a template together with parts of one.
        """
        declared = self.type_arguments[0] if self.type_arguments else Any
        if template is None:
            parts.setdefault("output", declared)
            template = PromptTemplate(**parts)
        elif parts:
            raise TypeError(f"a template has these already: {', '.join(parts)}")
        elif not isinstance(template, PromptTemplate):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a prompt is made of a PromptTemplate, not of {template!r}")
        elif declared not in (Any, template.output or NoneType):
            raise PromptValidationError(f"the template's answer is not of type {declared!r}")
        self.template = template
        self.ns, self.key, self.name = template.ns, template.key, template.name
        self.sections, self.structured_output = template.sections, template.structured_output
        self.overrides_store = overrides_store
        self.overrides_tag = overrides_tag or LATEST
        self._overridden: tuple[PromptOverride, tuple[SectionNode, ...]] | None = None
        self.scope = f"{template.ns}:{template.key}"
        """The scope of the policies' state."""
        self.resources = PromptResources(self._collect_resources)
        self._bound: dict[type[Any], Any] = {}
        self._bound_resources = ResourceRegistry()
        self._defaults: dict[type[Any], Any] = {}
        self._policies: dict[str, tuple[Policy, ...]] = {}
        for node in template.walk():
            kind, default = node.section.params_type, node.section.default_params
            if kind is not None and default is not None:
                self._defaults.setdefault(kind, default)
            for tool in node.tools:
                self._policies[tool.name] = (*node.policies, *template.policies)
        of_sections = {id(policy): policy for node in template.walk() for policy in node.policies}
        self._observers = tuple(policy for policy in of_sections.values() if observes_all_tools(policy))

    @property
    def descriptor(self) -> PromptDescriptor:
        return self.template.descriptor

    @property
    def params(self) -> tuple[Any, ...]:
        """The bound values, in the order of binding."""
        return tuple(self._bound.values())

    def find_section(self, kind: type[SectionT] | tuple[type[SectionT], ...]) -> SectionT:
        """See `PromptTemplate.find_section`."""
        return self.template.find_section(kind)

    def bind(self, *params: object, resources: Mapping[type[Any], object] | None = None) -> Self:
        """Bind values for the sections whose params are of their types, in the place of earlier ones.

        ``resources`` maps protocols to instances or bindings, and is merged over earlier ones. Where `bind` raises, the
        prompt is as it was.

        Raises:
            PromptValidationError: params of a type that no section takes, or two of one type.
            RuntimeError: resources, while the prompt's resources are open: they would come too late.
            TypeError: a resource that does not fit its protocol.
        """
        if resources and self.resources.is_open:
            raise RuntimeError("bind resources before `with prompt.resources:`, which has collected them already")
        known, values = self.template.params_types, dict[type[Any], object]()
        for value in params:
            kind = type(value)
            if kind not in known:
                names = ", ".join(sorted(one.__name__ for one in known)) or "none"
                message = f"no section takes {value!r}; the sections' params are: {names}"
                raise PromptValidationError(message, dataclass_type=kind)
            if kind in values:
                raise PromptValidationError(f"{kind.__name__} is bound twice at once", dataclass_type=kind)
            values[kind] = value
        self._bound_resources = self._bound_resources.merge(ResourceRegistry.build(resources or {}), strict=False)
        self._bound |= values
        return self

    def render(self, *, session: Session | None = None, deadline: Deadline | None = None) -> RenderedPrompt[OutputT]:
        """Render the current text and tools, without side effects. ``deadline`` is that of the evaluation.

        Raises:
            PromptRenderError: params that are missing, a section's own code that raised, a template that does not fit.
            PromptValidationError: a section is to be summarised and has no summary.
            PromptOverridesError: the store cannot be read.
        """
        return render(self.locate_sections(session=session), self.template, session, deadline)

    def render_section(self, location: SectionLocation, *, session: Session | None = None) -> str:
        """One section in full, and below it the enabled ones at their own visibility."""
        return render_text(replace(location, visibility=SectionVisibility.FULL).walk_visible(), session)

    def locate_sections(self, *, session: Session | None = None) -> tuple[SectionLocation, ...]:
        """The enabled sections, also those below summarised ones; raises what `render` raises."""
        return locate_sections(self._nodes(), SectionParams(self._bound, self._defaults), session)

    def tools(self, *, session: Session | None = None) -> tuple[Tool[Any, Any], ...]:
        """The tools that a rendering would offer, in the order of their declaration; raises what `render` raises."""
        return self.render(session=session).tools

    def policies_for_tool(self, name: str) -> tuple[Policy, ...]:
        """The policies that govern a tool: those of the section that declares it, then the prompt's.

        Those of sections above that one do not govern it. Raises KeyError for a tool that no section has.
        """
        return tuple(self.template.policies) if name in RESERVED_TOOL_NAMES else self._policies[name]

    def result_policies(self, name: str) -> tuple[Policy, ...]:
        """The policies that observe a tool's successes: those that govern it, and those that observe all tools.

        Raises KeyError for a tool that no section has.
        """
        governing = self.policies_for_tool(name)
        return (*governing, *(policy for policy in self._observers if all(policy is not one for one in governing)))

    def filesystem(self) -> Filesystem | None:
        """The filesystem that the prompt's tools work on, if there is one. Raises RuntimeError outside of the block."""
        return self.resources.get_optional(Filesystem)

    def _nodes(self) -> tuple[SectionNode, ...]:
        """The template's tree with the texts of the store."""
        if self.overrides_store is None:
            return self.template.nodes
        override = self.overrides_store.resolve(self.template.descriptor, self.overrides_tag)
        if override is None:
            return self.template.nodes
        if self._overridden is None or self._overridden[0] is not override:
            self._overridden = override, apply_overrides(self.template.nodes, override)
        return self._overridden[1]

    def _collect_resources(self) -> ResourceRegistry:
        params = SectionParams(self._bound, self._defaults)

        def provided(nodes: Iterable[SectionNode]) -> Iterator[ResourceRegistry]:
            for node in nodes:
                if not is_surely_disabled(node, params):
                    yield node.section.resources()
                    yield from provided(node.children)

        registry = self.template.resources
        for one in (*provided(self.template.nodes), self._bound_resources):
            registry = registry.merge(one, strict=False)
        return registry
