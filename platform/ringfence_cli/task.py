"""One task: a model, the files it works on, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ringfence.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    RestoreFailedError,
    WorkspaceConflictError,
)
from ringfence.failures import describe_error
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change
from ringfence.prompt.policy import Policy
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.section import MarkdownSection
from ringfence.prompt.tool import ProviderAdapter
from ringfence.runtime.limits import Budget, Deadline
from ringfence.runtime.session import Session
from ringfence_cli.disk import DiskWorkspace
from ringfence_cli.own_sections import MakeSection
from ringfence_cli.printable import one_line, plural
from ringfence_cli.resuming import PROMPT_NAME, RunRecord
from ringfence_cli.signals import Signals
from ringfence_cli.watch import RunObserver, RunStats, Watcher
from ringfence_cli.workspace import LeftOutPolicy, RunWorkspace
from ringfence_tools.planning import Plan, PlanningStrategy, PlanningToolsSection

if TYPE_CHECKING:
    from ringfence.telemetry import Telemetry

Outcome = Literal[
    "done", "failed", "not_started", "busy", "provider_failed", "no_sandbox", "limit_reached", "interrupted"
]
EXIT_CODES: dict[Outcome, int] = {
    "done": 0,
    "failed": 1,
    "not_started": 2,
    "busy": 2,
    "provider_failed": 3,
    "no_sandbox": 4,
    "limit_reached": 5,
    "interrupted": 130,
}

INSTRUCTIONS = """\
$task

