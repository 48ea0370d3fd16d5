"""What of a session a run goes on with, as its record has it: in each line only what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ringfence.prompt.policy import PathHashes, PolicyState
from ringfence.runtime.reducers import VisibilityOverrides
from ringfence.runtime.session import Session
from ringfence.tagged import decode, encode
from ringfence_sandbox import ShellEnvironment
from ringfence_tools.planning import Plan

KEPT: Sequence[type[Any]] = (Plan, PolicyState, ShellEnvironment, VisibilityOverrides)
"""What tools answered is in the conversation."""


class StateWriter:
    """Says what has changed since it was last asked. The files that a model knows are many, and every read adds one:
    they are said one by one, and the rest whole."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._said = _held(session)

    def news(self) -> dict[str, object]:
        """For a line of the record; nothing where nothing has changed."""
        before, now = self._said, _held(self._session)
        self._said = now
        found: dict[str, object] = {}
        if not _same(map(_but_hashes, now), map(_but_hashes, before)):
            found["state"] = [encode(_but_hashes(item)) for item in now]
        known, knows = _hashes(before), _hashes(now)
        learned: list[object] = [[*key, None] for key in known if key not in knows]
        for key, hashes in knows.items():
            if hashes is not known.get(key):
                learned.append([*key, {**hashes.since(known.get(key, PathHashes()))}])
        if learned:
            found["learned"] = learned
        return found


class StateReader:
    """Puts together what a record says, line by line."""

    def __init__(self, types: Mapping[str, type[Any]]) -> None:
        self._types = types
        self._items: Sequence[object] = ()
        self._learned: dict[tuple[str, str], PathHashes] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises what `decode` does, and what comes of values that are none of these."""
        if "state" in record:
            self._items = [decode(item, self._types) for item in record["state"]]
        for policy, scope, learned in record.get("learned", ()):
            known = self._learned.pop((policy, scope), PathHashes())
            if learned is not None:
                self._learned[policy, scope] = known.updated(learned)

    def items(self) -> tuple[object, ...]:
        return tuple(self._with_hashes(item) for item in self._items)

    def _with_hashes(self, item: object) -> object:
        if not isinstance(item, PolicyState) or _key(item) not in self._learned:
            return item
        return replace(item, invoked_keys=self._learned[_key(item)])


def _held(session: Session) -> tuple[object, ...]:
    return tuple(item for kind in KEPT for item in session[kind].all())


def _key(state: PolicyState) -> tuple[str, str]:
    return state.policy_name, state.scope


def _hashes(items: Iterable[object]) -> dict[tuple[str, str], PathHashes]:
    return {
        _key(item): item.invoked_keys
        for item in items
        if isinstance(item, PolicyState) and isinstance(item.invoked_keys, PathHashes)
    }


_NONE: Set[tuple[str, str]] = frozenset()


def _but_hashes(item: object) -> object:
    """It without what is said one by one."""
    if isinstance(item, PolicyState) and isinstance(item.invoked_keys, PathHashes):
        return replace(item, invoked_keys=_NONE)
    return item


def _same(one: Iterable[object], other: Iterable[object]) -> bool:
    mine, theirs = [*one], [*other]
    return len(mine) == len(theirs) and all(a is b or a == b for a, b in zip(mine, theirs, strict=True))
