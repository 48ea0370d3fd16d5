"""The command ``ringfence serve``: open the workspace, run the server, and stop it at a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
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
from ringfence.runtime.session import Session
from ringfence_cli.options import UNAVAILABLE, NotStartedError
from ringfence_cli.outputs import ErrorStream, refuse_way_out
from ringfence_cli.own_sections import reserve_stdout, sections_of
from ringfence_cli.policies import policies_of, unfit
from ringfence_cli.receipts_file import ReceiptsFile
from ringfence_cli.serve import transports
from ringfence_cli.serve.server import WorkspaceServer
from ringfence_cli.serve.workspaces import ServedWorkspace, open_workspace
from ringfence_cli.signals import Signals
from ringfence_cli.telemetry import telemetry_of
from ringfence_cli.workspace import recovered_before_copy
from ringfence_sandbox import StateDirectoryError, describe_moved_root
from ringfence_tools.agent_run import EXIT_CODES
from ringfence_tools.printable import printable, why
from ringfence_tools.run_workspace import Place, protect_path

TOKEN_VARIABLE = "RINGFENCE_MCP_TOKEN"  # noqa: S105  # its name
MIN_TOKEN_CHARACTERS = 16

Serve = Callable[[WorkspaceServer], Awaitable[None]]


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
    max_answer: int | None = None


class UnavailableError(click.ClickException):
    """Commands cannot be run here."""

    exit_code = UNAVAILABLE


def serve(options: ServeOptions, signals: Signals) -> int:
    """Serve until the end and return the exit code. Raise click.ClickException for what cannot be served."""
    with ExitStack() as stack:
        try:
            with signals.let_through():
                server, transport = _start(options, stack)
        except PromptValidationError as error:
            refusal = unfit(error, options.directory, options.place.workspace)
        except StateDirectoryError as error:
            refusal = NotStartedError.of(error)
        except SandboxUnavailableError as error:
            refusal = UnavailableError(str(error))
        except click.ClickException as error:
            refusal = error
        except KeyboardInterrupt:
            ErrorStream().say("ringfence: interrupted: nothing was changed")
            return EXIT_CODES["interrupted"]
        else:
            gc.freeze()  # so that no collection during a call traverses what is loaded now
            gc.enable()
            anyio.run(_run_until_signal, partial(transport, server), signals, server.stop)
            return EXIT_CODES["interrupted"] if signals.arrived else 0
    if options.http is None and not os.isatty(0):
        reason = printable(f"ringfence: {refusal.format_message()}")
        with transports.reserve_streams() as (source, target):
            anyio.run(_run_until_signal, partial(transports.refuse_stdio, reason, source, target), signals)
    raise refusal


def _start(options: ServeOptions, stack: ExitStack) -> tuple[WorkspaceServer, Serve]:
    """Open everything and tell a person about it. ``stack`` closes it."""
    errors = ErrorStream()
    telemetry = telemetry_of(errors, stack)
    transport, hints = _transport(options, stack)
    copied = options.place.workspace == "memory"
    if (moved := describe_moved_root(options.directory, copied=copied)) is not None:
        errors.say(f"ringfence: {moved}")
    for line in recovered_before_copy(options.directory) if copied else ():
        errors.say(line)
    policies = policies_of(options.directory, options.policies)
    with reserve_stdout(options.sections):
        extra_sections = sections_of(options.sections, options.directory)
    workspace = open_workspace(
        options.place,
        options.directory,
        read_only=options.read_only,
        policies=policies,
        extra_sections=extra_sections,
    )
    stack.callback(workspace.close)
    receipts = _open_receipts(options.receipts, workspace, stack)

    def observe(session: Session) -> None:
        if telemetry is not None:  # its spans are inside those of the SDK
            telemetry.observe(session)
        if receipts is not None:
            session.dispatcher.subscribe(Receipt, partial(_write_receipt, receipts, errors))

    try:
        with reserve_stdout(extra_sections):
            server = WorkspaceServer(workspace, observe, max_answer=options.max_answer)
    except (click.ClickException, PromptValidationError):
        raise
    except Exception as error:
        if not extra_sections:
            raise
        raise NotStartedError(f"--section: no client could begin with it: {describe_error(error)}") from error
    stack.callback(server.wait)
    for line in (*workspace.notes, *hints):
        errors.say(line)
    return server, transport


async def _run_until_signal(
    work: Callable[[], Awaitable[None]], signals: Signals, stop: Callable[[], None] = lambda: None
) -> None:
    scope = anyio.CancelScope()

    def end() -> None:
        stop()
        scope.cancel()

    # When the handlers of asyncio are removed, a second signal kills the process in the middle of a rollback.
    with signals.notifying(partial(asyncio.get_running_loop().call_soon_threadsafe, end)), scope:
        await work()


async def _over_stdio(server: WorkspaceServer) -> None:
    with transports.reserve_streams() as (source, target):
        await transports.serve_stdio(server.protocol(), source, target)


def _transport(options: ServeOptions, stack: ExitStack) -> tuple[Serve, Sequence[str]]:
    """Return the transport, and the lines that tell a person how to connect. Listen if it is HTTP."""
    if options.http is None:
        if options.allowed_hosts:
            raise click.UsageError("--allow-host is for --http")
        return _over_stdio, ()
    try:
        host, port = transports.parse_address(options.http)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--http'") from None
    if not transports.is_loopback(host) and not options.allowed_hosts:
        raise click.UsageError(
            f"{host} can be reached from other machines. If that is meant, say by which name clients call it: "
            "--allow-host NAME. The connection is not encrypted: put a proxy with TLS before it"
        )
    token, token_hint = _token()
    try:
        listening = stack.enter_context(transports.listen(host, port))
    except OSError as error:
        message = f"{options.http} cannot be used: {describe_error(error)}"
        raise click.BadParameter(message, param_hint="'--http'") from None
    port = listening.getsockname()[1]

    async def over_http(server: WorkspaceServer) -> None:
        await transports.serve_http(server.protocol(), listening, token, options.allowed_hosts)

    return over_http, (
        f"serving {options.directory} at http://{transports.host_header(host)}:{port}{transports.PATH}",
        f"clients send the header  Authorization: Bearer {token_hint}",
    )


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


def _open_receipts(path: Path | None, workspace: ServedWorkspace, stack: ExitStack) -> ReceiptsFile | None:
    """Open the file, and complete it with the receipts that a crash prevented."""
    if path is None:
        return None
    try:
        refuse_way_out(path, workspace.directory)
        receipts = stack.enter_context(closing(ReceiptsFile(path)))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None
    opened = workspace.opened
    if opened is not None and opened.history is not None:
        protect_path(opened, path, "the receipts of this server come there")
        receipts.complete(opened.history)
    return receipts


def _write_receipt(receipts: ReceiptsFile, errors: ErrorStream, receipt: Receipt) -> None:
    try:
        receipts.call(receipt, None, "")
    except OSError as error:
        errors.say(f"ringfence: the receipt of {receipt.tool} could not be written: {describe_error(error)}")
