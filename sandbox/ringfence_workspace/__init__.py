"""A workspace on disk: its files, their history as git commits, and transactions over both. It knows no container.

Other packages import these names alone, and nothing from the modules below.
"""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence_workspace.call_process import CallProcess
    from ringfence_workspace.commands import CommandResult, ShellEnvironment
    from ringfence_workspace.forks.fork_records import Fork, forks_of
    from ringfence_workspace.forks.fork_removal import discard_fork
    from ringfence_workspace.forks.promotion import Promotion
    from ringfence_workspace.history.git_data import GitDataChanges
    from ringfence_workspace.history.hidden_rule import describe_lost_rule, remembered_hidden
    from ringfence_workspace.history.history_views import Export, LogEntry, ShownStep
    from ringfence_workspace.history.ignored_files import Repository
    from ringfence_workspace.history.own_changes import OwnChanges
    from ringfence_workspace.history.scan import ScanLimits
    from ringfence_workspace.history.step_lookup import StepName
    from ringfence_workspace.history.store_roots import describe_replaced_root, record_root
    from ringfence_workspace.history.undo_plan import ReversalOutcome
    from ringfence_workspace.history_stores import HistoryStore, forget_store, stores
    from ringfence_workspace.host import HostFilesystem
    from ringfence_workspace.looks import AdoptedCall
    from ringfence_workspace.outputs import is_output
    from ringfence_workspace.revisions import checkout_revision, resolve_revision
    from ringfence_workspace.transaction.detection import Detect, DetectionLimits
    from ringfence_workspace.transaction.interrupted_calls import KilledCall, UnfinishedCall, unfinished_calls
    from ringfence_workspace.transaction.recovery import Recovered
    from ringfence_workspace.tree.confined import is_reserved
    from ringfence_workspace.tree.places import StateDirectoryError, store_directory
    from ringfence_workspace.tree.removal import remove_tree
    from ringfence_workspace.workspace import NothingToUndoError, Reversal, Workspace, find_workspace

__all__ = [
    "AdoptedCall",
    "CallProcess",
    "CommandResult",
    "Detect",
    "DetectionLimits",
    "Export",
    "Fork",
    "GitDataChanges",
    "HistoryStore",
    "HostFilesystem",
    "KilledCall",
    "LogEntry",
    "NothingToUndoError",
    "OwnChanges",
    "Promotion",
    "Recovered",
    "Repository",
    "Reversal",
    "ReversalOutcome",
    "ScanLimits",
    "ShellEnvironment",
    "ShownStep",
    "StateDirectoryError",
    "StepName",
    "UnfinishedCall",
    "Workspace",
    "checkout_revision",
    "describe_lost_rule",
    "describe_replaced_root",
    "discard_fork",
    "find_workspace",
    "forget_store",
    "forks_of",
    "is_output",
    "is_reserved",
    "record_root",
    "remembered_hidden",
    "remove_tree",
    "resolve_revision",
    "store_directory",
    "stores",
    "unfinished_calls",
]

# Imported when asked for: a filesystem on its own needs no git.
_MODULES = {
    "AdoptedCall": "ringfence_workspace.looks",
    "CallProcess": "ringfence_workspace.call_process",
    "CommandResult": "ringfence_workspace.commands",
    "Detect": "ringfence_workspace.transaction.detection",
    "DetectionLimits": "ringfence_workspace.transaction.detection",
    "Export": "ringfence_workspace.history.history_views",
    "Fork": "ringfence_workspace.forks.fork_records",
    "GitDataChanges": "ringfence_workspace.history.git_data",
    "HistoryStore": "ringfence_workspace.history_stores",
    "HostFilesystem": "ringfence_workspace.host",
    "KilledCall": "ringfence_workspace.transaction.interrupted_calls",
    "LogEntry": "ringfence_workspace.history.history_views",
    "OwnChanges": "ringfence_workspace.history.own_changes",
    "Promotion": "ringfence_workspace.forks.promotion",
    "Recovered": "ringfence_workspace.transaction.recovery",
    "Repository": "ringfence_workspace.history.ignored_files",
    "NothingToUndoError": "ringfence_workspace.workspace",
    "Reversal": "ringfence_workspace.workspace",
    "ReversalOutcome": "ringfence_workspace.history.undo_plan",
    "ScanLimits": "ringfence_workspace.history.scan",
    "ShellEnvironment": "ringfence_workspace.commands",
    "StateDirectoryError": "ringfence_workspace.tree.places",
    "ShownStep": "ringfence_workspace.history.history_views",
    "StepName": "ringfence_workspace.history.step_lookup",
    "UnfinishedCall": "ringfence_workspace.transaction.interrupted_calls",
    "Workspace": "ringfence_workspace.workspace",
    "checkout_revision": "ringfence_workspace.revisions",
    "describe_lost_rule": "ringfence_workspace.history.hidden_rule",
    "describe_replaced_root": "ringfence_workspace.history.store_roots",
    "discard_fork": "ringfence_workspace.forks.fork_removal",
    "find_workspace": "ringfence_workspace.workspace",
    "forget_store": "ringfence_workspace.history_stores",
    "forks_of": "ringfence_workspace.forks.fork_records",
    "is_output": "ringfence_workspace.outputs",
    "is_reserved": "ringfence_workspace.tree.confined",
    "record_root": "ringfence_workspace.history.store_roots",
    "remembered_hidden": "ringfence_workspace.history.hidden_rule",
    "remove_tree": "ringfence_workspace.tree.removal",
    "resolve_revision": "ringfence_workspace.revisions",
    "store_directory": "ringfence_workspace.tree.places",
    "stores": "ringfence_workspace.history_stores",
    "unfinished_calls": "ringfence_workspace.transaction.interrupted_calls",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
