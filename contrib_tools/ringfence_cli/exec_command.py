"""The command ``ringfence exec``: a command line as one transaction over the files of a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from ringfence.errors import RingfenceError, WorkspaceLockedError
from ringfence.escapes import display_path
from ringfence.failures import describe_error
from ringfence.participants import Change
from ringfence.policies.effects import HiddenFilesPolicy
from ringfence_cli.exec_report import OURS, change_lines, exit_code, report_json, report_lines
from ringfence_cli.options import (
    ASK,
    ASK_TIMEOUT,
    IMAGE,
    PATHS,
    POLICY,
    RECEIPTS,
    THIS_DIRECTORY,
    Command,
    Invocation,
    complete_word,
    nearest_workspace,
    network,
    seconds,
    without_words,
)
from ringfence_sandbox import Workspace
from ringfence_tools.runs.outputs import MAX_LISTED, ErrorStream, OutputFile, json_line, open_output, recording
from ringfence_tools.runs.recovered_call import describe_recovery

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ringfence.runtime.policy import Policy
    from ringfence_sandbox import CommandResult

TIMED_OUT = 124
LONGEST_SECONDS = 24 * 3600.0
TAG = "exec"
_JOINS = "the outer `ringfence exec` keeps or takes back what this command does"
_INSIDE = ("directory", "timeout_seconds", "interactive", "quiet")
"""The parameters that are also for a command inside of another `exec`."""
_SHAPE = "ringfence exec [DIR] [OPTIONS] -- COMMAND..."


class FailedError(click.ClickException):
    """Something of ringfence's own failed, and no command's exit code is known."""

    exit_code = OURS


class NotUnderstoodError(click.UsageError):
    """The command line cannot be understood."""

    exit_code = OURS


def _with_exit_code(error: click.ClickException) -> click.ClickException:
    if isinstance(error, click.UsageError):
        return NotUnderstoodError(error.format_message(), error.ctx)
    return FailedError(error.format_message())


class ExecCommand(Command):
    """What stands behind ``--`` is the command, as it is. All that fails of ringfence's own has the exit code 125."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = without_words(ctx, args)
        try:
            rest = super().parse_args(ctx, own)
            if not ctx.meta[PATHS] and not ctx.resilient_parsing:
                what = "there is no command behind `--`" if "--" in args else "write `--` before the command"
                raise click.UsageError(f"{what}: {_SHAPE}", ctx)
        except click.UsageError as error:
            if "--" not in args and "`--`" not in error.message:  # the command was taken for DIR and options
                message = f"{error.format_message()} Write `--` before the command: {_SHAPE}"
                raise NotUnderstoodError(message, error.ctx) from None
            raise _with_exit_code(error) from None
        except click.ClickException as error:
            raise _with_exit_code(error) from None
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return complete_word(ctx, incomplete) or super().shell_complete(ctx, incomplete)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[DIR]", "[OPTIONS]", "--", "COMMAND..."]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            raise _with_exit_code(error) from None
        except click.Abort:
            raise
        except (RingfenceError, OSError, ValueError) as error:
            raise FailedError(describe_error(error)) from None

    def failure_json(self, message: str, code: int) -> Mapping[str, object]:
        return {**super().failure_json(message, code), "ended_by": "ringfence"}


@click.command("exec", cls=ExecCommand)
@THIS_DIRECTORY
@click.option("--keep-on-error", is_flag=True, help="Keep what a command changed that ends with another code than 0.")
@click.option("--discard", is_flag=True, help="Roll a failed command back also if not all of its files can be kept.")
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
@click.option(
    "--allow-hidden", "allowed", multiple=True, metavar="GLOB", help="Let the command change these hidden files."
)
@ASK
@ASK_TIMEOUT
@RECEIPTS
@click.option("--patch", type=click.Path(path_type=Path), metavar="FILE", help="Save the patch, for `git apply`.")
@click.option("--message", metavar="TEXT", help="What the step is called in the log, instead of the command.")
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
    asked = [param for param in ctx.command.params if _is_given(ctx, param) and param.name not in _INSIDE]
    return _Exec(ctx.obj, ctx.meta[PATHS], [param.opts[0] for param in asked], **given).run()


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE


