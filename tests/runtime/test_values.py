"""Whether values of a type can be changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

import pytest

from ringfence.values import can_change


@dataclass(frozen=True)
class Basket:
    items: list[str]
    notes: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Fixed:
    name: str
    when: datetime | None = None
    pairs: tuple[tuple[str, int], ...] = ()
    kind: Literal["a", "b"] = "a"
    inner: Fixed | None = None


@dataclass
class Loose:
    name: str


@pytest.mark.parametrize(
    ("kind", "certainly", "perhaps"),
    [
        (None, False, False),
        (Fixed, False, False),
        (Annotated[str, "a name"], False, False),
        (Loose, True, True),
        (Basket, True, True),
        (tuple[Loose, ...], True, True),
        (Fixed | Basket, True, True),
        (Mapping[str, int], False, True),
        (Any, False, True),
        (frozenset[str], False, False),
    ],
)
def test_what_can_be_changed_in_place(kind: object, certainly: bool, perhaps: bool) -> None:
    assert can_change(kind, unknown=False) is certainly
    assert can_change(kind, unknown=True) is perhaps
