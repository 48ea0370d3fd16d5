"""``ringfence stores``: the histories on this machine, and how to be rid of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from ringfence.errors import WorkspaceLockedError
from ringfence.escapes import escape_path
from ringfence_cli.options import AS_JSON, Commands, Invocation
from ringfence_sandbox import HistoryStore, forget_store
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
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@AS_JSON
@click.pass_obj
def forget(invocation: Invocation, roots: tuple[str, ...], gone: bool, dry_run: bool) -> int:
    """Delete the history of each DIR. The files of DIR stay; its steps cannot be undone afterwards.

    DIR may be gone, too. The policy file of a directory that is still there stays.
    """
    if bool(roots) == gone:
        raise click.UsageError("name the directories, as `ringfence stores` lists them, or give --gone")
    chosen = [store for store in all_stores() if store.root_is_gone] if gone else _of(roots)
    for store in chosen:
        if not dry_run:
            _forget(store)
        if not invocation.wants_json:
            put(f"{_line(store)}\n".encode())
    if invocation.wants_json:
        invocation.put_json({"dry_run": dry_run, "forgotten": [_json(store) for store in chosen]})
    size = _size(sum(store.size_bytes for store in chosen))
    ErrorStream().say(f"{'would forget' if dry_run else 'forgot'} {plural(len(chosen), 'history')}, {size}")
    return 0


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


def _forget(store: HistoryStore) -> None:
    try:
        forget_store(store, keep=() if store.root_is_gone else (FILE_NAME,))
    except WorkspaceLockedError as error:
        raise BusyError(str(error)) from None
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    except OSError as error:
        raise NotStartedError(f"the history of {_root(store)} cannot be deleted: {why(error)}") from None


def _line(store: HistoryStore) -> str:
    return f"{_size(store.size_bytes):>12}  {store.used_at.astimezone():%Y-%m-%d %H:%M}  {_root(store)}"


def _root(store: HistoryStore) -> str:
    state = "  (gone)" if store.root_is_gone else "  (replaced)" if store.root_is_replaced else ""
    return escape_path(store.root or os.fspath(store.path)) + state


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _json(store: HistoryStore) -> dict[str, object]:
    return {
        "root": store.root,
        "root_is_gone": store.root_is_gone,
        "root_is_replaced": store.root_is_replaced,
        "store": os.fspath(store.path),
        "size_bytes": store.size_bytes,
        "used_at": store.used_at.isoformat(timespec="seconds"),
    }
