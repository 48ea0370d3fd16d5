"""The command ``ringfence view``: the page of a workspace or a run, here or as a file."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from pathlib import Path

import click

from ringfence.extras import missing
from ringfence.failures import describe_error
from ringfence_cli.options import Command, Invocation
from ringfence_sandbox import find_workspace
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, OutputFile, open_output, put_line
from ringfence_tools.runs.signals import Signals
from ringfence_view import CallSource, export_page

NOT_MASKED = (
    "the page has contents as the history has them: values of hidden files of now are masked, older ones are not"
)


@click.command(cls=Command)
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="[DIR | RECEIPTS]", default=".")
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

    The address that it prints, with a token, opens the page on this machine. It goes on showing what happens, until
    Ctrl-C.
    """
    if no_contents and export is None:
        raise click.UsageError("--no-contents is for --export")
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
    _serve(calls, port, write, invocation.signals)
    return 0


def _export(calls: CallSource, path: Path, contents: bool) -> int:
    page = export_page(calls, contents=contents).encode("utf-8", "backslashreplace")
    with ExitStack() as stack:
        try:
            file = open_output(OutputFile, path, calls.directory or Path(), stack)
            assert file is not None
            file.replace(page)
        except OSError as error:
            raise click.UsageError(f"{str(path)!r} cannot be written: {describe_error(error)}") from None
    if contents and calls.directory is not None:
        ErrorStream().say(NOT_MASKED)
    return 0


def _serve(calls: CallSource, port: int, write: bool, signals: Signals) -> None:
    try:
        import anyio

        from ringfence_view import serve_view, view_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ringfence"):
            raise
        raise click.UsageError(missing(error.name, "view")) from None
    token = secrets.token_urlsafe(32)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise click.BadParameter(f"{port} cannot be used: {describe_error(error)}", param_hint="'--port'") from None
    with listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        app = view_app(calls, token, host, can_write=write)
        put_line(f"http://{host}/#token={token}")
        ErrorStream().say("open that address here; whoever has it can see all of it. Ctrl-C ends the page")

        async def run() -> None:
            import asyncio

            scope = anyio.CancelScope()
            loop = asyncio.get_running_loop()
            with signals.notifying(lambda: loop.call_soon_threadsafe(scope.cancel)), scope:
                await serve_view(app, listening)

        anyio.run(run)
