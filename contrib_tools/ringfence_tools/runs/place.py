"""Where the agent of a run works, as it was asked for."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ringfence_sandbox import Network, SandboxLimits

WorkspaceKind: TypeAlias = Literal["memory", "disk", "podman"]


@dataclass(frozen=True, slots=True)
class Place:
    """The kind of workspace and the options of its container. None: the option was not given."""

    workspace: WorkspaceKind | None = None
    image: str | None = None
    network: Network | None = None
    keep_environment: bool = False
    memory_bytes: int | None = None
    cpus: float | None = None
    command_seconds: float | None = None
    """The longest time limit of a command."""
    secrets: tuple[str, ...] = ()
    """``NAME`` or ``NAME=env:VAR`` of each variable that commands get. Values are not recorded."""

    @property
    def options(self) -> dict[str, str]:
        """Return the options of the container that were given."""
        given = {
            "--image": shlex.quote(self.image) if self.image else None,
            "--network": shlex.quote(self.network) if self.network else None,
            "--keep-environment": "" if self.keep_environment else None,
            "--memory": f"{self.memory_bytes >> 20}m" if self.memory_bytes else None,
            "--cpus": f"{self.cpus:g}" if self.cpus else None,
            "--secret": " --secret ".join(self.secrets) or None,
            "--command-timeout": f"{self.command_seconds:.9g}s" if self.command_seconds else None,
        }
        return {option: value for option, value in given.items() if value is not None}

    def describe(self) -> str:
        """Return a place with commands as options of the command line."""
        return " ".join(["--workspace podman", *(f"{one} {value}".strip() for one, value in self.options.items())])

    def secret_values(self) -> dict[str, str]:
        """Return the variables of commands with their values, from the environment of this process.

        Raises ValueError for one that is not set here.
        """
        found: dict[str, str] = {}
        for spec in self.secrets:
            name, _, source = spec.partition("=env:")
            if not (value := os.environ.get(source or name)):
                raise ValueError(f"--secret {spec}: the variable {source or name} is not set here: export it first")
            found[name] = value
        return found

    def unmasked(self) -> list[str]:
        """Return a line for each secret whose value is too short to be masked."""
        from ringfence.secrets import SHORTEST  # its package is large, and no server starts with it

        return [
            f"--secret {name}: its value has fewer than {SHORTEST} characters, so it is not masked"
            for name, value in self.secret_values().items()
            if len(value) < SHORTEST
        ]

    def limits(self) -> SandboxLimits:
        """Return the limits of the container."""
        usual = SandboxLimits()
        memory = self.memory_bytes or usual.memory_bytes
        tmp = min(usual.tmp_bytes, memory // 2)
        return SandboxLimits(memory_bytes=memory, tmp_bytes=tmp, cpus=self.cpus or usual.cpus)
