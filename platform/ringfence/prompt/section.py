"""Sections: the nodes of a prompt, each with its instructions and tools; and the tree that they make in a template."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from string import Template
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypedDict

from typing_extensions import TypeVar, Unpack

from ringfence.errors import PromptRenderError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.resources import ResourceRegistry
from ringfence.runtime.policy import check_policy
from ringfence.runtime.tool import Tool
from ringfence.runtime.type_arguments import TypeArguments
from ringfence.session.visibility import VisibilityOverrides

if TYPE_CHECKING:
    from ringfence.runtime.policy import Policy
    from ringfence.session.session import Session

ParamsT = TypeVar("ParamsT", default=None)

SECTION_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class SectionFunction:
    """A predicate or selector of ``()``, ``(params)``, ``(*, session)`` or ``(params, *, session)``."""

    def __init__(self, function: Callable[..., Any], role: str) -> None:
        """Raises TypeError for anything that cannot be called in one of these shapes."""
        try:
            signature = inspect.signature(function)
            parameters = signature.parameters.values()
            self.takes_session = any(one.name == "session" or one.kind is one.VAR_KEYWORD for one in parameters)
            self.takes_params = any(_takes_params(one) for one in parameters)
            self._function = function
            signature.bind(*((None,) * self.takes_params), **({"session": None} if self.takes_session else {}))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{role} is a function of (params, *, session) or fewer of these: {error}") from None

    def __call__(self, params: object, session: Session | None) -> Any:
        positional = (params,) if self.takes_params else ()
        return self._function(*positional, session=session) if self.takes_session else self._function(*positional)


def _takes_params(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) or parameter.name == "session":
        return False
    # A default, as in `lambda on=on: on`, binds a loop variable: such a parameter takes no params.
    return parameter.default is parameter.empty or parameter.name == "params"


class SectionOptions(TypedDict, Generic[ParamsT], total=False):
    """The options of every section, besides its title."""

    key: str | None
    """Lower-case letters, digits, ``.``, ``_`` and ``-``; made from the title by default."""
    default_params: ParamsT | None
    """The params as long as none of their type are bound to the prompt."""
    children: Sequence[Section[Any]]
    enabled: Callable[..., bool] | None
    """A predicate of ``()``, ``(params)``, ``(*, session)`` or ``(params, *, session)``. While it is False, the prompt
    has neither the section nor its tools nor anything below it."""
    tools: Sequence[Tool[Any, Any]]
    policies: Sequence[Policy]
    """The policies of the section's own tools. They do not govern the tools of its children."""
    accepts_overrides: bool
    """Whether the text may be replaced from outside; True by default."""
    summary: str | None
    """A template: the body while the section's visibility is SUMMARY, when its tools and children are hidden."""
    visibility: SectionVisibility | Callable[..., SectionVisibility]
    """A value, or a selector with the shapes of ``enabled``; FULL by default."""


@dataclass(frozen=True, slots=True)
class SectionOverride:
    """Other texts for a section. None keeps the section's own text."""

    path: SectionPath
    content_hash: str
    """The hash of the replaced body. The override is stale if the body has another hash now."""
    body: str | None = None
    summary: str | None = None
    visibility: SectionVisibility | None = None


