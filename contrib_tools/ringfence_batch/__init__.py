"""Many tasks, each an agent's run on a copy of a workspace of its own: on this machine, or on a cluster."""

from ringfence_batch.batch import Batch, Progress
from ringfence_batch.check import check_tasks
from ringfence_batch.engine import AttemptEnded, AttemptRequest, Engine
from ringfence_batch.ledger import Ledger, LedgerError, TaskResult
from ringfence_batch.summary import Summary, TaskRow, summarize
from ringfence_batch.task import BatchTask, TaskFileError, TaskLimits, read_tasks

__all__ = [
    "AttemptEnded",
    "AttemptRequest",
    "Batch",
    "BatchTask",
    "Engine",
    "Ledger",
    "LedgerError",
    "Progress",
    "Summary",
    "TaskFileError",
    "TaskLimits",
    "TaskResult",
    "TaskRow",
    "check_tasks",
    "read_tasks",
    "summarize",
]
