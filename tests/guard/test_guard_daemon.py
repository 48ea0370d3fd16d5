"""The guard as agents and people meet it: a hook's client, a process, a socket."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from guard_processes import BASH, RESULT, Run, asked

from ringfence.errors import WorkspaceLockedError
from ringfence_guard import GuardSettings, client_path, guard_directory, save_settings
from ringfence_sandbox import Workspace


def test_the_first_event_starts_a_guard_and_a_denied_call_goes_back(root: Path, hook: Run) -> None:
    save_settings(root, GuardSettings(policies=("deny:/protected",)))
    before = hook("PreToolUse", **BASH, tool_input={"command": "x"})
    assert (before.returncode, before.stdout, before.stderr) == (0, "", "")
    (root / "protected").mkdir()
    (root / "side.txt").write_text("s")
    after = hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT)
    answer = json.loads(after.stdout)
    assert "protected must not be created" in answer["reason"]
    assert "side.txt" in answer["hookSpecificOutput"]["updatedToolOutput"]["stderr"]
    assert not (root / "side.txt").exists()

    hook("PreToolUse", **BASH, tool_input={"command": "y"})
    (root / "kept.txt").write_text("k")
    assert hook("PostToolUse", **BASH, tool_input={"command": "y"}, tool_response=RESULT).stdout == ""
    status = asked(root, {"kind": "status"})["status"]
    assert (status["sessions"], status["open_calls"]) == (1, [])
    assert "kept.txt" in asked(root, {"kind": "undo"})["text"]
    assert not (root / "kept.txt").exists()
    assert os.stat(guard_directory(root) / "socket").st_mode & 0o777 == 0o600
    for private in (guard_directory(root), guard_directory(root).parent):
        assert os.stat(private).st_mode & 0o777 == 0o700


def test_a_call_is_denied_where_no_guard_can_be_started(root: Path, hook: Run) -> None:
    save_settings(root, GuardSettings(policies=("nonsense",)))
    denied = hook("PreToolUse", **BASH, tool_input={"command": "x"})
    assert denied.returncode == 2
    assert "nonsense" in denied.stderr
    assert hook("PreToolUse", "--if-unavailable", "allow", **BASH).returncode == 0
    assert hook("PostToolUse", **BASH).returncode == 0
    assert hook("SessionEnd").returncode == 0


def test_a_guard_says_who_has_the_directory(root: Path, hook: Run) -> None:
    hook("SessionStart")
    with Workspace.open(root):
        denied = hook("PreToolUse", "--timeout", "3", **BASH, tool_input={"command": "x"})
        assert denied.returncode == 2
        assert "is open in process" in denied.stderr
        assert "is open in process" in hook("UserPromptSubmit", "--timeout", "3", prompt="undo!").stdout
    assert hook("PreToolUse", **BASH, tool_input={"command": "x"}).returncode == 0


def test_another_opener_has_the_directory_between_calls(root: Path, hook: Run) -> None:
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    (root / "a.txt").write_text("agent's")
    with pytest.raises(WorkspaceLockedError, match=r"`ringfence guard`, which watches a call of claude \(x\)"):
        Workspace.open(root)
    hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT)
    process = asked(root, {"kind": "status"})["status"]["process"]

    with Workspace.open(root) as workspace:
        assert [step.tool for step in workspace.steps()] == ["Bash"]
        workspace.undo()
        assert asked(root, {"kind": "status"})["status"]["process"] == process
    assert (root / "a.txt").read_text() == "a\n"

    hook("PreToolUse", **BASH, tool_input={"command": "y"})
    (root / "b.txt").write_text("b")
    hook("PostToolUse", **BASH, tool_input={"command": "y"}, tool_response=RESULT)
    assert "b.txt" in asked(root, {"kind": "undo"})["text"]
    assert asked(root, {"kind": "status"})["status"]["process"] == process


def test_a_call_waits_for_another_opener_that_ends_soon(root: Path, hook: Run) -> None:
    hook("SessionStart")
    with ExitStack() as stack:
        stack.enter_context(Workspace.open(root))
        closing = threading.Timer(0.5, stack.close)
        closing.start()
        assert hook("PreToolUse", **BASH, tool_input={"command": "x"}).returncode == 0
        closing.join()


def test_an_opener_that_dies_while_it_is_handed_the_directory_keeps_nobody_out(root: Path, hook: Run) -> None:
    hook("SessionStart")
    with socket.socket(socket.AF_UNIX) as connection:
        folder = os.open(guard_directory(root), os.O_PATH)
        connection.connect(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
        connection.sendall(b'{"kind": "release"}\n')
        assert connection.recv(1000) == b'{"released": true}\n'
    assert hook("PreToolUse", **BASH, tool_input={"command": "x"}).returncode == 0


def test_a_guard_that_is_killed_while_it_is_asked_has_let_go(root: Path, hook: Run) -> None:
    hook("SessionStart")
    process = os.pidfd_open(asked(root, {"kind": "status"})["status"]["process"])
    signal.pidfd_send_signal(process, signal.SIGSTOP)
    killing = threading.Timer(0.3, signal.pidfd_send_signal, (process, signal.SIGKILL))
    killing.start()
    with Workspace.open(root) as workspace:
        assert not workspace.steps()
    killing.join()
    os.close(process)
    assert hook("PreToolUse", **BASH, tool_input={"command": "x"}).returncode == 0


@pytest.mark.parametrize("name", ["PreToolUse", "PostToolUse"])
def test_an_event_whose_guard_is_killed_goes_to_the_next_one(root: Path, hook: Run, name: str) -> None:
    save_settings(root, GuardSettings(policies=("deny:/protected",)))
    call = {**BASH, "tool_input": {"command": "x"}}
    hook("PreToolUse" if name == "PostToolUse" else "SessionStart", **call)
    process = os.pidfd_open(asked(root, {"kind": "status"})["status"]["process"])
    if name == "PostToolUse":
        (root / "protected").mkdir()
    signal.pidfd_send_signal(process, signal.SIGSTOP)
    killing = threading.Timer(0.5, signal.pidfd_send_signal, (process, signal.SIGKILL))
    killing.start()
    answer = hook(name, **call, **({"tool_response": RESULT} if name == "PostToolUse" else {}))
    killing.join()
    os.close(process)
    assert answer.returncode == 0
    assert ("protected must not be created" in answer.stdout) == (name == "PostToolUse")
    assert len(asked(root, {"kind": "status"})["status"]["open_calls"]) == (1 if name == "PreToolUse" else 0)


def test_a_guard_that_does_not_answer_in_time_denies(root: Path, hook: Run) -> None:
    directory = guard_directory(root)
    directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as silent:
        folder = os.open(directory, os.O_PATH)
        silent.bind(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
        silent.listen()
        denied = hook("PreToolUse", "--timeout", "0.2", **BASH, tool_input={"command": "x"})
    assert denied.returncode == 2
    assert "must not run" in denied.stderr
    (directory / "socket").unlink()


def test_a_kill_of_the_guard_rolls_nothing_back_and_the_next_event_starts_another(root: Path, hook: Run) -> None:
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    process = asked(root, {"kind": "status"})["status"]["process"]
    (root / "half.txt").write_text("half")
    descriptor = os.pidfd_open(process)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    select.select([descriptor], [], [], 10)  # until it is dead
    os.close(descriptor)
    assert hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT).returncode == 0
    assert (root / "half.txt").read_text() == "half"
    assert asked(root, {"kind": "status"})["status"]["process"] != process


def test_the_death_of_an_agent_settles_its_calls(root: Path, tmp_path: Path, hook: Run) -> None:
    hook("SessionStart")
    with subprocess.Popen(["sleep", "60"]) as agent:
        payload = {"hook_event_name": "PreToolUse", "session_id": "t", "cwd": str(root), **BASH}
        question = {"kind": "event", "agent": "claude", "payload": payload, "process": agent.pid}
        assert asked(root, question) is None
        (root / "half.txt").write_text("half")
        assert asked(root, {"kind": "status"})["status"]["sessions"] == 2
        agent.kill()
    log = guard_directory(root) / "calls.jsonl"
    while asked(root, {"kind": "status"})["status"]["sessions"] == 2 or not log.exists():
        time.sleep(0.05)
    assert "its end was never told" in log.read_text()
    assert (root / "half.txt").exists()


def test_the_guard_of_a_repository_is_found_from_below(root: Path, hook: Run) -> None:
    (root / ".git").mkdir()
    (root / "below").mkdir()
    hook("SessionStart", cwd=str(root / "below"))
    assert asked(root, {"kind": "status"})["status"]["root"] == str(root)


@pytest.mark.parametrize(
    "question", [b"[]\n", b'{"kind": "nonsense"}\n', b"{\n", b'{"kind": "undo", "by": "session"}\n']
)
def test_nonsense_is_refused_and_the_guard_stays(root: Path, hook: Run, question: bytes) -> None:
    hook("SessionStart")
    with socket.socket(socket.AF_UNIX) as connection:
        folder = os.open(guard_directory(root), os.O_PATH)
        connection.connect(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
        connection.sendall(question)
        assert b'"exit_code": 2' in connection.makefile("rb").read()
    assert asked(root, {"kind": "status"})["status"]["root"] == str(root)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_an_event_that_is_no_object_is_denied(root: Path, tmp_path: Path, text: str) -> None:
    words = [sys.executable, "-I", "-S", client_path(), "claude", "--state", str(tmp_path / "state")]
    assert subprocess.run(words, input=text, capture_output=True, text=True, timeout=60).returncode == 2


@pytest.mark.parametrize("is_another", [False, True])
def test_a_killed_guards_session_lasts_while_its_very_process_does(root: Path, hook: Run, is_another: bool) -> None:
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    process = asked(root, {"kind": "status"})["status"]["process"]
    os.kill(process, signal.SIGKILL)
    while Path(f"/proc/{process}/cmdline").exists() and Path(f"/proc/{process}/cmdline").read_bytes():
        time.sleep(0.01)
    kept = guard_directory(root) / "open.jsonl"
    held = json.loads(kept.read_text().splitlines()[-1])
    [[agent, session, [number, started]]] = held["processes"]
    assert (agent, session, number) == ("claude", "s", os.getpid())
    if is_another:  # as after a reboot
        held["processes"] = [[agent, session, [number, started + 1]]]
        kept.write_text(json.dumps(held))
    hook("SessionStart", agent="codex", session_id="other")
    assert len(asked(root, {"kind": "status"})["status"]["open_calls"]) == (0 if is_another else 1)


def test_a_guarded_directory_is_forked_and_promoted_to_between_calls(root: Path, hook: Run) -> None:
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    (root / "a.txt").write_text("agent's")
    hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT)
    process = asked(root, {"kind": "status"})["status"]["process"]
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        fork.filesystem.write("b.txt", "of the fork\n")
        assert workspace.promote(fork).outcomes == {"b.txt": "applied"}
    hook("PreToolUse", **BASH, tool_input={"command": "y"})
    (root / "c.txt").write_text("c")
    hook("PostToolUse", **BASH, tool_input={"command": "y"}, tool_response=RESULT)
    with Workspace.open(root) as workspace:
        assert [step.tool for step in workspace.steps()] == ["Bash", "promote", "Bash"]
        workspace.discard_fork("a")
    assert asked(root, {"kind": "status"})["status"]["process"] == process
