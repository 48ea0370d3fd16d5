"""What a run is made of, in the words of its options. `open_run` opens it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence_tools.runs.place import Place
from ringfence_tools.runs.run_limits import RunLimits

if TYPE_CHECKING:
    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence_sandbox import Detect


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The model, the workspace, the policies and the sections of a run or of a server."""

    directory: Path
    model: str = ""
    """The SPEC of the model. Empty for a server, whose clients have their own."""
    limits: RunLimits = RunLimits()
    hide: HiddenFiles | None = None
    """The rule by which files are hidden. None is the rule that the store remembers."""
    with_ignored: bool = False
    """Whether changes of ignored paths are shown like all others."""
    allow_git: bool = False
    """Whether commands may change git's own data, but for hooks and settings."""
    store: Path | None = None
    """Where the history of a copy is, which has no owner and no earlier runs. None: where the directory has it."""
    project: Path | None = None
    """The directory that a container's image was built for, if it is another one."""

    detect: Detect = "auto"
    """How changes of commands are found, as for `HostFilesystem`."""
    seed: int | None = None
    """The seed of the model, where its API has one."""

    @property
    def place(self) -> Place:
        return self.limits.place

    @property
    def is_copy(self) -> bool:
        """Whether the run works on a copy in memory."""
        return self.place.workspace == "memory"
