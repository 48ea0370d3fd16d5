from __future__ import annotations

import gc
from datetime import UTC
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from ringfence.adapters import ToolExecutor
from ringfence.errors import CallEndedError
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Session
from ringfence_tools import SetupPlan, WorkspaceFileSystem

fsspec.register_implementation("ringfence", WorkspaceFileSystem, clobber=True)


@pytest.fixture
def files() -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    filesystem.write("data.csv", "x,y\n1,2\n3,4\n")
    filesystem.write("src/a.py", "a = 1\n")
    filesystem.write("src/deep/b.py", "b = 2\n")
    filesystem.mkdir("empty")
    return filesystem


@pytest.fixture
def view(files: InMemoryFilesystem) -> Any:
    return fsspec.filesystem("ringfence", filesystem=files)


# -- other people's programs


def test_pandas_reads_and_writes_files_of_a_workspace(files: InMemoryFilesystem) -> None:
    import pandas as pd  # only here: it is a third of what a process of these tests holds

    options = {"filesystem": files}
    frame = pd.read_csv("ringfence://data.csv", storage_options=options)
    assert frame["y"].sum() == 6
    frame.to_csv("ringfence://out/copy.csv", index=False, storage_options=options)
    frame.to_json("ringfence://out/frame.json.gz", storage_options=options)
    assert files.read("out/copy.csv").content == "x,y\n1,2\n3,4\n"
    assert pd.read_json("ringfence://out/frame.json.gz", storage_options=options).equals(frame)


def test_pandas_and_pyarrow_agree_on_a_parquet_file(files: InMemoryFilesystem, view: Any) -> None:
    import pandas as pd
    import pyarrow.parquet

    frame = pd.DataFrame({"n": range(100_000), "text": ["some text"] * 100_000})
    frame.to_parquet("ringfence://t.parquet", storage_options={"filesystem": files})
    with view.open("t.parquet") as file:
        assert pyarrow.parquet.read_table(file, columns=["n"]).num_rows == 100_000
    assert pd.read_parquet("ringfence://t.parquet", storage_options={"filesystem": files}).equals(frame)


def test_pyarrow_uses_a_workspace_as_its_filesystem(files: InMemoryFilesystem, view: Any) -> None:
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.fs

    files.write("tables/one.csv", "k,v\na,1\n")
    files.write("tables/two.csv", "k,v\nb,2\n")
    arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(view))
    table = pyarrow.dataset.dataset("tables", format="csv", filesystem=arrow).to_table()
    assert sorted(table["k"].to_pylist()) == ["a", "b"]
    with arrow.open_output_stream("written.bin") as stream:
        stream.write(b"bytes")
    assert files.read_bytes("written.bin").content == b"bytes"
    info = arrow.get_file_info("data.csv")
    assert (info.size, info.mtime) == (12, files.stat("data.csv").modified_at)


def test_two_workspaces_are_not_mixed_up() -> None:
    one, two = InMemoryFilesystem(), InMemoryFilesystem()
    one.write("a.txt", "one")
    two.write("a.txt", "two")
    views = [fsspec.filesystem("ringfence", filesystem=filesystem) for filesystem in (one, two, one)]
    assert [view.cat("a.txt") for view in views] == [b"one", b"two", b"one"]
    assert views[0] != views[1]
    assert views[0] == views[2]
    with pytest.raises(TypeError, match="say which workspace"):
        fsspec.filesystem("ringfence")


# -- looking


@pytest.mark.parametrize("path", ["src", "/src/", "ringfence://src", "ringfence:///src/", "./src", "src/./"])
def test_every_spelling_of_a_path_is_one_path(view: Any, path: str) -> None:
    assert view.ls(path, detail=False) == ["src/a.py", "src/deep"]
    assert view.info(path)["name"] == "src"


def test_glob_find_and_walk_work(view: Any) -> None:
    kinds = {info["name"]: (info["type"], info["size"]) for info in view.ls("")}
    assert kinds == {"data.csv": ("file", 12), "empty": ("directory", 0), "src": ("directory", 0)}
    assert view.ls("data.csv", detail=False) == ["data.csv"]
    assert view.glob("**/*.py") == ["src/a.py", "src/deep/b.py"]
    assert view.find("src") == ["src/a.py", "src/deep/b.py"]
    assert [found[0] for found in view.walk("")] == ["", "empty", "src", "src/deep"]
    assert view.du("src") == 12


def test_info_has_times_and_permission_bits(view: Any, files: InMemoryFilesystem) -> None:
    files.chmod("src/a.py", 0o755)
    info = view.info("src/a.py")
    assert (info["mode"], info["mtime"]) == (0o755, files.stat("src/a.py").modified_at)
    assert view.modified("src/a.py") == view.created("src/a.py")
    assert view.modified("src/a.py").tzinfo is UTC


