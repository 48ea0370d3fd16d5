"""What a run writes down of its session, to go on from: as much as has changed, and all of it in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ringfence import Session
from ringfence.prompt import PolicyState
from ringfence.runtime.policy import PathHashes
from ringfence.tagged import types_within
from ringfence_cli.resume import KEPT, StateReader, StateWriter
from ringfence_tools import Plan

POLICIES = st.sampled_from(["read_before_write", "deletions"])
SHAS = st.sampled_from(["1", "2", "3", None])
CHANGES = st.one_of(
    st.tuples(st.just("learn"), POLICIES, st.dictionaries(st.sampled_from("abcd"), SHAS, min_size=1)),
    st.tuples(st.just("forget"), POLICIES, st.none()),
    st.tuples(st.just("plan"), st.text(max_size=3), st.none()),
)


def change(session: Session, what: str, name: str, known: dict[str, str | None] | None) -> None:
    if what == "plan":
        session[Plan].seed(Plan(name))
        return
    states = session[PolicyState]
    found = next((state for state in states.all() if state.policy_name == name), PolicyState(name))
    if known is None:
        states.clear(lambda state: state.policy_name == name)
    else:
        keys = found.invoked_keys if isinstance(found.invoked_keys, PathHashes) else PathHashes()
        states.replace_item(found, PolicyState(name, frozenset({name}), keys.updated(known)))


def held(session: Session) -> list[object]:
    return [item for kind in KEPT for item in session[kind].all()]


@given(st.lists(st.lists(CHANGES, min_size=1, max_size=3), max_size=12), st.booleans())
def test_what_lines_say_one_after_the_other_is_what_the_session_has(
    rounds: Sequence[Sequence[tuple[str, str, dict[str, str | None] | None]]], back: bool
) -> None:
    session, reader = Session(), StateReader(types_within(KEPT))
    writer, before = StateWriter(session), session.snapshot()
    for changes in rounds:
        for one in changes:
            change(session, *one)
        reader.take(json.loads(json.dumps(writer.changes())))
        assert list(reader.items()) == held(session)
    if back:  # as a call that fails takes it back
        session.restore(before)
        reader.take(json.loads(json.dumps(writer.changes())))
        assert list(reader.items()) == held(session)


def test_a_line_is_as_long_as_what_is_new() -> None:
    session, sizes = Session(), list[int]()
    writer = StateWriter(session)
    for number in range(500):
        change(session, "learn", "read_before_write", {f"file-{number:03}": "a" * 64})
        sizes.append(len(json.dumps(writer.changes())))
    assert set(sizes[1:]) == {sizes[1]}


def test_a_line_is_empty_where_nothing_has_changed() -> None:
    session = Session()
    change(session, "learn", "read_before_write", {"a": "1"})
    writer = StateWriter(session)
    change(session, "plan", "", None)
    assert "learned" not in writer.changes()
    assert writer.changes() == {}
