"""Overrides: texts from files that replace texts of a prompt, and the store that reads the files."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template

from ringfence import serde
from ringfence.errors import PromptOverridesError, PromptValidationError, SectionVisibility
from ringfence.prompt.descriptor import (
    LATEST,
    DescribedPrompt,
    PromptDescriptor,
    PromptOverride,
    SectionDescriptor,
    ToolDescriptor,
    ToolOverride,
)
from ringfence.prompt.section import SECTION_KEY, SectionOverride, find_placeholders
from ringfence.runtime.tool import checked_description

logger = logging.getLogger(__name__)

VERSION = 3
BELOW_GIT_ROOT = (".ringfence", "prompts", "overrides")


# What can be replaced


def own_texts(prompt: DescribedPrompt, tag: str = LATEST) -> PromptOverride:
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

    def seed(self, prompt: DescribedPrompt, tag: str = LATEST) -> PromptOverride:
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
