"""Building an image from a context, with each line of the build as it comes."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.podman_connection import Connection
from ringfence_sandbox.container.seccomp import profile_path

CONTAINERFILE = ".ringfence-containerfile"
_SILENCE_SECONDS = 1800.0
_MEMORY_BYTES = 4 << 30
_LAST_CHARACTERS = 1500
_LINE_CHARACTERS = 1000
_OF_THE_ENGINE = re.compile(
    r"(Copying (blob|config)|Getting image|Writing manifest|Storing sig|COMMIT|-->|Successfully tagged|[0-9a-f]{64}$)"
)
# Podman takes "none" here and gives the build the host's own network: these are the words of its own client.
_WITHOUT_NETWORK = {
    "networkmode": "1",
    "nsoptions": json.dumps([{"Name": "network", "Host": False, "Path": ""}]),
    "isolation": "1",
    "dropcaps": json.dumps(["CAP_MKNOD", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_AUDIT_WRITE"]),
}


class Context:
    """The files that a build gets, in a temporary file on disk. Nothing of them belongs to anybody."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ringfence-context-")  # noqa: SIM115
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._file.close()

    def add(self, name: str, content: bytes | str, mode: int = 0o644) -> None:
        data = content.encode() if isinstance(content, str) else content
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), mode
        self._tar.addfile(info, io.BytesIO(data))

    def add_file(self, name: str, path: Path) -> None:
        self._tar.add(path, name, recursive=False, filter=_of_nobody)

    def add_project(self, directory: str, name: str = "", *, hidden: Callable[[str], bool]) -> Sequence[str]:
        """Add a directory of the project, less git's data, what its .containerignore or .dockerignore names, and what
        is ``hidden``. Return the paths of the last: an image that had them would show them to every command."""
        patterns, left_out = [".git", *_ignored(directory)], list[str]()

        def taken(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            path = os.path.relpath(info.name or ".", name or ".")
            if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
                return None
            if hidden(os.path.join(directory, path)):
                left_out.append(path)
                return None
            return _of_nobody(info) if info.isreg() or info.isdir() or info.issym() else None

        self._tar.add(directory, name or ".", filter=taken)
        return left_out

    def finished(self) -> Any:
        self._tar.close()
        self._file.seek(0)
        return self._file


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    return info


def _ignored(directory: str) -> Sequence[str]:
    for name in (".containerignore", ".dockerignore"):
        file = Path(directory, name)
        if file.is_file() and not file.is_symlink():
            lines = [line.strip().strip("/") for line in file.read_text(errors="replace").splitlines()]
            return [line.removeprefix("**/") for line in lines if line and not line.startswith(("#", "!"))]
    return []


def build_image(
    connection: Connection,
    context: Context,
    tag: str,
    *,
    labels: Mapping[str, str],
    args: Mapping[str, str] | None = None,
    output: Callable[[str], None],
    network: bool = False,
) -> None:
    """Build the Containerfile `CONTAINERFILE` of a context without fetching an image. Its commands have no network
    unless it is asked for, no device, no raw socket, and the system calls of a sandbox.

    Raises:
        SandboxUnavailableError: it cannot be built; with the last lines of the build.
    """
    params: dict[str, Any] = {
        "dockerfile": CONTAINERFILE,
        "t": tag,
        "pull": "false",
        "pullpolicy": "never",
        "rm": "true",
        "forcerm": "true",
        "layers": "false",
        "httpproxy": "false",
        "labels": json.dumps(dict(labels)),
        "buildargs": json.dumps(dict(args or {})),
    }
    if not connection.host.unlimited:
        params.update(memory=_MEMORY_BYTES, memswap=_MEMORY_BYTES)
    if not network:
        params.update(_WITHOUT_NETWORK, seccomp=profile_path())
    last = ""
    response = connection.client.api.post(
        "/build",
        params=params,
        data=context.finished(),
        headers={"Content-Type": "application/x-tar"},
        stream=True,
        timeout=_SILENCE_SECONDS,
    )
    response.raise_for_status()
    for line in response.iter_lines():
        found: dict[str, Any] = json.loads(line)
        if text := str(found.get("stream") or ""):
            last = (last + text)[-_LAST_CHARACTERS:]
            for one in text.splitlines():
                if one.strip() and not _OF_THE_ENGINE.match(one):
                    output(one[:_LINE_CHARACTERS])
        if "error" in found:
            raise SandboxUnavailableError(f"the image cannot be built: {str(found['error'])[-500:]}\n{last.strip()}")
