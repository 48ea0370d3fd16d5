"""The visibility of sections that a session sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringfence.errors import SectionPath, SectionVisibility
from ringfence.session.items import Replace
from ringfence.session.reducers import reducer


@dataclass(frozen=True, slots=True)
class SetVisibilityOverride:
    """From now on this session renders the section at `path` (keys from the root) at `visibility`."""

    path: SectionPath
    visibility: SectionVisibility


@dataclass(frozen=True, slots=True)
class ClearVisibilityOverride:
    """From now on the section at `path` is rendered at its own visibility."""

    path: SectionPath


@dataclass(frozen=True, slots=True)
class ClearAllVisibilityOverrides:
    """From now on all sections are rendered with their own visibility."""


@dataclass(frozen=True, slots=True)
class VisibilityOverrides:
    """The overrides of one session, installed on every session; `latest()` is None before the first one."""

    overrides: Mapping[SectionPath, SectionVisibility] = field(default_factory=dict[SectionPath, SectionVisibility])

    def __post_init__(self) -> None:
        # A copy: what a slice holds must not change through a dictionary that the caller kept.
        object.__setattr__(self, "overrides", dict(self.overrides))

    def get(self, path: SectionPath) -> SectionVisibility | None:
        return self.overrides.get(tuple(path))

    def with_override(self, path: SectionPath, visibility: SectionVisibility) -> VisibilityOverrides:
        return VisibilityOverrides({**self.overrides, tuple(path): visibility})

    def without_override(self, path: SectionPath) -> VisibilityOverrides:
        """Return the overrides without the one for `path`, if there is one."""
        return VisibilityOverrides({kept: value for kept, value in self.overrides.items() if kept != tuple(path)})

    @reducer(on=SetVisibilityOverride)
    def set_one(self, event: SetVisibilityOverride) -> Replace[VisibilityOverrides]:
        return Replace((self.with_override(event.path, event.visibility),))

    @reducer(on=ClearVisibilityOverride)
    def clear_one(self, event: ClearVisibilityOverride) -> Replace[VisibilityOverrides]:
        return Replace((self.without_override(event.path),))

    @reducer(on=ClearAllVisibilityOverrides)
    def clear_all(self, event: ClearAllVisibilityOverrides) -> Replace[VisibilityOverrides]:
        return Replace((VisibilityOverrides(),))
