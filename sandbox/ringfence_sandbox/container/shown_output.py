"""What a command prints, on its way to its file and to who watches: masked before either sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from ringfence.runtime.secrets import MaskedStream, Secrets
from ringfence_sandbox.disk.outputs import CommandOutput

Printed: TypeAlias = Literal["stdout", "stderr"]


class ShownOutput:
    """The output of one command."""

    def __init__(self, kept: CommandOutput, secrets: Secrets, on_output: Callable[[str, bytes], None] | None) -> None:
        """``on_output`` gets each piece of a stream as it comes."""
        self._kept = kept
        self._on_output = on_output
        self._masked: dict[Printed, MaskedStream] = (
            {"stdout": MaskedStream(secrets), "stderr": MaskedStream(secrets)} if secrets else {}
        )

    def take(self, stream: Printed, data: bytes) -> None:
        if not self._masked:
            self._show(stream, data)
        elif shown := self._masked[stream].take(data):
            self._show(stream, shown)

    def close(self) -> None:
        """Show what was held back, and close the files."""
        for stream, masked in self._masked.items():
            if held := masked.end():
                self._show(stream, held)
        self._kept.close()

    def _show(self, stream: Printed, data: bytes) -> None:
        self._kept.take(stream, data)
        if self._on_output is not None:
            self._on_output(stream, data)
