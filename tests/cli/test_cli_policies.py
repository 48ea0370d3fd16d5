"""Policies on the command line and in the owner's file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_runs import policies_of
from command_line import ringfence_text

CALLS: list[Mapping[str, object]] = [
    {"name": "read_file", "arguments": {"file_path": "a.txt"}},
    {"name": "write_file", "arguments": {"file_path": "src/new.py", "content": "new\n"}},
    {"name": "write_file", "arguments": {"file_path": ".github/workflows/ci.yml", "content": "on: push\n"}},
    {"name": "rm", "arguments": {"path": "a.txt"}},
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    turns: list[Mapping[str, object]] = [{"tool_calls": CALLS}, {"text": "Done."}]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return tmp_path / "tree"


def ringfence(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return ringfence_text(*arguments, env=os.environ | environment)


def run(tree: Path, *options: str | Path, workspace: str = "disk") -> tuple[int, dict[str, Any], str]:
    model = f"script:{tree.parent / 'script.jsonl'}"
    given = ("--task", "Do it.", "--model", model, "--json", "--workspace", workspace, *options)
    done = ringfence("run", tree, *given)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def changed(record: Mapping[str, Any]) -> set[str]:
    return {change["path"] for change in record["changes"] if change["after"] is None or change["after"]["size"]}


ALL = {"src/new.py", ".github/workflows/ci.yml", "a.txt"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], ALL),
        (["--policy", "allow:/src/**"], {"src/new.py"}),
        (["--policy", "allow:/src/**", "--policy", "allow:a.txt"], {"src/new.py", "a.txt"}),
        (["--policy", "deny:.GITHUB"], ALL - {".github/workflows/ci.yml"}),
        (["--policy", "deletions:0"], ALL - {"a.txt"}),
        (["--policy", "protected", "--policy", "deletions:0"], {"src/new.py"}),
        (["--policy", "tests:ls:/src/**"], ALL - {"src/new.py"}),
        (["--policy", "tests:ls=pytest tests::a*:/src/**"], ALL - {"src/new.py"}),
    ],
)
def test_a_policy_of_the_command_line_holds(tree: Path, options: list[str], kept: set[str]) -> None:
    code, record, _ = run(tree, *options, workspace="memory")
    assert code == 0
    assert changed(record) == kept
    assert record["tool_calls"]["denied"] == 3 - len(kept)


def test_the_owner_s_file_beside_the_store_holds_and_what_is_said_comes_on_top(tree: Path) -> None:
    place = Path(ringfence("policies", "file", tree).stdout.strip())
    assert not place.is_relative_to(tree)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("[policies]\nprotected = true\n")
    assert changed(run(tree, workspace="memory")[1]) == ALL - {".github/workflows/ci.yml"}
    assert changed(run(tree, "--policy", "deletions:0")[1]) == {"src/new.py"}


def test_beside_another_limit_on_deletions_a_file_that_the_run_made_does_not_count(tree: Path) -> None:
    own = {"name": "write_file", "arguments": {"file_path": "own.txt", "content": "x\n"}}
    calls = [own, {"name": "rm", "arguments": {"path": "own.txt"}}, CALLS[0], CALLS[-1]]
    turns = [*({"tool_calls": [call]} for call in calls), {"text": "Done."}]
    (tree.parent / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    code, record, _ = run(tree, "--policy", "deletions:2", "--policy", "deletions:1", "--policy", "deletions:1")
    assert (code, record["tool_calls"]["denied"]) == (0, 0)
    assert len(policies_of(tree, ["deletions:2", "deletions:1", "deletions:1"])) == 1


def test_a_file_that_is_named_says_all_that_there_is_to_say(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[policies]\nprotected = true\ndeletions = 3\npaths = {allow = ["/src/**", "a.txt"], deny = ["*.sh"]}\n'
        '[policies.tests]\ntool = "ls"\nbefore = ["rm"]\n'
    )
    assert changed(run(tree, "--policy", str(file))[1]) == {"src/new.py"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("policies = 3", "policies"),
        ("[policies]\nprotect = true", "protect"),
        ("[policies]\ndeletions = -1", "max_files"),
        ("[policies.paths]\ndeny = ['../x']", "'..'"),
        ("[policies.paths]\ndeny = ['*.{pem,key}']", "braces are not expanded"),
        ("[policies.paths]", "a PathPolicy denies something: give allow"),
        ("[policies", "own.toml"),
    ],
)
def test_a_file_that_is_not_understood_stops_the_run(tree: Path, tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(content)
    code, _, errors = run(tree, "--policy", str(file))
    assert code == 2
    assert said in errors
    assert (tree / "a.txt").exists()


@pytest.mark.parametrize(
    "says", ["", "[policies]\n", "# [policies]\n# protected = true\n", "[policies]\nprotected = false\n"]
)
def test_a_file_that_is_named_and_has_no_policy_stops_the_run(tree: Path, tmp_path: Path, says: str) -> None:
    (tmp_path / "own.toml").write_text(says)
    code, _, errors = run(tree, "--policy", str(tmp_path / "own.toml"))
    assert (code, "own.toml: it has no policy" in errors) == (2, True)


def test_an_owner_s_file_that_is_not_understood_is_not_said_to_be_an_option(tree: Path) -> None:
    place = Path(ringfence("policies", "file", tree).stdout.strip())
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("[policies]\nguard = true\n")
    code, _, errors = run(tree)
    assert (code, "--policy" in errors, "the owner of the directory" in errors, "guard" in errors) == (
        *(2, False, True, True),
    )


def test_a_spec_that_says_nothing_is_wrong_usage(tree: Path) -> None:
    for spec in (
        *("", "allow:", "deny", "deletions:-1", "deletions:x", "deletions:" + "9" * 5000, "guard", "deny:../x"),
        *("tests:ls", "tests:ls:", "tests:ls=:a", "tests:ls=pytest", "tests:make:/src/**", "tests:ls:*.{c,h}"),
    ):
        assert run(tree, "--policy", spec)[0] == 2, spec


@pytest.mark.parametrize("spec", ["allow:TREE/src/**", "deny:TREE/src/**", "tests:ls=a:b:TREE/src/**", "file"])
def test_a_pattern_of_the_machine_is_refused_since_it_would_match_nothing(
    tree: Path, tmp_path: Path, spec: str
) -> None:
    if spec == "file":
        (tmp_path / "own.toml").write_text(f'[policies.paths]\ndeny = ["{tree}/src/**"]\n')
        spec = str(tmp_path / "own.toml")
    code, _, errors = run(tree, "--policy", spec.replace("TREE", str(tree)))
    assert (code, f"for {tree}/src/** write /src/**" in " ".join(errors.split())) == (2, True), errors


def test_tests_in_a_container_that_is_not_there_name_the_way_out(tree: Path) -> None:
    task = ("--task", "x", "--model", f"script:{tree.parent / 'script.jsonl'}")
    refused = ringfence("run", tree, *task, "--policy", "tests:shell_execute:/src/**")
    said = " ".join(refused.stderr.split())
    assert refused.returncode == 2
    assert "it has apply_patch, " in said
    assert "shell_execute is there with --workspace podman" in said
    file = Path(ringfence("policies", "file", tree).stdout.strip())
    assert str(file) not in said.replace(" ", "")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('[policies.tests]\ntool = "shell_execute"\npaths = ["CHANGELOG.md"]\n')
    refused = ringfence("run", tree, *task)
    assert (refused.returncode, "--workspace podman" in refused.stderr) == (2, True)
    assert f"is in {file}" in " ".join(refused.stderr.split())


def test_a_file_within_reach_of_the_agent_is_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "ringfence.toml").write_text("[policies]\n")
    (tmp_path / "link.toml").symlink_to(tree / "ringfence.toml")
    for path in (tree / "ringfence.toml", tmp_path / "link.toml"):
        code, _, errors = run(tree, "--policy", path)
        assert (code, "inside of the workspace" in errors) == (2, True)


OWN = """
from ringfence import PolicyDecision
class NoText:
    name = "no_text"
    def check_effects(self, tool, params, changes, *, context):
        wrong = [change.path for change in changes if change.path.endswith(".txt")]
        return PolicyDecision.deny(f"leave {wrong} alone") if wrong else PolicyDecision.allow()
