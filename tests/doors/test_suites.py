"""The suites that other frameworks have for those who plug into them, with the oldest and the newest version."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from door_environments import Age, DoorSuite, make_environment, run_suite

SUITES = [
    DoorSuite("pydantic-ai", passes=71),
    DoorSuite("deepagents", passes=86),
    DoorSuite("deepagents-code", passes=3),
    DoorSuite("langchain", passes=14),
    DoorSuite("pytest", passes=6),
    DoorSuite("mini-swe-agent", passes=14),
    DoorSuite("inspect-ai", passes=42),
    DoorSuite("claude-agent-sdk", passes=6),
    DoorSuite("agents", passes=12),
]


@pytest.mark.prove
@pytest.mark.parametrize("age", ["oldest", "newest"])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_door_passes_the_suite_of_its_framework(
    suite: DoorSuite, age: Age, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    summary = run_suite(make_environment(suite, age), suite, tmp_path / "suite")
    record_property("summary", summary)  # for `--junit-xml`
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None, summary
    assert int(passed[1]) >= suite.passes, summary


def test_the_plugin_of_pytest_passes_its_own_here(tmp_path: Path) -> None:
    suite = next(suite for suite in SUITES if suite.name == "pytest")
    assert "passed" in run_suite(Path(sys.executable), suite, tmp_path / "suite")
