"""A client of your own for `ringfence mcp install`: here the agent of a house, which reads `acme.json`.

The entry point in `pyproject.toml` beside this file names it. After `pip install .`, this works:

    ringfence mcp install acme --exclusive
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringfence_mcp import ClientScope, ConfigEdit, McpClient, ServerCommand


def file(scope: ClientScope) -> Path:
    return scope.directory / (".config/acme.json" if scope.personal else "acme.json")


def entry(server: ServerCommand) -> dict[str, Any]:
    """What the agent reads: one list of words, and the environment."""
    return {"run": [server.command, *server.args], "environment": dict(server.env)}


def exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    """Switch off the agent's own tools that change files."""
    return [ConfigEdit(file(scope), ("tools", "off"), members=["edit", "shell"])]


acme = McpClient(
    name="acme",
    title="Acme",
    file=file,
    key=("servers", "ringfence"),
    entry=entry,
    next_step="start acme here",
    exclusive=exclusive,
    reported_name="acme-agent",  # what it calls itself in `initialize`
    shown_characters=20_000,  # of an answer; what is longer, the agent cuts
)
