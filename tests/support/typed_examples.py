"""Run mypy and basedpyright over the examples of the pages and of `examples/`, as users run them over their code.

A line that ends with "# error" has to be refused: `WRONG` has mistakes that nobody should have to run to find.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pages import PROJECT, pages

BIN = Path(sys.executable).parent
MARK = "  # error"
WRONG = """\
from ringfence import Budget, Deadline, MarkdownSection, Prompt, PromptTemplate, Session, Tool, ToolExecutor
from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ScriptedAdapter
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import PathPolicy, ReadBeforeWritePolicy, ToolContext, ToolResult, ToolsSection
from ringfence_sandbox import HostFilesystem, PodmanSandbox, Workspace
from ringfence_tools import AstevalSection, PlanningToolsSection, PodmanSandboxSection, VfsToolsSection

session = Session()
template = PromptTemplate[None](ns="1", key="y")
prompt = Prompt(template)


def handle(params: None, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok("done")


Prompt[None](ns="1", key="y", sectoins=[])  # error
Prompt[None](ns=1, key="y")  # error
Prompt[None](key="y")  # error
Prompt(template, key="y")  # error
PromptTemplate[None](ns="1", key="y", sectoins=[])  # error
MarkdownSection[None](title="a", key="b", templat="c")  # error
ToolsSection[None](title="a", key="b", tool=[])  # error
Tool[None, str]("name", "words", handle, readonly=True)  # error
Session(secret=None)  # error
ToolExecutor(prompt=prompt, session=session, dedline=None)  # error
ScriptedAdapter([], model_name="x")  # error
OpenAIAdapter(modle="x")  # error
AnthropicAdapter(modle="x")  # error
Deadline.after(seconds_left=1)  # error
Budget(max_tokens=3)  # error
PathPolicy(denied=["a"])  # error
ReadBeforeWritePolicy(read_tool=["a"])  # error
VfsToolsSection(session=session, file_system=InMemoryFilesystem())  # error
PlanningToolsSection(session=session, stratgy=None)  # error
AstevalSection(sesion=session)  # error
HostFilesystem("a", sotre="b")  # error
Workspace.open("a", sotre="b")  # error
PodmanSandbox("a", netwrok="none")  # error
PodmanSandboxSection(session=session, rot="a")  # error
"""
WRONG_LINES = [number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith(MARK)]
CONFIG = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.11",
    "extraPaths": [str(PROJECT / root) for root in ("platform", "sandbox", "contrib_tools")],
    "reportMissingModuleSource": False,
}


def write_examples(directory: Path) -> None:
    """Write each example of the pages into a file that is named after its place."""
    for page in pages():
        for block in page.blocks:
            if block.language == "python" and not block.is_elsewhere:
                name = page.name.removesuffix(".md").replace("/", "_").replace("-", "_")
                (directory / f"{name}_line_{block.line}.py").write_text(block.text, encoding="utf-8")


def run_basedpyright(directory: Path) -> dict[str, list[int]]:
    """Return the lines with errors, by file. The errors are printed, but for those of `wrong.py`."""
    (directory / "pyrightconfig.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [
        str(BIN / "basedpyright"),
        "--outputjson",
        "--level",
        "error",
        "--pythonpath",
        sys.executable,
        "--project",
    ]
    command += [str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, list[int]] = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        file, line = Path(one["file"]).name, one["range"]["start"]["line"] + 1
        if one["severity"] == "error":
            _note(found, file, line, one["message"])
    return found


def run_mypy(directory: Path, options: Sequence[str] = ()) -> dict[str, list[int]]:
    """The same with mypy. It keeps what it knows of the packages in `.mypy_cache`."""
    command = [str(BIN / "mypy"), "--output=json", f"--config-file={PROJECT / 'pyproject.toml'}", *options]
    command += [f"--cache-dir={PROJECT / '.mypy_cache'}", *map(str, sorted(directory.glob("*.py")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, list[int]] = {}
    for line in done.stdout.splitlines():
        one = json.loads(line)
        if one["severity"] == "error":
            _note(found, Path(one["file"]).name, one["line"], one["message"])
    return found


def _note(found: dict[str, list[int]], file: str, line: int, message: str) -> None:
    lines = found.setdefault(file, [])
    if line not in lines:
        lines.append(line)
    if file != "wrong.py":
        sys.stderr.write(f"{file}:{line}: {message}\n")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_examples(directory)
        for file in sorted((PROJECT / "examples").glob("*/*.py")):
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "wrong.py").write_text(WRONG, encoding="utf-8")
        for check in (run_basedpyright, run_mypy):
            found = check(directory)
            missed = sorted(set(WRONG_LINES).symmetric_difference(found.pop("wrong.py", [])))
            if missed:
                lines = WRONG.splitlines()
                sys.stderr.write(f"{check.__name__}: not as marked: {[lines[line - 1] for line in missed]}\n")
            if found or missed:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
