"""The texts of a prompt that overrides can replace, what replaces them, and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

from ringfence import serde
from ringfence.errors import SectionPath
from ringfence.prompt.section import SectionNode, SectionOverride
from ringfence.runtime.tool import Tool

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class SectionDescriptor:
    """A section whose text can be replaced; ``content_hash`` is the sha256 in hex of its template."""

    path: SectionPath
    content_hash: str
    number: str
    fields: tuple[str, ...] = ()
    """The names of the params' fields that a text may mention."""
    has_summary: bool = False


@dataclass(frozen=True, slots=True)
class ToolDescriptor:
    """A tool whose texts can be replaced; ``contract_hash`` is of its description and the schemas of both types."""

    path: SectionPath
    name: str
    contract_hash: str
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptDescriptor:
    """The texts of a prompt that can be replaced, with the hashes that show a change of them."""

    ns: str
    key: str
    sections: tuple[SectionDescriptor, ...] = ()
    tools: tuple[ToolDescriptor, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolOverride:
    """Another description, or other descriptions of the params, for a tool with this ``contract_hash``."""

    name: str
    contract_hash: str
    description: str | None = None
    param_descriptions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Descriptions by the name of a field of the params."""


@dataclass(frozen=True, slots=True)
class PromptOverride:
    """The overrides of one prompt under one tag."""

    ns: str
    prompt_key: str
    tag: str = LATEST
    sections: tuple[SectionOverride, ...] = ()
    tools: tuple[ToolOverride, ...] = ()


class HasSections(Protocol):
    """A template, as far as its texts go."""

    def walk(self) -> Iterator[SectionNode]: ...


class DescribedPrompt(Protocol):
    """A prompt, as far as its texts go: `Prompt` is one."""

    @property
    def ns(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def descriptor(self) -> PromptDescriptor: ...
    @property
    def template(self) -> HasSections: ...


@runtime_checkable
class PromptOverridesStore(Protocol):
    """A source of overrides. Raises PromptOverridesError for what it cannot read or write."""

    def resolve(self, descriptor: PromptDescriptor, tag: str = LATEST) -> PromptOverride | None:
        """Return the overrides that fit the prompt, and log the others. An unchanged store returns the same object as
        before."""
        ...

    def seed(self, prompt: DescribedPrompt, tag: str = LATEST) -> PromptOverride:
        """What there is or, where there is nothing yet, the prompt's own texts as overrides, to be edited."""
        ...


def describe_prompt(ns: str, key: str, nodes: Iterable[SectionNode]) -> PromptDescriptor:
    """Describe the sections and tools of a prompt that accept overrides."""
    sections: list[SectionDescriptor] = []
    tools: list[ToolDescriptor] = []
    for node in nodes:
        section, kind = node.section, node.section.params_type
        body = section.original_body_template()
        if section.accepts_overrides and body is not None:
            names = tuple(one.name for one in fields(kind)) if kind is not None else ()
            has_summary = section.summary is not None
            sections.append(SectionDescriptor(node.path, text_hash(body), node.number, names, has_summary))
        tools += [
            ToolDescriptor(node.path, tool.name, contract_hash(tool), tool.fields)
            for tool in node.tools
            if tool.accepts_overrides
        ]
    return PromptDescriptor(ns, key, tuple(sections), tuple(tools))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def contract_hash(tool: Tool[Any, Any]) -> str:
    params = None if tool.params_type is None else serde.schema(tool.params_type, extra="forbid")
    result = None if tool.result_type is None else [tool.result_container, _result_schema(tool.result_type)]
    schemas = (json.dumps(value, sort_keys=True, separators=(",", ":")) for value in (params, result))
    return text_hash("".join(text_hash(text) for text in (tool.description, *schemas)))


def _result_schema(kind: type[Any]) -> object:
    try:
        return serde.schema(kind)
    except TypeError:  # a result need not have a schema: its name stands for it
        return kind.__qualname__


def apply_overrides(nodes: Iterable[SectionNode], override: PromptOverride) -> tuple[SectionNode, ...]:
    """The same tree with the texts of an override that fits it."""
    sections = {one.path: one for one in override.sections}
    tools = {one.name: one for one in override.tools}

    def replaced(tool: Tool[Any, Any]) -> Tool[Any, Any]:
        one = tools.get(tool.name)
        if one is None:
            return tool
        description = tool.description if one.description is None else one.description
        return replace(tool, description=description, param_descriptions=one.param_descriptions)

    def apply(node: SectionNode) -> SectionNode:
        one = sections.get(node.path)
        section = node.section if one is None else node.section.overridden(one)
        children, own_tools = tuple(map(apply, node.children)), tuple(map(replaced, node.tools))
        return replace(node, section=section, children=children, tools=own_tools)

    return tuple(map(apply, nodes))
