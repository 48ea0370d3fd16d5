"""The record of a run on disk, beside the history of the workspace: what ``--resume`` goes on with."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ringfence import serde
from ringfence.adapters.model import Conversation, Message, MessageAdded
from ringfence.filesystem.paths import display_path
from ringfence.participants import Step
from ringfence.prompt.policy import PathHashes, PolicyState
from ringfence.runtime.reducers import VisibilityOverrides
from ringfence.runtime.session import Session
from ringfence.tagged import decode, encode, types_within
from ringfence_cli.outputs import OutputFile
from ringfence_cli.signals import Signals
from ringfence_cli.task_log import record_task
from ringfence_sandbox import Recovered, ShellEnvironment, store_directory
from ringfence_tools.agent_run import PROMPT_NAME, RunStats
from ringfence_tools.planning import Plan
from ringfence_tools.printable import one_line
from ringfence_tools.run_workspace import DiskWorkspace, Place

RECORD_NAME = "run.jsonl"
KEPT_NAME = "run-before.jsonl"
"""The record of a run that was interrupted, while another one has the first name."""
MAX_PATHS = 20
"""In one sentence for a model."""
LEAST = 1
"""Of every limit: a second, a token, a turn."""
KEPT: Sequence[type[Any]] = (Plan, PolicyState, ShellEnvironment, VisibilityOverrides)
"""The slices of a session that a resumed run goes on with. Results of tools are in the conversation."""
NO_KEYS: Set[tuple[str, str]] = frozenset()


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
    remaining: RunLimits
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
        self.stats = before.spent if before is not None else RunStats()
        """What the run comes to; it counts on from the parts before."""
        self.stats.parts += before is not None
        self._spent_before = self.stats.to_json()
        self._before = before
        self._file: OutputFile | None = None
        self._unwritten = b""
        """Lines that there was no space for: the next one is only written after them."""

    @property
    def earlier_sessions(self) -> Sequence[str]:
        """Those of the parts before this one."""
        return self._before.sessions if self._before is not None else ()

    def start(self, session: Session, signals: Signals, workspace: DiskWorkspace) -> None:
        """Bring a new session to where the interrupted one stood, if there is one, and listen to it."""
        record: dict[str, object] = {"task": self.task, "session": str(session.session_id)}
        record["terms"] = serde.dump(self.terms)
        if self._before is not None:
            for kind in KEPT:
                session[kind].seed([item for item in self._before.state if type(item) is kind])
            workspace.refused = {**self._before.refused, **workspace.refused}
            workspace.go_on_from(self._before.start, self._before.sessions)
            answered = _answer_committed_calls(self._before, workspace.history.steps())
            self._count_killed(len(answered), workspace.history.recovered)
            messages = (*self._before.messages, *answered)
            changed = workspace.changed_by_others(self._before.start, self._before.sessions) if messages else ()
            session[Conversation].seed(Conversation(PROMPT_NAME, messages, _describe_external_changes(changed)))
            record["messages"] = [encode(message) for message in answered]
            lines = self.path.read_bytes()
            os.truncate(self.path, lines.rfind(b"\n") + 1)  # a line that is torn would spoil the next
        else:
            record["start"] = workspace.start
            if self._has_messages():
                os.replace(self.path, self.kept)
            else:
                self.path.unlink(missing_ok=True)
        record |= {"spent": self._spent_before, "refused": dict(workspace.refused)}
        self._file = OutputFile(self.path, append=True)
        self._file.write(_line(record))
        record_task(workspace.directory, str(session.session_id), self.task)
        state = StateWriter(session)

        def add_message(event: MessageAdded) -> None:
            with signals.held():
                self._write({"messages": [_encoded(event.message)], "spent": self.stats.to_json(), **state.changes()})

        session.dispatcher.subscribe(MessageAdded, add_message)

    def _count_killed(self, committed: int, recovered: Recovered | None) -> None:
        """The calls of which the process was killed before it could count them."""
        assert self._before is not None
        if not self._before.killed:
            return
        self.stats.outcomes["committed"] += committed
        pending = [call.call_id for call in Conversation("", self._before.messages).unanswered()]
        if recovered is not None and recovered.outcome == "rolled back" and recovered.call_id in pending:
            self.stats.outcomes["rolled_back"] += 1
        self._spent_before["outcomes"] = dict(self.stats.outcomes)

    def _write(self, record: dict[str, object]) -> None:
        assert self._file is not None
        self._unwritten += _line(record)
        self._file.write(self._unwritten)
        self._unwritten = b""

    def interrupted_before(self) -> str | None:
        """What to say of an interrupted run that this one does not go on with, but keeps for another time."""
        newer, older = self._has_messages(), self.kept.exists()
        if self._before is not None or not (newer or older):
            return None
        task = _task_of(self.path if newer else self.kept)
        said = (
            f"a run was interrupted here before{task}: its record is kept, and --resume goes on with it after this "
            f"one; to forget it, delete {self.kept}"
        )
        before = f"; the one that was interrupted before that{_task_of(self.kept)} is forgotten"
        return said + before if newer and older else said

    def remaining(self) -> RunLimits:
        """Of what this part may use."""
        return _remaining(self.terms, RunStats.of_json(self._spent_before), self.stats)

    def interrupt(self) -> None:
        """The run has come to an end that it can go on from."""
        if self._file is not None:
            with suppress(OSError):  # what was spent up to the last message is there
                self._write({"spent": self.stats.to_json()})

    def finish(self) -> None:
        """The run has come to its end: what there is to go on with is the one before, if that was interrupted."""
        self.path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            os.replace(self.kept, self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _has_messages(self) -> bool:
        """Whether the record is of a run in which the model has said something, or cannot be read at all."""
        try:
            found = interrupted_run(self.path)
        except ValueError:
            return True
        return found is not None and bool(found.messages)


def record_of(directory: Path) -> Path:
    return store_directory(directory) / RECORD_NAME


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
    remaining = _remaining(terms, began, spent)
    items = state.items()
    return Interrupted(
        task, session_id, tuple(sessions), start, refused, tuple(messages), items, remaining, spent, killed
    )


def _task_of(record_file: Path) -> str:
    """The task of the run that was interrupted by its record, in brackets; empty where it cannot be read."""
    with suppress(ValueError):
        if (found := interrupted_run(record_file)) is not None:
            return f" ({one_line(found.task, 80)})"
    return ""


def _remaining(terms: RunLimits, began: RunStats, now: RunStats) -> RunLimits:
    tokens = (now.usage.total_tokens or 0) - (began.usage.total_tokens or 0)
    return terms.less(now.seconds - began.seconds, tokens, now.turns - began.turns)


def _answer_committed_calls(before: Interrupted, steps: Iterable[Step]) -> list[Message]:
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
        f"This call was committed as step {step.number}, which changed {_list_paths(step.paths)}. An interruption lost "
        "its answer: read what is there now before you change it again."
    )


def _describe_external_changes(changed: Sequence[str]) -> str:
    """What the model is told of what others have changed while it was interrupted."""
    if not changed:
        return ""
    return (
        f"You were interrupted. Meanwhile, others have changed or removed {_list_paths(changed)}: what you did "
        "there may be gone, and what you know of it may be out of date. Look again before you go on."
    )


def _list_paths(paths: Sequence[str]) -> str:
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


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``policies`` and ``sections`` are SPECs. A limit that there is not is None; of one that is used up, less than 1
    is left."""

    policies: tuple[str, ...] = ()
    seconds: float | None = None
    tokens: int | None = None
    turns: int | None = None
    place: Place = Place()
    sections: tuple[str, ...] = ()

    def describe(self) -> str:
        """As options of the command line."""
        policies = " ".join(f"--policy {shlex.quote(spec)}" for spec in self.policies)
        sections = " ".join(f"--section {shlex.quote(spec)}" for spec in self.sections)
        seconds = f"--deadline {self.seconds:.0f}s" if self.seconds is not None else ""
        tokens = f"--max-tokens {self.tokens}" if self.tokens is not None else ""
        turns = f"--max-turns {self.turns}" if self.turns is not None else ""
        return " ".join(
            option for option in (self.place.describe(), sections, policies, seconds, tokens, turns) if option
        )

    def less(self, seconds: float, tokens: int, turns: int) -> RunLimits:
        """What is left when so much of it has been used."""
        return replace(
            self,
            seconds=None if self.seconds is None else self.seconds - seconds,
            tokens=None if self.tokens is None else self.tokens - tokens,
            turns=None if self.turns is None else self.turns - turns,
        )

    def used_up(self) -> list[str]:
        """The options for those of the limits of which nothing is left."""
        limits = (("--deadline TIME", self.seconds), ("--max-tokens N", self.tokens), ("--max-turns N", self.turns))
        return [option for option, remaining in limits if remaining is not None and remaining < LEAST]

    def resumed(self, given: RunLimits) -> RunLimits:
        """Merge the limits that are left with those given now: policies and sections are added, others replaced.

        Raises:
            click.UsageError: a policy that would loosen one of the run's, a limit that is used up, or an option for a
                container that there is not.
        """
        terms = RunLimits(
            join_policies(self.policies, given.policies),
            self.seconds if given.seconds is None else given.seconds,
            self.tokens if given.tokens is None else given.tokens,
            self.turns if given.turns is None else given.turns,
            resume_place(self.place, given.place),
            tuple(dict.fromkeys((*self.sections, *given.sections))),
        )
        if used_up := terms.used_up():
            raise click.UsageError(
                f"what the run was allowed is used up: give the resumed part a limit of its own, {', '.join(used_up)}"
            )
        return terms

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> RunLimits:
        """ValueError for what is none."""
        return serde.parse(RunLimits, record)


