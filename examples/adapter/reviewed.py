"""An adapter of your own: a model whose every answer a second look may send back.

    ringfence run DIR --task "Note what is here." --model reviewed.py:reviewed

An adapter is a LoopAdapter. `respond` gets the conversation and the tools, and returns one turn; the loop, its limits
and the transactions of the calls are those of every model. This one needs no provider, so that you can run it at once:
put a request to your own server into `ask`.
"""

from __future__ import annotations

from ringfence.adapters import LoopAdapter, Request, ToolCall, Turn


def ask(request: Request) -> Turn:
    """Stand in for a provider: list the files, write a note about them, and answer."""
    last = request.messages[-1]
    calls = sum(len(message.turn.tool_calls) for message in request.messages if message.turn is not None)
    if calls == 0:
        return Turn(tool_calls=(ToolCall("call-1", "ls", {"path": ""}),))
    if calls == 1:
        return Turn(tool_calls=(ToolCall("call-2", "write_file", {"file_path": "NOTE.md", "content": last.text}),))
    return Turn("The note is in NOTE.md.")


class Reviewed(LoopAdapter):
    """Asks the model, and refuses a turn with more calls than `most_calls`."""

    def __init__(self, most_calls: int = 1) -> None:
        self._most_calls = most_calls

    def respond(self, request: Request) -> Turn:
        turn = ask(request)
        if len(turn.tool_calls) > self._most_calls:
            return Turn("I wanted to do too much at once.")
        return turn


def reviewed() -> Reviewed:
    return Reviewed()
