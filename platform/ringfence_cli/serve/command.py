"""The command ``ringfence serve``: open the workspace, run the server, and stop it at a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import click

from ringfence.errors import PromptValidationError, SandboxUnavailableError
from ringfence.failures import describe_error
from ringfence.runtime.receipts import Receipt
from ringfence_cli.options import UNAVAILABLE, NotStartedError
from ringfence_cli.outputs import ErrorStream, ReceiptsFile, refuse_way_out
from ringfence_cli.own_sections import reserve_stdout, sections_of
from ringfence_cli.policies import policies_of, unfit
from ringfence_cli.serve.clients import Client
from ringfence_cli.serve.server import WorkspaceServer
from ringfence_cli.serve.transports import (
    PATH,
    Address,
    listen,
    parse_address,
    refuse_stdio,
    serve_http,
    serve_stdio,
)
from ringfence_cli.serve.workspaces import ServedWorkspace, open_workspace
from ringfence_cli.signals import Signals
from ringfence_cli.telemetry import telemetry_of
from ringfence_cli.workspace import recovered_before_copy
from ringfence_sandbox import StateDirectoryError, describe_moved_root
from ringfence_tools.agent_run import EXIT_CODES, MakeSection
from ringfence_tools.printable import printable, why
from ringfence_tools.run_workspace import Place, protect_path

TOKEN_VARIABLE = "RINGFENCE_MCP_TOKEN"  # noqa: S105  # its name
MIN_TOKEN_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the command. ``http`` is HOST:PORT, or None for stdio."""

    directory: Path
    place: Place
    http: str | None = None
    allowed_hosts: Sequence[str] = ()
    receipts: Path | None = None
    read_only: bool = False
    policies: Sequence[str] = ()
    sections: Sequence[str] = ()


def serve(options: ServeOptions, signals: Signals) -> int:
    """Serve until the end and return the exit code. Raise click.ClickException for what cannot be served."""
    try:
        return _serve(options, signals)
    except (click.ClickException, StateDirectoryError) as raised:
        error = NotStartedError.of(raised) if isinstance(raised, StateDirectoryError) else raised
        _refuse(error.format_message(), options, signals)
        raise error from None


def _serve(options: ServeOptions, signals: Signals) -> int:
    errors = ErrorStream()
    with ExitStack() as stack:
        telemetry = telemetry_of(errors, stack)
        try:
            with signals.let_through():
                transport, hints = _transport(options, stack)
                copied = options.place.workspace == "memory"
                if (moved := describe_moved_root(options.directory, copied=copied)) is not None:
                    errors.say(f"ringfence: {printable(moved)}")
                for line in recovered_before_copy(options.directory) if copied else ():
                    errors.say(line)
                owned = policies_of(options.directory, options.policies)
                with reserve_stdout(options.sections):
                    extra_sections = sections_of(options.sections, options.directory)
                workspace = open_workspace(
                    options.place, options.directory, read_only=options.read_only, policies=owned
                )
                stack.callback(workspace.close)
                receipts = _open_receipts(options, stack)
                on_disk = workspace.writable
                if receipts is not None and on_disk is not None and on_disk.history is not None:
                    protect_path(on_disk, receipts.path, "the receipts of this server come there")
                    receipts.complete(on_disk.history)
                with reserve_stdout(extra_sections):
                    _check_client(workspace, extra_sections)
        except PromptValidationError as error:
            raise unfit(error, options.directory, options.place.workspace) from None
        except KeyboardInterrupt:
            errors.say("ringfence: interrupted: nothing was changed")
            return EXIT_CODES["interrupted"]
        except SandboxUnavailableError as error:
            errors.say(f"ringfence: {error}")
            _refuse(str(error), options, signals)
            return UNAVAILABLE
        for line in (*workspace.notes, *hints):
            errors.say(line)
        on_receipt = partial(_write_receipt, receipts, errors) if receipts is not None else _ignore
        server = WorkspaceServer(workspace, on_receipt, telemetry, extra_sections)
        stack.callback(server.wait)
        gc.freeze()  # so that no collection during a call traverses what is loaded now
        gc.enable()
        return anyio.run(_run, server, transport, signals)


