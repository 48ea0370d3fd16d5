"""What a suite wants and ringfence refuses is an expected failure. The module of the suite has the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

DOORS = Path(__file__).parents[3] / "docs/build/doors"


@pytest.fixture
def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Run the programs of a page, and return how many there are."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(page: str) -> int:
        path = DOORS / f"{page}.md"
        programs = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        for program in programs:
            exec(compile(program, path, "exec"), {"__name__": "example"})
        return len(programs)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        refused: dict[tuple[str, str], str] = getattr(getattr(item, "module", None), "REFUSED", {})
        place = (getattr(getattr(item, "cls", None), "__name__", ""), getattr(item, "originalname", item.name))
        if reason := refused.get(place):
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
