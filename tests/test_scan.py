from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence_sandbox.scan import scan
from ringfence_sandbox.scan.scan import MAX_DEPTH, ScanLimits, Scanner, ScanResult
from ringfence_sandbox.scan.stat_cache import StatCache, is_settled
from ringfence_sandbox.store.commit_messages import CommitInfo
from ringfence_sandbox.store.entries import Entry
from ringfence_sandbox.store.restoring import RestorePlan, plan_restore
from ringfence_sandbox.store.store import Store

NOW = datetime(2026, 11, 22, tzinfo=UTC)
LONG_AGO = 1_600_000_000_000_000_007


class Scanned:
    """A tree, its store and its cache, as the owner of both would drive them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        self.cache = StatCache()
        self.store = Store.open(folder / "store")

    def scan(self, **options: object) -> ScanResult:
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            store = self.store
            return Scanner(descriptor, store.states, store.tip, store.add_blob, self.cache, **options).scan()
        finally:
            os.close(descriptor)

    def take(self, **options: object) -> dict[str, Entry | None]:
        """Scan, and make a step of what changed."""
        found = self.scan(**options)
        if found.changes:
            prepared = self.store.prepare(found.changes, CommitInfo("step", NOW))
            self.store.publish(prepared)
            self.cache.commit = prepared.commit
        return found.changes

    def write(self, path: str, content: bytes = b"x", mode: int = 0o644) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        return file


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Scanned]:
    tree = Scanned(tmp_path)
    yield tree
    tree.store.close()


def settle(tree: Scanned) -> None:
    """Wait until nothing in the tree is so new that the cache will not trust it."""
    probe = tree.root.parent / "probe"
    while True:
        probe.write_bytes(b"")
        newest = max(os.lstat(path).st_ctime_ns for path in (tree.root, *tree.root.rglob("*")))
        if probe.stat().st_ctime_ns - newest > 25_000_000:
            return


def printed(root: Path) -> dict[bytes, tuple[object, ...]]:
    """The tree by `os.lstat` alone; the names of one file have the first of them in common."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}

    def look(path: bytes) -> None:
        status = os.lstat(os.path.join(os.fsencode(root), path))
        whole = os.path.join(os.fsencode(root), path)
        body: object = None
        if stat.S_ISREG(status.st_mode):
            with open(whole, "rb") as file:
                body = file.read(), first.setdefault(status.st_ino, path)
        elif stat.S_ISLNK(status.st_mode):
            body = os.readlink(whole)
        found[path] = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, body)
        if stat.S_ISDIR(status.st_mode):
            for name in sorted(os.listdir(whole)):
                look(os.path.join(path, name))

    look(b"")
    return found


def write_back(root: Path, plan: RestorePlan, content: Callable[[str], bytes]) -> None:
    for path in plan.removals:
        whole = root / path
        whole.rmdir() if whole.is_dir() and not whole.is_symlink() else whole.unlink()
    for path in plan.directories:
        (root / path).mkdir(0o700, exist_ok=True)
    for path, entry in plan.files:
        whole, meta = root / path, entry.meta
        whole.unlink(missing_ok=True)
        assert entry.oid is not None
        if entry.kind == "symlink":
            os.symlink(content(entry.oid), os.fsencode(whole))
        else:
            whole.write_bytes(content(entry.oid))
            whole.chmod(meta.mode)
        os.utime(whole, ns=(meta.mtime_ns, meta.mtime_ns), follow_symlinks=False)
    for group in plan.links:
        for other in group[1:]:
            (root / other).unlink()
            os.link(root / group[0], root / other, follow_symlinks=False)
    for path, entry in plan.finish:
        (root / path).chmod(entry.meta.mode)
        os.utime(root / path, ns=(entry.meta.mtime_ns, entry.meta.mtime_ns))


