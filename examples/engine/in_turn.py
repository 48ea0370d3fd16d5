"""An engine of your own: one attempt after the other, each in a fresh process.

An installed package offers it to `ringfence batch run --engine in-turn` with a line of its pyproject.toml:

    [project.entry-points."ringfence.engines"]
    in-turn = "in_turn:InTurn"

An engine starts attempts and tells how they ended. The ledger has all that must not be lost. `ringfence_batch.testing`
has the contract that each engine has to keep; the same lines with a queue of your cluster are an engine for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringfence_batch import AttemptEnded, AttemptRequest
from ringfence_batch.local import LocalEngine


class InTurn:
    """Runs one attempt at once, however many are asked for, and ends its process with it."""

    def __init__(self, out: Path, slots: int | None = None) -> None:
        self.slots = 1
        self._out = out
        self._process = LocalEngine(out, 1)

    def start(self, request: AttemptRequest) -> None:
        self._process.start(request)

    def poll(self, seconds: float) -> Sequence[AttemptEnded]:
        ended = self._process.poll(seconds)
        if ended:  # the next attempt gets a process without anything that this one left
            self._process.close()
            self._process = LocalEngine(self._out, 1)
        return ended

    def cancel(self, task_id: str) -> None:
        self._process.cancel(task_id)

    def close(self) -> None:
        self._process.close()
