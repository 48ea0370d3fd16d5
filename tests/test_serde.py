"""Dataclasses from what a model wrote and back, their schemas, and the words about what did not fit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import Field

from ringfence import serde

T = TypeVar("T")


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mark(Enum):
    ONE = 1
    TEXT = "text"


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Edit:
    old: str = field(metadata={"description": "The text that is replaced.", "min_length": 1})
    new: str
    count: int = field(default=1, metadata={"description": "How often `old` occurs.", "ge": 1, "le": 100})


@dataclass(frozen=True, slots=True)
class EditFile:
    file_path: str = field(metadata={"description": "Path of the file."})
    edits: tuple[Edit, ...] = field(metadata={"description": "Applied in order.", "min_length": 1})
    mode: Literal["strict", "fuzzy"] = "strict"
    title: str | None = field(default=None, metadata={"pattern": "^[a-z]+$", "max_length": 20})
    colour: Colour = Colour.RED
    tags: frozenset[str] = frozenset({"b", "a"})
    env: Mapping[str, str] = field(default_factory=dict)
    started: int = field(init=False, default=0)


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Box(Generic[T]):
    item: T
    more: tuple[T, ...] = ()


def holder(kind: Any) -> type[Any]:
    """A dataclass with one field, `value`, of that type."""
    return make_dataclass("Holder", [("value", kind)], frozen=True)


def parsed(kind: Any, value: object, *, coerce: bool = True) -> Any:
    return serde.parse(holder(kind), {"value": value}, coerce=coerce).value


def message(cls: type[Any], data: Any, extra: serde.Extra = "forbid") -> str:
    with pytest.raises(ValueError) as caught:
        serde.parse(cls, data, extra=extra)
    return str(caught.value)


# What is taken, and what is not


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (int, "-03", -3),
        (int, 3.0, 3),
        (int, 10**40, 10**40),
        (float, 1, 1.0),
        (float, "1.5", 1.5),
        (float, "-1e3", -1000.0),
        (bool, True, True),
        (bool, 0, False),
        (bool, "yes", True),
        (bool, "OFF", False),
        (bool, "1", True),
        (str, "", ""),
        (str, "3", "3"),
        (str | None, "", ""),
        (str | None, None, None),
        (int | None, "3", 3),
        (bytes, "AP8=", b"\x00\xff"),
        (bytes, "-_8=", b"\xfb\xff"),
        (bytes, b"raw", b"raw"),
        (Decimal, "1.10", Decimal("1.10")),
        (Decimal, 1.5, Decimal("1.5")),
        (Decimal, 2, Decimal(2)),
        (UUID, "12345678123456781234567812345678", UUID(int=0x12345678123456781234567812345678)),
        (Path, "a/b", Path("a/b")),
        (Path, Path("a/b"), Path("a/b")),
        (date, "2026-11-30", date(2026, 11, 30)),
        (datetime, "2026-11-30T12:30:00Z", datetime(2026, 11, 30, 12, 30, tzinfo=UTC)),
        (time, "12:30", time(12, 30)),
        (timedelta, "PT90S", timedelta(seconds=90)),
        (Colour, "dark-blue", Colour.DARK_BLUE),
        (Colour, "DARK_BLUE", Colour.DARK_BLUE),
        (Colour, Colour.RED, Colour.RED),
        (Level, 2, Level.HIGH),
        (Level, "2", Level.HIGH),
        (Level, "HIGH", Level.HIGH),
        (Mark, 1, Mark.ONE),
        (Mark, "text", Mark.TEXT),
        (Literal["a", 1, None], 1, 1),
        (Literal[1, True], True, True),
        (list[int], [1, "2"], [1, 2]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, str], [1, "2"], (1, "2")),
        (set[int], [1, 2], {1, 2}),
        (frozenset[int], ["1", 2], frozenset({1, 2})),
        (Sequence[int], [1], [1]),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (dict[Level, str], {"1": "a"}, {Level.LOW: "a"}),
        (dict[bool, str], {"true": "a"}, {True: "a"}),
        (Mapping[str, int], {"a": 1}, {"a": 1}),
        (Point, [1, "2"], Point(1, 2)),
        (Any, {"a": [True, "1_0", None]}, {"a": [True, "1_0", None]}),
        (object, "3", "3"),
        (Node, {"name": "a", "children": [{"name": "b"}]}, Node("a", [Node("b")])),
        (Node, Node("a"), Node("a")),
        (Box[int], {"item": "3", "more": [4]}, Box(3, (4,))),
        (Annotated[int, "words"], "3", 3),
    ],
)
def test_values_are_converted_where_nothing_is_lost(kind: Any, value: object, expected: object) -> None:
    result = parsed(kind, value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((int, each) for each in (True, False, 3.9, "3.0", "1_000", " 3", "", "٣", None, [3], math.nan, math.inf)),
        *((float, each) for each in (True, "nan", "Infinity", "1_0", "", ".", math.nan, -math.inf, "1e999", 10**400)),
        (int, "9" * 5000),
        *((bool, each) for each in (2, -1, 1.0, "y", "t", "", "truee", None, [])),
        *((str, each) for each in (3, 1.5, True, None, b"abc", ["a"], {})),
        *((bytes, each) for each in ("not base64!", 3, [1])),
        *((Decimal, each) for each in (True, "nan", "1_0", "", "Infinity", math.inf, [])),
        *((UUID, each) for each in ("x", 3, "")),
        *((Path, each) for each in (3, b"a", None, ["a"])),
        *((date, each) for each in (1, 1.5, "1", "1700000000", "2026-02-30", "", True)),
        *((datetime, each) for each in (1, 1.5, "1700000000", "-1.5", True, "soon", "2026-11-30T12:30:00.1234567Z")),
        *((time, each) for each in (1, 1.5, "25:00", True)),
        *((timedelta, each) for each in (1, True, "90", "soon")),
        *((Colour, each) for each in ("Red", "green", 1, None)),
        *((Level, each) for each in (True, 3, "3", 1.5, None)),
        *((Mark, each) for each in (True, "one", [1])),
        *((Literal["a", 1], each) for each in ("A", "1", True, None, [])),
        *((Literal[True], each) for each in (1, "true")),
        *((list[str], each) for each in ("abc", {"a": "b"}, None, [1])),
        *((tuple[str, ...], each) for each in ("abc", [1])),
        *((tuple[int, str], each) for each in ([1], [1, "a", "b"], ["a", 1])),
        *((frozenset[str], each) for each in ("abc", [1], ["a", ["b"]])),
        *((Sequence[str], each) for each in ("abc", b"abc", 3)),
        *((dict[str, int], each) for each in ([["a", 1]], "a", {"a": "b"}, {1: 1})),
        (dict[int, int], {"a": 1}),
        (int | None, "x"),
        (Node, "a"),
        (Node, [["name", "a"]]),
        *((Point, each) for each in (0, "ab", None, [1], [1, "x"], [1, 2, 3], {"a": 1}, {"x": 1, "y": 2})),
        (Box[int], {"item": "x"}),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(kind: Any, value: object) -> None:
    with pytest.raises(ValueError, match="value"):
        parsed(kind, value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, "3"), (int, 3.0), (float, "1.5"), (bool, "true"), (bool, 1), (Colour, "RED"), (Level, "2"), (Mark, "ONE")],
)
def test_without_coercion_text_is_no_number_no_boolean_and_no_name(kind: Any, value: object) -> None:
    assert parsed(kind, value) is not None
    with pytest.raises(ValueError, match="value: expected"):
        parsed(kind, value, coerce=False)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 1, 1.0),
        (tuple[int, ...], [1], (1,)),
        (date, "2026-11-30", date(2026, 11, 30)),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Colour, "red", Colour.RED),
    ],
)
def test_without_coercion_a_type_still_has_its_form_in_json(kind: Any, value: object, expected: object) -> None:
    assert parsed(kind, value, coerce=False) == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int | str, "3", "3"),
        (str | int, 3, 3),
        (bytes | str, "AAAA", "AAAA"),
        (Colour | str, "RED", "RED"),
        (Mark | str, "ONE", "ONE"),
        (float | int, 3, 3),
        (int | float, 3.5, 3.5),
        (int | bool, True, True),
        (bool | int, 1, 1),
        (int | list[int], ["3"], [3]),
        (list[int] | int, "3", 3),
        (Edit | Node, {"name": "a"}, Node("a")),
    ],
)
def test_a_union_prefers_the_member_whose_type_the_value_has(kind: Any, value: object, expected: object) -> None:
    result = parsed(kind, value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("mapping", [MappingProxyType({"name": "a"}), OrderedDict(name="a")])
def test_any_mapping_is_taken(mapping: Mapping[str, object]) -> None:
    assert serde.parse(Node, mapping) == Node("a")


def test_json_text_is_parsed_like_the_mapping_it_holds() -> None:
    data = {"file_path": "ä", "edits": [{"old": "a", "new": "b", "count": "2"}]}
    expected = serde.parse(EditFile, data)
    assert serde.parse(EditFile, json.dumps(data)) == expected
    assert serde.parse(EditFile, json.dumps(data, ensure_ascii=False).encode()) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON.*line 1 column 2"),
        ("{'name': 'a'}", "not valid JSON"),
        ('{"name": "a"} x', "not valid JSON"),
        ('{"name": NaN}', "not valid JSON: NaN"),
        ('{"name": [-Infinity]}', "not valid JSON: -Infinity"),
        ('{"name": "a", "name": "b"}', 'the key "name" occurs twice'),
        ('{"name": "a", "children": [{"x": 1, "y": 2, "y": 3}]}', 'the key "y" occurs twice'),
        ("[]", r"expected a JSON object \(got \[\]\)"),
        ("null", r"expected a JSON object \(got null\)"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"name": "\xff"}', "not UTF-8"),
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        serde.read_json(text)
    with pytest.raises(ValueError, match=words):
        serde.parse(Node, text)


@pytest.mark.parametrize("cls", [int, list[Node], Edit("a", "b"), None, "Node"])
def test_only_dataclasses_are_parsed(cls: Any) -> None:
    with pytest.raises(TypeError, match="expected a dataclass, got"):
        serde.parse(cls, {})


@pytest.mark.parametrize("data", [None, 3, ["name"], [("name", "a")], Node("a")])
def test_only_mappings_and_json_are_parsed(data: Any) -> None:
    with pytest.raises(TypeError, match="expected a mapping or the text of a JSON object, got"):
        serde.parse(Node, data)


def test_an_unknown_way_to_treat_extra_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="extra must be"):
        serde.parse(Node, {"name": "a"}, extra="allow")  # pyright: ignore[reportArgumentType] (the bad input)


# Extra keys


@dataclass(frozen=True)
class Deep:
    one: Edit
    many: tuple[Edit, ...] = ()
    by_name: Mapping[str, Edit] = field(default_factory=dict)
    maybe: Edit | None = None
    either: Edit | list[Edit] | None = None


EDIT = {"old": "a", "new": "b"}
WRONG = {"old": "a", "new": "b", "knt": 1}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"one": EDIT, "oen": 1}, "oen"),
        ({"one": WRONG}, "one.knt"),
        ({"one": EDIT, "many": [EDIT, WRONG]}, "many[1].knt"),
        ({"one": EDIT, "by_name": {"x": EDIT, "y z": WRONG}}, 'by_name["y z"].knt'),
        ({"one": EDIT, "maybe": WRONG}, "maybe.knt"),
        ({"one": EDIT, "either": WRONG}, "either.knt"),
        ({"one": EDIT, "either": [WRONG]}, "either[0].knt"),
    ],
)
def test_extra_keys_are_named_or_dropped_at_every_depth(data: Mapping[str, object], where: str) -> None:
    known = "one, many, by_name, maybe, either" if where == "oen" else "old, new, count"
    said = message(Deep, data)
    assert f"{where}: unknown key" in said
    assert f"(known: {known})" in said
    dropped = serde.parse(Deep, data)
    assert serde.dump(dropped, exclude_none=True).keys() <= {"one", "many", "by_name", "maybe", "either"}
    assert "knt" not in json.dumps(serde.dump(dropped))


def test_a_field_that_is_not_of_the_constructor_is_no_key() -> None:
    data = {"file_path": "a", "edits": [EDIT], "started": 5}
    assert serde.parse(EditFile, data).started == 0
    assert "started: unknown key" in message(EditFile, data)


# Messages


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "file_path: required, but missing; edits: required, but missing"),
        (
            {"file": "a", "edits": [EDIT]},
            (
                "file_path: required, but missing; "
                'file: unknown key; did you mean "file_path"? (known: file_path, edits, mode, title, colour, tags, env)'
            ),
        ),
        ({"file_path": 3, "edits": [EDIT]}, "file_path: expected a string (got 3)"),
        ({"file_path": 10**5000, "edits": [EDIT]}, "file_path: expected a string (got a very long int)"),
        ({"file_path": "a", "edits": "x"}, 'edits: expected a list (got "x")'),
        ({"file_path": "a", "edits": ["x"]}, 'edits[0]: expected an object with the keys old, new, count (got "x")'),
        ({"file_path": "a", "edits": [EDIT], "mode": "x"}, 'mode: expected one of "strict", "fuzzy" (got "x")'),
        ({"file_path": "a", "edits": [EDIT], "colour": 1}, 'colour: expected one of "red", "dark-blue" (got 1)'),
        ({"file_path": "a", "edits": [EDIT], "tags": [True]}, "tags[0]: expected a string (got true)"),
        ({"file_path": "a", "edits": [EDIT], "env": []}, "env: expected an object (got [])"),
        ({"file_path": "a", "edits": [EDIT], "env": {"K": 1}}, "env.K: expected a string (got 1)"),
        ({"file_path": "a", "edits": [EDIT], "env": {1: "a"}}, "env[1] (its key): expected a string (got 1)"),
        (
            {"file_path": "a", "edits": [EDIT, {"old": "", "new": None, "count": "many"}]},
            (
                'edits[1].old: should have at least 1 character (got ""); '
                "edits[1].new: expected a string (got null); "
                'edits[1].count: expected an integer (got "many")'
            ),
        ),
        ({"file_path": "a", "edits": []}, "edits: should have at least 1 item, not 0 (got [])"),
        ({"file_path": "a", "edits": [EDIT], "title": "A"}, "title: should match pattern '^[a-z]+$' (got \"A\")"),
        ({"file_path": "a", "edits": [EDIT], 1: 2}, "[1]: expected a string for a key (got 1)"),
        (
            {"file_path": "a", "edits": [{**EDIT, "count": 0}]},
            "edits[0].count: should be greater than or equal to 1 (got 0)",
        ),
    ],
)
def test_a_message_names_the_field_what_was_expected_and_what_came(data: Mapping[str, object], expected: str) -> None:
    assert message(EditFile, data) == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int | list[str], "x", 'value: expected an integer or a list (got "x")'),
        (int | list[str], [1], "value: expected an integer (got [1]); value[0]: expected a string (got 1)"),
        (Edit | int, {"old": "a"}, "value.new: required, but missing; value: expected an integer (got {'old': 'a'})"),
        (date, 1, "value: expected a date such as 2026-01-31 (got 1)"),
        (Path, 1, "value: expected a path (got 1)"),
        (bytes, "!", 'value: expected bytes as base64 text (got "!")'),
        (Literal["a"], 1, 'value: expected "a" (got 1)'),
        (tuple[int, int], [1], "value[1]: required, but missing"),
        (Sequence[int], "x", 'value: expected a list (got "x")'),
        (Sequence[int], ["x"], 'value[0]: expected an integer (got "x")'),
        (Box[int], {"item": "x"}, 'value.item: expected an integer (got "x")'),
    ],
)
def test_a_message_says_what_a_type_looks_like_in_json(kind: Any, value: object, expected: str) -> None:
    assert message(holder(kind), {"value": value}) == expected


MISSING = "required, but missing"


@dataclass
class Insertion:
    kind: Literal["insertion"]
    text: str


@dataclass
class Deletion:
    kind: Literal["deletion"]
    line: int
    count: int = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"kind": "deletion"}, f"value.line: {MISSING}"),
        ({"kind": "deletion", "line": "x"}, 'value.line: expected an integer (got "x")'),
        ({"kind": "insertion", "text": [1]}, "value.text: expected a string (got [1])"),
        (
            {"kind": "up"},
            f'value.kind: expected "insertion" or "deletion" (got "up"); value.text: {MISSING}; value.line: {MISSING}',
        ),
        (
            {},
            f"value.kind: {MISSING}; value.text: {MISSING}; value.line: {MISSING}",
        ),
    ],
)
def test_of_a_union_only_the_member_whose_literal_fits_has_problems(value: object, expected: str) -> None:
    assert message(holder(Insertion | Deletion), {"value": value}) == expected
    within = message(holder(list[Insertion | Deletion]), {"value": [{"kind": "insertion", "text": "a"}, value]})
    assert within == expected.replace("value", "value[1]")


def test_what_a_class_itself_refuses_is_told_in_its_words() -> None:
    @dataclass
    class Span:
        start: int
        end: InitVar[int]

        def __post_init__(self, end: int) -> None:
            if end < self.start:
                raise ValueError("end is before start")

    assert serde.parse(Span, {"start": 1, "end": 2}).start == 1
    assert message(Span, {"start": 2, "end": 1}) == "end is before start"
    assert message(holder(list[Span]), {"value": [{"start": 2, "end": 1}]}) == "value[0]: end is before start"


@pytest.mark.parametrize(
    "data",
    [
        {"file_path": ["x" * 100_000], "edits": ["y" * 100_000] * 10_000},
        {"file_path": 10**5000, "edits": {"x" * 100_000: 1}, "mode": {"a": {"b": {"c": ["d"] * 1000}}}},
        {"k" * 100_000: 1},
        {f"key{n}": n for n in range(10_000)},
    ],
)
def test_messages_stay_short_whatever_came(data: Mapping[str, object]) -> None:
    assert len(message(EditFile, data)) < 6000


def test_the_first_problems_are_told_and_the_others_counted() -> None:
    said = message(EditFile, {"file_path": "a", "edits": [{"old": "a"}] * 50})
    assert said.startswith("edits[0].new: required, but missing; edits[1].new: ")
    assert said.endswith("edits[19].new: required, but missing; and 30 more problems")


def test_messages_can_be_encoded_whatever_came() -> None:
    text = message(EditFile, {"file_path": "a", "edits": "\udcff", "mode": "ä\udcff", "env": {"\ud800": 1}})
    assert "ä\\udcff" in text.encode().decode()
    assert message(EditFile, {"\ud800": 1}).encode() == b'expected text without lone surrogates (got "\\ud800")'


def test_what_is_nested_too_deeply_is_refused() -> None:
    data: dict[str, object] = {"name": "leaf"}
    for _ in range(10_000):
        data = {"name": "a", "children": [data]}
    assert message(Node, data).endswith("nested too deeply")


# Dataclasses and their annotations


def test_classes_of_a_running_function_may_name_each_other() -> None:
    @dataclass(frozen=True)
    class Inner:
        count: int
        outer: Outer | None = None

    @dataclass(frozen=True)
    class Outer:
        inner: tuple[Inner, ...]
        last: Annotated[Inner | None, "words"] = field(default=None, metadata={"description": "The last."})

    assert serde.parse(Outer, {"inner": [{"count": "3"}]}) == Outer((Inner(3),))
    assert serde.parse(Box[Outer], {"item": {"inner": []}}) == Box(Outer(()))
    properties: Any = serde.schema(Outer)["properties"]
    assert properties["last"]["description"] == "The last."


def classes_of_an_ended_function() -> type[Any]:
    @dataclass
    class Inner:
        count: int

    @dataclass
    class Outer:
        inner: Inner

    return Outer


@pytest.mark.parametrize("use", [serde.decoder, serde.schema])
def test_a_type_that_cannot_be_found_is_named(use: Any) -> None:
    with pytest.raises(TypeError, match=r"Outer cannot be parsed: name 'Inner' is not defined; define it at module"):
        use(classes_of_an_ended_function())


@pytest.mark.parametrize("kind", [type(sys), Generic, list[memoryview], str | type(os)])
def test_a_type_that_json_cannot_hold_is_refused_beforehand(kind: Any) -> None:
    with pytest.raises(TypeError, match="Holder cannot be parsed"):
        serde.decoder(holder(kind))


def test_a_pattern_that_cannot_be_compiled_is_refused_beforehand() -> None:
    cls = make_dataclass("Searched", [("text", str, field(metadata={"pattern": "(?=a)"}))])
    with pytest.raises(TypeError, match=r"Searched cannot be parsed: .*look-around"):
        serde.decoder(cls)


def test_constraints_of_the_metadata_hold_in_parsing_and_schema() -> None:
    @dataclass
    class Limits:
        low: int = field(metadata={"ge": 1, "lt": 10, "multiple_of": 2})
        ratio: float | None = field(default=None, metadata={"gt": 0, "le": 1})
        names: tuple[str, ...] = field(default=(), metadata={"max_length": 2})
        word: Annotated[str, "words"] = field(default="ab", metadata={"pattern": "b$"})

    serde.parse(Limits, {"low": 8, "ratio": 1, "names": ["a", "b"], "word": "cab"})
    wrong = [("low", 0), ("low", 10), ("low", 3), ("ratio", 0), ("ratio", 1.5), ("names", ["a"] * 3), ("word", "bc")]
    for name, value in wrong:
        assert message(Limits, {"low": 2, name: value}).startswith(f"{name}: should ")
    properties: Any = serde.schema(Limits)["properties"]
    assert properties["low"] == {"type": "integer", "minimum": 1, "exclusiveMaximum": 10, "multipleOf": 2}
    assert properties["ratio"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert properties["names"]["maxItems"] == 2
    assert properties["word"]["pattern"] == "b$"


def ruled(kind: Any, rules: Mapping[str, Any], **default: Any) -> type[Any]:
    return make_dataclass("Ruled", [("value", kind, field(metadata=rules, **default))], frozen=True)


@pytest.mark.parametrize(
    ("kind", "rules", "value", "expected"),
    [
        (str, {"strip": True, "min_length": 1, "max_length": 2}, " ab\n", "ab"),
        (str, {"lower": True, "pattern": "^[a-z]+$"}, "ABC", "abc"),
        (str, {"uppercase": True, "enum": ["A", "B"]}, "b", "B"),
        (str, {"lowercase": True, "not_in": ["none"]}, "All", "all"),
        (str | None, {"strip": True}, None, None),
        (Colour, {"strip": True, "lower": True}, " RED ", Colour.RED),
        (int, {"validate": lambda value: None}, 3, 3),
        (int, {"validators": [lambda value: value + 1, lambda value: value * 2]}, 3, 8),
        (str, {"convert": str.title}, "ab", "Ab"),
        (str, {"transform": len, "strip": True}, " ab ", 2),
        (Annotated[int, {"ge": 1}], {"le": 3}, 2, 2),
        (list[Annotated[int, Field(ge=1)]], {}, [1], [1]),
    ],
)
def test_rules_change_a_value_and_then_check_it(
    kind: Any, rules: Mapping[str, Any], value: object, expected: object
) -> None:
    assert serde.parse(ruled(kind, rules), {"value": value}).value == expected


def refuse(value: object) -> None:
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("kind", "rules", "value", "words"),
    [
        (str, {"strip": True, "min_length": 1}, "  ", 'should have at least 1 character (got "")'),
        (str, {"in": ["a", "b"]}, "c", 'should be one of "a", "b" (got "c")'),
        (int, {"in": [1, 2]}, True, "expected an integer (got true)"),
        (object, {"in": [1, 2]}, True, "should be one of 1, 2 (got true)"),
        (str, {"in": ["{a}"]}, "c", 'should be one of "{a}" (got "c")'),
        (str, {"not_in": ["a"], "lower": True}, "A", 'should be none of "a" (got "A")'),
        (int | str | None, {"ge": 3, "min_length": 2}, 2, "expected a string, or should be greater than or equal to 3"),
        (
            int | str | None,
            {"ge": 3, "min_length": 2},
            "a",
            "expected an integer, or should have at least 2 characters",
        ),
        (Sequence[int], {"minItems": 2}, [1], "should have at least 2 items"),
        (date, {"ge": date(2026, 1, 1)}, "2025-01-01", "should be greater than or equal to 2026-01-01"),
        (int, {"validate": refuse}, 1, "not today"),
        (int, {"validate": lambda value: 1 // (value - 1)}, 1, "ZeroDivisionError: "),
        (int, {"convert": lambda value: value.lower()}, 1, "AttributeError: "),
        (Annotated[int, {"ge": 1}], {}, 0, "should be greater than or equal to 1"),
    ],
)
def test_what_a_rule_refuses_is_told_in_its_words(
    kind: Any, rules: Mapping[str, Any], value: object, words: str
) -> None:
    assert message(ruled(kind, rules), {"value": value}).startswith(f"value: {words}")


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        (str, {"ge": 1}),
        (bool, {"ge": 1}),
        (int | None, {"min_length": 1}),
        (Path, {"pattern": "a"}),
        (Node, {"min_length": 1}),
        (Colour, {"minLength": 1}),
        (list[str], {"strip": True}),
        (date, {"ge": 3}),
        (list[Annotated[int, {"ge": 1}]], {}),
    ],
)
def test_a_rule_that_says_nothing_about_its_type_is_refused_beforehand(kind: Any, rules: Mapping[str, Any]) -> None:
    for use in (serde.decoder, serde.schema):
        with pytest.raises(TypeError, match="Ruled"):
            use(ruled(kind, rules))


def test_rules_in_an_annotation_that_is_text_are_found() -> None:
    @dataclass
    class Local:
        value: Annotated[Level | int, {"in": [1, 7]}] = 1

    assert message(Local, {"value": 8}).startswith("value: should be one of 1, 7")


def test_a_default_is_not_held_to_the_rules() -> None:
    assert serde.parse(ruled(str, {"strip": True, "min_length": 9}, default=" a"), {}).value == " a"


def test_a_bound_of_a_union_is_in_the_schema_of_the_members_that_have_one() -> None:
    found: Any = serde.schema(ruled(int | str | None, {"ge": 3, "maxLength": 2}))
    bounded = [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 2}, {"type": "null"}]
    assert found["properties"]["value"] == {"anyOf": bounded}


def test_a_class_checks_itself_when_it_is_whole() -> None:
    @dataclass
    class Span:
        start: int
        end: int
        calls: list[str] = field(default_factory=list, init=False)

        def __validate__(self) -> None:
            self.calls.append("validate")
            if self.end < self.start:
                raise ValueError("end is before start")

        def __post_validate__(self) -> None:
            self.calls.append("post")

    assert serde.parse(Span, {"start": 1, "end": 2}).calls == ["validate", "post"]
    assert message(Span, {"start": 2, "end": 1}) == "end is before start"
    assert message(holder(list[Span]), {"value": [{"start": 2, "end": 1}]}) == "value[0]: end is before start"
    with pytest.raises(ValueError, match="end is before start"):
        serde.clone(Span(1, 2), end=0)


def camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


@dataclass(frozen=True)
class Person:
    __computed__ = ("full_name",)
    first_name: str
    last_name: str = field(metadata={"alias": "surname"})
    best_friend: Person | None = None

    @property
    def full_name(self) -> str:
        return f"{self.first_name} {self.last_name}"


def test_keys_can_be_made_of_names_in_one_way_for_all() -> None:
    friend = Person("Ann", "Lee")
    value = Person("Bo", "Ray", friend)
    dumped = serde.dump(value, alias_generator=camel_case, exclude_none=True)
    assert dumped == {
        "firstName": "Bo",
        "surname": "Ray",
        "bestFriend": {"firstName": "Ann", "surname": "Lee"},
    }
    assert serde.parse(Person, dumped, alias_generator=camel_case) == value
    found = serde.schema(Person, alias_generator=camel_case, extra="forbid")
    assert Draft202012Validator(found).is_valid(dumped)
    assert serde.dump(friend, by_alias=False) == {"first_name": "Ann", "last_name": "Lee", "best_friend": None}


def test_computed_attributes_are_dumped_where_asked_for_at_every_depth() -> None:
    dumped: Any = serde.dump([Person("Bo", "Ray", Person("Ann", "Lee"))], computed=True)
    assert dumped[0]["full_name"] == "Bo Ray"
    assert dumped[0]["best_friend"]["full_name"] == "Ann Lee"
    assert "full_name" not in json.dumps(serde.dump(Person("Bo", "Ray")))
    assert serde.parse(Person, dumped[0]) == Person("Bo", "Ray", Person("Ann", "Lee"))


def test_an_alias_is_the_key_in_json_and_the_name_is_taken_too() -> None:
    @dataclass
    class Import:
        source: str = field(metadata={"alias": "from"})
        _: KW_ONLY
        count: int = 1

    assert serde.parse(Import, {"from": "a"}) == serde.parse(Import, {"source": "a"}) == Import("a")
    assert serde.dump(Import("a")) == {"from": "a", "count": 1}
    assert serde.schema(Import)["required"] == ["from"]
    assert message(Import, {"fromm": "a"}).endswith('did you mean "from"? (known: from, count)')
    assert message(Import, {"from": "a", "source": "b"}) == 'source: the same as "from": give one of them'


def test_a_decoder_forbids_extra_keys_unless_told_otherwise() -> None:
    decode = serde.decoder(Node)
    assert decode({"name": "a"}) == decode('{"name": "a"}') == decode(b'{"name": "a"}') == Node("a")
    with pytest.raises(ValueError, match="nmae: unknown key"):
        decode({"name": "a", "nmae": "b"})
    assert serde.decoder(Node, extra="ignore")({"name": "a", "nmae": "b"}) == Node("a")


# Schema


def test_the_schema_of_a_params_class_says_all_that_a_model_needs() -> None:
    assert serde.schema(EditFile, extra="forbid") == {
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "Path of the file."},
            "edits": {
                "type": "array",
                "items": {"$ref": "#/$defs/Edit"},
                "minItems": 1,
                "description": "Applied in order.",
            },
            "mode": {"type": "string", "enum": ["strict", "fuzzy"], "default": "strict"},
            "title": {
                "anyOf": [{"type": "string", "pattern": "^[a-z]+$", "maxLength": 20}, {"type": "null"}],
                "default": None,
            },
            "colour": {"$ref": "#/$defs/Colour", "default": "red"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "default": ["a", "b"]},
            "env": {"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
        },
        "required": ["file_path", "edits"],
        "additionalProperties": False,
        "$defs": {
            "Colour": {"type": "string", "enum": ["red", "dark-blue"]},
            "Edit": {
                "type": "object",
                "properties": {
                    "old": {"type": "string", "minLength": 1, "description": "The text that is replaced."},
                    "new": {"type": "string"},
                    "count": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": 100,
                        "default": 1,
                        "description": "How often `old` occurs.",
                    },
                },
                "required": ["old", "new"],
                "additionalProperties": False,
            },
        },
    }


def test_a_schema_is_open_where_extra_keys_are_ignored() -> None:
    assert '"additionalProperties": false' not in json.dumps(serde.schema(EditFile))


def test_a_schema_belongs_to_whoever_asked_for_it() -> None:
    properties: Any = serde.schema(Node)["properties"]
    properties.clear()
    assert serde.schema(Node)["properties"]


def test_a_recursive_schema_is_an_object_at_its_root() -> None:
    found: Any = serde.schema(Node, extra="forbid")
    assert found["type"] == "object"
    assert found["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert found["additionalProperties"] is found["$defs"]["Node"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tuple[int, str], {"prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}),
        (bytes, {"type": "string", "contentEncoding": "base64"}),
        (datetime, {"type": "string", "format": "date-time"}),
        (UUID, {"type": "string", "format": "uuid"}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Any, {}),
    ],
)
def test_types_are_described_in_the_words_of_json_schema(kind: Any, expected: Mapping[str, object]) -> None:
    properties: Any = serde.schema(holder(kind))["properties"]
    assert properties["value"].items() >= expected.items()


def test_titles_are_left_out_and_fields_of_that_name_are_not() -> None:
    cls = make_dataclass("Titled", [("title", str), ("properties", int)])
    assert serde.schema(cls)["properties"] == {"title": {"type": "string"}, "properties": {"type": "integer"}}


def test_a_default_is_written_as_it_would_be_dumped() -> None:
    @dataclass(frozen=True)
    class Book:
        title: str

    @dataclass
    class Defaults:
        blob: bytes = b"\xff"
        book: Book = Book("a")

    properties: Any = serde.schema(Defaults)["properties"]
    assert (properties["blob"]["default"], properties["book"]["default"]) == ("/w==", {"title": "a"})


def test_a_default_without_a_json_form_is_left_out() -> None:
    cls = make_dataclass("Odd", [("value", object, field(default=object()))])
    assert serde.schema(cls) == {"type": "object", "properties": {"value": {}}}


def test_a_list_of_dataclasses_has_a_schema_too() -> None:
    found = serde.schema(list[Edit], extra="forbid")
    assert (found["type"], found["items"]) == ("array", {"$ref": "#/$defs/Edit"})


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(TypeError, match="Holder"):
        serde.schema(holder(type(sys)))


# Dump


@dataclass
class Wide:
    a: object = None
    b: object = None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (Level.HIGH, 2),
        (Colour.RED, "red"),
        (Mark.TEXT, "text"),
        (b"\x00\xff", "AP8="),
        (bytearray(b"\x00\xff"), "AP8="),
        (memoryview(b"\x00\xff"), "AP8="),
        (date(2026, 11, 30), "2026-11-30"),
        (datetime(2026, 11, 30, 12, 30, tzinfo=UTC), "2026-11-30T12:30:00+00:00"),
        (time(12, 30), "12:30:00"),
        (timedelta(days=-1, seconds=1), "-P0DT86399.000000S"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.10"), "1.10"),
        (Path("a/b"), "a/b"),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        ({1, "a", None}, ["a", 1, None]),
        (frozenset({Edit("b", "c"), Edit("a", "c")}), [{"old": o, "new": "c", "count": 1} for o in "ab"]),
        (Point(1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        ({1: "a", None: "b", Level.HIGH: "c", 1.5: "d"}, {"1": "a", "null": "b", "2": "c", "1.5": "d"}),
        ({UUID(int=1): 1, Colour.RED: 2}, {"00000000-0000-0000-0000-000000000001": 1, "red": 2}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        (math.nan, "NaN"),
        ([math.inf, -math.inf], ["Infinity", "-Infinity"]),
        ("a\udcffä", "a\\udcffä"),
        ({"\udcff": Path("\udcff")}, {"\\udcff": "\\udcff"}),
        (Node("a", [Node("b")]), {"name": "a", "children": [{"name": "b", "children": []}]}),
        (Wide(a=Wide(b=Edit("x", "y"))), {"a": {"a": None, "b": {"old": "x", "new": "y", "count": 1}}, "b": None}),
    ],
)
def test_a_dump_is_json_at_every_depth(value: object, expected: object) -> None:
    dumped = serde.dump(value)
    assert dumped == expected
    assert serde.dump({"in": [value]}) == {"in": [expected]}
    assert json.loads(json.dumps(dumped, allow_nan=False, ensure_ascii=False).encode()) == expected


def test_excluding_none_leaves_out_fields_and_no_other_data() -> None:
    value = Wide(a=[None, Wide(b=1)], b={"key": None})
    assert serde.dump(value, exclude_none=True) == {"a": [None, {"b": 1}], "b": {"key": None}}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (object(), TypeError, r"^the type object has no JSON form"),
        (Wide(a=[0, {"k": object()}]), TypeError, r"^a\[1\]\.k: the type object has no JSON form"),
        (Wide(b=(n for n in "ab")), TypeError, r"^b: the type generator has no JSON form"),
        (Wide(a=Wide), TypeError, r"^a: the type type has no JSON form"),
        ({"a": {(1, 2): 3}}, TypeError, r"^a: the type tuple cannot be a key in JSON"),
        ({"a": {1: 2, "1": 3}}, ValueError, r"^a: two keys become the same text"),
    ],
)
def test_what_has_no_json_form_is_named_with_its_place(value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        serde.dump(value)


def test_an_object_that_contains_itself_is_refused() -> None:
    node = Node("a")
    node.children.append(node)
    with pytest.raises(ValueError, match=r"^children\[0\].*contains itself") as caught:
        serde.dump(node)
    assert len(str(caught.value)) < 500


# Clone


def test_a_clone_is_checked_and_keeps_what_its_fields_hold() -> None:
    marker, edit = object(), Edit("a", "b")
    original = Wide(a=marker, b=edit)
    copy = serde.clone(original, b=[edit])
    assert copy is not original
    assert copy.a is marker
    assert copy.b == [edit]
    assert original.b is edit
    assert serde.clone(EditFile("a", (edit,)), mode="fuzzy").edits[0] is edit


def test_a_clone_takes_no_change_that_does_not_fit() -> None:
    edit = Edit("a", "b")
    with pytest.raises(ValueError, match="count: should be greater than or equal to 1"):
        serde.clone(edit, count=0)
    with pytest.raises(ValueError, match=r'count: expected an integer \(got "3"\)'):
        serde.clone(edit, count="3")
    with pytest.raises(ValueError, match='cuont: unknown key; did you mean "count"'):
        serde.clone(edit, cuont=1)
    with pytest.raises(TypeError, match="cannot clone int"):
        serde.clone(3)


# Properties


@dataclass(frozen=True)
class Kind:
    """A type, a strategy of its values, and the rules of a field that has it."""

    type: Any
    values: st.SearchStrategy[Any]
    rules: Mapping[str, Any] = field(default_factory=dict)


JSON_LEAVES = (
    Kind(int, st.integers()),
    Kind(float, st.floats(allow_nan=False, allow_infinity=False)),
    Kind(bool, st.booleans()),
    Kind(str, st.text(max_size=5)),
    Kind(type(None), st.none()),
    Kind(Literal["a", "3", 1, None], st.sampled_from(["a", "3", 1, None])),
    Kind(Colour, st.sampled_from(Colour)),
    Kind(Level, st.sampled_from(Level)),
    Kind(Mark, st.sampled_from(Mark)),
    Kind(int | str, st.integers() | st.text(max_size=3)),
    Kind(Annotated[str, "x"] | bool, st.text(max_size=3) | st.booleans()),
    Kind(Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    Kind(Point, st.builds(Point, st.integers(), st.integers())),
)
UNHASHABLE = (
    Kind(dict[int, bool], st.dictionaries(st.integers(), st.booleans(), max_size=2)),
    Kind(Box[int] | Node, st.builds(Box, st.integers()) | st.builds(Node, st.text(max_size=3))),
)
LETTERS = st.text("abc", min_size=1, max_size=3)
RULED = (
    Kind(int, st.integers(1, 9), {"ge": 1, "lt": 10}),
    Kind(int | None, st.none() | st.integers(-1, 1).map(lambda n: 2 * n), {"multiple_of": 2, "maximum": 2}),
    Kind(float, st.integers(-3, 3).map(lambda n: n / 2), {"multipleOf": 0.5, "gt": -2}),
    Kind(int, st.sampled_from([1, 2]), {"in": [1, 2]}),
    Kind(int | bool, st.sampled_from([0, 1, False]), {"not_in": [2, True]}),
    Kind(str, LETTERS, {"pattern": "^[a-z]+$", "maxLength": 3}),
    Kind(str | None, st.none() | LETTERS, {"minLength": 1, "not_in": ["red"]}),
    Kind(int | str | None, st.none() | st.integers(1, 3) | LETTERS, {"ge": 1, "min_length": 1, "max_length": 3}),
    Kind(Sequence[str], st.lists(LETTERS, min_size=1, max_size=2), {"min_length": 1, "maxItems": 2}),
    Kind(dict[str, int], st.dictionaries(LETTERS, st.integers(), max_size=1), {"max_length": 1}),
)
OTHER_LEAVES = (
    Kind(bytes, st.binary(max_size=5)),
    Kind(UUID, st.uuids()),
    Kind(date, st.dates()),
    Kind(datetime, st.datetimes(timezones=st.sampled_from([None, UTC]))),
    Kind(time, st.times()),
    Kind(timedelta, st.timedeltas()),
    Kind(Path, st.text("ab./ ", max_size=5).map(Path)),
)
KEYS = (
    Kind(str, st.text(max_size=3)),
    Kind(int, st.integers()),
    Kind(UUID, st.uuids()),
    Kind(date, st.dates()),
    Kind(Colour, st.sampled_from(Colour)),
    Kind(Level, st.sampled_from(Level)),
)


def dataclass_of(kinds: Sequence[Kind], optional: bool) -> Kind:
    names = [f"field_{number}" for number in range(len(kinds))]
    default = {"default": None} if optional else {}
    types = [kind.type | None if optional else kind.type for kind in kinds]
    fields = [
        (name, each, field(**default, metadata=kind.rules))
        for name, each, kind in zip(names, types, kinds, strict=True)
    ]
    cls = make_dataclass(f"Made{len(kinds)}", fields, frozen=True)
    return Kind(cls, st.builds(cls, **{name: kind.values for name, kind in zip(names, kinds, strict=True)}))


def containers(kinds: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return st.one_of(
        kinds.map(lambda k: Kind(list[k.type], st.lists(k.values, max_size=3))),
        kinds.map(lambda k: Kind(tuple[k.type, ...], st.lists(k.values, max_size=3).map(tuple))),
        st.tuples(kinds, kinds).map(lambda p: Kind(tuple[p[0].type, p[1].type], st.tuples(p[0].values, p[1].values))),
        kinds.map(lambda k: Kind(dict[str, k.type], st.dictionaries(st.text(max_size=3), k.values, max_size=3))),
        kinds.map(lambda k: Kind(k.type | None, st.none() | k.values)),
        st.builds(dataclass_of, st.lists(kinds | st.sampled_from(RULED), max_size=3), st.booleans()),
    )


def frozen_containers() -> st.SearchStrategy[Kind]:
    leaves = st.sampled_from(JSON_LEAVES + OTHER_LEAVES)
    keyed = st.tuples(st.sampled_from(KEYS), leaves)
    return st.one_of(
        leaves.map(lambda k: Kind(frozenset[k.type], st.frozensets(k.values, max_size=3))),
        keyed.map(lambda p: Kind(dict[p[0].type, p[1].type], st.dictionaries(p[0].values, p[1].values, max_size=3))),
    )


def of_dataclass(kinds: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
    return st.builds(dataclass_of, st.lists(kinds | st.sampled_from(RULED), min_size=1, max_size=3), st.just(False))


every_kind = st.recursive(
    st.sampled_from(JSON_LEAVES + UNHASHABLE + OTHER_LEAVES) | frozen_containers(), containers, max_leaves=5
)
json_kind = st.recursive(st.sampled_from(JSON_LEAVES + UNHASHABLE), containers, max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=of_dataclass(every_kind), coerce=st.booleans())
def test_what_was_dumped_parses_to_what_it_was(data: st.DataObject, kind: Kind, coerce: bool) -> None:
    value = data.draw(kind.values)
    dumped = serde.dump(value)
    assert serde.parse(kind.type, dumped, extra="forbid", coerce=coerce) == value
    assert serde.parse(kind.type, json.dumps(dumped, allow_nan=False), extra="forbid", coerce=coerce) == value
    assert serde.clone(value) == value


any_json = st.recursive(
    st.integers(-3, 3) | st.sampled_from([None, True, False, 0.5, -1.5, "", "a", "red", "3", "RED"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "3", "item", "name", "field_0", "field_1"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=of_dataclass(json_kind))
def test_a_schema_admits_exactly_what_parses_without_coercion(data: st.DataObject, kind: Kind) -> None:
    value = data.draw(any_json | kind.values.map(serde.dump))
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        value[data.draw(st.sampled_from(list(value)))] = data.draw(any_json)
    found = serde.schema(kind.type, extra="forbid")
    Draft202012Validator.check_schema(found)
    if Draft202012Validator(found).is_valid(value):
        serde.parse(kind.type, json.dumps(value), extra="forbid", coerce=False)
    else:
        with pytest.raises(ValueError):
            serde.parse(kind.type, json.dumps(value), extra="forbid", coerce=False)


TEXT_RULES = st.fixed_dictionaries(
    {},
    optional={
        "strip": st.booleans(),
        "lower": st.booleans(),
        "min_length": st.integers(0, 2),
        "max_length": st.integers(2, 3),
        "pattern": st.sampled_from(["^[a-z]*$", "a"]),
        "in": st.just(["a", "ab", "B"]),
        "not_in": st.just(["b"]),
    },
)


@settings(max_examples=300, deadline=None)
@given(rules=TEXT_RULES, value=st.text("aAbB ", max_size=4))
def test_text_is_taken_if_the_schema_admits_what_the_rules_make_of_it(rules: Mapping[str, Any], value: str) -> None:
    cls = ruled(str, rules)
    made = value.strip() if rules.get("strip") else value
    made = made.lower() if rules.get("lower") else made
    if Draft202012Validator(serde.schema(cls)).is_valid({"value": made}):
        assert serde.parse(cls, {"value": value}).value == made
    else:
        with pytest.raises(ValueError, match="^value: "):
            serde.parse(cls, {"value": value})


# Cost


def test_importing_serde_does_not_load_pydantic() -> None:
    code = "import sys, ringfence.serde; print([name for name in sys.modules if name.startswith('pydantic')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
