from __future__ import annotations

import json
import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.escapes import escape_path, unescaped
from ringfence.filesystem import InMemoryFilesystem
from ringfence.filesystem.paths import normalise, resolve_model_path

# Whatever bytes a directory may hold, as Python spells them.
names = st.binary(min_size=1, max_size=20).map(
    lambda name: name.replace(b"\0", b"0").replace(b"/", b"_").decode("utf-8", "surrogateescape")
)
backslashed = st.text(alphabet="\\x5cfF09aé\udce9", min_size=1, max_size=12)
paths = st.lists(st.one_of(names, backslashed), min_size=1, max_size=4).map("/".join)
spellings = st.lists(st.sampled_from(["a", "b c", ".", "..", "", "...", ".a", "é"]), max_size=8).map("/".join)


def filesystem_with(*files: str) -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    for path in files:
        filesystem.write(path, "x")
    return filesystem


@given(spellings)
def test_a_normal_path_is_what_posix_makes_of_it_below_a_root(spelling: str) -> None:
    expected = posixpath.normpath(f"top/{spelling}")
    try:
        normal = normalise(spelling)
    except PermissionError:
        depth = lowest = 0
        for name in spelling.split("/"):
            depth += {"..": -1, ".": 0, "": 0}.get(name, 1)
            lowest = min(lowest, depth)
        assert lowest < 0
    else:
        assert posixpath.join("top", normal).rstrip("/") == expected


@given(paths)
def test_normalising_again_changes_nothing(path: str) -> None:
    try:
        normal = normalise(path)
    except PermissionError:
        return
    assert normalise(normal) == normalise(f"/{normal}/") == normalise(f"./x//../{normal}") == normal


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a\0", "NUL"),
        ("d/" + "n" * 256, "255 bytes"),
        ("é" * 128, "255 bytes"),
        ("n/" * 2049, "4096 bytes"),
        ("a\ud800", "surrogate"),
        ("\udfff", "surrogate"),
    ],
)
def test_what_no_path_can_be_is_refused_with_the_reason(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        normalise(path)


def test_the_limits_themselves_are_allowed() -> None:
    assert normalise("n" * 255) == "n" * 255
    assert len(normalise("n/" * 2048)) == 4095
    assert normalise("/" * 9000 + "a") == "a"
    longest = "é" + "/n" * 2047
    assert len(normalise(longest).encode()) == 4096
    with pytest.raises(ValueError, match="4096 bytes"):
        normalise(f"{longest}n")


@given(paths)
def test_what_is_shown_can_be_read_back(path: str) -> None:
    assert unescaped(escape_path(path)) == path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


@given(paths)
def test_what_is_shown_is_plain_text(path: str) -> None:
    text = escape_path(path)
    assert text.encode("utf-8").decode("utf-8") == text
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text)
    assert json.loads(json.dumps(text, ensure_ascii=False)) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("caf\udce9.txt", r"caf\xe9.txt"),
        ("café.txt", "café.txt"),
        (r"caf\xe9.txt", r"caf\x5cxe9.txt"),
        (r"a\x0ab", r"a\x5cx0ab"),
        (r"dir\file", r"dir\file"),
        ("two\nlines", r"two\x0alines"),
        ("\x1b[31mred", r"\x1b[31mred"),
    ],
)
def test_only_what_cannot_be_shown_is_escaped(path: str, text: str) -> None:
    assert escape_path(path) == text
    assert unescaped(text) == path


def test_an_escape_for_what_no_name_can_have_stays_text() -> None:
    assert unescaped(r"a\x2fb\x00c") == r"a\x2fb\x00c"


@pytest.mark.parametrize(
    ("files", "text", "meant"),
    [
        (["a.txt"], "a.txt", "a.txt"),
        (["a.txt"], "  a.txt\n", "a.txt"),
        (["d/a.txt"], "/d//./a.txt", "d/a.txt"),
        # the exact name wins
        (["a.txt", "a.txt "], "a.txt ", "a.txt "),
        ([r"caf\xe9", "caf\udce9"], r"caf\xe9", r"caf\xe9"),
        (["caf\udce9", "caf\udce9 "], "caf\\xe9 ", "caf\udce9 "),
        # then escapes, then blanks, then both
        (["caf\udce9"], r"caf\xe9", "caf\udce9"),
        ([r"caf\xe9"], r"caf\x5cxe9", r"caf\xe9"),
        (["two\nlines"], r"two\x0alines", "two\nlines"),
        (["caf\udce9"], " caf\\xe9\n", "caf\udce9"),
        (["\\x41", "A"], r"\x41", r"\x41"),
        # what is new
        ([], "new.txt\n", "new.txt"),
        ([], "  d/new file.txt", "d/new file.txt"),
        ([], r"bin\x86\tool.c", r"bin\x86\tool.c"),
        (["caf\udce9/a"], r"caf\xe9/new\x41", "caf\udce9/new\\x41"),
        (["caf\udce9/a"], " caf\\xe9/new ", "caf\udce9/new"),
        ([" d /a"], " d /new", " d /new"),
        ([], "", ""),
        ([], "/", ""),
    ],
)
def test_a_model_means_the_first_reading_that_exists(files: list[str], text: str, meant: str) -> None:
    assert resolve_model_path(filesystem_with(*files), text) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("/workspace/a.txt", "a.txt"),
        ("/workspace", ""),
        ("/workspace/", ""),
        ("//workspace//d/../a.txt", "a.txt"),
        (" /workspace/a.txt\n", "a.txt"),
        ("/workspaces/a.txt", "workspaces/a.txt"),
        ("workspace/a.txt", "workspace/a.txt"),
        ("/a.txt", "a.txt"),
        ("a.txt", "a.txt"),
        ("/workspace/workspace/a.txt", "workspace/a.txt"),
    ],
)
def test_an_absolute_path_below_the_mount_point_loses_it(text: str, meant: str) -> None:
    filesystem = filesystem_with("a.txt")
    assert resolve_model_path(filesystem, text, mount_point="/workspace") == meant
    assert resolve_model_path(filesystem, text, mount_point="/workspace/") == meant


def test_without_a_mount_point_a_leading_slash_is_the_root() -> None:
    assert resolve_model_path(filesystem_with("a.txt"), "/workspace/a.txt") == "workspace/a.txt"
    assert resolve_model_path(filesystem_with("a.txt"), "/a.txt", mount_point="/") == "a.txt"


def test_a_dangling_link_is_something_that_exists() -> None:
    filesystem = InMemoryFilesystem()
    filesystem.symlink("link ", "nowhere")
    assert resolve_model_path(filesystem, "link ") == "link "


@pytest.mark.parametrize("text", ["../a.txt", "/../a.txt", "d/../../a.txt", "/workspace/../../etc/passwd"])
def test_what_a_model_writes_cannot_leave_the_root(text: str) -> None:
    with pytest.raises(PermissionError):
        resolve_model_path(filesystem_with("a.txt"), text, mount_point="/workspace")


@given(st.lists(paths, max_size=5), paths)
def test_what_is_shown_to_a_model_leads_back_to_the_file(files: list[str], path: str) -> None:
    filesystem = InMemoryFilesystem()
    for file in (path, *files):
        try:
            filesystem.write(file, "x")
        except (OSError, ValueError):
            continue
    for match in filesystem.glob("**"):
        if filesystem.exists(normalise(escape_path(match.path))) and escape_path(match.path) != match.path:
            continue  # another file has that very name, and the exact name wins
        meant = resolve_model_path(filesystem, escape_path(match.path))
        assert filesystem.resolve(meant) == match.path
