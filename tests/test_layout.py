"""The traps of this layout: three source roots that are no packages, one of them named like a standard module."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import ringfence

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "platform/ringfence",
    "sandbox/ringfence_workspace",
    "sandbox/ringfence_sandbox",
    "contrib_tools/ringfence_tools",
    "contrib_tools/ringfence_batch",
    "contrib_tools/ringfence_cli",
    "contrib_tools/ringfence_mcp",
    "contrib_tools/ringfence_guard",
    "contrib_tools/ringfence_doors",
    "contrib_tools/ringfence_view",
)
NAMED_OTHERWISE = {"minisweagent": "mini-swe-agent"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEMO = ROOT / "contrib_tools/ringfence_cli/demo/sample"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def package_files() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for package in PACKAGES for path in files_below(ROOT / package)]


def own_text() -> Iterator[tuple[Path, str]]:
    """Every text file of the project, what is built or cached left out."""
    for top in ROOT.iterdir():
        if top.name in {"build", "dist"} or (top.name.startswith(".") and top.is_dir() and top.name != ".ci"):
            continue
        for path in files_below(top) if top.is_dir() else [top]:
            yield path, path.read_text(encoding="utf-8", errors="replace")


def normalized(names: Iterable[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def bare_names(requirements: list[str]) -> set[str]:
    return normalized(re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)


def test_the_tests_run_what_is_in_this_checkout_and_not_a_copy_that_was_installed() -> None:
    hint = "`pip install .` has put a copy beside it; `touch pyproject.toml` and make set the checkout up again"
    assert Path(ringfence.__file__).is_relative_to(ROOT / "platform"), hint


def test_no_page_tells_to_install_a_copy_into_the_environment_that_make_has_made() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    copied = re.compile(r"pip install '?\.")
    assert [page.name for page in pages if copied.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("root", ["platform", "sandbox", "contrib_tools"])
def test_a_source_root_is_never_a_package(root: str) -> None:
    assert (ROOT / root).is_dir()
    assert not (ROOT / root / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_platform_is_the_standard_library_s_when_python_starts_in_the_checkout() -> None:
    program = "import platform; platform.system(); print(platform.__file__)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(answer.stdout.strip()).parent == Path(sysconfig.get_paths()["stdlib"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file()
    assert (ROOT / package / "py.typed").is_file()


def test_no_name_of_a_face_is_that_of_a_module() -> None:
    # The import of the module would put it in the place of the name.
    for package in PACKAGES:
        for face in (ROOT / package).rglob("__init__.py"):
            exported = set(re.findall(r'^    "(\w+)",$', face.read_text(), re.MULTILINE))
            modules = {path.stem for path in face.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
            assert exported & modules == set(), face


def test_every_folder_of_modules_is_a_package() -> None:
    # The import contracts do not see a module in a folder without __init__.py.
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.is_relative_to(DEMO)]
    assert {path.parent for path in modules if not (path.parent / "__init__.py").is_file()} == set()


def test_git_ignores_no_file_of_a_package(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    # A repository of its own, so that an unpacked sdist is judged like a checkout, by the project's ignore files only.
    environment = {**os.environ, "GIT_DIR": str(tmp_path / "git"), "GIT_WORK_TREE": str(ROOT)}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "init", "--quiet", "--bare", tmp_path / "git"], check=True)
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT,
        env=environment,
        input="\n".join(["platform/ringfence/__pycache__/probe.pyc", *package_files()]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ignored.stdout.split() == ["platform/ringfence/__pycache__/probe.pyc"]


def test_the_wheel_takes_every_file_of_the_packages() -> None:
    taken = {Path(file.path).relative_to(ROOT).as_posix() for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert taken == {*package_files(), *(path.relative_to(ROOT).as_posix() for path in files_below(ROOT / "images"))}


@pytest.mark.prove
def test_both_ways_of_starting_pytest_collect_the_same() -> None:
    options = ["--collect-only", "--quiet", "-p", "no:cacheprovider", "tests/test_layout.py"]
    script = Path(sys.executable).with_name("pytest")
    found = [
        subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in ([sys.executable, "-m", "pytest"], [script])
    ]
    tests = [[line for line in output.splitlines() if "::" in line] for output in found]
    assert tests[0] == tests[1] != []


def test_no_test_is_named_after_an_address_in_memory(request: pytest.FixtureRequest) -> None:
    # Two workers of xdist must collect the same names, or nothing runs.
    assert [item.nodeid for item in request.session.items if " at 0x" in item.nodeid] == []


def asserting(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Assert) or getattr(node, "attr", "") == "raises" for node in ast.walk(tree))


def test_every_test_asserts_something() -> None:
    without: list[str] = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)]
        helpers = {one.name for one in functions if not one.name.startswith("test") and asserting(one)}
        for one in functions:
            if not one.name.startswith("test") or asserting(one):
                continue
            named = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(one)}
            if helpers.isdisjoint(named):
                without.append(f"{path.relative_to(ROOT)}: {one.name}")
    assert without == []


def test_no_test_compares_how_long_something_took() -> None:
    # A machine may be busy. What can be counted is counted; a time is a benchmark's.
    clocks = re.compile(r"perf_counter|process_time|thread_time|getrusage|monotonic\(\) -|time\.time\(\) -")
    mine = Path(__file__)
    assert [path for path in (ROOT / "tests").rglob("*.py") if path != mine and clocks.search(path.read_text())] == []


def test_what_is_imported_is_declared() -> None:
    optional = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    declared = bare_names([*PROJECT["dependencies"], *optional])
    ours = {Path(package).name for package in PACKAGES}
    providers = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(DEMO)
        for name in imported_packages(path) - ours - sys.stdlib_module_names
        # What is not installed here is named as it is imported, but for those of NAMED_OTHERWISE.
        if declared.isdisjoint(normalized(providers.get(name, (NAMED_OTHERWISE.get(name, name),))))
    }
    assert undeclared == set()


def imported_packages(path: Path) -> set[str]:
    """What the module imports when it runs, inside functions too."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
        pending.extend(ast.iter_child_nodes(node))
    return names


def test_the_lock_file_covers_the_dependencies_and_names_no_address() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    locked = normalized(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE))
    assert bare_names(PROJECT["dependencies"]) <= locked
    assert "//" not in lock
    without_hash = re.findall(r"^[\w.-]+==[^\\]*$", lock, re.MULTILINE)
    assert without_hash == []


# Written so that no pattern matches its own line.
NEVER = {
    "a package registry's host": r"pypi[.]org|pythonhosted[.]org|npmjs[.]org|npmjs[.]com|deb[.]debian[.]org",
    "a path of one machine": r"/wor[k]/(main|shared)\b|/wor[k]/[.]lib|/tmp/r[f]/|/root/[.]|[.][.]/share[d]\b",
    "a document that is not part of the project": r"(?i)\b(seed|desig[n]) do[c]",
    "a reminder": r"\b(TOD[O]|FIXM[E]|XX[X])\b",
}


@pytest.mark.parametrize("what", NEVER)
def test_no_file_names(what: str) -> None:
    texts = [(path, text) for path, text in own_text() if what.endswith("host") or not path.is_relative_to(DEMO)]
    assert len(texts) > 20
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts for match in re.finditer(NEVER[what], text)
    }
    assert found == set()
