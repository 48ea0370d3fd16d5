"""The calls that another framework makes on a workspace: each change is one transaction."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ringfence.errors import CallDeniedError
from ringfence.limits import Cancellation
from ringfence_workspace import is_output

if TYPE_CHECKING:
    from ringfence.prompt import BasePolicy
    from ringfence.runtime import Receipt
    from ringfence_workspace import CommandResult, Workspace

ValueT = TypeVar("ValueT")

LONGEST_SECONDS = 24 * 3600.0
"""The timeout of a command where a framework has none."""
MOST_RECEIPTS = 1000
_LOOK_SECONDS = 0.05
_HEAD_BYTES = 16 * 1024
_LEFT_OUT = re.compile(r"\n\[\.\.\. \d+ bytes left out; read (\S+) for all of it \.\.\.\]\n")

COLLECTED: ContextVar[list[Receipt] | None] = ContextVar("COLLECTED", default=None)
"""The receipts of one call of a framework's tool, while it runs."""


class DoorCalls:
    """Commands and changes on one opened workspace, one at a time, from any thread."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        policies: Sequence[BasePolicy] = (),
        rollback_on_error: bool = False,
        leave_running: bool = False,
        run: Callable[..., CommandResult] | None = None,
    ) -> None:
        """``run`` runs commands as `Workspace.run` does, elsewhere: in a container over the same files, say."""
        self.workspace = workspace
        self.files = workspace.filesystem
        self.receipts: deque[Receipt] = deque(maxlen=MOST_RECEIPTS)
        """Of the newest calls, the newest last."""
        self._policies = tuple(policies)
        self._rollback_on_error = rollback_on_error
        self._leave_running = leave_running
        self._run = run or workspace.run
        self._turn = threading.Lock()

    @property
    def root(self) -> str:
        return self.workspace.root

    def place(self, path: str, *, follow: bool = True) -> str:
        """The path below the root, with its links resolved, the last one only with ``follow``.

        Raises PermissionError for a path that leads out of the workspace, and ValueError for one with a zero character.
        """
        absolute = os.path.join(self.root, path)
        parent, name = os.path.split(absolute)
        if follow or name in ("", ".", ".."):
            real = os.path.realpath(absolute)
        else:
            real = os.path.join(os.path.realpath(parent), name)
        if real == self.root:
            return ""
        if not real.startswith(self.root.rstrip("/") + "/"):
            raise PermissionError(errno.EACCES, "is outside of the workspace", path)
        return os.path.relpath(real, self.root)

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_seconds: float = LONGEST_SECONDS,
        cancellation: Cancellation | None = None,
    ) -> CommandResult:
        """Run a command: text is for the shell. Raises CallDeniedError where a policy denied it or its changes."""
        with self._alone(cancellation):
            result = self._run(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout_seconds=timeout_seconds,
                shell=isinstance(command, str),
                policies=self._policies,
                on_error="rollback" if self._rollback_on_error else "keep",
                leave_running=self._leave_running,
                cancellation=cancellation,
            )
        self._record(result.receipt)
        if result.outcome == "denied" and result.receipt is not None:
            denial = next((one for one in result.receipt.policies if not one.allowed), None)
            raise CallDeniedError(denial.policy if denial else "", (denial and denial.reason) or result.receipt.message)
        return result

    def change(self, tool: str, work: Callable[[], ValueT], cancellation: Cancellation | None = None) -> ValueT:
        """Do work that changes files through `files`, as one step. Raises CallDeniedError, and what the work raises."""
        with self._alone(cancellation):
            block = None
            try:
                with self.workspace.transaction(tool, policies=self._policies, opaque=False) as block:
                    return work()
            finally:
                self._record(block and block.receipt)

    @contextmanager
    def _alone(self, cancellation: Cancellation | None) -> Generator[None]:
        while not self._turn.acquire(timeout=_LOOK_SECONDS):
            if cancellation is not None:
                cancellation.check()
        try:
            yield
        finally:
            self._turn.release()

    def _record(self, receipt: Receipt | None) -> None:
        if receipt is not None:
            self.receipts.append(receipt)
            collected = COLLECTED.get()
            if collected is not None:
                collected.append(receipt)

    def whole(self, text: str) -> str | None:
        """All that a stream of a command had, from the text of its result. None where not all of it was kept."""
        if len(text.encode()) <= 2 * _HEAD_BYTES:
            return text
        for found in _LEFT_OUT.finditer(text):
            head, end = text[: found.start()], text[found.end() :]
            if len(head.encode()) >= _HEAD_BYTES and is_output(found[1]):
                with suppress(OSError):
                    kept = self.files.read_bytes(found[1]).content.decode("utf-8", "replace")
                    if kept.startswith(head.rstrip("\ufffd")) and kept.endswith(end.lstrip("\ufffd")):
                        return kept
        return None


def rollback_note(result: CommandResult) -> str:
    """What to tell a model of a command that was rolled back. Empty where nothing was."""
    if result.kept or not result.changes:
        return ""
    paths = [change.path for change in result.changes]
    more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
    return f"[ringfence: the changes of this command were rolled back: {', '.join(paths[:10])}{more}]"


async def in_thread(work: Callable[[Cancellation], ValueT]) -> ValueT:
    """Do the work in a thread. If this task is cancelled, the work is cancelled, and has ended when this raises."""
    cancellation = Cancellation()
    running = asyncio.ensure_future(asyncio.to_thread(work, cancellation))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancellation.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(running)
        raise


def receipts_json(receipts: Sequence[Receipt]) -> list[dict[str, Any]]:
    """The receipts as JSON objects."""
    return cast("list[dict[str, Any]]", [receipt.to_json() for receipt in receipts])