policy = NoText()
"""


def test_a_policy_of_ones_own_in_a_python_file(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    code, record, _ = run(tree, "--policy", f"{tmp_path / 'own.py'}:policy")
    assert (code, changed(record)) == (0, ALL - {"a.txt"})


def test_the_file_of_a_policy_that_the_page_shows_is_complete(tree: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "build" / "policies.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```", page.partition("## In a file")[2], re.MULTILINE | re.DOTALL)
    (tmp_path / "no_breakpoint.py").write_text(shown)
    (policy,) = policies_of(tree, [f"{tmp_path / 'no_breakpoint.py'}:policy"])
    assert policy.name == "no_breakpoint"


RAISES = """
class Raises:
    name = "raises"
    def check_effects(self, tool, params, changes, *, context):
        int("boom")
policy = Raises()
"""


def test_a_policy_that_raises_names_its_line(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    receipts = tmp_path / "receipts.jsonl"
    run(tree, "--policy", f"{tmp_path / 'raises.py'}:policy", "--receipts", receipts)
    said = "the policy could not decide: invalid literal for int() with base 10: 'boom' (raises.py, line 5)"
    assert said in receipts.read_text()


MISTAKES = """OTHER = 1
def make(): return policy
class Misspelt:
    name = "misspelt"
    def check_effect(self, tool, params, changes, *, context): ...
