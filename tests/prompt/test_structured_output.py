"""The typed answer of a prompt: what type it may be, its schema, and how it is read from a model's last words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import PromptValidationError
from ringfence.errors import OutputParseError
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.prompt.rendering import parse_output
from ringfence.prompt.structured_output import StructuredOutput


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...] = field(default=(), metadata={"description": "Corners, clockwise"})


one = StructuredOutput.of(Shape)
many = StructuredOutput.of(list[Shape])


@pytest.mark.parametrize(
    "declared", [int, dict[str, Any], list[int], list, tuple[Shape, ...], Shape | None, "Shape"], ids=str
)
def test_an_answer_is_a_dataclass_or_a_list_of_one(declared: Any) -> None:
    with pytest.raises(PromptValidationError, match="dataclass"):
        PromptTemplate[declared](ns="n", key="k")


def test_a_prompt_without_type_argument_answers_with_text() -> None:
    assert PromptTemplate(ns="n", key="k").structured_output is None
    assert PromptTemplate[None](ns="n", key="k").structured_output is None


def test_extra_keys_are_about_a_structured_answer() -> None:
    with pytest.raises(PromptValidationError, match="allow_extra_keys"):
        PromptTemplate(ns="n", key="k", allow_extra_keys=True)


def test_a_template_keeps_its_output_type() -> None:
    assert PromptTemplate[Shape](ns="n", key="k").structured_output == one
    assert PromptTemplate[list[Shape]](ns="n", key="k").structured_output == many
    assert Prompt(ns="n", key="k", output=Shape).structured_output == one
    assert replace(PromptTemplate[Shape](ns="n", key="k"), key="other").structured_output == one


# Schemas


def test_the_schema_of_an_object_forbids_extra_keys_unless_they_are_allowed() -> None:
    schema = one.schema()
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert "additionalProperties" not in StructuredOutput.of(Shape, allow_extra_keys=True).schema()


def test_the_schema_of_an_array_is_an_object_with_items() -> None:
    schema: Any = many.schema()
    assert schema["required"] == ["items"]
    assert schema["properties"]["items"]["items"]["properties"]["points"]["description"] == "Corners, clockwise"
    assert set(schema["$defs"]) == {"Point"}


# Parsing

GOOD = '{"name": "dot", "points": [{"x": 1}]}'
DOT = Shape("dot", (Point(1),))


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        f"Here it is:\n\n```json\n{GOOD}\n```\nDone.",
        f"```JSON\n{GOOD}\n```",
        f"````json {GOOD} ````",
        f"  ```json\n{GOOD}",
        f'First {{"this}} is none, see [1] and:\n```json\n{GOOD}\n```\nnot [{{}}]',
        f"The answer is {GOOD}, I think. Not {{}}.",
        f"The answer is {GOOD}. Again: {GOOD}",
        f"In one line: ```json {GOOD} ```",
        f"Set {{a, b}} or [1] or {GOOD}",
    ],
)
def test_an_object_is_found_in_an_answer(text: str) -> None:
    assert one.parse(text) == DOT


@pytest.mark.parametrize(
    "text",
    [
        f"[{GOOD}]",
        f'{{"items": [{GOOD}]}}',
        f"```json\n[{GOOD}]\n```",
        f"Of these {{}}: [{GOOD}]",
        f'Of these {{"name": 1}}: {{"items": [{GOOD}]}}',
    ],
)
def test_an_array_is_found_in_an_answer(text: str) -> None:
    assert many.parse(text) == [DOT]


def test_an_empty_array_is_an_answer() -> None:
    assert many.parse("[]") == []


def test_fences_inside_of_strings_end_nothing() -> None:
    name = "```json\n{}\n```"
    assert one.parse(json.dumps({"name": name})) == Shape(name)
    assert one.parse(f"So:\n```json\n{json.dumps({'name': name})}\n```") == Shape(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("I could not find it.", "no JSON"),
        ("{name: dot}", "no JSON"),
        ("```json\nnothing\n```", "not acceptable JSON"),
        (f"```json\n{GOOD[:-1]}\n```", "not acceptable JSON"),
        (f"```json\n{GOOD} and more\n```", "Extra data"),
        (f"[{GOOD}]", "must be a JSON object, not an array"),
        ('"text"', "must be a JSON object, not a string"),
        ("null", "not null"),
        ("3", "not a number"),
        ("true", "not a boolean"),
        ("see [1]", "not an array"),
        ('{"name": "a", "name": "b"}', "occurs twice"),
        ('so {"name": "a", "name": "b"}', "occurs twice"),
        ('{"name": "a", "points": [{"x": NaN}]}', "NaN"),
        ('{"points": []}', "name"),
        ('{"name": "a", "colour": "red"}', "colour"),
        ('{"name": "a", "points": [{"x": 1, "z": 2}]}', "z"),
        ('{"name": 3}', "name"),
        ('{"name": "a"} and {"name": "b"}', "several JSON objects in the answer, which differ: send exactly one"),
        ("[" * 100_000, "too deeply"),
        ("so " + "[" * 100_000, "too deeply"),
        ('{"name": ' + "9" * 10_000 + "}", "not acceptable JSON|name"),
    ],
    ids=lambda value: value[:40],
)
def test_an_answer_that_does_not_fit_is_refused(text: str, said: str) -> None:
    with pytest.raises(OutputParseError, match=said) as caught:
        one.parse(text)
    assert caught.value.dataclass_type is Shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD, 'an array or an object with the key "items", not an object'),
        ('{"items": 3}', "not an object"),
        (f"[{GOOD}, 3]", "item 1 must be a JSON object"),
        (f'[{GOOD}, {GOOD}, {{"name": 3}}]', "item 2 is no Shape: .*name"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(text: str, said: str) -> None:
    with pytest.raises(OutputParseError, match=said.replace("an array", "a JSON array")):
        many.parse(text)


def test_allowed_extra_keys_are_dropped_at_every_depth() -> None:
    text = '{"name": "a", "colour": "red", "points": [{"x": 1, "z": 2}]}'
    assert StructuredOutput.of(Shape, allow_extra_keys=True).parse(text) == Shape("a", (Point(1),))


@given(st.builds(Shape, st.text(), st.lists(st.builds(Point, st.integers(), st.integers())).map(tuple)), st.text())
def test_whatever_surrounds_it_a_fenced_answer_is_read_back(shape: Shape, around: str) -> None:
    points = [{"x": point.x, "y": point.y} for point in shape.points]
    fenced = "```json\n" + json.dumps({"name": shape.name, "points": points}) + "\n```"
    before = around.replace("```", "")
    assert one.parse(f"{before}\n{fenced}\n{around}") == shape


class Counting(str):
    """Knows over how many characters lines were counted in it, as a JSONDecodeError does, at the most."""

    most: list[int]

    def __new__(cls, text: str, most: list[int]) -> Counting:
        made = super().__new__(cls, text)
        made.most = most
        return made

    def __getitem__(self, key: Any) -> Counting:
        return Counting(super().__getitem__(key), self.most)

    def count(self, *args: Any) -> int:
        _, start, end = args
        self.most.append(end - start)
        return super().count(*args)


@pytest.mark.parametrize("text", ['{"' * 30_000, '{"a": 1, ' * 10_000, "[1 " * 20_000])
def test_a_try_to_find_json_in_a_long_answer_does_not_look_through_all_that_is_before_it(text: str) -> None:
    most: list[int] = []
    with pytest.raises(OutputParseError):
        one.parse(Counting(text, most))
    assert len(most) > 5_000
    assert max(most) < len(text) // 2


# Through a prompt


def test_the_answer_to_a_rendering_is_parsed_or_taken_as_the_provider_parsed_it() -> None:
    rendered = Prompt[Shape](ns="n", key="k").render()
    assert parse_output(rendered, GOOD) == DOT
    assert parse_output(rendered, "", parsed=json.loads(GOOD)) == DOT
    with pytest.raises(OutputParseError, match="item 0"):
        parse_output(Prompt[list[Shape]](ns="n", key="k").render(), "", parsed=[1])


def test_a_prompt_that_wants_text_has_no_value_to_parse() -> None:
    with pytest.raises(OutputParseError, match="no output type"):
        parse_output(Prompt(ns="n", key="k").render(), GOOD)
