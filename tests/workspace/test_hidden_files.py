"""Hidden files: no tool shows them, no call changes them, and no store has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_runs import DiskWorkspace, MemoryWorkspace
from captured_tree import capture_tree, shape
from store_bytes import store_bytes

from ringfence import Binding, Filesystem, Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.errors import PromptValidationError
from ringfence.filesystem import HiddenFiles, InMemoryFilesystem
from ringfence.prompt import HiddenFilesPolicy, ProtectedFilesPolicy, Tool, ToolContext, ToolResult, ToolsSection
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools import VfsToolsSection

SECRETS = (b"first-secret-value", b"second-secret-value", b"third-secret-value", b"fourth-secret-value")
HIDDEN = (".env", "app/.env.local", "hard.txt", "keys/server.pem", "plain/target.txt", "vault")


def build(root: Path) -> None:
    for directory in ("app", "keys", "plain", "vault/deep"):
        (root / directory).mkdir(parents=True)
    (root / ".env").write_bytes(b"TOKEN=" + SECRETS[0] + b"\n")
    (root / "app/.env.local").write_bytes(b"TOKEN=" + SECRETS[1] + b"\n")
    (root / "app/.env.example").write_text("TOKEN=\n")
    (root / "app/main.py").write_text("print('shown')\n")
    (root / "keys/server.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + SECRETS[2] + b"\n")
    (root / "keys/server.crt.pem").write_text("-----BEGIN CERTIFICATE-----\nshown\n")
    (root / "vault/deep/notes.txt").write_bytes(SECRETS[3])
    os.link(root / ".env", root / "hard.txt")
    os.symlink("keys/server.pem", root / "soft.txt")
    (root / "plain/target.txt").write_bytes(SECRETS[0])
    os.symlink("../plain/target.txt", root / "app/.env")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    build(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=root.parent / "store", hide=HiddenFiles(["/vault"])) as workspace:
        yield workspace


@pytest.fixture
def files(workspace: Workspace) -> HostFilesystem:
    return workspace.filesystem


def assert_no_secret(*texts: object) -> None:
    for text in texts:
        raw = text if isinstance(text, bytes) else repr(text).encode()
        assert [secret for secret in SECRETS if secret in raw] == []


@dataclass(frozen=True)
class Script:
    text: str


class Agent:
    """Calls the file tools, and an opaque tool that runs a script on the host, and keeps every answer."""

    def __init__(self, files: Filesystem, *, policies: tuple[Any, ...] = (HiddenFilesPolicy(),)) -> None:
        def run(params: Script, *, context: ToolContext) -> ToolResult[None]:
            subprocess.run(["sh", "-c", params.text], cwd=files.root, check=False)
            return ToolResult.ok(None)

        tool = Tool[Script, None]("run", "Runs a script.", run, opaque=True)
        self.session = Session()
        sections = [
            VfsToolsSection(session=self.session, filesystem=files),
            ToolsSection(title="Shell", key="shell", tools=[tool]),
        ]
        self._prompt = Prompt(PromptTemplate(ns="tests", key="hidden", sections=sections, policies=policies))
        self._prompt.bind(resources={Filesystem: Binding.instance(Filesystem, files)})
        self.answers: list[object] = []

    def __call__(self, tool: str, **arguments: object) -> str:
        with self._prompt.resources:
            done = ToolExecutor(prompt=self._prompt, session=self.session).execute(tool, arguments)
        self.answers += [done.result.message, done.result.render(), done.receipt]
        return done.receipt.outcome


def test_a_host_reads_what_is_hidden(files: HostFilesystem) -> None:
    contents = {file.path: file.head for file in files.hidden_files()}
    assert [file.public for file in files.hidden_files() if file.path == "app/.env.local"] == [b"TOKEN=\n\n\n\n"]
    assert contents.keys() == {*HIDDEN, "vault/deep/notes.txt"} - {"vault"}
    assert contents["vault/deep/notes.txt"] == SECRETS[3]


def test_what_is_hidden_is_told(files: HostFilesystem, workspace: Workspace) -> None:
    assert files.hidden_paths == HIDDEN
    assert sorted(path for path, reason in workspace.left_out.items() if reason == "hidden") == [*HIDDEN]


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        (".env", True),
        (".ENV", True),
        (".env.production", True),
        (".env.example", False),
        (".Env.Sample", False),
        (".env.template", False),
        (".env.dist", False),
        ("env", False),
        (".environment", False),
        ("id_rsa", True),
        ("id_ed25519", True),
        ("id_ed25519.pub", False),
        ("x.pem", False),
        ("ſ.env", False),
    ],
)
def test_the_usual_names(name: str, is_hidden: bool) -> None:
    assert HiddenFiles().hides(f"deep/{name}") is is_hidden
    assert not HiddenFiles(usual=False).hides(name)
    assert not HiddenFiles().hides(name, is_directory=True)


def test_a_key_is_hidden_by_its_content() -> None:
    assert HiddenFiles().hides("a/x.PEM", lambda: b"-----BEGIN RSA PRIVATE KEY-----")
    assert not HiddenFiles().hides("a/x.key", lambda: b"-----BEGIN CERTIFICATE-----")
    assert not HiddenFiles().hides("a/x.txt", lambda: b"-----BEGIN RSA PRIVATE KEY-----")


@pytest.mark.parametrize("pattern", ["{a,b}", "../x"])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(PromptValidationError):
        HiddenFiles([pattern])


def test_a_text_is_no_list_of_patterns() -> None:
    with pytest.raises(TypeError):
        HiddenFiles("*.txt")


READS = (".env", "./.env", "/.env", "app/../.env", "app/.env", "hard.txt", "soft.txt", "plain/target.txt", "vault/deep")


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("operation", ["read", "read_bytes", "content_hash", "stat", "list", "grep"])
def test_no_spelling_reads_a_hidden_file(files: HostFilesystem, operation: str, path: str) -> None:
    if operation == "grep":
        with pytest.raises(PermissionError, match="hidden"):
            files.grep("secret", path=path)
    elif operation != "list" or path == "vault/deep":
        with pytest.raises((PermissionError, IsADirectoryError), match=r"hidden|directory"):
            getattr(files, operation)(path)
    assert files.exists(path)


def test_searches_leave_hidden_files_out_and_a_listing_has_their_names_alone(files: HostFilesystem) -> None:
    assert files.grep("secret") == []
    assert [match.path for match in files.glob("**") if match.path in HIDDEN] == []
    assert files.glob("vault/**") == files.glob(".env") == []
    entries = {entry.path: entry for entry in files.list()}
    assert entries[".env"].size_bytes == 0
    assert entries.keys() >= {".env", "vault", "app"}


CHANGES: dict[str, Callable[[Any], object]] = {
    "write": lambda files: files.write(".env", "x"),
    "append": lambda files: files.write("hard.txt", "x", mode="append"),
    "write along a link": lambda files: files.write("soft.txt", "x"),
    "write below": lambda files: files.write("vault/new", "x"),
    "make one": lambda files: files.write("new/.env", "x"),
    "make one in capitals": lambda files: files.write(".ENV", "x"),
    "make a key": lambda files: files.write("new.pem", "-----BEGIN PRIVATE KEY-----"),
    "delete": lambda files: files.delete("app/.env.local"),
    "delete its directory": lambda files: files.delete("app", recursive=True),
    "move": lambda files: files.move(".env", "shown.txt"),
    "move its directory": lambda files: files.move("app", "shown"),
    "move a hidden directory": lambda files: files.move("vault", "shown"),
    "move over it": lambda files: files.move("app/main.py", ".env", overwrite=True),
    "move to a hidden name": lambda files: files.move("app/main.py", "app/id_rsa"),
    "chmod": lambda files: files.chmod("soft.txt", 0o777),
    "a link with a hidden name": lambda files: files.symlink("app/id_rsa", "main.py"),
    "mkdir": lambda files: files.mkdir("vault/new"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_reaches_a_hidden_file(files: HostFilesystem, root: Path, name: str) -> None:
    before = capture_tree(root)
    with held_call(files) as call:
        with pytest.raises(PermissionError, match="hidden"):
            CHANGES[name](files.for_call(call))
        call.rollback()
    assert capture_tree(root) == before


def test_tools_say_that_a_file_is_there_and_hidden_and_tell_nothing_of_it(
    files: HostFilesystem, workspace: Workspace, root: Path
) -> None:
    agent = Agent(files)
    for path in READS:
        assert agent("read_file", file_path=path) != "committed"
    assert "there and hidden" in str(agent.answers)
    for path in (".env", "soft.txt"):
        assert agent("write_file", file_path=path, content="x") == "denied"
        assert agent("edit_file", file_path=path, old_string="TOKEN", new_string="x") != "committed"
    assert agent("grep", pattern="secret|TOKEN") == "committed"
    assert agent("read_file", file_path=".env.exampel") != "committed"
    assert agent("write_file", file_path="app/main.py", content="x") != "committed"
    assert agent("read_file", file_path="app/main.py") == "committed"
    assert agent("edit_file", file_path="app/main.py", old_string="shown", new_string="hidden") == "committed"
    assert_no_secret(*agent.answers, workspace.diff(0), [workspace.show(step.number) for step in workspace.steps()])
    assert_no_secret(store_bytes(root.parent / "store"))


ESCAPES = {
    "change": "echo x >> .env",
    "replace": "echo x > t; mv t .env",
    "remove": "rm app/.env.local",
    "remove its directory": "rm -r app",
    "move": "mv .env shown.txt",
    "move its directory": "mv app shown",
    "move a hidden directory": "mv vault shown",
    "exchange": "mv .env t; mv app/main.py .env; mv t app/main.py",
    "make one": "mkdir new; echo x > new/.env",
    "make a key": "echo '-----BEGIN PRIVATE KEY-----' > app/new.key",
    "make a link": "ln -s app/main.py id_rsa",
    "permissions": "chmod 777 keys/server.pem",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_what_a_program_does_to_hidden_files_is_denied_and_rolled_back(
    files: HostFilesystem, workspace: Workspace, root: Path, name: str
) -> None:
    agent, before = Agent(files), shape(root)
    outcome = agent("run", text=f"{ESCAPES[name]}; echo done > done.txt")
    assert outcome == "denied"
    kept = {
        "change",
        "permissions",
        "replace",
        "remove",
        "remove its directory",
        "make one",
        "make a key",
    }  # nobody has a copy
    if name not in kept:
        assert shape(root) == before
    assert not (root / "done.txt").exists()
    assert_no_secret(*agent.answers, store_bytes(root.parent / "store"))
    assert workspace.steps() == []


def test_an_editor_may_save_a_hidden_file_while_a_call_runs(files: HostFilesystem, root: Path) -> None:
    """It cannot be told from the call's own change: the call is denied, and what was saved stays."""
    agent = Agent(files)
    assert agent("run", text="echo TOKEN=new-value > t; mv t .env; echo x > made.txt") == "denied"
    assert (root / ".env").read_text() == "TOKEN=new-value\n"
    assert not (root / "made.txt").exists()
    assert agent("run", text="echo x > made.txt") == "committed"


