"""The verdicts of policies on one call: before it runs, on its changes, and on its result."""

from __future__ import annotations

import logging
from sys import modules
from typing import TYPE_CHECKING, Any

from ringfence.errors import CallEndedError, RingfenceError, TransactionError
from ringfence.failures import describe_error, place_in
from ringfence.receipts import PolicyVerdict
from ringfence.runtime.policy import ALLOW, Policy, PolicyDecision

if TYPE_CHECKING:
    from ringfence.runtime.binding import BoundTool
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.transaction import Transaction
    from ringfence.session.tool_result import ToolResult

logger = logging.getLogger(__name__)


def ended_error(transaction: Transaction) -> CallEndedError:
    """The error for a call that an outer one has rolled back."""
    return CallEndedError(f"the call that made {transaction!r} has ended, and rolled it back")


def judge_call(
    tool: BoundTool, params: Any, context: ToolContext, transaction: Transaction, verdicts: list[PolicyVerdict]
) -> PolicyVerdict | None:
    """Ask the policies before the handler. Return the verdict that denies, if there is one; ``verdicts`` gets all."""
    session = context.session
    saved = transaction.save(session)
    for policy, verdict, asked in tool.policies:
        if asked:
            try:
                decision = policy.check(tool.tool, params, context=context)
                if decision is not ALLOW or session.changed(saved):
                    verdict = _verdict(context, transaction, policy, decision, verdict, saved)
            except BaseException as error:
                verdict = _verdict_of_error(context, transaction, policy, error, saved)
        verdicts.append(verdict)
        if not verdict.allowed:
            return verdict
    return None


def judge_effects(
    tool: BoundTool, params: Any, context: ToolContext, transaction: Transaction, verdicts: list[PolicyVerdict]
) -> PolicyVerdict | None:
    """Ask the effect policies about the changes. Return the verdict that denies, if there is one.

    What they read is not part of the call's read set."""
    if not tool.effect_policies:
        return None
    session = context.session
    saved, reads = session.begin(transaction), {lock: dict(paths) for lock, paths in transaction.reads.items()}
    changes = [change for changes in transaction.changes.values() for change in changes]
    try:
        for policy, verdict in tool.effect_policies:
            try:
                decision = policy.check_effects(tool.tool, params, changes, context=context)
                verdict = _verdict(context, transaction, policy, decision, verdict, saved)
            except BaseException as error:
                verdict = _verdict_of_error(context, transaction, policy, error, saved)
            verdicts.append(verdict)
            if not verdict.allowed:
                return verdict
        return None
    finally:
        transaction.reads.clear()
        transaction.reads.update(reads)


def show_result(
    tool: BoundTool, params: Any, result: ToolResult[Any], context: ToolContext, transaction: Transaction
) -> None:
    """Call the policies that record results, within the transaction."""
    for policy in tool.result_policies:
        if transaction.ended:
            raise ended_error(transaction)
        try:
            policy.on_result(tool.tool, params, result, context=context)
        except (RingfenceError, OSError):  # in words for the model
            raise
        except Exception as error:
            raise TransactionError(f"the policy {policy.name} failed on the result: {describe_error(error)}") from error


def _verdict(
    context: ToolContext,
    transaction: Transaction,
    policy: Policy,
    decision: PolicyDecision,
    allowed: PolicyVerdict,
    saved: Any,
) -> PolicyVerdict:
    """Return the verdict of a decision. Raises TypeError if it is no decision or the policy changed the session."""
    if not isinstance(decision, PolicyDecision) or type(decision.allowed) is not bool:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"it answered {decision!r}, which is no PolicyDecision that says yes or no")
    if _restored(context, transaction, saved):
        raise TypeError("it changed the session while it decided")
    return allowed if decision.allowed else PolicyVerdict(policy.name, False, decision.reason)


def _verdict_of_error(
    context: ToolContext, transaction: Transaction, policy: Policy, error: BaseException, saved: Any
) -> PolicyVerdict:
    """Return the denial of a policy that raised, after restoring the session. Re-raises what is no `Exception`."""
    _restored(context, transaction, saved)
    if not isinstance(error, Exception):
        raise error
    logger.warning("the policy %s could not decide on %s", policy.name, transaction.tool, exc_info=error)
    place = place_in(error, getattr(modules.get(type(policy).__module__), "__file__", None) or "")
    # Of ringfence's own policies the message says it all.
    where = f" ({place})" if place and not type(policy).__module__.startswith("ringfence") else ""
    return PolicyVerdict(policy.name, False, f"the policy could not decide: {describe_error(error)}{where}")


def _restored(context: ToolContext, transaction: Transaction, saved: Any) -> bool:
    """Restore the session if a policy has changed it. Return whether it had changed."""
    session = context.session
    if not session.changed(saved):
        return False
    with session.lock.mutex:
        if session.lock.holder is not transaction:  # an outer call has ended: another may hold it
            raise CallEndedError(f"the call that made {transaction!r} has ended")
        session.rollback(saved)
        return True
