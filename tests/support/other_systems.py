"""Take from this process what only Linux has, so that it is as on macOS for what Python code can ask.

Run with `python -c "import other_systems; other_systems.leave_linux(); ..."`. The kernel stays the same: how its files
behave is not simulated.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import sysconfig
import urllib.request  # noqa: F401  it imports what this Python has not, where it is loaded later
from typing import Any, NoReturn

OF_LINUX = {
    os: "O_PATH O_TMPFILE O_LARGEFILE O_DIRECT O_NOATIME O_RSYNC pidfd_open eventfd memfd_create copy_file_range "
    "sched_getaffinity sched_setaffinity getxattr setxattr listxattr removexattr posix_fadvise posix_fallocate pipe2 "
    "splice setresuid setresgid getresuid getresgid preadv2 pwritev2 getrandom sched_setscheduler fdatasync P_PIDFD "
    "POSIX_FADV_DONTNEED MFD_CLOEXEC EFD_CLOEXEC SEEK_DATA SEEK_HOLE",
    signal: "pidfd_send_signal SIGSTKFLT SIGPWR SIGPOLL SIGRTMIN SIGRTMAX sigwaitinfo sigtimedwait",
    select: "epoll EPOLLIN",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_VSOCK SO_PASSCRED SO_DOMAIN",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_SETLEASE F_NOTIFY",
}
OF_ITS_LIBC = {"syscall", "statx", "inotify_init1", "inotify_add_watch", "prctl", "unshare", "mount", "getauxval"}
"""What ctypes finds no more. `statfs` is there on macOS, with another structure."""
HIDDEN = ("/proc", "/sys", "/dev/shm")


def _refused(path: object) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _is_hidden(path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(path)  # pyright: ignore[reportUnknownArgumentType]
    return any(text == one or text.startswith(f"{one}/") for one in HIDDEN)


def _guarded(function: Any) -> Any:
    def call(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        return _refused(path) if _is_hidden(path) else function(path, *arguments, **named)

    return call


class _Libc(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in OF_ITS_LIBC:
            raise AttributeError(f"dlsym({name}): symbol not found")
        return super().__getattr__(name)


def leave_linux() -> None:
    """Take it away. There is no way back in this process."""
    sysconfig.get_config_vars()  # it reads a file of this Python that is named by the system
    sys.platform = "darwin"
    for module, names in OF_LINUX.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("open", "stat", "lstat", "listdir", "readlink", "scandir", "access"):
        setattr(os, name, _guarded(getattr(os, name)))
    builtins.open = _guarded(builtins.open)
    ctypes.CDLL = _Libc  # type: ignore[misc]
