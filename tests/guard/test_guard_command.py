"""`ringfence guard`: the hooks in agents' own settings, and what a person asks the guard."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence_process, ringfence_text
from store_bytes import store_bytes

from ringfence_guard import guard_directory, open_guarded

FILES = {
    "claude": (".claude/settings.local.json", ".claude/settings.json"),
    "codex": (".codex/hooks.json", ".codex/hooks.json"),
    "gemini": (".gemini/settings.json", ".gemini/settings.json"),
    "qwen": (".qwen/settings.json", ".qwen/settings.json"),
}
BEFORE = {"claude": "PreToolUse", "codex": "PreToolUse", "gemini": "BeforeTool", "qwen": "PreToolUse"}
PLUGIN = ".opencode/plugin/ringfence-guard.js"
UNDO = ".opencode/command/guard-undo.md"
OWN = {"hooks": [{"type": "command", "command": "echo own"}]}

Guard = Callable[..., str]


@pytest.fixture
def guard(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Guard]:
    """Runs the command in the directory, with a home of its own; returns what it prints."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CODEX_HOME", raising=False)

    def run(*arguments: str, exit_code: int = 0) -> str:
        done = ringfence_text("guard", *arguments, cwd=root)
        assert done.returncode == exit_code, done.stderr
        return done.stdout + done.stderr

    yield run
    run("stop")


def settings(path: Path) -> Any:
    return json.loads(path.read_text())


def hooks_of(path: Path) -> list[Any]:
    return [hook for groups in settings(path)["hooks"].values() for group in groups for hook in group["hooks"]]


@pytest.mark.parametrize("agent", FILES)
@pytest.mark.parametrize("personal", [False, True])
def test_hooks_are_added_to_all_that_a_file_has_and_removed_again(
    guard: Guard, root: Path, tmp_path: Path, agent: str, personal: bool
) -> None:
    path = (tmp_path / "home" if personal else root) / FILES[agent][personal]
    path.parent.mkdir()
    text = json.dumps({"theme": "dünkel", "hooks": {BEFORE[agent]: [OWN], "Other": [OWN]}, "z": 1}, indent=4)
    path.write_text(text)
    scope = ["--user"] if personal else []
    assert "installed in" in guard("install", agent, *scope)
    written = settings(path)
    assert [*written] == ["theme", "hooks", "z"]
    assert written["hooks"]["Other"] == [OWN]
    own, group = written["hooks"][BEFORE[agent]]
    assert own == OWN
    assert "matcher" in group
    assert "--if-unavailable" not in group["hooks"][0]["command"]

    again = path.read_text()
    said = guard("install", agent, "--policy", "deletions:2", *scope)
    assert "stays as it is" in said
    assert f"policies {'for all your projects (--user)' if personal else 'of this directory'}: deletions:2" in said
    assert path.read_text() == again

    assert "taken out of" in guard("uninstall", agent, *scope)
    assert settings(path) == json.loads(text)
    assert "stays as it is" in guard("uninstall", agent, *scope)


@pytest.mark.parametrize("agent", FILES)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_and_a_directory_that_are_made_go_again(guard: Guard, root: Path, agent: str, is_there: bool) -> None:
    path = root / FILES[agent][0]
    if is_there:
        path.parent.mkdir()
    guard("install", agent)
    assert path.exists()
    guard("install", agent, "--if-unavailable", "allow")
    guard("uninstall", agent)
    assert not path.exists()
    assert path.parent.exists() == is_there


