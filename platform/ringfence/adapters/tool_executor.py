"""The way of a tool call, from a model's request to its answer, top to bottom."""

from __future__ import annotations

import difflib
import errno
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from ringfence import serde
from ringfence.adapters.core import ProviderAdapter
from ringfence.adapters.offers import BoundTool, bind_tool
from ringfence.errors import (
    CallCancelledError,
    CallEndedError,
    DeadlineExceededError,
    PromptEvaluationError,
    RestoreFailedError,
    RingfenceError,
    ToolValidationError,
    TransactionError,
    VisibilityExpansionRequired,
)
from ringfence.failures import describe_error
from ringfence.participants import Mark, Transactional, current_call, set_current_call
from ringfence.prompt.long_results import READER, full_result_path
from ringfence.prompt.policy import ALLOW, Policy, PolicyDecision
from ringfence.prompt.tool import ToolContext
from ringfence.prompt.tool_result import (
    MAX_RESULT_CHARACTERS,
    AcceptsChanges,
    ToolResult,
    bounded,
    exit_code_of,
    whole_text,
)
from ringfence.resources.context import CallResources, ResourceContext
from ringfence.runtime.events import RejectedToolParams, ToolCallStarted, ToolInvoked
from ringfence.runtime.ids import new_id
from ringfence.runtime.interrupts import Interrupts
from ringfence.runtime.limits import BudgetTracker, Cancellation, Deadline, Heartbeat, RunContext, RunOptions
from ringfence.runtime.lock_order import Participants, sort_locks
from ringfence.runtime.receipts import Outcome, PolicyVerdict, Receipt
from ringfence.runtime.session import Session
from ringfence.runtime.transaction import ReceiptUpdates, Transaction, leave

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.prompt.rendering import RenderedPrompt

logger = logging.getLogger(__name__)

now = datetime.now


def check_arguments(prompt: object, session: object) -> None:
    """Raises TypeError for what is no prompt, such as a template, and for what is no session."""
    from ringfence.prompt.prompt import Prompt

    if not isinstance(prompt, Prompt):
        hint = ": write Prompt(template)" if hasattr(prompt, "sections") else ""
        raise TypeError(f"the prompt is a {type(prompt).__name__}, not a Prompt{hint}")
    if not isinstance(session, Session):
        raise TypeError(f"the session is a {type(session).__name__}, not a Session")


@dataclass(frozen=True, slots=True)
class ToolCallResult:
    """How a tool call ended: the result, what the model reads, and the receipt."""

    result: ToolResult[Any]
    text: str
    receipt: Receipt


UNFINISHED = ToolResult.error("the call did not come to an end")


@dataclass(frozen=True, slots=True)
class _Locks:
    resources: Sequence[Transactional]
    taken: Participants


@dataclass(slots=True)
class _Ending:
    """What is known of a call while it goes on, and in the end how it ended."""

    name: str
    call_id: str
    params: object
    recorded: object
    """The params as they came: a copy, where a handler could change them."""
    started_at: datetime
    clock: float
    verdicts: list[PolicyVerdict]
    outcome: Outcome = "failed"
    result: ToolResult[Any] = UNFINISHED
    rendered: str = ""
    raises: BaseException | None = None
    """What leaves `call` when everything is in order again."""
    invoked: ToolInvoked | None = None
    receipt: Receipt | None = None
    conflicts: Sequence[str] = ()
    """What the rollback left alone."""
    taken_back: ReceiptUpdates = ()
    """What to tell of calls within this one that it took back."""


