"""The shell steps of the GitHub action, run as a runner runs them. `gh` is a double on the path: it only records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
ACTION = (PROJECT / "action.yml").read_text()
EDIT = {"tool_calls": [{"name": "write_file", "arguments": {"file_path": "sub/new.txt", "content": "new\n"}}]}
LOOK = {"tool_calls": [{"name": "read_file", "arguments": {"file_path": "a.txt"}}]}
DONE = {"text": "Done.\n```\n::error::not mine"}
GH = '#!/bin/sh\nprintf "%s\\n" "$@" >"$GH_RECORD"\necho "token=$GH_TOKEN" >>"$GH_RECORD"\necho https://host/pull/7\n'


def defaults() -> dict[str, str]:
    found = re.findall(r"^  ([\w-]+):\n    description: .*\n    default: (.*)$", ACTION.partition("outputs:")[0], re.M)
    return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


def git(directory: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", directory, *words], check=True, capture_output=True, text=True).stdout.strip()


def without_quoted(output: str) -> str:
    """What a runner reads for commands of a step's output."""
    return re.sub(r"^::stop-commands::(\w+)\n(?:.*\n)*?::\1::$", "", output, flags=re.M)


@dataclass
class Job:
    """One job on a checkout, whose remote repository is a directory."""

    folder: Path
    outputs: dict[str, str] = field(default_factory=dict[str, str])
    summary: str = ""

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def gh_record(self) -> str:
        record = self.folder / "gh-arguments"
        return record.read_text() if record.exists() else ""

    def step(self, name: str, **given: str) -> subprocess.CompletedProcess[str]:
        """Run the shell step of this id with these inputs."""
        inputs = {**defaults(), "token": "of-the-job", **{key.replace("_", "-"): text for key, text in given.items()}}
        step = ACTION.partition(f"- id: {name}\n")[2].partition("\n    - ")[0]
        run = re.findall(r"^      run: (.+)$", step, re.M)[0]
        values = {f"inputs.{key}": text for key, text in inputs.items()}
        values |= {f"steps.command.outputs.{key}": text for key, text in self.outputs.items()}
        named = re.findall(r"^        (\w+): \$\{\{ ([\w.-]+) \}\}$", step.partition("env:\n")[2], re.M)
        environment = {variable: values.get(expression, "") for variable, expression in named}
        files = {name: self.folder / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        environment |= {
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "RUNNER_TEMP": str(self.folder / "temp"),
            "RINGFENCE_STATE_DIR": str(self.folder / "state"),
            "GH_RECORD": str(self.folder / "gh-arguments"),
            "GITHUB_ACTION_PATH": str(PROJECT),
            "GITHUB_RUN_ID": "42",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_REF_NAME": "main",
            "GITHUB_SERVER_URL": "https://host",
            "GITHUB_REPOSITORY": "owner/name",
            **{name: str(file) for name, file in files.items()},
        }
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
        done = subprocess.run(
            words, cwd=self.checkout, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        self.outputs |= dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        self.summary = files["GITHUB_STEP_SUMMARY"].read_text()
        return done

    def model(self, *turns: object) -> str:
        path = self.folder / "model.jsonl"
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        return f"script:{path}"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "bin").mkdir()
    (tmp_path / "temp").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    git(tmp_path, "init", "--quiet", "--bare", "remote.git")
    git(tmp_path, "init", "--quiet", "--initial-branch=main", "checkout")
    made = Job(tmp_path)
    (made.checkout / "a.txt").write_text("one\n")
    git(made.checkout, "add", ".")
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    git(made.checkout, *author, "commit", "--quiet", "-m", "first")
    git(made.checkout, "remote", "add", "origin", str(tmp_path / "remote.git"))
    return made


def test_a_run_leaves_the_checkout_and_its_patch_becomes_a_pull_request_of_one_commit(job: Job) -> None:
    task = '"; touch injected; $(touch injected) `touch injected`\nand more'
    ran = job.step("command", task=task, model=job.model(EDIT, DONE), policies="protected\nallow:/sub")
    assert ran.returncode == 0, ran.stderr
    assert (job.outputs["exit-code"], job.outputs["changed"]) == ("0", "true")
    assert all(Path(job.outputs[name]).stat().st_size for name in ("patch", "receipts", "report"))
    assert "sub/new.txt" in job.summary
    assert "````text\nDone." in job.summary
    # What a model says is no command for the runner.
    assert "::error" not in without_quoted(ran.stdout)
    assert "GH_TOKEN" not in ACTION.partition("- id: command\n")[2].partition("\n    - ")[0]

    opened = job.step("pull-request", task=task)
    assert opened.returncode == 0, opened.stderr
    assert job.outputs["pull-request"] == "https://host/pull/7"
    branch = "ringfence/42-1"
    remote = job.folder / "remote.git"
    assert git(remote, "log", "--format=%an %s", f"{git(job.checkout, 'rev-parse', 'HEAD')}..{branch}") == (
        f"ringfence {task.splitlines()[0]}"
    )
    assert git(remote, "diff", "--name-only", f"{branch}~", branch) == "sub/new.txt"
    words = job.gh_record.splitlines()
    assert words[:4] == ["pr", "create", f"--head={branch}", f"--title={task.splitlines()[0]}"]
    assert {"--base=main", "token=of-the-job"} <= {*words}
    assert git(job.checkout, "status", "--porcelain") == ""
    assert git(job.checkout, "worktree", "list").count("\n") == 0
    assert [*job.folder.rglob("injected")] == []


def test_a_task_that_begins_with_an_at_sign_reads_no_file(job: Job) -> None:
    (job.folder / "secret").write_text("hidden words")
    ran = job.step("command", task=f"@{job.folder}/secret", model=job.model(DONE))
    assert ran.returncode == 0, ran.stderr
    assert "hidden words" not in Path(job.outputs["report"]).read_text()


def test_a_run_that_changed_nothing_is_no_failure_unless_it_shall_be_one(job: Job) -> None:
    model = job.model(LOOK, DONE)
    assert job.step("command", task="Look.", model=model).returncode == 0
    assert (job.outputs["exit-code"], job.outputs["changed"]) == ("0", "false")
    failed = job.step("command", task="Look.", model=model, fail_if_unchanged="true")
    assert failed.returncode == 6
    assert job.outputs["exit-code"] == "6"
    assert "::error title=ringfence::" in failed.stdout


def test_a_script_is_kept_as_one_transaction_or_rolled_back_with_its_exit_code(job: Job) -> None:
    failed = job.step("command", command="exec", script="echo two >>a.txt\nexit 3")
    assert (failed.returncode, job.outputs["changed"]) == (3, "false")
    assert (job.checkout / "a.txt").read_text() == "one\n"
    kept = job.step("command", command="exec", directory=".", script="echo ::error::theirs\necho two >>a.txt")
    assert kept.returncode == 0, kept.stderr
    assert "::error" in kept.stdout
    assert "::error" not in without_quoted(kept.stdout)
    assert "a.txt" in job.summary
    opened = job.step("pull-request", title="Write two", branch="of-mine")
    assert opened.returncode == 0, opened.stderr
    assert git(job.folder / "remote.git", "show", "of-mine:a.txt") == "one\ntwo"
    # It began with the last commit, and the checkout is as the script left it.
    assert git(job.checkout, "status", "--porcelain") == "M a.txt"


def test_the_patch_of_a_directory_below_the_root_is_applied_there(job: Job) -> None:
    (job.checkout / "part").mkdir()
    ran = job.step("command", directory="part", task="Do it.", model=job.model(EDIT, DONE))
    assert ran.returncode == 0, ran.stderr
    assert job.step("pull-request", directory="part", task="Do it.").returncode == 0
    remote = job.folder / "remote.git"
    assert git(remote, "show", "ringfence/42-1:part/sub/new.txt") == "new"


def test_a_batch_has_its_own_summary(job: Job) -> None:
    (job.folder / "project").mkdir()
    task = {"id": "one", "workspace": "project", "task": "Do it.", "model": job.model(EDIT, DONE)}
    (job.folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    ran = job.step("command", command="batch", tasks="../tasks.jsonl", arguments="--jobs\n1")
    assert ran.returncode == 0, ran.stderr
    assert "one" in job.summary
    assert Path(job.outputs["report"]).name == "index.html"
    assert job.outputs["patch"] == ""


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"command": "rm"}, "command is one of run, exec, batch, not rm"),
        ({"task": "x"}, "run needs a model"),
        ({"model": "openai:MODEL"}, "run takes either task or task-file"),
        ({"command": "exec"}, "exec needs a script"),
        ({"command": "batch", "tasks": "x", "pull_request": "true"}, "opens no pull request"),
        ({"task": "x", "model": "openai:MODEL", "fail_if_unchanged": "yes%0A"}, "is true or false, not yes%250A"),
    ],
    ids=str,
)
def test_wrong_inputs_are_named_before_anything_runs(job: Job, inputs: dict[str, str], reason: str) -> None:
    done = job.step("command", **inputs)
    assert done.returncode == 2
    assert reason in done.stdout
    assert job.outputs == {}


def test_no_input_stands_in_the_text_of_a_step() -> None:
    runs = re.findall(r"^      run: (?:\|\n((?:        .*\n)+)|(.+)$)", ACTION, re.M)
    assert len(runs) == ACTION.count("run:")
    assert not any("${{" in text for pair in runs for text in pair)


def test_every_input_is_used_and_every_output_is_written() -> None:
    head, _, steps = ACTION.partition("\nruns:\n")
    named, _, outputs = head.partition("\noutputs:\n")
    for name in re.findall(r"^  ([\w-]+):$", named, re.M):
        assert f"inputs.{name} " in steps, name
    written = re.findall(r"(\w+)=", (PROJECT / "action" / "steps.py").read_text())
    for name in re.findall(r"steps\.[\w-]+\.outputs\.([\w-]+)", outputs):
        assert name.replace("-", "_") in written, name
