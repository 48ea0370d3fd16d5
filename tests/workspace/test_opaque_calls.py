"""Opaque calls on a disk workspace: handlers that run programs which change files behind the filesystem's back."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import capture_tree, lasting, shape
from killing import as_nobody, killed_at
from mounts import small_disk
from real_git import git

from ringfence import Binding, Filesystem, InMemoryFilesystem, Prompt, PromptTemplate, Session
from ringfence.adapters import ScriptedAdapter, ToolCallResult, ToolExecutor
from ringfence.errors import TransactionError
from ringfence.prompt import (
    DeletionLimitPolicy,
    MarkdownSection,
    PathPolicy,
    ProtectedFilesPolicy,
    Tool,
    ToolContext,
    ToolResult,
    ToolsSection,
)
from ringfence.runtime import CallInfo, CallLock, Change, Receipt, RollbackReport, Transactional, tool_transaction
from ringfence.testing import HeldCall, held_call
from ringfence_sandbox import CallProcess, HostFilesystem, ScanLimits, Workspace
from ringfence_tools import VfsToolsSection

ODD = os.fsdecode(b"caf\xe9 \n")


def build(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (root / "d/b.txt").write_text("b\n")
    (root / "d/e/c.txt").write_text("c\n")
    (root / "d/big").write_text("big\n" * 1000)
    (root / ODD).write_text("odd")
    (root / "one").write_text("linked")
    os.link(root / "one", root / "d/two")
    os.symlink("../a.txt", root / "d/link")
    (root / ".gitignore").write_text("ignored\n")
    (root / "ignored").write_text("ignored, and covered")
    subprocess.run(["git", "init", "-q", "nested"], cwd=root, check=True)
    os.chmod(root / "d/e/c.txt", 0o640)
    os.chmod(root / "d/b.txt", 0o4755)
    for path in ("d/e", "d", "empty", "a.txt", ""):
        os.utime(root / path, ns=(10**18, 10**18 + len(path)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    build(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def files(workspace: Workspace) -> HostFilesystem:
    return workspace.filesystem


def sh(root: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)


SCRIPTS: dict[str, tuple[str, set[str]]] = {
    "a new file": ("echo new > n; echo new > d/n", {"n", "d/n"}),
    "a file in place": ("echo more >> d/big; printf x > a.txt", {"d/big", "a.txt"}),
    "a file replaced": ("sed -i s/b/B/ d/b.txt", {"d/b.txt"}),
    "same size, same mtime": (
        "touch -r a.txt ref; printf 'ONE\\r\\nTWO\\r\\n' > a.txt; touch -r ref a.txt; rm ref",
        {"a.txt"},
    ),
    "a file moved": ("mv d/big moved", {"d/big", "moved"}),
    "a directory moved": ("mv d/e elsewhere", {"d/e", "d/e/c.txt", "elsewhere", "elsewhere/c.txt"}),
    "two files exchanged": ("mv a.txt t; mv d/b.txt a.txt; mv t d/b.txt", {"a.txt", "d/b.txt"}),
    "a directory removed": ("rm -rf d/e empty", {"d/e", "d/e/c.txt", "empty"}),
    "a file where a directory was": ("rmdir empty; echo x > empty", {"empty"}),
    "a directory where a file was": ("mv a.txt t; mkdir a.txt; mv t a.txt/a.txt", {"a.txt", "a.txt/a.txt"}),
    "a directory for a link": ("mv d r; ln -s r l; rm -r r; mkdir d", set()),
    "copies": ("cp -a d copy; rm -r copy/e", set()),
    "modes": ("chmod 700 d d/e; chmod 600 d/e/c.txt; chmod u-s d/b.txt", {"d", "d/e", "d/e/c.txt", "d/b.txt"}),
    "times": ("touch -d 2001-01-01 a.txt d empty d/link", set()),
    "a hard link cut": ("cp one c; mv c one", set()),
    "a hard link changed": ("echo more >> one", {"one", "d/two"}),
    "a hard link more": ("ln a.txt again; ln -f d/b.txt d/e/c.txt", {"again", "d/e/c.txt"}),
    "a hard link more, and its time": ("ln -f a.txt d/b.txt; touch a.txt", {"d/b.txt"}),
    "a hard link more, and its bits": ("ln -f a.txt d/b.txt; chmod 600 a.txt", {"a.txt", "d/b.txt"}),
    "a symlink": ("ln -sfn nowhere d/link; ln -s /etc out", {"d/link", "out"}),
    "a repository": ("cd nested; echo x > f; git add f; git config user.name x; rm .git/description", set()),
    "odd names": ('for f in caf*; do mv "$f" "$f.moved"; echo x > "$f"; done', set()),
    "everything": ("rm -rf ./* ./.[!.]*; mkdir -p d/e; echo x > d/e/c.txt; touch new", set()),
    "sockets and pipes": (
        f"mkfifo pipe; {sys.executable} -c 'import socket; socket.socket(1).bind(\"s\")'",
        {"pipe", "s"},
    ),
    "another owner": ("chown 12345:54321 a.txt d", set()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_is_rolled_back_or_a_step_with_exact_paths(root: Path, workspace: Workspace, name: str) -> None:
    script, changed = SCRIPTS[name]
    before = shape(root)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        assert shape(root) != before
        report = call.rollback()
    assert (shape(root), report.conflicts) == (before, ())
    with held_call(workspace.filesystem, opaque=True) as call:
        assert call.changed() == []
        sh(root, script)
        after = shape(root)
        found = {change.path for change in call.changed()}
        step = call.commit()
    assert shape(root) == after
    assert not changed or found == changed == set(step.paths if step else ())
    if step is not None:
        assert [entry.kind for entry in workspace.log()] == ["step", "baseline"]
        workspace.undo()
        kept = {path for path in ("pipe", "s") if path in after}  # no history has what they are
        now = shape(root)
        assert {path: (one.kind, one.content, one.mode) for path, one in now.items() if path not in kept} == {
            path: (one.kind, one.content, one.mode) for path, one in before.items()
        }


def test_an_undo_and_a_restore_leave_paths_that_are_too_long_and_do_the_rest(root: Path, workspace: Workspace) -> None:
    name = "n" * 240
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, f"rm a.txt; for i in $(seq 18); do mkdir {name}; cd -P {name}; done; echo deep > x")
        call.commit()
    for go_back in (workspace.undo, lambda: workspace.restore(0)):
        done = go_back()
        assert (done.outcomes["a.txt"], done.outcomes[f"{name}/" * 18 + "x"]) == ("restored", "kept")
        assert "more than 4096 bytes" in done.reasons[f"{name}/" * 18 + "x"]
        assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"
        (root / "a.txt").unlink()


def test_an_undo_brings_the_two_names_of_one_link_back(root: Path, workspace: Workspace) -> None:
    os.link(root / "d/link", root / "again", follow_symlinks=False)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "rm d/link again")
        call.commit()
    workspace.undo()
    assert os.readlink(root / "again") == "../a.txt"
    assert (root / "again").lstat().st_ino == (root / "d/link").lstat().st_ino


def test_a_directory_too_deep_to_be_taken_in_goes_where_a_file_was(root: Path, files: HostFilesystem) -> None:
    deep = root.joinpath(*["d"] * 254)
    deep.mkdir(parents=True)
    (deep / "last").write_text("a file, at the greatest depth")
    before = (deep / "last").lstat()
    with held_call(files, opaque=True) as call:
        (deep / "last").unlink()
        (deep / "last").mkdir()
        (deep / "last/below").write_text("too deep")
        assert call.rollback().conflicts == ()
    assert (deep / "last").read_text() == "a file, at the greatest depth"
    assert (deep / "last").lstat().st_mtime_ns == before.st_mtime_ns


def test_an_inode_that_only_moved_is_moved_back(root: Path, files: HostFilesystem) -> None:
    before = capture_tree(root)
    with held_call(files, opaque=True) as call:
        sh(root, "mv d/big moved; mv d/e e; mv a.txt t; mv one a.txt; mv t one; chmod 600 d/b.txt")
        call.rollback()
    now = capture_tree(root)
    assert {path for path in before if now[path].inode != before[path].inode} <= {"d/e"}


def test_an_append_only_file_is_a_conflict_and_the_rest_is_rolled_back(root: Path, files: HostFilesystem) -> None:
    if (
        os.geteuid() != 0
        or subprocess.run(["chattr", "+a", root / "d/big"], check=False, capture_output=True).returncode
    ):
        pytest.skip("only root, on a filesystem that has such attributes, gives them")
    try:
        before = shape(root)
        with held_call(files, opaque=True) as call:
            sh(root, "echo more >> d/big; rm a.txt; echo new > new; rm -r d/e")
            report = call.rollback()
        differing = {path for path, one in shape(root).items() if before.get(path) != one}
        assert (differing, report.conflicts) == ({"d/big"}, ("d/big",))
        assert "d/big may not be replaced or removed (Operation not permitted): see `lsattr`" in report.notes
    finally:
        sh(root, "chattr -a d/big")


# Somebody else


def test_what_a_person_wrote_before_the_call_stays_and_is_not_the_calls(root: Path, workspace: Workspace) -> None:
    (root / "theirs").write_text("person")
    (root / "a.txt").write_text("person")
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "echo call >> a.txt; rm theirs")
        call.rollback()
    assert (root / "a.txt").read_text() == (root / "theirs").read_text() == "person"
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "echo call > mine")
        call.commit()
    kinds = [(entry.kind, entry.paths) for entry in workspace.log()]
    assert kinds[:2] == [("step", ("mine",)), ("external", ("a.txt", "theirs"))]


def test_what_a_person_writes_meanwhile_is_kept_and_listed(root: Path, workspace: Workspace) -> None:
    with held_call(workspace.filesystem, opaque=True) as call:
        (root / "theirs").write_text("an hour of work")
        [note] = call.rollback().notes
    assert not (root / "theirs").exists()
    assert note == "rolled back: theirs; what they were is kept as aborted/1"
    [entry] = workspace.aborted()
    assert (entry.number, entry.kind, entry.paths) == (1, "aborted", ("theirs",))
    assert b"+an hour of work" in workspace.aborted_step(1).patch
    with pytest.raises(LookupError, match="there are 1"):
        workspace.aborted_step(7)
    workspace.gc(0)
    history = root.parent / "store/history"
    assert git(history, "show", "refs/ringfence/aborted/1:files/theirs") == "an hour of work"


@pytest.mark.parametrize("script", ["touch n; rm n", "mkfifo p; rm p", "mkdir d/n; rmdir d/n", "touch empty"])
def test_a_directory_s_time_alone_is_no_change(root: Path, workspace: Workspace, script: str) -> None:
    before = shape(root)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        assert call.changed() == []
        report = call.rollback()
    assert shape(root) == before
    assert report.notes == report.conflicts == ()
    assert workspace.aborted() == []


def test_the_root_is_said_where_it_is_more_than_its_time(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "chmod 711 .; chmod 711 d; touch empty")
        [note] = call.rollback().notes
    assert shape(root) == before
    assert note == "rolled back: the root, d; what they were is kept as aborted/1"


def test_what_a_person_writes_after_the_call_stays(root: Path, files: HostFilesystem) -> None:
    with held_call(files, opaque=True) as call:
        sh(root, "echo call > a.txt; echo call > d/b.txt; mkdir new; echo call > new/call; rm one")
        call.changed()
        (root / "d/b.txt").write_text("person")
        (root / "new/person").write_text("person")
        (root / "one").write_text("person")
        (root / "theirs").write_text("person")
        report = call.rollback()
    assert report.conflicts == ("d/b.txt", "new", "one")
    for path in report.conflicts:
        assert path == "new" or (root / path).read_text() == "person"
    assert (root / "new/person").exists()
    assert not (root / "new/call").exists()
    assert (root / "theirs").read_text() == "person"
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_a_hard_link_comes_back_though_another_name_is_in_conflict(root: Path, files: HostFilesystem) -> None:
    before = shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, "rm -r d")
        call.changed()
        (root / "d").write_text("person")
        report = call.rollback()
    assert {"d", "d/two"} <= set(report.conflicts)
    assert "one" not in report.conflicts
    assert (root / "d").read_text() == "person"
    assert replace(shape(root)["one"], links=()) == replace(before["one"], links=())


def test_paths_that_did_not_change_are_not_touched(root: Path, files: HostFilesystem) -> None:
    def stamps() -> dict[str, int]:
        return {path: os.lstat(root / path).st_ctime_ns for path in capture_tree(root) if path}

    before = stamps()
    with held_call(files, opaque=True) as call:
        sh(root, "echo x > a.txt; mkdir new; rm d/e/c.txt")
        call.rollback()
    now = stamps()
    assert {path for path in before if now[path] != before[path]} == {"a.txt", "d/e/c.txt", "d/e"}


# What no scan takes in


@contextmanager
def limited(root: Path, most: int = 1000) -> Iterator[Workspace]:
    with Workspace.open(root, store=root.parent / "store", limits=ScanLimits(max_file_bytes=most)) as workspace:
        yield workspace


def test_a_file_above_the_limit_that_was_there_is_never_deleted_or_overwritten(root: Path) -> None:
    before = shape(root)
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "echo more >> d/big; echo x > a.txt")
        assert [change.path for change in call.changed()] == ["a.txt", "d/big"]
        notes = call.rollback().notes
    assert "d/big is not as before the call: it is not covered (too large)" in notes
    assert (root / "d/big").read_text().endswith("big\nmore\n")
    assert shape(root)["a.txt"] == before["a.txt"]


@pytest.mark.parametrize(
    "script",
    [
        "mv d/big b",
        "mv d gone",
        "mkdir n; mv d/big n/b; echo other > d/big",
        "rm d/big",
        "rm -r d",
        "echo new > n; mv n d/big",
        "rm -r d; echo file > d",
        "rm d/big twin",
        "rm -r d; mkfifo d",
        "mv d e; mkfifo d",
        "rm -r d; head -c 5000 /dev/zero > d",
        "mv d/big t; mv twin d/big; mv t twin",
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_file_above_the_limit_that_a_program_moved_or_removed_is_back(root: Path, script: str, nested: bool) -> None:
    os.link(root / "d/big", root / "twin")
    os.mkfifo(root / "pipe")
    before, inode = shape(root), (root / "d/big").stat().st_ino
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        if nested:
            with held_call(workspace.filesystem, parent=call, opaque=True) as inner:
                sh(root, script)
                assert inner.rollback().conflicts == ()
        sh(root, script)
        assert call.rollback().conflicts == ()
    assert shape(root) == before
    assert (root / "d/big").stat().st_ino == inode


@pytest.mark.parametrize(
    ("script", "named", "there"),
    [
        ("mv pipe d/pipe", ["pipe"], ["d/pipe"]),
        ("mkdir n; mv pipe n/pipe", ["pipe"], ["n/pipe"]),
        ("mv pipe d/pipe; echo new > pipe", ["pipe"], ["d/pipe"]),
        ("chmod 700 pipe d/big", ["d/big", "pipe"], ["d/big", "pipe"]),
        ("rm pipe; echo x > a.txt", ["pipe"], []),
        ("touch -d 2001-01-01 d/big pipe", ["d/big", "pipe"], ["d/big", "pipe"]),
    ],
)
def test_what_no_scan_covers_is_left_as_a_program_has_made_it_and_is_named(
    root: Path, script: str, named: list[str], there: list[str]
) -> None:
    os.mkfifo(root / "pipe")
    files = {path: one.content for path, one in shape(root).items() if (root / path).is_file()}
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        after = {path: os.lstat(root / path) for path in there}
        report = call.rollback()
    lines = [note.split()[0] for note in report.notes if "is not as before the call" in note]
    assert (lines, report.conflicts) == (named, ())
    for path, one in after.items():
        now = os.lstat(root / path)
        assert (now.st_ino, now.st_mode, now.st_mtime_ns) == (one.st_ino, one.st_mode, one.st_mtime_ns)
    assert {path: one.content for path, one in shape(root).items() if (root / path).is_file()} == files


@pytest.mark.parametrize("made", ["mkfifo d", "head -c 5000 /dev/zero > d"])
@pytest.mark.parametrize("script", ["mkdir -p d/e; echo x > d/new; echo x > d/e/c.txt", "true"])
def test_nothing_comes_back_below_a_file_that_no_scan_covers(root: Path, made: str, script: str) -> None:
    with limited(root) as workspace:
        sh(root, f"rm -r d; {made}")
        before = shape(root)
        with held_call(workspace.filesystem, opaque=True) as call:
            sh(root, f"mv d moved; {script}")
            assert call.rollback().conflicts == ()
        if made == "mkfifo d":  # it stays where it is
            before["moved"] = before.pop("d")
        assert lasting(shape(root)) == lasting(before)


@pytest.mark.parametrize(
    ("script", "theirs", "place"),
    [
        ("mv d/big moved", "d/big", "moved"),
        ("mkdir new; mv d/big new/moved; rm -r d", "d", "new/moved"),
    ],
)
def test_a_moved_large_file_stays_if_its_place_is_taken(root: Path, script: str, theirs: str, place: str) -> None:
    content = (root / "d/big").read_bytes()
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        call.changed()
        (root / theirs).write_text("person")
        report = call.rollback()
    assert {"d/big", theirs} <= set(report.conflicts)
    assert f"what was moved from d/big is still at {place}" in report.notes
    assert (root / theirs).read_text() == "person"
    assert (root / place).read_bytes() == content


def test_a_file_above_the_limit_that_a_program_removes_with_what_is_held_is_gone_and_named(root: Path) -> None:
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "rm -r d/big .ringfence*; echo x > a.txt")
        assert "d/big is not as before the call: it is not covered (too large)" in call.rollback().notes
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_a_file_above_the_limit_that_no_program_touches_is_not_said_to_have_changed(root: Path) -> None:
    with limited(root) as workspace:
        workspace.look()
        with held_call(workspace.filesystem, opaque=True) as call:
            sh(root, "echo x > a.txt")
            call.commit()
        workspace.look()
        assert workspace.left_out_since == {}
        assert os.stat(root / "d/big").st_nlink == 1


def test_a_sparse_file_above_the_limit_that_a_command_removes_comes_back_with_its_holes(root: Path) -> None:
    with (root / "d/big").open("wb") as file:
        file.write(b"head")
        file.seek(1 << 25)
        file.write(b"middle")
        file.truncate(1 << 26)
    before = shape(root)
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "rm d/big")
        assert "d/big is back in its place" in call.rollback().notes
    assert shape(root) == before
    assert (root / "d/big").stat().st_blocks * 512 < 1 << 20


def test_a_file_above_the_limit_that_a_killed_call_had_removed_is_back(root: Path) -> None:
    before = shape(root)

    def work(before: Callable[[str], None]) -> None:
        with limited(root) as workspace, held_call(workspace.filesystem, opaque=True):
            sh(root, "rm d/big")
            before("the end")

    assert killed_at(0, work)
    with limited(root) as workspace:
        assert workspace.recovered is not None
        assert "d/big is back in its place" in workspace.recovered.notes
    assert shape(root) == before


def test_what_a_call_made_above_the_limit_goes_and_is_named(root: Path) -> None:
    before = shape(root)
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "head -c 5000 /dev/zero > big; head -c 5000 /dev/zero > a.txt")
        notes = call.rollback().notes
    assert shape(root) == before
    assert [note.partition(" (")[0] for note in notes[1:]] == ["a.txt was not kept", "big was not kept"]
    assert f"5000 bytes, sha256 {hashlib.sha256(bytes(5000)).hexdigest()}" in notes[1]


def test_files_beyond_the_number_are_left_alone(root: Path) -> None:
    before = shape(root)
    with (
        Workspace.open(root, store=root.parent / "store", limits=ScanLimits(max_files=5)) as workspace,
        held_call(workspace.filesystem, opaque=True) as call,
    ):
        sh(root, "echo new > 0; echo new > d/0; echo new > zzz")
        call.rollback()
    assert shape(root) == before


# Links and names that lead elsewhere


def test_nothing_is_written_through_a_link_that_a_call_made(root: Path, files: HostFilesystem, tmp_path: Path) -> None:
    shutil.copytree(root / "d", tmp_path / "outside", symlinks=True)
    (tmp_path / "outside/b.txt").write_text("outside")
    outside, before = capture_tree(tmp_path / "outside"), shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, f"rm -r d; ln -s {tmp_path}/outside d; rm a.txt; ln -s {tmp_path}/outside/b.txt a.txt")
        call.rollback()
    assert shape(root) == before
    assert capture_tree(tmp_path / "outside") == outside


def test_a_name_outside_is_not_written_through(root: Path, files: HostFilesystem, tmp_path: Path) -> None:
    os.link(root / "a.txt", tmp_path / "outside")
    with held_call(files, opaque=True) as call:
        sh(root, "mv a.txt b; echo new > a.txt")
        call.rollback()
    assert os.path.samefile(root / "a.txt", tmp_path / "outside")
    with held_call(files, opaque=True) as call:
        sh(root, "rm a.txt")
        call.rollback()
    assert (tmp_path / "outside").read_bytes() == (root / "a.txt").read_bytes()


# Together with typed calls


def test_typed_changes_within_an_opaque_call_go_back_with_it(root: Path, files: HostFilesystem) -> None:
    before = capture_tree(root)
    with held_call(files, opaque=True) as call:
        handle = files.for_call(call)
        handle.write("a.txt", "typed")
        sh(root, "cat a.txt > copy; mv d/big big; chmod 700 d")
        handle.write("copy", "typed over it")
        handle.delete("d", recursive=True)
        handle.move("big", "d/big")
        sh(root, "echo more >> copy; rm -rf nested")
        assert {"a.txt", "copy", "d/b.txt"} <= {change.path for change in call.changed()}
        assert call.rollback().conflicts == ()
    now = capture_tree(root)
    assert {path: replace(one, inode=0) for path, one in now.items()} == {
        path: replace(one, inode=0) for path, one in before.items()
    }
    for path in ("a.txt", "d/b.txt", "d/big", "one"):
        assert now[path].inode == before[path].inode


@pytest.mark.parametrize("changed", [False, True])
def test_a_call_that_runs_programs_in_a_call_that_is_not_declared_opaque_is_refused_and_changes_nothing(
    root: Path, workspace: Workspace, changed: bool
) -> None:
    files = workspace.filesystem
    with held_call(files, call_id="outer") as outer:
        if changed:
            files.for_call(outer).write("a.txt", "outer")
        before = capture_tree(root)
        inner = HeldCall("inner", outer, opaque=True)
        with pytest.raises(TransactionError, match="opaque=True"):
            inner.join(files)
        inner.release()
        assert capture_tree(root) == before
        files.for_call(outer).write("late", "outer")
        outer.commit()
    assert workspace.steps()[-1].paths == (("a.txt", "late") if changed else ("late",))


def test_an_opaque_call_in_another_one(root: Path, workspace: Workspace) -> None:
    files, before = workspace.filesystem, shape(root)
    (root / "theirs").write_text("person")
    for end in ("rollback", "commit"):
        with held_call(files, call_id="outer", opaque=True) as outer:
            files.for_call(outer).write("a.txt", "outer")
            files.for_call(outer).write("theirs", "outer")
            with held_call(files, call_id="failed", parent=outer, opaque=True) as inner:
                sh(root, "echo inner >> a.txt; rm -r d")
                inner.rollback()
            assert (root / "a.txt").read_text() == "outer"
            with held_call(files, call_id="inner", parent=outer, opaque=True) as inner:
                sh(root, "echo inner > i; rm d/b.txt; echo inner >> a.txt")
                assert [change.path for change in inner.changed()] == ["a.txt", "d/b.txt", "i"]
                inner.commit()
            files.for_call(outer).write("late", "outer")
            changed = [change.path for change in outer.changed()]
            assert changed == ["a.txt", "d/b.txt", "i", "late", "theirs"]
            getattr(outer, end)()
        if end == "rollback":
            assert (root / "theirs").read_text() == "person"
            now = shape(root)
            del now["theirs"]
            assert {path: one for path, one in now.items() if path} == {
                path: one for path, one in before.items() if path
            }
    assert workspace.steps()[-1].paths == ("a.txt", "d/b.txt", "i", "late", "theirs")
    assert [(entry.kind, entry.paths) for entry in workspace.log()][1] == ("external", ("theirs",))
    workspace.undo()
    assert (root / "theirs").read_text() == "person"
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


NESTED = {
    "a program, then a tool": "opaque => ! echo inner > d/b.txt => commit => write late/n => write d/b.txt",
    "a program, then one that fails": "opaque => ! echo inner > d/b.txt => commit => "
    "opaque => ! rm d/b.txt; touch d/n => rollback",
    "a program between two writes of one file": "opaque => write a.txt => "
    "! echo program > a.txt => commit => write a.txt",
    "the middle one of three calls goes back": "write a.txt => opaque => write d/b.txt => delete d/e => opaque => "
    "write late => opaque => ! rm -r d one late => commit => commit => rollback => "
    "! [ -e one ] && [ -e d/e/c.txt ] && [ ! -e late ] && grep -q by a.txt && ! grep -q by d/b.txt => write d/b.txt",
    "links that were brought back before": "opaque => ! rm one d/two => rollback => write one => opaque => "
    "! echo x > d/two => commit",
    "what was deleted before does not come back": "delete a.txt => delete d/e => opaque => opaque => "
    "! echo new > n; echo new > d/n => rollback => ! [ ! -e a.txt ] && [ ! -e d/e ] => commit",
    "a directory has its time back": "opaque => ! touch -r d ref; rm d/b.txt; touch -r ref d; rm ref => commit",
    "inodes of directories change places": "write p/q/f => opaque => opaque => "
    "! mv p/q t; rmdir p; mv t p => rollback => ! chmod 700 p p/q => rollback",
    "another name of a displaced file": "write one => opaque => ! echo x > d/two => "
    "rollback => opaque => ! rm -r d => rollback",
    "a program in the way of an inner rollback": "opaque => typed => delete a.txt => "
    "! echo program > a.txt => conflict => rollback",
    "what a program made is deleted in vain": "opaque => ! echo new > n => commit => typed => delete n => rollback",
    "an empty program in a call that fails": "opaque => delete a.txt => opaque => "
    "commit => rollback => opaque => commit",
    "a command removes what tools displaced": "opaque => write a.txt => ! rm -rf .ringfence* => "
    "write d/b.txt => ! mkdir away; mv .ringfence* away => commit",
}
DISPLACED = (
    "write a.txt => write a.txt => write one => write d/e/c.txt => delete d/e => delete d/link => "
    "write d/b.txt => write new/n => delete new => opaque => ! held=$(echo .ringfence-hold*); "
)
REACHED = {
    "overwrites": "for file in $(find $held -type f); do echo damaged > $file; done",
    "overwrites and hides it": "for file in $(find $held -type f); do cp -p $file t; tr 'a-z' 'b-za' < t > $file; "
    "touch -r t $file; rm t; done",
    "chmod": "chmod -R 700 $held",
    "replaces files": "for file in $(find $held -type f); do cp $file t; echo x >> t; mv t $file; done",
    "replaces it": "cp -r $held t; rm -r $held; mv t $held",
    "removes all": "rm -r $held",
    "puts a link there": "mv $held t; ln -s t $held",
    "moves all": "mkdir away; mv $held away",
    "moves into the tree": "for one in $held/*; do mv $one taken-$(basename $one); done",
    "makes more": "for one in $(find $held -type d); do echo new > $one/new; mkdir $one/77; ln -s x $one/88; done",
    "links": "for file in $(find $held -type f); do ln $file other-$(basename $file); echo x > $file; done",
    "another name": "echo through the tree > d/two; chmod 600 d/two",
    "everything": "rm -rf $held *",
}
for name, script in REACHED.items():
    for end in ("rollback", "commit"):
        NESTED[f"{name} what tools displaced, {end}"] = f"{DISPLACED}{script} => {end} => write late"


def play(root: Path, files: HostFilesystem, script: str) -> Sequence[str]:
    """Calls in calls, step by step. `typed` and `opaque` begin one, `commit`, `rollback` and `conflict` (a rollback
    that meets one) end it; `!` runs a command. The conflicts of the rollback of the outermost call."""
    calls = [HeldCall("outer", opaque=True)]
    calls[0].join(files)
    for number, line in enumerate(script.split(" => ")):
        verb, _, what = line.partition(" ")
        match verb:
            case "typed" | "opaque":
                calls.append(HeldCall(f"call-{number}", calls[-1], opaque=verb == "opaque"))
                calls[-1].join(files)
            case "commit":
                assert not [one.path for one in calls[-1].changed() if one.path.startswith(".ringfence")]
                calls[-1].commit()
                calls.pop().release()
            case "rollback" | "conflict":
                assert bool(calls[-1].rollback().conflicts) == (verb == "conflict")
                calls.pop().release()
            case "write":
                files.for_call(calls[-1]).write(what, f"by {number}")
            case "delete":
                files.for_call(calls[-1]).delete(what, recursive=True)
            case "!":
                sh(root, what)
            case _:
                raise AssertionError(line)
    [outer] = calls
    outer.changed()
    report = outer.rollback()
    outer.release()
    return report.conflicts


@pytest.mark.parametrize("name", NESTED)
def test_programs_and_tools_in_calls_in_calls_are_all_rolled_back(root: Path, workspace: Workspace, name: str) -> None:
    before = shape(root)
    assert play(root, workspace.filesystem, NESTED[name]) == ()
    assert shape(root) == before
    assert [entry.kind for entry in workspace.log()] == ["baseline"]


def test_a_displaced_file_that_a_program_takes_is_in_its_step(root: Path, workspace: Workspace) -> None:
    with held_call(workspace.filesystem, call_id="outer", opaque=True) as outer:
        files = workspace.filesystem.for_call(outer)
        files.write("a.txt", "outer")
        files.delete("d/e", recursive=True)
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "mkdir theirs; mv $(find .ringfence-hold*/[0-9]* -type f | head -n 1) theirs/taken")
            inner.commit()
        outer.commit()
    assert workspace.steps()[-1].paths == ("a.txt", "d/e", "d/e/c.txt", "theirs", "theirs/taken")
    assert (root / "theirs/taken").exists()
    assert not list(root.glob(".ringfence*/[0-9]*"))
    workspace.undo()
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


@pytest.mark.parametrize("script", ["for file in $held/*; do echo x >> $file; done", "truncate -s 0 other"])
def test_a_displaced_large_file_that_a_program_reaches_comes_back_as_it_is_now(root: Path, script: str) -> None:
    (root / "large").write_bytes(b"l" * 5000)
    os.link(root / "large", root / "other")
    with limited(root, 4500) as workspace, held_call(workspace.filesystem, call_id="outer", opaque=True) as outer:
        workspace.filesystem.for_call(outer).delete("large")
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "held=$(echo .ringfence-hold*); " + script)
            inner.commit()
        inode = (root / "other").stat().st_ino
        report = outer.rollback()
    assert "large is not as before the call: it is not covered (too large)" in report.notes
    assert (root / "large").stat().st_ino == inode


# Through tools


@dataclass(frozen=True)
class Script:
    text: str


def shell(root: Path, *, read_only: bool = False) -> Tool[Script, Script]:
    def run(params: Script, *, context: ToolContext) -> ToolResult[Script]:
        ended = subprocess.run(["sh", "-c", params.text], cwd=root, capture_output=True, text=True, check=False)
        if ended.returncode == 7:
            raise RuntimeError("a broken handler")
        if ended.returncode:
            return ToolResult.error(f"exit code {ended.returncode}")
        return ToolResult.ok(params)

    return Tool[Script, Script](
        name="shell", description="Run a script.", handler=run, opaque=True, read_only=read_only
    )


@contextmanager
def executor(
    files: Filesystem, *tools: Tool[Any, Any], adapter: Any = None, policies: Sequence[Any] = ()
) -> Iterator[ToolExecutor]:
    session = Session()
    sections = [
        VfsToolsSection(session=session, filesystem=files),
        MarkdownSection(title="Shell", key="shell", template="Run.", tools=list(tools)),
    ]
    prompt = Prompt(PromptTemplate(ns="tests", key="opaque", sections=sections, policies=policies))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session, adapter=adapter)


def execute(run: ToolExecutor, script: str) -> ToolCallResult:
    return run.execute("shell", {"text": script})


def test_an_opaque_tool_is_a_transaction(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    with executor(workspace.filesystem, shell(root)) as run:
        for script in ("echo x > a.txt; exit 1", "rm -r d; exit 7"):
            answer = execute(run, script)
            assert answer.receipt.outcome == "failed"
            assert shape(root) == before
            assert "rolled back: " in answer.text
            assert [change.path for change in answer.receipt.changes] != []
        answer = execute(run, "echo x > a.txt; rm d/b.txt")
        assert answer.receipt.outcome == "committed"
        assert [(change.kind, change.path) for change in answer.receipt.changes] == [
            ("modified", "a.txt"),
            ("deleted", "d/b.txt"),
        ]
        assert answer.receipt.commit == workspace.steps()[-1].commit
        quiet = execute(run, "cat a.txt")
        assert (quiet.receipt.commit, list(quiet.receipt.changes)) == (None, [])
    assert [step.paths for step in workspace.steps()] == [("a.txt", "d/b.txt")]
    assert [entry.tool for entry in workspace.aborted()] == ["shell", "shell"]


@pytest.mark.parametrize(
    ("policy", "denied", "why"),
    [
        (ProtectedFilesPolicy(), "echo KEY=1 > d/.env", "d/.env is where secrets are kept"),
        (ProtectedFilesPolicy(), "cd nested; git config user.name x", "nested/.git/config is git's own data"),
        (ProtectedFilesPolicy(), "mv nested moved", "moved/.git is git's own data"),
        (ProtectedFilesPolicy(), "ln -s ../d nested/.GIT", "nested/.GIT is git's own data"),
        (ProtectedFilesPolicy(), "rm -r nested/.git", "is git's own data"),
        (ProtectedFilesPolicy(), "mkdir -p .github/workflows; echo on > .github/workflows/x", ".github/workflows"),
        (
            ProtectedFilesPolicy(),
            "mkdir .github; ln -s ../d .github/workflows",
            ".github/workflows must not be created",
        ),
        (ProtectedFilesPolicy(), "chmod 600 nested/.git/HEAD", "nested/.git/HEAD is git's own data"),
        (PathPolicy(deny=["d/two"]), "echo more >> one", "d/two must not be modified"),
        (PathPolicy(deny=["d/e"]), "mv d/e elsewhere", "d/e must not be deleted"),
        (PathPolicy(deny=["d/e"]), "rm -r d; ln -s nested d", "d must not become a link"),
        (PathPolicy(deny=["d/b.txt"]), "touch -r d/b.txt r; printf 'B\n' > d/b.txt; touch -r r d/b.txt", "d/b.txt"),
        (PathPolicy(deny=["pipe"]), "mkfifo pipe", "pipe must not be created"),
        (PathPolicy(allow=["d"]), "echo x > d/n; echo x > n", "n is not among what may be changed"),
        (DeletionLimitPolicy(max_files=1), "rm d/b.txt; : > a.txt", "2 files removed"),
    ],
)
def test_an_effect_policy_denies_a_program(
    root: Path, workspace: Workspace, policy: Any, denied: str, why: str
) -> None:
    before = shape(root)
    with executor(workspace.filesystem, shell(root), policies=[policy]) as run:
        answer = execute(run, denied)
        assert (answer.result.success, answer.receipt.outcome) == (False, "denied")
        assert f"denied by the policy {policy.name}: " in answer.text
        assert why in answer.text
        assert "rolled back: " in answer.text
        assert shape(root) == before
        assert workspace.steps() == []
        assert execute(run, "mv d/big d/c; echo x > d/n").result.success
    assert [step.paths for step in workspace.steps()] == [("d/big", "d/c", "d/n")]


def test_a_read_only_opaque_tool_that_changes_something_fails(root: Path, files: HostFilesystem) -> None:
    before = shape(root)
    with executor(files, shell(root, read_only=True)) as run:
        assert not execute(run, "echo x > a.txt").result.success
        assert shape(root) == before
        assert execute(run, "cat a.txt").result.success


def test_what_an_opaque_call_changed_must_be_read_again(root: Path, files: HostFilesystem) -> None:
    with executor(files, shell(root)) as run:
        run.call("read_file", {"file_path": "a.txt"})
        assert run.call("write_file", {"file_path": "a.txt", "content": "known\n"}).success
        assert execute(run, "touch -r a.txt r; printf 'KNOWN\n' > a.txt; touch -r r a.txt; rm r").result.success
        denied = run.call("write_file", {"file_path": "a.txt", "content": "over it\n"})
        assert "has changed since it was read" in denied.message
        assert (root / "a.txt").read_text() == "KNOWN\n"
        run.call("read_file", {"file_path": "a.txt"})
        assert run.call("write_file", {"file_path": "a.txt", "content": "over it\n"}).success


@pytest.mark.parametrize("fails", [True, False])
def test_a_handler_that_evaluates_a_child_prompt(root: Path, workspace: Workspace, fails: bool) -> None:
    before = shape(root)

    def act(params: Script, *, context: ToolContext) -> ToolResult[Script]:
        sh(root, "echo outer > o")
        child_section = VfsToolsSection(session=context.session, filesystem=workspace.filesystem)
        tools = MarkdownSection(title="Shell", key="shell", template="Run.", tools=[shell(root)])
        child = Prompt(PromptTemplate(ns="tests", key="child", sections=[child_section, tools]))
        assert context.adapter is not None
        context.adapter.evaluate(child, session=context.session)
        sh(root, "echo more >> w")
        return ToolResult.error("no") if fails else ToolResult.ok(params)

    turns = [
        {"tool_calls": [{"name": "write_file", "arguments": {"file_path": "w", "content": "typed\n"}}]},
        {"tool_calls": [{"name": "shell", "arguments": {"text": "rm a.txt; exit 1"}}]},
        {"tool_calls": [{"name": "shell", "arguments": {"text": "echo shell > s"}}]},
        {"text": "done"},
    ]
    tool = Tool[Script, Script](name="act", description="Act.", handler=act, opaque=True)
    with executor(workspace.filesystem, tool, adapter=ScriptedAdapter(turns)) as run:
        answer = run.execute("act", {"text": ""})
        assert answer.result.success is not fails
    if fails:
        assert shape(root) == before
        assert workspace.steps() == []
    else:
        assert (root / "w").read_text() == "typed\nmore\n"
        assert [step.paths for step in workspace.steps()] == [("o", "s", "w")]


def test_a_transaction_of_ones_own_may_be_opaque(root: Path, workspace: Workspace) -> None:
    @dataclass(frozen=True)
    class Resources:
        participants: tuple[HostFilesystem, ...]

    with tool_transaction(Session(), Resources((workspace.filesystem,)), tag="mine", opaque=True):
        sh(root, "echo x > n")
    before = shape(root)
    with (
        pytest.raises(subprocess.CalledProcessError),
        tool_transaction(Session(), Resources((workspace.filesystem,)), opaque=True),
    ):
        sh(root, "rm n; exit 3")
    assert shape(root) == before
    assert [(step.tool, step.paths) for step in workspace.steps()] == [("mine", ("n",))]


def test_a_process_is_noted_only_within_an_opaque_call(root: Path, files: HostFilesystem) -> None:
    process = CallProcess.running(os.getpid(), "a test")
    with pytest.raises(TransactionError, match="while an opaque call runs"):
        files.note_process(process)
    with held_call(files) as call:
        with pytest.raises(TransactionError):
            files.for_call(call).note_process(process)
        call.rollback()
    with held_call(files, opaque=True) as call:
        files.for_call(call).note_process(process)
        call.rollback()
    assert process.lives


# Opening and space


def test_a_filesystem_alone_leaves_a_store_that_a_workspace_goes_on_with(root: Path) -> None:
    with HostFilesystem(root, store=root.parent / "store") as files:
        with held_call(files, opaque=True) as call:
            sh(root, "echo x > n; echo y > a.txt")
            call.commit()
        files.write("typed", "x")
    with Workspace.open(root, store=root.parent / "store") as workspace:
        assert next((entry.kind, entry.paths) for entry in workspace.log()) == ("external", ("typed",))
        assert [step.paths for step in workspace.steps()] == [("a.txt", "n")]


@pytest.mark.parametrize("where", ["root", "root and store"])
def test_a_full_disk_keeps_nothing_from_being_taken_back(tmp_path: Path, where: str) -> None:
    with small_disk(tmp_path / "small", "4m") as small:
        root = small / "root"
        root.mkdir()
        build(root)
        before = shape(root)
        store = (small if where == "root and store" else tmp_path) / "store"
        with HostFilesystem(root, store=store) as files, held_call(files, opaque=True) as call:
            sh(
                root,
                "echo x >> d/big; rm a.txt; for n in 1 2 3; do cat /dev/urandom > fill$n || true; done 2>/dev/null",
            )
            assert os.statvfs(root).f_bavail == 0
            report = call.rollback()
        assert shape(root) == before
        assert report.conflicts == ()
        if where == "root and store":
            assert any("want of space" in note or "could not be kept" in note for note in report.notes)


def test_without_room_for_the_state_before_it_a_call_does_not_begin(root: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4m") as small, HostFilesystem(root, store=small / "store") as files:
        (root / "incompressible").write_bytes(os.urandom(8 << 20))
        before = shape(root)
        with executor(files, shell(root)) as run:
            answer = execute(run, "echo x > a.txt")
            assert "No space left" in answer.text
            assert shape(root) == before
            (root / "incompressible").unlink()
            assert execute(run, "echo x > a.txt").result.success
        assert (root / "a.txt").read_text() == "x\n"


def test_what_is_mounted_in_a_workspace_is_left_alone(root: Path, tmp_path: Path) -> None:
    with small_disk(root / "mounted", "4m"):
        (root / "mounted/before").write_text("mounted")
        before = shape(root)
        with Workspace.open(root, store=tmp_path / "store") as workspace:
            assert workspace.left_out == {"mounted": "mounted"}
            with held_call(workspace.filesystem, opaque=True) as call:
                sh(root, "echo x > mounted/new; rm a.txt; mv d/b.txt mounted/b.txt")
                call.rollback()
        after = shape(root)
        assert after.keys() - before.keys() == {"mounted/new", "mounted/b.txt"}
        assert {path: one for path, one in after.items() if "mounted" not in path} == {
            path: one for path, one in before.items() if "mounted" not in path
        }


def test_no_program_runs_where_nothing_could_take_back_what_it_changes(root: Path) -> None:
    def runs_on(files: Filesystem) -> ToolCallResult:
        with executor(files, shell(root)) as run:
            return execute(run, "echo x > made")

    before = shape(root)
    with HostFilesystem(root, read_only=True) as only_looks:
        for files in (only_looks, InMemoryFilesystem()):
            assert "tracks_external_writes" in runs_on(files).text
    assert shape(root) == before


class Database(Transactional):
    """A participant that outlives the process and has no files."""

    durable = True
    rollback_only = True
    lock = CallLock("the database")

    def begin(self, call: CallInfo) -> None: ...

    def changes(self, mark: object) -> Sequence[Change]:
        return ()

    def commit(self, mark: object, receipt: Receipt) -> None: ...

    def rollback(self, mark: object) -> RollbackReport:
        return RollbackReport()


def fails_on(root: Path, resources: dict[type[Any], object]) -> ToolCallResult:
    prompt = Prompt[None](ns="tests", key="bound", sections=[ToolsSection(title="Tools", tools=[shell(root)])])
    with prompt.bind(resources=resources).resources:
        return execute(ToolExecutor(prompt=prompt, session=Session()), "echo x > made; exit 1")


def test_directories_that_a_user_who_is_not_root_locked_are_opened_up_again(root: Path) -> None:
    before = {path: (one.content, one.mode & 0o777) for path, one in shape(root).items()}

    def work() -> None:
        opened = Workspace.open(root, store=root.parent / "store")
        with opened as workspace, held_call(workspace.filesystem, opaque=True) as call:
            (root / "d/e/new").touch()
            (root / "d/e/c.txt").write_text("changed")
            (root / "mine/sub").mkdir(parents=True)
            (root / "mine/sub/f").touch()
            for path, mode in (("d/e/c.txt", 0), ("d/e", 0o500), ("d", 0), ("mine/sub", 0)):
                os.chmod(root / path, mode)
            assert call.rollback().conflicts == ()

    as_nobody(work, root.parent)
    assert {path: (one.content, one.mode & 0o777) for path, one in shape(root).items()} == before


@pytest.mark.parametrize(
    ("own", "tracks"), [({}, False), ({"read_only": False}, False), ({"tracks_external_writes": True}, True)]
)
def test_a_durable_participant_says_whether_it_tracks_programs(root: Path, own: dict[str, bool], tracks: bool) -> None:
    before = shape(root)
    participant = type("Own", (Database,), {"rollback_only": not own, **own})()
    assert ("tracks_external_writes" in fails_on(root, {Database: participant}).text) is not tracks
    assert (shape(root) == before) is not tracks  # it was to take back what was made


@pytest.mark.parametrize("lazy", [True, False], ids=["made when it is asked for", "bound as something else"])
def test_a_filesystem_sees_what_programs_change_however_it_is_bound(root: Path, lazy: bool) -> None:
    before = shape(root)
    with HostFilesystem(root, store=root.parent / "store") as files:
        bound = {Filesystem: Binding(Filesystem, lambda _: files)} if lazy else {HostFilesystem: files}
        assert "rolled back: made" in fails_on(root, dict(bound)).text
    assert shape(root) == before
