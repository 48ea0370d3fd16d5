"""Sessions and their slices, events, limits, transactions and receipts."""

from ringfence.errors import BudgetExceededError, DeadlineExceededError, RestoreFailedError, TransactionError
from ringfence.runtime.events import (
    DispatchResult,
    HandlerFailure,
    InProcessDispatcher,
    PromptExecuted,
    PromptRendered,
    RenderedTools,
    RunContext,
    ToolCallBegun,
    ToolInvoked,
    ToolSchema,
)
from ringfence.runtime.json_lines import SliceConfig, read_log
from ringfence.runtime.limits import Budget, BudgetTracker, Cancellation, Deadline, Heartbeat, TokenUsage
from ringfence.runtime.receipts import PolicyVerdict, Receipt
from ringfence.runtime.reducers import (
    Append,
    Clear,
    Extend,
    Replace,
    append_all,
    reducer,
    replace_latest,
    replace_latest_by,
    upsert_by,
)
from ringfence.runtime.session import Session
from ringfence.runtime.slices import SlicePolicy
from ringfence.runtime.snapshots import Snapshot
from ringfence.runtime.transaction import Transaction, tool_transaction

__all__ = [
    "Append",
    "Budget",
    "BudgetExceededError",
    "BudgetTracker",
    "Cancellation",
    "Clear",
    "Deadline",
    "DeadlineExceededError",
    "DispatchResult",
    "Extend",
    "HandlerFailure",
    "Heartbeat",
    "InProcessDispatcher",
    "PolicyVerdict",
    "PromptExecuted",
    "PromptRendered",
    "Receipt",
    "RenderedTools",
    "Replace",
    "RestoreFailedError",
    "RunContext",
    "Session",
    "SliceConfig",
    "SlicePolicy",
    "Snapshot",
    "TokenUsage",
    "ToolCallBegun",
    "ToolInvoked",
    "ToolSchema",
    "Transaction",
    "TransactionError",
    "append_all",
    "read_log",
    "reducer",
    "replace_latest",
    "replace_latest_by",
    "tool_transaction",
    "upsert_by",
]
