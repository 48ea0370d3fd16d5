"""A prompt of 200 sections and 300 tools, rendered again and again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import peer
from measure import Row, alternated, flat, less, repeated, report

AREA = "rendering"
TEXT = "Do $what with care, and say what came of it.\n" * 5


@dataclass(frozen=True)
class Task:
    what: str


@dataclass(frozen=True)
class Find:
    path: str
    limit: int = 10


@dataclass(frozen=True)
class Found:
    path: str

    def render(self) -> str:
        return self.path


def find(params: Find, *, context: Any) -> Any:
    raise NotImplementedError


def rendering(package: str, *, sections: int = 200, tools: int = 300) -> Callable[[], object]:
    """To render a prompt of that package: it has the same names for what is used here."""
    prompts: Any = importlib.import_module(f"{package}.prompt")
    runtime: Any = importlib.import_module(f"{package}.runtime.session")
    numbers = count()

    def section(number: int) -> Any:
        share = tools // sections + (number < tools % sections)
        own = [
            prompts.Tool[Find, Found](name=f"find_{next(numbers)}", description="Finds files.", handler=find)
            for _ in range(share)
        ]
        return prompts.MarkdownSection[Task](
            title=f"Section {number}", key=f"s{number}", template=TEXT, default_params=Task("it"), tools=own
        )

    template = prompts.PromptTemplate(ns="bench", key="large", sections=[section(number) for number in range(sections)])
    prompt, session = prompts.Prompt(template), runtime.Session()
    rendered = prompt.render(session=session)
    assert (len(rendered.tools), rendered.text.count("## ")) == (tools, sections)
    return lambda: prompt.render(session=session)


def rows() -> Iterator[Row]:
    ours = repeated(rendering("ringfence"))
    if peer.installed():
        spreads = alternated(ours, repeated(rendering(peer.NAME)))
        yield less(AREA, "200 sections, 300 tools", peer.NAME, spreads, at_most_us=10_000)
    small = repeated(rendering("ringfence", sections=20, tools=30))
    yield flat(AREA, "200 sections, 300 tools", "20 and 30", alternated(ours, small), at_most=12)


if __name__ == "__main__":
    report(rows())
