"""The command ``ringfence exec``: a command line as one transaction over the files of a directory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ringfence.errors import RingfenceError, WorkspaceLockedError
from ringfence.escapes import display_path
from ringfence.failures import describe_error
from ringfence.participants import Change
from ringfence.receipts import change_json
from ringfence_cli.options import (
    ASK,
    ASK_TIMEOUT,
    IMAGE,
    POLICY,
    RECEIPTS,
    Command,
    Invocation,
    nearest_workspace,
    network,
    seconds,
)
from ringfence_sandbox import Workspace
from ringfence_tools.printable import plural
from ringfence_tools.runs.outputs import ErrorStream, OutputFile, open_output, recording
from ringfence_tools.runs.recovered_call import describe_recovery

if TYPE_CHECKING:
    from ringfence.runtime.policy import Policy
    from ringfence_sandbox import CommandResult

DENIED, OURS = 122, 125
LONGEST_SECONDS = 24 * 3600.0
MAX_PATHS = 8
TAG = "exec"
_JOINS = "the outer `ringfence exec` keeps or takes back what this command does"
_WORDS = "ringfence_cli.command_words"
_USAGE = "write `--` before the command: ringfence exec [DIR] [OPTIONS] -- COMMAND..."


class FailedError(click.ClickException):
    """Something of ringfence's own failed, and no command's exit code is known."""

    exit_code = OURS


class NotUnderstoodError(click.UsageError):
    """The command line cannot be understood."""

    exit_code = OURS


def _ours(error: click.ClickException) -> click.ClickException:
    if isinstance(error, click.UsageError):
        return NotUnderstoodError(error.format_message(), error.ctx)
    return FailedError(error.format_message())


class ExecCommand(Command):
    """What stands behind ``--`` is the command, as it is. All that fails of ringfence's own has the exit code 125."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, found = args, list[str]()
        if "--" in args:
            at = args.index("--")
            own, found = args[:at], args[at + 1 :]
        ctx.meta[_WORDS] = found
        try:
            rest = super().parse_args(ctx, own)
            if not found and not ctx.resilient_parsing:
                raise click.UsageError(_USAGE, ctx)
        except click.ClickException as error:
            raise _ours(error) from None
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[DIR]", "[OPTIONS]", "--", "COMMAND..."]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            raise _ours(error) from None
        except click.Abort:
            raise
        except (RingfenceError, OSError, ValueError) as error:
            raise FailedError(describe_error(error)) from None


@click.command("exec", cls=ExecCommand)
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[DIR]", default="."
)
@click.option("--keep-on-error", is_flag=True, help="Keep what a command changed that ends with another code than 0.")
@click.option("--dry-run", is_flag=True, help="Take everything back at the end, and only say what it changed.")
@click.option(
    "--interactive/--no-interactive",
    default=None,
    help="Give the command the terminal, and keep what it changed unless you say otherwise at its end.  [default: "
    "where standard input is a terminal]",
)
@click.option("--timeout", "timeout_seconds", callback=seconds, metavar="TIME", help="End it after this time.")
@click.option(
    "--workspace",
    type=click.Choice(["disk", "podman"]),
    default="disk",
    show_default=True,
    help="Run the command on this machine, or in a Podman container, where it reads no input.",
)
@IMAGE
@click.option(
    "--network",
    "networks",
    callback=network,
    multiple=True,
    metavar="KIND",
    help="With podman: as for `ringfence run`.",
)
@POLICY
@ASK
@ASK_TIMEOUT
@RECEIPTS
@click.option("--patch", type=click.Path(path_type=Path), metavar="FILE", help="Save the patch, for `git apply`.")
@click.option("--message", metavar="TEXT", default=TAG, help="What the step is called in the log.")
@click.option("--quiet", is_flag=True, help="Say nothing on standard error but errors.")
@click.option(
    "--json", "as_json", is_flag=True, expose_value=False, help="Print one JSON object, with what the command printed."
)
@click.pass_context
def exec(ctx: click.Context, **given: Any) -> int:  # noqa: A001 - the command's name
    """Run COMMAND as one transaction over the files of DIR: kept if it exits with 0, else rolled back.

    It begins in DIR. If DIR has no history and a directory above has one, the transaction is over that one. All that it
    starts and leaves running is ended. The exit code is the command's; 122 if a policy denied it, 124 after --timeout,
    125 if ringfence itself failed, 126 and 127 if the command cannot be started. With --json, "ended_by" says whose it
    is. Inside of another `ringfence exec` it is a part of that.
    """
    return _Exec(ctx.obj, ctx.meta[_WORDS], **given).run()


