"""`ringfence run` as a user meets it: streams, files, exit codes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from agent_runs import AgentTask, MemoryWorkspace, Signals, apply_changes, read_task, run_agent
from click.testing import CliRunner
from command_line import ringfence, ringfence_text
from effort import one_in

from ringfence import DeadlineExceededError, RestoreFailedError
from ringfence.adapters import PromptEvaluationError, ScriptedAdapter
from ringfence_cli import main

Turn = Mapping[str, Any]
DONE: Turn = {"text": "Done."}


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def calls(*tool_calls: Mapping[str, object], text: str = "", **usage: float) -> Turn:
    return {"text": text, "tool_calls": list(tool_calls), **({"usage": usage} if usage else {})}


EDIT = calls(
    call("read_file", file_path="a.txt"),
    call("edit_file", file_path="a.txt", old_string="two", new_string="2"),
    call("write_file", file_path="new/b.txt", content="new\n"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "a.txt").write_bytes(b"one\r\ntwo\nthree")
    (tmp_path / "tree" / "sub" / "keep.txt").write_text("keep\n")
    return tmp_path / "tree"


def script(directory: Path, *turns: Turn) -> str:
    path = directory / "script.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return f"script:{path}"


def in_memory(tree: Path) -> list[str]:
    """The command of a run, but for its model."""
    return [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--workspace", "memory", "--task", "Do it."]


def run(tree: Path, *arguments: str | Path, turns: Sequence[Turn] = (EDIT, DONE)) -> subprocess.CompletedProcess[bytes]:
    given = ("--workspace", "memory", "--task", "Do it.", "--model", script(tree.parent, *turns))
    return ringfence("run", tree, *given, *arguments)


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def applied_by_git(tree: Path, patch: bytes) -> dict[str, bytes]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "apply", "-"], cwd=tree, input=patch, check=True, capture_output=True)
    return contents(tree)


EDITED = {"a.txt": b"one\r\n2\nthree", "new/b.txt": b"new\n", "sub/keep.txt": b"keep\n"}


def test_the_list_of_commands_says_the_whole_of_what_each_does() -> None:
    context = click.Context(main.ringfence)
    commands = {name: main.ringfence.get_command(context, name) for name in main.ringfence.list_commands(context)}
    for name, (_, sentence) in main.LAZY.items():
        assert commands[name] is not None
        assert commands[name].get_short_help_str(1000) == sentence
    for group in (main.ringfence, *(commands[name] for name in ("overrides", "policies", "sandbox"))):
        said = CliRunner().invoke(group, ["--help"]).output
        assert "Commands:\n" in said
        assert "..." not in said.partition("Commands:\n")[2]


def test_help_loads_neither_rich_nor_pydantic_nor_the_adapters() -> None:
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom ringfence_cli.main import ringfence\n"
        "for command in ([], ['run'], ['demo']):\n"
        "    assert CliRunner().invoke(ringfence, [*command, '--help']).exit_code == 0\n"
        "print(sorted(name for name in sys.modules if name.startswith(('rich', 'pydantic', 'ringfence.', 'fsspec'))"
        " and name != 'ringfence.lazy_names'))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_the_diff_goes_to_standard_output_and_the_directory_stays_as_it_is(tree: Path) -> None:
    before = contents(tree)
    ended = run(tree)
    assert ended.returncode == 0
    assert contents(tree) == before
    assert ended.stdout.startswith(b"diff --git a/a.txt b/a.txt\n")
    assert applied_by_git(tree, ended.stdout) == EDITED


def test_a_file_that_is_moved_counts_once(tree: Path) -> None:
    move = {"name": "move", "arguments": {"source": "a.txt", "target": "sub/moved.txt"}}
    ended = run(tree, turns=({"tool_calls": [{"name": "read_file", "arguments": {"file_path": "a.txt"}}, move]}, DONE))
    assert b"rename from a.txt\nrename to sub/moved.txt\n" in ended.stdout
    assert "1 file changed, +0 -0 lines" in ended.stderr.decode()


def test_the_package_runs_as_a_module() -> None:
    ended = subprocess.run([sys.executable, "-m", "ringfence", "--version"], capture_output=True, text=True)
    assert (ended.returncode, "version" in ended.stdout) == (0, True), ended


def test_what_is_applied_is_a_step_that_undo_reverses(tree: Path) -> None:
    before = contents(tree)
    record = json.loads(run(tree, "--apply", "--json").stdout)
    assert (record["applied"], record["steps"]) == (True, 1)
    (step,) = (entry for entry in json.loads(ringfence("log", tree, "--json").stdout)["log"] if entry["number"])
    assert (step["tool"], step["session_id"], step["task"]) == ("apply", record["session_ids"][-1], "Do it.")
    assert ringfence("undo", tree).returncode == 0
    assert contents(tree) == before


def test_nothing_is_applied_where_another_process_has_the_directory(tree: Path) -> None:
    before = contents(tree)
    holding = "import sys; from ringfence_sandbox import Workspace\nwith Workspace.open(sys.argv[1]): print(); input()"
    command = [sys.executable, "-c", holding, str(tree)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        ended = run(tree, "--apply")
        holder.communicate(b"\n")
    assert (ended.returncode, b"not applied" in ended.stderr) == (1, True), ended.stderr
    assert contents(tree) == before
    assert applied_by_git(tree, ended.stdout) == EDITED


def test_apply_writes_what_changed_and_nothing_else(tree: Path) -> None:
    kept = (tree / "sub" / "keep.txt").stat()
    ended = run(tree, "--apply")
    assert ended.returncode == 0
    assert contents(tree) == EDITED
    after = (tree / "sub" / "keep.txt").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (kept.st_ino, kept.st_mtime_ns, kept.st_ctime_ns)


def test_the_patch_file_reproduces_the_result_with_git_apply(tree: Path, tmp_path: Path) -> None:
    (tree / "data.bin").write_bytes(bytes(range(256)))
    (tree / "latin-1.txt").write_bytes(b"caf\xe9\n")
    (tree / os.fsdecode(b"caf\xe9")).write_bytes(b"name\n")
    patch = tmp_path / "out.patch"
    patch.write_text("an old one, longer than nothing\n" * 1000)
    changes = calls(
        call("read_file", file_path="latin-1.txt"),
        call("edit_file", file_path="latin-1.txt", old_string="caf", new_string="CAF"),
        call("read_file", file_path="data.bin"),
        call("rm", path="data.bin"),
        call("read_file", file_path="caf\\xe9"),
        call("edit_file", file_path="caf\\xe9", old_string="name", new_string="other"),
        call("read_file", file_path="sub/keep.txt"),
        call("move", source="sub/keep.txt", target="kept.txt"),
    )
    expected = {
        "a.txt": b"one\r\ntwo\nthree",
        "latin-1.txt": b"CAF\xe9\n",
        os.fsdecode(b"caf\xe9"): b"other\n",
        "kept.txt": b"keep\n",
    }
    ended = run(tree, "--patch", patch, turns=[changes, DONE])
    assert (ended.returncode, ended.stdout) == (0, patch.read_bytes())
    assert applied_by_git(tree, patch.read_bytes()) == expected


def test_every_call_leaves_a_line_in_the_receipts_file_after_those_that_are_there(tree: Path, tmp_path: Path) -> None:
    receipts = tmp_path / "receipts.jsonl"
    receipts.write_text('{"an": "older line"}\n')
    denied = call("write_file", file_path="sub/keep.txt", content="x")
    unknown = {"name": "fly", "arguments": "{not json"}
    failed = call("edit_file", file_path="a.txt", old_string="nowhere", new_string="x")
    assert run(tree, "--receipts", receipts, turns=[EDIT, calls(denied, unknown, failed), DONE]).returncode == 0
    lines = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [line.get("outcome") for line in lines] == [None, *["committed"] * 3, "denied", "rejected", "failed"]
    assert any(line.get("answer") for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path": NaN}',
        '{"path": -Infinity}',
        '{"path": %s}' % ("[" * 900 + "]" * 900),
        '"{not json"',
        '{"path": "\\ud800"}',
    ],
)
def test_whatever_a_model_sends_the_receipt_is_strict_json(tree: Path, tmp_path: Path, arguments: str) -> None:
    (tmp_path / "script.jsonl").write_text(
        f'{{"tool_calls": [{{"name": "ls", "arguments": {arguments}}}]}}\n{json.dumps(DONE)}\n'
    )
    model, receipts = f"script:{tmp_path / 'script.jsonl'}", tmp_path / "receipts.jsonl"
    assert (
        ringfence(
            "run", tree, "--workspace", "memory", "--task", "x", "--model", model, "--receipts", receipts
        ).returncode
        == 0
    )
    (line,) = receipts.read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["tool"] == "ls"
    json.dumps(record, ensure_ascii=False).encode()  # no half of a surrogate pair


def test_json_is_one_object_that_tells_all(tree: Path) -> None:
    (tree / ".git").mkdir()
    plan = call("planning_setup_plan", objective="Mend it", initial_steps=["Look"])
    turns = [calls(plan, input_tokens=10, output_tokens=2), EDIT, {**DONE, "usage": {"input_tokens": 5}}]
    ended = run(tree, "--json", "--quiet", turns=turns)
    assert ended.stderr == b""
    record = json.loads(ended.stdout)
    assert record["exit_code"] == ended.returncode == 0
    assert (record["outcome"], record["error"], record["text"]) == ("done", None, "Done.")
    assert (record["turns"], record["tool_calls"]["total"], record["tool_calls"]["committed"]) == (3, 4, 4)
    assert record["plan"]["steps"] == [{"step_id": 1, "title": "Look", "status": "pending"}]
    used = {"input_tokens": 15, "output_tokens": 2, "cached_tokens": None}
    assert record["usage"] == used | {"cache_write_tokens": None, "cost_usd": None, "prices": None}
    assert {change["path"]: change["kind"] for change in record["changes"]} == {
        "a.txt": "modified",
        "new": "created",
        "new/b.txt": "created",
    }
    assert [one["path"] for one in record["left_out"]] == [".git"]
    assert applied_by_git(tree, record["patch"].encode()) == EDITED


def test_json_has_a_patch_that_is_no_text_as_base64(tree: Path) -> None:
    (tree / "a.txt").write_bytes(b"\xe9 two\n")
    record = json.loads(run(tree, "--json").stdout)
    assert record["patch"] is None
    assert len(record["patch_base64"]) > 100


def test_the_task_can_come_from_a_file(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("From a file: $not ${a} template.\n")
    seen: list[str] = []

    def model(conversation: Sequence[Mapping[str, Any]]) -> Turn:
        seen.append(conversation[0]["content"])
        return DONE

    assert perform_with(model, tree, text=read_task(f"@{tmp_path / 'task.txt'}")) == (0, None)
    assert "From a file: $not ${a} template." in seen[0]


def usage_error(tree: Path, *arguments: str) -> str:
    ended = ringfence_text("run", *arguments)
    assert ended.returncode == 2
    assert contents(tree) == {"a.txt": b"one\r\ntwo\nthree", "sub/keep.txt": b"keep\n"}
    return ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["TREE/missing", "--task", "x", "--model", "GOOD"], "does not exist"),
        (["TREE/a.txt", "--task", "x", "--model", "GOOD"], "is a file"),
        (["TREE", "--task", "x", "--model", "gpt"], "script:FILE"),
        (["TREE", "--task", "x", "--model", "script:"], "script:FILE"),
        (["TREE", "--task", "x", "--model", "script:TREE/missing"], "cannot be read"),
        (["TREE", "--task", "x", "--model", "script:TREE"], "cannot be read"),
        (["TREE", "--task", "x", "--model", "GOOD", "--workspace", "cloud"], "memory"),
        (["TREE", "--task", "x", "--model", "GOOD", "--no-apply", "--workspace", "disk"], "ringfence undo"),
        (["TREE", "--task", "x", "--model", "GOOD", "--deadline", "0.5s"], "between 1s"),
        (["TREE", "--task", "x", "--model", "GOOD", "--deadline", "999999999h"], "between 1s"),
        (["TREE", "--task", "x", "--model", "GOOD", "--max-tokens", "0"], "--max-tokens"),
        (["TREE", "--task", "x", "--model", "GOOD", "--receipts", "TREE"], "cannot be written"),
        (["TREE", "--task", "x", "--model", "GOOD", "--patch", "OUT", "--receipts", "OUT"], "the same file"),
    ],
)
def test_wrong_usage_is_exit_code_2_before_anything_happens(tree: Path, arguments: list[str], said: str) -> None:
    names = {"TREE": str(tree), "GOOD": script(tree.parent, EDIT, DONE), "OUT": str(tree.parent / "out")}
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    assert said in usage_error(tree, *arguments)


@pytest.mark.parametrize(
    ("line", "said"),
    [("{not json", "line 2"), ('{"tool_calls": [{"arguments": {}}]}', "line 2")],
)
def test_a_malformed_script_is_named_with_its_line(tree: Path, line: str, said: str) -> None:
    (tree.parent / "bad.jsonl").write_text(f'{{"text": ""}}\n{line}\n')
    assert said in usage_error(tree, str(tree), "--task", "x", "--model", f"script:{tree.parent / 'bad.jsonl'}")


@pytest.mark.parametrize("arguments", [["disk"], ["memory", "--apply"]], ids=lambda arguments: arguments[0])
def test_every_name_can_be_written_whatever_the_locale_is(tree: Path, arguments: list[str]) -> None:
    turns = calls(call("write_file", file_path="new/caf\xe9.txt", content="new\n"))
    command = [sys.executable, "-m", "ringfence_cli", "run", tree, "--task", "Do it.", "--workspace", *arguments]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    model = ("--model", script(tree.parent, turns, DONE))
    done = subprocess.run([*command, *model], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, contents(tree)["new/caf\xe9.txt"]) == (0, b"new\n"), done.stderr


def test_a_directory_larger_than_the_bound_is_refused(tree: Path) -> None:
    with (tree / "huge").open("wb") as file:
        file.truncate((1 << 30) + 1)
    ended = run(tree)
    assert ended.returncode == 2
    assert b"more than the 1 GiB" in ended.stderr


def test_what_is_not_loaded_is_reported(tree: Path) -> None:
    (tree / ".git").mkdir()
    (tree / "out").symlink_to("/etc")
    os.mkfifo(tree / "pipe")
    said = run(tree, turns=[calls(call("ls")), DONE]).stderr.decode()
    assert [line.split()[2] for line in said.splitlines() if line.startswith("left out: ")] == [".git", "out", "pipe"]


@pytest.mark.parametrize("option", ["--patch", "--receipts", "--report"])
@pytest.mark.parametrize("place", ["file", "folder/new"])
def test_no_file_of_a_run_is_written_through_a_link_that_leads_out_of_the_directory(
    tree: Path, tmp_path: Path, option: str, place: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("victim", "new"):
        (outside / name).write_text("theirs")
    (tree / "file").symlink_to(outside / "victim")  # as an agent can make it, for the next run
    (tree / "folder").symlink_to(outside)
    refused = run(tree, option, tree / place)
    assert (refused.returncode, b"cannot be written" in refused.stderr) == (2, True)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"victim": "theirs", "new": "theirs"}
    assert run(tree, option, outside / "new").returncode == 0, "which is named itself"


def test_a_script_that_is_used_up_is_the_provider_s_failure(tree: Path) -> None:
    before = contents(tree)
    ended = run(tree, "--apply", turns=[EDIT])
    assert ended.returncode == 3
    assert contents(tree) == before
    assert applied_by_git(tree, ended.stdout) == EDITED


@pytest.mark.parametrize("usage", [{}, {"usage": {"input_tokens": 0, "output_tokens": 0}}])
def test_a_limit_of_tokens_that_the_model_does_not_count_is_said(tree: Path, usage: Turn) -> None:
    ended = run(tree, "--max-tokens", "10", "--quiet", "--json", turns=[{**DONE, **usage}])
    assert b"--max-tokens held nothing back" in ended.stderr
    assert not any(json.loads(ended.stdout)["usage"].values())
    counted = {**DONE, "usage": {"input_tokens": 1, "output_tokens": 1}}
    assert not run(tree, "--max-tokens", "10", "--quiet", turns=[counted]).stderr


def test_a_token_budget_that_is_used_up_is_exit_code_5(tree: Path) -> None:
    turns = [calls(call("ls"), input_tokens=9, output_tokens=2), DONE]
    ended = run(tree, "--max-tokens", "10", turns=turns)
    assert ended.returncode == 5
    assert b"budget" in ended.stderr
    assert run(tree, "--max-tokens", "11", turns=turns).returncode == 0


def test_a_cost_that_is_used_up_is_exit_code_5_and_a_cost_is_said(tree: Path) -> None:
    turns = [calls(call("ls"), input_tokens=9, cost_usd=0.25), {**DONE, "usage": {"cost_usd": 0.5}}]
    ended = run(tree, "--max-cost", "0.20", turns=turns)
    assert ended.returncode == 5
    assert b"the budget is used up: $0.2500, of $0.2000 that it allows" in ended.stderr
    ended = run(tree, "--max-cost", "$1", "--json", turns=turns)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["usage"]["cost_usd"] == 0.75
    assert b", $0.7500" in ended.stderr


def test_a_limit_of_cost_is_refused_for_a_model_of_unknown_price(tree: Path) -> None:
    command = ["run", tree, "--task", "x", "--model", "openai:m@http://127.0.0.1:9/v1"]
    ended = ringfence_text(*command, "--max-cost", "1")
    assert ended.returncode == 2
    assert "--max-cost can limit nothing: there is no price of m at 127.0.0.1" in " ".join(ended.stderr.split())
    for wrong in ("0", "1e3", "-1", "one"):
        ended = ringfence_text(*command, "--max-cost", wrong)
        assert ended.returncode == 2
        assert "is not an amount of US dollars above 0" in " ".join(ended.stderr.split())


def perform_with(
    model: Callable[[Sequence[Mapping[str, Any]]], Turn], tree: Path, *, text: str = "x", seconds: float | None = None
) -> tuple[int, str | None]:
    with Signals() as signals:
        workspace = MemoryWorkspace(tree)
        ending = run_agent(AgentTask(text, workspace, ScriptedAdapter(model), seconds=seconds), gate=signals)
        apply_changes(ending, workspace)
    return ending.exit_code, ending.error


def test_a_deadline_that_passes_is_exit_code_5(tree: Path) -> None:
    def slow(conversation: Sequence[Mapping[str, Any]]) -> Turn:
        time.sleep(1.1)
        return EDIT

    before = contents(tree)
    code, error = perform_with(slow, tree, seconds=1)
    assert (code, error is not None and "deadline" in error) == (5, True)
    assert contents(tree) == before


def test_a_file_changed_on_disk_meanwhile_is_a_conflict_and_nothing_is_applied(tree: Path) -> None:
    turns = iter([EDIT, DONE])

    def model(conversation: Sequence[Mapping[str, Any]]) -> Turn:
        (tree / "a.txt").write_text("somebody else was here\n")
        return next(turns)

    code, error = perform_with(model, tree)
    assert (code, error) == (1, "not applied, since files were changed on disk meanwhile: apply the patch by hand")
    assert contents(tree) == {"a.txt": b"somebody else was here\n", "sub/keep.txt": b"keep\n"}


@pytest.mark.parametrize("link", [False, True])
def test_what_was_made_in_memory_is_not_written_to_what_has_come_in_the_place_of_the_directory(
    tree: Path, link: bool
) -> None:
    turns, moved = iter([calls(call("write_file", file_path="new.txt", content="x")), DONE]), tree.with_name("moved")

    def model(conversation: Sequence[Mapping[str, Any]]) -> Turn:
        if not moved.exists():
            tree.rename(moved)
            if link:
                (tree.parent / "other").mkdir()
                tree.symlink_to("other")
            else:
                tree.mkdir()
        return next(turns)

    code, error = perform_with(model, tree)
    assert (code, error) == (1, f"not applied: {tree} is not the directory any more that was copied")
    assert list(tree.iterdir()) == []
    assert not (moved / "new.txt").exists()


def test_after_a_conflict_the_patch_is_saved_and_printed_and_the_paths_are_named(tree: Path, tmp_path: Path) -> None:
    # The receipts go into a file of the tree, which so changes while the agent works.
    ended = run(tree, "--apply", "--patch", tmp_path / "out.patch", "--receipts", tree / "a.txt")
    assert ended.returncode == 1
    assert ended.stderr.endswith(b"changed on disk meanwhile: apply the patch by hand\n  a.txt\n")
    assert not (tree / "new").exists()
    assert ended.stdout == (tmp_path / "out.patch").read_bytes()
    (tree / "a.txt").write_bytes(b"one\r\ntwo\nthree")
    assert applied_by_git(tree, ended.stdout) == EDITED


@pytest.mark.parametrize("way", ["write_file", "move", "apply_patch"])
def test_git_s_own_data_is_not_written(tree: Path, way: str) -> None:
    hook = "sub/.GIT/hooks/post-checkout"
    patch = f"--- /dev/null\n+++ b/{hook}\n@@ -0,0 +1 @@\n+#!/bin/sh\n"
    attempts = {
        "write_file": [call("write_file", file_path=hook, content="#!/bin/sh\n")],
        "move": [call("write_file", file_path="hook", content="x"), call("move", source="hook", target=hook)],
        "apply_patch": [call("apply_patch", patch=patch)],
    }
    ended = run(tree, "--apply", turns=[calls(*attempts[way]), DONE])
    assert b"git's own data" in ended.stderr
    assert not (tree / "sub" / ".GIT").exists()


def test_nothing_is_written_where_something_was_left_out(tree: Path) -> None:
    (tree / "up").symlink_to("..")
    ended = run(tree, "--apply", turns=[calls(call("write_file", file_path="up/escape.txt", content="x")), DONE])
    assert ended.returncode == 0
    assert b"up is not part of the workspace" in ended.stderr
    assert not (tree.parent / "escape.txt").exists()


@pytest.mark.parametrize("change", [call("rm", path="d", recursive=True), call("move", source="d", target="e")])
def test_a_directory_stays_where_something_in_it_was_left_out(tree: Path, change: dict[str, object]) -> None:
    (tree / "d").mkdir()
    (tree / "d" / "up").symlink_to("missing")
    ended = run(tree, "--apply", turns=[calls(change, call("write_file", file_path="new", content="x")), DONE])
    assert ended.returncode == 0, ended.stderr
    assert b"d/up is not part of the workspace" in ended.stderr
    assert (tree / "new").read_text() == "x"


def test_an_absolute_path_below_the_directory_is_that_file(tree: Path) -> None:
    run(tree, "--apply", turns=[calls(call("write_file", file_path=f"{tree}/new.txt", content="x")), DONE])
    assert (tree / "new.txt").read_text() == "x"


class Failing:
    """An adapter that cannot go on."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def evaluate(self, prompt: object, **options: object) -> Any:
        raise self.error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptEvaluationError("down", phase="request"), 3),
        (PromptEvaluationError("garbled", phase="response"), 3),
        (PromptEvaluationError("stuck", phase="tool"), 1),
        (PromptEvaluationError("dear", phase="budget"), 5),
        (caused(PromptEvaluationError("bad", phase="tool"), RestoreFailedError([("files", OSError())])), 1),
        (caused(PromptEvaluationError("late", phase="tool"), DeadlineExceededError("late")), 5),
        (ZeroDivisionError("a mistake of ours"), 1),
    ],
)
def test_what_ends_an_evaluation_has_its_exit_code(tree: Path, error: Exception, code: int) -> None:
    with Signals() as signals:
        ending = run_agent(AgentTask("x", MemoryWorkspace(tree), Failing(error)), gate=signals)
    assert ending.exit_code == code
    assert ending.error


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]not markup[/red] :smile: \u202e \ud800\r"


