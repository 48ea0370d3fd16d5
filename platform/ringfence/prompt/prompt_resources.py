"""A prompt's resources: open for the length of a block, and the way to them inside of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import TypeVar

from ringfence.resources import ResourceContext, ResourceRegistry, ResourceType

if TYPE_CHECKING:
    from ringfence.participants import Snapshotable, Transactional


ResourceT = TypeVar("ResourceT")


class PromptResources:
    """A prompt's resources: a context manager around the work, and inside of it the way to them.

    They are collected when the outermost block is entered: from the template, from the sections, depth first, and
    from `Prompt.bind`, the later ones winning. Entering again joins the open block.
    """

    def __init__(self, collect: Callable[[], ResourceRegistry]) -> None:
        self._collect = collect
        self._context: ResourceContext | None = None
        self._entering = threading.RLock()

    def __enter__(self) -> Self:
        with self._entering:
            if self._context is None or not self._context.is_open:
                self._context = ResourceContext(self._collect())
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.__exit__(kind, error, trace)

    @property
    def is_open(self) -> bool:
        return self._context is not None and self._context.is_open

    @property
    def context(self) -> ResourceContext:
        """The live resources. Raises RuntimeError outside of the block."""
        context = self._context
        if context is None or not context.is_open:
            raise RuntimeError("resources live inside their context: use them within `with prompt.resources:`")
        return context

    @property
    def participants(self) -> tuple[Transactional, ...]:
        return self.context.participants

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]:
        """See `ResourceContext.snapshotable`."""
        return self.context.snapshotable()

    def get(self, protocol: ResourceType[ResourceT]) -> ResourceT:
        """The resource bound to `protocol`; raises what `ResourceContext.get` raises."""
        return self.context.get(protocol)

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None:
        """The same, or None where nothing is bound to `protocol`."""
        return self.context.get_optional(protocol)