Work on the files of the workspace with the tools that you have. When you are done, answer without calling a tool: say
what you changed and why, and what you could not do or check."""


@dataclass(frozen=True, slots=True)
class Task:
    """``seconds`` and ``tokens`` are limits; None is none."""

    text: str
    workspace: RunWorkspace
    adapter: ProviderAdapter
    seconds: float | None = None
    tokens: int | None = None
    policies: Sequence[Policy] = ()
    sections: Sequence[MakeSection] = ()
    record: RunRecord | None = None
    telemetry: Telemetry | None = None


@dataclass(frozen=True, slots=True)
class TaskParams:
    task: str


@dataclass(slots=True)
class RunOutcome:
    """How a task ended. ``text`` is the model's final answer; ``changes`` and ``patch`` are what its committed calls
    came to, and are there however it ended."""

    outcome: Outcome = "done"
    error: str | None = None
    text: str | None = None
    plan: Plan | None = None
    changes: Sequence[Change] = ()
    patch: bytes = b""
    applied: bool = False
    conflicts: Sequence[str] = ()
    """Paths that kept the changes from being applied."""
    is_part: bool = False
    """Whether changes and patch are those of the last part alone, of a run that was resumed."""
    mixed: Sequence[str] = ()
    """Paths of which others have changed the same lines meanwhile: changes and patch have theirs, too."""
    session_ids: Sequence[str] = ()
    """Of all parts of the run, the last one's at the end: its steps in the history bear them."""
    used_up: Sequence[str] = ()
    """The options for limits that a resume has to be given anew."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def fail(self, error: str, outcome: Outcome = "failed") -> None:
        self.outcome, self.error = outcome, error


def check(task: Task) -> None:
    """Raises PromptValidationError where a policy is about a tool that there is not."""
    _prompt(task, Session())


def perform(task: Task, signals: Signals, tally: RunStats, watchers: Sequence[Watcher]) -> RunOutcome:
    """Let the model work until it is done, or cannot go on, or is interrupted. It is not applied here.

    Raises what `check` does, before anything is begun.
    """
    session = Session()
    if task.telemetry is not None:
        task.telemetry.observe(session)
    telling = RunObserver(session, signals, tally, watchers)
    deadline = Deadline.after(task.seconds) if task.seconds is not None else None
    earlier = task.record.earlier_sessions if task.record is not None else ()
    ending = RunOutcome(session_ids=(*earlier, str(session.session_id)))
    prompt = _prompt(task, session)
    try:
        if task.record is not None and isinstance(task.workspace, DiskWorkspace):
            task.record.attend(session, signals, task.workspace)
        with signals.let_through():
            response = task.adapter.evaluate(
                prompt,
                session=session,
                deadline=deadline,
                budget=Budget(max_total_tokens=task.tokens) if task.tokens is not None else None,
            )
        ending.text = response.text
    except KeyboardInterrupt:
        _interrupted(ending, task.workspace.steps())
    except PromptEvaluationError as error:
        # A limit is that of a part, while the counts beside it are those of all parts.
        of_part = ", in this part of the run" if tally.parts > 1 and error.phase == "budget" else ""
        ending.fail(f"{error}{of_part}", _outcome_of(error, deadline))
    except Exception as error:
        ending.fail(describe_error(error))
    except BaseException as error:  # sys.exit in a tool of the user's own: its exit code would say what is not so
        ending.fail(f"a tool has ended the run: {describe_error(error)}")
    telling.catch_up()
    if tally.outcomes["doubtful"] and ending.outcome == "interrupted":
        ending.fail("interrupted, and a rollback could not be completed: the files in the workspace are doubtful")
    if telling.problems and ending.outcome == "done":
        ending.fail(f"not everything could be written down: {one_line(describe_error(telling.problems[0]), 300)}")
    if task.record is not None and ending.outcome != "done":
        task.record.leave()
        ending.used_up = task.record.left().used_up()
    ending.plan = session[Plan].latest()
    ending.is_part = bool(task.workspace.is_part)
    own = task.workspace.own_changes()
    ending.changes, ending.patch, ending.mixed = own.changes, own.patch, own.mixed
    return ending


def _prompt(task: Task, session: Session) -> Prompt[None]:
    template = PromptTemplate(
        ns="ringfence",
        key="run",
        name=PROMPT_NAME,
        sections=[
            MarkdownSection(title="Task", key="task", template=INSTRUCTIONS, default_params=TaskParams(task.text)),
            PlanningToolsSection(session=session, strategy=PlanningStrategy.PLAN_ACT_REFLECT),
            task.workspace.section(session),
            *(make(session) for make in task.sections),
        ],
        policies=[LeftOutPolicy(task.workspace), *task.policies],
    )
    return Prompt(template)


def _outcome_of(error: PromptEvaluationError, deadline: Deadline | None) -> Outcome:
    if isinstance(error.__cause__, RestoreFailedError):
        return "failed"
    expired = deadline is not None and deadline.expired
    if expired or error.phase == "budget" or isinstance(error.__cause__, DeadlineExceededError):
        return "limit_reached"
    return "failed" if error.phase == "tool" else "provider_failed"


def _interrupted(ending: RunOutcome, steps: int) -> None:
    stays = f"{plural(steps, 'step')} committed before stay" if steps else "nothing on disk was changed"
    ending.fail(f"interrupted: the running call was rolled back, and {stays}", "interrupted")


def apply(ending: RunOutcome, workspace: RunWorkspace, signals: Signals) -> None:
    """Write what was changed back to disk, if the task was done: all of it, or nothing. Cannot be interrupted."""
    if ending.outcome != "done" or not ending.changes:
        return
    if signals.arrived:
        _interrupted(ending, 0)
        return
    try:
        left_over = workspace.apply(ending.changes)
        ending.applied = True
        if left_over:
            ending.error = f"applied, but files that were replaced could not be removed: {_listed(left_over)}"
    except WorkspaceConflictError as error:
        ending.conflicts = error.paths
        ending.fail("not applied, since files were changed on disk meanwhile")
    except (OSError, ValueError) as error:
        ending.fail(f"not applied: {describe_error(error)}")
    except RestoreFailedError as error:
        ending.fail(f"applying failed, and not everything could be put back: {error}")


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(escape_path(path) for path in paths)
