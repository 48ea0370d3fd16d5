"""mini-swe-agent on a workspace of ringfence: its agent, and what its own local environment does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel, make_output

from ringfence_doors.mini_swe_agent import RingfenceEnvironment


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    made = tmp_path / "root"
    (made / "d").mkdir(parents=True)
    (made / "a.txt").write_text("one\n")
    return made


@pytest.fixture
def environment(root: Path) -> Iterator[RingfenceEnvironment]:
    opened = RingfenceEnvironment(cwd=str(root), rollback_on_error=True, env={"OWN": "mine"}, timeout=5)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "command",
    [
        "echo out",
        "echo err >&2",
        "exit 7",
        "cat a.txt",
        "printf '\\377\\n'",
        "seq 20000",
        "echo $OWN",
        "no-such-program",
    ],
)
def test_a_command_answers_as_in_a_local_environment(
    root: Path, environment: RingfenceEnvironment, command: str
) -> None:
    local = LocalEnvironment(cwd=str(root), env={"OWN": "mine"})
    expected, found = local.execute({"command": command}), environment.execute({"command": command})
    found.pop("extra")
    assert found == expected or ("not found" in expected["output"] and "not found" in found["output"])
    assert found["returncode"] == expected["returncode"]


def test_a_command_starts_in_a_directory_of_the_workspace_alone(root: Path, environment: RingfenceEnvironment) -> None:
    assert environment.execute({"command": "pwd"}, cwd=str(root / "d"))["output"] == f"{root}/d\n"
    outside = environment.execute({"command": "touch b"}, cwd=str(root.parent))
    assert (outside["returncode"], outside["extra"]["exception_type"]) == (-1, "PermissionError")


def test_a_failed_command_leaves_no_trace_and_an_undo_reverses_the_others(
    root: Path, environment: RingfenceEnvironment
) -> None:
    failed = environment.execute({"command": "mv a.txt d; echo > b; exit 1"})
    assert "rolled back: a.txt, b, d/a.txt" in failed["output"]
    assert failed["extra"]["ringfence_receipts"][0]["outcome"] == "failed"
    late = environment.execute({"command": "echo > b; sleep 60"}, timeout=1)
    assert (late["returncode"], late["extra"]["exception_type"]) == (-1, "TimeoutError")
    assert sorted(path.name for path in root.iterdir() if ".ringfence" not in path.name) == ["a.txt", "d"]
    environment.execute({"command": "rm a.txt"})
    environment.undo()
    assert (root / "a.txt").read_text() == "one\n"


def test_the_first_line_says_that_the_task_is_done(environment: RingfenceEnvironment) -> None:
    with pytest.raises(Submitted) as raised:
        environment.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo the answer"})
    assert raised.value.messages[0]["extra"]["submission"].strip() == "the answer"


def test_two_environments_on_one_directory_are_refused_and_one_after_the_other_is_not(root: Path) -> None:
    first = RingfenceEnvironment(cwd=str(root))
    with pytest.raises(Exception, match="is open"):
        RingfenceEnvironment(cwd=str(root))
    first.close()
    RingfenceEnvironment(cwd=str(root)).close()


def test_an_agent_of_mini_swe_agent_works_in_it(root: Path) -> None:
    environment = get_environment(
        {"environment_class": "ringfence_doors.mini_swe_agent.RingfenceEnvironment", "cwd": str(root)}
    )
    outputs = [
        make_output("Change.", [{"command": "echo two > a.txt"}]),
        make_output("Submit.", [{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done"}]),
    ]
    agent = DefaultAgent(
        DeterministicModel(outputs=outputs), environment, system_template="You.", instance_template="{{task}}"
    )
    assert agent.run("Go.")["exit_status"] == "Submitted"
    assert (root / "a.txt").read_text() == "two\n"
    receipts = agent.serialize()["info"]["ringfence_receipts"]
    assert [receipt["outcome"] for receipt in receipts] == ["committed", "committed"]
    environment.undo()
    assert (root / "a.txt").read_text() == "one\n"
    environment.close()


def test_the_programs_of_the_page_run(run_page: Callable[[str], int]) -> None:
    assert run_page("mini-swe-agent") == 1