misspelt = Misspelt()
"""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("own.py:other", "no such name"),
        ("own.py:NoText", "is a class, and a policy is wanted: put `policy = NoText()` into "),
        ("own.py:make", "is a function, and a policy is wanted: put `policy = make()` into "),
        ("own.py:OTHER", "1 in own.py is no policy"),
        ("own.py:misspelt", "the Misspelt in own.py: check_effect would never be called; did you mean the hook "),
        ("own.py:misspelt", "(its class is at line 12)"),
        ("base.py:policy", "Base: check_effect would never be called; did you mean the hook check_effects? (base.py, "),
        ("missing.py:policy", "cannot be read"),
        ("broken.py:policy", "cannot be imported"),
        ("tree/own.py:policy", "inside of the workspace"),
    ],
)
def test_what_is_no_policy_is_wrong_usage(tree: Path, tmp_path: Path, spec: str, reason: str) -> None:
    (tmp_path / "own.py").write_text(f"{OWN}\n{MISTAKES}")
    base = "from ringfence.prompt import BasePolicy\nclass Base(BasePolicy):\n    def check_effect(self): ...\n"
    (tmp_path / "base.py").write_text(base)
    (tree / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("raise ValueError('broken')\n")
    code, _, errors = run(tree, "--policy", tmp_path / spec)
    assert (code, reason in " ".join(errors.split())) == (2, True)


def test_the_file_that_the_page_shows_is_understood(tree: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "use" / "policies.md").read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "owner.toml").write_text(shown)
    found = policies_of(tree, [str(tmp_path / "owner.toml")])
    assert [policy.name for policy in found] == ["protected_files", "paths", "deletion_limit", "require_clean_tests"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "tree", "--model", "script:script.jsonl", "--task", "Do it.", "--policy", "endless.toml"],
        ["run", "tree", "--model", "script:script.jsonl", "--task", "@/dev/zero"],
        ["run", "tree", "--model", "script:/dev/zero", "--task", "Do it."],
    ],
)
def test_a_file_that_does_not_end_is_wrong_usage_and_does_not_take_all_memory(tree: Path, words: list[str]) -> None:
    (tree.parent / "endless.toml").symlink_to("/dev/zero")
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", sys.executable, "-m", "ringfence_cli", *words]
    done = subprocess.run(limited, cwd=tree.parent, capture_output=True, text=True)
    assert (done.returncode, "has more than 268,435,456" in done.stderr) == (2, True)
