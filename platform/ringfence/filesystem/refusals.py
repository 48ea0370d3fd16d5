"""What every filesystem refuses, wherever its files are, and in the same words."""

from __future__ import annotations

from typing import get_args

from ringfence.filesystem.paths import normalise
from ringfence.filesystem.protocol import WriteMode

_WRITE_MODES = frozenset(get_args(WriteMode))


def check_write_mode(mode: str) -> None:
    """Raises ValueError for what is no `WriteMode`."""
    if mode not in _WRITE_MODES:
        raise ValueError(f"mode is one of {', '.join(sorted(_WRITE_MODES))}, not {mode!r}")


def check_permission_bits(mode: int) -> None:
    """Raises ValueError for what are no permission bits, TypeError for what is no number of them."""
    if not isinstance(mode, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all type-checked
        raise TypeError(f"mode has the permission bits, such as 0o644, it cannot be {mode!r}")
    if not 0 <= mode <= 0o7777:
        raise ValueError(f"mode has the permission bits, from 0 to 0o7777, it cannot be {mode:#o}")


def check_bytes_asked(offset: int, limit: int | None) -> None:
    """Raises ValueError for what are no numbers of bytes."""
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError(f"offset and limit count bytes, they cannot be negative: {offset}, {limit}")


def plain_bytes(content: bytes) -> bytes:
    """The bytes of anything that has some. Raises TypeError where it has none."""
    try:
        return bytes(memoryview(content))
    except TypeError:
        raise TypeError(f"write_bytes takes bytes, not {content!r:.80}; write takes a text") from None


def below_root(path: str) -> str:
    """The normal form of a path. Raises ValueError where it is the root's."""
    normal = normalise(path)
    if not normal:
        raise ValueError(f"{path!r} is the root, which is a directory; name a file below it")
    return normal
