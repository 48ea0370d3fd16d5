"""Patches that are written: what `git apply` makes of them is exactly the other state."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patches import (
    EXECUTABLE,
    REVERSIBLE_BYTES,
    SYMLINK,
    FileState,
    apply_patch,
    differences,
    parse_patch,
    patch_of,
    unified_diff,
)

from ringfence.filesystem import InMemoryFilesystem

Tree = dict[str, FileState]

LINES = [b"a", b"b", b"", b" ", b"\\ x", b"-- a", b"++ b", b"@@ -1 +1 @@", b"caf\xe9", "ü".encode()]
TEXTS = st.lists(
    st.tuples(st.sampled_from(LINES), st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\r\r\n", b""])),
    max_size=12,
).map(lambda lines: b"".join(line + end for line, end in lines))
STATES = st.none() | st.builds(FileState, TEXTS)


def put(root: Path, tree: Tree) -> None:
    for name, state in tree.items():
        path = os.fsencode(root) + b"/" + os.fsencode(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if state.mode == SYMLINK:
            os.symlink(state.content, path)
            continue
        with open(path, "wb") as file:
            file.write(state.content)
        os.chmod(path, 0o755 if state.mode == EXECUTABLE else 0o644)


def found(root: Path) -> Tree:
    tree: Tree = {}
    for directory, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(directory, name)
            shown = os.fsdecode(os.path.relpath(path, os.fsencode(root)))
            if os.path.islink(path):
                tree[shown] = FileState(os.readlink(path), SYMLINK)
                continue
            with open(path, "rb") as file:
                executable = os.stat(path).st_mode & 0o100
                tree[shown] = FileState(file.read(), EXECUTABLE) if executable else FileState(file.read())
    return tree


def git_apply(root: Path, patch: bytes, *options: str) -> None:
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_DIR": str(root / "none"),
    }
    command = ["git", "apply", "--whitespace=nowarn", *options]
    done = subprocess.run(command, check=False, cwd=root, input=patch, capture_output=True, env=environment)
    assert done.returncode == 0, (done.stderr.decode(), patch)


def patch_between(before: Tree, after: Tree) -> bytes:
    return b"".join(
        unified_diff(name, before.get(name), after.get(name))
        for wanted in (False, True)
        for name in sorted({*before, *after})
        if (name in after) is wanted
    )


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@given(before=STATES, after=STATES)
def test_a_diff_applied_gives_the_other_state(before: FileState | None, after: FileState | None) -> None:
    patch = unified_diff("file", before, after)
    if before == after:
        assert patch == b""
        return
    (file,) = parse_patch(patch)
    assert (file.source, file.target) == ("file" if before else None, "file" if after else None)
    patched = apply_patch(file, before.content if before else None)
    assert patched.problems == ()
    assert patched.content == (after.content if after else b"")
    assert set(patched.shifts) <= {0}


@needs_git
@settings(deadline=None, max_examples=25)
@given(before=STATES, after=STATES)
def test_git_applies_a_diff_forwards_and_backwards(
    tmp_path_factory: pytest.TempPathFactory, before: FileState | None, after: FileState | None
) -> None:
    root = tmp_path_factory.mktemp("tree")
    old, new = ({} if state is None else {"file": state} for state in (before, after))
    put(root, old)
    if patch := patch_between(old, new):
        git_apply(root, patch)
        assert found(root) == new
        git_apply(root, patch, "--reverse")
        assert found(root) == old


EXAMPLES: list[tuple[str, Tree, Tree]] = [
    ("no final newline", {"a": FileState(b"x\ny")}, {"a": FileState(b"x\nz")}),
    ("a final newline comes", {"a": FileState(b"x\ny")}, {"a": FileState(b"x\ny\n")}),
    ("crlf", {"a": FileState(b"x\r\ny\r\n")}, {"a": FileState(b"x\r\nz\r\n")}),
    ("crlf goes", {"a": FileState(b"x\r\ny\r\n")}, {"a": FileState(b"x\ny\n")}),
    ("binary", {"a": FileState(bytes(range(256)) * 9)}, {"a": FileState(bytes(range(255, -1, -1)) * 7)}),
    ("binary comes", {}, {"a/b.png": FileState(b"\x00\x01")}),
    ("binary goes", {"a": FileState(b"\0")}, {}),
    ("binary becomes text", {"a": FileState(b"\0")}, {"a": FileState(b"text\n")}),
    ("empty comes", {}, {"a": FileState(b"")}),
    ("empty goes", {"a": FileState(b"")}, {}),
    ("emptied", {"a": FileState(b"x\n")}, {"a": FileState(b"")}),
    ("executable", {"a": FileState(b"x\n")}, {"a": FileState(b"x\n", EXECUTABLE)}),
    ("executable and changed", {"a": FileState(b"x\n", EXECUTABLE)}, {"a": FileState(b"y\n")}),
    ("executable comes", {}, {"bin/a": FileState(b"#!\n", EXECUTABLE)}),
    ("symlink", {"a": FileState(b"x", SYMLINK)}, {"a": FileState(b"y/z", SYMLINK)}),
    ("symlink comes", {}, {"l": FileState(b"../else where", SYMLINK)}),
    ("file becomes symlink", {"a": FileState(b"x\n")}, {"a": FileState(b"b", SYMLINK)}),
    ("symlink becomes file", {"a": FileState(b"b", SYMLINK)}, {"a": FileState(b"x\n", EXECUTABLE)}),
    ("file becomes directory", {"a": FileState(b"x\n")}, {"a/b": FileState(b"y\n")}),
    ("directory becomes file", {"a/b": FileState(b"x\n")}, {"a": FileState(b"y\n")}),
    ("not utf-8", {"a": FileState(b"caf\xe9\nx\n")}, {"a": FileState(b"caf\xe9\ny\xff\n")}),
    *[
        (f"name {name!r}", {name: FileState(b"x\n")}, {name: FileState(b"y\n"), f"new {name}": FileState(b"n")})
        for name in (
            "a b",
            "ä/ö.txt",
            'quo"te',
            "back\\slash",
            "tab\tand\nline",
            "caf\udce9",
            "b/a",
            " lead",
            "a/a",
            "x\x7f",
        )
    ],
]


@needs_git
@pytest.mark.parametrize(("before", "after"), [case[1:] for case in EXAMPLES], ids=[case[0] for case in EXAMPLES])
def test_git_makes_the_tree_of_the_patch(tmp_path: Path, before: Tree, after: Tree) -> None:
    put(tmp_path, before)
    git_apply(tmp_path, patch_between(before, after))
    assert found(tmp_path) == after


@needs_git
def test_of_a_long_binary_file_only_what_it_becomes_is_given(tmp_path: Path) -> None:
    chance = random.Random(1)
    old, new = (b"\0" + chance.randbytes(REVERSIBLE_BYTES + more) for more in (0, 1))
    before = {"gone": FileState(old), "changed": FileState(old), "short": FileState(old[:-1])}
    after = {"changed": FileState(new), "short": FileState(b"\0"), "new": FileState(new)}
    put(tmp_path, before)
    git_apply(tmp_path, patch_between(before, after))
    assert found(tmp_path) == after
    assert len(unified_diff("gone", FileState(old), None)) < 200
    git_apply(tmp_path, unified_diff("short", before["short"], after["short"]), "--reverse")
    assert found(tmp_path)["short"] == before["short"]


def test_a_name_that_git_writes_is_read_again() -> None:
    for name in ("a b", "ä", 'q"', "\\", "\t\n", "caf\udce9", "a/b/a", "x y b/x y"):
        for before, after in ((None, FileState(b"")), (FileState(b"x\n"), FileState(b"y\n")), (FileState(b"x"), None)):
            (file,) = parse_patch(unified_diff(name, before, after))
            assert set(file.paths) == {name}


def test_a_patch_has_no_directories_and_only_the_permission_to_execute() -> None:
    filesystem = InMemoryFilesystem()
    for path in ("run.sh", "same.txt"):
        filesystem.write(path, "x\n")
    before = filesystem.snapshot()
    filesystem.mkdir("new/empty")
    filesystem.chmod("same.txt", 0o600)
    filesystem.chmod("run.sh", 0o755)
    patch = patch_of(filesystem.changes(before), *[{"run.sh": b"x\n"}.__getitem__] * 2)
    assert patch == b"diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n"


ONE, TWO, SAME = FileState(b"one\n"), FileState(b"two\n"), FileState(b"same\n")
MOVES: list[tuple[str, Tree, Tree, int]] = [
    ("a file", {"a": ONE}, {"b/c d": ONE}, 1),
    ("a name that git quotes", {'q"\t': ONE}, {"caf\udce9": ONE}, 1),
    ("a directory", {"d/a": ONE, "d/e/b": TWO}, {"f/a": ONE, "f/e/b": TWO}, 2),
    ("executable now", {"a": ONE}, {"b": FileState(ONE.content, EXECUTABLE)}, 1),
    ("binary", {"a": FileState(b"\0" * 9)}, {"b": FileState(b"\0" * 9)}, 1),
    ("one of two alike", {"a": SAME, "b": SAME}, {"b": SAME, "c": SAME}, 1),
    ("two alike", {"a": SAME, "b": SAME}, {"c": SAME, "d": SAME}, 2),
    ("one becomes two", {"a": ONE}, {"b": ONE, "c": ONE}, 1),
    ("two become one", {"a": ONE, "b": ONE}, {"c": ONE}, 1),
    ("changed on the way", {"a": ONE}, {"b": TWO}, 0),
    ("another in its place", {"a": ONE}, {"a": TWO, "b": ONE}, 0),
    ("into the place of a removed one", {"a": ONE, "b": TWO}, {"b": ONE}, 0),
    ("into a directory in its own place", {"a": ONE}, {"a/b": ONE}, 0),
    ("out of a directory into its place", {"a/b": ONE}, {"a": ONE}, 0),
    ("into a directory in a removed one's place", {"a": TWO, "x": ONE}, {"a/b": ONE}, 1),
    ("out of a directory whose place a file takes", {"a/b": ONE}, {"a": TWO, "c": ONE}, 1),
    ("round, each into the place of the other's directory", {"a/b": ONE, "c": TWO}, {"a": TWO, "c/d": ONE}, 1),
    ("an empty file", {"a": FileState(b"")}, {"b": FileState(b"")}, 1),
    ("a link", {"a": FileState(b"x", SYMLINK)}, {"b": FileState(b"x", SYMLINK)}, 1),
    ("a link to the bytes of a file", {"a": FileState(b"x", SYMLINK)}, {"b": FileState(b"x")}, 0),
]


def loaded(tree: Tree) -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    for name, state in tree.items():
        if state.mode == SYMLINK:
            filesystem.symlink(name, os.fsdecode(state.content))
        else:
            filesystem.write_bytes(name, state.content)
            filesystem.chmod(name, 0o755 if state.mode == EXECUTABLE else 0o644)
    return filesystem


def patch_of_trees(before: Tree, after: Tree) -> bytes:
    states: list[Any] = [loaded(tree).snapshot() for tree in (before, after)]
    changes = differences(*(snapshot.state for snapshot in states))
    return patch_of(changes, lambda name: before[name].content, lambda name: after[name].content)


@needs_git
@pytest.mark.parametrize(("before", "after", "renames"), [case[1:] for case in MOVES], ids=[case[0] for case in MOVES])
def test_a_file_that_only_moved_is_a_rename_for_git(tmp_path: Path, before: Tree, after: Tree, renames: int) -> None:
    patch = patch_of_trees(before, after)
    assert patch.count(b"\nsimilarity index 100%\n") == renames
    parse_patch(patch)
    put(tmp_path, before)
    git_apply(tmp_path, patch)
    assert found(tmp_path) == after
    git_apply(tmp_path, patch, "--reverse")
    assert found(tmp_path) == before


def test_of_files_that_are_alike_those_of_one_name_are_a_rename() -> None:
    empty = FileState(b"")
    before = {f"old/{name}/__init__.py": empty for name in "ab"} | {"old/a/py.typed": empty}
    after = {path.replace("old/", "a/new/"): empty for path in before}
    renames = re.findall(rb"rename from old/(\S+)\nrename to a/new/(\S+)\n", patch_of_trees(before, after))
    assert sorted(name for _, name in renames) == sorted(os.fsencode(path.removeprefix("old/")) for path in before)
    assert {os.path.basename(old) == os.path.basename(new) for old, new in renames} == {True}


def of_files(names: set[str], states: list[FileState]) -> Tree:
    """Without those that would have to be below another one."""
    return {
        name: state
        for name, state in zip(sorted(names), states, strict=False)
        if not any(name.startswith(f"{other}/") for other in names)
    }


TREES = st.builds(
    of_files,
    st.sets(st.sampled_from(["a", "b", "a/b", "a/c", "b/a", "c/a", "c/a/b", "d"])),
    st.lists(
        st.sampled_from([ONE, TWO, FileState(ONE.content, EXECUTABLE), FileState(b"x", SYMLINK)]),
        min_size=8,
        max_size=8,
    ),
)


@needs_git
@settings(deadline=None, max_examples=25)
@given(before=TREES, after=TREES)
def test_git_goes_between_any_two_trees_of_files_that_are_alike(
    tmp_path_factory: pytest.TempPathFactory, before: Tree, after: Tree
) -> None:
    root = tmp_path_factory.mktemp("tree")
    put(root, before)
    if patch := patch_of_trees(before, after):
        git_apply(root, patch)
        assert found(root) == after


def test_a_hunk_has_three_lines_around_a_change_and_no_more() -> None:
    old = b"".join(b"%d\n" % n for n in range(20))
    text = unified_diff("n", FileState(old), FileState(old.replace(b"9\n", b"nine\n", 1))).decode()
    assert text.splitlines()[4:] == ["@@ -7,7 +7,7 @@", " 6", " 7", " 8", "-9", "+nine", " 10", " 11", " 12"]


def test_changes_that_are_near_share_a_hunk_and_others_do_not() -> None:
    lines = [b"%d\n" % n for n in range(40)]
    changed = lines.copy()
    changed[5], changed[12], changed[30] = b"x\n", b"y\n", b"z\n"
    patch = unified_diff("n", FileState(b"".join(lines)), FileState(b"".join(changed)))
    assert patch.count(b"\n@@ ") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([b"%d\n" % n for n in range(50_000)], [b"x%d\n" % n if n % 2 else b"%d\n" % n for n in range(50_000)]),
        ([b"a\n", b"b\n"] * 40_000, [b"b\n", b"a\n"] * 39_999),
        ([b"%d\n" % (n % 7) for n in range(30_000)], [b"%d\n" % (n % 5) for n in range(30_000)]),
    ],
    ids=["every second line", "two lines", "few lines, often"],
)
def test_a_large_file_is_compared(old: list[bytes], new: list[bytes]) -> None:
    # A fraction of a second; difflib alone takes so many minutes that the run would be ended.
    patch = unified_diff("n", FileState(b"".join(old)), FileState(b"".join(new)))
    assert apply_patch(parse_patch(patch)[0], b"".join(old)).content == b"".join(new)
