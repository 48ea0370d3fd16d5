"""Running something in a process of its own that is killed at a chosen point, as a crash would."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

Work = Callable[[Callable[[str], None]], object]


def killed_at(point: int, work: Work) -> bool:
    """Run ``work(before)`` in a forked child that kills itself at the call of ``before`` with that number, from 0.

    False where it came to its end with fewer calls. What it raises is printed, and an AssertionError here.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child uses none of what they hold
        child = os.fork()
    if child == 0:
        _in_child(point, work)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed, see above"
    return False


def _in_child(point: int, work: Work) -> None:
    calls = 0

    def before(name: str) -> None:
        nonlocal calls
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    try:
        work(before)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
