"""The clients of an MCP server, and the results of their tool calls.

The client of a process on stdio, and of a session of the protocol up to 2025-11-25, has a session of its own: a file
that one client has read is still unread for the others. Over HTTP, the later protocol has no sessions. Its clients
cannot be told apart, whatever they call themselves, and name the version of a file that they replace.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from typing import Any, Protocol, cast

from mcp.server.context import ServerRequestContext
from mcp_types import CallToolResult, TextContent

from ringfence import serde
from ringfence.errors import PromptEvaluationError
from ringfence.failures import describe_error
from ringfence.limits import Cancellation
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.receipts import Receipt
from ringfence.runtime.tool import Tool
from ringfence.runtime.tool_executor import ToolCallResult, ToolExecutor
from ringfence.secrets import Secrets
from ringfence.session.events import ToolInvoked
from ringfence.session.session import Session
from ringfence.session.tool_result import bounded
from ringfence_mcp.descriptions import ITEMS, MESSAGE, is_structured
from ringfence_mcp.identity import identity_of, label_of
from ringfence_mcp.mcp_client import SHOWN_BY_OTHERS
from ringfence_mcp.workspaces import ServedWorkspace

MAX_CLIENTS = 64
MAX_ITEMS = 32
"""Events and values of one type that a session keeps, since a server may run for months. The newest half stays when
there are more. A result that was cut names the file of the whole."""
Observe = Callable[[Session], None]
"""Subscribes to the events of a client's session, which are published on the threads of its calls."""
CUT = "[the structured result was cut: ask for a smaller part]"


class ServedClient:
    """One client, or all of one label that have no identity: a session, and the tools on the shared workspace."""

    def __init__(self, workspace: ServedWorkspace, observe: Observe, label: str = "", *, shared: bool = False) -> None:
        self.session = Session(tags={"client": label}, secrets=workspace.secrets)
        self.shared = shared
        observe(self.session)
        sections = list(workspace.sections(self.session, shared))
        prompt = Prompt(PromptTemplate(ns="ringfence", key="serve", sections=sections, policies=workspace.policies))
        self._resources = ExitStack()
        self._resources.enter_context(prompt.resources)
        self._executor = ToolExecutor(prompt=prompt, session=self.session)
        tools = prompt.tools(session=self.session)
        self.tools = {tool.name: tool for tool in tools if tool.read_only or not workspace.read_only}
        self._item_types: set[Any] = {ToolInvoked, Receipt, *filter(is_dataclass, (tool.result_type for tool in tools))}

    def call(
        self,
        name: str,
        arguments: Mapping[str, object] | None,
        cancellation: Cancellation,
        max_answer: int = SHOWN_BY_OTHERS,
    ) -> CallToolResult:
        """Execute one tool call, on any thread. Two calls must not overlap.

        ``max_answer`` is the most characters of its text, and of its structured content.
        """
        try:
            call = self._executor.execute(name, arguments, cancellation=cancellation, max_answer=max_answer)
            return tool_result(call, self.tools.get(name), max_answer, self.session.secrets)
        except PromptEvaluationError as error:
            return error_result(str(error))
        except SystemExit as error:  # from a tool of the user: the other clients still need the server
            return error_result(f"{name} has ended itself, and was rolled back: {describe_error(error)}")
        finally:
            self._trim_session()

    def _trim_session(self) -> None:
        for item_type in self._item_types:
            items = self.session[item_type].all()
            if len(items) > MAX_ITEMS:
                self.session[item_type].seed(items[-MAX_ITEMS // 2 :])

    def close(self) -> None:
        self._resources.close()


class MakeClient(Protocol):
    def __call__(self, label: str, *, shared: bool) -> ServedClient: ...


class ServedClients:
    """The clients of one run of the server, the least recently used first."""

    def __init__(self, make_client: MakeClient) -> None:
        self._make_client = make_client
        self._clients: OrderedDict[str, ServedClient] = OrderedDict()

    def of(self, context: ServerRequestContext[Any, Any]) -> ServedClient:
        """Return the client of a request, whose turn it is: no other client has a call that runs. A client that was
        evicted starts anew.
        """
        identity, label = identity_of(context), label_of(context)
        key = identity if identity is not None else f"label {label}"
        client = self._clients.get(key)
        if client is None:
            client = self._make_client(label, shared=identity is None)
            if len(self._clients) >= MAX_CLIENTS:
                self._clients.popitem(last=False)[1].close()
            self._clients[key] = client
        self._clients.move_to_end(key)
        return client

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def tool_result(
    call: ToolCallResult, tool: Tool[Any, Any] | None, max_answer: int, secrets: Secrets | None = None
) -> CallToolResult:
    """Make the MCP result of a tool call: the text for the model, and the value if there is one, without secrets."""
    receipt, text = call.receipt, call.text
    meta = {"ringfence/outcome": receipt.outcome, "ringfence/receipt": receipt.receipt_id}
    if receipt.commit is not None:
        meta["ringfence/commit"] = receipt.commit
    structured: dict[str, Any] | None = None
    if call.result.success and tool is not None and is_structured(tool):
        dumped = serde.dump_any(call.result.value)
        if secrets:  # a property may put one together
            dumped = secrets.mask(dumped)
        message = bounded(call.result.message, max_answer // 2)
        room = max_answer - len(message) - len(CUT)
        value, cut = fit_structured(dumped if tool.result_container == "object" else {ITEMS: dumped}, room)
        if cut:
            message = f"{message}\n{CUT}"
        # Some clients show the model only the structured result.
        structured = {MESSAGE: message, **value}
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=structured,
        is_error=not call.result.success,
        _meta=meta,
    )


def error_result(message: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=bounded(message, SHOWN_BY_OTHERS))], is_error=True)


def fit_structured(value: Any, characters: int) -> tuple[Any, bool]:
    """Cut the texts and lists of a JSON value until it has so few characters. Return it, and whether it was cut.

    The value still has the shape of its schema.
    """
    limit = 10_000
    fitting = value
    while len(json.dumps(fitting, ensure_ascii=False)) > characters and limit:
        fitting = _cut(fitting, limit)
        limit //= 4
    return fitting, fitting is not value


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}[... {len(value) - limit:,} more characters]"
    if isinstance(value, list):
        return [_cut(item, limit) for item in cast("list[Any]", value)[:limit]]
    if isinstance(value, dict):
        items = list(cast("dict[str, Any]", value).items())[:limit]
        return {key: _cut(item, limit) for key, item in items}
    return value
