"""Workspaces to measure on."""

from __future__ import annotations

from ringfence.filesystem import InMemoryFilesystem

LINE = "    return self.workspace.read(path, offset=offset, limit=limit)\n"


def sample(count: int) -> dict[str, bytes]:
    """Files of about 1 KiB, half of them Python: a hundred to a directory, and ten directories to a directory."""
    digits = len(str(count - 1))
    return {_path(str(n).zfill(digits), "py" if n % 2 else "md"): _content(n) for n in range(count)}


def _path(number: str, ending: str) -> str:
    *above, tens, ones = number
    return "/".join(["src", *(f"part{digit}" for digit in above), f"file{tens}{ones}.{ending}"])


def _content(n: int) -> bytes:
    return f"# file {n}\n{LINE * 15}".encode()


def loaded(files: dict[str, bytes]) -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    for path, content in files.items():
        filesystem.load(path, content)
    return filesystem
