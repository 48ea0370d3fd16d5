"""Hidden files in a container: commands see something empty and read-only in their place."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from captured_tree import shape
from mounts import mounted

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.errors import SandboxUnavailableError
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import HiddenFilesPolicy
from ringfence_sandbox import PodmanSandbox, Workspace
from ringfence_tools import PodmanSandboxSection

SECRET = "a-secret-value-of-the-host"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for directory in ("app", "vault/deep"):
        (root / directory).mkdir(parents=True)
    (root / ".env").write_text(f"TOKEN={SECRET}\n")
    (root / "app/.env.local").write_text(f"TOKEN={SECRET}\n")
    (root / "app/main.py").write_text("print('shown')\n")
    (root / "app/server.key").write_text(f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n")
    (root / "vault/deep/notes.txt").write_text(SECRET)
    os.link(root / ".env", root / "hard.txt")
    os.symlink("app/server.key", root / "soft.txt")
    return root


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=root.parent / "store", hide=HiddenFiles(["/vault"])) as workspace:
        yield workspace


@pytest.fixture
def sandbox(workspace: Workspace, make_sandbox: Any) -> PodmanSandbox:
    return make_sandbox(Path(workspace.root), filesystem=workspace.filesystem)


@pytest.fixture
def call(sandbox: PodmanSandbox, root: Path) -> Iterator[Any]:
    """Runs a command as a tool call does; in the end, what the store has of the secret is what no command wrote."""
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox)
    prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section], policies=[HiddenFilesPolicy()]))
    answers: list[str] = []

    def run(command: str) -> tuple[str, str]:
        with prompt.resources:
            done = ToolExecutor(prompt=prompt, session=session).execute("shell_execute", {"command": command})
        answers.append(f"{done.result.message}\n{done.result.render()}\n{done.receipt}")
        return done.receipt.outcome, answers[-1]

    yield run
    assert [answer for answer in answers if SECRET in answer] == []
    history = root.parent / "store/history"
    every = ["git", "-C", str(history), "cat-file", "--batch-all-objects", "--batch"]
    assert SECRET.encode() not in subprocess.run(every, capture_output=True, check=True).stdout


WAYS = """
cat .env app/.env.local app/server.key hard.txt soft.txt
cat /proc/self/root/workspace/.env /proc/1/root/workspace/.env /proc/self/cwd/.env
cat vault/* vault/deep/notes.txt; ls -laR vault
cp -a . /tmp/copy; cp -rL . /tmp/other; cat /tmp/copy/.env /tmp/copy/hard.txt; grep -r value /tmp
tar cf /tmp/all.tar .; grep -a value /tmp/all.tar
python3 -m zipfile -c /tmp/all.zip .; python3 -m zipfile -e /tmp/all.zip /tmp/unpacked; grep -r value /tmp/unpacked
ln .env linked; ln -s .env soft2; cat linked soft2; rm -f soft2
umount .env; umount -l .env; mount --bind app vault; unshare -rm umount /workspace/.env; cat .env
grep -r value .; find . -type f -exec cat {} +; python3 -c 'print(open(".env").read())'
cat /proc/self/mountinfo; cat $(awk '/\\.env/ {print $4}' /proc/self/mountinfo)
mv .env t; mv hard.txt t; mv vault v; cat t v/deep/notes.txt
exec 3<>.env; cat <&3; dd if=.env bs=1 count=99
"""


def test_no_command_reads_a_hidden_file(call: Any, root: Path) -> None:
    for command in WAYS.strip().splitlines():
        call(command)
        assert (root / ".env").read_text() == f"TOKEN={SECRET}\n"


CHANGES = {
    "write": "echo x > .env; echo x >> app/.env.local; true",
    "remove": "rm -f .env hard.txt; rm -rf vault app/server.key; true",
    "replace": "echo x > t; mv -f t .env; rm -f t; true",
    "truncate and chmod": "truncate -s 0 .env; chmod 777 hard.txt; touch app/server.key; true",
}
DENIED = {
    "move its directory": "mv app elsewhere",
    "exchange its directory": "mv app elsewhere; mkdir app; cp elsewhere/main.py app",
}


def test_no_command_changes_a_hidden_file_and_what_would_move_or_make_one_is_denied(call: Any, root: Path) -> None:
    for commands, expected in ((CHANGES, "committed"), (DENIED, "denied")):
        for name, command in commands.items():
            before = {path: found for path, found in shape(root).items() if path}
            assert call(command)[0] == expected, name
            assert {path: found for path, found in shape(root).items() if path} == before, name
    made = "mkdir new; echo x > new/.env; echo '-----BEGIN PRIVATE KEY-----' > app/new.pem; echo x > new/shown"
    before = shape(root).keys()
    assert call(made)[0] == "denied"
    assert shape(root).keys() - before == {"new", "new/.env", "app/new.pem"}, "a person may have made them"
    assert call("cat app/.env.local .env; echo made > made.txt")[0] == "committed"


def test_a_file_that_an_editor_has_saved_is_covered_anew(call: Any, sandbox: PodmanSandbox, root: Path) -> None:
    assert call("cat .env")[0] == "committed"
    first = sandbox.start()
    (root / ".env.swap").write_text(f"TOKEN={SECRET}\n")
    os.replace(root / ".env.swap", root / ".env")  # a rename over it detaches what covers it
    assert call("cat .env hard.txt")[0] == "committed"
    assert sandbox.start() is not first
    (root / ".env").rename(root / "backup")  # what covers it goes along
    (root / ".env").write_text(f"TOKEN={SECRET}\n")
    assert call("cat .env backup hard.txt")[0] == "committed"
    second = sandbox.start()
    (root / ".env").write_text(f"TOKEN={SECRET} more\n")  # in place
    assert call("cat .env")[0] == "committed"
    assert sandbox.start() is second


def test_what_a_command_reads_of_a_file_that_is_saved_meanwhile_is_masked(call: Any, root: Path) -> None:
    """A rename over a covered file detaches what covers it. The call is denied, and what was saved stays."""
    news = "another-value-of-the-host"

    def save() -> None:
        while not (root / "begun").exists():
            time.sleep(0.005)
        (root.parent / "swap").write_text(f"OTHER={news}\n")
        os.replace(root.parent / "swap", root / ".env")

    with ThreadPoolExecutor() as threads:
        saved = threads.submit(save)
        wait = "i=0; while [ ! -s .env ] && [ $i -lt 500 ]; do i=$((i+1)); sleep .01; done"
        outcome, answer = call(f"touch begun; {wait}; cat .env")
        saved.result()
    assert outcome == "denied"
    assert news not in answer
    assert "OTHER=[OTHER]" in answer, "it was read"
    assert (root / ".env").read_text() == f"OTHER={news}\n"
    assert not (root / "begun").exists()
    assert "OTHER" not in call("cat .env hard.txt")[1]


def test_a_file_that_comes_is_covered_before_the_next_command(call: Any, root: Path) -> None:
    assert call("true")[0] == "committed"
    (root / "app/id_rsa").write_text(SECRET)
    (root / "vault/later.txt").write_text(SECRET)
    assert call("cat app/id_rsa vault/*; ls -l app")[0] == "committed"
    (root / ".env").unlink()
    assert call("cat .env; ls -la")[0] == "committed"


def test_a_hidden_file_is_covered_whatever_its_name_or_no_command_runs(root: Path, make_sandbox: Any) -> None:
    for name in ("a,b:c=d.tfvars", "new\nline.tfvars", 'quote".tfvars', "back\\slash.tfvars", " blank.tfvars"):
        (root / name).write_text(SECRET)
    with Workspace.open(root, hide=HiddenFiles(["*.tfvars"])) as workspace:
        sandbox = make_sandbox(root, filesystem=workspace.filesystem)
        assert SECRET not in sandbox.run("cat *.tfvars").stdout
        (root / os.fsdecode(b"caf\xe9.tfvars")).write_text(SECRET)
        before = sorted(os.listdir(root))
        with pytest.raises(SandboxUnavailableError, match="not UTF-8"):
            sandbox.run("touch ran")
        assert sorted(os.listdir(root)) == before


def test_the_executor_sees_what_is_not_covered(sandbox: PodmanSandbox) -> None:
    container = sandbox.start()
    assert container.channel.uncovered(["/workspace/.env", "/workspace/vault"]) == ""
    assert container.channel.uncovered(["/workspace/.env", "/workspace/app/main.py"]) == "/workspace/app/main.py"
    assert container.channel.uncovered(["/workspace/app"]) == "/workspace/app"
    assert container.channel.uncovered(["/workspace/none"]) == "/workspace/none"


def test_a_hidden_file_that_is_a_mount_is_covered(root: Path, make_sandbox: Any) -> None:
    """As in a development container, where somebody mounts the file with the secrets."""
    (root.parent / "mounted").write_text(SECRET)
    with (
        mounted(root / ".env", "--bind", str(root.parent / "mounted")),
        Workspace.open(root, hide=HiddenFiles()) as workspace,
    ):
        sandbox = make_sandbox(root, filesystem=workspace.filesystem)
        ended = sandbox.run("cat .env; echo ran")
        assert ended.stdout == "ran\n"


def hidden_below(root: Path, directories: int, files: int) -> None:
    for path in (root / f"keys/{outer}/.env.{inner}" for outer in range(directories) for inner in range(files)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)


def test_of_many_hidden_files_a_directory_with_nothing_else_is_covered_as_one(root: Path, make_sandbox: Any) -> None:
    hidden_below(root, 10, 60)
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        sandbox = make_sandbox(root, filesystem=workspace.filesystem)
        seen = sandbox.run("find keys; cat .env app/.env.local keys/*/.env.*; cat app/main.py; touch keys/made")
        assert seen.stdout == "keys\nprint('shown')\n"
        assert "Read-only file system" in seen.stderr
        first = sandbox.start()
        assert list(sandbox.start().hidden) == [".env", "app/.env.local", "app/server.key", "hard.txt", "keys"]
        (root / "keys/3/readme").write_text("shown\n")
        seen = sandbox.run(
            "cat keys/3/readme; cat keys/*/.env.*; ls -A keys/3 | wc -l; ls -A keys/4; touch keys/3/made"
        )
        assert seen.stdout == "shown\n61\n"
        assert seen.changed_paths == ("keys/3/made",)
        assert sandbox.start() is not first
        (root / "keys/4/.env.new").write_text(SECRET)
        assert sandbox.run("cat keys/4/*; ls -A keys/4").stdout == ""


@pytest.mark.prove
def test_what_is_hidden_in_too_many_places_is_covered_or_named(root: Path, make_sandbox: Any) -> None:
    hidden_below(root, 50, 50)
    for place in root.glob("keys/*"):
        (place / "shown").write_text("shown\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        sandbox = make_sandbox(root, filesystem=workspace.filesystem)
        try:  # not every runtime has such a limit
            assert SECRET not in sandbox.run("cat keys/*/.env.*").stdout
        except SandboxUnavailableError as error:
            assert "2,504 hidden files are too many to cover, most below keys (2,500)" in str(error)
    with (
        Workspace.open(root, hide=HiddenFiles(["/keys"])) as workspace,
        make_sandbox(root, filesystem=workspace.filesystem) as sandbox,
    ):
        assert sandbox.run("find keys; cat app/main.py").stdout == "keys\nprint('shown')\n"
