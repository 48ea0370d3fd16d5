"""The workspace of a guarded directory."""

from __future__ import annotations

from pathlib import Path

from ringfence.filesystem.hidden import HiddenFiles
from ringfence_sandbox import Workspace
from ringfence_tools.runs.hiding import hidden_as_before


def open_guarded(root: str) -> Workspace:
    """Open a workspace whose history has no hidden files: neither the usual ones with secrets, nor what a run has
    hidden before. What has changed since it was open is left to the next look. Raises as `Workspace.open`."""
    hide = hidden_as_before(Path(root), HiddenFiles(), lambda _: None, quiet=True)
    return Workspace.open(root, hide=hide, look_first=False)
