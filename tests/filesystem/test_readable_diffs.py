"""Patches for a person: a binary file is shown as text where it is nearly text, and else by size and hash."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patches import REVERSIBLE_BYTES, FileState, readable_patch, unified_diff

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0"


def shown(before: bytes | None, after: bytes | None) -> str:
    states = [None if content is None else FileState(content) for content in (before, after)]
    return readable_patch(unified_diff("a", *states)).decode()


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (b"one\ntwo\n", b"one\ntw\0o\n", [" one", "-two", "+tw\\x00o"]),
        (None, b"a line with one \0\n", ["+a line with one \\x00"]),
        (b"a line with one \0 in it\n", None, ["-a line with one \\x00 in it"]),
        (
            codecs.BOM_UTF16_LE + "é = 1\n".encode("utf-16-le"),
            codecs.BOM_UTF16_LE + "é = 2\n".encode("utf-16-le"),
            ["-é = 1", "+é = 2"],
        ),
    ],
)
def test_what_is_nearly_text_is_shown_as_text(before: bytes | None, after: bytes | None, lines: list[str]) -> None:
    text = shown(before, after)
    assert "GIT binary patch" not in text
    assert text.startswith("diff --git a/a b/a\n")
    assert text.partition(" @@\n")[2].splitlines() == lines


def test_of_any_other_binary_file_sizes_and_hashes_are_shown() -> None:
    digest = hashlib.sha256(PNG).hexdigest()[:16]
    assert shown(None, PNG).endswith(f"binary, nothing -> {len(PNG)} bytes (sha256 {digest})\n")
    assert shown(PNG, b"text\n").splitlines()[-1].startswith(f"binary, {len(PNG)} bytes (sha256 {digest}) -> 5 bytes")
    large = PNG + bytes(REVERSIBLE_BYTES)
    assert "binary, not shown -> " in shown(large, PNG)


TEXT = "h\u00e9llo \\x00 one two\n"
ENCODINGS = {
    "UTF-8": TEXT.encode(),
    "UTF-16 (little endian)": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "UTF-16 (big endian)": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "UTF-16 (little endian) without a byte order mark": TEXT.encode("utf-16-le"),
    "UTF-32 (big endian)": codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
}


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(ENCODINGS, 2)])
def test_where_only_the_encoding_changes_both_are_shown(one: str, other: str) -> None:
    before, after = ENCODINGS[one], ENCODINGS[other]
    sizes = [f"{len(text)} bytes (sha256 {hashlib.sha256(text).hexdigest()[:16]})" for text in (before, after)]
    assert shown(before, after).splitlines()[-1] == f"encoding, {sizes[0]} in {one} -> {sizes[1]} in {other}"


def test_where_the_text_changes_with_its_encoding_both_changes_are_shown() -> None:
    text = shown(ENCODINGS["UTF-8"], codecs.BOM_UTF16_LE + "other\n".encode("utf-16-le"))
    assert "\nencoding, " in text
    assert text.endswith("-h\u00e9llo \\x5cx00 one two\n+other\n")


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (rb"echo \x00", b"echo \0", [r"-echo \x5cx00", r"+echo \x00"]),
        (rb"echo \x5cx00", rb"echo \x00", [r"-echo \x5cx5cx00", r"+echo \x5cx00"]),
        (b"echo \\\0", rb"echo \\x00", [r"-echo \\x00", r"+echo \\x5cx00"]),
        (rb"echo \u200b", "echo \u200b".encode(), [r"-echo \x5cu200b", "+echo \u200b"]),
        (rb"C:\temp", rb"C:\tmp", [r"-C:\temp", r"+C:\tmp"]),
    ],
)
def test_an_escape_in_the_file_is_no_escaped_character(before: bytes, after: bytes, lines: list[str]) -> None:
    rest = b"\nand more text behind a \0\n"
    assert shown(before + rest, after + rest).partition(" @@\n")[2].splitlines()[:2] == lines


@given(*[st.text("a\\x05c\0", max_size=12)] * 2)
def test_no_two_different_files_are_shown_alike(one: str, other: str) -> None:
    rest = "text " * 30 + "\0"
    pages = [shown(None, (text + rest).encode()).partition(" @@\n")[2] for text in (one, other)]
    assert (one == other) is (pages[0] == pages[1])


def test_other_files_of_the_patch_stay_as_they_are() -> None:
    text = unified_diff("b", None, FileState(b"+GIT binary patch\nGIT binary patch\n"))
    binary = unified_diff("a", None, FileState(PNG))
    assert readable_patch(text) == text
    both = readable_patch(text + binary + text)
    assert both.startswith(text)
    assert both.endswith(text)
    assert b"GIT binary patch\nliteral" not in both


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_every_patch_becomes_readable(before: bytes, after: bytes) -> None:
    patch = unified_diff("a", FileState(before), FileState(after))
    assert (readable_patch(patch) == patch) is (b"\nGIT binary patch\n" not in patch)  # else a line of a text


def test_the_patch_for_programs_is_still_one_for_git(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n")
    patch = unified_diff("a", FileState(b"one\n"), FileState(b"on\0e\n"))
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a").read_bytes() == b"on\0e\n"
