"""Bringing the tree from one state of the history to another, by operations of the filesystem, in one call."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from ringfence_sandbox.host import HostFilesystem
from ringfence_sandbox.restore_writes import RestoreWrites
from ringfence_sandbox.store.entries import Difference, Entry, is_directory
from ringfence_sandbox.store.states import States


@dataclass(frozen=True, slots=True)
class _Plan:
    """To be done in the order of the fields.

    ``removals``: paths to remove, what is in a directory before it, so that each directory is empty by then.
    ``directories``: to make, or to make writable for the moment, from the top. ``files``: with their bytes by object
    id, modes, owners and times. ``links``: the groups of paths that are one file, with those that are there already.
    ``finish``: the modes, owners and times of all directories touched, from the bottom.
    """

    removals: tuple[str, ...]
    directories: tuple[str, ...]
    files: tuple[tuple[str, Entry], ...]
    links: tuple[tuple[str, ...], ...]
    finish: tuple[tuple[str, Entry], ...]


def _plan(
    differences: Iterable[Difference],
    directories: Mapping[str, Entry],
    linked: Mapping[int, Sequence[str]],
) -> _Plan:
    """From the state now to the wanted one; ``differences`` has both for each path.

    ``directories`` are the wanted states of the directories above the differences: their times change with what is
    done in them. ``linked`` has all wanted paths of the hard-link groups that occur in them.
    """
    found = sorted(differences)
    removals = [path for path, now, wanted in found if now is not None and (wanted is None or now.kind != wanted.kind)]
    wanted = [(path, entry) for path, _, entry in found if entry is not None]
    made = [path for path, now, entry in found if is_directory(entry) and not is_directory(now)]
    numbers = {entry.meta.link for _, entry in wanted if not is_directory(entry)}
    groups = (tuple(paths) for number, paths in linked.items() if number in numbers and len(paths) > 1)
    finish = dict(directories) | {path: entry for path, entry in wanted if is_directory(entry)}
    return _Plan(
        tuple(reversed(removals)),
        tuple(made),
        tuple((path, entry) for path, entry in wanted if not is_directory(entry)),
        tuple(groups),
        tuple(sorted(finish.items(), reverse=True)),
    )


class TreeWriter:
    """Writes kinds, bytes, permission bits, times, owners where that is permitted, and which files are one file.

    ``notes`` has in words what was not brought back.
    """

    def __init__(self, filesystem: HostFilesystem, states: States, now: str, contents: Mapping[str, bytes]) -> None:
        """``now`` is the commit that has the tree as it is; ``contents`` has bytes by object id besides the store's."""
        self.notes: Sequence[str] = ()
        self._filesystem = filesystem
        self._states = states
        self._now = now
        self._contents = contents
        self._modes: dict[str, int] = {}
        """Of the directories that were made writable for the moment."""
        self._written: dict[str, Entry] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        """By path, all names of the file that it is to be."""
        self._waiting: set[str] = set()
        """What is still to be written."""
        self._gone: Set[str] = frozenset()
        """What was removed."""

    def write(
        self, wanted: Mapping[str, Entry | None], before: Iterable[str] = (), *, whole: str | None = None
    ) -> Set[str]:
        """Make these paths so; those that are kept, since they hold what no history has.

        ``before`` are the commits that have the wanted states: there it says which paths are names of one file.
        ``whole`` is the commit that all of the tree is to be as, where there is one.
        """
        differences = [Difference(path, self._states.entry(self._now, path), state) for path, state in wanted.items()]
        before = [*before]
        directories = self._above(wanted, whole) if whole is not None else self._as_before(wanted, before)
        plan = _plan(differences, directories, self._linked(wanted, before))
        self._names = {path: group for group in plan.links for path in group}
        self._waiting = {path for path, _ in plan.files}
        with self._filesystem.restore_writes() as back:
            kept = self._remove(back, plan)
            self._gone = {*plan.removals} - kept
            made = self._make_directories(plan, kept)
            for path, entry in plan.files:
                if path not in kept:
                    self._open_up(path)
                    self._expect(back, path)
                    self._write(back, path, entry)
                self._waiting.discard(path)
            self._finish(back, plan, kept, made)
            self.notes = tuple(back.notes)
        return kept

    def _above(self, paths: Iterable[str], commit: str) -> dict[str, Entry]:
        """The directories that paths are in, at a commit."""
        found: dict[str, Entry] = {}
        for path in paths:
            above = path.rpartition("/")[0]
            state = self._states.entry(commit, above) if above not in found else None
            if state is not None and state.kind == "directory":
                found[above] = state
        return found

    def _as_before(self, wanted: Mapping[str, Entry | None], before: Sequence[str]) -> dict[str, Entry]:
        """The directories that paths are in and that have the time of before, though paths in them differ."""
        was = self._above(wanted, before[-1]) if before else {}
        now = self._above(wanted, self._now)
        return {path: entry for path, entry in now.items() if path not in wanted and was.get(path) == entry}

    def _linked(self, wanted: Mapping[str, Entry | None], before: Iterable[str]) -> dict[int, list[str]]:
        numbers = {state.meta.link for state in wanted.values() if state is not None and state.meta.link}
        found: dict[int, list[str]] = {}
        for commit in before if numbers else ():
            for number, paths in self._states.linked(commit, numbers).items():
                found[number] = sorted({*found.get(number, ()), *paths})
        return found

    def _expect(self, back: RestoreWrites, path: str) -> None:
        """Somebody may have changed a path since that commit: then it is not to be taken away or written over."""
        back.expect(path, self._states.entry(self._now, path) if path not in self._gone else None)

    def _remove(self, back: RestoreWrites, plan: _Plan) -> set[str]:
        files = self._filesystem
        kept: set[str] = set()
        for path in plan.removals:
            self._open_up(path)
            try:
                self._expect(back, path)
                files.delete(path)
                self._modes.pop(path, None)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EISDIR):
                    raise
                kept.add(path)
        return kept

    def _make_directories(self, plan: _Plan, kept: Set[str]) -> set[str]:
        made: set[str] = set()
        for path in plan.directories:
            if path not in kept:
                self._open_up(path)
                self._filesystem.mkdir(path)
                self._filesystem.chmod(path, 0o700 | stat.S_IMODE(self._filesystem.stat(path).mode))
                made.add(path)
        return made

    def _finish(self, back: RestoreWrites, plan: _Plan, kept: Set[str], made: Set[str]) -> None:
        """Modes, owners and times of directories, from the bottom."""
        finish = {path: entry.meta for path, entry in plan.finish if path not in kept}
        for path, meta in finish.items():
            self._modes[path] = meta.mode
        for path in sorted(self._modes, reverse=True):
            with suppress(FileNotFoundError):
                if path not in kept:
                    back.mode(path, self._modes[path])
        for path in sorted(finish, reverse=True):
            back.directory(path, finish[path], made=path in made)

    def _write(self, back: RestoreWrites, path: str, entry: Entry) -> None:
        assert entry.oid is not None, "a file has an object id"
        now = self._states.entry(self._now, path)
        other = self._other_name(path, entry)
        if other is not None:
            back.link(path, other)
        elif entry.kind == "symlink":
            back.symlink(path, os.fsdecode(self._content(entry.oid)), entry.meta)
        elif entry.oid in self._contents:  # merged just now, so its time is now, too
            self._filesystem.write_bytes(path, self._content(entry.oid), create_parents=False)
            self._filesystem.chmod(path, entry.meta.mode)
        elif now is not None and entry == replace(now, meta=replace(now.meta, mode=entry.meta.mode)):
            back.mode(path, entry.meta.mode)
        else:
            back.file(path, self._content(entry.oid), entry.meta)
        self._written[path] = entry

    def _other_name(self, path: str, entry: Entry) -> str | None:
        """Another name of what is to be one file with this path, where it is as wanted already."""
        for other in self._names.get(path, ()):
            if other not in self._waiting:
                there = self._written.get(other)
                if there is None and other not in self._gone:
                    there = self._states.entry(self._now, other)
                if there is not None and _alike(there, entry):
                    return other
        return None

    def _content(self, oid: str) -> bytes:
        known = self._contents.get(oid)
        return known if known is not None else self._states.content(oid)

    def _open_up(self, path: str) -> None:
        """Make the directory that a path is in writable for its owner, until all is done."""
        above = path.rpartition("/")[0]
        if above and above not in self._modes and self._filesystem.exists(above):
            mode = self._filesystem.stat(above).mode
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                self._filesystem.chmod(above, mode | stat.S_IRWXU)
                self._modes[above] = mode


def _alike(one: Entry, other: Entry) -> bool:
    """Whether two paths can be names of one file."""
    return one == replace(other, meta=replace(other.meta, link=one.meta.link))
