"""A run that was interrupted goes on where it stood: with its conversation, its plan, and what it has read."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from agent_runs import (
    AgentTask,
    DiskWorkspace,
    OutputFile,
    Place,
    RunLimits,
    RunOutcome,
    RunRecord,
    Signals,
    container,
    interrupted_run,
    join_policies,
    place_of,
    record_of,
    run_watched,
)
from command_line import ringfence_text as ringfence
from command_line import served_once
from effort import one_in

from ringfence import PromptEvaluationError, Session, serde
from ringfence.adapters import Message, MessageAdded, ScriptedAdapter
from ringfence.testing import held_call
from ringfence_sandbox import SandboxLimits, Workspace

DONE: Mapping[str, Any] = {"text": "Done."}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    return tmp_path / "tree"


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def calls(*tool_calls: Mapping[str, object]) -> dict[str, Any]:
    return {"tool_calls": list(tool_calls)}


def performed(
    tree: Path, turns: Any, *, resume: bool = False, watchers: Sequence[Any] = ()
) -> tuple[RunOutcome, ScriptedAdapter]:
    """A run in this process, so that a test can see what the model was sent."""
    before = interrupted_run(record_of(tree)) if resume else None
    workspace, adapter = DiskWorkspace(tree), ScriptedAdapter(turns)
    with closing(workspace), closing(RunRecord(workspace, "Do it.", before)) as record, Signals() as signals:
        ending = run_watched(AgentTask("Do it.", workspace, adapter), signals, watchers, None, record)
        if ending.outcome == "done":
            record.finish()
        return ending, adapter


READ = calls(call("planning_setup_plan", objective="fix", initial_steps=["edit"]), call("read_file", file_path="a.txt"))
EDIT = call("edit_file", file_path="a.txt", old_string="one", new_string="two")


def test_a_resumed_run_has_its_conversation_its_plan_and_what_it_has_read(tree: Path) -> None:
    ending, first = performed(tree, [READ])
    assert ending.outcome == "provider_failed"
    ending, second = performed(tree, [calls(EDIT), DONE], resume=True)
    assert ending.outcome == "done"
    assert second.requests[0]["messages"] == first.requests[-1]["messages"]
    assert (tree / "a.txt").read_text() == "two\n"
    assert ending.plan is not None
    assert ending.plan.objective == "fix"


def test_a_model_is_told_which_files_others_have_changed_while_its_run_was_interrupted(tree: Path) -> None:
    (tree / "b.txt").write_text("b\n")
    performed(tree, [READ, calls(EDIT)])
    (tree / "a.txt").unlink()
    (tree / "b.txt").write_text("by hand\n")
    write = calls(call("write_file", file_path="c.txt", content="c\n"))
    _, second = performed(tree, [write], resume=True)
    *_, answer, news = second.requests[0]["messages"]
    assert (answer["role"], news["role"]) == ("tool", "user")
    assert "a.txt, b.txt" in news["content"]
    _, third = performed(tree, [DONE], resume=True)
    assert [message for message in third.requests[-1]["messages"] if message["role"] == "user"] == [news]


def test_what_git_keeps_of_its_own_is_nobody_s_change_of_the_run(tree: Path) -> None:
    (tree / ".git").mkdir()
    (tree / ".git/index").write_text("1")
    performed(tree, [READ, calls(EDIT)])
    (tree / ".git/index").write_text("2")
    ending, second = performed(tree, [DONE], resume=True)
    assert not ending.is_part
    assert [change.path for change in ending.changes] == ["a.txt"]
    assert all(message["role"] != "user" for message in second.requests[0]["messages"])


def test_a_run_can_be_interrupted_and_resumed_again_and_again(tree: Path) -> None:
    performed(tree, [READ])
    performed(tree, [calls(EDIT)], resume=True)
    ending, last = performed(tree, [calls(call("write_file", file_path="a.txt", content="3\n")), DONE], resume=True)
    assert ending.outcome == "done"
    assert (tree / "a.txt").read_text() == "3\n"
    assert [message["role"] for message in last.requests[-1]["messages"]] == [
        *("system", "assistant", "tool", "tool", "assistant", "tool", "assistant", "tool")
    ]


def test_a_run_that_is_done_cannot_be_resumed(tree: Path) -> None:
    performed(tree, [READ, DONE])
    assert interrupted_run(record_of(tree)) is None


def test_what_was_interrupted_before_a_new_run_can_go_on_after_it(tree: Path) -> None:
    first = script(tree, "1.jsonl", READ)
    done, write = script(tree, "2.jsonl", DONE), script(tree, "3.jsonl", calls(EDIT), DONE)
    assert ringfence("run", tree, "--task", "Mend it.", "--model", first).returncode == 3
    other = ringfence("run", tree, "--task", "Something else.", "--model", done)
    assert (other.returncode, "(Mend it.)" in other.stderr) == (0, True)
    resumed = ringfence("run", tree, "--resume", "--model", write)
    assert resumed.returncode == 0, resumed.stderr
    assert (tree / "a.txt").read_text() == "two\n", "it knows what it had read"
    assert interrupted_run(record_of(tree)) is None
    assert "interrupted" not in ringfence("run", tree, "--task", "A third.", "--model", done).stderr


def test_with_its_task_a_run_is_resumed_only_if_there_is_one_of_that_task(tree: Path) -> None:
    read, write = script(tree, "1.jsonl", READ), script(tree, "2.jsonl", calls(EDIT), DONE)

    def run(task: str, model: str) -> subprocess.CompletedProcess[str]:
        return ringfence("run", tree, "--resume", "--task", task, "--model", model)

    assert run("Mend it.", read).returncode == 3
    other = run("Something else.", script(tree, "3.jsonl", DONE))
    assert (other.returncode, "goes on with --" in other.stderr) == (0, False)
    again = run("Mend it.", write)
    assert (again.returncode, "goes on with --" in again.stderr) == (0, True), again.stderr
    assert (tree / "a.txt").read_text() == "two\n", "it knows what it had read"
    assert "goes on with --" not in run("Mend it.", script(tree, "4.jsonl", DONE)).stderr, "that one is done"


KILLED_AT_ITS_END = """
import os, signal
from ringfence_tools.runs.agent_run import RunOutcome
RunOutcome.to_json = lambda *of: os.kill(os.getpid(), signal.SIGKILL)
from ringfence_cli.main import main
main()
"""


def test_a_run_that_was_killed_before_it_had_told_all_is_not_done_again(tree: Path) -> None:
    patch, write = tree.parent / "run.patch", call("write_file", file_path="b.txt", content="b\n")
    words = ["run", tree, "--resume", "--task", "Mend it.", "--json", "--patch", patch, "--model"]
    command = [sys.executable, "-c", KILLED_AT_ITS_END, *map(str, words), script(tree, "1.jsonl", calls(write), DONE)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    again = ringfence(*words, script(tree, "2.jsonl", DONE))
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert (told["outcome"], told["parts"], told["tool_calls"]["committed"]) == ("done", 2, 1)
    assert "b.txt" in patch.read_text()
    assert interrupted_run(record_of(tree)) is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_what_could_not_be_written_is_after_a_resume(tree: Path) -> None:
    words = ["run", tree, "--resume", "--task", "Mend it.", "--model"]
    write = call("write_file", file_path="b.txt", content="b\n")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ringfence_cli", *map(str, words), script(tree, "1.jsonl", calls(write), DONE)]
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (failed.returncode, "No space left" in failed.stderr, "--resume" in failed.stderr) == (1, True, True)
    again = ringfence(*words, script(tree, "2.jsonl", DONE))
    assert (again.returncode, "+++ b/b.txt" in again.stdout) == (0, True), again.stderr


def test_a_task_that_comes_through_a_pipe_is_read_once(tree: Path) -> None:
    words = ["run", str(tree), "--resume", "--task", "@/dev/stdin", "--model", script(tree, "1.jsonl", DONE)]
    command = [sys.executable, "-m", "ringfence_cli", *words]
    ended = subprocess.run(command, input="@mend it", capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_command_that_is_repeated_has_its_turns_anew(tree: Path) -> None:
    performed(tree, [READ])
    record = record_of(tree)
    record.write_text(record.read_text().replace('"turns": null', '"turns": 1'))
    model = script(tree, "1.jsonl", DONE)
    assert ringfence("run", tree, "--resume", "--model", model).returncode == 2, "its one turn is used up"
    again = ringfence("run", tree, "--resume", "--task", "Do it.", "--model", model)
    assert (again.returncode, "goes on with --max-turns 200" in again.stderr) == (0, True), again.stderr


def test_a_record_that_cannot_be_read_keeps_a_task_from_nothing(tree: Path) -> None:
    performed(tree, [READ])
    record_of(tree).write_bytes(b"{\n")
    model = script(tree, "1.jsonl", DONE)
    assert ringfence("run", tree, "--resume", "--model", model).returncode == 2
    assert ringfence("run", tree, "--resume", "--task", "Do it.", "--model", model).returncode == 0


def test_a_run_that_got_nowhere_does_not_take_the_place_of_one_that_did(tree: Path) -> None:
    first = script(tree, "1.jsonl", READ)
    assert ringfence("run", tree, "--task", "Mend it.", "--model", first).returncode == 3

    def unreachable(conversation: object) -> Any:
        raise PromptEvaluationError("no such model")

    for _ in range(2):
        assert performed(tree, unreachable)[0].outcome == "provider_failed"
    done = ringfence("run", tree, "--task", "Third.", "--model", script(tree, "3.jsonl", DONE))
    assert "(Mend it.)" in done.stderr
    before = interrupted_run(record_of(tree))
    assert before is not None
    assert before.task == "Mend it."


def test_a_run_that_is_wrong_usage_leaves_the_record_alone(tree: Path) -> None:
    performed(tree, [READ])
    before = record_of(tree).read_bytes()
    model = script(tree, "1.jsonl", DONE)
    for options in (["--policy", "tests:no_such_tool:/src/**"], ["--patch", tree / "no" / "such" / "place"]):
        refused = ringfence("run", tree, "--task", "Other.", "--model", model, *options)
        assert (refused.returncode, record_of(tree).read_bytes()) == (2, before), refused.stderr


def test_a_damaged_record_does_not_keep_a_new_run_from_beginning(tree: Path) -> None:
    performed(tree, [READ])
    record_of(tree).write_bytes(b"{}\nno record\n")
    begun = ringfence("run", tree, "--task", "Other.", "--model", script(tree, "1.jsonl", DONE))
    assert (begun.returncode, "--forget drops it" in begun.stderr) == (0, True)


def cut(tree: Path, lines: int, rest: bytes = b"") -> None:
    """As if the process had been killed so many messages before the end of its record."""
    record = record_of(tree)
    kept = record.read_bytes().splitlines(keepends=True)
    if lines:
        kept.pop()  # what it came to, which a killed process does not write
    record.write_bytes(b"".join(kept[: len(kept) - lines]) + rest)


@pytest.mark.parametrize("torn", [b"", b'{"messages": [{"$ty'])
def test_a_call_that_was_committed_but_not_answered_is_told_so_and_not_run_again(tree: Path, torn: bytes) -> None:
    create = call("write_file", file_path="new.txt", content="new\n")
    performed(tree, [READ, calls(create, call("ls"))])
    cut(tree, 2, torn)
    (tree / "new.txt").unlink()
    ending, second = performed(tree, [DONE], resume=True)
    assert ending.outcome == "done"
    *_, committed, listed, news = second.requests[0]["messages"]
    assert "committed as step 1, which changed new.txt" in committed["content"]
    assert ("a.txt" in listed["content"], "new.txt" in news["content"]) == (True, True)
    assert not (tree / "new.txt").exists()


def test_a_call_of_a_script_that_is_played_again_is_not_taken_for_one_that_was_committed(tree: Path) -> None:
    create = [calls(call("write_file", file_path=f"{n}.txt", content="new\n")) for n in (1, 2)]
    performed(tree, [create[0]])
    performed(tree, [create[1]], resume=True)
    _, last = performed(tree, [calls(call("ls")), DONE], resume=True)
    asked = [one["id"] for message in last.requests[-1]["messages"] for one in message.get("tool_calls", ())]
    assert len(asked) == len({*asked}) == 3


class Interrupting:
    """A watcher at whom Ctrl-C is pressed, when a call has ended and the model has not been told of it."""

    def text(self, event: object) -> None: ...

    retry = turn = text

    def call(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_a_call_that_was_counted_before_an_interrupt_is_not_counted_again(tree: Path) -> None:
    create = calls(call("write_file", file_path="new.txt", content="new\n"))
    assert performed(tree, [create], watchers=[Interrupting()])[0].outcome == "interrupted"
    _, second = performed(tree, [calls(call("ls"))], resume=True)
    assert "This call was committed as step 1" in second.requests[0]["messages"][-1]["content"]
    run = interrupted_run(record_of(tree))
    assert run is not None
    assert run.spent.outcomes == {"committed": 2}


def test_a_run_whose_record_was_torn_can_be_interrupted_and_resumed_again(tree: Path) -> None:
    performed(tree, [READ])
    cut(tree, 0, b'{"messages": [{"$ty')
    performed(tree, [calls(EDIT)], resume=True)
    ending, last = performed(tree, [DONE], resume=True)
    assert ending.outcome == "done"
    assert [message["role"] for message in last.requests[0]["messages"]] == [
        *("system", "assistant", "tool", "tool", "assistant", "tool")
    ]


@contextmanager
def room_for(file: Path, more: int) -> Generator[None]:
    """As on a disk on which no file can be longer."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + more, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_what_there_was_no_space_for_is_in_the_record_when_there_is(tree: Path) -> None:
    session, signals = Session(), Signals()
    said = [Message("system", f"{number}" * 2000) for number in range(3)]
    with closing(DiskWorkspace(tree)) as workspace, closing(RunRecord(workspace, "Do it.")) as record, signals:
        record.start(session, signals)
        with room_for(record_of(tree), 3000):
            for message in said[:2]:
                session.dispatcher.dispatch(MessageAdded("run", message))
        session.dispatcher.dispatch(MessageAdded("run", said[2]))
    before = interrupted_run(record_of(tree))
    assert before is not None
    assert [*before.messages] == said


