"""Prompts: a template is the tree of sections, checked once; a prompt is a template with values and resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from typing_extensions import TypeVar

from ringfence.errors import PromptRenderError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.disclosure import RESERVED_TOOL_NAMES, Place, places
from ringfence.prompt.feedback import FeedbackProviderConfig
from ringfence.prompt.overlay import apply_overrides
from ringfence.prompt.overrides import LATEST, PromptDescriptor, PromptOverride, PromptOverridesStore, descriptor_of
from ringfence.prompt.policy import BasePolicy, check_policy, observes_all_tools
from ringfence.prompt.prompt_resources import PromptResources
from ringfence.prompt.rendering import (
    RenderedPrompt,
    SectionNode,
    SectionParams,
    ShownSection,
    render,
    shown_sections,
    text_of,
    tools_of,
)
from ringfence.prompt.section import UNDECLARED, Section, TypeArgument, listed
from ringfence.prompt.section_tree import placed, refuse
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.prompt.task_examples import TaskExample
from ringfence.resources import ResourceRegistry

if TYPE_CHECKING:
    from ringfence.prompt.policy import Policy
    from ringfence.prompt.tool import Tool
    from ringfence.runtime.session import Session

OutputT = TypeVar("OutputT", default=None)
SectionT = TypeVar("SectionT", bound=Section[Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTemplate(TypeArgument, Generic[OutputT]):
    """A tree of sections, their tools, policies and resources, and the type of the final answer.

    ``PromptTemplate[Answer](...)`` wants an answer of the dataclass Answer, ``PromptTemplate[list[Answer]]`` several;
    without a type argument the answer is text.

    Raises:
        PromptValidationError: whatever is wrong with the tree; ``section_path`` and ``placeholder`` say where.
        TypeError: a section or policy that is none.
    """

    ns: str
    key: str
    name: str | None = None
    sections: Sequence[Section[Any]] = ()
    policies: Sequence[Policy] = ()
    """Govern the tools of all sections, after the policies of the section itself."""
    feedback_providers: Sequence[FeedbackProviderConfig] = ()
    """Who has something to say to the model now and then, along with a tool's answer; the first that is due does."""
    allow_extra_keys: bool = False
    """Whether a structured answer may have keys that are no fields."""
    resources: ResourceRegistry = field(default_factory=ResourceRegistry)

    structured_output: StructuredOutput | None = field(init=False)
    nodes: tuple[SectionNode, ...] = field(init=False, repr=False)
    """The sections at their places; the top level."""

    def __post_init__(self) -> None:
        for name in ("ns", "key"):
            value: str = getattr(self, name)
            if not value.strip():
                raise PromptValidationError(f"a prompt's {name} is a text that is not blank, not {value!r}")
            object.__setattr__(self, name, value.strip())
        declared = self.type_argument
        output = None
        if declared not in (UNDECLARED, Any, None, type(None)):
            output = StructuredOutput.of(declared, allow_extra_keys=self.allow_extra_keys)
        elif self.allow_extra_keys:
            raise PromptValidationError("allow_extra_keys is about a structured answer: write PromptTemplate[Answer]")
        object.__setattr__(self, "structured_output", output)
        for name in ("sections", "feedback_providers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "policies", listed(self.policies, f"the policies of the prompt {self.ns}:{self.key}"))
        object.__setattr__(self, "nodes", tuple(placed(self.sections, (), "")))
        self._check_tools()

    @cached_property
    def descriptor(self) -> PromptDescriptor:
        """What of the prompt overrides can replace."""
        return descriptor_of(self)

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

    @overload
    def find_section(self, kind: type[SectionT]) -> SectionT: ...
    @overload
    def find_section(self, kind: tuple[type[Section[Any]], ...]) -> Section[Any]: ...
    def find_section(self, kind: type[Section[Any]] | tuple[type[Section[Any]], ...]) -> Section[Any]:
        """The first section, depth first, of a type, or of one of several. Raises KeyError where there is none."""
        if kind == ():
            raise TypeError("no type of section to look for")
        for node in self.walk():
            if isinstance(node.section, kind):
                return node.section
        raise KeyError(f"the prompt {self.ns}:{self.key} has no section of type {kind}")

    def _check_tools(self) -> None:
        owners: dict[str, SectionPath] = {}
        for node in self.walk():
            for tool in node.tools:
                if tool.name in RESERVED_TOOL_NAMES:
                    refuse(f"the tool name {tool.name!r} is reserved", node.path, placeholder=tool.name)
                if tool.name in owners:
                    both = f"{'.'.join(owners[tool.name])} and {'.'.join(node.path)}"
                    refuse(f"two tools are called {tool.name!r}: in {both}", node.path, placeholder=tool.name)
                owners[tool.name] = node.path
        tools = {tool.name: tool for node in self.walk() for tool in node.tools}
        for node in self.walk():
            if isinstance(node.section, TaskExample):
                node.section.check(tools, self.structured_output, node.path)
        names = frozenset(owners)
        for policy in self.policies:
            check_policy(policy, f"the prompt {self.ns}:{self.key}")
        for policy in chain(self.policies, *(node.policies for node in self.walk())):
            if isinstance(policy, BasePolicy):
                policy.validate(names)


class Prompt(TypeArgument, Generic[OutputT]):
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
        *,
        ns: str,
        key: str,
        name: str | None = None,
        sections: Sequence[Section[Any]] = (),
        policies: Sequence[Policy] = (),
        feedback_providers: Sequence[FeedbackProviderConfig] = (),
        allow_extra_keys: bool = False,
        resources: ResourceRegistry = ...,
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
        """With a store, every rendering has the overrides that it has for this prompt under the tag.

        Raises what `PromptTemplate` raises, and TypeError for a template together with parts of one.
        """
        declared = self.type_argument
        if template is None:
            made: type[PromptTemplate[Any]] = PromptTemplate if declared is UNDECLARED else PromptTemplate[declared]
            template = made(**parts)
        elif parts:
            raise TypeError(f"a template has these already: {', '.join(parts)}")
        elif declared in (None, type(None)) and template.structured_output is None:
            pass  # of a template that does not say that its answer is text, too
        elif declared not in (UNDECLARED, Any, template.type_argument):
            raise PromptValidationError(f"the template's answer is not of type {declared!r}")
        self.template = template
        self.overrides_store = overrides_store
        self.overrides_tag = overrides_tag or LATEST
        self._overlaid: tuple[PromptOverride, tuple[SectionNode, ...]] | None = None
        self.scope = f"{template.ns}:{template.key}"
        """What policies keep their state under."""
        self.resources = PromptResources(self._collected_resources)
        self._bound: dict[type[Any], Any] = {}
        self._bound_resources = ResourceRegistry()
        self._misbound: PromptValidationError | None = None
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
    def ns(self) -> str:
        return self.template.ns

    @property
    def key(self) -> str:
        return self.template.key

    @property
    def name(self) -> str | None:
        return self.template.name

    @property
    def sections(self) -> Sequence[Section[Any]]:
        return self.template.sections

    @property
    def structured_output(self) -> StructuredOutput | None:
        return self.template.structured_output

    @property
    def feedback_providers(self) -> Sequence[FeedbackProviderConfig]:
        return self.template.feedback_providers

    @property
    def descriptor(self) -> PromptDescriptor:
        return self.template.descriptor

    @property
    def params(self) -> tuple[Any, ...]:
        """What is bound, in the order it was."""
        return tuple(self._bound.values())

    @overload
    def find_section(self, kind: type[SectionT]) -> SectionT: ...
    @overload
    def find_section(self, kind: tuple[type[Section[Any]], ...]) -> Section[Any]: ...
    def find_section(self, kind: Any) -> Section[Any]:
        """See `PromptTemplate.find_section`."""
        return self.template.find_section(kind)

    def bind(self, *params: object, resources: Mapping[type[Any], object] | None = None) -> Self:
        """Give values to the sections whose params are of their types, in the place of earlier ones.

        ``resources`` maps protocols to instances or bindings, and is merged over earlier ones. What of the params is
        no dataclass, of a type that no section uses, or there twice, is a PromptValidationError when it is rendered.

        Raises:
            RuntimeError: resources, while the prompt's resources are open: they would come too late.
            TypeError: resources that are no mapping, or stand among the params; what lacks what its protocol has.
        """
        if resources is not None and not isinstance(resources, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"resources map protocols to instances, such as {{Filesystem: files}}, not {resources!r}")
        if any(isinstance(value, Mapping) for value in params):
            raise TypeError("params are instances of dataclasses; resources are given as bind(resources={...})")
        if resources and self.resources.is_open:
            raise RuntimeError("bind resources before `with prompt.resources:`, which has collected them already")
        self._misbound = self._misbound or self._problem_with(params)
        self._bound.update({type(value): value for value in params})
        self._bound_resources = self._bound_resources.merge(ResourceRegistry.build(resources or {}), strict=False)
        return self

    def render(self, *, session: Session | None = None) -> RenderedPrompt[OutputT]:
        """The text and the tools as they are now; free of side effects.

        Raises:
            PromptRenderError: params that are missing, a section's own code that raised, a template that does not fit.
            PromptValidationError: something is bound that no section takes.
            PromptOverridesError: the store cannot be read.
        """
        params = self._params()
        return render(shown_sections(self._nodes(), params, session), params, self.template, session)

    def render_section(self, node: SectionNode, *, session: Session | None = None) -> str:
        """One section in full, and below it the enabled ones as they are visible by themselves."""
        params = self._params()
        opened = ShownSection(node, params.of(node), SectionVisibility.FULL)
        return text_of([opened, *shown_sections(node.children, params, session)], params, session)

    def places(self, *, session: Session | None = None) -> Iterator[Place]:
        """The enabled sections, those too that are hidden below summarised ones; depth first."""
        return places(self._nodes(), self._params(), session)

    def tools(self, *, session: Session | None = None) -> tuple[Tool[Any, Any], ...]:
        """The tools that a rendering would offer, in the order of their declaration; raises what `render` raises."""
        params = self._params()
        return tools_of(shown_sections(self._nodes(), params, session), params, session)

    def policies_for_tool(self, name: str) -> tuple[Policy, ...]:
        """What governs a tool: the policies of the section that declares it, then the prompt's. Those of sections
        above that one do not. Raises KeyError for a tool that no section has."""
        return tuple(self.template.policies) if name in RESERVED_TOOL_NAMES else self._policies[name]

    def result_policies(self, name: str) -> tuple[Policy, ...]:
        """Those that hear of a tool's successes: what governs it, and of other sections' policies those that hear of
        all (`ToolPolicy`). Raises KeyError for a tool that no section has."""
        governing = self.policies_for_tool(name)
        return (*governing, *(policy for policy in self._observers if all(policy is not one for one in governing)))

    def filesystem(self) -> Filesystem | None:
        """The filesystem that the prompt's tools work on, if there is one. Raises RuntimeError outside of the block."""
        return self.resources.get_optional(Filesystem)

    def _nodes(self) -> tuple[SectionNode, ...]:
        """The template's tree, with what the store has for it put in."""
        if self.overrides_store is None:
            return self.template.nodes
        override = self.overrides_store.resolve(self.template.descriptor, self.overrides_tag)
        if override is None:
            return self.template.nodes
        if self._overlaid is None or self._overlaid[0] is not override:
            self._overlaid = override, apply_overrides(self.template.nodes, override)
        return self._overlaid[1]

    def _params(self) -> SectionParams:
        if self._misbound is not None:
            raise self._misbound
        return SectionParams(self._bound, self._defaults)

    def _problem_with(self, params: tuple[object, ...]) -> PromptValidationError | None:
        known = self.template.params_types
        seen: set[type[Any]] = set()
        for value in params:
            kind = type(value)
            if isinstance(value, type) or not is_dataclass(value):
                return PromptValidationError(f"{value!r} is bound, which is no dataclass instance", dataclass_type=kind)
            if kind not in known:
                names = ", ".join(sorted(one.__name__ for one in known)) or "none"
                message = f"no section takes {kind.__name__}; the sections' params are: {names}"
                return PromptValidationError(message, dataclass_type=kind)
            if kind in seen:
                return PromptValidationError(f"{kind.__name__} is bound twice at once", dataclass_type=kind)
            seen.add(kind)
        return None

    def _collected_resources(self) -> ResourceRegistry:
        registry = self.template.resources
        params = self._params()
        nodes = list(reversed(self.template.nodes))
        while nodes:
            node = nodes.pop()
            if not _surely_disabled(node, params):
                registry = registry.merge(node.section.resources(), strict=False)
                nodes.extend(reversed(node.children))
        return registry.merge(self._bound_resources, strict=False)


def _surely_disabled(node: SectionNode, params: SectionParams) -> bool:
    """Whether a section's resources can be left out: not where only a session, or params to come, could tell."""
    section = node.section
    if section.enabled is None or section.enabled.takes_session or type(section).is_enabled is not Section.is_enabled:
        return False
    try:
        values = params.of(node)
    except PromptRenderError:
        return False
    return not node.is_enabled(values, None)