class Section(TypeArguments, ABC, Generic[ParamsT]):
    """A node of a prompt: a heading, a body made from its params, tools, and children below it.

    ``Section[Params]`` names the dataclass of its params. Without a type argument it is that of ``default_params``;
    without either the section has no params. Instances do not change, so that prompts can share a section.
    """

    _body: str | None = None
    """The template of an override."""

    def __init__(self, *, title: str, **options: Unpack[SectionOptions[ParamsT]]) -> None:
        """See `SectionOptions` for the options.

        Raises:
            ValueError: a title or key that cannot be one.
            TypeError: an unknown option, or an option of the wrong type.
            PromptValidationError: SUMMARY without a summary.
        """
        if unknown := options.keys() - SectionOptions.__annotations__.keys():
            raise TypeError(f"{type(self).__name__}() has no option {', '.join(sorted(unknown))}")
        self.title = title.strip()
        if not self.title or len(self.title.splitlines()) > 1:
            raise ValueError(f"a section's title is one line of text, not {title!r}")
        key, enabled = options.get("key"), options.get("enabled")
        self.key = normalize_key(key) if key is not None else _slug(self.title)
        what = f"section {self.key!r}"
        self.default_params = options.get("default_params")
        declared: Any = self.type_arguments[0] if self.type_arguments else Any
        kind: Any = type(self.default_params) if declared is Any else declared
        self.params_type: type[ParamsT] | None = None if kind is NoneType else kind
        if self.default_params is not None and not is_dataclass(self.params_type):
            raise TypeError(f"{what} takes no params that are a dataclass, so it has no default_params")
        self.children = tuple(options.get("children", ()))
        self.enabled = SectionFunction(enabled, f"enabled of {what}") if enabled is not None else None
        self.accepts_overrides = options.get("accepts_overrides", True)
        self.summary = options.get("summary")
        visibility = options.get("visibility", SectionVisibility.FULL)
        self.visibility: SectionVisibility | SectionFunction
        if isinstance(visibility, SectionVisibility):
            self.visibility = visibility
        else:
            self.visibility = SectionFunction(visibility, f"visibility of {what}")
        if visibility is SectionVisibility.SUMMARY and self.summary is None:
            raise PromptValidationError(f"{what} is to be summarised, but has no summary=")
        self._tools = tuple(options.get("tools", ()))
        self._policies = tuple(options.get("policies", ()))
        for policy in self._policies:
            check_policy(policy, what)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    # Methods that a subclass may override

    @abstractmethod
    def render_body(
        self, params: Any, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        """The text below the heading, at full visibility. Free of side effects."""

    def render_summary(self, params: Any, *, path: SectionPath) -> str:
        """The text below the heading while the section is summarised."""
        return expand(self.summary or "", params, path)

    def is_enabled(self, params: Any, *, session: Session | None = None) -> bool:
        """Whether a prompt with these params has the section."""
        return self.enabled is None or bool(self.enabled(params, session))

    def effective_visibility(self, params: Any, *, session: Session | None, path: SectionPath) -> SectionVisibility:
        """The visibility that the session sets for this path, else the section itself.

        Raises:
            TypeError: the selector returned something else than a SectionVisibility.
            PromptValidationError: SUMMARY is asked for, and there is no summary.
        """
        in_session = session[VisibilityOverrides].latest() if session is not None else None
        chosen = (in_session.get(path) if in_session is not None else None) or self.visibility
        if isinstance(chosen, SectionFunction):
            chosen = chosen(params, session)
            if not isinstance(chosen, SectionVisibility):
                raise TypeError(f"it returned {chosen!r}, which is no SectionVisibility")
        if chosen is SectionVisibility.SUMMARY and self.summary is None:
            raise PromptValidationError(f"section {'.'.join(path)} has no summary to show", section_path=path)
        return chosen

    def overridden(self, override: SectionOverride) -> Self:
        """A copy with the texts and the visibility of an override."""
        twin = copy.copy(self)
        twin._body = override.body
        twin.summary = self.summary if override.summary is None else override.summary
        twin.visibility = override.visibility or self.visibility
        return twin

    def original_body_template(self) -> str | None:
        """The body that an override may replace; None where there is none."""
        return None

    def placeholder_names(self) -> frozenset[str]:
        """The fields of the params that the section's texts mention."""
        return find_placeholders(self.summary, self.original_body_template())

    def tools(self) -> tuple[Tool[Any, Any], ...]:
        return self._tools

    def policies(self) -> tuple[Policy, ...]:
        return self._policies

    def resources(self) -> ResourceRegistry:
        """The resources that the section provides for its tools."""
        return ResourceRegistry()

    def clone(self, **changes: Any) -> Self:
        """A copy with copies of its children. ``changes`` (``session=...``) are for those that use them."""
        twin = copy.copy(self)
        twin.children = tuple(child.clone(**changes) for child in self.children)
        return twin

    def render(
        self,
        params: Any,
        depth: int,
        number: str,
        *,
        path: SectionPath = (),
        visibility: SectionVisibility = SectionVisibility.FULL,
        session: Session | None = None,
    ) -> str:
        """Render the heading and the body, without child sections. ``depth`` is 0 at the top."""
        where = f" ({'.'.join(path)})" if path else ""
        heading = f"{'#' * (depth + 2)} {number}. {self.title}{where}"
        if visibility is SectionVisibility.SUMMARY:
            return join_paragraphs(heading, self.render_summary(params, path=path))
        if self._body is not None:
            return join_paragraphs(heading, expand(self._body, params, path))
        return join_paragraphs(heading, self.render_body(params, visibility=visibility, path=path, session=session))


class MarkdownSection(Section[ParamsT]):
    """A section whose body is a `string.Template` over the fields of its params.

    The template is dedented and stripped. ``$name`` and ``${name}`` stand for fields of the params, ``$$`` for a
    dollar. Values are inserted as they are, and not expanded themselves.
    """

    def __init__(self, *, title: str, template: str, **options: Unpack[SectionOptions[ParamsT]]) -> None:
        super().__init__(title=title, **options)
        self.template = template

    def original_body_template(self) -> str | None:
        return self.template

    def render_body(
        self, params: Any, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return expand(self.template, params, path)


class ToolsSection(MarkdownSection[ParamsT]):
    """Tools under a heading, with a description where needed. Its text does not list the tools."""

    def __init__(
        self, *, title: str, description: str | None = None, **options: Unpack[SectionOptions[ParamsT]]
    ) -> None:
        """``description`` is a template, as in `MarkdownSection`."""
        super().__init__(title=title, template=description or "", **options)


def normalize_key(key: str) -> str:
    """`key` without surrounding blanks, in lower case. Raises ValueError for what cannot be a section's key."""
    normalized = key.strip().lower()
    if SECTION_KEY.fullmatch(normalized) is None:
        raise ValueError(
            f"section key {key!r}: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit"
        )
    return normalized


def _slug(title: str) -> str:
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain)[:64].strip("-")
    if not slug:
        raise ValueError(f"no key can be made from the title {title!r}: give the section a key=")
    return slug


# Text


def find_placeholders(*templates: str | None) -> frozenset[str]:
    """The names that the templates mention; None stands for a template that is not there."""
    return frozenset(name for template in templates if template for name in Template(template).get_identifiers())


def expand(template: str, params: Any, path: SectionPath) -> str:
    """Replace ``$name`` and ``${name}`` in a template by the fields of `params`, as they are.

    Raises:
        PromptRenderError: a placeholder that is no field, or a ``$`` that begins none.
    """
    kind: type[Any] | None = params.__class__ if params is not None else None
    values = {field.name: getattr(params, field.name) for field in fields(kind)} if kind is not None else {}
    where = f"section {'.'.join(path)}"
    try:
        return Template(textwrap.dedent(template).strip()).substitute(values).strip()
    except KeyError as error:
        name = str(error.args[0])
        raise PromptRenderError(
            f"{where}: the params have no {name!r} for the placeholder ${name}",
            section_path=path,
            dataclass_type=kind,
            placeholder=name,
        ) from None
    except ValueError as error:
        message = f"{where}: {error}; write $$ for a dollar sign"
        raise PromptRenderError(message, section_path=path, dataclass_type=kind) from None


def join_paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


# The tree of a template


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

    def walk(self) -> Iterator[SectionNode]:
        """This node and all below it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


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
        path, number = (*above, section.key), f"{number_above}{position}"
        if section.key in keys:
            _refuse(f"two sections are called {'.'.join(path)}", path)
        keys.add(section.key)
        _check_params(section, path)
        children = tuple(place_sections(section.children, path, f"{number}."))
        node = SectionNode(section, path, number, section.tools(), section.policies(), children)
        if node.policies and not any(one.tools for one in node.walk()):
            names = ", ".join(policy.name for policy in node.policies)
            where = ".".join(path)
            _refuse(f"section {where} has policies ({names}) and no tools: put them where the tools are", path)
        yield node


def _check_params(section: Section[Any], path: SectionPath) -> None:
    kind: type[Any] | None = section.params_type
    where = f"section {'.'.join(path)}"
    names: set[str] = set()
    if kind is not None:
        if not is_dataclass(kind):
            _refuse(f"the params of {where} must be a dataclass, not {kind!r}", path)
        if section.default_params is not None and type(section.default_params) is not kind:
            _refuse(f"default_params of {where} must be of type {kind.__name__}", path, kind=kind)
        names = {one.name for one in fields(kind)}
    problem = f"{kind.__name__} has no such field" if kind is not None else "the section has no params"
    for name in sorted(section.placeholder_names() - names):
        _refuse(f"the placeholder ${name} of {where}: {problem}", path, kind=kind, placeholder=name)


def collect_tools(nodes: Iterable[SectionNode], reserved: frozenset[str]) -> dict[str, Tool[Any, Any]]:
    """All tools by name, depth first.

    Raises PromptValidationError for what is no tool, and for a name that is reserved or there twice.
    """
    tools: dict[str, Tool[Any, Any]] = {}
    owners: dict[str, SectionPath] = {}
    for node in nodes:
        where = f"in section {'.'.join(node.path)}"
        for tool in node.tools:
            if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not type
                name, kind = getattr(tool, "__name__", repr(tool)), node.section.params_type
                message = f"{tool!r} {where} is no Tool: write Tool[Params, Result](name=...)"
                _refuse(message, node.path, kind=kind, placeholder=name)
            problem = "is reserved" if tool.name in reserved else None
            if tool.name in owners:
                problem = f"is taken by the one in section {'.'.join(owners[tool.name])}"
            if problem:
                message = f"the name of the tool {tool.name!r} {where} {problem}"
                _refuse(message, node.path, kind=tool.params_type, placeholder=tool.name)
            tools[tool.name], owners[tool.name] = tool, node.path
    return tools


def _refuse(message: str, path: SectionPath, *, kind: type | None = None, placeholder: str | None = None) -> NoReturn:
    raise PromptValidationError(message, section_path=path, dataclass_type=kind, placeholder=placeholder)
