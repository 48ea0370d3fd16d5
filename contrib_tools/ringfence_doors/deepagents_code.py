"""The sandbox of ``dcode --sandbox ringfence`` (the extra ``deepagents-code``): the directory that dcode runs in."""

# deepagents-code is not installed where this is checked. Its registry is used as tests/doors shows.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import os
import threading
from typing import Any

from ringfence.errors import RingfenceError
from ringfence.extras import missing
from ringfence_workspace import Workspace

try:
    from deepagents_code.integrations.sandbox_provider import (
        SandboxError,
        SandboxInstallHint,
        SandboxNotFoundError,
        SandboxProvider,
        SandboxProviderMetadata,
    )
except ImportError as error:
    raise ModuleNotFoundError(missing("deepagents_code", "deepagents-code"), name="deepagents_code") from error

from ringfence_doors.deepagents import RingfenceSandbox

_opened: dict[str, RingfenceSandbox] = {}
_mutex = threading.Lock()


class RingfenceProvider(SandboxProvider):
    """Sandboxes by their directory, each opened once in this process."""

    @property
    def metadata(self) -> SandboxProviderMetadata:
        install = SandboxInstallHint(kind="package", name="ringfence[deepagents-code]")
        return SandboxProviderMetadata(name="ringfence", working_dir=os.path.realpath("."), install=install)

    def get_or_create(
        self, *, sandbox_id: str | None = None, rollback_on_error: bool = False, **kwargs: Any
    ) -> RingfenceSandbox:
        """Open a directory: ``sandbox_id``, or that of this process. The files in it are the person's own.

        Raises:
            SandboxNotFoundError: there is no such directory.
            SandboxError: it cannot be opened, for instance since another process has it open.
        """
        root = os.path.realpath(sandbox_id or ".")
        with _mutex:
            if root not in _opened:
                try:
                    _opened[root] = RingfenceSandbox(Workspace.open(root), rollback_on_error=rollback_on_error)
                except (FileNotFoundError, NotADirectoryError) as error:
                    raise SandboxNotFoundError(str(error)) from error
                except (OSError, ValueError, RingfenceError) as error:
                    raise SandboxError(f"ringfence cannot open {root}: {error}") from error
            return _opened[root]

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """Close the workspace. Its directory, its files and their history stay."""
        with _mutex:
            sandbox = _opened.pop(os.path.realpath(sandbox_id), None)
        if sandbox is not None:
            sandbox.calls.workspace.close()
