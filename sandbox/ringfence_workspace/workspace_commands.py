"""One command on this machine as a transaction over a workspace."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ringfence.errors import CallCancelledError, CallDeniedError, RingfenceError, TransactionError
from ringfence.filesystem.paths import normalise, os_error
from ringfence.limits import Cancellation
from ringfence.participants import CURRENT_CALL, CallInfo
from ringfence.runtime.policy import BasePolicy, PolicyDecision
from ringfence.runtime.transaction import new_id
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult
from ringfence_workspace.commands import CommandRequest, CommandResult
from ringfence_workspace.workspace_calls import WorkspaceTransaction

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.policy import Policy
    from ringfence.runtime.tool import Tool
    from ringfence_workspace.commands import CommandExit
    from ringfence_workspace.host import HostFilesystem
    from ringfence_workspace.host_commands import HostCommands
    from ringfence_workspace.outputs import CommandOutput

OnError: TypeAlias = Literal["rollback", "keep"]
"""What becomes of the changes of a command that ends with another exit code than 0."""
Streams: TypeAlias = Literal["captured", "output", "inherited"]
"""Which streams of a command are not those of this process: all, only its output, or none."""
TAG = "run"
STAYS = "its changes stay, since no copy of all of them could be kept"
"""A note of the error that ended a command."""
KEPT_OUTPUT_BYTES = 64 << 20
"""Of each stream of a command; only its ends are in the result."""


@dataclass(frozen=True, slots=True)
class CommandParams:
    """A command, as its receipt has it and policies are shown it."""

    command: str | None
    """Text for the shell. None for a program and its arguments."""
    argv: tuple[str, ...] = ()
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: str = ""
    """How much it was given to read, in words."""
    timeout_seconds: float = 0.0
    leave_running: bool = False

    @classmethod
    def of(cls, request: CommandRequest, *, leave_running: bool = False) -> CommandParams:
        """What to record of a request. The values of its variables and its input are not."""
        text = request.text
        return cls(
            text,
            () if text is not None else request.argv,
            request.cwd,
            dict.fromkeys(request.env, "(set)"),
            "" if request.stdin is None else f"{len(request.stdin)} bytes",
            request.timeout_seconds,
            leave_running,
        )


@dataclass(frozen=True, slots=True)
class CommandRules:
    """What is to become of a command's changes."""

    policies: Sequence[Policy] = ()
    on_error: OnError = "rollback"
    dry_run: bool = False
    discard: bool = True
    """Whether a failed command is rolled back where not all that this removes can be kept."""

    def __post_init__(self) -> None:
        if self.on_error not in ("rollback", "keep"):
            raise ValueError(f"on_error is 'rollback' or 'keep', not {self.on_error!r}")

    def keeps(self, result: CommandResult) -> bool:
        """Whether the command is to be kept, as far as it is the command that says so."""
        return not result.failure and (result.exit_code == 0 or self.on_error == "keep")


def command_request(
    command: str | Sequence[str],
    *,
    shell: bool,
    cwd: str,
    env: Mapping[str, str],
    stdin: str | bytes | None,
    timeout_seconds: float,
) -> CommandRequest:
    """The request. Raises TypeError or ValueError for what is none; a text needs ``shell``, a list takes none."""
    if isinstance(command, str) and not shell:
        raise TypeError("the command is a text: say shell=True for a line of the shell, or give a list of arguments")
    if shell and not isinstance(command, str):
        raise TypeError("with shell=True the command is one text, a line of the shell")
    return CommandRequest.of(command, cwd=cwd, env=env, stdin=stdin, timeout_seconds=timeout_seconds, environment=None)


