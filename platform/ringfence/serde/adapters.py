"""pydantic's view of a dataclass, which parsing and schemas share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Extra = Literal["forbid", "ignore"]
AliasGenerator = Callable[[str], str]
"""From the name of a field to its key in JSON, for the fields whose metadata has no ``alias``."""


def type_adapter(cls: type[Any]) -> TypeAdapter[Any]:
    from pydantic import PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter
    from pydantic_core import SchemaError

    try:
        adapter = TypeAdapter(cls)
        if not adapter.pydantic_complete:
            adapter.rebuild(_types_namespace=enclosing_locals(cls))
    except PydanticUndefinedAnnotation as error:
        advice = "define it at module level, or parse while the function that defines it runs"
        raise TypeError(f"{name_of(cls)} cannot be parsed: {error.message}; {advice}") from None
    except PydanticUserError as error:
        raise TypeError(f"{name_of(cls)} cannot be parsed: {error.message.splitlines()[0]}") from None
    except SchemaError as error:  # a pattern that is no regular expression, say
        raise TypeError(f"{name_of(cls)} cannot be parsed: {' '.join(str(error).split())}") from None
    return adapter


def enclosing_locals(cls: type[Any]) -> dict[str, Any]:
    """The local names of the running functions in which ``cls`` was defined: its annotations may name them."""
    functions: set[tuple[str, str]] = set()
    for each in (get_origin(cls) or cls, *get_args(cls)):
        scopes = name_of(each).split(".<locals>")
        functions |= {(each.__module__, ".<locals>".join(scopes[:depth])) for depth in range(1, len(scopes))}
    found: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_qualname) in functions:
            found = {**frame.f_locals, **found}
        frame = frame.f_back
    return found


def name_of(cls: object) -> str:
    return getattr(cls, "__qualname__", None) or repr(cls)
