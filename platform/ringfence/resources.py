"""Resources: what tools work with besides their params, bound by type, opened with a prompt, and part of tool calls.

What a context builds takes part in transactions from its construction on. A call gets everything through a
`CallResources`, so that the resources know which call they work for in whatever thread its handler runs them.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar, cast, runtime_checkable

from ringfence.errors import ResourceError, TransactionError, format_error
from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import (
    CURRENT_CALL,
    CallInfo,
    CallLock,
    Snapshotable,
    Transactional,
    current_call,
    is_snapshotable,
    participant_of,
)

__all__ = [
    "Binding",
    "CallResources",
    "CircularDependencyError",
    "Closeable",
    "DuplicateBindingError",
    "PostConstruct",
    "ProviderError",
    "ResourceContext",
    "ResourceError",
    "ResourceRegistry",
    "ResourceResolver",
    "ResourceType",
    "Scope",
    "Snapshotable",
    "UnboundResourceError",
]

logger = logging.getLogger(__name__)

ResourceT = TypeVar("ResourceT")
InstanceT = TypeVar("InstanceT")
ResourceType: TypeAlias = type[ResourceT] | Callable[..., ResourceT]
"""A class or a protocol. (mypy takes no protocol for a ``type[T]``, but does take it for a callable.)"""


class UnboundResourceError(ResourceError, LookupError):
    """Nothing is bound to the protocol that was asked for."""


class CircularDependencyError(ResourceError):
    """Providers need each other; ``cycle`` lists the protocols in the order of the requests."""

    def __init__(self, cycle: Sequence[type]) -> None:
        super().__init__("circular dependency: " + " -> ".join(kind.__name__ for kind in cycle))
        self.cycle = tuple(cycle)


class DuplicateBindingError(ResourceError, ValueError):
    """Two bindings for one protocol."""


class ProviderError(ResourceError):
    """A resource could not be built or opened."""

    def __init__(self, protocol: type, cause: BaseException) -> None:
        super().__init__(f"the resource {protocol.__name__} could not be built: {format_error(cause)}")
        self.protocol = protocol
        self.cause = cause


class Scope(Enum):
    """How long an instance lives, and so how often its provider runs."""

    SINGLETON = "singleton"
    """Once per opened context, at the first use (or at once, where the binding is eager)."""
    TOOL_CALL = "tool_call"
    """Once per tool call that asks for it; closed when the call's handler has ended."""
    PROTOTYPE = "prototype"
    """At every access; closed with the tool call that asked for it, else with the context."""


@runtime_checkable
class Closeable(Protocol):
    """A resource that the context closes that built it."""

    def close(self) -> None: ...


@runtime_checkable
class PostConstruct(Protocol):
    """A resource with a second step of construction, run once, before anybody gets it."""

    def post_construct(self) -> None: ...


