"""The examples of commands in a container run: the README's, and those of their own page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence_sandbox.container.podman_connection import Connection

PROJECT = Path(__file__).parents[2]


@pytest.mark.usefixtures("limits_hold")
@pytest.mark.parametrize(("page", "number"), [("README.md", 1), ("docs/sandbox.md", 2)])
def test_the_examples_of_commands_run(
    page: str, number: int, podman: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_HOST", podman.url)
    shown = (PROJECT / page).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", shown, re.MULTILINE | re.DOTALL)
    of_commands = [example for example in examples if "PodmanSandbox" in example]
    assert len(of_commands) == number
    for example in of_commands:
        exec(compile(example, page, "exec"), {})
