"""Commands in the background: how long what changes may be theirs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime

import pytest

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, HookAnswer, may_be_left, may_live, open_guarded, parse_event

SESSION = ("claude", "s1")
TICKS = os.sysconf("SC_CLK_TCK")
MARK = {"CLAUDECODE": "1", "CLAUDE_CODE_SESSION_ID": "s1"}
AGENT, SINCE = 50, 100.0


class Machine:
    """The processes of a machine: a first one, a terminal, the agent, and who is started later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add(1, 0, 0.0, name="systemd")
        self.add(2, 0, 0.0, name="kthreadd", flags=0x200000)
        self.add(40, 1, 10.0, name="terminal (1)")
        self.add(AGENT, 40, 20.0, name="claude")

    def add(
        self, number: int, parent: int, started: float, name: str = "sleep", state: str = "S", flags: int = 0
    ) -> None:
        place = self.folder / str(number)
        place.mkdir()
        words = [state, str(parent), "0", "0", "0", "-1", str(flags), *["0"] * 12, str(round(started * TICKS)), "0"]
        (place / "stat").write_text(f"{number} ({name}) {' '.join(words)}\n")

    def mark(self, number: int, cwd: str = "/home/u", **environment: str) -> None:
        (self.folder / str(number) / "cwd").symlink_to(cwd)
        text = "".join(f"{name}={value}\0" for name, value in environment.items())
        (self.folder / str(number) / "environ").write_text(text)

    def may_live(self, agent: int = AGENT) -> bool:
        return may_live(SESSION, SINCE, agent, "/repo", self.folder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "proc").mkdir()
    return Machine(tmp_path / "proc")


def test_nothing_of_a_command_lives_where_no_process_is_younger(machine: Machine) -> None:
    machine.mark(40, **MARK)
    assert not machine.may_live()


def test_a_process_without_a_parent_of_its_own_may_be_of_it(machine: Machine) -> None:
    machine.add(60, 1, 101.0)
    assert machine.may_live()


@pytest.mark.parametrize(
    ("cwd", "environment", "lives"), [("/etc", "", True), ("/etc", "C", False), ("/repo", "C", True)]
)
def test_but_not_if_it_works_elsewhere_and_would_have_the_mark(
    machine: Machine, cwd: str, environment: str, lives: bool
) -> None:
    machine.add(60, 1, 101.0)
    machine.mark(60, cwd, **({"LANG": environment} if environment else {}))
    assert machine.may_live() == lives


def test_so_may_what_the_agent_has_started(machine: Machine) -> None:
    machine.add(60, AGENT, 101.0)
    machine.add(61, 60, 102.0)
    assert machine.may_live()


def test_a_command_from_a_persons_terminal_is_not_of_it(machine: Machine) -> None:
    machine.add(60, 40, 101.0)
    machine.add(61, 60, 102.0)
    machine.mark(60, HOME="/home/u")
    assert not machine.may_live()


@pytest.mark.parametrize(("session", "lives"), [("s1", True), ("s2", False)])
def test_the_mark_of_the_session_shows_one_that_a_service_has_started(
    machine: Machine, session: str, lives: bool
) -> None:
    machine.add(60, 40, 101.0)
    machine.mark(60, **{**MARK, "CLAUDE_CODE_SESSION_ID": session})
    assert machine.may_live() == lives


def test_one_that_has_ended_and_one_of_the_kernel_are_not_of_it(machine: Machine) -> None:
    machine.add(60, 1, 101.0, state="Z")
    machine.add(61, 2, 101.0, flags=0x200000)
    assert not machine.may_live()


def test_one_from_outside_of_the_container_is_not_of_it(machine: Machine) -> None:
    machine.add(60, 0, 101.0)
    machine.add(61, 60, 102.0)
    assert not machine.may_live()


def test_where_the_agent_or_the_processes_are_unknown_it_may_live(machine: Machine, tmp_path: Path) -> None:
    assert machine.may_live(agent=0)
    assert may_live(SESSION, SINCE, AGENT, "/repo", tmp_path / "nothing")


def test_a_real_process_whose_parent_has_ended_is_found() -> None:
    since = clock_gettime(CLOCK_BOOTTIME)
    line = "setsid sleep 60 >/dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", line], env={**os.environ, **MARK}, capture_output=True, text=True, check=True)
    try:
        assert may_live(SESSION, since, os.getpid(), "/repo")
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@pytest.fixture
def calls(root: Path) -> Generator[GuardedCalls]:
    policies = [PathPolicy(deny=["/protected"])]
    opened = partial(open_guarded, str(root))
    made = GuardedCalls(root, GuardLog(root.parent), open_workspace=opened, policies=policies)
    made.watched(SESSION, AGENT, 1)
    yield made
    made.close()


def bash(root: Path, calls: GuardedCalls, script: str, session: str = "s1") -> HookAnswer:
    """Run a command whose line says that it goes on. It does not."""
    common = {"session_id": session, "cwd": str(root), "tool_name": "Bash", "tool_use_id": script}
    arguments = {"tool_input": {"command": script}}
    calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **common, **arguments}))
    return calls.handle(parse_event("claude", {"hook_event_name": "PostToolUse", **common, **arguments}))


