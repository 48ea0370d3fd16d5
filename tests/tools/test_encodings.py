"""Text files that are not UTF-8: read, searched, edited and patched in their encoding, or refused with a reason."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.filesystem.encodings import as_utf8, check_encoding, from_utf8, wide_encoding
from ringfence.prompt import Prompt, PromptTemplate, ToolResult
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import VfsToolsSection

TEXT = "Grüße = 1\r\nname = 'x'\r\nlast = 3"
WIDE = {
    "utf-16 le": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "utf-16 be": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32 le": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
    "utf-32 be": codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
    "utf-16 le bare": TEXT.encode("utf-16-le"),
    "utf-16 be bare": TEXT.encode("utf-16-be"),
    "utf-32 le bare": TEXT.encode("utf-32-le"),
    "cjk with a mark": codecs.BOM_UTF16_LE + ("\u6f22\u5b57" * 9000 + TEXT).encode("utf-16-le"),
}
BINARY = {
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01",
    "elf": b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0>\0\x01\0\0\0",
    "zeros": bytes(64),
    "numbers of two bytes": b"".join(number.to_bytes(2, "little") for number in range(40)),
    "one NUL": b"a text with one \0 in it\n",
    "half a character after a mark": codecs.BOM_UTF16_LE + b"a\0b\0c",
    "half of a surrogate pair": codecs.BOM_UTF16_LE + b"a\0\0\xd8b\0",
    "a little": b"a\0b\0",
}


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    if request.param == "memory":
        yield InMemoryFilesystem()
    else:
        root = tmp_path / "root"
        root.mkdir()
        with HostFilesystem(root, store=tmp_path / "store") as filesystem:
            yield filesystem


@pytest.fixture
def executor(files: Filesystem) -> Iterator[ToolExecutor]:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="tests", key="files", sections=[section]))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session)


def answer(executor: ToolExecutor, tool: str, **arguments: object) -> tuple[bool, str]:
    answered = executor.execute(tool, arguments)
    result: ToolResult[object] = answered.result
    return result.success, answered.text


@pytest.mark.parametrize("kind", WIDE)
def test_wide_text_is_read_as_text_and_named(files: Filesystem, executor: ToolExecutor, kind: str) -> None:
    files.write_bytes("a.txt", WIDE[kind])
    success, text = answer(executor, "read_file", file_path="a.txt", offset=1)
    assert success
    assert "2 | name = 'x'\n3 | last = 3\n" in text
    assert ("UTF-32" if "32" in kind else "UTF-16") in text


@pytest.mark.parametrize("kind", WIDE)
def test_wide_text_is_searched(files: Filesystem, executor: ToolExecutor, kind: str) -> None:
    files.write_bytes("d/a.txt", WIDE[kind])
    for path in ("", "d/a.txt"):
        assert "d/a.txt:2: name = 'x'" in answer(executor, "grep", pattern="^name = .x.$", path=path)[1]
        assert "Grüße" in answer(executor, "grep", pattern="Grüße", path=path)[1]


@pytest.mark.parametrize("kind", WIDE)
def test_an_edit_and_a_patch_keep_the_encoding(files: Filesystem, executor: ToolExecutor, kind: str) -> None:
    content = WIDE[kind]
    files.write_bytes("a.txt", content)
    assert answer(executor, "read_file", file_path="a.txt", offset=1)[0]
    assert answer(executor, "edit_file", file_path="a.txt", old_string="'x'\nlast", new_string="'\u00fc'\nend")[0]
    codec = wide_encoding(content[:8192])
    assert codec is not None
    edited = codec.encode(codec.decode(content).replace("'x'\r\nlast", "'\u00fc'\r\nend"))
    assert files.read_bytes("a.txt").content == edited
    mark = "\\ No newline at end of file\n"
    hunk = f"@@ -2,2 +2,2 @@\n name = '\u00fc'\n-end = 3\n{mark}+new = \u00e9\n{mark}"
    assert answer(executor, "read_file", file_path="a.txt", offset=1)[0]
    assert answer(executor, "apply_patch", patch=f"--- a/a.txt\n+++ b/a.txt\n{hunk}")[0]
    assert files.read_bytes("a.txt").content == codec.encode(codec.decode(edited).replace("end = 3", "new = \u00e9"))


def test_wide_text_is_overwritten_only_once_all_of_it_was_read(files: Filesystem, executor: ToolExecutor) -> None:
    files.write_bytes("a.txt", WIDE["utf-16 le"])
    assert not answer(executor, "write_file", file_path="a.txt", content="x")[0]
    assert answer(executor, "read_file", file_path="a.txt", limit=1)[0]
    assert not answer(executor, "write_file", file_path="a.txt", content="x")[0]
    assert answer(executor, "read_file", file_path="a.txt", offset=1)[0]
    assert answer(executor, "write_file", file_path="a.txt", content="x")[0]
    assert files.read_bytes("a.txt").content == b"x"


@pytest.mark.parametrize("kind", BINARY)
def test_a_binary_file_is_not_taken_for_text(files: Filesystem, executor: ToolExecutor, kind: str) -> None:
    files.write_bytes("a.txt", BINARY[kind])
    success, text = answer(executor, "read_file", file_path="a.txt")
    assert success
    assert "kind: binary\n" in text
    assert hashlib.sha256(BINARY[kind]).hexdigest() in text
    assert answer(executor, "write_file", file_path="a.txt", content="x")[0]


def test_another_encoding_is_read_if_it_is_named(files: Filesystem, executor: ToolExecutor) -> None:
    files.write_bytes("a.txt", "caf\u00e9\nth\u00e9\n".encode("cp1252"))
    escaped = answer(executor, "read_file", file_path="a.txt")[1]
    assert "caf\\xe9" in escaped
    assert "name the encoding" in escaped
    named = answer(executor, "read_file", file_path="a.txt", encoding="cp1252", limit=1)[1]
    assert "1 | caf\u00e9" in named
    assert "decoded as cp1252" in named
    assert not answer(executor, "write_file", file_path="b.txt", content="x", encoding="cp1252")[0]
    files.write_bytes("b.txt", "\u6f22\u5b57\n".encode("shift_jis"))
    assert "1 | \u6f22\u5b57" in answer(executor, "read_file", file_path="b.txt", encoding="Shift_JIS")[1]
    files.write_bytes("c.txt", "\u6f22\u5b57\n\u5b57".encode("utf-16-be"))
    assert "2 | \u5b57" in answer(executor, "read_file", file_path="c.txt", encoding="utf-16-be")[1]


@pytest.mark.parametrize("name", ["", "no-such", "base64", "rot13", "idna", "punycode", "unicode_escape", "undefined"])
def test_an_encoding_that_is_none_of_text_is_refused(files: Filesystem, executor: ToolExecutor, name: str) -> None:
    files.write_bytes("a.txt", b"x")
    success, text = answer(executor, "read_file", file_path="a.txt", encoding=name)
    assert not success
    assert "is no encoding" in text


def test_a_wrong_encoding_is_an_error_and_no_read(files: Filesystem, executor: ToolExecutor) -> None:
    files.write_bytes("a.txt", b"caf\xe9\n")
    success, text = answer(executor, "read_file", file_path="a.txt", encoding="utf-8")
    assert not success
    assert "is not utf-8 text" in text
    assert not answer(executor, "write_file", file_path="a.txt", content="x")[0]


def test_text_that_is_not_ascii_is_not_mixed_into_another_encoding(files: Filesystem, executor: ToolExecutor) -> None:
    content = b"caf\xe9 = 1\nplain\n"
    files.write_bytes("a.txt", content)
    assert answer(executor, "read_file", file_path="a.txt")[0]
    success, text = answer(executor, "edit_file", file_path="a.txt", old_string="1", new_string="\u00e9")
    assert not success
    assert "another encoding than UTF-8" in text
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -2 +2,2 @@\n plain\n+\u00e9\n"
    success, text = answer(executor, "apply_patch", patch=patch)
    assert not success
    assert "another encoding than UTF-8" in text
    assert files.read_bytes("a.txt").content == content
    assert answer(executor, "edit_file", file_path="a.txt", old_string="1", new_string="2")[0]
    assert files.read_bytes("a.txt").content == b"caf\xe9 = 2\nplain\n"


def test_a_file_that_has_utf_8_beside_other_bytes_takes_more_of_it(files: Filesystem, executor: ToolExecutor) -> None:
    files.write_bytes("a.log", "\u00e9 = 1\n".encode() + b"\xff\n")
    assert answer(executor, "read_file", file_path="a.log")[0]
    assert answer(executor, "edit_file", file_path="a.log", old_string="1", new_string="\u00fc")[0]
    assert files.read_bytes("a.log").content == "\u00e9 = \u00fc\n".encode() + b"\xff\n"


@given(st.text(min_size=1), st.sampled_from(["utf-16", "utf-32"]), st.sampled_from(["le", "be"]))
def test_text_with_a_mark_goes_to_utf_8_and_back(text: str, width: str, order: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    mark = getattr(codecs, f"BOM_UTF{width[4:]}_{order.upper()}")
    content = mark + text.encode(f"{width}-{order}")
    utf8, encoding = as_utf8(content)
    if encoding is not None:  # of UTF-16 that begins with a NUL, UTF-32 is the other reading
        assert from_utf8(utf8, encoding) == content
    if not text.startswith("\0"):
        assert utf8 == text.encode()


@given(st.binary(max_size=60))
def test_any_bytes_go_to_utf_8_and_back(content: bytes) -> None:
    assert from_utf8(*as_utf8(content)) == content


def test_encodings_have_the_names_that_python_has_for_them() -> None:
    assert [check_encoding(name) for name in ("UTF8", "latin-1", "utf_16", "SJIS")] == [
        "utf-8", "iso8859-1", "utf-16", "shift_jis",
    ]  # fmt: skip


def test_a_read_behind_the_end_makes_no_line_known(files: Filesystem, executor: ToolExecutor) -> None:
    files.write_bytes("a.txt", b"caf\xe9\n")
    assert answer(executor, "read_file", file_path="a.txt", offset=5)[0]
    assert not answer(executor, "write_file", file_path="a.txt", content="x")[0]
