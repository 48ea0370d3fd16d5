"""Bringing the tree from one state of the history to another, by operations of the filesystem, in one call."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from ringfence_sandbox.entries import Entry
from ringfence_sandbox.history_states import States
from ringfence_sandbox.host import HostFilesystem
from ringfence_sandbox.restoring import plan_restore
from ringfence_sandbox.reversal import Outcome


class TreeWriter:
    """Writes kinds, bytes and permission bits. Times, owners and hard links become those of new files."""

    def __init__(self, filesystem: HostFilesystem, states: States, now: str, contents: Mapping[str, bytes]) -> None:
        """``now`` is the commit that has the tree as it is; ``contents`` has bytes by object id besides the store's."""
        self._filesystem = filesystem
        self._states = states
        self._now = now
        self._contents = contents
        self._modes: dict[str, int] = {}
        """Of the directories that were made writable for the moment."""

    def write(self, wanted: Mapping[str, Entry | None]) -> dict[str, Outcome]:
        """Make these paths so. What could not be, since somebody else's is in the way, is *kept*."""
        files = self._filesystem
        kept: dict[str, Outcome] = {}
        differences = [(path, self._states.entry(self._now, path), state) for path, state in wanted.items()]
        plan = plan_restore(differences, {}, {})
        for path in plan.removals:
            self._open_up(path)
            try:
                files.delete(path)
                self._modes.pop(path, None)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EISDIR):
                    raise
                kept[path] = "kept"  # it holds what no history has
        for path in plan.directories:
            if path not in kept:
                self._open_up(path)
                files.mkdir(path)
                files.chmod(path, 0o700 | stat.S_IMODE(files.stat(path).mode))
        for path, entry in plan.files:
            if path not in kept:
                self._open_up(path)
                self._write(path, entry)
        for path, entry in plan.finish:
            self._modes[path] = entry.meta.mode
        for path in sorted(self._modes, reverse=True):
            with suppress(FileNotFoundError):
                if path not in kept:
                    files.chmod(path, self._modes[path])
        return kept

    def _write(self, path: str, entry: Entry) -> None:
        files = self._filesystem
        assert entry.oid is not None, "a file has an object id"
        content = self._contents.get(entry.oid)
        if content is None:
            content = self._states.content(entry.oid)
        if entry.kind == "symlink":
            with suppress(FileNotFoundError):
                files.delete(path)
            files.symlink(path, os.fsdecode(content))
            return
        now = self._states.entry(self._now, path)
        if now is None or now.oid != entry.oid:
            files.write_bytes(path, content, create_parents=False)
        files.chmod(path, entry.meta.mode)

    def _open_up(self, path: str) -> None:
        """Make the directory that a path is in writable for its owner, until all is done."""
        above = path.rpartition("/")[0]
        if above and above not in self._modes and self._filesystem.exists(above):
            mode = self._filesystem.stat(above).mode
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                self._filesystem.chmod(above, mode | stat.S_IRWXU)
                self._modes[above] = mode
