"""Real filesystems, mounted for a test: full ones, other ones. And host directories, copied into files in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfence import Session
from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools import HostMount, HostMountPreview, VfsToolsSection


@contextmanager
def mounted(place: Path, *options: str) -> Generator[Path]:
    """What `mount` with these options puts there; without the right to mount, the test is skipped."""
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        if os.environ.get("RINGFENCE_REQUIRE_PODMAN") == "1":
            pytest.fail(f"nothing can be mounted: {done.stderr}")
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def small_disk(place: Path, size: str) -> Generator[Path]:
    """A new filesystem of that size, such as "2m"."""
    place.mkdir()
    with mounted(place, "-t", "tmpfs", "-o", f"size={size}", "ringfence-test"):
        yield place


def mount_all(
    filesystem: InMemoryFilesystem,
    mounts: Sequence[HostMount],
    allowed_host_roots: Iterable[str | os.PathLike[str]] | None = None,
) -> tuple[HostMountPreview, ...]:
    """Copy what a section of file tools mounts."""
    section = VfsToolsSection(
        session=Session(), filesystem=filesystem, mounts=mounts, allowed_host_roots=allowed_host_roots
    )
    return section.mounts
