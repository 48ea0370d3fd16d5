"""Patterns that protect nothing: refused where they never can, and named at the start where they do not now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batches import script
from command_line import ringfence_text

from ringfence import PromptValidationError
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import ApprovalPolicy, PathPolicy, RequireCleanTestsPolicy
from ringfence_batch import TaskFileError, check_tasks, read_tasks
from ringfence_batch.check import describe_unused_patterns
from ringfence_tools.runs.unused_patterns import unused_patterns

NEVER = [" /a", "a ", "\t", "a\n", "[z-a]", "src/[z-a]*", "[!9-0]", "/x/[b-a]/**"]
UNUSED = ["a,b", "/etc/passwd", "!src", "~/x", "src\\x", "a|b", "[a", "$HOME/x", "*.rs", "/b.py", "src/*.py,a.txt"]
USED = ["a.txt", "/src", "src/**", "./src", "*.py", "B.PY", "[a-z].txt", "**/b.py", ".git/hooks", "/src/b.py"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "a.txt").write_text("one\n")
    (tree / "src/b.py").write_text("1\n")
    return tree


@pytest.mark.parametrize("pattern", NEVER)
def test_a_pattern_that_can_fit_nothing_is_refused(pattern: str) -> None:
    for make in (
        lambda: PathPolicy(deny=[pattern]),
        lambda: PathPolicy(allow=[pattern]),
        lambda: HiddenFiles([pattern]),
    ):
        with pytest.raises(PromptValidationError, match=r"leave it out|write"):
            make()


def test_each_pattern_that_fits_no_path_is_named_once(tree: Path) -> None:
    policies = [
        PathPolicy(deny=[*UNUSED, *USED]),
        PathPolicy(allow=[*UNUSED, *(pattern for pattern in USED if pattern != "B.PY")]),
        RequireCleanTestsPolicy("ls", paths=[*UNUSED, *USED]),
        ApprovalPolicy(lambda request: None, ["writes", "some_tool", "a,b", "*.py"]),
    ]
    lines = unused_patterns(policies, HiddenFiles([*UNUSED, *USED]), tree)
    found = {line.partition(" fits no path now")[0].replace("\\\\", "\\") for line in lines}
    assert found == {f"{kind}:{one}" for kind in ("deny", "allow", "tests", "hide") for one in UNUSED} | {"ask:a,b"}
    assert len(lines) == len(found)
    (listed,) = (line for line in lines if line.startswith("deny:a,b"))
    assert "each pattern of a list for itself" in listed


def test_in_a_large_directory_nothing_is_said(tree: Path) -> None:
    for number in range(200):
        (tree / f"d{number}").mkdir()
        for name in range(100):
            (tree / f"d{number}/{name}").touch()
    assert unused_patterns([PathPolicy(deny=["nothing"])], None, tree) == []


@pytest.mark.parametrize("option", ["--policy", "--hide"])
def test_a_run_refuses_or_names_a_pattern_that_protects_nothing(tree: Path, option: str) -> None:
    words = ["run", tree, "--task", "x", "--model", script(tree, "m", {"text": "Done."})]
    kind = "deny:" if option == "--policy" else ""
    for pattern in (" /a", "[z-a]", f"{tree}/a.txt"):
        refused = ringfence_text(*words, option, f"{kind}{pattern}")
        assert (refused.returncode, option in refused.stderr) == (2, True)
    done = ringfence_text(*words, option, f"{kind}a,b", option, f"{kind}a.txt")
    assert done.returncode == 0
    assert f"{kind or 'hide:'}a,b fits no path now" in done.stderr
    assert "a.txt fits" not in done.stderr


def test_a_policy_file_s_patterns_are_named_too(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[policies]\npaths = { deny = ["a,b"] }\n')
    words = ["run", tree, "--task", "x", "--model", script(tree, "m", {"text": "Done."})]
    assert "deny:a,b fits no path now" in ringfence_text(*words, "--policy", tmp_path / "own.toml").stderr


def test_the_patterns_of_tasks_are_checked_before_any_begins(tree: Path, tmp_path: Path) -> None:
    task = {"workspace": str(tree), "task": "x", "model": script(tree, "m", {"text": "Done."})}
    wrong = [{"hide": [" x"]}, {"hide": [f"{tree}/a.txt"]}, {"policies": ["deny:[z-a]"]}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task | {"id": f"t{n}"} | more) + "\n" for n, more in enumerate(wrong)))
    with pytest.raises(TaskFileError) as raised:
        check_tasks(read_tasks(file))
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["t0", "t1", "t2"]
    file.write_text(json.dumps(task | {"id": "a", "hide": ["a,b", "a.txt"], "policies": ["deny:x,y"]}))
    lines = describe_unused_patterns(read_tasks(file))
    assert [line.partition(" fits")[0] for line in lines] == [f"{tree}: deny:x,y", f"{tree}: hide:a,b"]
