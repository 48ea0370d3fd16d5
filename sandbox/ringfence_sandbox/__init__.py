"""Commands in a container, over a workspace on disk. The names of `ringfence_workspace` are here, too.

Other packages import these names alone, and nothing from the modules below.
"""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence.errors import SandboxUnavailableError
    from ringfence_sandbox.container.isolation import SandboxLimits
    from ringfence_sandbox.doctor import Finding, examine_sandbox
    from ringfence_sandbox.network.network import Network, allowed_hosts
    from ringfence_sandbox.podman import PodmanSandbox
    from ringfence_sandbox.project.project_image import build_project_image, describe_stale_image
    from ringfence_sandbox.project.recipe_images import build_images
    from ringfence_workspace import (
        AdoptedCall,
        CallProcess,
        CommandResult,
        Detect,
        DetectionLimits,
        Export,
        Fork,
        GitDataChanges,
        HistoryStore,
        HostFilesystem,
        KilledCall,
        LogEntry,
        NothingToUndoError,
        OwnChanges,
        Promotion,
        Recovered,
        Repository,
        Reversal,
        ReversalOutcome,
        ScanLimits,
        ShellEnvironment,
        ShownStep,
        StateDirectoryError,
        StepName,
        UnfinishedCall,
        Workspace,
        checkout_revision,
        describe_lost_rule,
        describe_replaced_root,
        discard_fork,
        find_workspace,
        forget_store,
        forks_of,
        is_output,
        is_reserved,
        record_root,
        remembered_hidden,
        remove_tree,
        resolve_revision,
        store_directory,
        stores,
        unfinished_calls,
    )

__all__ = [
    "AdoptedCall",
    "CallProcess",
    "CommandResult",
    "Detect",
    "DetectionLimits",
    "Export",
    "Finding",
    "Fork",
    "GitDataChanges",
    "HistoryStore",
    "HostFilesystem",
    "KilledCall",
    "LogEntry",
    "Network",
    "NothingToUndoError",
    "OwnChanges",
    "PodmanSandbox",
    "Promotion",
    "Recovered",
    "Repository",
    "Reversal",
    "ReversalOutcome",
    "SandboxLimits",
    "SandboxUnavailableError",
    "ScanLimits",
    "ShellEnvironment",
    "ShownStep",
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
    "discard_fork",
    "examine_sandbox",
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

# Imported when asked for: a workspace needs no Podman.
_MODULES = dict.fromkeys(__all__, "ringfence_workspace") | {
    "Finding": "ringfence_sandbox.doctor",
    "Network": "ringfence_sandbox.container.isolation",
    "PodmanSandbox": "ringfence_sandbox.podman",
    "SandboxLimits": "ringfence_sandbox.container.isolation",
    "SandboxUnavailableError": "ringfence.errors",
    "allowed_hosts": "ringfence_sandbox.network.network",
    "build_images": "ringfence_sandbox.project.recipe_images",
    "build_project_image": "ringfence_sandbox.project.project_image",
    "describe_stale_image": "ringfence_sandbox.project.project_image",
    "examine_sandbox": "ringfence_sandbox.doctor",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
