"""A workspace on disk with its history: what people and programs do with the steps that tool calls made."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ringfence.errors import TransactionError
from ringfence.escapes import display_path
from ringfence.filesystem.paths import normalise
from ringfence.participants import RollbackReport, Step, outside_of_calls
from ringfence.receipts import PolicyVerdict
from ringfence_workspace.commands import LONGEST_SECONDS
from ringfence_workspace.history.ignored_files import (
    IgnoredInHistory,
)
from ringfence_workspace.history.scan import DEFAULT_LIMITS, Exclusion, Progress, ScanLimits, ScanResult, no_progress
from ringfence_workspace.history.step_lookup import NamedStep, StepName, parent_of
from ringfence_workspace.history.store import FOLDER, Store, reporting_damage
from ringfence_workspace.history.store_roots import check_format, replaced
from ringfence_workspace.history.undo_plan import DROPPED, NOT_EMPTY, Planner, ReversalOutcome, ReversalPlan
from ringfence_workspace.history_stores import begin_temporary_store
from ringfence_workspace.host import Durability, HostFilesystem
from ringfence_workspace.transaction.detection import Detect
from ringfence_workspace.transaction.interrupted_calls import (
    KilledCall,
    UnfinishedCall,
    forget_killed,
    killed_calls,
    unfinished_call,
    with_those_above,
)
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.transaction.tree_writer import TreeWriter
from ringfence_workspace.tree.linked_worktrees import is_linked_worktree
from ringfence_workspace.tree.places import made_outside, store_of
from ringfence_workspace.workspace_forks import WorkspaceForks

if TYPE_CHECKING:
    from typing import Self

    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence.limits import Cancellation
    from ringfence.participants import Change
    from ringfence.runtime.policy import Policy
    from ringfence.session.session import Session
    from ringfence_workspace.commands import CommandResult
    from ringfence_workspace.forks.fork_records import Fork
    from ringfence_workspace.forks.promotion import OnConflict, Promotion
    from ringfence_workspace.looks import AdoptedCall, Looks
    from ringfence_workspace.transaction.recovery import Recovered
    from ringfence_workspace.workspace_calls import WorkspaceTransaction
    from ringfence_workspace.workspace_commands import OnError, Streams, WorkspaceCommands


@dataclass(frozen=True, slots=True)
class Reversal:
    """What an undo or a restore did, or would do, by path.

    *restored*: its content is brought back. *removed*: it is gone, as it was not there then. *kept*: as it is, since
    the history does not know it, it is as wanted already, or holds what stays. *conflict*: as it is, since a later step
    that stays, or somebody else, changed it. ``step`` is None where nothing was restored or removed.
    """

    outcomes: Mapping[str, ReversalOutcome]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """By path, in words, why it is kept or a conflict; and of what goes, that it is somebody else's."""
    step: Step | None = None
    notes: Sequence[str] = ()
    """What could not be brought back besides, such as an owner, in words."""
    ignored: Set[str] = frozenset()
    """The paths of ``outcomes`` that git ignores, if they were asked for."""

    @property
    def has_changed(self) -> bool:
        """Whether any path was restored or removed, or would be."""
        return not {"restored", "removed"}.isdisjoint(self.outcomes.values())

    @property
    def lost_external_changes(self) -> Sequence[str]:
        """The paths at which changes by somebody else were reversed, or would be.

        Those that `gc` has dropped the history of are not among them.
        """
        return [
            path
            for path, reason in self.reasons.items()
            if reason != DROPPED and self.outcomes[path] in ("restored", "removed")
        ]


def find_workspace(directory: str | os.PathLike[str]) -> Path | None:
    """Return the nearest directory that has a history: this one, or one above it. As git's commands, it never goes up
    from a linked worktree: that is a workspace of its own."""
    for root in with_those_above(os.path.realpath(directory)):
        if os.path.isdir(os.path.join(store_of(root), FOLDER)):
            return Path(root)
        if is_linked_worktree(None, root):
            return None
    return None


class NothingToUndoError(LookupError):
    """The steps to undo changed nothing at the paths that were given."""

    def __init__(self, steps: Sequence[Step], paths: Collection[str]) -> None:
        self.steps = steps
        self.paths = paths
        of = ", ".join(f"{step.number} ({step.tool})" for step in steps)
        where = ", ".join(display_path(path) or "." for path in paths)
        super().__init__(f"step{'s' if len(steps) > 1 else ''} {of} changed nothing at {where}")