def absolute_policy(spec: str) -> str:
    """A SPEC that means the same in any working directory."""
    is_file = spec.endswith(".toml") and spec.partition(":")[0] not in ("allow", "deny", "tests", "deletions")
    return os.path.abspath(spec) if is_file else spec


def join_policies(held: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """The SPECs of a run, and those that its resume adds.

    Raises:
        click.BadParameter: one that would loosen those of the run.
    """
    allowed = [spec for spec in held if spec.startswith("allow:")]
    limits = [spec for spec in held if spec.startswith("deletions:")]
    new = [spec for spec in dict.fromkeys(added) if spec not in held]
    for spec in new:
        # All the patterns that are allowed count together; of limits the lowest does.
        loosened = allowed if spec.startswith("allow:") else []
        if spec.startswith("deletions:"):
            loosened = [limit for limit in limits if _number(limit) < _number(spec)]
        if loosened:
            raise click.BadParameter(
                f"{spec!r} is looser than what the run was begun with ({', '.join(loosened)}), which holds for all of "
                "it: leave it out, or begin a new run with --task",
                param_hint="'--policy'",
            )
    return (*held, *new)


def _number(spec: str) -> int:
    return int(spec.partition(":")[2])


def resume_place(before: Place, given: Place) -> Place:
    """What is not given is as it was before. click.UsageError for a container's option where there is none."""
    workspace = given.workspace or before.workspace
    if workspace == "podman":
        return Place(
            workspace,
            given.image or before.image,
            given.network or before.network,
            given.keep_environment or before.keep_environment,
            given.memory_bytes or before.memory_bytes,
            given.cpus or before.cpus,
            given.command_seconds or before.command_seconds,
        )
    if given.options:
        raise click.UsageError(
            f"{' and '.join(given.options)} is for commands, and the run that is resumed has none: "
            "--workspace podman gives it some"
        )
    return Place(workspace)


class StateWriter:
    """Says what has changed since it was last asked. The files that a model knows are many, and every read adds one:
    they are said one by one, and the rest whole."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._written = _held(session)

    def changes(self) -> dict[str, object]:
        """For a line of the record; nothing where nothing has changed."""
        before, now = self._written, _held(self._session)
        self._written = now
        found: dict[str, object] = {}
        if not _same(map(_without_hashes, now), map(_without_hashes, before)):
            found["state"] = [encode(_without_hashes(item)) for item in now]
        known, knows = _hashes(before), _hashes(now)
        learned: list[object] = [[*key, None] for key in known if key not in knows]
        for key, hashes in knows.items():
            if hashes is not known.get(key):
                learned.append([*key, {**hashes.since(known.get(key, PathHashes()))}])
        if learned:
            found["learned"] = learned
        return found


class StateReader:
    """Puts together what a record says, line by line."""

    def __init__(self, types: Mapping[str, type[Any]]) -> None:
        self._types = types
        self._items: Sequence[object] = ()
        self._learned: dict[tuple[str, str], PathHashes] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Raises what `decode` does, and what comes of values that are none of these."""
        if "state" in record:
            self._items = [decode(item, self._types) for item in record["state"]]
        for policy, scope, learned in record.get("learned", ()):
            known = self._learned.pop((policy, scope), PathHashes())
            if learned is not None:
                self._learned[policy, scope] = known.updated(learned)

    def items(self) -> tuple[object, ...]:
        return tuple(self._with_hashes(item) for item in self._items)

    def _with_hashes(self, item: object) -> object:
        if not isinstance(item, PolicyState) or _key(item) not in self._learned:
            return item
        return replace(item, invoked_keys=self._learned[_key(item)])


def _held(session: Session) -> tuple[object, ...]:
    return tuple(item for kind in KEPT for item in session[kind].all())


def _key(state: PolicyState) -> tuple[str, str]:
    return state.policy_name, state.scope


def _hashes(items: Iterable[object]) -> dict[tuple[str, str], PathHashes]:
    return {
        _key(item): item.invoked_keys
        for item in items
        if isinstance(item, PolicyState) and isinstance(item.invoked_keys, PathHashes)
    }


def _without_hashes(item: object) -> object:
    """It without what is said one by one."""
    if isinstance(item, PolicyState) and isinstance(item.invoked_keys, PathHashes):
        return replace(item, invoked_keys=NO_KEYS)
    return item


def _same(one: Iterable[object], other: Iterable[object]) -> bool:
    mine, theirs = [*one], [*other]
    return len(mine) == len(theirs) and all(a is b or a == b for a, b in zip(mine, theirs, strict=True))
