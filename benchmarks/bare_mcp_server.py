"""An MCP server with one tool that does nothing, as the SDK's own documentation has it: what `mcp_call.py` compares
with."""

from __future__ import annotations

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool


async def list_tools(context: object, params: object) -> ListToolsResult:
    return ListToolsResult(tools=[Tool(name="read_file", description="Nothing.", input_schema={"type": "object"})])


async def call_tool(context: object, params: object) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text="1 | hello")], structured_content={"lines": 1})


async def main() -> None:
    server = Server("bare", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


anyio.run(main)