def restore(store: Store, root: Path, now: str | None, wanted: str) -> None:
    files = store.states.files(wanted)
    differences = [(path, new, old) for path, new, old in store.states.differences(now, wanted)]
    directories = {path: entry for path, entry in files.items() if entry.kind == "directory"}
    links = {entry.meta.link for entry in files.values() if entry.meta.link}
    plan = plan_restore(differences, directories, store.states.linked(wanted, links))
    write_back(root, plan, store.states.content)


# What a scan finds.


def test_the_first_scan_takes_in_everything_and_the_next_finds_nothing(tree: Scanned) -> None:
    tree.write("a.txt", b"a\r\n")
    tree.write(".git/HEAD", b"ref")
    tree.write("sub/.git/config", b"[core]")
    (tree.root / "empty").mkdir()
    (tree.root / "link").symlink_to("nowhere")
    assert set(tree.take()) == {
        "", "a.txt", ".git", ".git/HEAD", "sub", "sub/.git", "sub/.git/config", "empty", "link"
    }  # fmt: skip
    assert tree.scan().changes == {}
    settle(tree)
    assert tree.scan().changes == {}
    again = tree.scan()
    assert (again.changes, again.read, again.files) == ({}, 0, 4)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda root: (root / "d/a").write_bytes(b"B"), {"d/a"}),
        (lambda root: (root / "d/a").chmod(0o600), {"d/a"}),
        (lambda root: os.utime(root / "d/a", ns=(5, 5)), {"d/a"}),
        (lambda root: (root / "d/a").unlink(), {"d", "d/a"}),
        (lambda root: (root / "d/a").rename(root / "d/b"), {"d", "d/a", "d/b"}),
        (lambda root: shutil.rmtree(root / "d"), {"", "d"}),
        (lambda root: (root / "d").rename(root / "e"), {"", "d", "e", "e/a", "e/sub", "e/sub/c"}),
        (lambda root: (root / "d").chmod(0o700), {"d"}),
        (lambda root: (root / "d/sub/c").rename(root / "d/a"), {"d", "d/a", "d/sub", "d/sub/c"}),
        (lambda root: [(root / "d/a").unlink(), (root / "d/a").mkdir()], {"d", "d/a"}),
        (lambda root: [(root / "d/a").unlink(), (root / "d/a").symlink_to("x")], {"d", "d/a"}),
        (lambda root: [shutil.rmtree(root / "d"), (root / "d").write_bytes(b"")], {"", "d"}),
        (lambda root: [shutil.rmtree(root / "d"), (root / "d").symlink_to("/etc")], {"", "d"}),
        (lambda root: os.link(root / "d/a", root / "d/b"), {"d", "d/a", "d/b"}),
        (lambda root: None, set[str]()),
    ],
)
@pytest.mark.parametrize("settled", [True, False])
def test_a_scan_finds_exactly_what_changed(
    tree: Scanned, change: Callable[[Path], object], found: set[str], settled: bool
) -> None:
    tree.write("d/a", b"A")
    tree.write("d/sub/c", b"C")
    tree.write("other/same", b"S")
    if settled:
        settle(tree)
    tree.take()
    change(tree.root)
    assert set(tree.take()) == found
    assert tree.store.tip is not None
    names = {str(path.relative_to(tree.root)) for path in tree.root.rglob("*")}
    assert set(tree.store.states.files(tree.store.tip)) == {"", *names}
    assert tree.scan().changes == {}


def test_a_restored_group_of_hard_links_is_no_change(tree: Scanned) -> None:
    file = tree.write("a", b"A")
    os.link(file, tree.root / "b")
    tree.write("c", b"A")
    tree.take()
    times = {name: (tree.root / name).stat().st_mtime_ns for name in ("a", "b", "")}
    for name in ("a", "b"):
        (tree.root / name).unlink()
    tree.write("keeps the inode", b"")
    tree.write("a", b"A")
    os.link(tree.root / "a", tree.root / "b")
    (tree.root / "keeps the inode").unlink()
    for name in ("a", ""):
        os.utime(tree.root / name, ns=(times[name], times[name]))
    assert tree.scan().changes == {}


