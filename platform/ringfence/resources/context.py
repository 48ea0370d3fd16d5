"""Live resources: built when they are first asked for, closed in reverse order, and part of tool calls.

What a context builds takes part in transactions from its construction on. A call gets everything through a
`CallResources`, so that the resources know which call they work for in whatever thread its handler runs them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ringfence.errors import (
    CircularDependencyError,
    ProviderError,
    ResourceError,
    TransactionError,
    UnboundResourceError,
)
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
from ringfence.resources.binding import Binding, Given, ResourceResolver, ResourceType, Scope

if TYPE_CHECKING:
    from typing import Self

    from ringfence.resources.registry import ResourceRegistry

logger = logging.getLogger(__name__)

ResourceT = TypeVar("ResourceT")


class ResourceContext:
    """The instances of one registry, from entering the outermost ``with`` block to leaving it.

    Entering again, in this thread or another, joins the block that is open; after the last one has been left the
    context can be entered anew and builds anew. `get` and `get_optional` raise RuntimeError outside.
    """

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self.participants: tuple[Transactional, ...] = ()
        """What takes part in transactions of everything that lives here now; kept, not computed."""
        # One lock for all building: with one per binding, two threads that enter a cycle at its two ends would wait
        # for each other for ever. Re-entrant, because providers resolve.
        self._owned = _Owned()
        self._lock = self._owned.lock
        self._path = _Path()
        self._blocks = 0
        self._values = self._owned.instances
        self._joining: dict[type[Any], Transactional] = {}

    def __enter__(self) -> Self:
        with self._lock:
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
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._stop()

    @property
    def is_open(self) -> bool:
        return self._blocks > 0

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`, built now where it has to be.

        Raises:
            UnboundResourceError: nothing is bound to it.
            CircularDependencyError, ProviderError: it cannot be built.
            ResourceError: it is bound per tool call, and this is no tool call's `CallResources`.
            RuntimeError: the context is not open.
        """
        return _bound(self.get_optional(protocol), protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound to `protocol`."""
        return self.resolve(protocol, current_call())

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """Of what lives here now, and for all calls, that which can be snapshotted and restored; by its protocol."""
        with self._lock:
            return {protocol: value for protocol, value in self._values.items() if is_snapshotable(value)}

    def for_call(self, call: CallInfo) -> CallResources:
        """These resources as `call` gets them."""
        return CallResources(self, call)

    def resolve(self, protocol: Any, call: CallInfo | None) -> Any:
        """`get_optional`, for `call`: what it is given takes part in its transaction."""
        value = self.living(protocol, call)
        return self._built(protocol, call) if value is None else value

    def living(self, protocol: Any, call: CallInfo | None) -> Any:
        """The same of what has been built already, and is for all calls."""
        value = self._values.get(protocol)
        if value is None:
            return None
        if call is not None and self._joining and not call.sealed:
            participant = self._joining.get(protocol)
            # Another thread, or a policy of this call, may have had it built since the call took its participants.
            if participant is not None and participant.lock.holder is not call:
                call.join(participant)
        return value

    def _built(self, protocol: Any, call: CallInfo | None) -> Any:
        self._check_open()
        binding = self.registry.binding_for(protocol)
        if binding is None:
            return None
        if binding.scope is Scope.TOOL_CALL:
            raise ResourceError(self._why_not_here(protocol))
        if binding.scope is Scope.PROTOTYPE:
            with self._lock:
                value = self.construct(binding, self, call, self._owned)
                self._admit(value)
            return value
        with self._lock:
            if protocol not in self._values:
                value = self.construct(binding, self, call, self._owned)
                participant = self._admit(value)
                if participant is not None:
                    self._joining[protocol] = participant
                self._values[protocol] = value
        return self.resolve(protocol, call)

    def construct(
        self, binding: Binding[ResourceT], resolver: ResourceResolver, call: CallInfo | None, owned: _Owned
    ) -> ResourceT:
        """A new instance, complete and part of `call`, which `owned` closes unless something owns it already."""
        self._check_open()
        protocol = binding.protocol
        path = self._path.protocols
        if protocol in path:
            raise CircularDependencyError([*path[path.index(protocol) :], protocol])
        token = CURRENT_CALL.set(call)
        path.append(protocol)
        try:
            value = binding.provider(resolver)
            if value is None:
                raise TypeError("the provider returned None")
            _refuse_bystander(protocol, value)
            # A provider may also hand on what it got (an alias): that has an owner, who opened it and will close it.
            if self._owned.has(value) or owned.has(value):
                _join(value, call)
                return value
            try:
                post_construct = _method(value, "post_construct")
                if post_construct is not None:
                    post_construct()
                _join(value, call)
            except BaseException:
                _log(_close(value))
                raise
        except (ResourceError, TransactionError):
            raise
        except Exception as error:
            raise ProviderError(protocol, error) from error
        finally:
            path.pop()
            CURRENT_CALL.reset(token)
        owned.add(value)
        return value

    def _start(self) -> None:
        for protocol, binding in self.registry.bindings.items():
            if isinstance(binding.provider, Given):
                value = binding.provider.value
                _refuse_bystander(protocol, value)
                participant = self._admit(value)
                if participant is not None:
                    self._joining[protocol] = participant
                self._values[protocol] = value
                self._owned.know(value)
        self._blocks += 1  # open to the providers, which resolve through it
        try:
            for binding in self.registry.eager_bindings():
                self.get(binding.protocol)
        finally:
            self._blocks -= 1

    def _stop(self) -> None:
        self._joining, self.participants = {}, ()
        _log(self._owned.close())

    def _admit(self, value: object) -> Transactional | None:
        participant = participant_of(value)
        if participant is not None and not any(participant is known for known in self.participants):
            self.participants = (*self.participants, participant)
        return participant

    def _check_open(self) -> None:
        if not self._blocks:
            raise RuntimeError("resources live inside their context: use them within `with prompt.resources:`")

    def _why_not_here(self, protocol: type[Any]) -> str:
        name = protocol.__name__
        if asking := self._path.protocols:
            return (
                f"{asking[-1].__name__} outlives {name}, which is made for each tool call: make it Scope.TOOL_CALL too"
            )
        return f"{name} is made for each tool call: a handler gets it from its context.resources"


class CallResources:
    """A context's resources as one tool call gets them.

    It holds the call's own instances (``Scope.TOOL_CALL``, and prototypes that the call asked for), and hands out
    what can be bound to a call (a value with a method ``for_call``, such as a filesystem) bound to this one.
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
        return {protocol: self._handle(value) for protocol, value in self._context.snapshotable().items()}

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`; raises what `ResourceContext.get` raises."""
        return _bound(self.get_optional(protocol), protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound to `protocol`."""
        if self._handles is not None:
            handle = self._handles.get(protocol)
            if handle is not None:
                return handle
        context = self._context
        value = context.living(protocol, self._call)
        if value is None:
            binding = context.registry.binding_for(cast("type[ResourceT]", protocol))
            if binding is not None and binding.scope is not Scope.SINGLETON:
                return self._own_instance(binding)
            value = context.resolve(protocol, self._call)
            if value is None:
                return None
        handle = self._handle(value)
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
        if own is None:
            return
        errors = own.close()
        for error in errors:
            if not isinstance(error, Exception):
                raise error
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(
                "resources of a tool call could not be closed", [e for e in errors if isinstance(e, Exception)]
            )

    def _own_instance(self, binding: Binding[ResourceT]) -> ResourceT:
        own = self._owned()
        with own.lock:
            if self._closed:
                raise ResourceError(f"{self._call!r} has ended: it gets no {binding.protocol.__name__} any more")
            value = own.instances.get(binding.protocol)
            if value is not None:
                _join(value, self._call)
                return value
            value = self._handle(self._context.construct(binding, self, self._call, own))
            if binding.scope is Scope.TOOL_CALL:
                own.instances[binding.protocol] = value
            return value

    def _owned(self) -> _Owned:
        with _making:
            if self._own is None:
                self._own = _Owned()
                for handle in (self._handles or {}).values():
                    self._own.know(handle)
            return self._own

    def _handle(self, value: ResourceT) -> ResourceT:
        for_call = getattr(type(value), "for_call", None)
        if for_call is None:
            return value
        handle = for_call(value, self._call)
        if self._own is not None:
            self._own.know(handle)  # an own instance may be an alias of it, and must not close what is not the call's
        return handle


_making = threading.Lock()


def _forked() -> None:
    global _making  # noqa: PLW0603
    _making = threading.Lock()  # the thread that had it is not in the child


os.register_at_fork(after_in_child=_forked)


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

    def has(self, value: object) -> bool:
        return id(value) in self._known

    def know(self, value: object) -> None:
        self._known[id(value)] = value

    def add(self, value: object) -> None:
        if _method(value, "close") is not None:
            self._closing.append(value)
            self.know(value)
        elif _method(value, "post_construct") is not None:
            self.know(value)

    def close(self) -> list[BaseException]:
        """Close in reverse order, all of it; what went wrong is returned."""
        errors: list[BaseException] = []
        self.instances.clear()
        while self._closing:
            errors.extend(_close(self._closing.pop()))
        self._known.clear()
        return errors


def _method(value: object, name: str) -> Callable[[], object] | None:
    """What isinstance with the protocols `Closeable` and `PostConstruct` would find, which is 40 times as slow."""
    method = None if isinstance(value, type) else getattr(value, name, None)
    return method if callable(method) else None


def _close(value: object) -> list[BaseException]:
    close = _method(value, "close")
    try:
        if close is not None:
            close()
    except BaseException as error:
        error.add_note(f"while closing {type(value).__name__}")
        return [error]
    return []


def _log(errors: list[BaseException]) -> None:
    """Closing stops nothing and hides no other error; an interrupt, though, was meant for the program."""
    for error in errors:
        if isinstance(error, Exception):
            logger.error("a resource could not be closed", exc_info=error)
    for error in errors:
        if not isinstance(error, Exception):
            raise error


def _join(value: object, call: CallInfo | None) -> None:
    """Make `value` part of `call`, unless it is none of what can be, or the call takes nothing in now."""
    if call is not None and not call.sealed:
        participant = participant_of(value)
        if participant is not None and participant.lock.holder is not call:
            call.join(participant)


def _refuse_bystander(protocol: object, value: object) -> None:
    """Raises ResourceError for a filesystem on which no rollback and no policy would have a hold."""
    if protocol is not Filesystem or participant_of(value) is not None or getattr(value, "read_only", False) is True:
        return
    if not isinstance(getattr(value, "lock", None), CallLock):  # that of the filesystem that it passes everything on to
        raise ResourceError(
            f"{type(value).__name__} is bound to Filesystem, but takes part in no transaction: what a failed call did "
            "to it would stay, and no policy would see it. Let the class inherit from "
            "ringfence.participants.Transactional; one that passes everything on to another filesystem has the lock "
            "of that one as its attribute `lock`"
        )


def _bound(value: ResourceT | None, protocol: Any) -> ResourceT:
    if value is None:
        raise UnboundResourceError(
            f"nothing is bound to {protocol.__name__}; bind it with Prompt.bind(resources={{{protocol.__name__}: ...}})"
        )
    return value
