"""Adapters, sections, policies and engines of the user's own: the examples, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence

from ringfence.prompt import Section
from ringfence.runtime import Session
from ringfence.testing import PolicyContract, SectionContract

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = ("adapter/reviewed.py", "policy/small_files.py", "section/word_count.py", "engine/in_turn.py")
ENTRY_POINTS = """
[ringfence.models]
reviewed = reviewed:reviewed
[ringfence.sections]
words = word_count:section
[ringfence.policies]
small-files = small_files:policy
[ringfence.engines]
in-turn = in_turn:InTurn
"""
BROKEN = """
from ringfence.adapters import LoopAdapter

class Adapter(LoopAdapter):
    def respond(self, request):
        raise AssertionError("no turn is asked for")

def raises():
    raise OSError("no key for the server")

number = 7
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that Python imports from, with the files of the examples."""
    code = tmp_path / "code"
    code.mkdir()
    for file in FILES:
        shutil.copy(EXAMPLES / file, code)
    (code / "broken.py").write_text(BROKEN)
    before = {*sys.modules}
    monkeypatch.syspath_prepend(code)
    yield code
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(code)):
            del sys.modules[name]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("one two\n")
    return tree


def register(place: Path, text: str = ENTRY_POINTS) -> None:
    """Write what pip leaves of an installed package."""
    metadata = place / "plugged-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(text)


def run(tree: Path, *words: str | Path) -> tuple[int, Mapping[str, Any], str]:
    done = ringfence("run", tree, "--workspace", "memory", "--task", "Note what is here.", "--json", *words)
    return done.returncode, json.loads(done.stdout), done.stderr.decode()


@pytest.mark.parametrize("spec", ["FILE:reviewed", "FILE:Reviewed", "reviewed:reviewed"])
def test_an_adapter_of_a_file_or_a_module_runs_the_task(code: Path, tree: Path, spec: str) -> None:
    exit_code, record, said = run(tree, "--model", spec.replace("FILE", str(code / "reviewed.py")))
    assert exit_code == 0, said
    assert record["text"] == "The note is in NOTE.md."
    assert [change["path"] for change in record["changes"]] == ["NOTE.md"]


def test_the_limits_of_a_run_hold_for_an_adapter_of_ones_own(code: Path, tree: Path) -> None:
    exit_code, record, _ = run(tree, "--model", code / "reviewed.py:reviewed", "--max-turns", "1")
    assert (exit_code, record["outcome"]) == (5, "limit_reached")


def test_plug_ins_are_used_by_their_names(code: Path, tree: Path) -> None:
    register(code)
    words = ["--model", "reviewed", "--section", "words", "--policy", "small-files"]
    exit_code, record, said = run(tree, *words)
    assert exit_code == 0, said
    assert record["tool_calls"]["committed"] == 2


def test_a_batch_uses_plug_ins_by_their_names(
    code: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(code)
    monkeypatch.setenv("PYTHONPATH", str(code))  # for the workers
    task = {"id": "note", "workspace": str(tree), "task": "Note it.", "model": "reviewed", "policies": ["small-files"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    out = tmp_path / "out"
    done = ringfence("batch", "run", tmp_path / "tasks.jsonl", "--out", out, "--engine", "in-turn", "--json")
    assert done.returncode == 0, done.stderr
    assert b"+++ b/NOTE.md" in next(out.rglob("patch.diff")).read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "CODE/broken.py:nothing"], "it has no such name"),
        (["--model", "CODE/broken.py:number"], "it gives a int, and a LoopAdapter"),
        (["--model", "CODE/broken.py:raises"], "makes no adapter: no key for the server"),
        (["--model", "CODE/absent.py:adapter"], "cannot be read"),
        (["--model", "no_such_module:adapter"], "there is no model 'no_such_module:adapter'; there is openai:MODEL"),
        (["--model", "renewed"], "there is no model 'renewed'"),
        (["--model", "renewed"], "the plug-in reviewed"),
        (["--section", "sentences"], "there is no section 'sentences'"),
        (["--section", "sentences"], "a plug-in (words)"),
        (["--policy", "tiny-files"], "there is no policy 'tiny-files'"),
        (["--policy", "tiny-files"], "the plug-in small-files"),
        (["--section", "gone"], "there is no module gone_with_its_package"),
    ],
)
def test_what_cannot_be_used_is_a_usage_error_that_says_why(
    code: Path, tree: Path, words: list[str], reason: str
) -> None:
    gone = "gone = gone_with_its_package:section\n" if "gone" in words else ""
    register(code, ENTRY_POINTS.replace("[ringfence.policies]", f"{gone}[ringfence.policies]"))
    model = [] if words[0] == "--model" else ["--model", "reviewed"]
    exit_code, record, said = run(tree, *model, *(word.replace("CODE", str(code)) for word in words))
    assert exit_code == 2
    assert f"'{words[0]}'" in said
    assert reason in record["error"]


def test_an_engine_that_there_is_not_is_a_usage_error_that_names_those_that_there_are(
    code: Path, tree: Path, tmp_path: Path
) -> None:
    register(code)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    done = ringfence("batch", "run", tmp_path / "tasks.jsonl", "--out", tmp_path / "out", "--engine", "slow")
    assert done.returncode == 2
    assert b"there is no engine 'slow'; there are local, ray, in-turn" in done.stderr


def test_an_adapter_that_the_agent_could_change_is_refused(code: Path, tree: Path) -> None:
    shutil.copy(code / "reviewed.py", tree / "mine.py")
    exit_code, record, _ = run(tree, "--model", tree / "mine.py:reviewed")
    assert exit_code == 2
    assert "is inside of the workspace" in record["error"]


def test_a_plug_in_that_is_registered_in_the_workspace_does_not_count(
    code: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tree)
    monkeypatch.syspath_prepend(tree)
    exit_code, record, _ = run(tree, "--model", "reviewed")
    assert exit_code == 2
    assert "there is no model 'reviewed'" in record["error"]


class TestSmallFilesPolicy(PolicyContract):
    files: Mapping[str, str] = {"a.txt": "one\n"}

    def policy(self) -> Any:
        return load("policy/small_files.py")["SmallFilesPolicy"](10)

    def allowed(self) -> list[tuple[str, str]]:
        return [("a.txt", "two\n"), ("b.txt", "0123456789")]

    def denied(self) -> list[tuple[str, str]]:
        return [("a.txt", "0123456789+"), ("b.txt", "x" * 100)]


class TestWordCountSection(SectionContract):
    def section(self, session: Session) -> Section[Any]:
        return load("section/word_count.py")["section"](session)


def load(file: str) -> dict[str, Any]:
    """Return the names of an example. Its dataclasses look their module up by its name."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = f"example_{Path(file).stem}"
    if name not in sys.modules:
        found = spec_from_file_location(name, EXAMPLES / file)
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return vars(sys.modules[name])
