"""The command ``ringfence view``: the page of a workspace or a run, here or as a file."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.failures import describe_error
from ringfence_cli.options import Command, Invocation
from ringfence_cli.page_process import check_view
from ringfence_sandbox import find_workspace
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, OutputFile, open_output, put_line
from ringfence_tools.runs.signals import Signals

if TYPE_CHECKING:
    from ringfence_view import CallSource

NOT_MASKED = (
    "the page has contents as the history has them: values of hidden files of now are masked, older ones are not"
)


@click.command(cls=Command)
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="[DIR | RECEIPTS | OUT]", default=".")
@click.option(
    "--receipts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With DIR: show the calls of this file of receipts, too, with their arguments, answers and reasons.",
)
@click.option("--export", "export", type=click.Path(path_type=Path), metavar="FILE.html", help="Write the page there.")
@click.option("--no-contents", is_flag=True, help="With --export: leave out arguments, answers and diffs.")
@click.option("--write", is_flag=True, help="Let the page undo, restore and reject what it shows.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="The port.  [default: any]")
@click.pass_obj
def view(
    invocation: Invocation,
    source: Path,
    receipts: Path | None,
    export: Path | None,
    no_contents: bool,
    write: bool,
    port: int,
) -> int:
    """Show the calls of DIR, or of a file of RECEIPTS, as a page: what each did, also what was rolled back.

    OUT is the directory of the results of a batch: the page has its tasks, and the calls of each.

    The address that it prints, with a token, opens the page on this machine. It goes on showing what happens, until
    Ctrl-C.
    """
    check_view(is_wanted=True, can_write=False)
    from ringfence_view import CallSource, is_batch, view_app

    if no_contents and export is None:
        raise click.UsageError("--no-contents is for --export")
    if is_batch(source):
        if receipts is not None or write or no_contents:
            raise click.UsageError("--receipts, --write and --no-contents are not for a batch")
        return _show_batch(source, export, port, invocation.signals)
    if source.is_file():
        if receipts is not None or write:
            raise click.UsageError("--receipts and --write are for a directory")
        directory, receipts = None, source
    else:
        directory = find_workspace(source) or source if source == Path() else source
    with ExitStack() as stack:
        stack.enter_context(invocation.signals.let_through()) if export is not None else None
        try:
            calls = CallSource(directory, receipts)
        except (FileNotFoundError, ValueError) as error:
            raise NotStartedError(str(error) if isinstance(error, ValueError) else describe_error(error)) from None
        if export is not None:
            return _export(calls, export, not no_contents)
    _serve(lambda token: view_app(calls, token, can_write=write), port, invocation.signals)
    return 0


def _show_batch(out: Path, export: Path | None, port: int, signals: Signals) -> int:
    from ringfence_view import BatchSource, batch_app

    try:
        batch = BatchSource(out)
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    if export is not None:
        from ringfence_batch.page import render_page

        place = os.path.relpath(os.path.realpath(out), os.path.realpath(export.parent))
        _write(export, out, render_page(batch.summary, f"{place}/"))
        return 0
    _serve(lambda token: batch_app(batch, token), port, signals)
    return 0


def _write(path: Path, directory: Path, page: str) -> None:
    with ExitStack() as stack:
        try:
            file = open_output(OutputFile, path, directory, stack)
            assert file is not None
            file.replace(page.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise click.UsageError(f"{str(path)!r} cannot be written: {describe_error(error)}") from None


def _export(calls: CallSource, path: Path, contents: bool) -> int:
    from ringfence_view import export_page

    _write(path, calls.directory or Path(), export_page(calls, contents=contents))
    if contents and calls.directory is not None:
        ErrorStream().say(NOT_MASKED)
    return 0


def _serve(make: Callable[[str], Any], port: int, signals: Signals) -> None:
    """Serve an application that is made with a token."""
    import asyncio

    import anyio

    from ringfence_view import serve_view

    token = secrets.token_urlsafe(32)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise click.BadParameter(f"{port} cannot be used: {describe_error(error)}", param_hint="'--port'") from None
    with listening:
        app = make(token)
        put_line(f"http://127.0.0.1:{listening.getsockname()[1]}/#token={token}")
        ErrorStream().say("open that address here; whoever has it can see all of it. Ctrl-C ends the page")

        async def run() -> None:
            scope = anyio.CancelScope()
            loop = asyncio.get_running_loop()
            with signals.notifying(lambda: loop.call_soon_threadsafe(scope.cancel)), scope:
                await serve_view(app, listening)

        anyio.run(run)
