"""Putting back what the history has: bytes, permission bits, owners, times and hard links, as changes of a call."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import replace

from ringfence_sandbox.disk.confined import read_file
from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.disk.new_files import resemble, write_all
from ringfence_sandbox.disk.state import State
from ringfence_sandbox.edits import Edits
from ringfence_sandbox.steps.metadata import apply_metadata
from ringfence_sandbox.store.entries import Entry, Meta, blob_id
from ringfence_sandbox.transaction.read_set import stale

_KINDS = {"file": stat.S_IFREG, "symlink": stat.S_IFLNK, "directory": stat.S_IFDIR}


class RestoreWrites:
    """Acts on places, which no link leads to. ``notes`` has in words what could not be brought back."""

    def __init__(self, edits: Edits) -> None:
        self.notes: list[str] = []
        self._edits = edits
        self._transactions = edits.transactions

    def expect(self, place: str, entry: Entry | None) -> None:
        """Raises OSError (ESTALE) where somebody else has changed a place since the history looked at it. What somebody
        changes there after this is not written over, or removed, either."""
        found = self._transactions.files.look(place)
        if entry is None or found is None:
            if entry is not None or found is not None:
                raise stale(place)
            self._transactions.read_set.expect(place, None)
            return
        if stat.S_IFMT(found.st_mode) != _KINDS[entry.kind]:
            raise stale(place)
        if entry.kind == "directory":
            self._transactions.read_set.expect(place, found)
            return
        with self._transactions.files.parent(place) as (at, name):
            try:
                if entry.kind == "symlink":
                    content, sha256 = os.fsencode(os.readlink(name, dir_fd=at)), ""
                else:
                    content, found = read_file(at, name, place)
                    sha256 = hashlib.sha256(content).hexdigest()
            except OSError:
                raise stale(place) from None
        if blob_id(content) != entry.oid:
            raise stale(place)
        self._transactions.read_set.expect(place, found, sha256)

    def file(self, place: str, content: bytes, meta: Meta) -> None:
        """Make a file, or exchange the one that is there. OSError where something else is."""
        with self._transactions.operation():
            holding = self._transactions.holding
            slot = holding.new_slot(place)
            descriptor = holding.create(slot)
            found = self._transactions.files.look(place)
            try:
                write_all(descriptor, content)
                if found is not None:
                    with self._transactions.files.parent(place) as (at, name):
                        resemble(descriptor, at, name, found, meta.mode)
                self._dress(place, slot, meta)
                made = self._edits.finished(descriptor, hashlib.sha256(content).hexdigest(), content)
            finally:
                os.close(descriptor)
            self._edits.put(place, slot, found, made)

    def link(self, place: str, other: str) -> None:
        """Make the path another name of the file at ``other``."""
        with self._transactions.operation():
            holding = self._transactions.holding
            slot = holding.new_slot(place)
            failpoint("link")
            with self._transactions.files.parent(other) as (at, name):
                os.link(name, str(slot), src_dir_fd=at, dst_dir_fd=holding.descriptor, follow_symlinks=False)
            self._edits.put(place, slot, self._transactions.files.look(place))

    def symlink(self, place: str, target: str, meta: Meta) -> None:
        """Make a symlink, or exchange the one that is there."""
        with self._transactions.operation():
            slot = self._edits.new_symlink(place, target)
            self._dress(place, slot, meta)
            self._edits.put(place, slot, self._transactions.files.look(place))

    def directory(self, place: str, meta: Meta, *, made: bool) -> None:
        """Give a directory, when all in it is done, its time, and its owner if it was ``made`` in this call."""
        found = self._transactions.files.look(place)
        if found is None or not stat.S_ISDIR(found.st_mode):
            return
        if (found.st_uid, found.st_gid) != (meta.uid, meta.gid):
            self._own(place, meta, made=made)
        try:
            with self._transactions.operation():
                self._transactions.touch(place, found, replace(State.of(found), mtime_ns=meta.mtime_ns))
                with self._transactions.files.parent(place) as (at, name):
                    failpoint("utime")
                    os.utime(name, ns=(found.st_atime_ns, meta.mtime_ns), dir_fd=at, follow_symlinks=False)
                self._transactions.times.gave(found.st_ino, meta.mtime_ns)
        except PermissionError:  # whoever may write in it may not set its times
            self.notes.append(f"the time of {place or 'the root'} cannot be brought back, it is another user's")

    def mode(self, place: str, mode: int) -> None:
        """Give a file or a directory its permission bits."""
        try:
            self._edits.chmod(place, mode)
        except PermissionError:
            self.notes.append(f"the permissions of {place or 'the root'} cannot be brought back, it is another user's")

    def _own(self, place: str, meta: Meta, *, made: bool) -> None:
        try:
            if not made:  # a rollback would not take it back
                raise PermissionError
            with self._transactions.files.parent(place) as (at, name):
                os.chown(name, meta.uid, meta.gid, dir_fd=at, follow_symlinks=False)
                os.chmod(name, meta.mode, dir_fd=at)  # which a new owner may have cost some bits
        except PermissionError:
            self._note_owner(place, meta)

    def _dress(self, place: str, slot: int, meta: Meta) -> None:
        if not apply_metadata(self._transactions.holding.descriptor, str(slot), meta):
            self._note_owner(place, meta)

    def _note_owner(self, place: str, meta: Meta) -> None:
        self.notes.append(f"{place or 'the root'} is not given back to user {meta.uid} and group {meta.gid}")
