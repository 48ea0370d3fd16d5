"""Secrets of commands in a real container: nothing that leaves has a value, and no inspection of the container does."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agent_runs import record_of
from command_line import ringfence_text
from killing import session_of
from podman_parts import OwnService
from real_git import git_bytes, objects_of
from served import client_of, open_served

from ringfence import Prompt, PromptTemplate
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import HiddenFiles
from ringfence.runtime import Cancellation, Session, ToolCallStarted, ToolInvoked, ToolOutput
from ringfence_sandbox import PodmanSandbox, ShellEnvironment, Workspace, store_directory
from ringfence_tools import PodmanSandboxSection

pytestmark = pytest.mark.usefixtures("podman", "limits_hold")
MakeSandbox = Callable[..., PodmanSandbox]
TOKEN = "ghp_0123456789abcdefghij/ABC+DEF=9"
DONE: Mapping[str, Any] = {"text": f"Done with {TOKEN}."}
FORMS = (
    TOKEN.encode(),
    *(base64.b64encode(b"\0" * k + TOKEN.encode())[4:40] for k in range(3)),
    b"%2FABC%2BDEF%3D9",
)


def call(name: str, **arguments: object) -> Mapping[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def test_output_is_masked_in_every_form_and_also_where_it_comes_in_pieces(make_sandbox: MakeSandbox) -> None:
    sandbox, pieces = make_sandbox(secrets={"TOKEN": TOKEN}), list[bytes]()
    result = sandbox.run(
        "echo $TOKEN; echo $TOKEN >&2; printf $TOKEN | base64; printf x$TOKEN$TOKEN | base64; env | grep TOKEN; "
        "python3 -c \"import os,urllib.parse as u; print(u.quote(os.environ['TOKEN'], safe=str()))\"; "
        "printf $TOKEN | rev; echo; printf %.9s $TOKEN; sleep 0.3; printf %s ${TOKEN#?????????}; ls /$TOKEN",
        on_output=lambda stream, data: pieces.append(data),
    )
    assert result.stdout.count("[TOKEN]") == 7
    assert TOKEN[::-1] in result.stdout  # this is where the promise ends
    assert result.stderr.count("[TOKEN]") == 2
    for shown in (result.stdout.encode(), result.stderr.encode(), b"".join(pieces)):
        assert not any(form in shown for form in FORMS)


def test_the_kept_output_of_a_command_is_masked_on_disk(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(secrets={"TOKEN": TOKEN})
    sandbox.run("for i in $(seq 3000); do echo $i $TOKEN; done")
    kept = b"".join(path.read_bytes() for path in sandbox.filesystem.outputs.directory.iterdir())
    assert kept.count(b"[TOKEN]") == 3000
    assert TOKEN.encode() not in kept


def test_a_program_that_cannot_be_started_is_named_with_a_mask(make_sandbox: MakeSandbox) -> None:
    result = make_sandbox(secrets={"TOKEN": TOKEN}).run([f"/no/{TOKEN}"])
    assert result.exit_code == 127
    assert TOKEN not in result.stderr


def test_a_kept_environment_hands_no_value_on(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(secrets={"TOKEN": TOKEN})
    begun = ShellEnvironment()
    first = sandbox.run('export COPY=$TOKEN IN_IT="a $TOKEN b" OTHER=1; cd /tmp', environment=begun)
    assert first.environment is not None
    assert first.environment.variables == {"OTHER": "1"}
    second = sandbox.run('test -n "$TOKEN" && echo $OTHER-$COPY', environment=first.environment)
    assert second.stdout == "1-\n"


def test_an_inspection_of_the_container_shows_no_value(make_sandbox: MakeSandbox, podman: Any) -> None:
    sandbox = make_sandbox(secrets={"TOKEN": TOKEN})
    assert sandbox.run("cat /proc/1/environ; cat /proc/1/cmdline; true").stdout.count("TOKEN") == 0
    inspected = [podman.client.containers.get(one.id).attrs for one in podman.client.containers.list(all=True)]
    assert any(sandbox.filesystem.root in json.dumps(attributes) for attributes in inspected)
    assert TOKEN not in json.dumps(inspected)


def test_a_service_of_our_own_gets_no_variable_that_podman_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    with closing(OwnService()) as service:
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in session_of(service.process.pid)]
    assert len(environments) >= 2
    assert not any(TOKEN.encode() in environment for environment in environments)


def test_a_section_gives_its_secrets_to_its_session_and_output_is_masked_as_it_comes(tmp_path: Path) -> None:
    session, events = Session(), list[object]()
    for kind in (ToolOutput, ToolCallStarted, ToolInvoked):
        session.dispatcher.subscribe(kind, events.append)
    with PodmanSandboxSection(session=session, root=tmp_path, secrets={"TOKEN": TOKEN}) as section:
        prompt = Prompt(PromptTemplate(ns="tests", key="secrets", sections=[section]))
        assert "$TOKEN" in prompt.render(session=session).text
        with prompt.resources:
            command = "printf %.9s $TOKEN; sleep 0.2; printf %s ${TOKEN#?????????}"
            assert ToolExecutor(prompt=prompt, session=session).call("shell_execute", {"command": command}).success
    output = [event for event in events if isinstance(event, ToolOutput)]
    assert "[TOKEN]" in repr(output)
    assert TOKEN[:9] not in repr(events)


TURNS = (
    {"text": f"I begin with {TOKEN}", **call("shell_execute", command="echo is $TOKEN; echo $TOKEN >&2; exit 3")},
    call("shell_execute", command="printf $TOKEN | base64 -w0; env; cat /proc/self/environ", rollback_on_error=True),
    call("shell_execute", command="echo $TOKEN; sleep 60", timeout_seconds=1),
    call("shell_execute", command="for i in $(seq 3000); do echo $TOKEN; done"),
    call("shell_execute", command=f"echo {TOKEN} > written"),
    call("shell_execute", command="echo aborted > gone; echo $TOKEN; false", rollback_on_error=True),
    call("write_file", file_path="a.py", content=f"key = '{TOKEN}'\n"),
    call("write_file", file_path="b.py", content="key = '[TOKEN]'\n"),
    call("write_file", file_path="c.py", content="fine\n"),
    call("edit_file", file_path="c.py", old_string="fine", new_string=TOKEN),
    call("evaluate_python", code="import os; print(1/0 if os.environ['TOKEN'] else os.environ)"),
    call("evaluate_python", code="import os; raise ValueError(os.environ['TOKEN'])"),
    call(TOKEN, **{TOKEN: TOKEN}),
    call("ls", path=TOKEN),
)


def test_a_run_says_that_its_patch_has_masks(tmp_path: Path) -> None:
    (tree := tmp_path / "tree").mkdir()
    script, patch = tmp_path / "script.jsonl", tmp_path / "patch"
    turn = call("shell_execute", command="echo v$TOKEN > leak.txt")
    script.write_text("".join(json.dumps(one) + "\n" for one in (turn, DONE)))
    arguments = ("--workspace", "podman", "--secret", "TOKEN", "--model", f"script:{script}", "--patch", patch)
    ended = ringfence_text("run", tree, *arguments, "--task", "x", env={**os.environ, "TOKEN": TOKEN})
    assert (tree / "leak.txt").read_text() == f"v{TOKEN}\n"
    assert "+v[TOKEN]" in patch.read_text()
    assert "the patch has masks in the place of secrets" in " ".join(ended.stderr.split())


def test_nothing_that_a_run_leaves_has_the_value(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    for directory in (tree, out):
        directory.mkdir()
    (tree / "first.txt").write_text("one\n")
    script = out / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in (*TURNS, DONE)))
    environment = {**os.environ, "GITHUB_TOKEN": TOKEN}
    results = ("--receipts", out / "receipts", "--report", out / "report.html", "--patch", out / "patch")
    arguments = ("--workspace", "podman", "--secret", "TOKEN=env:GITHUB_TOKEN", "--model", f"script:{script}")
    ended = ringfence_text("run", tree, *arguments, "--task", f"Use {TOKEN}.", *results, env=environment)
    script.unlink()
    assert ended.returncode == 0, ended.stderr
    receipts = [json.loads(line) for line in (out / "receipts").read_text().splitlines()]
    assert [receipt["outcome"] for receipt in receipts] == [
        *("committed", "committed", "failed", "committed", "denied", "failed"),
        *("denied", "denied", "committed", "denied", "failed", "failed", "rejected", "failed"),
    ]
    shown = [ended.stdout, ended.stderr]
    for command in (
        ("log", tree),
        ("show", tree, "1"),
        ("diff", tree),
        ("log", tree, "--json"),
        ("log", tree, "--aborted"),
    ):
        said = ringfence_text(*command)
        shown += [said.stdout, said.stderr]
    leaked = [
        place
        for place, data in [
            *((number, text.encode()) for number, text in enumerate(shown)),
            *((path, path.read_bytes()) for path in _files(tree, out, store_directory(tree))),
        ]
        if any(form in data for form in FORMS)
    ]
    assert not leaked
    assert "[TOKEN]" in ended.stderr
    assert "[TOKEN]" in (out / "report.html").read_text()
    assert b"fine\n" in _objects(store_directory(tree))
    for git_object in _objects(store_directory(tree)):
        assert not any(form in git_object for form in FORMS)


def _files(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*") if path.is_file()]


def _objects(store: Path) -> list[bytes]:
    """All objects of a store's history, unpacked."""
    history = next(store.rglob("HEAD")).parent
    return [git_bytes(history, "cat-file", "-p", name) for name in objects_of(history)]


