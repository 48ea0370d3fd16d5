"""Sections: the nodes of a prompt, each with its instructions and the tools that belong to them."""

from __future__ import annotations

import copy
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from typing_extensions import TypeVar

from ringfence.errors import PromptRenderError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.policy import check_policy
from ringfence.prompt.section_functions import ParamsT, Predicate, SectionFunction, Selector
from ringfence.prompt.text import examples_of, expand, placeholders
from ringfence.prompt.tool import Tool
from ringfence.resources import ResourceRegistry
from ringfence.runtime.reducers import VisibilityOverrides

if TYPE_CHECKING:
    from ringfence.prompt.policy import Policy
    from ringfence.prompt.rendering import SectionNode
    from ringfence.runtime.session import Session

ItemT = TypeVar("ItemT")

SECTION_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
UNDECLARED: Any = object()


class TypeArgument:
    """Remembers what a generic class was subscripted with: ``type_argument`` of ``MarkdownSection[Params]`` is Params.

    For the run time the subscripted class is a subclass. typing's own alias would tell an instance its argument only
    after ``__init__``, where it is needed.
    """

    type_argument: ClassVar[Any] = UNDECLARED

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            if cls.type_argument is UNDECLARED and not _is_variable(item):
                return _specialised(cls, item)
            return super().__class_getitem__(item)


def _is_variable(item: Any) -> bool:
    return not isinstance(item, type) and (hasattr(item, "__bound__") or bool(getattr(item, "__parameters__", ())))


@lru_cache(maxsize=1024)
def _specialised(cls: type, argument: Any) -> type:
    name = f"{cls.__name__}[{getattr(argument, '__name__', argument)}]"
    return type(name, (cls,), {"type_argument": argument, "__module__": cls.__module__, "__doc__": cls.__doc__})