class CommandNotKeptError(RingfenceError):
    """Rolls back the transaction of a command that is not to be kept."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(result.failure or f"the command ended with exit code {result.exit_code}")
        self.result = result


def transact(
    call: WorkspaceTransaction,
    rules: CommandRules,
    execute: Callable[[], CommandResult],
) -> CommandResult:
    """Run a command by ``execute()`` in a transaction; its result, with what became of its changes."""
    result: CommandResult | None = None
    unkept: Sequence[str] = ()
    try:
        with call.running():
            try:
                result = execute()
                call.result = ToolResult.ok(result, f"exit code {result.exit_code}")
                if not rules.keeps(result):
                    raise CommandNotKeptError(result)
            except BaseException as error:
                unkept = () if rules.discard or rules.dry_run else call.refuse_rollback()
                if unkept:
                    error.add_note(STAYS)
                raise
    except CommandNotKeptError:
        pass
    except CallDeniedError:
        if result is None:  # before it ran
            raise
    assert result is not None
    receipt = call.receipt
    assert receipt is not None
    stays = receipt.outcome == "committed" or bool(unkept)
    return replace(
        result,
        changed_paths=tuple(change.path for change in receipt.changes) if stays else (),
        outcome=receipt.outcome,
        changes=receipt.changes,
        step=call.step,
        receipt=receipt,
        notes=tuple(call.report.messages()),
        rollback_refused=bool(unkept),
    )


def check_opaque(call: CallInfo | None) -> None:
    """Raise TransactionError in a call without a scan before it: the changes of a command would not be seen."""
    around = call
    while around is not None and not around.opaque:
        around = around.parent
    if call is not None and around is None:
        raise TransactionError(
            f"{call!r} runs a command, whose changes are only seen around a call of an opaque tool: declare it so, "
            "Tool(..., opaque=True)"
        )


class WorkspaceCommands:
    """Commands of one opened workspace on this machine."""

    def __init__(self, filesystem: HostFilesystem) -> None:
        self._filesystem = filesystem
        self._session = Session()
        self._host: HostCommands | None = None

    def run(
        self,
        request: CommandRequest,
        rules: CommandRules,
        *,
        leave_running: bool = False,
        cancellation: Cancellation | None = None,
        streams: Streams = "captured",
        tag: str = TAG,
        title: str | None = None,
    ) -> CommandResult:
        """Run a command as a transaction."""
        if streams not in ("captured", "output", "inherited"):
            raise ValueError(f"streams is 'captured', 'output' or 'inherited', not {streams!r}")
        if request.stdin is not None and streams != "captured":
            raise ValueError("a command that has the input of this process gets none from stdin=")
        if self._filesystem.read_only:
            raise PermissionError(errno.EROFS, "a command changes files, and the workspace was opened read-only")
        check_opaque(CURRENT_CALL.get())
        call = WorkspaceTransaction(
            self._filesystem,
            self._session,
            tag,
            policies=rules.policies,
            call_id=new_id(),
            params=CommandParams.of(request, leave_running=leave_running),
            title=request.title if title is None else title,
            dry_run=rules.dry_run,
            cancellation=cancellation,
            keeps_hidden=True,
        )

        def execute() -> CommandResult:
            directory = self._directory(request.cwd)
            is_taken = streams != "inherited"
            output = self._filesystem.outputs.of_command(os.urandom(8).hex(), KEPT_OUTPUT_BYTES) if is_taken else None
            try:
                ended = self._commands().run(
                    request,
                    directory=directory,
                    call_id=call.call_id,
                    note=self._filesystem.note_process,
                    on_output=None if output is None else output.take,  # pyright: ignore[reportArgumentType]
                    cancellation=cancellation,
                    leave_running=leave_running,
                    inherits_input=streams == "output",
                )
            finally:
                os.close(directory)
                if output is not None:
                    output.close()
            if cancellation is not None and cancellation.cancelled:
                raise CallCancelledError("the command was cancelled, so nothing of it is kept")
            return _result(request, ended, output)

        return transact(call, rules, execute)

    def run_in_terminal(self, request: CommandRequest, call_id: str) -> CommandResult:
        """Run a command that has the terminal of this process, in no transaction."""
        directory, devnull = self._directory(request.cwd), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            ended = self._commands().run(
                request,
                directory=directory,
                call_id=call_id,
                note=lambda process: devnull,
                on_output=None,
                in_terminal=True,
            )
        finally:
            os.close(directory)
            os.close(devnull)
        return _result(request, ended, None)

    def _commands(self) -> HostCommands:
        from ringfence_workspace.host_commands import HostCommands

        if self._host is None:
            self._host = HostCommands()
        return self._host

    def close(self) -> None:
        """End what commands run under."""
        if self._host is not None:
            self._host.close()

    def _directory(self, cwd: str) -> int:
        """A descriptor of a directory of the workspace."""
        try:
            place = self._filesystem.resolve(normalise(cwd))
            if not self._filesystem.stat(place).is_directory:
                raise os_error(errno.ENOTDIR, place)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise type(error)(
                f"cwd is {cwd!r}, which is no directory of the workspace ({error.strerror}): it is a path from the "
                "root, such as 'src'"
            ) from None
        return os.open(os.path.join(self._filesystem.root, place), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _result(request: CommandRequest, ended: CommandExit, output: CommandOutput | None) -> CommandResult:
    failure, stdout, stderr = "", "", ""
    if ended.timed_out:
        seconds = request.timeout_seconds
        failure = f"timed out after {seconds:g} second{'' if seconds == 1 else 's'}"
    elif ended.unended:
        failure = f"{ended.unended} of its processes cannot be ended: they are another user's, or hang"
    if output is not None:
        stdout, stderr = output.stdout.text(), output.stderr.text()
    if ended.problem:
        stderr = "\n".join(one for one in (stderr, f"[{ended.problem}]") if one)
    return CommandResult(
        ended.exit_code,
        stdout,
        stderr,
        ended.timed_out,
        ended.duration_seconds,
        failure=failure,
        leftovers=ended.leftovers,
        not_started=ended.problem,
        output_files={} if output is None else output.files(),
    )


class RollbackWish(BasePolicy):
    """Whoever ran a command says at its end whether it is to be taken back."""

    name = "whoever ran it"
    runs_last = True
    reason = "it is to be taken back"

    def __init__(self, wishes: Callable[[Sequence[Change]], bool]) -> None:
        self._wishes = wishes

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.deny(self.reason) if self._wishes(changes) else PolicyDecision.allow()
