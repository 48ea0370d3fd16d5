"""A sandbox for the OpenAI Agents SDK (the extra ``agents``): each command and each patch is a transaction."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import posixpath
import stat
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from uuid import uuid4

from ringfence.errors import CallDeniedError, RingfenceError
from ringfence.extras import missing
from ringfence_doors.door_calls import LONGEST_SECONDS, DoorCalls, in_thread, rollback_note

try:
    from agents.sandbox import ExecResult, ExecTimeoutError, ExecTransportError, Manifest, Permissions
    from agents.sandbox.capabilities import Capability, Compaction, Filesystem, Shell
    from agents.sandbox.capabilities.filesystem import FilesystemToolSet
    from agents.sandbox.capabilities.shell import ShellToolSet
    from agents.sandbox.capabilities.tools import ExecCommandTool, SandboxApplyPatchTool
    from agents.sandbox.errors import (
        ExecNonZeroError,
        InvalidManifestPathError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
    )
    from agents.sandbox.files import EntryKind, FileEntry
    from agents.sandbox.session import BaseSandboxSession, SandboxSession, SandboxSessionState
    from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
except ImportError as error:
    raise ModuleNotFoundError(missing("agents", "agents"), name="agents") from error

if TYPE_CHECKING:
    from ringfence.limits import Cancellation
    from ringfence.prompt import BasePolicy
    from ringfence_workspace import Reversal, Workspace

ValueT = TypeVar("ValueT")

COMMAND_SECONDS = 600.0
DENIED_EXIT_CODE = 126
_WITHIN: ContextVar[bool] = ContextVar("_WITHIN", default=False)
"""Whether this is a part of a step that has begun."""


class RingfenceSessionState(SandboxSessionState):
    """The root of the workspace is that of the manifest."""

    type: Literal["ringfence"] = "ringfence"  # pyright: ignore[reportIncompatibleVariableOverride]


class RingfenceClientOptions(BaseSandboxClientOptions):
    """None: what there is to say is said to the client."""

    type: Literal["ringfence"] = "ringfence"  # pyright: ignore[reportIncompatibleVariableOverride]


class RingfenceInnerSession(BaseSandboxSession):
    """What the SDK asks of a sandbox, on an opened workspace."""

    state: SandboxSessionState

    def __init__(self, state: SandboxSessionState, calls: DoorCalls) -> None:
        self.state = state
        self.calls = calls
        self._is_running = False

    # -- commands

    def _prepare_exec_command(self, *command: str | Path, shell: bool | list[str], user: Any) -> list[str]:
        _refuse_user(user)
        given = ["sh", "-c"] if shell is True else shell
        return super()._prepare_exec_command(*command, shell=given, user=None)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        """Run a command as one transaction.

        Raises:
            ExecTimeoutError: it took too long, and is rolled back.
            ExecTransportError: it cannot be run here, or printed more than was kept.
        """
        argv = [*map(str, command)]
        if _WITHIN.get():
            raise ExecTransportError(command=argv, message="a command cannot be a part of a change of files")
        variables = await self.state.manifest.environment.resolve()

        def run(cancellation: Cancellation) -> ExecResult | None:
            seconds = LONGEST_SECONDS if timeout is None else max(timeout, 0.001)
            result = self.calls.run(argv, env=variables, timeout_seconds=seconds, cancellation=cancellation)
            if result.timed_out:
                return None
            out, err = self.calls.whole(result.stdout), self.calls.whole(result.stderr)
            shown = result.stderr if err is None else err
            lines = "\n".join(filter(None, [shown, result.failure, rollback_note(result)]))
            return ExecResult(
                stdout=(result.stdout if out is None else out).encode(),
                stderr=lines.encode(),
                exit_code=result.exit_code,
            )

        try:
            done = await in_thread(run)
        except CallDeniedError as error:
            return ExecResult(stdout=b"", stderr=f"[ringfence: {error}]".encode(), exit_code=DENIED_EXIT_CODE)
        except (OSError, ValueError, RingfenceError) as error:
            raise ExecTransportError(command=argv, cause=error, message=str(error)) from error
        if done is None:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        return done

    # -- files

    def normalize_path(self, path: Path | str, *, for_write: bool = False) -> Path:
        """The path in the workspace, with the links of its directories resolved. Raises InvalidManifestPathError."""
        self._place(path)  # where its own link leads has to be inside, too
        return Path(self.calls.root, self._place(path, follow=False))

    def _place(self, path: Path | str, *, follow: bool = True) -> str:
        given = posixpath.normpath(str(path).replace("\\", "/"))
        try:
            return self.calls.place(given, follow=follow)
        except (PermissionError, ValueError) as error:
            reason: Any = "absolute" if os.path.isabs(given) else "escape_root"
            raise InvalidManifestPathError(rel=str(path), reason=reason, cause=error) from error

    async def in_one_step(self, tool: str, work: Callable[[], Coroutine[Any, Any, ValueT]]) -> ValueT:
        """Do work that changes files through this session, as one step. In such work it is a part of that.

        Raises WorkspaceArchiveWriteError where a policy denied it, and what the work raises. Nothing is left then.
        """
        if _WITHIN.get():
            return await work()

        async def block() -> ValueT:
            _WITHIN.set(True)
            return await work()

        # Not a thread for each change: all of them may be waiting for the end of this step.
        return await self._changing(tool, self.calls.root, lambda: asyncio.run(block()))

    async def _changing(self, tool: str, path: Path | str, work: Callable[[], ValueT]) -> ValueT:
        try:
            if _WITHIN.get():
                return work()
            return await in_thread(lambda cancellation: self.calls.change(tool, work, cancellation))
        except FileExistsError:
            raise
        except CallDeniedError as error:
            words = str(error)
            raise WorkspaceArchiveWriteError(path=Path(path), cause=error, retryable=False, message=words) from error
        except (OSError, RingfenceError) as error:
            words = f"cannot change {path}: {error}"
            raise WorkspaceArchiveWriteError(path=Path(path), cause=error, message=words) from error

    async def _looking(self, work: Callable[[], ValueT]) -> ValueT:
        return work() if _WITHIN.get() else await in_thread(lambda cancellation: work())

    async def read(self, path: Path, *, user: Any = None) -> io.IOBase:
        _refuse_user(user)
        place = self._place(path)
        try:
            return io.BytesIO(await self._looking(lambda: self.calls.files.read_bytes(place).content))
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=Path(path), cause=error) from error
        except (OSError, RingfenceError) as error:
            raise WorkspaceArchiveReadError(path=Path(path), cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: Any = None) -> None:
        _refuse_user(user)
        place, content = self._place(path), _bytes(data)
        await self._changing("write_file", path, lambda: self.calls.files.write_bytes(place, content))

    async def _write_new_file(self, path: Path, data: io.IOBase, *, user: Any = None) -> None:
        _refuse_user(user)
        place, content = self._place(path, follow=False), _bytes(data)
        await self._changing("write_file", path, lambda: self.calls.files.write_bytes(place, content, mode="create"))

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: Any = None) -> None:
        _refuse_user(user)
        place = self._place(path)
        if place:
            work = lambda: self.calls.files.mkdir(place, parents=parents, exist_ok=parents)  # noqa: E731
            await self._changing("mkdir", path, work)

    async def rm(self, path: Path | str, *, recursive: bool = False, user: Any = None) -> None:
        _refuse_user(user)
        place = self._place(path, follow=False)
        if not recursive and not self.calls.files.exists(place) and not os.path.lexists(self._host(place)):
            raise _failed("rm", path, FileNotFoundError(errno.ENOENT, "there is no such file", str(path)))
        if os.path.lexists(self._host(place)):
            await self._changing("rm", path, lambda: self.calls.files.delete(place, recursive=recursive))

    async def mv(self, source: Path | str, destination: Path | str, *, user: Any = None) -> None:
        _refuse_user(user)
        old, new = self._place(source, follow=False), self._place(destination, follow=False)
        for place, path in ((old, source), (new, destination)):
            if os.path.isdir(self._host(place)) and not os.path.islink(self._host(place)):
                raise _failed("mv", path, IsADirectoryError(errno.EISDIR, "is a directory", str(path)))
        await self._changing("mv", destination, lambda: self.calls.files.move(old, new, overwrite=True))

    async def same_file(
        self, left: Path | str, right: Path | str, *, follow_symlinks: bool = True, user: Any = None
    ) -> bool:
        _refuse_user(user)
        paths = [self._host(self._place(path, follow=follow_symlinks)) for path in (left, right)]
        if not all(map(os.path.lexists, paths)) or (not follow_symlinks and any(map(os.path.islink, paths))):
            return False
        return os.path.samefile(*paths)

    async def ls(self, path: Path | str, *, user: Any = None) -> list[FileEntry]:
        _refuse_user(user)
        place = self._place(path)
        try:
            found = await self._looking(lambda: self.calls.files.list(place))
            return [_entry(self._host(one.path)) for one in found]
        except (OSError, RingfenceError) as error:
            raise _failed("ls", path, error) from error

    def _host(self, place: str) -> str:
        return os.path.join(self.calls.root, place)

    async def extract(self, path: Path | str, data: io.IOBase, **options: Any) -> None:
        await self.in_one_step("extract", lambda: super(RingfenceInnerSession, self).extract(path, data, **options))

    # -- its life

    async def _after_start(self) -> None:
        self._is_running = True

    async def _after_shutdown(self) -> None:
        self._is_running = False

    async def running(self) -> bool:
        return self._is_running

    async def provision_manifest_accounts(self) -> None: ...

    async def _can_reuse_restorable_snapshot_workspace(self) -> bool:
        """A session that goes on has the files as they are now: what people changed meanwhile is not taken back."""
        return self._can_reuse_preserved_workspace_on_resume()

    def _should_compute_snapshot_fingerprint_on_persist(self) -> bool:
        return False

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        data = await self.state.snapshot.restore(dependencies=self.dependencies)
        try:
            await self.hydrate_workspace(data)
        finally:
            data.close()

    async def persist_workspace(self) -> io.IOBase:
        """The number of the newest step. The files are in the history."""
        steps = await in_thread(lambda cancellation: self.calls.workspace.steps())
        held = {"ringfence": self.calls.root, "step": steps[-1].number if steps else 0}
        return io.BytesIO(json.dumps(held).encode())

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Bring the files back to what they were after a step. It is a step of its own, and can be undone.

        Raises WorkspaceArchiveWriteError for what is no snapshot of this workspace.
        """
        root = Path(self.calls.root)
        try:
            held: Any = json.loads(_bytes(data))
            if held["ringfence"] != self.calls.root:
                raise ValueError(f"it is one of {held['ringfence']}")
            await in_thread(lambda cancellation: self.calls.workspace.restore(int(held["step"])))
        except (ValueError, LookupError, TypeError, OSError, RingfenceError) as error:
            words = f"this is no snapshot of {root}: {error}"
            raise WorkspaceArchiveWriteError(path=root, cause=error, message=words) from error


