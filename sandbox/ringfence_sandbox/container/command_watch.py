"""Looks, while a command runs, whether it fills the disk that the workspace is on, or nobody waits for it any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ringfence.runtime.limits import Cancellation

_LOOK_SECONDS = 0.05


class CommandWatch:
    """Ends a command that leaves too little space, or too few inodes, or whose call is cancelled. One thread, asleep
    between commands."""

    def __init__(self, root: str, free_bytes: int, free_inodes: int) -> None:
        self._root = root
        self._least = free_bytes, free_inodes
        self._running = threading.Event()
        self._closed = False
        self._end: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._cancellation: Cancellation | None = None
        self.reason = ""
        """Why what the command did is to be taken back, in words, if it is."""

    def begin(self, end: Callable[[], None], cancellation: Cancellation | None) -> None:
        """Watch from now on; ``end`` is called in another thread, again and again until `stop`."""
        self.reason = ""
        self._cancellation = cancellation
        # On a disk that is nearly full already a command may use half of what is left.
        self._floor = tuple(min(least, left // 2) for least, left in zip(self._least, _left(self._root), strict=True))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ringfence disk watch", daemon=True)
            self._thread.start()
        self._end = end
        self._running.set()

    def stop(self) -> None:
        with self._lock:
            self._running.clear()
            # What a quick command did between two looks is not let stay either.
            if self._end is not None and not self.reason and (lacking := self._lacking()):
                self.reason = lacking
            self._end = self._cancellation = None

    def close(self) -> None:
        self._closed = True
        self._running.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        pause = threading.Event()
        while self._running.wait() and not self._closed:
            pause.wait(_LOOK_SECONDS)
            with self._lock:
                if self._end is None:
                    continue
                if lacking := self._lacking():
                    self.reason = f"ended because {lacking}"
                if self._cancellation is not None and self._cancellation.cancelled:
                    self.reason = "ended because its call was cancelled"
                if self.reason:
                    self._end()

    def _lacking(self) -> str:
        with suppress(FileNotFoundError):  # somebody has moved the root: cancellations are still looked for
            for left, floor, what in zip(_left(self._root), self._floor, ("bytes", "inodes"), strict=True):
                if left < floor:
                    return f"{left} {what} are left on the disk"
        return ""


def _left(root: str) -> tuple[int, int]:
    found = os.statvfs(root)
    # Filesystems without a number of inodes say 0.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else 1 << 62