LAYOUTS = [
    "",
    "{}",
    "{\n}\n",
    '{"theme":"x","z":[1,2]}',
    '{ "theme" : "x", "hooks" : { "PreToolUse" : [ ] } }\n',
    '{\n\t"theme": "x",\n\t"z": [1,\n2]\n}',
    '{\r\n    "hooks": {\r\n        "PreToolUse": []\r\n    },\r\n    "theme": "x"\r\n}\r\n',
    '{\n  "theme": "x",\r\n  "z": 1\n}\n',
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_file_is_byte_for_byte_what_it_was_after_an_uninstallation(guard: Guard, root: Path, text: str) -> None:
    path = root / FILES["claude"][0]
    path.parent.mkdir()
    path.write_bytes(text.encode())
    guard("install", "claude")
    guard("install", "claude", "--if-unavailable", "allow")
    assert hooks_of(path)
    assert (b"\r\n" in path.read_bytes()) == ("\r\n" in text)
    guard("uninstall", "claude")
    assert path.read_bytes().decode() == text


@pytest.mark.parametrize("text", [layout for layout in LAYOUTS if "theme" in layout])
def test_what_a_person_edits_beside_the_hooks_stays_in_its_layout(guard: Guard, root: Path, text: str) -> None:
    path = root / FILES["claude"][0]
    path.parent.mkdir()
    path.write_bytes(text.encode())
    guard("install", "claude")
    edited = path.read_bytes().decode().replace('"x"', '"another"')
    path.write_bytes(edited.encode())
    guard("install", "claude", "--if-unavailable", "allow")
    guard("uninstall", "claude")
    left = path.read_bytes().decode()
    if "hooks" in text:  # where nothing is left of them
        assert json.loads(left) == {key: one for key, one in json.loads(edited).items() if key != "hooks"}
    else:
        assert left == text.replace('"x"', '"another"')


@pytest.mark.parametrize(
    ("agent", "timeout"), [("claude", 120), ("codex", 120), ("gemini", 120_000), ("qwen", 120_000)]
)
def test_time_limits_are_in_the_agents_own_unit(guard: Guard, root: Path, agent: str, timeout: int) -> None:
    guard("install", agent)
    assert {hook["timeout"] for hook in hooks_of(root / FILES[agent][0])} - {3} == {timeout}


def test_claude_denies_a_call_whose_hook_fails(guard: Guard, root: Path) -> None:
    path = root / FILES["claude"][0]
    guard("install", "claude")
    assert settings(path)["hooks"]["PreToolUse"][0]["hooks"][0]["onFailure"] == "block"
    guard("install", "claude", "--if-unavailable", "allow")
    (hook,) = settings(path)["hooks"]["PreToolUse"][0]["hooks"]
    assert "onFailure" not in hook
    assert hook["command"].endswith("--if-unavailable allow")


@pytest.mark.parametrize("text", ['{"a": 1, // why\n}', "[]", '{"hooks": {"PreToolUse": {}}}', '{"a": 1, "a": 2}', "{"])
def test_a_file_that_cannot_be_edited_stays_as_it_is(guard: Guard, root: Path, text: str) -> None:
    path = root / FILES["claude"][0]
    path.parent.mkdir()
    path.write_text(text)
    assert "stays as it is" in guard("install", "claude", exit_code=2)
    assert path.read_text() == text


@pytest.mark.parametrize("agent", FILES)
def test_settings_with_a_byte_order_mark_stay_and_the_reason_is_said(guard: Guard, root: Path, agent: str) -> None:
    path = root / FILES[agent][0]
    path.parent.mkdir()
    path.write_text("\ufeff{}\n")
    assert f"{path} begins with a byte order mark, and stays as it is" in guard("install", agent, exit_code=2)
    assert path.read_text() == "\ufeff{}\n"


def test_a_group_that_a_person_has_added_to_stays(guard: Guard, root: Path) -> None:
    path = root / FILES["qwen"][0]
    guard("install", "qwen")
    written = settings(path)
    written["hooks"]["PreToolUse"][0]["hooks"].append(OWN["hooks"][0])
    path.write_text(json.dumps(written))
    guard("uninstall", "qwen")
    assert [*settings(path)["hooks"]] == ["PreToolUse"]


def test_a_plug_in_is_installed_for_opencode_and_removed_again(guard: Guard, root: Path) -> None:
    assert "64 MB" in guard("install", "opencode")
    text = (root / PLUGIN).read_text()
    assert "__COMMAND__" not in text
    assert "hook_client.py" in text
    assert f"ringfence guard undo --directory {root} $ARGUMENTS" in (root / UNDO).read_text()
    guard("install", "opencode", "--if-unavailable", "allow")
    assert '"--if-unavailable", "allow"' in (root / PLUGIN).read_text()
    guard("uninstall", "opencode")
    assert not (root / ".opencode").exists()


@pytest.mark.parametrize("file", [PLUGIN, UNDO])
def test_somebody_elses_plug_in_stays(guard: Guard, root: Path, file: str) -> None:
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("mine")
    assert "somebody else's" in guard("install", "opencode", exit_code=2)
    assert "somebody else's" in guard("uninstall", "opencode", exit_code=2)
    assert [path.read_text() for path in (root / ".opencode").rglob("*.*")] == ["mine"]


def test_other_files_beside_a_plug_in_stay(guard: Guard, root: Path) -> None:
    (root / UNDO).parent.mkdir(parents=True)
    (root / UNDO).with_name("mine.md").write_text("mine")
    guard("install", "opencode")
    guard("uninstall", "opencode")
    assert [path.name for path in (root / ".opencode").rglob("*.*")] == ["mine.md"]


@pytest.mark.parametrize("agent", ["codex", "gemini"])
def test_an_agent_that_tells_no_exit_code_rolls_back_no_failure(guard: Guard, root: Path, agent: str) -> None:
    assert "does not tell" in guard("install", agent, "--rollback-on-failure", exit_code=2)
    assert not (root / FILES[agent][0]).exists()


def test_a_policy_that_cannot_be_used_is_refused_before_anything_is_written(guard: Guard, root: Path) -> None:
    assert "nonsense" in guard("install", "claude", "--policy", "nonsense", exit_code=2)
    assert not (root / ".claude").exists()


def fire(root: Path, name: str, agent: str = "claude", **event: Any) -> subprocess.CompletedProcess[str]:
    """Run the hook that the agent's file has for an event, as the agent does: by a shell."""
    (hook,) = (hook for group in settings(root / FILES[agent][0])["hooks"][name] for hook in group["hooks"])
    payload = {"hook_event_name": name, "session_id": "s", "cwd": str(root), "prompt_id": "p", **event}
    return subprocess.run(
        hook["command"],
        shell=True,
        input=json.dumps(payload),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=root,
        env={"PATH": os.environ["PATH"], "CLAUDE_PID": str(os.getpid())},
    )


def bash(root: Path, script: str, prompt: str = "p", session: str = "s") -> str:
    call = {
        "session_id": session,
        "prompt_id": prompt,
        "tool_name": "Bash",
        "tool_input": {"command": script},
        "tool_use_id": script,
    }
    assert fire(root, "PreToolUse", **call).returncode == 0
    subprocess.run(["sh", "-c", script], cwd=root, check=True)
    done = fire(root, "PostToolUse", **call, tool_response={})
    assert done.returncode == 0
    return done.stdout


def test_an_installed_agent_is_guarded_and_a_person_sees_and_undoes_what_it_did(guard: Guard, root: Path) -> None:
    assert "no guard runs" in guard("status")
    guard("install", "claude", "--policy", "deny:/protected")
    assert bash(root, "echo 1 > 1.txt") == ""
    assert "protected must not be created" in bash(root, "mkdir protected; echo s > side.txt")
    bash(root, "echo 2 > 2.txt", "q")
    bash(root, "echo 3 > 3.txt", "q")
    assert not (root / "side.txt").exists()

    assert "Claude Code: installed, project, last event PostToolUse" in guard("status")
    assert json.loads(guard("status", "--json"))["guard"]["sessions"] == 1
    lines = [re.split("  +", line.strip()) for line in guard("log").splitlines()]
    assert [line[0] for line in lines] == ["3", "2", "-", "1"]
    denied = "denied by the policy paths: protected must not be created; kept as aborted/1"
    assert lines[2][2:] == ["claude", "Bash: mkdir protected; echo s > side.txt", "protected, side.txt", denied]
    assert lines[3][2:] == ["claude", "Bash: echo 1 > 1.txt", "1.txt", "kept"]
    assert json.loads(guard("log", "--json", "--limit", "1"))["calls"][0]["paths"] == ["3.txt"]
    assert "+1" in guard("show", "1")
    for words in (("1", "--aborted"), ("--aborted", "1"), ("aborted/1",), ("aborted/1", "--stat")):
        assert "side.txt" in guard("show", *words)
    assert json.loads(guard("show", "aborted/1", "--json"))["step"]["tool"] == "Bash"
    assert "side.txt" in ringfence_text("show", ".", "aborted/1", cwd=root).stdout
    assert "+3" in guard("show")

    assert "3.txt" in guard("undo", "--prompt")
    assert sorted(path.name for path in root.glob("?.txt")) == ["1.txt", "a.txt"]
    guard("undo", "--session")
    assert sorted(path.name for path in root.glob("?.txt")) == ["a.txt"]
    assert "stopped" in guard("stop")
    assert "no guard runs here" in guard("stop")


def test_commands_work_beside_a_guard_from_below_and_without_one(guard: Guard, root: Path) -> None:
    guard("install", "claude")
    bash(root, "mkdir below; echo 1 > 1.txt")
    for words in (("checkpoint", ".", "before"), ("exec", "--", "touch", "2.txt"), ("undo",), ("gc",)):
        done = ringfence_text(*words, cwd=root)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in root.glob("[0-9].txt")) == ["1.txt"]
    assert json.loads(guard("status", "--json"))["guard"]["sessions"] == 1
    bash(root, "echo 3 > 3.txt")
    fire(root, "PreToolUse", tool_name="Bash", tool_input={"command": "long"}, tool_use_id="long")
    busy = ringfence_text("restore", ".", "before", cwd=root)
    assert busy.returncode == 2
    assert "watches a call of claude (long)" in busy.stderr
    guard("stop")
    assert "1.txt" in guard("log", "--directory", str(root / "below"))
    assert "3.txt" in guard("undo", "--directory", str(root / "below"))
    assert not (root / "3.txt").exists()


