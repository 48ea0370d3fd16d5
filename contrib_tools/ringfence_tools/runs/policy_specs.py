"""Policies by their SPECs: what a person writes on a command line, in a task, or in a file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringfence import serde
from ringfence.errors import PromptValidationError
from ringfence.filesystem.edits import read_host_text
from ringfence.policies.effects import DeletionLimitPolicy, PathPolicy, ProtectedFilesPolicy, RequireCleanTestsPolicy
from ringfence.runtime.policy import Policy
from ringfence_tools.printable import why
from ringfence_tools.runs.own_code import policy_of
from ringfence_tools.runs.plug_ins import plug_ins
from ringfence_tools.runs.spec_error import SpecError

GROUP = "ringfence.policies"
KINDS = "allow:GLOB, deny:GLOB, deletions:N, protected, tests:TOOL[=COMMAND]:GLOB, FILE.toml or FILE.py:NAME"


@dataclass(frozen=True, slots=True)
class Paths:
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tests:
    tool: str
    command: str | tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """The table ``[policies]`` of a file."""

    protected: bool = False
    deletions: int | None = None
    paths: Paths | None = None
    tests: Tests | None = None

    def policies(self) -> Iterator[Policy]:
        if self.protected:
            yield ProtectedFilesPolicy()
        if self.paths is not None:
            yield PathPolicy(allow=self.paths.allow, deny=self.paths.deny)
        if self.deletions is not None:
            yield DeletionLimitPolicy(max_files=self.deletions)
        if self.tests is not None:
            tests = self.tests
            yield RequireCleanTestsPolicy(tests.tool, command=tests.command, before=tests.before, paths=tests.paths)


@dataclass(frozen=True, slots=True)
class PolicyFile:
    policies: PolicyTable = field(default_factory=PolicyTable)


def parse_specs(specs: Sequence[str], directory: Path) -> tuple[Policy, ...]:
    """Return the policies of the command line. All patterns make one policy. Raises SpecError."""
    found: list[Policy] = []
    globs: dict[str, list[str]] = {"allow": [], "deny": []}
    for spec in specs:
        kind, _, rest = spec.partition(":")
        try:
            if kind in globs:
                globs[kind].append(_pattern(kind, rest, directory))
            elif spec == "protected":
                found.append(ProtectedFilesPolicy())
            elif kind == "deletions":
                found.append(DeletionLimitPolicy(max_files=_count(rest)))
            elif kind == "tests":
                found.append(_clean_tests(rest, directory))
            elif spec.endswith(".toml"):
                found.extend(parse_policy_file(Path(spec), directory, may_be_empty=False))
            elif is_own_policy(spec, directory):
                found.append(policy_of(spec, directory))
            else:
                installed = "".join(f"; the plug-in {one}" for one in sorted(plug_ins(GROUP, directory)))
                raise _bad(f"there is no policy {spec!r}; there are {KINDS}{installed}")
        except SpecError:
            raise
        except (PromptValidationError, ValueError) as error:
            raise _bad(f"{spec!r}: {error}") from None
    if any(globs.values()):
        try:
            found.append(PathPolicy(allow=globs["allow"] or None, deny=globs["deny"]))
        except PromptValidationError as error:
            raise _bad(str(error)) from None
    return strictest(found)


def is_code(spec: str) -> bool:
    """Whether a SPEC names a policy of the user's own, FILE.py:NAME."""
    place, _, name = spec.rpartition(":")
    return place.endswith(".py") and name.isidentifier() and spec.partition(":")[0] not in ("allow", "deny", "tests")


def is_own_policy(spec: str, directory: Path) -> bool:
    """Whether a SPEC names a policy of the user's own, in a file or of a plug-in."""
    if ":" in spec or spec == "protected" or spec.endswith(".toml"):
        return is_code(spec)
    return spec in plug_ins(GROUP, directory)


def strictest(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Return the policies with only the lowest limit on deletions."""
    limits = [policy for policy in policies if isinstance(policy, DeletionLimitPolicy)]
    lowest = min(limits, key=lambda limit: limit.max_files, default=None)
    return tuple(policy for policy in policies if policy is lowest or policy not in limits)


def _pattern(kind: str, glob: str, directory: Path) -> str:
    if not glob:
        raise ValueError(f"{kind}:GLOB takes a pattern, such as {kind}:/src/**")
    refuse_path_of_host(glob, directory)
    return glob


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("deletions:N takes a number of files, such as deletions:3")
    return int(text)


def _clean_tests(text: str, directory: Path) -> Policy:
    """Parse ``TOOL:GLOB`` or ``TOOL=COMMAND:GLOB``. The command may have colons, the glob may not."""
    tool, _, pattern = text.partition(":")
    command = ()
    if "=" in tool:
        named, _, pattern = text.rpartition(":")
        tool, _, command = named.partition("=")
    if not (tool and pattern):
        raise ValueError("tests:TOOL:GLOB takes a tool and a pattern, such as tests:shell_execute:/src/**")
    refuse_path_of_host(pattern, directory)
    return RequireCleanTestsPolicy(tool, command=command, paths=[pattern])


def refuse_path_of_host(pattern: str, directory: Path) -> None:
    """Raise ValueError for a pattern that begins with the path of the workspace. It would match nothing."""
    for root in (os.path.abspath(directory), os.path.realpath(directory)):
        if root != "/" and f"{pattern}/".startswith(f"{root}/"):
            meant = pattern.removeprefix(root) or "/**"
            raise ValueError(f"patterns are from the root of the workspace: for {pattern} write {meant}")


def parse_policy_file(file: Path, directory: Path, *, may_be_empty: bool = True) -> tuple[Policy, ...]:
    """Return the policies of a file. Raises SpecError for one that is invalid, or inside of the workspace."""
    root = os.path.realpath(directory)
    for place in (os.path.abspath(file), os.path.realpath(file)):
        if os.path.commonpath((root, place)) == root:
            raise _bad(f"{file} is inside of the workspace, where the agent could change it: keep it elsewhere")
    try:
        table = serde.parse(PolicyFile, tomllib.loads(read_host_text(file)), extra="forbid", coerce=False).policies
        paths, tests = table.paths or Paths(), table.tests or Tests("")
        for pattern in (*(paths.allow or ()), *paths.deny, *tests.paths):
            refuse_path_of_host(pattern, directory)
        found = tuple(table.policies())
    except (OSError, PromptValidationError, ValueError) as error:
        raise _bad(f"{file}: {why(error)}") from None
    if not found and not may_be_empty:  # whoever names a file does not want all to be allowed
        raise _bad(f"{file}: it has no policy: a table [policies] has protected, deletions, paths or tests")
    return found


def _bad(message: str) -> SpecError:
    return SpecError("--policy", message)
