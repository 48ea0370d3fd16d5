"""What tools work with besides their params: clients, filesystems, trackers, bound by type and opened with a prompt."""

from ringfence.errors import (
    CircularDependencyError,
    DuplicateBindingError,
    ProviderError,
    ResourceError,
    UnboundResourceError,
)
from ringfence.participants import Snapshotable
from ringfence.resources.binding import Binding, Closeable, PostConstruct, ResourceResolver, Scope
from ringfence.resources.context import CallResources, ResourceContext
from ringfence.resources.registry import ResourceRegistry

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
    "Scope",
    "Snapshotable",
    "UnboundResourceError",
]
