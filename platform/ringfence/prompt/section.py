"""Sections: the nodes of a prompt, each with its instructions and the tools that belong to them."""

from __future__ import annotations

import copy
import inspect
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeAlias, TypedDict

from typing_extensions import TypeVar, Unpack

from ringfence.errors import PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.policy import check_policy
from ringfence.prompt.text import expand, find_placeholders, format_examples, join_paragraphs
from ringfence.prompt.tool import Tool
from ringfence.prompt.type_arguments import UNDECLARED, TypeArgument
from ringfence.resources import ResourceRegistry
from ringfence.runtime.reducers import VisibilityOverrides

if TYPE_CHECKING:
    from ringfence.prompt.policy import Policy
    from ringfence.runtime.session import Session

ItemT = TypeVar("ItemT")
ParamsT = TypeVar("ParamsT", default=None)
TakenT = TypeVar("TakenT", contravariant=True)
ValueT = TypeVar("ValueT", covariant=True)

SECTION_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class OfSession(Protocol[ValueT]):
    def __call__(self, *, session: Session | None) -> ValueT: ...


class OfParamsAndSession(Protocol[TakenT, ValueT]):
    def __call__(self, params: TakenT, /, *, session: Session | None) -> ValueT: ...


Predicate: TypeAlias = (
    Callable[[], bool] | Callable[[ParamsT], bool] | OfSession[bool] | OfParamsAndSession[ParamsT, bool]
)
Selector: TypeAlias = (
    Callable[[], SectionVisibility]
    | Callable[[ParamsT], SectionVisibility]
    | OfSession[SectionVisibility]
    | OfParamsAndSession[ParamsT, SectionVisibility]
)


class SectionFunction:
    """A predicate or selector of ``()``, ``(params)``, ``(*, session)`` or ``(params, *, session)``."""

    def __init__(self, function: Callable[..., Any], role: str) -> None:
        """Raises TypeError for anything that cannot be called in one of these shapes."""
        try:
            signature = inspect.signature(function)
            parameters = signature.parameters.values()
            self.takes_session = any(_takes_session(parameter) for parameter in parameters)
            self.takes_params = any(_takes_params(parameter) for parameter in parameters)
            self._function = function
            signature.bind(*self._positional(None), **self._keywords(None))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{role} is a function of (params, *, session) or fewer of these: {error}") from None

    def __call__(self, params: object, session: Session | None) -> Any:
        return self._function(*self._positional(params), **self._keywords(session))

    def _positional(self, params: object) -> tuple[object, ...]:
        return (params,) if self.takes_params else ()

    def _keywords(self, session: Session | None) -> dict[str, Any]:
        return {"session": session} if self.takes_session else {}


def _takes_session(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return parameter.name == "session"
    return parameter.kind is parameter.VAR_KEYWORD


def _takes_params(parameter: inspect.Parameter) -> bool:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return True
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) or _takes_session(parameter):
        return False
    # A default, as in `lambda on=on: on`, binds a loop variable: such a parameter takes no params.
    return parameter.default is parameter.empty or parameter.name == "params"


class SectionOptions(TypedDict, Generic[ParamsT], total=False):
    """What every section can be made with, besides its title."""

    key: str | None
    """Lower-case letters, digits, ``.``, ``_`` and ``-``; made from the title by default."""
    default_params: ParamsT | None
    """The params as long as none of their type are bound to the prompt."""
    children: Sequence[Section[Any]]
    enabled: Predicate[ParamsT] | None
    """A predicate of ``()``, ``(params)``, ``(*, session)`` or ``(params, *, session)``. While it is False, the prompt
    has neither the section nor its tools nor anything below it."""
    tools: Sequence[Tool[Any, Any]]
    policies: Sequence[Policy]
    """Govern the tools of this section, not those of its children."""
    accepts_overrides: bool
    """Whether the text may be replaced from outside; True by default."""
    summary: str | None
    """A template: the body while the section's visibility is SUMMARY, when its tools and children are hidden."""
    visibility: SectionVisibility | Selector[ParamsT]
    """A value, or a selector with the shapes of ``enabled``; FULL by default."""


