"""A store that goes away, fills up, may not be written, or is another version's: it is said, and nothing is lost."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from captured_tree import capture_tree, lasting
from effort import kill_points
from killing import as_nobody, killed_at, killed_at_call
from mounts import mounted, small_disk
from real_git import fsck

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.testing import held_call
from ringfence_batch.archives import trust
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_tools import VfsToolsSection

MADE = runpy.run_path(str(Path(__file__).with_name("make_store.py")))
build: Callable[[Path], None] = MADE["build"]
change: Callable[[HostFilesystem], None] = MADE["change"]
OLD = Path(__file__).parent / "stores" / "without-a-number.tar.gz"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    build(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def workspace(root: Path, store: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=store) as workspace:
        yield workspace


def call(workspace: Workspace, work: Callable[[HostFilesystem], object]) -> None:
    with held_call(workspace.filesystem) as held:
        try:
            work(workspace.filesystem.for_call(held))
            held.commit()
        except BaseException:
            held.rollback()
            raise


# Gone


def another_in_its_place(store: Path) -> None:
    store.rename(store.with_name("elsewhere"))
    shutil.copytree(store.with_name("elsewhere"), store)


GONE: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda store: store.rename(store.with_name("elsewhere")),
    "another in its place": another_in_its_place,
    "its history removed": lambda store: shutil.rmtree(store / "history"),
}


@pytest.mark.parametrize("name", GONE)
def test_the_next_call_says_what_to_do(workspace: Workspace, root: Path, store: Path, name: str) -> None:
    before = capture_tree(root)
    GONE[name](store)
    for _ in range(2):
        with pytest.raises(OSError, match="open it again") as caught:
            call(workspace, change)
        assert caught.value.errno == errno.ESTALE
        assert capture_tree(root) == before
    workspace.close()
    with Workspace.open(root, store=store) as again:
        call(again, change)
        assert [step.number for step in again.steps()] == [1]


@pytest.mark.parametrize("name", GONE)
def test_a_call_that_loses_the_store_rolls_back(workspace: Workspace, root: Path, store: Path, name: str) -> None:
    before = capture_tree(root)
    with pytest.raises(OSError, match="open it again"):
        call(workspace, lambda fs: (change(fs), GONE[name](store)))
    assert capture_tree(root) == before


def test_a_model_is_told_and_the_loop_goes_on(workspace: Workspace, root: Path, store: Path) -> None:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=workspace.filesystem)
    prompt = Prompt(PromptTemplate(ns="test", key="gone", sections=[section]))
    shutil.rmtree(store)
    with prompt.resources:
        answer = ToolExecutor(prompt=prompt, session=session).call("write_file", {"file_path": "x", "content": "x"})
    assert not answer.success
    assert "open it again" in answer.message
    assert not (root / "x").exists()


# Damaged


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.chmod(0o600)
    path.write_bytes(change(path.read_bytes()))


DAMAGES = {
    "without a pack": ("objects/pack/*.pack", Path.unlink),
    "without an index": ("objects/pack/*.idx", Path.unlink),
    "without packs": ("objects", shutil.rmtree),
    "without refs": ("packed-refs", Path.unlink),
    "with strange refs": ("packed-refs", lambda refs: rewritten(refs, lambda _: b"\x1f")),
    "with half an index": ("objects/pack/*.idx", lambda index: rewritten(index, lambda data: data[:1100])),
    "with other bytes": ("objects/pack/*.pack", lambda pack: rewritten(pack, lambda data: data[::-1])),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_history_is_said_and_nothing_changes_nor_is_deleted(root: Path, store: Path, name: str) -> None:
    with Workspace.open(root, store=store) as workspace:
        call(workspace, change)
    whole = shutil.copytree(store, store.with_name("whole"))
    pattern, damage = DAMAGES[name]
    [place] = (store / "history").glob(pattern)
    damage(place)
    before, left = capture_tree(root), lasting(capture_tree(store / "history"))
    for read_only in (True, False):
        with pytest.raises(ValueError, match="history is damaged .* or move it away to begin a new one"):
            Workspace.open(root, store=store, read_only=read_only)
    assert capture_tree(root) == before
    assert left.items() <= lasting(capture_tree(store / "history")).items()
    (store / "history").rename(store / "aside")
    shutil.copytree(whole / "history", store / "history")
    with Workspace.open(root, store=store) as workspace:
        assert [step.number for step in workspace.steps()] == [1]


LOOKS: dict[str, Callable[[Workspace], object]] = {
    "show": lambda workspace: workspace.show(1),
    "export": lambda workspace: workspace.export("mbox"),
    "undo": lambda workspace: workspace.undo(2),
    "restore": lambda workspace: workspace.restore(0),
    "gc": lambda workspace: workspace.gc(9),
}


def with_a_flipped_bit(root: Path, store: Path) -> None:
    """Of the first of two packs, which only what looks back meets."""
    with Workspace.open(root, store=store) as workspace:
        call(workspace, change)
    [pack] = (store / "history/objects/pack").glob("*.pack")
    with Workspace.open(root, store=store) as workspace:
        call(workspace, lambda fs: fs.write("a.txt", "two"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.chmod(0o600)
    pack.write_bytes(data)


@pytest.mark.parametrize("name", LOOKS)
def test_a_part_of_the_history_that_cannot_be_read_is_said_when_it_is_met(root: Path, store: Path, name: str) -> None:
    with_a_flipped_bit(root, store)
    before = capture_tree(root)
    with Workspace.open(root, store=store) as workspace:
        with pytest.raises(ValueError, match="history is damaged .* or move it away to begin a new one"):
            LOOKS[name](workspace)
        assert capture_tree(root) == before


def test_a_workspace_with_a_damaged_part_of_its_history_opens_and_closes(root: Path, store: Path) -> None:
    with_a_flipped_bit(root, store)
    for number in range(12):
        with Workspace.open(root, store=store) as workspace:
            call(workspace, lambda fs, number=number: fs.write("a.txt", f"{number}"))
    with Workspace.open(root, store=store) as workspace:
        assert workspace.log(1)[0].number == 14


def test_a_first_opening_that_was_killed_anywhere_has_damaged_nothing(root: Path, store: Path) -> None:
    for point in kill_points(13):
        killed = killed_at_call(point, ("write", "mkdir", "fsync", "open"), lambda: Workspace.open(root, store=store))
        with Workspace.open(root, store=store) as workspace:
            assert [entry.kind for entry in workspace.log()] == ["baseline"]
            call(workspace, change)
            workspace.undo()
        fsck(store / "history")
        shutil.rmtree(store)
        if not killed:
            return


def killed_after_three_calls(root: Path, store: Path) -> Path:
    """Leaves a history of which nothing is in a pack; its log."""

    def work(before: Callable[[str], None]) -> None:
        with Workspace.open(root, store=store) as workspace:
            for number in range(3):
                call(workspace, lambda fs, number=number: fs.write(f"made-{number}", "x" * 99))
            before("the end")

    assert killed_at(0, work)
    [log] = (store / "history").glob("log.??????")
    return log


def whole(log: Path) -> bytearray:
    """What a log has, without the room that is reserved for more."""
    return bytearray(log.read_bytes().rstrip(b"\0"))


def flip(log: Path, at: float) -> bytearray:
    """Damages one byte of a log; what it has then."""
    data = whole(log)
    data[int(at * len(data)) if isinstance(at, float) else at] ^= 16
    log.write_bytes(data)
    return data


@pytest.mark.parametrize("at", [20, 0.2, 0.5, 0.8])
def test_nothing_of_a_damaged_log_goes_without_a_copy_and_a_word(root: Path, store: Path, at: float) -> None:
    log = killed_after_three_calls(root, store)
    data = flip(log, at)
    if at not in (20, 0.2):  # else there is no history any more to be looked at
        with Workspace.open(root, store=store, read_only=True) as workspace:
            assert "the history is damaged" in str(workspace.damage)
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        [said] = [note for note in workspace.recovered.notes if "the history is damaged" in note]
        assert "steps in them are lost" in said
        assert len(workspace.steps()) == {20: 0, 0.2: 0, 0.5: 0, 0.8: 2}[at]
        assert len([*root.glob("made-*")]) == 3
        call(workspace, lambda fs: fs.write("after the damage", "x"))
    assert Path(said.rpartition(" is kept at ")[2]).read_bytes() == data
    fsck(store / "history")
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is None
        assert workspace.steps()[-1].paths == ("after the damage",)


def test_what_was_done_behind_the_damage_of_a_log_stays_wherever_its_opening_is_killed(root: Path, store: Path) -> None:
    log = killed_after_three_calls(root, store)
    flip(log, 0.8)
    damaged = shutil.copytree(store, store.with_name("damaged"))
    for point in kill_points(20):
        killed = killed_at_call(
            point, ("pwrite", "ftruncate", "unlink", "open"), lambda: Workspace.open(root, store=store)
        )
        with Workspace.open(root, store=store) as workspace:
            assert [path.name for path in sorted(root.glob("made-*"))] == ["made-0", "made-1", "made-2"]
            assert [step.paths for step in workspace.steps()] == [("made-0",), ("made-1",)]
        shutil.rmtree(store)
        shutil.copytree(damaged, store)
        if not killed:
            return


@pytest.mark.parametrize("cut", [1, 5, 30, -4096])
def test_a_log_that_a_kill_has_cut_off_is_not_damaged(root: Path, store: Path, cut: int) -> None:
    log = killed_after_three_calls(root, store)
    os.truncate(log, len(whole(log)) - cut)  # or what was made longer for a record has none yet
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is None or workspace.recovered.outcome == "finished"
        assert workspace.damage is None
        assert len(workspace.steps()) == 3


def test_a_log_that_is_cut_off_while_it_is_open_fails_the_next_call(root: Path, store: Path) -> None:
    before = capture_tree(root)
    with Workspace.open(root, store=store) as workspace:
        [log] = (store / "history").glob("log.??????")
        os.truncate(log, 0)
        with pytest.raises(OSError, match="cut off"):
            call(workspace, change)
    assert capture_tree(root) == before


def test_a_log_that_was_removed_takes_the_steps_that_only_it_had(root: Path, store: Path) -> None:
    with Workspace.open(root, store=store) as workspace:
        call(workspace, change)
    killed_after_three_calls(root, store).unlink()
    with Workspace.open(root, store=store, read_only=True) as workspace:
        assert len(workspace.steps()) == 1
    with Workspace.open(root, store=store) as workspace:
        assert [entry.kind for entry in workspace.log()] == ["external", "step", "baseline"]


def test_a_record_that_is_just_being_written_is_no_damage_to_a_reader(
    workspace: Workspace, root: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(workspace, change)
    real, torn = os.pread, list[bytes]()

    def pread(file: int, size: int, at: int) -> bytes:
        content = real(file, size, at)
        if torn or at:
            return content
        middle = len(content.rstrip(b"\0")) // 2
        torn.append(content)
        return content[:middle] + bytes(9) + content[middle + 9 :]

    monkeypatch.setattr(os, "pread", pread)
    with Workspace.open(root, store=store, read_only=True) as looking:
        assert looking.damage is None
        assert [step.number for step in looking.steps()] == [1]
    assert torn


# Not to be written


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")


@needs_root
def test_a_store_that_may_not_be_written_is_an_error_that_says_so(root: Path, store: Path) -> None:
    store.mkdir(0o755)

    def work() -> None:
        for place in (store, store / "below"):
            for opened in (HostFilesystem, Workspace.open):
                with pytest.raises(PermissionError, match="RINGFENCE_STATE_DIR"):
                    opened(root, store=place)

    as_nobody(work, root)
    assert os.listdir(store) == []


@needs_root
def test_a_store_that_becomes_unwritable_keeps_its_steps(root: Path, store: Path) -> None:
    store.mkdir()

    def work() -> None:
        with Workspace.open(root, store=store) as workspace:
            for path in (store, store / "history", store / "history/objects/pack"):
                path.chmod(0o500)
            call(workspace, change)
        for path in (store, store / "history", store / "history/objects/pack"):
            path.chmod(0o700)
        with Workspace.open(root, store=store) as again:
            assert [step.number for step in again.steps()] == [1]
            assert [entry.kind for entry in again.log()] == ["step", "baseline"]
            again.undo()

    before = {path: one[:1] + one[4:] for path, one in lasting(capture_tree(root)).items()}
    as_nobody(work, root, store)
    assert {path: one[:1] + one[4:] for path, one in lasting(capture_tree(root)).items()} == before


# Full


def fill(place: Path) -> None:
    """Take all the space that there is."""
    with open(place / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break


def much(fs: HostFilesystem) -> None:
    change(fs)
    fs.write_bytes("much", os.urandom(600_000))


def test_a_full_store_rolls_the_call_back_and_the_next_one_goes_through(root: Path, tmp_path: Path) -> None:
    before = capture_tree(root)
    with small_disk(tmp_path / "disk", "2m") as disk, Workspace.open(root, store=disk / "store") as workspace:
        fill(disk)
        with pytest.raises(OSError, match="No space left") as caught:
            call(workspace, much)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename).startswith(str(disk / "store"))
        assert "make room, or name another place for it in the environment variable RINGFENCE_STATE_DIR" in str(
            caught.value
        )
        assert capture_tree(root) == before
        (disk / "filler").unlink()
        call(workspace, much)
        assert [step.number for step in workspace.steps()] == [1]
        workspace.undo()
    assert lasting(capture_tree(root)) == lasting(before)


def test_a_rollback_for_want_of_space_is_written_down(root: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:

        def work(before: Callable[[str], None]) -> None:
            with Workspace.open(root, store=disk / "store") as workspace:
                call(workspace, change)
                fill(disk)
                with pytest.raises(OSError, match="No space left"):
                    call(workspace, lambda fs: fs.write_bytes("much", os.urandom(600_000)))
                before("the end")

        assert killed_at(0, work)
        (disk / "filler").unlink()
        with Workspace.open(root, store=disk / "store") as workspace:
            assert workspace.recovered is None or workspace.recovered.outcome == "finished"


def test_a_store_that_fills_up_step_by_step_keeps_what_it_has(root: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        made = 0
        with Workspace.open(root, store=disk / "store") as workspace:
            with pytest.raises(OSError, match="No space left"):
                while made < 100:
                    tree = capture_tree(root)
                    call(workspace, lambda fs: fs.write_bytes("random", os.urandom(100_000)))
                    made += 1
            assert made > 5
            assert capture_tree(root) == tree
            assert [step.number for step in workspace.steps()] == list(range(1, made + 1))
        with Workspace.open(root, store=disk / "store", read_only=True) as looking:
            assert [step.number for step in looking.steps()] == list(range(1, made + 1))
            assert [one.path for one in looking.show(made).changes] == ["random"]


def test_a_full_store_cannot_be_opened_and_is_as_it_was_afterwards(root: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        with Workspace.open(root, store=disk / "store") as workspace:
            call(workspace, change)
        fill(disk)
        (root / "theirs").write_bytes(os.urandom(100_000))
        before = capture_tree(root)
        with pytest.raises(OSError, match="No space left on device: here the history is kept; make room") as caught:
            Workspace.open(root, store=disk / "store")
        assert str(caught.value.filename).startswith(str(disk / "store"))
        assert capture_tree(root) == before
        (disk / "filler").unlink()
        with Workspace.open(root, store=disk / "store") as workspace:
            assert [entry.kind for entry in workspace.log()] == ["external", "step", "baseline"]


def test_a_gc_that_finds_the_store_full_says_so_and_takes_nothing_away(root: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk, Workspace.open(root, store=disk / "store") as workspace:
        for _ in range(2):
            call(workspace, lambda fs: fs.write_bytes("random", os.urandom(100_000)))
        fill(disk)
        with pytest.raises(OSError, match="No space left on device: here the history is kept; make room"):
            workspace.gc(1)
        assert [step.number for step in workspace.steps()] == [1, 2]
        (disk / "filler").unlink()
        assert workspace.gc(1) >= 0
        assert workspace.show(2).patch


@pytest.mark.parametrize(
    "work",
    [
        much,
        lambda fs: (fs.delete("old"), change(fs), fs.write_bytes("old", os.urandom(900_000))),
        lambda fs: (fs.move("old", "d/old"), fs.write_bytes("d/old", os.urandom(900_000), mode="append")),
    ],
)
def test_a_full_workspace_rolls_back(store: Path, tmp_path: Path, work: Callable[[HostFilesystem], object]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        root = disk / "root"
        root.mkdir()
        build(root)
        (root / "old").write_bytes(os.urandom(300_000))
        with Workspace.open(root, store=store) as workspace:
            fill(disk)
            before = capture_tree(root)
            with pytest.raises(OSError, match="No space left on device: the workspace's filesystem is full.*make room"):
                call(workspace, work)
            assert capture_tree(root) == before
        assert capture_tree(root) == before


@pytest.mark.parametrize("path", ["old", "new"])
@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_write_that_does_not_fit_gives_its_room_back(store: Path, tmp_path: Path, path: str, mode: Any) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "root").mkdir()
        (disk / "root/old").write_bytes(os.urandom(100_000))

        def work(fs: HostFilesystem) -> None:
            with pytest.raises(OSError, match="make room"):
                fs.write_bytes(path, bytes(2_000_000), mode=mode)
            fs.write_bytes(path, bytes(500_000))

        with Workspace.open(disk / "root", store=store) as workspace:
            call(workspace, work)
            assert [step.paths for step in workspace.steps()] == [(path,)]


def test_a_file_that_takes_two_tries_to_come_back_to_a_full_disk_comes_back(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        (disk / "root").mkdir()
        (disk / "root/old").write_bytes(os.urandom(500_000))
        with Workspace.open(disk / "root", store=disk / "store") as workspace:
            before = capture_tree(disk / "root")
            with held_call(workspace.filesystem, opaque=True) as held:
                held.commit()
            fill(disk)
            os.truncate(disk / "filler", (disk / "filler").stat().st_size - 100_000)
            with held_call(workspace.filesystem, opaque=True) as held:
                (disk / "root/old").write_bytes(os.urandom(200_000))
                held.rollback()
            assert lasting(capture_tree(disk / "root")) == lasting(before)


def test_what_is_kept_of_a_rolled_back_call_leaves_the_rollback_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "48m") as disk:
        (disk / "root").mkdir()
        (disk / "root/old").write_bytes(os.urandom(16_000_000))
        with Workspace.open(disk / "root", store=disk / "store") as workspace:
            before = capture_tree(disk / "root")
            left = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - 500_000))
            with held_call(workspace.filesystem, opaque=True) as held:
                (disk / "root/old").unlink()
                for number in range(11):
                    (disk / f"root/{number}").write_bytes(os.urandom(1_000_000))
                held.rollback()
            assert lasting(capture_tree(disk / "root")) == lasting(before)


@contextmanager
def ext4(place: Path) -> Generator[Path]:
    """A real filesystem of 8 MiB, on which a directory takes room too."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    place.mkdir()
    image = place.with_name("image")
    image.touch()
    os.truncate(image, 8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    with mounted(place, "-o", "loop", str(image)):
        yield place


def test_a_file_that_fills_the_disk_does_not_stop_a_rollback(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk") as disk:
        root = disk / "root"
        (root / "d/e").mkdir(parents=True)
        for name in ("a", "b", "d/e/c"):
            (root / name).write_bytes(os.urandom(50_000))
        with Workspace.open(root, store=disk / "store") as workspace:
            before = capture_tree(root)
            with held_call(workspace.filesystem, opaque=True) as held:
                (root / "b").rename(root / "moved")
                shutil.rmtree(root / "d")
                (root / "a").rename(disk / "root/filler")
                fill(root)
                (root / "filler").rename(root / "a")
                assert os.statvfs(disk).f_bavail == 0
                held.rollback()
            assert lasting(capture_tree(root)) == lasting(before)


def test_a_disk_with_no_inode_left_is_said(store: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m,nr_inodes=8") as disk:
        (disk / "root").mkdir()
        (disk / "root/a").touch()
        with Workspace.open(disk / "root", store=store) as workspace:
            before = capture_tree(disk / "root")
            with pytest.raises(OSError, match="make room"):
                call(workspace, lambda fs: [fs.write(f"{number}/x", "") for number in range(8)])
            assert capture_tree(disk / "root") == before


# Of another version


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("ringfence store 2\n", "has form 2, and this version of ringfence knows form 1"),
        ("", "no form"),
        ("\xff", "no form"),
    ],
)
def test_a_store_of_a_form_that_is_not_known_is_left_alone(root: Path, store: Path, said: str, words: str) -> None:
    with Workspace.open(root, store=store) as workspace:
        call(workspace, change)
    (store / "format").write_text(said)
    before = lasting(capture_tree(store))
    for read_only in (False, True):
        with pytest.raises(ValueError, match=words):
            Workspace.open(root, store=store, read_only=read_only)
    with pytest.raises(ValueError, match=words):
        HostFilesystem(root, store=store)
    assert lasting(capture_tree(store)) == before


def test_a_store_from_before_there_was_a_number_still_opens(root: Path, store: Path) -> None:
    with tarfile.open(OLD) as archive:
        trust(archive).extractall(store.parent)
    before = lasting(capture_tree(root))
    (root / "a.txt").write_text("three\n")
    (root / "n").mkdir()
    (root / "n/o").write_text("new\n")
    (root / "d/empty").rmdir()
    (root / "second").write_text("2\n")
    with Workspace.open(root, store=store) as workspace:
        assert [(entry.kind, entry.number) for entry in workspace.log()] == [("step", 2), ("step", 1), ("baseline", 0)]
        assert b"+three" in workspace.show(1).patch
        assert set(workspace.undo(2).outcomes.values()) == {"restored", "removed"}
    assert lasting(capture_tree(root)) == before
    assert (store / "format").exists()
