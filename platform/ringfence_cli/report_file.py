"""``--report``: the file that a run is told in, and the watcher that writes down what it tells."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
from ringfence.runtime.limits import utc_now
from ringfence.runtime.receipts import Receipt
from ringfence_cli import report_html
from ringfence_cli.outputs import OutputFile
from ringfence_cli.printable import plural
from ringfence_cli.watch import RunStats
from ringfence_tools.planning import Plan

MAX_RECORD_CHARACTERS = 5_000_000
"""Of HTML, for turns and calls. What comes after them is counted."""


class ReportFile:
    """A watcher that keeps what the page shows of each turn and call, and in the end puts the page in its place: whole,
    or not at all.

    The directory is held open, so that whatever becomes of its name meanwhile, nothing is written elsewhere.
    """

    def __init__(self, path: Path, directory: Path) -> None:
        """``directory`` is where the run works.

        Raises OSError for a path where nothing can be written, or where something else than a file is.
        """
        self.started_at = utc_now()
        self.path = Path(os.path.realpath(path.parent)) / path.name
        self._works_in = Path(os.path.abspath(directory))  # who reads the page is somewhere else
        self._record: list[str] = []
        self._room = MAX_RECORD_CHARACTERS
        self._left_turns = self._left_calls = 0
        self._turns = self._calls = 0
        self._directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = self._found()
            # In the place of a link or a device a file would be of no use, and the other gone.
            if not path.name or (found is not None and not stat.S_ISREG(found.st_mode)):
                raise OSError(errno.EINVAL, "something is there that is no regular file", str(path))
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._directory):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        except BaseException:
            os.close(self._directory)
            raise

    def _found(self) -> os.stat_result | None:
        try:
            return os.stat(self.path.name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_same_file(self, other: OutputFile) -> bool:
        found = self._found()
        return found is not None and other.is_file(found)

    def text(self, event: ModelText) -> None: ...

    def retry(self, event: ModelRetry) -> None: ...

    def turn(self, event: ModelTurn) -> None:
        self._turns += 1
        self._left_turns += not self._kept(report_html.turn(event))

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        self._calls += 1
        self._left_calls += not self._kept(report_html.call(receipt, answer, self._works_in))

    def _kept(self, piece: str) -> bool:
        self._room -= len(piece)
        if self._room >= 0:
            self._record.append(piece)
        return self._room >= 0

    def record_of(self, tally: RunStats) -> str:
        """Everything that was kept of a run, and what was not, in words."""
        turns, calls = tally.turns - self._turns, tally.calls - self._calls
        if tally.parts > 1:
            before = (
                f"{plural(turns, 'turn')} and {plural(calls, 'tool call')} of the parts before are not on this page."
            )
            return f"<p>The run was resumed: {before}</p>{self.record}"
        return self.record

    @property
    def record(self) -> str:
        """Everything that was kept, and what there was no room for, in words."""
        if self._room >= 0:
            return "".join(self._record)
        left = f"{plural(self._left_turns, 'more turn')} and {plural(self._left_calls, 'more tool call')}"
        return f"{''.join(self._record)}<p>There is no room for {left}; --receipts FILE.jsonl has every call.</p>"

    def write(self, page: bytes) -> None:
        """Raises OSError, and leaves what was there before as it was."""
        try:
            self._put(page)
        except OSError as error:  # of a name that nobody has given, or of none
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _put(self, page: bytes) -> None:
        name = f".{self.path.name[:100]}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o666, dir_fd=self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(page)
            os.replace(name, self.path.name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._directory)
            raise

    def close(self) -> None:
        os.close(self._directory)
