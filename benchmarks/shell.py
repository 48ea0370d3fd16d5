"""Whole calls of `shell_execute` over trees of many files, beside other ways to run a command.

In time as a clock shows it, since the work is done by other processes. A call of ours is all of it: the policies, the
looks through the tree before and after, the command, the receipt. Of the others it is the command alone: none of them
knows what it changed, nor could take it back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from disk import timed, written
from measure import Row, alternated, flat, less, report, scratch_directory
from trees import sample

from ringfence.adapters import ToolExecutor
from ringfence.errors import SandboxUnavailableError
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem, PodmanSandbox
from ringfence_tools import PodmanSandboxSection

TRUE = shutil.which("true") or "/bin/true"
SIZES = (1_000, 10_000)


class Shell:
    """The tools over one tree, with a store that goes with it."""

    def __init__(self, root: Path, store: Path) -> None:
        self._open = ExitStack()
        filesystem = self._open.enter_context(HostFilesystem(root, store=store))
        self.sandbox = self._open.enter_context(PodmanSandbox(root, filesystem=filesystem))
        session = Session()
        section = PodmanSandboxSection(session=session, sandbox=self.sandbox)
        prompt = Prompt(PromptTemplate(ns="bench", key="shell", sections=[section]))
        self._open.enter_context(prompt.resources)
        self._executor = ToolExecutor(prompt=prompt, session=session)

    def call(self, command: str, *, rollback_on_error: bool = False) -> None:
        result = self._executor.call("shell_execute", {"command": command, "rollback_on_error": rollback_on_error})
        assert result.success is not rollback_on_error, result.message

    def close(self) -> None:
        self._open.close()


def rows(scratch: Path) -> Iterator[Row]:
    for number in SIZES:
        files = sample(number)
        shell = Shell(written(scratch / f"tree-{number}", files), scratch / f"store-{number}")
        try:
            yield from beside(f"shell_execute, {number:,}", shell, next(iter(files)))
        finally:
            shell.close()


def beside(area: str, shell: Shell, path: str) -> Iterator[Row]:
    shell.call("true")
    name = shell.sandbox.start().name
    true = timed(lambda: shell.call("true"))
    podman = timed(lambda: subprocess.run(["podman", "exec", name, "true"], check=True))
    if shutil.which("podman") is not None:
        yield less(area, "call that runs true", "podman exec", alternated(true, podman, seconds=4))
    host = timed(lambda: os.waitpid(os.posix_spawn(TRUE, ["true"], {}), 0))
    yield less(area, "call that runs true", "fork and exec on the host", alternated(true, host, seconds=2))
    change = timed(lambda: shell.call(f"echo >> {path}"))
    yield flat(
        area, "call that changes one file", "call that runs true", alternated(change, true, seconds=2), at_most=4
    )
    fails = timed(lambda: shell.call(f"echo >> {path}; exit 1", rollback_on_error=True))
    yield flat(area, "the same, rolled back", "call that runs true", alternated(fails, true, seconds=2), at_most=4)


def main() -> None:
    try:
        with scratch_directory() as scratch:
            report(rows(scratch))
    except SandboxUnavailableError as error:
        print(f"without the rows of shell_execute: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
