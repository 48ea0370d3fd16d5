"""Texts of a prompt replaced from outside: what can be, what replaces it, and where that is kept."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from string import Template
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ringfence import serde
from ringfence.errors import PromptOverridesError, PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.task_examples import TaskExample, TaskExamplesSection, checked_objective
from ringfence.prompt.tool import Tool, ToolExample, checked_description
from ringfence.prompt.tool_types import name_of

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt, PromptTemplate
    from ringfence.prompt.section import Section

logger = logging.getLogger(__name__)

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class SectionDescriptor:
    """A section whose text can be replaced. ``content_hash`` is the sha256 in hex of its template."""

    path: SectionPath
    content_hash: str
    number: str


@dataclass(frozen=True, slots=True)
class ToolDescriptor:
    """A tool whose texts can be replaced; ``contract_hash`` is of its description and the schemas of both types."""

    path: SectionPath
    name: str
    contract_hash: str
    example_hashes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskExampleDescriptor:
    """A task example by its place in the section that holds it, which is at ``path``."""

    path: SectionPath
    index: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class PromptDescriptor:
    """What of a prompt can be replaced, and the hashes by which it is known that it is still the same."""

    ns: str
    key: str
    sections: tuple[SectionDescriptor, ...] = ()
    tools: tuple[ToolDescriptor, ...] = ()
    task_examples: tuple[TaskExampleDescriptor, ...] = ()


@dataclass(frozen=True, slots=True)
class SectionOverride:
    """Another text for a section; None leaves as it is what the section says."""

    path: SectionPath
    content_hash: str
    """Of the text that it replaces: where that has changed since, the override is stale."""
    body: str | None = None
    summary: str | None = None
    visibility: SectionVisibility | None = None


@dataclass(frozen=True, slots=True)
class ToolExampleOverride:
    """Another example for a tool: in the place of the one at ``index``, or a further one where that is None.

    ``input`` and ``output`` are JSON values, parsed as the tool's types; None keeps what there is.
    """

    index: int | None = None
    content_hash: str | None = None
    remove: bool = False
    description: str | None = None
    input: object = None
    output: object = None


@dataclass(frozen=True, slots=True)
class ToolOverride:
    """Another description, other examples or other texts of the params for a tool, as long as its hash is the same."""

    name: str
    contract_hash: str
    description: str | None = None
    param_descriptions: Mapping[str, str] = field(default_factory=dict[str, str])
    """By field of the params."""
    examples: tuple[ToolExampleOverride, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskExampleOverride:
    """Another objective or outcome for a task example, or its removal."""

    path: SectionPath
    index: int
    content_hash: str
    remove: bool = False
    objective: str | None = None
    outcome: str | None = None


Override: TypeAlias = SectionOverride | ToolOverride | TaskExampleOverride


@dataclass(frozen=True, slots=True)
class PromptOverride:
    """All that replaces texts of one prompt, under one tag."""

    ns: str
    prompt_key: str
    tag: str = LATEST
    sections: tuple[SectionOverride, ...] = ()
    tools: tuple[ToolOverride, ...] = ()
    task_examples: tuple[TaskExampleOverride, ...] = ()

    def with_one(self, one: Override) -> PromptOverride:
        """With `one` in the place of what there was for the same section, tool or task example."""
        sections = {each.path: each for each in self.sections}
        tools = {each.name: each for each in self.tools}
        tasks = {(each.path, each.index): each for each in self.task_examples}
        if isinstance(one, SectionOverride):
            sections[one.path] = one
        elif isinstance(one, ToolOverride):
            tools[one.name] = one
        else:
            tasks[one.path, one.index] = one
        return replace(
            self,
            sections=tuple(sections.values()),
            tools=tuple(tools.values()),
            task_examples=tuple(tasks.values()),
        )


@runtime_checkable
class PromptOverridesStore(Protocol):
    """Where overrides are kept. Raises PromptOverridesError for what it cannot keep or read."""

    def resolve(self, descriptor: PromptDescriptor, tag: str = LATEST) -> PromptOverride | None:
        """What still fits the prompt; what does not is left out and logged. The same object while nothing changed."""
        ...

    def upsert(self, descriptor: PromptDescriptor, override: PromptOverride) -> PromptOverride:
        """Keep all of it, in the place of what there was. What does not fit the prompt is refused."""
        ...

    def store(self, descriptor: PromptDescriptor, override: Override, tag: str = LATEST) -> PromptOverride:
        """Keep one besides what there is. What does not fit the prompt is refused."""
        ...

    def delete(self, *, ns: str, prompt_key: str, tag: str = LATEST) -> None:
        """Nothing happens where there is none."""
        ...

    def seed(self, prompt: Prompt[Any], tag: str = LATEST) -> PromptOverride:
        """What there is or, where there is nothing yet, the prompt's own texts as overrides, to be edited."""
        ...


