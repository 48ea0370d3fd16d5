"""Files that come to be hidden while a call runs: they stay as they are, and no store has them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from agent_runs import MemoryWorkspace
from captured_tree import CapturedPath, capture_tree, shape
from killing import killed_at
from store_bytes import store_bytes

from ringfence import Filesystem, Session
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import HiddenFilesPolicy, Prompt, PromptTemplate, Tool, ToolContext, ToolResult, ToolsSection
from ringfence.resources import Binding
from ringfence.runtime import Receipt
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

SECRET = "a-secret-value-of-the-host"
OLD = "an-old-secret-value-of-the-host"
KEY = f"-----BEGIN PRIVATE KEY-----\\n{SECRET}"
RULE = HiddenFiles(["/vault*"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "app").mkdir(parents=True)
    (root / ".env").write_text(f"TOKEN={OLD}\n")
    (root / "app/main.py").write_text("print('shown')\n")
    (root / "app/cert.pem").write_text("-----BEGIN CERTIFICATE-----\nshown\n")
    time.sleep(0.1)  # what was made in the instant of a scan, no scan knows again by its inode
    return root


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def workspace(root: Path, store: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=store, hide=RULE) as workspace:
        yield workspace


def run(
    files: HostFilesystem, script: str, *, policies: tuple[HiddenFilesPolicy, ...] = (), ends: str = "ok"
) -> Receipt:
    """An opaque call during which a script runs, as a command's or as that of a person."""

    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        subprocess.run(["sh", "-ec", script], cwd=files.root, check=True)
        if ends == "raises":
            raise RuntimeError("on purpose")
        return ToolResult.ok(None) if ends == "ok" else ToolResult.error("on purpose")

    tool = Tool[None, None]("run", "Runs a script.", handler, opaque=True)
    section = ToolsSection(title="Shell", key="shell", tools=[tool])
    prompt = Prompt(PromptTemplate(ns="tests", key="hidden", sections=[section], policies=policies))
    prompt.bind(resources={Filesystem: Binding.instance(Filesystem, files)})
    with prompt.resources:
        return ToolExecutor(prompt=prompt, session=Session()).execute("run", {}).receipt


def assert_not_stored(store: Path) -> None:
    held = store_bytes(store)
    assert SECRET.encode() not in held
    assert OLD.encode() not in held


def without_times(tree: Mapping[str, CapturedPath]) -> Mapping[str, tuple[str, str, int]]:
    return {path: (one.kind, one.content, one.mode) for path, one in tree.items()}


STAYING = {
    "a new one": (f"echo {SECRET} > .env.local", [".env.local"]),
    "in a new directory": (f"mkdir -p d/e; echo {SECRET} > d/e/.env; echo x > d/x", ["d", "d/e", "d/e/.env"]),
    "in a directory that was moved": (f"mv app new; echo {SECRET} > new/id_rsa", ["new", "new/id_rsa"]),
    "a hidden directory": (f"mkdir vault; echo {SECRET} > vault/note", ["vault", "vault/note"]),
    "a key": (f"printf -- '{KEY}' > app/new.key", ["app/new.key"]),
    "a backup of one that was saved anew": (f"mv .env .env.old; echo {SECRET} > .env", [".env", ".env.old"]),
    "a backup under another name": (f"mv .env backup; echo {SECRET} > .env", [".env", "backup"]),
    "one with another link": (f"echo {SECRET} > .env.a; ln .env.a .env.b", [".env.a", ".env.b"]),
}


@pytest.mark.parametrize(
    ("name", "ends"), [*((name, "denied") for name in STAYING), ("a new one", "failed"), ("a new one", "raises")]
)
def test_what_comes_to_be_hidden_during_a_call_stays_and_is_not_stored(
    workspace: Workspace, root: Path, store: Path, name: str, ends: str
) -> None:
    script, staying = STAYING[name]
    before = without_times(shape(root))
    policies = (HiddenFilesPolicy(),) if ends == "denied" else ()
    receipt = run(workspace.filesystem, f"{script}; echo x > made", policies=policies, ends=ends)
    assert receipt.outcome != "committed"
    now = without_times(shape(root))
    assert {path: one for path, one in now.items() if path not in staying} == {
        path: one for path, one in before.items() if path not in staying
    }
    assert {*staying} <= now.keys()
    assert f"{staying[-1].split('/note')[0]} " in receipt.message, "the person is told"
    assert SECRET in "".join(path.read_text() for path in root.rglob("*") if path.is_file())
    assert workspace.filesystem.hides(staying[-1])
    workspace.close()
    assert_not_stored(store)


MOVED = {
    "moved to a hidden name": "mv app/main.py app/id_rsa",
    "a hard link with a hidden name": "ln app/main.py app/id_rsa",
    "a link with a hidden name": "ln -s main.py app/id_rsa",
    "a directory moved to a hidden name": "mv app vault; mv vault/main.py vault/x",
    "a hidden one moved to another hidden name": "mv .env app/.env.local",
    "a hidden one moved": "mv .env app/shown",
    "a hidden one with another link": "ln .env app/shown",
}


