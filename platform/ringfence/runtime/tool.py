"""Tools: what a model may call, with typed parameters, a typed result and a handler."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Generic, Literal, TypeVar

from ringfence import serde
from ringfence.errors import PromptValidationError
from ringfence.runtime.context import ToolHandler
from ringfence.runtime.type_arguments import TypeArguments
from ringfence.session.tool_result import ToolResult
from ringfence.values import can_change

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
WrappedParamsT = TypeVar("WrappedParamsT")
WrappedResultT = TypeVar("WrappedResultT")

TOOL_NAME = re.compile(r"[a-z0-9_-]{1,64}")
MAX_DESCRIPTION_CHARACTERS = 200
OPEN_SECTIONS = "open_sections"
"""The tool with which a model asks for sections in full. Its call ends with a `VisibilityExpansionRequired`."""
MISSING: Any = object()


@dataclass(frozen=True)
class ToolExample(Generic[ParamsT, ResultT]):
    """A call worth imitating: instances of the params and of the result."""

    description: str
    input: ParamsT
    output: ResultT


@dataclass(frozen=True, slots=True)
class ContentOf:
    """For `Tool.writes`: a tool writes the file that the path leads to. A directory has no content."""

    path: str
    whole: bool = True
    """Whether all of the content may go, so that a model has to have read all of it. An edit quotes what goes."""


@dataclass(frozen=True, slots=True)
class Itself:
    """For `Tool.writes`: a tool moves, replaces or removes what is at the path. Of a link that is the link alone, and
    not what it leads to; of a directory, all that is in it."""

    path: str
    whole: bool = True
    """Whether a model has to have read all of the content. For a removal, or the source of a move, a part is enough."""


Written = str | ContentOf | Itself
"""The items of `Tool.writes`. A plain text stands for both `ContentOf` and `Itself` of its path."""


@dataclass(frozen=True)
class Tool(TypeArguments, Generic[ParamsT, ResultT]):
    """A callable affordance, checked when it is constructed.

    ``Tool[Params, Result](name=..., description=..., handler=...)``; where the type arguments are left out, the
    handler's annotations say them. Either may be None for a tool without params or without a value. A result is a
    dataclass, a mapping, a ``list[T]``, ``Sequence[T]`` or ``tuple[T, ...]``, or a ``str``.

    Files must be changed through the filesystem resource. A handler that opens files of the workspace itself makes
    changes that count as somebody else's, unless the tool is declared ``opaque``.

    Raises PromptValidationError for a name, description, type, handler or example that does not fit.
    """

    name: str
    """Lower-case letters, digits, ``_`` and ``-``, at most 64."""
    description: str
    """The description for the model: 1 to 200 ASCII characters."""
    handler: ToolHandler[ParamsT, ResultT] | None
    """None for a tool that is only documented: calling it fails."""
    examples: Sequence[ToolExample[ParamsT, ResultT]] = ()
    accepts_overrides: bool = True
    read_only: bool = False
    """It changes nothing. A read-only tool that changes something anyway fails and is rolled back."""
    opaque: bool = False
    """It changes files other than through the filesystem resource, by a command, say: a filesystem on disk looks
    through all files before and after it. Without one that can be written the call is refused."""
    writes: Callable[[ParamsT], Iterable[Written] | None] | None = None
    """The paths that a call with these params is about to change, which `ReadBeforeWritePolicy` governs; None where
    this call can change no file that is there. A path in `ContentOf` or `Itself` says what is changed of a link or a
    directory; a text alone is taken for both."""
    external_effects: str = field(default="", kw_only=True)
    """What a call does that no rollback takes back, such as "it sends a mail". `ApprovalPolicy` asks before its handler
    runs."""
    param_descriptions: Mapping[str, str] = field(default_factory=dict[str, str], kw_only=True, compare=False)
    """Descriptions of the params by the name of the field. They replace the ``description`` in a field's metadata."""
    declared_types: tuple[Any, Any] | None = field(default=None, kw_only=True, repr=False)
    """The types of params and result, as the type arguments or the handler say them."""

    params_type: type[ParamsT] | None = field(init=False, compare=False)
    result_type: type[Any] | None = field(init=False, compare=False)
    """The type of the value; of the items, where the result is an array."""
    result_container: Literal["object", "array"] = field(init=False, compare=False)
    decode: Callable[[Mapping[str, object] | str | bytes], ParamsT] = field(init=False, compare=False, repr=False)
    """From a model's arguments to the params, extra keys forbidden. ValueError or TypeError says what does not fit."""
    params_can_change: bool = field(init=False, compare=False, repr=False)
    """Whether a handler could change its params in place."""

    def __post_init__(self) -> None:
        if TOOL_NAME.fullmatch(self.name) is None:
            raise _invalid(f"tool name {self.name!r}: use 1 to 64 lower-case letters, digits, '_' and '-'", self.name)
        declared = self.declared_types or self.type_arguments or _annotated_types(self.handler)
        if MISSING in declared:
            raise _invalid(
                f"tool {self.name!r}: write Tool[Params, Result](...), or annotate the handler's params and its "
                "-> ToolResult[Result] with types that are defined in a module, not in a function",
                self.name,
            )
        params, result = (None if kind is types.NoneType else kind for kind in declared)
        if params is not None and not is_dataclass(typing.get_origin(params) or params):
            raise _invalid(f"tool {self.name!r}: params must be a dataclass or None, not {_name_of(params)}", self.name)
        if self.handler is not None:
            self._check_handler(self.handler, params, result)
        item, container = _split_result(result, self.name)
        values: dict[str, object] = {
            "description": checked_description(self.description, self.name),
            "examples": tuple(self.examples),
            "declared_types": (params, result),
            "params_type": params,
            "result_type": item,
            "result_container": container,
            "decode": _decoder(params, self.name),
            "params_can_change": can_change(params, unknown=True),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for example in self.examples:
            self.check_example(example)

    def _check_handler(self, handler: object, params: Any, result: Any) -> None:
        if not callable(handler):
            raise _invalid(f"tool {self.name!r}: the handler {handler!r} cannot be called", "handler")
        call = _function_of(handler)
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(call) for is_kind in kinds):
            raise _invalid(f"tool {self.name!r}: a handler is a plain function, not async or a generator", "handler")
        try:
            inspect.signature(handler).bind(object(), context=object())
        except (TypeError, ValueError) as error:
            raise _invalid(f"tool {self.name!r}: a handler takes (params, *, context): {error}", "handler") from None
        own_params, own_result = _annotated_types(handler)
        for what, annotated, declared in (("params", own_params, params), ("result", own_result, result)):
            if not _may_be(annotated, declared):
                raise _invalid(
                    f"tool {self.name!r}: the annotations of its handler say {_name_of(annotated)} for the {what}, and "
                    f"the tool says {_name_of(declared)}",
                    "handler",
                )

    def check_example(self, example: ToolExample[ParamsT, ResultT]) -> None:
        """Raises PromptValidationError for an example that is not of this tool's types, or that it would refuse."""
        checked_description(example.description, f"{self.name} example")
        if not _is_of_type(example.input, self.params_type):
            raise _invalid(
                f"tool {self.name!r}: an example's input is a {type(example.input).__name__}, not "
                f"{_name_of(self.params_type)}",
                "examples",
            )
        if example.input is not None:
            try:
                self.decode(json.dumps(serde.dump(example.input)))
            except (TypeError, ValueError) as error:
                raise _invalid(f"tool {self.name!r}: a call like its example is refused: {error}", "examples") from None
        if (example.output is None and self.result_type is not None) or not self.fits(example.output):
            raise _invalid(f"tool {self.name!r}: an example's output is not {self.result_words}", "examples")

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the params' fields."""
        return tuple(one.name for one in _fields_of(self.params_type))

    @property
    def described(self) -> dict[str, str]:
        """The known descriptions of the params, by the name of the field."""
        metadata = {one.name: one.metadata for one in _fields_of(self.params_type)}
        own = {name: str(texts["description"]) for name, texts in metadata.items() if "description" in texts}
        return {**own, **self.param_descriptions}

    def fits(self, value: object) -> bool:
        """Whether a result's value is of the declared type, or none: a message may say it all."""
        kind = self.result_type
        if value is None or (type(value) is kind and self.result_container == "object"):
            return True
        if self.result_container == "object":
            return _is_of_type(value, kind)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            return False
        return all(_is_of_type(item, kind) for item in typing.cast("Sequence[object]", value))

    @property
    def result_words(self) -> str:
        """The type of the tool's result in words, for messages."""
        name = _name_of(self.result_type)
        return f"a list of {name}" if self.result_container == "array" else name

    @classmethod
    def wrap(cls, function: ToolHandler[WrappedParamsT, WrappedResultT]) -> Tool[WrappedParamsT, WrappedResultT]:
        """A tool from a function alone: its name, the first paragraph of its docstring, its annotations."""
        handler: Callable[..., ToolResult[WrappedResultT]] = function
        name = handler.__name__
        description, _, _ = (inspect.getdoc(function) or "").partition("\n\n")
        if not description:
            raise _invalid(f"tool {name!r}: the function needs a docstring, it becomes the description", "description")
        return Tool(name=name, description=description, handler=function)


