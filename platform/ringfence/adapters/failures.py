"""Exceptions in words for a model: the one table."""

from __future__ import annotations

from ringfence.filesystem.paths import said_about, shown, words_shown

SAID: tuple[tuple[type[BaseException], str], ...] = (
    (FileNotFoundError, "there is no such file or directory"),
    (FileExistsError, "it exists already"),
    (IsADirectoryError, "that is a directory"),
    (NotADirectoryError, "that is not a directory"),
    (PermissionError, "that is not permitted"),
    (TimeoutError, "it took too long"),
    (RecursionError, "it went too deep"),
    (MemoryError, "there was not enough memory"),
)
"""For errors whose own text may be no more than a path; the most specific comes first."""


def said_of(error: BaseException) -> str:
    """What went wrong, for somebody who cannot see the code: never empty, never a bare path."""
    text = _text(error)
    for kind, words in SAID:
        if isinstance(error, kind):
            return words if not text else text if " " in text.strip() else f"{words}: {text}"
    if isinstance(error, (ValueError, RuntimeError, OSError)) and text:
        return text
    kind = type(error).__name__
    return text if text.startswith(f"{kind}: ") else f"{kind}: {text}" if text else kind


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, OSError) and error.strerror is not None:
            words = words_shown(str(error.strerror))
            return words if error.filename in (None, "") else said_about(shown(str(error.filename)), words)
        return words_shown(str(error))
    except Exception:  # a class of somebody's own may do anything there
        return ""