def test_a_script_that_does_not_end_a_run_is_no_run_to_resume(tree: Path) -> None:
    on_disk = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--task", "Do it."]
    ended = subprocess.run([*on_disk, "--model", script(tree.parent, EDIT)], capture_output=True)
    assert (ended.returncode, b"end it with a turn that calls none" in ended.stderr) == (3, True)
    assert b"--resume" not in ended.stderr


def test_nothing_a_model_says_acts_on_the_terminal(tree: Path) -> None:
    (tree / f"odd{HOSTILE[:5]}").write_text("x")
    turn = calls(
        call("planning_setup_plan", objective=HOSTILE, initial_steps=[HOSTILE]),
        call("write_file", file_path="x.txt", content=HOSTILE.replace("\ud800", "")),
        {"name": HOSTILE, "arguments": HOSTILE},
        text=HOSTILE,
    )
    shown = at_a_terminal([*in_memory(tree), "--model", script(tree.parent, turn, {"text": HOSTILE})])
    plain = run(tree, turns=[turn, {"text": HOSTILE}]).stderr
    for said in (shown, plain):
        assert b"[red]not markup[/red] :smile:" in said
        for sent in (b"\x1b]0;", b"\x1b[2J", b"\x9b", "\u202e".encode(), b"\x07"):
            assert sent not in said.replace(b"\xc2\x9b", b"\x9b")
    assert b"\x1b" not in plain