class ToolExecutor:
    """Runs tool calls of one prompt and session, each a transaction.

    To be used inside ``with prompt.resources:``. What a call raises is only what ends an evaluation:
    VisibilityExpansionRequired, PromptEvaluationError (a passed deadline and a rollback that could not be completed
    included) and what is no `Exception`, such as KeyboardInterrupt; all of it after the rollback.
    """

    def __init__(
        self,
        *,
        prompt: Prompt[Any],
        session: Session,
        adapter: ProviderAdapter | None = None,
        deadline: Deadline | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        rendered_prompt: RenderedPrompt[Any] | None = None,
        run_context: RunContext | None = None,
    ) -> None:
        """``rendered_prompt`` is the rendering whose tools are on offer; it is made here where it is not given.

        Raises TypeError for what is no prompt, no session and no limit, and what `Prompt.render` raises.
        """
        check_arguments(prompt, session)
        RunOptions(deadline, budget_tracker, heartbeat, run_context)  # refuses limits of another type
        self.prompt = prompt
        self.session = session
        self.adapter = adapter
        self.deadline = deadline
        self.budget_tracker = budget_tracker
        self.heartbeat = heartbeat
        self.run_context = run_context
        if rendered_prompt is None:
            rendered_prompt = replace(prompt.render(session=session), deadline=deadline)
        self.rendered_prompt = rendered_prompt
        self.prompt_name = prompt.name or f"{prompt.ns}:{prompt.key}"
        self._session_id = str(session.session_id)
        self._adapter_name = type(adapter).__name__ if adapter is not None else ""
        self._offers = {tool.name: bind_tool(tool, prompt) for tool in self.rendered_prompt.tools}
        self._locks = _Locks((), sort_locks((session,)))

    def call(
        self, name: str, arguments: Mapping[str, object] | str | None, *, call_id: str | None = None
    ) -> ToolResult[Any]:
        """Run one tool call; ``arguments`` is a mapping or JSON text."""
        return self.execute(name, arguments, call_id=call_id).result

    def execute(
        self,
        name: str,
        arguments: Mapping[str, object] | str | None,
        *,
        call_id: str | None = None,
        cancellation: Cancellation | None = None,
    ) -> ToolCallResult:
        """`call`, with the text for the model and the receipt.

        A call that is cancelled before its commit point is rolled back, and its outcome is "interrupted".
        """
        if self.heartbeat is not None:
            self.heartbeat.beat()
        ending = _Ending(name, call_id or new_id(), arguments, arguments, now(UTC), perf_counter(), [])
        if self.session.heard(ToolCallStarted):
            self._tell_begun(ending, arguments)
        call = Transaction(ending.call_id, name, current_call())
        call.deadline, call.budget_tracker = self.deadline, self.budget_tracker
        if call.parent is not None:
            self._limit_as_around(call)
        offer = self._resolved(ending)
        if offer is None or not self._parsed(ending, offer, arguments):
            self._record(ending, call)
            self._tell(ending)
            return self._answered(ending)
        call.opaque = offer.opaque
        resources = self.prompt.resources.context
        context = self._context(call, resources, cancellation)
        interrupts = Interrupts()
        try:
            try:
                set_current_call(call)
                interrupts.allow()
                call.lock(self._locked_for(resources.participants))
                if self._permitted(ending, offer, context, call):
                    interrupts.hold()
                    call.begin()
                    interrupts.allow()
                    self._run(ending, offer, context, call)
                    self._settle(ending, offer, context, call)
                interrupts.hold()
                if ending.outcome == "committed":
                    self._commit(ending, call)
            except BaseException as error:
                interrupts.hold()
                _failed(ending, error, call)
        except BaseException as error:  # an interrupt in the one line before the one that holds them back
            _failed(ending, error, call)
        try:  # No interrupt comes through in here: one that did before is on its way out in `ending.raises`.
            if ending.receipt is None:
                self._roll_back(ending, context, call)
            self._record(ending, call)
        finally:
            call.release()
            try:
                leave(call, interrupts)
            finally:
                self._tell(ending)
        return self._answered(ending)

    def _limit_as_around(self, call: Transaction) -> None:
        """The limits of a call hold for what its handler does, and so for the calls that this makes."""
        limits = RunOptions(self.deadline, self.budget_tracker).inherit()
        call.deadline, call.budget_tracker = limits.deadline, limits.budget_tracker

    def _tell_begun(self, ending: _Ending, arguments: Mapping[str, object] | str | None) -> None:
        offer = self._offers.get(ending.name)
        self.session.notify(
            ToolCallStarted(
                call_id=ending.call_id,
                name=ending.name,
                description=offer.tool.description if offer is not None else None,
                arguments=arguments,
                prompt_name=self.prompt_name,
                session_id=self.session.session_id,
                started_at=ending.started_at,
            )
        )

    def _resolved(self, ending: _Ending) -> BoundTool | None:
        offer = self._offers.get(ending.name)
        if offer is None or offer.handler is None:
            ending.outcome = "rejected"
            run = [name for name, offer in self._offers.items() if offer.handler is not None]
            near = difflib.get_close_matches(str(ending.name), run, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(run) or 'none'}"
            what = "there is no tool" if offer is None else "it is only described, and nothing runs the tool"
            ending.result = ToolResult.error(f"{what} {ending.name!r}; {hint}")
            ending.params = RejectedToolParams(ending.recorded, ending.result.message)
            return None
        return offer

    def _parsed(self, ending: _Ending, offer: BoundTool, arguments: Mapping[str, object] | str | None) -> bool:
        try:
            ending.params = offer.decode({} if arguments is None or arguments == "" else arguments)
        except Exception as error:  # what a params class raises by itself, too
            ending.outcome = "rejected"
            ending.params = RejectedToolParams(raw_arguments=arguments, error=str(error))
            ending.result = ToolResult.error(f"the arguments of {ending.name} do not fit: {describe_error(error)}")
            ending.recorded = ending.params
            return False
        ending.recorded = _copied(ending.params) if offer.tool.params_can_change else ending.params
        return True

    def _locked_for(self, resources: Sequence[Transactional]) -> Participants:
        """What a call takes; the same again for as long as the resources are."""
        known = self._locks
        if known.resources is not resources:
            known = self._locks = _Locks(resources, sort_locks((self.session, *resources)))
        return known.taken

    def _context(self, call: Transaction, resources: ResourceContext, cancellation: Cancellation | None) -> ToolContext:
        return ToolContext(
            prompt=self.prompt,
            rendered_prompt=self.rendered_prompt,
            adapter=self.adapter,
            session=self.session,
            deadline=call.deadline,
            heartbeat=self.heartbeat,
            run_context=self.run_context,
            budget=call.budget_tracker,
            cancellation=cancellation,
            call=call,
            scope=CallResources(resources, call),
        )

    def _permitted(self, ending: _Ending, offer: BoundTool, context: ToolContext, call: Transaction) -> bool:
        """Policies, of the section and then of the prompt, until one denies; then the deadline and cancellation."""
        session, tool, params = self.session, offer.tool, ending.params
        before = session.begin(call)
        for policy, verdict, asked in offer.policies:
            if asked:
                try:
                    decision = policy.check(tool, params, context=context)
                    if decision is not ALLOW or session.changed(before):
                        verdict = self._verdict(policy, decision, verdict, before, call)
                except BaseException as error:
                    verdict = self._undecided(policy, error, ending.name, before, call)
            ending.verdicts.append(verdict)
            if not verdict.allowed:
                return _denied(ending, verdict)
        if call.deadline is not None and call.deadline.expired:
            ending.outcome = "denied"
            raise DeadlineExceededError(f"the deadline had passed before {ending.name} could run")
        if context.cancellation is not None:
            context.cancellation.check()
        return True

    def _effects_permitted(self, ending: _Ending, offer: BoundTool, context: ToolContext, call: Transaction) -> bool:
        """Effect policies, until one denies what the call has changed; what they read does not count as read by it."""
        before, read = self.session.begin(call), {lock: dict(reads) for lock, reads in call.reads.items()}
        changes = [change for changes in call.changes.values() for change in changes]
        try:
            for policy, verdict in offer.effect_policies:
                try:
                    decision = policy.check_effects(offer.tool, ending.params, changes, context=context)
                    verdict = self._verdict(policy, decision, verdict, before, call)
                except BaseException as error:
                    verdict = self._undecided(policy, error, ending.name, before, call)
                ending.verdicts.append(verdict)
                if not verdict.allowed:
                    return _denied(ending, verdict)
            return True
        finally:
            call.reads.clear()
            call.reads.update(read)

    def _verdict(
        self, policy: Policy, decision: PolicyDecision, allowed: PolicyVerdict, before: Mark, call: Transaction
    ) -> PolicyVerdict:
        """What one policy's decision means. TypeError where it is none, or the policy has changed the session."""
        if not isinstance(decision, PolicyDecision) or type(decision.allowed) is not bool:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"it answered {decision!r}, which is no PolicyDecision that says yes or no")
        if self._took_back(before, call):
            raise TypeError("it changed the session while it decided")
        return allowed if decision.allowed else PolicyVerdict(policy.name, False, decision.reason)

    def _undecided(
        self, policy: Policy, error: BaseException, tool: str, before: Mark, call: Transaction
    ) -> PolicyVerdict:
        """A policy that raises denies, and has changed nothing. What is no `Exception` goes on."""
        self._took_back(before, call)
        if not isinstance(error, Exception):
            raise error
        logger.warning("the policy %s could not decide on %s", policy.name, tool, exc_info=error)
        return PolicyVerdict(policy.name, False, f"the policy could not decide: {describe_error(error)}")

    def _took_back(self, before: Mark, call: Transaction) -> bool:
        """Whether a policy had changed the session; it is as it was before then."""
        if not self.session.changed(before):
            return False
        with self.session.lock.mutex:
            if self.session.lock.holder is not call:  # the call around has ended: the session may be another's by now
                raise CallEndedError(f"the call that made {call!r} has ended")
            self.session.rollback(before)
            return True

    def _run(self, ending: _Ending, offer: BoundTool, context: ToolContext, call: Transaction) -> None:
        """The handler, in its resource scope; from its end on, nothing changes through this call."""
        assert offer.handler is not None
        assert context.scope is not None
        if offer.opaque:
            _ = context.filesystem  # one that is made when it is asked for joins the call with that
            if not call.tracks_external_writes():
                raise TransactionError(
                    f"{ending.name} changes files by itself, as programs do, and no filesystem of this prompt sees "
                    "that: bind one on disk that is not read-only, such as that of a Workspace (one of your own "
                    "that does has sees_programs = True)"
                )
        result = offer.handler(ending.params, context=context)
        context.scope.close()
        # By the real type: `isinstance` believes a `__class__` that lies.
        if not issubclass(type(result), ToolResult) or not isinstance(result.message, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"its handler returned {type(result).__name__}, not a ToolResult with a text for a message")
        if type(result.message) is not str:  # a subclass may do anything when it is put together
            result = replace(result, message=str.__str__(result.message))
        if type(result.success) is not bool:
            raise TypeError(f"its handler returned a ToolResult with success={result.success!r}: it is True or False")
        if result.success and not offer.fits(result.value):
            raise TypeError(
                f"its handler returned a value of another type than it declares: {type(result.value).__name__}, "
                f"not {offer.tool.result_words}"
            )
        ending.result = result
        call.seal()
        if offer.opaque and result.success and isinstance(result.value, AcceptsChanges):
            ending.result = replace(result, value=result.value.with_changes(call.all_changes()))

    def _settle(self, ending: _Ending, offer: BoundTool, context: ToolContext, call: Transaction) -> None:
        """Everything that may still turn a successful call into a failed one."""
        result = ending.result
        looked_at = result.success and offer.effect_policies and call.changes
        if looked_at and not self._effects_permitted(ending, offer, context, call):
            if (code := exit_code_of(result.value)) is not None:  # what a command found out was paid for
                said = f"{ending.result.message}; it had ended with exit code {code}, and what it did is taken back"
                ending.result = replace(result, message=said, success=False)
                ending.rendered = "" if result.exclude_value_from_context else result.render()
            return
        if result.value is not None and not result.exclude_value_from_context:
            ending.rendered = result.render()
        if not result.success:
            return
        if offer.read_only and call.changed(self.session):
            raise TransactionError(f"{ending.name} is declared read-only, but it changed something")
        for policy in offer.learning:
            if call.ended:
                raise CallEndedError(f"the call that made {call!r} has ended, and took it back")
            try:
                policy.on_result(offer.tool, ending.params, result, context=context)
            except (RingfenceError, OSError):  # in words for the model
                raise
            except Exception as error:
                raise TransactionError(
                    f"the policy {policy.name} failed on the result: {describe_error(error)}"
                ) from error
        ending.invoked = self._event(ending)
        if call.parent is None:  # so nothing can end it but itself
            self.session.apply(ending.invoked, to="state")
        else:
            with self.session.lock.mutex:
                if call.ended:
                    raise CallEndedError(f"the call that made {call!r} has ended, and took it back")
                self.session.apply(ending.invoked, to="state")
        if call.problems:
            raise TransactionError(f"it cannot be kept: {describe_error(call.problems[0])}") from call.problems[0]
        if context.cancellation is not None:
            context.cancellation.check()
        ending.outcome = "committed"

    def _commit(self, ending: _Ending, call: Transaction) -> None:
        """The commit point. What fails here rolls back like anything else."""
        ending.receipt = self._receipt(ending, call)
        try:
            step = call.commit(ending.receipt)
        except BaseException:
            ending.receipt = None
            raise
        if step is not None:
            ending.receipt = replace(ending.receipt, commit=step.commit)

    def _roll_back(self, ending: _Ending, context: ToolContext, call: Transaction) -> None:
        """The call's own resources closed, if its handler left them open; then everything back."""
        try:
            if context.scope is not None:
                context.scope.close()
            if not call.sealed:
                call.seal()
        except BaseException as error:
            logger.warning("the failed call %s did not end well", ending.name, exc_info=True)
            if not isinstance(error, Exception) and ending.raises is None:
                ending.raises = error
        try:
            report = call.rollback()
            if report.conflicts or report.notes:
                said = "; ".join((ending.result.message, *report.said()))
                ending.result = replace(ending.result, message=said)
                ending.conflicts = report.conflicts
        except RestoreFailedError as error:
            ending.outcome = "doubtful"
            ending.result = ToolResult.error(str(error))
            raised = PromptEvaluationError(f"{ending.name}: {error}", prompt_name=self.prompt_name, phase="tool")
            raised.__cause__ = error
            if ending.raises is None or isinstance(ending.raises, Exception):
                ending.raises = raised

    def _record(self, ending: _Ending, call: Transaction) -> None:
        """The receipt and the event, into the session's logs."""
        if ending.receipt is None:
            if isinstance(ending.raises, DeadlineExceededError):
                deadline = ending.raises
                ending.raises = PromptEvaluationError(str(deadline), prompt_name=self.prompt_name, phase="tool")
                ending.raises.__cause__ = deadline
            ending.receipt = self._receipt(ending, call)
            ending.invoked = self._event(ending)
        assert ending.invoked is not None
        self.session.log(ending.invoked, ending.receipt)
        try:
            self.session.log_values(ending.invoked)
        except Exception:
            logger.warning("a value of %s could not be logged", ending.name, exc_info=True)
        except BaseException as error:
            ending.raises = ending.raises or error
        if ending.outcome != "committed":
            ending.taken_back = call.taken_back(doubtful=ending.outcome == "doubtful")
        elif call.parent is not None:
            ending.taken_back = call.merge_into_parent((self.session, ending.receipt))

    def _tell(self, ending: _Ending) -> None:
        """Observers hear of the call. What they do about it cannot undo it."""
        for event in (ending.invoked, ending.receipt):
            if event is not None:
                self.session.notify(event)
        for session, receipt in ending.taken_back:
            session.notify(receipt)

    def _answered(self, ending: _Ending) -> ToolCallResult:
        if self.heartbeat is not None:
            self.heartbeat.beat()
        if ending.raises is not None:
            raise ending.raises
        assert ending.receipt is not None
        text = whole_text(ending.result, ending.rendered)
        if len(text) > MAX_RESULT_CHARACTERS:
            text = bounded(text, whole_at=full_result_path(ending.call_id) if READER in self._offers else None)
        return ToolCallResult(ending.result, text, ending.receipt)

    def _event(self, ending: _Ending) -> ToolInvoked:
        return ToolInvoked(
            prompt_name=self.prompt_name,
            adapter=self._adapter_name,
            name=ending.name,
            params=ending.params,
            result=ending.result,
            session_id=self.session.session_id,
            created_at=now(UTC),
            rendered_output=ending.rendered,
            call_id=ending.call_id,
            run_context=self.run_context,
        )

    def _receipt(self, ending: _Ending, call: Transaction) -> Receipt:
        # The first ten by place: of more than fifteen names the interpreter makes a dictionary.
        return Receipt(
            new_id(),
            ending.call_id,
            ending.name,
            ending.recorded,
            ending.outcome,
            ending.result.message,
            ending.started_at,
            perf_counter() - ending.clock,
            self._session_id,
            self.prompt_name,
            policies=ending.verdicts,
            read=call.reads_by_path(),
            changes=call.all_changes(),
            inner=tuple(call.inner),
            conflicts=ending.conflicts,
            exit_code=exit_code_of(ending.result.value),
        )


