"""``ringfence stores``: the histories on this machine, and how to be rid of them."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import click

from ringfence.errors import WorkspaceLockedError
from ringfence.escapes import escape_path
from ringfence_cli.forks import fork_json, named_paths, unpromoted_in
from ringfence_cli.options import AS_JSON, Commands, Invocation
from ringfence_sandbox import Fork, HistoryStore, discard_fork, forget_store, forks_of
from ringfence_sandbox import stores as all_stores
from ringfence_tools.printable import plural, why
from ringfence_tools.runs.command_errors import BusyError, NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, put
from ringfence_tools.runs.owner_policies import FILE_NAME


@click.group(cls=Commands, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def stores(ctx: click.Context, as_json: bool) -> int:
    """List the histories of this machine with size, last use and directory."""
    if ctx.invoked_subcommand is not None:
        return 0
    invocation: Invocation = ctx.obj
    invocation.wants_json = as_json
    return _list(invocation)


def _list(invocation: Invocation) -> int:
    found = all_stores()
    if invocation.wants_json:
        invocation.put_json({"stores": [_json(store) for store in found]})
        return 0
    put("".join(f"{_line(store)}\n" for store in found).encode())
    total = sum(store.size_bytes for store in found)
    ErrorStream().say(f"{plural(len(found), 'history')}, {_size(total)}")
    return 0


@stores.command()
@click.argument("roots", nargs=-1, metavar="[DIR]...")
@click.option("--gone", is_flag=True, help="Those whose directory was removed.")
@click.option(
    "--discard-forks",
    "discards",
    is_flag=True,
    help="With --gone: also if a fork of such a directory holds what was not promoted.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@AS_JSON
@click.pass_obj
def forget(invocation: Invocation, roots: tuple[str, ...], gone: bool, discards: bool, dry_run: bool) -> int:
    """Delete the history of each DIR. The files of DIR stay; its steps cannot be undone afterwards.

    DIR may be gone, too. The policy file of a directory that is still there stays. With --gone, the forks of a
    directory are discarded, unless they hold what was not promoted.
    """
    if bool(roots) == gone or (discards and not gone):
        raise click.UsageError("name the directories, as `ringfence stores` lists them, or give --gone")
    chosen = [store for store in all_stores() if store.root_is_gone] if gone else _of(roots)
    forgotten, discarded, problems = list[HistoryStore](), list[Fork](), list[str]()
    for store in chosen:
        if not store.path.exists():  # it was that of a fork of an earlier one
            continue
        try:
            forks = _forks_to_discard(store, discards=discards) if gone else ()
            if not dry_run:
                _forget(store, forks)
        except click.ClickException as error:
            if not gone:
                raise
            problems.append(error.format_message())
            continue
        forgotten.append(store)
        discarded += forks
    if invocation.wants_json:
        invocation.put_json(
            {
                "dry_run": dry_run,
                "forgotten": [_json(store) for store in forgotten],
                "discarded": [fork_json(fork) for fork in discarded],
                "problems": problems,
            }
        )
    else:
        put("".join(f"{_line(store)}\n" for store in forgotten).encode())
    _say_forgotten(forgotten, discarded, problems, dry_run=dry_run)
    return NotStartedError.exit_code if problems else 0


def _say_forgotten(
    forgotten: Sequence[HistoryStore], discarded: Sequence[Fork], problems: Sequence[str], *, dry_run: bool
) -> None:
    errors = ErrorStream()
    for fork in discarded:
        errors.say(f"with the fork {fork.name}, {escape_path(fork.root)}")
    for problem in problems:
        errors.say(f"not forgotten: {problem}")
    size = _size(sum(store.size_bytes for store in forgotten))
    errors.say(f"{'would forget' if dry_run else 'forgot'} {plural(len(forgotten), 'history')}, {size}")


def _of(roots: Sequence[str]) -> list[HistoryStore]:
    """Return the stores of the directories, all of them before any is deleted."""
    by_root = {store.root: store for store in all_stores()}
    chosen = dict[str, HistoryStore]()
    for root in roots:
        real = next((path for path in (os.path.abspath(root), os.path.realpath(root)) if path in by_root), None)
        if real is None:
            raise NotStartedError(f"{root} has no history: `ringfence stores` lists the directories that have one")
        chosen[real] = by_root[real]
    return list(chosen.values())


def _forks_to_discard(store: HistoryStore, *, discards: bool) -> Sequence[Fork]:
    """Return the forks of a directory that is gone and their own forks, those first that borrow from others.

    Raises NotStartedError for one with unpromoted changes, unless they may go, and BusyError for one that is open."""
    found = list[Fork]()

    def add(place: str | os.PathLike[str]) -> None:
        for fork in forks_of(place):
            add(fork.store)
            found.append(fork)

    add(store.path)
    for fork in () if discards else found:
        with _as_refusal(fork.root):
            if held := unpromoted_in(fork):
                raise NotStartedError(
                    f"the fork {fork.name} of {_root(store)} holds what was not promoted, in {escape_path(fork.root)}: "
                    f"{named_paths(held)}. --discard-forks deletes it"
                )
    return found


def _forget(store: HistoryStore, forks: Sequence[Fork]) -> None:
    for fork in forks:
        with _as_refusal(fork.root):
            discard_fork(fork)
    with _as_refusal(_root(store)):
        forget_store(store, keep=() if store.root_is_gone else (FILE_NAME,))


@contextmanager
def _as_refusal(root: str) -> Generator[None]:
    """Raise NotStartedError or BusyError for what keeps a history from being deleted."""
    try:
        yield
    except WorkspaceLockedError as error:
        raise BusyError(str(error)) from None
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    except OSError as error:
        raise NotStartedError(f"the history of {root} cannot be deleted: {why(error)}") from None


def _line(store: HistoryStore) -> str:
    return f"{_size(store.size_bytes):>12}  {store.used_at.astimezone():%Y-%m-%d %H:%M}  {_root(store)}"


def _root(store: HistoryStore) -> str:
    if store.source and not store.root_is_gone:
        gone = "" if os.path.isdir(store.source) else ", which is gone"
        return f"{escape_path(store.root)}  (fork of {escape_path(store.source)}{gone})"
    state = "  (gone)" if store.root_is_gone else "  (replaced)" if store.root_is_replaced else ""
    return escape_path(store.root or os.fspath(store.path)) + state


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _json(store: HistoryStore) -> dict[str, object]:
    return {
        "root": store.root,
        "root_is_gone": store.root_is_gone,
        "root_is_replaced": store.root_is_replaced,
        "source": store.source or None,
        "store": os.fspath(store.path),
        "size_bytes": store.size_bytes,
        "used_at": store.used_at.isoformat(timespec="seconds"),
    }
