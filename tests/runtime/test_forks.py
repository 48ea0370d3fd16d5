"""A fork waits for who makes or closes what a child must not have, and its child waits for nobody."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import os, signal, threading, time
from ringfence_workspace.tree.kernel import FORKS

held = threading.Event()

def hold():
    with FORKS:
        held.set()
        time.sleep(1)

threading.Thread(target=hold).start()
held.wait()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
child = os.fork()
if child == 0:
    os._exit(0 if FORKS.acquire(timeout=5) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_a_fork_that_is_interrupted_while_it_waits_is_not_kept_waiting() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=30)
    assert (done.returncode, b"KeyboardInterrupt" in done.stderr) == (0, True)
