"""The clients that the server knows: those of ringfence, and those of the entry points in ``ringfence.clients``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from ringfence_mcp.builtin_clients import BUILT_IN
from ringfence_mcp.mcp_client import SHOWN_BY_OTHERS, McpClient
from ringfence_tools.runs.plug_ins import plug_ins

GROUP = "ringfence.clients"


class ClientEntryPointError(ValueError):
    """An entry point in ``ringfence.clients`` is no client."""


def client_names() -> Sequence[str]:
    """The names of all clients. Those of ringfence come first. No entry point is loaded."""
    return [*(client.name for client in BUILT_IN), *_entry_points()]


def client_named(name: str) -> McpClient:
    """Return the client with this name. A client of ringfence wins over an entry point of its name.

    Raises:
        KeyError: there is none.
        ClientEntryPointError: its entry point cannot be loaded, or is no client of that name.
    """
    for client in BUILT_IN:
        if client.name == name:
            return client
    return _load(_entry_points()[name])


def shown_characters(reported_name: str, directory: Path | None = None) -> int:
    """Return how many characters of an answer the client shows whole that calls itself so.

    An entry point that cannot be loaded is passed over: the server goes on. `ringfence mcp install` names it. One that
    is registered inside of ``directory`` does not count: the agent could change it.
    """
    for client in (*BUILT_IN, *_loaded(directory)):
        if client.reported_name and reported_name.startswith(client.reported_name):
            return client.shown_characters
    return SHOWN_BY_OTHERS


@cache
def _loaded(directory: Path | None) -> Sequence[McpClient]:
    clients = list[McpClient]()
    for point in _entry_points(directory).values():
        with suppress(ClientEntryPointError):
            clients.append(_load(point))
    return clients


@cache
def _entry_points(directory: Path | None = None) -> dict[str, EntryPoint]:
    built_in = {client.name for client in BUILT_IN}
    registered = plug_ins(GROUP, directory).items()
    return {name: EntryPoint(name, value, GROUP) for name, value in registered if name not in built_in}


def _load(point: EntryPoint) -> McpClient:
    try:
        client: object = point.load()
    except Exception as error:
        raise ClientEntryPointError(f"the client {point.name} of {point.value} cannot be loaded: {error}") from error
    if not isinstance(client, McpClient) or client.name != point.name:
        raise ClientEntryPointError(f"{point.value} is no McpClient with the name {point.name}")
    return client