def test_an_undo_that_waits_for_a_call_does_not_take_its_step_unsaid(guard: Guard, root: Path) -> None:
    guard("install", "claude")
    bash(root, "echo 1 > 1.txt")
    guard("stop")
    with open_guarded(str(root)) as workspace, socket.socket(socket.AF_UNIX) as holder, ExitStack() as stack:
        folder = os.open(guard_directory(root), os.O_PATH)
        stack.callback(os.close, folder)
        holder.bind(f"/proc/self/fd/{folder}/socket")  # a path of any length
        stack.callback((guard_directory(root) / "socket").unlink)
        holder.listen()
        words = [sys.executable, "-m", "ringfence_cli", "undo"]
        undo = stack.enter_context(subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, text=True))
        asked, _ = holder.accept()
        mark = workspace.begin_look()
        (root / "2.txt").write_text("2")
        workspace.adopt(mark, tool="Bash", client="claude", title="echo 2 > 2.txt")
        workspace.close()
        asked.sendall(b'{"released": true}\n')
        _, said = undo.communicate(timeout=60)
        asked.close()
    assert undo.returncode == 1
    assert "nothing was undone: step 2 (Bash: echo 2 > 2.txt of claude)" in said
    assert (root / "2.txt").exists()
    assert ringfence_text("undo", cwd=root).returncode == 0
    assert sorted(path.name for path in root.glob("[0-9].txt")) == ["1.txt"]


