"""The guard among what goes wrong around it: other users, clients that lie, policies that change, upgrades, moves."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from guard_processes import BASH, RESULT, Run, asked, connected, guard_process
from killing import as_nobody
from mounts import small_disk

import ringfence_guard
from ringfence_guard import GuardSettings, guard_directory, save_settings
from ringfence_sandbox import Workspace

CALL = {**BASH, "tool_input": {"command": "x"}}
END = {**CALL, "tool_response": RESULT}


def test_another_user_gets_no_answer(root: Path, tmp_path: Path, hook: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can be another user")
    hook("SessionStart")
    directory = guard_directory(root)
    folder = os.open(directory, os.O_PATH)
    directory.chmod(0o711)  # if it were open to others, which it is not
    (directory / "socket").chmod(0o666)

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{folder}/socket")
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(b'{"kind": "status"}\n')
                assert connection.recv(1000) == b""

    as_nobody(ask)
    os.close(folder)
    assert guard_process(root)


@pytest.mark.parametrize("question", [b'{"kind": "status"}', b""])
def test_a_client_that_is_slow_holds_nobody_up(root: Path, hook: Run, question: bytes) -> None:
    hook("SessionStart")
    with connected(root) as slow:
        slow.sendall(question)
        assert hook("PreToolUse", **CALL).returncode == 0
        began = time.monotonic()
        asked(root, {"kind": "stop"})
        assert slow.recv(1000) == b""
        assert time.monotonic() < began + 8  # and not how long a question may take
    while (guard_directory(root) / "socket").exists():
        time.sleep(0.01)


def test_a_question_that_is_too_long_is_dropped_and_a_long_result_is_not(root: Path, hook: Run) -> None:
    hook("SessionStart")
    with connected(root) as connection, pytest.raises(OSError, match=r"."):
        for _ in range(80):
            connection.sendall(b"x" * (1 << 20))
        assert connection.recv(1) == b"x"
    hook("PreToolUse", **CALL)
    (root / "b.txt").write_text("b")
    assert hook("PostToolUse", **CALL, tool_response={**RESULT, "stdout": "x" * (8 << 20)}).returncode == 0
    assert "b.txt" in asked(root, {"kind": "undo"})["text"]


def test_a_client_of_another_session_or_root_ends_and_undoes_nothing(root: Path, tmp_path: Path, hook: Run) -> None:
    hook("PreToolUse", **CALL)
    (root / "b.txt").write_text("b")
    hook("PostToolUse", session_id="other", **END)
    elsewhere = str(tmp_path / "elsewhere")
    edit = {"tool_name": "Edit", "tool_use_id": "c9", "tool_input": {"file_path": f"{elsewhere}/x"}}
    assert hook("PreToolUse", "--root", str(root), "--directory", str(guard_directory(root)), **edit).returncode == 0
    assert len(asked(root, {"kind": "status"})["status"]["open_calls"]) == 1
    hook("PostToolUse", **END)
    assert "has 0 steps" in hook("UserPromptSubmit", session_id="other", prompt_id="q", prompt="undo!").stdout
    assert "b.txt" in asked(root, {"kind": "undo"})["text"]


def test_a_policy_that_changes_holds_from_the_next_call_and_one_that_breaks_denies(
    root: Path, tmp_path: Path, hook: Run
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[policies.paths]\ndeny = ["/one"]\n')
    save_settings(root, GuardSettings(policies=(str(policy),)))
    hook("PreToolUse", **CALL)
    process = guard_process(root)
    (root / "one").write_text("1")
    assert "one must not be created" in hook("PostToolUse", **END).stdout

    policy.write_text('[policies.paths]\ndeny = ["/other"]\n')
    hook("PreToolUse", **CALL)
    (root / "one").write_text("1")
    assert hook("PostToolUse", **END).stdout == ""

    hook("PreToolUse", **CALL)
    policy.write_text("[policies.paths\n")
    (root / "other").write_text("2")
    assert "other must not be created" in hook("PostToolUse", **END).stdout
    denied = hook("PreToolUse", **CALL)
    assert denied.returncode == 2
    assert "policy.toml" in denied.stderr

    policy.unlink()
    assert hook("PreToolUse", **CALL).returncode == 2
    save_settings(root, GuardSettings(policies=("deny:/third",)))
    assert hook("PreToolUse", **CALL).returncode == 0
    (root / "third").write_text("3")
    assert "third must not be created" in hook("PostToolUse", **END).stdout
    assert guard_process(root) == process


def test_an_upgrade_ends_the_guard_and_the_next_one_goes_on(root: Path, tmp_path: Path, hook: Run) -> None:
    older = tmp_path / "older"
    shutil.copytree(Path(ringfence_guard.__file__).parent, older / "ringfence_guard")
    words = "import sys; sys.path.insert(0, sys.argv[1]); from ringfence_guard.daemon import serve; serve(sys.argv[2])"
    command = [sys.executable, "-c", words, str(older), str(root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (guard_directory(root) / "socket").exists():
            time.sleep(0.01)
        hook("PreToolUse", **CALL)
        assert guard_process(root) == process.pid
        (root / "b.txt").write_text("b")
        os.utime(older / "ringfence_guard" / "daemon.py")
        _, said = process.communicate(timeout=60)
    assert "was upgraded" in said
    assert hook("PostToolUse", **END).stdout == ""
    assert guard_process(root) != process.pid
    assert "b.txt" in asked(root, {"kind": "undo"})["text"]


def test_of_two_guarded_directories_one_within_the_other_one_is_watched_at_a_time(root: Path, hook: Run) -> None:
    inner = root / "inner"
    inner.mkdir()
    save_settings(inner, GuardSettings(policies=("deny:/never",)))
    hook("PreToolUse", **CALL)
    hook("SessionStart", cwd=str(inner))
    denied = hook("PreToolUse", "--timeout", "5", cwd=str(inner), **CALL)
    assert denied.returncode == 2
    assert "`ringfence guard stop`" in denied.stderr
    hook("PostToolUse", **END)
    asked(root, {"kind": "stop"})
    while (guard_directory(root) / "socket").exists():
        time.sleep(0.01)
    assert hook("PreToolUse", cwd=str(inner), **CALL).returncode == 0
    (inner / "never").write_text("n")
    assert "never must not be created" in hook("PostToolUse", cwd=str(inner), **END).stdout
    assert hook("PreToolUse", "--timeout", "5", **CALL).returncode == 2
    asked(inner, {"kind": "stop"})


@pytest.mark.parametrize("where", ["below", ".."])
def test_a_call_from_below_or_above_is_watched(root: Path, hook: Run, where: str) -> None:
    (root / "below").mkdir()
    save_settings(root, GuardSettings(policies=("deny:/no",)))
    options = ("--root", str(root), "--directory", str(guard_directory(root)))
    hook("PreToolUse", *options, cwd=str(root / where), **CALL)
    (root / "no").write_text("n")
    assert "no must not be created" in hook("PostToolUse", *options, cwd=str(root / where), **END).stdout
    name = "../no" if where == "below" else f"{root.name}/no"
    edit = {"tool_name": "Edit", "tool_use_id": "c2", "tool_input": {"file_path": name}}
    hook("PreToolUse", *options, cwd=str(root / where), **edit)
    (root / "no").write_text("n")
    assert "no must not be created" in hook("PostToolUse", *options, cwd=str(root / where), **edit).stdout


def test_a_directory_that_was_moved_is_not_watched_any_more_which_denies(root: Path, hook: Run) -> None:
    options = ("--root", str(root), "--directory", str(guard_directory(root)))
    hook("PreToolUse", *options, **CALL)
    (root / "b.txt").write_text("b")
    hook("PostToolUse", *options, **END)
    there = root.rename(root.with_name("moved"))
    edit = {"tool_name": "Edit", "tool_use_id": "c2", "tool_input": {"file_path": str(there / "b.txt")}}
    for call in (CALL, edit):
        denied = hook("PreToolUse", *options, cwd=str(there), **call)
        assert denied.returncode == 2
        assert "ringfence guard install" in denied.stderr
    root.mkdir()
    assert hook("PreToolUse", *options, **CALL).returncode == 0
    (root / "c.txt").write_text("c")
    hook("PostToolUse", *options, **END)
    with Workspace.open(root, read_only=True) as workspace:
        assert workspace.steps()[-1].paths == ("c.txt",)


def test_where_there_is_no_space_a_call_is_judged_when_there_is_again(root: Path, tmp_path: Path, hook: Run) -> None:
    with small_disk(tmp_path / "state", "3m") as state:
        save_settings(root, GuardSettings(policies=("deny:/no",)))
        hook("PreToolUse", **CALL)
        (root / "no").write_text("n")
        (root / "side").write_text("s")
        with (state / "all").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1024))
        for name, call in (("PostToolUse", END), ("PreToolUse", {**CALL, "tool_use_id": "c2"})):
            refused = hook(name, **call)
            assert refused.returncode == 2
            assert "No space left" in refused.stderr
        (state / "all").unlink()
        assert hook("PreToolUse", **{**CALL, "tool_use_id": "c3"}).returncode == 0
        assert {path.name for path in root.iterdir()} & {"no", "side"} == set()
        assert "no must not be created" in hook("PostToolUse", **{**END, "tool_use_id": "c3"}).stdout
        asked(root, {"kind": "stop"})


def test_in_a_linked_worktree_files_go_back_and_commits_stay(root: Path, tmp_path: Path, hook: Run) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@e"]
    tree = tmp_path / "tree"
    subprocess.run([*git, "init", "-q", "."], cwd=root, check=True)
    subprocess.run([*git, "add", "."], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "1"], cwd=root, check=True)
    subprocess.run([*git, "worktree", "add", "-q", tree], cwd=root, check=True)
    save_settings(tree, GuardSettings(policies=("deny:/no",)))
    hook("PreToolUse", cwd=str(tree), **CALL)
    (tree / "no").write_text("n")
    subprocess.run([*git, "add", "."], cwd=tree, check=True)
    subprocess.run([*git, "commit", "-qm", "2"], cwd=tree, check=True)
    assert "no must not be created" in hook("PostToolUse", cwd=str(tree), **END).stdout
    assert not (tree / "no").exists()
    shown = subprocess.run([*git, "log", "--format=%s"], cwd=tree, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == ["2", "1"]
    asked(tree, {"kind": "stop"})
