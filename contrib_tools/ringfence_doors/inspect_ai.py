"""A sandbox for evaluations of Inspect (the extra ``inspect-ai``): each command and each write is a transaction."""

# inspect_ai is not installed where this is checked. Its classes are used as its own suite proves in tests/doors.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

import base64
import errno
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel

from ringfence.errors import CallDeniedError
from ringfence.errors import SandboxUnavailableError as NoContainerError
from ringfence.extras import missing
from ringfence_doors.door_calls import COLLECTED, LONGEST_SECONDS, DoorCalls, in_thread, receipts_json, rollback_note
from ringfence_sandbox import PodmanSandbox, Workspace
from ringfence_tools.runs.owner_policies import policies_of

try:
    from inspect_ai.log import transcript
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
except ImportError as error:
    raise ModuleNotFoundError(missing("inspect_ai", "inspect-ai"), name="inspect_ai") from error

if TYPE_CHECKING:
    from ringfence.limits import Cancellation
    from ringfence.prompt import BasePolicy
    from ringfence.runtime import Receipt
    from ringfence_workspace import CommandResult, Reversal

ValueT = TypeVar("ValueT")

CANNOT_START = 126
# In a container, files outside of the workspace are a command's. A path is an argument, never a part of the script.
_READ = 'test ! -d "$1" || exit 21; test -e "$1" || exit 2; test -r "$1" || exit 13; base64 -w0 -- "$1"'
_WRITE = 'test ! -d "$1" || exit 21; mkdir -p -- "$(dirname -- "$1")" && cat > "$1" || exit 13'
_GO = 'cd -- "$1" && shift && exec "$@"'


class RingfenceConfig(BaseModel, frozen=True, extra="forbid"):
    """What the sandboxes of a task are. A text in its place is its ``source``."""

    source: str = ""
    """The directory that each sample gets a copy of. Without one it gets an empty directory."""
    policies: tuple[str, ...] = ()
    """As ``--policy`` takes them."""
    rollback_on_error: bool = False
    keep: str = ""
    """A directory where the files of each sample stay. Their histories stay, too."""
    podman: bool = False
    """Whether commands run in a container, and not on this machine."""
    image: str | None = None
    network: str = "none"


