"""The runtime of a tool call: transactions, with the sessions, events, limits and receipts that they work on."""

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
from ringfence.session.reducers import ReducerContext, append_all, reducer, replace_latest, replace_latest_by, upsert_by
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
