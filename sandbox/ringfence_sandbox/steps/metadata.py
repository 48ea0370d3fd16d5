"""Giving a file the owner, permission bits and time that the history has of it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.store.entries import Meta


def apply_metadata(at: int, name: str, meta: Meta) -> bool:
    """Give what is at a name in the directory `at` what is different in `meta`, and never what a link leads to. Whether
    the owner, too: where only root could, the bits that make a program another user's are left out."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        here = os.fstat(descriptor)
        link = stat.S_ISLNK(here.st_mode)
        # A link's own descriptor cannot be gone through, so it is named; it is never followed.
        target, where = (name, at) if link else (f"/proc/self/fd/{descriptor}", None)
        mode, owned = meta.mode, True
        if (here.st_uid, here.st_gid) != (meta.uid, meta.gid):
            failpoint("chown")
            try:
                os.chown(target, meta.uid, meta.gid, dir_fd=where, follow_symlinks=not link)
            except PermissionError:
                mode, owned = mode & ~(stat.S_ISUID | stat.S_ISGID), False
        if not link and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            failpoint("chmod")
            os.chmod(target, mode)
        if here.st_mtime_ns != meta.mtime_ns:
            failpoint("utime")
            with suppress(PermissionError):
                os.utime(target, ns=(here.st_atime_ns, meta.mtime_ns), dir_fd=where, follow_symlinks=not link)
        return owned
    finally:
        os.close(descriptor)
