"""``--view``: the page of what a command does, served by a process of its own while the command works."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import click

from ringfence.extras import missing
from ringfence.failures import describe_error
from ringfence_cli.terminal import has_person
from ringfence_tools.printable import one_line
from ringfence_tools.runs.agent_run import RunWatcher
from ringfence_tools.runs.outputs import ErrorStream
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.signals import Signals

PATIENCE_SECONDS = 3.0
TELL_SECONDS = 30.0
"""How long the page may take to read a line. One that does not is given up: no question may wait for it."""
_MODULES = ("anyio", "pygments", "starlette", "uvicorn")


def check_view(*, is_wanted: bool, can_write: bool) -> None:
    """Raise click.UsageError for options of a page that cannot be."""
    if can_write and not is_wanted:
        raise click.UsageError("--write is for --view")
    if is_wanted and (lacking := next((name for name in _MODULES if find_spec(name) is None), None)) is not None:
        raise click.UsageError(missing(lacking, "view"))


class PageProcess:
    """The process that serves a page. A context manager, which ends it."""

    def __init__(
        self, errors: ErrorStream, signals: Signals, request: Mapping[str, object], descriptors: Sequence[int] = ()
    ) -> None:
        """Say the address of the page. ``request`` is what it is about, for `ringfence_view.page_server`, which gets
        these descriptors. Raises click.ClickException if no port can be had."""
        self._errors = errors
        self._signals = signals
        token = secrets.token_urlsafe(32)
        with ExitStack() as stack:
            try:
                listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            except OSError as error:
                raise click.ClickException(f"the page cannot be served: {describe_error(error)}") from None
            self._last_words = tempfile.TemporaryFile()  # noqa: SIM115  # `__exit__` closes it
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ringfence_view.page_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._last_words,
                pass_fds=[listening.fileno(), *descriptors],
                start_new_session=True,  # Ctrl-C is for the command
            )
            # The token is not in its arguments, which everybody on the machine can read.
            line = json.dumps({**request, "listening": listening.fileno(), "token": token})
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._stdin, self._stdout = self._process.stdin, self._process.stdout
            self._heard, self.is_there = b"", True
            with suppress(BrokenPipeError):
                self._stdin.write(line.encode() + b"\n")
                self._stdin.flush()
            os.set_blocking(self._stdin.fileno(), False)
            errors.say(f"the page: http://127.0.0.1:{listening.getsockname()[1]}/#token={token}")

    def tell(self, given: Mapping[str, object]) -> None:
        """Give the page a line, if it is there."""
        left = memoryview(json.dumps(given).encode() + b"\n")
        until = monotonic() + TELL_SECONDS
        try:
            while self.is_there and left:
                _, ready, _ = select.select([], [self._stdin], [], max(until - monotonic(), 0))
                if not ready:
                    self.is_there = False
                    return
                left = left[os.write(self._stdin.fileno(), left) :]
        except BrokenPipeError:
            self.is_there = False

    def fileno(self) -> int:
        """What the page answers on."""
        return self._stdout.fileno()

    def heard(self) -> Sequence[Mapping[str, Any]]:
        """Read what the page answers, for which this waits. Return the lines that are whole."""
        chunk = os.read(self.fileno(), 65536)
        self.is_there = self.is_there and bool(chunk)
        *lines, self._heard = (self._heard + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it. Where a person is at a terminal, wait for their Ctrl-C, so that they can look at how it came out."""
        stays = kind is None and not self._signals.has_come and self._process.poll() is None
        if stays and has_person():
            self._errors.say("the page stays until Ctrl-C")
            with suppress(KeyboardInterrupt), self._signals.let_through():
                self._process.wait()
        is_ended = self._process.poll() is not None
        with suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        with self._last_words as file:
            if is_ended:
                file.seek(0)
                lines = file.read().decode(errors="replace").strip().split("\n")
                self._errors.say(f"the page had ended: {one_line(lines[-1], 200)}")


def page_of_workspace(errors: ErrorStream, signals: Signals, directory: Path, *, can_write: bool) -> PageProcess:
    """Serve the page of the history of a directory, with its forks."""
    place = os.path.abspath(directory)
    request = {"directory": place, "receipts": None, "title": place, "can_write": can_write}
    return PageProcess(errors, signals, request)


def page_of_run(
    errors: ErrorStream,
    signals: Signals,
    directory: Path,
    receipts: ReceiptsFile | None,
    stack: ExitStack,
    *,
    has_history: bool,
    can_write: bool,
) -> tuple[PageProcess, Sequence[RunWatcher]]:
    """Serve the page of a run until ``stack`` ends. Return it, and what writes the receipts that it shows, unless they
    are in a file already."""
    if receipts is not None and receipts.path.is_file():
        path, descriptors, watchers = receipts.path, list[int](), list[RunWatcher]()
    else:
        # It has no name, so a kill leaves nothing.
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
        path, descriptors = Path(f"/proc/self/fd/{file.fileno()}"), [file.fileno()]
        watchers = [stack.enter_context(closing(ReceiptsFile(path)))]
    request = {
        "directory": os.path.abspath(directory) if has_history else None,
        "receipts": os.path.abspath(path),
        "title": os.path.abspath(directory),
        "can_write": can_write,
        "can_answer": True,
    }
    return stack.enter_context(PageProcess(errors, signals, request, descriptors)), watchers
