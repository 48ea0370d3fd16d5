"""`ringfence overrides` as a user meets it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import ringfence_process

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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "prompts.py").write_text(MODULE)
    return tmp_path


def overrides(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A process, since the module that it imports changes between two commands.
    done = ringfence_process("overrides", *arguments, cwd=project)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_texts_are_seeded_edited_listed_compared_and_checked(project: Path) -> None:
    seeded = overrides(project, "seed", "prompts:TEMPLATE")
    path = Path(seeded.stdout.strip())
    assert path == project / ".ringfence" / "prompts" / "overrides" / "app" / "main" / "latest.json"
    assert overrides(project, "diff", "prompts:PROMPT").stdout == ""
    path.write_text(path.read_text().replace("Be kind.", "Be brave.").replace("Find.", "Seek."))
    assert "stays as it is" in overrides(project, "seed", "prompts:PROMPT").stderr
    assert "app:main latest  1 section, 1 tool" in overrides(project, "list").stdout
    shown = overrides(project, "diff", "prompts:PROMPT").stdout
    assert "-Be kind.\n+Be brave." in shown
    assert "-tool find: Find.\n+tool find: Seek." in shown
    checked = overrides(project, "check", "prompts:PROMPT")
    assert (checked.returncode, checked.stdout) == (0, "")
    (project / "prompts.py").write_text(MODULE.replace("Be kind.", "Be calm."))
    checked = overrides(project, "check", "prompts:PROMPT")
    assert checked.returncode == 1
    assert "section t: it has changed since" in checked.stdout


@pytest.mark.parametrize("command", [["list"], ["check", "prompts:PROMPT"], ["diff", "prompts:PROMPT"]])
def test_a_root_that_is_not_there_is_said(project: Path, command: list[str]) -> None:
    ended = overrides(project, *command, "--root", "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "there is no directory 'nowhere'" in ended.stderr


def test_a_list_of_nothing_says_where_it_has_looked(project: Path) -> None:
    ended = overrides(project, "list")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert f"there are no overrides in {project / '.ringfence'}" in ended.stderr


def test_a_root_and_a_tag_can_be_named(project: Path) -> None:
    overrides(project, "seed", "prompts:PROMPT", "--root", "elsewhere", "--tag", "stable")
    assert (project / "elsewhere" / "app" / "main" / "stable.json").exists()
    assert "stable" in overrides(project, "list", "--root", "elsewhere").stdout


@pytest.mark.parametrize("spec", ["prompts", "prompts:NOTHING", "nowhere:X", "prompts:OTHER", ":"])
def test_what_names_no_prompt_is_wrong_usage(project: Path, spec: str) -> None:
    refused = overrides(project, "check", spec)
    assert refused.returncode == 2
    assert refused.stderr.count("ModuleNotFoundError") < 2


@pytest.mark.parametrize("command", ["seed", "check", "diff"])
@pytest.mark.parametrize("leaving", ["raise SystemExit", "import sys; sys.exit(0)", "raise SystemExit('enough')"])
def test_a_module_that_ends_the_process_is_named_and_is_no_success(project: Path, command: str, leaving: str) -> None:
    (project / "leaves.py").write_text(leaving)
    ended = overrides(project, command, "leaves:PROMPT")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'leaves:PROMPT' cannot be had: SystemExit" in ended.stderr


@pytest.mark.parametrize("command", ["check", "diff"])
def test_a_file_that_is_a_link_to_itself_is_said(project: Path, command: str) -> None:
    path = project / ".ringfence/prompts/overrides/app/main/latest.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)
    ended = overrides(project, command, "prompts:PROMPT")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"Error: the overrides in {path} cannot be read: " in ended.stderr


def test_a_damaged_file_is_said(project: Path) -> None:
    path = Path(overrides(project, "seed", "prompts:PROMPT").stdout.strip())
    path.write_text("{")
    for command in ("check", "diff", "seed"):
        done = overrides(project, command, "prompts:PROMPT")
        assert done.returncode == 1
        assert "cannot be read" in done.stderr
    assert "cannot be read" in overrides(project, "list").stderr


def test_nothing_in_a_file_with_overrides_or_in_its_name_acts_on_the_terminal(project: Path) -> None:
    path = Path(overrides(project, "seed", "prompts:PROMPT").stdout.strip())
    hostile = path.with_name("\x1b]0;x\x07.json")
    hostile.write_text(path.read_text().replace('"app"', '"\\u001b]0;x\\u0007"'))
    listed = overrides(project, "list").stdout
    assert listed.count("\\x1b]0;x\\x07") == 2
    assert "\x1b" not in listed