def checked_description(text: str, name: str) -> str:
    """`text` without surrounding blanks. Raises PromptValidationError for what cannot be a tool's description."""
    stripped = text.strip()
    if not 1 <= len(stripped) <= MAX_DESCRIPTION_CHARACTERS or not stripped.isascii():
        raise _invalid(
            f"{name!r}: a description is ASCII text of 1 to {MAX_DESCRIPTION_CHARACTERS} characters, not {text!r}",
            "description",
        )
    return stripped


def _invalid(message: str, placeholder: str, kind: type | None = None) -> PromptValidationError:
    return PromptValidationError(message, placeholder=placeholder, dataclass_type=kind)


def _name_of(kind: object) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) else str(kind)


def _fields_of(kind: Any) -> tuple[Field[Any], ...]:
    return () if kind is None else fields(typing.get_origin(kind) or kind)


def _split_result(kind: Any, name: str) -> tuple[Any, Literal["object", "array"]]:
    """The type of a result's value, or of its items where it is an array."""
    origin: Any = typing.get_origin(kind) or kind
    arguments = typing.get_args(kind) or (Any, ...)
    if origin in (list, Sequence) or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return arguments[0], "array"
    if kind is None or origin in (str, dict, Mapping) or is_dataclass(origin):
        return kind, "object"
    raise _invalid(
        f"tool {name!r}: a result is a dataclass, a mapping, a list, Sequence or tuple[T, ...], a str or None, not "
        f"{_name_of(kind)}",
        name,
    )


