"""A prompt of 200 sections and 300 tools: quick to render again, and nothing piles up."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from counting import count_calls

from ringfence.prompt import (
    LocalPromptOverridesStore,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    SectionVisibility,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import Session


@dataclass(frozen=True)
class Task:
    what: str = "it"


@dataclass(frozen=True)
class Params:
    path: str
    limit: int = 10


def act(params: Params, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult("done")


def large(sections: int = 200, tools: int = 300, summarised: int = 20) -> PromptTemplate[Any]:
    made = [Tool[Params, None](name=f"tool_{n}", description="Does it.", handler=act) for n in range(tools)]
    return PromptTemplate(
        ns="tests",
        key="large",
        sections=[
            MarkdownSection[Task](
                title=f"Section {n}",
                template="Do $what with care.\n" * 5,
                tools=made[n::sections],
                summary="In short.",
                visibility=SectionVisibility.SUMMARY if n < summarised else SectionVisibility.FULL,
            )
            for n in range(sections)
        ],
    )


@pytest.mark.parametrize("overridden", [False, True], ids=["plain", "overridden"])
def test_what_it_costs_to_render_it_again_grows_with_its_size_and_no_more(tmp_path: Path, overridden: bool) -> None:
    store = LocalPromptOverridesStore(tmp_path) if overridden else None
    costs: list[int] = []
    for size in ((200, 300, 20), (400, 600, 40)):
        prompt, session = Prompt(large(*size), overrides_store=store), Session()
        if store is not None:
            store.path(prompt.ns, prompt.key, "latest").unlink(missing_ok=True)
            store.seed(prompt)
        first = prompt.render(session=session)
        assert (
            len(first.tools) == size[1] - size[2] * 2 + 1
        )  # of the sections in full, and the one that opens the others
        costs.append(count_calls(partial(prompt.render, session=session)))
    assert costs[0] <= 150 * 200, "a section of it costs more calls than it takes for 10 ms"
    assert costs[1] <= 2.05 * costs[0]


@pytest.mark.prove
def test_memory_stays_where_it_is_over_ten_thousand_renderings() -> None:
    size = (200, 300, 20) if os.environ.get("RINGFENCE_PROVE") == "1" else (10, 15, 1)
    prompt, session = Prompt(large(*size)), Session()

    def held(times: int) -> int:
        for _ in range(times):
            prompt.render(session=session)
        gc.collect()
        return sys.getallocatedblocks()

    before = held(200)
    assert held(10_000) - before < 500
