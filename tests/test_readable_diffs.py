"""Patches for a person: a binary file is shown as text where it is nearly text, and else by size and hash."""

from __future__ import annotations

import codecs
import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.filesystem.diff import REVERSIBLE_BYTES, FileState, unified_diff
from ringfence.filesystem.readable_diff import readable_patch

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
    assert (readable_patch(patch) == patch) is (b"GIT binary patch\n" not in patch)


def test_the_patch_for_programs_is_still_one_for_git(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n")
    patch = unified_diff("a", FileState(b"one\n"), FileState(b"on\0e\n"))
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "a").read_bytes() == b"on\0e\n"
