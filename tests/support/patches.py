"""Diffs and patches as the filesystems and the tool `apply_patch` make, read and apply them."""

from __future__ import annotations

from ringfence.filesystem.diff import REVERSIBLE_BYTES, FileState, patch_of, unified_diff
from ringfence.filesystem.patch import EXECUTABLE, SYMLINK, FilePatch, Patched, apply_patch
from ringfence.filesystem.patch_text import parse_patch
from ringfence.filesystem.readable_diff import readable_patch
from ringfence.filesystem.tree import differences

__all__ = [
    "EXECUTABLE",
    "REVERSIBLE_BYTES",
    "SYMLINK",
    "FilePatch",
    "FileState",
    "Patched",
    "apply_patch",
    "differences",
    "parse_patch",
    "patch_of",
    "readable_patch",
    "unified_diff",
]
