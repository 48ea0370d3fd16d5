"""Resources: what tools work with besides their params, bound by type, opened with a prompt, and part of tool calls.

What a context builds takes part in transactions from its construction on. A call gets everything through a
`CallResources`, so that the resources know which call they work for in whatever thread its handler runs them.
"""

from __future__ import annotations

import inspect
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar, cast, runtime_checkable
from weakref import WeakValueDictionary

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

    __slots__ = ()

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`, built now if necessary.

        Raises:
            UnboundResourceError: nothing is bound to it.
            CircularDependencyError, ProviderError: it cannot be built.
            ResourceError: it is bound per tool call, and this does not belong to a call that is running.
            RuntimeError: the context is not open.
        """
        value = self.get_optional(protocol)
        if value is None:
            name = cast("type[ResourceT]", protocol).__name__
            raise UnboundResourceError(
                f"nothing is bound to {name}; bind it with Prompt.bind(resources={{{name}: ...}})"
            )
        return value

    @abstractmethod
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

    @staticmethod
    def instance(protocol: type[InstanceT], value: InstanceT) -> Binding[InstanceT]:
        """A binding of a ready-made instance, which its maker keeps: it is not closed with the context."""
        binding = Binding(protocol, InstanceProvider(value))
        _check_instance(protocol, value)
        return binding


def _check_instance(protocol: type[Any], value: object) -> None:
    name = protocol.__name__
    if value is None:
        raise ValueError(f"None is no instance of {name}; leave the binding out")
    # A class can be called, and so may itself be what a protocol with `__call__` asks for.
    if isinstance(value, type) and not issubclass(protocol, type) and "__call__" not in dir(protocol):
        raise TypeError(f"the class {value.__name__} is no {name} yet: write {value.__name__}(...)")
    if getattr(protocol, "_is_runtime_protocol", False) and not isinstance(value, protocol):
        near = name.lower()  # where a Workspace is given, say, for its filesystem
        hint = f"; give its .{near}" if isinstance(getattr(value, near, None), protocol) else ""
        raise TypeError(f"{value!r} is no {name}: it lacks what that has{hint}")


@dataclass(frozen=True, slots=True)
class ResourceRegistry:
    """An immutable set of bindings, one per protocol; iterating gives the protocols.

    Raises ValueError for a binding under another protocol than its own.
    """

    bindings: Mapping[type[Any], Binding[Any]] = field(default_factory=dict[type[Any], Binding[Any]])

    def __post_init__(self) -> None:
        for protocol, binding in self.bindings.items():
            if binding.protocol is not protocol:
                raise ValueError(f"the binding of {binding.protocol.__name__} stands under {protocol.__name__}")
        object.__setattr__(self, "bindings", MappingProxyType(dict(self.bindings)))

    @staticmethod
    def of(*bindings: Binding[Any]) -> ResourceRegistry:
        """The registry of these bindings. Raises DuplicateBindingError where two are for one protocol."""
        registry = ResourceRegistry()
        for binding in bindings:
            registry = registry.merge(ResourceRegistry({binding.protocol: binding}))
        return registry

    @staticmethod
    def build(resources: Mapping[type[Any], object]) -> ResourceRegistry:
        """The registry of instances and bindings by protocol; entries that are None are left out."""
        found: dict[type[Any], Binding[Any]] = {}
        for protocol, value in resources.items():
            if value is not None:
                found[protocol] = value if isinstance(value, Binding) else Binding.instance(protocol, value)
        return ResourceRegistry(found)

    def merge(self, other: ResourceRegistry, *, strict: bool = True) -> ResourceRegistry:
        """Both together. What both bind is a DuplicateBindingError, or `other`'s where not ``strict``."""
        twice = self.conflicts(other)
        if strict and twice:
            names = ", ".join(sorted(protocol.__name__ for protocol in twice))
            raise DuplicateBindingError(f"bound twice: {names}; merge(..., strict=False) lets the second one win")
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


class _Owner(ResourceResolver):
    """Instances by protocol, and what is closed in the end: of a context, or of one tool call."""

    __slots__ = ("closing", "instances")

    def __init__(self) -> None:
        self.instances: dict[Any, Any] = {}
        self.closing: list[object] = []

    def has(self, value: object) -> bool:
        return any(value is one for one in (*self.instances.values(), *self.closing))

    def take(self, value: object) -> None:
        """Complete the construction of ``value``, to close it in the end; at once where that fails."""
        if isinstance(value, PostConstruct):
            try:
                value.post_construct()
            except BaseException:
                _close_or_log(value)
                raise
        if isinstance(value, (Closeable, PostConstruct)):  # the latter so that `has` knows it
            self.closing.append(value)

    def close_all(self, close: Callable[[Any], None]) -> None:
        """Close everything in reverse order of construction. Of several errors the last one is raised, but no error
        takes the place of an interrupt."""
        self.instances.clear()
        with ExitStack() as stack:
            for value in self.closing:
                stack.push(partial(_close_after, close, value))
            self.closing = []


class ResourceContext(_Owner):
    """The instances of one registry, from entering the outermost ``with`` block to leaving it.

    Entering again, in this thread or another, joins the open block. After the last one has been left the context can
    be entered anew and builds anew. `get` and `get_optional` raise RuntimeError outside.
    """

    def __init__(self, registry: ResourceRegistry) -> None:
        super().__init__()
        self.registry = registry
        # One lock for all building: with one per binding, two threads that enter a cycle at its two ends would wait
        # for each other for ever. Re-entrant, because providers resolve.
        self.lock = threading.RLock()
        self._participants: tuple[Transactional, ...] = ()
        # By id. A prototype takes part for as long as somebody holds it.
        self._prototypes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._building = threading.local()
        self._blocks = 0

    def __enter__(self) -> Self:
        with self.lock:
            self._blocks += 1
            if self._blocks == 1:
                try:
                    self._start()
                except BaseException:
                    self.__exit__()
                    raise
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self._blocks -= 1
            if not self._blocks:
                self._participants = ()
                self._prototypes.clear()
                self.close_all(_close_or_log)

    def _start(self) -> None:
        for protocol, binding in self.registry.bindings.items():
            if isinstance(binding.provider, InstanceProvider):
                _check_transactional(protocol, binding.provider.value)
                self._keep(protocol, binding.provider.value)
        for binding in self.registry.eager_bindings():
            self.get(binding.protocol)

    @property
    def is_open(self) -> bool:
        return self._blocks > 0

    @property
    def participants(self) -> tuple[Transactional, ...]:
        """What takes part in transactions of everything that lives here now."""
        if not self._prototypes:
            return self._participants
        return (*self._participants, *filter(None, map(participant_of, self._prototypes.values())))

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        return self.resolve(protocol, current_call())

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """The living instances for all calls that can be snapshotted and restored, by their protocols."""
        with self.lock:
            return {kind: value for kind, value in self.instances.items() if is_snapshotable(value)}

    def for_call(self, call: CallInfo) -> CallResources:
        """These resources as `call` gets them."""
        return CallResources(self, call)

    def resolve(self, protocol: Any, call: CallInfo | None) -> Any:
        """`get_optional` for `call`: the resource takes part in its transaction."""
        value = self.instances.get(protocol)
        if value is None:
            value = self._build(protocol, call)
        # Another thread, or a policy of this call, may have had it built since the call locked its participants.
        _join(value, call)
        return value

    def _build(self, protocol: Any, call: CallInfo | None) -> Any:
        if not self._blocks:
            raise RuntimeError("resources live inside their context: use them within `with prompt.resources:`")
        binding = self.registry.binding_for(protocol)
        if binding is None:
            return None
        if binding.scope is Scope.TOOL_CALL:
            raise ResourceError(
                f"{protocol.__name__} is made for each tool call: a handler gets it from its context.resources, and "
                "what is built of it is Scope.TOOL_CALL too"
            )
        with self.lock:
            value = self.instances.get(protocol)
            if value is None:
                value = self.construct(binding, self, call)
                if binding.scope is Scope.SINGLETON:
                    self._keep(protocol, value)
                elif participant_of(value) not in (None, *self._participants):
                    self._prototypes[id(value)] = value
            return value

    def construct(self, binding: Binding[ResourceT], owner: _Owner, call: CallInfo | None) -> ResourceT:
        """A new instance, which ``owner`` closes unless something owns it already."""
        protocol = binding.protocol
        path: list[type[Any]] = vars(self._building).setdefault("path", [])  # of this thread, outermost first
        if protocol in path:
            raise CircularDependencyError([*path[path.index(protocol) :], protocol])
        token = CURRENT_CALL.set(call)
        path.append(protocol)
        try:
            value = binding.provider(owner)
            if value is None:
                raise TypeError("the provider returned None")
            _check_transactional(protocol, value)
            # A provider may return what it got (an alias): that has an owner, who opened it and will close it.
            if not self.has(value) and not owner.has(value):
                owner.take(value)
        except (ResourceError, TransactionError):
            raise
        except Exception as error:
            raise ProviderError(protocol, error) from error
        finally:
            path.pop()
            CURRENT_CALL.reset(token)
        return value

    def _keep(self, protocol: type[Any], value: object) -> None:
        participant = participant_of(value)
        if participant is not None and participant not in self._participants:
            self._participants = (*self._participants, participant)
        self.instances[protocol] = value


class CallResources(_Owner):
    """A context's resources as one tool call gets them.

    It holds the call's own instances (``Scope.TOOL_CALL``, and prototypes that the call asked for). Of a resource with
    a method ``for_call(call)`` it returns what that returns, once per call.
    """

    __slots__ = ("_call", "_context", "_is_closed")

    def __init__(self, context: ResourceContext, call: CallInfo) -> None:
        self.instances = {}  # set here, since every tool call makes one of these
        self.closing = []
        self._context = context
        self._call = call
        self._is_closed = False

    @property
    def participants(self) -> tuple[Transactional, ...]:
        """What takes part in a transaction within the call."""
        return self._context.participants

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """See `ResourceContext.snapshotable`."""
        return {protocol: self._handle(value) for protocol, value in self._context.snapshotable().items()}

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        value = self.instances.get(protocol)
        if value is None:
            return self._resolve(protocol)
        _join(value, self._call)
        return value

    def _resolve(self, protocol: Any) -> Any:
        context, call = self._context, self._call
        binding = context.registry.bindings.get(protocol)
        if binding is None or binding.scope is Scope.SINGLETON:
            value = context.resolve(protocol, call)
            handle = self._handle(value)
            return value if handle is value else self.instances.setdefault(protocol, handle)
        with context.lock:
            if self._is_closed:
                raise ResourceError(f"{call!r} has ended: it gets no {protocol.__name__} any more")
            value = self.instances.get(protocol)
            if value is None:
                value = self._handle(context.construct(binding, self, call))
                if binding.scope is Scope.TOOL_CALL:
                    self.instances[protocol] = value
        _join(value, call)
        return value

    def _handle(self, value: Any) -> Any:
        for_call = getattr(cast("type[object]", type(value)), "for_call", None)
        return value if for_call is None else for_call(value, self._call)

    def close(self) -> None:
        """Close the call's own instances, in reverse order of construction. Nothing is built for the call after it.

        Raises what a ``close()`` raised, after all were closed: the last error, with the others as its context.
        """
        self._is_closed = True
        if self.closing:
            self.close_all(_close)


def _close(value: object) -> None:
    if isinstance(value, Closeable):
        value.close()


def _close_after(
    close: Callable[[Any], None], value: object, kind: object, error: BaseException | None, traceback: object
) -> None:
    """Close ``value`` while ``error`` propagates."""
    try:
        close(value)
    except Exception:
        if error is None or isinstance(error, Exception):
            raise
        logger.exception("the resource %s could not be closed", type(value).__name__)


def _close_or_log(value: object) -> None:
    """Close ``value``, if it can be closed. An error is logged, since it must hide no other error."""
    try:
        _close(value)
    except Exception:
        logger.exception("the resource %s could not be closed", type(value).__name__)


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
            f"{type(value).__name__} is bound to Filesystem, but takes part in no transaction, so no rollback and no "
            "policy would reach it. Let the class inherit from ringfence.runtime.Transactional; one that passes "
            "everything on to another filesystem has the lock of that one as its attribute `lock`"
        )
