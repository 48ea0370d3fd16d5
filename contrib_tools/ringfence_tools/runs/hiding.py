"""What a run or a server hides: what its options say, and what was hidden in the directory before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ringfence.filesystem.hidden import HiddenFiles
from ringfence_sandbox import describe_lost_rule, remembered_hidden
from ringfence_tools.printable import printable


def hidden_as_before(
    directory: Path, given: HiddenFiles | None, say: Callable[[str], None], *, quiet: bool = False
) -> HiddenFiles | None:
    """Return the rule that the options give, with the patterns of earlier runs, and say which these are.

    A rule without the usual files is that of ``--no-hide``: it forgets the patterns. None is the remembered rule.

    Raises:
        StateDirectoryError: the state directory is unknown.
    """
    if (lost := describe_lost_rule(directory)) is not None:
        say(f"ringfence: {printable(lost)}")
    before = remembered_hidden(directory)
    others = [glob for glob in (() if before is None else before.globs) if given is None or glob not in given.globs]
    forgets = given is not None and not given.usual
    if others and not quiet:
        listed = printable(", ".join(others))
        say(f"no longer hidden: {listed}" if forgets else f"hidden as before: {listed} (--no-hide forgets this)")
    return given if given is None or forgets else HiddenFiles([*others, *given.globs])
