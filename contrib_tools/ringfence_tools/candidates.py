"""Candidates of a model: forks of its workspace, in which others work for it, and of which it promotes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path
from ringfence.failures import describe_error
from ringfence.runtime.context import ToolContext
from ringfence.session.tool_result import ToolResult
from ringfence_sandbox import Promotion, Workspace
from ringfence_tools.handlers import MAX_LISTED, Unrendered
from ringfence_tools.printable import plural

AnswerT = TypeVar("AnswerT")

MAX_NAMED = 20
"""The most paths that a message names."""
INTRODUCTION = """\
To try several ways, make a fork for each with `fork_workspace`: a candidate, which has all files as they are now. What
is done in one changes nothing here. `promote` makes the changes of the best one here, as a step; `discard` deletes a
candidate that you made."""


@dataclass(frozen=True, slots=True)
class ForkWorkspace:
    name: str = field(metadata={"description": "1 to 64 letters, digits, '-', '_', '.'."})


@dataclass(frozen=True, slots=True)
class PromoteFork:
    name: str
    on_conflict: Literal["abort", "keep"] = field(
        default="abort",
        metadata={"description": "If a path changed here as well: change nothing, or keep it as it is here."},
    )
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class DiscardFork:
    name: str


@dataclass(frozen=True, slots=True)
class MadeFork(Unrendered):
    """A fork that a session made. Only this session's model discards it."""

    name: str
    created_at: str
    """ISO 8601."""


@dataclass(frozen=True, slots=True)
class PromotedPath:
    path: str
    outcome: Literal["applied", "merged", "kept", "conflict"]
    """applied, merged, kept (as it is here), or conflict (it has changed here as well, and is as it is here)."""
    reason: str | None = None

    def render(self) -> str:
        return f"{self.outcome:9} {self.path}" + (f"  ({self.reason})" if self.reason is not None else "")


@dataclass(frozen=True, slots=True)
class PromotedFork:
    name: str
    paths: tuple[PromotedPath, ...]
    left_out: int = 0
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        more = [f"[{self.left_out:,} more paths]"] if self.left_out else []
        return "\n".join((*(one.render() for one in self.paths), *more, *self.notes))


class Candidates:
    """The forks of a workspace: the tools over them, and for `DelegationSection` the way to one."""

    def __init__(self, workspace: Callable[[], AbstractContextManager[Workspace]]) -> None:
        self._workspace = workspace

    def opened(self, name: str) -> Workspace:
        """Open a fork. Raises ToolValidationError where there is none of that name."""
        fork = self._ask(lambda workspace: workspace.fork_named(name))
        return Workspace.open(fork.root, store=fork.store)

    def fork_workspace(self, params: ForkWorkspace, *, context: ToolContext) -> ToolResult[MadeFork]:
        def fork(workspace: Workspace) -> MadeFork:
            with workspace.fork(params.name) as made:
                record = made.fork_record
            assert record is not None, "it was forked"
            return MadeFork(record.name, record.created_at.isoformat())

        made = self._ask(fork)
        return ToolResult.ok(made, f"the candidate {made.name} has all files as they are now")

    def promote(self, params: PromoteFork, *, context: ToolContext) -> ToolResult[PromotedFork]:
        done = self._ask(lambda workspace: workspace.promote(params.name, params.on_conflict, dry_run=params.dry_run))
        if done.conflicts and params.on_conflict == "abort" and not params.dry_run:
            return ToolResult.error(
                f"nothing was changed: {_named_conflicts(done)}; on_conflict=keep promotes the rest, and leaves these"
            )
        return ToolResult.ok(_promoted(done), _message(done, params.dry_run))

    def discard(self, params: DiscardFork, *, context: ToolContext) -> ToolResult[None]:
        own = {(made.name, made.created_at) for made in context.session[MadeFork].all()}

        def discard(workspace: Workspace) -> None:
            fork = workspace.fork_named(params.name)
            if (fork.name, fork.created_at.isoformat()) not in own:
                raise ValueError(f"the fork {fork.name!r} is not of your making: whoever made it discards it")
            workspace.discard_fork(params.name)

        self._ask(discard)
        return ToolResult.ok(None, f"the candidate {params.name} is gone")

    def _ask(self, question: Callable[[Workspace], AnswerT]) -> AnswerT:
        return ask_workspace(self._workspace, question)


def ask_workspace(
    workspace: Callable[[], AbstractContextManager[Workspace]], question: Callable[[Workspace], AnswerT]
) -> AnswerT:
    """Open a workspace and ask it. Raises ToolValidationError if it refuses. A KeyError or IndexError is a bug and
    passes."""
    try:
        with workspace() as opened:
            return question(opened)
    except (KeyError, IndexError):
        raise
    except (LookupError, ValueError, FileNotFoundError) as error:
        raise ToolValidationError(str(error)) from None
    except FileExistsError as error:
        raise ToolValidationError(describe_error(error)) from None


def _named_conflicts(done: Promotion) -> str:
    named = [f"{display_path(path)} ({done.reasons.get(path, 'conflict')})" for path in done.conflicts[:MAX_NAMED]]
    more = len(done.conflicts) - len(named)
    return ", ".join(named) + (f", and {more:,} more" if more else "")


def _promoted(done: Promotion) -> PromotedFork:
    paths = [
        PromotedPath(display_path(path), outcome, done.reasons.get(path)) for path, outcome in done.outcomes.items()
    ]
    left_out = [f"left out: {display_path(path)} ({why})" for path, why in done.left_out.items()]
    notes = tuple([*done.notes, *left_out][:MAX_NAMED])
    if done.git_ref:
        notes = (*notes, f"its commits are named by {done.git_ref}")
    return PromotedFork(done.fork.name, tuple(paths[:MAX_LISTED]), max(0, len(paths) - MAX_LISTED), notes)


def _message(done: Promotion, is_dry: bool) -> str:
    counts = Counter(done.outcomes.values())
    if not counts:
        return f"the candidate {done.fork.name} has nothing to promote"
    would = "would be " if is_dry else ""
    changed = counts["applied"] + counts["merged"]
    return f"{plural(changed, 'path')} {would}promoted, {counts['kept']} kept, {plural(counts['conflict'], 'conflict')}"
