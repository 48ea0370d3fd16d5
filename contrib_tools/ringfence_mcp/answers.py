"""How much of an answer the clients of an MCP server show a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.server.context import ServerRequestContext

SHOWN: Mapping[str, int] = {
    "claude-code": 48_000,  # 2.1.331: an answer of more than 50,000 characters goes into a file
    "codex-mcp-client": 10_000,  # 0.169.0: 10,000 bytes, and for the models that it knows 10,000 tokens
    "gemini-cli-mcp-client": 40_000,  # 0.61: DEFAULT_TRUNCATE_TOOL_OUTPUT_THRESHOLD
    "opencode": 48_000,  # 1.18.33: MAX_BYTES is 51,200, and MAX_LINES 2,000
    "qwen-cli-mcp-client": 25_000,  # 0.24: DEFAULT_TRUNCATE_TOOL_OUTPUT_THRESHOLD; the name of the server follows
}
"""The characters that a client shows whole, by the name that it gives itself, as its installed source has them."""
SHOWN_BY_OTHERS = 10_000


def client_name(context: ServerRequestContext[Any, Any]) -> str:
    """Return what the client calls itself. It may be anything."""
    params = context.session.client_params
    return params.client_info.name if params is not None else ""


def shown_characters(name: str) -> int:
    """Return how many characters of an answer the client with this name shows whole."""
    return next((shown for known, shown in SHOWN.items() if name.startswith(known)), SHOWN_BY_OTHERS)
