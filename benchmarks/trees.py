"""Workspaces to measure on."""

from __future__ import annotations

from ringfence.filesystem import InMemoryFilesystem

LINE = "    return self.workspace.read(path, offset=offset, limit=limit)\n"


def sample(count: int) -> dict[str, bytes]:
    """Files of about 1 KiB, half of them Python, a hundred to a directory and ten directories to a directory."""
    return {_path(n): f"# file {n}\n{LINE * 15}".encode() for n in range(count)}


def _path(n: int) -> str:
    *above, tens, ones = str(n).zfill(6)
    directories = "/".join(f"part{digit}" for digit in above)
    return f"{directories}/file{tens}{ones}.{'py' if n % 2 else 'md'}"


def loaded(files: dict[str, bytes]) -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    for path, content in files.items():
        filesystem.load(path, content)
    return filesystem
