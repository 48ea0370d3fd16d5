"""What a step changed of git's own data, for a terminal and as JSON: no patch has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringfence_tools.printable import one_line, patch_json, stat_lines

if TYPE_CHECKING:
    from ringfence_sandbox import GitDataChanges

UNTIL = "until git removes what no ref names, by default after two weeks"


def git_data_lines(git: GitDataChanges, *, aborted: bool, stat: bool) -> Iterator[str]:
    """Say where refs stood, and show the rest as text, which is indented: `git apply` passes over it.

    Of what was rolled back (``aborted``) they say how to get at the commits. With ``stat`` texts are only listed.
    """
    for ref in git.refs:
        name = ref.name if ref.repository == ".git" else f"{ref.repository}/{ref.name}"
        gone = ", whose objects are not there" if ref.missing else ""
        yield one_line(f"git: {name}: {ref.before or 'none'} -> {ref.after or 'none'}{gone}", 300)
    new = dict.fromkeys(ref.after for ref in git.refs if ref.after and not ref.missing and ":" not in ref.after)
    for commit in new if aborted else ():
        yield f"git: `git branch NAME {one_line(commit, 80)}` gets it, {UNTIL}"
    for line in stat_lines(git.texts) if stat else git.texts.decode(errors="replace").splitlines():
        yield f"    {line}"


def git_data_json(git: GitDataChanges) -> dict[str, object]:
    """The same for JSON."""
    refs = [
        {
            "repository": ref.repository,
            "name": ref.name,
            "before": ref.before or None,
            "after": ref.after or None,
            "missing": ref.missing,
        }
        for ref in git.refs
    ]
    return {"refs": refs, **patch_json(git.texts)}