def test_links_are_read_through_and_never_walked_into(view: Any, files: InMemoryFilesystem) -> None:
    files.symlink("src/up", "..")
    files.symlink("file", "data.csv")
    files.symlink("lost", "nowhere")
    kinds = {info["name"]: info["type"] for info in [*view.ls(""), *view.ls("src")]}
    assert (kinds["src/up"], kinds["file"], kinds["lost"]) == ("link", "file", "other")
    assert view.cat("file") == b"x,y\n1,2\n3,4\n"
    assert view.isdir("src/up")
    assert view.glob("**/*.csv") == ["data.csv"]
    assert (view.exists("lost"), view.lexists("lost"), view.lexists("gone")) == (False, True, False)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda view: view.ls("missing"), FileNotFoundError),
        (lambda view: view.info("missing"), FileNotFoundError),
        (lambda view: view.cat("missing"), FileNotFoundError),
        (lambda view: view.cat("src"), IsADirectoryError),
        (lambda view: view.open("missing"), FileNotFoundError),
        (lambda view: view.open("src"), IsADirectoryError),
        (lambda view: view.open("src", "wb"), IsADirectoryError),
        (lambda view: view.open("data.csv", "xb"), FileExistsError),
        (lambda view: view.open("data.csv", "r+b"), ValueError),
        (lambda view: view.cat("../outside"), PermissionError),
        (lambda view: view.pipe("../outside", b""), PermissionError),
        (lambda view: view.mkdir("src"), FileExistsError),
        (lambda view: view.mkdir("new/deep", create_parents=False), FileNotFoundError),
        (lambda view: view.makedirs("src"), FileExistsError),
        (lambda view: view.rmdir("src"), OSError),
        (lambda view: view.rmdir("data.csv"), NotADirectoryError),
        (lambda view: view.rm("missing"), FileNotFoundError),
        (lambda view: view.rm("src"), IsADirectoryError),
        (lambda view: view.rm("empty"), IsADirectoryError),
        (lambda view: view.rm_file("src"), IsADirectoryError),
        (lambda view: view.mv("missing", "x"), FileNotFoundError),
        (lambda view: view.pipe_file("data.csv", b"", mode="create"), FileExistsError),
    ],
)
def test_errors_are_the_built_in_ones(view: Any, files: InMemoryFilesystem, act: Any, error: type[Exception]) -> None:
    before = files.snapshot()
    with pytest.raises(error):
        act(view)
    assert files.changes(before) == []


# -- reading


CONTENT = bytes(range(256)) * 40


@pytest.mark.parametrize("start", [None, 0, 5, 10_239, 10_240, 99_999, -5, -99_999])
@pytest.mark.parametrize("end", [None, 0, 3, 7, 10_240, 99_999, -1, -99_999])
def test_ranges_are_as_slices(view: Any, start: int | None, end: int | None) -> None:
    view.pipe("blob", CONTENT)
    assert view.cat_file("blob", start, end) == CONTENT[start:end]


def test_a_file_can_be_read_in_parts(view: Any) -> None:
    view.pipe("blob", CONTENT)
    with view.open("blob", "rb", block_size=100) as file:
        file.seek(-10, 2)
        assert file.read() == CONTENT[-10:]
        file.seek(1000)
        assert file.read(5) == CONTENT[1000:1005]


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(view: Any, files: InMemoryFilesystem) -> None:
    view.pipe("blob", CONTENT)
    with view.open("blob", "rb", block_size=10, cache_type="none") as file:
        file.read(10)
        files.write_bytes("blob", b"x" * len(CONTENT))
        with pytest.raises(OSError, match="changed while it was being read"):
            file.read(10)


# -- writing


@pytest.mark.parametrize(("mode", "expected"), [("wb", b"new"), ("ab", b"oldnew")])
def test_a_written_file_appears_when_it_is_closed(view: Any, mode: str, expected: bytes) -> None:
    view.pipe("f", b"old")
    with view.open("f", mode) as file:
        assert file.tell() == (3 if mode == "ab" else 0)
        file.write(b"ne")
        file.flush()
        file.write(b"w")
        assert view.cat("f") == b"old"
    assert view.cat("f") == expected


def test_a_file_made_meanwhile_is_not_overwritten_by_an_exclusive_one(view: Any) -> None:
    file = view.open("f", "xb")
    view.pipe("f", b"theirs")
    with pytest.raises(FileExistsError):
        file.close()
    assert view.cat("f") == b"theirs"


def test_a_file_that_is_dropped_without_closing_is_written(view: Any) -> None:
    view.open("f", "wb").write(b"abc")
    gc.collect()
    assert view.cat("f") == b"abc"


