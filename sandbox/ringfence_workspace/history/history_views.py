"""A history as people and programs look at it: its entries, its steps with what they changed, and patches.

A patch is one over several steps, or a mailbox with a mail a commit for `git am`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime

from ringfence.filesystem.diff import patch_of
from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.filesystem.paths import is_dotgit
from ringfence.participants import Change, Step
from ringfence_workspace.history.commits import REPLACED, CommitKind, CommitRecord
from ringfence_workspace.history.git_data import GitDataChanges, git_data_changes
from ringfence_workspace.history.step_lookup import parent_of
from ringfence_workspace.history.store import Store


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One commit of the history. ``number`` is that of a step, 0 that of the baseline, None somebody else's change."""

    number: int | None
    kind: CommitKind
    tool: str
    call_id: str
    session_id: str
    receipt_id: str
    created_at: datetime
    paths: tuple[str, ...]
    commit: str
    names: tuple[str, ...] = ()
    apart: bool = False
    """Whether `gc` has left it for its name alone, and dropped what was between it and the rest of the history."""
    client: str = ""
    ignored: int = 0
    """The number of ignored paths that are left out of ``paths``."""
    title: str = ""
    """The command that a step ran, on one line and shortened."""

    @property
    def is_replacement(self) -> bool:
        """Whether another directory has come in the place of the workspace's root."""
        return self.kind == "external" and self.tool == REPLACED


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step; ``patch`` is what ``git apply`` takes. ``left_out`` has the paths of which the history lacks what the
    step made of them, and why."""

    step: Step
    changes: Sequence[Change]
    patch: bytes
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: Sequence[str] = ()
    """The changed paths that are left out since git ignores them."""
    git: GitDataChanges = field(default_factory=GitDataChanges)
    """What the patch cannot have of git's own data."""


def log_entry(store: Store, record: CommitRecord, names: Sequence[str], *, apart: bool = False) -> LogEntry:
    info, step = record.message.info, store.step_of(record)
    return LogEntry(
        record.number,
        info.kind,
        info.tool,
        info.call_id,
        info.session_id,
        info.receipt_id,
        info.created_at,
        step.paths,
        record.commit,
        tuple(names),
        apart,
        info.client,
        title=info.title if info.kind == "step" else "",
    )


def shown_step(
    store: Store, record: CommitRecord, root: str | os.PathLike[str], ignored: IgnoredPaths | None = None
) -> ShownStep:
    parent = parent_of(record)
    patch = unified(store, parent, record.commit, ignored=ignored).text
    changes, hidden = split_ignored(store.states.changes(parent, record.commit), ignored)
    made = store.states.unknown(record.commit)
    new = sorted(made.new_since(store.states.unknown(parent)))
    return ShownStep(
        store.step_of(record),
        changes,
        patch,
        {path: made.reasons[path] for path in new},
        [change.path for change in hidden],
        git_data_changes(store, root, parent, record.commit, changes),
    )


@dataclass(frozen=True, slots=True)
class Export:
    """The text, and the paths that it cannot have: git takes no patch for what is in a `.git`. ``unknown`` are those
    that differ in what the history knows of them, with the reason why it did not know them at one of the ends."""

    text: bytes
    left_out: tuple[str, ...]
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])
    changes: Sequence[Change] = ()
    """Of a patch from one step to another, what it is the patch for."""
    ignored: Sequence[str] = ()
    """The changed paths that are left out since git ignores them."""


def unified(
    store: Store,
    one: str | None,
    other: str,
    *,
    without: Collection[str] = (),
    ignored: IgnoredPaths | None = None,
) -> Export:
    """The changes from one commit (None: an empty tree) to another as a patch for `git apply`, ``without`` paths and
    without ``ignored`` ones."""
    states = store.states
    found = [change for change in states.changes(one, other) if change.path not in without]
    shown, hidden = split_ignored(found, ignored)
    changes, left_out = _applicable(shown)
    text = patch_of(
        changes, lambda path: states.read(one, path) if one is not None else b"", lambda path: states.read(other, path)
    )
    return Export(text, left_out, states.unclear(one, other), changes, [change.path for change in hidden])


def split_ignored(changes: Sequence[Change], ignored: IgnoredPaths | None) -> tuple[list[Change], list[Change]]:
    """The changes that are shown, and those of paths that are ``ignored``."""
    return ([*changes], []) if ignored is None else ignored.split(changes)


def patch_text(changes: Iterable[Change], before: Callable[[str], bytes], after: Callable[[str], bytes]) -> bytes:
    """A patch for changes of which the files' bytes are given."""
    return patch_of(_applicable(changes)[0], before, after)


def mailbox(
    store: Store, records: Sequence[CommitRecord], *, ignored: Callable[[CommitRecord], IgnoredPaths] | None = None
) -> Export:
    """The commits, oldest first, each as a mail; one that changed nothing that a patch can hold has none. ``ignored``
    returns the ignored paths of a commit."""
    found = [
        (record, unified(store, record.parent, record.commit, ignored=ignored and ignored(record)))
        for record in records
    ]
    patches = [(record, patch.text) for record, patch in found if patch.text]
    mails = (_mail(store, record, text, n, len(patches)) for n, (record, text) in enumerate(patches, 1))
    left_out, hidden = set[str](), set[str]()
    unknown: dict[str, str] = {}
    for _, patch in found:
        left_out.update(patch.left_out)
        hidden.update(patch.ignored)
        unknown |= patch.unknown
    return Export(b"".join(mails), tuple(sorted(left_out)), dict(sorted(unknown.items())), (), sorted(hidden))


def _applicable(changes: Iterable[Change]) -> tuple[list[Change], tuple[str, ...]]:
    takes: list[Change] = []
    left_out: list[str] = []
    for change in changes:
        links = "symlink" in (version.kind for version in (change.before, change.after) if version is not None)
        names = change.path.split("/")
        # git lets no link be its list of submodules, and one such path would have it refuse the whole patch.
        if any(is_dotgit(os.fsencode(name)) for name in names) or (links and names[-1].lower() == ".gitmodules"):
            left_out.append(change.path)
        else:
            takes.append(change)
    return takes, tuple(left_out)


def _mail(store: Store, record: CommitRecord, patch: bytes, number: int, of: int) -> bytes:
    subject, body = store.message_text(record.commit)
    # A line that looks like the beginning of a patch would end the message; a From line would end the mail.
    text = re.sub(r"(?m)^(?=---|diff |Index: |>*From )", " ", body).strip("\n")
    # `git am` takes away what is in brackets before the subject.
    content = f"{text}\n---\n\n".encode() + patch + b"-- \nringfence\n"
    encoding = "8bit"
    if b"\r" in content:
        # On the way through a mail, a carriage return at the end of a line gets lost.
        encoding, content = "base64", base64.encodebytes(content)
    header = (
        f"From {record.commit} Mon Sep 17 00:00:00 2001\n"
        f"From: {store.author(record.commit)}\n"
        f"Date: {format_datetime(record.message.info.created_at.astimezone(UTC))}\n"
        f"Subject: [PATCH {number}/{of}] {subject}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        f"Content-Transfer-Encoding: {encoding}\n\n"
    )
    return header.encode() + content + b"\n"
