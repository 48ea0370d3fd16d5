"""Values that are made many times in every call are what their dataclasses would have made, however they are made."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest

from ringfence.values import can_change, quick_maker, quickly_made

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Slow:
    name: str
    tags: list[str] = field(default_factory=lambda: ["made"])
    size: int = 3


@quickly_made
@dataclass(frozen=True, slots=True)
class Quick:
    name: str
    tags: list[str] = field(default_factory=lambda: ["made"])
    size: int = 3


make_slow = quick_maker(Slow)
MAKERS = pytest.mark.parametrize(("make", "kind"), [(Slow, Slow), (Quick, Quick), (make_slow, Slow)])


@MAKERS
def test_it_is_an_instance_like_any_other(make: Callable[..., Any], kind: type[Any]) -> None:
    made = make("a", size=4)
    assert type(made) is kind
    assert (made.name, made.tags, made.size) == ("a", ["made"], 4)
    assert made == kind("a", ["made"], 4)
    assert repr(made) == f"{kind.__qualname__}(name='a', tags=['made'], size=4)"
    assert replace(made, size=5).size == 5
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


@dataclass(frozen=True, slots=True)
class Named:
    kind: str
    made: str
    thawed: str = "no"


def test_a_field_may_be_called_what_the_making_calls_things() -> None:
    assert quick_maker(Named)("a", made="b") == quickly_made(Named)("a", made="b") == Named("a", "b", "no")


@quickly_made
@dataclass(frozen=True, slots=True)
class Box(Generic[ItemT]):
    item: ItemT


class Marked(Box[int]):
    """A class of somebody's own, which may remember more."""


def test_a_generic_one_may_say_of_what_it_is() -> None:
    assert Box[int](3) == Box(3)
    marked = Marked(3)
    marked.more = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert vars(marked) == {"more": 4}
    with pytest.raises(FrozenInstanceError):
        marked.item = 4  # pyright: ignore[reportAttributeAccessIssue]


@MAKERS
def test_it_is_frozen(make: Callable[..., Any], kind: type[Any]) -> None:
    made = make("a")
    with pytest.raises(FrozenInstanceError):
        made.size = 5
    with pytest.raises((AttributeError, TypeError)):
        made.other = 5


def test_its_signature_is_that_of_the_dataclass() -> None:
    assert inspect.signature(Quick) == inspect.signature(Slow)
    assert inspect.get_annotations(Quick.__init__) == inspect.get_annotations(Slow.__init__)
    assert inspect.signature(make_slow).parameters == inspect.signature(Slow).parameters


@MAKERS
def test_a_default_that_is_made_is_made_anew(make: Callable[..., Any], kind: type[Any]) -> None:
    assert make("a").tags is not make("a").tags


@MAKERS
@pytest.mark.parametrize("arguments", [{}, {"name": "a", "other": 1}])
def test_arguments_that_do_not_fit_are_refused(
    make: Callable[..., Any], kind: type[Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=r"name|other"):
        make(**arguments)


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
