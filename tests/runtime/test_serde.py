"""Dataclasses from what a model wrote and back, their schemas, and the error messages for what did not fit."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import Field, computed_field

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


@dataclass
class Wide:
    a: object = None
    b: object = None


EDIT = {"old": "a", "new": "b"}


def holder(kind: Any) -> type[Any]:
    """A dataclass with one field, `value`, of that type."""
    return make_dataclass("Holder", [("value", kind)], frozen=True)


def parsed(kind: Any, value: object, *, coerce: bool = True) -> Any:
    return serde.parse(holder(kind), {"value": value}, coerce=coerce).value


def message(cls: type[Any], data: Any) -> str:
    with pytest.raises(ValueError) as caught:
        serde.parse(cls, data, extra="forbid")
    return str(caught.value)


# Parse


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, "3", 3),
        (int, "-3", -3),
        (int, 3.0, 3),
        (float, "1.5", 1.5),
        (float, "-1e3", -1000.0),
        (bool, "True", True),
        (str | None, "", ""),
        (int | None, "3", 3),
        (bytes, "AP8=", b"\x00\xff"),
        (bytes, "-_8=", b"\xfb\xff"),
        (bytes, b"raw", b"raw"),
        (Path, Path("a/b"), Path("a/b")),
        (timedelta, "PT90S", timedelta(seconds=90)),
        (Colour, "dark-blue", Colour.DARK_BLUE),
        (Colour, Colour.RED, Colour.RED),
        (Mark, "text", Mark.TEXT),
        (Literal["a", 1, None], 1, 1),
        (list[int], [1, "2"], [1, 2]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, str], [1, "2"], (1, "2")),
        (frozenset[int], ["1", 2], frozenset({1, 2})),
        (Sequence[int], [1], [1]),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Point, [1, 2], Point(1, 2)),
        (object, {"a": [True, "1", None]}, {"a": [True, "1", None]}),
        (Node, {"name": "a", "children": [{"name": "b"}]}, Node("a", [Node("b")])),
        (Node, Node("a"), Node("a")),
        (Box[int], {"item": "3", "more": [4]}, Box(3, (4,))),
        (int | str, "3", "3"),
        (list[int] | int, "3", 3),
        (Edit | Node, {"name": "a"}, Node("a")),
    ],
)
def test_a_value_becomes_what_its_field_declares(kind: Any, value: object, expected: object) -> None:
    result = parsed(kind, value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((int, each) for each in (True, 3.9, "3.0", "1_000", "", None, [3], math.nan, "9" * 5000)),
        *((float, each) for each in (True, "nan", "Infinity", "", math.inf, "1e999")),
        *((bool, each) for each in (2, 1.0, "y", "", None)),
        *((str, each) for each in (3, True, None, ["a"], {})),
        *((bytes, each) for each in ("not base64!", 3)),
        *((date, each) for each in (1, "2026-02-30", "", True)),
        *((Colour, each) for each in ("RED", "green", 1, None)),
        *((Level, each) for each in (3, "2", None)),
        *((Literal["a", 1], each) for each in ("A", "1", None)),
        *((list[str], each) for each in ("abc", {"a": "b"}, None, [1])),
        *((tuple[int, str], each) for each in ([1], [1, "a", "b"], ["a", 1])),
        *((Sequence[str], each) for each in ("abc", 3)),
        *((dict[str, int], each) for each in ([["a", 1]], "a", {"a": "b"})),
        (dict[int, int], {"a": 1}),
        *((Node, each) for each in ("a", [["name", "a"]])),
        (Box[int], {"item": "x"}),
        (list[Annotated[int, Field(ge=1)]], [0]),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(kind: Any, value: object) -> None:
    with pytest.raises(ValueError):
        parsed(kind, value)


@pytest.mark.parametrize(("kind", "value"), [(int, "3"), (int, 3.0), (float, "1.5"), (bool, "true")])
def test_without_coercion_text_is_no_number_and_no_boolean(kind: Any, value: object) -> None:
    with pytest.raises(ValueError, match="value: expected"):
        parsed(kind, value, coerce=False)


def test_json_text_is_parsed_like_the_mapping_it_holds() -> None:
    data = {"file_path": "ä", "edits": [{"old": "a", "new": "b", "count": "2"}]}
    expected = serde.parse(EditFile, data)
    assert serde.parse(EditFile, MappingProxyType(data)) == expected
    assert serde.parse(EditFile, json.dumps(data)) == expected
    assert serde.parse(EditFile, json.dumps(data, ensure_ascii=False).encode()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{'name': 'a'}",
        '{"name": "a"} x',
        '{"name": NaN}',
        '{"name": "a", "name": "b"}',
        '{"name": "a", "children": [{"x": 1, "y": 2, "y": 3}]}',
        "[]",
        "null",
        "[" * 100_000,
        b'{"name": "\xff"}',
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        serde.read_json(text)
    with pytest.raises(ValueError):
        serde.parse(Node, text)


@dataclass(frozen=True)
class Optional:
    text: str
    number: int = 3
    flag: bool = False
    words: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    either: int | str = "x"
    named: int = field(default=5, metadata={"alias": "Named"})
    maybe: int | None = 7
    edits: tuple[Edit, ...] = ()


@pytest.mark.parametrize("key", ["number", "flag", "words", "env", "either", "Named", "edits"])
def test_null_for_an_optional_key_is_a_key_that_is_left_out(key: str) -> None:
    assert serde.parse(Optional, {"text": "a", key: None}) == Optional("a")


def test_every_null_at_every_depth_is_left_out() -> None:
    data = {"text": "a", "number": None, "words": None, "edits": [{"old": "a", "new": "b", "count": None}]}
    assert serde.parse(Optional, data) == Optional("a", edits=(Edit("a", "b"),))
    assert serde.parse(Optional, json.dumps(data)) == Optional("a", edits=(Edit("a", "b"),))


def test_null_stays_where_it_is_admitted_and_is_refused_where_a_value_is_required() -> None:
    assert serde.parse(Optional, {"text": "a", "maybe": None}) == Optional("a", maybe=None)
    for data in ({"text": None}, {"text": "a", "words": [None]}, {"text": "a", "env": {"a": None}}):
        with pytest.raises(ValueError, match=r"expected a valid string \(got null\)"):
            serde.parse(Optional, data)
    with pytest.raises(ValueError, match="got null"):
        serde.parse(Optional, {"text": "a", "number": None}, coerce=False)


@pytest.mark.parametrize("cls", [int, list[Node], Edit("a", "b"), None, "Node"])
def test_only_dataclasses_are_parsed(cls: Any) -> None:
    with pytest.raises(TypeError, match="expected a dataclass, got"):
        serde.parse(cls, {})


@pytest.mark.parametrize("data", [None, 3, ["name"], Node("a")])
def test_only_mappings_and_json_are_parsed(data: Any) -> None:
    with pytest.raises(TypeError, match="expected a mapping or the text of a JSON object, got"):
        serde.parse(Node, data)


def test_a_decoder_forbids_extra_keys_unless_told_otherwise() -> None:
    decode = serde.decoder(Node)
    assert decode({"name": "a"}) == decode('{"name": "a"}') == decode(b'{"name": "a"}') == Node("a")
    with pytest.raises(ValueError, match="nmae: unknown key"):
        decode({"name": "a", "nmae": "b"})
    assert serde.decoder(Node, extra="ignore")({"name": "a", "nmae": "b"}) == Node("a")


def test_parsing_keeps_no_class_alive() -> None:
    cls = make_dataclass("Local", [("value", int)])
    serde.parse(cls, {"value": 1})
    serde.schema(cls)
    serde.dump(cls(1))
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


# Error messages


@dataclass(frozen=True)
class Deep:
    one: Edit
    many: tuple[Edit, ...] = ()
    by_name: Mapping[str, Edit] = field(default_factory=dict)
    maybe: Edit | None = None
    either: Edit | list[Edit] | None = None


WRONG = {"old": "a", "new": "b", "cuont": 1}


@pytest.mark.parametrize(
    ("data", "where", "near", "known"),
    [
        ({"one": EDIT, "oen": 1}, "oen", "one", "one, many, by_name, maybe, either"),
        ({"one": WRONG}, "one.cuont", "count", "old, new, count"),
        ({"one": EDIT, "many": [EDIT, WRONG]}, "many[1].cuont", "count", "old, new, count"),
        ({"one": EDIT, "by_name": {"x": EDIT, "y z": WRONG}}, 'by_name["y z"].cuont', "count", "old, new, count"),
        ({"one": EDIT, "maybe": WRONG}, "maybe.cuont", "count", "old, new, count"),
        ({"one": EDIT, "either": [WRONG]}, "either[0].cuont", "count", "old, new, count"),
    ],
)
def test_extra_keys_are_named_or_dropped_at_every_depth(
    data: Mapping[str, object], where: str, near: str, known: str
) -> None:
    assert f'{where}: unknown key; did you mean "{near}"? (known: {known})' in message(Deep, data)
    assert "cuont" not in json.dumps(serde.dump(serde.parse(Deep, data)))


def test_a_field_that_is_not_of_the_constructor_is_no_key() -> None:
    data = {"file_path": "a", "edits": [EDIT], "started": 5}
    assert serde.parse(EditFile, data).started == 0
    assert "started: unknown key" in message(EditFile, data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "file_path: Field required; edits: Field required"),
        ({"file_path": 3, "edits": [EDIT]}, "file_path: expected a valid string (got 3)"),
        ({"file_path": "a", "edits": "x"}, 'edits: expected a valid array (got "x")'),
        ({"file_path": "a", "edits": [EDIT], "mode": "x"}, "mode: expected 'strict' or 'fuzzy' (got \"x\")"),
        ({"file_path": "a", "edits": [EDIT], "env": {"K": 1}}, "env.K: expected a valid string (got 1)"),
        (
            {"file_path": "a", "edits": [EDIT, {"old": "c", "new": None, "count": "many"}]},
            'edits[1].new: expected a valid string (got null); edits[1].count: expected a valid integer (got "many")',
        ),
        (
            {"file_path": "a", "edits": [EDIT], "title": "A"},
            "title: String should match pattern '^[a-z]+$' (got \"A\")",
        ),
    ],
)
def test_a_message_has_the_place_the_problem_and_the_value(data: Mapping[str, object], expected: str) -> None:
    assert message(EditFile, data) == expected


def test_a_message_leaves_out_which_member_of_a_union_it_is_about() -> None:
    found = message(holder(int | list[str]), {"value": [1]})
    assert found == "value: expected a valid integer (got [1]); value[0]: expected a valid string (got 1)"


def test_what_a_class_itself_refuses_is_described_in_its_words() -> None:
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
        {"file_path": ["x" * 100_000], "edits": ["y" * 100_000] * 100},
        {"k" * 100_000: 1},
        {f"key{n}": n for n in range(10_000)},
        {"file_path": "a", "edits": [{"old": "a"}] * 50},
    ],
)
def test_messages_stay_short_whatever_came(data: Mapping[str, object]) -> None:
    assert len(message(EditFile, data)) < 6000


def test_messages_can_be_encoded_whatever_came() -> None:
    text = json.dumps({"file_path": "a", "edits": "\udcff", "mode": "ä\udcff", "env": {"\ud800": 1}})
    assert message(EditFile, text).encode()
    assert message(EditFile, {"\ud800": 1}).encode()


def test_what_is_nested_too_deeply_is_refused() -> None:
    data: dict[str, object] = {"name": "leaf"}
    for _ in range(10_000):
        data = {"name": "a", "children": [data]}
    with pytest.raises(ValueError):
        serde.parse(Node, data)


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


@pytest.mark.parametrize("kind", [type(sys), list[memoryview], Annotated[str, Field(pattern="(?=a)")]])
def test_a_type_that_cannot_be_parsed_is_refused_beforehand(kind: Any) -> None:
    with pytest.raises(TypeError, match="Holder cannot be parsed"):
        serde.decoder(holder(kind))


def test_an_alias_is_the_key_in_json_and_the_name_is_taken_too() -> None:
    @dataclass
    class Import:
        source: str = field(metadata={"alias": "from"})
        count: int = 1

    assert serde.parse(Import, {"from": "a"}) == serde.parse(Import, {"source": "a"}) == Import("a")
    assert serde.dump(Import("a")) == {"from": "a", "count": 1}
    assert serde.schema(Import)["required"] == ["from"]
    assert message(Import, {"fromm": "a"}).endswith('did you mean "from"? (known: from, count)')


def test_dataclasses_of_pydantic_keep_their_aliases_and_computed_fields() -> None:
    @pydantic.dataclasses.dataclass
    class Person:
        first: str = Field(alias="firstName")
        last: str = ""

        @computed_field
        @property
        def name(self) -> str:
            return f"{self.first} {self.last}"

    person = serde.parse(Person, {"firstName": "Ann", "last": "Lee"}, extra="forbid")
    assert serde.dump([person]) == [{"firstName": "Ann", "last": "Lee", "name": "Ann Lee"}]
    assert serde.schema(Person)["required"] == ["firstName"]


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
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
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


def test_titles_are_left_out_and_fields_of_that_name_are_not() -> None:
    cls = make_dataclass("Titled", [("title", str), ("properties", int)])
    assert serde.schema(cls)["properties"] == {"title": {"type": "string"}, "properties": {"type": "integer"}}


def test_a_default_without_a_json_form_is_left_out() -> None:
    cls = make_dataclass("Odd", [("value", object, field(default=object()))])
    assert serde.schema(cls) == {"type": "object", "properties": {"value": {}}}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (list[Edit], {"type": "array", "items": {"$ref": "#/$defs/Edit"}}),
        (Mapping[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (str, {"type": "string"}),
    ],
)
def test_other_types_have_a_schema_too(kind: Any, expected: Mapping[str, object]) -> None:
    assert serde.schema(kind, extra="forbid").items() >= expected.items()


# Dump


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (Level.HIGH, 2),
        (Colour.RED, "red"),
        (b"\x00\xff", "AP8="),
        (date(2026, 11, 30), "2026-11-30"),
        (datetime(2026, 11, 30, 12, 30, tzinfo=UTC), "2026-11-30T12:30:00+00:00"),
        (timedelta(days=-1, seconds=1), "-P0DT86399.000000S"),
        ({3, 10, 2}, [2, 3, 10]),
        ({1, "a", None}, ["a", 1, None]),
        (frozenset({Edit("b", "c"), Edit("a", "c")}), [{"old": o, "new": "c", "count": 1} for o in "ab"]),
        (Point(1, 2), [1, 2]),
        ({1: "a", None: "b", Level.HIGH: "c"}, {"1": "a", "null": "b", "2": "c"}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        ([math.nan, math.inf, -math.inf], ["NaN", "Infinity", "-Infinity"]),
        ({"\udcff": Path("\udcff")}, {"\\udcff": "\\udcff"}),
        (Node("a", [Node("b")]), {"name": "a", "children": [{"name": "b", "children": []}]}),
        (Wide(a=Wide(b=Edit("x", "y"))), {"a": {"a": None, "b": {"old": "x", "new": "y", "count": 1}}, "b": None}),
    ],
)
def test_a_dump_is_json_at_every_depth(value: object, expected: object) -> None:
    assert serde.dump(value) == expected
    assert serde.dump({"in": [value]}) == {"in": [expected]}
    assert json.loads(json.dumps(serde.dump(value), allow_nan=False, ensure_ascii=False).encode()) == expected


def test_excluding_none_leaves_out_fields_and_no_other_data() -> None:
    value = Wide(a=[None, Wide(b=1)], b={"key": None})
    assert serde.dump(value, exclude_none=True) == {"a": [None, {"b": 1}], "b": {"key": None}}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (Wide(a=[0, {"k": object()}]), TypeError, r"^a\[1\]\.k: the type object has no JSON form"),
        ({"a": {(1, 2): 3}}, TypeError, r"^a: the type tuple cannot be a key in JSON"),
        ({"a": {1: 2, "1": 3}}, ValueError, r"^a: two keys become the same text"),
    ],
)
def test_what_has_no_json_form_is_named_with_its_place(value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        serde.dump(value)
    assert json.dumps(serde.dump_any(value))


def test_an_object_that_contains_itself_is_refused() -> None:
    node = Node("a")
    node.children.append(node)
    with pytest.raises(ValueError, match=r"^children\[0\].*contains itself") as caught:
        serde.dump(node)
    assert len(str(caught.value)) < 500
    assert serde.dump_any(node) == {"name": "a", "children": ["<Node again>"]}


# Properties


VALUES: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=5),
    int | None: st.none() | st.integers(),
    Literal["a", "3"]: st.sampled_from(["a", "3"]),
    Colour: st.sampled_from(Colour),
    Edit: st.builds(Edit, st.text(min_size=1, max_size=3), st.text(max_size=3), st.integers(1, 100)),
    list[int]: st.lists(st.integers(), max_size=3),
    dict[str, bool]: st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2),
    tuple[str, int]: st.tuples(st.text(max_size=3), st.integers()),
}
OTHER_VALUES: Mapping[Any, st.SearchStrategy[Any]] = {
    Level: st.sampled_from(Level),  # pydantic takes True for 1
    bytes: st.binary(max_size=5),
    UUID: st.uuids(),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    date: st.dates(),
    datetime: st.datetimes(timezones=st.sampled_from([None, UTC])),
    time: st.times(),
    timedelta: st.timedeltas(),
    Path: st.text("ab./ ", max_size=5).map(Path),
    frozenset[str]: st.frozensets(st.text(max_size=3), max_size=3),
    dict[int, str]: st.dictionaries(st.integers(), st.text(max_size=3), max_size=2),
}
EVERY_VALUE = {**VALUES, **OTHER_VALUES}
HOLDERS = {kind: holder(kind) for kind in EVERY_VALUE}


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(EVERY_VALUE)), coerce=st.booleans())
def test_what_was_dumped_parses_to_what_it_was(data: st.DataObject, kind: Any, coerce: bool) -> None:
    value = HOLDERS[kind](data.draw(EVERY_VALUE[kind]))
    dumped = serde.dump(value)
    assert serde.parse(HOLDERS[kind], dumped, extra="forbid", coerce=coerce) == value
    assert serde.parse(HOLDERS[kind], json.dumps(dumped, allow_nan=False), extra="forbid", coerce=coerce) == value


any_json = st.recursive(
    st.integers(-3, 3) | st.sampled_from([None, True, False, 0.5, -1.5, "", "a", "red", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "old", "new"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(VALUES)))
def test_a_schema_admits_exactly_what_parses(data: st.DataObject, kind: Any) -> None:
    value = {"value": data.draw(any_json | VALUES[kind].map(serde.dump))}
    found = serde.schema(HOLDERS[kind], extra="forbid")
    Draft202012Validator.check_schema(found)
    if Draft202012Validator(found).is_valid(value):
        serde.parse(HOLDERS[kind], value, extra="forbid")
    else:
        with pytest.raises(ValueError):
            serde.parse(HOLDERS[kind], value, extra="forbid", coerce=False)


def test_importing_serde_does_not_load_pydantic() -> None:
    code = "import sys, ringfence.serde; print([name for name in sys.modules if name.startswith('pydantic')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
