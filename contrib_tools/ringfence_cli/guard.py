"""The commands ``ringfence guard``: watch the tools that an agent already has."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click

from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence_cli.history import DRY_RUN, STAT, step_name
from ringfence_cli.history import show as show_step
from ringfence_cli.options import AS_JSON, POLICY, Interruptible, Invocation, PathsCommand, given_paths
from ringfence_guard import (
    GUARDED_AGENTS,
    CodexHook,
    CodexTrust,
    GuardedCallRecord,
    GuardLog,
    GuardSettings,
    HookCommand,
    HookInstallation,
    ask_guard,
    cache_around,
    check_person,
    guard_directory,
    guarded_root,
    list_paths,
    open_guarded,
    person_writes,
    save_launcher,
    save_settings,
    scoped_settings,
    stop_guard,
    unreadable_policies,
)
from ringfence_sandbox import StepName, store_directory
from ringfence_tools.client_files import ClientScope
from ringfence_tools.printable import one_line, plural, printable
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, put, put_line
from ringfence_tools.runs.owner_policies import policies_of
from ringfence_tools.runs.policy_specs import is_code

MAX_PATHS = 5
"""The most paths on a line of the log."""
MAX_ARGUMENTS = 80
"""The most characters of a tool and its arguments there."""


@click.group(cls=Interruptible)
def guard() -> None:
    """Make each changing call of an agent's own tools a step that can be undone."""


CLIENT = click.argument("client", type=click.Choice([*GUARDED_AGENTS]), metavar="CLIENT")
WHERE = click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False, metavar="[DIR]"
)
USER = click.option("--user", "personal", is_flag=True, help="For all your projects, instead of the one in DIR.")
HERE = click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    metavar="DIR",
    help="The guarded directory, or one in it.  [default: this one]",
)


@guard.command()
@CLIENT
@WHERE
@USER
@POLICY
@click.option(
    "--background",
    type=click.Choice(["allow", "deny"]),
    default="allow",
    help="Commands that go on after their call.  [default: allow]",
)
@click.option(
    "--rollback-on-failure", is_flag=True, help="Roll back what a command changed that ends with another code than 0."
)
@click.option(
    "--if-unavailable",
    type=click.Choice(["allow", "deny"]),
    default="deny",
    help="Calls that cannot be watched.  [default: deny]",
)
@click.option("--trust", is_flag=True, help="Codex: ask whether to trust the hooks, without which it passes over them.")
def install(
    client: str,
    directory: Path | None,
    personal: bool,
    policies: tuple[str, ...],
    background: str,
    rollback_on_failure: bool,
    if_unavailable: str,
    trust: bool,
) -> None:
    """Guard the tools of CLIENT in DIR: claude, codex, gemini, qwen or opencode.

    Adds hooks to the agent's own settings, and changes nothing else there. A second time replaces the hooks and the
    policies of the first.
    """
    with _failures():
        _check_lasting()
        installation = _installation(client, directory, personal)
        check_person(os.environ, (Path.cwd(), installation.scope.directory))
        _check_options(installation, rollback_on_failure=rollback_on_failure, trust=trust)
        root = None if personal else Path(os.path.realpath(directory or "."))
        settings = GuardSettings(tuple(map(_absolute, policies)), background == "deny", rollback_on_failure)
        policies_of(root or Path.home(), policies)
        if root is not None and not _watches_a_call(root):
            stop_guard(root)
            open_guarded(str(root)).close()  # the first opening reads all files, which no call should wait for
        state = str(store_directory("/").parent.parent)
        command = HookCommand(
            sys.executable,
            _program(),
            state,
            "" if root is None else str(root),
            if_unavailable == "allow",
        )
        save_launcher(state)
        with person_writes(guarded_root(installation.scope.directory), installation.paths):
            installation.install(command)
        dropped = [*_replace_settings(root, settings)]
        for line in (*dropped, *_descriptions(scoped_settings(root or Path.home()))):
            put_line(line)
        for line in () if root is None else _notes_above(root):
            put_line(line)
        if trust:
            trusted = CodexTrust(installation.scope, installation.record_path)
            put_line(f"Codex: {trusted.trust(trusted.own_hooks(installation.path), _is_trusted)}")