class _Exec:
    def __init__(
        self,
        invocation: Invocation,
        words: Sequence[str],
        *,
        directory: Path,
        keep_on_error: bool,
        dry_run: bool,
        interactive: bool | None,
        timeout_seconds: float | None,
        workspace: Literal["disk", "podman"],
        image: str | None,
        networks: str | None,
        policies: Sequence[str],
        asks: Sequence[str],
        ask_seconds: float | None,
        receipts: Path | None,
        patch: Path | None,
        message: str,
        quiet: bool,
    ) -> None:
        self.invocation, self.words, self.directory = invocation, words, directory
        self.root = nearest_workspace(directory, quiet=quiet)
        self.cwd = os.path.relpath(os.path.realpath(directory), os.path.realpath(self.root))
        self.keep_on_error, self.dry_run, self.seconds = keep_on_error, dry_run, timeout_seconds or LONGEST_SECONDS
        self.podman, self.image, self.network = workspace == "podman", image, networks
        self.specs, self.asks, self.ask_seconds = policies, asks, ask_seconds
        self.receipts, self.patch, self.message, self.quiet = receipts, patch, message, quiet
        self.errors = ErrorStream()
        if (image is not None or networks is not None) and not self.podman:
            raise click.UsageError("--image and --network are for --workspace podman")
        is_terminal = sys.stdin.isatty() and not invocation.wants_json and not self.podman and not dry_run
        self.interactive = is_terminal if interactive is None else interactive
        if self.interactive and (invocation.wants_json or self.podman or dry_run):
            raise click.UsageError("--interactive is for a command on this machine, without --json and --dry-run")

    def run(self) -> int:
        policies = self._policies()
        with ExitStack() as stack:
            patch = open_output(OutputFile, self.patch, self.root, stack)
            receipts = open_output(_AppendedFile, self.receipts, self.root, stack)
            try:
                with self.invocation.signals.let_through(), self._opened() as workspace:
                    before = workspace.newest
                    done = self._done(workspace, policies)
                    text = workspace.diff_since(before) if patch is not None and done.kept else b""
            except KeyboardInterrupt:
                raise click.Abort("interrupted: the command has ended, and is rolled back") from None
            except WorkspaceLockedError:
                if "RINGFENCE_CALL" not in os.environ or self.dry_run or self.specs or self.asks:
                    raise
                return self._join()
            if receipts is not None and done.receipt is not None:
                from ringfence_tools.runs.outputs import json_line

                receipts.write(json_line(done.receipt.to_json()))
            if patch is not None:
                patch.replace(text)
        return self._report(done)

    def _policies(self) -> tuple[Policy, ...]:
        from ringfence_cli.terminal import Terminal, has_person
        from ringfence_tools.runs.asking import approval_of, nobody
        from ringfence_tools.runs.owner_policies import policies_of

        found = policies_of(self.root, self.specs)
        if not self.asks:
            return found
        ask = Terminal(self.errors) if has_person() else nobody
        return (*found, approval_of(self.asks, self.ask_seconds, ask, self.root))

    def _opened(self) -> Workspace:
        with recording() as progress:
            workspace = Workspace.open(self.root, progress=progress)
        if workspace.recovered is not None:
            self.errors.say(describe_recovery(workspace.recovered, self.root))
        return workspace

    def _done(self, workspace: Workspace, policies: Sequence[Policy]) -> CommandResult:
        on_error: Literal["keep", "rollback"] = "keep" if self.keep_on_error else "rollback"
        if self.podman:
            return self._in_container(workspace, policies, on_error)
        if self.interactive:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal it is for the command
            try:
                return workspace.run_in_terminal(
                    self.words,
                    cwd=self.cwd,
                    tag=self.message,
                    timeout_seconds=self.seconds,
                    policies=policies,
                    rolls_back=self._rolls_back,
                )
            finally:
                signal.signal(signal.SIGINT, before)
        return workspace.run(
            self.words,
            cwd=self.cwd,
            timeout_seconds=self.seconds,
            policies=policies,
            on_error=on_error,
            dry_run=self.dry_run,
            streams="output" if self.invocation.wants_json else "inherited",
            tag=self.message,
        )

    def _in_container(
        self, workspace: Workspace, policies: Sequence[Policy], on_error: Literal["keep", "rollback"]
    ) -> CommandResult:
        from ringfence_sandbox import PodmanSandbox

        def show(stream: str, data: bytes) -> None:
            out = sys.stdout if stream == "stdout" else sys.stderr
            out.buffer.write(data)
            out.buffer.flush()

        with PodmanSandbox(
            self.root, image=self.image, network=self.network or "none", filesystem=workspace.filesystem
        ) as sandbox:
            return sandbox.run(
                self.words,
                cwd=self.cwd,
                timeout_seconds=self.seconds,
                policies=policies,
                on_error=on_error,
                dry_run=self.dry_run,
                on_output=None if self.invocation.wants_json else show,
                tag=self.message,
            )

    def _rolls_back(self, exit_code: int, changes: Sequence[Change]) -> bool:
        """Ask a person about a command that failed. Without an answer, its changes stay."""
        from ringfence_cli.terminal import has_person

        if exit_code == 0 or self.keep_on_error or not has_person():
            return False
        self.errors.say(f"the command ended with exit code {exit_code}, and changed:")
        for line in _lines(changes):
            self.errors.say(line)
        self.errors.write("take these changes back? [y/N] ")
        self.errors.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def _join(self) -> int:
        """Be the command: a part of the outer one."""
        if not self.quiet:
            self.errors.say(f"ringfence: {_JOINS}")
        os.chdir(self.directory)
        try:
            os.execvp(self.words[0], [*self.words])  # noqa: S606 - it is what was asked for
        except OSError as error:
            self.errors.say(f"ringfence: {self.words[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126

    def _report(self, done: CommandResult) -> int:
        code = DENIED if done.outcome == "denied" else done.exit_code
        if self.invocation.wants_json:
            self.invocation.put_json(_json(done, code))
            return code
        if done.exit_code in (126, 127) and done.stderr and not self.podman:  # it cannot be started
            self.errors.say(f"ringfence: {done.stderr.strip('[]')}")
        if self.quiet:
            return code
        what = {"committed": "kept", "denied": "denied, and taken back"}.get(done.outcome, "taken back")
        if not done.changes:
            self.errors.say("ringfence: nothing changed" if done.kept else f"ringfence: {_why(done)}; nothing changed")
            self._say_notes(done)
            return code
        which = f" as step {done.step.number}" if done.step is not None else ""
        reason = "" if done.kept else f" ({_why(done)})"
        self.errors.say(f"ringfence: {plural(len(done.changes), 'change')} {what}{which}{reason}:")
        for line in _lines(done.changes):
            self.errors.say(line)
        self._say_notes(done)
        return code

    def _say_notes(self, done: CommandResult) -> None:
        for line in done.notes:
            self.errors.say(f"ringfence: {line}")


class _AppendedFile(OutputFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, append=True)


def _why(done: CommandResult) -> str:
    if done.failure:
        return done.failure
    denial = next((one for one in done.receipt.policies if not one.allowed), None) if done.receipt else None
    if done.outcome == "denied" and denial is not None:
        return f"the policy {denial.policy}: {denial.reason or 'no reason given'}"
    return "as you asked" if done.outcome == "rolled_back" else f"exit code {done.exit_code}"


def _lines(changes: Sequence[Change]) -> list[str]:
    more = [f"  and {len(changes) - MAX_PATHS} more"] if len(changes) > MAX_PATHS else []
    return [f"  {change.kind} {display_path(change.path)}" for change in changes[:MAX_PATHS]] + more


def _json(done: CommandResult, code: int) -> Mapping[str, object]:
    receipt = done.receipt
    return {
        "exit_code": code,
        "ended_by": "ringfence" if code != done.exit_code or done.timed_out else "command",
        "command_exit_code": done.exit_code,
        "outcome": done.outcome,
        "failure": done.failure,
        "step": None if done.step is None else done.step.number,
        "changes": [change_json(change) for change in done.changes],
        "notes": [*done.notes],
        "leftovers": done.leftovers,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "receipt": None if receipt is None else receipt.to_json(),
    }
