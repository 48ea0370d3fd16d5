"""What a scan of the tree finds, and what it leaves out, as a workspace shows it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from captured_tree import lasting, shape
from effort import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import as_nobody

from ringfence.testing import held_call
from ringfence_sandbox import ScanLimits, Workspace

LONG_AGO = 1_600_000_000_000_000_007
MAX_DEPTH = 256


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def opened(root: Path, **limits: int) -> Workspace:
    return Workspace.open(root, store=root.parent / "store", limits=ScanLimits(**limits))


def changed_by(workspace: Workspace, work: Callable[[], object]) -> list[str]:
    """What an opaque call finds changed; it is committed."""
    with held_call(workspace.filesystem, opaque=True) as call:
        work()
        found = [change.path for change in call.changed()]
        call.commit()
    return found


def deep(root: Path, depth: int) -> int:
    """Directories within each other, whose path may be longer than a system call takes; the innermost, open."""
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    return descriptor


def test_the_same_size_and_the_old_mtime_do_not_hide_a_change(root: Path) -> None:
    file = root / "a"
    file.write_bytes(b"0000")

    def rewrite(number: int) -> None:
        with file.open("r+b") as opened:
            opened.write(b"%04d" % number)
        os.utime(file, ns=(LONG_AGO, LONG_AGO))

    with opened(root) as workspace:
        rewrite(0)
        for number in range(1, 100):
            assert changed_by(workspace, lambda number=number: rewrite(number)) == ["a"], number


def test_a_change_of_times_alone_is_no_step(root: Path) -> None:
    (root / "a").touch()
    with opened(root) as workspace:
        assert changed_by(workspace, lambda: os.utime(root / "a", ns=(5, 5))) == []
        assert workspace.steps() == []


def test_looking_leaves_no_trace(root: Path) -> None:
    (root / "a").write_text("a")
    os.utime(root / "a", ns=(5, LONG_AGO))

    def stamps() -> list[tuple[int, int, int]]:
        found = [path.stat() for path in (root / "a", root)]
        return [(one.st_atime_ns if n == 0 else 0, one.st_mtime_ns, one.st_ctime_ns) for n, one in enumerate(found)]

    before = stamps()
    with opened(root) as workspace:
        assert changed_by(workspace, lambda: None) == []
    assert stamps() == before


@pytest.mark.parametrize("at", [None, 0, 10, 60, -1])
def test_without_its_cache_or_with_a_damaged_one_a_workspace_finds_the_same(root: Path, at: int | None) -> None:
    for name in ("a", "caf\udce9"):
        (root / name).write_text(name.encode("utf-8", "surrogateescape").hex())
    opened(root).close()
    [cache] = (root.parent / "store").rglob("stat-cache")
    data = bytearray(cache.read_bytes())
    if at is None:
        cache.unlink()
    else:
        data[at] ^= 4
        cache.write_bytes(data)
    (root / "a").write_text("changed")
    with opened(root) as workspace:
        assert [(entry.kind, entry.paths) for entry in workspace.log()][:-1] == [("external", ("a",))]


# What is left out


def test_what_cannot_be_taken_in_is_reported(root: Path) -> None:
    (root / "large").write_bytes(b"x" * 1001)
    (root / "fits").write_bytes(b"x" * 1000)
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    with opened(root, max_file_bytes=1000) as workspace:
        assert workspace.left_out == {"large": "too large", "fifo": "special file", "socket": "special file"}
        assert workspace.log()[-1].paths == ("fits",)


def test_files_beyond_the_number_are_reported_each(root: Path) -> None:
    for number in range(8):
        (root / f"f{number}").touch()
    with opened(root, max_files=5) as workspace:
        assert [*workspace.left_out.values()] == ["too many files"] * 3


def test_holes_are_taken_in_up_to_a_sum_a_scan(root: Path) -> None:
    """They cost a program nothing to make, and a scan as much as other bytes to read."""
    mib = 1 << 20
    for name, size in (("a", 3 * mib), ("b", 3 * mib), ("small", mib - 1)):
        (root / name).touch()
        os.truncate(root / name, size)
    (root / "data").write_bytes(b"x" * 4 * mib)
    if (root / "a").stat().st_blocks:
        pytest.skip("this filesystem has no holes")
    with opened(root, max_file_bytes=4 * mib) as workspace:
        assert [*workspace.left_out.values()] == ["too large"]
        assert workspace.left_out.keys() < {"a", "b"}


def test_what_may_not_be_read_is_reported_and_the_rest_is_taken_in(root: Path) -> None:
    for path in ("secret", "dir/inside", "open", "listed/inside", "above/below/inside"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")
    modes = {"secret": 0, "dir": 0, "listed": 0o444, "above": 0o444}
    for path, mode in modes.items():
        (root / path).chmod(mode)

    def look() -> None:
        with opened(root) as workspace:
            assert workspace.left_out == dict.fromkeys(modes, "unreadable")
            assert workspace.log()[-1].paths == ("open",)

    as_nobody(look, root.parent)
    for path in modes:
        (root / path).chmod(0o700)


def test_what_is_too_deep_is_reported_and_what_is_not_is_found(root: Path) -> None:
    descriptor = deep(root, MAX_DEPTH - 2)
    with opened(root) as workspace:
        assert workspace.left_out == {}
        time.sleep(0.05)  # until the scan trusts what it knows of the directories
        inside = "/".join(["d"] * (MAX_DEPTH - 2))
        made = changed_by(workspace, lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor)))
        assert made == [f"{inside}/new"]
        for name in ("d", "d/d", "d/d/d"):
            os.mkdir(name, dir_fd=descriptor)
        assert changed_by(workspace, lambda: None) == []
        assert workspace.left_out == {f"{inside}/d/d": "too deep"}
    os.close(descriptor)
    shutil.rmtree(root / "d")


# Links


def test_a_directory_exchanged_for_a_link_while_scanning_is_never_followed(root: Path) -> None:
    (outside := root.parent / "outside").mkdir()
    (outside / "secret").write_text("secret")
    (root / "d").mkdir()
    (root / "d/a").touch()
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            (root / "d").rename(root / "away")
            (root / "d").symlink_to(outside)
            (root / "d").unlink()
            (root / "away").rename(root / "d")

    with opened(root) as workspace:
        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(50):
                assert not any("secret" in path for path in changed_by(workspace, lambda: None))
        finally:
            stop.set()
            thread.join()
        assert not any("secret" in path for entry in workspace.log() for path in entry.paths)


# All of it


@settings(max_examples=amount(prove=1000, test=20))
@given(st.lists(st.tuples(st.sampled_from(["write", "remove", "move", "exchange", "wait"]), st.randoms()), max_size=12))
def test_what_earlier_scans_knew_never_hides_what_somebody_changed(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, random.Random]]
) -> None:
    """A rollback brings back what the scan at the call's beginning took in: all that is there, if that was seen."""
    top = tmp_path_factory.mktemp("scans")
    root = top / "root"
    for path in ("a/x", "a/b/x", "c/x", "c/d/x"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    with opened(root) as workspace:
        for number, (move, pick) in enumerate(moves):
            disturb(root, number, move, pick)
            before = shape(root)
            with held_call(workspace.filesystem, opaque=True) as call:
                emptied(root)
                call.rollback()
            assert shape(root) == before
    shutil.rmtree(top)


def disturb(root: Path, number: int, move: str, pick: random.Random) -> None:
    there = [root, *sorted(root.rglob("*"))]
    one, other = pick.choice(there), pick.choice(there)
    folder = one if one.is_dir() else one.parent
    times = [(path, path.lstat().st_mtime_ns) for path in {root, folder, one.parent, other.parent} - {root.parent}]
    with suppress(OSError):  # a directory goes not into itself
        match move:
            case "write":
                (folder / f"new{number}").write_text(move)
            case "remove" if one != root:
                shutil.rmtree(one) if one.is_dir() else one.unlink()
            case "move":
                other.rename(folder / f"moved{number}")
            case "exchange":
                one.rename(root / "between")
                other.rename(one)
                (root / "between").rename(other)
            case _:
                time.sleep(0.03)
    for path, mtime in times:
        if pick.random() < 0.5 and path.exists():
            os.utime(path, ns=(mtime, mtime))


names = st.sampled_from(
    ["a", "b", ".git", ".GIT ", "git~1", "ünï", "caf\udce9", "new\nline", "back\\slash", "~rf~", " b ", "x" * 255]
)
bodies = st.binary(max_size=40) | st.sampled_from([b"a\r\nb\r\n", b"", b"\0" * 300])
modes = st.sampled_from([0o644, 0o755, 0o600, 0o4711, 0o400, 0o666])
times = st.sampled_from([0, 1, LONG_AGO, 4_000_000_000_123_456_789])
leaves = st.one_of(
    st.tuples(st.just("file"), bodies, modes, times),
    st.tuples(st.just("link"), st.sampled_from([b"a", b"../..", b"/etc/passwd", b"caf\xe9"]), st.just(0), times),
    st.tuples(st.just("hard"), st.integers(0, 10), st.just(0), times),
)
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=4),
    lambda below: st.dictionaries(names, leaves | below, max_size=4),
    max_leaves=12,
)


