"""Which resources there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, cast

from ringfence.errors import DuplicateBindingError
from ringfence.resources.binding import Binding
from ringfence.resources.context import ResourceContext

ResourceT = TypeVar("ResourceT")


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
            if value is None:
                continue
            if not isinstance(value, Binding):
                found[protocol] = Binding.instance(protocol, value)
                continue
            binding = cast("Binding[Any]", value)  # isinstance leaves the type argument unknown
            if binding.protocol is not protocol:
                raise ValueError(f"the binding of {binding.protocol.__name__} stands under {protocol.__name__}")
            found[protocol] = binding
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
