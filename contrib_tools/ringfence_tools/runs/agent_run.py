"""One run of an agent on a workspace, without a terminal. An `AgentTask` goes in, a `RunOutcome` comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, Protocol, TypeAlias, get_args

from ringfence import serde
from ringfence.adapters import ProviderAdapter
from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
from ringfence.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    RestoreFailedError,
    WorkspaceConflictError,
    WorkspaceLockedError,
)
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.readable_diff import readable_patch
from ringfence.limits import Budget, Deadline, TokenUsage
from ringfence.participants import Change
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.section import MarkdownSection, Section
from ringfence.receipts import Outcome as CallOutcome
from ringfence.receipts import Receipt, change_json
from ringfence.runtime.policy import Policy
from ringfence.session.events import ToolCallStarted, ToolInvoked, ToolOutput
from ringfence.session.session import Session
from ringfence_tools.contents import LeftOut
from ringfence_tools.planning import Plan, PlanningStrategy, PlanningToolsSection
from ringfence_tools.printable import one_line, patch_json, plural
from ringfence_tools.runs.attention import Attention, attention
from ringfence_tools.runs.run_workspace import RunWorkspace, own_policies

Outcome = Literal[
    "done",
    "failed",
    "not_started",
    "busy",
    "provider_failed",
    "no_sandbox",
    "limit_reached",
    "unchanged",
    "interrupted",
]
EXIT_CODES: dict[Outcome, int] = {
    "done": 0,
    "failed": 1,
    "not_started": 2,
    "busy": 2,
    "provider_failed": 3,
    "no_sandbox": 4,
    "limit_reached": 5,
    "unchanged": 6,
    "interrupted": 130,
}
CALL_OUTCOMES: tuple[CallOutcome, ...] = get_args(CallOutcome)
PROMPT_NAME = "ringfence:run"
INSTRUCTIONS = """\
$task

Work on the files of the workspace with the tools that you have. When you are done, answer without calling a tool: say
what you changed and why, and what you could not do or check."""

MakeSection: TypeAlias = Callable[[Session], Section[Any]]


class SessionObserver(Protocol):
    """Subscribes to the events of a session, as `ringfence.telemetry.Telemetry` does."""

    def observe(self, session: Session) -> object: ...


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task, and all that a run needs for it.

    ``seconds``, ``tokens`` and ``cost_usd`` are limits; None is no limit. Each function in ``sections`` makes a section
    for the session of the run.
    """

    text: str
    workspace: RunWorkspace
    adapter: ProviderAdapter
    seconds: float | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    policies: Sequence[Policy] = ()
    sections: Sequence[MakeSection] = ()
    telemetry: SessionObserver | None = None


MASKED = "the patch has masks in the place of secrets: it gives other files than those that the run has changed"


@dataclass(frozen=True, slots=True)
class TaskParams:
    task: str


class InterruptGate(Protocol):
    """Decides where a KeyboardInterrupt may be raised."""

    def let_through(self) -> AbstractContextManager[None]: ...

    def held(self) -> AbstractContextManager[None]: ...


class OpenGate:
    """A gate that holds nothing back: for a run in a thread, or in a program that handles Ctrl-C itself."""

    def let_through(self) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()


class RunWatcher:
    """Gets every turn and every tool call when it happens. A watcher that raises fails the run at the run's end."""

    def text(self, event: ModelText) -> None:
        """Get a piece of a turn that the model still writes. `turn` gets the whole turn."""

    def retry(self, event: ModelRetry) -> None:
        """Get notice that a request to the model is repeated."""

    def turn(self, event: ModelTurn) -> None:
        """Get a complete turn of the model."""

    def started(self, event: ToolCallStarted) -> None:
        """Get a call that begins. `call` gets its end."""

    def output(self, event: ToolOutput) -> None:
        """Get a piece of output of a command that runs."""

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        """Get a call that has ended.

        ``plan`` is the plan after the call. ``answer`` is the tool's output without the receipt's message. A call that
        an outer call rolls back later comes a second time.
        """


