"""Looks at a workspace around calls that somebody else runs. Nothing is open between them."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.errors import CallDeniedError
from ringfence.filesystem.paths import normalise
from ringfence.session.session import Session
from ringfence_workspace.workspace_calls import WorkspaceTransaction

if TYPE_CHECKING:
    from ringfence.participants import Change, Step
    from ringfence.receipts import Outcome, Receipt
    from ringfence.runtime.policy import Policy
    from ringfence_workspace.history.store import Store
    from ringfence_workspace.host import HostFilesystem

KEPT_SECONDS = 7 * 24 * 3600.0
"""How long `gc` keeps a look that nobody adopts."""
_PREFIX = "looks/"
"""Before the marks among all names that a store keeps."""
_FOLDER = "looks"
"""In a store, what is known of looks besides their commits."""
_MARK = re.compile(r"(\d{1,12})-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class AdoptedCall:
    """What became of a call that somebody else ran.

    It was kept, and is a step if it changed anything; or a policy denied it, and its changes were taken back.
    """

    outcome: Outcome
    """"committed", or "denied"."""
    changes: Sequence[Change]
    """What changed since the look and was not known yet, also if it was taken back."""
    receipt: Receipt
    step: Step | None = None
    aborted: int | None = None
    """The number under which `Workspace.aborted_step` has what was taken back."""
    conflicts: Sequence[str] = ()
    """Paths that were denied, and stay as they are."""
    notes: Sequence[str] = ()
    """What else the way back left, in words."""
    mark: str | None = None
    """The look that the next call begins with, if it was asked for."""

    @property
    def kept(self) -> bool:
        """Whether its changes were kept."""
        return self.outcome == "committed"

    @property
    def changed_paths(self) -> tuple[str, ...]:
        """The paths of what was kept. They are relative to the root, which is "" itself."""
        return tuple(change.path for change in self.changes) if self.kept else ()


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Whose call is adopted, for its receipt and step."""

    tool: str
    call_id: str | None = None
    session_id: str = ""
    agent: str = ""
    prompt_id: str = ""
    parent_call: str = ""
    approved_by: str = ""
    client: str = ""
    params: object = None
    title: str = ""
    began_at: datetime | None = field(default=None)

    def __post_init__(self) -> None:
        if not self.tool.strip():
            raise ValueError("tool is empty: give the name of the tool whose call it was, for the step and the receipt")

    def describe(self, receipt: Receipt) -> Receipt:
        """The receipt with whose call it was."""
        return replace(
            receipt,
            session_id=self.session_id or receipt.session_id,
            began_at=self.began_at,
            agent=self.agent,
            prompt_id=self.prompt_id,
            parent_call=self.parent_call,
            approved_by=self.approved_by,
            client=self.client,
        )


class Looks:
    """The looks of one opened workspace. Its callers hold the filesystem's lock, or a transaction of it."""

    def __init__(self, filesystem: HostFilesystem, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._filesystem = filesystem
        self._store = store
        self._clock = clock
        self._folder = Path(store.folder).parent / _FOLDER
        self._sessions: dict[str, Session] = {}
        """For the state of policies: one session for each that calls name."""
        self._taken: set[str] = set()
        """The marks that are being adopted."""

    def begin(self, paths: Collection[str] | None) -> str:
        """Look at the tree, and keep the newest commit as what a call begins with."""
        self.expire()
        named = self._places(paths)
        more = self._filesystem.look(named)
        mark = f"{int(self._clock())}-{os.urandom(8).hex()}"
        tip = self._store.tip
        assert tip is not None, "an opened workspace has a baseline"
        if more:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            (self._folder / mark).write_bytes(more)
        if named:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._paths_file(mark).write_text(json.dumps(named))
        self._store.keep(f"{_PREFIX}{mark}", tip)
        self._store.objects.log.flush()
        return mark

    def check(self, mark: str) -> None:
        """Raise ValueError for what is no look that can be adopted."""
        if f"{_PREFIX}{mark}" not in self._store.kept() or mark in self._taken:
            raise ValueError(f"{mark!r} is no look that can be adopted: it was adopted or dropped, or never made here")

    def drop(self, mark: str) -> None:
        """Forget a look."""
        self._taken.discard(mark)
        self._store.unkeep(f"{_PREFIX}{mark}")
        self._store.objects.log.flush()
        for file in (self._folder / mark, self._paths_file(mark)):
            file.unlink(missing_ok=True)

    def expire(self) -> None:
        """Forget the looks that nobody has adopted for a week."""
        for name in self._store.kept():
            found = _MARK.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
            if found is not None and int(found[1]) < self._clock() - KEPT_SECONDS:
                self.drop(found[0])

    def adopt(
        self,
        mark: str,
        origin: CallOrigin,
        *,
        paths: Collection[str] | None,
        policies: Sequence[Policy],
    ) -> AdoptedCall:
        """Make what differs from the history a step of somebody else's call, or take it back."""
        found = _MARK.fullmatch(mark)
        origin = replace(origin, began_at=None if found is None else datetime.fromtimestamp(int(found[1]), UTC))
        call = WorkspaceTransaction(
            self._filesystem,
            self._session(origin.session_id),
            origin.tool,
            policies=policies,
            opaque=False,
            call_id=origin.call_id,
            params=origin.params,
            title=origin.title,
            describe=origin.describe,
            on_denial=self._filesystem.deny_adopted,
        )
        more = b""
        with suppress(FileNotFoundError):
            more = (self._folder / mark).read_bytes()
        named = self._paths_of(mark) if paths is None else self._places(paths)
        is_taken = False
        try:
            with suppress(CallDeniedError), call.running():
                self.check(mark)  # with the lock: another thread may have adopted it
                self._filesystem.adopt(more, named)
                self._taken.add(mark)
                is_taken = True
        except BaseException:
            if is_taken:
                self._taken.discard(mark)
            raise
        receipt = call.receipt
        assert receipt is not None
        return AdoptedCall(
            receipt.outcome,
            receipt.changes,
            receipt,
            call.step,
            self._aborted(receipt.call_id) if receipt.outcome == "denied" else None,
            call.report.conflicts,
            call.report.notes,
        )

    def _paths_file(self, mark: str) -> Path:
        return self._folder / f"{mark}.paths"

    def _paths_of(self, mark: str) -> tuple[str, ...] | None:
        """The paths that a look was limited to."""
        if _MARK.fullmatch(mark) is None:
            return None
        try:
            return tuple(json.loads(self._paths_file(mark).read_bytes()))
        except FileNotFoundError:
            return None

    def _places(self, paths: Collection[str] | None) -> tuple[str, ...] | None:
        """The paths of a look, normalised, and where they lead along links."""
        if isinstance(paths, str):
            raise TypeError(f"{paths!r} is one path where a list of paths is expected: put it in brackets")
        if paths is None:
            return None
        found = {normalise(path) for path in paths}
        for path in [*found]:
            with suppress(OSError):  # it leads out of the root, where nothing is looked at
                found.add(self._filesystem.resolve(path))
        return tuple(sorted(found))

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            self._sessions[session_id] = Session()
        return self._sessions[session_id]

    def _aborted(self, call_id: str) -> int | None:
        found = self._store.aborted.commits()
        for number in sorted(found, reverse=True):
            if self._store.commit(found[number]).message.info.call_id == call_id:
                return number
        return None
