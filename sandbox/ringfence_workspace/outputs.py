"""What commands print: a little for the model, the whole of it in a file of the store."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from ringfence_workspace.tree.kernel import free_bytes

SHOWN_BYTES = 32 * 1024
_HEAD_BYTES = SHOWN_BYTES // 2
_KEPT_FILES = 100
_KEPT_BYTES = 1 << 30
_FOLDER = ".ringfence-output"
_NAME = re.compile(re.escape(_FOLDER) + r"/([0-9a-f]{16}\.std(?:out|err))\Z")


def is_output(normal: str) -> bool:
    """Whether a normalised path of a workspace stands for the kept output of a command. No file of the tree has one."""
    return _NAME.match(normal) is not None


class KeptOutputs:
    """The outputs of a workspace's commands, outside of its tree. The newest are kept."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def of_command(self, command: str, keep_bytes: int) -> CommandOutput:
        """For one command, of which ``command`` is 16 hexadecimal digits. ``keep_bytes`` is the most of each stream."""
        # The workspace may be on the same disk, and a rollback needs what is left there before the command.
        keep_bytes = min(keep_bytes, free_bytes(self.directory.parent) // 4)
        names = (f"{command}.stdout", f"{command}.stderr")
        streams = (OutputStream(self.directory / name, f"{_FOLDER}/{name}", keep_bytes) for name in names)
        return CommandOutput(self, *streams)

    def read(self, normal: str) -> tuple[bytes, os.stat_result] | None:
        """What is kept under a path, and its file's status; None where it names nothing that is."""
        if found := _NAME.match(normal):
            path = self.directory / found[1]
            with suppress(FileNotFoundError):
                return path.read_bytes(), path.stat()
        return None

    def prune(self) -> None:
        """Remove all but the newest, by number and by size: they never hold more than what is left on the disk."""
        if not self.directory.is_dir():
            return
        with os.scandir(self.directory) as entries:
            found = sorted(((entry.stat(), entry.path) for entry in entries), key=lambda item: -item[0].st_mtime_ns)
        most = min(_KEPT_BYTES, (sum(known.st_size for known, _ in found) + free_bytes(self.directory)) // 2)
        size = 0
        for number, (known, path) in enumerate(found):
            size += known.st_size
            if number >= _KEPT_FILES or size > most:
                with suppress(FileNotFoundError):
                    os.unlink(path)


class CommandOutput:
    """What one command prints, on two streams."""

    def __init__(self, kept: KeptOutputs, stdout: OutputStream, stderr: OutputStream) -> None:
        self._kept = kept
        self.stdout = stdout
        self.stderr = stderr

    def take(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).take(data)

    def files(self) -> dict[str, str]:
        """By stream, the file of this machine that has what is too long to be shown."""
        streams = {"stdout": self.stdout, "stderr": self.stderr}
        return {name: stream.path for name, stream in streams.items() if stream.is_kept}

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()
        if self.stdout.is_kept or self.stderr.is_kept:
            self._kept.prune()


class OutputStream:
    """One stream of one command. A file is made only of what is too long to be shown."""

    def __init__(self, path: Path, name: str, keep_bytes: int) -> None:
        """``name`` is how a model asks for the file."""
        self._path = path
        self._name = name
        self._keep = keep_bytes
        self._start = b""
        self._end = b""
        self._file: BinaryIO | None = None
        self._written = 0
        self._problem = "too little space is left on the disk"
        self.total = 0

    def take(self, data: bytes) -> None:
        before, self.total = self.total, self.total + len(data)
        if self.total > SHOWN_BYTES:
            self._write(self._start + data if before <= SHOWN_BYTES else data)
        self._start += data[: max(0, SHOWN_BYTES - before)]
        self._end = (self._end + data)[-_HEAD_BYTES:]

    def _write(self, data: bytes) -> None:
        room = self._keep - self._written
        if room <= 0:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = self._path.open("wb")
            self._file.write(data[:room])
            self._written += min(room, len(data))
        except OSError as error:  # a full disk: the command is ended for it, its output is not the place to fail
            self._problem, self._keep = str(error), self._written

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    @property
    def is_kept(self) -> bool:
        return self._written > 0

    @property
    def path(self) -> str:
        return os.fspath(self._path)

    def text(self) -> str:
        """What is shown, once it is closed: all, or both ends and where the rest is. Bad bytes are replaced."""
        if self.total <= SHOWN_BYTES:
            return self._start.decode("utf-8", "replace")
        left_out = self.total - _HEAD_BYTES - len(self._end)
        kept = "" if self._written == self.total else f" (its first {self._written} bytes)"
        where = f"read {self._name} for all of it{kept}" if self._written else f"it was not kept: {self._problem}"
        start, end = self._start[:_HEAD_BYTES].decode("utf-8", "replace"), self._end.decode("utf-8", "replace")
        return f"{start}\n[... {left_out} bytes left out; {where} ...]\n{end}"
