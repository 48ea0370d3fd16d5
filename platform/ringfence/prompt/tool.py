"""Tools: what a model may call, with typed parameters, a typed result and a handler."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, get_origin, runtime_checkable

from ringfence import serde
from ringfence.filesystem.paths import resolve_model_path
from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.policy import EffectPolicy, ToolPolicy, has_hook, is_asked
from ringfence.prompt.tool_types import (
    MISSING,
    Written,
    annotated_types,
    check_handler,
    check_writes,
    invalid,
    is_of_type,
    name_of,
    params_type_of,
    result_type_of,
)
from ringfence.runtime.limits import BudgetTracker, RunOptions
from ringfence.runtime.receipts import PolicyVerdict
from ringfence.runtime.tool_result import ToolResult
from ringfence.values import can_change

if TYPE_CHECKING:
    from ringfence.participants import CallInfo, Change
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt
    from ringfence.resources import CallResources, ResourceContext
    from ringfence.runtime.events import Dispatcher, PromptResponse
    from ringfence.runtime.limits import Budget, Cancellation, Deadline, Heartbeat, RunContext
    from ringfence.runtime.session import Session

OutputT = TypeVar("OutputT")
ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
ContraParamsT = TypeVar("ContraParamsT", contravariant=True)
CoResultT = TypeVar("CoResultT", covariant=True)
WrappedParamsT = TypeVar("WrappedParamsT")
WrappedResultT = TypeVar("WrappedResultT")
OutputT = TypeVar("OutputT")

TOOL_NAME = re.compile(r"[a-z0-9_-]{1,64}")
MAX_DESCRIPTION_CHARACTERS = 200


@runtime_checkable
class ProviderAdapter(Protocol):
    """Evaluates prompts with some provider's model."""

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        *,
        session: Session,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Ask the model, run the tools it calls, until it gives its final answer.

        ``budget_tracker`` takes the place of ``budget`` where several evaluations share one, or to see what was used.

        Raises:
            PromptEvaluationError: with the phase in which the evaluation could not go on.
            VisibilityExpansionRequired: sections were asked for in full more often than there are any; before that the
                evaluation opens them in its session and goes on.
            ValueError: a budget, and a tracker of another one.
        """
        ...


@dataclass(slots=True, eq=False)
class ToolContext:
    """What surrounds one tool call. Made for the call, and of no use after it.

    The filesystem and the resources that it has belong to the call in every thread: changes made through them are
    committed or rolled back with it, and are refused once the handler has ended.
    """

    prompt: Prompt[Any]
    rendered_prompt: RenderedPrompt[Any] | None
    adapter: ProviderAdapter | None
    session: Session
    options: RunOptions = RunOptions()
    call: CallInfo | None = None
    scope: CallResources | None = None
    cancellation: Cancellation | None = None
    _paths: dict[tuple[str, str | None], str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def deadline(self) -> Deadline | None:
        return self.options.deadline

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self.options.heartbeat

    @property
    def run_context(self) -> RunContext | None:
        return self.options.run_context

    @property
    def resources(self) -> CallResources | ResourceContext:
        """The prompt's live resources; instances of ``Scope.TOOL_CALL`` are this call's own."""
        return self.scope if self.scope is not None else self.prompt.resources.context

    @property
    def filesystem(self) -> Filesystem | None:
        """The prompt's filesystem, as this call's; None where none is bound."""
        scope = self.scope
        return self.resources.get_optional(Filesystem) if scope is None else scope.get_optional(Filesystem)

    def resolve_path(self, path: str, *, mount_point: str | None = None) -> str:
        """The path in `filesystem` that a model means by `path`: see `resolve_model_path`.

        It is resolved once a call, so what a policy has checked is what the handler gets.
        """
        key = path, mount_point
        resolved = self._paths.get(key)
        if resolved is None:
            filesystem = self.filesystem
            assert filesystem is not None, "no filesystem is bound"
            resolved = self._paths[key] = resolve_model_path(filesystem, path, mount_point=mount_point)
        return resolved

    @property
    def budget_tracker(self) -> BudgetTracker | None:
        """The evaluation's, else the one that is bound as a resource."""
        return self.options.budget_tracker or self.resources.get_optional(BudgetTracker)

    @property
    def event_bus(self) -> Dispatcher:
        """The session's dispatcher."""
        return self.session.dispatcher

    @property
    def changes(self) -> Sequence[Change]:
        """What this call has changed in its filesystem; known when its handler has ended, so to `on_result`."""
        return () if self.call is None else self.call.changes.get(self._files_lock, ())

    @property
    def reads(self) -> Mapping[str, str]:
        """What this call has read through its filesystem: resolved path to the sha256 of the file's bytes."""
        return {} if self.call is None else self.call.reads.get(self._files_lock, {})

    @property
    def _files_lock(self) -> Any:
        return getattr(self.filesystem, "lock", None)

    def beat(self) -> None:
        """Say that the call is alive; for handlers that take long."""
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()


