"""The commands for forks of a disk workspace: make one, list them, promote the best, discard the others."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringfence import serde
from ringfence.errors import RingfenceError
from ringfence.escapes import display_path, escape_path
from ringfence.failures import describe_error
from ringfence_cli.history import (
    DRY_RUN,
    history_command,
    history_command_of_gone,
    opened,
    opened_to_change,
    step_name,
)
from ringfence_cli.options import Invocation
from ringfence_sandbox import Fork, Promotion, Workspace, discard_fork, forks_of, store_directory
from ringfence_tools.printable import patch_json, plural, printable
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, put, put_diff

if TYPE_CHECKING:
    from ringfence_sandbox import StepName

MAX_NAMED = 10
"""The most paths of one kind that are named."""


def _known_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a fork."""
    with (
        suppress(RingfenceError, OSError, LookupError, ValueError),
        Workspace.open(ctx.params.get("directory") or Path(), read_only=True) as workspace,
    ):
        return [record.name for record in workspace.forks() if record.name.startswith(incomplete)]
    return []


NAME = click.argument("name", shell_complete=_known_names)


@history_command
@click.argument("name")
@click.option("--at", callback=step_name, metavar="STEP", help="Begin with the files as they were after STEP.")
@click.option("--into", type=click.Path(path_type=Path), metavar="PATH", help="Make it there, where nothing is yet.")
@click.option("--no-secrets", is_flag=True, help="Leave hidden files out.")
@click.option(
    "--share",
    multiple=True,
    metavar="DIRECTORY",
    help="Do not copy this directory of DIR: containers of the fork have that of DIR, to be read. Its commands run in "
    "containers only then. Can be repeated.",
)
def fork(
    invocation: Invocation,
    directory: Path,
    name: str,
    at: StepName | None,
    into: Path | None,
    no_secrets: bool,
    share: Sequence[str],
) -> int:
    """Make a fork of DIR called NAME: a directory with all of its files and a history of its own."""
    with (
        opened_to_change(directory, invocation) as workspace,
        workspace.fork(name, at=at, into=into, share=share, secrets=not no_secrets) as made,
    ):
        record = made.fork_record
    assert record is not None, "it was forked"
    if invocation.wants_json:
        invocation.put_json({"fork": fork_json(record)})
        return 0
    put(f"{escape_path(record.root)}\n".encode())
    errors = ErrorStream()
    for line in _what_differs(record):
        errors.say(line)
    errors.say(f"`ringfence promote {shlex.quote(str(directory))} {name}` makes its changes here, too")
    return 0


def _what_differs(record: Fork) -> Iterator[str]:
    if record.points_back:
        yield f"still named {escape_path(record.source)} in: {_named(record.points_back)}"
    if record.rewritten:
        yield f"links that lead into the fork now: {_named(record.rewritten)}"
    if record.shared:
        yield f"empty, and only there for commands with --workspace podman: {_named([*record.shared])}"
    if record.left_out:
        yield f"left out: {_named([f'{path} ({why})' for path, why in record.left_out.items()])}"


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - MAX_NAMED
    named = ", ".join(escape_path(path) for path in paths[:MAX_NAMED])
    return named + (f" and {more} more; --json lists all" if more > 0 else "")


@history_command_of_gone
@click.option(
    "--diff",
    "compared",
    nargs=2,
    metavar="A B",
    help="Print the patch from the files of the fork A to those of B instead.",
)
def forks(invocation: Invocation, directory: Path, compared: tuple[str, str] | None) -> int:
    """List the forks of DIR that were not discarded. The score of a candidate stands behind its directory."""
    if compared is not None:
        with opened(directory, invocation, changes=False) as workspace:
            return _put_difference(workspace.diff_forks(*compared), invocation)
    with _forks_of(directory, invocation) as found:
        if invocation.wants_json:
            invocation.put_json({"forks": [fork_json(record) for record in found]})
        else:
            put("".join(f"{_line(record)}\n" for record in found).encode())
            ErrorStream().say(plural(len(found), "fork"))
    return 0


@contextmanager
def _forks_of(directory: Path, invocation: Invocation) -> Generator[Sequence[Fork]]:
    """The forks of DIR, which may be gone.

    Raises what `opened` does.
    """
    if os.path.lexists(directory):
        with opened(directory, invocation, changes=False) as workspace:
            yield workspace.forks()
        return
    try:
        if not (store := store_directory(directory)).exists():
            raise NotStartedError(f"{directory} is gone, and so is its history")
        yield forks_of(store)
    except (ValueError, OSError) as error:
        raise NotStartedError(describe_error(error)) from None


def _put_difference(patch: bytes, invocation: Invocation) -> int:
    if invocation.wants_json:
        invocation.put_json(patch_json(patch))
    else:
        put_diff(patch)
    return 0


def _line(record: Fork) -> str:
    states = [*([] if record.state == "ready" else [record.state]), *(["source gone"] if record.source_is_gone else [])]
    state = f"  ({', '.join(states)})" if states else ""
    made = f"{record.created_at.astimezone():%Y-%m-%d %H:%M}"
    score = f"  {printable(escape_path(record.score))}" if record.score else ""
    return f"{record.name:16}  {made}  step {record.step:<5}  {escape_path(record.root)}{state}{score}"