# Hashes and descriptors


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_hash(value: object) -> str:
    return text_hash(json.dumps(value, sort_keys=True, separators=(",", ":")))


def contract_hash(tool: Tool[Any, Any]) -> str:
    params = None if tool.params_type is None else serde.schema(tool.params_type, extra="forbid")
    result = None if tool.result_type is None else _result_schema(tool)
    return text_hash("".join((text_hash(tool.description), json_hash(params), json_hash(result))))


def _result_schema(tool: Tool[Any, Any]) -> object:
    assert tool.result_type is not None
    try:
        schema: object = serde.schema(tool.result_type)
    except TypeError:  # a result need not have a schema: its name stands for it
        schema = name_of(tool.result_type)
    return [tool.result_container, schema]


def example_hash(example: ToolExample[Any, Any]) -> str:
    return json_hash([example.description, serde.dump_any(example.input), serde.dump_any(example.output)])


def descriptor_of(template: PromptTemplate[Any]) -> PromptDescriptor:
    """What of a prompt accepts overrides."""
    sections: list[SectionDescriptor] = []
    tools: list[ToolDescriptor] = []
    tasks: list[TaskExampleDescriptor] = []
    for node in template.walk():
        section = node.section
        body = section.original_body_template()
        if section.accepts_overrides and body is not None:
            sections.append(SectionDescriptor(node.path, text_hash(body), node.number))
        if section.accepts_overrides and isinstance(section, TaskExamplesSection):
            for index, child in enumerate(section.children):
                assert isinstance(child, TaskExample)
                tasks.append(TaskExampleDescriptor(node.path, index, text_hash(child.text())))
        for tool in node.tools:
            if tool.accepts_overrides:
                examples = tuple(example_hash(example) for example in tool.examples)
                tools.append(ToolDescriptor(node.path, tool.name, contract_hash(tool), examples, tool.fields))
    return PromptDescriptor(template.ns, template.key, tuple(sections), tuple(tools), tuple(tasks))


def own_texts(template: PromptTemplate[Any], tag: str = LATEST) -> PromptOverride:
    """The prompt's texts as they are, as overrides; without those that no override may have (`problems`)."""
    found = template.descriptor
    known = {node.path: node.section for node in template.walk()}
    tools = {tool.name: tool for node in template.walk() for tool in node.tools}
    return PromptOverride(
        found.ns,
        found.key,
        tag,
        tuple(_own_text(known[one.path], one) for one in found.sections),
        tuple(
            ToolOverride(one.name, one.contract_hash, tools[one.name].description, _own_descriptions(tools[one.name]))
            for one in found.tools
        ),
    )


def _own_text(section: Section[Any], one: SectionDescriptor) -> SectionOverride:
    return SectionOverride(
        one.path, one.content_hash, section.original_body_template(), section.original_summary_template()
    )


def _own_descriptions(tool: Tool[Any, Any]) -> dict[str, str]:
    """Of its params, which in code may have longer ones than an override."""
    return {param: text for param, text in tool.described.items() if _is_description(text)}


def _is_description(text: str) -> bool:
    try:
        checked_description(text, "")
    except PromptValidationError:
        return False
    return True


