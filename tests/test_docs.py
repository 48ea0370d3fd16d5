"""What the pages in docs/ show runs, page by page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("prompts", "tools", "policies", "sessions", "evaluations", "resources", "overrides", "telemetry", "testing")


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_one_after_the_other(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples(page)
    name = f"docs_{page}"
    module = ModuleType(name)  # a real one: dataclasses look their module up
    monkeypatch.setitem(sys.modules, name, module)
    for example in examples(page):
        exec(compile(example, f"docs/{page}.md", "exec"), vars(module))


def test_the_examples_pass_the_strict_type_checker(tmp_path: Path) -> None:
    for page in PAGES:
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
    readme = (DOCS.parent / "README.md").read_text()
    assert [page for page in PAGES if f"docs/{page}.md" not in readme] == []


def test_pages_fit_on_a_few_screens() -> None:
    assert [page for page in PAGES if len((DOCS / f"{page}.md").read_text().splitlines()) > 150] == []
