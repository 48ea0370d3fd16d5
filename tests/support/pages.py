"""The pages of the project: what they show, and where they lead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
DOORS = ("claude_agent_sdk", "deepagents", "inspect_ai", "langchain", "langchain_core", "minisweagent")
"""Frameworks whose doors have environments of their own."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its first line of text."""

    language: str
    text: str
    line: int

    @property
    def is_elsewhere(self) -> bool:
        """Whether it needs a framework that is not installed here. The suite of a door in tests/doors runs it then."""
        names = re.findall(r"^(?:from|import) (\w+)", self.text, re.MULTILINE)
        return any(name in DOORS and find_spec(name) is None for name in names)


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(PROJECT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The page without its blocks and without code in lines."""
        return re.sub(r"`[^`\n]+`", "", FENCE.sub("", self.text))

    @property
    def blocks(self) -> list[Block]:
        return [
            Block(found[1], found[2], self.text.count("\n", 0, found.start(2)) + 1)
            for found in FENCE.finditer(self.text)
        ]

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\((?!https?:)([^)]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", FENCE.sub("", self.text), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def page(name: str) -> Page:
    """A page of `docs/`, named without its ending."""
    return Page(DOCS / f"{name}.md")


def pages() -> Iterator[Page]:
    yield from map(Page, sorted(PROJECT.glob("*.md")))
    yield from map(Page, sorted(DOCS.rglob("*.md")))
