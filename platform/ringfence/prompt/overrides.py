"""Overrides: texts from files that replace texts of a prompt, and the store that reads the files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ringfence import serde
from ringfence.errors import PromptOverridesError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.section import SECTION_KEY, SectionNode, SectionOverride, find_placeholders
from ringfence.prompt.tool import Tool, checked_description

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt

logger = logging.getLogger(__name__)

LATEST = "latest"
VERSION = 3
BELOW_GIT_ROOT = (".ringfence", "prompts", "overrides")


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


@runtime_checkable
class PromptOverridesStore(Protocol):
    """A source of overrides. Raises PromptOverridesError for what it cannot read or write."""

    def resolve(self, descriptor: PromptDescriptor, tag: str = LATEST) -> PromptOverride | None:
        """Return the overrides that fit the prompt, and log the others. An unchanged store returns the same object as
        before."""
        ...

    def seed(self, prompt: Prompt[Any], tag: str = LATEST) -> PromptOverride:
        """What there is or, where there is nothing yet, the prompt's own texts as overrides, to be edited."""
        ...


# What can be replaced


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


def own_texts(prompt: Prompt[Any], tag: str = LATEST) -> PromptOverride:
    """The prompt's texts as overrides, without the descriptions that no override may have."""
    descriptor, nodes = prompt.descriptor, tuple(prompt.template.walk())
    bodies = {one.path: one.content_hash for one in descriptor.sections}
    contracts = {one.name: one.contract_hash for one in descriptor.tools}
    sections = [
        SectionOverride(node.path, bodies[node.path], node.section.original_body_template(), node.section.summary)
        for node in nodes
        if node.path in bodies
    ]
    tools: list[ToolOverride] = []
    for tool in (tool for node in nodes for tool in node.tools if tool.name in contracts):
        fitting = {name: text for name, text in tool.described.items() if not _description_problem(tool.name, text)}
        tools.append(ToolOverride(tool.name, contracts[tool.name], tool.description, fitting))
    return PromptOverride(descriptor.ns, descriptor.key, tag, tuple(sections), tuple(tools))


# What fits


def select_fitting(descriptor: PromptDescriptor, override: PromptOverride) -> tuple[PromptOverride, list[str]]:
    """The parts of an override that fit the prompt, and why the others do not: one message a part."""
    sections = {one.path: one for one in descriptor.sections}
    tools = {one.name: one for one in descriptor.tools}
    problems: list[str] = []

    def fits(problem: str | None) -> bool:
        problems.extend([problem] if problem else [])
        return not problem

    selected = replace(
        override,
        sections=tuple(one for one in override.sections if fits(_section_problem(one, sections.get(one.path)))),
        tools=tuple(one for one in override.tools if fits(_tool_problem(one, tools.get(one.name)))),
    )
    return selected, problems


def _section_problem(one: SectionOverride, descriptor: SectionDescriptor | None) -> str | None:
    what = f"section {'.'.join(one.path)}"
    if descriptor is None:
        return f"{what}: the prompt has no such section, or it accepts no overrides"
    if descriptor.content_hash != one.content_hash:
        return f"{what}: it has changed since the override was made"
    texts = [text for text in (one.body, one.summary) if text is not None]
    if not all(Template(text).is_valid() for text in texts):
        return f"{what}: a $ in it begins no name; write $$ for a dollar sign"
    if unknown := find_placeholders(*texts) - set(descriptor.fields):
        return f"{what}: its params have no {', '.join(sorted(unknown))}"
    if one.visibility is SectionVisibility.SUMMARY and one.summary is None and not descriptor.has_summary:
        return f"{what}: it is to be summarised, but there is no summary"
    return None


