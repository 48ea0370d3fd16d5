"""What a guard adds to a call of an agent's own tools, beside the start of the interpreter that its hook needs anyway.

In time as a clock shows it. The events are handled in this process: a hook's client adds its own start on both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import run
from time import sleep

from disk import timed, written
from measure import Row, Spread, alternated, flat, less, report, scratch_directory
from trees import sample

from ringfence_guard import GuardedCalls, GuardLog, parse_event
from ringfence_sandbox import Workspace

SIZES = (1_000, 10_000, 50_000)


class Agent:
    """Claude Code, as far as its hooks are concerned, at work in one tree."""

    def __init__(self, root: Path, store: Path) -> None:
        store.mkdir()
        self._root, self._number = root, 0
        self.calls = GuardedCalls(
            root, GuardLog(store), open_workspace=partial(Workspace.open, root, store=store / "store")
        )
        for _ in range(2):  # the first takes in the tree, and the second finds nothing that is too new to be told
            self.command()
            sleep(0.05)

    def call(self, tool: str, arguments: dict[str, str], work: Callable[[], object]) -> None:
        self._number += 1
        given = {"session_id": "s", "cwd": str(self._root), "tool_name": tool, "tool_input": arguments}
        given["tool_use_id"] = str(self._number)
        self.calls.handle(parse_event("claude", {**given, "hook_event_name": "PreToolUse"}))
        work()
        self.calls.handle(parse_event("claude", {**given, "hook_event_name": "PostToolUse", "tool_response": {}}))

    def command(self) -> None:
        self.call("Bash", {"command": "true"}, lambda: None)

    def changing_command(self, file: Path) -> None:
        self.call("Bash", {"command": "change"}, partial(self._change, file))

    def edit(self, file: Path) -> None:
        self.call("Edit", {"file_path": str(file)}, partial(self._change, file))

    def _change(self, file: Path) -> None:
        file.write_text(f"change {self._number}\n")


def start_interpreter() -> None:
    run([sys.executable, "-I", "-S", "-c", "pass"], check=True)


def rows(scratch: Path) -> Iterator[Row]:
    small: Spread | None = None
    for number in SIZES:
        area, files = f"guard, {number:,}", sample(number)
        root = written(scratch / f"tree-{number}", files)
        with ExitStack() as stack:
            agent = Agent(root, scratch / f"guard-{number}")
            stack.callback(agent.calls.close)
            file = root / next(iter(files))
            sides: dict[str, Callable[[], object]] = {
                "command that changes nothing, both events": agent.command,
                "command that changes a file, both events": partial(agent.changing_command, file),
                "edit of a named file, both events": partial(agent.edit, file),
            }
            for what, side in sides.items():
                ours, alone = alternated(timed(side), timed(start_interpreter), seconds=2)
                yield less(area, what, "python -I -S -c pass", (ours, alone))
                if what.startswith("command that changes nothing"):
                    if small is not None:
                        yield flat(area, what, "in 1,000 files", (ours, small), at_most=2)
                    small = small or ours


def main() -> None:
    with scratch_directory() as scratch:
        report(rows(scratch))


if __name__ == "__main__":
    main()