def _check_options(installation: HookInstallation, *, rollback_on_failure: bool, trust: bool) -> None:
    """Raise click.UsageError for an option that an agent has no use for."""
    agent = installation.agent
    if rollback_on_failure and agent.name in ("codex", "gemini"):
        raise click.UsageError(f"--rollback-on-failure: {agent.title} does not tell its hooks whether a command failed")
    if trust and agent.name != "codex":
        raise click.UsageError("--trust is for codex")


def _is_trusted(hooks: Sequence[CodexHook]) -> bool:
    """Ask a person. Nobody says no."""
    put_line("Codex is to run this from now on:")
    for command in dict.fromkeys(hook.command for hook in hooks):
        events = ", ".join(hook.event for hook in hooks if hook.command == command)
        put_line(printable(f"  {events}: {command}"))
    try:
        return click.confirm("Trust it?", err=True)
    except click.Abort:
        return False


def _watches_a_call(root: Path) -> bool:
    """Whether a guard runs whose agent is in the middle of a call: then it goes on, and reads the settings anew."""
    answer = ask_guard(root, {"kind": "status"}, starts=False)
    return answer is not None and bool(answer["status"]["open_calls"])


def _check_lasting() -> None:
    """Raise NotStartedError for a program that hooks would not find any more after a while."""
    if (cache := cache_around(Path(sys.prefix))) is not None:
        raise NotStartedError(
            f"ringfence runs from the cache {escape_path(str(cache))}, and its hooks would end when that is "
            "cleaned: `uv tool install ringfence`, or `pipx install ringfence`, and then `ringfence guard install`"
        )


def _notes_above(root: Path) -> Iterator[str]:
    """Say what the guards of directories above mean for that of a root."""
    for above in filter(_is_guarded, root.parents):
        name = escape_path(str(above))
        yield (
            f"{name} is guarded, too, and calls are denied here while its guard runs: keep one of the two, with "
            f"`ringfence guard uninstall`, or run `ringfence guard stop --directory {shlex.quote(name)}` before"
        )


def _is_guarded(directory: Path) -> bool:
    """Whether a directory has hooks of its own."""
    has_settings = (guard_directory(directory) / "settings.json").exists()
    return has_settings and any(_installation(name, directory, False).is_installed() for name in GUARDED_AGENTS)


def _program() -> str:
    """Where this very program is, as it was called: a tool manager's link to it outlives an upgrade."""
    called = Path(sys.argv[0])
    return os.path.abspath(called if called.name == "ringfence" else shutil.which("ringfence") or called)


def _absolute(spec: str) -> str:
    """A policy whose file the guard finds from any directory."""
    return os.path.abspath(spec) if spec.endswith(".toml") or is_code(spec) else spec


def _replace_settings(root: Path | None, settings: GuardSettings) -> Iterator[str]:
    """Keep the settings of a root, or of a person for None. Say which ones of before have gone with that."""
    try:
        before = scoped_settings(root or Path.home()).get("user" if root is None else "directory", GuardSettings())
    except ValueError:  # nobody knows what they were
        before = GuardSettings()
    save_settings(root, settings)
    if dropped := [rule for rule in _rules(before) if rule not in _rules(settings)]:
        yield printable(f"policies dropped, which held before: {', '.join(dropped)}")


def _rules(settings: GuardSettings) -> Sequence[str]:
    rules = [*settings.policies]
    rules += ["--background deny"] if settings.deny_background else []
    return [*rules, "--rollback-on-failure"] if settings.rollback_on_failure else rules


def _descriptions(settings: Mapping[str, GuardSettings]) -> Iterator[str]:
    """Say what the guard judges calls by, and by whom it was chosen."""
    said = False
    for scope, chosen in settings.items():
        if rules := _rules(chosen):
            said = True
            where = "for all your projects (--user)" if scope == "user" else "of this directory"
            yield printable(f"policies {where}: {', '.join(rules)}")
    yield "policies of the owner's file hold, too" if said else "policies: none beside those of the owner"


