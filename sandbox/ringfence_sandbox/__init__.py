"""Where work happens other than in memory: workspaces on disk, their history, and commands in a container."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.errors import SandboxUnavailableError
    from ringfence_sandbox.container.isolation import SandboxLimits
    from ringfence_sandbox.container.shell_environment import ShellEnvironment
    from ringfence_sandbox.disk.call_process import CallProcess
    from ringfence_sandbox.host import HostFilesystem
    from ringfence_sandbox.podman import CommandResult, PodmanSandbox
    from ringfence_sandbox.workspace import Workspace

__all__ = [
    "CallProcess",
    "CommandResult",
    "HostFilesystem",
    "PodmanSandbox",
    "SandboxLimits",
    "SandboxUnavailableError",
    "ShellEnvironment",
    "Workspace",
]

# Imported when asked for: a filesystem on its own needs no git, and a workspace no Podman.
_MODULES = {
    "CallProcess": "ringfence_sandbox.disk.call_process",
    "CommandResult": "ringfence_sandbox.podman",
    "HostFilesystem": "ringfence_sandbox.host",
    "PodmanSandbox": "ringfence_sandbox.podman",
    "SandboxLimits": "ringfence_sandbox.container.isolation",
    "SandboxUnavailableError": "ringfence.errors",
    "ShellEnvironment": "ringfence_sandbox.container.shell_environment",
    "Workspace": "ringfence_sandbox.workspace",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
