"""A workspace that is open in a process which needs it now and then only: it lets another opener have it meanwhile.

Such a process listens on a socket in the store. Who wants the workspace asks there, and keeps the connection open until
it has taken the lock.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

from ringfence.errors import WorkspaceLockedError

SOCKET = os.path.join("guard", "socket")
"""In a store, where its holder is asked."""
QUESTION = b'{"kind": "release"}\n'
PATIENCE_SECONDS = 30.0
_PEER = struct.Struct("3i")


@contextmanager
def released(path: str, store: str) -> Generator[bool]:
    """Have the holder of the workspace at ``path`` close it, and not open it again before the block is left.

    Yield whether there is a holder that is asked at all; one that died while it was asked has let go, too.

    Raises:
        WorkspaceLockedError: the holder needs it, and says for what.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        yield _connected(connection, store) and _is_released(connection, path)


def _connected(connection: socket.socket, store: str) -> bool:
    """Whether a process listens that is another one of the same user."""
    try:
        folder = os.open(os.path.join(store, os.path.dirname(SOCKET)), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(SOCKET)}")  # a path of any length
    except OSError:
        return False
    finally:
        os.close(folder)
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process != os.getpid() and user == os.getuid()


def _is_released(connection: socket.socket, path: str) -> bool:
    try:
        connection.sendall(QUESTION)
        with connection.makefile("rb") as file:
            answer: object = json.loads(file.readline() or b"{}")
    except TimeoutError:
        raise WorkspaceLockedError(path, "`ringfence guard`, which does not answer") from None
    except (OSError, ValueError):
        return True
    said = cast("dict[str, object]", answer) if isinstance(answer, dict) else {}
    if "holder" in said:
        raise WorkspaceLockedError(path, str(said["holder"]))
    return not said or said.get("released") is True
