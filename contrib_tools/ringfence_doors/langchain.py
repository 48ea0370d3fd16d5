"""The tools of a prompt for agents of LangChain (the extra ``langchain``). The receipt of a call is its artifact."""

# langchain-core is not installed where this is checked. Its own suite runs on these tools in tests/doors.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from ringfence.adapters.loop import tool_schema
from ringfence.extras import missing
from ringfence.limits import Cancellation

try:
    from langchain_core.tools import BaseTool, StructuredTool
except ImportError as error:
    raise ModuleNotFoundError(missing("langchain_core", "langchain"), name="langchain_core") from error

if TYPE_CHECKING:
    from ringfence.runtime.tool_executor import ToolCallResult, ToolExecutor

Answer = tuple[str, dict[str, object]]
"""The text for the model, and the receipt."""


class OneAtATime:
    """Runs the calls of one executor one at a time, in the order of the requests, in a thread."""

    def __init__(self, executor: ToolExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringfence-langchain")

    def run(self, name: str, arguments: dict[str, object]) -> Answer:
        return _answer(self._submit(name, arguments, Cancellation()).result())

    async def arun(self, name: str, arguments: dict[str, object]) -> Answer:
        """Run a call. If this task is cancelled, the call has ended, and is rolled back unless it had committed."""
        cancellation = Cancellation()
        call = self._submit(name, arguments, cancellation)
        try:
            return _answer(await asyncio.shield(asyncio.wrap_future(call)))
        except asyncio.CancelledError:
            cancellation.cancel()
            call.cancel()
            while not call.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([asyncio.wrap_future(call)])
            raise

    def _submit(self, name: str, arguments: dict[str, object], cancellation: Cancellation) -> Future[ToolCallResult]:
        # The caller's context tells which call this one is nested in.
        run = copy_context().run
        return self._threads.submit(run, self._executor.execute, name, arguments, cancellation=cancellation)


def _answer(call: ToolCallResult) -> Answer:
    return call.text, call.receipt.to_json()


def langchain_tools(executor: ToolExecutor) -> list[BaseTool]:
    """Return the prompt's tools for ``create_agent(model, tools=...)``.

    Use them inside ``with prompt.resources:``. Calls run one at a time. A failed call is an answer for the model. The
    ``artifact`` of the message of a call is its receipt, as JSON.
    """
    calls = OneAtATime(executor)
    rendered = executor.rendered_prompt

    def structured(name: str, description: str, parameters: dict[str, Any]) -> BaseTool:
        def run(**arguments: Any) -> Answer:
            return calls.run(name, arguments)

        async def arun(**arguments: Any) -> Answer:
            return await calls.arun(name, arguments)

        return StructuredTool(
            name=name,
            description=description,
            args_schema=parameters,
            func=run,
            coroutine=arun,
            response_format="content_and_artifact",
        )

    schemas = [tool_schema(tool, rendered) for tool in rendered.tools]
    return [structured(schema.name, schema.description, dict(schema.parameters)) for schema in schemas]