def test_a_group_of_hard_links_that_comes_apart_or_grows_is_a_change(tree: Scanned) -> None:
    for name in ("b", "c"):
        os.link(tree.write("a", b"A") if name == "b" else tree.root / "a", tree.root / name)
    tree.take()
    content, time = (tree.root / "a").read_bytes(), (tree.root / "a").stat().st_mtime_ns
    (tree.root / "a").unlink()
    tree.write("a", content)
    os.utime(tree.root / "a", ns=(time, time))
    assert set(tree.take()) == {"", "a"}
    (tree.root / "a").unlink()
    os.link(tree.root / "b", tree.root / "a")
    assert "a" in tree.take()


def test_holes_are_taken_in_up_to_a_sum_a_scan(tree: Scanned) -> None:
    """They cost a program nothing to make, and a scan as much as other bytes to read."""
    mib = 1 << 20
    for name, size in (("a", 3 * mib), ("b", 3 * mib), ("small", mib - 1)):
        os.truncate(tree.write(name, b"x"), size)
    tree.write("data", b"x" * 4 * mib)
    if (tree.root / "a").stat().st_blocks * 512 >= mib:
        pytest.skip("this filesystem has no holes")
    limits = ScanLimits(max_file_bytes=4 * mib)
    excluded = tree.scan(limits=limits).excluded
    assert excluded in ({"a": "too large"}, {"b": "too large"})
    time.sleep(0.02)  # what was written just now is read again
    tree.take(limits=limits)
    assert tree.scan(limits=limits).excluded == {}


def test_what_cannot_be_taken_in_is_reported(tree: Scanned) -> None:
    tree.write("large", b"x" * 1001)
    os.truncate(tree.write("fits"), 1000)
    os.mkfifo(tree.root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tree.root)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
    found = tree.scan(limits=ScanLimits(max_file_bytes=1000))
    assert found.excluded == {"large": "too large", "fifo": "special file", "socket": "special file"}
    assert set(found.changes) == {"", "fits"}


def test_a_file_that_grows_beyond_the_limit_is_gone_from_the_state_and_reported(tree: Scanned) -> None:
    tree.write("a", b"small")
    tree.take(limits=ScanLimits(max_file_bytes=10))
    tree.write("a", b"no longer small")
    found = tree.scan(limits=ScanLimits(max_file_bytes=10))
    assert (found.changes, found.excluded) == ({"a": None}, {"a": "too large"})


def test_files_beyond_the_number_are_reported_each(tree: Scanned) -> None:
    for n in range(8):
        tree.write(f"f{n}")
    settle(tree)
    tree.take()
    found = tree.scan(limits=ScanLimits(max_files=5))
    assert set(found.excluded.values()) == {"too many files"}
    assert len(found.excluded) == 3
    assert found.changes == dict.fromkeys(found.excluded)