def _is_of_type(value: object, kind: Any) -> bool:
    """Whether a value is of a declared type; what a union or a type variable allows is not looked at."""
    origin = typing.get_origin(kind) or kind
    if kind is None:
        return value is None
    return not isinstance(origin, type) or origin is types.UnionType or isinstance(value, origin)


def _function_of(handler: object) -> Any:
    return handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004


def _annotated_types(handler: object) -> tuple[Any, Any]:
    """The params and result types that a handler's annotations name; MISSING for what they do not say."""
    try:
        hints = inspect.get_annotations(_function_of(handler), eval_str=True)
        first = next(iter(inspect.signature(handler).parameters), "")  # pyright: ignore[reportArgumentType]
    except (NameError, TypeError, ValueError, AttributeError):  # among them, no handler
        return MISSING, MISSING
    returned = hints.get("return")
    result = typing.get_args(returned)[0] if typing.get_origin(returned) is ToolResult else MISSING
    return hints.get(first, MISSING), MISSING if result is typing.Never else result


def _may_be(annotated: Any, declared: Any) -> bool:
    """Whether an annotation leaves room for a declared type. Other than classes are let through."""
    if annotated in (MISSING, Any, declared):
        return True
    kinds = [types.NoneType if kind is None else kind for kind in (annotated, declared)]
    if not all(isinstance(kind, type) for kind in kinds) or types.GenericAlias in map(type, kinds):
        return True
    return issubclass(kinds[0], kinds[1]) or issubclass(kinds[1], kinds[0])


def _decoder(params: Any, name: str) -> Callable[[Mapping[str, object] | str | bytes], Any]:
    if params is None:
        return _decode_nothing
    try:
        serde.schema(params, extra="forbid")  # a model could not call a tool without one
        return serde.decoder(params, extra="forbid")
    except TypeError as error:
        raise _invalid(f"tool {name!r}: {error}", name, params if isinstance(params, type) else None) from error


def _decode_nothing(arguments: Mapping[str, object] | str | bytes) -> None:
    given = arguments if isinstance(arguments, Mapping) else serde.read_json(arguments)
    if given:
        raise ValueError(f"this tool takes no arguments; leave out {', '.join(map(repr, given))}")
