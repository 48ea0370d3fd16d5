"""The command ``ringfence serve``: run the server, and stop it at a signal.

The packages of the protocol are loaded after the first answer.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import click

from ringfence_mcp.first_answer import Begun, answer_first, reserve_streams
from ringfence_mcp.options import ServeOptions
from ringfence_tools.runs.command_errors import INTERRUPTED
from ringfence_tools.runs.signals import Signals

if TYPE_CHECKING:
    from ringfence_mcp.opening import LazyWorkspace
    from ringfence_mcp.server import WorkspaceServer

TOKEN_VARIABLE = "RINGFENCE_MCP_TOKEN"  # noqa: S105  # its name
MIN_TOKEN_CHARACTERS = 16

PACKAGES = ("anyio", "mcp", "mcp_types")

Serve: TypeAlias = "Callable[[WorkspaceServer], Awaitable[None]]"


def serve(options: ServeOptions, signals: Signals) -> int:
    """Serve until the end and return the exit code.

    Raises:
        click.ClickException: it cannot be served.
        ModuleNotFoundError: a package is missing.
    """
    for package in PACKAGES:  # before an answer that would promise a server
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
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
        import anyio

        try:
            anyio.run(_run_until_signal, partial(transport, server), signals, server.stop)
        finally:
            server.wait()
        return INTERRUPTED if signals.arrived else 0


def _start(options: ServeOptions, stack: ExitStack) -> WorkspaceServer:
    """Make the server. If a person has started it, open the workspace. ``stack`` closes it."""
    telemetry = None
    if any(name.startswith("OTEL_") for name in os.environ):  # before the SDK has a first span
        from ringfence_tools.runs.outputs import ErrorStream
        from ringfence_tools.runs.span_export import telemetry_of

        telemetry = telemetry_of(ErrorStream(), stack)

    approvals = None
    if options.asks:
        from ringfence_mcp.approvals import Approvals

        approvals = Approvals()

    def load() -> LazyWorkspace:
        from ringfence_mcp.opening import LazyWorkspace

        return stack.enter_context(closing(LazyWorkspace(options, telemetry, approvals)))

    from ringfence_mcp.server import WorkspaceServer

    server = WorkspaceServer(options.directory, load, max_answer=options.max_answer, approvals=approvals)
    if options.has_person:
        server.open()
    return server


def _say(text: str) -> None:
    from ringfence_tools.runs.outputs import ErrorStream

    ErrorStream().say(text)


async def _run_until_signal(
    work: Callable[[], Awaitable[None]], signals: Signals, stop: Callable[[], None] = lambda: None
) -> None:
    import asyncio

    import anyio

    scope = anyio.CancelScope()

    def end() -> None:
        stop()
        scope.cancel()

    # When the handlers of asyncio are removed, a second signal kills the process in the middle of a rollback.
    with signals.notifying(partial(asyncio.get_running_loop().call_soon_threadsafe, end)), scope:
        await work()


async def _over_stdio(streams: tuple[int, int], begun: Begun, server: WorkspaceServer) -> None:
    import anyio

    from ringfence_mcp import transports

    async with anyio.create_task_group() as group:
        group.start_soon(server.open_early)
        await transports.serve_stdio(server.protocol(), *streams, begun)
        server.stop()
        group.cancel_scope.cancel()


def _transport(options: ServeOptions, stack: ExitStack) -> tuple[Serve, Sequence[str]]:
    """Return the transport, and the lines that tell a person how to connect. Listen if it is HTTP.

    Else answer the client's first request.
    """
    if options.http is None:
        if options.allowed_hosts:
            raise click.UsageError("--allow-host is for --http")
        streams = stack.enter_context(reserve_streams())
        begun = answer_first(*streams, options.directory) if not options.has_person else Begun()
        return partial(_over_stdio, streams, begun), ()
    return _over_http(options, options.http, stack)


def _over_http(options: ServeOptions, address: str, stack: ExitStack) -> tuple[Serve, Sequence[str]]:
    from ringfence.failures import describe_error
    from ringfence_mcp import transports

    try:
        host, port = transports.parse_address(address)
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
        message = f"{address} cannot be used: {describe_error(error)}"
        raise click.BadParameter(message, param_hint="'--http'") from None
    port = listening.getsockname()[1]

    async def serve_over_http(server: WorkspaceServer) -> None:
        await transports.serve_http(server.protocol(), listening, token, options.allowed_hosts)

    return serve_over_http, (
        f"serving {options.directory} at http://{transports.host_header(host)}:{port}{transports.PATH}",
        f"clients send the header  Authorization: Bearer {token_hint}",
    )


def _token() -> tuple[str, str]:
    """Return the token, and how to print it."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        import secrets

        token = secrets.token_urlsafe(32)
        return token, token
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise click.UsageError(
            f"{TOKEN_VARIABLE} has to be {MIN_TOKEN_CHARACTERS} or more printable ASCII characters without blanks"
        )
    return token, f"${TOKEN_VARIABLE}"
