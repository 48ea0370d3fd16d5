"""Tool calls through `ringfence serve`, over standard input and output, beside a bare server of the same SDK and the
same calls in this process.

Calls in time as a clock shows it, since the servers are processes of their own: from the request to its answer. A start
in processor time, up to the answer to `initialize`: on a busy machine a clock shows what else runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from measure import Row, Side, Spread, alternated, report, scratch_directory

from ringfence import InMemoryFilesystem, Prompt, PromptTemplate, Session, ToolExecutor
from ringfence_sandbox import Workspace
from ringfence_tools import VfsToolsSection

BARE = [sys.executable, str(Path(__file__).with_name("bare_mcp_server.py"))]
SERVE = [sys.executable, "-m", "ringfence_cli", "serve"]
BESIDE = ("a bare server", "the call in process")
MORE_MS = 2.0
"""That a call may take more than one of the bare server, and the same call in process."""
START_SECONDS = 0.4
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "benchmark", "version": "1"}}


class Speaker:
    """A client that speaks line by line, so that nothing but the server takes time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout
        self._ids = count()
        self.ask("initialize", HELLO)

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        self._to.write(json.dumps(request).encode() + b"\n")
        self._to.flush()
        answer = json.loads(self._from.readline())
        assert not answer["result"].get("isError"), answer
        return answer

    def cpu_seconds(self) -> float:
        """The processor time that the server has taken."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def call(self, name: str, arguments: Mapping[str, str]) -> object:
        return self.ask("tools/call", {"name": name, "arguments": arguments})


@contextmanager
def speaking(command: list[str]) -> Iterator[Speaker]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet) as process:
        yield Speaker(process)


def repeated(call: Callable[[str, Mapping[str, str]], object], name: str, arguments: Mapping[str, str]) -> Side:
    """``*`` in an argument is another number each time."""
    numbers = count()

    def side(number: int) -> float:
        started = perf_counter()
        for _ in range(number):
            call(name, {key: value.replace("*", str(next(numbers))) for key, value in arguments.items()})
        return (perf_counter() - started) / number

    return side


def starting(command: list[str]) -> Side:
    def side(number: int) -> float:
        taken = 0.0
        for _ in range(number):
            with speaking(command) as speaker:
                taken += speaker.cpu_seconds()
        return taken / number

    return side


def rows() -> Iterator[Row]:
    with scratch_directory() as directory:
        os.environ["RINGFENCE_STATE_DIR"] = str(directory / "state")
        for kind in ("memory", "disk"):
            yield from calls(kind, directory)
        serve = [*SERVE, str(directory / "memory")]
        first, baseline = alternated(starting(serve), starting(BARE))
        met, target = first.median <= START_SECONDS, f"<= {START_SECONDS:g} s"
        yield Row(
            "mcp",
            "start, processor time to the first answer",
            BESIDE[0],
            ratio(first, baseline),
            target,
            met,
            first,
            baseline,
        )


def calls(kind: str, directory: Path) -> Iterator[Row]:
    roots = [directory / kind, directory / f"{kind} in process"]
    for root in roots:
        root.mkdir()
        (root / "a.txt").write_text("hello\n")
    with ExitStack() as stack:
        ours = stack.enter_context(speaking([*SERVE, str(roots[0]), "--workspace", kind]))
        bare = stack.enter_context(speaking(BARE))
        call = in_process(kind, roots[1], stack)
        ours.call("read_file", {"file_path": "a.txt"})  # the first call opens the workspace
        for what, name, arguments in (
            ("reads a file", "read_file", {"file_path": "a.txt"}),
            ("writes a file", "write_file", {"file_path": "new/*.txt", "content": "x\n"}),
        ):
            sides = (
                repeated(ours.call, name, arguments),
                repeated(bare.call, name, arguments),
                repeated(call, name, arguments),
            )
            first, server, executor = alternated(*sides)
            both = Spread(server.median + executor.median, server.low + executor.low, server.high + executor.high)
            met = first.median - both.median <= MORE_MS / 1e3
            target = f"<= {MORE_MS:g} ms more"
            said = f"a call over MCP that {what} ({kind})"
            yield Row("mcp", said, " and ".join(BESIDE), ratio(first, both), target, met, first, both)


def in_process(kind: str, root: Path, stack: ExitStack) -> Callable[[str, Mapping[str, str]], object]:
    files = stack.enter_context(Workspace.open(root)).filesystem if kind == "disk" else InMemoryFilesystem()
    if isinstance(files, InMemoryFilesystem):
        files.write("a.txt", "hello\n")
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="benchmarks", key="mcp", sections=[section]))
    stack.enter_context(prompt.resources)
    return ToolExecutor(prompt=prompt, session=session).call


def ratio(ours: Spread, baseline: Spread) -> float:
    return ours.median / baseline.median


if __name__ == "__main__":
    report(rows())
