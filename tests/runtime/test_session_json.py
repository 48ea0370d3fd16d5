"""Sessions as JSON: snapshots that come back whole or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ScriptedAdapter
from ringfence.errors import SnapshotRestoreError
from ringfence.prompt import MarkdownSection, PolicyState, Prompt, SectionVisibility, Tool, ToolContext, ToolResult
from ringfence.runtime import (
    PromptExecuted,
    Receipt,
    Session,
    SetVisibilityOverride,
    Snapshot,
    ToolInvoked,
)
from ringfence.runtime.policy import PathHashes
from ringfence.tagged import decode, encode, types_within
from ringfence_tools import Plan, PlanningToolsSection, SetupPlan

T = TypeVar("T")


class Colour(Enum):
    RED = "red"
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    name: str
    colour: Colour | None = None


@dataclass(frozen=True)
class Box(Generic[T]):
    held: T


@dataclass(frozen=True)
class Fact:
    """Fields whose types JSON does not have, and one that may hold anything."""

    anything: object = None
    inner: Inner | None = None
    boxes: tuple[Box[Inner], ...] = ()
    counted: int = field(default=0, init=False)


@dataclass(frozen=True)
class Line:
    text: str


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=10)
    | st.binary(max_size=10)
    | st.dates()
    | st.datetimes()
    | st.datetimes(timezones=st.just(UTC))
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.sampled_from(Colour)
    | st.builds(Inner, st.text(max_size=5), st.none() | st.sampled_from(Colour))
    | st.sampled_from([Path("/a/b"), PurePosixPath("c")])
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=3), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.builds(Box, inner)
        | st.builds(Fact, inner, boxes=st.lists(st.builds(Box, st.builds(Inner, st.text(max_size=3)))).map(tuple))
    ),
    max_leaves=8,
)
KNOWN = types_within([Fact, Colour])


@given(VALUES)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    text = json.dumps(encode(value))
    back = decode(json.loads(text), KNOWN)
    assert back == value
    assert type(back) is type(value)
    assert json.dumps(encode(back)) == text


def restored(session: Session, **options: Any) -> Session:
    twin = session.clone()
    text = session.snapshot(**options).to_json()
    twin.reset()
    twin.restore(Snapshot.from_json(text, types=twin.slice_types), preserve_logs=False)
    return twin


@given(st.lists(st.builds(Fact, VALUES), max_size=3))
def test_a_snapshot_comes_back_from_json(facts: list[Fact]) -> None:
    session = Session(tags={"run": "1"})
    session[Fact].seed(facts)
    assert restored(session)[Fact].all() == tuple(facts)
    snapshot = session.snapshot(tag="here")
    back = Snapshot.from_json(snapshot.to_json(), types=session.slice_types)
    assert back == snapshot
    assert (back.tag, back.created_at, back.tags["run"]) == ("here", snapshot.created_at, "1")
    assert back.to_json() == snapshot.to_json()


def test_what_the_runtime_and_the_tools_keep_comes_back() -> None:
    session = Session()
    PlanningToolsSection(session=session)
    session.dispatch(SetupPlan("fix", ("one", "two")))
    session.dispatch(SetVisibilityOverride(("a", "b.c"), SectionVisibility.FULL))
    hashes = PathHashes([("a.txt", "1"), ("\udcff", "2")])
    session[PolicyState].seed(PolicyState("p", frozenset({"t"}), hashes, "s"))
    twin = restored(session)
    assert twin[Plan].all() == session[Plan].all()
    assert twin.snapshot() == session.snapshot()
    assert twin[PolicyState].latest() == session[PolicyState].latest()


@dataclass(frozen=True)
class Paint:
    colour: Colour
    rooms: tuple[Inner, ...]


@dataclass(frozen=True)
class Painted:
    paint: object


def paint(params: Paint, *, context: ToolContext) -> ToolResult[Painted]:
    return ToolResult.ok(Painted(params))


def test_what_an_evaluation_has_logged_comes_back_with_the_types_of_its_session() -> None:
    session = Session()
    tool = Tool[Paint, Painted](name="paint", description="Paint.", handler=paint)
    prompt = Prompt[Inner](ns="t", key="t", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    arguments = {"colour": "red", "rooms": [{"name": "hall", "colour": 2}]}
    calls = [{"name": "paint", "arguments": arguments}, {"name": "paint", "arguments": "{"}, {"name": "nothing"}]
    ScriptedAdapter([{"tool_calls": calls}, {"text": '{"name": "done"}'}]).evaluate(prompt, session=session)
    snapshot = session.snapshot(include_all=True)
    back = Snapshot.from_json(snapshot.to_json(), types=session.slice_types)
    assert back == snapshot
    for kind in (ToolInvoked, Receipt, PromptExecuted, Painted):
        assert back.slices[kind] == session[kind].all() != ()


def test_the_json_is_the_same_whatever_the_order_in_which_slices_came() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    one, other = (Session(session_id=UUID(int=1), created_at=at) for _ in range(2))
    one.dispatch(Line("x"))
    one.dispatch(Fact(frozenset({"a", "b", "c"})))
    other.dispatch(Fact(frozenset({"c", "b", "a"})))
    other.dispatch(Line("x"))
    texts = [json.loads(session.snapshot().to_json()) | {"created_at": ""} for session in (one, other)]
    assert texts[0] == texts[1]
    assert [one["slice_type"] for one in texts[0]["slices"]] == sorted(one["slice_type"] for one in texts[0]["slices"])
    line = next(one for one in texts[0]["slices"] if one["slice_type"].endswith(":Line"))
    assert line["item_type"] == line["slice_type"]


def test_a_slice_of_several_types_comes_back() -> None:
    session = Session()
    session[Line].seed([Line("a")])
    session[Fact].seed(Fact(Line("in a field that says nothing")))
    assert restored(session)[Fact].latest() == Fact(Line("in a field that says nothing"))


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(("value", "error"), [(print, TypeError), (sys.stdout, TypeError), (ENDLESS, ValueError)])
def test_what_has_no_json_form_is_refused_with_its_slice(value: object, error: type[Exception]) -> None:
    session = Session()
    session.dispatch(Fact(value))
    with pytest.raises(error, match="Fact"):
        session.snapshot().to_json()


def tampered(change: Mapping[str, Any]) -> str:
    session = Session()
    session.dispatch(Line("x"))
    return json.dumps(json.loads(session.snapshot().to_json()) | change)


LINE = f"{__name__}:Line"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        tampered({"version": "2"}),
        tampered({"version": 1}),
        tampered({"created_at": "2026-01-01T00:00:00"}),
        tampered({"slices": None}),
        tampered({"policies": ["forever"]}),
        tampered({"slices": [{"slice_type": "subprocess:Popen", "items": []}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$type": "antigravity:x", "fields": {}}]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$type": LINE, "fields": {}}]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$type": LINE, "fields": {"text": "x", "more": 1}}]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$enum": LINE, "name": "x"}]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$what": 1}]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": 3}]}),
        tampered({"slices": [{"slice_type": LINE, "items": {"$tuple": []}}]}),
        tampered({"slices": [{"slice_type": LINE, "items": ["no dataclass"]}]}),
        tampered({"slices": [{"slice_type": LINE, "items": [{"$timedelta": [1]}]}]}),
        "[" * 100_000,
    ],
)
def test_what_is_no_snapshot_is_refused_and_imports_nothing(text: str) -> None:
    session = Session()
    session.dispatch(Line("kept"))
    with pytest.raises(SnapshotRestoreError):
        Snapshot.from_json(text, types=session.slice_types)
    assert "antigravity" not in sys.modules


RICH = Fact(
    {"a": [1, (2,), {3}, date(2026, 1, 1), timedelta(1), Decimal(1), UUID(int=1), b"x", Path("/a"), Colour.RED]},
    Inner("n", Colour.BLUE),
    (Box(Inner("b")),),
)
FACT = f"{__name__}:Fact"
TAGS = "$date $timedelta $decimal $bytes $set $dict $float $path $enum $type $no name".split()
HOSTILE = st.recursive(
    st.sampled_from(
        [None, True, -1, 1e308, 10**20, *("", "x", "\0", "\ud800", "sNaN", "__class__", "RED", "os:system"), FACT]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(TAGS), inner, max_size=1)
        | st.fixed_dictionaries({"$type": st.sampled_from([FACT, "os:system"]), "fields": inner})
        | st.fixed_dictionaries({"$enum": st.sampled_from([f"{__name__}:Colour", f"{__name__}:Inner"]), "name": inner})
    ),
    max_leaves=4,
)


def places_in(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, each in inner for place in places_in(each, (*path, key)))]


@given(st.data(), HOSTILE)
def test_whatever_stands_in_a_snapshot_it_is_restored_or_refused_and_nothing_is_imported(
    data: st.DataObject, hostile: object
) -> None:
    session = Session()
    session.dispatch(RICH)
    document: Any = json.loads(session.snapshot().to_json())
    *above, last = data.draw(st.sampled_from(places_in(document)[1:]))
    node = document
    for key in above:
        node = node[key]
    node[last] = hostile
    loaded = set(sys.modules)
    try:
        snapshot = Snapshot.from_json(json.dumps(document), types=session.slice_types)
        session.clone().restore(snapshot)
    except SnapshotRestoreError:
        pass
    else:
        assert all(is_dataclass(item) for items in snapshot.slices.values() for item in items)
    assert set(sys.modules) == loaded


def test_a_snapshot_that_lacks_something_says_what() -> None:
    with pytest.raises(SnapshotRestoreError, match="it has no 'version'$"):
        Snapshot.from_json("{}", types=())


def test_a_type_that_a_session_does_not_know_is_refused_before_anything_changes() -> None:
    text = tampered({})
    session = Session()
    with pytest.raises(SnapshotRestoreError, match="Line is not known"):
        Snapshot.from_json(text, types=session.slice_types)