def test_a_line_that_there_is_no_space_for_is_not_written_in_part(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\n")
    with closing(OutputFile(tmp_path / "lines", append=True)) as file:
        with room_for(tmp_path / "lines", 5), pytest.raises(OSError, match="lines"):
            file.write(b"two, and more\n")
        file.write(b"three\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nthree\n"


def test_a_run_that_was_killed_before_its_first_line_leaves_the_one_before_to_be_resumed(tree: Path) -> None:
    performed(tree, [READ])
    record_of(tree).rename(record_of(tree).with_name("run-before.jsonl"))
    resumed = ringfence("run", tree, "--resume", "--model", script(tree, "1.jsonl", calls(EDIT), DONE))
    assert resumed.returncode == 0, resumed.stderr
    assert (tree / "a.txt").read_text() == "two\n"


def test_a_call_that_was_neither_answered_nor_committed_runs_now(tree: Path) -> None:
    performed(tree, [READ, calls(call("ls"), call("grep", pattern="one"))])
    cut(tree, 2)
    _, second = performed(tree, [DONE], resume=True)
    assert [message["role"] for message in second.requests[0]["messages"][-3:]] == ["assistant", "tool", "tool"]
    assert "a.txt:1" in second.requests[0]["messages"][-1]["content"]


def test_what_somebody_changed_meanwhile_has_to_be_read_again(tree: Path) -> None:
    performed(tree, [READ])
    (tree / "a.txt").write_text("one, by hand\n")
    _, second = performed(tree, [calls(EDIT), DONE], resume=True)
    assert "has changed since it was read" in second.requests[-1]["messages"][-1]["content"]
    assert (tree / "a.txt").read_text() == "one, by hand\n"


FULL = """
import resource
from ringfence import MarkdownSection

def full(session):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return MarkdownSection(title="Full", template="As on a full disk.")
"""


def test_where_there_was_no_space_for_its_record_nobody_is_told_to_go_on_with_a_run(tree: Path) -> None:
    (tree.parent / "full.py").write_text(FULL)
    words = ["--task", "Do it.", "--model", script(tree, "1.jsonl", DONE), "--section", f"{tree.parent}/full.py:full"]
    command = [sys.executable, "-m", "ringfence_cli", "run", tree, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, "run.jsonl: File too large" in ended.stderr) == (1, True)
    assert "--resume" not in ended.stderr


def test_a_damaged_record_is_said(tree: Path) -> None:
    performed(tree, [READ])
    cut(tree, 0, b'{"messages": [{"$type": "os:system", "fields": {}}]}\n')
    with pytest.raises(ValueError, match="cannot be read"):
        interrupted_run(record_of(tree))


def script(tree: Path, name: str, *turns: Mapping[str, Any]) -> str:
    (tree.parent / name).write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return f"script:{tree.parent / name}"


def test_a_run_that_was_killed_goes_on_from_its_last_step(tree: Path) -> None:
    turns = [calls(call("write_file", file_path=f"{number}.txt", content="x\n")) for number in range(2000)]
    receipts = tree.parent / "receipts.jsonl"
    command = ["run", tree, "--task", "Write.", "--model", script(tree, "1.jsonl", *turns), "--receipts", receipts]
    with subprocess.Popen(
        [sys.executable, "-m", "ringfence_cli", *map(str, command)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as running:
        until = time.monotonic() + 60
        while not receipts.exists() or receipts.read_bytes().count(b"\n") < 20:
            assert time.monotonic() < until
            time.sleep(0.005)
        os.kill(running.pid, signal.SIGKILL)
    overwrite = calls(*(call("write_file", file_path=f"{number}.txt", content="y\n") for number in range(15)))
    done = ringfence("run", tree, "--resume", "--model", script(tree, "2.jsonl", overwrite, DONE), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["tool_calls"]["denied"] == 0, "it knows what it wrote before it was killed"
    assert (tree / "14.txt").read_text() == "y\n"
    assert interrupted_run(record_of(tree)) is None


def resumed_in_parts(
    tree: Path, *, meanwhile: str | None = None, outputs: Path | None = None
) -> tuple[dict[str, Any], str, str]:
    """What a run told of itself that was cut off twice: its record, its patch, and what it said. Its files are in
    ``outputs``, by default beside the tree."""
    place = outputs or tree.parent
    patch, page, receipts = place / "run.patch", place / "run.html", place / "run.jsonl"
    writes = [calls(call("write_file", file_path=f"{name}.txt", content="x\n")) for name in "bcd"]
    options = ["--json", "--patch", patch, "--report", page, "--receipts", receipts]
    ringfence("run", tree, "--task", "Write.", "--model", script(tree, "0.jsonl", calls(call("ls"))))
    ringfence("run", tree, "--task", "Write.", "--model", script(tree, "1.jsonl", writes[0]), *options)
    if meanwhile is not None:
        (tree / meanwhile).write_text("by hand\n")
    for turns in ([writes[1]], [writes[2], DONE]):
        done = ringfence("run", tree, "--resume", "--model", script(tree, "2.jsonl", *turns), *options)
    return json.loads(done.stdout), patch.read_text(), done.stderr


def test_what_a_resumed_run_tells_is_the_whole_run(tree: Path) -> None:
    record, patch, said = resumed_in_parts(tree)
    assert [change["path"] for change in record["changes"]] == ["b.txt", "c.txt", "d.txt"]
    assert (record["steps"], patch, record["is_part"]) == (3, record["patch"], False)
    log = json.loads(ringfence("log", tree, "--json").stdout)["log"]
    steps = [entry["session_id"] for entry in reversed(log) if entry["number"]]
    assert (len(record["session_ids"]), steps) == (3, record["session_ids"])
    assert (record["parts"], record["turns"], record["tool_calls"]["committed"]) == (3, 4, 3)
    assert "in 3 parts" in (tree.parent / "run.html").read_text()
    assert f"`ringfence undo {tree} 3`" in said
    assert ringfence("undo", tree, "3").returncode == 0
    assert sorted(path.name for path in tree.iterdir()) == ["a.txt"]


def test_what_a_run_wrote_for_its_user_into_the_directory_is_nobody_else_s_change(tree: Path) -> None:
    record, patch, said = resumed_in_parts(tree, outputs=tree)
    assert [change["path"] for change in record["changes"]] == ["b.txt", "c.txt", "d.txt"]
    assert (record["steps"], patch, record["is_part"]) == (3, record["patch"], False)
    assert ("run.patch" in patch, "changed by others" in said) == (False, False)
    assert len((tree / "run.jsonl").read_text().splitlines()) == 3


def test_the_files_of_a_run_are_not_the_agent_s_to_change_when_it_is_resumed_without_them(tree: Path) -> None:
    begun(tree, "--patch", str(tree / "run.patch"))
    write = call("write_file", file_path="run.patch", content="x\n")
    done = resumed(tree, "--json", turns=[calls(call("read_file", file_path="run.patch"), write), DONE])
    record = json.loads(done.stdout)
    assert (record["tool_calls"]["denied"], record["changes"], record["is_part"]) == (1, [], False)


def test_where_others_changed_files_a_resumed_run_tells_of_all_of_its_own(tree: Path) -> None:
    record, patch, said = resumed_in_parts(tree, meanwhile="mine.txt")
    assert [change["path"] for change in record["changes"]] == ["b.txt", "c.txt", "d.txt"]
    assert (record["steps"], "mine.txt" in patch, record["is_part"]) == (3, False, False)
    assert f"`ringfence undo {tree} 3`" in said


def test_a_file_of_the_run_that_somebody_changes_meanwhile_has_both_and_is_named(tree: Path) -> None:
    (tree / "a.txt").write_text("one\n2\n3\n4\n")
    read, edit = call("read_file", file_path="a.txt"), {"old_string": "one", "new_string": "1"}
    performed(tree, [calls(read, call("edit_file", file_path="a.txt", **edit))])
    (tree / "a.txt").write_text("1\n2\n3\nby hand\n")
    again = calls(read, call("edit_file", file_path="a.txt", old_string="1\n", new_string="two\n"))
    ending, _ = performed(tree, [again, DONE], resume=True)
    assert (tree / "a.txt").read_text() == "two\n2\n3\nby hand\n"
    assert (b"+two\n" in ending.patch, b"by hand" in ending.patch, ending.mixed) == (True, True, ["a.txt"])


def test_where_others_made_steps_since_a_resumed_run_names_its_own(tree: Path) -> None:
    performed(tree, [READ, calls(EDIT)])
    with Workspace.open(tree) as workspace, held_call(workspace.filesystem) as other:
        workspace.filesystem.for_call(other).write("mine.txt", "x\n")
        other.commit()
    said = resumed(tree, turns=[DONE]).stderr
    assert f"`ringfence undo {tree} --step 1`" in said


@pytest.mark.parametrize("collected", [False, True])
def test_what_others_touched_without_changing_it_makes_no_part_of_a_resumed_run(tree: Path, collected: bool) -> None:
    write = calls(call("write_file", file_path="b.txt", content="x\n"))
    performed(tree, [DONE])
    os.utime(tree / "a.txt", (1, 1))  # as `git status` does with the directory of its index
    if collected:
        performed(tree, [DONE])
        assert ringfence("gc", tree, "--keep", "0").returncode == 0
    performed(tree, [write])
    ending, _ = performed(tree, [DONE], resume=True)
    assert ([change.path for change in ending.changes], ending.is_part) == (["b.txt"], False)


def test_what_gc_dropped_is_not_said_to_be_nothing(tree: Path) -> None:
    write = calls(call("write_file", file_path="b.txt", content="x\n"))
    ringfence("run", tree, "--task", "Write.", "--model", script(tree, "1.jsonl", write))
    assert ringfence("gc", tree, "--keep", "0").returncode == 0
    done = ringfence("run", tree, "--resume", "--model", script(tree, "2.jsonl", DONE), "--json")
    assert (done.returncode, json.loads(done.stdout)["is_part"], "`gc`" in done.stderr) == (0, True, True)


def test_an_adapter_s_own_object_does_not_keep_a_turn_from_the_record(tree: Path) -> None:
    class Failing(ScriptedAdapter):
        def respond(self, request: Any) -> Any:
            if self.requests:
                raise PromptEvaluationError("lost")
            return replace(super().respond(request), raw=object())

    workspace = DiskWorkspace(tree)
    with closing(workspace), closing(RunRecord(workspace, "Do it.")) as record, Signals() as signals:
        run_watched(AgentTask("Do it.", workspace, Failing([READ])), signals, [], None, record)
    before = interrupted_run(record_of(tree))
    assert before is not None
    assert len(before.messages) == 3


def begun(tree: Path, *options: str, usage: int = 0) -> str:
    """What was said of a run that was cut off after its first turn."""
    turn = {**READ, "usage": {"input_tokens": usage, "output_tokens": 0}}
    return ringfence("run", tree, "--task", "Go.", "--model", script(tree, "1.jsonl", turn), *options).stderr


def resumed(tree: Path, *options: str, turns: Any = None) -> subprocess.CompletedProcess[str]:
    return ringfence(
        "run", tree, "--resume", "--model", script(tree, "2.jsonl", *(turns or (calls(EDIT), DONE))), *options
    )


def test_a_resumed_run_has_the_policies_that_it_was_begun_with(tree: Path) -> None:
    begun(tree, "--policy", "deny:/a.txt")
    first = resumed(tree, "--policy", "deny:/b.txt", turns=[calls(EDIT)])
    assert "goes on with --policy deny:/a.txt --policy deny:/b.txt" in first.stderr
    last = resumed(tree, turns=[calls(EDIT, call("write_file", file_path="b.txt", content="x\n")), DONE])
    assert last.returncode == 0, last.stderr
    assert "goes on with --policy deny:/a.txt --policy deny:/b.txt" in last.stderr
    assert ((tree / "a.txt").read_text(), (tree / "b.txt").exists()) == ("one\n", False)


def test_a_policy_file_of_a_run_holds_for_its_resume_in_another_working_directory(tree: Path) -> None:
    (tree.parent / "own.toml").write_text('[policies.paths]\ndeny = ["/a.txt"]\n')
    begun(tree, "--policy", os.path.relpath(tree.parent / "own.toml"))
    (tree.parent / "elsewhere").mkdir()
    model = script(tree, "2.jsonl", calls(EDIT), DONE)
    command = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--resume", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tree.parent / "elsewhere")
    assert (done.returncode, (tree / "a.txt").read_text()) == (0, "one\n"), done.stderr


def test_a_resume_whose_policy_file_has_gone_is_refused(tree: Path) -> None:
    (tree.parent / "own.toml").write_text("[policies]\nprotected = true\n")
    begun(tree, "--policy", str(tree.parent / "own.toml"))
    (tree.parent / "own.toml").unlink()
    refused = resumed(tree)
    assert (refused.returncode, "own.toml" in refused.stderr, (tree / "a.txt").read_text()) == (2, True, "one\n")


@pytest.mark.parametrize(
    ("held", "added", "refused"),
    [
        (["allow:/src"], ["allow:/docs"], True),
        (["deletions:2", "deletions:9"], ["deletions:3"], True),
        (["allow:/src", "deletions:2"], ["allow:/src", "deletions:2"], False),
        (["deny:/src"], ["allow:/docs", "deletions:3", "deny:/docs", "protected"], False),
        (["deletions:2"], ["deletions:1"], False),
    ],
)
def test_a_resume_adds_policies_and_loosens_none(held: list[str], added: list[str], refused: bool) -> None:
    if refused:
        with pytest.raises(click.BadParameter, match=r"looser than what the run was begun with .*--task"):
            join_policies(held, added)
    else:
        assert join_policies(held, added) == tuple(dict.fromkeys((*held, *added)))


def test_what_a_run_has_used_of_its_limits_is_used_for_its_resume_too(tree: Path) -> None:
    begun(tree, "--max-tokens", "150", "--max-turns", "9", usage=100)
    costly = {**READ, "usage": {"input_tokens": 60, "output_tokens": 0}}
    first = resumed(tree, turns=[costly, DONE])
    assert "goes on with --max-tokens 50 --max-turns 8" in first.stderr
    assert first.returncode == 5
    refused = resumed(tree)
    assert (refused.returncode, (tree / "a.txt").read_text()) == (2, "one\n")
    last = resumed(tree, "--max-tokens", "7")
    assert "goes on with --max-tokens 7 --max-turns 7" in last.stderr
    assert (last.returncode, (tree / "a.txt").read_text()) == (0, "two\n")


CONTAINER = Place("podman", "python:3", "bridge", True, memory_bytes=1 << 28, cpus=0.5, command_seconds=90)


@pytest.mark.parametrize(
    ("was", "given", "then"),
    [
        (CONTAINER, Place(), CONTAINER),
        (CONTAINER, Place(network="none"), replace(CONTAINER, network="none")),
        (CONTAINER, Place("disk"), Place("disk")),
        (Place("disk"), Place(), Place("disk")),
        (Place("disk"), CONTAINER, CONTAINER),
    ],
)
def test_a_run_goes_on_where_it_worked_unless_it_is_told_otherwise(was: Place, given: Place, then: Place) -> None:
    assert RunLimits(place=was).resumed(RunLimits(place=given)).place == then
    assert serde.parse(RunLimits, json.loads(json.dumps(serde.dump(RunLimits(place=was))))).place == was


@pytest.mark.parametrize("place", [CONTAINER, Place("podman", memory_bytes=3 << 30, command_seconds=1_234_567.0)])
def test_what_a_container_was_given_is_said_as_it_can_be_typed(place: Place) -> None:
    command = click.Command("run", params=[])
    typed = container(command).make_context("run", shlex.split(place.describe().removeprefix("--workspace podman")))
    assert place_of("podman", typed.params) == place


def test_no_number_is_no_number_of_processors() -> None:
    with pytest.raises(click.BadParameter, match="nan"):
        container(click.Command("run", params=[])).make_context("run", ["--cpus", "nan"])
    with pytest.raises(ValueError, match="cpus"):
        SandboxLimits(cpus=float("nan"))


def test_a_limit_that_is_used_up_is_said_to_be_of_the_part_where_the_counts_are_of_all_parts(tree: Path) -> None:
    assert "in this part" not in begun(tree, "--max-turns", "1")
    again = resumed(tree, "--max-turns", "1", turns=[READ, DONE])
    assert (again.returncode, "in 2 parts" in again.stderr, "in this part" in again.stderr) == (5, True, True)
    tokens = resumed(tree, "--max-tokens", "7", "--max-turns", "3", turns=[{**READ, "usage": {"input_tokens": 9}}])
    assert (tokens.returncode, "in this part" in tokens.stderr) == (5, True)


def test_the_time_that_a_run_has_taken_is_gone_for_its_resume(tree: Path) -> None:
    begun(tree, "--deadline", "1h")
    record = record_of(tree)
    *lines, last = record.read_text().splitlines()
    spent = json.loads(last)
    spent["spent"]["seconds"] += 3000
    record.write_text("".join(f"{line}\n" for line in (*lines, json.dumps(spent))))
    before = interrupted_run(record)
    assert before is not None
    assert before.remaining.seconds is not None
    assert 500 < before.remaining.seconds < 600
    assert before.remaining.resumed(RunLimits(seconds=5.0)).seconds == 5
    spent["spent"]["seconds"] += 600
    record.write_text("".join(f"{line}\n" for line in (*lines, json.dumps(spent))))
    refused = resumed(tree)
    assert (refused.returncode, "--deadline TIME" in refused.stderr) == (2, True)


KILLED = """
import os, signal, sys
from ringfence_cli.main import main
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_workspace.transaction.call_log import CallLog

outcome, write_commit, call = sys.argv.pop(1), CallLog.commit, ReceiptsFile.call


def killed(log, step):
    if log.label[0] != "call_2" or outcome == "committed":
        write_commit(log, step)
    if log.label[0] == "call_2":
        os.kill(os.getpid(), signal.SIGKILL)


def killed_late(file, receipt, plan, answer):
    if receipt.call_id == ("call_1" if outcome == "ended first" else "call_2"):
        os.kill(os.getpid(), signal.SIGKILL)
    call(file, receipt, plan, answer)


if outcome.startswith("ended"):
    ReceiptsFile.call = killed_late
else:
    CallLog.commit = killed
main()
"""


@pytest.mark.parametrize("meanwhile", ["--resume", "--resume --task=Y", "--task=X"])
def test_a_run_or_its_resume_that_another_process_was_quicker_with_is_refused(tree: Path, meanwhile: str) -> None:
    done, write = script(tree, "1.jsonl", DONE), script(tree, "2.jsonl", calls(call("ls")))
    if "--resume" in meanwhile:
        assert ringfence("run", tree, "--task=X", "--model", write).returncode == 3
    pipe = tree.parent / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "ringfence_cli", "run", tree, "--task=X", "--resume", "--model", f"script:{pipe}"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as slow, pipe.open("w") as turns:
        for option in meanwhile.split():  # the slow one has looked, and reads its script
            ringfence("run", tree, option, "--model", done if option == "--resume" else write)
        print(json.dumps(DONE), file=turns, flush=True)
        turns.close()
        record = json.loads(slow.communicate()[0])
    assert (record["exit_code"], record["outcome"]) == (2, "busy")


def test_where_there_is_nothing_to_resume_the_results_of_the_run_that_has_ended_stay(tree: Path) -> None:
    patch, report = tree.parent / "run.patch", tree.parent / "run.html"
    results = ["--patch", patch, "--report", report]
    write = calls(call("write_file", file_path="new", content="x"))
    run = ["run", tree, "--model", script(tree, "1.jsonl", write, DONE), *results]
    assert ringfence(*run, "--task", "Write.").returncode == 0
    before = patch.read_bytes(), report.read_bytes()
    assert ringfence(*run, "--resume").returncode == 2
    assert (patch.read_bytes(), report.read_bytes()) == before
    assert before[0]


@pytest.mark.parametrize(
    ("outcome", "then"),
    one_in(
        2,
        [
            *((outcome, "run") for outcome in ("rolled_back", "committed", "ended", "ended first")),
            ("rolled_back", "serve"),
            ("ended first", "serve"),
            ("committed", "undo"),
            ("ended", "undo"),
        ],
    ),
)
def test_the_receipt_that_a_kill_has_cut_off_is_in_the_file_of_the_next(tree: Path, outcome: str, then: str) -> None:
    receipts, writes = (
        tree.parent / "receipts.jsonl",
        [call("write_file", file_path=name, content="x") for name in "bc"],
    )
    run = ["run", tree, "--model", script(tree, "1.jsonl", calls(*writes), DONE), "--receipts", receipts]
    command = [sys.executable, "-c", KILLED, outcome, *map(str, run), "--task", "Write."]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    killed_at = datetime.now(UTC)
    serve = ["serve", tree, "--receipts", receipts]
    if then == "undo":
        assert ringfence("recover", tree).returncode == 0
        assert ringfence("undo", tree).returncode == 0
    for following in ([*run, "--resume"] if then == "run" else serve, serve):
        ended = served_once(*following[1:]) if following is serve else ringfence(*following)
        assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in receipts.read_text().splitlines()]
    last, path = ("call_1", "b") if outcome == "ended first" else ("call_2", "c")
    first, cut_off, *more = lines if last == "call_2" else [None, *lines]
    assert first is None or (first["call_id"], first["recovered"]) == ("call_1", False)
    committed = outcome != "rolled_back"
    assert (cut_off["call_id"], cut_off["recovered"], cut_off["outcome"] == "committed") == (last, True, committed)
    assert [change["path"] for change in cut_off["changes"]] == ([path] if committed else [])
    assert datetime.fromisoformat(cut_off["started_at"]) < killed_at
    assert not any(one["recovered"] for one in more)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_where_the_receipt_that_a_kill_has_cut_off_cannot_be_written_nothing_is_begun(tree: Path) -> None:
    model = ["--model", script(tree, "1.jsonl", calls(call("write_file", file_path="b", content="x")), DONE)]
    run = ["run", str(tree), *model, "--task", "Write.", "--receipts"]
    command = [sys.executable, "-c", KILLED, "ended first", *run, str(tree.parent / "receipts.jsonl")]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    ended = ringfence(*run, "/dev/full")
    assert (ended.returncode, "'/dev/full' cannot be written" in ended.stderr) == (2, True)


@pytest.mark.parametrize("outcome", ["rolled_back", "committed", "ended", "ended first"])
def test_a_resumed_run_counts_the_call_that_a_kill_has_cut_off_as_the_receipts_do(tree: Path, outcome: str) -> None:
    receipts = tree.parent / "receipts.jsonl"
    writes = [call("write_file", file_path=name, content="x") for name in "bc"]
    run = ["run", tree, "--model", script(tree, "1.jsonl", calls(*writes), DONE), "--receipts", receipts]
    command = [sys.executable, "-c", KILLED, outcome, *map(str, run), "--task", "Write."]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    done = ringfence(*run, "--resume", "--json")
    outcomes = Counter(json.loads(line)["outcome"] for line in receipts.read_text().splitlines())
    counted = json.loads(done.stdout)["tool_calls"]
    assert outcomes.total() == counted["total"]
    assert all(counted[kind] == count for kind, count in outcomes.items())
