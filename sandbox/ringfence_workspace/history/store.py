"""A workspace's history: a git repository outside of it, with a commit a step.

Everything is written through dulwich's objects: no configuration, hook, filter or attribute of anybody is consulted.
New objects go into the log, and from there into packs. `Store.prepare` adds those of a commit. A record of the log
makes it part of the history: that of the call's commit (`commit_record`), or one of its own (`Store.publish`).

A store has one writer, who holds its lock; readers (``writable=False``) need none. It is not for several threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from dulwich.objects import Commit

from ringfence.errors import TransactionError, format_error
from ringfence.participants import Step
from ringfence_workspace.history.aborted import AbortedCalls
from ringfence_workspace.history.commits import (
    MOST_PATHS,
    CommitInfo,
    CommitLinks,
    CommitRecord,
    ParsedMessage,
    PreparedStep,
    format_message,
    parse_message,
)
from ringfence_workspace.history.entries import BLOB, COMMIT, TREE, Difference, Entry, Unknown
from ringfence_workspace.history.log import NoLogError
from ringfence_workspace.history.objects import (
    UNREADABLE,
    HistoryObjects,
    create_repository,
    read_refs,
    read_shallow,
    write_refs,
    write_shallow,
)
from ringfence_workspace.history.states import UNKNOWN, CommitStates, read_commit
from ringfence_workspace.history.trees import Builder, Folder, reachable
from ringfence_workspace.tree.state import Json

FOLDER = "history"
"""In the directory of a workspace's store."""
MAIN = b"refs/heads/main"
_KEPT = b"refs/ringfence/"
_AUTHOR = b"ringfence <ringfence@localhost>"
SEAL_BYTES = 32 << 20
"""A log of this size becomes a pack."""
_OTHERS_BETWEEN = 32
"""Where a session goes on after more commits of others, it begins anew: no call walks a long history."""
_RECORDS = 256
"""So many commits that were read are kept in memory."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.|lock(?:/|$)|$)|/(?=[A-Za-z0-9]))*")


@contextmanager
def reporting_damage(folder: Path, errors: tuple[type[Exception], ...] = (LookupError, *UNREADABLE)) -> Generator[None]:
    """Whatever a history of which bytes were lost or changed makes of it, or these ``errors`` alone, say what it is, as
    a ValueError."""
    try:
        yield
    except NoLogError:
        raise
    except errors as error:
        raise ValueError(
            f"the history at {folder} is damaged ({format_error(error)}): bring it back from a copy, or move it away "
            "to begin a new one"
        ) from error


class Store:
    """The history at a folder. ``damage`` says what was found unreadable of its log when it was opened, if that is
    more than a crash leaves."""

    def __init__(self, folder: Path, refs: dict[bytes, str], objects: HistoryObjects, *, writable: bool) -> None:
        self.folder = folder
        self.objects = objects
        self.damage: Final = objects.log.damage
        self._writable = writable
        self._refs = refs
        for name, oid in objects.log.refs.items():
            self._set_ref(name, oid)
        self._shallow = read_shallow(folder)
        self.states = CommitStates(objects)
        self._number: int | None = None
        self._records: dict[str, CommitRecord] = {}
        self._seal_at = SEAL_BYTES
        self.aborted = AbortedCalls(self, objects.log.records)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, writable: bool = True, power: bool = False) -> Store:
        """Open the store at `folder`; a writable one is created if it is not there. ``power`` is as for `Log`.

        Raises:
            FileNotFoundError: there is none, and it is not to be written.
            ValueError: it is damaged.
        """
        path = Path(folder)
        if not (path / "HEAD").exists() and not writable:
            raise FileNotFoundError(f"there is no history at {path}")
        if writable and not ((path / "HEAD").exists() and (path / "objects/pack").is_dir()):
            create_repository(path)
        with reporting_damage(path):
            return cls._opened(path, writable, power)

    @classmethod
    def _opened(cls, path: Path, writable: bool, power: bool) -> Store:
        # The refs first: a reader without the lock must not know of commits newer than the objects that it opens.
        # Nor of one that was dropped in between, so the refs have to be the same afterwards.
        refs, objects = read_refs(path), HistoryObjects(path, writable=writable, power=power)
        while not writable and refs != (now := read_refs(path)):
            objects.close()
            refs, objects = now, HistoryObjects(path, writable=False)
        store = cls(path, refs, objects, writable=writable)
        try:
            if store.tip is not None:
                store.commit(store.tip)
            elif objects.packs:
                raise LookupError("it has packs, and no refs")
        except BaseException:
            objects.close()
            raise
        return store

    def _set_ref(self, name: bytes, oid: bytes | None) -> None:
        if oid is None:
            self._refs.pop(name, None)
        else:
            self._refs[name] = oid.hex()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Seal what is in the log, and close the files."""
        try:
            if self._writable and not self.objects.closed:
                self.seal()
        finally:
            self.objects.close()

    # Writing.

    @property
    def tip(self) -> str | None:
        """The newest commit; None if there is no baseline yet."""
        return self._refs.get(MAIN)

    def add_blob(self, content: bytes) -> str:
        """Add bytes that a step may have later; their object id."""
        return self.objects.add(BLOB, content).hex()

    def prepare(
        self,
        changes: Mapping[str, Entry | None],
        info: CommitInfo,
        *,
        after: PreparedStep | None = None,
        unknown: Unknown | None = None,
    ) -> PreparedStep:
        """Add the objects of the state that differs from the newest (or from ``after``) in `changes`.

        ``changes`` has the new states by path relative to the root, None for a path that is gone, with all below it;
        a directory's own state is about itself alone. ``unknown`` is what is not known of the new state; by default
        what was not known before, but for the changes. The cost is that of the changes and of the directories above
        them.

        Raises:
            ValueError: the changes do not fit the state before.
            LookupError: the store does not have the bytes of an entry.
            OSError: it could not be written. The history is as it was.
        """
        parent = after.commit if after is not None else self.tip
        if after is not None:
            before, unknown_before = after.root, after.unknown
        else:
            before = self.states.root(parent) if parent is not None else None
            unknown_before = self.states.unknown(parent)
        if unknown is None:
            unknown = unknown_before.knowing({path: state and state.kind for path, state in changes.items()})
        try:
            builder = Builder(self.objects, before)
            root = builder.build({path: self._stored(state) for path, state in changes.items()})
            newest = self._newest_number(after) + (info.kind == "step")
            number = newest if info.kind == "step" else 0 if info.kind == "baseline" else None
            found = _changed_paths(sorted(builder.found, key=lambda one: one.path))
            if info.kind == "step" and unknown.reasons:
                new = dict.fromkeys(unknown.new_since(unknown_before), "unknown")
                found = sorted({**new, **dict(found)}.items())
            commit = self._commit(root, unknown, parent, info, number, found)
            self.objects.log.wait_for_objects()
        except BaseException:
            self.objects.log.abandon()
            self._records.clear()
            raise
        return PreparedStep(commit, parent, number, newest, root, tuple(path for path, _ in found), unknown)

    def _stored(self, state: Entry | None) -> Entry | None:
        # An `add_blob` that could not be written is forgotten; a step must not be made of its id.
        if state is not None and state.oid is not None and not self.objects.has(bytes.fromhex(state.oid)):
            raise LookupError(f"the store does not have the content {state.oid}; add it again")
        return state

    def _newest_number(self, after: PreparedStep | None) -> int:
        if after is not None:
            return after.newest
        if self._number is None:
            self._number = next((record.number for record in self.commits() if record.number is not None), 0)
        return self._number

    def _commit(
        self,
        root: Folder,
        unknown: Unknown,
        parent: str | None,
        info: CommitInfo,
        number: int | None,
        changed: Sequence[tuple[str, str]],
    ) -> str:
        files = root.files.oid or self.objects.add(TREE, b"")
        tree = b"40000 files\0" + files + b"40000 meta\0" + root.subs.oid
        if unknown.reasons:
            tree += b"100644 %b\0%b" % (UNKNOWN, self.objects.add(BLOB, unknown.to_bytes()))
        raw = b"tree %b\n%bauthor %b\ncommitter %b\n\n%b" % (
            self.objects.add(TREE, tree).hex().encode(),
            b"parent %b\n" % parent.encode() if parent is not None else b"",
            *[b"%b %d +0000" % (_AUTHOR, max(0, int(info.created_at.timestamp())))] * 2,
            format_message(info, number, changed, links := self._links(info, number, parent)),
        )
        commit = self.objects.add(COMMIT, raw).hex()
        paths = tuple(path for path, _ in changed) if len(changed) <= MOST_PATHS else None
        self._remember(CommitRecord(commit, parent, ParsedMessage(info, number, paths, links)))
        return commit

    def _links(self, info: CommitInfo, number: int | None, parent: str | None) -> CommitLinks:
        earlier, start = None, ""
        with suppress(LookupError):  # what is damaged of the history before is no reason not to go on
            earlier = self._step_from(parent, number & (number - 1)) if number and number % 2 == 0 else None
            start = self._session_start(info.session_id, parent) if info.session_id and parent is not None else ""
        return CommitLinks(earlier.commit if earlier is not None else "", start)

    def _session_start(self, session: str, parent: str) -> str:
        """What was there before the first step of a session. Empty where only a walk through all commits can tell."""
        for record in islice(self._commits_from(parent), _OTHERS_BETWEEN):
            if record.message.info.session_id == session:
                return record.message.links.session_start
        return parent

    def publish(self, prepared: PreparedStep) -> None:
        """Make a prepared commit the newest of the history.

        Raises:
            ValueError: the history has moved on since it was prepared.
            OSError: it could not be written. The history is as it was.
        """
        if not self._leads_to_tip(prepared.parent):
            raise ValueError("the history has another newest step by now; prepare this one again")
        self.objects.log.append(commit_record(prepared.commit))
        self.published(prepared)
        self.seal_when_long()

    def begin_with(self, prepared: PreparedStep) -> None:
        """Make a prepared commit the first of an empty history, whatever it comes after in the one that it borrows.

        Raises OSError where it cannot be written."""
        write_shallow(self.folder, {prepared.commit})
        self._shallow = {prepared.commit}
        self._records.clear()
        self.objects.log.append(commit_record(prepared.commit))
        self.published(prepared)

    def _leads_to_tip(self, parent: str | None) -> bool:
        # Several that were prepared on each other may be published at once.
        while parent is not None and parent != self.tip:
            parent = self.commit(parent).parent
        return parent == self.tip

    def published(self, prepared: PreparedStep) -> None:
        """The log has the record that makes a commit the newest."""
        self._set_ref(MAIN, bytes.fromhex(prepared.commit))
        self.states.remember(prepared.commit, prepared.root, prepared.unknown)
        self._number = prepared.newest

    def seal_when_long(self) -> None:
        """`seal`, if the log is long and no call needs it."""
        if self.objects.log.size > self._seal_at and not self.objects.log.busy:
            try:
                self.seal()
                self._seal_at = SEAL_BYTES
            except (OSError, LookupError, *UNREADABLE):
                # All is in the log: sealing can wait until there is space, or until the opening that reports a damaged
                # pack.
                self._seal_at += SEAL_BYTES

    def keep(self, name: str, commit: str) -> None:
        """Keep a commit, whatever `gc` drops, until `unkeep`; also one that is not part of the history.

        Raises:
            ValueError: the name has something else than letters, digits, "-", "_", "." and "/" in it.
        """
        self.commit(commit)
        self._record_ref(_kept_ref(name), bytes.fromhex(commit))

    def unkeep(self, name: str) -> None:
        self._record_ref(_kept_ref(name), None)

    def _record_ref(self, ref: bytes, oid: bytes | None) -> None:
        if self._writable:  # what who only looks makes of an aborted call is in memory
            self.objects.log.append({"ref": ref.decode(), "oid": None if oid is None else oid.hex()})
        self._set_ref(ref, oid)

    def kept(self, *, all_made: bool = True) -> dict[str, str]:
        """The commits that are kept, by name; with ``all_made`` those of all aborted calls."""
        if all_made:
            self.aborted.make_commits()
        return {name[len(_KEPT) :].decode(): commit for name, commit in self._refs.items() if name.startswith(_KEPT)}

    def seal(self) -> None:
        """Move everything into packs and refs that git itself reads, and sync it. Before there is a baseline all stays
        in the log: a first look that was interrupted goes on with that, and packs without refs are a damage.

        Raises:
            TransactionError: a call needs the log.
            OSError: it could not be written. All stays as it was.
        """
        if self.objects.log.busy:
            raise TransactionError("the history cannot be packed while a call changes files")
        if self.tip is None and self.objects.log.objects:
            return
        self.aborted.make_commits()
        self.objects.seal(before_deleting=lambda: write_refs(self.folder, self._refs))

    # Reading.

    def has(self, commit: str) -> bool:
        """Whether it has a commit. `gc` drops some that others name."""
        return self.objects.has(bytes.fromhex(commit))

    def commit(self, commit: str) -> CommitRecord:
        """One commit by its id.

        Raises:
            LookupError: the store does not have it.
        """
        if commit not in self._records:
            parsed = self._parsed(commit)
            parents = [] if commit in self._shallow else parsed.parents
            message = parse_message(parsed.message)
            self._remember(CommitRecord(commit, parents[0].decode() if parents else None, message))
        return self._records[commit]

    def _remember(self, record: CommitRecord) -> None:
        if len(self._records) >= _RECORDS:
            self._records.clear()
        self._records[record.commit] = record

    def _parsed(self, commit: str) -> Commit:
        return read_commit(self.objects, commit)

    def message_text(self, commit: str) -> tuple[str, str]:
        """The first line of a commit's message, and the rest."""
        subject, _, body = self._parsed(commit).message.decode("utf-8", "replace").partition("\n")
        return subject, body.strip("\n")

    def author(self, commit: str) -> str:
        return self._parsed(commit).author.decode("utf-8", "replace")

    def commits(self, *, before: str | None = None) -> Iterator[CommitRecord]:
        """The history, newest first, external changes included. With ``before``, what is older than that commit.

        Raises LookupError where there is no such commit.
        """
        if before is None:
            return self._commits_from(self.tip)
        try:
            return self._commits_from(self.commit(before).parent)
        except KeyError:
            raise LookupError(f"the history has no commit {before}, or not any more") from None

    def _commits_from(self, commit: str | None) -> Iterator[CommitRecord]:
        while commit is not None:
            record = self.commit(commit)
            yield record
            commit = record.parent

    def record(self, number: int) -> CommitRecord:
        """The commit of a step; 0 is the baseline.

        Raises:
            LookupError: there is no such step, or not any more.
        """
        found = self._step_from(self.tip, number)
        if found is None:
            raise LookupError(f"the history has no step {number}")
        return found

    def oldest(self) -> CommitRecord:
        """The commit before which nothing is known. LookupError in an empty history."""
        record = self.commit(self.tip or "")
        while (before := self._before(record, 0)) is not None:
            record = before
        return record

    def _step_from(self, commit: str | None, number: int) -> CommitRecord | None:
        """The commit of a step that a commit is, or comes after."""
        record = self.commit(commit) if commit is not None else None
        while record is not None and (record.number is None or record.number > number):
            record = self._before(record, number)
        return record if record is not None and record.number == number else None

    def _before(self, record: CommitRecord, number: int) -> CommitRecord | None:
        """A commit before this one, and not before the step of a number: the one that it names, or its parent."""
        step, earlier = record.number or 0, record.message.links.earlier_step
        if earlier and step & (step - 1) >= number and self.has(earlier):
            return self.commit(earlier)
        return self.commit(record.parent) if record.parent is not None else None

    def steps(self) -> list[Step]:
        """The steps, oldest first; without the baseline and others' changes."""
        found = [self.step_of(record) for record in self.commits() if record.number]
        found.reverse()
        return found

    def step_of(self, record: CommitRecord) -> Step:
        info, paths = record.message.info, record.message.paths
        if paths is None:
            found = self.states.differences(record.parent, record.commit)
            paths = tuple(path for path, _ in _changed_paths(found))
        number, commit = record.number or 0, record.commit
        return Step(
            number, info.tool, info.call_id, info.session_id, info.created_at, paths, commit, info.client, info.title
        )

    # Keeping it small.

    def gc(self, keep_steps: int) -> int:
        """Drop what neither the newest `keep_steps` steps nor the kept commits need; the bytes that this gave back.

        The newest step stays even of none, since the numbers go on from it. The state before the oldest of these steps
        stays, so that it can be undone.

        Raises:
            ValueError: `keep_steps` is negative.
        """
        if keep_steps < 0:
            raise ValueError(f"keep_steps is the number of steps to keep, so it cannot be {keep_steps}")
        # An aborted call is shown as what differs from the state that it was made from.
        made_from = [self.commit(commit).parent for commit in self.aborted.commits().values()]
        commits = {*self._refs.values()}
        commits.update(parent for parent in made_from if parent is not None)
        steps, numbered = 0, False
        for record in self.commits():
            commits.add(record.commit)
            numbered = numbered or record.number is not None
            if steps >= keep_steps and numbered:
                break
            steps += record.number is not None and record.number > 0
        self.seal()
        before = self._size()
        parsed = {commit: self._parsed(commit) for commit in commits}
        shallow = {commit for commit, it in parsed.items() if any(p.decode() not in commits for p in it.parents)}
        needed = reachable(self.objects, (bytes.fromhex(it.tree.decode()) for it in parsed.values()))
        needed.update(map(bytes.fromhex, commits))
        needed = {oid for oid in needed if self.objects.has_own(oid) or not self.objects.has(oid)}  # not the borrowed
        # git takes a commit in `shallow` for one without parents: written before anything goes, it is never wrong.

        def cut() -> None:
            write_shallow(self.folder, shallow)
            self._shallow = shallow  # also where what is dropped then will not go
            self._records.clear()

        self.objects.repack(needed, before_deleting=cut)
        return max(0, before - self._size())

    def _size(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "objects" / "pack").iterdir())


def _changed_paths(differences: Iterable[Difference]) -> list[tuple[str, str]]:
    """The paths whose kind, bytes or permissions changed, and how; "" is the root, where it is not new."""
    return [
        (found.path, "created" if found.before is None else "deleted" if found.after is None else "modified")
        for found in differences
        if (found.path or found.before is not None) and found.changes_content
    ]


def commit_record(commit: str) -> dict[str, Json]:
    """What the log has of a commit that is the newest from there on."""
    return {"ref": MAIN.decode(), "oid": commit}


def _kept_ref(name: str) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a name of a kept step; use letters, digits, '-', '_', '.' and '/'")
    return _KEPT + name.encode()
