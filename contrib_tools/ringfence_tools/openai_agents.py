"""The tools of a ringfence workspace for the OpenAI Agents SDK (the extra ``agents``): every call a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.adapters.loop import tool_schema
from ringfence.adapters.provider import package
from ringfence.adapters.tool_executor import ToolExecutor
from ringfence_tools.calls_in_order import CallsInOrder

if TYPE_CHECKING:
    from agents import FunctionTool


def agents_tools(executor: ToolExecutor) -> list[FunctionTool]:
    """What an ``Agent(tools=...)`` takes, one for every tool that the executor's prompt offers.

    To be used inside ``with prompt.resources:``. Calls of one turn run one after the other, in their order; a call that
    fails is an answer for the model. A run that is cancelled waits for the end of the call that runs.

    Raises:
        ImportError: the SDK is not installed.
    """
    sdk: Any = package("agents", extra="agents")
    calls = CallsInOrder(executor)
    rendered = executor.rendered_prompt

    def made(name: str, description: str, parameters: Any) -> FunctionTool:
        async def invoke(context: Any, arguments: str) -> str:
            return await calls.answer(name, arguments, getattr(context, "tool_call_id", None))

        return sdk.FunctionTool(
            name=name,
            description=description,
            params_json_schema=parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,  # which would want every argument, also those with a default
        )

    schemas = [tool_schema(tool, rendered) for tool in rendered.tools]
    return [made(schema.name, schema.description, dict(schema.parameters)) for schema in schemas]