def nothing_lives(session: tuple[str, str], since: float, agent: int, root: str) -> bool:
    return False


def all_live(session: tuple[str, str], since: float, agent: int, root: str) -> bool:
    return True


def change(root: Path, text: str) -> None:
    (root / "protected").mkdir(exist_ok=True)
    (root / "protected/mine.txt").write_text(text)


def test_what_changes_after_the_end_of_a_command_in_the_background_is_a_persons(
    root: Path, calls: GuardedCalls
) -> None:
    bash(root, calls, "serve &")
    asked: list[tuple[object, float, int]] = []

    def lives(session: tuple[str, str], since: float, agent: int, root: str) -> bool:
        asked.append((session, since, agent))
        return False

    calls.end_background(lives)
    change(root, "a person's\n")
    assert bash(root, calls, "true") == HookAnswer()
    assert (root / "protected/mine.txt").exists()
    ((session, since, agent),) = asked
    assert (session, agent) == (SESSION, AGENT)
    assert since <= clock_gettime(CLOCK_BOOTTIME)


def test_what_it_has_changed_until_then_is_judged(root: Path, calls: GuardedCalls) -> None:
    bash(root, calls, "serve &")
    change(root, "its own\n")
    calls.end_background(nothing_lives)
    assert not (root / "protected").exists()
    told = bash(root, calls, "true")
    assert "late change" in told.context
    assert "protected/mine.txt" in told.person
    assert "aborted/1" in told.person


def test_while_it_lives_what_changes_may_be_its_own(root: Path, calls: GuardedCalls) -> None:
    bash(root, calls, "serve &")
    calls.end_background(all_live)
    change(root, "its own\n")
    assert "late change" in bash(root, calls, "true").context


def test_one_of_another_session_goes_on(root: Path, calls: GuardedCalls) -> None:
    bash(root, calls, "serve &")
    bash(root, calls, "watch &", "s2")
    calls.end_background(lambda session, since, agent, root: session == ("claude", "s2"))
    change(root, "its own\n")
    assert "watch &" in bash(root, calls, "true", "s2").context


def test_another_guard_knows_when_a_command_began(root: Path, tmp_path: Path) -> None:
    def started() -> GuardedCalls:
        opened = partial(open_guarded, str(root))
        return GuardedCalls(root, GuardLog(root.parent), open_workspace=opened, state=tmp_path)

    calls = started()
    before = clock_gettime(CLOCK_BOOTTIME)
    bash(root, calls, "serve &")
    calls.close()
    calls = started()
    calls.open()
    found: list[float] = []

    def lives(session: tuple[str, str], since: float, agent: int, root: str) -> bool:
        found.append(since)
        return True

    calls.end_background(lives)
    calls.close()
    assert found[0] >= before


Start = Callable[[], GuardedCalls]


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Generator[Start]:
    """Starts a guard that goes on with what the one before left. `.env` is there, and no call may change it."""
    (root / ".env").write_text("KEY=1\n")
    (tmp_path / "kept").mkdir()
    started: list[GuardedCalls] = []

    def start() -> GuardedCalls:
        for one in started:
            one.close()
        opened, policies = partial(open_guarded, str(root)), [PathPolicy(deny=[".env", "/protected"])]
        log, kept = GuardLog(root.parent), tmp_path / "kept"
        started.append(GuardedCalls(root, log, open_workspace=opened, policies=policies, state=kept))
        started[-1].watched(SESSION, AGENT, 1)
        return started[-1]

    yield start
    started[-1].close()


def test_a_hidden_file_that_nobody_has_changed_is_no_change_for_the_next_guard(root: Path, start: Start) -> None:
    bash(root, start(), "serve &")
    calls = start()
    assert bash(root, calls, "true") == HookAnswer()
    assert bash(root, start(), "false") == HookAnswer()
    assert not GuardLog(root.parent).read()


def test_a_guard_that_does_not_know_what_hidden_files_were_takes_none_for_changed(
    root: Path, start: Start, tmp_path: Path
) -> None:
    bash(root, start(), "serve &")
    file = tmp_path / "kept/open.jsonl"
    held = json.loads(file.read_text().splitlines()[-1])
    del held["look"]  # as guards before this one left it
    file.write_text(f"{json.dumps(held)}\n")
    assert bash(root, start(), "true") == HookAnswer()
    assert not GuardLog(root.parent).read()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_late_change_of_a_hidden_file_is_named_once_and_stays(root: Path, start: Start, restarts: bool) -> None:
    calls = start()
    bash(root, calls, "serve &")
    (root / ".env").write_text("its own\n")
    calls = start() if restarts else calls
    told = bash(root, calls, "true")
    for text in (told.context, told.person):
        assert "a late change that stays as it is, since hidden files are in no history" in text
        assert "serve &" in text
        assert ".env" in text
        assert "rolled back" not in text
    assert (root / ".env").read_text() == "its own\n"
    assert bash(root, calls, "false") == HookAnswer()
    (record,) = GuardLog(root.parent).read()
    assert (record.kind, record.paths, record.aborted, record.policy) == ("denied", [".env"], None, "paths")
    assert "stays as it is" in record.note


