"""Writes a workspace and its store with the ringfence that is installed: test data for the versions after it.

``python tests/workspace/make_store.py DIR`` makes DIR/root and DIR/store. `stores/` beside it has stores of earlier
versions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace


def build(root: Path) -> None:
    """The files as they are before the first step."""
    (root / "d/empty").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (root / "d/b.sh").write_text("b\n")
    (root / "d/b.sh").chmod(0o755)
    os.symlink("a.txt", root / "link")
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")


def change(fs: HostFilesystem) -> None:
    """The first step, and all there is of the second but "second"."""
    fs.write("a.txt", "three\n")
    fs.write("n/o", "new\n")
    fs.delete("d/empty")


def make(top: Path) -> None:
    (top / "root").mkdir(parents=True)
    build(top / "root")
    with Workspace.open(top / "root", store=top / "store") as workspace:
        for number, work in enumerate((change, lambda fs: fs.write("second", "2\n")), 1):
            with held_call(workspace.filesystem, call_id=f"call-{number}") as call:
                work(workspace.filesystem.for_call(call))
                call.commit()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
