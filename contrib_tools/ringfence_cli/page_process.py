"""``--view``: the page of what a command does, served by a process of its own while the command works."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

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
                stdout=subprocess.DEVNULL,
                stderr=self._last_words,
                pass_fds=[listening.fileno(), *descriptors],
                start_new_session=True,  # Ctrl-C is for the command
            )
            # The token is not in its arguments, which everybody on the machine can read.
            line = json.dumps({**request, "listening": listening.fileno(), "token": token})
            assert self._process.stdin is not None
            self._stdin = self._process.stdin
            with suppress(BrokenPipeError):
                self._stdin.write(line.encode() + b"\n")
                self._stdin.flush()
            errors.say(f"the page: http://127.0.0.1:{listening.getsockname()[1]}/#token={token}")

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
) -> Sequence[RunWatcher]:
    """Serve the page of a run until ``stack`` ends. Return what writes the receipts that it shows, unless they are
    in a file already."""
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
    }
    stack.enter_context(PageProcess(errors, signals, request, descriptors))
    return watchers