@dataclass(frozen=True, slots=True)
class SectionOverride:
    """Other texts for a section; None leaves what the section says."""

    path: SectionPath
    content_hash: str
    """Of the body that it replaces: the override is stale where that has changed since."""
    body: str | None = None
    summary: str | None = None
    visibility: SectionVisibility | None = None


class Section(TypeArgument, ABC, Generic[ParamsT]):
    """A node of a prompt: a heading, a body made from its params, tools, and children below it.

    ``Section[Params]`` names the dataclass of its params. Without a type argument it is that of ``default_params``;
    without either the section has no params. Instances do not change, so that prompts can share a section.
    """

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
        self.params_type: type[ParamsT] | None = self._params_type()
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
        self._tools = as_tuple(options.get("tools", ()), f"the tools of {what}")
        self._policies = as_tuple(options.get("policies", ()), f"the policies of {what}")
        for policy in self._policies:
            check_policy(policy, what)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    def _params_type(self) -> Any:
        kind: type[Any] = type(self.default_params)
        if self.type_argument in (UNDECLARED, Any):
            if self.default_params is not None and not is_dataclass(kind):
                raise TypeError(
                    f"default_params of section {self.key!r} is a {kind.__name__}, not a dataclass instance"
                )
            return kind if self.default_params is not None else None
        if self.type_argument not in (None, type(None)):
            return self.type_argument
        if self.default_params is not None:
            raise TypeError(f"section {self.key!r} takes no params, so it has no default_params")
        return None

    # What a subclass may do differently

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

    def effective_visibility(
        self, params: Any, *, session: Session | None, path: SectionPath, override: SectionOverride | None = None
    ) -> SectionVisibility:
        """The visibility that the session sets for this path, else an override, else the section itself.

        Raises:
            TypeError: the selector returned something else than a SectionVisibility.
            PromptValidationError: SUMMARY is asked for, and there is no summary.
        """
        in_session = session[VisibilityOverrides].latest() if session is not None else None
        chosen = in_session.get(path) if in_session is not None else None
        if chosen is None and override is not None:
            chosen = override.visibility
        if chosen is None:
            chosen = self.visibility
        if isinstance(chosen, SectionFunction):
            chosen = chosen(params, session)
            if not isinstance(chosen, SectionVisibility):
                raise TypeError(f"it returned {chosen!r}, which is no SectionVisibility")
        has_summary = self.summary is not None or (override is not None and override.summary is not None)
        if chosen is SectionVisibility.SUMMARY and not has_summary:
            raise PromptValidationError(f"section {'.'.join(path)} has no summary to show", section_path=path)
        return chosen

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
        override: SectionOverride | None = None,
        tools: Sequence[Tool[Any, Any]] | None = None,
    ) -> str:
        """The section without its children: heading, body, examples of its tools. ``depth`` is 0 at the top.

        ``override`` and ``tools`` replace the section's own texts and tools.
        """
        where = f" ({'.'.join(path)})" if path else ""
        heading = f"{'#' * (depth + 2)} {number}. {self.title}{where}"
        if visibility is SectionVisibility.SUMMARY:
            if override is not None and override.summary is not None:
                return join_paragraphs(heading, expand(override.summary, params, path))
            return join_paragraphs(heading, self.render_summary(params, path=path))
        if override is not None and override.body is not None:
            body = expand(override.body, params, path)
        else:
            body = self.render_body(params, visibility=visibility, path=path, session=session)
        return join_paragraphs(heading, body, format_examples(self.tools() if tools is None else tools))


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


def as_tuple(values: Iterable[ItemT], what: str) -> tuple[ItemT, ...]:
    """Raises TypeError for one thing in the place of several."""
    if isinstance(values, str) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{what} are a list, and this is a {type(values).__name__}: put it in brackets")
    return tuple(values)