class _Exec:
    def __init__(
        self,
        invocation: Invocation,
        words: Sequence[str],
        outer: Sequence[str],
        *,
        directory: Path,
        keep_on_error: bool,
        discard: bool,
        dry_run: bool,
        interactive: bool | None,
        timeout_seconds: float | None,
        workspace: Literal["disk", "podman"],
        image: str | None,
        networks: str | None,
        policies: Sequence[str],
        allowed: Sequence[str],
        asks: Sequence[str],
        ask_seconds: float | None,
        receipts: Path | None,
        patch: Path | None,
        message: str | None,
        quiet: bool,
    ) -> None:
        self.invocation, self.words, self.directory = invocation, words, directory
        self.outer, self.limit = outer, timeout_seconds
        self.root = nearest_workspace(directory, quiet=quiet)
        self.cwd = os.path.relpath(os.path.realpath(directory), os.path.realpath(self.root))
        self.discard = discard
        self.keep_on_error, self.dry_run, self.seconds = keep_on_error, dry_run, timeout_seconds or LONGEST_SECONDS
        self.podman, self.image, self.network = workspace == "podman", image, networks
        self.allowed = allowed
        self.specs, self.asks, self.ask_seconds = policies, asks, ask_seconds
        self.receipts, self.patch, self.quiet = receipts, patch, quiet
        self.tag, self.title = (TAG, None) if message is None else (message, "")
        self.errors = ErrorStream()
        if (image is not None or networks is not None) and not self.podman:
            raise click.UsageError("--image and --network are for --workspace podman")
        if allowed and self.podman:
            raise click.UsageError("--allow-hidden is for a command on this machine: a container hides these files")
        is_terminal = sys.stdin.isatty() and not invocation.wants_json and not self.podman and not dry_run
        self.interactive = is_terminal if interactive is None else interactive
        if self.interactive and (invocation.wants_json or self.podman or dry_run):
            raise click.UsageError("--interactive is for a command on this machine, without --json and --dry-run")

    def run(self) -> int:
        policies = self._policies()
        if not self.quiet:
            self._announce(policies)
        with ExitStack() as stack:
            patch = open_output(OutputFile, self.patch, self.root, stack)
            receipts = open_output(_AppendedFile, self.receipts, self.root, stack)
            try:
                with self.invocation.signals.let_through(), self._opened() as workspace:
                    before = workspace.newest
                    done = self._done(workspace, policies)
                    text = self._patch(workspace, before, done) if patch is not None else b""
            except KeyboardInterrupt as error:
                became = "; ".join(getattr(error, "__notes__", ["it is rolled back"]))
                raise click.Abort(f"interrupted: the command has ended; {became}") from None
            except WorkspaceLockedError as error:
                if not error.is_around:
                    raise
                return self._join()
            if receipts is not None and done.receipt is not None:
                receipts.write(json_line(done.receipt.to_json()))
            if patch is not None:
                patch.replace(text)
        if self.invocation.wants_json:
            self.invocation.put_json(report_json(done))
            return exit_code(done)
        if done.not_started:
            self.errors.say(f"ringfence: {done.not_started}")
        for line in () if self.quiet else report_lines(done):
            self.errors.say(line)
        return exit_code(done)

    def _policies(self) -> tuple[Policy, ...]:
        from ringfence_cli.run_questions import RunQuestions
        from ringfence_cli.terminal import Terminal, has_person
        from ringfence_tools.runs.asking import approval_of
        from ringfence_tools.runs.owner_policies import policies_of

        found = policies_of(self.root, self.specs)
        if not self.asks:
            return found
        ask = RunQuestions(Terminal(self.errors) if has_person() else None)
        return (*found, approval_of(self.asks, self.ask_seconds, ask, self.root))

    def _announce(self, policies: Sequence[Policy]) -> None:
        from ringfence_cli.terminal import has_person
        from ringfence_tools.runs.asking import NOBODY_AT_START
        from ringfence_tools.runs.unused_patterns import unused_patterns

        if self.asks and not has_person():
            self.errors.say(NOBODY_AT_START)
        for line in unused_patterns(policies, None, self.root)[:MAX_LISTED]:
            self.errors.say(line)

    def _patch(self, workspace: Workspace, before: str, done: CommandResult) -> bytes:
        """Return the patch of what was kept, or of a dry run would have been."""
        if done.kept:
            return workspace.diff_since(before)
        if done.outcome != "rolled_back" or not self.dry_run or done.receipt is None:
            return b""
        call = done.receipt.call_id
        number = next((entry.number for entry in workspace.aborted() if entry.call_id == call), None)
        return b"" if number is None else workspace.aborted_step(number).patch

    def _opened(self) -> Workspace:
        with recording() as progress:
            workspace = Workspace.open(self.root, progress=progress)
        if workspace.recovered is not None:
            self.errors.say(describe_recovery(workspace.recovered, self.root))
        outside = None if self.quiet or self.podman else workspace.filesystem.git_outside
        if outside is not None:
            self.errors.say(
                f"ringfence: git's data is outside of the workspace and not restored: {display_path(outside)}"
            )
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
                    tag=self.tag,
                    title=self.title,
                    timeout_seconds=self.seconds,
                    policies=policies,
                    rolls_back=self._rolls_back,
                )
            finally:
                signal.signal(signal.SIGINT, before)
        if self.allowed and workspace.filesystem.hidden is not None:
            policies = (HiddenFilesPolicy(allow=self.allowed, deny_new=False), *policies)
        return workspace.run(
            self.words,
            cwd=self.cwd,
            timeout_seconds=self.seconds,
            policies=policies,
            on_error=on_error,
            dry_run=self.dry_run,
            discard=self.discard,
            streams="output" if self.invocation.wants_json else "inherited",
            tag=self.tag,
            title=self.title,
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
                tag=self.tag,
                title=self.title,
            )

    def _rolls_back(self, exit_code: int, changes: Sequence[Change]) -> bool:
        """Ask a person about a command that failed. Without an answer, its changes stay."""
        from ringfence_cli.terminal import has_person

        if exit_code == 0 or self.keep_on_error or not has_person():
            return False
        self.errors.say(f"the command ended with exit code {exit_code}, and changed:")
        for line in change_lines(changes):
            self.errors.say(line)
        self.errors.write("take these changes back? [y/N] ")
        self.errors.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def _join(self) -> int:
        """Run the command as a part of the outer one."""
        if self.outer:
            raise click.UsageError(
                f"{', '.join(self.outer)}: not inside of another `ringfence exec`, which decides and reports for both"
            )
        if not self.quiet:
            self.errors.say(f"ringfence: {_JOINS}")
        try:
            os.chdir(self.directory)
            if self.limit is None:
                os.execvp(self.words[0], [*self.words])  # noqa: S606 - it is what was asked for
            with self.invocation.signals.let_through():
                return self._run_inside(self.limit)
        except OSError as error:
            self.errors.say(f"ringfence: {self.words[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126

    def _run_inside(self, seconds: float) -> int:
        """Run the command with a time limit. What it leaves running ends with the outer command."""
        is_apart = not sys.stdin.isatty()  # else it has to stay where the terminal is
        with subprocess.Popen(self.words, start_new_session=is_apart) as process:
            try:
                code = process.wait(seconds)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                self.errors.say(f"ringfence: timed out after {seconds:g} seconds")
                return TIMED_OUT
            finally:
                with suppress(ProcessLookupError):
                    if is_apart:
                        os.killpg(process.pid, signal.SIGKILL)
                    elif process.returncode is None:
                        process.kill()


class _AppendedFile(OutputFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, append=True)