@pytest.mark.parametrize("hides", ["", "env -u RINGFENCE_CALL "])
def test_an_agent_within_an_exec_is_a_part_of_that_transaction(guard: Guard, root: Path, hides: str) -> None:
    guard("install", "claude")
    bash(root, "echo 1 > 1.txt")
    (root / "below").mkdir()
    call = {"tool_name": "Bash", "tool_input": {"command": "x"}, "tool_use_id": "x", "tool_response": {}}
    lines, said = ["set -e"], shlex.quote(str(root.parent / "said"))
    for name in ("SessionStart", "PreToolUse", "PostToolUse", "Stop", "SessionEnd"):
        (hook,) = settings(root / FILES["claude"][0])["hooks"][name][0]["hooks"]
        event = {"hook_event_name": name, "session_id": "t", "cwd": str(root), "prompt_id": "p", **call}
        lines.append(f"echo {shlex.quote(json.dumps(event))} | {hides}{hook['command']} >> {said} 2>&1")
        lines.append(f"echo {name} > {name}.txt")
    agent = root.parent / "agent.sh"
    agent.write_text("\n".join(lines))
    for directory, exit_code in ((".", 0), ("below", 3)):
        done = ringfence_process("exec", directory, "--", "sh", "-c", f"sh {agent}; exit {exit_code}", cwd=root)
        assert done.returncode == exit_code, done.stderr
    assert (root.parent / "said").read_text() == ""
    assert (root / "Stop.txt").exists()
    steps = json.loads(ringfence_text("log", "--json", cwd=root).stdout)["log"]
    assert [step["tool"] for step in steps if step["number"]] == ["exec", "Bash"]
    assert len(guard("log").splitlines()) == 1
    bash(root, "echo 2 > 2.txt")
    assert len(guard("log").splitlines()) == 2


def test_one_undo_after_another_goes_back_step_by_step_and_past_the_steps_of_others(guard: Guard, root: Path) -> None:
    guard("install", "claude")
    for n in (1, 2, 3):
        bash(root, f"echo {n} > {n}.txt")
    assert ringfence_text("exec", "--", "touch", "9.txt", cwd=root).returncode == 0
    for left in ("129", "19"):
        guard("undo")
        assert sorted(path.name for path in root.glob("[0-9].txt")) == [f"{n}.txt" for n in left]
    told = fire(root, "UserPromptSubmit", prompt="go on", prompt_id="later").stdout
    assert "A person has undone changes of yours" in told
    assert "2.txt" in told
    assert "Undone: 1.txt" in fire(root, "UserPromptSubmit", prompt="undo!", prompt_id="last").stdout
    assert "no step of an agent" in guard("undo", exit_code=2)
    assert (root / "9.txt").exists()