class RingfenceSession(SandboxSession):
    """A session over an opened workspace. It goes through the workspace, and never closes it."""

    _inner: RingfenceInnerSession  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def calls(self) -> DoorCalls:
        return self._inner.calls

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    async def apply_patch(self, operations: Any, *, patch_format: Any = "v4a") -> str:
        """Apply all operations as one step, or none of them. Raises what a session of the SDK raises."""
        inner = self._inner
        return await inner.in_one_step("apply_patch", lambda: inner.apply_patch(operations, patch_format=patch_format))

    async def extract(self, path: Path | str, data: io.IOBase, **options: Any) -> None:
        """Extract an archive as one step. Raises what a session of the SDK raises."""
        await self._inner.extract(path, data, **options)


class RingfenceSandboxClient(BaseSandboxClient[RingfenceClientOptions | None]):
    """Makes sessions over one opened workspace. Whoever opened it closes it.

    A command that ends with another exit code than 0 keeps its changes, unless ``rollback_on_error`` is set. One that
    is cancelled, or takes too long, is rolled back in any case. ``policies`` are asked about each change.
    """

    backend_id = "ringfence"
    supports_default_options = True

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

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: RingfenceClientOptions | None = None,
    ) -> SandboxSession:
        """A session in the workspace. With a snapshot that is there, it begins with the files of that step.

        Raises ValueError for a manifest with another root, users, groups, mounts or paths outside of the workspace.
        """
        given = manifest or Manifest()
        if given.root not in (Manifest().root, self.calls.root):
            raise ValueError(f"the root is {self.calls.root}: leave that of the manifest out")
        self._check(given)
        session_id = uuid4()
        state = RingfenceSessionState(
            session_id=session_id,
            manifest=given.model_copy(update={"root": self.calls.root}, deep=True),
            snapshot=resolve_snapshot(snapshot, str(session_id)),
        )
        return self._session(state)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """A session that goes on, with the files as they are now. Raises ValueError for one of another workspace."""
        if not isinstance(state, RingfenceSessionState) or state.manifest.root != self.calls.root:
            raise ValueError(f"this session is not one of the workspace {self.calls.root}")
        self._check(state.manifest)
        session = self._session(state)
        session._inner._set_start_state_preserved(True)  # pyright: ignore[reportPrivateUsage]
        return session

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Delete nothing: the files are a person's own."""
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, RingfenceSessionState)

    def _check(self, manifest: Manifest) -> None:
        self._validate_manifest_for_create(manifest)
        refused = {
            "users": manifest.users,
            "groups": manifest.groups,
            "mounts": manifest.mount_targets(),
            "extra_path_grants": manifest.extra_path_grants,
        }
        if named := [name for name, value in refused.items() if value]:
            raise ValueError(f"a workspace on this machine has no {', '.join(named)}: leave them out of the manifest")

    def _session(self, state: SandboxSessionState) -> RingfenceSession:
        inner = RingfenceInnerSession(state, self.calls)
        return RingfenceSession(inner, dependencies=self._resolve_dependencies())


