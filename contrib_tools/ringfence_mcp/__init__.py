"""The MCP server, and its registration with the agents that people have."""