class ResourceResolver(Protocol):
    """Where a provider gets what it depends on."""

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`. Raises UnboundResourceError where nothing is, and other ResourceErrors."""
        ...

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceProvider:
    """The provider of an instance that the caller made. The caller owns it: no context opens or closes it."""

    value: Any

    def __call__(self, resolver: ResourceResolver) -> Any:
        return self.value


@dataclass(frozen=True)
class Binding(Generic[ResourceT]):
    """What a protocol (or any other class) resolves to.

    Raises:
        TypeError: the protocol is no class, the provider cannot be called, or a ready-made instance lacks what a
            protocol that can be checked has.
        ValueError: an eager binding that is no singleton, or None as a ready-made instance.
    """

    protocol: type[ResourceT]
    provider: Callable[[ResourceResolver], ResourceT]
    scope: Scope = Scope.SINGLETON
    eager: bool = False
    """Build it when the context opens, so that an error shows before the work starts."""

    def __post_init__(self) -> None:
        # Callers may not be type-checked, and a wrong argument here would surface much later, in a tool call.
        if not inspect.isclass(self.protocol):
            raise TypeError(f"a binding's protocol is a class, not {self.protocol!r}")
        name = self.protocol.__name__
        if not callable(self.provider):
            raise TypeError(f"the provider of {name} cannot be called; use Binding.instance for a value")
        if self.eager and self.scope is not Scope.SINGLETON:
            raise ValueError(f"the eager binding of {name} must be a singleton: nothing else outlives its use")
        if isinstance(self.provider, InstanceProvider):
            _check_instance(self.protocol, self.provider.value)

    @staticmethod
    def instance(protocol: type[InstanceT], value: InstanceT) -> Binding[InstanceT]:
        """A binding of a ready-made instance, which its maker keeps: it is not closed with the context."""
        return Binding(protocol, InstanceProvider(value))


def _check_instance(protocol: type[Any], value: object) -> None:
    name = protocol.__name__
    if value is None:
        raise ValueError(f"None is no instance of {name}; leave the binding out")
    # A class can be called, and so may itself be what a protocol with `__call__` asks for.
    if isinstance(value, type) and not issubclass(protocol, type) and "__call__" not in dir(protocol):
        made = value.__name__
        raise TypeError(
            f"the class {made} is no {name} yet: write {made}(...), or Binding({name}, ...) to make it later"
        )
    if getattr(protocol, "_is_runtime_protocol", False) and not isinstance(value, protocol):
        near = name.lower()  # where a Workspace is given, say, for its filesystem
        hint = f"; give its .{near}" if isinstance(getattr(value, near, None), protocol) else ""
        raise TypeError(f"{value!r} is no {name}: it lacks what that has{hint}")


@dataclass(frozen=True, slots=True)
class ResourceRegistry:
    """An immutable set of bindings, one per protocol; iterating gives the protocols."""

    bindings: Mapping[type[Any], Binding[Any]] = field(default_factory=dict[type[Any], Binding[Any]])

    def __post_init__(self) -> None:
        object.__setattr__(self, "bindings", MappingProxyType(dict(self.bindings)))

    @staticmethod
    def of(*bindings: Binding[Any]) -> ResourceRegistry:
        """The registry of these bindings. Raises DuplicateBindingError where two are for one protocol."""
        found: dict[type[Any], Binding[Any]] = {}
        for binding in bindings:
            if binding.protocol in found:
                raise DuplicateBindingError(f"{binding.protocol.__name__} is bound twice")
            found[binding.protocol] = binding
        return ResourceRegistry(found)

    @staticmethod
    def build(resources: Mapping[type[Any], object]) -> ResourceRegistry:
        """The registry of instances and bindings by protocol; entries that are None are left out.

        Raises:
            ValueError: a binding stands under another protocol than its own.
        """
        found: dict[type[Any], Binding[Any]] = {}
        for protocol, value in resources.items():
            if isinstance(value, Binding):
                binding = cast("Binding[Any]", value)  # isinstance leaves the type argument unknown
                if binding.protocol is not protocol:
                    raise ValueError(f"the binding of {binding.protocol.__name__} stands under {protocol.__name__}")
                found[protocol] = binding
            elif value is not None:
                found[protocol] = Binding.instance(protocol, value)
        return ResourceRegistry(found)

    def merge(self, other: ResourceRegistry, *, strict: bool = True) -> ResourceRegistry:
        """Both together. What both bind is a DuplicateBindingError, or `other`'s where not ``strict``."""
        twice = self.conflicts(other)
        if strict and twice:
            names = ", ".join(sorted(protocol.__name__ for protocol in twice))
            raise DuplicateBindingError(f"bound in both registries: {names}; strict=False lets the second one win")
        return ResourceRegistry({**self.bindings, **other.bindings})

    def conflicts(self, other: ResourceRegistry) -> frozenset[type[Any]]:
        """The protocols that both bind."""
        return frozenset(self.bindings.keys() & other.bindings.keys())

    def binding_for(self, protocol: type[ResourceT]) -> Binding[ResourceT] | None:
        return self.bindings.get(protocol)

    def eager_bindings(self) -> tuple[Binding[Any], ...]:
        return tuple(binding for binding in self.bindings.values() if binding.eager)

    def open(self) -> ResourceContext:
        """A context over these bindings: ``with registry.open() as resources: ...``."""
        return ResourceContext(self)

    def __len__(self) -> int:
        return len(self.bindings)

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self.bindings)

    def __contains__(self, protocol: object) -> bool:
        return protocol in self.bindings


class ResourceContext:
    """The instances of one registry, from entering the outermost ``with`` block to leaving it.

    Entering again, in this thread or another, joins the open block. After the last one has been left the context can
    be entered anew and builds anew. `get` and `get_optional` raise RuntimeError outside.
    """

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self._owned = _Owned()
        self._participants: tuple[Transactional, ...] = ()
        self._prototypes: dict[int, weakref.ref[Any]] = {}
        """By id. A prototype takes part for as long as somebody holds it."""
        self._joining: dict[type[Any], Transactional] = {}
        # One lock for all building: with one per binding, two threads that enter a cycle at its two ends would wait
        # for each other for ever. Re-entrant, because providers resolve.
        self.lock = self._owned.lock
        self._path = _Path()
        self._blocks = 0

    def __enter__(self) -> Self:
        with self.lock:
            if not self._blocks:
                try:
                    self._start()
                except BaseException:
                    self._stop()
                    raise
            self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self._blocks -= 1
            if not self._blocks:
                self._stop()

    @property
    def is_open(self) -> bool:
        return self._blocks > 0

    @property
    def participants(self) -> tuple[Transactional, ...]:
        """What takes part in transactions of everything that lives here now."""
        if not self._prototypes:
            return self._participants
        living = [reference() for reference in list(self._prototypes.values())]
        return (*self._participants, *filter(None, map(participant_of, living)))

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`, built now if necessary.

        Raises:
            UnboundResourceError: nothing is bound to it.
            CircularDependencyError, ProviderError: it cannot be built.
            ResourceError: it is bound per tool call, and this is no tool call's `CallResources`.
            RuntimeError: the context is not open.
        """
        return _require_bound(self.get_optional(protocol), protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound to `protocol`."""
        return self.resolve(protocol, current_call())

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """The living instances for all calls that can be snapshotted and restored, by their protocols."""
        with self.lock:
            return {kind: value for kind, value in self._owned.instances.items() if is_snapshotable(value)}

    def for_call(self, call: CallInfo) -> CallResources:
        """These resources as `call` gets them."""
        return CallResources(self, call)

    def resolve(self, protocol: Any, call: CallInfo | None) -> Any:
        """`get_optional` for `call`: the resource takes part in its transaction."""
        value = self.find(protocol, call)
        return self._build(protocol, call) if value is None else value

    def find(self, protocol: Any, call: CallInfo | None) -> Any:
        """`resolve` for what is built already and is for all calls; None for anything else."""
        value = self._owned.instances.get(protocol)
        if value is not None and call is not None and self._joining and not call.sealed:
            participant = self._joining.get(protocol)
            # Another thread, or a policy of this call, may have had it built since the call locked its participants.
            if participant is not None and participant.lock.holder is not call:
                call.join(participant)
        return value

    def _build(self, protocol: Any, call: CallInfo | None) -> Any:
        self._check_open()
        binding = self.registry.binding_for(protocol)
        if binding is None:
            return None
        if binding.scope is Scope.TOOL_CALL:
            raise ResourceError(self._describe_missing_call(protocol))
        with self.lock:
            if binding.scope is Scope.PROTOTYPE:
                value = self.construct(binding, self, call, self._owned)
                self._track_prototype(value)
                return value
            if protocol not in self._owned.instances:
                self._keep(protocol, self.construct(binding, self, call, self._owned))
        return self.resolve(protocol, call)

    def construct(
        self, binding: Binding[ResourceT], resolver: ResourceResolver, call: CallInfo | None, owned: _Owned
    ) -> ResourceT:
        """A new instance, complete and part of `call`, which `owned` closes unless something owns it already."""
        self._check_open()
        protocol, path = binding.protocol, self._path.protocols
        if protocol in path:
            raise CircularDependencyError([*path[path.index(protocol) :], protocol])
        token = CURRENT_CALL.set(call)
        path.append(protocol)
        try:
            value = binding.provider(resolver)
            if value is None:
                raise TypeError("the provider returned None")
            _check_transactional(protocol, value)
            # A provider may return what it got (an alias): that has an owner, who opened it and will close it.
            if not (is_alias := value in self._owned or value in owned):
                self._open(value, call)
            else:
                _join(value, call)
        except (ResourceError, TransactionError):
            raise
        except Exception as error:
            raise ProviderError(protocol, error) from error
        finally:
            path.pop()
            CURRENT_CALL.reset(token)
        if not is_alias:
            owned.add(value)
        return value

    def _open(self, value: object, call: CallInfo | None) -> None:
        try:
            post_construct = _find_method(value, "post_construct")
            if post_construct is not None:
                post_construct()
            _join(value, call)
        except BaseException:
            _log(_close(value))
            raise

    def _start(self) -> None:
        for protocol, binding in self.registry.bindings.items():
            if isinstance(binding.provider, InstanceProvider):
                value = binding.provider.value
                _check_transactional(protocol, value)
                self._keep(protocol, value)
                self._owned.know(value)
        self._blocks += 1  # open to the providers, which resolve through it
        try:
            for binding in self.registry.eager_bindings():
                self.get(binding.protocol)
        finally:
            self._blocks -= 1

    def _stop(self) -> None:
        self._joining, self._participants, self._prototypes = {}, (), {}
        _log(self._owned.close())

    def _keep(self, protocol: type[Any], value: object) -> None:
        participant = participant_of(value)
        if participant is not None:
            self._joining[protocol] = participant
            if not self._has_participant(participant):
                self._participants = (*self._participants, participant)
        self._owned.instances[protocol] = value

    def _track_prototype(self, value: object) -> None:
        participant = participant_of(value)
        if participant is not None and not self._has_participant(participant):
            key, prototypes = id(value), self._prototypes
            prototypes[key] = weakref.ref(value, lambda _: prototypes.pop(key, None))

    def _has_participant(self, participant: Transactional) -> bool:
        return any(participant is known for known in self._participants)

    def _check_open(self) -> None:
        if not self._blocks:
            raise RuntimeError("resources live inside their context: use them within `with prompt.resources:`")

    def _describe_missing_call(self, protocol: type[Any]) -> str:
        name = protocol.__name__
        if path := self._path.protocols:
            return f"{path[-1].__name__} outlives {name}, which is made for each tool call: make it Scope.TOOL_CALL too"
        return f"{name} is made for each tool call: a handler gets it from its context.resources"


