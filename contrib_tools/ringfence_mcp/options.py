"""What a server is started with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence_tools.runs.place import Place


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the command. ``http`` is HOST:PORT, or None for stdio."""

    directory: Path
    place: Place
    http: str | None = None
    allowed_hosts: Sequence[str] = ()
    receipts: Path | None = None
    read_only: bool = False
    hide: HiddenFiles | None = None
    policies: Sequence[str] = ()
    sections: Sequence[str] = ()
    max_answer: int | None = None
    asks: Sequence[str] = ()
    ask_seconds: float | None = None
    at_terminal: bool = field(default_factory=lambda: os.isatty(0))
    allow_git: bool = False

    @property
    def has_person(self) -> bool:
        """Whether a person has started the server, and not a client."""
        return self.http is not None or self.at_terminal
