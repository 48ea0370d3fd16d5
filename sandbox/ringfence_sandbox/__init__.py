"""Where work happens other than in memory: workspaces on disk, and their history."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence_sandbox.call_process import CallProcess
    from ringfence_sandbox.host import HostFilesystem
    from ringfence_sandbox.workspace import Workspace

__all__ = ["CallProcess", "HostFilesystem", "Workspace"]

# Imported when asked for: a filesystem on its own needs no git.
_MODULES = {"CallProcess": "call_process", "HostFilesystem": "host", "Workspace": "workspace"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
