"""An MCP server whose one tool asks the person at its client, over the transports of `ringfence serve`."""

from __future__ import annotations

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from ringfence_mcp.first_answer import reserve_streams
from ringfence_mcp.questions import Elicitation, answer_in, ask, asking_result, elicitation_of
from ringfence_mcp.server import Connected
from ringfence_mcp.transports import serve_stdio

CHOICES = ("yes", "no")
STATE = "the call"


async def list_tools(context: object, params: object) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[types.Tool(name="asks", input_schema={"type": "object"})])


async def call_tool(
    context: ServerRequestContext[Connected], params: types.CallToolRequestParams
) -> types.CallToolResult | types.InputRequiredResult:
    how = elicitation_of(context)
    if how is None:
        text = "cannot ask"
    elif how is Elicitation.REQUEST:
        try:
            text = str(await ask(context, "go on?", CHOICES))
        except MCPError as error:
            text = f"not asked: {error.error.message}"
    elif params.request_state != STATE:
        return asking_result("go on?", CHOICES, STATE)
    else:
        text = str(answer_in(params, CHOICES))
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])


def asking_server() -> Server[Connected]:
    return Server("asking", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    with reserve_streams() as (source, target):
        anyio.run(serve_stdio, asking_server(), source, target)