@guard.command()
@CLIENT
@WHERE
@USER
def uninstall(client: str, directory: Path | None, personal: bool) -> None:
    """Take the guard's hooks out of the settings of CLIENT again. The history of DIR stays.

    With the last agent, the policies go that were chosen there.
    """
    with _failures():
        installation = _installation(client, directory, personal)
        check_person(os.environ, (Path.cwd(), installation.scope.directory))
        if client == "codex":
            with suppress(ModuleNotFoundError):  # then nothing was written
                CodexTrust(installation.scope, installation.record_path).forget(installation.path)
        with person_writes(guarded_root(installation.scope.directory), installation.paths):
            installation.uninstall()
        scope = [_installation(name, directory, personal) for name in GUARDED_AGENTS]
        if not any(one.is_installed() for one in scope):
            root = None if personal else Path(os.path.realpath(directory or "."))
            if root is None or guard_directory(root).exists():
                for line in _replace_settings(root, GuardSettings()):
                    put_line(line)


@guard.command()
@HERE
@AS_JSON
@click.pass_obj
def status(invocation: Invocation, directory: Path) -> None:
    """Say which agents are guarded here, and what the guard is doing."""
    with _failures():
        root = guarded_root(directory)
        answer = ask_guard(root, {"kind": "status"}, starts=False)
        installed = {
            name: [
                scope
                for scope, personal in (("project", False), ("user", True))
                if _installation(name, root, personal).is_installed()
            ]
            for name in GUARDED_AGENTS
        }
        running = None if answer is None else answer["status"]
        unreadable = unreadable_policies(root)
        settings: Mapping[str, GuardSettings] = {}
        with suppress(ValueError):  # which is what is unreadable
            settings = scoped_settings(root)
        if invocation.wants_json:
            chosen = {scope: asdict(one) for scope, one in settings.items()}
            invocation.put_json(
                {
                    "root": str(root),
                    "installed": installed,
                    "settings": chosen,
                    "unreadable_policies": unreadable or None,
                    "guard": running,
                }
            )
            return
        put_line(escape_path(str(root)))
        for name, scopes in installed.items():
            seen = "" if running is None else running["last_events"].get(name, "")
            last = f", last event {seen}" if seen else ""
            where = f"installed, {' and '.join(scopes)}" if scopes else "not installed"
            put_line(f"{GUARDED_AGENTS[name].title}: {where}{last}")
        if unreadable:
            put_line(one_line(f"policies cannot be read: {unreadable}; calls are denied", 1000))
        for line in () if unreadable and not settings else _descriptions(settings):
            put_line(line)
        if running is None:
            put_line("no guard runs: the first event of an agent starts it")
        else:
            put_line(f"the guard is process {running['process']}, with {plural(running['sessions'], 'session')}")
            for call in running["open_calls"]:
                put_line(one_line(f"running: {call}", 200))


@guard.command()
@HERE
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N", help="Only the newest N entries."
)
@AS_JSON
@click.pass_obj
def log(invocation: Invocation, directory: Path, limit: int) -> None:
    """List what the calls of agents did here, newest first."""
    with _failures():
        records = list(reversed(GuardLog(guard_directory(guarded_root(directory))).read()))[:limit]
        if invocation.wants_json:
            invocation.put_json({"calls": [record.to_json() for record in records]})
            return
        put("".join(f"{_line(record)}\n" for record in records).encode())
        if not records:
            ErrorStream().say("no call of an agent has changed a file here yet")