def _copied(params: object) -> object:
    try:
        return deepcopy(params)
    except Exception:
        return serde.dump_any(params)


def _denied(ending: _Ending, verdict: PolicyVerdict) -> Literal[False]:
    ending.outcome = "denied"
    ending.result = ToolResult.error(f"denied by the policy {verdict.policy}: {verdict.reason or 'no reason given'}")
    return False


EXPECTED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, TimeoutError)


def _log(name: str, error: Exception) -> None:
    """A mistake in a handler is shown to whoever set no logging up; what the model is told, and can mend, is not."""
    told = isinstance(error, EXPECTED) or (isinstance(error, OSError) and error.errno in (errno.ESTALE, errno.ELOOP))
    logger.log(logging.DEBUG if told else logging.WARNING, "%s failed", name, exc_info=error)


def _is_logged(error: Exception, call: Transaction) -> bool:
    """Whether it is what a reducer has raised, which the session has logged: of the problems only that has a cause."""
    problem = error.__cause__ if isinstance(error, TransactionError) else None
    return any(problem is one and one.__cause__ is not None for one in call.problems)


def _failed(ending: _Ending, error: BaseException, call: Transaction) -> None:
    """What an exception makes of a call: words for the model, or something that leaves the loop as well."""
    ending.rendered = ""
    if ending.outcome == "committed":
        ending.outcome = "failed"
    if isinstance(error, (VisibilityExpansionRequired, PromptEvaluationError, DeadlineExceededError)):
        ending.raises = error
        said = str(error)
    elif isinstance(error, RestoreFailedError):
        ending.raises = PromptEvaluationError(str(error), phase="tool")
        ending.raises.__cause__ = error
        said = str(error)
    elif isinstance(error, CallCancelledError):
        ending.outcome = "interrupted"
        said = str(error)
    elif isinstance(error, ToolValidationError):
        said = str(error)
    elif isinstance(error, Exception):
        if not _is_logged(error, call):
            _log(ending.name, error)
        said = f"{ending.name} failed: {describe_error(error)}"
    else:
        ending.outcome = "interrupted"
        ending.raises = error
        said = f"{ending.name} was interrupted by {type(error).__name__}"
    ending.result = ToolResult.error(said)
