"""Who sends a request to an MCP server, as far as that can be known."""

from __future__ import annotations

from typing import Any

from mcp.server.context import ServerRequestContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

CLIENT_HEADER = "ringfence-client"
"""Labels a client, in the place of its name and version. It is no identity."""
MAX_LABEL_CHARACTERS = 100
SESSION_HEADER = "mcp-session-id"


def identity_of(context: ServerRequestContext[Any, Any]) -> str | None:
    """What only one client can have: the process on stdio, or a session that the transport has checked."""
    if context.request is None:
        return "process"
    session: str | None = context.request.headers.get(SESSION_HEADER)
    if session is None or context.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
        return None
    return f"session {session}"


def client_name(context: ServerRequestContext[Any, Any]) -> str:
    """Return what the client calls itself. It may be anything."""
    params = context.session.client_params
    return params.client_info.name if params is not None else ""


def label_of(context: ServerRequestContext[Any, Any]) -> str:
    """What a client calls itself, for people and models: on one line, with nothing in it that acts or hides."""
    from ringfence_tools.printable import one_line

    named: str | None = context.request.headers.get(CLIENT_HEADER) if context.request is not None else None
    params = context.session.client_params
    if named is None and params is not None:
        named = f"{params.client_info.name} {params.client_info.version}"
    return one_line(named or "", MAX_LABEL_CHARACTERS)
