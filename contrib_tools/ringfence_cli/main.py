"""The command ``ringfence``. What a command needs is imported when it runs: ``--help`` is quick."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence import __version__
from ringfence_cli.options import (
    ALLOW_GIT,
    ASK,
    ASK_TIMEOUT,
    DETECT,
    IMAGE,
    POLICY,
    RECEIPTS,
    SECTION,
    THIS_DIRECTORY,
    VIEW,
    WITH_IGNORED,
    WRITE,
    CandidateOptions,
    Commands,
    Invocation,
    container,
    hidden_of,
    hiding,
    place_of,
    seconds,
    usd,
)
from ringfence_cli.overrides import overrides
from ringfence_cli.sandbox_commands import sandbox
from ringfence_tools.runs.command_errors import INTERRUPTED, UNAVAILABLE, BusyError, NotStartedError
from ringfence_tools.runs.signals import Signals

if TYPE_CHECKING:
    from typing import Literal

    from ringfence_sandbox import Detect
    from ringfence_tools.runs.place import WorkspaceKind

STANDARD_ERROR = 2
HISTORY = {
    "log": "List the steps of DIR, newest first, and what somebody else changed in between.",
    "show": "Show what a step of DIR changed.",
    "diff": "Print the patch from the state after step A (by default the oldest) to that after B (by default the "
    "newest).",
    "apply": "Apply PATCH, a unified diff or `-` for standard input, to the files of DIR as one step, or not at all.",
    "undo": "Reverse the newest N steps of DIR, by default one.",
    "restore": "Bring the files of DIR back to what they were after STEP, a number or a name; 0 is the beginning.",
    "checkpoint": "Give the files of DIR as they are a NAME, for `restore` and `diff`.",
    "recover": "Roll back a call that a crash interrupted in DIR, if there is one.",
    "export": "Write the changes of DIR from step A (by default the oldest) to B (by default the newest) for git.",
    "gc": "Drop from the history of DIR what its newest and its named steps do not need.",
}
FORKS = {
    "fork": "Make a fork of DIR called NAME: a directory with all of its files and a history of its own.",
    "forks": "List the forks of DIR that were not discarded.",
    "promote": "Make the changes of the fork NAME in DIR, as one step, which can be undone.",
    "discard": "Delete the fork NAME of DIR: its files and its history.",
}
LAZY = {
    **{name: ("ringfence_cli.forks", sentence) for name, sentence in FORKS.items()},
    **{name: ("ringfence_cli.history", sentence) for name, sentence in HISTORY.items()},
    "batch": (
        "ringfence_cli.batch",
        "Many tasks, each on a copy of its workspace: run them, and see how far they are.",
    ),
    "exec": (
        "ringfence_cli.exec_command",
        "Run COMMAND as one transaction over the files of DIR: kept if it exits with 0, else rolled back.",
    ),
    "guard": (
        "ringfence_cli.guard",
        "Make each changing call of an agent's own tools a step that can be undone.",
    ),
    "mcp": ("ringfence_cli.mcp", "Register the server with an agent that you have."),
    "policies": ("ringfence_cli.policies", "Rules about what an agent's calls may change."),
    "stores": (
        "ringfence_cli.stores",
        "List the histories of this machine with size, last use and directory.",
    ),
    "view": (
        "ringfence_cli.view",
        "Show the calls of DIR, or of a file of RECEIPTS, as a page: what each did, also what was rolled back.",
    ),
}


@click.group(cls=Commands, lazy=LAZY, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def ringfence() -> None:
    """Coding agents that change a repository safely: every tool call is a transaction."""
    import logging

    # The log of a failed call, with its traceback, is not shown. The call's receipt has the reason.
    logging.getLogger().addHandler(logging.NullHandler())


@ringfence.command()
@THIS_DIRECTORY
@click.option("--task", metavar="TEXT", help="What to do, or @FILE to read it from.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run that was interrupted in DIR: where it worked, under its policies, to which --policy adds, "
    "and what is left of its limits. With --task, only if that was its task; else a new run begins.",
)
@click.option("--forget", is_flag=True, help="Only drop the interrupted run of DIR: nothing goes on with it any more.")
@click.option(
    "--model",
    metavar="SPEC",
    help="openai:MODEL or anthropic:MODEL, each with @BASE_URL for a compatible server; script:FILE, a written model: "
    "JSON Lines of turns; or an adapter of your own: FILE.py:NAME, MODULE:NAME, or the NAME of an installed plug-in.",
)
@click.option(
    "--workspace",
    type=click.Choice(["memory", "disk", "podman"]),
    help="Where the agent works: on the files of DIR as they are, every step undoable; so, and with commands in a "
    "Podman container; or on a copy in memory.  [default: disk, or with --resume where the run was]",
)
@container
@click.option(
    "--apply/--no-apply",
    default=None,
    help="With memory: write the result back to DIR if the task was done, or only print it.  [default: no-apply]",
)
@click.option("--patch", type=click.Path(path_type=Path), metavar="FILE", help="Save the patch, for `git apply`.")
@RECEIPTS
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a page of HTML that tells of the run, however it ends.",
)
@VIEW
@WRITE
@click.option("--deadline", callback=seconds, metavar="TIME", help="Stop after this time: 90s, 10m, 2h.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Stop when the model has used more.")
@click.option("--max-cost", callback=usd, metavar="USD", help="Stop when the model has cost more: 0.50, 20.")
@click.option("--max-turns", type=click.IntRange(min=1), metavar="N", help="Stop after N turns.  [default: 200]")
@click.option(
    "--max-repeats",
    type=click.IntRange(min=2),
    metavar="N",
    help="Stop when the agent has made a call N times with the same answer, while no file changed.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=2, max=64),
    metavar="N",
    help="Do the task N times, each in a fork of DIR. DIR itself changes only by `ringfence promote`, or --promote. "
    "Tokens and cost are divided among them, and the time by how many follow each other; {candidate} in the SPEC of "
    "--model is the number of each.",
)
@click.option(
    "--score",
    metavar="COMMAND",
    help="With --candidates: score each by a command of the shell where its agent worked. It passes with exit code 0; "
    "of those that pass, the highest number on the last line of the output is best.",
)
@click.option(
    "--score-anyway",
    is_flag=True,
    help="With --score: also if a Python environment in DIR names DIR. Its packages may be those of DIR then.",
)
@click.option(
    "--share",
    multiple=True,
    metavar="DIRECTORY",
    help="With --candidates and --workspace podman: do not copy this directory of DIR. Each candidate can read that of "
    "DIR. Can be repeated.",
)
@click.option("--promote", type=click.Choice(["best"]), help="With --score: make the changes of the best in DIR.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="J",
    help="With --candidates: at most J at once.  [default: one a processor]",
)
@click.option("--fail-if-unchanged", is_flag=True, help="Exit with 6 if the model ended its work and changed nothing.")
@SECTION
@POLICY
@ALLOW_GIT
@DETECT
@WITH_IGNORED
@hiding
@ASK
@ASK_TIMEOUT
@click.option("--quiet", is_flag=True, help="Say nothing on standard error but errors.")
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Print one JSON object instead of the diff.")
@click.pass_obj
def run(invocation: Invocation, **given: Any) -> int:
    """Run an agent's task on the files of DIR; print what it changed.

    The diff, or the JSON object, goes to standard output and everything else to standard error. Exit codes: 0 done,
    1 the task failed, 2 nothing was begun (usage, a busy workspace, a store that cannot be made), 3 the model provider
    failed, 4 the sandbox is not available, 5 deadline, turns or budget used up, 6 nothing was changed and
    --fail-if-unchanged given, 130 interrupted and rolled back. With --json there is always an object, and its
    "outcome" says which it was. With --candidates it is 0 if one passed, or without --score if one was done, and 1 if
    none did or the promotion met a conflict.
    """
    if given.pop("forget"):
        if given["task"] is not None or given["resume"]:
            raise click.UsageError("--forget only drops the interrupted run: give it without --task and --resume")
        from ringfence_cli.resume import forget_run

        return forget_run(given["directory"], invocation)
    if given["model"] is None:
        raise click.MissingParameter(param_hint="'--model'", param_type="option")
    wanted = CandidateOptions.of(given)
    from ringfence_cli.run import run_task
    from ringfence_cli.run_command import RunCommand

    if wanted is not None:
        from ringfence_cli.candidates import run_candidates

        return run_candidates(RunCommand.of(given), wanted, invocation)
    return run_task(RunCommand.of(given), invocation)


@ringfence.command()
@THIS_DIRECTORY
@click.option(
    "--workspace",
    type=click.Choice(["memory", "disk", "podman"]),
    default="disk",
    show_default=True,
    help="Serve the files of DIR as they are, every step undoable; so, and with commands in a Podman container; or a "
    "copy in memory that ends with the server.",
)
@container
@click.option("--http", metavar="HOST:PORT", help="Serve streamable HTTP there, with a token, instead of stdio.")
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A name by which other machines call the server. Without one, it serves this machine alone.",
)
@RECEIPTS
@SECTION
@POLICY
@ALLOW_GIT
@DETECT
@hiding
@ASK
@ASK_TIMEOUT
@click.option("--read-only", is_flag=True, help="Offer only the tools that change nothing.")
@click.option(
    "--max-answer",
    type=click.IntRange(min=4_000),
    metavar="CHARACTERS",
    help="The most that a model gets for one call. Left out, what its client is known to show, else 10,000.",
)
@click.pass_obj
def serve(
    invocation: Invocation,
    directory: Path,
    workspace: WorkspaceKind,
    http: str | None,
    allow_host: tuple[str, ...],
    receipts: Path | None,
    sections: tuple[str, ...],
    policies: tuple[str, ...],
    allow_git: bool,
    detect: Detect,
    hidden_globs: tuple[str, ...],
    no_hide: bool,
    asks: tuple[str, ...],
    ask_seconds: float | None,
    read_only: bool,
    max_answer: int | None,
    **given: Any,
) -> int:
    """Serve the files of DIR to agents over the Model Context Protocol; every tool call is a transaction.

    It speaks on standard input and output, and ends with its client, at Ctrl-C or SIGTERM: what runs is rolled back.
    The token for --http is in RINGFENCE_MCP_TOKEN, or is made and printed on standard error.
    """
    gc.disable()  # until the server runs: what is loaded stays, and looking for garbage in it takes a tenth of the time
    try:
        from ringfence_mcp.command import serve
        from ringfence_mcp.options import ServeOptions
        from ringfence_tools.runs.run_limits import RunLimits
        from ringfence_tools.runs.run_spec import RunSpec

        place = place_of(workspace, given)
        limits = RunLimits(policies, place=place, sections=sections, asks=asks, ask_seconds=ask_seconds)
        hide = hidden_of(hidden_globs, no_hide, directory)
        spec = RunSpec(directory, limits=limits, hide=hide, allow_git=allow_git, detect=detect)
        options = ServeOptions(spec, http, allow_host, receipts, read_only, max_answer)
        return serve(options, invocation.signals)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ringfence"):
            raise
        from ringfence.extras import missing

        raise click.UsageError(missing(error.name, "mcp")) from None
    finally:
        gc.enable()


@ringfence.command()
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Work in DIR, which must not exist yet, and leave it there, with receipts beside it.",
)
@click.option(
    "--workspace",
    type=click.Choice(["memory", "podman"]),
    default="memory",
    show_default=True,
    help="With podman the agent runs the repository's tests itself, in a container.",
)
@IMAGE
@click.option("--candidates", is_flag=True, help="Do the task three times, each in a fork, and promote the best.")
@click.pass_obj
def demo(
    invocation: Invocation,
    keep: Path | None,
    workspace: Literal["memory", "podman"],
    image: str | None,
    candidates: bool,
) -> int:
    """Mend a real repository with a scripted model: no network, no key.

    Its tests fail before and pass after. On the way a write is denied and a failed call is rolled back.
    """
    if candidates:
        if workspace == "podman" or image is not None:
            raise click.UsageError(
                "--candidates is without --workspace podman and --image: the tests run on this machine"
            )
        from ringfence_cli.candidates_demo import demonstrate_candidates

        return demonstrate_candidates(keep, run, invocation)
    from ringfence_cli.demonstration import demonstrate

    if workspace != "podman" and image is not None:
        raise click.UsageError("--image is for --workspace podman, where commands run")
    return demonstrate(keep, invocation.signals, in_container=workspace == "podman", image=image)


ringfence.add_command(overrides)
ringfence.add_command(sandbox)


def _in_utf8() -> None:
    """Start Python again in UTF-8 mode if the locale is not UTF-8. The mode can only be set at the start."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _open_closed_streams() -> None:
    """Open closed standard streams. Else the next opened file would get their descriptor and their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def main() -> None:
    """The entry point. Ends the process."""
    _in_utf8()
    # Never left: until the process ends, an interrupt is raised only where a command lets it through.
    signals = Signals().__enter__()
    atexit.register(signals.ignore)  # the first, which is the last to be called
    _open_closed_streams()
    for descriptor, name in enumerate(("stdout", "stderr"), 1):
        stream: object = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    exit_code = execute(signals)
    signals.end_at_once_with(exit_code)
    sys.exit(exit_code)


def execute(signals: Signals) -> int:
    """Run the command that ``sys.argv`` names, print what went wrong, and return the exit code."""
    invocation = Invocation(signals)
    try:
        return ringfence.main(prog_name="ringfence", obj=invocation, standalone_mode=False) or 0
    except BrokenPipeError:
        return 0
    except Exception as error:
        message, exit_code = _describe(error)
        if invocation.command is serve:
            from ringfence_mcp.refusal import refuse

            refuse(message, signals)
        if invocation.wants_json:
            with suppress(OSError):
                invocation.put_json(_failure(invocation, error, message, exit_code))
        return exit_code


def _describe(error: Exception) -> tuple[str, int]:
    """Print an error. Return its message and the exit code."""
    from ringfence.errors import RingfenceError, SandboxUnavailableError, WorkspaceLockedError
    from ringfence.failures import describe_error, innermost, with_limit
    from ringfence_sandbox import StateDirectoryError
    from ringfence_tools.runs.outputs import ErrorStream

    errors = ErrorStream()
    if isinstance(error, InterruptedError):  # nobody reads
        return str(error.strerror), INTERRUPTED
    if isinstance(error, FileNotFoundError) and _is_nowhere():
        error = NotStartedError("the current directory was removed: change to one that is there")
    elif isinstance(error, StateDirectoryError):
        error = NotStartedError.of(error)
    elif isinstance(error, WorkspaceLockedError):
        error = BusyError(str(error))
    if isinstance(error, click.ClickException):
        errors.show(error)
        return error.format_message(), error.exit_code
    if isinstance(error, click.Abort):
        message, exit_code = str(error) or "interrupted", INTERRUPTED
    elif isinstance(error, SandboxUnavailableError):
        message, exit_code = str(error), UNAVAILABLE
    elif isinstance(error, (RingfenceError, OSError)):
        message, exit_code = describe_error(error), 1
    else:  # a bug of ours: a traceback would not help the user
        cause = innermost(error)
        message, exit_code = with_limit(f"{type(cause).__name__}: {str(cause)!r}", cause), 1
    errors.say(f"ringfence: {message}")
    return message, exit_code


def _is_nowhere() -> bool:
    """Whether the current directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _failure(invocation: Invocation, error: Exception, message: str, exit_code: int) -> Mapping[str, object]:
    """Return the JSON object of a failed command."""
    if invocation.command is not None and invocation.command is not run:
        return invocation.command.failure_json(message, exit_code)
    from ringfence_tools.runs.agent_run import EXIT_CODES, Outcome, RunOutcome

    outcome: Outcome = next(outcome for outcome, code in EXIT_CODES.items() if code == exit_code)
    return RunOutcome("busy" if isinstance(error, BusyError) else outcome, message).to_json()


if __name__ == "__main__":
    main()
