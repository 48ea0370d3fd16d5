"""What the pages show runs, what they name is there, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import fsspec
import pytest
from agent_runs import CALL_OUTCOMES, EXIT_CODES, RunOutcome
from pages import DOCS, PROJECT, Block, Page, page, pages
from provider_server import ProviderServer

from ringfence.filesystem import MAX_WRITE_LENGTH
from ringfence.runtime import Session
from ringfence_cli.main import ringfence
from ringfence_sandbox import Workspace
from ringfence_tools import (
    HistoryToolsSection,
    PlanningToolsSection,
    PodmanSandboxSection,
    VfsToolsSection,
    WorkspaceFileSystem,
)

PAGES = [*pages()]
README = Page(PROJECT / "README.md")
SESSIONS = ("start/tutorial",)
"""Pages whose blocks are one session of a shell: a block that begins with a file's name is that file."""
GENERATED = ("python.md", "command-line.md")
EXAMPLES = [
    pytest.param(one, block, id=f"{one.name}:{block.line}")
    for one in PAGES
    for block in one.blocks
    if block.language == "python"
    and "PodmanSandbox" not in block.text  # those run in tests/sandbox/podman
    and not block.is_elsewhere
]


TABLE_HEAD = re.compile(r"\|(?: ?:?-+:? ?\|)+")