def test_an_fsspec_transaction_writes_all_or_nothing(view: Any) -> None:
    with pytest.raises(KeyError), view.transaction:
        with view.open("f", "wb") as file:
            file.write(b"x")
        raise KeyError
    assert not view.exists("f")
    with view.transaction:
        with view.open("f", "wb") as file:
            file.write(b"x")
        assert not view.exists("f")
    assert view.cat("f") == b"x"


def test_a_read_only_workspace_says_so_at_once() -> None:
    filesystem = InMemoryFilesystem(read_only=True)
    view: Any = WorkspaceFileSystem(filesystem)
    with pytest.raises(PermissionError, match="read-only"):
        view.open("f", "wb")


def test_files_and_directories_are_moved_as_one(view: Any, files: InMemoryFilesystem) -> None:
    files.chmod("src/a.py", 0o755)
    view.mv("src", "lib")
    view.mv("data.csv", "lib")
    assert view.find("") == ["lib/a.py", "lib/data.csv", "lib/deep/b.py"]
    assert files.stat("lib/a.py").mode == 0o755
    view.mv("lib/a.py", "lib/data.csv")
    assert view.cat("lib/data.csv") == b"a = 1\n"
    view.mv("lib/*.csv", "empty/")
    assert view.find("") == ["empty/data.csv", "lib/deep/b.py"]


def test_a_directory_at_the_top_is_copied_into_one_that_exists(view: Any, tmp_path: Path) -> None:
    view.copy("src", "empty", recursive=True)
    view.copy("src", "new", recursive=True)
    view.copy("src/", "ringfence://empty/", recursive=True)
    assert view.find("empty") == ["empty/a.py", "empty/deep/b.py", "empty/src/a.py", "empty/src/deep/b.py"]
    assert view.find("new") == ["new/a.py", "new/deep/b.py"]
    view.get("src", str(tmp_path), recursive=True)
    assert (tmp_path / "src/deep/b.py").read_text() == "b = 2\n"


def test_removing_takes_lists_globs_and_depths(view: Any) -> None:
    view.rm(["data.csv", "src/deep/*.py"])
    assert view.find("") == ["src/a.py"]
    view.pipe("src/deep/c.py", b"")
    with pytest.raises(OSError, match="not empty"):
        view.rm("src", recursive=True, maxdepth=1)
    assert view.exists("src/deep/c.py")
    view.rm("src", recursive=True)
    view.rmdir("empty")
    assert view.ls("") == []


def test_a_link_is_removed_and_not_what_it_leads_to(view: Any, files: InMemoryFilesystem) -> None:
    files.symlink("link", "src")
    view.rm("link", recursive=True)
    assert view.find("src") == ["src/a.py", "src/deep/b.py"]


def test_touch_makes_empties_and_leaves(view: Any) -> None:
    view.touch("new")
    view.touch("src/a.py", truncate=False)
    assert (view.cat("new"), view.cat("src/a.py")) == (b"", b"a = 1\n")
    view.touch("src/a.py")
    assert view.cat("src/a.py") == b""


# -- in a tool call


def test_what_is_written_through_it_is_part_of_the_tool_call(files: InMemoryFilesystem) -> None:
    import pandas as pd

    kept: list[Any] = []

    def handler(params: SetupPlan, *, context: ToolContext) -> ToolResult[SetupPlan]:
        view: Any = fsspec.filesystem("ringfence", filesystem=context.filesystem)
        pd.DataFrame({"a": [1]}).to_csv("ringfence://made.csv", storage_options={"filesystem": context.filesystem})
        view.rm("src", recursive=True)
        assert view.exists("made.csv")
        kept.append(view)
        return ToolResult.error("no")

    tool = Tool[SetupPlan, SetupPlan](name="act", description="Act.", handler=handler)
    section = MarkdownSection(title="Work", key="work", template="Do it.", tools=[tool])
    prompt = Prompt(PromptTemplate(ns="tests", key="view", sections=[section])).bind(resources={Filesystem: files})
    before = files.snapshot()
    with prompt.resources:
        result = ToolExecutor(prompt=prompt, session=Session()).call("act", {"objective": "x"})
    assert result.message == "no"
    assert files.changes(before) == []
    with pytest.raises(CallEndedError):
        kept[0].pipe("late", b"")


# -- fsspec's own suite


class Fixtures(AbstractFixtures):
    @pytest.fixture
    def fs(self) -> Any:
        return WorkspaceFileSystem(InMemoryFilesystem())

    @pytest.fixture
    def local_fs(self) -> Any:  # fsspec's own is of a kind that pytest 9 refuses in its older releases
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return ""

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(part for part in parts if part)

    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestCopy(Fixtures, AbstractCopyTests):
    pass


class TestGet(Fixtures, AbstractGetTests):
    pass


class TestPut(Fixtures, AbstractPutTests):
    pass


class TestOpen(Fixtures, AbstractOpenTests):
    pass


class TestPipe(Fixtures, AbstractPipeTests):
    pass
