"""Tools with which a model reads the history of a workspace on disk, names its steps, undoes and restores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError
from ringfence.escapes import display_path
from ringfence.prompt.section import Section
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult
from ringfence_sandbox import LogEntry, Reversal, ReversalOutcome, Workspace
from ringfence_tools.candidates import INTRODUCTION as INTRODUCTION_TO_CANDIDATES
from ringfence_tools.candidates import Candidates, ask_workspace
from ringfence_tools.handlers import MAX_LISTED, Unrendered, answer_room
from ringfence_tools.printable import one_line, plural

AnswerT = TypeVar("AnswerT")
StepT = TypeVar("StepT", int | str, int | str | None)

MAX_PATHS = 20
MAX_WHO_CHARACTERS = 100
"""The most paths of one step in a listing."""
LOOK_SECONDS = 2.0
"""The age of a scan for changes by others that `history` and `diff` still use. A scan of many files takes long."""
INTRODUCTION = """\
Every tool call that changes files is a step of a history. `history` lists the steps, `diff` shows what they changed.
`checkpoint` gives the files as they are a name before something risky; `restore` goes back to a step or a name, and
`undo` reverses your newest steps and leaves alone what others changed. Both are steps that can be undone."""


@dataclass(frozen=True, slots=True)
class ShowHistory:
    limit: int = field(default=20, metadata={"ge": 1, "le": 1000})


@dataclass(frozen=True, slots=True)
class ShowDiff:
    since: int | str | None = field(
        default=None, metadata={"description": "Step number or name; left out, the oldest."}
    )
    until: int | str | None = field(default=None, metadata={"description": "Left out, the newest."})


@dataclass(frozen=True, slots=True)
class UndoSteps:
    steps: int | None = field(default=None, metadata={"description": "How many; left out, one.", "ge": 1})
    step: int | str | None = field(default=None, metadata={"description": "Number or name of the only one."})
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.step is not None and self.steps is not None:
            raise ToolValidationError("give either steps, for the newest ones, or step, for that one alone")


@dataclass(frozen=True, slots=True)
class RestoreStep:
    step: int | str = field(metadata={"description": "Number or name; 0 is the beginning."})
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class NameStep:
    name: str = field(metadata={"description": "1 to 64 letters, digits, '-', '_', '.'; not digits alone."})


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    step: int | None
    """None for an external change."""
    made_by: str
    at: str
    """ISO 8601."""
    paths: tuple[str, ...]
    """The first paths. Empty for step 0."""
    more_paths: int = 0
    ignored_paths: int = 0
    """The number of changed paths that git ignores. They are in neither of the two above."""
    names: tuple[str, ...] = ()
    client: str = ""
    """The client that called the tool, if it is known."""

    def render(self) -> str:
        number = "-" if self.step is None else str(self.step)
        more = f" and {self.more_paths:,} more" if self.more_paths else ""
        paths = f"{', '.join(self.paths)}{more}" if self.paths else plural(self.more_paths, "path")
        if self.ignored_paths:
            ignored = plural(self.ignored_paths, "ignored path")
            paths = f"{paths} and {ignored}" if self.paths else ignored
        names = "".join(f" [{name}]" for name in self.names)
        client = f" ({self.client})" if self.client else ""
        return f"{number:>4}  {self.at}  {self.made_by}{client}: {paths}{names}"


@dataclass(frozen=True, slots=True)
class HistoryEntries:
    """Newest first."""

    entries: tuple[HistoryEntry, ...]

    def render(self) -> str:
        return "\n".join(entry.render() for entry in self.entries)


@dataclass(frozen=True, slots=True)
class DiffText:
    patch: str
    left_out_characters: int = 0

    def render(self) -> str:
        if not self.left_out_characters:
            return self.patch
        return f"{self.patch}\n[{self.left_out_characters:,} more characters: ask for fewer steps]"


@dataclass(frozen=True, slots=True)
class PathOutcome:
    path: str
    outcome: ReversalOutcome
    """restored, removed (it was not there), kept (as it is), or conflict (a later step or somebody else changed it)."""
    reason: str | None = None
    """Why the path is kept or a conflict, or that a restore removes an external change."""

    def render(self) -> str:
        return f"{self.outcome:9} {self.path}" + (f"  ({self.reason})" if self.reason is not None else "")


@dataclass(frozen=True, slots=True)
class Reversed:
    paths: tuple[PathOutcome, ...]
    left_out: int = 0
    notes: tuple[str, ...] = ()
    """Attributes that could not be restored, such as an owner."""

    def render(self) -> str:
        more = [f"[{self.left_out:,} more paths]"] if self.left_out else []
        return "\n".join((*(one.render() for one in self.paths), *more, *self.notes))


@dataclass(frozen=True, slots=True)
class Named(Unrendered):
    name: str
    step: int


class HistoryToolsSection(Section[None]):
    """Tools to list, name, undo and restore the steps of a workspace on disk.

    `undo` reverses the newest steps of the call's session. It reverses a step of another session if it is named.
    """

    def __init__(
        self,
        *,
        session: Session,
        workspace: Callable[[], AbstractContextManager[Workspace]],
        read_only: bool = False,
        shared_session: bool = False,
        candidates: bool = False,
        accepts_overrides: bool = False,
    ) -> None:
        """``workspace`` opens the workspace for one call; FileNotFoundError where it has no history yet. A read-only
        section only looks. With ``shared_session``, nobody has steps of its own, and `undo` has to name one. With
        ``candidates`` there are tools to fork the workspace, and to promote and discard a fork. A
        `DelegationSection` that has ``candidates``, too, has a child work in one."""
        self.session = session
        self._workspace = workspace
        self._candidates = Candidates(workspace) if candidates and not read_only else None
        self._shared_session = shared_session
        descriptions: dict[Callable[..., ToolResult[Any]], str] = {
            self.history: "List the newest steps: what tool calls and others changed.",
            self.diff: "Show what changed between two steps, as a patch.",
            self.undo: "Take back your newest steps. What others changed since stays.",
            self.restore: "Bring all files back to what they were after a step. Can be undone.",
            self.checkpoint: "Name the files as they are now, to restore them later.",
        }
        external_effects: dict[Callable[..., ToolResult[Any]], str] = {}
        if self._candidates is not None:
            forks = self._candidates
            descriptions |= {
                forks.fork_workspace: "Make a candidate: a fork of all files, in which something can be tried.",
                forks.promote: "Make the changes of a candidate here, too. Can be undone.",
                forks.discard: "Delete a candidate that you made: its files and its history.",
            }
            external_effects[forks.discard] = "it deletes the files of the candidate"
        changes_nothing = (self.history, self.diff)
        super().__init__(
            title="History",
            key="history.tools",
            tools=[
                Tool(
                    handler.__name__,
                    description,
                    handler,
                    (),
                    accepts_overrides,
                    read_only=handler in changes_nothing,
                    external_effects=external_effects.get(handler, ""),
                )
                for handler, description in descriptions.items()
                if handler in changes_nothing or not read_only
            ],
            accepts_overrides=accepts_overrides,
        )

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return INTRODUCTION if self._candidates is None else f"{INTRODUCTION}\n\n{INTRODUCTION_TO_CANDIDATES}"

    def resources(self) -> ResourceRegistry:
        if self._candidates is None:
            return ResourceRegistry()
        return ResourceRegistry.of(Binding.instance(Candidates, self._candidates))

    def history(self, params: ShowHistory, *, context: ToolContext) -> ToolResult[HistoryEntries]:
        looked, entries = self._ask(
            lambda workspace: (_look(workspace), workspace.log(params.limit, with_ignored=False))
        )
        found = HistoryEntries(tuple(map(_entry, entries)))
        return ToolResult.ok(found, f"the newest {plural(len(entries), 'entry')}; {looked}")

    def diff(self, params: ShowDiff, *, context: ToolContext) -> ToolResult[DiffText]:
        since, until = _step(params.since), _step(params.until)
        looked, found = self._ask(
            lambda workspace: (_look(workspace), workspace.export(a=since, b=until, with_ignored=False))
        )
        text = found.text.decode("utf-8", "backslashreplace")
        room = answer_room(context)
        value = DiffText(text[:room], max(0, len(text) - room))
        ignored = f", beside {plural(len(found.ignored), 'ignored path')}" if found.ignored else ""
        return ToolResult.ok(value, f"{'what differs' if text else 'nothing differs'}{ignored}; {looked}")

    def undo(self, params: UndoSteps, *, context: ToolContext) -> ToolResult[Reversed]:
        if self._shared_session and params.step is None:
            raise ToolValidationError(
                "name the step to reverse, as `history` lists it: your steps cannot be told from those of others here"
            )
        session, step = str(context.session.session_id), _step(params.step)
        done = self._ask(
            lambda workspace: workspace.undo(params.steps, step=step, session=session, dry_run=params.dry_run)
        )
        if done.outcomes and not done.has_changed and not params.dry_run:
            same = "kept" in done.outcomes.values() and (params.steps or 1) > 1
            hint = "; an undo is a step, too: name the step to reverse, as `history` lists it" if same else ""
            return ToolResult.error(f"nothing was undone: {_describe_skipped(done)}{hint}")
        return _reversal_result(done, params.dry_run)

    def restore(self, params: RestoreStep, *, context: ToolContext) -> ToolResult[Reversed]:
        done = self._ask(lambda workspace: workspace.restore(_step(params.step), dry_run=params.dry_run))
        return _reversal_result(done, params.dry_run)

    def checkpoint(self, params: NameStep, *, context: ToolContext) -> ToolResult[Named]:
        named = self._ask(lambda workspace: workspace.checkpoint(params.name))
        message = f"{named.description} is called {named.name}: `restore` goes back to it"
        return ToolResult.ok(Named(named.name, named.number), message)

    def _ask(self, question: Callable[[Workspace], AnswerT]) -> AnswerT:
        return ask_workspace(self._workspace, question)


def _look(workspace: Workspace) -> str:
    """Scan for external changes. Return a sentence about the age of the scan."""
    age = workspace.look(older_than=LOOK_SECONDS)
    if age is None:
        return "changes by others since the newest entry are not looked for, since this is read-only"
    return f"changes by others are those of {age:.1f} s ago"


def _step(step: StepT) -> int | StepT:
    """Return a step in the form of the history: a string of digits becomes a number."""
    return int(step) if isinstance(step, str) and step.isdecimal() else step


def _entry(entry: LogEntry) -> HistoryEntry:
    who = {"baseline": "as it was found", "external": entry.tool or "somebody else"}.get(entry.kind, entry.tool)
    who = f"{who}: {entry.title}" if entry.title else who
    listed = () if entry.kind == "baseline" else entry.paths[:MAX_PATHS]
    paths = tuple(display_path(path) for path in listed)
    at = entry.created_at.isoformat(timespec="seconds")
    more = len(entry.paths) - len(paths)
    who, client = (one_line(text, MAX_WHO_CHARACTERS) for text in (who, entry.client))  # as other programs wrote them
    return HistoryEntry(entry.number, who, at, paths, more, entry.ignored, entry.names, client)


def _describe_skipped(done: Reversal) -> str:
    reasons = [f"{display_path(path)} ({reason})" for path, reason in done.reasons.items()]
    more = f", and {len(reasons) - MAX_PATHS:,} more" if len(reasons) > MAX_PATHS else ""
    edit = "; read what is there now, and edit what is to go" if "conflict" in done.outcomes.values() else ""
    return f"{', '.join(reasons[:MAX_PATHS])}{more}{edit}"


def _reversal_result(done: Reversal, dry_run: bool) -> ToolResult[Reversed]:
    outcomes = [
        PathOutcome(display_path(path), outcome, done.reasons.get(path)) for path, outcome in done.outcomes.items()
    ]
    kept = outcomes[:MAX_LISTED]
    numbers = Counter(outcome.outcome for outcome in outcomes)
    skipped = numbers["kept"] + numbers["conflict"]
    would = "would be " if dry_run else ""
    restored = plural(numbers["restored"], "path")
    message = f"{restored} {would}restored, {numbers['removed']} removed, {skipped} left as is"
    message += "; undo reverses that" if done.has_changed and not dry_run else ""
    value = Reversed(tuple(kept), len(outcomes) - len(kept), tuple(done.notes[:MAX_PATHS]))
    return ToolResult.ok(value, message if outcomes else "nothing differs")
