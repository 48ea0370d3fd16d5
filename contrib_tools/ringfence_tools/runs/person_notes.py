"""What a person has to say about an agent's changes: kept beside the history until an agent is told."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence import serde
from ringfence.escapes import display_path
from ringfence_sandbox import store_directory
from ringfence_tools.printable import one_line, printable

FILE_NAME = "notes.jsonl"
MAX_NOTE_CHARACTERS = 4_000
MAX_TOLD = 50
"""The most notes that an agent is told at once."""


@dataclass(frozen=True, slots=True)
class PersonNote:
    """A comment, or what was rejected. ``text`` is the person's own words, and may be empty for a rejection."""

    text: str
    step: int | None = None
    path: str = ""
    lines: str = ""
    """Such as ``3-9``, as the step left the file."""
    is_rejection: bool = False
    is_reversed: bool = True
    """Whether all of what was rejected is reversed."""

    def describe(self) -> str:
        """Return it in words for a model or a person. No content of a file is in it."""
        where = f"{display_path(self.path)}, lines {self.lines}" if self.lines else display_path(self.path)
        of_step = "" if self.step is None else f"step {self.step}"
        place = " of ".join(filter(None, (where if self.path else "", of_step)))
        text = printable(self.text.strip()[:MAX_NOTE_CHARACTERS])
        if self.is_rejection:
            how = "rejected, and reversed" if self.is_reversed else "rejected, but not all of it could be reversed"
            return f"{how}: {place}" + (f". Their words: {text}" if text else "")
        return f"about {place}: {text}" if place else text


class PersonNotes:
    """The notes of one workspace. Any number of processes may have it open. No lock of the workspace is needed."""

    def __init__(self, directory: Path) -> None:
        self._path = store_directory(directory) / FILE_NAME

    def add(self, note: PersonNote) -> None:
        """Raises OSError."""
        self._append({"note": serde.dump(note)})

    def waiting(self) -> Sequence[tuple[int, PersonNote]]:
        """Return the notes that nobody was told yet, each with its number. Raises OSError."""
        notes, done = dict[int, PersonNote](), set[int]()
        for number, record in enumerate(self._records()):
            with suppress(ValueError, TypeError):  # of a later version
                if "note" in record:
                    notes[number] = serde.parse(PersonNote, json.dumps(record["note"]))
                done.update(record.get("done", ()))
        return [(number, note) for number, note in notes.items() if number not in done]

    def end(self, numbers: Sequence[int], how: str) -> None:
        """Have notes wait no more: they were told, or withdrawn. Raises OSError."""
        if numbers:
            self._append({"done": list(numbers), "how": how})

    def take(self, how: str) -> str:
        """Return what waits as a message for an agent, and have it wait no more. Empty if nothing does.

        Of several agents that ask at once, one gets it. Raises OSError.
        """
        if not self._path.exists():
            return ""
        with self._locked():
            found = self.waiting()[:MAX_TOLD]
            self.end([number for number, _ in found], how)
        return describe_notes([note for _, note in found])

    def _append(self, record: dict[str, Any]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(record).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield each line. One that cannot be read is empty, so that the others keep their numbers."""
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return
        for line in lines:
            try:
                record = json.loads(line)
                yield record if isinstance(record, dict) else {}
            except (ValueError, RecursionError):
                yield {}

    @contextmanager
    def _locked(self) -> Generator[None]:
        with self._path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def describe_notes(notes: Sequence[PersonNote]) -> str:
    """Return notes as a message for an agent. Empty without any."""
    if not notes:
        return ""
    lines = [f"- {note.describe()}" for note in notes]
    return "\n".join(("The person whose files these are has looked at your changes, and says:", *lines))


def note_line(note: PersonNote) -> str:
    return one_line(note.describe(), 300)
