"""A workspace for agents of pydantic-ai (the extra ``pydantic-ai``): each command and each write is a transaction."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ringfence.errors import CallDeniedError, RingfenceError
from ringfence.extras import missing
from ringfence_doors.door_calls import COLLECTED, LONGEST_SECONDS, DoorCalls, in_thread, receipts_json, rollback_note

try:
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.messages import ToolReturn
    from pydantic_ai.tools import AgentDepsT, RunContext
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceError,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ImportError as error:
    raise ModuleNotFoundError(missing("pydantic_ai", "pydantic-ai"), name="pydantic_ai") from error

if TYPE_CHECKING:
    from ringfence.limits import Cancellation
    from ringfence.prompt import BasePolicy
    from ringfence_workspace import Reversal, Workspace

ValueT = TypeVar("ValueT")

LARGEST_OUTPUT_BYTES = 10 * 1024 * 1024
"""Of both streams of a command together, as of pydantic-ai's own local workspace."""
METADATA_KEY = "ringfence_receipts"


class WorkspaceDeniedError(WorkspaceError, PermissionError):
    """A policy denied a command or a change, and nothing of it is left."""


class RingfenceBackend(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """An opened workspace as a backend. Whoever opened the workspace closes it. It works on asyncio.

    A command that ends with another exit code than 0 keeps its changes, unless ``rollback_on_error`` is set. A command
    that is cancelled, or takes too long, is rolled back in any case. ``policies`` are asked about each change.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        policies: Sequence[BasePolicy] = (),
        rollback_on_error: bool = False,
        leave_running: bool = False,
    ) -> None:
        self.calls = DoorCalls(
            workspace, policies=policies, rollback_on_error=rollback_on_error, leave_running=leave_running
        )
        self._ref = WorkspaceRef(provider="ringfence", id=workspace.root)

    @property
    def ref(self) -> WorkspaceRef:
        """The root. It is known from the beginning."""
        return self._ref

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    async def working_dir(self) -> str:
        return await self._do(lambda cancellation: self.calls.root)

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command as one transaction.

        Raises:
            TypeError: a text without ``shell``, or a list with it.
            ValueError: the timeout is not above 0 or is above a day, or the command is empty.
            WorkspaceTimeoutError: it took too long, and is rolled back.
            WorkspaceOutputLimitError: it printed too much. What it changed is a step all the same.
            WorkspaceDeniedError: a policy denied it.
            WorkspaceUnavailableError: the root is gone, or the workspace is closed.
        """
        if isinstance(command, str) != shell:
            raise TypeError("a text is for the shell, so it needs shell=True, and a list of arguments takes none")
        seconds = LONGEST_SECONDS if timeout is None else timeout
        result = await self._do(
            lambda cancellation: self.calls.run(command, env=env, timeout_seconds=seconds, cancellation=cancellation)
        )
        out, err = await self._do(lambda cancellation: [*map(self.calls.whole, (result.stdout, result.stderr))])
        if result.timed_out:
            raise WorkspaceTimeoutError(f"the command {result.failure}", stdout=result.stdout, stderr=result.stderr)
        if out is None or err is None or len(out) + len(err) > LARGEST_OUTPUT_BYTES:
            raise WorkspaceOutputLimitError(
                "the command printed too much", limit=LARGEST_OUTPUT_BYTES, stdout=result.stdout, stderr=result.stderr
            )
        lines = [err, result.failure, rollback_note(result)]
        return CommandResult(exit_code=result.exit_code, stdout=out, stderr="\n".join(filter(None, lines)))

    async def read_bytes(self, path: str) -> bytes:
        return await self._do(lambda cancellation: self.calls.files.read_bytes(self._place(path)).content)

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._change("write_file", lambda: self.calls.files.write_bytes(self._place(path), data))

    async def make_dir(self, path: str) -> None:
        await self._change("mkdir", lambda: self.calls.files.mkdir(self._place(path)))

    async def remove(self, path: str) -> None:
        def remove() -> None:
            if _holds(path, self.calls.root):
                raise ValueError("the root of the workspace, and what is above it, cannot be removed")
            self.calls.files.delete(self._place(path, follow=False), recursive=True)

        await self._change("rm", remove)

    async def exists(self, path: str) -> bool:
        def exists(cancellation: Cancellation) -> bool:
            place = self._place(path)
            return not place or self.calls.files.exists(place)

        return await self._do(exists)

    async def stat(self, path: str) -> FileEntry:
        def stat(cancellation: Cancellation) -> FileEntry:
            found = self.calls.files.stat(self._place(path))
            return _entry(path, found.is_directory, found.size_bytes)

        return await self._do(stat)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        def entries(cancellation: Cancellation) -> list[FileEntry]:
            place = self._place(path)
            found: list[FileEntry] = []
            for one in self.calls.files.list(place):
                child = posixpath.join(path, one.name)
                # A link to an absolute path inside of the root is followed here.
                target = os.path.realpath(child) if one.is_symlink else child
                is_directory = one.is_directory or (one.is_symlink and os.path.isdir(target))
                found.append(_entry(child, is_directory, one.size_bytes if one.is_file else None))
            return found

        return await self._do(entries)

    async def realpath(self, path: str) -> str:
        return await self._do(lambda cancellation: os.path.realpath(path))

    def _place(self, path: str, *, follow: bool = True) -> str:
        if not os.path.isabs(path):
            raise ValueError(f"the path has to be absolute: {path!r}")
        return self.calls.place(path, follow=follow)

    async def _change(self, tool: str, work: Callable[[], object]) -> None:
        await self._do(lambda cancellation: self.calls.change(tool, work, cancellation))

    async def _do(self, work: Callable[[Cancellation], ValueT]) -> ValueT:
        """Do the work in a thread; the errors of ringfence become those of pydantic-ai."""

        def do(cancellation: Cancellation) -> ValueT:
            try:
                self._check_there()
                done = work(cancellation)
            except CallDeniedError as error:
                raise WorkspaceDeniedError(str(error)) from error
            except (OSError, RingfenceError):
                self._check_there()
                raise
            self._check_there()
            return done

        return await in_thread(do)

    def _check_there(self) -> None:
        root = self.calls.root
        try:
            self.calls.files.check_open()
        except ValueError as error:
            raise WorkspaceUnavailableError(f"the workspace {root} is closed") from error
        if not os.path.isdir(root):
            raise WorkspaceUnavailableError(f"the directory {root} of the workspace is gone")


def _holds(path: str, root: str) -> bool:
    """Whether the path is the root, or above it."""
    real = os.path.realpath(path)
    return not os.path.islink(path) and (root == real or root.startswith(os.path.join(real, "")))


def _entry(path: str, is_directory: bool, size: int | None) -> FileEntry:
    name = posixpath.basename(posixpath.normpath(path))
    return FileEntry(name=name, path=path, is_dir=is_directory, size=None if is_directory else size)


@dataclass
class RingfenceWorkspace(AbstractCapability[AgentDepsT]):
    """Gives the runs of an agent an opened workspace.

    What a tool returns gets the receipts of the changes that it made as metadata, for the program and not for the
    model: ``{"ringfence_receipts": [...]}``. Metadata of a tool's own that is no mapping is left as it is.
    """

    workspace: Workspace
    _: KW_ONLY
    policies: Sequence[BasePolicy] = ()
    rollback_on_error: bool = False
    leave_running: bool = False
    id: str | None = "ringfence_workspace"
    backend: RingfenceBackend = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.backend = RingfenceBackend(
            self.workspace,
            policies=self.policies,
            rollback_on_error=self.rollback_on_error,
            leave_running=self.leave_running,
        )

    def get_workspace(self, ctx: RunContext[AgentDepsT], *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        return self.backend if ref in (None, self.backend.ref) else None

    async def wrap_tool_execute(
        self, ctx: RunContext[AgentDepsT], *, call: Any, tool_def: Any, args: Any, handler: Any
    ) -> Any:
        receipts: list[Any] = []
        token = COLLECTED.set(receipts)
        try:
            result: Any = await handler(args)
        finally:
            COLLECTED.reset(token)
        if not receipts:
            return result
        returned = cast("ToolReturn[Any]", result if isinstance(result, ToolReturn) else ToolReturn(result))
        own: Any = returned.metadata
        if own is None or isinstance(own, Mapping):
            returned.metadata = {**(own or {}), METADATA_KEY: receipts_json(receipts)}
        return returned

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.backend.undo(n)
