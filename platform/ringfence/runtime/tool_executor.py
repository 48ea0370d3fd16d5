"""The executor of tool calls. The methods stand in the order in which a tool call passes through them."""

from __future__ import annotations

import difflib
import errno
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from traceback import walk_tb
from typing import Any

from ringfence import serde
from ringfence.errors import (
    CallCancelledError,
    DeadlineExceededError,
    PromptEvaluationError,
    RestoreFailedError,
    ToolValidationError,
    TransactionError,
    VisibilityExpansionRequired,
)
from ringfence.failures import describe_error
from ringfence.limits import BudgetTracker, Cancellation, Deadline, Heartbeat, RunContext, RunOptions
from ringfence.participants import SortedParticipants, Transactional, current_call, set_current_call, sort_participants
from ringfence.receipts import Outcome, PolicyVerdict, Receipt, network_of
from ringfence.resources import CallResources
from ringfence.runtime.binding import BoundTool, bind_tool
from ringfence.runtime.context import Evaluates, PromptOfCalls, Rendering, ToolContext
from ringfence.runtime.interrupts import Interrupts
from ringfence.runtime.kept_results import READER, full_result_path
from ringfence.runtime.policy_verdicts import ended_error, judge_call, judge_effects, show_result
from ringfence.runtime.tool import OPEN_SECTIONS
from ringfence.runtime.transaction import ReceiptUpdates, Transaction, new_id
from ringfence.secrets import Secrets
from ringfence.session.events import RejectedToolParams, ToolCallStarted, ToolInvoked
from ringfence.session.session import Session
from ringfence.session.tool_result import (
    MAX_RESULT_CHARACTERS,
    AcceptsChanges,
    ToolResult,
    bounded,
    exit_code_of,
    whole_text,
)

logger = logging.getLogger(__name__)

now = datetime.now

Arguments = Mapping[str, object] | str | None
MASKED_ARGUMENT = (
    "{} stands for a secret, and would be written in the place of its value: edit other lines only, or let a command "
    "use the variable"
)
UNFINISHED = ToolResult.error("the call did not come to an end")


def check_arguments(prompt: object, session: object) -> None:
    """Raise TypeError if `prompt` is no Prompt (a template is none) or `session` is no Session."""
    if not hasattr(prompt, "policies_for_tool"):
        hint = ": write Prompt(template)" if hasattr(prompt, "sections") else ""
        raise TypeError(f"the prompt is a {type(prompt).__name__}, not a Prompt{hint}")
    if not isinstance(session, Session):
        raise TypeError(f"the session is a {type(session).__name__}, not a Session")


@dataclass(slots=True)
class ToolCallResult:
    """The end of a tool call: the result, the text for the model, and the receipt."""

    result: ToolResult[Any]
    text: str
    receipt: Receipt


@dataclass(slots=True)
class Call:
    """The state of one tool call while it runs, and its outcome."""

    name: str
    call_id: str
    arguments: Arguments
    transaction: Transaction
    context: ToolContext
    params: Any
    recorded: object
    """The params for the receipt, as the model sent them. They are copied if a handler could change them."""
    started_at: datetime
    clock: float
    verdicts: list[PolicyVerdict]
    outcome: Outcome = "failed"
    result: ToolResult[Any] = UNFINISHED
    rendered: str = ""
    error: BaseException | None = None
    """The exception that the executor raises when the call has ended."""
    conflicts: Sequence[str] = ()
    invoked: ToolInvoked | None = None
    receipt: Receipt | None = None
    is_masked: bool = False
    """Whether a secret was masked in the result, or in its text for the model."""
    updates: ReceiptUpdates = ()
    """The corrected receipts of inner calls that were rolled back with this call."""

    def deny(self, policy: str, reason: str | None) -> None:
        self.outcome = "denied"
        self.result = ToolResult.error(f"denied by the policy {policy}: {reason or 'no reason given'}")

    def reject(self, message: str, error: str) -> None:
        self.outcome = "rejected"
        self.result = ToolResult.error(message)
        self.params = RejectedToolParams(self.arguments, error)


