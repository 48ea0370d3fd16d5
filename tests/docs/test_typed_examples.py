"""What a type checker says about code that uses the packages. `make types` runs two over all examples of the pages."""

from __future__ import annotations

from pathlib import Path

from typed_examples import WRONG, WRONG_LINES, run_basedpyright


def test_a_type_checker_finds_misspelt_arguments(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    assert run_basedpyright(tmp_path) == {"wrong.py": WRONG_LINES}
