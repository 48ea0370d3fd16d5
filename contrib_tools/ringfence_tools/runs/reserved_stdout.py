"""Keep the tools of a user's own from writing on standard output, where the result of a command goes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO


@contextmanager
def reserve_stdout(sections: Sequence[object]) -> Generator[None]:
    """Redirect the standard output of the user's tools to standard error.

    At the end, standard output and the current directory are restored, since a tool may have changed both.
    """
    if not sections:
        yield
        return
    with ExitStack() as back:
        with suppress(OSError):  # a directory to which nobody can go back
            here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            back.callback(os.close, here)
            back.callback(_go_to, here)
        stream, kept = sys.stdout, os.dup(1)
        back.callback(os.close, kept)
        back.callback(os.dup2, kept, 1)
        send_stdout_to_stderr()
        back.callback(_flush_buffers, stream)
        back.callback(setattr, sys, "stdout", stream)
        yield


def send_stdout_to_stderr() -> None:
    """Make standard output, and that of the programs started from now on, standard error.

    Each text is written at once. What is left in a buffer would come out after standard output was restored.
    """
    stream = sys.stdout
    stream.flush()
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(
        io.FileIO(1, "w", closefd=False), stream.encoding, "backslashreplace", write_through=True
    )


def _flush_buffers(stream: TextIO) -> None:
    """Write what Python and C hold back of the output of tools that knew the stream, or the descriptor, itself."""
    with suppress(OSError, ValueError):  # standard error was closed, or the stream
        stream.flush()
    import ctypes  # a server answers its client first without it

    ctypes.CDLL(None).fflush(None)


def _go_to(directory: int) -> None:
    with suppress(OSError):
        os.fchdir(directory)