def _check_directory(path: str) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no directory {path}: make it first")
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is no directory: a workspace is opened at one, name that of the file")


class Workspace(WorkspaceForks):
    """One opened workspace on disk. Opened by `open`, and let go of by `close`, which ``with`` calls."""

    def __init__(self, filesystem: HostFilesystem, store: Store, history: StepHistory | None) -> None:
        super().__init__(filesystem, store)
        self._history = history
        self._commands: WorkspaceCommands | None = None
        self._looks: Looks | None = None
        self._closed = False
        self._left_out_first: Mapping[str, tuple[Exclusion, object]] = {}
        self._tip_first = store.tip
        self.unfinished: UnfinishedCall | None = None
        """If this one was opened read-only: the call that had begun to change the files, and was not committed."""

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        limits: ScanLimits = DEFAULT_LIMITS,
        durability: Durability = "process",
        read_only: bool = False,
        only_this_host: bool = False,
        hide: HiddenFiles | None = None,
        progress: Progress | None = None,
        detect: Detect = "auto",
        look_first: bool = True,
    ) -> Workspace:
        """Open the workspace at `root`: recover it, lock it, and take in what changed since its newest step.

        A read-only one is not locked, so that it can be looked at while an agent works; it has what was recorded.
        ``store`` is the directory outside of the root that keeps its history; by default one that the root's real
        path leads to. Of another one only who names it knows: the commands, and copies of the root into memory, take
        what a killed call has left half done for the files as they are. ``only_this_host`` is as for
        `HostFilesystem`, and so are ``hide``, the rule by which files are hidden, and ``detect``. ``progress`` is
        called now and then with the number of files read so far: the first opening reads all of them. Without
        ``look_first`` a later one takes nothing in, and what has changed is left to the next look or call: for who goes
        on with the marks of `begin_look` that an earlier opening made.

        Raises:
            WorkspaceLockedError: another opener has it; it is named.
            NotADirectoryError: the root is a file.
            FileNotFoundError: there is no such directory, or, read-only, no history of it.
            OSError: the store cannot be made or written, or the tree cannot be watched, and ``detect`` is "watch".
            ValueError: the store is inside of the root, another version of ringfence wrote it, or it is damaged; or
                Python does not take names for UTF-8.
            RestoreFailedError: what a killed call left cannot be undone now.
        """
        real = os.path.realpath(root)
        place = os.fspath(store) if store is not None else store_of(real)
        _check_directory(real)
        if read_only:
            return cls._looking(real, place, hide)
        if not os.path.exists(os.path.join(place, FOLDER)):
            begin_temporary_store(real, place)
        place = made_outside(real, place)
        with ExitStack() as opened:
            filesystem = HostFilesystem(
                real,
                store=place,
                limits=limits,
                durability=durability,
                only_this_host=only_this_host,
                hide=hide,
                progress=progress,
                detect=detect,
            )
            opened.callback(filesystem.close)
            history = filesystem.history
            assert history is not None, "it was opened to change it"
            workspace = cls(filesystem, history.store, history)
            if look_first or history.store.tip is None:
                workspace._look_first()
            history.progress = no_progress
            opened.pop_all()  # it is open, and stays so
        return workspace

    def _look_first(self) -> None:
        """Take in the tree as it is. `left_out_since` compares with what is left out now."""
        with reporting_damage(self._store.folder):
            self._look()
        self._left_out_first, self._tip_first = self._left_out(), self._store.tip

    @classmethod
    def _looking(cls, root: str, place: str, hide: HiddenFiles | None) -> Workspace:
        check_format(place)
        filesystem = HostFilesystem(root, store=place, read_only=True, hide=hide)
        try:
            store = Store.open(os.path.join(place, FOLDER), writable=False)
            if store.tip is None:  # its first opener did not come to an end
                store.close()
                raise FileNotFoundError(store.folder)
        except FileNotFoundError:
            filesystem.close()
            above = find_workspace(root)
            advice = f"`ringfence run {root}` or `ringfence serve {root}` begins one"
            if above not in (None, Path(root)):
                advice = f"it is in {above}, which has one"
            raise FileNotFoundError(f"{root} has no history yet: {advice}") from None
        workspace = cls(filesystem, store, None)
        workspace.unfinished = unfinished_call(root, place)
        return workspace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Roll back what is open, and let go of the workspace. Once is enough.

        Raises OSError where it cannot be rolled back (no space, say): the workspace stays open, to be closed again."""
        if self._closed:
            return
        if self._commands is not None:
            self._commands.close()
        self.filesystem.close()  # and the history with it
        if self._history is None:
            self._store.close()
        self._closed = True

    @property
    def left_out(self) -> Mapping[str, Exclusion]:
        """What the newest look at the tree did not take into the history, and why: undo and restore leave it alone."""
        return {path: reason for path, (reason, _) in self._left_out().items()}

    @property
    def left_out_since(self) -> Mapping[str, Exclusion]:
        """Of that, what is there and was not, or not as it is now, when the workspace was opened; and of what was left
        out then, what is gone since without a step that says so."""
        first, now = self._left_out_first, self._left_out()
        gone = [path for path in first if path not in now and not self._is_there(path)]
        told = self._paths_since(self._tip_first) if gone else ()
        return {
            **{path: found[0] for path, found in now.items() if first.get(path) != found and self._is_there(path)},
            **{path: first[path][0] for path in gone if path not in told},
        }

    def _is_there(self, path: str) -> bool:
        return os.path.lexists(os.path.join(self.root, path))

    def _paths_since(self, commit: str | None) -> Collection[str]:
        """What is changed in the history after ``commit``."""
        with self._looking_alone():
            records = itertools.takewhile(lambda record: record.commit != commit, self._store.commits())
            return {path for record in records for path in self._store.step_of(record).paths}

    def _left_out(self) -> Mapping[str, tuple[Exclusion, object]]:
        return self._history.left_out if self._history is not None else {}

    @property
    def damage(self) -> str | None:
        """What was found of the history that cannot be read, when it was opened, in words; None where all can be."""
        return self._store.damage

    @property
    def recovered(self) -> Recovered | None:
        """What opening did about a call that was killed; None where there was nothing to do."""
        return self.filesystem.recovered

    def killed_calls(self) -> Sequence[KilledCall]:
        """Return the calls that recovery has ended since `forget_killed_calls`, oldest first.

        Their processes were killed before they could write a receipt.
        """
        return killed_calls(self._store.folder.parent)

    def forget_killed_calls(self) -> None:
        """Forget them, because their receipts are written. Raise OSError if that is impossible."""
        forget_killed(self._store.folder.parent)

    # Looking.

    def look(self, *, older_than: float = 0.0) -> float | None:
        """Scan for changes by others and record them, unless the last such scan is at most so many seconds old.

        Return the age of the last scan in seconds. Return None for a workspace that was opened read-only: whoever has
        it open scans it.
        """
        if self._history is None:
            return None
        if monotonic() - self._history.looked_at > older_than:
            with self._alone("look"):
                pass
        return monotonic() - self._history.looked_at

    # Changing.

    def undo(
        self,
        n: int | None = None,
        *,
        step: StepName | Collection[int] | None = None,
        session: str | Collection[str] | None = None,
        paths: Collection[str] | None = None,
        dry_run: bool = False,
        with_ignored: bool = True,
    ) -> Reversal:
        """Reverse the newest `n` steps (by default 1), or ``step`` (a number or a name), with regard for later changes.
        ``step`` may be several numbers: these steps are reversed together.

        With ``session``, its id or several ids, the newest steps are those of these sessions. With ``paths`` only what
        these steps changed there, and below, is reversed.

        Text that merges cleanly is merged. It is a step of its own, and can be undone. With ``dry_run`` it only says
        what would become of each path. Without ``with_ignored`` it also says which paths git ignores.

        Raises:
            ValueError: `n` is not positive or beside a ``step``, or ``step`` is the baseline.
            LookupError: there are not so many steps.
            NothingToUndoError: they changed nothing at these paths.
            PermissionError: a path leads out of the workspace, or it was opened read-only.
        """
        named = None if paths is None else {normalise(path) for path in paths}
        with self._alone("undo") as (transaction, history):
            sessions = (session,) if isinstance(session, str) else session
            undone = self._find.steps_to_undo(n, step, sessions)
            plan = self._planner(history).undo(undone, [parent_of(record) for record in undone], named)
            if named is not None and not (plan.outcomes or plan.states):
                raise NothingToUndoError(tuple(self._store.step_of(record) for record in undone), paths or ())
            ignored = frozenset[str]() if with_ignored else self._ignored(undone[-1].commit, plan)
            parents = [record.parent for record in undone if record.parent is not None]
            notes = () if dry_run else self._write(history, plan, parents)
            history.reverses = "" if dry_run else " ".join(str(record.number) for record in undone)
        made = None if dry_run else self._made(transaction, history)
        return Reversal(plan.outcomes, plan.reasons, made, notes, ignored)

    def restore(self, step: StepName, *, dry_run: bool = False, with_ignored: bool = True) -> Reversal:
        """Bring the files back to what they were after a step; 0 is the baseline, and a name stands for its step.

        What somebody else changed meanwhile goes as well, and is in the history first; but a person's commits are not
        an agent's to take back, so what is git's own data stays, unless a step changed it. What the history did not
        know after the step becomes what it was when it was next known, or stays. It is a step of its own.
        Without ``with_ignored`` it also says which paths git ignores.

        Raises:
            LookupError: there is no such step.
        """
        with self._alone("restore") as (transaction, history):
            record = self._find.record(step)
            plan = self._planner(history).restore(record)
            ignored = frozenset[str]() if with_ignored else self._ignored(self._tip(), plan)
            notes = () if dry_run else self._write(history, plan, [record.commit], whole=record.commit)
            history.reverses = "" if dry_run else f">{self._newest_step(record)}"
        made = None if dry_run else self._made(transaction, history)
        return Reversal(plan.outcomes, plan.reasons, made, notes, ignored)

    def _ignored(self, commit: str, plan: ReversalPlan) -> Set[str]:
        return IgnoredInHistory(self._store, self.root).among(plan.outcomes, commit, self._tip())

    def _planner(self, history: StepHistory) -> Planner:
        return Planner(self._store, self._tip(), history.names)

    def _write(
        self,
        history: StepHistory,
        plan: ReversalPlan,
        before: Sequence[str],
        *,
        whole: str | None = None,
        linked: Mapping[int, Sequence[str]] | None = None,
    ) -> Sequence[str]:
        """What could not be brought back besides, in words."""
        with self.filesystem.restoring() as edits:
            writer = TreeWriter(edits, self._store.states, self._tip(), plan.contents)
            kept = writer.write(plan.states, before, whole=whole, linked=linked)
        for path in sorted(kept):
            plan.keep(path, NOT_EMPTY)  # only now, or the plan would say so
        if self.filesystem.has_uncommitted:
            history.rewritten = {*plan.states}
        plan.sort()
        return tuple(writer.notes)

    @contextmanager
    def transaction(
        self, tag: str, *, policies: Sequence[Policy] = (), session: Session | None = None, opaque: bool | None = None
    ) -> Generator[WorkspaceTransaction]:
        """Make what changes during a ``with`` block one step, or none if it raises.

        ``tag`` is the tool that the step names. The block gets an object with `rollback`, and afterwards the `step` and
        the `receipt`. ``policies`` are asked about the changes at the end. ``session`` takes part too, and the step
        bears its id. An ``opaque`` block may run programs, here or elsewhere: the tree is looked at before and after
        it. So it is by default, unless a tool call that is not opaque is around it. It must not change hidden files,
        unless a `HiddenFilesPolicy` among the ``policies`` says otherwise, and a rollback restores them.

        Raises:
            CallDeniedError: a policy denied it, so all is rolled back.
            ParticipantBusyError: another call did not end in time.
            RestoreFailedError: the rollback could not be completed.
        """
        from ringfence_workspace.workspace_calls import new_transaction

        call = new_transaction(self.filesystem, session, tag, policies=policies, opaque=opaque)
        with call.running() as transaction:
            yield transaction

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_seconds: float = 600.0,
        shell: bool = False,
        policies: Sequence[Policy] = (),
        on_error: OnError = "rollback",
        dry_run: bool = False,
        discard: bool = False,
        leave_running: bool = False,
        cancellation: Cancellation | None = None,
        streams: Streams = "captured",
        tag: str = "run",
        title: str | None = None,
    ) -> CommandResult:
        """Run a command on this machine, as the user of this process: its changes are one step, or none.

        ``command`` is a program and its arguments, or with ``shell`` a line of the shell. When this returns, all that
        the command has started has ended, unless it is to ``leave_running`` what it started; what a service of the
        machine (`systemd-run`, `at`) or another user runs for it goes on. A command that fails is rolled back, unless
        ``on_error="keep"``; one that took longer than ``timeout_seconds`` is in any case. ``policies`` are asked about
        the changes of one that is to be kept. A change of a hidden file is denied, unless a `HiddenFilesPolicy` among
        them says otherwise, and a rollback restores it. ``dry_run`` rolls back always. If a failed command has made or
        changed files of which no copy can be kept, such as those above 256 MiB, all of its changes stay, unless they
        are to be ``discard``ed. ``cwd`` is a directory of the workspace. ``tag`` is the tool that the step names, and
        ``title`` stands behind it in a log: by default the command, shortened. With ``streams="output"`` the command
        has the standard input of this
        process, and with "inherited" its output, too, of which the result has nothing then.

        Within a tool call, whose tool has to be opaque, it is part of that.

        Raises:
            CallDeniedError: a policy denied it before it ran.
            CallCancelledError: it was cancelled, ended and rolled back.
            ParticipantBusyError: another call did not end in time.
            FileNotFoundError, NotADirectoryError: ``cwd`` is no directory of the workspace.
            PermissionError: the workspace was opened read-only.
            TransactionError: it is run in a tool call whose tool is not declared opaque.
            ValueError, TypeError: the command cannot be asked for so. ValueError: the fork shares directories.
            RestoreFailedError: the rollback could not be completed.
        """
        from ringfence_workspace.workspace_commands import CommandRules, command_request

        request = command_request(
            command, shell=shell, cwd=cwd, env=env or {}, stdin=stdin, timeout_seconds=timeout_seconds
        )
        self.check_commands_here()
        rules = CommandRules(policies, on_error, dry_run, discard)
        return self._known_commands().run(
            request,
            rules,
            leave_running=leave_running,
            cancellation=cancellation,
            streams=streams,
            tag=tag,
            title=title,
        )

    def run_in_terminal(
        self,
        command: Sequence[str],
        *,
        cwd: str = "",
        tag: str = "run",
        title: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = LONGEST_SECONDS,
        policies: Sequence[Policy] = (),
        rolls_back: Callable[[int, Sequence[Change]], bool] = lambda exit_code, changes: False,
    ) -> CommandResult:
        """Run a command that has the terminal, between two looks: a crash, or a terminal that hangs up, keeps it.

        At its end ``rolls_back`` is called with the exit code and the changes, and says whether they are taken back.
        The changes of others meanwhile are among them. Raises what `run` and `adopt` raise.
        """
        from ringfence.runtime.transaction import new_id
        from ringfence_workspace.workspace_commands import CommandParams, RollbackWish, command_request

        request = command_request(
            command, shell=False, cwd=cwd, env=env or {}, stdin=None, timeout_seconds=timeout_seconds
        )
        self.check_commands_here()
        mark, call_id = self.begin_look(), new_id()
        ended = self._known_commands().run_in_terminal(request, call_id)
        wish = RollbackWish(lambda changes: rolls_back(ended.exit_code, changes))
        params = CommandParams.of(request)
        title = request.title if title is None else title
        found = self.adopt(mark, tool=tag, call_id=call_id, policies=[*policies, wish], params=params, title=title)
        receipt = replace(found.receipt, exit_code=ended.exit_code)
        if found.receipt.policies[-1:] == (PolicyVerdict(wish.name, False, wish.reason),):
            receipt = replace(receipt, outcome="rolled_back")
        left = tuple(RollbackReport(tuple(found.conflicts), tuple(found.notes)).messages())
        return replace(
            ended, outcome=receipt.outcome, changes=found.changes, step=found.step, receipt=receipt, notes=left
        )

    async def arun(self, command: str | Sequence[str], **options: Any) -> CommandResult:
        """`run` in a thread. If this task is cancelled, the command is ended and rolled back before this raises."""
        from ringfence_workspace.async_calls import in_thread

        return await in_thread(lambda cancellation: self.run(command, cancellation=cancellation, **options))

    def atransaction(self, tag: str, **options: Any) -> AbstractAsyncContextManager[WorkspaceTransaction]:
        """`transaction` for ``async with``: it begins and ends in a thread. A cancellation of the block rolls back."""
        from ringfence_workspace.async_calls import in_transaction

        return in_transaction(lambda: self.transaction(tag, **options))

    async def abegin_look(self, *, paths: Collection[str] | None = None) -> str:
        """`begin_look` in a thread."""
        from ringfence_workspace.async_calls import in_thread

        return await in_thread(lambda cancellation: self.begin_look(paths=paths))

    async def aadopt(self, mark: str, *, tool: str, **options: Any) -> AdoptedCall:
        """`adopt` in a thread. If this task is cancelled, it is done all the same before this raises."""
        from ringfence_workspace.async_calls import in_thread

        return await in_thread(lambda cancellation: self.adopt(mark, tool=tool, **options))

    def begin_look(self, *, paths: Collection[str] | None = None) -> str:
        """Look at the files before somebody else runs a call, and return a mark of the look for `adopt`.

        Nothing stays open: no lock, no transaction, no thread. What is different later and is never adopted is
        somebody else's change. With ``paths`` only these files, and what is below them, are looked at. `gc` keeps what
        a mark needs for 7 days.

        Raises:
            ParticipantBusyError: a call did not end in time.
            TransactionError: it is made in a tool call that has changed files.
            PermissionError: the workspace was opened read-only, or a path leads out of it.
        """
        with self._with_looks("begin_look") as looks:
            return looks.begin(paths)

    def drop_look(self, mark: str) -> None:
        """Forget a look. Raises ValueError for an unknown one, and PermissionError where it was opened read-only."""
        with self._with_looks("drop_look") as looks:
            looks.check(mark)
            looks.drop(mark)

    def adopt(
        self,
        mark: str,
        *,
        tool: str,
        call_id: str | None = None,
        session_id: str = "",
        paths: Collection[str] | None = None,
        policies: Sequence[Policy] = (),
        begin_next: bool = False,
        agent: str = "",
        prompt_id: str = "",
        parent_call: str = "",
        approved_by: str = "",
        client: str = "",
        params: object = None,
        title: str = "",
    ) -> AdoptedCall:
        """Make what has changed since a look one step of a call that somebody else ran, or take it back.

        What steps, commands and looks have recorded meanwhile is not part of it. If a policy denies it, the files are
        restored, and what they were is kept, as after any rollback; `.git` in the root is restored too, but for objects
        that came. While a git command holds a lock there, that is waited for, up to 10 seconds; then `.git` stays, and
        is among the conflicts. ``paths`` are those of the look: only these files are looked at. A mark is adopted once.
        With ``begin_next`` the result has the mark of another look, with which the next call begins.

        The other arguments say in the receipt whose call it was.

        Raises:
            ValueError: the mark is unknown, or was adopted or dropped, or ``tool`` is empty. Nothing is changed.
            ParticipantBusyError: another call did not end in time.
            TransactionError: it is adopted within another call.
            PermissionError: the workspace was opened read-only.
            RestoreFailedError: the rollback could not be completed.
        """
        from ringfence_workspace.looks import CallOrigin

        self._check_writable("adopt")
        looks = self._known_looks()
        looks.check(mark)
        origin = CallOrigin(
            tool, call_id, session_id, agent, prompt_id, parent_call, approved_by, client, params=params, title=title
        )
        with reporting_damage(self._store.folder, (KeyError,)):
            found = looks.adopt(mark, origin, paths=paths, policies=policies)
            with self.filesystem.lock.mutex:
                looks.drop(mark)
        return replace(found, mark=self.begin_look()) if begin_next else found

    @contextmanager
    def _with_looks(self, tool: str) -> Generator[Looks]:
        self._check_writable(tool)
        with reporting_damage(self._store.folder, (KeyError,)), self.transaction(tool, opaque=False):
            yield self._known_looks()

    def _known_looks(self) -> Looks:
        from ringfence_workspace.looks import Looks

        if self._looks is None:
            self._looks = Looks(self.filesystem, self._store)
        return self._looks

    def _known_commands(self) -> WorkspaceCommands:
        from ringfence_workspace.workspace_commands import WorkspaceCommands

        with self.filesystem.lock.mutex:
            if self._commands is None:
                self._commands = WorkspaceCommands(self.filesystem)
            return self._commands

    def _check_writable(self, tool: str) -> StepHistory:
        if self._history is None:
            raise PermissionError(f"{tool} changes the workspace, and this one was opened read-only")
        return self._history

    def fork(
        self,
        name: str,
        at: StepName | None = None,
        into: str | os.PathLike[str] | None = None,
        share: Collection[str] = (),
        *,
        secrets: bool = True,
    ) -> Workspace:
        """Make a fork: a directory with all files as they are now, and a history of its own. Return it, opened.

        All of the tree comes along, with modes, times, links and empty directories: ignored files and git's own data,
        and, unless ``secrets`` is false, hidden files, too. ``at`` is the step, a number or a name, whose state it
        begins with: what the history did not know then is as it is now. Its directory is beside the store, or
        ``into``, which must not exist. No file of it shares an inode with the source. Absolute symlinks into the source
        lead into the fork.

        `Fork.points_back` of `fork_record` names what still leads to the source, and `Fork.left_out` what did not come
        along: sockets and other special files, mounts, linked worktrees of git.

        ``share`` names directories that are not copied. The fork has an empty one at the place of each, and its
        containers that of the source, as it is then, to be read. No command of the fork runs on this machine, where it
        would not find them.

        Raises:
            ValueError: it cannot be a name, the place is inside of this workspace, the `.git` in the root is a file
                that leads elsewhere, or a directory cannot be shared: it is not there, hidden, or git's own.
            LookupError: there is no such step.
            FileExistsError: there is a fork of this name, or something at its place.
            OSError: there is no room, or it cannot be written. Nothing of it is left.
            PermissionError: the workspace was opened read-only.
        """
        made = self._make_fork(name, at, into, share, secrets=secrets)
        # Nobody had the path before: what changes from now on is found by the next look or call.
        return Workspace.open(made.root, store=made.store, look_first=False)

    async def afork(self, name: str, **options: Any) -> Workspace:
        """`fork` in a thread. If this task is cancelled, the fork is made all the same, and closed."""
        from asyncio import CancelledError

        from ringfence_workspace.async_calls import in_thread

        made: list[Workspace] = []
        try:
            return await in_thread(lambda cancellation: made.append(self.fork(name, **options)) or made[0])
        except CancelledError:
            for workspace in made:
                workspace.close()
            raise

    def promote(
        self,
        fork: Workspace | Fork | str,
        on_conflict: OnConflict = "abort",
        *,
        dry_run: bool = False,
        with_git: bool = False,
    ) -> Promotion:
        """Make the net changes of a fork of this workspace here, as one step, which can be undone.

        A path that was promoted before is compared with what was promoted, unless an undo or a restore here has
        reversed that. What has not changed here since becomes as in the fork: bytes, kind, permissions, times, links
        and empty directories. Text that both changed is merged, if it merges cleanly. The rest is a conflict. With
        ``on_conflict="abort"`` nothing is changed then, and the result says what is in conflict; with "keep" it stays
        as it is here. What git ignores is no conflict: it stays. With ``dry_run`` nothing is changed.

        Git's own data is not promoted as files, but the commits that were made in the fork come along. They are named
        by `refs/ringfence/candidates/NAME`; or, ``with_git``, by the fork's branch, if it stands here where it stood at
        the fork or where a promotion has moved it. Index and configuration stay. Hidden files are never promoted.

        ``fork`` is one of this workspace: opened, or its name or record, of one that nobody has open.

        Raises:
            ValueError: it is no fork of this workspace, another directory is in its place, or ``on_conflict`` is
                neither "abort" nor "keep".
            LookupError: there is no fork of that name, or its directory is gone.
            WorkspaceLockedError: another process has the fork open.
            OSError (ESTALE): somebody has changed a path meanwhile; nothing is changed.
            TransactionError: it is promoted in a tool call that has changed files.
            PermissionError: the workspace was opened read-only.
        """
        if on_conflict not in ("abort", "keep"):
            raise ValueError(f"on_conflict is one of 'abort', 'keep', not {on_conflict!r}")
        if isinstance(fork, Workspace):
            with outside_of_calls():  # a call that promotes is one of this workspace
                fork.look()
            return self._promote(fork, on_conflict, dry_run=dry_run, with_git=with_git)
        record = self.fork_named(fork) if isinstance(fork, str) else fork
        with self._open_fork(record) as opened:
            return self._promote(opened, on_conflict, dry_run=dry_run, with_git=with_git)

    def diff_forks(self, one: str, other: str, *, read_only: bool = False) -> bytes:
        """The patch from the files of one fork of this workspace to those of another, without paths that git ignores.

        With ``read_only`` it is from their histories as they are, also while others have the forks open, and leaves
        out what somebody else has changed since the last look at a fork.

        Raises:
            ValueError: they are the same fork, or another directory is in the place of one.
            LookupError: there is no fork of that name, or its directory is gone.
            WorkspaceLockedError: another process has one of them open, and ``read_only`` is not given.
        """
        if one == other:
            raise ValueError(f"a patch is from one fork to another, and both are {one!r}")
        a, b = self.fork_named(one), self.fork_named(other)
        with self._open_fork(a, read_only) as before, self._open_fork(b, read_only) as after:
            return before._patch_to(after)

    def _open_fork(self, fork: Fork, read_only: bool = False) -> Workspace:
        """Raises LookupError where its directory is gone, and ValueError for another one in its place."""
        if not os.path.isdir(fork.root):
            raise LookupError(f"the directory of the fork {fork.name!r} is gone: {fork.root}; discard the fork")
        if fork.state == "forgotten":
            raise LookupError(
                f"the history of the fork {fork.name!r} was deleted: copy what you need from {fork.root}, then discard "
                "the fork"
            )
        if replaced(fork.root, fork.store):
            raise ValueError(f"{fork.root} is another directory than the fork {fork.name!r}: discard the fork")
        return Workspace.open(fork.root, store=fork.store, read_only=read_only)

    async def apromote(self, fork: Workspace | Fork | str, **options: Any) -> Promotion:
        """`promote` in a thread. If this task is cancelled, it is done all the same before this raises."""
        from ringfence_workspace.async_calls import in_thread

        return await in_thread(lambda cancellation: self.promote(fork, **options))

    def checkpoint(self, name: str) -> NamedStep:
        """Give the newest step, with what others have changed since, a name: a point that `restore` and `diff` take
        and `gc` keeps, until `drop_checkpoint`. A tool call that gives one and then fails does not take it back.

        Raises:
            ValueError: it is no name, or is taken.
        """
        with self._alone("checkpoint"):
            return self._find.give(name, self._tip())

    def drop_checkpoint(self, name: str) -> None:
        """Take a name away. The step stays, as long as `gc` keeps it. LookupError where there is no such name."""
        with self._alone("checkpoint"):
            self._find.drop(name)

    def gc(self, keep: int) -> int:
        """Drop what the newest `keep` steps, the named ones and the forks do not need; the bytes that this gave back.

        A fork whose directory is gone is dropped, with its history."""
        with self._alone("gc"):
            self._known_looks().expire()
            self._drop_gone_forks()
            return self._store.gc(keep)

    def _look(self) -> ScanResult:
        assert self._history is not None
        return self._history.look()

    @contextmanager
    def _alone(self, tool: str) -> Generator[tuple[WorkspaceTransaction, StepHistory]]:
        """A transaction over the filesystem, with the tree as it is now in the history. In a tool call it is part of
        that, which then makes the step."""
        history = self._check_writable(tool)
        with reporting_damage(self._store.folder, (KeyError,)), self.transaction(tool, opaque=False) as transaction:
            if self.filesystem.has_uncommitted:
                raise TransactionError(f"{tool} is for a tool call of its own: this one has changed files before")
            self._look()
            yield transaction, history

    def _made(self, transaction: WorkspaceTransaction, history: StepHistory) -> Step | None:
        last = history.last
        return last if last is not None and last.call_id == transaction.call_id else None
