"""The steps of the GitHub action `action.yml`: `steps.py command` and `steps.py pull-request`.

All inputs come from the environment. Needs Python 3.11 and nothing else. A pull request needs git and gh.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_TITLE = 72
MAX_SHOWN = 20_000
"""The most characters of a model's answer in the summary of the job."""
MAX_LISTED = 100
MAX_ANNOTATIONS = 10
NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")


def stop(reason: str) -> NoReturn:
    """End the step as wrong usage."""
    print(f"::error title=ringfence::{escaped(reason)}")
    sys.exit(2)


def given(name: str) -> str:
    return os.environ.get(name, "").strip()


def lines(name: str) -> list[str]:
    return [line.strip() for line in os.environ.get(name, "").splitlines() if line.strip()]


def is_true(name: str) -> bool:
    value = given(name) or "false"
    if value not in ("true", "false"):
        stop(f"{name.lower().replace('_', '-')} is true or false, not {value}")
    return value == "true"


def escaped(text: str) -> str:
    """The text of an annotation."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escaped_property(text: str) -> str:
    return escaped(text).replace(":", "%3A").replace(",", "%2C")


def fenced(text: str, limit: int = MAX_SHOWN) -> str:
    """A block of Markdown that the text cannot end."""
    shown = text if len(text) <= limit else f"{text[:limit]}\n..."
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", shown)), 3)
    return f"{ticks}text\n{shown}\n{ticks}\n"


def append(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def put_outputs(**values: object) -> None:
    for name, value in values.items():
        text = str(value)
        assert "\n" not in text, f"the output {name} is one line"
        append("GITHUB_OUTPUT", f"{name.replace('_', '-')}={text}\n")


def agent_words(folder: Path) -> list[str]:
    if bool(given("TASK")) == bool(given("TASK_FILE")):
        stop("run takes either task or task-file")
    if not given("MODEL"):
        stop("run needs a model")
    task = Path(given("TASK_FILE"))
    if given("TASK"):  # by a file, as a text that begins with @ would name one
        (task := folder / "task.md").write_text(f"{given('TASK')}\n", encoding="utf-8")
    words = ["run", given("DIRECTORY") or ".", "--model", given("MODEL"), "--workspace", given("WORKSPACE") or "memory"]
    words += ["--fail-if-unchanged"] if is_true("FAIL_IF_UNCHANGED") else []
    words += [f"--policy={policy}" for policy in lines("POLICIES")] + lines("ARGUMENTS")
    words += ["--task", f"@{task}", "--patch", f"{folder}/changes.patch", "--receipts", f"{folder}/receipts.jsonl"]
    return [*words, "--report", f"{folder}/report.html", "--json"]


def exec_words(folder: Path) -> list[str]:
    if not given("SCRIPT"):
        stop("exec needs a script")
    words = ["exec", given("DIRECTORY") or ".", "--no-interactive", "--workspace", given("WORKSPACE") or "disk"]
    words += [f"--policy={policy}" for policy in lines("POLICIES")] + lines("ARGUMENTS")
    words += ["--patch", f"{folder}/changes.patch", "--receipts", f"{folder}/receipts.jsonl"]
    return [*words, "--", "sh", "-ec", os.environ["SCRIPT"]]


def batch_words(folder: Path) -> list[str]:
    if not given("TASKS"):
        stop("batch needs tasks")
    if is_true("PULL_REQUEST"):
        stop("batch has a patch for each task and opens no pull request")
    return ["batch", "run", given("TASKS"), "--out", f"{folder}/batch", *lines("ARGUMENTS")]


WORDS = {"run": agent_words, "exec": exec_words, "batch": batch_words}


def run_quoted(words: Sequence[str], stdout: Path | None) -> int:
    """Run a command whose output can hold no commands for the runner. Return its exit code."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        if stdout is None:
            return subprocess.run(words, check=False, stdin=subprocess.DEVNULL).returncode
        with open(stdout, "wb") as file:
            return subprocess.run(words, check=False, stdin=subprocess.DEVNULL, stdout=file).returncode
    finally:
        print(f"\n::{token}::", flush=True)


def described_changes(changes: Sequence[Mapping[str, Any]]) -> str:
    paths = [str(change["path"]) for change in changes]
    more = [f"and {len(paths) - MAX_LISTED} more"] if len(paths) > MAX_LISTED else []
    files = "file" if len(paths) == 1 else "files"
    return f"{len(paths)} {files} changed.\n\n" + (fenced("\n".join(paths[:MAX_LISTED] + more)) if paths else "")


def tell_run(folder: Path, exit_code: int) -> None:
    """The summary and the annotations of a run."""
    try:
        record = json.loads((folder / "run.json").read_bytes())
    except ValueError:
        record = {"error": "the command printed no object"}
    append("GITHUB_STEP_SUMMARY", f"## ringfence run: {record.get('outcome', 'failed')}\n\n")
    if text := record.get("text"):
        append("GITHUB_STEP_SUMMARY", fenced(str(text)) + "\n")
    append("GITHUB_STEP_SUMMARY", described_changes(record.get("changes") or ()))
    for look in (record.get("look_first") or ())[:MAX_ANNOTATIONS]:
        print(f"::warning file={escaped_property(look['path'])},title=ringfence::{escaped(look['reason'])}")
    if exit_code:
        reason = record.get("error") or record.get("outcome") or "failed"
        print(f"::error title=ringfence::{escaped(f'{reason} (exit code {exit_code})')}")


