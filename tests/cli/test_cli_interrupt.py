"""Ctrl-C, SIGTERM and SIGHUP while `ringfence run` works: rolled back, said so, and nothing lost or left over."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentTask, MemoryWorkspace, Signals, apply_outcome, run_agent
from effort import one_in

from ringfence.adapters import ScriptedAdapter
from ringfence_cli.main import execute

STARTED = 30.0
"""Seconds that a process has to come to its first call."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def new_files(number: int) -> str:
    """A patch that makes ten files: what of it is there, all of it is there."""
    return "".join(f"--- /dev/null\n+++ b/made/{number}/{n}.txt\n@@ -0,0 +1 @@\n+{number} {n}\n" for n in range(10))


def contents(tree: Path) -> dict[str, str]:
    files = [path for path in tree.rglob("*") if path.is_file()]
    return {str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Running:
    """`ringfence run` with a script, in a process of its own."""

    def __init__(self, directory: Path, turns: list[Mapping[str, Any]], *options: str, **popen: Any) -> None:
        self.tree, self.patch, self.receipts = directory / "tree", directory / "patch", directory / "receipts.jsonl"
        (directory / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        command = [sys.executable, "-m", "ringfence_cli", "run", str(self.tree), "--task", "x"]
        command += ["--workspace", "memory", "--apply"]
        outputs = ["--patch", str(self.patch), "--receipts", str(self.receipts)]
        self.process = subprocess.Popen(
            [*command, "--model", f"script:{directory / 'script.jsonl'}", *outputs, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **popen,
        )

    def wait_for_calls(self, count: int = 1) -> None:
        until = time.monotonic() + STARTED
        while self.process.poll() is None and time.monotonic() < until:
            if self.receipts.exists() and self.receipts.read_bytes().count(b"\n") >= count:
                return
            time.sleep(0.002)
        raise AssertionError(f"no {count} calls were made: {self.process.communicate(timeout=10)}")

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output.decode(), errors.decode()

    def receipt_lines(self) -> list[dict[str, Any]]:
        written = self.receipts.read_bytes()
        assert written.endswith(b"\n")
        return [json.loads(line) for line in written.splitlines()]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    return tmp_path


def many_calls() -> list[Mapping[str, Any]]:
    numbers = iter(range(10_000))
    turns = [
        {
            "text": f"turn {turn}",
            "tool_calls": [
                part
                for _ in range(20)
                for part in (call("apply_patch", patch=new_files(next(numbers))), call("grep", pattern="[0-9]+ 9"))
            ],
        }
        for turn in range(150)
    ]
    return [*turns, {"text": "Done."}]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(("options", "number"), one_in(3, product([(), ("--json",), ("--quiet",)], SIGNALS)))
def test_at_any_time_it_ends_with_130_and_keeps_what_was_committed(
    directory: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    before = contents(directory / "tree")
    running = Running(directory, many_calls(), *options)
    running.wait_for_calls(random.randrange(1, 60))
    time.sleep(random.random() / 50)
    running.process.send_signal(number)
    code, output, errors = running.end()
    assert code == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert contents(running.tree) == before
    expected = dict(before)
    for receipt in running.receipt_lines():
        for change in receipt["changes"] if receipt["outcome"] == "committed" else ():
            if change["after"]["kind"] == "file":
                expected[change["path"]] = change["after"]["content_hash"]
    assert len(expected) > 1
    subprocess.run(["git", "apply", str(running.patch)], cwd=running.tree, check=True)
    assert contents(running.tree) == expected
    if options == ("--json",):
        record = json.loads(output)
        assert (record["exit_code"], record["outcome"], record["applied"]) == (130, "interrupted", False)
        assert record["tool_calls"]["total"] == len(running.receipt_lines())
    else:
        assert output == ""


def long_calls() -> list[Mapping[str, Any]]:
    """Calls whose handler takes long: it looks in vain for lines that are near, and says what it found."""
    wanted = "line nmber 77 with sme words in it\nline nmber 78 with som words in it\n"
    edit = call("edit_file", file_path="big.txt", old_string=wanted, new_string="x")
    return [
        {"tool_calls": [call("write_file", file_path="new.txt", content="new\n")]},
        {"tool_calls": [call("read_file", file_path="big.txt", limit=1), *[edit] * 100]},
    ]


def test_in_the_middle_of_a_handler_the_call_is_rolled_back_and_has_its_receipt(directory: Path) -> None:
    (directory / "tree" / "big.txt").write_text(
        "".join(f"line number {n} with some words in it\n" for n in range(190_000))
    )
    running = Running(directory, long_calls())
    running.wait_for_calls(2)
    time.sleep(0.1)
    running.process.send_signal(signal.SIGINT)
    code, output, errors = running.end()
    assert (code, output) == (130, "")
    last = running.receipt_lines()[-1]
    assert (last["tool"], last["outcome"]) == ("edit_file", "interrupted")
    assert "edit_file file_path='big.txt'" in errors
    assert "interrupted and rolled back" in errors
    assert "+++ b/new.txt" in running.patch.read_text()
    assert not (running.tree / "new.txt").exists()


def test_more_interrupts_do_not_disturb_what_the_first_one_began(directory: Path) -> None:
    running = Running(directory, many_calls())
    running.wait_for_calls(20)
    for _ in range(200):
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
    code, _, errors = running.end()
    assert code == 130
    assert "Traceback" not in errors
    assert running.receipt_lines()
    assert running.patch.read_bytes().count(b"\ndiff --git") % 10 == 9


def test_where_interrupts_are_ignored_they_stay_so_and_sigterm_still_ends(directory: Path) -> None:
    def ignoring() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    running = Running(directory, many_calls(), preexec_fn=ignoring)
    running.wait_for_calls(5)
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGHUP)
    running.wait_for_calls(len(running.receipt_lines()) + 100)
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 130


# -- the signals themselves


def test_an_interrupt_waits_until_it_is_let_through() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.arrived
        with pytest.raises(KeyboardInterrupt), signals.let_through():
            raise AssertionError("it came too late")
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_within_a_held_part_it_comes_at_the_end(number: signal.Signals) -> None:
    steps: list[str] = []
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.let_through():
            with signals.held():
                signal.raise_signal(number)
                steps.append("held")
            steps.append("not reached")
        assert not signals.arrived
    assert steps == ["held"]


def test_one_that_a_finalizer_swallows_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with Signals() as signals, pytest.raises(KeyboardInterrupt), signals.let_through():
        Finalized()
        gc.collect()
        with signals.held():
            pass
        raise AssertionError("it was lost")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("lets_through", [True, False])
def test_a_child_that_a_tool_forks_is_ended_by_a_signal_as_ever(number: signal.Signals, lets_through: bool) -> None:
    signal.signal(number, signal.SIG_DFL)  # Ray leaves a handler of its own in the process of an earlier test
    with Signals() as signals, signals.let_through() if lets_through else nullcontext():
        child = os.fork()
        if child == 0:  # as a worker of multiprocessing, which waits for its end
            with suppress(BaseException):
                time.sleep(60)
            os._exit(0)
        os.kill(child, number)  # which may not have come to its first line
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -number


def test_the_handlers_of_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Signals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_one_that_comes_while_the_directory_is_loaded_ends_it_before_anything_is_done(
    directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "script.jsonl").write_text('{"text": "Done."}\n')
    receipts, model = directory / "receipts.jsonl", f"script:{directory / 'script.jsonl'}"
    words = ["run", str(directory / "tree"), "--task", "x", "--model", model, "--receipts", str(receipts)]
    monkeypatch.setattr(sys, "argv", ["ringfence", *words])
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert execute(signals) == 130
    assert capfd.readouterr() == ("", "ringfence: interrupted: nothing was changed\n")
    assert not receipts.exists()


def test_one_that_comes_between_the_task_and_its_application_keeps_it_from_being_applied(directory: Path) -> None:
    turns = [{"tool_calls": [call("write_file", file_path="new.txt", content="new\n")]}, {"text": "Done."}]
    with Signals() as signals:
        workspace = MemoryWorkspace(directory / "tree")
        task = AgentTask("x", workspace, ScriptedAdapter(turns))
        ending = run_agent(task, gate=signals)
        assert ending.outcome == "done"
        signal.raise_signal(signal.SIGINT)
        apply_outcome(ending, task, signals)
    assert (ending.exit_code, ending.applied) == (130, False)
    assert os.listdir(directory / "tree") == ["a.txt"]


@pytest.mark.parametrize(
    ("calls", "options", "code", "number"),
    one_in(2, [(*case, one) for case in [(100, ["--quiet"], 1), (1000, [], 130)] for one in SIGNALS[:2]]),
)
def test_what_nobody_reads_does_not_keep_a_command_that_is_interrupted(
    directory: Path, calls: int, options: list[str], code: int, number: signal.Signals
) -> None:
    writes = [call("write_file", file_path=f"{n}", content="x\n") for n in range(calls)]
    running = Running(directory, [{"tool_calls": writes}, {"text": "Done."}], *options, pipesize=8192)
    running.wait_for_calls()
    made = 0
    while made < (made := len(running.receipt_lines())):  # it does not wait for a reader yet
        time.sleep(1)
    running.process.send_signal(number)
    assert running.process.wait() == code
    assert "Traceback" not in running.end()[2]


def test_what_is_applied_was_printed_before_so_that_no_kill_loses_it(directory: Path) -> None:
    before = contents(directory / "tree")
    write = call("write_file", file_path="big.txt", content="a line\n" * 6_000)
    running = Running(directory, [{"tool_calls": [write]}, {"text": "Done."}], "--quiet", pipesize=4096)
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == b"diff --git a/big.txt b/big.txt\n"
    assert contents(running.tree) == before
    assert running.end()[0] == 0
    assert contents(running.tree).keys() == {*before, "big.txt"}


LATE = """
import os, signal, sys
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.Signals(int(sys.argv.pop(1)))):
        kill(pid, number)
sys.late = Late()
from ringfence_cli.main import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_when_all_is_done_and_told_the_exit_code_says_the_same(directory: Path, number: signal.Signals) -> None:
    ended = subprocess.run([sys.executable, "-c", LATE, str(int(number)), "log", str(directory), "--json"], check=False)
    assert ended.returncode == 1


STAYING = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
from ringfence_cli.main import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_thread_that_stays_when_all_is_done_and_told_can_be_ended(directory: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STAYING, "log", str(directory), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["exit_code"] == 1
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(60) == 1
