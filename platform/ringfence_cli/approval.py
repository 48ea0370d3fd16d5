"""``--ask``: its policy, the text of a question, and the answer where nobody can be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from ringfence.errors import PromptValidationError
from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.filesystem.paths import display_path
from ringfence.prompt.approval import ASK_SECONDS, Approval, ApprovalPolicy, ApprovalRequest, Ask
from ringfence_cli.outputs import diff_style
from ringfence_tools.policy_specs import refuse_path_of_host
from ringfence_tools.printable import (
    given_params,
    line_counts,
    one_line,
    params_summary,
    plural,
    printable,
    unpatchable_changes,
)

NOBODY = "nobody can be asked here, since there is no terminal: that counts as a no"
NOBODY_AT_START = "nobody can answer here, since there is no terminal: what --ask asks about is denied"
MAX_LINE_CHARACTERS = 400
MAX_IGNORED = 5
"""The most names of ignored paths in a short question."""

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


def question_lines(request: ApprovalRequest, *, most_diff: int | None, most_output: int | None) -> Iterator[Line]:
    """Yield a question. What comes from the agent stands behind a bar, so that it cannot pass for the rest.

    ``most_diff`` and ``most_output`` are the most lines of either; None is all of them, however long.
    """
    yield f"approval of {one_line(request.tool, 64)} ({one_line(request.call_id, 64)})", "bold"
    for line in _params_lines(request):
        yield f"  {line}", ""
    if request.before:
        yield f"  it has not run yet: {printable(request.before)}", "yellow"
        return
    if request.exit_code is not None:
        yield f"  exit code {request.exit_code}", "" if request.exit_code == 0 else "red"
        lines = printable(request.output).splitlines()
        cut = 0 if most_output is None else max(len(lines) - most_output, 0)
        yield "  output:" + (f" (the first {plural(cut, 'line')} left out)" if cut else ""), ""
        yield from _block(lines[cut:], is_whole=most_output is None)
    added, removed = line_counts(request.diff)
    yield f"  changes: {plural(len(request.changes), 'path')}, +{added} -{removed} lines", ""
    if request.ignored:
        most = len(request.ignored) if most_diff is None else MAX_IGNORED
        named = [display_path(change.path) for change in request.ignored[:most]]
        more = f" and {len(request.ignored) - len(named)} more" if len(request.ignored) > len(named) else ""
        yield f"  {plural(len(request.ignored), 'ignored path')}: {printable(', '.join(named))}{more}", "yellow"
    for line in unpatchable_changes(request.changes):
        yield f"  {printable(line)}", ""
    lines = printable(request.diff.decode("utf-8", "surrogateescape")).splitlines()
    for text, _ in _block(lines[:most_diff], is_whole=most_diff is None):
        yield text, diff_style(text[4:])
    if most_diff is not None and len(lines) > most_diff:
        yield f"  {plural(len(lines) - most_diff, 'more line')} of the diff", "yellow"


def _block(lines: Sequence[str], *, is_whole: bool) -> Iterator[Line]:
    for line in lines:
        is_long = len(line) > MAX_LINE_CHARACTERS and not is_whole
        yield f"  | {line[:MAX_LINE_CHARACTERS]} [and more]" if is_long else f"  | {line}", ""


def _params_lines(request: ApprovalRequest) -> Iterator[str]:
    """The params: all of them for a command and before a handler, else in short, since the diff has them."""
    if request.exit_code is None and not request.before:
        yield params_summary(request.params)
        return
    for name, value in given_params(request.params):
        lines = printable(value if isinstance(value, str) else repr(value)).splitlines()
        yield f"{name}: " + "\n  | ".join(lines)
