"""Looks at an installed wheel: `python -I tests/smoke_wheel.py CHECKOUT`, run outside the checkout by `make wheel`.

What is in the checkout's packages must be what is installed, file for file, and every module must import with
nothing but the wheel's own dependencies beside it.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

SOURCES = {
    "ringfence": "platform",
    "ringfence_batch": "contrib_tools",
    "ringfence_cli": "contrib_tools",
    "ringfence_doors": "contrib_tools",
    "ringfence_guard": "contrib_tools",
    "ringfence_mcp": "contrib_tools",
    "ringfence_workspace": "sandbox",
    "ringfence_sandbox": "sandbox",
    "ringfence_tools": "contrib_tools",
    "ringfence_view": "contrib_tools",
}
EXTRAS = {"anyio", "mcp", "mcp_types", "opentelemetry", "ray", "starlette", "tomlkit", "uvicorn"}
DOORS = {
    "agents",
    "claude_agent_sdk",
    "deepagents",
    "deepagents_code",
    "inspect_ai",
    "langchain_core",
    "minisweagent",
    "pydantic_ai",
    "pytest",
}


def in_checkout(checkout: Path) -> set[str]:
    images = checkout / "images"
    recipes = {f"ringfence_sandbox/recipes/{path.relative_to(images)}" for path in images.rglob("*") if path.is_file()}
    return recipes | {
        path.relative_to(checkout / root).as_posix()
        for package, root in SOURCES.items()
        for path in (checkout / root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def installed() -> set[str]:
    files = distribution("ringfence").files or []
    return {file.as_posix() for file in files if file.parts[0] in SOURCES and "__pycache__" not in file.parts}


def import_everything() -> int:
    count = 0
    for package in map(importlib.import_module, SOURCES):
        where = Path(package.__file__ or "")
        assert where.is_relative_to(sysconfig.get_paths()["purelib"]), f"{package.__name__} came from {where}"
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                # An extra's, which is not installed here.
                assert error.name in EXTRAS | DOORS, f"{module.name} needs {error.name}"
            count += 1
    return count


def main(checkout: Path) -> None:
    assert Path.cwd() != checkout, "run this outside the checkout"
    expected, found = in_checkout(checkout), installed()
    assert found == expected, f"missing: {sorted(expected - found)}; too many: {sorted(found - expected)}"
    assert {f"{package}/py.typed" for package in SOURCES} <= found
    assert any(name.startswith("ringfence_cli/demo/sample/") for name in found)
    assert "ringfence_tools/runs/templates/report.html.j2" in found
    for entry_point in distribution("ringfence").entry_points:
        if not entry_point.module.startswith("ringfence_doors."):  # those are for who has the framework
            entry_point.load()
    count = import_everything()
    from ringfence.extras import missing

    assert "pip install 'ringfence[openai]" in missing("openai", "openai")
    subprocess.run([Path(sys.executable).with_name("ringfence"), "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"the wheel holds {len(found)} files, and its {count} modules import alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
