"""The record of a run on disk, beside the history of the workspace, so that one that was interrupted can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringfence import serde
from ringfence.adapters.core import Conversation, Message, MessageAdded
from ringfence.filesystem.paths import display_path
from ringfence.participants import Step
from ringfence.runtime.session import Session
from ringfence.tagged import decode, encode, types_within
from ringfence_cli.disk import DiskWorkspace
from ringfence_cli.kept_state import KEPT, StateReader, StateWriter
from ringfence_cli.noted_tasks import note_task
from ringfence_cli.outputs import OutputFile
from ringfence_cli.printable import one_line
from ringfence_cli.signals import Signals
from ringfence_cli.terms import RunLimits
from ringfence_cli.watch import RunStats
from ringfence_sandbox.calls.recovery import Recovered
from ringfence_sandbox.disk.places import store_of

FILE_NAME = "run.jsonl"
KEPT_NAME = "run-before.jsonl"
"""The record of a run that was interrupted, while another one has the first name."""
PROMPT_NAME = "ringfence:run"
MAX_PATHS = 20
"""That a model is told of in one sentence."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that has not come to its end."""

    task: str
    session_id: str
    """Of the session in which it was interrupted; its steps bear it."""
    sessions: tuple[str, ...]
    """Of every part of the run, that one included."""
    start: str
    """The commit of the history at which it began; empty where the record does not say."""
    refused: Mapping[str, str]
    """The files of the workspace that its parts have written for the user, and the reasons for the agent."""
    messages: tuple[Message, ...]
    state: tuple[object, ...]
    """The items of the slices that are kept."""
    left: RunLimits
    """What the next part may use, if it is not given limits of its own, and the policies that hold for it."""
    spent: RunStats
    """What all parts came to, as far as was written down."""
    killed: bool
    """Whether the last part could not write down what it came to at its end."""


