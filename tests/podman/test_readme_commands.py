"""The README's examples of commands in a container run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence_sandbox.podman_connection import Connection

README = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("limits_hold")
def test_the_examples_of_commands_run(podman: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_HOST", podman.url)
    examples = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    of_commands = [example for example in examples if "PodmanSandbox" in example]
    assert len(of_commands) == 2
    for example in of_commands:
        exec(compile(example, "README.md", "exec"), {})