def test_nothing_in_the_words_of_the_command_line_acts_on_the_terminal(tree: Path) -> None:
    (tree / HOSTILE[:5]).write_text("a name that an agent gave a file, for `ringfence log *`")
    for words in (["log", tree, tree / HOSTILE[:5]], ["policies", "try", tree / "a.txt", "--policy", "/\x1b]0;x.toml"]):
        said = ringfence(*words)
        assert (said.returncode, b"Error: " in said.stderr, b"\x1b" in said.stderr) == (2, True, False)


@pytest.mark.parametrize("command", ["doctor", "build"])
def test_nothing_that_is_said_of_podman_acts_on_the_terminal(command: str) -> None:
    said = ringfence("sandbox", command, env={**os.environ, "CONTAINER_HOST": "unix:///nowhere/\x1b]0;x"})
    told = said.stdout + said.stderr
    assert (said.returncode, b"\\x1b]0;x" in told, b"\x1b" in told) == (4, True, False)


def at_a_terminal(command: Sequence[str]) -> bytes:
    """What a command writes to a terminal that is all three of its streams."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that nobody has the other end any more
                break
    os.close(ours)
    return shown


def test_a_terminal_gets_colours_and_a_live_plan(tree: Path) -> None:
    plan = call("planning_setup_plan", objective="Mend it", initial_steps=["Look around"])
    model = script(tree.parent, calls(plan), EDIT, DONE)
    shown = at_a_terminal([*in_memory(tree), "--model", model])
    assert b"[ ] 1. Look around" in shown
    assert b"\x1b[32m+2" in shown
    assert b"\x1b[31m-two" in shown


def test_quiet_says_nothing_but_errors(tree: Path) -> None:
    assert run(tree, "--quiet").stderr == b""
    ended = run(tree, "--quiet", turns=[EDIT])
    assert ended.stderr.startswith(b"ringfence: the script has no turn left")
    assert ended.stderr.count(b"\n") == 1


def test_a_failing_tool_shows_no_traceback(tree: Path) -> None:
    turn = calls(call("read_file", file_path="missing"), call("grep", pattern="("), call("read_file", file_path="../x"))
    ended = run(tree, turns=[turn, DONE])
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr
    assert ended.stderr.count(b"failed and rolled back: ") == 3


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_of_standard_output_who_leaves_is_no_error(tree: Path, arguments: list[str]) -> None:
    (tree / "big.txt").write_text("two\n" * 100_000)
    turn = calls(
        call("read_file", file_path="big.txt"),
        call("edit_file", file_path="big.txt", old_string="two", new_string="2", replace_all=True),
    )
    command = [*in_memory(tree), "--apply", *arguments]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*command, "--model", script(tree.parent, turn, DONE)], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.close(reading)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert b"Error" not in said
    assert (tree / "big.txt").read_text() == "2\n" * 100_000


def test_standard_output_that_is_full_fails(tree: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*in_memory(tree), "--model", script(tree.parent, EDIT, DONE)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert ended.returncode == 1
    assert b"No space left" in ended.stderr


@pytest.mark.parametrize(("name", "buffered"), one_in(2, product(["stdout", "stderr"], ["", "1"])))
def test_a_stream_that_does_not_wait_for_its_reader_gets_all_the_same(tree: Path, name: str, buffered: str) -> None:
    (tree / "big.txt").write_text("two\n" * 30_000)
    change = calls(call("read_file", file_path="big.txt"), call("rm", path="big.txt"))
    said = [calls(call("ls"), text="x" * 2_000)] * 50
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: writing}
    command = [*in_memory(tree), "--model", script(tree.parent, change, *said, DONE)]
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    process = subprocess.Popen(command, stdout=streams["stdout"], stderr=streams["stderr"], env=environment)
    os.close(writing)
    with suppress(subprocess.TimeoutExpired):
        process.wait(3)
    with open(reading, "rb") as stream:
        got = stream.read()
    assert process.wait(60) == 0
    assert got.count(b"-two\n") == 30_000 if name == "stdout" else got.endswith(b"saves them for `git apply`\n")


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed")
def test_what_standard_output_takes_only_in_part_is_no_success(tree: Path, tmp_path: Path) -> None:
    (tree / "big.txt").write_text("two\n" * 30_000)
    turns = script(tree.parent, calls(call("read_file", file_path="big.txt"), call("rm", path="big.txt")), DONE)
    with open(tmp_path / "patch", "wb") as patch:
        ended = subprocess.run(
            ["prlimit", "--fsize=65536", *in_memory(tree), "--model", turns],
            stdout=patch,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            check=False,
        )
    assert ended.returncode == 1
    assert b"File too large" in ended.stderr


@pytest.mark.parametrize("words", [["log", "missing"], ["run", ".", "--task", ""], ["run", "."], ["restore"]])
def test_standard_error_that_is_full_changes_neither_exit_code_nor_json(tree: Path, words: list[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    command = [sys.executable, "-m", "ringfence_cli", *words, "--json"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, cwd=tree, check=False)
    assert (ended.returncode, json.loads(ended.stdout)["exit_code"]) == (2, 2)


@pytest.mark.parametrize("workspace", ["memory", "disk"])
def test_a_run_without_a_container_loads_nothing_of_podman(tree: Path, workspace: str) -> None:
    program = (
        "import atexit, sys\nfrom ringfence_cli.main import main\n"
        "loaded = lambda: [name for name in sys.modules if name.startswith(('podman', 'requests', 'rich.progress'))]\n"
        "atexit.register(lambda: print(loaded(), file=sys.stderr))\nmain()\n"
    )
    words = ["run", tree, "--task", "x", "--workspace", workspace, "--model", script(tree.parent, EDIT, DONE)]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (0, ["[]"]), ended.stderr


def test_with_closed_streams_nothing_is_said_into_other_files(tree: Path, tmp_path: Path) -> None:
    receipts = tmp_path / "receipts.jsonl"
    command = [*in_memory(tree), "--receipts", str(receipts), "--model", script(tree.parent, EDIT, DONE)]
    ended = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], check=False)
    assert ended.returncode == 0
    assert [json.loads(line)["outcome"] for line in receipts.read_text().splitlines()] == ["committed"] * 3


@pytest.mark.parametrize(
    ("own_tools", "closed"), one_in(3, product([False, True], ["<&- >&- 2>&-", "<&- 2>&-", "<&- >&-"]))
)
def test_without_standard_input_none_of_the_streams_is_a_file_of_the_run(
    tree: Path, tmp_path: Path, closed: str, own_tools: bool
) -> None:
    receipts, tools = tmp_path / "receipts.jsonl", tmp_path / "tools.py"
    tools.write_text("from ringfence import MarkdownSection\nown = MarkdownSection(title='Own', template='Print.')\n")
    options = ["--workspace", "disk", "--receipts", receipts, *(["--section", f"{tools}:own"] if own_tools else [])]
    command = [*in_memory(tree), *map(str, options), "--model", script(tree.parent, EDIT, DONE)]
    ended = subprocess.run(["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *command], check=False)
    assert ended.returncode == 0
    assert [json.loads(line)["outcome"] for line in receipts.read_text().splitlines()] == ["committed"] * 3


def test_receipts_that_cannot_be_written_fail_the_task(tree: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    before = contents(tree)
    ended = run(tree, "--receipts", "/dev/full", "--apply")
    assert ended.returncode == 1
    assert b"No space left" in ended.stderr
    assert contents(tree) == before


def test_git_s_own_data_is_not_written_through_a_link_either(tree: Path) -> None:
    link = "--- /dev/null\n+++ b/g\nnew file mode 120000\n@@ -0,0 +1 @@\n+sub/.git\n\\ No newline at end of file\n"
    patch = f"diff --git a/g b/g\nnew file mode 120000\n{link.replace('new file mode 120000' + chr(10), '')}"
    hook = call("write_file", file_path="g/hooks/post-checkout", content="#!/bin/sh\n")
    ended = run(tree, "--apply", turns=[calls(call("apply_patch", patch=patch)), calls(hook), DONE])
    assert b"git's own data" in ended.stderr
    assert not (tree / "sub" / ".git").exists()


def test_a_run_that_may_open_too_few_files_says_which_limit_to_raise(tree: Path) -> None:
    (tree / "/".join("d" * 80)).mkdir(parents=True)
    command = [*in_memory(tree), "--workspace", "disk", "--model", script(tree.parent, DONE)]
    ended = subprocess.run(["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command], capture_output=True)
    assert ended.returncode == 2
    assert b"the workspace cannot be opened: Too many open files: raise" in b" ".join(ended.stderr.split())
    assert b"`ulimit -n`" in ended.stderr


def test_a_run_that_changed_nothing_fails_only_where_that_is_asked_for(tree: Path) -> None:
    assert run(tree, turns=[DONE]).returncode == 0
    done = run(tree, "--fail-if-unchanged", "--json", turns=[DONE])
    assert (done.returncode, json.loads(done.stdout)["outcome"]) == (6, "unchanged")
    assert run(tree, "--fail-if-unchanged").returncode == 0


def test_a_run_on_disk_that_changed_nothing_is_not_to_be_resumed(tree: Path) -> None:
    given = ("--task", "Do it.", "--model", script(tree.parent, DONE), "--fail-if-unchanged")
    assert ringfence("run", tree, *given).returncode == 6
    assert ringfence("run", tree, "--resume", "--model", script(tree.parent, DONE)).returncode == 2