class ToolExecutor:
    """Runs tool calls of one prompt and session. Each call is a transaction.

    An executor is used inside ``with prompt.resources:``. It raises only exceptions that end an evaluation, after the
    rollback: VisibilityExpansionRequired, PromptEvaluationError, and exceptions that are no `Exception`, such as
    KeyboardInterrupt. A passed deadline and an incomplete rollback are PromptEvaluationErrors.
    """

    def __init__(
        self,
        *,
        prompt: PromptOfCalls,
        session: Session,
        adapter: Evaluates | None = None,
        deadline: Deadline | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        rendered_prompt: Rendering | None = None,
        run_context: RunContext | None = None,
    ) -> None:
        """``rendered_prompt`` is the rendering whose tools can be called. By default the prompt is rendered here.

        Raises TypeError for an argument of the wrong type, and the errors of `Prompt.render`.
        """
        check_arguments(prompt, session)
        self.prompt = prompt
        self.session = session
        self.adapter = adapter
        self.options = RunOptions(deadline, budget_tracker, heartbeat, run_context)
        if rendered_prompt is None:
            rendered_prompt = prompt.render(session=session, deadline=deadline)
        self.rendered_prompt = rendered_prompt
        self.prompt_name = prompt.name or f"{prompt.ns}:{prompt.key}"
        self._session_id = str(session.session_id)
        self._adapter_name = type(adapter).__name__ if adapter is not None else ""
        self._tools = {tool.name: bind_tool(tool, prompt) for tool in self.rendered_prompt.tools}
        self._resources: Sequence[Transactional] = ()
        self._participants = sort_participants((session,))

    def call(self, name: str, arguments: Arguments, *, call_id: str | None = None) -> ToolResult[Any]:
        """Run one tool call and return its result. ``arguments`` is a mapping or JSON text."""
        return self.execute(name, arguments, call_id=call_id).result

    def execute(
        self,
        name: str,
        arguments: Arguments,
        *,
        call_id: str | None = None,
        cancellation: Cancellation | None = None,
        max_answer: int | None = None,
        rejection: str | None = None,
    ) -> ToolCallResult:
        """Run one tool call as `call` does. Return its result, the text for the model and the receipt.

        ``max_answer`` is the option of `RunOptions`. With a ``rejection``, the call is rejected for that reason. A call
        that is cancelled before its commit point is rolled back, and its outcome is "interrupted". Raises RuntimeError
        outside of ``with prompt.resources:``.
        """
        call = self._start(name, call_id or new_id(), arguments, cancellation, max_answer)
        transaction = call.transaction
        tool = self._parse(call, rejection)
        if tool is None:
            self._record(call)
            self._publish(call)
            return self._finish(call)
        interrupts = Interrupts()
        try:
            try:
                set_current_call(transaction)
                interrupts.allow()
                transaction.acquire(self._participants_now(call))
                if self._is_permitted(call, tool):
                    interrupts.hold()
                    transaction.begin()
                    interrupts.allow()
                    self._run(call, tool)
                    self._settle(call, tool)
                interrupts.hold()
                if call.outcome == "committed":
                    self._commit(call)
            except BaseException as error:
                interrupts.hold()
                _fail(call, error)
        except BaseException as error:  # an interrupt just before `hold`
            _fail(call, error)
        try:  # Interrupts are held back in this block. An earlier interrupt is in `call.error`.
            if call.receipt is None:
                self._roll_back(call)
            self._record(call)
        finally:
            transaction.finish(lambda: self._publish(call), interrupts)
        return self._finish(call)

    def _start(
        self, name: str, call_id: str, arguments: Arguments, cancellation: Cancellation | None, max_answer: int | None
    ) -> Call:
        """Create the call and publish its start."""
        resources = self.prompt.resources.context  # raises outside of the block, before the call is published
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()
        transaction = Transaction(call_id, name, current_call())
        options = self.options if transaction.parent is None else self.options.inherit()
        if max_answer is not None:
            options = replace(options, max_answer=max_answer)
        transaction.limits = options
        context = ToolContext(
            self.prompt,
            self.rendered_prompt,
            self.adapter,
            self.session,
            options=options,
            call=transaction,
            scope=CallResources(resources, transaction),
            cancellation=cancellation,
        )
        if self.session.secrets:
            arguments = self.session.secrets.mask(arguments)
        call = Call(name, call_id, arguments, transaction, context, arguments, arguments, now(UTC), perf_counter(), [])
        if self.session.dispatcher.has_handlers(ToolCallStarted):
            bound = self._tools.get(name)
            self.session.notify(
                ToolCallStarted(
                    call_id=call_id,
                    name=name,
                    description=bound.tool.description if bound is not None else None,
                    arguments=arguments,
                    prompt_name=self.prompt_name,
                    session_id=self.session.session_id,
                    started_at=call.started_at,
                )
            )
        return call

    def _parse(self, call: Call, rejection: str | None) -> BoundTool | None:
        """Find the tool and decode the arguments. Return None for a call that is rejected.

        A call is rejected if there is a reason from outside, the tool does not exist or its arguments do not fit.
        """
        if rejection is not None:
            call.reject(rejection, rejection)
            return None
        bound = self._tools.get(call.name)
        if bound is None or bound.handler is None:
            known = [name for name, one in self._tools.items() if one.handler is not None]
            near = difflib.get_close_matches(str(call.name), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known) or 'none'}"
            what = "there is no tool" if bound is None else "it is only described, and nothing runs the tool"
            message = f"{what} {call.name!r}; {hint}"
            call.reject(message, message)
            return None
        try:
            call.params = bound.decode({} if call.arguments in (None, "") else call.arguments)
        except Exception as error:  # code of a params class may raise any exception
            if not isinstance(error, (ValueError, TypeError)):
                logger.warning("the params of %s could not be made", call.name, exc_info=error)
            call.reject(f"the arguments of {call.name} do not fit: {describe_error(error)}", str(error))
            call.recorded = call.params
            return None
        call.recorded = _copy(call.params) if bound.tool.params_can_change else call.params
        call.transaction.opaque = bound.opaque
        return bound

    def _participants_now(self, call: Call) -> SortedParticipants:
        """The participants: the session and the live resources. They are sorted again only after a change."""
        assert call.context.scope is not None
        resources = call.context.scope.participants
        if self._resources is not resources:
            self._resources, self._participants = resources, sort_participants((self.session, *resources))
        return self._participants

    def _is_permitted(self, call: Call, tool: BoundTool) -> bool:
        """Whether all policies, deadline and cancellation permit the call. The section's policies run first."""
        context = call.context
        is_writer = tool.tool.writes is not None or tool.opaque
        if is_writer and self.session.secrets and not self._is_free_of_masks(call, self.session.secrets):
            return False
        denial = judge_call(tool, call.params, context, call.transaction, call.verdicts)
        if denial is not None:
            call.deny(denial.policy, denial.reason)
            return False
        deadline = context.options.deadline
        if deadline is not None and deadline.expired:
            call.outcome = "denied"
            raise DeadlineExceededError(f"the deadline had passed before {call.name} could run")
        if context.cancellation is not None:
            context.cancellation.check()
        return True

    def _is_free_of_masks(self, call: Call, secrets: Secrets) -> bool:
        """Whether a call that changes something has no mask in its arguments: it would be written for the value.

        A tool that declares ``writes=``, or runs programs, is asked before it runs. Another one is asked when it has
        changed a file.
        """
        masks = secrets.masks_in(call.params)
        if masks:
            verdict = PolicyVerdict("secrets", False, MASKED_ARGUMENT.format(", ".join(masks)))
            call.verdicts.append(verdict)
            call.deny(verdict.policy, verdict.reason)
        return not masks

    def _mask(self, call: Call, secrets: Secrets) -> None:
        """Mask the secrets in all that is recorded of the call."""
        result = secrets.mask(call.result)
        call.is_masked |= result is not call.result
        call.result, call.rendered = result, secrets.mask(call.rendered)
        call.verdicts[:] = secrets.mask(call.verdicts)
        call.params, call.recorded = secrets.mask(call.params), secrets.mask(call.recorded)
        if call.error is not None:
            call.error.args = secrets.mask(call.error.args)

    def _are_effects_permitted(self, call: Call, tool: BoundTool) -> bool:
        """Whether all effect policies permit the call. Their reads are not part of the call's read set."""
        was_asked = tool.tool.writes is not None or tool.opaque
        if not was_asked and self.session.secrets and not self._is_free_of_masks(call, self.session.secrets):
            return False
        call.context.result = call.result
        denial = judge_effects(tool, call.params, call.context, call.transaction, call.verdicts)
        if denial is not None:
            call.deny(denial.policy, denial.reason)
        return denial is None

    def _run(self, call: Call, tool: BoundTool) -> None:
        """Run the handler in its resource scope. After the handler's end, nothing can change through this call."""
        context, transaction = call.context, call.transaction
        assert tool.handler is not None
        assert context.scope is not None
        if tool.opaque:
            _ = context.filesystem  # constructs a lazy one now, as a participant of the call
            if not transaction.tracks_external_writes():
                raise TransactionError(
                    f"{call.name} runs programs, and no filesystem of this prompt scans for their changes: bind that "
                    "of a Workspace, or one of your own with tracks_external_writes = True"
                )
        try:
            result = tool.handler(call.params, context=context)
        except VisibilityExpansionRequired as expansion:
            if call.name != OPEN_SECTIONS:
                raise
            call.error = expansion  # the call has done its work: it commits, and then the loop renders again
            result = ToolResult[Any](str(expansion), None)
        context.scope.close()
        # The real type counts: `isinstance` trusts a `__class__` attribute that lies.
        if not issubclass(type(result), ToolResult) or not isinstance(result.message, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"its handler returned {type(result).__name__}, not a ToolResult with a text for a message")
        if type(result.message) is not str:  # formatting a subclass could run its code
            result = replace(result, message=str.__str__(result.message))
        if type(result.success) is not bool:
            raise TypeError(f"its handler returned a ToolResult with success={result.success!r}: it is True or False")
        if result.success and not tool.fits(result.value):
            raise TypeError(
                f"its handler returned a value of another type than it declares: {type(result.value).__name__}, "
                f"not {tool.tool.result_words}"
            )
        call.result = result
        transaction.seal()
        if tool.opaque and result.success and isinstance(result.value, AcceptsChanges):
            call.result = replace(result, value=result.value.with_changes(transaction.all_changes()))

    def _settle(self, call: Call, tool: BoundTool) -> None:
        """Do all steps before the commit point that can still fail."""
        if self.session.secrets:
            self._mask(call, self.session.secrets)
        transaction, result = call.transaction, call.result
        if result.success and transaction.changes and not self._are_effects_permitted(call, tool):
            if (code := exit_code_of(result.value)) is not None:  # also of a failed call
                message = f"{call.result.message}; it had ended with exit code {code}, and its changes are rolled back"
                call.result = replace(result, message=message, success=False)
                call.rendered = "" if result.exclude_value_from_context else result.render()
            return
        self._render(call)
        if not result.success:
            return
        if tool.read_only and transaction.changed(self.session):
            raise TransactionError(f"{call.name} is declared read-only, but it changed something")
        if call.is_masked:
            transaction.reads.clear()  # what the model was not shown
            message = f"{result.message}; secrets in it are masked, and what is masked does not count as read"
            call.result = result = replace(result, message=message)
        show_result(tool, call.params, call.result, call.context, call.transaction)
        call.invoked = self._event(call)
        with self.session.lock.mutex:  # no outer call can roll back meanwhile
            if transaction.ended:
                raise ended_error(transaction)
            self.session.apply(call.invoked, to="state")
        transaction.check_problems()
        if call.context.cancellation is not None:
            call.context.cancellation.check()
        call.outcome = "committed"

    def _render(self, call: Call) -> None:
        """Render the value for the model."""
        if call.result.value is not None and not call.result.exclude_value_from_context:
            rendered = call.result.render()
            # `render()` may put a secret together that no field of the value has.
            call.rendered = self.session.secrets.mask(rendered) if self.session.secrets else rendered
            call.is_masked |= call.rendered is not rendered

    def _commit(self, call: Call) -> None:
        """Commit the transaction. A failure here rolls the call back."""
        call.receipt = self._receipt(call)
        try:
            step = call.transaction.commit(call.receipt)
        except BaseException:
            call.receipt = None
            raise
        if step is not None:
            call.receipt = replace(call.receipt, commit=step.commit)

    def _roll_back(self, call: Call) -> None:
        """Close the call's own resources, if its handler left them open, and roll all participants back."""
        assert call.context.scope is not None
        try:
            call.context.scope.close()
            if not call.transaction.sealed:
                call.transaction.seal()
        except BaseException as error:
            logger.warning("the failed call %s did not end well", call.name, exc_info=True)
            if not isinstance(error, Exception) and call.error is None:
                call.error = error
        try:
            report = call.transaction.rollback()
            if report.conflicts or report.notes:
                call.result = replace(call.result, message="; ".join((call.result.message, *report.messages())))
                call.conflicts = report.conflicts
        except RestoreFailedError as error:
            call.outcome = "doubtful"
            call.result = ToolResult.error(str(error))
            if call.error is None or isinstance(call.error, Exception):
                call.error = self._evaluation_error(f"{call.name}: {error}", error)

    def _record(self, call: Call) -> None:
        """Append the receipt and the event to the session's logs."""
        if call.receipt is None:
            if self.session.secrets:
                self._mask(call, self.session.secrets)
            if isinstance(call.error, DeadlineExceededError):
                call.error = self._evaluation_error(str(call.error), call.error)
            call.receipt = self._receipt(call)
            call.invoked = self._event(call)
        assert call.invoked is not None
        self.session.log(call.invoked, call.receipt)
        try:
            self.session.log_values(call.invoked)
        except Exception:
            logger.warning("a value of %s could not be logged", call.name, exc_info=True)
        except BaseException as error:
            call.error = call.error or error
        transaction = call.transaction
        if call.outcome != "committed":
            call.updates = transaction.rolled_back_receipts(doubtful=call.outcome == "doubtful")
        elif transaction.parent is not None:
            call.updates = transaction.merge_into_parent((self.session, call.receipt))

    def _publish(self, call: Call) -> None:
        """Publish the end of the call. An observer's error does not roll the call back."""
        for event in (call.invoked, call.receipt):
            if event is not None:
                self.session.notify(event)
        for session, receipt in call.updates:
            session.notify(receipt)

    def _finish(self, call: Call) -> ToolCallResult:
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()
        if call.error is not None:
            raise call.error
        assert call.receipt is not None
        text = whole_text(call.result, call.rendered)
        limit = call.context.options.max_answer or MAX_RESULT_CHARACTERS
        if 4 * len(text) > limit:  # a character has at most four bytes
            text = bounded(text, limit, whole_at=full_result_path(call.call_id) if READER in self._tools else None)
        return ToolCallResult(call.result, text, call.receipt)

    def _evaluation_error(self, message: str, cause: Exception) -> PromptEvaluationError:
        error = PromptEvaluationError(message, prompt_name=self.prompt_name, phase="tool")
        error.__cause__ = cause
        return error

    def _event(self, call: Call) -> ToolInvoked:
        return ToolInvoked(
            prompt_name=self.prompt_name,
            adapter=self._adapter_name,
            name=call.name,
            params=call.params,
            result=call.result,
            session_id=self.session.session_id,
            created_at=now(UTC),
            rendered_output=call.rendered,
            call_id=call.call_id,
            run_context=self.options.run_context,
        )

    def _receipt(self, call: Call) -> Receipt:
        receipt = Receipt(
            receipt_id=new_id(),
            call_id=call.call_id,
            tool=call.name,
            params=call.recorded,
            outcome=call.outcome,
            message=call.result.message,
            started_at=call.started_at,
            duration_seconds=perf_counter() - call.clock,
            session_id=self._session_id,
            prompt_name=self.prompt_name,
            policies=call.verdicts,
            read=call.transaction.reads_by_path(),
            changes=call.transaction.all_changes(),
            inner=tuple(call.transaction.inner),
            conflicts=call.conflicts,
            exit_code=(code := exit_code_of(call.result.value)),
            network=() if code is None else network_of(call.result.value),
            client=self.session.tags.get("client", ""),
            parent_call="" if call.transaction.parent is None else call.transaction.parent.call_id,
            detection=call.transaction.detection,
        )
        return self.session.secrets.mask(receipt) if self.session.secrets else receipt


