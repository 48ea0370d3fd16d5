"""Commands in a container: watched while they run, and what they print and leave to the next one."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, Self, TypeAlias

from ringfence.limits import Cancellation
from ringfence.secrets import MaskedStream, Secrets
from ringfence_sandbox.container.executor import REPORT
from ringfence_sandbox.container.isolation import WORKSPACE, SandboxLimits
from ringfence_workspace.commands import CommandExit, CommandRequest, ShellEnvironment
from ringfence_workspace.outputs import CommandOutput

Printed: TypeAlias = Literal["stdout", "stderr"]
LONGEST_REPORT = 64 * 1024
"""Bytes of a directory and all exported variables. A longer report is none."""
UNKNOWN = "what it exported is not known, so that the next command begins as this one did"
_NOT_FOUND = 127
_LOOK_SECONDS = 0.05
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_OF_EACH_SHELL = frozenset({"_", "OLDPWD", "PWD", "SHLVL"})
# On the line of the command, so that the shell counts its lines right. `set +ex`: what a command asks for is not for
# what follows it. The directory and each variable end with a zero byte, and the whole with one more.
_REPORTING = (
    "trap '{ set +ex; } 2>/dev/null; "
    '{ command pwd -P && command printf "\\0" && command -p env -0 && command printf "\\0"; } '
    f"2>/dev/null >/proc/self/fd/{REPORT}' EXIT; "
)


def explained(request: CommandRequest, ended: CommandExit) -> str:
    """Why a command could not be started, and what to do; empty where it was."""
    if not ended.problem or ended.exit_code != _NOT_FOUND:
        return ended.problem
    program = request.argv[0]
    if " " in program and len(request.argv) == 1:
        return f"{ended.problem}; a line for the shell is one text, not a list; of a list each argument is an item"
    if "/" in program:
        return f"{ended.problem}; that, or the interpreter which its first line names, is not in the container"
    return f"{ended.problem}; the container's PATH has no such program: take an image that has it, or give its path"


def no_directory(cwd: str, error: OSError | ValueError) -> OSError | ValueError:
    """The same kind of error, with what a cwd may be. What says nothing about the path stays as it is."""
    why = str(error)
    if isinstance(error, OSError):
        why = error.strerror or why
        if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
            if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                return error
            error = NotADirectoryError()
    return type(error)(
        f"cwd is {cwd!r}, which is no directory of the workspace ({why}): it is a path from the root, such as 'src', "
        f"or below {WORKSPACE}"
    )


class KeptEnvironment:
    """What one command begins with and leaves to the next. Where none is to be kept, it is run as it was asked for.

    A shell says at its end where it is and what it exports, unless the command replaces it (``exec``), is killed, or
    sets a trap of its own on EXIT. A program leaves the environment as it was.
    """

    def __init__(
        self, request: CommandRequest, directory: str, own: Mapping[str, str], secrets: Secrets | None = None
    ) -> None:
        """``directory`` is where in the container it begins, ``own`` the container's variables. The variables of
        ``secrets`` are never handed on."""
        self._secrets = secrets or Secrets()
        self._before = request.environment
        self._directory = directory
        self._own = own
        self._received = bytearray()
        text = request.text if request.environment is not None else None
        self.reports = text is not None
        """Whether what it leaves is to be reported."""
        self.argv = request.argv if text is None else (*request.argv[:2], _REPORTING + text)
        self.env: Mapping[str, str | None] = {
            **self._secrets.variables,
            **(request.environment or ShellEnvironment()).variables,
            **request.env,
        }

    def take(self, data: bytes) -> None:
        """A piece of the report."""
        self._received += data[: LONGEST_REPORT + 1 - len(self._received)]

    def next_environment(self) -> ShellEnvironment | None:
        """What the next command begins with; None where a report that should be there is none, or not a whole one.

        A report may be forged, which gains what ``export`` does. What the command itself changed is handed on, not the
        directory and the variables that it was given for itself; of directories, only those of the workspace, of
        variables, those with the name of a shell's variable and a value that is UTF-8 and has no secret in it.
        """
        if self._before is None or not self.reports:
            return self._before
        report = bytes(self._received)
        place, ended, rest = report.partition(b"\n\0")
        if len(report) > LONGEST_REPORT or not ended or not (rest == b"\0" or rest.endswith(b"\0\0")):
            return None
        changed = {name: value for name, value in self._changed(rest).items() if self._secrets.mask(value) is value}
        variables = {**self._before.variables, **changed}
        cwd = place.decode(errors="surrogateescape")
        if cwd == self._directory:
            cwd = self._before.cwd
        else:
            cwd = cwd.removeprefix(f"{WORKSPACE}/") if cwd.startswith(f"{WORKSPACE}/") else ""
        different = {name: variables[name] for name in sorted(variables) if variables[name] != self._own.get(name)}
        return ShellEnvironment(cwd, different)

    def _changed(self, words: bytes) -> Mapping[str, str | None]:
        given = {**self._own, **self.env}
        pairs = (word.partition("=") for word in words.decode(errors="surrogateescape").split("\0"))
        exported = {name: value for name, equals, value in pairs if equals}
        return {
            name: exported.get(name)
            for name in given.keys() | exported.keys()
            if exported.get(name) != given.get(name)
            and name not in _OF_EACH_SHELL
            and _NAME.match(name)
            and not _NOT_UTF8.search(exported.get(name, ""))
        }


class ShownOutput:
    """What a command prints, on its way to its file and to who watches: masked before either sees it."""

    def __init__(self, kept: CommandOutput, secrets: Secrets, on_output: Callable[[str, bytes], None] | None) -> None:
        """``on_output`` gets each piece of a stream as it comes."""
        self._kept = kept
        self._on_output = on_output
        self._masked: dict[Printed, MaskedStream] = {}
        if secrets:
            self._masked = {"stdout": MaskedStream(secrets), "stderr": MaskedStream(secrets)}

    def take(self, stream: Printed, data: bytes) -> None:
        self._show(stream, self._masked[stream].take(data) if self._masked else data)

    def close(self) -> None:
        """Show what was held back, and close the files."""
        for stream, masked in self._masked.items():
            self._show(stream, masked.end())
        self._kept.close()

    def _show(self, stream: Printed, data: bytes) -> None:
        if data:
            self._kept.take(stream, data)
            if self._on_output is not None:
                self._on_output(stream, data)


class CommandWatch:
    """Ends the command of a block when it leaves too little space, or too few inodes, on the disk of the workspace, or
    when its call is cancelled. A thread of its own looks."""

    def __init__(
        self, root: str, limits: SandboxLimits, end: Callable[[], None], cancellation: Cancellation | None
    ) -> None:
        """``end`` is called in another thread, again and again until the block ends."""
        self._root = root
        self._end = end
        self._cancellation = cancellation
        # On a disk that is nearly full already a command may use half of what is left.
        least = limits.free_disk_bytes, limits.free_inodes
        self._floor = [min(wanted, left // 2) for wanted, left in zip(least, _free_space(root), strict=True)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ringfence disk watch", daemon=True)
        self.reason = ""
        """The reason to roll back what the command did, if there is one."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        # What a quick command did between two looks is not let stay either.
        self.reason = self.reason or self._lacking()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            if lacking := self._lacking():
                self.reason = f"ended because {lacking}"
            if self._cancellation is not None and self._cancellation.cancelled:
                self.reason = "ended because its call was cancelled"
            if self.reason:
                self._end()

    def _lacking(self) -> str:
        with suppress(FileNotFoundError):  # somebody has moved the root: cancellations are still looked for
            for left, floor, what in zip(_free_space(self._root), self._floor, ("bytes", "inodes"), strict=True):
                if left < floor:
                    return f"{left} {what} are left on the disk"
        return ""


def _free_space(root: str) -> tuple[int, int]:
    found = os.statvfs(root)
    # Filesystems without a number of inodes say 0.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else 1 << 62