def _tool_problem(one: ToolOverride, descriptor: ToolDescriptor | None) -> str | None:
    what = f"tool {one.name}"
    if descriptor is None:
        return f"{what}: the prompt has no such tool, or it accepts no overrides"
    if descriptor.contract_hash != one.contract_hash:
        return f"{what}: it has changed since the override was made"
    if unknown := one.param_descriptions.keys() - set(descriptor.fields):
        return f"{what}: its params have no {', '.join(sorted(unknown))}"
    texts = [one.description, *one.param_descriptions.values()]
    problems = (_description_problem(one.name, text) for text in texts if text is not None)
    return next((problem for problem in problems if problem), None)


def _description_problem(name: str, text: str) -> str | None:
    try:
        checked_description(text, name)
    except PromptValidationError as error:
        return str(error)
    return None


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


# The files


class LocalPromptOverridesStore:
    """Overrides in ``<root>/<ns>/<key>/<tag>.json``; a ``/`` in the ns makes directories.

    A link is followed as long as it stays below the root, or in the repository that the default root is in.
    """

    def __init__(self, root_path: str | os.PathLike[str] | None = None) -> None:
        """By default the root is below the git repository that the process works in.

        Raises PromptOverridesError where there is no such repository.
        """
        self._within = Path(root_path) if root_path is not None else _git_root()
        self.root = self._within if root_path is not None else self._within.joinpath(*BELOW_GIT_ROOT)
        self._read: dict[Path, tuple[bytes, PromptDescriptor, PromptOverride]] = {}
        """By file: the content that was read, and what of it fitted which prompt."""

    def resolve(self, descriptor: PromptDescriptor, tag: str = LATEST) -> PromptOverride | None:
        path = self.path(descriptor.ns, descriptor.key, tag)
        content = self._content(path)
        if content is None:
            return None
        known = self._read.get(path)
        if known is None or known[:2] != (content, descriptor):
            fitting, problems = select_fitting(descriptor, _parse(path, content))
            for problem in problems:
                logger.warning("an override in %s is left out: %s", path, problem)
            known = self._read[path] = content, descriptor, fitting
        return known[2]

    def seed(self, prompt: Prompt[Any], tag: str = LATEST) -> PromptOverride:
        path = self.path(prompt.ns, prompt.key, tag)
        there = self.read(path)
        if there is not None:
            return there
        texts = own_texts(prompt, tag)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"version": VERSION, **serde.dump(texts)}, indent=2) + "\n")
        except OSError as error:
            raise PromptOverridesError(f"overrides cannot be written to {path}: {error}") from error
        return texts

    def files(self) -> Iterator[Path]:
        """Every file with overrides, sorted."""
        yield from sorted(self.root.rglob("*.json"))

    def path(self, ns: str, key: str, tag: str) -> Path:
        """The file for a prompt. Raises PromptOverridesError for names that make no path."""
        names = (*ns.split("/"), key, tag)
        for name in names:
            if SECTION_KEY.fullmatch(name) is None:
                raise PromptOverridesError(
                    f"{name!r} of {ns}:{key} ({tag}) makes no file name: use a-z, 0-9, '.', '_' and '-'"
                )
        return self.root.joinpath(*names[:-1], f"{tag}.json")

    def read(self, path: Path) -> PromptOverride | None:
        """The overrides of a file, whether they fit a prompt or not; None where there is no file.

        Raises PromptOverridesError for a file that cannot be read.
        """
        content = self._content(path)
        return None if content is None else _parse(path, content)

    def _content(self, path: Path) -> bytes | None:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._within)):
            raise _unreadable(path, f"a link leads out of {self._within}; put its target in its place")
        try:
            # Neither waits for a writer of a pipe, nor reads a device, which may have no end.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _unreadable(path, "it is no regular file")
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error


def _parse(path: Path, content: bytes) -> PromptOverride:
    try:
        data = serde.read_json(content)
        if data.pop("version", None) != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        return serde.parse(PromptOverride, data, extra="forbid", coerce=False)
    except ValueError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, why: object) -> PromptOverridesError:
    return PromptOverridesError(f"the overrides in {path} cannot be read: {why}")


def _git_root() -> Path:
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / ".git").exists():
            return directory
    raise PromptOverridesError(f"{here} is in no git repository: say where overrides are kept with root_path=")
