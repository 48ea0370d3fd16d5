"""Transactions over a workspace without a prompt: judged by policies, and with a receipt of their own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from ringfence.errors import CallCancelledError, CallDeniedError, RestoreFailedError
from ringfence.failures import describe_error
from ringfence.filesystem.protocol import Filesystem
from ringfence.limits import RunOptions
from ringfence.participants import RollbackReport, current_call
from ringfence.policies.effects import HiddenFilesPolicy
from ringfence.resources import Binding, CallResources, ResourceContext, ResourceRegistry
from ringfence.runtime.binding import BoundTool, bind_tool
from ringfence.runtime.context import Rendering, ToolContext
from ringfence.runtime.policy import Policy, check_policy
from ringfence.runtime.policy_verdicts import judge_call, judge_effects, show_result
from ringfence.runtime.tool import TOOL_NAME, Tool
from ringfence.runtime.transaction import Transaction, draft_receipt, tool_transaction
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult

if TYPE_CHECKING:
    from ringfence.limits import Cancellation, Deadline
    from ringfence.participants import CallInfo, Change, Step
    from ringfence.receipts import Outcome, PolicyVerdict, Receipt
    from ringfence_workspace.host import HostFilesystem

logger = logging.getLogger(__name__)

_NO_TOOL_NAME = re.compile(r"[^a-z0-9_-]+")


class PolicyScope:
    """What policies ask a prompt for, where a call has none."""

    ns = key = "workspace"
    name: str | None = "workspace"
    scope = "workspace"

    def __init__(self, policies: Sequence[Policy], context: ResourceContext) -> None:
        self.policies = policies
        self.context = context

    @property
    def resources(self) -> Self:
        return self

    def render(self, *, session: Session, deadline: Deadline | None = None) -> Rendering:
        """Raises TypeError: there is no prompt."""
        raise TypeError("a call of a workspace has no prompt")

    def policies_for_tool(self, name: str) -> Sequence[Policy]:
        return self.policies

    def result_policies(self, name: str) -> Sequence[Policy]:
        return self.policies


class PolicyJudge:
    """The policies on one call, with what they are shown of it."""

    def __init__(
        self,
        resources: ResourceContext,
        session: Session,
        tool: str,
        *,
        policies: Sequence[Policy],
        opaque: bool,
        params: object = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        for policy in policies:
            check_policy(policy, "policies")
        self.verdicts: list[PolicyVerdict] = []
        self.params = params
        self._session = session
        self._cancellation = cancellation
        self._prompt = PolicyScope(policies, resources)
        self._tool: BoundTool | None = None
        self._context: ToolContext | None = None
        if policies:
            name = tool if TOOL_NAME.fullmatch(tool) else _NO_TOOL_NAME.sub("_", tool.lower())[:64] or "call"
            described = Tool[Any, Any](
                name=name,
                description="A call of a workspace.",
                handler=None,
                opaque=opaque,
                declared_types=(None, None),
            )
            self._tool = bind_tool(described, self._prompt)

    def judge_call(self, transaction: Transaction) -> None:
        """Ask the policies before the call. Raises CallDeniedError."""
        if self._tool is not None:
            self._context = ToolContext(
                self._prompt,
                None,
                None,
                self._session,
                options=RunOptions(),
                call=transaction,
                scope=CallResources(self._prompt.context, transaction),
                cancellation=self._cancellation,
            )
            _raise(judge_call(self._tool, self.params, self._context, transaction, self.verdicts))

    def judge_effects(self, transaction: Transaction, result: ToolResult[Any]) -> None:
        """Ask the policies about the changes, and show them the result. Raises CallDeniedError."""
        if self._tool is None or self._context is None:
            return
        self._context.result = result
        if transaction.changes:
            _raise(judge_effects(self._tool, self.params, self._context, transaction, self.verdicts))
        show_result(self._tool, self.params, result, self._context, transaction)


def _raise(denial: PolicyVerdict | None) -> None:
    if denial is not None:
        raise CallDeniedError(denial.policy, denial.reason)


class WorkspaceTransaction:
    """One transaction over the files of a workspace: kept at the end of its block, or rolled back.

    After the block it has the `step` and the `receipt`.
    """

    def __init__(
        self,
        filesystem: HostFilesystem,
        session: Session,
        tag: str,
        *,
        policies: Sequence[Policy] = (),
        opaque: bool = True,
        call_id: str | None = None,
        params: object = None,
        title: str = "",
        dry_run: bool = False,
        cancellation: Cancellation | None = None,
        describe: Callable[[Receipt], Receipt] = lambda receipt: receipt,
        on_denial: Callable[[], object] = lambda: None,
        keeps_hidden: bool = False,
    ) -> None:
        """``describe`` adds to the receipt. ``on_denial`` is called before the rollback of what a policy has denied.
        With ``keeps_hidden`` the files that are hidden may be changed by what runs in it: a change of one is denied,
        unless a HiddenFilesPolicy among the ``policies`` says otherwise, and a rollback restores it."""
        self.step: Step | None = None
        """The step that it has become. None before its end, where it changed nothing, and within another call."""
        self.receipt: Receipt | None = None
        """The record of it, once it has ended."""
        self.result: ToolResult[Any] = ToolResult.ok(None, "")
        """For policies that are asked about the changes."""
        self._filesystem = filesystem
        self._session = session
        self._tag = tag
        self._policies = tuple(policies)
        self._opaque = opaque
        self._call_id = call_id
        self._params = params
        self._title = title
        self._dry_run = dry_run
        self._cancellation = cancellation
        self._describe = describe
        self._on_denial = on_denial
        self._keeps_hidden = keeps_hidden and filesystem.hidden is not None
        if self._keeps_hidden and not any(isinstance(one, HiddenFilesPolicy) for one in policies):
            self._policies = (HiddenFilesPolicy(deny_new=False), *self._policies)
        self._judge: PolicyJudge | None = None
        self._transaction: Transaction | None = None
        self._is_rolled_back = False
        self._report = RollbackReport()

    @property
    def call_id(self) -> str:
        assert self._transaction is not None, "it has begun"
        return self._transaction.call_id

    @property
    def changes(self) -> Sequence[Change]:
        """What it changed, also if that was rolled back. Known when it has ended."""
        return () if self.receipt is None else self.receipt.changes

    @property
    def report(self) -> RollbackReport:
        """What its rollback left."""
        return self._report if self._transaction is None or self._is_rolled_back else self._transaction.report

    def rollback(self) -> RollbackReport:
        """Take back what was done since the block began. What is done until the end of the block is not part of it."""
        if self._transaction is not None and not self._is_rolled_back:
            self._is_rolled_back = True
            self._seal()
            self._report = self._transaction.rollback()
        return self._report

    def refuse_rollback(self) -> Sequence[str]:
        """Have the changes stay if the rollback, which comes next, could not keep all that it removes. Return the paths
        that it could not keep."""
        self._seal()
        try:
            return self._filesystem.refuse_rollback()
        except OSError:
            logger.warning("the failed call %s is rolled back, whatever can be kept of it", self._tag, exc_info=True)
            return ()

    @contextmanager
    def running(self) -> Generator[Self]:
        """The block. Raises CallDeniedError for what a policy denies, and what `tool_transaction` raises."""
        started, clock = datetime.now(UTC), perf_counter()
        try:
            with (
                ResourceRegistry.of(Binding.instance(Filesystem, self._filesystem)).open() as resources,
                tool_transaction(
                    self._session,
                    resources,
                    tag=self._tag,
                    opaque=self._opaque,
                    call_id=self._call_id,
                    settle=self._settle,
                ) as transaction,
            ):
                self._transaction = transaction
                self._judge = PolicyJudge(
                    resources,
                    self._session,
                    self._tag,
                    policies=self._policies,
                    opaque=self._opaque,
                    params=self._params,
                    cancellation=self._cancellation,
                )
                self._judge.judge_call(transaction)
                if self._keeps_hidden:
                    self._filesystem.copy_hidden()
                try:
                    yield self
                except BaseException:
                    self._seal()  # so that it is known what is rolled back
                    raise
                if self._is_rolled_back:
                    raise _RolledBackError
        except BaseException as error:
            self._end_without_commit(error, started, perf_counter() - clock)
            if not isinstance(error, _RolledBackError):
                raise
        else:
            assert self._transaction is not None
            self.step = self._transaction.step
            if self.step is not None and self.receipt is not None:
                self.receipt = replace(self.receipt, commit=self.step.commit)

    def _seal(self) -> None:
        assert self._transaction is not None
        if not self._transaction.sealed:
            try:
                self._transaction.seal()
            except Exception:
                logger.warning("the failed call %s did not end well", self._tag, exc_info=True)

    def _settle(self, transaction: Transaction, receipt: Receipt) -> Receipt:
        assert self._judge is not None
        try:
            self._judge.judge_effects(transaction, self.result)
        except CallDeniedError:
            self._on_denial()
            raise
        transaction.check_problems()
        if self._cancellation is not None:
            self._cancellation.check()
        if self._dry_run:
            raise _RolledBackError
        self.receipt = self._described(receipt)
        return self.receipt

    def _described(self, receipt: Receipt) -> Receipt:
        verdicts = () if self._judge is None else tuple(self._judge.verdicts)
        exit_code: object = getattr(self.result.value, "exit_code", None)
        described = replace(
            receipt,
            params=self._params,
            title=self._title,
            policies=verdicts,
            exit_code=exit_code if type(exit_code) is int else None,
        )
        return self._describe(described)

    def _end_without_commit(self, error: BaseException, started: datetime, seconds: float) -> None:
        self.receipt = None
        if self._transaction is not None:
            report = self.report
            words = [] if isinstance(error, _RolledBackError) else [describe_error(error)]
            receipt = draft_receipt(self._transaction, self._session, started, seconds)
            self.receipt = replace(
                self._described(receipt),
                outcome=_outcome(error),
                message="; ".join([*words, *report.messages()]),
                conflicts=report.conflicts,
            )


def is_opaque_by_default(call: CallInfo | None) -> bool:
    """Whether a transaction looks for the changes of programs where nobody says so: within a call only if that does."""
    return call is None or call.opaque


def new_transaction(
    filesystem: HostFilesystem,
    session: Session | None,
    tag: str,
    *,
    policies: Sequence[Policy],
    opaque: bool | None,
) -> WorkspaceTransaction:
    """A transaction that has not begun."""
    found = is_opaque_by_default(current_call()) if opaque is None else opaque
    return WorkspaceTransaction(
        filesystem, session or Session(), tag, policies=policies, opaque=found, keeps_hidden=found
    )


class _RolledBackError(Exception):
    """Whoever made the call asked for its rollback."""


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, RestoreFailedError):
        return "doubtful"
    if isinstance(error, CallDeniedError):
        return "denied"
    if isinstance(error, _RolledBackError):
        return "rolled_back"
    return "failed" if isinstance(error, Exception) and not isinstance(error, CallCancelledError) else "interrupted"
