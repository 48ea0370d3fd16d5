"""The command ``ringfence serve``: run the server, and stop it at a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from ringfence.failures import describe_error
from ringfence_cli.options import INTERRUPTED
from ringfence_cli.serve import transports
from ringfence_cli.serve.server import WorkspaceServer
from ringfence_cli.signals import Signals

if TYPE_CHECKING:
    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence_cli.serve.opening import LazyWorkspace
    from ringfence_tools.place import Place

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
    hide: HiddenFiles | None = None
    policies: Sequence[str] = ()
    sections: Sequence[str] = ()
    max_answer: int | None = None
    asks: Sequence[str] = ()
    ask_seconds: float | None = None

    @property
    def has_person(self) -> bool:
        """Whether a person has started the server, and not a client."""
        return self.http is not None or os.isatty(0)


def serve(options: ServeOptions, signals: Signals) -> int:
    """Serve until the end and return the exit code. Raise click.ClickException for what cannot be served."""
    with ExitStack() as stack:
        try:
            with signals.let_through():
                transport, hints = _transport(options, stack)
                server = _start(options, stack)
        except KeyboardInterrupt:
            _say("ringfence: interrupted: nothing was changed")
            return INTERRUPTED
        for line in hints:
            _say(line)
        try:
            anyio.run(_run_until_signal, partial(transport, server), signals, server.stop)
        finally:
            server.wait()
        return INTERRUPTED if signals.arrived else 0


def _start(options: ServeOptions, stack: ExitStack) -> WorkspaceServer:
    """Make the server. If a person has started it, open the workspace. ``stack`` closes it."""
    telemetry = None
    if any(name.startswith("OTEL_") for name in os.environ):  # before the SDK has a first span
        from ringfence_cli.outputs import ErrorStream
        from ringfence_cli.telemetry import telemetry_of

        telemetry = telemetry_of(ErrorStream(), stack)

    approvals = None
    if options.asks:
        from ringfence_cli.serve.approvals import Approvals

        approvals = Approvals()

    def load() -> LazyWorkspace:
        from ringfence_cli.serve.opening import LazyWorkspace

        return stack.enter_context(closing(LazyWorkspace(options, telemetry, approvals)))

    server = WorkspaceServer(options.directory, load, max_answer=options.max_answer, approvals=approvals)
    if options.has_person:
        server.open()
    return server


def _say(text: str) -> None:
    from ringfence_cli.outputs import ErrorStream

    ErrorStream().say(text)


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
        async with anyio.create_task_group() as group:
            group.start_soon(server.open_early)
            await transports.serve_stdio(server.protocol(), source, target)
            server.stop()
            group.cancel_scope.cancel()


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
