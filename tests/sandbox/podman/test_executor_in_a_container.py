"""What a command in a container can do to the executor, and what is left of it when it takes all there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfence_sandbox import PodmanSandbox, SandboxLimits


@pytest.mark.parametrize(
    "code",
    [
        "os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.setpriority(os.PRIO_PGRP, 0, 19)",
        "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
        "os.sched_setparam(1, os.sched_param(0))",
        "resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(1, resource.RLIMIT_AS, (1, 1))",
    ],
)
def test_a_command_changes_neither_the_executor_s_priority_nor_its_limits(shared: PodmanSandbox, code: str) -> None:
    result = shared.run(["python3", "-I", "-S", "-c", "import os, resource\n" + code])
    assert (result.exit_code, result.failure) == (1, "")
    assert "PermissionError" in result.stderr


def test_a_command_changes_its_own_priority_and_limits(shared: PodmanSandbox) -> None:
    code = "import os, resource as r; os.setpriority(0, 0, 19); r.setrlimit(r.RLIMIT_NOFILE, (9, 9)); print(os.nice(0))"
    result = shared.run(["python3", "-I", "-S", "-c", code])
    assert (result.exit_code, result.stdout) == (0, "19\n"), result
    # The tests themselves may run as nice as that.
    assert shared.run("ulimit -n 20 && echo $(($(nice -n 3 nice) - $(nice)))").stdout == "3\n"


HOG = "import time; held = bytearray(4 << 20); time.sleep(2)"
HOGS = f"for i in $(seq 50); do python3 -I -S -c '{{first}}{HOG}' & done; wait"
AS_LATE_AS_OTHERS = 'open("/proc/self/oom_score_adj", "w").write("0"); '


@pytest.mark.prove
@pytest.mark.usefixtures("limits_hold")
def test_many_small_hogs_do_not_take_the_executor_with_them(sandbox: PodmanSandbox) -> None:
    container = sandbox.start()
    result = sandbox.run(HOGS.format(first=""))
    assert result.out_of_memory, result
    assert sandbox.run("cat /proc/1/oom_score_adj; awk '/VmRSS/ {print $2}' /proc/1/status").exit_code == 0
    assert sandbox.start() is container


@pytest.mark.usefixtures("limits_hold")
def test_hogs_that_are_not_taken_first_are_told_of_the_memory_even_with_the_executor(sandbox: PodmanSandbox) -> None:
    result = sandbox.run(HOGS.format(first=AS_LATE_AS_OTHERS))
    assert result.out_of_memory or "memory was used up" in result.failure, result
    assert sandbox.run("echo next").stdout == "next\n"


FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""


def test_a_fork_bomb_of_512_processes_ends(make_sandbox: Callable[..., PodmanSandbox]) -> None:
    sandbox = make_sandbox(limits=SandboxLimits())
    sandbox.start()
    assert sandbox.run(["python3", "-I", "-S", "-c", FORK_BOMB], timeout_seconds=1).timed_out
    assert sandbox.run("ps -e | wc -l; echo fine").stdout.endswith("fine\n")