def tell_exec(folder: Path, exit_code: int) -> None:
    receipts = folder / "receipts.jsonl"
    written = receipts.read_text(encoding="utf-8").splitlines() if receipts.exists() else []
    record = json.loads(written[-1]) if written else {}
    append("GITHUB_STEP_SUMMARY", f"## ringfence exec: {record.get('outcome', 'failed')}\n\n")
    append("GITHUB_STEP_SUMMARY", described_changes(record.get("changes") or ()))
    if exit_code:
        print(f"::error title=ringfence::{escaped(f'the script ended with exit code {exit_code}')}")


def tell_batch(folder: Path, exit_code: int) -> None:
    summary = folder / "batch" / "summary.md"
    append("GITHUB_STEP_SUMMARY", summary.read_text(encoding="utf-8") if summary.exists() else "## ringfence batch\n")
    if exit_code:
        print(f"::error title=ringfence::{escaped(f'the batch ended with exit code {exit_code}')}")


TELL = {"run": tell_run, "exec": tell_exec, "batch": tell_batch}


def command() -> int:
    """Run the command, and tell the job what became of it."""
    name = given("COMMAND") or "run"
    if name not in WORDS:
        stop(f"command is one of {', '.join(WORDS)}, not {name}")
    folder = Path(tempfile.mkdtemp(prefix="ringfence-", dir=os.environ.get("RUNNER_TEMP")))
    words = [given("PROGRAM") or "ringfence", *WORDS[name](folder)]
    exit_code = run_quoted(words, folder / "run.json" if name == "run" else None)
    TELL[name](folder, exit_code)
    patch, receipts = folder / "changes.patch", folder / "receipts.jsonl"
    report = {"run": folder / "report.html", "batch": folder / "batch" / "index.html"}.get(name)
    put_outputs(
        exit_code=exit_code,
        folder=folder,
        changed="true" if patch.exists() and patch.stat().st_size else "false",
        patch=patch if patch.exists() else "",
        receipts=receipts if receipts.exists() else "",
        report=report if report is not None and report.exists() else "",
    )
    return exit_code


def git(directory: str | Path, *words: str, stdin: str | None = None) -> str:
    """Run git without hooks of the repository. Raises CalledProcessError."""
    command = ["git", "-C", os.fspath(directory), *NO_HOOKS, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, input=stdin).stdout.rstrip("\n")


def title_of() -> str:
    text = given("TITLE") or next(iter(lines("TASK")), "") or "Changes made by an agent"
    flat = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return flat if len(flat) <= MAX_TITLE else f"{flat[: MAX_TITLE - 3]}..."


def pull_request() -> int:
    """Push the patch as one commit on a branch of its own, and open a pull request of it."""
    directory, title = given("DIRECTORY") or ".", title_of()
    run, attempt = os.environ.get("GITHUB_RUN_ID", "0"), os.environ.get("GITHUB_RUN_ATTEMPT", "1")
    branch = given("BRANCH") or f"ringfence/{run}-{attempt}"
    git(directory, "check-ref-format", f"refs/heads/{branch}")
    server, repository = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
    body = f"Made by {server}/{repository}/actions/runs/{run}, which has the patch and the receipts.\n"
    prefix = git(directory, "rev-parse", "--show-prefix")
    with tempfile.TemporaryDirectory(dir=os.environ.get("RUNNER_TEMP")) as temporary:
        tree = Path(temporary) / "tree"
        # The checkout stays as it is: what exec or a run on disk changed there is not among what is committed.
        git(directory, "worktree", "add", "--quiet", "--detach", os.fspath(tree), "HEAD")
        try:
            git(tree, "apply", "--index", f"--directory={prefix}", os.path.abspath(given("PATCH")))
            author = ("-c", "user.name=ringfence", "-c", "user.email=ringfence@localhost")
            git(tree, *author, "commit", "--quiet", "--no-verify", "-F", "-", stdin=f"{title}\n\n{body}")
            # The token is for git, too, and stands in no argument and no file.
            helper = ("-c", "credential.helper=", "-c", "credential.helper=!gh auth git-credential")
            git(tree, *helper, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
        finally:
            git(directory, "worktree", "remove", "--force", os.fspath(tree))
    words = ["gh", "pr", "create", f"--head={branch}", f"--title={title}", f"--body={body}"]
    on_branch = os.environ.get("GITHUB_REF_TYPE", "branch") == "branch"
    if base := os.environ.get("GITHUB_HEAD_REF") or (on_branch and os.environ.get("GITHUB_REF_NAME")):
        words.append(f"--base={base}")
    made = subprocess.run(words, check=True, cwd=directory, stdout=subprocess.PIPE, text=True).stdout.split()
    put_outputs(pull_request=made[-1] if made else "")
    append("GITHUB_STEP_SUMMARY", f"\nPull request: {made[-1] if made else branch}\n")
    return 0


if __name__ == "__main__":
    sys.exit({"command": command, "pull-request": pull_request}[sys.argv[1]]())