@dataclass(slots=True)
class RunStats:
    """Counts of a run so far."""

    started: float = field(default_factory=monotonic)
    turns: int = 0
    outcomes: Counter[CallOutcome] = field(default_factory=Counter[CallOutcome])
    usage: TokenUsage = TokenUsage()
    parts: int = 1
    """How often the run was started or resumed."""

    def to_json(self) -> dict[str, object]:
        """Return the counts in the form that `of_json` reads."""
        usage = serde.dump(self.usage)
        outcomes = dict(self.outcomes)
        return {"parts": self.parts, "seconds": self.seconds, "turns": self.turns, "outcomes": outcomes, "usage": usage}

    @staticmethod
    def of_json(record: Mapping[str, Any]) -> RunStats:
        """Read the counts of `to_json`. Raises KeyError, TypeError or ValueError for another shape."""
        usage = serde.parse(TokenUsage, record["usage"])
        started = monotonic() - float(record["seconds"])
        return RunStats(started, int(record["turns"]), Counter(record["outcomes"]), usage, int(record["parts"]))

    @property
    def seconds(self) -> float:
        return monotonic() - self.started

    @property
    def calls(self) -> int:
        return self.outcomes.total()

    def describe(self) -> str:
        counts = ((self.outcomes[outcome], outcome.replace("_", " ")) for outcome in CALL_OUTCOMES)
        ended = ", ".join(f"{count} {word}" for count, word in counts if count)
        usage = self.usage.describe()
        return (
            f"{plural(self.turns, 'turn')}, {plural(self.calls, 'tool call')}"
            + (f" ({ended})" if ended else "")
            + (f", {usage}" if usage else "")
            + (f", in {self.parts} parts" if self.parts > 1 else "")
        )


