"""What `ringfence serve` serves, and with what: a vocabulary for tests over the inside of the server."""

from __future__ import annotations

from pathlib import Path

from ringfence.filesystem import HiddenFiles
from ringfence.runtime import Cancellation
from ringfence_mcp.clients import MAX_CLIENTS, MAX_ITEMS, ServedClient, fit_structured
from ringfence_mcp.mcp_client import SHOWN_BY_OTHERS
from ringfence_mcp.questions import Answer
from ringfence_mcp.server import MAX_RESOURCE_BYTES, PAGE_SIZE, WorkspaceServer, resource_uri
from ringfence_mcp.transports import MAX_LINE_BYTES, is_loopback, listen, parse_address, serve_http, serve_stdio
from ringfence_mcp.workspaces import ServedWorkspace, open_workspace
from ringfence_tools.runs.place import Place, WorkspaceKind
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_spec import RunSpec

__all__ = [
    "MAX_CLIENTS",
    "MAX_ITEMS",
    "MAX_LINE_BYTES",
    "MAX_RESOURCE_BYTES",
    "PAGE_SIZE",
    "SHOWN_BY_OTHERS",
    "Answer",
    "ServedClient",
    "ServedWorkspace",
    "WorkspaceServer",
    "client_of",
    "fit_structured",
    "is_loopback",
    "listen",
    "open_served",
    "parse_address",
    "resource_uri",
    "serve_http",
    "serve_stdio",
]


def open_served(
    directory: Path,
    kind: WorkspaceKind | None = None,
    *,
    hide: HiddenFiles | None = None,
    secrets: tuple[str, ...] = (),
    read_only: bool = False,
    cancellation: Cancellation | None = None,
) -> ServedWorkspace:
    """The workspace that `ringfence serve` opens with these options."""
    spec = RunSpec(directory, limits=RunLimits(place=Place(kind, secrets=secrets)), hide=hide)
    return open_workspace(spec, read_only=read_only, cancellation=cancellation)


def client_of(workspace: ServedWorkspace) -> ServedClient:
    """One whose calls nobody observes."""
    return ServedClient(workspace, lambda session: None)
