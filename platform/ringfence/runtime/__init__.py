"""The runtime of a tool call: transactions, with the sessions, events, limits and receipts that they work on."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.errors import (
        DeadlineExceededError,
        RestoreFailedError,
        SnapshotRestoreError,
        TransactionError,
    )
    from ringfence.limits import (
        Budget,
        BudgetExceededError,
        BudgetTracker,
        Cancellation,
        Deadline,
        Heartbeat,
        RunContext,
        RunOptions,
        TokenUsage,
    )
    from ringfence.participants import CallInfo, CallLock, Change, FileVersion, RollbackReport, Step, Transactional
    from ringfence.receipts import HostTraffic, PolicyVerdict, Receipt, final_receipts
    from ringfence.runtime.transaction import Transaction, create_snapshot, restore_snapshot, tool_transaction
    from ringfence.secrets import MaskedStream, Secrets, masked_logs
    from ringfence.session.events import (
        Dispatcher,
        DispatchResult,
        HandlerFailure,
        InProcessDispatcher,
        PromptExecuted,
        PromptRendered,
        RejectedToolParams,
        RenderedTools,
        ToolCallStarted,
        ToolInvoked,
        ToolOutput,
        ToolSchema,
    )
    from ringfence.session.items import Append, Clear, Extend, Replace, SliceOp
    from ringfence.session.reducers import (
        ReducerContext,
        append_all,
        reducer,
        replace_latest,
        replace_latest_by,
        upsert_by,
    )
    from ringfence.session.session import Session
    from ringfence.session.slices import SlicePolicy
    from ringfence.session.snapshots import CompositeSnapshot, Snapshot, SnapshotMetadata
    from ringfence.session.views import SessionView, SliceView
    from ringfence.session.visibility import (
        ClearAllVisibilityOverrides,
        ClearVisibilityOverride,
        SetVisibilityOverride,
        VisibilityOverrides,
    )

__all__ = [
    "Append",
    "Budget",
    "BudgetExceededError",
    "BudgetTracker",
    "CallInfo",
    "CallLock",
    "Cancellation",
    "Change",
    "Clear",
    "ClearAllVisibilityOverrides",
    "ClearVisibilityOverride",
    "CompositeSnapshot",
    "Deadline",
    "DeadlineExceededError",
    "DispatchResult",
    "Dispatcher",
    "Extend",
    "FileVersion",
    "HandlerFailure",
    "Heartbeat",
    "HostTraffic",
    "InProcessDispatcher",
    "MaskedStream",
    "PolicyVerdict",
    "PromptExecuted",
    "PromptRendered",
    "Receipt",
    "ReducerContext",
    "RejectedToolParams",
    "RenderedTools",
    "Replace",
    "RestoreFailedError",
    "RollbackReport",
    "RunContext",
    "RunOptions",
    "Secrets",
    "Session",
    "SessionView",
    "SetVisibilityOverride",
    "SliceOp",
    "SlicePolicy",
    "SliceView",
    "Snapshot",
    "SnapshotMetadata",
    "SnapshotRestoreError",
    "Step",
    "TokenUsage",
    "ToolCallStarted",
    "ToolInvoked",
    "ToolOutput",
    "ToolSchema",
    "Transaction",
    "TransactionError",
    "Transactional",
    "VisibilityOverrides",
    "append_all",
    "create_snapshot",
    "final_receipts",
    "masked_logs",
    "reducer",
    "replace_latest",
    "replace_latest_by",
    "restore_snapshot",
    "tool_transaction",
    "upsert_by",
]

# Imported when asked for: the history of a workspace needs no session.
_MODULES = {
    "Append": "ringfence.session.items",
    "Budget": "ringfence.limits",
    "BudgetExceededError": "ringfence.limits",
    "BudgetTracker": "ringfence.limits",
    "CallInfo": "ringfence.participants",
    "CallLock": "ringfence.participants",
    "Cancellation": "ringfence.limits",
    "Change": "ringfence.participants",
    "Clear": "ringfence.session.items",
    "ClearAllVisibilityOverrides": "ringfence.session.visibility",
    "ClearVisibilityOverride": "ringfence.session.visibility",
    "CompositeSnapshot": "ringfence.session.snapshots",
    "Deadline": "ringfence.limits",
    "DeadlineExceededError": "ringfence.errors",
    "DispatchResult": "ringfence.session.events",
    "Dispatcher": "ringfence.session.events",
    "Extend": "ringfence.session.items",
    "FileVersion": "ringfence.participants",
    "HandlerFailure": "ringfence.session.events",
    "Heartbeat": "ringfence.limits",
    "HostTraffic": "ringfence.receipts",
    "InProcessDispatcher": "ringfence.session.events",
    "MaskedStream": "ringfence.secrets",
    "PolicyVerdict": "ringfence.receipts",
    "PromptExecuted": "ringfence.session.events",
    "PromptRendered": "ringfence.session.events",
    "Receipt": "ringfence.receipts",
    "ReducerContext": "ringfence.session.reducers",
    "RejectedToolParams": "ringfence.session.events",
    "RenderedTools": "ringfence.session.events",
    "Replace": "ringfence.session.items",
    "RestoreFailedError": "ringfence.errors",
    "RollbackReport": "ringfence.participants",
    "RunContext": "ringfence.limits",
    "RunOptions": "ringfence.limits",
    "Secrets": "ringfence.secrets",
    "Session": "ringfence.session.session",
    "SessionView": "ringfence.session.views",
    "SetVisibilityOverride": "ringfence.session.visibility",
    "SliceOp": "ringfence.session.items",
    "SlicePolicy": "ringfence.session.slices",
    "SliceView": "ringfence.session.views",
    "Snapshot": "ringfence.session.snapshots",
    "SnapshotMetadata": "ringfence.session.snapshots",
    "SnapshotRestoreError": "ringfence.errors",
    "Step": "ringfence.participants",
    "TokenUsage": "ringfence.limits",
    "ToolCallStarted": "ringfence.session.events",
    "ToolInvoked": "ringfence.session.events",
    "ToolOutput": "ringfence.session.events",
    "ToolSchema": "ringfence.session.events",
    "Transaction": "ringfence.runtime.transaction",
    "TransactionError": "ringfence.errors",
    "Transactional": "ringfence.participants",
    "VisibilityOverrides": "ringfence.session.visibility",
    "append_all": "ringfence.session.reducers",
    "create_snapshot": "ringfence.runtime.transaction",
    "final_receipts": "ringfence.receipts",
    "masked_logs": "ringfence.secrets",
    "reducer": "ringfence.session.reducers",
    "replace_latest": "ringfence.session.reducers",
    "replace_latest_by": "ringfence.session.reducers",
    "restore_snapshot": "ringfence.runtime.transaction",
    "tool_transaction": "ringfence.runtime.transaction",
    "upsert_by": "ringfence.session.reducers",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
