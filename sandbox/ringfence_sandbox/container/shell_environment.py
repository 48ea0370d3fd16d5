"""What one shell hands on to the next. A value, since no shell outlives its call: it can be kept, and taken back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ShellEnvironment:
    """Where a command begins, and how its variables differ from the container's own."""

    cwd: str = ""
    """A directory of the workspace, relative to its root."""
    variables: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """None is a variable of the container that is taken out."""
