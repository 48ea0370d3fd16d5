"""Putting back what the history has: bytes, permission bits, owners, times and hard links, each as a deed of a call."""

from __future__ import annotations

import hashlib
import os
import stat

from ringfence_sandbox.calls.core import Core
from ringfence_sandbox.calls.seen import stale
from ringfence_sandbox.disk.confined import read_file
from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.disk.new_files import resemble, write_all
from ringfence_sandbox.disk.records import Deed, Identity
from ringfence_sandbox.host_writes import HostWrites
from ringfence_sandbox.steps.metadata import apply_metadata
from ringfence_sandbox.store.entries import Entry, Meta, blob_id

_KINDS = {"file": stat.S_IFREG, "symlink": stat.S_IFLNK, "directory": stat.S_IFDIR}


class RestoreWrites:
    """Acts on places, which no link leads to. ``notes`` has in words what could not be brought back."""

    def __init__(self, core: Core, writes: HostWrites) -> None:
        self.notes: list[str] = []
        self._core = core
        self._writes = writes

    def expect(self, place: str, entry: Entry | None) -> None:
        """Raises OSError (ESTALE) where somebody else has changed a place since the history looked at it. What somebody
        changes there after this is not written over, or removed, either."""
        found = self._core.files.look(place)
        if entry is None or found is None:
            if entry is not None or found is not None:
                raise stale(place)
            self._core.seen.expect(place, None)
            return
        if stat.S_IFMT(found.st_mode) != _KINDS[entry.kind]:
            raise stale(place)
        if entry.kind == "directory":
            self._core.seen.expect(place, found)
            return
        with self._core.files.parent(place) as (at, name):
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
        self._core.seen.expect(place, found, sha256)

    def file(self, place: str, content: bytes, meta: Meta) -> None:
        """Make a file, or exchange the one that is there. OSError where something else is."""
        with self._core.operation():
            slot = self._core.holding.new_slot()
            descriptor = self._core.holding.create(slot)
            found = self._core.files.look(place)
            try:
                write_all(descriptor, content)
                if found is not None:
                    with self._core.files.parent(place) as (at, name):
                        resemble(descriptor, at, name, found, meta.mode)
                self._dress(place, slot, meta)
                digest = hashlib.sha256(content).hexdigest()
                identity = self._writes.finish(descriptor, digest)
            finally:
                os.close(descriptor)
            self._core.changed.keep_bytes(self._place(place, slot, found, identity), content)

    def link(self, place: str, other: str) -> None:
        """Make the path another name of the file at ``other``."""
        with self._core.operation():
            slot = self._core.holding.new_slot()
            failpoint("link")
            with self._core.files.parent(other) as (at, name):
                os.link(name, str(slot), src_dir_fd=at, dst_dir_fd=self._core.holding.descriptor, follow_symlinks=False)
            held = self._core.holding.look(slot)
            assert held is not None, "it was made just now"
            self._place(place, slot, self._core.files.look(place), Identity.of(held))

    def symlink(self, place: str, target: str, meta: Meta) -> None:
        """Make a symlink, or exchange the one that is there."""
        with self._core.operation():
            holding = self._core.holding
            slot = holding.new_slot()
            failpoint("symlink")
            os.symlink(target, str(slot), dir_fd=holding.descriptor)
            self._dress(place, slot, meta)
            made = os.lstat(str(slot), dir_fd=holding.descriptor)
            self._place(place, slot, self._core.files.look(place), Identity.of(made))

    def directory(self, place: str, meta: Meta, *, made: bool) -> None:
        """Give a directory, when all in it is done, its time, and its owner if it was ``made`` in this call."""
        found = self._core.files.look(place)
        if found is None or not stat.S_ISDIR(found.st_mode):
            return
        if (found.st_uid, found.st_gid) != (meta.uid, meta.gid):
            self._own(place, meta, made=made)
        try:
            with self._core.operation():
                self._core.set_times(place, found, meta.mtime_ns)
        except PermissionError:  # whoever may write in it may not set its times
            self.notes.append(f"the time of {place or 'the root'} cannot be brought back, it is another user's")

    def mode(self, place: str, mode: int) -> None:
        """Give a file or a directory its permission bits."""
        try:
            self._writes.chmod(place, mode)
        except PermissionError:
            self.notes.append(f"the permissions of {place or 'the root'} cannot be brought back, it is another user's")

    def _own(self, place: str, meta: Meta, *, made: bool) -> None:
        try:
            if not made:  # a rollback would not take it back
                raise PermissionError
            with self._core.files.parent(place) as (at, name):
                os.chown(name, meta.uid, meta.gid, dir_fd=at, follow_symlinks=False)
                os.chmod(name, meta.mode, dir_fd=at)  # which a new owner may have cost some bits
        except PermissionError:
            self._note_owner(place, meta)

    def _dress(self, place: str, slot: int, meta: Meta) -> None:
        if not apply_metadata(self._core.holding.descriptor, str(slot), meta):
            self._note_owner(place, meta)

    def _note_owner(self, place: str, meta: Meta) -> None:
        self.notes.append(f"{place or 'the root'} is not given back to user {meta.uid} and group {meta.gid}")

    def _place(self, place: str, slot: int, found: os.stat_result | None, identity: Identity) -> Deed:
        if found is None:
            deed = Deed("put", place, slot=slot, new=identity)
        else:
            self._core.seen.check(place, found)
            deed = Deed("swap", place, slot=slot, new=identity, old=Identity.of(found))
        expected = deed.old
        self._core.perform(deed)
        self._core.seen.check_displaced(place, expected, deed.old)
        self._core.seen.forget(place)
        return deed
