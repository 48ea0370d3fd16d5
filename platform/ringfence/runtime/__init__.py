"""Sessions and their slices, events, limits, transactions and receipts."""

from ringfence.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    RestoreFailedError,
    SnapshotRestoreError,
    SnapshotSerializationError,
    TransactionError,
)
from ringfence.runtime.composite import CompositeSnapshot, SnapshotMetadata, create_snapshot, restore_snapshot
from ringfence.runtime.events import (
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
    ToolSchema,
)
from ringfence.runtime.json_lines import SliceConfig, read_log
from ringfence.runtime.limits import (
    Budget,
    BudgetTracker,
    Cancellation,
    Deadline,
    Heartbeat,
    RunContext,
    RunOptions,
    TokenUsage,
)
from ringfence.runtime.pending import PendingToolTracker
from ringfence.runtime.receipts import PolicyVerdict, Receipt, settled
from ringfence.runtime.reducers import (
    Append,
    Clear,
    Extend,
    ReducerContext,
    Replace,
    SliceOp,
    append_all,
    reducer,
    replace_latest,
    replace_latest_by,
    upsert_by,
)
from ringfence.runtime.session import Session, SessionView, iter_sessions_bottom_up
from ringfence.runtime.slice_views import SliceView
from ringfence.runtime.slices import SlicePolicy
from ringfence.runtime.snapshots import Snapshot
from ringfence.runtime.transaction import Transaction, tool_transaction
from ringfence.runtime.visibility import (
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
    "Cancellation",
    "Clear",
    "ClearAllVisibilityOverrides",
    "ClearVisibilityOverride",
    "CompositeSnapshot",
    "Deadline",
    "DeadlineExceededError",
    "DispatchResult",
    "Dispatcher",
    "Extend",
    "HandlerFailure",
    "Heartbeat",
    "InProcessDispatcher",
    "PendingToolTracker",
    "PolicyVerdict",
    "PromptExecuted",
    "PromptRendered",
    "Receipt",
    "ReducerContext",
    "RejectedToolParams",
    "RenderedTools",
    "Replace",
    "RestoreFailedError",
    "RunContext",
    "RunOptions",
    "Session",
    "SessionView",
    "SetVisibilityOverride",
    "SliceConfig",
    "SliceOp",
    "SlicePolicy",
    "SliceView",
    "Snapshot",
    "SnapshotMetadata",
    "SnapshotRestoreError",
    "SnapshotSerializationError",
    "TokenUsage",
    "ToolCallStarted",
    "ToolInvoked",
    "ToolSchema",
    "Transaction",
    "TransactionError",
    "VisibilityOverrides",
    "append_all",
    "create_snapshot",
    "iter_sessions_bottom_up",
    "read_log",
    "reducer",
    "replace_latest",
    "replace_latest_by",
    "restore_snapshot",
    "settled",
    "tool_transaction",
    "upsert_by",
]