@pytest.mark.parametrize("name", MOVED)
def test_what_was_there_comes_back_from_a_hidden_path(workspace: Workspace, root: Path, name: str) -> None:
    before = shape(root)
    assert run(workspace.filesystem, MOVED[name], policies=(HiddenFilesPolicy(),)).outcome == "denied"
    assert shape(root) == before
    assert workspace.filesystem.read("app/main.py").content == "print('shown')\n", "it is hidden no more"
    assert run(workspace.filesystem, "echo x > made", policies=(HiddenFilesPolicy(),)).outcome == "committed"
    assert workspace.steps()[-1].paths == ("made",)


HIDING_WHAT_IT_CHANGES = {
    "a hard link": "ln app/main.py app/id_rsa; echo evil > app/main.py",
    "a symlink": "ln -s main.py app/id_rsa; echo evil > app/main.py",
    "a hard link of a new file": "echo evil > app/new.py; ln app/new.py .env.x",
    "a symlink to a new file": "echo evil > app/new.py; ln -s app/new.py .env.x",
    "git's own": "echo evil >> .git/config; ln .git/config .env.x",
    "a hook": "echo evil > .git/hooks/pre-commit; ln -s .git/hooks/pre-commit .env.x",
    "a directory of hooks": "echo evil > .git/hooks/pre-commit; ln -s .git/hooks .env.x",
    "a hidden directory of hooks": "echo evil > .git/hooks/pre-commit; ln -s .git/hooks vault",
    "a file that has become a key": f"printf -- '{KEY}' > app/cert.pem",
    "a move to a hidden name": "mv app/main.py .env.x; echo evil > .env.x; ln .env.x app/main.py",
}


@pytest.mark.parametrize("ends", ["ok", "raises", "killed"])
@pytest.mark.parametrize("name", HIDING_WHAT_IT_CHANGES)
def test_no_call_keeps_what_it_changed_by_giving_it_a_hidden_name(
    root: Path, store: Path, name: str, ends: str
) -> None:
    (root / ".git/hooks").mkdir(parents=True)
    (root / ".git/config").write_text("[core]\n")
    before = {path: one for path, one in without_times(capture_tree(root)).items() if path}
    with Workspace.open(root, store=store, hide=RULE):
        pass
    if ends == "killed":

        def work(stop: Callable[[str], None]) -> None:
            with Workspace.open(root, store=store) as workspace, held_call(workspace.filesystem, opaque=True):
                subprocess.run(["sh", "-ec", HIDING_WHAT_IT_CHANGES[name]], cwd=root, check=True)
                stop("here")

        assert killed_at(0, work)
        Workspace.open(root, store=store).close()
    else:
        with Workspace.open(root, store=store) as workspace:
            policies = (HiddenFilesPolicy(),)
            receipt = run(workspace.filesystem, HIDING_WHAT_IT_CHANGES[name], policies=policies, ends=ends)
            assert receipt.outcome == ("denied" if ends == "ok" else "failed")
    after = without_times(capture_tree(root))
    assert {path: one for path, one in after.items() if path and path != ".env.x"} == before


def test_a_directory_that_changed_just_before_the_call_is_hidden_by_no_link_to_it(root: Path, store: Path) -> None:
    (root / ".git/hooks").mkdir(parents=True)
    with Workspace.open(root, store=store, hide=RULE, detect="scan") as workspace:
        for n in range(20):  # within a tick of the clock that stamps files, no time tells what came after a scan
            (root / ".git/hooks" / f"mine{n}").write_text("a person's")
            workspace.look()
            script = HIDING_WHAT_IT_CHANGES["a directory of hooks"]
            assert run(workspace.filesystem, script, ends="raises").outcome == "failed"
            assert not (root / ".git/hooks/pre-commit").exists()
            (root / ".env.x").unlink(missing_ok=True)


def test_a_file_gives_way_to_no_directory_with_something_hidden(workspace: Workspace, root: Path, store: Path) -> None:
    script = f"rm app/main.py; mkdir app/main.py; echo {SECRET} > app/main.py/.env; echo x > app/main.py/x"
    receipt = run(workspace.filesystem, script, policies=(HiddenFilesPolicy(),))
    assert receipt.conflicts == ("app/main.py",)
    assert os.listdir(root / "app/main.py") == [".env"]
    assert_not_stored(store)


def test_a_number_that_an_inode_gets_again_hides_nothing(workspace: Workspace, root: Path) -> None:
    receipt = run(workspace.filesystem, "rm .env; mkdir d1 d2 d3 d4 d5 d6", policies=(HiddenFilesPolicy(),))
    assert receipt.outcome == "denied"
    assert sorted(os.listdir(root)) == ["app"]


