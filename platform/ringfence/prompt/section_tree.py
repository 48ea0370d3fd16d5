"""Sections at their places in a prompt, each checked as it comes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ringfence.errors import PromptValidationError, SectionPath
from ringfence.prompt.rendering import SectionNode
from ringfence.prompt.section import Section
from ringfence.prompt.structured_output import is_dataclass_type


def placed(sections: Sequence[Section[Any]], above: SectionPath, number_above: str) -> Iterator[SectionNode]:
    seen: set[str] = set()
    for position, section in enumerate(sections, 1):
        if not isinstance(section, Section):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not type
            raise TypeError(f"{section!r} among the sections is no Section")
        path = (*above, section.key)
        if section.key in seen:
            refuse(f"two sections are called {'.'.join(path)}", path)
        seen.add(section.key)
        _check_params(section, path)
        number = f"{number_above}{position}"
        children = tuple(placed(section.children, path, f"{number}."))
        yield SectionNode(section, path, number, section.tools(), section.policies(), children)


def _check_params(section: Section[Any], path: SectionPath) -> None:
    kind: type[Any] | None = section.params_type
    where = ".".join(path)
    known: set[str] = set()
    says = "the section has no params"
    if kind is not None:
        if not is_dataclass_type(kind):
            refuse(f"the params of section {where} must be a dataclass, not {kind!r}", path)
        if section.default_params is not None and type(section.default_params) is not kind:
            refuse(f"default_params of section {where} must be of type {kind.__name__}", path, kind=kind)
        known = {one.name for one in fields(kind)}
        says = f"{kind.__name__} has no such field"
    for name in sorted(section.placeholder_names() - known):
        refuse(f"the placeholder ${name} of section {where}: {says}", path, kind=kind, placeholder=name)


def refuse(message: str, path: SectionPath, *, kind: type | None = None, placeholder: str | None = None) -> None:
    raise PromptValidationError(message, section_path=path, dataclass_type=kind, placeholder=placeholder)
