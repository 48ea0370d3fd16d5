"""The terms of a run: policies, sections, limits and workspace. A resume may change some of them."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import click

from ringfence_tools.runs.place import Place


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The terms of a run. ``policies``, ``sections`` and ``asks`` are SPECs.

    None is no limit. A limit below 1 is used up, and one of the cost that is not above 0.
    """

    policies: tuple[str, ...] = ()
    seconds: float | None = None
    tokens: int | None = None
    turns: int | None = None
    place: Place = Place()
    sections: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    ask_seconds: float | None = None
    repeats: int | None = None
    cost_usd: float | None = None

    def describe(self) -> str:
        """Return the terms as options of the command line."""
        options = [self.place.describe()] if self.place.workspace == "podman" else []
        options += [f"--section {shlex.quote(spec)}" for spec in self.sections]
        options += [f"--policy {shlex.quote(spec)}" for spec in self.policies]
        options += [f"--ask {shlex.quote(spec)}" for spec in self.asks]
        options += [f"--ask-timeout {self.ask_seconds:.0f}s"] if self.ask_seconds is not None else []
        options += [f"--deadline {self.seconds:.0f}s"] if self.seconds is not None else []
        options += [f"--max-tokens {self.tokens}"] if self.tokens is not None else []
        options += [f"--max-cost {self.cost_usd:g}"] if self.cost_usd is not None else []
        options += [f"--max-turns {self.turns}"] if self.turns is not None else []
        options += [f"--max-repeats {self.repeats}"] if self.repeats is not None else []
        return " ".join(options)

    def less(self, seconds: float, tokens: int, cost_usd: float, turns: int) -> RunLimits:
        """Return the limits less the amounts that were used."""
        return replace(
            self,
            seconds=None if self.seconds is None else self.seconds - seconds,
            tokens=None if self.tokens is None else self.tokens - tokens,
            cost_usd=None if self.cost_usd is None else self.cost_usd - cost_usd,
            turns=None if self.turns is None else self.turns - turns,
        )

    def used_up(self) -> list[str]:
        """Return the options of the limits that are used up."""
        limits = (("--deadline TIME", self.seconds), ("--max-tokens N", self.tokens), ("--max-turns N", self.turns))
        found = [option for option, remaining in limits if remaining is not None and remaining < 1]
        return found + (["--max-cost USD"] if self.cost_usd is not None and self.cost_usd <= 0 else [])

    def resumed(self, given: RunLimits) -> RunLimits:
        """Merge the limits that are left with those given now: policies, sections and asks are added, others
        replaced.

        Raises:
            click.UsageError: a policy that would loosen one of the run's, a limit that is used up, or an option for a
                container that there is not.
        """
        limits = RunLimits(
            join_policies(self.policies, given.policies),
            self.seconds if given.seconds is None else given.seconds,
            self.tokens if given.tokens is None else given.tokens,
            self.turns if given.turns is None else given.turns,
            _resume_place(self.place, given.place),
            tuple(dict.fromkeys((*self.sections, *given.sections))),
            tuple(dict.fromkeys((*self.asks, *given.asks))),
            self.ask_seconds if given.ask_seconds is None else given.ask_seconds,
            self.repeats if given.repeats is None else given.repeats,
            self.cost_usd if given.cost_usd is None else given.cost_usd,
        )
        if used_up := limits.used_up():
            raise click.UsageError(
                f"what the run was allowed is used up: give the resumed part a limit of its own, {', '.join(used_up)}"
            )
        return limits


def absolute_policy(spec: str) -> str:
    """A SPEC that means the same in any working directory."""
    if spec.partition(":")[0] in ("allow", "deny", "tests", "deletions"):
        return spec
    return os.path.abspath(spec) if spec.endswith(".toml") else absolute_code(spec)


def absolute_code(spec: str) -> str:
    """A SPEC of Python code that means the same in any working directory."""
    place, colon, name = spec.rpartition(":")
    return f"{os.path.abspath(place)}{colon}{name}" if place.endswith(".py") else spec


def join_policies(held: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """Join the policies of a run and its resume. Raises click.BadParameter if an added one loosens another."""
    new = [spec for spec in dict.fromkeys(added) if spec not in held]
    for spec in new:
        kind, _, value = spec.partition(":")
        # All the patterns that are allowed count together; of limits the lowest does.
        loosened = [other for other in held if kind == "allow" and other.startswith("allow:")]
        if kind == "deletions":
            limits = [other for other in held if other.startswith("deletions:")]
            loosened = [limit for limit in limits if int(limit.partition(":")[2]) < int(value)]
        if loosened:
            raise click.BadParameter(
                f"{spec!r} is looser than what the run was begun with ({', '.join(loosened)}), which holds for all of "
                "it: leave it out, or begin a new run with --task",
                param_hint="'--policy'",
            )
    return (*held, *new)


def _resume_place(before: Place, given: Place) -> Place:
    """Return the place of a resume. Options that are not given stay as they were."""
    workspace = given.workspace or before.workspace
    if workspace == "podman":
        place = replace(before, **{name: value for name, value in asdict(given).items() if value})
        specs = {spec.partition("=")[0]: spec for spec in (*before.secrets, *given.secrets)}
        place = replace(place, secrets=tuple(specs.values()))
        try:
            place.secret_values()
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        return place
    if given.options:
        raise click.UsageError(
            f"{' and '.join(given.options)} is for commands, and the run that is resumed has none: "
            "--workspace podman gives it some"
        )
    return Place(workspace)


def divided(limits: RunLimits, count: int, jobs: int) -> RunLimits:
    """Return the limits of one of so many candidates: of the tokens and the cost its part, and of the time that of its
    round."""
    seconds, tokens, cost_usd = limits.seconds, limits.tokens, limits.cost_usd
    return replace(
        limits,
        seconds=None if seconds is None else seconds / math.ceil(count / jobs),
        tokens=None if tokens is None else max(tokens // count, 1),
        cost_usd=None if cost_usd is None else cost_usd / count,
    )