def _check_client(workspace: ServedWorkspace, extra_sections: Sequence[MakeSection]) -> None:
    """Make one client, so that an error of the tools is reported before the first request."""
    try:
        Client(workspace, _ignore, extra_sections=extra_sections).close()
    except (click.ClickException, PromptValidationError):
        raise
    except Exception as error:
        if not extra_sections:
            raise
        raise NotStartedError(f"--section: no client could begin with it: {describe_error(error)}") from error


def _refuse(message: str, options: ServeOptions, signals: Signals) -> None:
    if options.http is None and not os.isatty(0):
        anyio.run(_run_until_signal, partial(refuse_stdio, printable(f"ringfence: {message}")), signals)


Transport = Callable[[WorkspaceServer], Awaitable[None]]


async def _run(server: WorkspaceServer, transport: Transport, signals: Signals) -> int:
    """Serve until the client disconnects or a signal arrives. Return the exit code."""
    await _run_until_signal(partial(transport, server), signals, server.stop)
    return EXIT_CODES["interrupted"] if signals.arrived else 0


async def _run_until_signal(
    work: Callable[[], Awaitable[None]], signals: Signals, stop: Callable[[], None] = lambda: None
) -> None:
    arrived = anyio.Event()
    # When the handlers of asyncio are removed, a second signal kills the process in the middle of a rollback.
    with signals.notifying(partial(asyncio.get_running_loop().call_soon_threadsafe, arrived.set)):
        async with anyio.create_task_group() as group:

            async def wait_for_signal() -> None:
                await arrived.wait()
                stop()
                group.cancel_scope.cancel()

            group.start_soon(wait_for_signal)
            await work()
            stop()
            group.cancel_scope.cancel()


def _transport(options: ServeOptions, stack: ExitStack) -> tuple[Transport, Sequence[str]]:
    """Return the transport, and the lines that tell a person how to connect."""
    if options.http is None:
        if options.allowed_hosts:
            raise click.UsageError("--allow-host is for --http")
        return _over_stdio, ()
    try:
        address = parse_address(options.http)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--http'") from None
    if not address.is_loopback and not options.allowed_hosts:
        raise click.UsageError(
            f"{address.host} can be reached from other machines. If that is meant, say by which name clients call it: "
            "--allow-host NAME. The connection is not encrypted: put a proxy with TLS before it"
        )
    token, token_hint = _token()
    try:
        listening = stack.enter_context(listen(address))
    except OSError as error:
        raise click.BadParameter(
            f"{options.http} cannot be used: {describe_error(error)}", param_hint="'--http'"
        ) from None
    bound = Address(address.host, listening.getsockname()[1])
    hints = (
        f"serving {options.directory} at http://{bound.url_host}:{bound.port}{PATH}",
        f"clients send the header  Authorization: Bearer {token_hint}",
    )
    return partial(_over_http, listening=listening, token=token, hosts=options.allowed_hosts), hints


def _token() -> tuple[str, str]:
    """Return the token, and how to print it."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        token = secrets.token_urlsafe(32)
        return token, token
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise click.UsageError(
            f"{TOKEN_VARIABLE} has to be {MIN_TOKEN_CHARACTERS} or more printable ASCII characters without blanks"
        )
    return token, f"${TOKEN_VARIABLE}"


async def _over_stdio(server: WorkspaceServer) -> None:
    await serve_stdio(server.protocol())


async def _over_http(server: WorkspaceServer, listening: socket.socket, token: str, hosts: Sequence[str]) -> None:
    await serve_http(server.protocol(), listening, token, hosts)


def _open_receipts(options: ServeOptions, stack: ExitStack) -> ReceiptsFile | None:
    path = options.receipts
    if path is None:
        return None
    try:
        refuse_way_out(path, options.directory)
        return stack.enter_context(closing(ReceiptsFile(path)))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None


def _write_receipt(receipts: ReceiptsFile, errors: ErrorStream, receipt: Receipt) -> None:
    try:
        receipts.call(receipt, None, "")
    except OSError as error:
        errors.say(f"ringfence: the receipt of {receipt.tool} could not be written: {describe_error(error)}")


def _ignore(receipt: Receipt) -> None:
    """Write no receipt."""
