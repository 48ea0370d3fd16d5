"""Exceptions in words for a model."""

from __future__ import annotations

import errno
import os
import traceback
from typing import cast

from ringfence.escapes import escape_path, escape_text, path_message

MESSAGES: tuple[tuple[type[BaseException], str], ...] = (
    (FileNotFoundError, "there is no such file or directory"),
    (FileExistsError, "it exists already"),
    (IsADirectoryError, "that is a directory"),
    (NotADirectoryError, "that is not a directory"),
    (PermissionError, "that is not permitted"),
    (TimeoutError, "it took too long"),
    (RecursionError, "it went too deep"),
    (MemoryError, "there was not enough memory"),
)
"""Texts for errors whose message may be only a path. The most specific error comes first."""


_PROCESSES = "raise the limit of processes and threads (`ulimit -u`, in a container that of its pids)"
LIMITS = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit of open files (`fs.file-max`)",
    errno.EAGAIN: f"if no process could be started, {_PROCESSES}",
}
"""The remedy for each error that reports a reached limit of the system."""


def describe_error(error: BaseException) -> str:
    """Describe an error for a reader who cannot see the code. The text is never empty and never only a path."""
    error = innermost(error)
    text, kind = _text(error), type(error).__name__
    words = next((words for known, words in MESSAGES if isinstance(error, known)), None)
    if words is not None:
        text = text if " " in text.strip() else f"{words}: {text}" if text else words
    elif not text:
        text = kind
    elif not isinstance(error, (ValueError, RuntimeError, OSError)) and not text.startswith(f"{kind}: "):
        text = f"{kind}: {text}"
    return with_limit(text, error)


def place_in(error: BaseException, file: str) -> str:
    """Return the innermost line of a file at which an error passed, in words; "" if it passed none of its lines."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"{os.path.basename(file)}, line {lines[-1]}" if lines else ""


def innermost(error: BaseException) -> BaseException:
    """Unwrap an error from exception groups that contain only this error, as a task group raises them."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return innermost(group.exceptions[0]) if len(group.exceptions) == 1 else group


def with_limit(text: str, error: BaseException) -> str:
    """Return the text. If the error is a reached limit of the system, the text also says how to raise the limit."""
    limit = LIMITS.get(error.errno or 0) if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        limit = _PROCESSES
    return f"{text}: {limit}" if limit else text


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, OSError) and error.strerror is not None:
            words = escape_text(str(error.strerror))
            return words if error.filename in (None, "") else path_message(escape_path(str(error.filename)), words)
        return escape_text(str(error))
    except Exception:  # a foreign class may do anything there
        return ""
