"""What the pages in docs/ show runs, page by page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import fsspec
import pytest

from ringfence.filesystem.protocol import MAX_WRITE_LENGTH
from ringfence.runtime import Session
from ringfence_cli.report import as_json
from ringfence_cli.task import RunOutcome
from ringfence_cli.watch import OUTCOMES, RunStats
from ringfence_sandbox import Workspace
from ringfence_tools import (
    HistoryToolsSection,
    PlanningToolsSection,
    PodmanSandboxSection,
    VfsToolsSection,
    WorkspaceFileSystem,
)

DOCS = Path(__file__).parent.parent / "docs"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
IN_A_CONTAINER = "sandbox"
WITH_EXAMPLES = (
    "workspaces",
    "prompts",
    "tools",
    "policies",
    "sessions",
    "evaluations",
    "resources",
    "overrides",
    "telemetry",
    "testing",
    "extending",
)
PAGES = ("running", "models", "mcp", IN_A_CONTAINER, *WITH_EXAMPLES)


@pytest.fixture(autouse=True)
def project() -> None:
    """The entry point of an installed package, where the tests run without one."""
    fsspec.register_implementation("ringfence", WorkspaceFileSystem, clobber=True)


def text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_the_examples_of_a_page_run_one_after_the_other(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples(page)
    name = f"docs_{page}"
    module = ModuleType(name)  # a real one: dataclasses look their module up
    monkeypatch.setitem(sys.modules, name, module)
    for example in examples(page):
        exec(compile(example, f"docs/{page}.md", "exec"), vars(module))


def test_the_examples_pass_the_strict_type_checker(tmp_path: Path) -> None:
    for page in (IN_A_CONTAINER, *WITH_EXAMPLES):
        allowed = "# pyright: reportUnknownMemberType=false, reportDuplicateImport=false, reportUnusedClass=false\n"
        (tmp_path / f"{page}.py").write_text(allowed + "\n".join(examples(page)))
    roots = [str(DOCS.parent / root) for root in ("platform", "sandbox", "contrib_tools")]
    config = {"typeCheckingMode": "strict", "extraPaths": roots, "reportMissingTypeStubs": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_test_file_that_is_shown_runs(tmp_path: Path) -> None:
    (shown,) = [example for example in examples("testing") if "FilesystemContract" in example]
    (tmp_path / "test_my_filesystem.py").write_text(shown)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 50


def test_every_page_is_reached_from_the_readme() -> None:
    assert [page for page in PAGES if f"docs/{page}.md" not in README] == []


def test_links_between_pages_lead_somewhere() -> None:
    dead: list[str] = []
    for page in (*DOCS.parent.glob("*.md"), *DOCS.glob("*.md")):
        words = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", words):
            name, _, heading = target.partition("#")
            there = page.parent / name if name else page
            headings = (
                re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE) if there.is_file() else []
            )
            anchors = [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]
            if not there.exists() or (heading and heading not in anchors):
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_pages_fit_on_a_few_screens() -> None:
    assert [page for page in PAGES if len(text(page).splitlines()) > 180] == []


def test_the_tools_that_the_pages_name_are_those_that_there_are_with_their_arguments(tmp_path: Path) -> None:
    tables = text("running").replace(json_keys(), "") + text("mcp") + text(IN_A_CONTAINER)
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", tables, re.MULTILINE)
    said = {name: set(re.findall(r"`(\w+)`", what)) for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    session = Session()
    sections = (
        VfsToolsSection(session=session),
        PlanningToolsSection(session=session),
        HistoryToolsSection(session=session, workspace=lambda: Workspace.open("nowhere", read_only=True)),
    )
    with PodmanSandboxSection(session=session, root=tmp_path) as shell:
        tools = [tool for section in (*sections, shell) for tool in section.tools()]
    assert said == {tool.name: {one.name for one in fields(tool.params_type)} for tool in tools if tool.params_type}


def test_the_page_says_how_much_one_call_writes() -> None:
    assert f"| `write_file` | `file_path`, `content`: at most {MAX_WRITE_LENGTH:,} characters |" in text("running")


def test_what_a_held_snapshot_needs_waits_in_the_root_as_the_page_says(tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    with Workspace.open(root, store=tmp_path / "store") as disk:
        held = disk.filesystem.snapshot()
        disk.filesystem.write("a.txt", "a")
        disk.filesystem.restore(held)
        (there,) = root.iterdir()
        assert there.match(re.findall(r"`(\.\S+-\*)` in the root", text("resources"))[0])
        assert disk.filesystem.list() == []
    assert [*root.iterdir()] == []


def test_the_configuration_of_clients_can_be_read_and_starts_the_server() -> None:
    blocks = re.findall(r"^```json\n(.*?)^```", README + text("mcp"), re.MULTILINE | re.DOTALL)
    known = [json.loads(block) for block in blocks if "ringfence" in block]
    known += map(tomllib.loads, re.findall(r"^```toml\n(.*?)^```", text("mcp"), re.MULTILINE | re.DOTALL))
    servers = [server["ringfence"] for one in known for server in one.values()]
    assert len(servers) == 6
    for server in servers:
        if "url" not in server:
            assert (server["command"], server["args"][0], len(server["args"])) == ("ringfence", "serve", 2)


def json_keys() -> str:
    """The table of the page on running."""
    return text("running").partition("### JSON output")[2].partition("### Exit codes")[0]


def test_the_page_on_running_has_all_keys_of_the_json_object() -> None:
    first_cells = [line.split("|")[1] for line in json_keys().splitlines() if line.startswith("| `")]
    told = as_json(RunOutcome(), RunStats(), None)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(told)
    assert all(f"`{outcome}`" in json_keys() for outcome in OUTCOMES)