def test_what_comes_later_is_hidden_too(files: HostFilesystem, root: Path) -> None:
    (root / "app/id_rsa").write_bytes(SECRETS[1])
    agent = Agent(files)
    assert agent("read_file", file_path="app/id_rsa") != "committed"
    assert agent("run", text="echo x > made.txt") == "committed"
    assert "app/id_rsa" in files.hidden_paths
    (root / "app/.env.local").rename(root / "app/renamed")
    assert agent("read_file", file_path="app/renamed") != "committed"
    assert_no_secret(*agent.answers, store_bytes(root.parent / "store"))


def test_a_number_that_an_inode_gets_again_is_not_hidden(files: HostFilesystem, root: Path) -> None:
    (root / ".env").unlink()
    (root / "hard.txt").unlink()
    for number in range(50):
        (root / f"{number}.txt").write_text("shown")
        assert files.read(f"{number}.txt").content == "shown"


def test_a_directory_in_the_place_of_a_hidden_file_is_not_hidden_once_it_was_looked_at(
    workspace: Workspace, root: Path
) -> None:
    for _ in range(10):  # the directory often gets the number of the file
        (root / ".env").unlink()
        (root / ".env").mkdir()
        (root / ".env/x").write_text("x\n")
        workspace.look()
        assert not workspace.filesystem.hides(".env/x")
        assert ".env" not in workspace.left_out
        shutil.rmtree(root / ".env")
        (root / ".env").write_text("KEY=1\n")
        workspace.look()
        assert workspace.filesystem.hides(".env")