def test_beside_one_what_can_go_back_does(root: Path, start: Start) -> None:
    calls = start()
    bash(root, calls, "serve &")
    (root / ".env").write_text("its own\n")
    change(root, "its own\n")
    told = bash(root, calls, "true").context
    assert not (root / "protected").exists()
    back, stays = told.split("\n\n")
    assert ".env" not in back
    assert "protected/mine.txt" in back
    assert "protected" not in stays


def test_what_a_call_changes_in_a_hidden_file_is_no_late_change(root: Path, start: Start) -> None:
    calls = start()
    bash(root, calls, "serve &")
    common = {"session_id": "s1", "cwd": str(root), "tool_name": "Write", "tool_use_id": "w"}
    arguments = {"tool_input": {"file_path": str(root / ".env"), "content": "mine\n"}}
    calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **common, **arguments}))
    (root / ".env").write_text("mine\n")
    said = calls.handle(parse_event("claude", {"hook_event_name": "PostToolUse", **common, **arguments}))
    assert "These stay as the call left them" in said.verdict
    assert bash(root, calls, "true") == HookAnswer()


@pytest.mark.parametrize("restarts", [False, True])
def test_the_end_of_a_call_that_was_settled_before_is_not_unseen(root: Path, start: Start, restarts: bool) -> None:
    calls = start()
    common = {"session_id": "s1", "cwd": str(root), "tool_name": "Bash", "tool_use_id": "long"}
    arguments = {"tool_input": {"command": "long"}}
    calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **common, **arguments}))
    (root / "a.txt").write_text("changed\n")
    calls.settle_all()
    calls = start() if restarts else calls
    assert (
        calls.handle(parse_event("claude", {"hook_event_name": "PostToolUse", **common, **arguments})) == HookAnswer()
    )
    assert [(one.kind, one.note) for one in GuardLog(root.parent).read()] == [("kept", "its end was never told")]


UNTIL = 110.0


@pytest.fixture
def left(machine: Machine) -> Callable[[], bool]:
    return lambda: may_be_left(SESSION, SINCE, UNTIL, AGENT, "/repo", machine.folder)


@pytest.mark.parametrize(
    ("cwd", "environment", "is_left"),
    [("/repo/src", {"LANG": "C"}, True), ("/", MARK, True), ("/", {}, True), ("/", {"LANG": "C"}, False)],
)
def test_what_has_lost_its_parent_may_be_left_of_a_call(
    machine: Machine, left: Callable[[], bool], cwd: str, environment: dict[str, str], is_left: bool
) -> None:
    machine.add(60, 1, 101.0)
    machine.mark(60, cwd, **environment)
    assert left() == is_left


def test_what_the_agent_has_started_itself_is_not_left_of_a_call(machine: Machine, left: Callable[[], bool]) -> None:
    for number, parent in ((60, AGENT), (61, 60), (62, 40)):  # a server, its child, and a person's command
        machine.add(number, parent, 101.0)
        machine.mark(number, "/repo", **MARK)
    assert not left()


@pytest.mark.parametrize("started", [99.0, 111.0])
def test_nor_is_what_was_there_before_or_came_after_its_end(
    machine: Machine, left: Callable[[], bool], started: float
) -> None:
    machine.add(60, 1, started)
    machine.mark(60, "/repo", **MARK)
    assert not left()


def test_nor_is_what_cannot_be_looked_into(machine: Machine, left: Callable[[], bool]) -> None:
    machine.add(60, 1, 101.0, name="cron")
    assert not left()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_call_that_leaves_a_process_which_its_line_does_not_show_is_in_the_background(
    root: Path, start: Start, leaves: bool
) -> None:
    calls = start()
    session = ("claude", "s3")
    calls.watched(session, os.getpid(), 1)
    common = {"session_id": "s3", "cwd": str(root), "tool_name": "Bash", "tool_use_id": "1"}
    arguments = {"tool_input": {"command": "./start.sh"}}
    calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **common, **arguments}))
    script = "(sleep 60 >/dev/null 2>&1 & echo $!)" if leaves else "echo 0"
    done = subprocess.run(["sh", "-c", script], cwd=root, capture_output=True, text=True, check=True)
    try:
        ended = parse_event("claude", {"hook_event_name": "PostToolUse", **common, **arguments})
        calls.handle(replace(ended, hooked_at=clock_gettime(CLOCK_BOOTTIME)))
    finally:
        if leaves:
            os.kill(int(done.stdout), signal.SIGKILL)
    change(root, "late\n")
    assert ("./start.sh" in bash(root, calls, "true", "s3").context) == leaves
    assert (root / "protected").exists() != leaves
