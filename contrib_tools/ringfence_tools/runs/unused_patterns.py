"""Patterns of policies and of hidden files that fit no path of a directory now: most of them are mistyped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ringfence.escapes import display_path
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.path_patterns import covering, covering_any_case
from ringfence.policies.approval import COMMANDS, WRITES, ApprovalPolicy
from ringfence.policies.effects import PathPolicy, RequireCleanTestsPolicy
from ringfence.runtime.policy import Policy
from ringfence.runtime.tool import TOOL_NAME
from ringfence_tools.printable import one_line

MOST_PATHS = 20_000
"""How many paths are looked at. In a larger directory nothing is said, so that a start costs no more."""
GIT = ".git"


def unused_patterns(policies: Iterable[Policy], hide: HiddenFiles | None, directory: Path) -> Sequence[str]:
    """Return a line for each pattern that fits no path of the directory now. A later path may still fit."""
    patterns = dict.fromkeys(_patterns(policies, hide))
    tests = {
        (kind, pattern): (covering if kind == "allow" else covering_any_case)([pattern])
        for kind, pattern in patterns
        if GIT not in pattern.casefold()  # its files are many, and not looked at
    }
    paths = _paths(directory)
    for path in islice(paths, MOST_PATHS):
        for found in [one for one, fits in tests.items() if fits(path)]:
            del tests[found]
        if not tests:
            return []
    if next(paths, None) is not None:
        return []
    return [
        one_line(f"{kind}:{display_path(pattern)} fits no path now{_advice(pattern)}", 300) for kind, pattern in tests
    ]


def _patterns(policies: Iterable[Policy], hide: HiddenFiles | None) -> Iterator[tuple[str, str]]:
    for policy in policies:
        if isinstance(policy, PathPolicy):
            yield from (("allow", pattern) for pattern in policy.allow or ())
            yield from (("deny", pattern) for pattern in policy.deny)
        elif isinstance(policy, RequireCleanTestsPolicy):
            yield from (("tests", pattern) for pattern in policy.paths)
        elif isinstance(policy, ApprovalPolicy):
            words = sorted(policy.of - {COMMANDS, WRITES})
            yield from (("ask", word) for word in words if not TOOL_NAME.fullmatch(word))
    yield from (("hide", pattern) for pattern in (hide.globs if hide is not None else ()))


def _paths(directory: Path) -> Iterator[str]:
    """Yield all paths below a directory but those of git's data, the nearest first."""
    waiting = [""]
    for prefix in waiting:
        try:
            entries = sorted(os.scandir(directory / prefix), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = f"{prefix}{entry.name}"
            yield path
            if entry.name != GIT and entry.is_dir(follow_symlinks=False):
                waiting.append(f"{path}/")


def _advice(pattern: str) -> str:
    if "," in pattern:
        return ": give each pattern of a list for itself"
    if pattern.startswith("/") and os.path.lexists(pattern):
        return ": patterns begin at the workspace, not at the root of the machine"
    return ""
