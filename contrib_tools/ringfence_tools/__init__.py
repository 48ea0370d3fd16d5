"""Sections with tools for a model, and mounts for their workspaces."""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence_tools.delegation import Delegate, DelegatedTask, DelegationSection
    from ringfence_tools.frameworks import agents_tools, pydantic_toolset
    from ringfence_tools.fsspec_view import WorkspaceFileSystem
    from ringfence_tools.history import HistoryToolsSection
    from ringfence_tools.mounts import HostMount, HostMountPreview
    from ringfence_tools.planning import (
        AddStep,
        Plan,
        PlanningStrategy,
        PlanningToolsSection,
        PlanStep,
        ReadPlan,
        SetupPlan,
        UpdateStep,
    )
    from ringfence_tools.python_eval import AstevalSection
    from ringfence_tools.sections import VfsToolsSection
    from ringfence_tools.shell import PodmanSandboxSection

__all__ = [
    "AddStep",
    "AstevalSection",
    "Delegate",
    "DelegatedTask",
    "DelegationSection",
    "HistoryToolsSection",
    "HostMount",
    "HostMountPreview",
    "Plan",
    "PlanStep",
    "PlanningStrategy",
    "PlanningToolsSection",
    "PodmanSandboxSection",
    "ReadPlan",
    "SetupPlan",
    "UpdateStep",
    "VfsToolsSection",
    "WorkspaceFileSystem",
    "agents_tools",
    "pydantic_toolset",
]

# Imported when asked for: whoever wants a plan does not pay for fsspec.
_MODULES = dict.fromkeys(__all__, ".planning") | {
    "AstevalSection": ".python_eval",
    "Delegate": ".delegation",
    "DelegatedTask": ".delegation",
    "DelegationSection": ".delegation",
    "HistoryToolsSection": ".history",
    "HostMount": ".mounts",
    "HostMountPreview": ".mounts",
    "PodmanSandboxSection": ".shell",
    "VfsToolsSection": ".sections",
    "WorkspaceFileSystem": ".fsspec_view",
    "agents_tools": ".frameworks",
    "pydantic_toolset": ".frameworks",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
