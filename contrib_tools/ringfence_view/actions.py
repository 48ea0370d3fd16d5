"""What a person does from the page: undo, restore, reject, promote. Each is previewed first, and is one step."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

from ringfence.escapes import display_path
from ringfence.filesystem import InMemoryFilesystem
from ringfence.filesystem.patch_text import parse_patch
from ringfence_sandbox import HostFilesystem, Reversal, Workspace
from ringfence_tools.patching import apply_to
from ringfence_tools.printable import one_line, plural
from ringfence_view.diffs import reversed_patch
from ringfence_view.sources import CallSource

MAX_LISTED = 20
MAX_WAITING = 20
"""The previews that wait for somebody to go on."""

Work = Callable[[bool], Sequence[str]]
"""Does it, or with True only says what would become of each path. Returns lines for a person."""


class Actions:
    """The writes of one page. A preview gives a token, with which the same thing can be done once."""

    def __init__(self, source: CallSource, directory: Path) -> None:
        self._source = source
        self._directory = directory
        self._waiting: dict[str, Work] = {}
        self._lock = Lock()

    def preview(self, what: str, given: Mapping[str, str]) -> tuple[str, Sequence[str]]:
        """Return the token, and what would become of each path.

        Raises:
            ValueError, LookupError: it cannot be asked for so, or there is no such step.
            RingfenceError, OSError: the workspace cannot be opened now, such as while an agent has it.
        """
        work = self._work(what, given)
        lines = work(True)
        once = secrets.token_urlsafe(32)
        with self._lock:
            self._waiting[once] = work
            for old in [*self._waiting][:-MAX_WAITING]:
                del self._waiting[old]
        return once, lines

    def act(self, once: str) -> Sequence[str]:
        """Do what was previewed.

        Raises what `preview` raises, and LookupError for a token that is unknown or was used.
        """
        with self._lock:
            work = self._waiting.pop(once, None)
        if work is None:
            raise LookupError("this was done already, or never previewed")
        return work(False)

    def _work(self, what: str, given: Mapping[str, str]) -> Work:
        match what:
            case "undo":
                step = int(given["step"])
                return lambda dry: self._reverse(
                    lambda workspace: workspace.undo(step=step, dry_run=dry, with_ignored=False)
                )
            case "restore":
                step = int(given["step"])
                return lambda dry: self._reverse(
                    lambda workspace: workspace.restore(step, dry_run=dry, with_ignored=False)
                )
            case "reject":
                files, row = self._source.raw_files(given["key"]), int(given["row"])
                patch = reversed_patch(files[int(given["file"])].patch_of_hunk(row))
                return lambda dry: self._reject(patch, dry)
            case "promote":
                name = given["name"]
                return lambda dry: self._promote(name, dry)
            case _:
                raise ValueError(f"there is no action {one_line(what, 40)!r}")

    def _reverse(self, ask: Callable[[Workspace], Reversal]) -> Sequence[str]:
        with self._source.opened(writable=True) as workspace:
            done = ask(workspace)
        shown = {path: what for path, what in done.outcomes.items() if path not in done.ignored or what == "conflict"}
        return [*_outcome_lines(done.outcomes, shown, done.reasons), *done.notes]

    def _promote(self, name: str, dry: bool) -> Sequence[str]:
        with self._source.opened(writable=True) as workspace:
            done = workspace.promote(name, dry_run=dry)
        lines = [*_outcome_lines(done.outcomes, done.outcomes, done.reasons), *done.notes]
        if done.conflicts:
            lines.append(
                "nothing is changed while there is a conflict; `ringfence promote --on-conflict keep` does the rest"
            )
        return lines

    def _reject(self, patch: bytes, dry: bool) -> Sequence[str]:
        with self._source.opened(writable=True) as workspace:
            if dry:
                files = apply_to(_copied(workspace.filesystem, patch), patch)
            else:
                with workspace.transaction("reject", opaque=False):
                    files = apply_to(workspace.filesystem, patch)
        return [one_line(file.render(), 300) for file in files]


def _outcome_lines(outcomes: Mapping[str, str], shown: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[str]:
    """Count all outcomes, and name some paths."""
    yield ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items()) or "nothing differs"
    for path, outcome in [*shown.items()][:MAX_LISTED]:
        why = f" ({reasons[path]})" if path in reasons else ""
        yield one_line(f"{outcome}: {display_path(path)}{why}", 300)
    if len(shown) > MAX_LISTED:
        yield f"and {plural(len(shown) - MAX_LISTED, 'more path')}"


def _copied(files: HostFilesystem, patch: bytes) -> InMemoryFilesystem:
    """The files of a patch in memory: a preview leaves nothing in the history."""
    copied = InMemoryFilesystem()
    for path in {path for one in parse_patch(patch) for path in one.paths}:
        if files.exists(path):
            copied.load(path, files.read_bytes(path).content)
    return copied
