"""Calls of agents' own tools: which is whose step, what goes back, and what each model is told."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from effort import amount

from ringfence.errors import WorkspaceLockedError
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, GuardSettings, HookAnswer, HookEvent, open_guarded, parse_event
from ringfence_sandbox import Workspace

PROTECTED = PathPolicy(deny=["/protected"])


class Agent:
    """Claude Code, as far as its hooks are concerned. Commands are real."""

    def __init__(self, root: Path, calls: GuardedCalls, session: str = "s1", subagent: str = "") -> None:
        self.root, self.calls = root, calls
        self.given: dict[str, Any] = {"session_id": session, "cwd": str(root), "prompt_id": "p1"}
        if subagent:
            self.given["agent_id"] = subagent
        self.transcript = root.parent / f"transcript-{session}"
        self.given["transcript_path"] = str(self.transcript)
        self._n = 0

    def event(self, name: str, **more: Any) -> HookEvent:
        return parse_event("claude", {"hook_event_name": name, **self.given, **more})

    def tell(self, name: str, **more: Any) -> HookAnswer:
        return self.calls.handle(self.event(name, **more))

    def call_of(self, tool: str, **arguments: Any) -> dict[str, Any]:
        self._n += 1
        return {"tool_name": tool, "tool_input": arguments, "tool_use_id": f"{self.given['session_id']}-{self._n}"}

    def begin(self, tool: str, **arguments: Any) -> dict[str, Any]:
        call = self.call_of(tool, **arguments)
        assert self.tell("PreToolUse", **call) == HookAnswer()
        return call

    def end(self, call: dict[str, Any], code: int = 0) -> HookAnswer:
        if code:
            return self.tell("PostToolUseFailure", **call, error=f"Exit code {code}\noops")
        return self.tell("PostToolUse", **call, tool_response={})

    def sh(self, script: str) -> int:
        return subprocess.run(["sh", "-ec", script], cwd=self.root).returncode

    def bash(self, script: str, **arguments: Any) -> HookAnswer:
        call = self.begin("Bash", command=script, **arguments)
        return self.end(call, self.sh(script))

    def write(self, path: str, content: str) -> HookAnswer:
        call = self.begin("Write", file_path=str(self.root / path), content=content)
        (self.root / path).write_text(content)
        return self.end(call)


@pytest.fixture
def log(root: Path) -> GuardLog:
    return GuardLog(root.parent)


@pytest.fixture
def guarded(workspace: Workspace, log: GuardLog) -> Callable[..., GuardedCalls]:
    def make(**settings: Any) -> GuardedCalls:
        return GuardedCalls(
            workspace.root,
            log,
            open_workspace=lambda: workspace,
            policies=[PROTECTED],
            settings=GuardSettings(**settings),
            overlap_seconds=0.2,
            verdict_seconds=0.2,
        )

    return make


@pytest.fixture
def agent(root: Path, guarded: Callable[..., GuardedCalls]) -> Agent:
    return Agent(root, guarded())


def other(agent: Agent, session: str = "s2", subagent: str = "") -> Agent:
    return Agent(agent.root, agent.calls, session, subagent)


def steps(workspace: Workspace) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.tool, step.paths) for step in workspace.steps()]


def files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.relative_to(root).parts[0].startswith((".ringfence-hold", ".git"))
    }


BEFORE = {"a.txt": "a\n", "notes.txt": "notes\n"}


def test_each_changing_call_is_a_step_that_says_whose_it_is(agent: Agent, workspace: Workspace, log: GuardLog) -> None:
    assert agent.bash("echo b > b.txt; rm a.txt") == HookAnswer()
    assert agent.write("notes.txt", "mine") == HookAnswer()
    assert other(agent, "s1", "helper").bash("echo c > c.txt") == HookAnswer()
    agent.bash("true")
    assert steps(workspace) == [("Bash", ("a.txt", "b.txt")), ("Write", ("notes.txt",)), ("Bash", ("c.txt",))]
    assert {(step.session_id, step.client) for step in workspace.steps()} == {("s1", "claude")}
    found = [(one.kind, one.tool, one.arguments, one.step, one.subagent, one.prompt_id) for one in log.read()]
    assert found == [
        ("kept", "Bash", "echo b > b.txt; rm a.txt", 1, "", "p1"),
        ("kept", "Write", str(agent.root / "notes.txt"), 2, "", "p1"),
        ("kept", "Bash", "echo c > c.txt", 3, "helper", "p1"),
    ]


def test_a_denied_call_goes_back_whole_and_its_model_is_told(agent: Agent, workspace: Workspace, log: GuardLog) -> None:
    answer = agent.bash("mkdir protected; echo x > protected/x.txt; echo s > side.txt; rm notes.txt")
    assert files(agent.root) == BEFORE
    for part in ("paths", "protected must not be created", "side.txt", "notes.txt", "Read them again", "aborted/1"):
        assert part in answer.verdict
    assert steps(workspace) == []
    assert workspace.aborted_step(1).step.tool == "Bash"
    assert [(one.kind, one.aborted) for one in log.read()] == [("denied", 1)]


def test_a_denial_of_a_command_says_how_a_person_gets_an_edit_of_theirs_back(agent: Agent) -> None:
    way = "`ringfence guard show aborted/1 | git apply --include=PATH`"
    assert way in agent.bash("mkdir protected; echo x > protected/x.txt").verdict
    (agent.root / "protected").mkdir()
    assert "git apply" not in agent.write("protected/y.txt", "y").verdict  # looked at by its path alone


def test_a_command_that_fails_is_kept(agent: Agent, workspace: Workspace) -> None:
    assert agent.bash("echo part > c.txt; exit 1") == HookAnswer()
    assert steps(workspace) == [("Bash", ("c.txt",))]


def test_a_command_that_fails_goes_back_where_a_person_asked_for_it(
    root: Path, guarded: Callable[..., GuardedCalls], workspace: Workspace
) -> None:
    agent = Agent(root, guarded(rollback_on_failure=True))
    assert "exit code 3" in agent.bash("echo part > c.txt; exit 3").verdict
    assert files(root) == BEFORE
    agent.bash("echo whole > c.txt")
    assert steps(workspace) == [("Bash", ("c.txt",))]


def test_a_persons_edit_between_calls_stays_theirs(agent: Agent, workspace: Workspace) -> None:
    agent.bash("echo b > b.txt")
    agent.sh("mkdir protected; echo mine > protected/x; echo p > person.txt")
    agent.bash("echo c > c.txt")
    assert steps(workspace) == [("Bash", ("b.txt",)), ("Bash", ("c.txt",))]
    assert (agent.root / "protected/x").exists()


def test_a_persons_edit_during_a_call_that_names_its_file_stays_theirs(agent: Agent, workspace: Workspace) -> None:
    call = agent.begin("Write", file_path=str(agent.root / "a.txt"), content="new")
    agent.sh("echo new > a.txt; echo p > person.txt")
    agent.end(call)
    assert steps(workspace) == [("Write", ("a.txt",))]


def test_a_denied_file_goes_back_beside_a_command_that_runs(agent: Agent, workspace: Workspace) -> None:
    (agent.root / "protected").mkdir()
    command = agent.begin("Bash", command="slow")
    agent.sh("echo 1 > slow.txt")
    assert "protected/x must not be created" in other(agent).write("protected/x", "no").verdict
    assert agent.end(command) == HookAnswer()
    assert (agent.root / "slow.txt").exists()
    assert not (agent.root / "protected/x").exists()


def test_a_file_that_is_being_written_is_not_the_commands(agent: Agent, workspace: Workspace) -> None:
    command = agent.begin("Bash", command="slow")
    writing = other(agent).begin("Write", file_path=str(agent.root / "f.txt"), content="f")
    agent.sh("echo f > f.txt; echo s > s.txt")
    agent.end(command)
    agent.sh("echo more >> f.txt")
    other(agent).end(writing)
    assert steps(workspace) == [("Write", ("f.txt",)), ("Bash", ("s.txt",)), ("Write", ("f.txt",))]


def test_commands_that_overlap_are_one_step_of_both(agent: Agent, workspace: Workspace, log: GuardLog) -> None:
    second = other(agent)
    one = agent.begin("Bash", command="one")
    two = second.begin("Bash", command="two")
    agent.sh("echo 1 > 1.txt; echo 2 > 2.txt")
    assert agent.end(one) == HookAnswer()
    assert second.end(two) == HookAnswer()
    assert steps(workspace) == [("Bash", ("1.txt", "2.txt"))]
    assert [(record.session_id, record.arguments, record.step) for record in log.read()] == [
        ("s1", "one", 1),
        ("s2", "two", 1),
    ]


def test_commands_that_overlap_are_denied_together_and_each_is_told(
    root: Path, workspace: Workspace, log: GuardLog
) -> None:
    calls = GuardedCalls(
        root, log, open_workspace=lambda: workspace, policies=[PROTECTED], overlap_seconds=0.1, verdict_seconds=60
    )
    agent = Agent(root, calls)
    second = other(agent)
    one = agent.begin("Bash", command="one")
    two = second.begin("Bash", command="two")
    agent.sh("echo 1 > 1.txt; mkdir protected")
    told: list[HookAnswer] = []
    waiting = threading.Thread(target=lambda: told.append(agent.end(one)))
    waiting.start()
    told.append(second.end(two))
    waiting.join()
    assert files(root) == BEFORE
    for answer in told:
        assert "one; two" in answer.verdict
        assert "cannot be told apart" in answer.verdict


def test_a_command_waits_for_one_that_ends_soon(root: Path, workspace: Workspace, log: GuardLog) -> None:
    calls = GuardedCalls(root, log, open_workspace=lambda: workspace, overlap_seconds=60)
    agent, began = Agent(root, calls), threading.Event()
    second = other(agent)

    def run() -> None:
        began.set()
        second.bash("echo 2 > 2.txt")

    one = agent.begin("Bash", command="one")
    waiting = threading.Thread(target=run)
    waiting.start()
    began.wait()
    agent.sh("echo 1 > 1.txt")
    agent.end(one)
    waiting.join()
    assert steps(workspace) == [("Bash", ("1.txt",)), ("Bash", ("2.txt",))]


def test_the_first_of_two_that_does_not_hear_the_verdict_in_time_is_told_later(agent: Agent) -> None:
    second = other(agent)
    one, two = agent.begin("Bash", command="one"), second.begin("Bash", command="two")
    agent.sh("mkdir protected")
    assert agent.end(one) == HookAnswer()
    assert "rolled this call back" in second.end(two).verdict
    later = agent.tell("UserPromptSubmit", prompt="go on")
    assert "one; two" in later.context
    assert later.verdict == ""
    assert agent.tell("UserPromptSubmit", prompt="go on") == HookAnswer()


@pytest.mark.parametrize("name", ["Stop", "SessionEnd", "UserPromptSubmit", "PostToolBatch"])
def test_a_call_without_an_end_is_kept_by_the_event_that_proves_it_over(
    agent: Agent, workspace: Workspace, log: GuardLog, name: str
) -> None:
    agent.begin("Bash", command="killed")
    agent.begin("Write", file_path=str(agent.root / "w.txt"), content="w")
    agent.sh("echo half > half.txt; echo w > w.txt")
    agent.tell(name, prompt_id="p2", prompt="next")
    assert agent.calls.open_calls == []
    assert {(tool, paths) for tool, paths in steps(workspace)} == {("Bash", ("half.txt",)), ("Write", ("w.txt",))}
    assert {one.note for one in log.read()} == {"its end was never told"}


def test_another_sessions_end_settles_nothing(agent: Agent) -> None:
    agent.begin("Bash", command="goes on")
    other(agent).tell("SessionEnd")
    other(agent, "s1", "helper").tell("SubagentStop")
    assert [event.arguments for event in agent.calls.open_calls] == ["goes on"]


def test_what_a_killed_agents_command_was_denied_goes_back_alone(agent: Agent, workspace: Workspace) -> None:
    agent.begin("Bash", command="killed")
    agent.sh("mkdir protected; echo x > protected/x; echo half > half.txt")
    agent.calls.end_session("claude", "s1")
    assert files(agent.root) == {**BEFORE, "half.txt": "half\n"}
    assert workspace.aborted()[0].paths == ("protected", "protected/x")


def test_a_late_change_of_a_background_command_is_not_the_next_calls(
    agent: Agent, workspace: Workspace, log: GuardLog
) -> None:
    agent.bash("true # server", run_in_background=True)
    agent.sh("mkdir protected; echo x > protected/x; echo late > late.txt")
    call = agent.call_of("Bash", command="innocent")
    assert agent.tell("PreToolUse", **call) == HookAnswer()
    agent.sh("echo good > good.txt")
    answer = agent.end(call)
    assert answer.verdict == ""
    assert "true # server" in answer.context
    assert "protected/x" in answer.context
    assert "or by somebody else" in answer.context
    assert files(agent.root) == {**BEFORE, "good.txt": "good\n", "late.txt": "late\n"}
    assert steps(workspace) == [("unattributed", ("late.txt",)), ("Bash", ("good.txt",))]
    assert [one.kind for one in log.read()] == ["denied", "unattributed", "kept"]


def test_beside_a_background_command_a_file_that_is_being_written_is_its_calls(
    agent: Agent, workspace: Workspace
) -> None:
    agent.bash("true", run_in_background=True)
    first = agent.begin("Write", file_path=str(agent.root / "1.txt"), content="1")
    agent.sh("echo 1 > 1.txt; echo late > late.txt")
    agent.write("2.txt", "2")
    agent.end(first)
    assert steps(workspace) == [("Write", ("1.txt",)), ("unattributed", ("late.txt",)), ("Write", ("2.txt",))]


def test_when_its_commands_have_ended_changes_between_calls_are_a_persons_again(agent: Agent) -> None:
    agent.bash("true", run_in_background=True)
    agent.tell("Stop", background_tasks=[])
    agent.sh("mkdir protected")
    agent.bash("echo b > b.txt")
    assert (agent.root / "protected").is_dir()


def test_a_command_in_the_background_is_refused_where_a_person_asked_for_it(
    root: Path, guarded: Callable[..., GuardedCalls]
) -> None:
    agent = Agent(root, guarded(deny_background=True))
    call = agent.call_of("Bash", command="x", run_in_background=True)
    assert "background" in agent.tell("PreToolUse", **call).denial
    assert agent.calls.open_calls == []


def test_an_end_without_a_beginning_changes_nothing(agent: Agent, workspace: Workspace, log: GuardLog) -> None:
    agent.sh("echo x > x.txt")
    assert agent.end(agent.call_of("Bash", command="unseen")) == HookAnswer()
    assert steps(workspace) == []
    assert [one.kind for one in log.read()] == ["unseen"]


def test_a_file_outside_is_not_looked_at(agent: Agent, workspace: Workspace, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    call = agent.begin("Write", file_path=str(outside), content="x")
    outside.write_text("x")
    assert agent.end(call) == HookAnswer()
    assert steps(workspace) == []
    assert outside.exists()


def test_a_prompt_undoes_the_sessions_own_steps_once(agent: Agent, workspace: Workspace) -> None:
    agent.bash("echo 1 > 1.txt")
    other(agent).bash("echo 2 > 2.txt")
    agent.bash("echo 3 > 3.txt")
    blocked = agent.tell("UserPromptSubmit", prompt="undo! 2", prompt_id="p2")
    assert "1.txt" in blocked.denial
    assert files(agent.root) == {**BEFORE, "2.txt": "2\n"}
    assert agent.tell("UserPromptSubmit", prompt="undo! 2", prompt_id="p2").denial == ""
    assert "undone" in agent.tell("UserPromptSubmit", prompt="go on", prompt_id="p3").context
    assert (agent.root / "2.txt").exists()


def test_nothing_is_undone_while_another_session_has_a_call_open_and_that_is_judged(
    agent: Agent, workspace: Workspace
) -> None:
    agent.bash("echo 1 > 1.txt")
    second = other(agent)
    call = second.begin("Bash", command="long")
    second.sh("mkdir protected; echo s > side.txt")
    with pytest.raises(WorkspaceLockedError, match=r"watches a call of claude \(long\)"):
        agent.calls.undo(1)
    assert "watches a call" in agent.tell("UserPromptSubmit", prompt="undo!", prompt_id="p2").denial
    agent.tell("SessionEnd", reason="exit")
    assert "protected must not be created" in second.end(call).verdict
    assert files(agent.root) == {**BEFORE, "1.txt": "1\n"}


def test_an_undo_goes_on_before_a_step_of_which_nothing_can_be_undone(agent: Agent, workspace: Workspace) -> None:
    for n in (1, 2, 3):
        agent.bash(f"echo {n} > {n}.txt")
    workspace.undo()
    (agent.root / "2.txt").write_text("a person's\n")
    workspace.look()
    assert "Nothing was undone" in agent.calls.undo(1)
    assert "2.txt" in agent.calls.undo(1)
    assert "Undone: 1.txt" in agent.calls.undo(1)
    assert files(agent.root) == {**BEFORE, "2.txt": "a person's\n"}


def test_a_session_that_ends_while_somebody_has_the_workspace_is_forgotten(root: Path, log: GuardLog) -> None:
    calls = GuardedCalls(
        str(root), log, open_workspace=partial(open_guarded, str(root)), policies=[PROTECTED], verdict_seconds=0.2
    )
    agent = Agent(root, calls)
    agent.bash("true", run_in_background=True)
    calls.close()
    with Workspace.open(root), pytest.raises(WorkspaceLockedError):
        calls.end_session("claude", "s1")
    (root / "protected").mkdir()
    (root / "protected/mine").write_text("a person's\n")
    assert other(agent).bash("echo 1 > 1.txt") == HookAnswer()
    assert (root / "protected/mine").exists()
    calls.close()


def test_a_prompt_is_found_behind_what_hooks_have_put_before_it(agent: Agent) -> None:
    agent.bash("echo 1 > 1.txt")
    prompt = "<hook_context>notes</hook_context>\n\nundo!"
    assert "1.txt" in agent.tell("UserPromptSubmit", prompt=prompt, prompt_id="p2").denial


@pytest.mark.parametrize("prompt", ["please undo! 2", "undo! everything", "undo", "undo! -1"])
def test_another_prompt_undoes_nothing(agent: Agent, prompt: str) -> None:
    agent.bash("echo 1 > 1.txt")
    assert agent.tell("UserPromptSubmit", prompt=prompt, prompt_id="p2") == HookAnswer()
    assert (agent.root / "1.txt").exists()


def test_a_prompt_undoes_no_more_than_its_session_did(agent: Agent) -> None:
    other(agent).bash("echo 2 > 2.txt")
    agent.bash("echo 1 > 1.txt")
    assert "1 step" in agent.tell("UserPromptSubmit", prompt="undo! 2", prompt_id="p2").denial
    assert (agent.root / "1.txt").exists()


def test_a_sub_agents_prompt_undoes_nothing(agent: Agent) -> None:
    agent.bash("echo 1 > 1.txt")
    helper = other(agent, "s1", "helper")
    assert helper.tell("UserPromptSubmit", prompt="undo!", prompt_id="p2") == HookAnswer()
    assert (agent.root / "1.txt").exists()


@pytest.mark.parametrize(
    "script",
    [
        "mkdir -p .claude; echo '{}' > .claude/settings.json",
        "echo x > .git/hooks/pre-commit",
        "git config core.hooksPath /tmp/x",
        "git config alias.st status",
        "printf '[include]\\npath = /x\\n' >> .git/config",
    ],
)
def test_what_would_let_an_agent_loose_goes_back(agent: Agent, script: str) -> None:
    agent.sh("git init -q .")
    config = (agent.root / ".git/config").read_text()
    assert "policy guard" in agent.bash(script).verdict
    assert (agent.root / ".git/config").read_text() == config
    assert not (agent.root / ".git/hooks/pre-commit").exists()
    assert not (agent.root / ".claude").exists()


def test_commits_branches_and_remotes_are_an_agents_to_make(agent: Agent, workspace: Workspace) -> None:
    agent.sh("git init -q .; git config alias.st status")
    git = "git -c user.name=n -c user.email=e"
    assert agent.bash(f"git add a.txt; {git} commit -qm 1; git branch x; git remote add o /r") == HookAnswer()
    assert len(workspace.steps()) == 1


@pytest.mark.parametrize("script", ["sleep 60 >/dev/null 2>&1 &", "nohup make serve", "(a; b) & c"])
def test_a_command_line_that_leaves_a_program_running_is_in_the_background(
    agent: Agent, workspace: Workspace, script: str
) -> None:
    agent.end(agent.begin("Bash", command=script))
    agent.sh("mkdir protected; echo 1 > late.txt")
    assert "late change" in agent.write("mine.txt", "mine").context
    assert not (agent.root / "protected").exists()
    assert steps(workspace) == [("unattributed", ("late.txt",)), ("Write", ("mine.txt",))]
    agent.tell("Stop", background_tasks=[])
    agent.sh("echo 2 > later.txt")
    agent.bash("true")
    assert steps(workspace)[-1] == ("unattributed", ("later.txt",))


@pytest.mark.parametrize(
    "script", ["a && b", "a 2>&1", "a &> b", "echo 'a & b'", 'echo "a & b"', "a & b & wait", "echo a \\& b", "a |& b"]
)
def test_a_command_line_that_ends_whole_is_not_in_the_background(agent: Agent, script: str) -> None:
    assert not agent.event("PreToolUse", **agent.call_of("Bash", command=script)).is_background


def test_the_steps_of_long_ago_go_when_a_session_ends(root: Path, workspace: Workspace, log: GuardLog) -> None:
    agent = Agent(root, GuardedCalls(root, log, open_workspace=lambda: workspace, kept_steps=2))
    for number in range(4):
        agent.write("a.txt", str(number))
    agent.tell("SessionEnd")
    assert len(workspace.steps()) == 4
    agent.write("a.txt", "last")
    agent.tell("SessionEnd")
    assert [step.number for step in workspace.steps()] == [3, 4, 5]


def test_hundreds_of_events_leave_no_more_than_what_is_kept(root: Path, tmp_path: Path, log: GuardLog) -> None:
    store, largest = tmp_path / "store", 0
    opened = partial(Workspace.open, root, store=store)
    calls = GuardedCalls(root, log, open_workspace=opened, kept_steps=3, state=tmp_path, policies=[PROTECTED])
    agent = Agent(root, calls)
    for session in range(amount(prove=40, test=8)):
        for number in range(16):
            call = agent.begin("Bash", command="x")
            (root / ("protected" if number % 8 == 7 else "a.txt")).write_text(f"{session} {number}" * 100)
            agent.end(call)
        agent.tell("SessionEnd")
        size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        assert size < 2 * largest or session < 3
        largest = max(size, largest)
    calls.close()
    assert len(log.read()) == 30
    assert (tmp_path / "open.jsonl").stat().st_size < 2 << 20
    with Workspace.open(root, store=store, read_only=True) as workspace:
        assert len(workspace.steps()) == 4  # and the one before the three


def test_a_late_verdict_of_a_sub_agents_session_is_told_to_the_session_above(agent: Agent) -> None:
    def told(name: str, session: str, **more: Any) -> HookAnswer:
        payload = {"hook_event_name": name, "sessionID": session, "cwd": str(agent.root), **more}
        return agent.calls.handle(parse_event("opencode", payload))

    call = {"tool": "bash", "callID": "1", "args": {"command": "x"}}
    told("tool.execute.before", "child", **call, parent_session_id="parent")
    agent.sh("mkdir protected")
    told("session.idle", "child", parent_session_id="parent")
    other = {**call, "callID": "2"}
    told("tool.execute.before", "parent", **other)
    assert "late change" in told("tool.execute.after", "parent", **other).context


def test_an_event_that_two_hooks_tell_counts_once(agent: Agent, workspace: Workspace, log: GuardLog) -> None:
    for tool, arguments in (("Bash", {"command": "x"}), ("Write", {"file_path": str(agent.root / "a.txt")})):
        call = agent.call_of(tool, **arguments)
        for _ in range(2):
            assert agent.tell("PreToolUse", **call) == HookAnswer()
        assert len(agent.calls.open_calls) == 1
        (agent.root / "a.txt").write_text(tool)
        for _ in range(2):
            assert agent.end(call) == HookAnswer()
    assert steps(workspace) == [("Bash", ("a.txt",)), ("Write", ("a.txt",))]
    assert [one.kind for one in log.read()] == ["kept", "kept"]


def test_a_call_id_that_is_used_again_is_another_call(agent: Agent, workspace: Workspace) -> None:
    lost = agent.begin("Bash", command="first")
    agent.sh("mkdir protected; echo 1 > first.txt")
    again = {**lost, "tool_input": {"command": "second"}}
    assert agent.tell("PreToolUse", **again) == HookAnswer()
    agent.sh("echo 2 > second.txt")
    assert "late change" in agent.end(again).context
    assert steps(workspace) == [("Bash", ("first.txt",)), ("Bash", ("second.txt",))]


@pytest.fixture
def restarted(root: Path, tmp_path: Path, log: GuardLog) -> Generator[Callable[[], GuardedCalls]]:
    """Starts a guard of its own opening of the workspace, in the place of one that was killed."""
    running: list[GuardedCalls] = []

    def start() -> GuardedCalls:
        for one in running:
            one.close()
        opened = partial(open_guarded, str(root))
        running.append(GuardedCalls(root, log, open_workspace=opened, policies=[PROTECTED], state=tmp_path))
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_another_guard_goes_on_with_the_calls_of_one_that_was_killed(
    root: Path, restarted: Callable[[], GuardedCalls]
) -> None:
    agent = Agent(root, restarted())
    command = agent.begin("Bash", command="x")
    file = agent.begin("Write", file_path=str(root / "mine.txt"))
    agent.sh("mkdir protected; echo 1 > side.txt")
    agent.calls = restarted()
    agent.sh("echo 1 > mine.txt")
    assert agent.end(file) == HookAnswer()
    assert "protected must not be created" in agent.end(command).verdict
    with Workspace.open(root, read_only=True) as workspace:
        assert steps(workspace) == [("Write", ("mine.txt",))]
    assert not (root / "side.txt").exists()


def test_what_a_background_command_does_without_a_guard_is_unattributed(
    root: Path, restarted: Callable[[], GuardedCalls]
) -> None:
    agent = Agent(root, restarted())
    agent.bash("true", run_in_background=True)
    agent.sh("mkdir protected; echo 1 > late.txt")
    agent.calls = restarted()
    assert "late change" in agent.bash("echo 2 > mine.txt").context
    assert not (root / "protected").exists()
    with Workspace.open(root, read_only=True) as workspace:
        assert steps(workspace) == [("unattributed", ("late.txt",)), ("Bash", ("mine.txt",))]


def test_what_changes_while_no_guard_runs_and_no_call_is_open_is_a_persons(
    root: Path, restarted: Callable[[], GuardedCalls]
) -> None:
    agent = Agent(root, restarted())
    agent.bash("true")
    agent.sh("mkdir protected; echo 1 > mine.txt")
    agent.calls = restarted()
    assert agent.bash("echo 2 > its.txt") == HookAnswer()
    with Workspace.open(root, read_only=True) as workspace:
        assert steps(workspace) == [("Bash", ("its.txt",))]


def test_a_call_that_ended_when_its_guard_was_killed_is_not_adopted_again(
    root: Path, tmp_path: Path, workspace: Workspace, log: GuardLog
) -> None:
    def started() -> GuardedCalls:
        return GuardedCalls(root, log, open_workspace=lambda: workspace, state=tmp_path)

    agent = Agent(root, started())
    call = agent.begin("Bash", command="x")
    agent.sh("echo 1 > a.txt")
    before = (tmp_path / "open.jsonl").read_text()
    agent.end(call)
    (tmp_path / "open.jsonl").write_text(before)
    agent.calls = started()
    assert agent.end(call) == HookAnswer()
    assert steps(workspace) == [("Bash", ("a.txt",))]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1}'])
def test_a_torn_file_of_open_calls_is_as_none(
    root: Path, tmp_path: Path, workspace: Workspace, log: GuardLog, text: str
) -> None:
    (tmp_path / "open.jsonl").write_text(text)
    agent = Agent(root, GuardedCalls(root, log, open_workspace=lambda: workspace, state=tmp_path))
    assert agent.bash("echo 1 > a.txt") == HookAnswer()
    assert steps(workspace) == [("Bash", ("a.txt",))]


RULES = ["Bash(ls:*)"]


@pytest.mark.parametrize("before", [None, {}, {"hooks": {"Stop": []}, "permissions": {"allow": RULES, "deny": []}}])
@pytest.mark.parametrize("rule", ["Bash(npm pkg get:*)", "Bash(npm pkg get *)", "Bash(npm pkg get name)"])
def test_what_a_person_permits_in_the_dialog_of_a_call_stays(
    root: Path, guarded: Callable[..., GuardedCalls], before: dict[str, Any] | None, rule: str
) -> None:
    settings = root / ".claude/settings.local.json"
    settings.parent.mkdir()
    if before is not None:
        settings.write_text(json.dumps(before))
    agent = Agent(root, guarded())
    call = agent.begin("Bash", command="touch made.txt && npm pkg get name")
    held = before or {}
    allowed = [*held.get("permissions", {}).get("allow", []), rule]
    settings.write_text(json.dumps({**held, "permissions": {"allow": allowed, "deny": []}}))
    (root / "made.txt").touch()
    assert agent.end(call) == HookAnswer()
    assert rule in settings.read_text()
    assert (root / "made.txt").exists()


@pytest.mark.parametrize(
    "after",
    [
        {"permissions": {"allow": ["Bash(*)"]}},
        {"permissions": {"allow": ["Bash"]}},
        {"permissions": {"allow": ["Bash(rm:*)"]}},
        {"permissions": {"allow": ["Bash(npm:*)", "Write"]}},
        {"permissions": {"allow": ["Bash(npm:*)"], "defaultMode": "bypassPermissions"}},
        {"permissions": {"allow": ["Bash(npm:*)"]}, "hooks": {}},
        {"hooks": {}},
    ],
)
def test_but_nothing_else_in_the_settings_of_an_agent(
    root: Path, guarded: Callable[..., GuardedCalls], after: dict[str, Any]
) -> None:
    settings = root / ".claude/settings.local.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps({"hooks": {"Stop": []}, "permissions": {"allow": []}}))
    agent = Agent(root, guarded())
    call = agent.begin("Bash", command="npm test")
    settings.write_text(json.dumps({"hooks": {"Stop": []}, **after}))
    assert "only people change it" in str(agent.end(call))
    assert json.loads(settings.read_text()) == {"hooks": {"Stop": []}, "permissions": {"allow": []}}


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ('echo \'{"allow": ["Bash(git push:*)"]}\' > .claude/settings.local.json', "Bash(git push:*)"),
        ("cd .claude; cp ../mine settings.local.json; git push", "Bash(git push:*)"),
        (f"echo {'x' * 300}; git push", "Bash(echo:*)"),
        ("./format.sh", "Bash(rm:*)"),
        ("./format.sh", "Bash(or:*)"),
        ("make; curl-config", "Bash(curl:*)"),
    ],
)
def test_a_command_permits_itself_nothing(
    root: Path, guarded: Callable[..., GuardedCalls], command: str, rule: str
) -> None:
    agent = Agent(root, guarded())
    call = agent.begin("Bash", command=command)
    (root / ".claude").mkdir()
    (root / ".claude/settings.local.json").write_text(json.dumps({"permissions": {"allow": [rule]}}))
    assert "only people change it" in str(agent.end(call))
    assert not (root / ".claude").exists()


def test_a_denial_says_that_hidden_files_stay_as_the_call_left_them(root: Path, log: GuardLog) -> None:
    (root / ".env").write_text("KEY=1\n")
    (root / "protected").mkdir(exist_ok=True)
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        agent = Agent(root, GuardedCalls(str(root), log, open_workspace=lambda: workspace, policies=[PROTECTED]))
        said = str(agent.bash("rm .env; echo q > protected/k.txt"))
    assert "Back to what they were: protected/k.txt." in said
    assert "These stay as the call left them, since hidden files are in no history: .env." in said
    assert not (root / ".env").exists()
