"""Kernels and filesystems that can do less than this one, as `HostFilesystem(can=...)` takes them."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ringfence_workspace.tree.kernel import Abilities, abilities, boot_id

OLD_KERNEL = Abilities(openat2=False, renameat2=False, tmpfile=False)
NO_LINKS = Abilities(openat2=True, renameat2=False, tmpfile=False, links=False)
on_each_kernel = pytest.fixture(params=[None, OLD_KERNEL], ids=["this kernel", "an old kernel"])


def on_filesystem(kind: Callable[[int], int]) -> Abilities:
    """Where `kind` says of an open file what the filesystem is, by its number in the kernel."""
    return replace(abilities(), filesystem_type=kind)


def in_another_boot() -> None:
    """From now on this process, which is to be killed, is one of before the machine was started anew."""
    real = builtins.open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        if path == "/proc/sys/kernel/random/boot_id":
            return io.StringIO("another boot")
        return real(path, *arguments, **named)

    builtins.open = opened
    boot_id.cache_clear()
