"""The removal of a directory with all that is in it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress


def remove_tree(place: str | os.PathLike[str]) -> None:
    """Remove a directory, also what is in directories that may not be written, such as Go's cache of modules. Nothing
    happens where there is none. OSError: something of it stays."""

    def opened_up(function: Callable[..., object], path: str, error: object) -> None:
        """A directory that may not be written is opened up, and tried once more."""
        with suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
                shutil.rmtree(path)
            else:
                os.unlink(path)

    if not os.path.lexists(place):
        return
    shutil.rmtree(place, onerror=opened_up)  # pyright: ignore[reportDeprecated]  # Python 3.11 has no other
    if os.path.lexists(place):
        raise OSError(errno.ENOTEMPTY, "it could not be removed", os.fspath(place))
