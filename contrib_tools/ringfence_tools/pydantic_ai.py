"""The tools of a ringfence workspace as a toolset of pydantic-ai, which is an extra: every call a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.adapters.loop import tool_schema
from ringfence.adapters.provider import package
from ringfence.adapters.tool_executor import ToolExecutor
from ringfence_tools.calls_in_order import CallsInOrder

if TYPE_CHECKING:
    from pydantic_ai.toolsets import AbstractToolset


REPEATS = 20
"""How often in a row a model may write arguments that are no JSON before pydantic-ai gives up on it."""


def pydantic_toolset(executor: ToolExecutor, *, toolset_id: str | None = None) -> AbstractToolset[Any]:
    """What an ``Agent(toolsets=...)`` takes, with every tool that the executor's prompt offers.

    To be used inside ``with prompt.resources:``. Calls of one turn run one after the other, in their order; a call that
    fails is an answer for the model, and no retry of pydantic-ai's. A run that is cancelled waits for the end of the
    call that runs.

    Raises:
        ImportError: pydantic-ai is not installed.
    """
    toolsets: Any = package("pydantic_ai.toolsets", extra="pydantic-ai")
    tools: Any = package("pydantic_ai.tools", extra="pydantic-ai")
    core: Any = package("pydantic_core", extra="pydantic-ai")
    calls = CallsInOrder(executor)
    rendered = executor.rendered_prompt
    # Anything is let through: the call parses its arguments itself, and says what does not fit.
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
                    max_retries=REPEATS,
                    args_validator=anything,
                )
                for schema in (tool_schema(tool, rendered) for tool in rendered.tools)
            }

        async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: Any, tool: Any) -> str:
            return await calls.answer(name, tool_args, ctx.tool_call_id)

    return Toolset()
