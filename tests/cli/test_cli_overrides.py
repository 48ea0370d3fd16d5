"""`ringfence overrides` as a user meets it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import ringfence_process

from ringfence.prompt import LocalPromptOverridesStore, MarkdownSection, Prompt, PromptTemplate, Tool

MODULE = """
from dataclasses import dataclass
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool

@dataclass(frozen=True)
class Find:
    what: str

tool = Tool[Find, None](name="find", description="Find.", handler=None)
section = MarkdownSection(title="T", template="Be kind.", tools=[tool])
TEMPLATE = PromptTemplate(ns="app", key="main", sections=[section])
PROMPT = Prompt(TEMPLATE)
OTHER = 3
"""


@dataclass(frozen=True)
class Find:
    what: str


def seeded(project: Path, root: str = ".ringfence/prompts/overrides", tag: str = "latest") -> Path:
    """The file that a program with the same prompt seeds."""
    tool = Tool[Find, None](name="find", description="Find.", handler=None)
    section = MarkdownSection(title="T", template="Be kind.", tools=[tool])
    store = LocalPromptOverridesStore(project / root)
    store.seed(Prompt(PromptTemplate[None](ns="app", key="main", sections=[section])), tag)
    return store.path("app", "main", tag)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "prompts.py").write_text(MODULE)
    return tmp_path


def overrides(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A process, since the module that it imports changes between two commands.
    done = ringfence_process("overrides", *arguments, cwd=project)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("name", ["PROMPT", "TEMPLATE"])
def test_texts_are_listed_and_checked(project: Path, name: str) -> None:
    path = seeded(project)
    path.write_text(path.read_text().replace("Be kind.", "Be brave.").replace("Find.", "Seek."))
    assert "app:main latest  1 section, 1 tool" in overrides(project, "list").stdout
    checked = overrides(project, "check", f"prompts:{name}")
    assert (checked.returncode, checked.stdout) == (0, "")
    (project / "prompts.py").write_text(MODULE.replace("Be kind.", "Be patient."))
    checked = overrides(project, "check", f"prompts:{name}")
    assert checked.returncode == 1
    assert "section t: it has changed since" in checked.stdout


@pytest.mark.parametrize("command", [["list"], ["check", "prompts:PROMPT"]])
def test_a_root_that_is_not_there_is_wrong_usage(project: Path, command: list[str]) -> None:
    ended = overrides(project, *command, "--root", "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "there is no directory 'nowhere'" in ended.stderr


def test_a_list_of_nothing_names_the_directory(project: Path) -> None:
    ended = overrides(project, "list")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert f"there are no overrides in {project / '.ringfence'}" in ended.stderr


def test_a_root_and_a_tag_can_be_named(project: Path) -> None:
    path = seeded(project, "elsewhere", "stable")
    assert "stable" in overrides(project, "list", "--root", "elsewhere").stdout
    path.write_text(path.read_text().replace("Be kind.", "Be $kind."))
    check = ("check", "prompts:PROMPT", "--root", "elsewhere")
    assert overrides(project, *check).returncode == 0
    assert overrides(project, *check, "--tag", "stable").returncode == 1


@pytest.mark.parametrize("spec", ["prompts", "prompts:NOTHING", "nowhere:X", "prompts:OTHER", ":"])
def test_what_names_no_prompt_is_wrong_usage(project: Path, spec: str) -> None:
    refused = overrides(project, "check", spec)
    assert refused.returncode == 2
    assert refused.stderr.count("ModuleNotFoundError") < 2


@pytest.mark.parametrize("ending", ["raise SystemExit", "import sys; sys.exit(0)", "raise SystemExit('enough')"])
def test_a_module_that_ends_the_process_is_named_and_is_no_success(project: Path, ending: str) -> None:
    (project / "leaves.py").write_text(ending)
    ended = overrides(project, "check", "leaves:PROMPT")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'leaves:PROMPT' cannot be had: SystemExit" in ended.stderr


def test_a_damaged_file_is_an_error_that_names_it(project: Path) -> None:
    path = seeded(project)
    path.write_text("{")
    done = overrides(project, "check", "prompts:PROMPT")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the overrides in {path} cannot be read" in done.stderr
    assert "cannot be read" in overrides(project, "list").stderr


def test_nothing_in_a_file_with_overrides_or_in_its_name_acts_on_the_terminal(project: Path) -> None:
    path = seeded(project)
    hostile = path.with_name("\x1b]0;x\x07.json")
    hostile.write_text(path.read_text().replace('"app"', '"\\u001b]0;x\\u0007"'))
    listed = overrides(project, "list").stdout
    assert listed.count("\\x1b]0;x\\x07") == 2
    assert "\x1b" not in listed
