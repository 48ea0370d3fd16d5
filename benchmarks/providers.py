"""What an adapter adds to a tool call, beside a bare loop on the same SDK against the same server on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import Row, Spread, alternated, repeated, report

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ProviderAdapter
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate
from ringfence.runtime import Session
from ringfence_tools import VfsToolsSection

AREA = "provider"
CALLS = 10
AT_MOST_SECONDS = 0.002
TEXT = "the file a\n"
TURN = {"text": "I look.", "tool_calls": [{"name": "read_file", "arguments": {"file_path": "a.txt"}}]}
SUPPORT = str(Path(__file__).parent.parent / "tests" / "support")
SERVER = f"""
import sys
sys.path.insert(0, {SUPPORT!r})
from provider_server import ProviderServer
with ProviderServer([{TURN!r}] * {CALLS} + [{{"text": "Done."}}], repeat=True) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def read_file(arguments: str) -> str:
    return {"a.txt": TEXT}[json.loads(arguments)["file_path"]]


def bare_chat(client: Any, tools: list[Any], stream: bool) -> str:
    messages: list[Any] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Begin."}]
    tools = [{"type": "function", "function": tool} for tool in tools]
    while True:
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(model="m", messages=messages, tools=tools)
            message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            text = read_file(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def bare_responses(client: Any, tools: list[Any], stream: bool) -> str:
    items: list[Any] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Begin."}]
    tools = [{"type": "function", "strict": False, **tool} for tool in tools]
    while True:
        if stream:
            with client.responses.stream(model="m", input=items, tools=tools) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(model="m", input=items, tools=tools)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += answer.output
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": read_file(call.arguments)}
            for call in calls
        ]


def bare_messages(client: Any, tools: list[Any], stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": "Look."}]
    tools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    while True:
        options = {"model": "m", "max_tokens": 1000, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**options) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**options)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[-1].text
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": read_file(json.dumps(call.input))}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


def evaluation(adapter: ProviderAdapter) -> Callable[[], object]:
    """A fresh session each time, as an agent's task has."""

    def evaluate() -> None:
        prompt, session = prompt_of()
        assert adapter.evaluate(prompt, session=session).text == "Done."

    return evaluate


def prompt_of() -> tuple[Prompt[None], Session]:
    session, files = Session(), InMemoryFilesystem()
    files.write("a.txt", TEXT)
    look = MarkdownSection(title="Task", key="task", template="Look.")
    section = VfsToolsSection(session=session, filesystem=files)
    return Prompt(PromptTemplate(ns="bench", key="provider", sections=[look, section])), session


def rows() -> Iterator[Row]:
    import anthropic
    import openai

    from ringfence.adapters.loop import tool_schema

    rendered = prompt_of()[0].render()
    schemas = [tool_schema(tool, rendered) for tool in rendered.tools]
    tools = [{"name": s.name, "description": s.description, "parameters": s.parameters} for s in schemas]
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        spoken = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0))
        claude = stack.enter_context(anthropic.Anthropic(base_url=url, api_key="k", max_retries=0))
        for stream in (True, False):
            how = "streamed" if stream else "whole"
            sides: list[tuple[str, ProviderAdapter, Callable[[], str]]] = [
                (
                    f"Responses, {how}",
                    OpenAIAdapter("m", client=spoken, stream=stream),
                    lambda stream=stream: bare_responses(spoken, tools, stream),
                ),
                (
                    f"Chat Completions, {how}",
                    OpenAIAdapter("m", client=spoken, api="chat", stream=stream),
                    lambda stream=stream: bare_chat(spoken, tools, stream),
                ),
                (
                    f"Messages, {how}",
                    AnthropicAdapter("m", client=claude, stream=stream),
                    lambda stream=stream: bare_messages(claude, tools, stream),
                ),
            ]
            for what, adapter, bare in sides:
                spreads = alternated(repeated(evaluation(adapter)), repeated(bare), seconds=3)
                ours, baseline = map(per_call, spreads)
                met = ours.median - baseline.median <= AT_MOST_SECONDS
                target = f"<= {AT_MOST_SECONDS * 1e3:g} ms more"
                ratio = ours.median / baseline.median
                yield Row(AREA, f"a turn with a tool call, {what}", "a bare loop", ratio, target, met, ours, baseline)
        server.communicate()


def per_call(spread: Spread) -> Spread:
    """Of an evaluation's calls, its last turn shared out among them."""
    return Spread(spread.median / CALLS, spread.low / CALLS, spread.high / CALLS)


if __name__ == "__main__":
    report(rows())