# What fits


def problems(descriptor: PromptDescriptor, override: PromptOverride) -> dict[int, str]:
    """By `id` of a section, tool, example or task override: why it does not fit the prompt, where it does not."""
    sections = {one.path: one.content_hash for one in descriptor.sections}
    tools = {one.name: one for one in descriptor.tools}
    tasks = {(one.path, one.index): one.content_hash for one in descriptor.task_examples}
    found: dict[int, str] = {}
    for section in override.sections:
        found |= _problem(
            section, "section " + ".".join(section.path), sections.get(section.path), section.content_hash
        )
        if not all(Template(text).is_valid() for text in (section.body, section.summary) if text is not None):
            found[id(section)] = (
                f"section {'.'.join(section.path)}: a $ in it begins no name; write $$ for a dollar sign"
            )
    for tool in override.tools:
        known = tools.get(tool.name)
        found |= _problem(tool, f"tool {tool.name}", known and known.contract_hash, tool.contract_hash)
        if known is not None:
            found |= _problems_of_tool(tool, known)
    for task in override.task_examples:
        what = f"task example {task.index} of {'.'.join(task.path)}"
        found |= _problem(task, what, tasks.get((task.path, task.index)), task.content_hash)
        try:
            checked_objective(task.objective if task.objective is not None else "x")
        except PromptValidationError as error:
            found[id(task)] = f"{what}: {error}"
    return found


def _problem(one: object, what: str, known: str | None, given: str) -> dict[int, str]:
    if known is None:
        return {id(one): f"{what}: the prompt has no such thing, or it accepts no overrides"}
    return {} if known == given else {id(one): f"{what}: it has changed since the override was made"}


def _problems_of_tool(tool: ToolOverride, known: ToolDescriptor) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        for text in (tool.description, *tool.param_descriptions.values()):
            if text is not None:
                checked_description(text, tool.name)
    except PromptValidationError as error:
        found[id(tool)] = str(error)
    if unknown := tool.param_descriptions.keys() - set(known.fields):
        found[id(tool)] = f"tool {tool.name}: its params have no {', '.join(sorted(unknown))}"
    for example in tool.examples:
        if example.index is not None:
            there = 0 <= example.index < len(known.example_hashes)
            what = f"example {example.index} of tool {tool.name}"
            found |= _problem(
                example, what, known.example_hashes[example.index] if there else None, example.content_hash or ""
            )
        elif example.remove:
            found[id(example)] = f"a further example of tool {tool.name} cannot be removed"
    return found


def fitting(descriptor: PromptDescriptor, override: PromptOverride) -> PromptOverride:
    """What fits; the rest is logged."""
    wrong = problems(descriptor, override)
    for said in wrong.values():
        logger.warning(
            "an override of %s:%s (%s) is left out: %s", override.ns, override.prompt_key, override.tag, said
        )
    if not wrong:
        return override
    tools = tuple(
        ToolOverride(
            tool.name, tool.contract_hash, tool.description, tool.param_descriptions, _kept(tool.examples, wrong)
        )
        for tool in _kept(override.tools, wrong)
    )
    return PromptOverride(
        override.ns,
        override.prompt_key,
        override.tag,
        _kept(override.sections, wrong),
        tools,
        _kept(override.task_examples, wrong),
    )


def _kept(values: Iterable[Any], wrong: Mapping[int, str]) -> tuple[Any, ...]:
    return tuple(value for value in values if id(value) not in wrong)


def refuse_misfits(descriptor: PromptDescriptor, override: PromptOverride) -> None:
    """Raises PromptOverridesError for an override of another prompt, or with anything that does not fit this one."""
    if (override.ns, override.prompt_key) != (descriptor.ns, descriptor.key):
        raise PromptOverridesError(
            f"these overrides are of {override.ns}:{override.prompt_key}, not of {descriptor.ns}:{descriptor.key}"
        )
    if wrong := problems(descriptor, override):
        raise PromptOverridesError("; ".join(wrong.values()))
