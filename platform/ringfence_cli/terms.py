"""On what terms a run works: its policies and limits, and where, as they were said and as its record keeps them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from ringfence import serde
from ringfence_cli.workspace import WorkspaceKind
from ringfence_sandbox import SandboxLimits
from ringfence_sandbox.container.isolation import Network

LEAST = 1
"""Of every limit: a second, a token, a turn."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run works, and with which container. None is what was not said."""

    workspace: WorkspaceKind | None = None
    image: str | None = None
    network: Network | None = None
    keep_environment: bool = False
    memory_bytes: int | None = None
    cpus: float | None = None
    command_seconds: float | None = None
    """The most that a command may take."""

    @property
    def options(self) -> dict[str, str]:
        """What was said of the container, by option."""
        given = {
            "--image": None if self.image is None else shlex.quote(self.image),
            "--network": self.network,
            "--keep-environment": "" if self.keep_environment else None,
            "--memory": None if self.memory_bytes is None else f"{self.memory_bytes >> 20}m",
            "--cpus": None if self.cpus is None else f"{self.cpus:g}",
            "--command-timeout": None if self.command_seconds is None else f"{self.command_seconds:.9g}s",
        }
        return {option: value for option, value in given.items() if value is not None}

    @property
    def said(self) -> str:
        """As options of the command line, if commands run."""
        if self.workspace != "podman":
            return ""
        return " ".join(["--workspace podman", *(f"{one} {value}".strip() for one, value in self.options.items())])

    def limits(self) -> SandboxLimits:
        """Those of the container."""
        usual = SandboxLimits()
        memory = self.memory_bytes or usual.memory_bytes
        tmp = min(usual.tmp_bytes, memory // 2)
        return SandboxLimits(memory_bytes=memory, tmp_bytes=tmp, cpus=self.cpus or usual.cpus)

    def resumed(self, given: Place) -> Place:
        """That of a run when it is resumed: what is not given is as it was. click.UsageError for a container's option
        where there is none."""
        workspace = given.workspace or self.workspace
        if workspace == "podman":
            return Place(
                workspace,
                given.image or self.image,
                given.network or self.network,
                given.keep_environment or self.keep_environment,
                given.memory_bytes or self.memory_bytes,
                given.cpus or self.cpus,
                given.command_seconds or self.command_seconds,
            )
        if given.options:
            raise click.UsageError(
                f"{' and '.join(given.options)} is for commands, and the run that is resumed has none: "
                "--workspace podman gives it some"
            )
        return Place(workspace)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``policies`` and ``sections`` are SPECs. A limit that there is not is None; of one that is used up, less than 1
    is left."""

    policies: tuple[str, ...] = ()
    seconds: float | None = None
    tokens: int | None = None
    turns: int | None = None
    place: Place = Place()
    sections: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """As options of the command line."""
        policies = " ".join(f"--policy {shlex.quote(spec)}" for spec in self.policies)
        sections = " ".join(f"--section {shlex.quote(spec)}" for spec in self.sections)
        seconds = f"--deadline {self.seconds:.0f}s" if self.seconds is not None else ""
        tokens = f"--max-tokens {self.tokens}" if self.tokens is not None else ""
        turns = f"--max-turns {self.turns}" if self.turns is not None else ""
        return " ".join(option for option in (self.place.said, sections, policies, seconds, tokens, turns) if option)

    def less(self, seconds: float, tokens: int, turns: int) -> RunLimits:
        """What is left when so much of it has been used."""
        return replace(
            self,
            seconds=None if self.seconds is None else self.seconds - seconds,
            tokens=None if self.tokens is None else self.tokens - tokens,
            turns=None if self.turns is None else self.turns - turns,
        )

    def used_up(self) -> list[str]:
        """The options for those of the limits of which nothing is left."""
        limits = (("--deadline TIME", self.seconds), ("--max-tokens N", self.tokens), ("--max-turns N", self.turns))
        return [option for option, left in limits if left is not None and left < LEAST]

    def resumed(self, given: RunLimits) -> RunLimits:
        """What a resume works on when this is left of the run's: its policies and sections, with those that are given,
        its limits where none is given anew, and where it worked unless that is given.

        Raises:
            click.UsageError: a policy that would loosen one of the run's, a limit that is used up, or an option for a
                container that there is not.
        """
        terms = RunLimits(
            joined(self.policies, given.policies),
            self.seconds if given.seconds is None else given.seconds,
            self.tokens if given.tokens is None else given.tokens,
            self.turns if given.turns is None else given.turns,
            self.place.resumed(given.place),
            tuple(dict.fromkeys((*self.sections, *given.sections))),
        )
        if used_up := terms.used_up():
            raise click.UsageError(
                f"what the run was allowed is used up: give the resumed part a limit of its own, {', '.join(used_up)}"
            )
        return terms

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> RunLimits:
        """ValueError for what is none."""
        return serde.parse(RunLimits, record)


def spelled(spec: str) -> str:
    """A SPEC that means the same in any working directory."""
    is_file = spec.endswith(".toml") and spec.partition(":")[0] not in ("allow", "deny", "tests", "deletions")
    return os.path.abspath(spec) if is_file else spec


def joined(held: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """The SPECs of a run, and those that its resume adds.

    Raises:
        click.BadParameter: one that would loosen those of the run.
    """
    allowed = [spec for spec in held if spec.startswith("allow:")]
    limits = [spec for spec in held if spec.startswith("deletions:")]
    new = [spec for spec in dict.fromkeys(added) if spec not in held]
    for spec in new:
        # All the patterns that are allowed count together; of limits the lowest does.
        loosened = allowed if spec.startswith("allow:") else []
        if spec.startswith("deletions:"):
            loosened = [limit for limit in limits if _number(limit) < _number(spec)]
        if loosened:
            raise click.BadParameter(
                f"{spec!r} is looser than what the run was begun with ({', '.join(loosened)}), which holds for all of "
                "it: leave it out, or begin a new run with --task",
                param_hint="'--policy'",
            )
    return (*held, *new)


def _number(spec: str) -> int:
    return int(spec.partition(":")[2])
