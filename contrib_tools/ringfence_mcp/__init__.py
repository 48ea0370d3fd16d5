"""The MCP server, and its registration with the agents that people have."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence_mcp.mcp_client import ClientScope, McpClient, OffSwitch, OwnCommand, ServerCommand
    from ringfence_tools.client_files import ConfigEdit

__all__ = ["ClientScope", "ConfigEdit", "McpClient", "OffSwitch", "OwnCommand", "ServerCommand"]


# Imported when asked for: the server answers its client first.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "ringfence_tools.client_files" if name == "ConfigEdit" else "ringfence_mcp.mcp_client"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
