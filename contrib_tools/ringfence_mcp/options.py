"""What a server is started with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringfence_tools.runs.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the command. ``http`` is HOST:PORT, or None for stdio."""

    spec: RunSpec
    http: str | None = None
    allowed_hosts: Sequence[str] = ()
    receipts: Path | None = None
    read_only: bool = False
    max_answer: int | None = None
    at_terminal: bool = field(default_factory=lambda: os.isatty(0))

    @property
    def directory(self) -> Path:
        return self.spec.directory

    @property
    def asks(self) -> Sequence[str]:
        return self.spec.limits.asks

    @property
    def has_person(self) -> bool:
        """Whether a person has started the server, and not a client."""
        return self.http is not None or self.at_terminal
