"""A workspace on disk with things in it that nobody expects."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import OLD_KERNEL, on_each_kernel

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.txt").write_text("needle\n")
    return tmp_path / "root"


@on_each_kernel
def fs(root: Path, request: pytest.FixtureRequest) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=root.parent / "store", can=request.param) as filesystem:
        yield filesystem


def test_pipes_and_sockets_are_listed_and_never_opened(root: Path, fs: HostFilesystem) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{os.open(root, os.O_PATH)}/socket")
    entries = {entry.name: (entry.is_file, entry.is_directory) for entry in fs.list()}
    assert entries == {"a.txt": (True, False), "pipe": (False, False), "socket": (False, False)}
    assert [match.path for match in fs.grep("needle")] == ["a.txt"]
    assert [(match.path, match.is_file) for match in fs.glob("[ps]*")] == [("pipe", False), ("socket", False)]
    for path in ("pipe", "socket"):
        for use in (fs.read, fs.read_bytes, fs.content_hash, lambda path: fs.write(path, "x")):
            with pytest.raises(PermissionError):
                use(path)
        with held_call(fs) as call:
            fs.for_call(call).move(path, f"moved/{path}")
            fs.for_call(call).delete("moved", recursive=True)
            call.rollback()
        assert fs.exists(path)


@pytest.mark.parametrize("spelling", ["root", "other/../root", "link", "/proc/self/cwd/link"])
def test_a_root_may_be_relative_or_a_link(root: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    os.symlink("root", "link")
    os.mkdir("other")
    with HostFilesystem(spelling, store="store") as fs:
        monkeypatch.chdir("/")
        fs.write("b.txt", "x")
        assert fs.root == str(root)
    assert (root / "b.txt").read_text() == "x"


def test_links_that_leave_the_root_are_not_even_looked_through(root: Path, fs: HostFilesystem) -> None:
    (root.parent / "secret").mkdir()
    (root.parent / "secret/needle.txt").write_text("needle")
    for name, target in (("up", "../secret"), ("absolute", str(root.parent / "secret")), ("inside", str(root))):
        os.symlink(target, root / name)
        for path in (name, f"{name}/needle.txt"):
            for use in (fs.read, fs.list, fs.stat, fs.content_hash, lambda path: fs.write(path, "x")):
                with pytest.raises(PermissionError):
                    use(path)
    assert [match.path for match in fs.grep("needle")] == ["a.txt"]
    assert [match.path for match in fs.glob("**/*.txt")] == ["a.txt"]
    assert [(entry.name, entry.size_bytes) for entry in fs.list() if entry.is_symlink] == [
        ("absolute", 0),
        ("inside", 0),
        ("up", 0),
    ]


def test_a_file_that_vanishes_or_cannot_be_read_spoils_no_search(root: Path, fs: HostFilesystem) -> None:
    for name in ("b", "c"):
        (root / name).mkdir()
        (root / name / "x.txt").write_text("needle")
    os.symlink("a.txt/x", root / "through a file")
    assert [match.path for match in fs.grep("needle")] == ["a.txt", "b/x.txt", "c/x.txt"]
    assert len(fs.list()) == 4


def answer(fs: HostFilesystem, use: str, path: str) -> object:
    try:
        return getattr(fs, use)(path)
    except (OSError, ValueError) as error:
        return repr(error)


def test_an_old_kernel_gives_the_same_answers(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/e/f").write_text("f")
    os.symlink("d/e", root / "way")
    os.symlink("way/../e/f", root / "d/odd")
    os.symlink("a.txt/..", root / "no way")
    deep = "/".join(["n" * 200] * 12)
    (root / deep).mkdir(parents=True)
    found = list[list[object]]()
    for can in (None, OLD_KERNEL):
        with HostFilesystem(root, store=root.parent / "store", can=can) as fs:
            found.append(
                [
                    answer(fs, use, path)
                    for path in (
                        "",
                        "a.txt",
                        "d",
                        "way",
                        "way/f",
                        "d/odd",
                        "no way",
                        "a.txt/x",
                        "x/y",
                        deep,
                        f"{deep}/x",
                    )
                    for use in ("stat", "readlink", "list", "read")
                ]
            )
    assert found[0] == found[1]


def test_a_name_that_only_looks_reserved_is_a_name(root: Path, fs: HostFilesystem) -> None:
    for path in (".ringfence-hold-", ".ringfence-hold-x", f"d/.ringfence-hold-{'0' * 16}", ".ringfence"):
        fs.write(path, "x")
        assert fs.read(path).content == "x"
    fs.write(f".ringfence-hold-{'0' * 16}", "x")
    (hold,) = root.glob(".ringfence-hold-????????????????/")
    with pytest.raises(PermissionError):
        fs.write(hold.name, "x")


def test_what_is_made_where_something_was_moved_away_from_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as fs, held_call(fs) as call:
        files = fs.for_call(call)
        files.write("d/deep/a", "a")
        files.move("d", "e")
        files.write("d/deep/b", "b")
        assert [change.path for change in call.changed()] == ["d", "d/deep", "d/deep/b", "e", "e/deep", "e/deep/a"]
        call.rollback()
        assert fs.list() == []


def test_a_replaced_file_does_not_take_on_the_default_acl_of_its_directory(root: Path, fs: HostFilesystem) -> None:
    entries = [(0x01, 7, -1), (0x02, 7, 12345), (0x04, 7, -1), (0x10, 7, -1), (0x20, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(root, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    (root / "a.txt").chmod(0o600)
    (root / "new.txt").write_text("")
    assert "system.posix_acl_access" in os.listxattr(root / "new.txt")
    fs.write("a.txt", "changed")
    fs.write("new.txt", "changed")
    assert os.listxattr(root / "a.txt") == []
    assert (root / "a.txt").stat().st_mode & 0o7777 == 0o600
    assert os.getxattr(root / "new.txt", "system.posix_acl_access").startswith(struct.pack("<I", 2))


def test_calls_that_remove_files_leave_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "root/d").mkdir(parents=True)
    with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as fs:
        counts: list[int] = []
        for number in range(4):
            fs.write("d/a.txt", "a")
            with held_call(fs, call_id=f"call-{number}") as held:
                fs.for_call(held).delete("d/a.txt")
                held.commit()
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[-1]
