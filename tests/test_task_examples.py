"""Examples of whole tasks: checked against their prompt, and rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ringfence.prompt import (
    Prompt,
    PromptTemplate,
    PromptValidationError,
    TaskExample,
    TaskExamplesSection,
    TaskStep,
    Tool,
    ToolExample,
    ToolsSection,
)


@dataclass(frozen=True)
class Find:
    what: str


@dataclass(frozen=True)
class Found:
    path: str

    def render(self) -> str:
        return f"found {self.path}"


@dataclass(frozen=True)
class Answer:
    good: bool


FIND = Tool[Find, list[Found]](name="find", description="Find.", handler=None)
PING = Tool[None, None](name="ping", description="Ping.", handler=None)
STEP = TaskStep("find", ToolExample("Look for it.", Find("x"), [Found("a"), Found("b")]))
PINGED = TaskStep("ping", ToolExample("See who is there.", None, None))


def example(objective: str = "Find x.", outcome: Any = "It is in a.", steps: Any = (STEP, PINGED)) -> TaskExample:
    return TaskExample(key="one", objective=objective, outcome=outcome, steps=steps)


def template(one: TaskExample, output: Any = None) -> PromptTemplate[Any]:
    kind: Any = PromptTemplate if output is None else PromptTemplate[output]
    sections = [ToolsSection(title="Tools", tools=[FIND, PING]), TaskExamplesSection(examples=[one])]
    return kind(ns="n", key="k", sections=sections)


def test_an_example_shows_objective_steps_and_outcome() -> None:
    text = Prompt(template(example())).render().text
    assert "## 2. Task examples (task-examples)\n\n### 2.1. Find x. (task-examples.one)\n\nObjective: Find x." in text
    assert "1. `find`: Look for it." in text
    assert '{"what": "x"}' in text
    assert "found a\n\n    found b" in text.replace("    \n", "\n")
    assert "2. `ping`: See who is there.\n   input:\n    ```json\n    null" in text
    assert text.endswith("Outcome:\n\nIt is in a.")


@pytest.mark.parametrize(
    ("outcome", "output"), [(Answer(True), Answer), ([Answer(True)], list[Answer]), ([], list[Answer]), ("x", None)]
)
def test_the_outcome_is_of_the_prompt_s_output_type(outcome: Any, output: Any) -> None:
    assert "Outcome:" in Prompt(template(example(outcome=outcome), output)).render().text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: example(""), "objective"),
        (lambda: example("x" * 501), "objective"),
        (lambda: example("caf\u00e9"), "objective"),
        (lambda: example("two\nlines"), "objective"),
        (lambda: example(steps=()), "no steps"),
        (lambda: TaskExamplesSection(examples=[]), "no task examples"),
        (lambda: template(example(outcome=Answer(True))), "outcome is not a str"),
        (lambda: template(example(), Answer), "not a Answer"),
        (lambda: template(example(outcome=Answer(True)), list[Answer]), "not a list of Answer"),
        (lambda: template(example(outcome=[Found("x")]), list[Answer]), "not a list of Answer"),
        (lambda: template(example(steps=[TaskStep("nowhere", STEP.example)])), "no tool 'nowhere'"),
        (lambda: template(example(steps=[TaskStep("ping", STEP.example)])), "input is a Find"),
        (lambda: template(example(steps=[TaskStep("find", ToolExample("x", Find("x"), Found("a")))])), "output"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_prompt_is_put_together(make: Any, said: str) -> None:
    with pytest.raises(PromptValidationError, match=said):
        make()


def test_a_long_objective_makes_a_short_title() -> None:
    assert example("x" * 100).title == "x" * 60 + "..."
    assert example("x" * 60).title == "x" * 60
