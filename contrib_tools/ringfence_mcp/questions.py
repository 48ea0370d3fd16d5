"""Questions to the person at a client of an MCP server, in the middle of a call.

Up to revision 2025-11-25, a server asks by a request of its own while the call runs. Since 2026-07-28, the question is
the result of the call. The client then repeats the call with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

KEY = "question"
"""The name of the question in the answer to a call, and of the answer in the repeated call."""


class Elicitation(Enum):
    """How the person at a client can be asked."""

    REQUEST = "by a request while the call runs"
    RESULT = "by the result of the call, which the client then repeats"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question. ``choice`` is None if the person declined or dismissed the question."""

    choice: str | None
    comment: str = ""
    is_malformed: bool = False
    """Whether the client sent no answer to the question that was asked. ``choice`` is None then, too."""


def elicitation_of(context: ServerRequestContext[Any, Any]) -> Elicitation | None:
    """Return how the person at the client of a call can be asked; None if the client cannot show a form."""
    capabilities = context.session.client_capabilities
    elicitation = capabilities.elicitation if capabilities is not None else None
    if elicitation is None or (elicitation.form is None and elicitation.url is not None):
        return None
    if context.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
        return Elicitation.RESULT
    return Elicitation.REQUEST if context.session.can_send_request else None


async def ask(context: ServerRequestContext[Any, Any], message: str, choices: Sequence[str]) -> Answer:
    """Ask by a request, and wait for the answer. A cancellation withdraws the question.

    Raise MCPError: the client did not answer the question.
    """
    question = _form(message, choices)
    result = await context.session.elicit_form(question.message, question.requested_schema, context.request_id)
    return _answer(result, choices)


def asking_result(message: str, choices: Sequence[str], state: str) -> types.InputRequiredResult:
    """Return the result that asks.

    The client repeats the call with ``state``, and may send anything there. Only a secret shows that the call is the
    same one.
    """
    question = types.ElicitRequest(params=_form(message, choices))
    return types.InputRequiredResult(input_requests={KEY: question}, request_state=state)


def answer_in(params: types.CallToolRequestParams, choices: Sequence[str]) -> Answer:
    """Return the answer from the repeated call."""
    result = (params.input_responses or {}).get(KEY)
    return _answer(result, choices) if isinstance(result, types.ElicitResult) else Answer(None, is_malformed=True)


def _form(message: str, choices: Sequence[str]) -> types.ElicitRequestFormParams:
    properties = {
        "choice": {"type": "string", "title": "Answer", "enum": list(choices)},
        "comment": {"type": "string", "title": "Comment", "description": "The model reads it."},
    }
    schema = {"type": "object", "properties": properties, "required": ["choice"]}
    return types.ElicitRequestFormParams(message=message, requested_schema=schema)


def _answer(result: types.ElicitResult, choices: Sequence[str]) -> Answer:
    content = result.content or {}
    choice, comment = content.get("choice"), content.get("comment")
    if result.action != "accept":
        return Answer(None)
    if choice not in choices:
        return Answer(None, is_malformed=True)
    return Answer(str(choice), comment if isinstance(comment, str) else "")
