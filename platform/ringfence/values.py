"""Values: the quick making of those that every tool call makes many of, and whether one can be changed in place."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

ValueT = TypeVar("ValueT")
Arguments = ParamSpec("Arguments")


def quickly_made(kind: type[ValueT]) -> type[ValueT]:
    """Give a frozen dataclass with slots an ``__init__`` that takes a third of the time, and is the same otherwise.

    The one that `dataclass` writes goes through `object.__setattr__`, which looks every field up by its name; this one
    calls what those look-ups find, the descriptors of the slots. Fields of ``kw_only`` and ``__post_init__`` are
    not for it.
    """
    known: Any = kind
    scope: dict[str, Any] = {f"set_{field.name}": getattr(kind, field.name).__set__ for field in fields(known)}
    lines = [f"set_{field.name}(self, {_given(field, scope)})" for field in fields(known)]
    quick = _function("__init__", ["self", *_parameters(known, scope)], lines, scope)
    quick.__qualname__, quick.__module__ = known.__init__.__qualname__, kind.__module__
    known.__init__ = quick
    known.__setattr__ = _refusing(known)
    return kind


def _refusing(kind: Any) -> Callable[[Any, str, object], None]:
    """The ``__setattr__`` that `dataclass` means: on Python 3.11 its own fails with slots, where a generic class is
    told its arguments (``ToolResult[Plan](...)``), since it knows the class as it was before it got them."""
    names = frozenset(field.name for field in fields(kind))

    def refusing(self: Any, name: str, value: object) -> None:
        if type(self) is kind or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    return refusing


def quick_maker(kind: Callable[Arguments, ValueT]) -> Callable[Arguments, ValueT]:
    """A function that makes instances of a frozen dataclass with slots, in a third of the time if it has many fields.

    It fills an instance of a class with the same slots that is not frozen, where an assignment takes no look-up, and
    turns it into one of ``kind``. Being a function, it takes arguments by name for nothing, too.
    """
    known: Any = kind
    names = tuple(field.name for field in fields(known))
    scope: dict[str, Any] = {"__kind": kind, "__thawed": type(known.__name__, (), {"__slots__": names})}
    lines = [f"__made.{field.name} = {_given(field, scope)}" for field in fields(known)]
    lines = ["__made = __thawed()", *lines, "__made.__class__ = __kind", "return __made"]
    make = _function("make", _parameters(known, scope), lines, scope)
    make.__qualname__ = f"make {known.__qualname__}"
    return make


def _parameters(kind: Any, scope: dict[str, Any]) -> list[str]:
    """As ``__init__`` of `kind` has them. Written out, since the interpreter takes a slower way to a function whose
    defaults or annotations were set later."""
    parameters: list[str] = []
    names = [field.name for field in fields(kind)]
    defaults: tuple[object, ...] = kind.__init__.__defaults__ or ()
    for place, name in enumerate(names, start=len(defaults) - len(names)):
        scope[f"type_{name}"] = kind.__init__.__annotations__[name]
        scope[f"left_out_{name}"] = defaults[place] if place >= 0 else None
        parameters.append(f"{name}: type_{name}" + (f" = left_out_{name}" if place >= 0 else ""))
    return parameters


def _given(field: Field[Any], scope: dict[str, Any]) -> str:
    """The value of a field, out of its parameter."""
    name = field.name
    if field.default_factory is MISSING:
        return name
    scope[f"make_{name}"] = field.default_factory
    return f"make_{name}() if {name} is left_out_{name} else {name}"


def _function(name: str, parameters: list[str], lines: list[str], scope: dict[str, Any]) -> Any:
    text = f"def {name}({', '.join(parameters)}){' -> None' if name == '__init__' else ''}:\n"
    text += "".join(f"    {line}\n" for line in lines)
    exec(compile(text, f"<{name}>", "exec", dont_inherit=True), scope)  # noqa: S102  # as `dataclass` makes its own
    return scope[name]


_CHANGEABLE = (list, dict, set, bytearray, deque)
_FIXED = (str, int, float, complex, bool, bytes, type(None), date, time, timedelta, Decimal, PurePath, UUID, Enum)


def can_change(kind: Any, *, unknown: bool, _within: tuple[object, ...] = ()) -> bool:
    """Whether values of an annotation can be changed in place, in whatever depth; ``unknown`` where it does not say
    so, as ``Mapping`` and ``Any`` do not."""
    if kind in _within:  # a type within itself adds nothing
        return False
    within, origin, arguments = (*_within, kind), get_origin(kind), get_args(kind)
    if kind is None or origin is Literal:
        return False
    if origin is Annotated:
        return can_change(arguments[0], unknown=unknown, _within=within)
    if origin in (tuple, frozenset, Union, types.UnionType):
        parts = [argument for argument in arguments if argument is not Ellipsis]
        return any(can_change(part, unknown=unknown, _within=within) for part in parts)
    plain = origin or kind
    if not isinstance(plain, type):
        return unknown
    if is_dataclass(plain):
        known: Any = plain
        if not known.__dataclass_params__.frozen:
            return True
        try:
            hints = get_type_hints(plain, include_extras=True)
        except Exception:  # a name that is not known where the class is
            return unknown
        return any(can_change(hints[one.name], unknown=unknown, _within=within) for one in fields(known))
    if issubclass(plain, _CHANGEABLE):
        return True
    return unknown and not issubclass(plain, _FIXED)