class Section(TypeArgument, ABC, Generic[ParamsT]):
    """A node of a prompt: a heading, a body made from its params, tools, and children below it.

    ``Section[Params]`` says what dataclass its params are; without a type argument they are what ``default_params``
    is, or there are none. Instances do not change, so that one section can be part of several prompts.
    """

    def __init__(
        self,
        *,
        title: str,
        key: str | None = None,
        default_params: ParamsT | None = None,
        children: Sequence[Section[Any]] = (),
        enabled: Predicate[ParamsT] | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        policies: Sequence[Policy] = (),
        accepts_overrides: bool = True,
        summary: str | None = None,
        visibility: SectionVisibility | Selector[ParamsT] = SectionVisibility.FULL,
    ) -> None:
        """
        Args:
            key: lower-case letters, digits, ``.``, ``_`` and ``-``; made from the title where it is left out.
            enabled: a predicate of ``()``, ``(params)``, ``(*, session)`` or ``(params, *, session)``. Where it says
                False, the section, its tools and everything below it are not there.
            policies: govern the tools of this section, not those of its children.
            accepts_overrides: whether the text may be replaced from outside.
            summary: a template; the body while the section's visibility is SUMMARY, when its tools and children are
                hidden.
            visibility: a value, or a selector with the shapes of ``enabled``.

        Raises:
            ValueError: a title or key that cannot be one.
            TypeError: something of the wrong type among the arguments.
            PromptValidationError: SUMMARY without a summary.
        """
        self.title = title.strip()
        if not self.title or len(self.title.splitlines()) > 1:
            raise ValueError(f"a section's title is one line of text, not {title!r}")
        self.key = normalized_key(key) if key is not None else _slug(self.title)
        self.params_type: type[ParamsT] | None = self._params_type(default_params)
        self.default_params = default_params
        self.children = tuple(children)
        self.enabled = SectionFunction(enabled, f"enabled of section {self.key!r}") if enabled is not None else None
        self.accepts_overrides = accepts_overrides
        self.summary = summary
        self.visibility: SectionVisibility | SectionFunction
        if isinstance(visibility, SectionVisibility):
            self.visibility = visibility
        else:
            self.visibility = SectionFunction(visibility, f"visibility of section {self.key!r}")
        if visibility is SectionVisibility.SUMMARY and summary is None:
            raise PromptValidationError(f"section {self.key!r} is to be summarised, but has no summary=")
        self._tools = tuple(tools)
        self._policies = listed(policies, f"the policies of section {self.key!r}")
        for policy in self._policies:
            check_policy(policy, f"section {self.key!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    def _params_type(self, default_params: object) -> Any:
        declared = self.type_argument if self.type_argument not in (UNDECLARED, Any) else type(default_params)
        if declared in (None, type(None)):
            if default_params is not None:
                raise TypeError(f"section {self.key!r} takes no params, so it has no default_params")
            return None
        if self.type_argument in (UNDECLARED, Any) and not is_dataclass(declared):
            raise TypeError(
                f"default_params of section {self.key!r} is a {declared.__name__}, not a dataclass instance"
            )
        return declared

    # What a subclass may do differently

    @abstractmethod
    def render_body(
        self, params: Any, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        """The text below the heading, at full visibility. Free of side effects."""

    def is_enabled(self, params: Any, *, session: Session | None) -> bool:
        return self.enabled is None or bool(self.enabled(params, session))

    def effective_visibility(
        self,
        params: Any,
        *,
        session: Session | None,
        path: SectionPath,
        override: SectionVisibility | None = None,
        summary: str | None = None,
    ) -> SectionVisibility:
        """What the session says about this section, else an override, else what the section says itself.

        ``summary`` is another summary than the section's own.

        Raises:
            TypeError: the selector answered something else than a SectionVisibility.
            PromptRenderError: the selector raised.
            PromptValidationError: SUMMARY is asked for, and there is no summary.
        """
        overrides = session[VisibilityOverrides].latest() if session is not None else None
        chosen = overrides.get(path) if overrides is not None else None
        if chosen is None:
            chosen = override or self._own_visibility(params, session, path)
        if chosen is SectionVisibility.SUMMARY and self.summary is None and summary is None:
            raise PromptValidationError(f"section {'.'.join(path)} has no summary to show", section_path=path)
        return chosen

    def _own_visibility(self, params: Any, session: Session | None, path: SectionPath) -> SectionVisibility:
        if isinstance(self.visibility, SectionVisibility):
            return self.visibility
        try:
            chosen = self.visibility(params, session)
        except Exception as error:
            raise PromptRenderError(
                f"the visibility selector of section {'.'.join(path)} raised {type(error).__name__}: {error}",
                section_path=path,
                dataclass_type=self.params_type,
            ) from error
        if not isinstance(chosen, SectionVisibility):
            raise TypeError(f"the visibility selector of section {'.'.join(path)} answered {chosen!r}")
        return chosen

    def format_heading(self, depth: int, number: str, path: SectionPath = ()) -> str:
        where = f" ({'.'.join(path)})" if path else ""
        return f"{'#' * (depth + 2)} {number}. {self.title}{where}"

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
        """The section without its children: heading, body, examples of its tools. ``depth`` is 0 at the top."""
        heading = self.format_heading(depth, number, path)
        if visibility is SectionVisibility.SUMMARY:
            return _paragraphs(heading, self.render_summary(params, path=path))
        body = self.render_body(params, visibility=visibility, path=path, session=session)
        return _paragraphs(heading, body, self.render_tool_examples())

    def render_override(
        self, params: Any, node: SectionNode, *, visibility: SectionVisibility, session: Session | None
    ) -> str:
        """`render`, with the texts and the tools of overrides that ``node`` has in the place of the section's own."""
        path, said = node.path, node.replaced
        heading = self.format_heading(node.depth, node.number, path)
        if visibility is SectionVisibility.SUMMARY:
            other = said.summary if said is not None else None
            return _paragraphs(heading, expand(self.summary or "" if other is None else other, params, path))
        body = said.body if said is not None else None
        if body is None:
            body = self.render_body(params, visibility=visibility, path=path, session=session)
        elif said is not None and not said.literal:
            body = expand(body, params, path)
        return _paragraphs(heading, body, examples_of(node.tools))

    def original_body_template(self) -> str | None:
        """The text that an override may replace; None where there is none to be replaced."""
        return None

    def original_summary_template(self) -> str | None:
        """The same of the summary."""
        return self.summary

    def render_summary(self, params: Any, *, path: SectionPath) -> str:
        return expand(self.summary or "", params, path)

    def render_tool_examples(self) -> str:
        """The calls that the section's tools give as examples; empty where they give none."""
        return examples_of(self.tools())

    def placeholder_names(self) -> frozenset[str]:
        """The fields of the params that the section's texts mention."""
        return placeholders(self.summary or "")

    def tools(self) -> tuple[Tool[Any, Any], ...]:
        return self._tools

    def policies(self) -> tuple[Policy, ...]:
        return self._policies

    def resources(self) -> ResourceRegistry:
        """What the section brings along for its tools."""
        return ResourceRegistry()

    def clone(self, **changes: Any) -> Self:
        """A copy with copies of its children. ``changes`` (``session=...``) are for those of them that know them."""
        twin = copy.copy(self)
        twin.children = tuple(child.clone(**changes) for child in self.children)
        return twin


class ToolsSection(Section[ParamsT]):
    """Tools under a heading, with a few words about them where needed. It does not list them: a model gets that with
    the tools themselves."""

    def __init__(
        self,
        *,
        title: str,
        tools: Sequence[Tool[Any, Any]],
        description: str | None = None,
        key: str | None = None,
        default_params: ParamsT | None = None,
        children: Sequence[Section[Any]] = (),
        enabled: Predicate[ParamsT] | None = None,
        policies: Sequence[Policy] = (),
        accepts_overrides: bool = True,
        summary: str | None = None,
        visibility: SectionVisibility | Selector[ParamsT] = SectionVisibility.FULL,
    ) -> None:
        """``description`` is a template over the params, as in `MarkdownSection`; the rest is as in `Section`."""
        super().__init__(
            title=title,
            key=key,
            default_params=default_params,
            children=children,
            enabled=enabled,
            tools=tools,
            policies=policies,
            accepts_overrides=accepts_overrides,
            summary=summary,
            visibility=visibility,
        )
        self.description = description or ""

    def original_body_template(self) -> str | None:
        return self.description

    def render_body(
        self, params: Any, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return expand(self.description, params, path)

    def placeholder_names(self) -> frozenset[str]:
        return super().placeholder_names() | placeholders(self.description)


def normalized_key(key: str) -> str:
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


def listed(values: Iterable[ItemT], what: str) -> tuple[ItemT, ...]:
    """Raises TypeError for one thing in the place of several."""
    if isinstance(values, str) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{what} are a list, and this is a {type(values).__name__}: put it in brackets")
    return tuple(values)


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