def _copy(params: object) -> object:
    try:
        return deepcopy(params)
    except Exception:
        return serde.dump_any(params)


_EXPECTED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, TimeoutError)


def _log(call: Call, error: Exception) -> None:
    """Log an error in a handler as a warning.

    An error that the model can correct is not logged. The session has logged the error of a reducer.
    """
    problem = error.__cause__ if isinstance(error, TransactionError) else None
    if any(problem is one and one.__cause__ is not None for one in call.transaction.problems):
        return  # the session has logged it
    stale = isinstance(error, OSError) and error.errno in (errno.ESTALE, errno.ELOOP)
    level = logging.DEBUG if stale or isinstance(error, _EXPECTED) else logging.WARNING
    logger.log(level, "%s failed", call.name, exc_info=error)


_MISTAKES = (TypeError, AttributeError, LookupError, NameError, ArithmeticError, AssertionError, ImportError)


def _place(error: Exception) -> str:
    """The place of an error in the user's code: the innermost file and line outside of this package."""
    if not isinstance(error, _MISTAKES):
        return ""
    own = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith("ringfence")
    ]
    return own[-1] if own else ""


def _fail(call: Call, error: BaseException) -> None:
    """Set the call's failed result from an exception. Some exceptions also end the evaluation."""
    call.rendered = ""
    if call.outcome == "committed":
        call.outcome = "failed"
    if isinstance(call.error, VisibilityExpansionRequired):
        call.error = None
    if isinstance(error, (VisibilityExpansionRequired, PromptEvaluationError, DeadlineExceededError)):
        call.error = error
        message = str(error)
    elif isinstance(error, RestoreFailedError):
        call.error = PromptEvaluationError(str(error), phase="tool")
        call.error.__cause__ = error
        message = str(error)
    elif isinstance(error, CallCancelledError):
        call.outcome = "interrupted"
        message = str(error)
    elif isinstance(error, ToolValidationError):
        message = str(error)
    elif isinstance(error, Exception):
        _log(call, error)
        message = f"{call.name} failed: {describe_error(error)}{_place(error)}"
    else:
        call.outcome = "interrupted"
        call.error = error
        message = f"{call.name} was interrupted by {type(error).__name__}"
    call.result = ToolResult.error(message)