def test_a_file_that_a_command_wrote_is_shown_with_a_mask(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    script = tmp_path / "script.jsonl"
    turns = (
        call("shell_execute", command="echo key = $TOKEN > config"),
        call("read_file", file_path="config"),
        call("grep", pattern="key"),
        call("write_file", file_path="config", content="key = other\n"),
        {"text": "Done."},
    )
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    arguments = (
        "--workspace",
        "podman",
        "--secret",
        "TOKEN",
        "--secret",
        "PIN",
        "--task",
        "x",
        "--model",
        f"script:{script}",
    )
    patch, receipts = tmp_path / "patch", tmp_path / "receipts"
    ended = ringfence_text(
        "run",
        tmp_path / "tree",
        *arguments,
        "--patch",
        patch,
        "--receipts",
        receipts,
        "--json",
        env={**os.environ, "TOKEN": TOKEN, "PIN": "1234"},
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "tree" / "config").read_text() == f"key = {TOKEN}\n"
    assert "PIN: its value has fewer than 8 characters" in ended.stderr
    assert "+key = [TOKEN]" in patch.read_text()
    assert "[TOKEN]" in ended.stdout
    for text in (patch.read_text(), ended.stdout, ended.stderr, receipts.read_text()):
        assert TOKEN not in text
    assert [json.loads(line)["outcome"] for line in receipts.read_text().splitlines()][-1] == "denied"


def test_a_resumed_run_needs_the_variable_again_and_its_record_has_only_the_name(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    script, tree = tmp_path / "script.jsonl", tmp_path / "tree"

    def run(*turns: Mapping[str, Any], **variables: str) -> Any:
        script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        begun = (
            () if record_of(tree).exists() else ("--workspace", "podman", "--secret", "TOKEN=env:VAR", "--task", "x")
        )
        words = ("run", tree, "--model", f"script:{script}", "--receipts", tmp_path / "out", *(begun or ("--resume",)))
        return ringfence_text(*words, env={**os.environ, **variables})

    export = call("shell_execute", command="export COPY=$TOKEN; echo $TOKEN")
    assert run(export, VAR=TOKEN).returncode == 3
    assert b"TOKEN=env:VAR" in record_of(tree).read_bytes()
    for file in _files(store_directory(tree)):
        assert TOKEN.encode() not in file.read_bytes()
    refused = run({"text": "Done."})
    assert refused.returncode == 2
    assert "variable VAR is not set" in " ".join(refused.stderr.split())
    before = (tmp_path / "out").read_bytes()
    turns = (call("write_file", file_path="a", content="[TOKEN]"), call("shell_execute", command="echo ${#TOKEN}"))
    ended = run(*turns, {"text": "Done."}, VAR=TOKEN)
    assert ended.returncode == 0, ended.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "out").read_bytes()[len(before) :].splitlines()]
    assert [receipt["outcome"] for receipt in outcomes] == ["denied", "committed"]


