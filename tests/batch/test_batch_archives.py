"""Archives as sources of a batch: what is in one, and that nothing of it goes elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from captured_tree import capture_tree

from ringfence_batch import BatchTask
from ringfence_batch.archives import ARCHIVES
from ringfence_batch.sources import SourceError, copy_source, pack_source, unpack_source

MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.xz": "w:xz", ".tar.bz2": "w:bz2"}


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.size = 4 if kind == tarfile.REGTYPE else 0
    info.uid = info.gid = 12345
    return info


def archive(path: Path, members: Sequence[tarfile.TarInfo], mode: str = "w") -> BatchTask:
    with tarfile.open(path, mode) as packed:  # type: ignore[call-overload]
        for info in members:
            packed.addfile(info, io.BytesIO(b"evil") if info.size else None)
    return BatchTask("a", str(path), "Mend it.", "openai:m")


@pytest.mark.parametrize("end", ARCHIVES)
def test_an_archive_of_each_kind_is_copied_without_its_one_directory(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"repo{end}"
    if end == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            zipped.writestr("repo-1.0/d/a.sh", "evil")
        task = BatchTask("a", str(path), "Mend it.", "openai:m")
    else:
        found = [
            member("repo-1.0", tarfile.DIRTYPE, mode=0o555),
            member("repo-1.0/d/a.sh", mode=0o4777),
            member("repo-1.0/d/link", tarfile.SYMTYPE, "a.sh"),
            member("repo-1.0/hard", tarfile.LNKTYPE, "repo-1.0/d/a.sh", 0o755),
        ]
        task = archive(path, found, MODES[end])
    copy_source(task, tmp_path / "copy")
    assert (tmp_path / "copy/d/a.sh").read_text() == "evil"
    if end != ".zip":
        status = (tmp_path / "copy/d/a.sh").stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_nlink) == (0o755, os.getuid(), 2)
        assert os.readlink(tmp_path / "copy/d/link") == "a.sh"


@pytest.mark.parametrize(
    "members",
    [
        [member("../outside/new")],
        [member("d/../../outside/new")],
        [member("link", tarfile.SYMTYPE, "../outside"), member("link/new")],
        [member("link", tarfile.SYMTYPE, "/etc/passwd")],
        [member("d/link", tarfile.SYMTYPE, "../../outside/file")],
        [member("hard", tarfile.LNKTYPE, "../outside/file"), member("hard")],
        [member("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [member("d", tarfile.DIRTYPE), member("d/up", tarfile.SYMTYPE, ".."), member("x", tarfile.SYMTYPE, "d/up/..")],
        [member("x", tarfile.SYMTYPE, "up/.."), member("up", tarfile.SYMTYPE, "."), member("x/outside/new")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
    ],
)
def test_an_archive_that_leads_elsewhere_is_refused_and_writes_nothing_there(
    tmp_path: Path, members: Sequence[tarfile.TarInfo]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("mine")
    place = tmp_path / "place"
    place.mkdir()
    before = capture_tree(tmp_path / "outside")
    with pytest.raises(SourceError):
        copy_source(archive(tmp_path / "bad.tar", members), place / "copy")
    assert capture_tree(tmp_path / "outside") == before
    assert list(place.iterdir()) == []


def test_an_absolute_name_is_one_in_the_archive(tmp_path: Path) -> None:
    copy_source(archive(tmp_path / "a.tar", [member("/etc/passwd"), member("b")]), tmp_path / "copy")
    assert (tmp_path / "copy/etc/passwd").read_text() == "evil"


def test_a_pack_has_links_that_lead_outside_as_the_tree_has_them(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/link").symlink_to("/nowhere")
    (tmp_path / "repo/a.txt").write_text("one\n")
    pack_source(BatchTask("a", str(tmp_path / "repo"), "Mend it.", "openai:m"), tmp_path / "pack")
    unpack_source(tmp_path / "pack", tmp_path / "copy")
    assert os.readlink(tmp_path / "copy/link") == "/nowhere"
    assert (tmp_path / "copy/a.txt").read_text() == "one\n"