def test_a_committed_call_keeps_what_has_become_hidden_and_its_step_does_not_have_it(
    workspace: Workspace, root: Path, store: Path
) -> None:
    script = f"mkdir d; echo x > d/x; echo {SECRET} > d/.env; printf -- '{KEY}' > app/cert.pem"
    assert run(workspace.filesystem, script).outcome == "committed"
    assert SECRET not in str(workspace.diff(0))
    workspace.undo()
    assert sorted(os.listdir(root / "d")) == [".env"]
    workspace.restore(0)
    assert (root / "d/.env").read_text() == f"{SECRET}\n"
    assert SECRET in (root / "app/cert.pem").read_text()
    workspace.close()
    assert_not_stored(store)


def test_an_undo_leaves_a_hidden_file_in_a_directory_that_the_step_made(
    workspace: Workspace, root: Path, store: Path
) -> None:
    assert run(workspace.filesystem, "mkdir -p d/e; echo x > d/e/x").outcome == "committed"
    (root / "d/e/.env").write_text(SECRET)
    workspace.undo()
    assert [path.name for path in (root / "d").rglob("*")] == ["e", ".env"]
    workspace.undo()
    assert (root / "d/e/x").exists()
    workspace.restore(0)
    assert (root / "d/e/.env").read_text() == SECRET
    workspace.close()
    assert_not_stored(store)


@pytest.mark.parametrize("inner_ends", ["commit", "rollback"])
def test_a_call_within_a_call_leaves_it_too(workspace: Workspace, root: Path, store: Path, inner_ends: str) -> None:
    files, before = workspace.filesystem, without_times(shape(root))
    with held_call(files, opaque=True) as outer:
        files.for_call(outer).write("typed", "x")
        (root / ".env.first").write_text(SECRET)
        with held_call(files, call_id="call-2", parent=outer, opaque=True) as inner:
            subprocess.run(["sh", "-c", f"mkdir d; echo {SECRET} > d/.env; echo x > d/x"], cwd=root, check=True)
            getattr(inner, inner_ends)()
        (root / ".env.last").write_text(SECRET)
        outer.rollback()
    staying = {".env.first", "d", "d/.env", ".env.last"}
    now = without_times(shape(root))
    assert now.keys() == before.keys() | staying
    workspace.close()
    assert_not_stored(store)


@pytest.mark.parametrize("change", ["write", "mkdir", "move"])
def test_a_typed_call_that_fails_leaves_it_too(workspace: Workspace, root: Path, store: Path, change: str) -> None:
    files = workspace.filesystem
    with held_call(files) as call:
        view = files.for_call(call)
        {
            "write": lambda: view.write("d/x", "x"),
            "mkdir": lambda: view.mkdir("d"),
            "move": lambda: view.move("app", "d"),
        }[change]()
        (root / "d/.env").write_text(SECRET)
        call.rollback()
    assert SECRET in {path.read_text() for path in root.rglob(".env")}
    assert (root / "app/main.py").exists()
    workspace.close()
    assert_not_stored(store)


@pytest.mark.parametrize("name", ["in a new directory", "a hidden directory", "a key", "a backup under another name"])
def test_a_recovery_leaves_it_too(root: Path, store: Path, name: str) -> None:
    script, staying = STAYING[name]
    with Workspace.open(root, store=store, hide=RULE):
        before = without_times(shape(root))
    process = os.fork()
    if process == 0:
        with Workspace.open(root, store=store) as workspace, held_call(workspace.filesystem, opaque=True):
            subprocess.run(["sh", "-c", f"{script}; echo x > made"], cwd=root, check=True)
            os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    with Workspace.open(root, store=store, hide=HiddenFiles(usual=False)) as workspace:
        assert workspace.recovered is not None
        assert f"{staying[-1].split('/note')[0]} " in " ".join(workspace.recovered.notes)
        now = without_times(shape(root))
        assert {path: one for path, one in now.items() if path not in staying} == {
            path: one for path, one in before.items() if path not in staying
        }
        assert {*staying} <= now.keys()
        assert SECRET not in str([workspace.aborted_step(one.number) for one in workspace.aborted()])


def test_a_recovery_of_a_typed_call_does_not_store_what_somebody_has_put_into_a_directory_since(
    root: Path, store: Path
) -> None:
    with Workspace.open(root, store=store, hide=RULE):
        pass
    process = os.fork()
    if process == 0:
        with Workspace.open(root, store=store) as workspace, held_call(workspace.filesystem) as call:
            files = workspace.filesystem.for_call(call)
            files.write("app/new.py", "x")
            files.move("app", "moved")
            os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    (root / "moved/.env").write_text(SECRET)
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert (root / "app/main.py").exists()
        assert SECRET in {path.read_text() for path in root.rglob(".env")}
    assert_not_stored(store)


def test_a_copy_in_memory_leaves_it_too(root: Path, store: Path) -> None:
    copy = MemoryWorkspace(root, store=store, hide=RULE)
    copy.filesystem.write("app/x", "x")
    (root / "app/.env").write_text(SECRET)
    copy.apply(copy.own_changes().changes)
    assert (root / "app/x").read_text() == "x"
    assert (root / "app/.env").read_text() == SECRET
    assert_not_stored(store)
