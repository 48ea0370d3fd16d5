"""A workspace has one opener at a time, whatever it is called and wherever its state is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.errors import WorkspaceLockedError
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import HostMount, VfsToolsSection


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/d").mkdir(parents=True)
    (tmp_path / "root/a.txt").write_text("a\n")
    return tmp_path / "root"


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=root.parent / "store") as filesystem:
        yield filesystem


def test_a_second_opener_is_told_who_has_it(root: Path, fs: HostFilesystem) -> None:
    with pytest.raises(WorkspaceLockedError) as caught:
        HostFilesystem(root, store=root.parent / "store")
    assert f"process {os.getpid()} (" in str(caught.value)
    assert " since 20" in caught.value.holder
    assert fs.read("a.txt").content == "a\n"


def test_who_opened_another_store_before_is_not_named(root: Path) -> None:
    HostFilesystem(root, store=root.parent / "another").close()
    with HostFilesystem(root, store=root.parent / "store"), pytest.raises(WorkspaceLockedError) as caught:
        HostFilesystem(root, store=root.parent / "another")
    assert caught.value.holder == "another process"


def test_other_spellings_and_roots_above_and_below_collide(
    root: Path, fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    os.symlink(root, root.parent / "link")
    monkeypatch.chdir(root.parent)
    for path in ("root", "./root//", "root/d", "link", "link/d", "."):
        with pytest.raises(WorkspaceLockedError):
            HostFilesystem(path, store=elsewhere / "store")


def test_whoever_fails_to_open_it_holds_nothing(root: Path) -> None:
    (root.parent / "store/history").mkdir(parents=True)
    (root.parent / "store/history/log.000001").write_text("somebody's notes, and more of them")
    for _ in range(2):
        with pytest.raises(ValueError, match="is no log"):
            HostFilesystem(root, store=root.parent / "store")
    HostFilesystem(root, store=root.parent / "another").close()


OPEN = """
import os, sys, time
from ringfence_sandbox import HostFilesystem
fs = HostFilesystem(sys.argv[1], store=sys.argv[2])
if os.fork() == 0:
    try:
        fs.read("a.txt")
    except ValueError as error:
        print(error, flush=True)
    fs.close()
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_killed_opener_lets_go_even_if_its_children_live(root: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", OPEN, str(root), str(root.parent / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert "forked" in process.stdout.readline()
        try:
            with pytest.raises(WorkspaceLockedError, match=f"process {process.pid} "):
                HostFilesystem(root, store=root.parent / "store")
            process.kill()
            process.wait()
            HostFilesystem(root, store=root.parent / "store").close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_read_only_one_needs_no_lock(root: Path, fs: HostFilesystem) -> None:
    with HostFilesystem(root, read_only=True) as reader:
        fs.write("a.txt", "x")
        assert reader.read("a.txt").content == "x"


@pytest.mark.parametrize("store", ["root", "root/d", "root/new/store", "link/store"])
def test_a_store_in_the_workspace_is_refused(root: Path, store: str) -> None:
    os.symlink(root, root.parent / "link")
    with pytest.raises(ValueError, match="inside of the workspace .* RINGFENCE_STATE_DIR"):
        HostFilesystem(root, store=root.parent / store)
    assert sorted(os.listdir(root)) == ["a.txt", "d"]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RINGFENCE_STATE_DIR": "/state"}, "state"),
        ({"XDG_STATE_HOME": "/xdg"}, "xdg/ringfence"),
        ({"XDG_STATE_HOME": "a relative one", "HOME": "/home"}, "home/.local/state/ringfence"),
    ],
)
def test_the_store_is_found_by_the_real_path(
    root: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    monkeypatch.delenv("RINGFENCE_STATE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, f"{root.parent}{value}" if value.startswith("/") else value)
    os.symlink(root, root.parent / "link")
    with HostFilesystem(root.parent / "link") as fs, pytest.raises(WorkspaceLockedError):
        assert fs.root == str(root)
        assert len(list((root.parent / place).rglob("log.000001"))) == 1
        HostFilesystem(root)


@pytest.mark.parametrize("variables", [{"RINGFENCE_STATE_DIR": "state"}, {"XDG_STATE_HOME": "state", "HOME": "home"}])
def test_a_relative_store_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.chdir(root)
    monkeypatch.delenv("RINGFENCE_STATE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="absolute one in the environment variable RINGFENCE_STATE_DIR"):
        HostFilesystem(root)
    assert sorted(os.listdir(root)) == ["a.txt", "d"]


def test_files_are_mounted_without_a_place_for_stores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFENCE_STATE_DIR")
    monkeypatch.setenv("HOME", "home")
    assert VfsToolsSection(session=Session(), mounts=[HostMount(root)]).filesystem.exists("a.txt")
