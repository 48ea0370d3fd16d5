"""Hidden files that a command of this machine changes: denied, restored from a private copy, and in no history."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured_tree import shape
from killing import killed_at
from store_bytes import store_bytes

from ringfence.errors import CallDeniedError
from ringfence.filesystem import HiddenFiles
from ringfence.prompt import HiddenFilesPolicy
from ringfence_sandbox import Workspace

OLD, NEW = "an-old-secret-of-the-host", "a-new-secret-of-the-host"
RULE = HiddenFiles(["/vault*"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "app").mkdir(parents=True)
    (root / "vault/in").mkdir(parents=True)
    (root / "a").write_text("one\n")
    (root / "app/main.py").write_text("shown\n")
    for place in (".env", "app/.env", "vault/note", "vault/in/deep"):
        (root / place).write_text(f"TOKEN={OLD}\n")
    os.chmod(root / ".env", 0o640)
    os.utime(root / "vault", ns=(10**18, 10**18))
    time.sleep(0.02)  # what is made in the instant of a scan is not known again
    return root


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def workspace(root: Path, store: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=store, hide=RULE) as workspace:
        yield workspace


def assert_not_stored(store: Path) -> None:
    """Neither value is in a store, but for what a restore has replaced, which only the owner can read."""
    for path in (store / "kept").glob("*"):
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
    held = store_bytes(store)
    assert OLD.encode() not in held
    assert NEW.encode() not in held


CHANGES = {
    "written over": (f"echo {NEW} > .env", ".env"),
    "appended to": (f"echo {NEW} >> .env", ".env"),
    "written, and its time put back": (
        "cp -p .env x; printf X | dd of=.env conv=notrunc; touch -r x .env; rm x",
        ".env",
    ),
    "another mode": ("chmod 600 .env", ".env"),
    "removed": ("rm .env", ".env"),
    "renamed": ("mv .env shown", ".env"),
    "renamed and written": (f"mv .env shown; echo {NEW} >> shown", ".env"),
    "renamed and saved anew": (f"mv .env .env.old; echo {NEW} > .env", ".env"),
    "replaced by another": (f"echo {NEW} > t; mv t .env", ".env"),
    "replaced by a link": ("ln -sf app/main.py .env", ".env"),
    "replaced by a directory": (f"rm .env; mkdir .env; echo {NEW} > .env/x", ".env"),
    "removed with its directory": ("rm -r app", "app/.env"),
    "moved with its directory": (f"mv app new; echo {NEW} > new/.env", "app/.env"),
    "in a hidden directory": (f"echo {NEW} > vault/in/deep", "vault/in/deep"),
    "removed in a hidden directory": ("rm -r vault/in", "vault/in/deep"),
    "a hidden directory removed": ("rm -r vault", "vault/note"),
    "a hidden directory moved": (f"mv vault v; echo {NEW} > v/note", "vault/note"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_command_that_changes_a_hidden_file_is_denied_and_all_is_as_before(
    workspace: Workspace, root: Path, store: Path, name: str
) -> None:
    script, path = CHANGES[name]
    before = shape(root)
    done = workspace.run(f"{script}; echo two >> a", shell=True)
    assert (done.exit_code, done.outcome) == (0, "denied")
    assert path in {change.path for change in done.changes}
    assert done.receipt is not None
    assert [one.policy for one in done.receipt.policies if not one.allowed] == ["hidden_files"]
    assert shape(root) == before
    assert workspace.run("echo two >> a", shell=True).kept
    workspace.close()
    assert_not_stored(store)
    assert not [*store.rglob("*hidden-copies*")]


def test_an_edit_of_a_person_during_a_command_that_fails_is_kept_aside(
    workspace: Workspace, root: Path, store: Path
) -> None:
    done = workspace.run("echo MINE=1 >> .env; exit 3", shell=True)
    assert (root / ".env").read_text() == f"TOKEN={OLD}\n"
    (kept,) = (store / "kept").iterdir()
    assert kept.read_text() == f"TOKEN={OLD}\nMINE=1\n"
    assert any(str(kept) in note for note in done.notes)


@pytest.mark.parametrize("name", ["written over", "removed", "replaced by a link", "in a hidden directory"])
def test_a_command_that_fails_has_its_hidden_files_restored_too(workspace: Workspace, root: Path, name: str) -> None:
    before = shape(root)
    done = workspace.run(f"{CHANGES[name][0]}; exit 3", shell=True)
    assert done.outcome == "failed"
    assert any(CHANGES[name][1] in note for note in done.notes)
    assert shape(root) == before
    assert all(change.after is None or change.after.content_hash is None for change in done.changes)


def test_a_block_that_changes_a_hidden_file_is_denied(workspace: Workspace, root: Path) -> None:
    before = shape(root)
    with pytest.raises(CallDeniedError), workspace.transaction("import"):
        (root / ".env").write_text(NEW)
    assert shape(root) == before
    with workspace.transaction("import") as block:
        (root / ".env").write_text(NEW)
        block.rollback()
    assert shape(root) == before


def test_what_is_allowed_stays_and_is_in_no_history(workspace: Workspace, root: Path, store: Path) -> None:
    allowed = [HiddenFilesPolicy(allow=["/.env"])]
    done = workspace.run(f"echo {NEW} > .env; echo two > a", shell=True, policies=allowed, title="")
    assert (done.outcome, done.changed_paths) == ("committed", (".env", "a"))
    assert (root / ".env").read_text() == f"{NEW}\n"
    assert workspace.run("rm app/.env", shell=True, policies=allowed).outcome == "denied"
    assert workspace.steps()[-1].paths == ("a",)
    workspace.close()
    assert_not_stored(store)


def test_a_new_file_with_a_hidden_name_is_allowed_and_stays_also_after_a_failure(
    workspace: Workspace, root: Path, store: Path
) -> None:
    done = workspace.run(f"echo {NEW} > .env.local; echo {NEW} > vault/new", shell=True, title="")
    assert (done.outcome, {*done.changed_paths}) == ("committed", {".env.local", "vault/new"})
    assert workspace.run(f"echo {NEW} > app/.env.local; exit 1", shell=True).outcome == "failed"
    assert (root / "app/.env.local").exists()
    workspace.close()
    assert_not_stored(store)


def test_copies_are_private_while_the_command_runs_and_none_are_made_of_nothing(
    workspace: Workspace, store: Path
) -> None:
    script = f"find {store}/hidden-copies -printf '%m %y\\n' | sort -u"
    assert workspace.run(script, shell=True).stdout.splitlines() == ["600 f", "700 d"]
    assert workspace.run(["rm", "-r", ".env", "app/.env", "vault"], policies=[HiddenFilesPolicy(allow=["*"])]).kept
    assert "No such file" in workspace.run(script, shell=True).stderr


def test_files_beyond_the_limit_have_no_copy_and_a_change_of_one_stays_and_is_named(
    workspace: Workspace, root: Path
) -> None:
    with (root / ".env.large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    done = workspace.run(f"rm .env; echo {NEW} >> .env.large", shell=True)
    assert done.outcome == "denied"
    assert OLD in (root / ".env").read_text()
    assert (root / ".env.large").stat().st_size > (64 << 20) + 1
    assert any(".env.large is not as before" in note for note in done.notes)


@pytest.mark.parametrize(
    "name",
    [
        "written over",
        "renamed and saved anew",
        "replaced by a directory",
        "moved with its directory",
        "a hidden directory removed",
    ],
)
def test_a_recovery_restores_hidden_files_and_removes_the_copies(root: Path, store: Path, name: str) -> None:
    with Workspace.open(root, store=store, hide=RULE) as workspace:
        workspace.run(["true"])
    before = shape(root)
    kill_in_command(root, store, f"{CHANGES[name][0]}; echo two >> a")
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.conflicts == ()
    assert shape(root) == before
    assert_not_stored(store)
    assert not (store / "hidden-copies").exists()


def test_a_recovery_leaves_what_a_person_has_saved_since_and_keeps_what_it_was(root: Path, store: Path) -> None:
    with Workspace.open(root, store=store, hide=RULE):
        pass
    kill_in_command(root, store, f"echo {NEW} > .env; rm app/.env")
    long_ago = (time.time_ns() - 3600 * 10**9).to_bytes(8, "little")
    with (store / "alive").open("r+b") as file:  # the call was last seen an hour ago
        file.write(long_ago)
    (root / ".env").write_text("a person's\n")
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.conflicts == (".env",)
        assert (root / ".env").read_text() == "a person's\n"
        assert OLD in (root / "app/.env").read_text()
        [kept] = (store / "kept").iterdir()
        assert str(kept) in " ".join(workspace.recovered.notes)
        assert OLD in kept.read_text()
        assert kept.stat().st_mode & 0o777 == 0o600


def kill_in_command(root: Path, store: Path, script: str) -> None:
    """Kill who runs a command when the command has done its work."""
    ready = store.parent / "ready"

    def work(kill: Callable[[str], None]) -> None:
        def killer() -> None:
            while not ready.exists():
                time.sleep(0.005)
            kill("now")

        threading.Thread(target=killer).start()
        with Workspace.open(root, store=store) as workspace:
            workspace.run(f"{script}; touch {ready}; sleep 60", shell=True)

    assert killed_at(0, work)