def test_a_client_of_the_mcp_server_gets_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", TOKEN)
    served = open_served(tmp_path, "podman", secrets=("TOKEN",))
    with closing(served), closing(client_of(served)) as client:
        said = client.call("shell_execute", {"command": "echo $TOKEN; echo x-$TOKEN > a.txt"}, Cancellation())
        read = client.call("read_file", {"file_path": "a.txt"}, Cancellation())
    assert (tmp_path / "a.txt").read_text() == f"x-{TOKEN}\n"
    assert "stdout:\n[TOKEN]" in said.model_dump()["content"][0]["text"]
    assert "x-[TOKEN]" in read.model_dump()["content"][0]["text"]
    assert TOKEN not in said.model_dump_json() + read.model_dump_json()


def test_values_of_hidden_files_are_masked_in_what_commands_print(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / ".env").write_text(f"API_KEY={TOKEN}\n")
    (root / "config").write_text(f"key: {TOKEN}\n")
    with (
        Workspace.open(root, store=tmp_path / "store", hide=HiddenFiles()) as workspace,
        PodmanSandbox(root, filesystem=workspace.filesystem) as sandbox,
    ):
        first = sandbox.run("cat .env config; base64 config").stdout
        (root / ".env").write_text("API_KEY=rotated-0123456789\n")
        (root / "config").write_text("key: rotated-0123456789\n")
        again = sandbox.run("cat config").stdout
    assert "key: [API_KEY]" in first
    assert "key: [API_KEY]" in again
    assert not any(form in (first + again).encode() for form in FORMS)