class _PatchTool(SandboxApplyPatchTool):
    """`apply_patch`, all operations of a patch as one step."""

    async def _on_invoke_tool(self, ctx: Any, raw_input: str) -> str:
        work = super()._on_invoke_tool
        if not isinstance(self.session, RingfenceSession):
            return await work(ctx, raw_input)
        inner = self.session._inner  # pyright: ignore[reportPrivateUsage]
        self.editor.session = inner
        return await inner.in_one_step("apply_patch", lambda: work(ctx, raw_input))


class _CommandTool(ExecCommandTool):
    """`exec_command`, where ``yield_time_ms`` does not end a command: here nothing goes on after its call."""

    seconds = COMMAND_SECONDS

    async def _run(self, args: Any, wrapped_command: str) -> str:
        milliseconds = max(args.yield_time_ms, int(self.seconds * 1000))
        return await super()._run(args.model_copy(update={"yield_time_ms": milliseconds}), wrapped_command)


def ringfence_capabilities(*, command_seconds: float = COMMAND_SECONDS) -> list[Capability]:
    """Return the ``capabilities`` of a `SandboxAgent`: those that it has by default, with tools that are transactions.

    A patch is one step with these, and a command has ``command_seconds``. With the SDK's own, each file of a patch is a
    step, and a command is ended after the ``yield_time_ms`` that the model gives.
    """

    def patches(tools: FilesystemToolSet) -> None:
        old = tools.apply_patch
        tools.apply_patch = _PatchTool(session=old.session, user=old.editor.user, workspace_scope=tools.workspace_scope)

    def commands(tools: ShellToolSet) -> None:
        old = tools.exec_command
        tool = _CommandTool(session=old.session, user=old.user, workspace_scope=tools.workspace_scope)
        tool.seconds = command_seconds
        tools.exec_command = tool

    return [Filesystem(configure_tools=patches), Shell(configure_tools=commands), Compaction()]


def _refuse_user(user: object) -> None:
    if user is not None:
        raise ValueError("all is done as the user of this process: leave the user, and run_as, out")


def _bytes(data: io.IOBase) -> bytes:
    content: Any = cast("Any", data).read()
    return content.encode() if isinstance(content, str) else bytes(content)


def _failed(command: str, path: Path | str, error: Exception) -> ExecNonZeroError:
    result = ExecResult(stdout=b"", stderr=str(error).encode(), exit_code=1)
    return ExecNonZeroError(result, command=(command, str(path)), cause=error)


def _entry(path: str) -> FileEntry:
    found = os.lstat(path)
    kinds = {stat.S_IFDIR: EntryKind.DIRECTORY, stat.S_IFREG: EntryKind.FILE, stat.S_IFLNK: EntryKind.SYMLINK}
    return FileEntry(
        path=path,
        permissions=Permissions.from_mode(found.st_mode),
        owner=str(found.st_uid),
        group=str(found.st_gid),
        size=found.st_size,
        kind=kinds.get(stat.S_IFMT(found.st_mode), EntryKind.OTHER),
    )