class RunRecord:
    """Writes a line for every message of a run, with the state after it where that has changed.

    A line is one write, so that whoever reads it finds a call with its answer and its state, or none of it.
    """

    def __init__(
        self, directory: Path, task: str, before: Interrupted | None = None, terms: RunLimits | None = None
    ) -> None:
        """``before`` is the run to go on with. The workspace has to be open: its lock guards the record too."""
        self.path = record_of(directory)
        self.kept = self.path.with_name(KEPT_NAME)
        self.task = task
        self.terms = terms or RunLimits()
        self.tally = before.spent if before is not None else RunStats()
        """What the run comes to; it counts on from the parts before."""
        self.tally.parts += before is not None
        self._spent_before = self.tally.to_json()
        self._before = before
        self._file: OutputFile | None = None
        self._unwritten = b""
        """Lines that there was no space for: the next one is only written after them."""

    @property
    def earlier_sessions(self) -> Sequence[str]:
        """Those of the parts before this one."""
        return self._before.sessions if self._before is not None else ()

    def attend(self, session: Session, signals: Signals, workspace: DiskWorkspace) -> None:
        """Bring a new session to where the interrupted one stood, if there is one, and listen to it."""
        record: dict[str, object] = {"task": self.task, "session": str(session.session_id)}
        record["terms"] = serde.dump(self.terms)
        if self._before is not None:
            for kind in KEPT:
                session[kind].seed([item for item in self._before.state if type(item) is kind])
            workspace.refused = {**self._before.refused, **workspace.refused}
            workspace.go_on_from(self._before.start, self._before.sessions)
            answered = _answers_of_steps(self._before, workspace.history.steps())
            self._count_killed(len(answered), workspace.history.recovered)
            messages = (*self._before.messages, *answered)
            changed = workspace.changed_by_others(self._before.start, self._before.sessions) if messages else ()
            session[Conversation].seed(Conversation(PROMPT_NAME, messages, _news(changed)))
            record["messages"] = [encode(message) for message in answered]
            lines = self.path.read_bytes()
            os.truncate(self.path, lines.rfind(b"\n") + 1)  # a line that is torn would spoil the next
        else:
            record["start"] = workspace.start
            if self._has_got_anywhere():
                os.replace(self.path, self.kept)
            else:
                self.path.unlink(missing_ok=True)
        record |= {"spent": self._spent_before, "refused": dict(workspace.refused)}
        self._file = OutputFile(self.path, append=True)
        self._file.write(_line(record))
        note_task(workspace.directory, str(session.session_id), self.task)
        state = StateWriter(session)

        def said(event: MessageAdded) -> None:
            with signals.held():
                self._write({"messages": [_encoded(event.message)], "spent": self.tally.to_json(), **state.news()})

        session.dispatcher.subscribe(MessageAdded, said)

    def _count_killed(self, committed: int, recovered: Recovered | None) -> None:
        """The calls of which the process was killed before it could count them."""
        assert self._before is not None
        if not self._before.killed:
            return
        self.tally.outcomes["committed"] += committed
        pending = [call.call_id for call in Conversation("", self._before.messages).unanswered()]
        if recovered is not None and recovered.outcome == "rolled back" and recovered.call_id in pending:
            self.tally.outcomes["rolled_back"] += 1
        self._spent_before["outcomes"] = dict(self.tally.outcomes)

    def _write(self, record: dict[str, object]) -> None:
        assert self._file is not None
        self._unwritten += _line(record)
        self._file.write(self._unwritten)
        self._unwritten = b""

    def interrupted_before(self) -> str | None:
        """What to say of an interrupted run that this one does not go on with, but keeps for another time."""
        newer, older = self._has_got_anywhere(), self.kept.exists()
        if self._before is not None or not (newer or older):
            return None
        task = _task_of(self.path if newer else self.kept)
        said = (
            f"a run was interrupted here before{task}: its record is kept, and --resume goes on with it after this "
            f"one; to forget it, delete {self.kept}"
        )
        before = f"; the one that was interrupted before that{_task_of(self.kept)} is forgotten"
        return said + before if newer and older else said

    def left(self) -> RunLimits:
        """Of what this part may use."""
        return _left(self.terms, RunStats.of_json(self._spent_before), self.tally)

    def leave(self) -> None:
        """The run has come to an end that it can go on from."""
        if self._file is not None:
            with suppress(OSError):  # what was spent up to the last message is there
                self._write({"spent": self.tally.to_json()})

    def finish(self) -> None:
        """The run has come to its end: what there is to go on with is the one before, if that was interrupted."""
        self.path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            os.replace(self.kept, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _has_got_anywhere(self) -> bool:
        """Whether the record is of a run in which the model has said something, or cannot be read at all."""
        try:
            found = interrupted_run(self.path)
        except ValueError:
            return True
        return found is not None and bool(found.messages)


def record_of(directory: Path) -> Path:
    return Path(store_of(os.path.realpath(directory)), FILE_NAME)


def run_to_resume(directory: Path) -> Interrupted | None:
    """The run that was interrupted in a directory. The workspace has to be open. Raises what `interrupted_run` does."""
    path = record_of(directory)
    found, kept = interrupted_run(path), path.with_name(KEPT_NAME)
    if found is None and kept.exists():  # the next one was killed before it had written a line
        os.replace(kept, path)
        found = interrupted_run(path)
    return found


def is_interrupted(directory: Path, task: str | None = None) -> bool:
    """Whether there is a run to go on with, of this task if one is given; a record that cannot be read is none."""
    path = record_of(directory)
    try:
        found = interrupted_run(path) or interrupted_run(path.with_name(KEPT_NAME))
    except (OSError, ValueError):
        return False
    return found is not None and task in (None, found.task)


def interrupted_run(record_file: Path) -> Interrupted | None:
    """The run that was interrupted by its record, if one was. A torn last line is as if it had not been written.

    Raises:
        ValueError: the record is of another version of this program, or damaged.
    """
    types = types_within((Message, *KEPT))
    task, start, sessions = "", "", list[str]()
    messages, state, refused = list[Message](), StateReader(types), dict[str, str]()
    terms, began, spent, killed = RunLimits(), RunStats(), RunStats(), True
    try:
        *lines, _torn = record_file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    try:
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            task, start = record.get("task", task), record.get("start", start)
            spent, killed = RunStats.of_json(record["spent"]), "messages" in record or "session" in record
            if "session" in record:
                sessions.append(record["session"])
                terms, began = RunLimits.of_record(record["terms"]), spent
                refused = dict(record["refused"])
            messages += [decode(message, types) for message in record.get("messages", ())]
            state.take(record)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the record of the interrupted run cannot be read: {error}") from error
    if not lines:
        return None
    session_id = sessions[-1] if sessions else ""
    left = _left(terms, began, spent)
    told, kept = tuple(messages), state.items()
    return Interrupted(task, session_id, tuple(sessions), start, refused, told, kept, left, spent, killed)


def _task_of(record_file: Path) -> str:
    """The task of the run that was interrupted by its record, in brackets; empty where it cannot be read."""
    with suppress(ValueError):
        if (found := interrupted_run(record_file)) is not None:
            return f" ({one_line(found.task, 80)})"
    return ""


def _left(terms: RunLimits, began: RunStats, now: RunStats) -> RunLimits:
    tokens = (now.usage.total_tokens or 0) - (began.usage.total_tokens or 0)
    return terms.less(now.seconds - began.seconds, tokens, now.turns - began.turns)


def _answers_of_steps(before: Interrupted, steps: Iterable[Step]) -> list[Message]:
    """What the model is told of calls that were committed when the run was killed, before it could be."""
    made = {step.call_id: step for step in steps if step.session_id == before.session_id}
    pending = Conversation("", before.messages).unanswered()
    return [
        Message("tool", _committed(made[call.call_id]), call_id=call.call_id)
        for call in pending
        if call.call_id in made
    ]


def _committed(step: Step) -> str:
    return (
        f"This call was committed as step {step.number}, which changed {_some(step.paths)}. An interruption lost its "
        "answer: read what is there now before you change it again."
    )


def _news(changed: Sequence[str]) -> str:
    """What the model is told of what others have changed while it was interrupted."""
    if not changed:
        return ""
    return (
        f"You were interrupted. Meanwhile, others have changed or removed {_some(changed)}: what you did there may be "
        "gone, and what you know of it may be out of date. Look again before you go on."
    )


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_PATHS:,} more" if len(paths) > MAX_PATHS else ""
    return ", ".join(display_path(path) for path in paths[:MAX_PATHS]) + more


def _encoded(message: Message) -> object:
    try:
        return encode(message)
    except (TypeError, ValueError):  # what a provider wants to see again may be an object of its own
        assert message.turn is not None
        return encode(replace(message, turn=replace(message.turn, raw=None, parsed=None)))


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"
