"""Tool calls that did not come to their end: those that have changed a workspace and are not committed, and those whose
process was killed. Looking for them changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from ringfence_workspace.tree.places import StateDirectoryError, replacing, state_directory, store_of


@dataclass(frozen=True, slots=True)
class UnfinishedCall:
    """A tool call that has begun to change the workspace at ``root``, and is not committed.

    ``is_running`` is False if its process was killed. The next opening of the workspace then rolls it back. ``str()``
    describes the call to a person.
    """

    root: str
    call_id: str
    tool: str
    is_running: bool

    def __str__(self) -> str:
        call = f"the tool call {self.call_id} ({self.tool})"
        if self.is_running:
            return f"{call} of another process is at work there"
        recover = f"`ringfence recover {shlex.quote(self.root)}` rolls it back"
        return f"{call} was killed, and what it had done is still there: {recover}"


def unfinished_calls(path: str | os.PathLike[str]) -> Sequence[UnfinishedCall]:
    """Return the unfinished calls in a directory and in those above it, the nearest first."""
    found = (unfinished_call(above, store_of(above)) for above in with_those_above(path))
    return [call for call in found if call is not None]


def unfinished_call(root: str, store: str) -> UnfinishedCall | None:
    """Return the unfinished call of the workspace with the real path `root`, if there is one."""
    with suppress(OSError, ValueError), open(os.path.join(store, "holder"), "rb") as holder:
        is_running = _is_locked(holder)
        call = _begun(root, store)
        if call is not None and _is_locked(holder) == is_running:  # nobody has come or gone meanwhile
            return UnfinishedCall(root, *call, is_running)
    return None


def _is_locked(holder: IO[bytes]) -> bool:
    """Whether an opener has the workspace.

    The lock is tried for no longer than an opener has patience with. It is released by name: a child that was forked
    meanwhile has it open, too.
    """
    try:
        fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(holder, fcntl.LOCK_UN)
    return False


def _begun(root: str, store: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that has begun to change the tree, and is not committed."""
    # Imported here: most directories that somebody asks about are no workspaces.
    from ringfence_workspace.history.log import Log
    from ringfence_workspace.history.store import FOLDER
    from ringfence_workspace.transaction.call_log import Replay

    with suppress(OSError, ValueError), closing(Log(Path(store, FOLDER), writable=False)) as log:
        replay = Replay.of(log.records)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return replay.call if replay.is_of(descriptor) and not replay.committed else None
        finally:
            os.close(descriptor)
    return None


def with_those_above(path: str | os.PathLike[str]) -> Iterator[str]:
    """The real path of a directory, and those of the directories that it is in; none where no call can have begun."""
    try:
        state_directory()
    except StateDirectoryError:
        return
    above, below = os.fspath(os.path.realpath(path)), ""
    while above != below:
        yield above
        above, below = os.path.dirname(above), above


_NAME = "killed"
_MOST = 50


@dataclass(frozen=True, slots=True)
class KilledCall:
    """A tool call that was killed and that recovery ended. ``begun`` distinguishes it from others of the same id."""

    begun: str
    call_id: str
    tool: str
    committed: bool
    commit: str | None
    """Of the step that it became, if it changed anything and was committed."""
    conflicts: Sequence[str]
    notes: Sequence[str]
    at: str
    """When it began to change files; where nobody knows, when it was recovered."""

    @property
    def began_at(self) -> datetime:
        return datetime.fromisoformat(self.at)


def note_killed(store: Path, noted: KilledCall) -> None:
    """For who has the store's lock; the same call may be noted again. OSError."""
    others = [one for one in killed_calls(store) if (one.begun, one.call_id) != (noted.begun, noted.call_id)]
    _write(store, [*others, noted][-_MOST:])


def killed_calls(store: Path) -> list[KilledCall]:
    """The calls, oldest first."""
    try:
        return [KilledCall(**one) for one in json.loads((store / _NAME).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []  # of a later version, maybe: it is about receipts alone


def forget_killed(store: Path) -> None:
    """Their receipts are written. OSError."""
    (store / _NAME).unlink(missing_ok=True)


def _write(store: Path, calls: Sequence[KilledCall]) -> None:
    with replacing(store / _NAME) as file:
        file.write(json.dumps([asdict(one) for one in calls]).encode())
