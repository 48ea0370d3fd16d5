"""Values that are made many times in every tool call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, ParamSpec, TypeVar

ValueT = TypeVar("ValueT")
Arguments = ParamSpec("Arguments")


def quickly_made(kind: type[ValueT]) -> type[ValueT]:
    """Give a frozen dataclass with slots an ``__init__`` that takes a third of the time, and is the same otherwise.

    The one that `dataclass` writes goes through `object.__setattr__`, which looks every field up by its name; this one
    calls what those look-ups find, the descriptors of the slots. Fields of ``kw_only`` and ``__post_init__`` are
    not for it.
    """
    slow: Any = kind.__init__
    known: Any = kind
    names = [field.name for field in fields(known)]
    defaults: tuple[object, ...] = slow.__defaults__ or ()
    scope: dict[str, Any] = {f"set_{name}": getattr(kind, name).__set__ for name in names}
    lines = [f"def __init__(self, {', '.join(names)}):"]
    for place, field in enumerate(fields(known), start=-len(names)):
        name = field.name
        if field.default_factory is MISSING:
            lines.append(f"    set_{name}(self, {name})")
        else:
            scope |= {f"make_{name}": field.default_factory, f"left_out_{name}": defaults[place]}
            lines.append(f"    set_{name}(self, make_{name}() if {name} is left_out_{name} else {name})")
    exec("\n".join(lines), scope)  # noqa: S102  # as `dataclass` makes its own
    quick = scope["__init__"]
    quick.__defaults__, quick.__annotations__ = slow.__defaults__, slow.__annotations__
    quick.__qualname__, quick.__module__ = slow.__qualname__, kind.__module__
    known.__init__ = quick
    return kind


def quick_maker(kind: Callable[Arguments, ValueT]) -> Callable[Arguments, ValueT]:
    """A function that makes instances of a frozen dataclass with slots, in a third of the time if it has many fields.

    It fills an instance of a class with the same slots that is not frozen, where an assignment takes no look-up, and
    turns it into one of ``kind``. Being a function, it takes arguments by name for nothing, too.
    """
    known: Any = kind
    names = [field.name for field in fields(known)]
    thawed = type(known.__name__, (), {"__slots__": tuple(names)})
    scope: dict[str, Any] = {"__kind": kind, "__thawed": thawed}  # which no field is called
    lines = [f"def make({', '.join(names)}):", "    __made = __thawed()"]
    for place, field in enumerate(fields(known), start=-len(names)):
        name = field.name
        if field.default_factory is MISSING:
            lines.append(f"    __made.{name} = {name}")
        else:
            scope |= {f"make_{name}": field.default_factory, f"left_out_{name}": known.__init__.__defaults__[place]}
            lines.append(f"    __made.{name} = make_{name}() if {name} is left_out_{name} else {name}")
    lines += ["    __made.__class__ = __kind", "    return __made"]
    exec("\n".join(lines), scope)  # noqa: S102  # as `dataclass` makes its own
    make: Any = scope["make"]
    make.__defaults__ = known.__init__.__defaults__
    make.__qualname__ = f"make {known.__qualname__}"
    return make