@contextmanager
def without_privileges() -> Iterator[None]:
    """root can read everything; anybody else is as good as nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_reported_and_the_rest_is_taken_in(tree: Scanned) -> None:
    tree.write("secret", mode=0)
    tree.write("dir/inside")
    tree.write("open", b"for everybody")
    tree.write("listed/inside")
    (tree.root / "dir").chmod(0)
    tree.write("above/below/inside")
    for path in ("listed", "above"):
        (tree.root / path).chmod(0o444)
    descriptor = os.open(tree.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with without_privileges():
            found = Scanner(descriptor, tree.store.states, None, tree.store.add_blob, tree.cache).scan()
    finally:
        os.close(descriptor)
        (tree.root / "dir").chmod(0o700)
    assert found.excluded == dict.fromkeys(("secret", "dir", "listed", "above"), "unreadable")
    assert set(found.changes) == {"", "open"}


def test_what_changed_far_below_directories_that_did_not_is_found(tree: Scanned) -> None:
    deep = "/".join(["d"] * (MAX_DEPTH - 2))
    descriptor = os.open(tree.root, os.O_RDONLY)
    for _ in range(MAX_DEPTH - 2):  # a path of its length is more than a system call takes
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    time.sleep(0.05)
    tree.take()
    os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)
    assert tree.take().keys() == {deep, f"{deep}/new"}


def test_what_is_too_deep_is_reported(tree: Scanned) -> None:
    descriptor = os.open(tree.root, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 3):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    assert tree.scan().excluded == {"/".join(["d"] * MAX_DEPTH): "too deep"}
    tree.take()
    assert tree.store.tip is not None
    assert len(tree.store.states.files(tree.store.tip)) == MAX_DEPTH
    assert len(tree.store.states.changes(None, tree.store.tip)) == MAX_DEPTH
    shutil.rmtree(tree.root / "d")


def test_nothing_is_read_through_a_link(tree: Scanned, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    (tree.root / "d").symlink_to(tmp_path / "outside")
    (tree.root / "f").symlink_to(tmp_path / "outside" / "secret")
    found = tree.scan()
    assert {path: entry.kind for path, entry in found.changes.items() if entry} == {
        "": "directory",
        "d": "symlink",
        "f": "symlink",
    }
    assert {tree.store.states.content(entry.oid) for entry in found.changes.values() if entry and entry.oid} == {
        os.fsencode(tmp_path / "outside"),
        os.fsencode(tmp_path / "outside" / "secret"),
    }


def test_a_directory_exchanged_for_a_link_while_scanning_is_never_followed(tree: Scanned, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    tree.write("d/a")
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            (tree.root / "d").rename(tree.root / "away")
            (tree.root / "d").symlink_to(outside)
            (tree.root / "d").unlink()
            (tree.root / "away").rename(tree.root / "d")

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(100):
            found = tree.scan()
            assert not any("secret" in path for path in found.changes)
    finally:
        stop.set()
        thread.join()


def test_hidden_names_of_the_root_are_not_there(tree: Scanned) -> None:
    tree.write(".hold-1/a")
    tree.write("d/.hold-1")
    found = tree.scan(hidden=lambda name: name.startswith(".hold-"))
    assert set(found.changes) == {"", "d", "d/.hold-1"}


def test_looking_leaves_no_trace(tree: Scanned) -> None:
    file = tree.write("a")
    os.utime(file, ns=(5, LONG_AGO))
    before = file.stat(), tree.root.stat()
    tree.scan()
    after = file.stat(), tree.root.stat()
    assert [(s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns) for s in (before[0], after[0])] == [
        (5, LONG_AGO, before[0].st_ctime_ns)
    ] * 2
    assert (before[1].st_mtime_ns, before[1].st_ctime_ns) == (after[1].st_mtime_ns, after[1].st_ctime_ns)


# The cache.


@pytest.mark.parametrize(
    ("ctime", "clock", "settled"),
    [
        (1_000_000_007, 1_021_000_007, True),
        (1_000_000_007, 1_020_000_007, False),
        (1_000_000_007, 1_000_000_007, False),
        (1_000_000_007, 999_000_007, False),
        (4_000_000_000, 5_999_999_999, False),
        (4_000_000_000, 6_000_000_001, True),
    ],
)
def test_only_a_file_left_alone_for_longer_than_a_tick_is_trusted(ctime: int, clock: int, settled: bool) -> None:
    status = os.stat_result((0,) * 10, {"st_ctime_ns": ctime})
    assert is_settled(status, clock) is settled


def test_the_same_size_and_the_old_mtime_do_not_hide_a_change(tree: Scanned) -> None:
    file = tree.write("a", b"0000")
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    tree.take()
    for n in range(1, 200):
        with open(file, "r+b") as opened:
            opened.write(b"%04d" % n)
        os.utime(file, ns=(LONG_AGO, LONG_AGO))
        assert set(tree.take()) == {"a"}, n


def test_a_stamp_from_within_the_tick_is_not_believed(tree: Scanned) -> None:
    # As on a kernel whose clock has not moved between the scan and the edit: the file has the stamp of the old bytes.
    file = tree.write("a", b"old")
    tree.take()
    ctime = file.stat().st_ctime_ns
    for clock, believed in ((ctime + 19_000_000, False), (ctime + 21_000_000, True)):
        with open(file, "r+b") as opened:
            opened.write(b"new")
        tree.cache.set("a", file.stat(), clock - ctime + file.stat().st_ctime_ns)
        assert ("a" in tree.scan().changes) is not believed
        tree.cache.commit = tree.store.tip


def test_a_cache_that_stands_for_no_step_is_not_believed(tree: Scanned) -> None:
    tree.write("a")
    settle(tree)
    tree.scan()
    assert tree.cache.commit is None
    # The changes of that scan never became a step.
    assert set(tree.scan().changes) == {"", "a"}


def test_a_cache_follows_the_history(tree: Scanned) -> None:
    for path in ("a", "d/b", "d/c"):
        tree.write(path)
    settle(tree)
    tree.take()
    # A step that the disk does not have: the scan finds what undoes it, and reads nothing else.
    prepared = tree.store.prepare({"d/b": None}, CommitInfo("step", NOW))
    tree.store.publish(prepared)
    found = tree.scan()
    assert (set(found.changes), found.read) == ({"d/b"}, 1)


def test_a_cache_of_a_commit_that_is_gone_starts_anew(tree: Scanned) -> None:
    tree.write("a")
    settle(tree)
    tree.take()
    assert tree.store.tip is not None
    tree.cache.commit = "12" * 20
    found = tree.scan()
    assert (found.changes, found.read) == ({}, 1)


def test_a_saved_cache_is_as_good(tree: Scanned, tmp_path: Path) -> None:
    for path in ("a", "d/caf\udce9", "d/e/f\n"):
        tree.write(path)
    settle(tree)
    tree.take()
    tree.cache.save(tmp_path / "cache")
    tree.cache = StatCache.load(tmp_path / "cache")
    again = tree.scan()
    assert (again.changes, again.read) == ({}, 0)


def test_a_saved_cache_knows_what_is_not_of_a_time_beyond_it(tree: Scanned, tmp_path: Path) -> None:
    for path, year in (("a", 2026), ("d/b", 2026), ("d/late", 2300)):
        os.utime(tree.write(path), (0, (year - 1970) * 31_556_952))
    os.utime(tree.root / "d", (0, 330 * 31_556_952))
    settle(tree)
    tree.take()
    tree.cache.save(tmp_path / "cache")
    tree.cache = StatCache.load(tmp_path / "cache")
    again = tree.scan()
    assert (again.changes, again.read) == ({}, 1)


@pytest.mark.parametrize("cut", [0, 10, 60, 120, -1])
def test_a_damaged_cache_is_made_anew(tree: Scanned, tmp_path: Path, cut: int) -> None:
    tree.write("a")
    settle(tree)
    tree.take()
    tree.cache.save(tmp_path / "cache")
    data = bytearray((tmp_path / "cache").read_bytes())
    flipped = data.copy()
    flipped[cut] ^= 4
    for damaged in (data[:cut], flipped):
        (tmp_path / "cache").write_bytes(damaged)
        tree.cache = StatCache.load(tmp_path / "cache")
        assert tree.cache.commit is None
        again = tree.scan()
        assert (again.changes, again.read) == ({}, 1)
    assert StatCache.load(tmp_path / "nowhere").commit is None


def test_a_forgotten_path_is_read_again_with_all_below(tree: Scanned) -> None:
    for path in ("d/a", "d/e/b", "dd/c"):
        tree.write(path)
    settle(tree)
    tree.take()
    tree.cache.forget("d")
    again = tree.scan()
    assert (again.changes, again.read) == ({}, 2)


def test_a_rescan_reads_nothing_of_a_directory_that_stayed(tree: Scanned) -> None:
    for n in range(50):
        tree.write(f"d{n}/f")
    settle(tree)
    tree.take()
    tree.store.close()
    tree.store = Store.open(tree.store.folder)
    tree.write("d7/f", b"changed")
    assert set(tree.scan().changes) == {"d7/f"}
    assert tree.store.tip is not None
    root = tree.store.states.root(tree.store.tip)
    assert set(root.loaded) == {b"d7"}


# Listings.


def listed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of the directories that are listed from now on."""
    found: list[int] = []
    plain = os.scandir

    def scandir(descriptor: int) -> object:
        found.append(os.fstat(descriptor).st_ino)
        return plain(descriptor)

    monkeypatch.setattr("ringfence_sandbox.scan.scan.os.scandir", scandir)
    return found


