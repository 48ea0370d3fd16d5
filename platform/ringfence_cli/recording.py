"""How far the first look at a directory is, for a person at a terminal who would wonder."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TextIO

from ringfence_cli.printable import plural
from ringfence_cli.terminal import ErrorStream

PATIENCE_SECONDS, EVERY_SECONDS = 1.0, 0.1
"""After which something is said, and how often it is renewed."""
CLEARED = "\r\x1b[K"


class Recording:
    """What `Workspace.open` tells its progress: one line on a terminal's standard error, which goes when it is done."""

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream if stream is not None else ErrorStream()
        self._clock = clock
        is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
        self._shows = not quiet and not is_dumb and self._stream.isatty()
        self._next = clock() + PATIENCE_SECONDS
        self._said = False

    def __call__(self, files: int) -> None:
        if not self._shows or (now := self._clock()) < self._next:
            return
        self._next, self._said = now + EVERY_SECONDS, True
        self._put(f"{CLEARED}recording the tree: {plural(files, 'file')} so far")

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._said:
            self._put(CLEARED)

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
