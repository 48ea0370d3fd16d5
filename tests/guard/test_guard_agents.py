"""Agents that people have, from npm, under `ringfence guard`. Their models are scripts; they are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from npm import programs_of
from provider_server import Asked, ProviderServer, Reply
from real_agents import AGENTS, GIVEN, Place


@dataclass(frozen=True)
class GuardedRun:
    """How an agent is run without a person, and its tool for commands."""

    line: str
    shell: str
    key: str = "command"
    more: Mapping[str, Any] | None = None
    before: str = "true"
    """What a person has done first."""
    options: str = ""
    undo: str = ""
    """The undo from inside of the agent, which asks the model."""


RUNS = {
    "claude": GuardedRun("claude -p 'Work.' --allowedTools Bash Write", "Bash", more={"description": "run"}),
    "codex": GuardedRun(
        "codex exec --dangerously-bypass-approvals-and-sandbox 'Work.'",
        "exec_command",
        "cmd",
        before="""printf '[projects."%s"]\ntrust_level = "trusted"\n' "$PWD" >> ~/.codex/config.toml""",
        options=" --trust",
    ),
    "gemini": GuardedRun(
        "GEMINI_CLI_TRUST_WORKSPACE=true gemini -m gemini-2.5-pro --approval-mode yolo -p 'Work.'",
        "run_shell_command",
        more={"description": "run"},
    ),
    "opencode": GuardedRun(
        "opencode run 'Work.'", "bash", more={"description": "run"}, undo="opencode run --command guard-undo 2"
    ),
    "qwen": GuardedRun(
        "qwen --approval-mode yolo -p 'Work.'", "run_shell_command", more={"description": "run", "is_background": False}
    ),
}
SCRIPTS = [
    "mkdir protected; echo x > protected/x.txt; echo s > side.txt; rm a.py",
    "echo kept > kept.txt; exit 1",
    "echo last > last.txt",
]


class Model(ProviderServer):
    """Answers the conversation that offers the tool for commands, and gives a title to whatever is asked besides."""

    def __init__(self, shell: str, replies: Sequence[Reply]) -> None:
        super().__init__(replies)
        self._shell = shell

    def reply(self, asked: Asked) -> Reply:
        if f'"{self._shell}"' in json.dumps(asked.body.get("tools")):
            return super().reply(asked)
        return {"text": "A title"}


@pytest.fixture
def place(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    agent = AGENTS[name]
    return Place(agent, programs_of([f"{agent.package}@{agent.version}"], name, request, agent.options), tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name != "codex" else ()) for name in AGENTS]
)
def test_a_real_agents_commands_are_steps_and_its_model_reads_what_went_back(name: str, place: Place) -> None:
    run = RUNS[name]
    calls = [
        {"id": f"call_{number}", "name": run.shell, "arguments": {run.key: script, **(run.more or {})}}
        for number, script in enumerate(SCRIPTS)
    ]
    with Model(run.shell, [*({"tool_calls": [call]} for call in calls), *[{"text": "Done."}] * 2]) as model:
        place.log_in(model.url)
        place.run(run.before)
        place.run(f"echo y | ringfence guard install {name} --policy deny:/protected{run.options}")
        try:
            place.run(run.line, model.url)
            log = json.loads(place.run("ringfence guard log --json"))["calls"]
            told = json.dumps(model.asked[1].body)
            undone = place.run(run.undo or "ringfence guard undo 2", model.url)
            undone = json.dumps(model.asked[-1].body) if run.undo else undone
        finally:
            place.run("ringfence guard stop")
    assert "protected must not be created" in told
    assert "side.txt" in told
    assert [(call["kind"], call["agent"]) for call in log] == [("kept", name), ("kept", name), ("denied", name)]
    assert "kept.txt" in undone
    made = ("protected", "side.txt", "kept.txt", "last.txt")
    assert [name for name in made if (place.root / name).exists()] == []
    assert (place.root / "a.py").read_text() == GIVEN["a.py"]
