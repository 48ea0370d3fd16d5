"""All that a store has, for tests that look for a secret in it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def store_bytes(store: Path) -> bytes:
    """Return the files of a store as they are, and the content of all objects in its packs."""
    git = ["git", "-C", str(store / "history")]
    every = subprocess.run([*git, "cat-file", "--batch-all-objects", "--batch"], capture_output=True, check=False)
    return every.stdout + b"".join(path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file())
