"""How one resource comes to be: what it is asked for by, what builds it, and how long an instance lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from ringfence.tagged import register_type

ResourceT = TypeVar("ResourceT")
GivenT = TypeVar("GivenT")
ResourceType: TypeAlias = type[ResourceT] | Callable[..., ResourceT]
"""A class or a protocol. (mypy takes no protocol for a ``type[T]``, but does take it for a callable.)"""


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
    """A resource that wants to be closed by the context that built it."""

    def close(self) -> None: ...


@runtime_checkable
class PostConstruct(Protocol):
    """A resource with a second step of construction, taken once, before anybody gets it."""

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
class Given:
    """The provider of an instance that the caller made. It stays the caller's: no context opens or closes it."""

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
    """Build it when the context opens, so that what cannot be built is known before the work starts."""

    def __post_init__(self) -> None:
        # Callers may not be type-checked, and a wrong argument here would surface much later, in a tool call.
        if not inspect.isclass(self.protocol):
            raise TypeError(f"a binding's protocol is a class, not {self.protocol!r}")
        name = self.protocol.__name__
        if not callable(self.provider):
            raise TypeError(f"the provider of {name} cannot be called; use Binding.instance for a value")
        if self.eager and self.scope is not Scope.SINGLETON:
            raise ValueError(f"the eager binding of {name} must be a singleton: nothing else outlives its use")
        if isinstance(self.provider, Given) and self.provider.value is None:
            raise ValueError(f"None is no instance of {name}; leave the binding out")
        if isinstance(self.provider, Given) and _is_class_of(self.protocol, self.provider.value):
            made = self.provider.value.__name__
            raise TypeError(
                f"the class {made} is no {name} yet: write {made}(...), or Binding({name}, ...) to make it later"
            )
        register_type(self.protocol)
        checkable = getattr(self.protocol, "_is_runtime_protocol", False)
        if checkable and isinstance(self.provider, Given) and not isinstance(self.provider.value, self.protocol):
            near = name.lower()  # where a Workspace is given, say, for its filesystem
            hint = f"; give its .{near}" if isinstance(getattr(self.provider.value, near, None), self.protocol) else ""
            raise TypeError(f"{self.provider.value!r} is no {name}: it lacks what that has{hint}")

    @staticmethod
    def instance(protocol: type[GivenT], value: GivenT) -> Binding[GivenT]:
        """A binding of a ready-made instance, which its maker keeps: it is not closed with the context."""
        return Binding(protocol, Given(value))


def _is_class_of(protocol: type[Any], value: object) -> bool:
    """Whether it is a class where its instance is meant; a class can be called, and so be what a protocol asks for."""
    return isinstance(value, type) and not issubclass(protocol, type) and "__call__" not in dir(protocol)
