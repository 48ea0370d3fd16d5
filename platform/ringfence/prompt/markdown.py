"""Sections whose body is a Markdown template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringfence.errors import SectionPath, SectionVisibility
from ringfence.prompt.section import Section
from ringfence.prompt.section_functions import ParamsT, Predicate, Selector
from ringfence.prompt.text import expand, placeholders
from ringfence.prompt.tool import Tool

if TYPE_CHECKING:
    from ringfence.prompt.policy import Policy
    from ringfence.runtime.session import Session


class MarkdownSection(Section[ParamsT]):
    """A section whose body is a `string.Template` over the fields of its params."""

    def __init__(
        self,
        *,
        title: str,
        template: str,
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
        """``template`` is dedented and stripped; ``$name`` and ``${name}`` stand for fields of the params, ``$$`` for a
        dollar. Values are inserted as they are and not looked into. The rest is as in `Section`."""
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
        self.template = template

    def original_body_template(self) -> str | None:
        return self.template

    def render_body(
        self, params: Any, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return expand(self.template, params, path)

    def placeholder_names(self) -> frozenset[str]:
        return super().placeholder_names() | placeholders(self.template)
