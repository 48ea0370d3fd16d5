"""The tools of a prompt for other agent frameworks. Every call is a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from ringfence.adapters.loop import tool_schema
from ringfence.adapters.provider import package
from ringfence.runtime.tool_executor import ToolExecutor

if TYPE_CHECKING:
    from agents import FunctionTool
    from pydantic_ai.toolsets import AbstractToolset

MAX_MALFORMED_CALLS = 20
"""pydantic-ai gives up on a model after this many calls in a row whose arguments are not JSON."""


class OrderedCalls:
    """Runs the calls of one executor one at a time, in the order of the requests, in a thread."""

    def __init__(self, executor: ToolExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringfence-calls")

    async def run(self, name: str, arguments: Mapping[str, object] | str, call_id: str | None) -> str:
        """Return the text for the model. Raises what `ToolExecutor.execute` raises.

        A running call cannot be stopped. A cancelled caller therefore waits for its end.
        """
        # The caller's context tells which call this one is nested in.
        run = copy_context().run
        running = self._threads.submit(run, self._executor.execute, name, arguments, call_id=call_id)
        try:
            return (await asyncio.shield(asyncio.wrap_future(running))).text
        except asyncio.CancelledError:
            running.cancel()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([asyncio.wrap_future(running)])
            raise


def agents_tools(executor: ToolExecutor) -> list[FunctionTool]:
    """Return the prompt's tools for an ``Agent(tools=...)`` of the OpenAI Agents SDK (the extra ``agents``).

    Use them inside ``with prompt.resources:``. The calls of one turn run in their order. A failed call is an answer for
    the model. A cancelled run waits for the end of its running call.

    Raises:
        ImportError: the SDK is not installed.
    """
    sdk: Any = package("agents", extra="agents")
    calls = OrderedCalls(executor)
    rendered = executor.rendered_prompt

    def function_tool(name: str, description: str, parameters: Any) -> FunctionTool:
        async def invoke(context: Any, arguments: str) -> str:
            return await calls.run(name, arguments, getattr(context, "tool_call_id", None))

        return sdk.FunctionTool(
            name=name,
            description=description,
            params_json_schema=parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,  # strict would require arguments that have a default
        )

    schemas = [tool_schema(tool, rendered) for tool in rendered.tools]
    return [function_tool(schema.name, schema.description, dict(schema.parameters)) for schema in schemas]


def pydantic_toolset(executor: ToolExecutor, *, toolset_id: str | None = None) -> AbstractToolset[Any]:
    """Return the prompt's tools for an ``Agent(toolsets=...)`` of pydantic-ai (the extra ``pydantic-ai``).

    Use it inside ``with prompt.resources:``. The calls of one turn run in their order. A failed call is an answer for
    the model and no retry of pydantic-ai. A cancelled run waits for the end of its running call.

    Raises:
        ImportError: pydantic-ai is not installed.
    """
    toolsets: Any = package("pydantic_ai.toolsets", extra="pydantic-ai")
    tools: Any = package("pydantic_ai.tools", extra="pydantic-ai")
    core: Any = package("pydantic_core", extra="pydantic-ai")
    calls = OrderedCalls(executor)
    rendered = executor.rendered_prompt
    # The tool call itself validates its arguments.
    anything = core.SchemaValidator(core.core_schema.any_schema())

    class Toolset(toolsets.AbstractToolset):
        @property
        def id(self) -> str | None:
            return toolset_id

        async def get_tools(self, ctx: Any) -> dict[str, Any]:
            return {
                schema.name: toolsets.ToolsetTool(
                    toolset=self,
                    tool_def=tools.ToolDefinition(
                        name=schema.name,
                        description=schema.description,
                        parameters_json_schema=dict(schema.parameters),
                        sequential=True,
                    ),
                    max_retries=MAX_MALFORMED_CALLS,
                    args_validator=anything,
                )
                for schema in (tool_schema(tool, rendered) for tool in rendered.tools)
            }

        async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: Any, tool: Any) -> str:
            return await calls.run(name, tool_args, ctx.tool_call_id)

    return Toolset()
