"""How a result becomes the text that a model reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.prompt import ToolRenderableResult, ToolResult


@dataclass(frozen=True)
class Plain:
    name: str
    size: int | None = None
    data: bytes = b""


@dataclass(frozen=True)
class Own:
    text: Any

    def render(self) -> Any:
        return self.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("text", "text"),
        (b"caf\xc3\xa9 \xff", "café �"),
        (Own("mine"), "mine"),
        (Own(3), "3"),
        ({1: "a"}, '{"1": "a"}'),
        ([], "[]"),
        ([Own("a"), Own(""), Own("b")], "a\n\nb"),
        (["NaN", "1"], "NaN\n\n1"),
        ([Plain("ü")], '[{"name": "ü", "data": ""}]'),
        (7, "7"),
    ],
)
def test_every_kind_of_value_has_a_text(value: object, text: str) -> None:
    assert ToolResult.ok(value).render() == text


def test_a_dataclass_without_render_is_json_without_nones() -> None:
    assert json.loads(ToolResult.ok(Plain("a")).render()) == {"name": "a", "data": ""}


def test_a_sequence_of_json_is_one_array() -> None:
    assert json.loads(ToolResult.ok([Plain("a"), Plain("b", 2)]).render()) == [
        {"name": "a", "data": ""},
        {"name": "b", "size": 2, "data": ""},
    ]


def test_the_text_is_message_blank_line_value() -> None:
    assert ToolResult.ok(Own("v"), message="m").text() == "m\n\nv"
    assert ToolResult.ok(Own("v"), message="").text() == "v"
    assert ToolResult.error("m").text() == "m"
    assert ToolResult("m", Own("v"), exclude_value_from_context=True).text() == "m"


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    text = ToolResult.ok(Own("a" * 300_000 + "end"), message="start").text()
    assert len(text) < 100_000 + 100
    assert text.startswith("start")
    assert text.endswith("end")
    assert "characters left out" in text


def test_a_result_may_say_of_what_it_is() -> None:
    assert ToolResult[Plain]("m", Plain("a")) == ToolResult("m", Plain("a"))


def test_a_result_with_render_is_renderable() -> None:
    assert isinstance(Own("x"), ToolRenderableResult)


class Hostile:
    def __init__(self, how: int) -> None:
        self.how = how

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __str__(self) -> str:
        raise RuntimeError("str")


leaves: st.SearchStrategy[object] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.builds(Hostile, st.just(1)),
    st.builds(Own, st.integers()),
    st.complex_numbers(),
    st.just(object()),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner) | st.builds(Own, inner)
)


@given(values)
def test_rendering_never_raises_and_gives_a_string(value: object) -> None:
    assert isinstance(ToolResult.ok(value).text(), str)


@given(st.dictionaries(st.text(), st.floats() | st.text() | st.binary()))
def test_a_mapping_is_valid_json_whatever_floats_it_has(value: dict[str, object]) -> None:
    def refuse(constant: str) -> object:
        raise AssertionError(constant)

    assert json.loads(ToolResult.ok(value).render(), parse_constant=refuse).keys() == value.keys()


def test_a_cycle_is_rendered() -> None:
    cycle: dict[str, Any] = {"a": 1}
    cycle["self"] = cycle
    assert '"a": 1' in ToolResult.ok(cycle).render()
