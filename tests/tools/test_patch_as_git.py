"""``ringfence apply`` beside a real ``git apply``: what git refuses is refused, a second time, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from real_git import git, git_bytes, needs_git

from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools.patching import apply_to

TEN = [f"line {number}" for number in range(10)]
CASES = {
    "appended": (["one"], ["one", "two"]),
    "appended to ten": (TEN, [*TEN, "more"]),
    "put before": (["one"], ["zero", "one"]),
    "put before ten": (TEN, ["first", *TEN]),
    "put between": (TEN, [*TEN[:5], "new", *TEN[5:]]),
    "put after the first": (TEN, [TEN[0], "new", *TEN[1:]]),
    "put before the last": (TEN, [*TEN[:9], "new", TEN[9]]),
    "doubled among equal lines": (["same"] * 8, ["same"] * 9),
    "one line of a repeated pair": (["a", "b"] * 4, ["a", "b"] * 5),
    "replaced": (TEN, [*TEN[:4], "other", *TEN[5:]]),
    "taken away": (TEN, TEN[:4] + TEN[5:]),
    "taken away among equal lines": (["same"] * 8, ["same"] * 7),
    "in two places": ([*TEN, *TEN], ["first", *TEN, *TEN, "last"]),
    "all of it": (["one"], ["two"]),
    "emptied": (["one"], []),
    "filled": ([], ["one"]),
    "created": (None, ["one"]),
    "deleted": (["one"], None),
}


def content(lines: list[str] | None) -> bytes | None:
    return None if lines is None else "".join(f"{line}\n" for line in lines).encode()


def write(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def applied_by_git(folder: Path, before: bytes | None, patch: bytes) -> tuple[bool, bytes | None]:
    path = folder / "f"
    write(path, before)
    done = subprocess.run(["git", "-C", folder, "apply", "-"], input=patch, capture_output=True, check=False)
    return done.returncode == 0, path.read_bytes() if path.exists() else None


def applied(before: bytes | None, patch: bytes) -> tuple[bool, bytes | None]:
    filesystem = InMemoryFilesystem()
    if before is not None:
        filesystem.write_bytes("f", before)
    try:
        apply_to(filesystem, patch)
    except ValueError:
        return False, before
    return True, filesystem.read_bytes("f").content if filesystem.exists("f") else None


@needs_git
@pytest.mark.parametrize("context", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_patch_goes_in_once_as_with_git(case: str, context: int, tmp_path: Path) -> None:
    before, after = map(content, CASES[case])
    git(tmp_path, "init", "--quiet")
    write(tmp_path / "f", before)
    git(tmp_path, "add", "--all")
    write(tmp_path / "f", after)
    git(tmp_path, "add", "--intent-to-add", "--all")
    patch = git_bytes(tmp_path, "diff", f"--unified={context}")
    once = applied(before, patch)
    # Without context git puts lines where they do not belong: that is refused.
    assert once in (applied_by_git(tmp_path, before, patch), *([] if context else [(False, before)]))
    assert applied(after, patch) in (applied_by_git(tmp_path, after, patch), (False, after))
    moved = None if before is None else b"above\n" + before + b"below\n"
    assert applied(moved, patch) in (applied_by_git(tmp_path, moved, patch), (False, moved))
