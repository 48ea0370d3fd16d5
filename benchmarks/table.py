"""Every benchmark beside its baseline, in one run and one table. ``--markdown`` prints it as Markdown.

Each file runs in a process of its own. Its rows time both sides in turns on the same interpreter, and the table
shows medians, the fastest and the slowest round, and first of all the ratio, since machines differ.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import interpreter
import peer
from measure import Row, Spread, reported

HERE = Path(__file__).resolve().parent
TIMED = (
    "tool_call.py",
    "session.py",
    "files.py",
    "transactions.py",
    "disk.py",
    "history.py",
    "forks.py",
    "providers.py",
    "mcp_call.py",
    "rendering.py",
    "shell.py",
    "commands.py",
    "host_commands.py",
    "guard.py",
)
FILES = (*TIMED, "imports.py", "memory.py", "batch.py")
HEADINGS = ("ratio", "target", "met", "area", "what", "ringfence", "baseline", "is")

NOTES = f"""\
The ratio says how many times less ringfence takes than the baseline beside it; where the target says "more", and in
the rows about memory, starting and MCP, how many times more. Medians of processor time, (fastest to slowest round).
{peer.NAME} {peer.VERSION} ships no filesystem in memory: here its tool calls work on a bare dictionary, and the rest
is beside fsspec's and beside a dictionary, copied to go back to, that checks, locks and reports nothing."""


def main() -> None:
    markdown = "--markdown" in sys.argv[1:]
    chosen = interpreter.with_the_peer()
    python = sys.executable if isinstance(chosen, str) else str(chosen)
    rows = [row for file in FILES for row in measured(python, file)]
    lines = [HEADINGS, *(cells(row) for row in rows)]
    print("\n".join(in_markdown(lines) if markdown else in_columns(lines)))
    print()
    print(NOTES)
    print()
    print(where(python))
    if isinstance(chosen, str):
        print(f"Without the rows beside {peer.NAME}: {chosen}.")
    missed = [row for row in rows if row.met is False]
    print(f"{len(missed)} of {sum(row.met is not None for row in rows)} targets missed.")


def measured(python: str, file: str) -> Iterator[Row]:
    print(f"{file} ...", file=sys.stderr, flush=True)
    done = subprocess.run([python, HERE / file], check=True, stdout=subprocess.PIPE, text=True)
    return map(reported, done.stdout.splitlines())


def cells(row: Row) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: ""}[row.met]
    ours, baseline = spelled(row.ours, row.unit), spelled(row.baseline, row.unit)
    return f"{significant(row.ratio)}x", row.target, met, row.area, row.what, ours, baseline, row.beside


def spelled(spread: Spread, unit: str) -> str:
    steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")] if unit == "s" else [(1024.0**2, "MiB"), (1024.0, "KiB")]
    size, name = next((step for step in steps if spread.median >= step[0]), steps[-1])
    median, low, high = (significant(value / size) for value in (spread.median, spread.low, spread.high))
    return f"{median} {name}" if low == high else f"{median} {name} ({low} to {high})"


def significant(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def in_columns(lines: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (
            cell.rjust(width) if at == 0 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join((first, *rest)).rstrip()


def in_markdown(lines: list[tuple[str, ...]]) -> Iterator[str]:
    for at, line in enumerate(lines):
        yield f"| {' | '.join(cell.replace('*', chr(92) + '*') for cell in line)} |"
        if at == 0:
            yield f"|{' --: |' + ' --- |' * (len(line) - 1)}"


def where(python: str) -> str:
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.strip()
    return f"{datetime.now(UTC):%Y-%m-%d}, {version}, {os.cpu_count()} x {processor()}, {platform.system()}."


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