@history_command
@NAME
@DRY_RUN
@click.option(
    "--on-conflict",
    type=click.Choice(["abort", "keep"]),
    default="abort",
    show_default=True,
    help="If a path has changed here as well: change nothing at all; or keep it as it is here.",
)
@click.option("--with-git", is_flag=True, help="Move the branch, too, if it is where it was at the fork.")
def promote(invocation: Invocation, directory: Path, name: str, dry_run: bool, on_conflict: str, with_git: bool) -> int:
    """Make the changes of the fork NAME in DIR, as one step, which can be undone. The fork stays until discarded."""
    with opened_to_change(directory, invocation, dry_run=dry_run) as workspace:
        done = workspace.promote(name, "keep" if on_conflict == "keep" else "abort", dry_run=dry_run, with_git=with_git)
    if invocation.wants_json:
        invocation.put_json({"dry_run": dry_run, **promotion_json(done)})
    else:
        say_promotion(done, directory, dry_run=dry_run)
    return 1 if done.conflicts else 0


def promotion_json(done: Promotion) -> dict[str, object]:
    """The JSON object of what became of a promotion."""
    paths = [
        {"path": escape_path(path), "outcome": outcome, "reason": done.reasons.get(path)}
        for path, outcome in done.outcomes.items()
    ]
    return {
        "paths": paths,
        "step": serde.dump(done.step) if done.step is not None else None,
        "notes": [escape_path(note) for note in done.notes],
        "left_out": [{"path": escape_path(path), "reason": reason} for path, reason in done.left_out.items()],
        "git_ref": done.git_ref,
    }


def say_promotion(done: Promotion, directory: Path, *, dry_run: bool = False) -> None:
    """Print what became of a promotion, by path, and what a person can do now."""
    lines = [
        f"{outcome:9} {printable(display_path(path))}{_why(done, path)}\n" for path, outcome in done.outcomes.items()
    ]
    lines += [f"left out  {printable(display_path(path))}  ({why})\n" for path, why in done.left_out.items()]
    put("".join(lines).encode())
    errors, here = ErrorStream(), shlex.quote(str(directory))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(done.outcomes.values()).items())
    stays = dry_run or (done.step is None and bool(done.conflicts))
    if not counts:
        errors.say("the fork has nothing to promote")
    else:
        errors.say(f"nothing was changed; it would be {counts}" if stays else counts)
    for note in done.notes:
        errors.say(escape_path(note))
    if done.left_out:
        them = "it" if len(done.left_out) == 1 else "them"
        errors.say(
            f"{plural(len(done.left_out), 'change')} of the fork left out: `ringfence discard` would delete {them}"
        )
    if done.git_ref and not stays:
        errors.say(f"its commits are named by {done.git_ref}")
        if done.git_ref.startswith("refs/heads/"):
            errors.say("the index stays: run `git reset` before the next commit, which would reverse them")
    if done.conflicts and done.step is None and not dry_run:
        errors.say("--on-conflict keep promotes the rest, and keeps these as they are here")
    if done.step is not None:
        errors.say(f"step {done.step.number}: `ringfence undo {here}` reverses it")


def _why(done: Promotion, path: str) -> str:
    reason = done.reasons.get(path, "")
    return f"  ({printable(escape_path(reason))})" if reason else ""


@history_command_of_gone
@NAME
def discard(invocation: Invocation, directory: Path, name: str) -> int:
    """Delete the fork NAME of DIR: its files and its history. What was promoted stays."""
    with _forks_of(directory, invocation) as found:
        record = {one.name: one for one in found}.get(name)
        if record is None:
            there = f"there are: {', '.join(one.name for one in found)}" if found else "there are none"
            raise NotStartedError(f"there is no fork {name!r}; {there}")
        lost: Sequence[str] = ()
        with suppress(RingfenceError, OSError, ValueError):  # one that cannot be read can be discarded, too
            lost = unpromoted_in(record)
        discard_fork(record)
    if invocation.wants_json:
        invocation.put_json({"discarded": fork_json(record)})
    else:
        ErrorStream().say(f"the fork {name} is gone, with {escape_path(record.root)}")
        if lost:
            ErrorStream().say(f"so is what was not promoted: {named_paths(lost)}")
    return 0


def named_paths(paths: Sequence[str]) -> str:
    return ", ".join(escape_path(path) for path in paths[:MAX_NAMED]) + (", ..." if paths[MAX_NAMED:] else "")


def unpromoted_in(fork: Fork) -> Sequence[str]:
    """Return what of a fork is nowhere else: paths, or in words."""
    if fork.state == "ready":
        with Workspace.open(fork.root, store=fork.store) as opened:
            return opened.unpromoted()
    if fork.state == "forgotten":
        return ["its files, whose history was deleted"]
    if fork.state == "gone" and not os.path.isdir(os.path.dirname(fork.root)):
        return ["its directory, which may be on a disk that is not mounted"]
    return ()


def fork_json(record: Fork) -> dict[str, object]:
    """The JSON object of a fork."""
    values = {key: value for key, value in asdict(record).items() if key not in ("inode", "born_ns", "copied_ns")}
    return {
        **values,
        "score": record.score or None,
        "created_at": record.created_at.isoformat(timespec="seconds"),
        "source_is_gone": record.source_is_gone,
    }
