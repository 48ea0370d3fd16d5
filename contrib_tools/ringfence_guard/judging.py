"""Policies over the changes of calls that an agent ran itself, and what a person chose of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.failures import describe_error
from ringfence.runtime.policy import ALLOW, BasePolicy, Policy, PolicyDecision
from ringfence_guard.settings import GuardSettings, load_settings, scoped_settings, settings_files
from ringfence_tools.runs.owner_policies import owner_file, policies_of
from ringfence_tools.runs.policy_specs import is_code, parse_specs, strictest

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool


class ChosenPolicies:
    """The settings of a root and the policies that count there. Their files may change while they are in force."""

    def __init__(self, root: str) -> None:
        """Raises as `read`."""
        self._root = root
        self._files: tuple[object, ...] = ()
        self.settings = GuardSettings()
        self.policies: tuple[Policy, ...] = ()
        self.read()

    def read(self) -> bool:
        """Read them if a file has changed since they were read. Return whether that is so.

        Raises:
            ValueError: they cannot be understood, and which. What was read before stays.
            OSError: a file cannot be looked at.
        """
        if self._files and self._files == self._seen(self.settings):
            return False
        self._files = ()
        settings, scopes = load_settings(self._root), scoped_settings(self._root).values()
        seen, root = self._seen(settings), Path(self._root)
        try:
            # Each on its own: what one allows is not allowed by the other.
            chosen = [policy for one in scopes for policy in parse_specs(one.policies, root)]
            policies = strictest((*policies_of(root, ()), *chosen))
        except click.ClickException as error:
            raise ValueError(error.format_message()) from error
        self.settings, self.policies, self._files = settings, policies, seen
        return True

    def _seen(self, settings: GuardSettings) -> tuple[object, ...]:
        return tuple(map(_identity, self._paths(settings)))

    def _paths(self, settings: GuardSettings) -> Iterator[Path]:
        yield from settings_files(self._root)
        yield owner_file(Path(self._root))
        for spec in settings.policies:
            if spec.endswith(".toml") or is_code(spec):
                yield Path(spec if spec.endswith(".toml") else spec.rpartition(":")[0])


def unreadable_policies(root: Path) -> str:
    """Why the policies that count in a root cannot be read, for which calls are denied there; else nothing."""
    try:
        ChosenPolicies(str(root))
    except (OSError, ValueError) as error:
        return str(error) if isinstance(error, ValueError) else describe_error(error)
    return ""


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FailedCommandPolicy(BasePolicy):
    """Deny what a command changed that has failed."""

    name = "rollback-on-failure"

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.deny(f"the command ended with exit code {self._exit_code}")


class SomeDeniedError(BaseException):
    """Ends an adoption before anything is kept or rolled back. It is no Exception, which would be a denial."""


class EachChangePolicy(BasePolicy):
    """Ask policies about every change on its own, and end the adoption if any is denied.

    It is for changes of which nobody knows whose they are: one that is denied says nothing about the others.
    """

    name = "each"

    def __init__(self, policies: Sequence[Policy], is_hidden: Callable[[str], bool]) -> None:
        """What ``is_hidden`` is in no history, and cannot be rolled back: it does not end the adoption."""
        self._is_hidden = is_hidden
        self._policies = [policy for policy in policies if isinstance(policy, BasePolicy)]
        self.denied: dict[str, str] = {}
        """By path, which policy denies it and why."""
        self.stays: dict[str, str] = {}
        """The same of hidden files."""

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            for policy in self._policies:
                decision = policy.check_effects(tool, params, (change,), context=context)
                if not decision.allowed:
                    denied = self.stays if self._is_hidden(change.path) else self.denied
                    denied.setdefault(change.path, f"{policy.name}: {decision.reason}")
        if self.denied:
            raise SomeDeniedError
        return ALLOW
