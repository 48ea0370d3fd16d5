"""A program at a terminal of its own, as a person sees it and types at it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType

from rich.cells import cell_len

WAIT_SECONDS = 30.0
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", re.DOTALL)


def screen_of(raw: str, columns: int) -> list[str]:
    """Return the lines of a terminal of `columns` that has got `raw`, those that have scrolled away too."""
    lines, row, column = [""], 0, 0
    for number, action, character in _PARTS.findall(raw):
        if action == "A":
            row = max(row - int(number or 1), 0)
        elif action == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character:
            if column + cell_len(character) > columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            # A wide character stands for two columns: the second one has a character that no test looks for.
            lines[row] = lines[row][:column].ljust(column) + character + "\0" * (cell_len(character) - 1)
            column += cell_len(character)
        lines += [""] * (row + 1 - len(lines))
    return [line.replace("\0", "").rstrip() for line in lines]


class Terminal:
    """A process whose standard streams are one terminal, which is its controlling terminal. A context manager."""

    def __init__(self, command: Sequence[str], *, columns: int = 120) -> None:
        self._side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("CI", "COLUMNS", "LINES"):  # the size is that of the terminal
            environment.pop(name, None)
        program = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [command[0], "-c", program, *command],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env=environment,
        )
        os.close(other)
        self._columns = columns
        self.raw = ""
        self._read = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._side)

    def wait_for(self, text: str) -> str:
        """Wait until the screen shows `text` after what was waited for before. Return what came up to it."""
        until = time.monotonic() + WAIT_SECONDS
        while (at := self.shown.find(text, self._read)) < 0:
            if not self._more(until):
                raise AssertionError(f"{text!r} was not shown:\n{self.shown[self._read :]}")
        found = self.shown[self._read : at]
        self._read = at + len(text)
        return found

    @property
    def shown(self) -> str:
        """All text so far, without what moves the cursor or colours."""
        return _SEQUENCES.sub("", self.raw).replace("\r\n", "\n")

    @property
    def screen(self) -> list[str]:
        """The lines that a person sees now, or by scrolling up."""
        return screen_of(self.raw, self._columns)

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def end(self) -> int:
        """Read to the end. Return the exit code."""
        until = time.monotonic() + WAIT_SECONDS
        while self._more(until):
            pass
        assert time.monotonic() < until, f"it has not ended:\n{self.shown}"
        return self.process.wait(WAIT_SECONDS)

    def _more(self, until: float) -> bool:
        if not select.select([self._side], [], [], max(until - time.monotonic(), 0))[0]:
            return False
        try:
            chunk = os.read(self._side, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.raw += chunk.decode(errors="replace")
        return bool(chunk)