class CallResources:
    """A context's resources as one tool call gets them.

    It holds the call's own instances (``Scope.TOOL_CALL``, and prototypes that the call asked for). Of a resource with
    a method ``for_call(call)`` it returns what that returns, once per call.
    """

    # Made at every tool call, and many calls ask for nothing: so nothing else is allocated before it is needed.
    __slots__ = ("_call", "_closed", "_context", "_handles", "_own")

    def __init__(self, context: ResourceContext, call: CallInfo) -> None:
        self._context = context
        self._call = call
        self._handles: dict[Any, Any] | None = None
        self._own: _Owned | None = None
        self._closed = False

    @property
    def participants(self) -> tuple[Transactional, ...]:
        """What takes part in a transaction within the call."""
        return self._context.participants

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """See `ResourceContext.snapshotable`."""
        return {protocol: self._for_call(value) for protocol, value in self._context.snapshotable().items()}

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`; raises what `ResourceContext.get` raises."""
        return _require_bound(self.get_optional(protocol), protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound to `protocol`."""
        if self._handles is not None:
            handle = self._handles.get(protocol)
            if handle is not None:
                return handle
        context = self._context
        value = context.find(protocol, self._call)
        if value is None:
            binding = context.registry.binding_for(cast("type[ResourceT]", protocol))
            if binding is not None and binding.scope is not Scope.SINGLETON:
                return self._own_instance(binding)
            value = context.resolve(protocol, self._call)
            if value is None:
                return None
        handle = self._for_call(value)
        if handle is value:
            return value
        if self._handles is None:
            self._handles = {}
        return self._handles.setdefault(protocol, handle)

    def close(self) -> None:
        """Close the call's own instances, in reverse order of construction. Nothing is built for the call after it.

        Raises what a ``close()`` raised, after all were closed; an ExceptionGroup where there was more than one.
        """
        self._closed = True
        own, self._own = self._own, None
        errors = [] if own is None else own.close()
        failures: list[Exception] = []
        for error in errors:
            if not isinstance(error, Exception):
                raise error
            failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("resources of a tool call could not be closed", failures)

    def _own_instance(self, binding: Binding[ResourceT]) -> ResourceT:
        own = self._owned()
        with own.lock:
            if self._closed:
                raise ResourceError(f"{self._call!r} has ended: it gets no {binding.protocol.__name__} any more")
            value = own.instances.get(binding.protocol)
            if value is not None:
                _join(value, self._call)
                return value
            value = self._for_call(self._context.construct(binding, self, self._call, own))
            if binding.scope is Scope.TOOL_CALL:
                own.instances[binding.protocol] = value
            return value

    def _owned(self) -> _Owned:
        with self._context.lock:
            if self._own is None:
                self._own = _Owned()
                for handle in (self._handles or {}).values():
                    self._own.know(handle)
            return self._own

    def _for_call(self, value: ResourceT) -> ResourceT:
        for_call = getattr(type(value), "for_call", None)
        if for_call is None:
            return value
        handle = for_call(value, self._call)
        if self._own is not None:
            self._own.know(handle)  # an own instance may be an alias of it, and must not close what is not the call's
        return handle


class _Path(threading.local):
    """The protocols that this thread is building, outermost first."""

    def __init__(self) -> None:
        self.protocols: list[type[Any]] = []


class _Owned:
    """What a context or a call closes in the end, and what it must neither open nor close a second time."""

    __slots__ = ("_closing", "_known", "instances", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.instances: dict[type[Any], Any] = {}
        self._closing: list[object] = []
        self._known: dict[int, object] = {}  # by id; the value keeps its id taken

    def __contains__(self, value: object) -> bool:
        return id(value) in self._known

    def know(self, value: object) -> None:
        self._known[id(value)] = value

    def add(self, value: object) -> None:
        closes = _find_method(value, "close") is not None
        if closes:
            self._closing.append(value)
        if closes or _find_method(value, "post_construct") is not None:
            self.know(value)

    def close(self) -> list[BaseException]:
        """Close everything in reverse order; the errors are returned."""
        errors: list[BaseException] = []
        self.instances.clear()
        while self._closing:
            errors.extend(_close(self._closing.pop()))
        self._known.clear()
        return errors


def _find_method(value: object, name: str) -> Callable[[], object] | None:
    """What isinstance with the protocols `Closeable` and `PostConstruct` would find, which is 40 times as slow."""
    method = None if isinstance(value, type) else getattr(value, name, None)
    return method if callable(method) else None


def _close(value: object) -> list[BaseException]:
    close = _find_method(value, "close")
    try:
        if close is not None:
            close()
    except BaseException as error:
        error.add_note(f"while closing {type(value).__name__}")
        return [error]
    return []


def _log(errors: list[BaseException]) -> None:
    """Log what closing raised, since it must hide no other error. Then raise an interrupt, which is the program's."""
    for error in errors:
        if isinstance(error, Exception):
            logger.error("a resource could not be closed", exc_info=error)
    for error in errors:
        if not isinstance(error, Exception):
            raise error


def _join(value: object, call: CallInfo | None) -> None:
    """Let `value` take part in `call`, if it can and the handler of the call is running."""
    if call is not None and not call.sealed:
        participant = participant_of(value)
        if participant is not None and participant.lock.holder is not call:
            call.join(participant)


def _check_transactional(protocol: object, value: object) -> None:
    """Raise ResourceError for a filesystem that neither a rollback nor a policy would reach."""
    if protocol is not Filesystem or participant_of(value) is not None or getattr(value, "read_only", False) is True:
        return
    if not isinstance(getattr(value, "lock", None), CallLock):  # that of the filesystem that it passes everything on to
        raise ResourceError(
            f"{type(value).__name__} is bound to Filesystem, but takes part in no transaction: what a failed call did "
            "to it would stay, and no policy would see it. Let the class inherit from "
            "ringfence.participants.Transactional; one that passes everything on to another filesystem has the lock "
            "of that one as its attribute `lock`"
        )


def _require_bound(value: ResourceT | None, protocol: Any) -> ResourceT:
    if value is None:
        raise UnboundResourceError(
            f"nothing is bound to {protocol.__name__}; bind it with Prompt.bind(resources={{{protocol.__name__}: ...}})"
        )
    return value