@pytest.mark.parametrize("where", [*PAGES, README], ids=lambda one: one.name)
def test_every_table_has_a_head_and_as_many_cells_in_each_row(where: Page) -> None:
    text = re.sub(r"^```.*?^```", "", where.path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert len(rows) > 2, rows
        assert TABLE_HEAD.fullmatch(rows[1]), rows[:2]
        # A bar in code is written as \\|.
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {rows[1].count("|")}, table


def module_of(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("where", "example"), EXAMPLES)
def test_each_example_runs_by_itself(
    where: Page, example: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # what an example writes is not left here
    (tmp_path / "project").mkdir()
    assert re.match(r"(# \S+\.py\n)?(from|import) ", example.text), "an example begins with all its imports"
    # The entry point of an installed package, where the tests run without one.
    fsspec.register_implementation("ringfence", WorkspaceFileSystem, clobber=True)
    module = ModuleType("example")  # a real one: dataclasses look their module up
    monkeypatch.setitem(sys.modules, "example", module)
    code = compile("\n" * (example.line - 1) + example.text, where.path, "exec")
    with ProviderServer([{"text": "Done."}], repeat=True) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.openai_url)
        monkeypatch.setenv("OPENAI_API_KEY", "of-mine")
        exec(code, vars(module))


def without_what_differs(text: str) -> str:
    """Instants, durations, temporary names and the ids of sessions are others each time."""
    text = re.sub(r"\d{4}-\d\d-\d\d[T ] ?\d\d:\d\d:\d\d(\+00:00)?", "INSTANT", text)
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|after \d+\.\d s", "-", text)


def output_of(command: str, directory: Path) -> str:
    """Both streams in one, as a terminal has them, of a command that succeeds."""
    words = ["sh", "-ec", command]
    if command.startswith("ringfence "):
        words = [sys.executable, "-m", "ringfence_cli", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_what_the_shell_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (directory := tmp_path / "work").mkdir()
    for block in page(name).blocks:
        if block.language == "sh":
            output_of(block.text, directory)
        elif block.language == "console":
            for typed, answer in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
                output = output_of(typed, directory)
                if answer:  # of a command alone, only the success counts
                    assert without_what_differs(output) == without_what_differs(answer), typed
        elif file := re.match(r"# (\S+\.py)\n", block.text):
            (directory / file[1]).write_text(block.text)


def test_links_between_pages_lead_somewhere() -> None:
    dead: list[str] = []
    for one in PAGES:
        for link in one.links:
            name, _, anchor = link.partition("#")
            target = Page((one.path.parent / name).resolve() if name else one.path)
            if not target.path.exists() or (anchor and anchor not in target.anchors):
                dead.append(f"{one.name}: {link}")
    assert dead == []


def test_every_page_is_in_the_index() -> None:
    index = page("index")
    linked = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links}
    assert [one.name for one in PAGES if DOCS in one.path.parents and one != index and one.path not in linked] == []


def test_pages_are_short() -> None:
    written = [one for one in PAGES if one.path.name not in GENERATED]
    assert [one.name for one in written if len(one.text.splitlines()) > 200] == []
    assert len(README.text.split()) <= 700


@pytest.mark.parametrize("name", GENERATED)
def test_the_reference_is_that_of_the_code(name: str) -> None:
    write = module_of(DOCS / "reference/generate.py").PAGES[name]
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == write(), "`make docs` writes it anew"


def shown_commands(where: Page) -> list[list[str]]:
    """The words after `ringfence` of every command in the blocks and lines of a page."""
    lines = [line.strip() for block in where.blocks if block.language != "python" for line in block.text.split("\n")]
    lines += re.findall(r"`(ringfence [^`]+)`", where.text)
    found = [re.match(r"(?:\$ )?ringfence ([a-z][^#&|]*)", line) for line in lines]
    return [one[1].split() for one in found if one]


def unknown_in(words: list[str]) -> list[str]:
    """The command if there is none of this name, else those of its options that it does not have."""
    command: click.Command | None = ringfence
    while words and isinstance(command, click.Group):
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
    if command is None:
        return ["no such command"]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    return [word for word in own if word.startswith("--") and word not in known]


def test_commands_that_pages_show_are_there_with_their_options() -> None:
    shown = [(one.name, words) for one in PAGES for words in shown_commands(one) if one.path.name != "CHANGELOG.md"]
    assert len(shown) > 50
    assert [(name, words, unknown) for name, words in shown if (unknown := unknown_in(words))] == []


def workflow_commands(text: str) -> list[list[str]]:
    """The words after `ringfence` of each command in the YAML of a job, with the options on the lines below it."""
    found = re.findall(r"(?:^|[ =(])ringfence ([a-z]+ .*(?:\n +--.*)*)", re.sub(r"^ *#.*$", "", text, flags=re.M), re.M)
    return [re.sub(r" > .*", "", one).split() for one in found]


@pytest.mark.parametrize("where", sorted((PROJECT / "examples").glob("*/*.yml")), ids=lambda one: one.name)
def test_commands_of_the_jobs_in_examples_are_there_with_their_options(where: Path) -> None:
    text = where.read_text()
    shown = workflow_commands(text)
    assert shown or "uses: OWNER/ringfence@" in text
    assert [(words, unknown) for words in shown if (unknown := unknown_in(words))] == []


def test_jobs_in_examples_that_use_the_action_name_inputs_that_it_has() -> None:
    action = (PROJECT / "action.yml").read_text()
    known = set(re.findall(r"^  ([\w-]+):$", action.partition("\noutputs:")[0], re.M))
    text = (PROJECT / "examples/ci/with-action.yml").read_text()
    given = re.search(r"OWNER/ringfence@.*\n        with:\n((?:          .*\n)+)", text)
    assert given is not None
    assert {"task", "model"} <= set(re.findall(r"^          ([\w-]+):", given[1], re.M)) <= known


def test_the_proofs_that_pages_name_are_there() -> None:
    for one in (Page(PROJECT / "SECURITY.md"), page("guarantees")):
        named = set(re.findall(r"`(tests/[\w/.]+)`", one.text))
        assert len(named) > 5
        assert [name for name in named if not (PROJECT / name).exists()] == []


def test_the_files_that_pages_for_contributors_name_are_there() -> None:
    for one in [other for other in PAGES if other.name.startswith("contribute/")] + [page("understand/architecture")]:
        roots = "platform|sandbox|contrib_tools|tests|docs|examples"
        named = set(re.findall(rf"`((?:{roots})/[\w/.]+)`", one.text))
        assert [name for name in named if not (PROJECT / name).exists()] == [], one.name


def test_the_tools_that_the_pages_name_are_those_that_there_are_with_their_arguments(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", page("reference/tools").text, re.MULTILINE)
    named = {name: set(re.findall(r"`(\w+)`", what)) for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    session = Session()
    sections = (
        VfsToolsSection(session=session),
        PlanningToolsSection(session=session),
        HistoryToolsSection(
            session=session, workspace=lambda: Workspace.open("nowhere", read_only=True), candidates=True
        ),
    )
    with PodmanSandboxSection(session=session, root=tmp_path) as shell:
        tools = [tool for section in (*sections, shell) for tool in section.tools()]
    assert named == {tool.name: {one.name for one in fields(tool.params_type)} for tool in tools if tool.params_type}


def test_the_page_of_tools_says_how_much_one_call_writes() -> None:
    assert f"{MAX_WRITE_LENGTH:,} characters" in page("reference/tools").text


def test_the_configuration_of_clients_can_be_read_and_starts_the_server() -> None:
    blocks = page("use/mcp").blocks
    known = [json.loads(block.text) for block in blocks if block.language == "json"]
    known += [tomllib.loads(block.text) for block in blocks if block.language == "toml"]
    servers = [server["ringfence"] for one in known for server in one.values()]
    assert len(servers) == 3
    for server in servers:
        if "url" not in server:
            assert (server["command"], server["args"][0], len(server["args"])) == ("ringfence", "serve", 2)


def section(name: str, heading: str) -> str:
    return page(name).text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_reference_has_all_keys_of_the_json_object_of_a_run() -> None:
    table = section("reference/json", "ringfence run --json")
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(RunOutcome().to_json())


def test_the_reference_has_all_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section("reference/json", "Exit codes"), re.MULTILINE)
    assert {outcome: int(code) for code, names in rows for outcome in re.findall(r"`(\w+)`", names)} == EXIT_CODES


def test_the_reference_has_all_outcomes_of_a_call() -> None:
    outcomes = section("reference/receipts", "Outcomes")
    assert re.findall(r"^\| `(\w+)` \|", outcomes, re.MULTILINE) == [*CALL_OUTCOMES]
