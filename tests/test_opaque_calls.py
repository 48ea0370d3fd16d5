"""Opaque calls on a disk workspace: handlers that run programs which change files behind the filesystem's back."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import CapturedPath, capture_tree
from killing import killed_at

from ringfence import Binding, Filesystem, InMemoryFilesystem, Prompt, PromptTemplate, Session
from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.adapters.tool_executor import ToolCallResult
from ringfence.errors import TransactionError
from ringfence.participants import CallInfo, CallLock, Change, RollbackReport, Transactional
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
from ringfence.runtime import Receipt, tool_transaction
from ringfence.testing import held_call
from ringfence_sandbox import CallProcess, HostFilesystem, ScanLimits, Workspace
from ringfence_sandbox.opaque.owner_stamp import OwnerStamp
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


@pytest.fixture(params=["a workspace", "a filesystem alone"])
def files(root: Path, request: pytest.FixtureRequest) -> Iterator[HostFilesystem]:
    if request.param == "a workspace":
        with Workspace.open(root, store=root.parent / "store") as workspace:
            yield workspace.filesystem
    else:
        with HostFilesystem(root, store=root.parent / "store") as files:
            yield files


def sh(root: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)


def shape(root: Path) -> dict[str, CapturedPath]:
    """All that a rollback brings back; which inode it is, is no part of that."""
    return {path: replace(one, inode=0) for path, one in capture_tree(root).items()}


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
    "a sparse file": ("truncate -s 1G sparse", {"sparse"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_failed_program_did_is_taken_back(root: Path, files: HostFilesystem, name: str) -> None:
    script, changed = SCRIPTS[name]
    before = shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, script)
        after = shape(root)
        assert after != before
        found = {change.path for change in call.changed()}
        assert not changed or found == changed
        report = call.rollback()
    assert shape(root) == before
    assert report.conflicts == ()
    with held_call(files, opaque=True) as call:
        assert call.changed() == []
        assert call.rollback().notes == ()


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_program_did_is_a_step_with_exact_paths(root: Path, workspace: Workspace, name: str) -> None:
    script, changed = SCRIPTS[name]
    before = shape(root)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        after = shape(root)
        step = call.commit()
    assert shape(root) == after
    if changed:
        assert step is not None
        assert set(step.paths) == changed
    if step is not None:
        assert [entry.kind for entry in workspace.log()] == ["step", "baseline"]
        workspace.undo()
        kept = {path for path in ("pipe", "s", "sparse") if path in after}  # no history has what they are
        now = shape(root)
        assert {path: (one.kind, one.content, one.mode) for path, one in now.items() if path not in kept} == {
            path: (one.kind, one.content, one.mode) for path, one in before.items()
        }


DEEP = "i=0; while [ $i -lt 260 ]; do mkdir d; cd -P d; i=$((i + 1)); done"


@pytest.mark.parametrize(
    "script",
    [
        "rm -r d; mkfifo d",
        "mv d e; mkfifo d",
        "rm -r d/e; truncate -s 257M d/e",
        f"mkdir x; cd x; {DEEP}; mv {{root}}/d {{root}}/a.txt {{root}}/empty .; mkfifo {{root}}/empty",
    ],
)
def test_what_no_scan_takes_in_is_taken_away_where_a_directory_was(
    root: Path, files: HostFilesystem, script: str
) -> None:
    before = shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, script.replace("{root}", str(root)))
        assert shape(root) != before
        report = call.rollback()
    assert shape(root) == before
    assert report.conflicts == ()


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


def test_what_may_only_be_added_to_stays_and_is_said_and_the_rest_is_taken_back(
    root: Path, files: HostFilesystem
) -> None:
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


def test_a_name_that_may_not_be_replaced_keeps_no_other_name_of_its_file_from_coming_back(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, "echo more >> one; rm d/two; echo of the call > d/two")
        if (
            os.geteuid() != 0
            or subprocess.run(["chattr", "+i", root / "d"], check=False, capture_output=True).returncode
        ):
            pytest.skip("only root, on a filesystem that has such attributes, gives them")
        try:
            report = call.rollback()
        finally:
            sh(root, "chattr -i d")
    assert report.conflicts == ("d/two",)
    assert (root / "d/two").read_text() == "of the call\n"
    assert replace(shape(root)["one"], links=()) == replace(before["one"], links=())


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
    assert note == "taken back: theirs; what they were is kept as aborted/1"
    [entry] = workspace.aborted()
    assert (entry.number, entry.kind, entry.paths) == (1, "aborted", ("theirs",))
    assert b"+an hour of work" in workspace.aborted_step(1).patch
    with pytest.raises(LookupError, match="there are 1"):
        workspace.aborted_step(7)
    workspace.gc(0)
    shown = subprocess.run(
        ["git", "--git-dir", root.parent / "store/history", "show", "refs/ringfence/aborted/1:files/theirs"],
        capture_output=True,
        check=True,
    )
    assert shown.stdout == b"an hour of work"


@pytest.mark.parametrize("script", ["touch n; rm n", "mkfifo p; rm p", "mkdir d/n; rmdir d/n", "touch empty"])
def test_of_directories_of_which_only_the_time_differs_nothing_is_kept_or_said(
    root: Path, workspace: Workspace, script: str
) -> None:
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
    assert note == "taken back: the root, d; what they were is kept as aborted/1"


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


def test_what_a_person_writes_after_the_call_stays_also_where_taking_back_is_tried_again(root: Path) -> None:
    failing: list[str] = []

    def before(name: str) -> None:
        if name in failing:
            failing.remove(name)
            raise OSError(errno.EIO, "once")

    with (
        Workspace.open(root, store=root.parent / "store", before=before) as workspace,
        held_call(workspace.filesystem, opaque=True) as call,
    ):
        sh(root, "rm -r d; rm a.txt")
        call.changed()
        (root / "d").write_text("person")
        failing.append("create")
        with pytest.raises(OSError, match="once"):
            call.rollback()
        assert "d" in call.rollback().conflicts
    assert (root / "d").read_text() == "person"
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_a_file_comes_back_though_somebody_elses_is_in_the_place_of_another_name_of_it(
    root: Path, files: HostFilesystem
) -> None:
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


def test_only_the_newest_of_what_was_taken_back_are_kept(root: Path, workspace: Workspace) -> None:
    for number in range(53):
        with held_call(workspace.filesystem, opaque=True) as call:
            (root / f"n{number}").touch()
            call.rollback()
    assert [entry.number for entry in workspace.aborted()] == list(range(53, 3, -1))


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
    assert "d/big was changed, and stays so: it was not taken in (too large)" in notes
    assert (root / "d/big").read_text().endswith("big\nmore\n")
    assert shape(root)["a.txt"] == before["a.txt"]


@pytest.mark.parametrize(
    "script", ["mv d/big b", "mv d gone", "mkdir n; mv d/big n/b; echo other > d/big", "mv a.txt t"]
)
def test_a_file_above_the_limit_that_moved_is_moved_back(root: Path, script: str) -> None:
    before, inode = shape(root), (root / "d/big").stat().st_ino
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        call.rollback()
    assert shape(root) == before
    assert (root / "d/big").stat().st_ino == inode


@pytest.mark.parametrize(
    ("script", "theirs", "place"),
    [
        ("mv d/big moved", "d/big", "moved"),
        ("mkdir new; mv d/big new/moved; rm -r d", "d", "new/moved"),
    ],
)
def test_a_file_above_the_limit_that_moved_stays_there_if_somebody_elses_is_in_its_place(
    root: Path, script: str, theirs: str, place: str
) -> None:
    content = (root / "d/big").read_bytes()
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, script)
        call.changed()
        (root / theirs).write_text("person")
        report = call.rollback()
    assert {"d/big", theirs} <= set(report.conflicts)
    assert f"d/big stays at {place}: somebody else's is in its place" in report.notes
    assert (root / theirs).read_text() == "person"
    assert (root / place).read_bytes() == content


def test_a_file_above_the_limit_is_kept_whole_if_somebody_saves_in_its_place_while_it_comes_back(root: Path) -> None:
    content, saving = (root / "d/big").read_bytes(), list[str]()

    def before(name: str) -> None:
        if name in saving:
            saving.remove(name)
            (root / "d/big").write_text("person")

    limits = ScanLimits(max_file_bytes=1000)
    with (
        Workspace.open(root, store=root.parent / "store", limits=limits, before=before) as workspace,
        held_call(workspace.filesystem, opaque=True) as call,
    ):
        sh(root, "mv d/big moved")
        saving.append("rename")
        report = call.rollback()
    assert report.conflicts == ("d/big",)
    [kept] = (root.parent / "store/kept").iterdir()
    assert f"what d/big was before the call is kept at {kept}: copy it back from there if it is wanted" in report.notes
    assert kept.read_bytes() == content
    assert (root / "d/big").read_text() == "person"


def test_permission_bits_of_what_a_scan_leaves_out_are_seen_and_brought_back(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with HostFilesystem(root, store=root.parent / "store", limits=ScanLimits(max_file_bytes=3000)) as files:
        before = shape(root)
        with held_call(files, opaque=True) as call:
            sh(root, "chmod 700 pipe d/big; mv d/big big")
            assert {change.path for change in call.changed()} == {"pipe", "d/big", "big"}
            report = call.rollback()
        assert shape(root) == before
        assert report.conflicts == ()
        assert "pipe has its permissions again" in report.notes


def test_another_thing_that_has_the_inode_of_a_pipe_is_not_taken_for_it(root: Path, files: HostFilesystem) -> None:
    os.mkfifo(root / "pipe")
    inode = os.lstat(root / "pipe").st_ino
    before = shape(root)
    with held_call(files, opaque=True) as call:
        (root / "pipe").unlink()
        for number in range(1000):  # the number that is free now is given away soon
            (root / "pipe").write_text("x")
            if os.lstat(root / "pipe").st_ino == inode:
                break
            (root / "pipe").rename(root / f"n{number}")
        notes = call.rollback().notes
    assert [note for note in notes if note.startswith("pipe is gone")] != []
    assert {path: one for path, one in before.items() if path != "pipe"} == shape(root)


def test_a_directory_in_the_place_of_a_pipe_goes_with_all_that_is_in_it(root: Path, files: HostFilesystem) -> None:
    os.mkfifo(root / "pipe")
    before = shape(root)
    with held_call(files, opaque=True) as call:
        sh(root, "rm pipe; mkdir -p pipe/d; echo x > pipe/d/x")
        report = call.rollback()
    assert report.conflicts == ()
    assert {path: one for path, one in before.items() if path != "pipe"} == shape(root)


IN_PLACE = ["mkdir -p d/e; echo x > d/new; echo x > d/e/c.txt", "mkdir d; mkdir d/b.txt; echo x > d/b.txt/x", "true"]


@pytest.mark.parametrize("script", IN_PLACE)
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("made", ["mkfifo d", "head -c 5000 /dev/zero > d"])
def test_what_was_in_a_directory_before_what_is_not_taken_in_was_there_does_not_come_back_in_its_place(
    root: Path, made: str, around: bool, script: str
) -> None:
    with limited(root) as workspace:
        sh(root, f"rm -r d; {made}")
        before = shape(root)
        with held_call(workspace.filesystem, call_id="outer", opaque=around) as outer:
            with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
                sh(root, f"mv d moved; {script}")
                changed = [change.path for change in inner.changed()]
                assert changed == ["d", *sorted(path for path in shape(root) if path.startswith("d/")), "moved"]
                assert inner.rollback().conflicts == ()
            assert outer.rollback().conflicts == ()
        assert shape(root) == before


def test_an_empty_file_that_a_command_moves_to_where_a_pipe_was_is_in_its_step(
    root: Path, workspace: Workspace
) -> None:
    (root / "empty.txt").touch(mode=0o644)
    os.mkfifo(root / "pipe", 0o644)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "mv empty.txt pipe")
        assert [change.path for change in call.changed()] == ["empty.txt", "pipe"]
        step = call.commit()
    assert step is not None
    assert step.paths == ("empty.txt", "pipe")


def test_a_pipe_that_a_typed_change_took_away_in_an_opaque_call_is_back_and_said(
    root: Path, files: HostFilesystem
) -> None:
    os.mkfifo(root / "pipe")
    before = shape(root)
    with held_call(files, opaque=True) as call:
        files.for_call(call).delete("pipe")
        assert call.rollback().notes == ("pipe is back in its place",)
    assert shape(root) == before


@pytest.mark.parametrize("command", ["rm d/big", "rm -r d", "echo new > n; mv n d/big", "rm -r d; echo file > d"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_file_above_the_limit_that_a_command_removes_comes_back(root: Path, command: str, nested: bool) -> None:
    before = shape(root)
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        if nested:
            with held_call(workspace.filesystem, parent=call, opaque=True) as inner:
                sh(root, command)
                assert "d/big is back in its place" in inner.rollback().notes
        sh(root, command)
        assert "d/big is back in its place" in call.rollback().notes
    assert shape(root) == before


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


def test_what_was_in_the_way_of_a_call_within_is_no_conflict_once_the_opaque_call_around_it_is_back(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files, opaque=True) as call:
        with held_call(files, parent=call) as inner:
            files.for_call(inner).delete("a.txt")
            sh(root, "echo program > a.txt")
            assert inner.rollback().conflicts == ("a.txt",)
        assert call.rollback().conflicts == ()
    assert shape(root) == before


def test_what_was_in_the_way_after_an_opaque_call_is_no_conflict_of_the_call_that_goes_back_before_it(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files) as call:
        with held_call(files, parent=call, opaque=True) as program:
            sh(root, "echo program > n")
            program.commit()
        with held_call(files, parent=call) as inner:
            files.for_call(inner).delete("a.txt")
            sh(root, "echo somebody > a.txt")
            assert inner.rollback().conflicts == ("a.txt",)
        assert call.rollback().conflicts == ()
    assert shape(root) == before


def test_a_file_above_the_limit_that_came_back_in_a_call_is_no_change_of_the_one_around_it(root: Path) -> None:
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        with held_call(workspace.filesystem, parent=call, opaque=True) as inner:
            sh(root, "rm d/big")
            inner.rollback()
        assert call.changed() == []
        sh(root, "rm -r d")  # by somebody else, now that it was asked
        [note] = [note for note in call.rollback().notes if "kept at" in note]
    kept = note.partition("kept at ")[2].partition(":")[0]
    assert Path(kept).stat().st_size > 1000


def test_a_file_above_the_limit_that_is_gone_with_a_killed_process_is_said(root: Path) -> None:
    with limited(root):
        pass

    def work(before: Callable[[str], None]) -> None:
        with limited(root) as workspace, held_call(workspace.filesystem, opaque=True):
            sh(root, "rm d/big")
            before("the end")

    assert killed_at(0, work)
    with limited(root) as workspace:
        assert workspace.recovered is not None
        said = "d/big is gone, and cannot be brought back: it was not taken in (too large)"
        assert said in workspace.recovered.notes


def test_a_file_above_the_limit_comes_back_also_where_taking_back_is_tried_again(root: Path) -> None:
    before, failing = shape(root), list[str]()

    def fail(name: str) -> None:
        if name in failing and (root / "d/big").exists():
            failing.remove(name)
            raise OSError(errno.EIO, "the disk does not answer")

    limits = ScanLimits(max_file_bytes=1000)
    with (
        Workspace.open(root, store=root.parent / "store", limits=limits, before=fail) as workspace,
        held_call(workspace.filesystem, opaque=True) as call,
    ):
        sh(root, "rm d/big")
        failing.append("utime")
        with pytest.raises(OSError, match="does not answer"):
            call.rollback()
        assert call.rollback().conflicts == ()
    assert shape(root) == before


def test_names_of_one_file_above_the_limit_come_back_as_names_of_one_file(root: Path) -> None:
    os.link(root / "d/big", root / "twin")
    before = shape(root)
    with limited(root) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        sh(root, "rm d/big twin")
        assert call.rollback().conflicts == ()
    assert (root / "d/big").samefile(root / "twin")
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


def test_a_socket_that_was_there_stays(root: Path, files: HostFilesystem) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "s"))
        before = shape(root)
        with held_call(files, opaque=True) as call:
            sh(root, "mv s t; echo x > a.txt")
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


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_program_saves_between_two_typed_changes_is_the_calls(
    root: Path, files: HostFilesystem, nested: bool
) -> None:
    with held_call(files, opaque=not nested) as outer:
        with held_call(files, parent=outer, opaque=True) if nested else nullcontext(outer) as running:
            files.for_call(running).write("a.txt", "ours")
            (root / "a.txt").write_text("the program's")
            if nested:
                assert [change.path for change in running.changed()] == ["a.txt"]
                running.commit()
        files.for_call(outer).write("a.txt", "ours again")
        assert [change.path for change in outer.changed()] == ["a.txt"]
        outer.commit()
    assert (root / "a.txt").read_text() == "ours again"


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


def test_a_command_that_removes_what_typed_changes_displaced(root: Path, files: HostFilesystem) -> None:
    before = shape(root)
    with held_call(files, opaque=True) as call:
        files.for_call(call).write("a.txt", "typed")
        sh(root, "rm -rf .ringfence-hold-*")
        files.for_call(call).write("d/b.txt", "typed")
        sh(root, "mkdir away; mv .ringfence-hold-* away")
        call.rollback()
    assert shape(root) == before


def test_an_opaque_call_in_a_typed_one(root: Path, workspace: Workspace) -> None:
    files, before = workspace.filesystem, shape(root)
    (root / "theirs").write_text("person")
    for end in ("rollback", "commit"):
        with held_call(files, call_id="outer") as outer:
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


def test_what_a_failed_call_had_changed_before_an_opaque_one_in_it_is_no_change_of_the_call_around_both(
    root: Path, files: HostFilesystem
) -> None:
    with held_call(files, call_id="outer") as outer:
        with held_call(files, call_id="failed", parent=outer) as failed:
            files.for_call(failed).delete("a.txt")
            with held_call(files, call_id="program", parent=failed, opaque=True) as program:
                program.commit()
            failed.rollback()
        with held_call(files, call_id="another program", parent=outer, opaque=True) as program:
            program.commit()
        assert outer.changed() == []
        assert outer.commit() is None


@pytest.mark.parametrize("later", ["chmod 700 p p/q", "rm -r p", "true"])
def test_typed_changes_are_known_again_after_two_ways_back_have_given_their_directories_other_inodes(
    root: Path, files: HostFilesystem, later: str
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        files.for_call(outer).write("p/q/f", "outer")
        with held_call(files, call_id="middle", parent=outer, opaque=True) as middle:
            with held_call(files, call_id="inner", parent=middle, opaque=True) as inner:
                sh(root, "mv p/q t; rmdir p; mv t p")  # the inode of the one is the other's now
                assert inner.rollback().conflicts == ()
            sh(root, later)
            assert middle.rollback().conflicts == ()
        assert outer.rollback().conflicts == ()
    assert shape(root) == before


def test_what_a_call_deleted_does_not_come_back_from_an_opaque_call_in_another(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        files.for_call(outer).delete("a.txt")
        files.for_call(outer).delete("d/e", recursive=True)
        for path in ("", "d"):
            os.utime(root / path, ns=(0, before[path].mtime_ns))
        time.sleep(0.05)  # from here on the directories are known by their stamps
        with held_call(files, call_id="middle", parent=outer, opaque=True) as middle:
            with held_call(files, call_id="inner", parent=middle, opaque=True) as inner:
                sh(root, "echo new > n; echo new > d/n")
                assert [change.path for change in inner.changed()] == ["d/n", "n"]
                inner.rollback()
            assert not (root / "a.txt").exists()
            assert middle.changed() == []
            middle.commit()
        assert not (root / "d/e").exists()
        assert outer.rollback().conflicts == ()
    assert shape(root) == before


def test_what_a_program_deletes_is_seen_again_where_its_directory_has_its_time_back(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        with held_call(files, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "touch -r d ref; rm d/b.txt; touch -r ref d; rm ref")
            time.sleep(0.05)
            assert [change.path for change in inner.changed()] == ["d/b.txt"]
            inner.commit()
        assert [change.path for change in outer.changed()] == ["d/b.txt"]
        outer.rollback()
    assert shape(root) == before


@pytest.mark.parametrize("script", ["rm d/two", "echo x > d/two", "mv d/two gone", "rm -r d"])
def test_what_a_typed_change_displaced_stays_its_own_when_another_name_of_it_comes_back(
    root: Path, files: HostFilesystem, script: str
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        files.for_call(outer).write("one", "outer")
        with held_call(files, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, script)
            assert inner.rollback().conflicts == ()
        assert outer.rollback().conflicts == ()
    assert shape(root) == before


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("last", ["typed", "rolled back", "nothing"])
def test_what_came_after_an_opaque_call_goes_back_with_the_call_around_both(
    root: Path, files: HostFilesystem, asked: bool, last: str
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        with held_call(files, call_id="first", parent=outer, opaque=True) as inner:
            sh(root, "echo inner > d/b.txt")
            inner.changed()
            inner.commit()
        if asked:
            outer.changed()
        if last == "typed":
            files.for_call(outer).write("late/n", "outer")
            files.for_call(outer).write("d/b.txt", "outer")
        elif last == "rolled back":
            with held_call(files, call_id="second", parent=outer, opaque=True) as inner:
                sh(root, "rm d/b.txt; touch d/n")
                inner.rollback()
        assert outer.rollback().conflicts == ()
    assert shape(root) == before


REACHED = {
    "overwrites": "for file in $(find $held -type f); do echo damaged > $file; done",
    "overwrites and hides it": "for file in $(find $held -type f); do cp -p $file t; tr 'a-z' 'b-za' < t > $file; "
    "touch -r t $file; rm t; done",
    "appends": "for file in $(find $held -type f); do echo more >> $file; done",
    "chmod": "chmod -R 700 $held",
    "touch": "find $held | xargs touch -h -d 2001-01-01",
    "replaces files": "for file in $(find $held -type f); do cp $file t; echo x >> t; mv t $file; done",
    "replaces it": "cp -r $held t; rm -r $held; mv t $held",
    "removes all": "rm -r $held",
    "removes files": "find $held -type f -delete",
    "puts a file there": "rm -r $held; echo x > $held",
    "puts a link there": "mv $held t; ln -s t $held",
    "moves all": "mkdir away; mv $held away",
    "moves into the tree": "for one in $held/*; do mv $one taken-$(basename $one); done",
    "exchanges": "mv $held/0 t; mv $held/1 $held/0; mv t $held/1",
    "makes more": "for one in $(find $held -type d); do echo new > $one/new; mkdir $one/77; ln -s x $one/88; done",
    "makes directories where more is to come": "for n in $(seq 0 99); do [ -e $held/$n ] || mkdir $held/$n; done",
    "makes files where more is to come": "for n in $(seq 0 99) $(printf 9%.0s $(seq 255)); do "
    "[ -e $held/$n ] || echo x > $held/$n; done",
    "links": "for file in $(find $held -type f); do ln $file other-$(basename $file); echo x > $file; done",
    "other kinds": "for file in $(find $held -type f); do rm $file; mkdir $file; done; rm $(find $held -type l)",
    "another name": "echo through the tree > d/two; chmod 600 d/two",
    "everything": "rm -rf $held *",
}


@pytest.mark.parametrize("ends", ["rollback", "commit"])
@pytest.mark.parametrize("name", REACHED)
def test_what_a_program_does_to_what_a_call_around_it_displaced_is_mended_first(
    root: Path, workspace: Workspace, name: str, ends: str
) -> None:
    files, before = workspace.filesystem, shape(root)
    with held_call(files, call_id="outer") as outer:
        displace(files.for_call(outer))
        with held_call(files, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "held=$(echo .ringfence-hold-*); " + REACHED[name])
            if ends == "commit":
                assert not [change.path for change in inner.changed() if change.path.startswith(".ringfence")]
            report = getattr(inner, ends)()
            assert ends == "commit" or report.conflicts == ()
        files.for_call(outer).write("late", "after it")
        report = outer.rollback()
    assert report.conflicts == ()
    assert not [note for note in report.notes if " .ringfence" in note]
    assert shape(root) == before
    assert [entry.kind for entry in workspace.log()] == ["baseline"]


@pytest.mark.parametrize("script", ["mv .ringfence-hold-* theirs", "mkdir theirs; mv .ringfence-hold-*/* theirs"])
def test_what_a_program_took_of_what_was_displaced_is_the_trees_when_the_calls_are_committed(
    root: Path, workspace: Workspace, script: str
) -> None:
    with held_call(workspace.filesystem, call_id="outer") as outer:
        workspace.filesystem.for_call(outer).write("a.txt", "outer")
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, script)
            assert [change.path for change in inner.changed()] == ["theirs", "theirs/0"]
            inner.commit()
        outer.commit()
    assert (root / "theirs/0").read_bytes() == b"one\r\ntwo\r\n"
    assert workspace.steps()[-1].paths == ("a.txt", "theirs", "theirs/0")
    assert not list(root.glob(".ringfence*"))


def test_what_a_program_made_goes_though_a_failed_call_had_displaced_it_meanwhile(
    root: Path, files: HostFilesystem
) -> None:
    before = shape(root)
    with held_call(files, call_id="outer") as outer:
        with held_call(files, call_id="program", parent=outer, opaque=True) as program:
            sh(root, "echo new > n")
            program.commit()
        with held_call(files, call_id="typed", parent=outer) as typed:
            files.for_call(typed).delete("n")
            typed.rollback()
        assert outer.rollback().conflicts == ()
    assert shape(root) == before


def displace(files: HostFilesystem) -> None:
    files.write("a.txt", "first")
    files.write("a.txt", "outer")
    files.write("one", "outer")
    files.write("d/e/c.txt", "outer")
    files.delete("d/e", recursive=True)
    files.delete("d/link")
    files.write("d/b.txt", "outer")
    files.move("empty", "moved")
    files.move("d/big", "ignored", overwrite=True)
    files.write("new/n", "outer")
    files.delete("new", recursive=True)
    files.chmod("d", 0o700)


def test_a_step_has_nothing_of_what_calls_held(root: Path, workspace: Workspace) -> None:
    files = workspace.filesystem
    with held_call(files, call_id="outer") as outer:
        displace(files.for_call(outer))
        with held_call(files, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "echo damaged | tee .ringfence-hold-*/0 > n")
            inner.commit()
        outer.commit()
    assert "n" in workspace.steps()[-1].paths
    assert not [path for entry in workspace.log() for path in entry.paths if path.startswith(".ringfence")]
    assert not list(root.glob(".ringfence*"))
    workspace.undo()
    assert (root / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


@pytest.mark.parametrize("script", ["echo x >> $held/0", "truncate -s 0 other"])
def test_what_is_too_large_to_be_taken_in_and_was_displaced_is_said_if_a_program_reaches_it(
    root: Path, script: str
) -> None:
    (root / "large").write_bytes(b"l" * 5000)
    os.link(root / "large", root / "other")
    with limited(root, 4500) as workspace, held_call(workspace.filesystem, call_id="outer") as outer:
        workspace.filesystem.for_call(outer).delete("large")
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "held=$(echo .ringfence-hold-*); " + script)
            inner.commit()
        report = outer.rollback()
    assert report.conflicts == ("large",)
    assert any("what was at large before" in note for note in report.notes)


def test_what_is_too_large_to_be_taken_in_and_was_displaced_comes_back_if_a_program_removes_it(root: Path) -> None:
    (root / "large").write_bytes(b"l" * 5000)
    os.link(root / "large", root / "other")
    before = capture_tree(root)
    with limited(root, 4500) as workspace, held_call(workspace.filesystem, call_id="outer") as outer:
        workspace.filesystem.for_call(outer).delete("large")
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            sh(root, "rm .ringfence-hold-*/0")
            inner.commit()
        assert outer.rollback().conflicts == ()
    assert capture_tree(root) == before


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
            assert "taken back: " in answer.text
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
        (PathPolicy(deny=["large"]), "truncate -s 300M large", "large must not be created"),
        (PathPolicy(allow=["d"]), "echo x > d/n; echo x > n", "n is not among what may be changed"),
        (DeletionLimitPolicy(max_files=1), "rm d/b.txt; : > a.txt", "2 files removed"),
    ],
)
def test_an_effect_policy_sees_what_a_program_changed_and_its_denial_takes_that_back(
    root: Path, workspace: Workspace, policy: Any, denied: str, why: str
) -> None:
    before = shape(root)
    with executor(workspace.filesystem, shell(root), policies=[policy]) as run:
        answer = execute(run, denied)
        assert (answer.result.success, answer.receipt.outcome) == (False, "denied")
        assert f"denied by the policy {policy.name}: " in answer.text
        assert why in answer.text
        assert "taken back: " in answer.text
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
def test_a_handler_that_evaluates_a_child_prompt_between_commands(
    root: Path, workspace: Workspace, fails: bool
) -> None:
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
    with held_call(files) as call, pytest.raises(TransactionError):
        files.for_call(call).note_process(process)
    with held_call(files, opaque=True) as call:
        files.for_call(call).note_process(process)
        call.rollback()
    assert process.lives


# Opening and space


def test_a_filesystem_alone_leaves_a_store_that_a_workspace_goes_on_with(root: Path) -> None:
    with HostFilesystem(root, store=root.parent / "store") as files:
        with held_call(files, opaque=True) as call:
            sh(root, "echo x > n; echo y > a.txt")
            assert call.commit() is None, "without a history there are no steps"
        files.write("typed", "x")
    with Workspace.open(root, store=root.parent / "store") as workspace:
        assert next((entry.kind, entry.paths) for entry in workspace.log()) == ("external", ("a.txt", "n", "typed"))
        assert workspace.steps() == []


def test_the_command_line_shows_what_was_taken_back(root: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "RINGFENCE_STATE_DIR": str(tmp_path / "state")}
    code = (
        "import sys; from ringfence.testing import held_call; from ringfence_sandbox import Workspace\n"
        "with Workspace.open(sys.argv[1]) as w, held_call(w.filesystem, opaque=True) as call:\n"
        "    open(sys.argv[1] + '/new', 'w').write('kept\\n'); call.rollback()\n"
    )
    subprocess.run([sys.executable, "-c", code, root], env=environment, check=True, timeout=60)

    def ringfence(*arguments: str) -> str:
        command = [sys.executable, "-m", "ringfence_cli", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout

    assert ringfence("log", str(root), "--aborted").split()[-1] == "new"
    [entry] = json.loads(ringfence("log", str(root), "--aborted", "--json"))["log"]
    assert (entry["number"], entry["kind"]) == (1, "aborted")
    shown = ringfence("show", str(root), "1", "--aborted")
    assert shown.startswith("taken back 1: a test, call ")
    assert "session" not in shown.splitlines()[0], "it is not kept of what was taken back"
    assert "+kept" in shown


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("where", ["root", "root and store"])
def test_a_full_disk_keeps_nothing_from_being_taken_back(tmp_path: Path, where: str) -> None:
    with small_disk(tmp_path / "small") as small:
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
    with small_disk(tmp_path / "small") as small, HostFilesystem(root, store=small / "store") as files:
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
    with small_disk(root / "mounted"):
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


def test_what_outlives_the_process_and_has_no_files_does_not_see_what_programs_change(root: Path) -> None:
    before = shape(root)
    assert "tracks_external_writes" in fails_on(root, {Database: Database()}).text
    assert shape(root) == before


class Elsewhere(Database):
    """A filesystem that outlives the process and is not said to see what programs change."""

    rollback_only = False
    read_only = False


class Looking(Elsewhere):
    tracks_external_writes = True


def test_a_durable_filesystem_of_one_s_own_is_taken_to_see_what_programs_change_where_it_says_so(root: Path) -> None:
    before = shape(root)
    refused = fails_on(root, {Database: Elsewhere()})
    assert (refused.receipt.outcome, "tracks_external_writes" in refused.text) == ("failed", True)
    assert shape(root) == before
    assert "sees_programs" not in fails_on(root, {Database: Looking()}).text
    assert (root / "made").exists()  # which it was to take back


def fails_on(root: Path, resources: dict[type[Any], object]) -> ToolCallResult:
    prompt = Prompt[None](ns="tests", key="bound", sections=[ToolsSection(title="Tools", tools=[shell(root)])])
    with prompt.bind(resources=resources).resources:
        return execute(ToolExecutor(prompt=prompt, session=Session()), "echo x > made; exit 1")


def test_a_filesystem_that_is_made_when_it_is_asked_for_sees_what_programs_change(root: Path) -> None:
    before = shape(root)
    lazy = Binding(Filesystem, lambda _: HostFilesystem(root, store=root.parent / "store"))
    assert "taken back: made" in fails_on(root, {Filesystem: lazy}).text
    assert shape(root) == before


def test_a_filesystem_that_is_bound_as_something_else_sees_what_programs_change(root: Path) -> None:
    before = shape(root)
    with HostFilesystem(root, store=root.parent / "store") as files:
        assert "taken back: made" in fails_on(root, {HostFilesystem: files}).text
    assert shape(root) == before


def test_the_limits_of_a_filesystem_alone_are_its_own(root: Path) -> None:
    with (
        HostFilesystem(root, store=root.parent / "store", limits=ScanLimits(max_file_bytes=1000)) as files,
        held_call(files, opaque=True) as call,
    ):
        sh(root, "rm d/big")
        assert "d/big is back in its place" in call.rollback().notes


NOT_ROOT = """
import encodings.ascii, os, sys
from pathlib import Path
from ringfence.testing import held_call
import ringfence_sandbox.opaque.opaque_calls, ringfence_sandbox.workspace
from ringfence_sandbox import HostFilesystem
root = Path(sys.argv[1])
os.setegid(65534); os.seteuid(65534)
with HostFilesystem(root, store=root.parent / "store") as files, held_call(files, opaque=True) as call:
    (root / "d/e/new").touch()
    (root / "d/e/c").write_text("changed")
    os.chmod(root / "d/e/c", 0)
    os.chmod(root / "d/e", 0o500)
    os.chmod(root / "d", 0)
    (root / "mine/sub").mkdir(parents=True)
    (root / "mine/sub/f").touch()
    os.chmod(root / "mine/sub", 0)
    report = call.rollback()
    assert not report.conflicts, report
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users reach, as pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="opaque-calls-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def test_directories_that_a_user_who_is_not_root_locked_are_opened_up_again(public: Path) -> None:
    root = public / "own/root"
    (root / "d/e").mkdir(parents=True)
    (root / "d/e/c").write_text("c")
    for path in (root.parent, root, root / "d", root / "d/e", root / "d/e/c"):
        os.chown(path, 65534, 65534)
    before = shape(root)
    subprocess.run([sys.executable, "-c", NOT_ROOT, root], check=True, timeout=60)
    assert shape(root) == before


def test_a_stamp_that_fails_leaves_its_descriptor_to_no_other_file(tmp_path: Path) -> None:
    class Failing(OwnerStamp):
        def _stamp(self, file: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                failed.set()
                raise OSError(errno.EIO, "the disk fails")
            super()._stamp(file)

    failed = threading.Event()
    stamp = Failing(str(tmp_path / "alive"), sync=False)
    stamp.start()
    try:
        assert failed.wait(10)
        for thread in threading.enumerate():
            if thread.name == "ringfence stamp":
                thread.join(10)
        with open(tmp_path / "another", "wb") as another:
            assert another.fileno() != stamp.descriptor
            assert os.path.samestat(os.fstat(stamp.descriptor), os.stat(tmp_path / "alive"))
    finally:
        stamp.stop()
    assert stamp.descriptor == -1