def plant(folder: Path, tree: Mapping[str, object], files: list[Path], pick: random.Random) -> None:
    for name, what in tree.items():
        path = folder / name
        match what:
            case dict():
                path.mkdir()
                plant(path, what, files, pick)
                path.chmod(pick.choice([0o755, 0o700, 0o2775]))
                os.utime(path, ns=(LONG_AGO, LONG_AGO))
            case ("hard", int(which), _, _) if files:
                os.link(files[which % len(files)], path)
            case ("link", bytes(target), _, int(mtime)):
                os.symlink(target, os.fsencode(path))
                os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
            case (_, body, int(mode), int(mtime)):
                path.write_bytes(body if isinstance(body, bytes) else b"no link")
                path.chmod(mode or 0o644)
                files.append(path)
                os.utime(path, ns=(mtime, mtime))
            case _:
                raise AssertionError(what)


def emptied(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@settings(max_examples=amount(prove=1000, test=30))
@given(trees, trees, st.randoms(use_true_random=False))
def test_a_tree_goes_into_the_store_and_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, object], other: dict[str, object], pick: random.Random
) -> None:
    root = tmp_path_factory.mktemp("round") / "root"
    root.mkdir()
    plant(root, one, [], pick)
    before = shape(root)
    with opened(root) as workspace:
        for end in ("rollback", "commit"):
            with held_call(workspace.filesystem, opaque=True) as call:
                emptied(root)
                plant(root, other, [], pick)
                after = lasting(shape(root))
                getattr(call, end)()
            assert end == "commit" or shape(root) == before
    with opened(root) as workspace:
        assert "external" not in [entry.kind for entry in workspace.log()]
        workspace.restore(0)
        assert lasting(shape(root)) == lasting(before)
        if workspace.steps():
            workspace.undo()
            assert lasting(shape(root)) == after
    shutil.rmtree(root.parent)
