"""The examples of commands in a container run."""

from __future__ import annotations

from typing import Any

import pytest
from pages import page


@pytest.mark.usefixtures("limits_hold")
@pytest.mark.parametrize("number", [0, 1])
def test_an_example_of_commands_runs(number: int, podman: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_HOST", podman.url)
    blocks = [block for block in page("build/workspaces").blocks if "PodmanSandbox" in block.text]
    assert len(blocks) == 2
    exec(compile(blocks[number].text, "docs/build/workspaces.md", "exec"), {})
