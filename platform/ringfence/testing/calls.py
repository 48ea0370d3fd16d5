"""A tool call without a tool. A test runs the steps of a participant's transaction itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from ringfence.participants import (
    CallInfo,
    CallState,
    Change,
    Mark,
    RollbackReport,
    Step,
    Transactional,
    participant_of,
)
from ringfence.receipts import Receipt


class HeldCall(CallInfo):
    """A running call with at most one participant, which joins at its first use."""

    __slots__ = ("_mark", "_participant")

    def __init__(self, call_id: str = "call-1", parent: CallInfo | None = None, *, opaque: bool = False) -> None:
        super().__init__(call_id, "a test", parent, opaque=opaque)
        self._participant: Transactional | None = None
        self._mark: Mark = None

    def join(self, participant: Transactional) -> None:
        assert self._participant is None, f"{self!r} holds {self._participant!r} already"
        participant.lock.acquire(self)
        self._participant = participant
        self._mark = participant.begin(self)

    @property
    def participant(self) -> Transactional:
        assert self._participant is not None, f"{self!r} has met nothing that takes part"
        return self._participant

    def changed(self) -> Sequence[Change]:
        """The participant's changes since it joined the call."""
        return self.participant.changes(self._mark)

    def commit(self) -> Step | None:
        self.state = CallState.SEALED
        changes = self.changed()
        self.changes = {self.participant.lock: changes}
        receipt = Receipt(
            receipt_id=f"receipt of {self.call_id}",
            call_id=self.call_id,
            tool=self.tool,
            params={},
            outcome="committed",
            message="done",
            started_at=datetime(2026, 1, 1, tzinfo=UTC),
            duration_seconds=0.0,
            session_id="a session",
            prompt_name="a prompt",
            changes=changes,
        )
        return self.participant.commit(self._mark, receipt)

    def rollback(self) -> RollbackReport:
        self.state = CallState.SEALED
        return self.participant.rollback(self._mark)

    def release(self) -> None:
        self.state = CallState.SEALED
        if self._participant is not None:
            self._participant.lock.release(self, self.parent)


@contextmanager
def held_call(
    resource: object, *, call_id: str = "call-1", parent: CallInfo | None = None, opaque: bool = False
) -> Generator[HeldCall]:
    """A call that holds `resource` and has begun. The test commits it or rolls it back; it is released here."""
    participant = participant_of(resource)
    assert participant is not None, f"{resource!r} takes part in no transaction"
    call = HeldCall(call_id, parent, opaque=opaque)
    try:
        call.join(participant)
        yield call
    finally:
        call.release()
