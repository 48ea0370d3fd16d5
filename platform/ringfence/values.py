"""Values that are made many times in every tool call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, ParamSpec, TypeVar

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
    return kind


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