def test_the_store_remembers_what_is_hidden(workspace: Workspace, root: Path) -> None:
    workspace.close()
    store = root.parent / "store"
    with Workspace.open(root, store=store) as again:
        assert again.filesystem.hidden_paths == HIDDEN
    with Workspace.open(root, store=store, read_only=True) as view:
        assert view.filesystem.hidden_paths == HIDDEN
    with Workspace.open(root, store=store, hide=HiddenFiles(usual=False)) as shown:
        assert shown.filesystem.hidden_paths == ()
        assert shown.filesystem.hidden is None
    with Workspace.open(root, store=store, hide=HiddenFiles()) as hidden:
        assert "vault" not in hidden.filesystem.hidden_paths
        with pytest.raises(PermissionError):
            hidden.filesystem.read(".env")
        assert hidden.undo(dry_run=True) if hidden.steps() else True


def test_undo_and_restore_leave_hidden_files_alone(files: HostFilesystem, workspace: Workspace, root: Path) -> None:
    agent = Agent(files)
    assert agent("run", text="echo changed > app/main.py; mkdir keys/sub; echo x > keys/sub/y") == "committed"
    before = {path: (root / path).read_bytes() for path in HIDDEN if path != "vault"}
    workspace.undo()
    workspace.restore(1)
    workspace.restore(0)
    assert {path: (root / path).read_bytes() for path in before} == before


