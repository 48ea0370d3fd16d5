"""The types that a tool declares, and whether its handler's signature and annotations agree with them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from ringfence.errors import PromptValidationError
from ringfence.runtime.tool_result import ToolResult

MISSING: Any = object()


@dataclasses.dataclass(frozen=True, slots=True)
class ContentOf:
    """For `Tool.writes`: a tool writes the file that the path leads to. A directory has no content."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Itself:
    """For `Tool.writes`: a tool moves, replaces or removes what is at the path. Of a link that is the link alone, and
    not what it leads to; of a directory, all that is in it."""

    path: str


Written: TypeAlias = str | ContentOf | Itself
"""What `Tool.writes` names: a path that may be meant either way is a text."""


def invalid(message: str, placeholder: str, kind: type | None = None) -> PromptValidationError:
    return PromptValidationError(message, placeholder=placeholder, dataclass_type=kind)


def name_of(kind: object) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) else str(kind)


def _is_dataclass_type(kind: object) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and dataclasses.is_dataclass(origin)


def params_type_of(kind: Any, name: str) -> Any:
    if kind is None or kind is type(None):
        return None
    if not _is_dataclass_type(kind):
        raise invalid(f"tool {name!r}: params must be a dataclass or None, not {name_of(kind)}", name)
    return kind


def result_type_of(kind: Any, name: str) -> tuple[Any, Literal["object", "array"]]:
    """The type of a result's value, or of its items where it is an array."""
    if kind is None or kind is type(None):
        return None, "object"
    origin = get_origin(kind) or kind
    if origin in (list, tuple, Sequence):
        arguments = get_args(kind) or (Any, ...)
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            raise invalid(f"tool {name!r}: a tuple result is tuple[T, ...] of one type, not {kind}", name)
        return arguments[0], "array"
    if _is_dataclass_type(kind) or origin in (str, dict, Mapping):
        return kind, "object"
    raise invalid(
        f"tool {name!r}: a result is a dataclass, a mapping, a list, Sequence or tuple[T, ...], a str or None, not "
        f"{name_of(kind)}",
        name,
    )


def is_of_type(value: object, kind: Any) -> bool:
    """Whether a value is of a declared type; what a union or a type variable allows is not looked at."""
    if type(value) is kind:
        return True
    origin = get_origin(kind) or kind
    return not isinstance(origin, type) or origin is types.UnionType or isinstance(value, origin)


def check_handler(handler: object, name: str, params: Any, result: Any) -> None:
    if not callable(handler):
        raise invalid(f"tool {name!r}: the handler {handler!r} cannot be called", "handler")
    call = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
    for wrong, said in (
        (inspect.iscoroutinefunction, "async"),
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.isasyncgenfunction, "an async generator"),
    ):
        if wrong(call):
            raise invalid(f"tool {name!r}: the handler is {said}; handlers are plain functions", "handler")
    try:
        signature = inspect.signature(handler)
    except ValueError:  # some built-ins have none: the call itself will tell
        return
    try:
        signature.bind(object(), context=object())
    except TypeError as error:
        raise invalid(f"tool {name!r}: a handler takes (params, *, context): {error}", "handler") from None
    _check_returned(call, name)
    said_params, said_result = annotated_types(handler)
    for said, declared in ((said_params, params), (said_result, result)):
        if said is not MISSING and not _agree(said, declared):
            raise invalid(
                f"tool {name!r}: declared with {name_of(declared)}, but its handler is annotated with {name_of(said)}",
                "handler",
            )


def check_writes(writes: object, name: str) -> None:
    said = f"tool {name!r}: writes is a function of the params, such as lambda params: [params.path]"
    if not callable(writes):
        raise invalid(f"{said}, not {writes!r}", "writes")
    try:
        inspect.signature(writes).bind(object())
    except ValueError:  # some built-ins have none
        return
    except TypeError as error:
        raise invalid(f"{said}: {error}", "writes") from None


def _check_returned(call: Any, name: str) -> None:
    """What no ToolResult can be is refused; what cannot be told apart here is let through."""
    try:
        said = typing.get_type_hints(call).get("return", ToolResult)
    except (NameError, TypeError, ValueError, AttributeError):
        return
    kind = get_origin(said) or said
    if (
        kind is not Any
        and isinstance(kind, type)
        and not (issubclass(kind, ToolResult) or issubclass(ToolResult, kind))
    ):
        raise invalid(
            f"tool {name!r}: a handler returns a ToolResult, and its annotation says {name_of(said)}", "handler"
        )


def _agree(said: Any, declared: Any) -> bool:
    """Whether an annotation leaves room for the declared type; what cannot be told apart here is let through."""
    if said is Any or isinstance(said, TypeVar) or said == declared:
        return True
    if said in (None, type(None)) or declared in (None, type(None)):
        return said in (None, type(None)) and declared in (None, type(None))
    if isinstance(said, type) and isinstance(declared, type) and not get_args(said) and not get_args(declared):
        return issubclass(declared, said) or issubclass(said, declared)
    return not _is_dataclass_type(said) or not _is_dataclass_type(declared) or get_origin(said) == get_origin(declared)


def annotated_types(handler: object) -> tuple[Any, Any]:
    """The params and result types that a handler's annotations name; MISSING for what they do not say."""
    if handler is None:
        return MISSING, MISSING
    call: Any = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
    try:
        parameters = list(inspect.signature(handler).parameters.values())  # pyright: ignore[reportArgumentType]
        hints = typing.get_type_hints(call)
    except (NameError, TypeError, ValueError, AttributeError):
        return MISSING, MISSING
    params = hints.get(parameters[0].name, MISSING) if parameters else MISSING
    returned = hints.get("return", MISSING)
    if returned is MISSING or get_origin(returned) is not ToolResult:
        return params, MISSING
    (result,) = get_args(returned)
    return params, MISSING if result is typing.Never else result
