"""The clients of a server. Each has a session of its own, so what one has read says nothing about the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from mcp.server.context import ServerRequestContext
from mcp_types import CallToolResult

from ringfence.adapters.tool_executor import ToolExecutor
from ringfence.errors import PromptEvaluationError
from ringfence.failures import describe_error
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.runtime.events import ToolInvoked
from ringfence.runtime.limits import Cancellation
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.session import Session
from ringfence_cli.serve.results import called, failed
from ringfence_cli.serve.workspaces import ServedWorkspace
from ringfence_tools.agent_run import MakeSection

if TYPE_CHECKING:
    from ringfence.telemetry import Telemetry

CLIENT_HEADER = "ringfence-client"
"""By which clients that share a name, and have no connection that lasts, can tell themselves apart."""
SESSION_HEADER = "mcp-session-id"
MAX_CLIENTS = 64
MAX_REMEMBERED = 32
"""Events and values of one kind that a session keeps: a server may run for months."""
REMEMBERED = 16
"""Of these, when there are too many: the last ones, since an answer that was cut names the place of the whole."""


class Client:
    """One client's session over the shared workspace."""

    def __init__(
        self,
        workspace: ServedWorkspace,
        hear: Callable[[Receipt], None],
        telemetry: Telemetry | None = None,
        added: Sequence[MakeSection] = (),
    ) -> None:
        self.session = Session()
        if telemetry is not None:
            telemetry.observe(self.session)
        sections = [*workspace.sections(self.session), *(make(self.session) for make in added)]
        template = PromptTemplate(ns="ringfence", key="serve", sections=sections, policies=workspace.policies)
        prompt = Prompt(template)
        self.calls = 0
        """That run, or wait for their turn."""
        self._resources = ExitStack()
        self._resources.enter_context(prompt.resources)
        self._executor = ToolExecutor(prompt=prompt, session=self.session)
        tools = prompt.tools(session=self.session)
        self.tools = {tool.name: tool for tool in tools if tool.read_only or not workspace.read_only}
        results = (tool.result_type for tool in tools)
        self._kinds = {ToolInvoked, Receipt, *(kind for kind in results if kind is not None and is_dataclass(kind))}
        self.session.dispatcher.subscribe(Receipt, hear)

    def call(self, name: str, arguments: Mapping[str, object] | None, cancellation: Cancellation) -> CallToolResult:
        """One tool call, on any thread; never two at once."""
        try:
            answer = self._executor.execute(name, arguments, cancellation=cancellation)
            return called(answer, self.tools.get(name))
        except PromptEvaluationError as error:
            return failed(str(error))
        except SystemExit as error:  # of a tool of the user's own: the server goes on for all others
            return failed(f"{name} has ended itself, and was rolled back: {describe_error(error)}")
        finally:
            self._forget()

    def _forget(self) -> None:
        for kind in self._kinds:
            items = self.session[kind].all()
            if len(items) > MAX_REMEMBERED:
                self.session[kind].seed(items[-REMEMBERED:])

    def close(self) -> None:
        self._resources.close()


class Clients:
    """The clients that one run of the server has had, the least recently seen first."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._clients: OrderedDict[str, Client] = OrderedDict()

    def of(self, context: ServerRequestContext[Any, Any]) -> Client:
        """The client that made a request. One who has not been heard of for long is a new one."""
        key = _key(context)
        client = self._clients.get(key)
        if client is None:
            client = self._make()
            if len(self._clients) >= MAX_CLIENTS:
                self._forget_one()
            self._clients[key] = client
        self._clients.move_to_end(key)
        return client

    def _forget_one(self) -> None:
        """Who has not been heard of for longest, and waits for no answer."""
        for key, client in self._clients.items():
            if not client.calls:
                del self._clients[key]
                client.close()
                return

    def close(self) -> None:
        while self._clients:
            self._clients.popitem()[1].close()


def _key(context: ServerRequestContext[Any, Any]) -> str:
    if context.request is None:
        return ""  # standard input and output, or memory: one connection, one client
    headers: Mapping[str, str] = context.request.headers
    if (session := headers.get(SESSION_HEADER)) is not None:
        return f"session {session}"
    # 2026-07-28 and later: nothing lasts from one request to the next, so a client is who it says it is.
    params = context.session.client_params
    name = f"{params.client_info.name} {params.client_info.version}" if params is not None else ""
    return f"client {headers.get(CLIENT_HEADER, '')} {name}"