def test_a_history_that_has_a_file_does_not_bring_it_back_over_a_hidden_one(root: Path) -> None:
    store = root.parent / "store"
    with Workspace.open(root, store=store, hide=HiddenFiles(usual=False)) as shown, shown.transaction("a test"):
        shown.filesystem.write(".env", "as a call left it")
        shown.filesystem.write("new/.env", "made by a call")
    with Workspace.open(root, store=store, hide=HiddenFiles()) as hidden:
        (root / ".env").write_text("by a person")
        done = hidden.undo()
        assert {path: done.outcomes[path] for path in (".env", "new/.env")} == dict.fromkeys(
            (".env", "new/.env"), "kept"
        )
        hidden.restore(0)
        assert ((root / ".env").read_text(), (root / "new/.env").read_text()) == ("by a person", "made by a call")


def test_a_virtual_environment_is_not_hidden_for_its_name(files: HostFilesystem, root: Path) -> None:
    agent = Agent(files)
    assert agent("run", text="mkdir -p venv/.env/bin; echo shown > venv/.env/bin/python") == "committed"
    assert files.read("venv/.env/bin/python").content == "shown\n"
    assert files.grep("shown", path="venv")


def test_a_policy_denies_every_call_where_nothing_is_hidden(tmp_path: Path) -> None:
    with HostFilesystem(tmp_path, store=tmp_path.parent / "other") as files:
        assert Agent(files)("ls") == "denied"


def test_one_list_is_for_hidden_and_for_protected_files() -> None:
    files = InMemoryFilesystem()
    agent = Agent(files, policies=(ProtectedFilesPolicy(),))
    for name in (".env", ".env.x", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "x.pem", "x.key"):
        assert agent("write_file", file_path=name, content="x") == "denied"
    assert agent("write_file", file_path=".env.example", content="x") == "committed"


def test_a_copy_in_memory_lacks_what_is_hidden(root: Path) -> None:
    copy = MemoryWorkspace(root, store=root.parent / "store", hide=HiddenFiles(["/vault"]))
    assert copy.filesystem.hidden_paths == HIDDEN
    agent = Agent(copy.filesystem)
    for path in HIDDEN:
        assert agent("read_file", file_path=path) != "committed"
    assert agent("write_file", file_path=".env", content="x") == "denied"
    assert agent("write_file", file_path="new/.env", content="x") == "denied"
    assert agent("write_file", file_path="made.txt", content="x") == "committed"
    assert "is there and hidden" in str(agent.answers)
    before = {path: (root / path).read_bytes() for path in HIDDEN if path != "vault"}
    copy.apply(copy.own_changes().changes)
    assert (root / "made.txt").read_text() == "x"
    assert {path: (root / path).read_bytes() for path in before} == before
    assert_no_secret(*agent.answers, store_bytes(root.parent / "store"), json.dumps(HIDDEN).encode())


def test_the_values_of_hidden_files_are_masked_wherever_they_are_read(root: Path) -> None:
    (root / "app/copied.py").write_text("token = 'first-secret-value'\nelse = 'shown'\n")
    copy = MemoryWorkspace(root, store=root.parent / "store", hide=HiddenFiles())
    disk = DiskWorkspace(root, store=root.parent / "store", hide=HiddenFiles())
    try:
        for workspace in (copy, disk):
            session = Session(secrets=workspace.secrets)
            prompt = Prompt(PromptTemplate(ns="tests", key="masks", sections=[workspace.section(session)]))
            with prompt.resources:
                call = ToolExecutor(prompt=prompt, session=session).call
                answer = call("read_file", {"file_path": "app/copied.py"}).render()
                assert "[TOKEN]" in answer
                assert "shown" in answer
                assert_no_secret(answer, call("grep", {"pattern": "token"}).render())
    finally:
        disk.close()


def test_a_deep_tree_is_opened(root: Path) -> None:
    deep = os.open(root, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    try:
        with HostFilesystem(root, store=root.parent / "store", hide=HiddenFiles()) as files:
            assert ".env" in files.hidden_paths
    finally:  # pytest cannot remove it
        subprocess.run(["rm", "-rf", root], check=True)
