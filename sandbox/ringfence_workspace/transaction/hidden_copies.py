"""Private copies of hidden files, which no history has, for as long as a command on this machine may change them.

They lie in a directory of the store that only its owner can read. They are there from before the command begins until
the end of its outermost call; a recovery finds them by their list, which is written last.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ringfence.escapes import escape_path
from ringfence.filesystem.paths import directories_above
from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.stat_cache import attributes_from_json, attributes_json
from ringfence_workspace.transaction.hold import HoldHandle
from ringfence_workspace.transaction.restore import RestoreReport, is_full
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.extended_attributes import Attributes, attributes_of
from ringfence_workspace.tree.hidden_tree import HiddenTree
from ringfence_workspace.tree.kernel import failpoint
from ringfence_workspace.tree.new_files import create, give, make, make_directory, sync_file, write_all
from ringfence_workspace.tree.places import not_written, replacing
from ringfence_workspace.tree.state import State

FOLDER = "hidden-copies"
"""In a store, the directory of the copies."""
_LIST = "list"
_KEPT = "kept"
"""In a store, where a copy goes whose file cannot be restored."""
MOST_BYTES, MOST_FILES = 64 << 20, 1000
"""Of the copies of one call. The smallest files are copied first."""


@dataclass(frozen=True, slots=True)
class HiddenCopy:
    """What one hidden path had. ``number`` is the name of the copy; None where there is none."""

    path: str
    state: State
    ctime_ns: int
    number: int | None
    attributes: Attributes = field(default_factory=dict[str, bytes])

    def is_untouched(self, found: os.stat_result) -> bool:
        """Whether this is the very file, and nobody has written to it or changed its metadata."""
        return self.state.fits(found) and found.st_ctime_ns == self.ctime_ns

    @property
    def version(self) -> FileVersion:
        return _version(self.state)


def remove_copies(store: str) -> None:
    """Remove the copies of a call that is over, if there are any. Never fails."""
    folder = os.path.join(store, FOLDER)
    if os.path.lexists(folder):
        with suppress(OSError):
            os.unlink(os.path.join(folder, _LIST))
        shutil.rmtree(folder, ignore_errors=True)


class HiddenCopies:
    """The copies of one outermost call of a workspace."""

    def __init__(self, files: Confined, store: str, *, sync: bool) -> None:
        self._files = files
        self._store = store
        self._folder = os.path.join(store, FOLDER)
        self._sync = sync
        self._copies: dict[str, HiddenCopy] = {}

    @property
    def paths(self) -> Collection[str]:
        """The hidden paths that were there, with what is below hidden directories."""
        return self._copies.keys()

    @property
    def restorable(self) -> Collection[str]:
        """Those that `restore` brings back."""
        return {path for path, one in self._copies.items() if one.state.is_directory or one.number is not None}

    # -- copying

    def make(self, hidden: HiddenTree, call_id: str) -> None:
        """Copy what is hidden, unless that was done in this call. OSError: the store cannot be written."""
        found = [] if self._copies else [*hidden.entries()]
        if not found:
            return
        remove_copies(self._store)
        try:
            os.mkdir(self._folder, 0o700)
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                copies = [*self._copied(descriptor, sorted(found, key=lambda one: one[1].st_size))]
            finally:
                os.close(descriptor)
            rows = [[one.path, one.state.to_json(), one.ctime_ns, one.number] for one in copies]
            attributes = attributes_json({one.path: one.attributes for one in copies if one.attributes})
            with replacing(Path(self._folder, _LIST), sync=self._sync) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps([call_id, rows, attributes]).encode())
        except OSError as error:
            remove_copies(self._store)
            raise not_written(error, self._folder) from error
        self._copies = {one.path: one for one in copies}

    def _copied(self, folder: int, found: list[tuple[str, os.stat_result]]) -> Iterator[HiddenCopy]:
        room, number = MOST_BYTES, 0
        for path, status in found:
            state = State.of(status)
            if state.kind == "special":
                continue
            content = None
            if not state.is_directory and state.size <= room and number < MOST_FILES:
                with suppress(*_UNREADABLE):
                    content = self._files.read_content(path)
            if content is None:
                yield HiddenCopy(path, state, status.st_ctime_ns, None)
                continue
            room -= len(content)
            with open(create(folder, str(number)), "wb", buffering=0) as file:
                write_all(file.fileno(), content)
                if self._sync:
                    sync_file(file.fileno())
            with self._files.parent(path) as (at, name):
                attributes = attributes_of(f"/proc/self/fd/{at}/{name}")
            yield HiddenCopy(path, state, status.st_ctime_ns, number, attributes)
            number += 1

    def load(self, call_id: str) -> None:
        """Find the copies of a call whose process was killed."""
        with suppress(FileNotFoundError):
            named, rows, attributes = json.loads(Path(self._folder, _LIST).read_bytes())
            if named == call_id:
                given = attributes_from_json(attributes)
                for path, row, ctime_ns, number in rows:
                    state = State.from_json(row)
                    assert state is not None, "it was there"
                    self._copies[path] = HiddenCopy(path, state, ctime_ns, number, given.get(path, {}))

    def clear(self) -> None:
        """The call is over: remove the copies. Never fails."""
        if self._copies:
            self._copies = {}
            remove_copies(self._store)

    # -- comparing

    def changes(self, hidden: HiddenTree) -> Iterator[Change]:
        """What is not as before: of what was there, and of what is below hidden directories. No content is told."""
        for path, copy in self._copies.items():
            here = self._look(path)
            if self._differs(copy, here):
                yield Change(path, copy.version, None if here is None else _version(State.of(here)))
        folders = {path for path, copy in self._copies.items() if copy.state.is_directory}
        for path, status in hidden.entries() if folders else ():
            if path not in self._copies and not folders.isdisjoint(directories_above(path)):
                yield Change(path, None, _version(State.of(status)))

    def _differs(self, copy: HiddenCopy, here: os.stat_result | None) -> bool:
        """Whether kind, bytes or permission bits differ. Without a copy, size and time tell of the bytes."""
        if here is None:
            return True
        now, was = State.of(here), copy.state
        if (now.kind, now.mode) != (was.kind, was.mode):
            return True
        if was.is_directory or copy.is_untouched(here):
            return False
        if copy.number is None or now.size != was.size:
            return not was.fits(here)
        try:
            return self._files.read_content(copy.path) != self._content(copy)
        except OSError:
            return True

    def _content(self, copy: HiddenCopy) -> bytes:
        return Path(self._folder, str(copy.number)).read_bytes()

    def _look(self, path: str) -> os.stat_result | None:
        try:
            return self._files.look(path)
        except PermissionError:
            return None

    # -- going back

    def restore(self, hold: HoldHandle, report: RestoreReport, limit_ns: int | None = None) -> None:
        """Make the hidden files what they were, but for what ``report`` has as conflicts. After a crash, what has
        changed after ``limit_ns`` is somebody else's.

        Each is replaced by one rename, so that a restore that was killed can be done again.

        Raises:
            OSError: the disk is full. It may be tried again.
        """
        restored: list[str] = []
        copies = [self._copies[path] for path in sorted(self._copies)]  # a directory before what is in it
        for copy in copies:
            path, here = copy.path, self._look(copy.path)
            if not report.conflicts.isdisjoint((path, *directories_above(path))) or not self._is_to_do(copy, here):
                continue
            is_others = limit_ns is not None and here is not None and here.st_ctime_ns > limit_ns
            if is_others and not copy.state.is_directory:
                report.conflicts.add(path)
                self._keep_aside(copy, report, "somebody else has changed it")
            elif self._is_restored(copy, here, hold, report):
                restored.append(path)
        for copy in reversed(copies):
            if copy.state.is_directory:
                self._finish_directory(copy, limit_ns)
        if restored:
            named = ", ".join(map(escape_path, restored[:_MOST_NAMED]))
            more = f" and {len(restored) - _MOST_NAMED} more" if len(restored) > _MOST_NAMED else ""
            report.notes.append(f"hidden, and restored from a private copy: {named}{more}")

    def _is_to_do(self, copy: HiddenCopy, here: os.stat_result | None) -> bool:
        if self._differs(copy, here):
            return True
        was = copy.state
        return here is not None and not was.is_directory and State.of(here)[:5] != was[:5]

    def _is_restored(
        self, copy: HiddenCopy, here: os.stat_result | None, hold: HoldHandle, report: RestoreReport
    ) -> bool:
        """Whether a path has got what it had."""
        if copy.number is None and not copy.state.is_directory:
            report.notes.append(f"{escape_path(copy.path)} is not as before the call: it is hidden, and had no copy")
            return False
        try:
            self._keep_changed(copy, here, report)
            self._put_back(copy, here, hold)
        except OSError as error:
            if is_full(error):
                raise
            self._keep_aside(copy, report, error.strerror or "it cannot be written")
            return False
        return True

    def _put_back(self, copy: HiddenCopy, here: os.stat_result | None, hold: HoldHandle) -> None:
        with self._files.parent(copy.path) as (at, name):
            above = os.fstat(at)
            if copy.state.kind == "directory":
                if here is None or not stat.S_ISDIR(here.st_mode):
                    make_directory(at, name)
            else:
                assert copy.state.kind != "special", "it has a copy"
                holding = hold.make()
                slot = str(holding.new_slot())
                make(holding.descriptor, slot, copy.state.kind, self._content(copy), copy.state, copy.attributes)
                try:
                    failpoint("rename")
                    os.rename(slot, name, src_dir_fd=holding.descriptor, dst_dir_fd=at)
                except OSError:
                    os.unlink(slot, dir_fd=holding.descriptor)
                    raise
            with suppress(PermissionError):
                os.utime(f"/proc/self/fd/{at}", ns=(above.st_atime_ns, above.st_mtime_ns))

    def _finish_directory(self, copy: HiddenCopy, limit_ns: int | None) -> None:
        """Give a hidden directory its permission bits, owner and time."""
        here = self._look(copy.path)
        if here is None or not stat.S_ISDIR(here.st_mode) or (limit_ns is not None and here.st_mtime_ns > limit_ns):
            return
        if State.of(here)[:5] != copy.state[:5]:
            with suppress(OSError), self._files.parent(copy.path) as (at, name):
                give(at, name, copy.state)

    def _keep_aside(self, copy: HiddenCopy, report: RestoreReport, reason: str) -> None:
        """Keep the copy of a file that cannot be restored: there is no other."""
        named = escape_path(copy.path)
        if copy.number is None:
            report.notes.append(f"{named} is hidden, and could not be restored: {reason}")
            return
        kept = self._kept(self._content(copy))
        report.notes.append(f"{named} was not restored ({reason}): what it was is in {kept}, which is yours to remove")

    def _keep_changed(self, copy: HiddenCopy, here: os.stat_result | None, report: RestoreReport) -> None:
        """Keep the bytes that a restore replaces: an edit of a person during the call may be among them."""
        if here is None or not stat.S_ISREG(here.st_mode) or not here.st_size or here.st_size > MOST_BYTES:
            return
        try:
            content = self._files.read_content(copy.path)
        except _UNREADABLE:
            return
        if copy.number is None or content != self._content(copy):
            kept = self._kept(content)
            report.notes.append(f"{escape_path(copy.path)}: what it had become is in {kept}, which is yours to remove")

    def _kept(self, content: bytes) -> str:
        """Write a file that only its owner can read, beside the history. Return its path."""
        folder = os.path.join(self._store, _KEPT)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        name = f"hidden-{os.urandom(4).hex()}"
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with open(create(descriptor, name), "wb", buffering=0) as file:
                write_all(file.fileno(), content)
        finally:
            os.close(descriptor)
        return os.path.join(folder, name)


_MOST_NAMED = 8
_UNREADABLE = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a file that gets no copy."""


def _version(state: State) -> FileVersion:
    kind = "file" if state.kind == "special" else state.kind
    return FileVersion(kind, state.mode, state.size)
