"""The record of a run, from which ``--resume`` continues. It is beside the history of the workspace."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringfence import serde
from ringfence.adapters.model import Conversation, Message, MessageAdded
from ringfence.escapes import display_path
from ringfence.participants import Step
from ringfence.receipts import Outcome
from ringfence.runtime.policy import PathHashes, PolicyState
from ringfence.session.session import Session
from ringfence.session.visibility import VisibilityOverrides
from ringfence.tagged import decode, encode, types_within
from ringfence_cli.history import opened
from ringfence_cli.options import Invocation
from ringfence_sandbox import ShellEnvironment, store_directory
from ringfence_tools.planning import Plan
from ringfence_tools.printable import one_line
from ringfence_tools.runs.agent_run import PROMPT_NAME, RunStats
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, OutputFile
from ringfence_tools.runs.person_notes import PersonNotes, describe_notes
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_workspace import DiskWorkspace
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.task_log import record_task, record_usage

RECORD_NAME = "run.jsonl"
KEPT_NAME = "run-before.jsonl"
"""The record of an interrupted run while another run uses the first name."""
MAX_PATHS = 20
"""The most paths in one sentence for a model."""
KEPT: Sequence[type[Any]] = (Plan, PolicyState, ShellEnvironment, VisibilityOverrides)
"""The slices that a resumed run gets back. Results of tools are in the conversation."""


@dataclass(slots=True)
class Interrupted:
    """An interrupted run."""

    task: str = ""
    sessions: list[str] = field(default_factory=list[str])
    """The session ids of all parts of the run, the last one at the end."""
    start: str = ""
    """The commit of the history at which the run began. Empty if it is not known."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """The files that the run writes for its user, each with the reason for the agent."""
    messages: list[Message] = field(default_factory=list[Message])
    state: Sequence[object] = ()
    """The items of the slices in `KEPT`."""
    remaining: RunLimits = RunLimits()
    """The terms of the next part, unless the resume is given others."""
    spent: RunStats = field(default_factory=RunStats)
    """The recorded counts of all parts."""
    killed: bool = False
    """Whether the last part was killed before it recorded its counts."""

    @property
    def pending(self) -> Sequence[str]:
        """The ids of the calls without an answer."""
        return [call.call_id for call in Conversation("", tuple(self.messages)).unanswered()]


class RunRecord:
    """Writes a line for every message of a run. The line has the state after the message if it changed.

    Each line is one write. So a reader finds a call with answer and state, or none of them.
    """

    def __init__(
        self,
        workspace: DiskWorkspace,
        task: str,
        before: Interrupted | None = None,
        limits: RunLimits = RunLimits(),  # noqa: B008  # frozen
    ) -> None:
        """``before`` is the run to continue. The lock of the open workspace also guards the record."""
        self.path = record_of(workspace.directory)
        self.kept = self.path.with_name(KEPT_NAME)
        self.task = task
        self.limits = limits
        self.stats = before.spent if before is not None else RunStats()
        """The counts of the run, with those of earlier parts."""
        self.stats.parts += before is not None
        self._spent_before = self.stats.to_json()
        self._workspace = workspace
        self._before = before
        self._file: OutputFile | None = None
        self._session_id = ""
        self._unwritten = b""
        """Lines that the full disk had no space for. They are written before the next line."""

    @property
    def earlier_sessions(self) -> Sequence[str]:
        """The session ids of earlier parts."""
        return self._before.sessions if self._before is not None else ()

    def start(self, session: Session, signals: Signals) -> None:
        """Restore the interrupted session's state in a new session, if there is one, and subscribe to it."""
        workspace, before = self._workspace, self._before
        notes, told = PersonNotes(workspace.directory), list[int]()
        record: dict[str, object] = {"task": self.task, "session": str(session.session_id)}
        if before is None:
            record["start"] = workspace.start
            if _has_messages(self.path):
                os.replace(self.path, self.kept)
            else:
                self.path.unlink(missing_ok=True)
        else:
            for kind in KEPT:
                session[kind].seed([item for item in before.state if type(item) is kind])
            workspace.refused = {**before.refused, **workspace.refused}
            workspace.go_on_from(before.start, before.sessions)
            answered = _answer_committed_calls(before, workspace.history.steps())
            if before.killed:
                self._count_killed(before, len(answered))
            messages = (*before.messages, *answered)
            changed = workspace.changed_by_others(before.start, before.sessions) if messages else ()
            waiting = notes.waiting() if messages else ()
            told = [number for number, _ in waiting]
            news = (_describe_external_changes(changed), describe_notes([note for _, note in waiting]))
            session[Conversation].seed(Conversation(PROMPT_NAME, messages, "\n\n".join(filter(None, news))))
            record["messages"] = [encode(message) for message in answered]
            if interrupted_run(self.path) is None:
                os.replace(self.kept, self.path)
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)  # a torn line would spoil the next
        record |= {
            "terms": serde.dump(self.limits),
            "spent": self._spent_before,
            "refused": dict(workspace.refused),
        }
        self._file = OutputFile(self.path, append=True)
        self._file.write(_line(record))
        self._session_id = str(session.session_id)
        record_task(workspace.directory, str(session.session_id), self.task, self.earlier_sessions)
        state = StateWriter(session)

        def add_message(event: MessageAdded) -> None:
            with signals.held():
                self._write({"messages": [_encode(event.message)], "spent": self.stats.to_json(), **state.changes()})
                if event.message.role == "user":  # now they are in the record, whatever becomes of the run
                    notes.end(told, "told to a resumed run")
                    told.clear()

        session.dispatcher.subscribe(MessageAdded, add_message)

    def _count_killed(self, before: Interrupted, committed: int) -> None:
        """Count the calls whose process was killed before it could count them."""
        recovered = self._workspace.history.recovered
        rolled_back = (
            recovered is not None and recovered.outcome == "rolled back" and recovered.call_id in before.pending
        )
        self.stats.outcomes += Counter[Outcome]({"committed": committed, "rolled_back": int(rolled_back)})
        self._spent_before["outcomes"] = dict(self.stats.outcomes)

    def _write(self, record: dict[str, object]) -> None:
        assert self._file is not None
        self._unwritten += _line(record)
        self._file.write(self._unwritten)
        self._unwritten = b""

    def interrupted_before(self) -> str | None:
        """Return a message about an interrupted run whose record this run keeps, or None."""
        newer, older = _has_messages(self.path), self.kept.exists()
        if self._before is not None or not (newer or older):
            return None
        task = _task_of(self.path if newer else self.kept)
        said = (
            f"a run was interrupted here before{task}, and its record is kept: when this run has ended, --resume "
            f"goes on with that one, and --forget drops it"
        )
        if newer and older:
            said += f"; the one that was interrupted before that{_task_of(self.kept)} is forgotten"
        return said

    def remaining(self) -> RunLimits:
        """Return the limits that are left to the next part."""
        return _remaining(self.limits, RunStats.of_json(self._spent_before), self.stats)

    def record_usage(self) -> None:
        """Record what the run has used: who looks at the history sees it, also when this record is gone."""
        if self._session_id:
            with suppress(OSError):
                record_usage(self._workspace.directory, self._session_id, self.stats.turns, self.stats.usage)

    def interrupt(self) -> None:
        """Record the end of a run that can be resumed."""
        if self._file is not None:
            with suppress(OSError):  # what was spent up to the last message is there
                self._write({"spent": self.stats.to_json()})

    def finish(self) -> None:
        """Delete the record of a completed run. The record of an interrupted run before it comes back."""
        self.path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            os.replace(self.kept, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def record_of(directory: Path) -> Path:
    return store_directory(directory) / RECORD_NAME


def run_to_resume(directory: Path) -> Interrupted | None:
    """Return the interrupted run of a directory, or None. Raises ValueError as `interrupted_run` does."""
    path = record_of(directory)
    # The first is missing where the next run was killed before it had written a line.
    return interrupted_run(path) or interrupted_run(path.with_name(KEPT_NAME))


def forget_run(directory: Path, invocation: Invocation) -> int:
    """Delete the record of the interrupted run of a directory. Its steps stay in the history.

    Raises:
        NotStartedError: there is none.
        BusyError: another process runs there now.
    """
    path = record_of(directory)
    record = next((one for one in (path, path.with_name(KEPT_NAME)) if one.exists()), None)
    if record is None:
        raise NotStartedError(f"there is no interrupted run in {directory}")
    with opened(directory, invocation, changes=True):  # its lock also guards the record
        task = _task_of(record)
        record.unlink(missing_ok=True)
    if invocation.wants_json:
        invocation.put_json({"forgotten": task})
    ErrorStream().say(f"forgot the interrupted run{task}; its steps stay in the history")
    return 0


def is_interrupted(directory: Path, task: str | None = None) -> bool:
    """Whether a run can be resumed, with this task if one is given. False if the record is unreadable."""
    try:
        found = run_to_resume(directory)
    except (OSError, ValueError):
        return False
    return found is not None and task in (None, found.task)


def interrupted_run(record_file: Path) -> Interrupted | None:
    """Read a record and return its run, or None. A torn last line is ignored.

    Raises:
        ValueError: the record is of another version of this program, or damaged.
    """
    try:
        *lines, _torn = record_file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    types = types_within((Message, *KEPT))
    run, state = Interrupted(), StateReader(types)
    limits, began = RunLimits(), RunStats()
    try:
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            run.task, run.start = record.get("task", run.task), record.get("start", run.start)
            run.spent = RunStats.of_json(record["spent"])
            run.killed = "messages" in record or "session" in record
            if "session" in record:
                run.sessions.append(record["session"])
                limits, began = serde.parse(RunLimits, record["terms"]), run.spent
                run.refused = dict(record["refused"])
            run.messages += [decode(message, types) for message in record.get("messages", ())]
            state.take(record)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the record of the interrupted run cannot be read: {error}") from error
    run.state, run.remaining = state.items(), _remaining(limits, began, run.spent)
    return run if lines else None


def _has_messages(record_file: Path) -> bool:
    """Whether the record is of a run in which the model has said something, or cannot be read at all."""
    try:
        found = interrupted_run(record_file)
    except ValueError:
        return True
    return found is not None and bool(found.messages)


def _task_of(record_file: Path) -> str:
    """Return the task of a record in brackets. Empty if it cannot be read."""
    with suppress(ValueError):
        if (found := interrupted_run(record_file)) is not None:
            return f" ({one_line(found.task, 80)})"
    return ""


def _remaining(limits: RunLimits, began: RunStats, now: RunStats) -> RunLimits:
    tokens = (now.usage.total_tokens or 0) - (began.usage.total_tokens or 0)
    cost_usd = (now.usage.cost_usd or 0) - (began.usage.cost_usd or 0)
    return limits.less(now.seconds - began.seconds, tokens, cost_usd, now.turns - began.turns)


def _answer_committed_calls(before: Interrupted, steps: Iterable[Step]) -> list[Message]:
    """Return answers for the calls that were committed just before the run was killed."""
    made = {step.call_id: step for step in steps if before.sessions and step.session_id == before.sessions[-1]}
    return [
        Message(
            "tool",
            f"This call was committed as step {made[call_id].number}, which changed {_list_paths(made[call_id].paths)}."
            " An interruption lost its answer: read what is there now before you change it again.",
            call_id=call_id,
        )
        for call_id in before.pending
        if call_id in made
    ]


def _describe_external_changes(changed: Sequence[str]) -> str:
    if not changed:
        return ""
    return (
        f"You were interrupted. Meanwhile, others have changed or removed {_list_paths(changed)}: what you did "
        "there may be gone, and what you know of it may be out of date. Look again before you go on."
    )


def _list_paths(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_PATHS:,} more" if len(paths) > MAX_PATHS else ""
    return ", ".join(display_path(path) for path in paths[:MAX_PATHS]) + more


def _encode(message: Message) -> object:
    try:
        return encode(message)
    except (TypeError, ValueError):  # what a provider wants to see again may be an object of its own
        assert message.turn is not None
        return encode(replace(message, turn=replace(message.turn, raw=None, parsed=None)))


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


Known = dict[tuple[str, str], PathHashes]
"""The hashes that each policy knows, by name and scope of the policy."""


class StateWriter:
    """Finds the changes of the slices in `KEPT` since the last line.

    A policy knows many hashes, and every read adds one. Hashes are recorded one by one, the other items whole.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._items: list[object]
        self._items, self._known = _kept_state(session)

    def changes(self) -> dict[str, object]:
        """Return the changed state for a line of the record. Empty if nothing changed."""
        (items, known), before, found = _kept_state(self._session), self._known, dict[str, object]()
        if items != self._items:
            found["state"] = [encode(item) for item in items]
        learned: list[object] = [[*key, None] for key in before if key not in known]
        for key, hashes in known.items():
            if hashes is not before.get(key):
                learned.append([*key, dict(hashes.since(before.get(key, PathHashes())))])
        if learned:
            found["learned"] = learned
        self._items, self._known = items, known
        return found


class StateReader:
    """Rebuilds the state from the lines of a record."""

    def __init__(self, types: Mapping[str, type[Any]]) -> None:
        self._types = types
        self._items: Sequence[object] = ()
        self._known: Known = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a line. Raises ValueError, LookupError, TypeError, AttributeError or RecursionError for a bad one."""
        if "state" in record:
            self._items = [decode(item, self._types) for item in record["state"]]
        for policy, scope, learned in record.get("learned", ()):
            known = self._known.pop((policy, scope), PathHashes())
            if learned is not None:
                self._known[policy, scope] = known.updated(learned)

    def items(self) -> Sequence[object]:
        return [
            replace(item, invoked_keys=self._known.get((item.policy_name, item.scope), item.invoked_keys))
            if isinstance(item, PolicyState)
            else item
            for item in self._items
        ]


def _kept_state(session: Session) -> tuple[list[object], Known]:
    """Return the items of the slices in `KEPT` without hashes, and the hashes."""
    items, known = list[object](), Known()
    for kind in KEPT:
        for item in session[kind].all():
            if isinstance(item, PolicyState) and isinstance(item.invoked_keys, PathHashes):
                known[item.policy_name, item.scope] = item.invoked_keys
                items.append(replace(item, invoked_keys=frozenset()))
            else:
                items.append(item)
    return items, known
