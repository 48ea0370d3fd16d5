"""The file tools of a workspace section, called as a model calls them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ringfence import serde
from ringfence.adapters.tool_executor import ToolExecutor
from ringfence.errors import PromptValidationError, ToolValidationError
from ringfence.filesystem import Filesystem, GlobMatch, InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate, ReadBeforeWritePolicy, ToolResult, ToolsSection
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import HostMount, VfsToolsSection
from ringfence_tools.files import EditedFile, FileText, file_tools


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


def prompt_of(section: VfsToolsSection) -> Prompt[object]:
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


def test_of_a_large_directory_a_part_is_listed(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    for n in range(1_200):
        files.write(f"many/{n:04}", "")
    text = call(executor, "ls", path="many")
    assert "1,200 files" in text
    assert "[200 more entries: use glob for a part of them]" in text


@pytest.mark.parametrize(
    ("path", "said"),
    [("src/main.py", "is a file"), ("scr", "did you mean src"), ("../x", "outside of the workspace root")],
)
def test_what_cannot_be_listed(executor: ToolExecutor, path: str, said: str) -> None:
    assert said in refused(executor, "ls", path=path)


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
    ],
)
def test_what_cannot_be_seen_is_said(
    executor: ToolExecutor, files: InMemoryFilesystem, content: bytes, note: str
) -> None:
    files.write_bytes("f", content)
    text = call(executor, "read_file", file_path="f")
    assert note in text
    assert "\r" not in text


@pytest.mark.parametrize(
    ("content", "said"), [("", "it is empty"), ("a\nb\n", "no lines from offset 5: it has 2 lines")]
)
def test_no_lines_is_an_answer(executor: ToolExecutor, files: InMemoryFilesystem, content: str, said: str) -> None:
    files.write("f", content)
    assert call(executor, "read_file", file_path="f", offset=0 if not content else 5) == f"f: {said}"


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
        raise AssertionError(f"searched for {pattern}")


def test_a_missing_file_is_not_searched_for_in_the_whole_workspace(session: Session) -> None:
    filesystem = UnsearchedFilesystem()
    filesystem.write("src/main.py", "pass\n")
    prompt = prompt_of(VfsToolsSection(session=session, filesystem=filesystem))
    with prompt.resources:
        answer = refused(ToolExecutor(prompt=prompt, session=session), "read_file", file_path="src/mian.py")
    assert "src/main.py" in answer


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"file_path": "src"}, "is a directory: list it with ls"),
        ({"file_path": "src/mian.py"}, "there is no src/mian.py; did you mean src/main.py?"),
        ({"file_path": "src/lib/main.py"}, "did you mean src/main.py?"),
        ({"file_path": "no/such/thing"}, "there is no no/such/thing"),
        ({"file_path": "README.md/x"}, "did you mean README.md?"),
        ({"file_path": "README.md", "offset": -1}, "offset is the number of lines to skip"),
        ({"file_path": "README.md", "limit": 0}, "limit is the number of lines to read"),
        ({"path": "README.md"}, "file_path"),
    ],
)
def test_what_cannot_be_read(executor: ToolExecutor, arguments: dict[str, object], said: str) -> None:
    assert said in refused(executor, "read_file", **arguments)


def test_a_link_that_leads_nowhere_is_named_as_one(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.symlink("dangling", "nothing")
    assert "a symlink that leads nowhere" in refused(executor, "read_file", file_path="dangling")


# Writing


def test_a_file_is_created_with_its_directories_and_exactly_its_text(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    text = call(executor, "write_file", file_path="new/ä.txt", content="ü\r\nno end")
    assert text == "created new/ä.txt (10 bytes)"
    assert content_of(files, "new/ä.txt") == "ü\r\nno end".encode()


def test_a_file_is_replaced_once_it_was_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert "has not been read" in refused(executor, "write_file", file_path="README.md", content="x")
    call(executor, "read_file", file_path="README.md", offset=2, limit=1)
    assert call(executor, "write_file", file_path="./README.md", content="x") == "replaced README.md (1 byte)"
    assert call(executor, "write_file", file_path="README.md", content="own writes count")
    files.write("README.md", "somebody else's")
    assert "changed" in refused(executor, "write_file", file_path="README.md", content="y")


def test_reading_no_lines_is_no_reading(executor: ToolExecutor) -> None:
    call(executor, "read_file", file_path="README.md", offset=100)
    assert "has not been read" in refused(executor, "write_file", file_path="README.md", content="x")


def test_neither_grep_nor_ls_nor_a_failed_edit_is_reading(executor: ToolExecutor) -> None:
    call(executor, "grep", pattern="Title", path="README.md")
    call(executor, "ls")
    refused(executor, "edit_file", file_path="README.md", old_string="zzz", new_string="y")
    assert "has not been read" in refused(
        executor, "edit_file", file_path="README.md", old_string="Title", new_string="y"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"file_path": "src", "content": "x"}, "directory"),
        ({"file_path": "README.md/x", "content": "x"}, "README.md/x cannot be: a file stands"),
        ({"file_path": "", "content": "x"}, "root"),
        ({"file_path": " ", "content": "x"}, "/ is a directory: name a file in it"),
        ({"file_path": "../x", "content": "x"}, "outside of the workspace root"),
        ({"file_path": "f", "content": "x" * 48_001}, "48,001 characters, one call takes 48,000"),
        ({"file_path": "f", "content": "x", "mode": "append"}, "mode"),
    ],
)
def test_what_cannot_be_written(
    free: ToolExecutor, files: InMemoryFilesystem, arguments: dict[str, object], said: str
) -> None:
    before = files.snapshot()
    assert said in refused(free, "write_file", **arguments)
    assert files.changes(before) == []


def test_48_000_characters_are_written(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    call(free, "write_file", file_path="f", content="ä" * 48_000)
    assert files.stat("f").size_bytes == 96_000


# Editing


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


def test_a_file_of_any_size_is_edited(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write_bytes("big", b"x\n" * 1_000_000 + b"end" + b"\0y" * 1_000_000)
    call(free, "edit_file", file_path="big", old_string="end", new_string="END")
    assert content_of(files, "big") == b"x\n" * 1_000_000 + b"END" + b"\0y" * 1_000_000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def  main():", "x", "src/main.py was not changed: old_string does not occur in the file. Line 4"),
        ("def  main():", "import os", "new_string is in the file already, perhaps from the same edit before. Line 4"),
        ("os", "x", "occurs 2 times, at lines 1, 5"),
        ("", "x", "old_string is empty"),
        ("x", "x", "the same"),
        ("x" * 48_001, "y", "48,001 characters"),
        ("y", "x" * 48_001, "48,001 characters"),
    ],
)
def test_what_cannot_be_edited(free: ToolExecutor, files: InMemoryFilesystem, old: str, new: str, said: str) -> None:
    before = files.snapshot()
    assert said in refused(free, "edit_file", file_path="src/main.py", old_string=old, new_string=new)
    assert files.changes(before) == []


def test_a_missing_file_or_a_directory_cannot_be_edited(free: ToolExecutor) -> None:
    assert "did you mean src/main.py" in refused(
        free, "edit_file", file_path="src/mein.py", old_string="a", new_string="b"
    )
    assert "only files" in refused(free, "edit_file", file_path="src", old_string="a", new_string="b")


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


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("README.md", "src", "target is the new path itself, such as src/README.md"),
        ("README.md", "README.md", "the same"),
        ("RAEDME.md", "x", "did you mean README.md"),
        ("src", "src/lib/x", "into itself"),
        ("src", "README.md", "README.md is a file, which a directory does not replace"),
        ("README.md", "win.txt/x", "win.txt/x cannot be: a file stands where it has a directory"),
        ("", "x", "root"),
        ("README.md", "../x", "outside of the workspace root"),
    ],
)
def test_what_cannot_be_moved(
    free: ToolExecutor, files: InMemoryFilesystem, source: str, target: str, said: str
) -> None:
    before = files.snapshot()
    assert said in refused(free, "move", source=source, target=target)
    assert files.changes(before) == []


def test_files_are_removed_once_they_were_read(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    assert "has not been read" in refused(executor, "rm", path="src", recursive=True)
    call(executor, "read_file", file_path="src/main.py")
    assert "src/lib/parse.py" in refused(executor, "rm", path="src", recursive=True)
    call(executor, "read_file", file_path="src/lib/parse.py")
    assert call(executor, "rm", path="src", recursive=True) == "removed src, 4 entries in all"
    assert not files.exists("src")


def test_a_link_is_removed_and_not_what_it_leads_to(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.symlink("link", "src")
    assert call(free, "rm", path="link") == "removed link"
    assert files.exists("src/main.py")


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
            said = refused(executor, "write_file", file_path="pipe", content="x")
            assert said == "write_file failed: pipe is a socket, a pipe or a device, which is never opened"
            call(executor, "move", source="pipe", target="moved")
            call(executor, "rm", path="moved")


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("write_file", {"content": "x"}, "src is a directory: name a file in it"),
        ("edit_file", {"old_string": "a", "new_string": "b"}, "src is a directory, only files can be edited"),
    ],
)
def test_a_directory_is_told_as_one_and_not_as_unread(
    executor: ToolExecutor, tool: str, arguments: dict[str, object], said: str
) -> None:
    assert refused(executor, tool, file_path="src", **arguments) == said


def test_an_empty_directory_needs_no_recursion(free: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.mkdir("empty")
    call(free, "rm", path="empty")
    assert not files.exists("empty")


@pytest.mark.parametrize(
    ("path", "said"),
    [("", "root"), ("/", "root"), ("src", "set recursive"), ("srv", "did you mean src"), ("../x", "outside")],
)
def test_what_cannot_be_removed(free: ToolExecutor, files: InMemoryFilesystem, path: str, said: str) -> None:
    before = files.snapshot()
    assert said in refused(free, "rm", path=path)
    assert files.changes(before) == []


# Finding


def test_paths_are_found_by_a_pattern(executor: ToolExecutor) -> None:
    assert call(executor, "glob", pattern="**/*.py") == "2 paths below / for **/*.py\n\nsrc/lib/parse.py\nsrc/main.py"
    assert call(executor, "glob", pattern="*", path="src") == "2 paths below src for *\n\nsrc/lib/\nsrc/main.py"
    assert call(executor, "glob", pattern="**", glob="p*") == "1 path below / for **\n\nsrc/lib/parse.py"
    assert call(executor, "glob", pattern="*.c") == "0 paths below / for *.c"


def test_braces_that_find_nothing_are_said_not_to_be_expanded(executor: ToolExecutor) -> None:
    said = "; braces are not expanded: call it once for each alternative"
    assert call(executor, "glob", pattern="*.{py,c}") == f"0 paths below / for *.{{py,c}}{said}"
    assert call(executor, "glob", pattern="**", glob="*.{py,c}") == f"0 paths below / for **{said}"
    assert call(executor, "grep", pattern="def", glob="*.{py,c}") == f"no line in / for def{said}"
    assert said not in call(executor, "grep", pattern="x{7,9}")


@pytest.mark.parametrize(
    ("tool", "arguments"), [("ls", {}), ("glob", {"pattern": "**/*.py"}), ("grep", {"pattern": "def"})]
)
def test_a_path_that_is_null_is_the_root(executor: ToolExecutor, tool: str, arguments: dict[str, str]) -> None:
    assert call(executor, tool, **arguments, path=None) == call(executor, tool, **arguments)


def test_grep_tells_of_a_pattern_as_it_was_given(executor: ToolExecutor) -> None:
    assert "missing ): ( (it has no" in refused(executor, "grep", pattern="(")


def test_glob_does_not_take_a_link_that_leads_nowhere_for_a_directory(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    files.symlink("src/dangling", "nothing")
    files.symlink("src/other", "lib")
    assert call(executor, "glob", pattern="*", path="src").splitlines()[2:] == [
        "src/dangling",
        "src/lib/",
        "src/main.py",
        "src/other/",
    ]


def test_very_many_paths_are_cut(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    for n in range(1_100):
        files.write(f"many/{n:04}", "")
    assert "[100 more: use a narrower pattern]" in call(executor, "glob", pattern="many/*")


def test_lines_are_found_by_a_regular_expression(executor: ToolExecutor) -> None:
    text = call(executor, "grep", pattern=r"^def \w+\(", glob="*.py")
    assert text == (
        "2 lines in 2 files for ^def \\w+\\(\n\nsrc/lib/parse.py:1: def parse(text):\nsrc/main.py:4: def main():"
    )
    assert call(executor, "grep", pattern=r"\Qos.name\E").endswith("src/main.py:5:     return os.name")
    assert call(executor, "grep", pattern="nothing") == "no line in / for nothing"


def test_very_many_lines_are_cut_and_that_is_said(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("many.txt", "hit\n" * 1_001)
    text = call(executor, "grep", pattern="hit")
    assert text.startswith("the first 1,000 lines in 1 file for hit")
    assert text.endswith("[there are more: use a narrower pattern, path or glob]")
    files.write("many.txt", "hit\n" * 1_000)
    assert "there are more" not in call(executor, "grep", pattern="hit")


def test_of_a_long_line_the_part_around_the_match_is_shown(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("long.txt", "a" * 5_000 + "needle" + "b" * 5_000)
    text = call(executor, "grep", pattern="needle")
    assert "needle" in text
    assert len(text) < 600


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("grep", {"pattern": "("}, "the search cannot be made"),
        ("grep", {"pattern": ""}, "empty"),
        ("grep", {"pattern": "x", "path": "scr"}, "did you mean src"),
        ("grep", {"pattern": "x", "literal": True}, "literal"),
        ("glob", {"pattern": "  "}, "blank"),
        ("glob", {"pattern": "../*"}, "'..'"),
        ("glob", {"pattern": "*", "path": "scr"}, "did you mean src"),
        ("glob", {"pattern": "*", "path": "README.md"}, "is not a directory"),
    ],
)
def test_what_cannot_be_searched(executor: ToolExecutor, tool: str, arguments: dict[str, object], said: str) -> None:
    assert said in refused(executor, tool, **arguments)


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
        "read_file": ["file_path", "offset", "limit"],
        "write_file": ["file_path", "content"],
        "edit_file": ["file_path", "old_string", "new_string", "replace_all"],
        "apply_patch": ["patch"],
        "move": ["source", "target"],
        "glob": ["pattern", "path", "glob"],
        "grep": ["pattern", "path", "glob"],
        "rm": ["path", "recursive"],
    }
    found: dict[str, list[str]] = {}
    for tool in file_tools():
        assert tool.params_type is not None
        properties = serde.schema(tool.params_type)["properties"]
        assert isinstance(properties, dict)
        assert all("description" in field for field in properties.values())
        found[tool.name] = list(properties)
    assert found == promised


def test_tools_that_change_nothing_say_so_and_the_others_say_what_they_change() -> None:
    assert {tool.name for tool in file_tools() if tool.read_only} == {"ls", "read_file", "glob", "grep"}
    assert {tool.name for tool in file_tools() if tool.writes is None} == {"ls", "read_file", "glob", "grep"}


@pytest.fixture
def repository(files: InMemoryFilesystem) -> None:
    for path in (".git/logs/HEAD", "src/.git/logs", "z.txt", ".gitignore"):
        files.write(path, "needle\n" * (1200 if path == ".git/logs/HEAD" else 1))


@pytest.mark.usefixtures("repository")
def test_a_search_leaves_out_gits_own_data(free: ToolExecutor) -> None:
    found = call(free, "grep", pattern="needle")
    assert found == "2 lines in 2 files for needle\n\n.gitignore:1: needle\nz.txt:1: needle"
    paths = call(free, "glob", pattern="**/*")
    assert "\n.git/" not in paths
    assert "\n.gitignore" in paths


@pytest.mark.usefixtures("repository")
def test_a_search_that_names_gits_own_data_finds_it(free: ToolExecutor) -> None:
    assert call(free, "grep", pattern="needle", path=".git").startswith("the first ")
    assert "src/.git/logs:1: needle" in call(free, "grep", pattern="needle", glob="src/.git/*")
    assert ".git/logs/HEAD" in call(free, "glob", pattern="**/*", path=".git")
    assert "1 path below / for .git/logs/*" in call(free, "glob", pattern=".git/logs/*")


@pytest.fixture
def ignoring(files: InMemoryFilesystem) -> None:
    files.write(".gitignore", "# built\n/build/\n*.log  \n!keep.log\n\n.env\n")
    files.write("src/.gitignore", "/generated.py\n")
    for path in ("build/out.py", "a.log", "keep.log", ".env", "src/generated.py", "src/x.py", "src/build/y.py"):
        files.write(path, "needle\n")


@pytest.mark.usefixtures("ignoring")
def test_a_search_leaves_out_what_gitignore_files_name(free: ToolExecutor) -> None:
    found = call(free, "grep", pattern="needle")
    left_out = "; left out, as git ignores them: .env, a.log, build and 1 more (name one in path to look there)"
    assert found.splitlines() == [
        f"3 lines in 3 files for needle{left_out}",
        "",
        "keep.log:1: needle",
        "src/build/y.py:1: needle",
        "src/x.py:1: needle",
    ]
    assert "build/out.py" not in call(free, "glob", pattern="**/*.py")
    assert "\nsrc/generated.py" not in call(free, "glob", pattern="*.py", path="src")


@pytest.mark.usefixtures("ignoring")
def test_a_search_that_names_what_is_ignored_finds_it(free: ToolExecutor) -> None:
    assert "build/out.py:1: needle" in call(free, "grep", pattern="needle", path="build")
    assert "a.log:1: needle" in call(free, "grep", pattern="needle", path="a.log")
    assert "build/out.py:1: needle" in call(free, "grep", pattern="needle", glob="build/*.py")
    assert "\n.env" in call(free, "glob", pattern="**/.env")
    assert "\nbuild/out.py" in call(free, "glob", pattern="build/**")


@pytest.mark.usefixtures("ignoring")
def test_a_search_does_not_count_as_a_read_of_what_it_goes_by(executor: ToolExecutor) -> None:
    call(executor, "grep", pattern="needle")
    assert "read it first" in refused(executor, "write_file", file_path=".gitignore", content="")


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
    said = refused(executor, tool, **{name: root}, **others)
    assert f"{name} is the root" in said
    assert "read it first" not in said


def test_a_path_out_of_the_workspace_is_named_in_the_denial(executor: ToolExecutor) -> None:
    assert "../b.txt is outside of the workspace root" in refused(
        executor, "write_file", file_path="../b.txt", content="x"
    )


def test_a_path_out_of_the_workspace_is_what_the_sentence_is_about(executor: ToolExecutor) -> None:
    patch = "--- a/../b.txt\n+++ b/../b.txt\n@@ -1 +1 @@\n-a\n+b\n"
    assert "failed: ../b.txt is outside of" in refused(executor, "read_file", file_path="../b.txt")
    assert "../b.txt is outside of the workspace root" in refused(executor, "apply_patch", patch=patch)


def test_a_pattern_that_is_no_regular_expression_is_answered_with_what_the_tool_has(executor: ToolExecutor) -> None:
    said = refused(executor, "grep", pattern="main(")
    assert "literal=" not in said
    assert "\\Q" in said
    assert "def main():" in call(executor, "grep", pattern="\\Qmain(\\E")
