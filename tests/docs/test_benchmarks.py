"""What the benchmarks stand on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WAITING = """
import time
from measure import scratch_directory
def rows():
    with scratch_directory() as place:
        (place / "a.txt").touch()
        yield place
        time.sleep(3600)
for row in rows():
    print(row, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_ended_leaves_no_directory(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        place = Path(process.stdout.readline().strip())
        assert (place / "a.txt").is_file()
        process.send_signal(number)
        assert process.wait(60) != 0
    assert not place.exists()
