"""What a person does from the page: undo, restore, reject, promote. Each is previewed first, and is one step."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path
from ringfence.filesystem import InMemoryFilesystem
from ringfence.filesystem.patch_text import parse_patch
from ringfence_sandbox import HostFilesystem, Reversal, Workspace
from ringfence_tools.patching import PatchedFile, apply_to
from ringfence_tools.printable import one_line, plural
from ringfence_tools.runs.person_notes import MAX_NOTE_CHARACTERS, PersonNote, PersonNotes, note_line
from ringfence_view.diffs import DiffFile, reversed_patch
from ringfence_view.sources import CallSource

MAX_LISTED = 20
MAX_WAITING = 20
"""The previews that wait for somebody to go on."""
_FROM_FIRST_LINE = re.compile(rb"^@@ -1(?:,\d+)? \+\d+(?:,\d+)? @@.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Done:
    """What was done, or would be, in lines for a person."""

    lines: Sequence[str]
    has_changed: bool = True
    has_conflicts: bool = False


Work = Callable[[bool], Done]
"""Does it, or with True only says what would become of each path."""


class Actions:
    """The writes of one page. A preview gives a token, with which the same thing can be done once."""

    def __init__(self, source: CallSource, directory: Path) -> None:
        self._source = source
        self._notes = PersonNotes(directory)
        self._waiting: dict[str, tuple[Work, PersonNote | None]] = {}
        self._lock = Lock()

    def preview(self, what: str, given: Mapping[str, str]) -> tuple[str, Sequence[str]]:
        """Return the token, and what would become of each path.

        Raises:
            ValueError, LookupError: it cannot be asked for so, or there is no such step.
            RingfenceError, OSError: the workspace cannot be opened now, such as while an agent has it.
        """
        work = self._work(what, given)
        lines = work(True).lines
        once = secrets.token_urlsafe(32)
        with self._lock:
            self._waiting[once] = work, self._note(what, given)
            for old in [*self._waiting][:-MAX_WAITING]:
                del self._waiting[old]
        return once, lines

    def act(self, once: str, words: str = "") -> Sequence[str]:
        """Do what was previewed. The agent is told of a rejection, with the person's ``words``.

        Raises what `preview` raises, and LookupError for a token that is unknown or was used.
        """
        with self._lock:
            work, note = self._waiting.pop(once, (None, None))
        if work is None:
            raise LookupError("this was done already, or never previewed")
        done = work(False)
        if note is not None and done.has_changed:
            self._notes.add(replace(note, text=words[:MAX_NOTE_CHARACTERS], is_reversed=not done.has_conflicts))
        return done.lines

    def comment(self, given: Mapping[str, str]) -> None:
        """Keep a comment for the agent. Raises ValueError for an empty one, LookupError, OSError."""
        words = given.get("words", "").strip()
        if not words:
            raise ValueError("a comment needs some words")
        if len(words) > MAX_NOTE_CHARACTERS:
            raise ValueError(f"a comment has at most {MAX_NOTE_CHARACTERS:,} characters")
        self._notes.add(PersonNote(words, *self._place(given)))

    def withdraw(self, number: int) -> None:
        """Raises LookupError if no such note waits, OSError."""
        if number not in dict(self._notes.waiting()):
            raise LookupError("this was told already, or withdrawn")
        self._notes.end([number], "withdrawn")

    def waiting_notes(self) -> Sequence[tuple[int, str]]:
        return [(number, note_line(note)) for number, note in self._notes.waiting()]

    def _work(self, what: str, given: Mapping[str, str]) -> Work:
        match what:
            case "undo" | "reject-step":
                step = int(given["step"])
                return lambda dry: self._reverse(
                    lambda workspace: workspace.undo(step=step, dry_run=dry, with_ignored=False)
                )
            case "restore":
                step = int(given["step"])
                return lambda dry: self._reverse(
                    lambda workspace: workspace.restore(step, dry_run=dry, with_ignored=False)
                )
            case "reject-file":
                number, file = self._source.entry(given["key"]).number, self._file(given)
                paths = {file.place, file.old_place}
                return lambda dry: self._reverse(
                    lambda workspace: workspace.undo(step=number, paths=paths, dry_run=dry, with_ignored=False)
                )
            case "reject":
                patch = reversed_patch(self._file(given).patch_of_hunk(int(given["row"])))
                return lambda dry: self._reject(patch, dry)
            case "promote":
                name = given["name"]
                return lambda dry: self._promote(name, dry)
            case "checkpoint":
                name = given.get("name", "").strip()
                return lambda dry: self._checkpoint(name, dry)
            case _:
                raise ValueError(f"there is no action {one_line(what, 40)!r}")

    def _file(self, given: Mapping[str, str]) -> DiffFile:
        return self._source.raw_files(given["key"])[int(given["file"])]

    def _note(self, what: str, given: Mapping[str, str]) -> PersonNote | None:
        """What the agent is to be told, without the words of the person."""
        if what == "reject-step":
            return PersonNote("", int(given["step"]), is_rejection=True)
        return PersonNote("", *self._place(given), is_rejection=True) if what in ("reject", "reject-file") else None

    def _place(self, given: Mapping[str, str]) -> tuple[int | None, str, str]:
        """The step, the path and the lines of what is shown."""
        if "key" not in given:
            return None, "", ""
        number = self._source.entry(given["key"]).number
        if "file" not in given:
            return number, "", ""
        file = self._file(given)
        return number, file.place, file.lines_of_hunk(int(given["row"])) if "row" in given else ""

    def _reverse(self, ask: Callable[[Workspace], Reversal]) -> Done:
        with self._source.opened(writable=True) as workspace:
            done = ask(workspace)
        shown = {path: what for path, what in done.outcomes.items() if path not in done.ignored or what == "conflict"}
        lines = [*_outcome_lines(done.outcomes, shown, done.reasons), *done.notes]
        return Done(lines, done.step is not None, "conflict" in done.outcomes.values())

    def _promote(self, name: str, dry: bool) -> Done:
        with self._source.opened(writable=True) as workspace:
            done = workspace.promote(name, dry_run=dry)
        lines = [*_outcome_lines(done.outcomes, done.outcomes, done.reasons), *done.notes]
        if done.conflicts:
            lines.append(
                "nothing is changed while there is a conflict; `ringfence promote --on-conflict keep` does the rest"
            )
        return Done(lines)

    def _checkpoint(self, name: str, dry: bool) -> Done:
        with self._source.opened(writable=not dry) as workspace:
            newest = workspace.newest
            if dry and any(one.name == name for one in workspace.named_steps()):
                raise ValueError(f"the name {one_line(name, 80)!r} is taken")
            if not dry:
                workspace.checkpoint(name)
        return Done([f"the files as they are now (step {newest}) get the name {one_line(name, 80)}"])

    def _reject(self, patch: bytes, dry: bool) -> Done:
        with self._source.opened(writable=True) as workspace:
            patch, files = _fitted(workspace.filesystem, patch)
            if not dry:
                with workspace.transaction("reject", opaque=False):
                    files = apply_to(workspace.filesystem, patch)
        return Done([one_line(file.render(), 300) for file in files])


def _outcome_lines(outcomes: Mapping[str, str], shown: Mapping[str, str], reasons: Mapping[str, str]) -> Iterator[str]:
    """Count all outcomes, and name some paths."""
    yield ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items()) or "nothing differs"
    for path, outcome in [*shown.items()][:MAX_LISTED]:
        why = f" ({reasons[path]})" if path in reasons else ""
        yield one_line(f"{outcome}: {display_path(path)}{why}", 300)
    if len(shown) > MAX_LISTED:
        yield f"and {plural(len(shown) - MAX_LISTED, 'more path')}"


def _fitted(files: HostFilesystem, patch: bytes) -> tuple[bytes, Sequence[PatchedFile]]:
    """The patch of a hunk, and what it does to the files as they are now. Raises ValueError where it does not fit.

    A hunk from the first line on belongs there. Where lines have come above it, its numbers count for nothing.
    """
    try:
        return patch, apply_to(_copied(files, patch), patch)
    except ToolValidationError as error:
        for loose in {_FROM_FIRST_LINE.sub(b"@@", patch, count=1)} - {patch}:
            with suppress(ToolValidationError):
                return loose, apply_to(_copied(files, loose), loose)
        why = " ".join(str(error).split())
        raise ValueError(f"{why}. To reject the file, or to undo the step, may do") from error


def _copied(files: HostFilesystem, patch: bytes) -> InMemoryFilesystem:
    """The files of a patch in memory: a preview leaves nothing in the history."""
    copied = InMemoryFilesystem()
    for path in {path for one in parse_patch(patch) for path in one.paths}:
        if files.exists(path):
            copied.load(path, files.read_bytes(path).content)
    return copied