def test_only_a_directory_in_which_a_name_came_or_went_is_listed_again(
    tree: Scanned, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("a/1", "a/2", "b/c/1", "b/c/2"):
        tree.write(path)
    settle(tree)
    tree.take()
    inodes = listed(monkeypatch)
    tree.write("a/1", b"changed")
    assert set(tree.take()) == {"a/1"}
    assert inodes == []
    tree.write("b/c/3")
    (tree.root / "b/c/1").unlink()
    os.utime(tree.root / "b/c", ns=(LONG_AGO, LONG_AGO))
    assert set(tree.take()) == {"b/c", "b/c/1", "b/c/3"}
    assert inodes == [os.stat(tree.root / "b/c").st_ino]


def test_a_name_may_be_hidden_from_one_scan_and_not_from_the_next(tree: Scanned) -> None:
    tree.write("kept/a")
    tree.write("b")
    settle(tree)
    assert set(tree.take(hidden=lambda name: name == "kept")) == {"", "b"}
    assert set(tree.take()) == {"kept", "kept/a"}


def test_a_directory_that_was_listed_within_the_tick_of_its_change_is_listed_again(
    tree: Scanned, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write("a/1")
    tree.take()
    inodes = listed(monkeypatch)
    assert tree.take() == {}
    assert set(inodes) == {os.stat(tree.root).st_ino, os.stat(tree.root / "a").st_ino}


def test_where_directories_may_keep_their_times_names_that_come_and_go_are_found(
    tree: Scanned, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse = 0x65735546
    stamp_of = scan.stamp_of

    def stamp(status: os.stat_result) -> tuple[int, int, int, int]:
        inode, *_ = found = stamp_of(status)
        return (inode, 0, 0, 0) if stat.S_ISDIR(status.st_mode) else found

    monkeypatch.setattr(scan, "stamp_of", stamp)
    monkeypatch.setattr(scan, "filesystem_type", lambda descriptor: fuse)
    for path in ("a/1", "a/2", "b/1"):
        tree.write(path)
    settle(tree)
    tree.take()
    before = os.stat(tree.root / "a")
    (tree.root / "a/1").unlink()
    tree.write("b/2")
    os.utime(tree.root / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    found = set(tree.take())
    assert found >= {"a/1", "b/2"}
    assert "a/2" not in found


def test_where_a_listing_has_no_kinds_what_may_not_be_searched_is_left_out_too(
    tree: Scanned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.scandir

    @dataclass
    class Entry:
        name: str
        within: int

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            assert not follow_symlinks
            return stat.S_ISDIR(os.lstat(self.name, dir_fd=self.within).st_mode)

    @contextmanager
    def scandir(descriptor: int) -> Iterator[list[Entry]]:
        with plain(descriptor) as found:
            yield [Entry(entry.name, descriptor) for entry in found]

    monkeypatch.setattr("ringfence_sandbox.scan.scan.os.scandir", scandir)
    tree.write("listed/inside")
    tree.write("open")
    (tree.root / "listed").chmod(0o444)
    descriptor = os.open(tree.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with without_privileges():
            found = Scanner(descriptor, tree.store.states, None, tree.store.add_blob, tree.cache).scan()
    finally:
        os.close(descriptor)
    assert (found.excluded, set(found.changes)) == ({"listed": "unreadable"}, {"", "open"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["write", "remove", "move", "exchange", "wait"]), st.randoms()), max_size=12))
def test_what_a_scan_knew_never_hides_a_change(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, random.Random]]
) -> None:
    tree = Scanned(tmp_path_factory.mktemp("listings"))
    try:
        for path in ("a/x", "a/b/x", "c/x", "c/d/x"):
            tree.write(path)
        settle(tree)
        tree.take()
        for turn, (move, pick) in enumerate(moves):
            there = sorted(tree.root.rglob("*"))
            one, other = (pick.choice(there), pick.choice(there)) if there else (tree.root, tree.root)
            folder = one if one.is_dir() else one.parent
            times = [(path, os.lstat(path).st_mtime_ns) for path in {tree.root, folder, one.parent, other.parent}]
            if move == "write":
                new = folder / f"new{turn}"
                new.mkdir() if pick.random() < 0.2 else new.touch()
            elif move == "remove" and there:
                shutil.rmtree(one) if one.is_dir() else one.unlink()
            elif move == "move" and there and other not in {folder, *folder.parents}:
                other.rename(folder / f"moved{turn}")
            elif move == "exchange" and one not in {other, *other.parents} and other not in one.parents and there:
                one.rename(tree.root / "between")
                other.rename(one)
                (tree.root / "between").rename(other)
            elif move == "wait":
                settle(tree)
            for path, mtime in times:
                if pick.random() < 0.5 and path.exists():
                    os.utime(path, ns=(mtime, mtime))
            tree.take()
            known, tree.cache = tree.cache, StatCache()
            assert tree.scan().changes == {}
            tree.cache = known
    finally:
        tree.store.close()
        shutil.rmtree(tree.root.parent)


# All of it.


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


def plant(folder: Path, shape: Mapping[str, object], files: list[Path], pick: random.Random) -> None:
    for name, what in shape.items():
        path = folder / name
        if isinstance(what, dict):
            path.mkdir()
            plant(path, what, files, pick)
            path.chmod(pick.choice([0o755, 0o700, 0o2775]))
            os.utime(path, ns=(LONG_AGO, LONG_AGO))
            continue
        kind, body, mode, time = what
        if kind == "link":
            os.symlink(body, os.fsencode(path))
        elif kind == "hard" and files:
            os.link(files[body % len(files)], path)
            continue
        else:
            path.write_bytes(body if isinstance(body, bytes) else b"no link")
            path.chmod(mode or 0o644)
            files.append(path)
        os.utime(path, ns=(time, time), follow_symlinks=False)


def emptied(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@settings(max_examples=80, deadline=None)
@given(trees, trees, st.randoms(use_true_random=False))
def test_a_tree_goes_into_the_store_and_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    one: dict[str, object],
    other: dict[str, object],
    pick: random.Random,
) -> None:
    tree = Scanned(tmp_path_factory.mktemp("round"))
    try:
        plant(tree.root, one, [], pick)
        before = printed(tree.root)
        tree.take()
        first = tree.store.tip
        assert first is not None
        emptied(tree.root)
        plant(tree.root, other, [], pick)
        between = printed(tree.root)
        tree.take()
        second = tree.store.tip
        assert second is not None
        tree.store.close()
        tree.store = Store.open(tree.store.folder)
        restore(tree.store, tree.root, second, first)
        assert printed(tree.root) == before
        restore(tree.store, tree.root, first, second)
        assert printed(tree.root) == between
        assert tree.scan().changes == {}
        emptied(tree.root)
        restore(tree.store, tree.root, None, first)
        assert printed(tree.root) == before
    finally:
        tree.store.close()
        shutil.rmtree(tree.root.parent)
