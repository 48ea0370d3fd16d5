"""The MCP server, and its registration with the agents that people have."""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence_mcp.mcp_client import ClientScope, McpClient, OffSwitch, OwnCommand, ServerCommand
    from ringfence_tools.client_files import ConfigEdit

__all__ = ["ClientScope", "ConfigEdit", "McpClient", "OffSwitch", "OwnCommand", "ServerCommand"]

# Imported when asked for: the server answers its client first.
_MODULES = dict.fromkeys(__all__, ".mcp_client") | {"ConfigEdit": "ringfence_tools.client_files"}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