@sandboxenv(name="ringfence")
class RingfenceSandboxEnvironment(SandboxEnvironment):
    """The workspace of one sample. It works on asyncio.

    A command that ends with another exit code than 0 keeps its changes, unless ``rollback_on_error`` is set. One that
    takes longer than its timeout is rolled back in any case, and so is one whose task is cancelled. The receipt of what
    changed, or was rolled back, is an event of the sample's transcript.
    """

    calls: DoorCalls

    def __init__(self, config: RingfenceConfig | None = None) -> None:
        super().__init__()
        self._config = config or RingfenceConfig()
        self._base = ""
        self._workspace: Workspace | None = None
        self._container: PodmanSandbox | None = None

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return RingfenceConfig(**config)

    @classmethod
    async def sample_init(cls, task_name: str, config: BaseModel | str | None, metadata: Any) -> dict[str, Any]:
        """Open a workspace for a sample.

        Raises:
            TypeError, ValueError: the configuration is of another sandbox, or a policy is none.
            OSError, RingfenceError: the source cannot be copied, or the copy not be opened.
        """
        given = RingfenceConfig(source=config) if isinstance(config, str) else config
        if given is not None and not isinstance(given, RingfenceConfig):
            raise TypeError(f"a RingfenceConfig or a directory is wanted, not a {type(given).__name__}")
        made = cls(given)
        try:
            await in_thread(lambda cancellation: made.open())
        except BaseException:
            made.close()
            raise
        return {"default": made}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: dict[str, Any], interrupted: bool) -> None:
        for environment in environments.values():
            await in_thread(lambda cancellation, made=environment: made.close())

    def open(self) -> None:
        """Copy the source and open the copy. Raises as `sample_init`."""
        config = self._config
        source = config.source and os.path.realpath(config.source)
        if config.keep:
            os.makedirs(config.keep, exist_ok=True)
        self._base = os.path.realpath(tempfile.mkdtemp(prefix="ringfence-", dir=config.keep or None))
        root = os.path.join(self._base, "workspace")
        if source:
            shutil.copytree(source, root, symlinks=True)
        else:
            os.mkdir(root)
        policies = policies_of(Path(source or root), config.policies)
        self._workspace = Workspace.open(root, store=None if config.keep else os.path.join(self._base, "store"))
        if config.podman:
            self._container = PodmanSandbox(
                root,
                filesystem=self._workspace.filesystem,
                image=config.image,
                project=source or None,
                network=cast("Any", config.network),
            )
        self.calls = DoorCalls(
            self._workspace,
            policies=cast("Sequence[BasePolicy]", policies),
            rollback_on_error=config.rollback_on_error,
            run=None if self._container is None else self._container.run,
        )

    def close(self) -> None:
        """Close the workspace, and remove it unless it is to be kept. Raises OSError."""
        for opened in (self._container, self._workspace):
            if opened is not None:
                opened.close()
        if self._base and not self._config.keep:
            shutil.rmtree(self._base, ignore_errors=True)

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 (the name that Inspect gives it)
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command as one transaction. It is never tried again.

        Raises:
            SandboxUserUnsupportedError: it is to run as another user.
            SandboxUnavailableError: there is no container, or the workspace is closed.
            TimeoutError: it took too long, and is rolled back.
            PermissionError: a policy denied it, or it may not be executed, or ``cwd`` is not in the workspace.
            OutputLimitExceededError: it printed too much. What it changed is a step all the same.
        """
        self._check_user(user)
        place = self._place(cwd or "")
        argv = cmd if place is not None else ["sh", "-c", _GO, "sh", str(cwd), *cmd]

        def run(cancellation: Cancellation) -> tuple[CommandResult, str | None, str | None]:
            result = self.calls.run(
                argv,
                cwd=place or "",
                env=env,
                stdin=input,
                timeout_seconds=timeout or LONGEST_SECONDS,
                cancellation=cancellation,
            )
            return result, self.calls.whole(result.stdout), self.calls.whole(result.stderr)

        result, out, err = await self._do(run)
        if result.timed_out:
            raise TimeoutError(f"the command {result.failure}")
        if result.not_started and result.exit_code == CANNOT_START:
            raise PermissionError(errno.EACCES, result.not_started, cmd[0])
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if out is None or err is None or max(len(out.encode()), len(err.encode())) > limit:
            shown = f"{result.stdout}{result.stderr}"
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, shown)
        lines = "\n".join(filter(None, [err, result.failure, rollback_note(result)]))
        return ExecResult(result.exit_code == 0, result.exit_code, out, lines)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file as one step. Raises PermissionError for one outside of the workspace, and OSError."""
        data = contents.encode() if isinstance(contents, str) else contents
        place = self._place(file)
        if place is None:
            await self._do(lambda cancellation: self._script(_WRITE, file, data))
            return
        await self._do(
            lambda cancellation: self.calls.change(
                "write_file", lambda: self.calls.files.write_bytes(place, data), cancellation
            )
        )

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file. Raises as `write_file`, and OutputLimitExceededError for a large one."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        place = self._place(file)

        def read(cancellation: Cancellation) -> bytes | None:
            if place is None:
                return self._script(_READ, file)
            if self.calls.files.stat(place).size_bytes > limit:
                return None
            return self.calls.files.read_bytes(place).content

        data = await self._do(read)
        if data is None or len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def _place(self, path: str) -> str | None:
        """The path below the root. None: it is elsewhere in the container, where only commands reach it."""
        if self._container is None:
            return self.calls.place(path)
        inside = os.path.normpath(os.path.join(PodmanSandbox.mount_point, path))
        below = os.path.relpath(inside, PodmanSandbox.mount_point)
        return None if below == ".." or below.startswith("../") else self.calls.place(below)

    def _script(self, script: str, file: str, stdin: bytes = b"") -> bytes | None:
        """What a script in the container read of a file elsewhere in it. None: it is too large."""
        result = self.calls.run(["sh", "-c", script, "sh", file], stdin=stdin)
        if result.exit_code:
            number = result.exit_code if result.exit_code in (errno.ENOENT, errno.EISDIR) else errno.EACCES
            raise OSError(number, os.strerror(number).lower(), file)
        out = self.calls.whole(result.stdout)
        return None if out is None else base64.b64decode(out)

    def _check_user(self, user: str | None) -> None:
        own = set() if self._container is not None else {str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name}
        if user is not None and user not in own:
            raise SandboxUserUnsupportedError(f"a command cannot run as {user!r} here: leave the user out")

    async def _do(self, work: Callable[[Cancellation], ValueT]) -> ValueT:
        """Do the work in a thread, and record its receipts; the errors of ringfence become those of Inspect."""

        def do(cancellation: Cancellation) -> ValueT:
            try:
                self.calls.files.check_open()
            except ValueError as error:
                raise SandboxUnavailableError(f"the workspace {self.calls.root} is closed") from error
            try:
                return work(cancellation)
            except CallDeniedError as error:
                raise PermissionError(errno.EACCES, str(error)) from error
            except NoContainerError as error:
                raise SandboxUnavailableError(str(error)) from error

        receipts: list[Receipt] = []
        token = COLLECTED.set(receipts)
        try:
            return await in_thread(do)
        finally:
            COLLECTED.reset(token)
            for receipt in receipts_json([one for one in receipts if one.changes]):
                transcript().info(receipt, source="ringfence")
