"""Where work happens other than in memory: workspaces on disk, their history, and commands in a container.

Other packages import these names alone, and nothing from the modules below.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.errors import SandboxUnavailableError
    from ringfence_sandbox.container.commands import ShellEnvironment
    from ringfence_sandbox.container.isolation import SandboxLimits
    from ringfence_sandbox.container.network import Network, allowed_hosts
    from ringfence_sandbox.disk.call_process import CallProcess
    from ringfence_sandbox.disk.confined import is_reserved
    from ringfence_sandbox.disk.outputs import is_output
    from ringfence_sandbox.disk.places import StateDirectoryError, store_directory
    from ringfence_sandbox.doctor import Finding, examine_sandbox
    from ringfence_sandbox.history_stores import HistoryStore, forget_store, stores
    from ringfence_sandbox.host import HostFilesystem
    from ringfence_sandbox.podman import CommandResult, PodmanSandbox
    from ringfence_sandbox.project.project_image import build_project_image, describe_stale_image
    from ringfence_sandbox.project.recipe_images import build_images
    from ringfence_sandbox.revisions import checkout_revision, resolve_revision
    from ringfence_sandbox.scan.scan import ScanLimits
    from ringfence_sandbox.steps.ignored_files import Repository
    from ringfence_sandbox.steps.own_changes import OwnChanges
    from ringfence_sandbox.steps.undo_plan import ReversalOutcome
    from ringfence_sandbox.store.hidden_rule import describe_lost_rule, remembered_hidden
    from ringfence_sandbox.store.history_views import Export, LogEntry
    from ringfence_sandbox.store.step_lookup import StepName
    from ringfence_sandbox.store_roots import describe_replaced_root, record_root
    from ringfence_sandbox.transaction.interrupted_calls import KilledCall, UnfinishedCall, unfinished_calls
    from ringfence_sandbox.transaction.recovery import Recovered
    from ringfence_sandbox.workspace import Reversal, Workspace, find_workspace

__all__ = [
    "CallProcess",
    "CommandResult",
    "Export",
    "Finding",
    "HistoryStore",
    "HostFilesystem",
    "KilledCall",
    "LogEntry",
    "Network",
    "OwnChanges",
    "PodmanSandbox",
    "Recovered",
    "Repository",
    "Reversal",
    "ReversalOutcome",
    "SandboxLimits",
    "SandboxUnavailableError",
    "ScanLimits",
    "ShellEnvironment",
    "StateDirectoryError",
    "StepName",
    "UnfinishedCall",
    "Workspace",
    "allowed_hosts",
    "build_images",
    "build_project_image",
    "checkout_revision",
    "describe_lost_rule",
    "describe_replaced_root",
    "describe_stale_image",
    "examine_sandbox",
    "find_workspace",
    "forget_store",
    "is_output",
    "is_reserved",
    "record_root",
    "remembered_hidden",
    "resolve_revision",
    "store_directory",
    "stores",
    "unfinished_calls",
]

# Imported when asked for: a filesystem on its own needs no git, and a workspace no Podman.
_MODULES = {
    "CallProcess": "ringfence_sandbox.disk.call_process",
    "CommandResult": "ringfence_sandbox.podman",
    "Export": "ringfence_sandbox.store.history_views",
    "Finding": "ringfence_sandbox.doctor",
    "HistoryStore": "ringfence_sandbox.history_stores",
    "HostFilesystem": "ringfence_sandbox.host",
    "KilledCall": "ringfence_sandbox.transaction.interrupted_calls",
    "LogEntry": "ringfence_sandbox.store.history_views",
    "Network": "ringfence_sandbox.container.isolation",
    "OwnChanges": "ringfence_sandbox.steps.own_changes",
    "PodmanSandbox": "ringfence_sandbox.podman",
    "Recovered": "ringfence_sandbox.transaction.recovery",
    "Repository": "ringfence_sandbox.steps.ignored_files",
    "Reversal": "ringfence_sandbox.workspace",
    "ReversalOutcome": "ringfence_sandbox.steps.undo_plan",
    "SandboxLimits": "ringfence_sandbox.container.isolation",
    "SandboxUnavailableError": "ringfence.errors",
    "ScanLimits": "ringfence_sandbox.scan.scan",
    "ShellEnvironment": "ringfence_sandbox.container.commands",
    "StateDirectoryError": "ringfence_sandbox.disk.places",
    "StepName": "ringfence_sandbox.store.step_lookup",
    "UnfinishedCall": "ringfence_sandbox.transaction.interrupted_calls",
    "Workspace": "ringfence_sandbox.workspace",
    "allowed_hosts": "ringfence_sandbox.container.network",
    "build_images": "ringfence_sandbox.project.recipe_images",
    "checkout_revision": "ringfence_sandbox.revisions",
    "build_project_image": "ringfence_sandbox.project.project_image",
    "describe_lost_rule": "ringfence_sandbox.store.hidden_rule",
    "describe_replaced_root": "ringfence_sandbox.store_roots",
    "describe_stale_image": "ringfence_sandbox.project.project_image",
    "examine_sandbox": "ringfence_sandbox.doctor",
    "find_workspace": "ringfence_sandbox.workspace",
    "forget_store": "ringfence_sandbox.history_stores",
    "is_output": "ringfence_sandbox.disk.outputs",
    "is_reserved": "ringfence_sandbox.disk.confined",
    "record_root": "ringfence_sandbox.store_roots",
    "remembered_hidden": "ringfence_sandbox.store.hidden_rule",
    "resolve_revision": "ringfence_sandbox.revisions",
    "store_directory": "ringfence_sandbox.disk.places",
    "stores": "ringfence_sandbox.history_stores",
    "unfinished_calls": "ringfence_sandbox.transaction.interrupted_calls",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
