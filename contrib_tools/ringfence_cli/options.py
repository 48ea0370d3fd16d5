"""The common part of the commands: usage errors, groups, options and typed values.

Nothing here is slow to import, so that ``--help`` is quick.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence_tools.runs.place import Place, WorkspaceKind
    from ringfence_tools.runs.signals import Signals

CommandT = TypeVar("CommandT", bound=Callable[..., object])

PATHS = "ringfence_cli.paths"
"""Where click's context has the words behind ``--``. A shell completes one more of them to a file."""
BEHIND = "ringfence_cli.behind"
"""Where it has whether there is a ``--``."""
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_SECONDS = 365 * 24 * 3600.0
BYTES = {"m": 1 << 20, "g": 1 << 30}
LEAST_BYTES = 64 << 20


@dataclass(slots=True)
class Invocation:
    """The state of one run of the program. It is the object of click's contexts."""

    signals: Signals
    command: Command | None = None
    """The name of the command, after it was parsed."""
    wants_json: bool = False
    """Whether a JSON object is still to be printed."""

    def put_json(self, record: Mapping[str, object]) -> None:
        """Print the JSON object of a command. Raises OSError if it cannot be written."""
        from ringfence_tools.runs.outputs import json_line, put

        self.wants_json = False
        put(json_line(record))


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """The options of `run` that are about candidates."""

    count: int
    score: str | None = None
    promotes: bool = False
    jobs: int | None = None
    scores_anyway: bool = False
    """Whether to score although an environment of Python may run the code of the source."""
    share: Sequence[str] = ()
    """Directories that are not copied, and that containers of candidates have from the source."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> CandidateOptions | None:
        """Take these options out of what was given. None: there are to be no candidates. click.UsageError."""
        count, score, jobs = given.pop("candidates"), given.pop("score"), given.pop("jobs")
        promote, anyway, share = given.pop("promote"), given.pop("score_anyway"), given.pop("share")
        if count is None:
            options = (("--score", score), ("--promote", promote), ("--jobs", jobs), ("--score-anyway", anyway or None))
            options += (("--share", share or None),)
            if alone := [option for option, value in options if value is not None]:
                raise click.UsageError(f"{' and '.join(alone)}: for --candidates N")
            return None
        if promote is not None and score is None:
            raise click.UsageError("--promote best needs --score COMMAND, which says what is best")
        return cls(count, score, promote is not None, jobs, anyway, share)


class Command(click.Command):
    """A command that sets on the `Invocation` whether JSON is wanted, also after a usage error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if isinstance(ctx.obj, Invocation):
            ctx.obj.command, ctx.obj.wants_json = self, bool(self.values(ctx, args).get("as_json"))
        return super().parse_args(ctx, self.completed(ctx, args))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            from ringfence_tools.runs.command_errors import spec_refused
            from ringfence_tools.runs.spec_error import SpecError

            if isinstance(error, SpecError):
                raise spec_refused(error, ctx) from None
            raise

    def failure_json(self, message: str, code: int) -> Mapping[str, object]:
        """Return the JSON object of a failure of ringfence's own, with its exit code."""
        return {"error": message, "exit_code": code}

    def completed(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the words of the command line with an argument that was left out."""
        return args

    def values(self, ctx: click.Context, args: list[str]) -> Mapping[str, Any]:
        """Return the words of options and arguments by parameter, before they are converted."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        before, ctx.resilient_parsing = ctx.resilient_parsing, True
        values, _, _ = parser.parse_args(list(args))
        ctx.resilient_parsing = before
        return values


class PathsCommand(Command):
    """A command that takes paths behind ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, without_words(ctx, args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return complete_word(ctx, incomplete) or super().shell_complete(ctx, incomplete)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PATH...]"]


def without_words(ctx: click.Context, args: list[str]) -> list[str]:
    """Return what stands before ``--``. The context gets what stands behind it."""
    at = args.index("--") if "--" in args else len(args)
    ctx.meta[PATHS] = args[at + 1 :]
    ctx.meta[BEHIND] = at < len(args)
    return args[:at]


def complete_word(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Complete a word behind ``--``. Empty where the command line has no ``--``."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")] if ctx.meta.get(BEHIND) else []


def _complete_directory(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return complete_word(ctx, incomplete) or param.type.shell_complete(ctx, param, incomplete)


def given_paths(directory: Path) -> Sequence[str] | None:
    """Return the paths behind ``--``, from the root of the workspace. None: there are none."""
    given: Sequence[str] = click.get_current_context().meta[PATHS]
    if not given:
        return None
    root, here = os.path.realpath(directory), os.getcwd()
    found: list[str] = []
    for path in given:
        absolute = os.path.normpath(os.path.join(here if os.path.commonpath((root, here)) == root else root, path))
        if os.path.commonpath((root, absolute)) != root:
            raise click.UsageError(f"{path} is not in {directory}")
        found.append(os.path.relpath(absolute, root))
    return ["" if path == os.curdir else path for path in found]


def workspace_of(directory: Path, *, quiet: bool = False) -> Path:
    """Return the workspace that contains the current directory, as git does. Another DIR is meant as it is."""
    return directory if directory != Path() else nearest_workspace(directory, quiet=quiet)


def nearest_workspace(directory: Path, *, quiet: bool = False) -> Path:
    """Return the workspace that contains a directory, and say so; the directory itself where there is none."""
    from ringfence.escapes import escape_path
    from ringfence_sandbox import find_workspace
    from ringfence_tools.runs.outputs import ErrorStream

    above = find_workspace(directory)
    if above is None or above == Path(os.path.realpath(directory)):
        return directory
    if not quiet:
        ErrorStream().say(f"ringfence: in {escape_path(str(above))}, which has this directory in its history")
    return above


class Commands(click.Group):
    """Lists each command with the whole first sentence of its help, which click would cut at the end of the line.

    ``lazy`` has commands that are imported when they are run: the module and the first sentence, by name.
    """

    command_class = Command

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*self.commands, *self.lazy))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            return getattr(import_module(self.lazy[cmd_name][0]), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        here = {name: command.get_short_help_str(limit=1000) for name, command in self.commands.items()}
        sentences = here | {name: sentence for name, (_, sentence) in self.lazy.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(sentences.items()))


class Interruptible(Commands):
    """A group of commands that change no workspace: an interrupt may come at any time."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ctx.obj.signals.let_through():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse a duration such as ``90s``, ``10m`` or ``1h30m``."""
    if value is None:
        return None
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise click.BadParameter(f"{value!r} is not a duration: write 90s, 10m or 1h30m", ctx, param)
    found = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not 1 <= found <= LONGEST_SECONDS:
        raise click.BadParameter(f"{value!r} is not between 1s and a year", ctx, param)
    return found


def usd(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse an amount of US dollars such as ``0.50``, ``20`` or ``$5``."""
    if value is None:
        return None
    if not re.fullmatch(r"\$?\d{1,9}(?:\.\d{1,9})?", value) or not float(value.lstrip("$")):
        raise click.BadParameter(f"{value!r} is not an amount of US dollars above 0: write 0.50 or 20", ctx, param)
    return float(value.lstrip("$"))


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse a size such as ``512m`` or ``4g``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([mg])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size: write 512m or 4g", ctx, param)
    found_bytes = int(found[1]) * BYTES[found[2]]
    if found_bytes < LEAST_BYTES:
        raise click.BadParameter(f"{value!r} is too little: a command needs {LEAST_BYTES >> 20}m", ctx, param)
    return found_bytes


def secret(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse what is neither NAME nor NAME=env:VAR. A value on the command line would be seen by others."""
    if not all(re.fullmatch(r"[A-Za-z_]\w*(=env:[A-Za-z_]\w*)?", spec, re.ASCII) for spec in value):
        raise click.BadParameter(
            "write NAME, or NAME=env:VAR for the value of the variable VAR: a value does not belong on a command line, "
            "where other users of the machine see it",
            ctx,
            param,
        )
    return value


def network(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | None:
    """Refuse what is no network. The hosts of several options are one network."""
    if not value:
        return None
    from ringfence_sandbox import allowed_hosts

    try:
        if len({allowed_hosts(one) is not None or one for one in value}) > 1:
            raise ValueError(f"these cannot be had together: {', '.join(value)}")
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return ",".join((value[0], *(one.removeprefix("allow:") for one in value[1:]))) if ":" in value[0] else value[0]


def number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse ``nan``, which click takes to be in every range."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"{value} is not a number", ctx, param)
    return value


def _this_directory(*, exists: bool) -> Callable[[Any], Any]:
    return click.argument(
        "directory",
        type=click.Path(exists=exists, file_okay=False, path_type=Path),
        metavar="[DIR]",
        default=".",
        shell_complete=_complete_directory,
    )


THIS_DIRECTORY = _this_directory(exists=True)
THIS_DIRECTORY_OR_GONE = _this_directory(exists=False)
WITH_IGNORED = click.option(
    "--with-ignored", is_flag=True, help="Show changes of paths that git ignores, which are else only counted."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, expose_value=False, help="Print one JSON object.")
RECEIPTS = click.option(
    "--receipts", type=click.Path(path_type=Path), metavar="FILE", help="Append a line of JSON for every tool call."
)
VIEW = click.option(
    "--view", is_flag=True, help="Serve a page on this machine that follows the work; its address is printed."
)
WRITE = click.option("--write", is_flag=True, help="With --view: let the page undo, restore and reject what it shows.")
SECTION = click.option(
    "--section",
    "sections",
    multiple=True,
    metavar="SPEC",
    help="Tools of your own: FILE.py:NAME or MODULE:NAME, of a section or a function from a session to one, or the "
    "NAME of an installed plug-in. They run in this process, outside of any container; may be given several times.",
)
POLICY = click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SPEC",
    help="allow:GLOB, deny:GLOB, deletions:N, protected, tests:TOOL[=COMMAND]:GLOB, FILE.toml, FILE.py:NAME of a "
    "policy of your own, or the NAME of an installed plug-in; may be given several times. A GLOB with a / (/src, "
    "docs/*.md) is from the root of DIR, one without (*.md) for names at any depth; what matches takes along all that "
    "is below it.",
)
ALLOW_GIT = click.option(
    "--allow-git",
    is_flag=True,
    help="Let commands change git's own data: commit, stash, check out. Hooks and settings stay as they are.",
)
DETECT = click.option(
    "--detect",
    type=click.Choice(["auto", "watch", "scan"]),
    default="auto",
    help="How changes of commands are found: by a scan of all files around each, by a watch (inotify) that names what "
    "to look at, or by a watch where there can be one.  [default: auto]",
)
_HIDING = (
    click.option(
        "--hide",
        "hidden_globs",
        multiple=True,
        metavar="GLOB",
        help="Hide files from tools and commands, besides .env, .env.*, id_rsa and the like, and private keys in *.pem "
        "and *.key; may be given several times.",
    ),
    click.option("--no-hide", is_flag=True, help="Hide no files but those of --hide."),
)
IMAGE = click.option(
    "--image",
    metavar="NAME",
    help="With podman: the container's image.  [default: that of `ringfence sandbox build DIR`, else ringfence's own]",
)
ASK = click.option(
    "--ask",
    "asks",
    multiple=True,
    metavar="WHAT",
    help="Ask before a call is kept, and show what it has really changed: `commands`, `writes`, a GLOB of changed "
    "paths as in --policy, or the name of a tool; may be given several times. Where nobody can answer, it is denied.",
)
ASK_TIMEOUT = click.option(
    "--ask-timeout",
    "ask_seconds",
    callback=seconds,
    metavar="TIME",
    help="How long a call waits for an answer before it is denied.  [default: 5m]",
)
_CONTAINER = (
    IMAGE,
    click.option(
        "--network",
        callback=network,
        multiple=True,
        metavar="KIND",
        help="With podman: the network of commands: none, allow:HOST[:PORT],*.HOST for these hosts alone, or all that "
        "bridge, slirp4netns or pasta reach. Hosts may be given several times.  [default: none]",
    ),
    click.option(
        "--keep-environment",
        is_flag=True,
        help="With podman: a command begins in the directory where the last one ended, with the variables it exported.",
    ),
    click.option(
        "--memory",
        "memory_bytes",
        callback=size,
        metavar="SIZE",
        help="With podman: the memory of all commands together, such as 4g.  [default: 1g]",
    ),
    click.option(
        "--cpus",
        type=click.FloatRange(min=0.1, max=1024),
        callback=number,
        metavar="N",
        help="With podman: how many processors' time commands get.  [default: 1]",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        callback=secret,
        metavar="NAME[=env:VAR]",
        help="With podman: give commands the variable NAME, with its value here or that of VAR. The value is masked in "
        "all that is shown and recorded; may be given several times.",
    ),
    click.option(
        "--command-timeout",
        "command_seconds",
        callback=seconds,
        metavar="TIME",
        help="With podman: the longest time that a model may give a command. A command without one gets 2m at most.  "
        "[default: 20m]",
    ),
)


def container(command: CommandT) -> CommandT:
    """Give a command the options of a container; `place_of` takes their values."""
    for option in reversed(_CONTAINER):
        command = option(command)
    return command


def hiding(command: CommandT) -> CommandT:
    """Give a command the options of hidden files; `hidden_of` takes their values."""
    for option in reversed(_HIDING):
        command = option(command)
    return command


def hidden_of(
    hidden_globs: Sequence[str], no_hide: bool, directory: Path, *, remembered: bool = False
) -> HiddenFiles | None:
    """Return the rule by which files of a directory are hidden; None for that which the store remembers.

    Raises click.BadParameter for a bad pattern.
    """
    from ringfence.errors import PromptValidationError
    from ringfence.filesystem.hidden import HiddenFiles

    if remembered and not hidden_globs and not no_hide:
        return None
    try:
        if hidden_globs:
            from ringfence_tools.runs.policy_specs import (
                refuse_path_of_host,  # what a start without --hide does not load
            )

            for glob in hidden_globs:
                refuse_path_of_host(glob, directory)
        return HiddenFiles(hidden_globs, usual=not no_hide)
    except (PromptValidationError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="'--hide'") from None


def place_of(workspace: WorkspaceKind | None, given: Mapping[str, Any]) -> Place:
    """Raise click.UsageError for an option of the container if the workspace has no container."""
    from ringfence_tools.runs.place import Place

    place = Place(workspace, **given)
    if workspace not in (None, "podman") and place.options:
        raise click.UsageError(f"{' and '.join(place.options)}: for --workspace podman, where commands run")
    try:
        place.secret_values()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return place