def _line(record: GuardedCallRecord) -> str:
    """Number, time, agent, tool and arguments, paths, and what became of them."""
    number = "-" if record.step is None else str(record.step)
    at = datetime.fromisoformat(record.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    who = f"{record.agent}/{record.subagent}" if record.subagent else record.agent
    what = one_line(f"{record.tool}: {record.arguments}" if record.arguments else record.tool, MAX_ARGUMENTS)
    git = [path for path in record.paths if ".git" in path.split("/")]
    named = [path for path in record.paths if path not in git]
    paths = [list_paths(named, MAX_PATHS)] if named else []
    paths += [f"{plural(len(git), 'path')} of git"] if git else []
    if not record.tool:
        who, what = ("person", "undo") if record.kind == "undone" else ("nobody", "unattributed")
    cells = (f"{number:>4}", at, printable(who), what, one_line(", ".join(paths), 200), one_line(_outcome(record), 300))
    return "  ".join(cell for cell in cells if cell)


def _outcome(record: GuardedCallRecord) -> str:
    kept = "" if record.aborted is None else f"kept as aborted/{record.aborted}"
    match record.kind:
        case "denied":
            by = f"denied by the policy {record.policy}: {record.reason}" if record.policy else "denied"
            return "; ".join(filter(None, (by, record.note, kept)))
        case "undone":
            steps = ", ".join(map(str, sorted(record.undoes)))
            return f"undid step {steps}" if steps else "undid some paths"
        case "kept" if record.step is None:
            return "kept, and no step: hidden files are in no history"
        case "unattributed":
            return f"kept, {record.note}"
        case "refused":
            return f"not run: {record.note}"
        case _:
            return f"{record.kind}: {record.note}" if record.note else record.kind


@guard.command()
@click.argument("shown", metavar="[N]", callback=step_name, required=False)
@click.option("--aborted", is_flag=True, help="N is the number of something that was rolled back.")
@STAT
@HERE
@AS_JSON
@click.pass_context
def show(ctx: click.Context, shown: StepName | None, aborted: bool, stat: bool, directory: Path) -> None:
    """Show the patch of step N, by default the newest, or of what was rolled back as `aborted/N`."""
    with _failures():
        root = guarded_root(directory)
        ctx.invoke(show_step, directory=root, step=shown, aborted=aborted, stat=stat, with_ignored=True)


@guard.command(cls=PathsCommand)
@click.argument("n", type=click.IntRange(min=1), required=False, metavar="[N]")
@click.option("--session", is_flag=True, help="All steps of the session that made the newest one.")
@click.option("--prompt", is_flag=True, help="All steps of the prompt that led to the newest one.")
@DRY_RUN
@HERE
def undo(n: int | None, session: bool, prompt: bool, dry_run: bool, directory: Path) -> None:
    """Undo the newest N steps, by default one. What was changed later stays.

    With `-- PATH...` only what these steps changed at these paths, and below them, is undone.
    """
    if (n is not None) + session + prompt > 1:
        raise click.UsageError("give one of N, --session and --prompt")
    by = "session" if session else "prompt" if prompt else ""
    with _failures():
        root = guarded_root(directory)
        asked = {"kind": "undo", "n": n or 1, "by": by, "paths": given_paths(root), "dry_run": dry_run}
        answer = ask_guard(root, asked)
        assert answer is not None
        put_line(answer["text"])


@guard.command()
@HERE
def stop(directory: Path) -> None:
    """Stop the guard. The next event of an agent starts it again."""
    with _failures():
        check_person(os.environ, ())
        put_line("stopped" if stop_guard(guarded_root(directory)) else "no guard runs here")


def _installation(client: str, directory: Path | None, personal: bool) -> HookInstallation:
    project = Path(os.path.realpath(directory or "."))
    scope = ClientScope(project, Path.home(), personal, os.environ)
    record = store_directory(project).parent.parent / "guards.json"
    return HookInstallation(GUARDED_AGENTS[client], scope, record, put_line)


@contextmanager
def _failures() -> Generator[None]:
    """Raise click's errors for those of a guard."""
    try:
        yield
    except LookupError as error:
        raise NotStartedError(str(error.args[0])) from None
    except ModuleNotFoundError as error:
        raise NotStartedError(f"{error}: --trust edits TOML, which needs `pip install 'ringfence[mcp]'`") from error
    except (OSError, ValueError) as error:
        raise NotStartedError(str(error) if isinstance(error, ValueError) else describe_error(error)) from error