@dataclass(slots=True)
class RunOutcome:
    """The result of a run. ``changes`` and ``patch`` cover its committed calls, also after a failure."""

    outcome: Outcome = "done"
    error: str | None = None
    text: str | None = None
    """The model's final answer."""
    plan: Plan | None = None
    changes: Sequence[Change] = ()
    patch: bytes = b""
    readable_patch: bytes = b""
    """The same for a person: binary files are described, and not for ``git apply``."""
    ignored: Sequence[Change] = ()
    """The changes of paths that git ignores. ``changes`` and ``patch`` are without them."""
    look_first: Sequence[Attention] = ()
    """The changes that a reviewer looks at first."""
    applied: bool = False
    conflicts: Sequence[str] = ()
    """Paths that kept the changes from being applied."""
    is_part: bool = False
    """Whether ``changes`` and ``patch`` cover only the last part of a resumed run."""
    mixed: Sequence[str] = ()
    """Files that somebody else changed, too, during the run. Their diff may include these changes."""
    is_masked: bool = False
    """Whether ``patch`` has the mask of a secret in the place of its value, and so gives other files."""
    session_ids: Sequence[str] = ()
    """One id for each part of the run, oldest first. Its steps in the history have these ids."""
    receipts: Sequence[Receipt] = ()
    stats: RunStats = field(default_factory=RunStats)
    steps: int = 0
    """The number of steps that the run added to the history."""
    left_out: Sequence[LeftOut] = ()
    """Paths that are hidden from the agent or not covered by the history."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def usage(self) -> TokenUsage:
        return self.stats.usage

    def fail(self, error: str, outcome: Outcome = "failed") -> None:
        self.outcome, self.error = outcome, error

    def fail_interrupted(self) -> None:
        kept = f"{plural(self.steps, 'step')} committed before stay" if self.steps else "nothing on disk was changed"
        self.fail(f"interrupted: the running call was rolled back, and {kept}", "interrupted")

    def to_json(self) -> dict[str, object]:
        """Return all fields. ``changes`` has the form that it has in a receipt."""
        stats = self.stats
        left_out = {one.path: one.reason for one in self.left_out}
        return {
            "exit_code": self.exit_code,
            "outcome": self.outcome,
            "error": self.error,
            "text": self.text,
            "parts": stats.parts,
            "session_ids": list(self.session_ids),
            "is_part": self.is_part,
            "is_masked": self.is_masked,
            "mixed": [escape_path(path) for path in self.mixed],
            "turns": stats.turns,
            "tool_calls": {"total": stats.calls, **{outcome: stats.outcomes[outcome] for outcome in CALL_OUTCOMES}},
            "plan": serde.dump(self.plan) if self.plan is not None else None,
            "changes": [change_json(change) for change in self.changes],
            **patch_json(self.patch),
            "ignored": len(self.ignored),
            "look_first": [{"path": escape_path(one.path), "reason": one.reason} for one in self.look_first],
            "applied": self.applied,
            "steps": self.steps,
            "conflicts": [escape_path(path) for path in self.conflicts],
            "left_out": [{"path": escape_path(path), "reason": reason} for path, reason in left_out.items()],
            "usage": serde.dump(stats.usage),
            "duration_seconds": round(stats.seconds, 3),
        }


def check_task(task: AgentTask) -> None:
    """Check the policies of a task. Raises PromptValidationError if one names a tool that the run does not have."""
    _prompt(task, Session())


def run_agent(
    task: AgentTask,
    *,
    watchers: Sequence[RunWatcher] = (),
    stats: RunStats | None = None,
    gate: InterruptGate | None = None,
    prepare: Callable[[Session], None] | None = None,
    earlier_sessions: Sequence[str] = (),
) -> RunOutcome:
    """Run the agent until it is done, fails or is interrupted. `apply_changes` is a separate step.

    ``stats`` has the counts of earlier parts of the run, and grows. ``earlier_sessions`` are the session ids of these
    parts. ``prepare`` is called with the new session before the first turn. If it raises, the run fails.

    Raises:
        PromptValidationError: as in `check_task`, before the first turn.
    """
    workspace = task.workspace
    session = Session(secrets=workspace.secrets)
    stats, gate = stats or RunStats(), gate or OpenGate()
    if task.telemetry is not None:
        task.telemetry.observe(session)
    observer = RunObserver(session, gate, stats, watchers)
    deadline = Deadline.after(task.seconds) if task.seconds is not None else None
    is_limited = (task.tokens, task.cost_usd) != (None, None)
    budget = Budget(max_total_tokens=task.tokens, max_cost_usd=task.cost_usd) if is_limited else None
    outcome = RunOutcome(session_ids=(*earlier_sessions, str(session.session_id)), stats=stats)
    prompt = _prompt(task, session)
    try:
        if prepare is not None:
            prepare(session)
        with gate.let_through():
            response = task.adapter.evaluate(prompt, session=session, deadline=deadline, budget=budget)
        outcome.text = response.text
    except KeyboardInterrupt:
        outcome.steps = len(workspace.own_steps())
        outcome.fail_interrupted()
    except PromptEvaluationError as error:
        # A limit holds for one part. The counts beside it cover all parts.
        of_part = ", in this part of the run" if stats.parts > 1 and error.phase == "budget" else ""
        outcome.fail(f"{error}{of_part}", _outcome_of(error, deadline))
    except Exception as error:
        outcome.fail(describe_error(error))
    except BaseException as error:  # such as sys.exit in a user's tool, which would set our exit code
        outcome.fail(f"a tool has ended the run: {describe_error(error)}")
    observer.catch_up()
    _judge(outcome, observer.problems)
    outcome.plan = session[Plan].latest()
    outcome.receipts = session[Receipt].all()
    outcome.is_part = bool(workspace.is_part)
    outcome.steps = len(workspace.own_steps())
    outcome.left_out = (*workspace.left_out, *workspace.left_out_since())
    own = workspace.own_changes()
    outcome.changes, outcome.patch, outcome.mixed, outcome.ignored = own.changes, own.patch, own.mixed, own.ignored
    outcome.look_first = attention(own.changes, own.ignored, own.patch, workspace.ignored)
    outcome.readable_patch = readable_patch(own.patch)
    outcome.is_masked = workspace.secrets.mask(own.patch) != own.patch
    return workspace.secrets.mask(outcome)


def _judge(outcome: RunOutcome, problems: Sequence[Exception]) -> None:
    """Fail a run that left doubtful files, or whose watchers had problems."""
    if outcome.stats.outcomes["doubtful"] and outcome.outcome == "interrupted":
        outcome.fail("interrupted, and a rollback could not be completed: the files in the workspace are doubtful")
    if problems and outcome.outcome == "done":
        outcome.fail(f"not everything could be written down: {one_line(describe_error(problems[0]), 300)}")


def apply_changes(outcome: RunOutcome, workspace: RunWorkspace) -> None:
    """Write the changes to the directory in one transaction, if the task was done."""
    changes = sorted((*outcome.changes, *outcome.ignored), key=lambda change: change.path)
    if outcome.outcome != "done" or not changes:
        return
    try:
        workspace.apply(changes)
        outcome.applied, outcome.steps = True, len(workspace.own_steps())
    except WorkspaceConflictError as error:
        outcome.conflicts = error.paths
        outcome.fail("not applied, since files were changed on disk meanwhile: apply the patch by hand")
    except (OSError, ValueError, WorkspaceLockedError) as error:
        outcome.fail(f"not applied: {describe_error(error)}")
    except RestoreFailedError as error:
        outcome.fail(f"applying failed, and not everything could be rolled back: {error}")


def _prompt(task: AgentTask, session: Session) -> Prompt[None]:
    ns, _, key = PROMPT_NAME.partition(":")
    template = PromptTemplate(
        ns=ns,
        key=key,
        name=PROMPT_NAME,
        sections=[
            MarkdownSection(title="Task", key="task", template=INSTRUCTIONS, default_params=TaskParams(task.text)),
            PlanningToolsSection(session=session, strategy=PlanningStrategy.PLAN_ACT_REFLECT),
            task.workspace.section(session),
            *(make(session) for make in task.sections),
        ],
        policies=[*own_policies(task.workspace), *task.policies],
    )
    return Prompt(template)


def _outcome_of(error: PromptEvaluationError, deadline: Deadline | None) -> Outcome:
    if isinstance(error.__cause__, RestoreFailedError):
        return "failed"
    expired = deadline is not None and deadline.expired
    if expired or error.phase == "budget" or isinstance(error.__cause__, DeadlineExceededError):
        return "limit_reached"
    return "failed" if error.phase == "tool" else "provider_failed"


class RunObserver:
    """Passes each event of a session to the watchers once. An interrupt waits until they have it."""

    def __init__(self, session: Session, gate: InterruptGate, stats: RunStats, watchers: Sequence[RunWatcher]) -> None:
        self.problems: list[Exception] = []
        """The exceptions that watchers have raised."""
        self._session = session
        self._gate = gate
        self._stats = stats
        self._watchers = watchers
        self._known: dict[str, CallOutcome] = {}
        session.dispatcher.subscribe(ModelText, lambda event: self._notify(lambda watcher: watcher.text(event)))
        session.dispatcher.subscribe(ModelRetry, lambda event: self._notify(lambda watcher: watcher.retry(event)))
        session.dispatcher.subscribe(ModelTurn, self._turn)
        session.dispatcher.subscribe(ToolCallStarted, lambda event: self._notify(lambda one: one.started(event)))
        session.dispatcher.subscribe(ToolOutput, lambda event: self._notify(lambda one: one.output(event)))
        session.dispatcher.subscribe(Receipt, self._call)

    def catch_up(self) -> None:
        """Pass on the calls whose events were lost in an interrupt."""
        for receipt in self._session[Receipt].all():
            self._call(receipt)

    def _turn(self, event: ModelTurn) -> None:
        with self._gate.held():
            self._stats.turns += 1
            if event.turn.usage is not None:
                self._stats.usage += event.turn.usage
            self._notify(lambda watcher: watcher.turn(event))

    def _call(self, receipt: Receipt) -> None:
        with self._gate.held():
            before = self._known.get(receipt.receipt_id)
            if before is not None:
                if receipt.rolled_back_by is None or receipt.outcome == before:
                    return
                self._stats.outcomes[before] -= 1
            self._known[receipt.receipt_id] = receipt.outcome
            self._stats.outcomes[receipt.outcome] += 1
            plan, invoked = self._session[Plan].latest(), self._session[ToolInvoked].latest()
            if invoked is None or invoked.call_id != receipt.call_id:
                found = self._session[ToolInvoked].where(lambda one: one.call_id == receipt.call_id)
                invoked = found[-1] if found else None
            answer = invoked.rendered_output if invoked is not None else ""
            self._notify(lambda watcher: watcher.call(receipt, plan, answer))

    def _notify(self, notify: Callable[[RunWatcher], None]) -> None:
        for watcher in self._watchers:
            try:
                notify(watcher)
            except Exception as error:  # the other watchers still get the event
                self.problems.append(error)
