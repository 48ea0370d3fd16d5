"""The file tools of a workspace section, called as a model calls them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_values import EditedFile, FileText, file_tools

from ringfence import PromptValidationError, ToolValidationError, serde
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem, GlobMatch, InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate, ReadBeforeWritePolicy, Section, ToolResult, ToolsSection
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import HostMount, VfsToolsSection


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def files() -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    filesystem.write("README.md", "# Title\n\nText.\n")
    filesystem.write("src/main.py", "import os\n\n\ndef main():\n    return os.name\n")
    filesystem.write("src/lib/parse.py", "def parse(text):\n    return text.split()\n")
    filesystem.write("win.txt", "one\r\ntwo\r\n")
    filesystem.write_bytes("logo.png", b"\x89PNG\r\n\x1a\n\0\0")
    return filesystem


@pytest.fixture
def executor(session: Session, files: InMemoryFilesystem) -> Iterator[ToolExecutor]:
    prompt = prompt_of(VfsToolsSection(session=session, filesystem=files))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session)


@pytest.fixture
def free(session: Session, files: InMemoryFilesystem) -> Iterator[ToolExecutor]:
    """An executor without a policy."""
    prompt = prompt_of(VfsToolsSection(session=session, filesystem=files, policies=()))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session)


def prompt_of(section: Section[Any]) -> Prompt[object]:
    return Prompt(PromptTemplate(ns="tests", key="files", sections=[section]))


def content_of(files: Filesystem, path: str) -> bytes:
    return files.read_bytes(path).content


def call(executor: ToolExecutor, tool: str, **arguments: object) -> str:
    """What the model reads after a call that succeeds."""
    answer = executor.execute(tool, arguments)
    assert answer.result.success, answer.text
    return answer.text


def refused(executor: ToolExecutor, tool: str, **arguments: object) -> str:
    answer = executor.execute(tool, arguments)
    assert not answer.result.success
    return answer.text


REFUSED: dict[str, list[tuple[dict[str, object], str]]] = {
    "ls": [
        ({"path": "src/main.py"}, "is a file"),
        ({"path": "scr"}, "did you mean src"),
        ({"path": "../x"}, "outside of the workspace root"),
    ],
    "read_file": [
        ({"file_path": "src"}, "is a directory: list it with ls"),
        ({"file_path": "src/mian.py"}, "there is no src/mian.py in the workspace; did you mean src/main.py?"),
        ({"file_path": "src/lib/main.py"}, "did you mean src/main.py?"),
        ({"file_path": "no/such/thing"}, "there is no no/such/thing"),
        ({"file_path": "README.md/x"}, "did you mean README.md?"),
        ({"file_path": "dangling"}, "a symlink that leads nowhere"),
        ({"file_path": "README.md", "offset": -1}, "offset"),
        ({"file_path": "README.md", "limit": 0}, "limit"),
        ({"path": "README.md"}, "file_path"),
        ({"file_path": "../b.txt"}, "../b.txt is outside of the workspace root"),
    ],
    "write_file": [
        ({"file_path": "src", "content": "x"}, "src is a directory: name a file in it"),
        ({"file_path": "README.md/x", "content": "x"}, "README.md/x cannot be: a file stands"),
        ({"file_path": " ", "content": "x"}, "/ is a directory: name a file in it"),
        ({"file_path": "../x", "content": "x"}, "../x is outside of the workspace root"),
        ({"file_path": "f", "content": "x" * 48_001}, "48,001 characters, one call takes 48,000"),
        ({"file_path": "f", "content": "\ud800"}, "surrogate"),
        ({"file_path": "f", "content": "x", "mode": "append"}, "mode"),
    ],
    "edit_file": [
        ({"old_string": "def  main():", "new_string": "x"}, "old_string does not occur in the file. Line 4"),
        ({"old_string": "def  main():", "new_string": "import os"}, "new_string is in the file already"),
        ({"old_string": "os", "new_string": "x"}, "occurs 2 times, at lines 1, 5"),
        ({"old_string": "", "new_string": "x"}, "old_string is empty"),
        ({"old_string": "x", "new_string": "x"}, "the same"),
        ({"old_string": "x" * 48_001, "new_string": "y"}, "48,001 characters"),
        ({"old_string": "y", "new_string": "x" * 48_001}, "48,001 characters"),
        ({"file_path": "src/mein.py", "old_string": "a", "new_string": "b"}, "did you mean src/main.py"),
        ({"file_path": "src", "old_string": "a", "new_string": "b"}, "src is a directory, only files can be edited"),
    ],
    "apply_patch": [
        (
            {"patch": "--- a/../b.txt\n+++ b/../b.txt\n@@ -1 +1 @@\n-a\n+b\n"},
            "../b.txt is outside of the workspace root",
        )
    ],
    "move": [
        ({"source": "README.md", "target": "src"}, "target is the new path itself, such as src/README.md"),
        ({"source": "README.md", "target": "README.md"}, "the same"),
        ({"source": "RAEDME.md", "target": "x"}, "did you mean README.md"),
        ({"source": "src", "target": "src/lib/x"}, "into itself"),
        ({"source": "src", "target": "README.md"}, "README.md is a file, which a directory does not replace"),
        ({"source": "README.md", "target": "win.txt/x"}, "win.txt/x cannot be: a file stands where it has a directory"),
        ({"source": "README.md", "target": "../x"}, "outside of the workspace root"),
    ],
    "rm": [
        ({"path": "src"}, "set recursive"),
        ({"path": "srv"}, "did you mean src"),
        ({"path": "../x"}, "outside"),
    ],
    "glob": [
        ({"pattern": "  "}, "blank"),
        ({"pattern": "../*"}, "'..'"),
        ({"pattern": "*", "path": "scr"}, "did you mean src"),
        ({"pattern": "*", "path": "README.md"}, "is not a directory"),
    ],
    "grep": [
        ({"pattern": "("}, "missing ): ( (it has no"),
        ({"pattern": "main("}, "\\Q"),
        ({"pattern": ""}, "empty"),
        ({"pattern": "x", "path": "scr"}, "did you mean src"),
        ({"pattern": "x", "literal": True}, "literal"),
    ],
}


@pytest.mark.parametrize(
    ("tool", "arguments", "said"), [(tool, *case) for tool, cases in REFUSED.items() for case in cases]
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    free: ToolExecutor, files: InMemoryFilesystem, tool: str, arguments: dict[str, object], said: str
) -> None:
    files.symlink("dangling", "nothing")
    before = files.snapshot()
    if tool == "edit_file":
        arguments = {"file_path": "src/main.py", **arguments}
    text = refused(free, tool, **arguments)
    assert said in text
    assert "literal=" not in text
    assert files.changes(before) == []


@pytest.mark.parametrize("root", ["", "/", ".", "./", "//."])
@pytest.mark.parametrize(
    ("tool", "name", "others"),
    [
        ("write_file", "file_path", {"content": "x"}),
        ("edit_file", "file_path", {"old_string": "a", "new_string": "b"}),
        ("rm", "path", {"recursive": True}),
        ("move", "source", {"target": "b"}),
        ("move", "target", {"source": "README.md"}),
    ],
)
def test_the_root_is_not_taken_for_a_file_that_has_to_be_read_first(
    executor: ToolExecutor, tool: str, name: str, others: dict[str, object], root: str
) -> None:
    assert f"{name} is the root" in refused(executor, tool, **{name: root}, **others)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("write_file", {"content": "x"}), ("edit_file", {"old_string": "a", "new_string": "b"})],
)
def test_a_directory_is_told_as_one_and_not_as_unread(
    executor: ToolExecutor, tool: str, arguments: dict[str, object]
) -> None:
    assert refused(executor, tool, file_path="src", **arguments).startswith("src is a directory")


# Listing


def test_a_listing_has_kinds_and_sizes(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.symlink("link", "src/main.py")
    assert call(executor, "ls").splitlines() == [
        "/: 1 directory, 4 files",
        "",
        "file       15  README.md",
        "symlink     -  link -> src/main.py",
        "file       10  logo.png",
        "directory   -  src/",
        "file       10  win.txt",
    ]


def test_a_directory_is_listed_by_any_spelling(executor: ToolExecutor) -> None:
    texts = {call(executor, "ls", path=path) for path in ("src", "/src/", "./src", " src ", "src/lib/..")}
    assert len(texts) == 1


def test_of_very_many_entries_paths_and_lines_a_part_is_shown(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    for n in range(1_001):
        files.write(f"many/{n:04}", "hit\n")
    assert "[1 more entries: use glob for a part of them]" in call(executor, "ls", path="many")
    assert "[1 more: use a narrower pattern]" in call(executor, "glob", pattern="many/*")
    found = call(executor, "grep", pattern="hit")
    assert found.startswith("the first 1,000 lines in 1,000 files for hit")
    assert found.endswith("[there are more: use a narrower pattern, path or glob]")
    files.delete("many/0000")
    assert "there are more" not in call(executor, "grep", pattern="hit")


# Reading


def test_lines_are_read_with_their_numbers(executor: ToolExecutor) -> None:
    assert call(executor, "read_file", file_path="README.md") == (
        "README.md: lines 1 to 3 of 3\n\n1 | # Title\n2 | \n3 | Text."
    )


def test_what_is_left_is_said_with_how_to_read_on(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("long.txt", "".join(f"line {n}\n" for n in range(1, 5_001)))
    text = call(executor, "read_file", file_path="long.txt")
    assert "lines 1 to 2000 of 5,000" in text
    assert "[3,000 lines left: read on with offset=2000]" in text
    text = call(executor, "read_file", file_path="long.txt", offset=4_998, limit=9_999)
    assert text == "long.txt: lines 4999 to 5000 of 5,000\n\n4999 | line 4999\n5000 | line 5000"


def test_long_lines_and_long_answers_are_cut(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("wide.txt", f"{'x' * 5_000}\n" * 100)
    text = call(executor, "read_file", file_path="wide.txt")
    assert "[... 3,000 more characters in this line]" in text
    assert len(text) < 70_000
    assert "lines left: read on with offset=" in text


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"a\r\nb\r\n", "[lines end with CRLF]"),
        (b"a\r\nb\r\nc", "[lines end with CRLF]"),
        (b"a\r\nb\n", "[some lines end with CRLF, some with LF]"),
        (b"a\nb", "[no newline at the end of the file]"),
        (b"\xef\xbb\xbfa\n", "[the file begins with a byte order mark, which is not shown]"),
        (b"caf\xe9\n", "not UTF-8"),
        (b"", "it is empty"),
    ],
)
def test_what_cannot_be_seen_is_said(
    executor: ToolExecutor, files: InMemoryFilesystem, content: bytes, note: str
) -> None:
    files.write_bytes("f", content)
    text = call(executor, "read_file", file_path="f")
    assert note in text
    assert "\r" not in text


def test_a_binary_file_is_described_and_counts_as_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    text = call(executor, "read_file", file_path="logo.png")
    assert text == (
        "logo.png is not text\n\nkind: image/png\nsize: 10 bytes\nsha256: " + files.content_hash("logo.png")
    )
    assert call(executor, "write_file", file_path="logo.png", content="x")


def test_text_of_another_encoding_is_shown_and_its_other_bytes_stay(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    files.write_bytes("latin.txt", b"caf\xe9 = 1\nth\xe9 = 2")
    assert "1 | caf\\xe9 = 1\n2 | th\\xe9 = 2\n" in call(executor, "read_file", file_path="latin.txt")
    assert "2 | th\\xe9 = 2" in call(executor, "read_file", file_path="latin.txt", offset=1)
    call(executor, "edit_file", file_path="latin.txt", old_string=" = 1", new_string=" = 3")
    assert content_of(files, "latin.txt") == b"caf\xe9 = 3\nth\xe9 = 2"


class UnsearchedFilesystem(InMemoryFilesystem):
    def glob(self, pattern: str, *, path: str = "") -> Sequence[GlobMatch]:
        assert "**" not in pattern, f"searched for {pattern}"
        return super().glob(pattern, path=path)


def test_a_missing_file_is_not_searched_for_in_the_whole_workspace(session: Session) -> None:
    filesystem = UnsearchedFilesystem()
    filesystem.write("src/main.py", "pass\n")
    prompt = prompt_of(VfsToolsSection(session=session, filesystem=filesystem))
    with prompt.resources:
        answer = refused(ToolExecutor(prompt=prompt, session=session), "read_file", file_path="src/mian.py")
    assert "src/main.py" in answer


# Writing and editing


def test_a_file_is_created_with_its_directories_and_exactly_its_text(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    text = call(executor, "write_file", file_path="new/ä.txt", content="ü\r\nno end")
    assert text == "created new/ä.txt (10 bytes)"
    assert content_of(files, "new/ä.txt") == "ü\r\nno end".encode()
    call(executor, "write_file", file_path="f", content="ä" * 48_000)
    assert files.stat("f").size_bytes == 96_000


def test_a_file_is_replaced_once_it_was_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert "has not been read" in refused(executor, "write_file", file_path="README.md", content="x")
    call(executor, "read_file", file_path="README.md")
    assert call(executor, "write_file", file_path="./README.md", content="x") == "replaced README.md (1 byte)"
    assert call(executor, "write_file", file_path="README.md", content="own writes count")
    files.write("README.md", "somebody else's")
    assert "changed" in refused(executor, "write_file", file_path="README.md", content="y")


@given(
    total=st.integers(1, 12),
    parts=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 6)), max_size=8),
)
def test_a_file_is_replaced_once_all_of_its_lines_were_read(total: int, parts: list[tuple[int, int]]) -> None:
    session, files = Session(), InMemoryFilesystem()
    prompt = prompt_of(VfsToolsSection(session=session, filesystem=files))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        files.write("f", "".join(f"line {number}\n" for number in range(total)))
        seen: set[int] = set()
        for offset, limit in parts:
            call(executor, "read_file", file_path="f", offset=offset, limit=limit)
            seen |= {*range(offset, min(offset + limit, total))}
            denied = executor.execute("write_file", {"file_path": "f", "content": "x"}).receipt.outcome == "denied"
            assert denied == (len(seen) < total)
            if not denied:
                break
        if 0 < len(seen) < total:
            call(executor, "edit_file", file_path="f", old_string="line 0\n", new_string="first\n")


def test_lines_of_one_content_are_not_lines_of_the_next(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("f", "one\ntwo\n")
    call(executor, "read_file", file_path="f", limit=1)
    files.write("f", "three\ntwo\n")
    assert "has changed" in refused(executor, "edit_file", file_path="f", old_string="two", new_string="2")
    call(executor, "read_file", file_path="f", offset=1)
    assert "only the lines 2-2 of f" in refused(executor, "write_file", file_path="f", content="x")


def test_a_part_suffices_for_edits_moves_and_removals(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("f", "one\ntwo\n")
    files.write("g", "other\n")
    call(executor, "read_file", file_path="f", limit=1)
    call(executor, "read_file", file_path="g")
    for old, new in (("one", "1"), ("two", "2")):
        call(executor, "edit_file", file_path="f", old_string=old, new_string=new)
        assert "only a part of f" in refused(executor, "write_file", file_path="f", content="x")
    assert "only a part of f" in refused(executor, "move", source="g", target="f")
    call(executor, "move", source="f", target="h")
    assert "only a part of h" in refused(executor, "write_file", file_path="h", content="x")
    call(executor, "write_file", file_path="there", content="x")
    call(executor, "move", source="h", target="there")
    assert "only a part of there" in refused(executor, "write_file", file_path="there", content="x")
    call(executor, "move", source="there", target="h")
    call(executor, "apply_patch", patch="--- a/h\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-1\n-2\n")
    call(executor, "write_file", file_path="g", content="all of it was read\n")


def test_only_what_shows_lines_is_reading(executor: ToolExecutor) -> None:
    nothing = call(executor, "read_file", file_path="README.md", offset=100)
    assert nothing == "README.md: no lines from offset 100: it has 3 lines"
    call(executor, "grep", pattern="Title", path="README.md")
    call(executor, "ls")
    refused(executor, "edit_file", file_path="README.md", old_string="zzz", new_string="y")
    assert "has not been read" in refused(executor, "write_file", file_path="README.md", content="x")


def test_an_edit_says_where_it_was_made(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    text = call(free, "edit_file", file_path="src/main.py", old_string="os.name", new_string="os.sep")
    assert text == "edited src/main.py: line 5"
    assert content_of(files, "src/main.py").endswith(b"return os.sep\n")
    text = call(free, "edit_file", file_path="src/main.py", old_string="os", new_string="sys", replace_all=True)
    assert text == "edited src/main.py: 2 places, at lines 1, 5"


def test_an_edit_keeps_line_ends_permissions_and_everything_else(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.chmod("win.txt", 0o755)
    call(free, "edit_file", file_path="win.txt", old_string="one\ntwo", new_string="1\n2\n3")
    assert content_of(files, "win.txt") == b"1\r\n2\r\n3\r\n"
    assert files.stat("win.txt").mode == 0o755
    files.write_bytes("big", b"x\n" * 1_000_000 + b"end" + b"\0y" * 1_000_000)
    call(free, "edit_file", file_path="big", old_string="end", new_string="END")
    assert content_of(files, "big") == b"x\n" * 1_000_000 + b"END" + b"\0y" * 1_000_000


# Moving and removing


def test_a_file_moves_and_may_replace_one_that_was_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert "README.md exists and has not been read" in refused(executor, "move", source="README.md", target="docs/r.md")
    call(executor, "read_file", file_path="README.md")
    assert call(executor, "move", source="README.md", target="docs/r.md") == "moved README.md to docs/r.md"
    assert "win.txt exists and has not been read" in refused(executor, "move", source="docs/r.md", target="win.txt")
    call(executor, "read_file", file_path="win.txt")
    call(executor, "move", source="docs/r.md", target="win.txt")
    assert content_of(files, "win.txt") == b"# Title\n\nText.\n"
    assert not files.exists("README.md")


def test_a_directory_moves(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    call(free, "move", source="src", target="lib/python")
    assert files.exists("lib/python/lib/parse.py")
    assert not files.exists("src")


def test_files_are_removed_once_they_were_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert "has not been read" in refused(executor, "rm", path="src", recursive=True)
    call(executor, "read_file", file_path="src/main.py")
    assert "src/lib/parse.py" in refused(executor, "rm", path="src", recursive=True)
    call(executor, "read_file", file_path="src/lib/parse.py")
    assert call(executor, "rm", path="src", recursive=True) == "removed src, 4 entries in all"
    assert not files.exists("src")
    files.mkdir("empty")
    call(executor, "rm", path="empty")
    assert not files.exists("empty")


@pytest.mark.parametrize("target", ["README.md", "src", "nowhere", "/etc/passwd", "x" * 256])
def test_a_link_is_moved_replaced_and_removed_by_who_has_not_read_what_it_leads_to(
    executor: ToolExecutor, files: InMemoryFilesystem, target: str
) -> None:
    for name in ("link", "other"):
        files.symlink(name, target)
    assert call(executor, "move", source="link", target="moved") == "moved link to moved"
    if target != "src":
        assert call(executor, "move", source="moved", target="other") == "moved moved to other"
        assert not executor.call("write_file", {"file_path": "other", "content": "x"}).success
    assert call(executor, "rm", path="other") == "removed other"
    assert {"README.md", "src/main.py"} <= {match.path for match in files.glob("**")}


def test_what_is_below_a_link_is_not_removed_or_replaced_unread(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    files.symlink("link", "src")
    files.symlink("src/own", "main.py")
    assert "src/main.py exists and has not been read" in refused(executor, "rm", path="link/main.py")
    assert "src/main.py exists" in refused(executor, "move", source="link/main.py", target="new")
    assert "src/main.py exists" in refused(executor, "move", source="link/own", target="link/main.py")
    assert call(executor, "rm", path="link/own") == "removed link/own"


def test_a_pipe_can_be_moved_and_removed_and_not_written(session: Session, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    os.mkfifo(tmp_path / "root/pipe")
    with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as disk:
        prompt = prompt_of(VfsToolsSection(session=session, filesystem=disk))
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=session)
            assert "never opened" in refused(executor, "write_file", file_path="pipe", content="x")
            call(executor, "move", source="pipe", target="moved")
            call(executor, "rm", path="moved")


# Finding


def test_paths_are_found_by_a_pattern(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert call(executor, "glob", pattern="**/*.py") == "2 paths below / for **/*.py\n\nsrc/lib/parse.py\nsrc/main.py"
    assert call(executor, "glob", pattern="**", glob="p*") == "1 path below / for **\n\nsrc/lib/parse.py"
    assert call(executor, "glob", pattern="*.c") == "0 paths below / for *.c"
    files.symlink("src/dangling", "nothing")
    files.symlink("src/other", "lib")
    found = call(executor, "glob", pattern="*", path="src")
    assert found == "4 paths below src for *\n\nsrc/dangling\nsrc/lib/\nsrc/main.py\nsrc/other/"


def test_braces_that_find_nothing_are_said_not_to_be_expanded(executor: ToolExecutor) -> None:
    said = "; braces are not expanded: call it once for each alternative"
    assert call(executor, "glob", pattern="*.{py,c}").endswith(said)
    assert call(executor, "glob", pattern="**", glob="*.{py,c}").endswith(said)
    assert call(executor, "grep", pattern="def", glob="*.{py,c}").endswith(said)
    assert said not in call(executor, "grep", pattern="x{7,9}")


@pytest.mark.parametrize(
    ("tool", "arguments"), [("ls", {}), ("glob", {"pattern": "**/*.py"}), ("grep", {"pattern": "def"})]
)
def test_a_path_that_is_null_is_the_root(executor: ToolExecutor, tool: str, arguments: dict[str, str]) -> None:
    assert call(executor, tool, **arguments, path=None) == call(executor, tool, **arguments)


def test_lines_are_found_by_a_regular_expression(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    text = call(executor, "grep", pattern=r"^def \w+\(", glob="*.py")
    assert text == (
        "2 lines in 2 files for ^def \\w+\\(\n\nsrc/lib/parse.py:1: def parse(text):\nsrc/main.py:4: def main():"
    )
    assert call(executor, "grep", pattern=r"\Qos.name\E").endswith("src/main.py:5:     return os.name")
    assert "def main():" in call(executor, "grep", pattern="\\Qmain(\\E")
    assert call(executor, "grep", pattern="nothing") == "no line in / for nothing"
    files.write("long.txt", "a" * 5_000 + "needle" + "b" * 5_000)
    text = call(executor, "grep", pattern="needle")
    assert "needle" in text
    assert len(text) < 600


# Names


@pytest.mark.parametrize("name", ["caf\udce9", "a\nb", " blanks ", "ä ö", "[x]*", "back\\slash", "x\\x41"])
def test_every_name_that_is_shown_is_taken_back(executor: ToolExecutor, files: InMemoryFilesystem, name: str) -> None:
    files.write(f"odd/{name}", "text\n")
    shown = call(executor, "glob", pattern="odd/*").splitlines()[-1]
    json.dumps(shown).encode()
    assert "1 | text" in call(executor, "read_file", file_path=shown)
    call(executor, "edit_file", file_path=shown, old_string="text", new_string="other")
    assert content_of(files, f"odd/{name}") == b"other\n"
    assert [entry.name for entry in files.list("odd")] == [name]
    assert "1: other" in call(executor, "grep", pattern="other", path=shown)
    call(executor, "rm", path=shown)
    assert list(files.list("odd")) == []


# The section


def test_the_parameters_are_those_that_were_promised() -> None:
    promised = {
        "ls": ["path"],
        "read_file": ["file_path", "offset", "limit", "encoding"],
        "write_file": ["file_path", "content"],
        "edit_file": ["file_path", "old_string", "new_string", "replace_all"],
        "apply_patch": ["patch"],
        "move": ["source", "target"],
        "glob": ["pattern", "path", "glob"],
        "grep": ["pattern", "path", "glob"],
        "rm": ["path", "recursive"],
    }
    assert {tool.name: list(tool.fields) for tool in file_tools()} == promised


def test_tools_that_change_nothing_say_so_and_the_others_say_what_they_change() -> None:
    assert {tool.name for tool in file_tools() if tool.read_only} == {"ls", "read_file", "glob", "grep"}
    assert {tool.name for tool in file_tools() if tool.writes is None} == {"ls", "read_file", "glob", "grep"}


@pytest.fixture
def repository(files: InMemoryFilesystem) -> None:
    for path in (".git/logs/HEAD", "src/.git/logs", "z.txt"):
        files.write(path, "needle\n" * (1200 if path == ".git/logs/HEAD" else 1))
    files.write(".gitignore", "# built\n/build/\n*.log  \n!keep.log\n\n.env\n")
    files.write("src/.gitignore", "/generated.py\n")
    for path in ("build/out.py", "a.log", "keep.log", ".env", "src/generated.py", "src/x.py", "src/build/y.py"):
        files.write(path, "needle\n")


@pytest.mark.usefixtures("repository")
def test_a_search_leaves_out_gits_own_data_and_what_gitignore_files_name(executor: ToolExecutor) -> None:
    summary, _, *lines = call(executor, "grep", pattern="needle").splitlines()
    assert "4 lines in 4 files" in summary
    assert "left out, as git ignores them: .env, a.log, build and 1 more" in summary
    assert [line.partition(":")[0] for line in lines] == ["keep.log", "src/build/y.py", "src/x.py", "z.txt"]
    paths = call(executor, "glob", pattern="**/*").splitlines()
    assert {".gitignore", "src/x.py"} <= {*paths}
    assert {".git/", ".git/logs/HEAD", "build/out.py", "src/generated.py"}.isdisjoint(paths)
    # Nor does it count as a read of the rules that it goes by.
    assert "read it first" in refused(executor, "write_file", file_path=".gitignore", content="")


@pytest.mark.parametrize(
    ("tool", "arguments", "found"),
    [
        ("grep", {"path": ".git"}, ".git/logs/HEAD:1: needle"),
        ("grep", {"glob": "src/.git/*"}, "src/.git/logs:1: needle"),
        ("grep", {"path": "build"}, "build/out.py:1: needle"),
        ("grep", {"path": "a.log"}, "a.log:1: needle"),
        ("grep", {"glob": "build/*.py"}, "build/out.py:1: needle"),
        ("glob", {"pattern": "**/*", "path": ".git"}, ".git/logs/HEAD"),
        ("glob", {"pattern": ".git/logs/*"}, ".git/logs/HEAD"),
        ("glob", {"pattern": "**/.env"}, ".env"),
        ("glob", {"pattern": "build/**"}, "build/out.py"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_a_search_that_names_what_is_ignored_finds_it(
    free: ToolExecutor, tool: str, arguments: dict[str, object], found: str
) -> None:
    assert found in call(free, tool, **{"pattern": "needle", **arguments}).splitlines()


def test_a_search_whose_first_lines_are_all_ignored_says_so(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write(".gitignore", "a.txt\n")
    files.load("a.txt", b"needle\n" * 200_000)
    files.write("z.txt", "needle\n")
    assert "no line but in ignored files, of which there are more than 100,000" in call(free, "grep", pattern="needle")
    files.load("a.txt", b"needle\n" * 2_000)
    assert "1 line in 1 file" in call(free, "grep", pattern="needle")


def test_the_mount_point_that_a_model_sees_is_taken_off(session: Session, files: InMemoryFilesystem) -> None:
    section = ToolsSection(title="Files", tools=file_tools(mount_point="/workspace"))
    prompt = Prompt(PromptTemplate(ns="tests", key="mounted", sections=[section]))
    prompt = prompt.bind(resources={Filesystem: files})
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        assert call(executor, "read_file", file_path="/workspace/README.md").startswith("README.md: lines 1 to 3")


def test_on_disk_an_absolute_path_below_the_root_is_a_path_of_the_workspace(session: Session, tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    (root / "there.txt").write_text("there\n")
    with HostFilesystem(root, store=tmp_path / "store") as disk:
        prompt = prompt_of(VfsToolsSection(session=session, filesystem=disk))
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=session)
            assert "read it first" in refused(executor, "write_file", file_path=f"{root}/there.txt", content="")
            call(executor, "read_file", file_path=f"{root}/there.txt")
            call(executor, "write_file", file_path=f"{root}/there.txt", content="new\n")
            call(executor, "write_file", file_path=f"{root}/made/new.txt", content="")
            for path in ("", "made", f"{root}/made"):
                assert "made/new.txt" in call(executor, "glob", pattern=f"{root}/made/*.txt", path=path)
            call(executor, "write_file", file_path="made/deep/new.txt", content="new\n")
            assert "there.txt:1: new" in (found := call(executor, "grep", pattern="new", glob=f"{root}/*.txt"))
            assert "deep" not in found
            assert "deep" not in call(executor, "glob", pattern="**", path="made", glob=f"{root}/made/*.txt")
            assert "deep" not in call(executor, "grep", pattern="new", glob="/*.txt")
        assert (root / "there.txt").read_text() == "new\n"
        assert sorted(path for path in os.listdir(root) if path[0] != ".") == ["made", "there.txt"]


def test_a_file_that_would_take_the_memory_of_the_process_is_not_read(session: Session, tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    (root / "small.txt").write_text("needle\n")
    with open(root / "huge.txt", "wb") as huge:
        huge.write(b"needle\n" * 1_000)
        huge.truncate(1 << 40)
    read = ("read_file", {"file_path": "huge.txt"})
    searched = ("grep", {"pattern": "needle", "path": "huge.txt"})
    edited = ("edit_file", {"file_path": "huge.txt", "old_string": "needle", "new_string": "pin"})
    patched = ("apply_patch", {"patch": "--- a/huge.txt\n+++ b/huge.txt\n@@ -1 +1 @@\n-needle\n+pin\n"})
    with HostFilesystem(root, store=tmp_path / "store") as disk:
        guarded = VfsToolsSection(session=session, filesystem=disk)
        tools = ToolsSection(title="Files", tools=file_tools())
        for section, said in ((guarded, "has not been read"), (tools, "1,099,511,627,776 bytes")):
            prompt = prompt_of(section).bind(resources={Filesystem: disk})
            with prompt.resources:
                executor = ToolExecutor(prompt=prompt, session=session)
                for name, arguments in (read, searched):
                    assert "1,099,511,627,776 bytes" in refused(executor, name, **arguments)
                for name, arguments in (edited, patched):
                    assert said in refused(executor, name, **arguments)
                assert "1 line in 1 file" in call(executor, "grep", pattern="needle")


def test_without_a_filesystem_every_tool_says_so(session: Session) -> None:
    prompt = Prompt(PromptTemplate(ns="tests", key="bare", sections=[ToolsSection(title="Files", tools=file_tools())]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        assert "no filesystem" in refused(executor, "ls")
        assert "no filesystem" in refused(executor, "write_file", file_path="a", content="b")


def test_a_section_has_a_filesystem_of_its_own(session: Session) -> None:
    one, other = VfsToolsSection(session=session), VfsToolsSection(session=session)
    assert one.filesystem != other.filesystem
    assert one.key == "vfs.tools"
    assert one.session is session
    assert [policy.name for policy in one.policies()] == [ReadBeforeWritePolicy.name]


def test_a_clone_shares_the_files_unless_it_is_given_others(session: Session, files: InMemoryFilesystem) -> None:
    section, later = VfsToolsSection(session=session, filesystem=files), Session()
    twin = section.clone(session=later)
    assert (twin.session, twin.filesystem) == (later, files)
    assert section.session is session
    others = InMemoryFilesystem()
    assert section.clone(filesystem=others).filesystem is others
    assert section.filesystem is files


def test_mounts_are_copied_and_listed(session: Session, tmp_path: Path) -> None:
    for n in range(25):
        (tmp_path / f"{n:02}.txt").write_text("x")
    section = VfsToolsSection(session=session, mounts=[HostMount(str(tmp_path), mount_path="data")])
    assert section.filesystem.exists("data/24.txt")
    prompt = prompt_of(section)
    with prompt.resources:
        text = prompt.render(session=session).text
    assert "`/data`, 25 files in all: `00.txt`" in text
    assert "`19.txt`, and 5 more" in text
    assert "`20.txt`" not in text


def test_the_text_promises_reading_first_only_where_it_is_enforced(session: Session) -> None:
    with_policy, without = (
        prompt_of(VfsToolsSection(session=session, policies=policies)).render(session=session).text
        for policies in (None, ())
    )
    assert "Read a file before you change" in with_policy
    assert "Read a file before you change" not in without


def test_mounts_need_a_filesystem_in_memory_and_an_allowed_root(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ToolValidationError):
        VfsToolsSection(session=session, mounts=[HostMount(str(tmp_path))], allowed_host_roots=[tmp_path / "other"])
    (tmp_path / "tree").mkdir()
    with (
        HostFilesystem(tmp_path / "tree", store=tmp_path / "store") as elsewhere,
        pytest.raises(PromptValidationError, match="in memory"),
    ):
        VfsToolsSection(session=session, mounts=[HostMount(str(tmp_path))], filesystem=elsewhere)


def test_a_result_is_a_value_that_a_program_can_use(free: ToolExecutor) -> None:
    read: ToolResult[FileText] = free.call("read_file", {"file_path": "README.md", "limit": 1})
    assert read.value == FileText("README.md", "1 | # Title", 0, 1, 3, ("2 lines left: read on with offset=1",))
    edit = {"file_path": "win.txt", "old_string": "o", "new_string": "0", "replace_all": True}
    edited: ToolResult[EditedFile] = free.call("edit_file", edit)
    assert edited.value == EditedFile("win.txt", replacements=2, lines=(1, 2))
    assert serde.dump(edited.value) == {"path": "win.txt", "replacements": 2, "lines": [1, 2]}
