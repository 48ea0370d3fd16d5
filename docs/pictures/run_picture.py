"""Draw `run.svg`: an excerpt of what `ringfence demo` prints on a terminal.

Run it from a checkout after a change of that output: ``.venv/bin/python docs/pictures/run_picture.py``. The demo needs
no network, since its model is a script.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

PICTURE = Path(__file__).with_name("run.svg")
COLUMNS, CALL_COLUMNS = 104, 46
TURNS = {"5", "6", "8", "9", "10"}
"""Where the agent is denied, has a patch rolled back, and repairs it."""


def demo_output() -> list[Text]:
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "ringfence_cli", "demo"]
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    return [Text.from_ansi(line) for line in done.stderr.decode().splitlines()]


def excerpt(lines: list[Text]) -> Iterator[Text]:
    """The tests before, the turns in `TURNS` and the end. A line of dots stands for what is left out."""
    wanted, left_out = True, False
    for line in lines:
        if started := re.match(r"turn (\d+)", line.plain):
            wanted = started[1] in TURNS
        elif line.plain.startswith(("The task:", "at turn")):
            wanted = False
        elif line.plain.startswith(("done after", "yes")):
            wanted = True
        if wanted and line.plain.strip():
            if left_out:
                yield Text("  ...", style="dim")
            yield line
        left_out = not wanted


def shortened(line: Text) -> Text:
    """A line of `COLUMNS` at most. Of a tool call, the outcome matters more than the arguments."""
    end = line.plain.find(" -> ")
    call, outcome = line.divide([end]) if end >= 0 else (line, Text())
    call.truncate(CALL_COLUMNS if end >= 0 else COLUMNS, overflow="ellipsis")
    whole = Text.assemble(call, outcome)
    whole.truncate(COLUMNS, overflow="ellipsis")
    return whole


def svg(lines: list[Text]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make run", style="bold"))
    for line in lines:
        console.print(shortened(line))
    drawn = console.export_svg(title="ringfence", theme=DEFAULT_TERMINAL_THEME, unique_id="run")
    # A page that shows the picture loads no font for it. The frame is to be seen on white.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code,", "")
    drawn = drawn.replace('stroke="rgba(255,255,255,0.35)"', 'stroke="#b0b0b0"')
    return re.sub(r"^[ \t]*\n|[ \t]+$", "", drawn, flags=re.MULTILINE)


if __name__ == "__main__":
    PICTURE.write_text(svg([*excerpt(demo_output())]), encoding="utf-8")
