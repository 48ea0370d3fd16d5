"""Running something in a process of its own that is killed at a chosen point, as a crash would."""

from __future__ import annotations

import codecs
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

Work = Callable[[Callable[[str], None]], object]
_NOBODY = 65534  # by convention


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


def killed_at_call(point: int, calls: Collection[str], work: Callable[[], object]) -> bool:
    """Run ``work()`` as `killed_at` does; what counts are its calls of these functions of `os`."""

    def counting(before: Callable[[str], None]) -> None:
        def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                before(name)
                return real(*arguments, **options)

            return call

        for name in calls:
            setattr(os, name, counted(name, getattr(os, name)))
        work()

    return killed_at(point, counting)


def as_nobody(work: Callable[[], object], *owned: Path, foreign: Collection[str] = ()) -> None:
    """Run ``work()`` in a forked child without the superuser's rights, to whom these directories and all in them
    belong, but for files of the names in ``foreign``. An AssertionError where it raises."""
    if os.geteuid() == 0:
        for place in owned:
            for path in (place, *place.rglob("*")):
                if path.name not in foreign:
                    os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
            for above in place.parents:
                if above.stat().st_mode & 0o055 != 0o055:
                    os.chmod(above, above.stat().st_mode | 0o055)  # the other user passes
    codecs.lookup("ascii")  # the interpreter's own files may be nobody's to read

    def in_child(_: Callable[[str], None]) -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        work()

    assert not killed_at(-1, in_child)


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


def session_of(leader: int) -> list[int]:
    """The processes of the session that a process began, also when it has ended itself."""
    found: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            if os.getsid(pid) == leader and Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie has none
                found.append(pid)
    return found