class ToolHandler(Protocol[ContraParamsT, CoResultT]):
    """What runs when a tool is called. Synchronous; everything that has effects belongs here."""

    def __call__(self, params: ContraParamsT, /, *, context: ToolContext) -> ToolResult[CoResultT]: ...


@dataclass(frozen=True)
class ToolExample(Generic[ParamsT, ResultT]):
    """A call worth imitating: instances of the params and of the result."""

    description: str
    input: ParamsT
    output: ResultT


@dataclass(frozen=True)
class Tool(Generic[ParamsT, ResultT]):
    """A callable affordance, checked when it is constructed.

    ``Tool[Params, Result](name=..., description=..., handler=...)``; where the type arguments are left out, the
    handler's annotations say them. Either may be None for a tool without params or without a value. A result is a
    dataclass, a mapping, a ``list[T]``, ``Sequence[T]`` or ``tuple[T, ...]``, or a ``str``.

    Files must be changed through the filesystem resource. A handler that opens files of the workspace itself makes
    changes that count as somebody else's, unless the tool is declared ``opaque``.

    Raises:
        PromptValidationError: a name, description, type, handler or example that does not fit.
        TypeError: an argument of another type.
    """

    name: str
    """Lower-case letters, digits, ``_`` and ``-``, at most 64."""
    description: str
    """For the model: ASCII, 1 to 200 characters."""
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

    params_type: type[ParamsT] | None = dataclasses.field(init=False, compare=False)
    result_type: type[Any] | None = dataclasses.field(init=False, compare=False)
    """The type of the value; of the items, where the result is an array."""
    result_container: Literal["object", "array"] = dataclasses.field(init=False, compare=False)
    decode: Callable[[Mapping[str, object] | str | bytes], ParamsT] = dataclasses.field(
        init=False, compare=False, repr=False
    )
    """From a model's arguments to the params, extra keys forbidden. ValueError or TypeError says what does not fit."""
    params_can_change: bool = dataclasses.field(init=False, compare=False, repr=False)
    """Whether a handler could change its params in place."""

    type_arguments = None  # (ParamsT, ResultT) in the subclass that Tool[P, R] makes

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            # typing's alias would tell the instance its arguments only after __init__, and swallow what is raised
            # then. So Tool[P, R] is a subclass that knows them; only a use with type variables is an alias.
            concrete = isinstance(item, tuple) and not any(isinstance(argument, TypeVar) for argument in item)
            if cls.type_arguments is None and concrete and len(item) == 2:
                return _specialised(cls, *item)
            return super().__class_getitem__(item)

    def __post_init__(self) -> None:
        _put(self, "description", checked_description(self.description, self.name))
        if TOOL_NAME.fullmatch(self.name) is None:
            raise invalid(f"tool name {self.name!r}: use 1 to 64 lower-case letters, digits, '_' and '-'", self.name)
        params, result = self._types()
        _put(self, "params_type", params_type_of(params, self.name))
        result_type, container = result_type_of(result, self.name)
        _put(self, "result_type", result_type)
        _put(self, "result_container", container)
        if self.handler is not None:
            check_handler(self.handler, self.name, params, result)
        if self.writes is not None:
            check_writes(self.writes, self.name)
        _put(self, "decode", _decoder(self.params_type, self.name))
        _put(self, "examples", tuple(self.examples))
        for example in self.examples:
            self.check_example(example)
        _put(self, "params_can_change", can_change(self.params_type, unknown=True))

    def _types(self) -> tuple[Any, Any]:
        if self.type_arguments is not None:
            return self.type_arguments
        params, result = annotated_types(self.handler)
        if params is MISSING or result is MISSING:
            raise invalid(
                f"tool {self.name!r}: write Tool[Params, Result](...), or annotate the handler's params and its "
                "-> ToolResult[Result] with types that are defined in a module, not in a function",
                self.name,
            )
        return params, result

    def check_example(self, example: ToolExample[ParamsT, ResultT]) -> None:
        """Raises PromptValidationError for an example that is not of this tool's types, or that it would refuse."""
        checked_description(example.description, f"{self.name} example")
        if not _is_exactly(example.input, self.params_type):
            raise invalid(
                f"tool {self.name!r}: an example's input is a {type(example.input).__name__}, not "
                f"{name_of(self.params_type)}",
                "examples",
            )
        if example.input is not None:
            try:
                self.decode(json.dumps(serde.dump(example.input)))
            except (TypeError, ValueError) as error:
                raise invalid(f"tool {self.name!r}: a call like its example is refused: {error}", "examples") from None
        output: Any = example.output
        if self.result_container == "array":
            fits = (
                isinstance(output, Sequence)
                and not isinstance(output, (str, bytes))
                and all(_is_exactly(item, self.result_type) for item in typing.cast("Sequence[object]", output))
            )
        else:
            fits = _is_exactly(output, self.result_type)
        if not fits:
            raise invalid(
                f"tool {self.name!r}: an example's output is not of type {name_of(self.result_type)}", "examples"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the params' fields."""
        return tuple(one.name for one in _fields_of(self.params_type))

    @property
    def described(self) -> dict[str, str]:
        """What the params' fields are for, by name, where their metadata says it."""
        known = _fields_of(self.params_type)
        return {one.name: str(one.metadata["description"]) for one in known if "description" in one.metadata}

    def fits(self, value: object) -> bool:
        """Whether a result's value is of the declared type, or none: a message may say it all."""
        if value is None or self.result_container == "object":
            return value is None or (self.result_type is not None and is_of_type(value, self.result_type))
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return False
        items = typing.cast("Sequence[object]", value)
        return all(is_of_type(item, self.result_type) for item in items)

    @property
    def result_words(self) -> str:
        """What the tool answers with, for messages."""
        name = name_of(self.result_type)
        return f"a list of {name}" if self.result_container == "array" else name

    @classmethod
    def wrap(cls, function: ToolHandler[WrappedParamsT, WrappedResultT]) -> Tool[WrappedParamsT, WrappedResultT]:
        """A tool from a function alone: its name, the first paragraph of its docstring, its annotations."""
        handler: Callable[..., ToolResult[WrappedResultT]] = function
        name = handler.__name__
        description, _, _ = (inspect.getdoc(function) or "").partition("\n\n")
        if not description:
            raise invalid(f"tool {name!r}: the function needs a docstring, it becomes the description", "description")
        extra = [p for p in inspect.signature(function).parameters if p not in ("params", "context")]
        if extra:
            raise invalid(f"tool {name!r}: a handler takes (params, *, context), not {', '.join(extra)}", extra[0])
        return Tool(name=name, description=description, handler=function)


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool in a prompt, and what a call needs of it. (To ask the tool itself takes longer: it has its own class.)"""

    tool: Tool[Any, Any]
    handler: ToolHandler[Any, Any] | None
    decode: Callable[[Mapping[str, object] | str | bytes], object]
    fits: Callable[[object], bool]
    read_only: bool
    opaque: bool
    policies: Sequence[tuple[ToolPolicy, PolicyVerdict, bool]]
    """Each with its verdict where it allows a call, and whether it has to be asked for that."""
    result_policies: Sequence[ToolPolicy]
    effect_policies: Sequence[tuple[EffectPolicy, PolicyVerdict]]


def bind_tool(tool: Tool[Any, Any], prompt: Prompt[Any]) -> BoundTool:
    policies = prompt.policies_for_tool(tool.name)
    checking = [policy for policy in policies if isinstance(policy, ToolPolicy) and has_hook(policy, "check")]
    observing = [policy for policy in prompt.result_policies(tool.name) if isinstance(policy, ToolPolicy)]
    effects = [policy for policy in policies if isinstance(policy, EffectPolicy)]
    return BoundTool(
        tool,
        tool.handler,
        tool.decode,
        tool.fits,
        tool.read_only,
        tool.opaque,
        [(policy, PolicyVerdict(policy.name, True), is_asked(policy, "check", tool)) for policy in checking],
        [policy for policy in observing if is_asked(policy, "on_result", tool)],
        [(policy, PolicyVerdict(policy.name, True)) for policy in effects if is_asked(policy, "check_effects", tool)],
    )


@functools.lru_cache(maxsize=1024)
def _specialised(cls: type[Tool[Any, Any]], params: Any, result: Any) -> type[Tool[Any, Any]]:
    name = f"{cls.__name__}[{name_of(params)}, {name_of(result)}]"
    return type(
        name, (cls,), {"type_arguments": (params, result), "__module__": cls.__module__, "__doc__": cls.__doc__}
    )


def _put(tool: object, name: str, value: object) -> None:
    object.__setattr__(tool, name, value)


def checked_description(text: str, name: str) -> str:
    """`text` without surrounding blanks. Raises PromptValidationError for what cannot be a tool's description."""
    stripped = text.strip()
    if not 1 <= len(stripped) <= MAX_DESCRIPTION_CHARACTERS or not stripped.isascii():
        raise invalid(
            f"{name!r}: a description is ASCII text of 1 to {MAX_DESCRIPTION_CHARACTERS} characters, not {text!r}",
            "description",
        )
    return stripped


def _is_exactly(value: object, kind: object) -> bool:
    """A dataclass itself and none of its subclasses; an instance of another type."""
    if kind is None:
        return value is None
    cls = get_origin(kind) or kind
    return type(value) is cls if dataclasses.is_dataclass(cls) else is_of_type(value, kind)


def _fields_of(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return () if kind is None else dataclasses.fields(get_origin(kind) or kind)


def _decoder(params: Any, name: str) -> Callable[[Mapping[str, object] | str | bytes], Any]:
    if params is None:
        return _decode_nothing
    try:
        serde.schema(params, extra="forbid")  # a model could not call a tool without one
        return serde.decoder(params, extra="forbid")
    except TypeError as error:
        raise invalid(f"tool {name!r}: {error}", name, params if isinstance(params, type) else None) from error


def _decode_nothing(arguments: Mapping[str, object] | str | bytes) -> None:
    given = arguments if isinstance(arguments, Mapping) else serde.read_json(arguments)
    if given:
        raise ValueError(f"this tool takes no arguments; leave out {', '.join(map(repr, given))}")
