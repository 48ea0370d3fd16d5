"""``durability="power"``: what waits for the disk, how often, and what a loss of power leaves."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree, lasting
from effort import kill_points
from killing import killed_at

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_sandbox.calls.journal import Journal
from ringfence_tools import VfsToolsSection


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    for n in range(10):
        (root / f"f{n}").write_text(f"{n}\n")
    return root


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def workspace(root: Path, done: list[str]) -> Iterator[Workspace]:
    with Workspace.open(root, store=root.parent / "store", durability="power", before=done.append) as workspace:
        done.clear()
        yield workspace


def waits(done: list[str]) -> Counter[str]:
    return Counter(name for name in done if name.startswith("fsync"))


def patch(*paths: str, new: tuple[str, ...] = ()) -> str:
    changed = "".join(f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{path[-1]}\n+ours\n" for path in paths)
    return changed + "".join(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+new\n" for path in new)


def patched(filesystem: HostFilesystem, text: str) -> None:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=filesystem)
    prompt = Prompt(PromptTemplate(ns="test", key="power", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        for n in range(10):
            assert executor.call("read_file", {"file_path": f"f{n}"}).success
        answer = executor.call("apply_patch", {"patch": text})
    assert answer.success, answer.message


def test_one_file_waits_for_the_journal_twice(workspace: Workspace, done: list[str]) -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("f0", "ours")
        held.commit()
    assert waits(done) == {"fsync journal": 2, "fsync file": 1, "fsync directory": 1, "fsync objects": 1}
    order = [name for name in done if name.startswith("fsync") or name == "exchange"]
    assert order == ["fsync file", "fsync journal", "exchange", "fsync objects", "fsync directory", "fsync journal"]


def test_a_patch_of_ten_files_waits_for_the_journal_twice(workspace: Workspace, root: Path, done: list[str]) -> None:
    patched(workspace.filesystem, patch(*(f"f{n}" for n in range(10))))
    assert waits(done) == {"fsync journal": 2, "fsync file": 10, "fsync directory": 1, "fsync objects": 1}
    last_wait = max(n for n, name in enumerate(done) if name == "fsync file")
    assert last_wait < done.index("fsync journal") < done.index("exchange")
    assert {path.read_text() for path in root.glob("f*")} == {"ours\n"}


def test_a_patch_that_makes_directories_is_one_batch_too(workspace: Workspace, root: Path, done: list[str]) -> None:
    patched(workspace.filesystem, patch("f0", "f1", new=("n/o/p", "n/o/q", "d/r", "s")))
    assert waits(done)["fsync journal"] == 2
    assert (root / "n/o/q").read_text() == "new\n"
    workspace.undo()
    assert sorted(os.listdir(root)) == ["d", *(f"f{n}" for n in range(10))]


def test_a_rollback_waits_for_what_it_takes_away_before_that_goes(workspace: Workspace, done: list[str]) -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("f0", "ours")
        done.clear()
        held.rollback()
    order = [name for name in done if name.startswith("fsync") or name == "exchange"]
    assert order == ["fsync taken back", "exchange"]


def test_without_power_nothing_waits(root: Path, done: list[str]) -> None:
    with Workspace.open(root, store=root.parent / "store", before=done.append) as workspace:
        done.clear()
        patched(workspace.filesystem, patch("f0", new=("n/o",)))
        with held_call(workspace.filesystem) as held:
            workspace.filesystem.for_call(held).write("f0", "taken back")
            held.rollback()
    assert waits(done) == {}


UNANNOUNCED: dict[str, Callable[[HostFilesystem, Path], object]] = {
    "other content": lambda fs, root: fs.write("f0", "other"),
    "another order": lambda fs, root: fs.write("d/new/x", "new"),
    "a change by somebody else": lambda fs, root: (root / "f0").write_text("theirs, longer"),
    "something else first": lambda fs, root: fs.delete("f5"),
    "a directory in the way": lambda fs, root: fs.mkdir("d/new/x"),
    "a move away": lambda fs, root: fs.move("d", "e"),
}


@pytest.mark.parametrize("name", UNANNOUNCED)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_was_announced_and_comes_otherwise_is_done_as_ever(root: Path, name: str, end: str) -> None:
    with HostFilesystem(root, store=root.parent / "s", durability="power") as fs, held_call(fs) as held:
        handle = fs.for_call(held)
        handle.announce({"f0": b"ours", "d/new/x": b"new", "f1/below": b"", "f2": b"two"})
        assert held.changed() == []
        UNANNOUNCED[name](handle, root)
        before = capture_tree(root)["f1"]
        handle.write("f0", "ours")
        if name != "a directory in the way":
            handle.write("d/new/x", "new")
        handle.write("f2", "two")
        changed = [change.path for change in held.changed()]
        assert {"f0", "f2"} <= set(changed)
        assert (root / "f0").read_text() == "ours"
        getattr(held, end)()
    assert capture_tree(root)["f1"] == before
    assert [path for path in os.listdir(root) if path.startswith(".ringfence")] == []
    if end == "rollback":
        assert sorted(os.listdir(root)) == ["d", *(f"f{n}" for n in range(10))]
        assert os.listdir(root / "d") == []


def test_a_patch_killed_anywhere_is_undone_or_done(tmp_path: Path) -> None:
    ends: set[bool] = set()
    for point in kill_points(5):
        root, store = tmp_path / f"{point}/root", tmp_path / f"{point}/store"
        root.mkdir(parents=True)
        for n in range(10):
            (root / f"f{n}").write_text(f"{n}\n")
        before = capture_tree(root)

        def work(announce: Callable[[str], None], root: Path = root, store: Path = store) -> None:
            with HostFilesystem(root, store=store, durability="power", before=announce) as fs:
                patched(fs, patch("f0", "f1", "f2", new=("n/o/p", "q")))

        killed = killed_at(point, work)
        HostFilesystem(root, store=store).close()
        done = (root / "q").exists()
        ends.add(done)
        if done:
            assert [(root / f"f{n}").read_text() for n in range(3)] == ["ours\n"] * 3
            assert (root / "n/o/p").read_text() == "new\n"
        else:
            assert capture_tree(root) == before
        assert not [name for name in os.listdir(root) if name.startswith(".ringfence")]
        if not killed:
            break
    assert ends == {True, False}


# After a loss of power, as far as it can be played: another boot id in the journal, and files without their bytes.

CONTENT = os.urandom(3000)


def unplugged(root: Path, change: Callable[[HostFilesystem], object], *, commit: bool = True) -> Path:
    """A workspace whose machine stopped after a call, in the default durability; its store."""
    store = root.parent / "store"

    def work(stop: Callable[[str], None]) -> None:
        workspace = Workspace.open(root, store=store)
        with held_call(workspace.filesystem) as held:
            change(workspace.filesystem.for_call(held))
            if commit:
                held.commit()
            stop("here")

    assert killed_at(0, work)
    another_boot(store)
    return store


def another_boot(store: Path) -> None:
    old = Journal(str(store / "journal"))
    records = old.records
    old.close()
    (store / "journal").unlink()
    new = Journal(str(store / "journal"))
    for record in records:
        match record.values:
            case {"root": [inode, born, device, str()]}:
                new.append({"root": [inode, born, device, "another boot"]})
            case _:
                new.append(dict(record.values), blob=record.blob)
    new.close()


def losing(path: Path, content: bytes) -> None:
    found = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


LOST = {"empty": b"", "zeros": bytes(3000), "half": CONTENT[:1024] + bytes(1976), "short": CONTENT[:512]}


def write_one(fs: HostFilesystem) -> None:
    fs.write_bytes("d/new", CONTENT)
    fs.chmod("d/new", 0o640)


@pytest.mark.parametrize("lost", LOST)
def test_a_committed_file_that_lost_its_bytes_is_healed(root: Path, lost: str) -> None:
    store = unplugged(root, write_one)
    before = lasting(capture_tree(root)), capture_tree(root)["d/new"].mtime_ns
    losing(root / "d/new", LOST[lost])
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.conflicts == ()
        assert "d/new" in workspace.recovered.notes[-1]
        assert [entry.kind for entry in workspace.log()] == ["step", "baseline"]
    assert (lasting(capture_tree(root)), capture_tree(root)["d/new"].mtime_ns) == before
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is None


def test_a_file_is_healed_where_a_later_call_moved_it(root: Path) -> None:
    def change(fs: HostFilesystem) -> None:
        write_one(fs)
        fs.move("d", "e/d")

    store = unplugged(root, change)
    losing(root / "e/d/new", b"")
    Workspace.open(root, store=store).close()
    assert (root / "e/d/new").read_bytes() == CONTENT


@pytest.mark.parametrize("lost", [b"theirs", b"", CONTENT[:512] + b"theirs"])
def test_what_somebody_wrote_after_the_loss_stays(root: Path, lost: bytes) -> None:
    store = unplugged(root, write_one)
    (root / "d/new").write_bytes(lost)
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == lost


@pytest.mark.parametrize("edit", [CONTENT[:512] + b"x" * 2488, CONTENT + b"x"])
def test_what_no_crash_can_make_stays_even_with_the_old_time(root: Path, edit: bytes) -> None:
    store = unplugged(root, write_one)
    losing(root / "d/new", edit)
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == edit


def test_in_the_same_boot_nothing_is_healed(root: Path) -> None:
    store = root.parent / "store"

    def work(stop: Callable[[str], None]) -> None:
        workspace = Workspace.open(root, store=store)
        with held_call(workspace.filesystem) as held:
            write_one(workspace.filesystem.for_call(held))
            held.commit()
            stop("here")

    assert killed_at(0, work)
    losing(root / "d/new", b"")
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == b""


def test_a_call_that_was_not_committed_is_undone_though_its_files_lost_their_bytes(root: Path) -> None:
    before = capture_tree(root)
    store = unplugged(root, lambda fs: (write_one(fs), fs.write("f0", "ours " * 500)), commit=False)
    losing(root / "d/new", b"")
    losing(root / "f0", bytes(2500))
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert (workspace.recovered.outcome, workspace.recovered.conflicts) == ("rolled back", ())
    assert capture_tree(root) == before


def test_what_no_history_has_is_reported(root: Path) -> None:
    store = root.parent / "store"

    def work(stop: Callable[[str], None]) -> None:
        with HostFilesystem(root, store=store) as fs, held_call(fs) as held:
            write_one(fs.for_call(held))
            held.commit()
            stop("here")

    assert killed_at(0, work)
    another_boot(store)
    losing(root / "d/new", b"")
    with HostFilesystem(root, store=store) as fs:
        assert fs.recovered is not None
        assert fs.recovered.conflicts == ("d/new",)
        assert "the history does not have" in fs.recovered.notes[0]


def test_healing_killed_anywhere_is_done_again(tmp_path: Path) -> None:
    for point in range(10_000):
        root = tmp_path / f"{point}/root"
        (root / "d").mkdir(parents=True)
        store = unplugged(root, write_one)
        losing(root / "d/new", CONTENT[:512])
        time = capture_tree(root)[""].mtime_ns

        def work(announce: Callable[[str], None], root: Path = root, store: Path = store) -> None:
            Workspace.open(root, store=store, before=announce).close()

        killed = killed_at(point, work)
        Workspace.open(root, store=store).close()
        assert (root / "d/new").read_bytes() == CONTENT, point
        assert sorted(os.listdir(root)) == ["d"], point
        assert capture_tree(root)[""].mtime_ns == time, point
        if not killed:
            assert point > 5
            break


def test_a_holding_directory_that_the_journal_does_not_know_is_reported_and_left(root: Path) -> None:
    (root / f".ringfence-hold-{'a' * 16}").mkdir()
    held = root / f".ringfence-hold-{'b' * 16}"
    held.mkdir()
    (held / "0").write_text("somebody may miss it")
    for _ in range(2):
        with Workspace.open(root, store=root.parent / "store") as workspace:
            assert workspace.recovered is not None
            assert held.name in workspace.recovered.notes[0]
    assert (held / "0").read_text() == "somebody may miss it"
    assert [name for name in os.listdir(root) if name.startswith(".ring")] == [held.name]
