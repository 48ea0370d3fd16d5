"""What `ringfence show` tells of a step besides its patch, which has no directories and few permission bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agent_runs import MAX_CHANGE_LINES, unpatchable_changes

from ringfence.runtime import Change, FileVersion
from ringfence.testing import held_call
from ringfence_sandbox import Workspace


def version(kind: str, mode: int) -> FileVersion:
    return FileVersion(kind, mode, 0, "0" * 64 if kind == "file" else None)


FILE, FOLDER = version("file", 0o644), version("directory", 0o755)
LINK = version("symlink", 0o777)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"d": (None, FOLDER)}, ["d (directory made)"]),
        ({"d": (None, FOLDER), "d/e": (None, FOLDER), "f": (None, FILE)}, ["d/e (directory made)"]),
        ({"d": (None, FOLDER), "d/e": (None, FOLDER), "d/e/f": (None, LINK)}, []),
        ({"d": (FOLDER, None), "d/e": (FOLDER, None), "f": (FILE, None)}, ["d (directory removed)"]),
        ({"d": (FOLDER, None), "d/e": (FOLDER, None), "d/f": (FILE, None)}, ["d/e (directory removed)"]),
        ({"d": (FOLDER, version("directory", 0o700))}, ["d (permissions 755 -> 700)"]),
        ({"": (FOLDER, version("directory", 0o1777))}, ["/ (permissions 755 -> 1777)"]),
        ({"a": (FILE, version("file", 0o600))}, ["a (permissions 644 -> 600)"]),
        ({"a": (FILE, version("file", 0o755)), "b": (FILE, FILE), "c": (FILE, LINK)}, []),
        ({"a": (FILE, FOLDER), "b": (FOLDER, FILE)}, ["a (directory made)"]),
        ({"a\n": (None, FOLDER)}, ["a\\x0a (directory made)"]),
        (
            {"p": (None, FileVersion("file", 0o644, 0))},
            ["p (created; it cannot be shown, as its bytes are in no history)"],
        ),
    ],
)
def test_what_a_patch_cannot_say_is_said(
    changes: dict[str, tuple[FileVersion | None, FileVersion | None]], told: list[str]
) -> None:
    assert list(unpatchable_changes([Change(path, *versions) for path, versions in changes.items()])) == told


def test_of_many_the_first_are_named_and_the_rest_counted() -> None:
    changes = [Change(f"{number}", None, FOLDER) for number in range(MAX_CHANGE_LINES + 3)]
    assert [*unpatchable_changes(changes)][MAX_CHANGE_LINES:] == ["3 more of these; --json lists all"]


def test_a_step_of_an_empty_directory_is_shown_as_one(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as workspace:
        for change in (lambda files: files.mkdir("d"), lambda files: files.chmod("d", 0o700)):
            with held_call(workspace.filesystem) as call:
                change(workspace.filesystem.for_call(call))
                call.commit()
    said = [
        subprocess.run([sys.executable, "-m", "ringfence_cli", "show", tmp_path, step], capture_output=True).stdout
        for step in "12"
    ]
    assert b"\nnot in the patch: d (directory made)\n" in said[0]
    assert b"\nnot in the patch: d (permissions 755 -> 700)\n" in said[1]