def test_hidden_files_never_enter_the_history(guard: Guard, root: Path) -> None:
    (root / ".env").write_text("KEY=earlier-secret\n")
    guard("install", "claude", "--policy", "deny:/protected")
    bash(root, "sed -i s/earlier/later/ .env; echo 1 > 1.txt")
    assert "later-secret" not in guard("show", "1")
    assert "rolled this call back" in bash(root, "sed -i s/later/last/ .env; mkdir protected")
    assert (root / ".env").read_text() == "KEY=last-secret\n"
    guard("stop")
    assert b"-secret" not in store_bytes(guard_directory(root).parent)


def test_an_undo_names_hidden_files_that_it_leaves_and_a_dry_run_says_what_would_be(guard: Guard, root: Path) -> None:
    (root / ".env").write_text("KEY=1\n")
    guard("install", "claude")
    bash(root, "echo 1 > 1.txt; echo KEY=2 > .env")
    bash(root, "echo 2 > 2.txt")
    assert guard("undo", "--dry-run") == "Would be undone: 2.txt.\n"
    both = guard("undo", "2", "--dry-run")
    assert "1.txt, 2.txt" in both or "2.txt, 1.txt" in both
    assert "Not undone, since hidden files are in no history: .env" in both
    assert (root / "2.txt").exists()
    assert "3 " not in guard("log").split()
    bash(root, "echo KEY=3 > .env")
    assert "hidden files are in no history" in guard("log", "--limit", "1")
    assert "Not undone" in guard("undo")
    assert "Not undone" not in guard("undo", "--", "1.txt")
    assert (root / ".env").read_text() == "KEY=3\n"


def test_objects_of_git_are_counted(guard: Guard, root: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    guard("install", "claude", "--policy", "deny:/protected")
    commit = "git add -A && git -c user.name=n -c user.email=e commit -qm one"
    bash(root, f"echo 1 > 1.txt; {commit}")
    (line,) = guard("log").splitlines()
    assert re.search(r"  1.txt, \d+ paths of git  kept$", line)
    assert "paths of git's own data" in guard("show", "1")
    assert re.search(r"git: refs/heads/\w+: none -> [0-9a-f]{40}\n", guard("show", "1"))
    told = json.loads(bash(root, f"mkdir protected; echo 1 > protected/p; {commit}"))["reason"]
    assert ".git/refs/heads" in told
    assert "objects of git" not in told
    assert "What came to .git/objects stays there, and git's refs are what they were." in told


def test_some_paths_of_a_step_are_undone(guard: Guard, root: Path) -> None:
    guard("install", "claude")
    bash(root, "echo 1 > 1.txt; echo 2 > 2.txt")
    assert "is not in" in guard("undo", "--", "../other", exit_code=2)
    assert "2.txt" in guard("undo", "--session", "--", "2.txt")
    assert (root / "1.txt").exists()
    assert not (root / "2.txt").exists()


def test_an_installation_over_a_running_guard_has_its_policies_in_force(guard: Guard, root: Path) -> None:
    guard("install", "claude")
    bash(root, "echo 1 > 1.txt")
    guard("install", "claude", "--policy", "deny:*.txt")
    assert "must not be created" in bash(root, "echo 2 > 2.txt")


def test_there_is_nothing_to_show_or_undo_at_first(guard: Guard, root: Path) -> None:
    guard("install", "qwen")
    assert "no step of an agent" in guard("undo", "--session", exit_code=2)
    assert guard("show", "7", exit_code=2)
    assert guard("log") == "no call of an agent has changed a file here yet\n"
    assert "give one of" in guard("undo", "3", "--prompt", exit_code=2)


def test_the_command_of_a_hook_runs_one_file_of_the_standard_library(guard: Guard, root: Path) -> None:
    guard("install", "gemini")
    words = shlex.split(hooks_of(root / FILES["gemini"][0])[0]["command"])
    assert words[0] == "/bin/sh"
    assert all(Path(word).exists() for word in words[:4])
    assert 'exec "$python" -I -S ' in Path(words[1]).read_text()
