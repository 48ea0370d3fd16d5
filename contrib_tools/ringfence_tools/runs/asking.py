"""``--ask``: its policy, the text of a question, and the answer where nobody can be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.cells import cell_len

from ringfence.errors import PromptValidationError
from ringfence.escapes import display_path
from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.policies.approval import ASK_SECONDS, Approval, ApprovalPolicy, ApprovalRequest, Ask
from ringfence_tools.printable import (
    given_params,
    line_counts,
    one_line,
    params_summary,
    plural,
    printable,
    unpatchable_changes,
)
from ringfence_tools.runs.outputs import diff_style
from ringfence_tools.runs.policy_specs import refuse_path_of_host

NOBODY = "nobody can be asked here, since there is no terminal: that counts as a no"
NOBODY_AT_START = "nobody can answer here, since there is no terminal: what --ask asks about is denied"
MAX_LINE_CHARACTERS = 400
MAX_IGNORED = 5
"""The most names of ignored paths in a short question."""

BAR, GOES_ON = "  | ", "  |>"
WIDENS = "\ufe0f"
"""It has no width, and asks for the wide form of the character before it."""

Line = tuple[str, str]
"""A line for a person, without anything that acts on a terminal, and its style."""


def approval_of(
    specs: Sequence[str],
    seconds: float | None,
    ask: Ask,
    directory: Path,
    ignored: Callable[[], IgnoredPaths] | None = None,
) -> ApprovalPolicy:
    """Return the policy of the options. ``ignored`` gives the paths that are only counted.

    Raises click.BadParameter for a glob that matches nothing.
    """
    try:
        for spec in specs:
            refuse_path_of_host(spec, directory)
        return ApprovalPolicy(ask, specs, timeout_seconds=seconds or ASK_SECONDS, ignored=ignored)
    except (PromptValidationError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="'--ask'") from None


def nobody(request: ApprovalRequest) -> Approval:
    """The answer where nobody can be asked."""
    return Approval(False, NOBODY)


def question_lines(
    request: ApprovalRequest, *, most_diff: int | None, most_output: int | None, width: int
) -> Iterator[Line]:
    """Yield a question. What comes from the agent stands behind a bar, so that it cannot pass for the rest.

    ``most_diff`` and ``most_output`` are the most lines of either; None is all of them, however long. ``width`` is the
    number of columns of the screen. A line that the screen itself wrapped would go on without a bar.
    """
    about = f"approval of {one_line(request.tool, 64)} ({one_line(request.call_id, 64)})"
    yield next(_pieces(about, width)), "bold"
    for line in _params_lines(request):
        yield from _barred(line, width)
    if request.before:
        yield f"  it has not run yet: {printable(request.before)}", "yellow"
        return
    if request.exit_code is not None:
        yield f"  exit code {request.exit_code}", "" if request.exit_code == 0 else "red"
        lines = printable(request.output).splitlines()
        cut = 0 if most_output is None else max(len(lines) - most_output, 0)
        yield "  output:" + (f" (the first {plural(cut, 'line')} left out)" if cut else ""), ""
        for line in lines[cut:]:
            yield from _barred(line, width, is_whole=most_output is None)
    added, removed = line_counts(request.diff)
    yield f"  changes: {plural(len(request.changes), 'path')}, +{added} -{removed} lines", ""
    if request.ignored:
        most = len(request.ignored) if most_diff is None else MAX_IGNORED
        named = [display_path(change.path) for change in request.ignored[:most]]
        more = f" and {len(request.ignored) - len(named)} more" if len(request.ignored) > len(named) else ""
        yield f"  {plural(len(request.ignored), 'ignored path')}:", "yellow"
        yield from _barred(printable(", ".join(named)) + more, width, is_whole=True)
    for line in unpatchable_changes(request.changes):
        yield from _barred(printable(line), width, is_whole=True)
    lines = printable(request.diff.decode("utf-8", "surrogateescape")).splitlines()
    for line in lines[:most_diff]:
        yield from _barred(line, width, diff_style(line), is_whole=most_diff is None)
    if most_diff is not None and len(lines) > most_diff:
        yield f"  {plural(len(lines) - most_diff, 'more line')} of the diff", "yellow"


def _barred(line: str, width: int, style: str = "", *, is_whole: bool = False) -> Iterator[Line]:
    """Yield a line of the agent, wrapped at ``width``. What goes on a line has another bar than what begins one."""
    if len(line) > MAX_LINE_CHARACTERS and not is_whole:
        line = f"{line[:MAX_LINE_CHARACTERS]} [and more]"
    for number, piece in enumerate(_pieces(line.expandtabs(), width - len(BAR))):
        yield (GOES_ON if number else BAR) + piece, style


def _pieces(line: str, width: int) -> Iterator[str]:
    """Yield the parts of a line that fit. A terminal may show characters apart that others join to one."""
    if 2 * len(line) <= width:
        yield line
        return
    start = columns = 0
    for at, character in enumerate(line):
        wide = 1 if character == WIDENS else cell_len(character)
        if columns + wide > width and at > start:
            yield line[start:at]
            start, columns = at, 0
        columns += wide
    yield line[start:]


def _params_lines(request: ApprovalRequest) -> Iterator[str]:
    """The params: all of them for a command and before a handler, else in short, since the diff has them."""
    if request.exit_code is None and not request.before:
        yield params_summary(request.params)
        return
    for name, value in given_params(request.params):
        yield from f"{name}: {printable(value if isinstance(value, str) else repr(value))}".splitlines()
