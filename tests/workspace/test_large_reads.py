"""A part of a large file on disk is read without the whole of it in memory, and is what a whole read would give."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ToolExecutor
from ringfence.filesystem.edits import line_window
from ringfence.filesystem.line_stream import stream_window
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import VfsToolsSection

LINE = b"a line of the file, 32 bytes it.\n"
LINES = 250_000
CONTENT = LINE * LINES
MOST_BYTES = 3 << 20
"""The most memory of a read. The file has 8 MB."""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HostFilesystem]:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/large.txt").write_bytes(CONTENT)
    with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as filesystem:
        yield filesystem


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_part_of_a_large_file_takes_little_memory(files: HostFilesystem, tmp_path: Path) -> None:
    (tmp_path / "root/latin.txt").write_bytes(b"caf\xe9\n" + CONTENT)
    (tmp_path / "root/large.bin").write_bytes(b"\0" + CONTENT)
    files.symlink("link.txt", "large.txt")
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="tests", key="large", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)

        def read(path: str, offset: int, encoding: str | None = None) -> Callable[[], None]:
            def work() -> None:
                arguments = {"file_path": path, "offset": offset, "limit": 1, "encoding": encoding}
                assert executor.execute("read_file", arguments).result.success

            return work

        read("large.txt", 0)()  # what is imported and built once
        for work in (
            read("large.txt", 200_000),
            read("link.txt", LINES - 1),
            read("latin.txt", 0),
            read("latin.txt", 100_000, "cp1252"),
            read("large.bin", 0),
            lambda: files.read("large.txt", offset=3, limit=1),
            lambda: files.read_bytes("large.txt", offset=5_000_000, limit=10),
            lambda: files.content_hash("large.txt"),
        ):
            assert peak_of(work) < MOST_BYTES


def test_what_was_read_of_a_large_file_counts(files: HostFilesystem) -> None:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="tests", key="large", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        read = executor.execute("read_file", {"file_path": "large.txt", "offset": 249_999, "limit": 5})
        assert "large.txt: lines 250000 to 250000 of 250,000" in read.text
        part = {"file_path": "large.txt", "content": "x"}
        assert not executor.execute("write_file", part).result.success
        assert executor.execute("rm", {"path": "large.txt"}).result.success


@pytest.mark.parametrize(("offset", "limit"), [(0, None), (0, 3), (7, 0), (249_999, 9), (250_000, 1), (5, -1)])
def test_a_window_of_a_large_file_is_that_of_its_bytes(files: HostFilesystem, offset: int, limit: int | None) -> None:
    result = files.read("large.txt", offset=offset, limit=limit)
    assert (result.content, result.limit, result.total_lines) == line_window(CONTENT, offset, limit, "utf-8", "a")
    assert files.content_hash("large.txt") == hashlib.sha256(CONTENT).hexdigest()
    most = None if limit == -1 else limit
    read = files.read_bytes("large.txt", offset=offset, limit=most)
    assert read.content == CONTENT[offset:][:most]
    assert read.size_bytes == len(CONTENT)


@given(
    st.lists(st.text("ab\u00e9\r\n", max_size=8).map(str.encode), max_size=8),
    st.integers(0, 9),
    st.sampled_from([None, -1, 0, 1, 2, 5]),
    st.sampled_from(["utf-8", "latin-1", "utf-16-le"]),
)
def test_lines_from_pieces_are_those_of_the_whole(
    pieces: list[bytes], offset: int, limit: int | None, encoding: str
) -> None:
    content = b"".join(pieces).decode().encode(encoding, "replace")
    cuts = [content[at : at + 3] for at in range(0, len(content), 3)]
    assert stream_window(cuts, offset, limit, encoding, "a") == line_window(content, offset, limit, encoding, "a")


@pytest.mark.parametrize(("offset", "limit", "encoding"), [(-1, 1, "utf-8"), (0, -2, "utf-8"), (0, 1, "none")])
def test_a_window_that_cannot_be_is_refused_as_ever(
    files: HostFilesystem, offset: int, limit: int, encoding: str
) -> None:
    with pytest.raises(ValueError):
        files.read("large.txt", offset=offset, limit=limit, encoding=encoding)
    with pytest.raises(ValueError, match="is not utf-16"):
        files.write_bytes("odd.txt", CONTENT + b"\x00")
        files.read("odd.txt", limit=1, encoding="utf-16-le")
