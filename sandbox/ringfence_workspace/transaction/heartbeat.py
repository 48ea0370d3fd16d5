"""When an opaque call was last seen alive: what changed later is somebody else's.

A number in a file of its own, written over once a second: it is always whole, and never grows. Its owner writes it, and
so may what it started in a container, which goes on where the owner is stopped before it is killed.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from contextlib import ExitStack, suppress

from ringfence_workspace.tree.places import not_written

STAMP = "alive"
"""In a store, the file that the owner of an opaque call stamps."""
RUNS = b"runs"
"""What is in it behind the stamp while the log has such a call."""
SECONDS_BETWEEN = 1.0
GRACE_NS = 3_000_000_000
"""How long after the loss of its owner a call may still change files: until then the sandbox has ended it."""
_STAMP = struct.Struct("<Q")


class LivenessFile:
    """Stamps a file from `start` to `stop`, by a thread. With ``sync`` each stamp waits for the disk."""

    def __init__(self, path: str, *, sync: bool) -> None:
        self._path = path
        self._sync = sync
        self._running: tuple[threading.Thread, threading.Event] | None = None
        self.descriptor = -1
        """Of the file, from `start` to `stop`."""

    def start(self) -> None:
        """OSError where the file cannot be written. It has been stamped once when this returns."""
        if self._running is not None:
            return
        with ExitStack() as opened:
            try:
                file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                opened.callback(os.close, file)
                self._stamp(file)
            except OSError as error:
                raise not_written(error, self._path) from error
            stopped = threading.Event()
            thread = threading.Thread(target=self._run, args=(file, stopped), name="ringfence stamp", daemon=True)
            thread.start()
            opened.pop_all()
        self._running = thread, stopped
        self.descriptor = file

    def _run(self, file: int, stopped: threading.Event) -> None:
        try:
            while not stopped.wait(SECONDS_BETWEEN):
                self._stamp(file)
        except OSError:  # a call that recovery takes for ended early leaves more behind, and loses nothing
            pass

    def _stamp(self, file: int) -> None:
        os.pwrite(file, _STAMP.pack(time.time_ns()), 0)
        if self._sync:
            os.fdatasync(file)

    def begun(self) -> None:
        """The log tells of the call: from now on one that has lost it can be known to have. Never fails."""
        with suppress(OSError):
            os.pwrite(self.descriptor, RUNS, _STAMP.size)

    def pause(self) -> None:
        """Write no more stamps: the call has done all that it does to files. Its end may be a while off."""
        if self._running is not None:
            thread, stopped = self._running
            stopped.set()
            if thread.is_alive():
                thread.join()

    def stop(self) -> None:
        self.pause()
        running, self._running = self._running, None
        if running is not None:
            with suppress(OSError):
                os.ftruncate(self.descriptor, _STAMP.size)
            # Not by the thread, should it fail: its number would soon be another file's, for whoever stamps as well.
            os.close(self.descriptor)
            self.descriptor = -1

    @staticmethod
    def last_ns(path: str) -> int:
        """The last stamp, in nanoseconds since 1970; 0 where there is none."""
        try:
            with open(path, "rb") as file:
                return int(_STAMP.unpack(file.read(_STAMP.size))[0])
        except (OSError, struct.error):
            return 0
