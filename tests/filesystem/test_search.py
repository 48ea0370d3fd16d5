from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.filesystem import InMemoryFilesystem
from ringfence.filesystem.search import AT_ONCE, grep_files, path_filter

segments = st.sampled_from(["a", "b", "ab", "*", "?", "**", "[ab]", "[!a]", "*b", "a*", "*a*", ".a", "."])
patterns = st.lists(segments, min_size=1, max_size=5).map("/".join).filter(lambda pattern: pattern.strip("./"))
trees = st.lists(st.lists(st.sampled_from(["a", "b", "ab", ".a", "ba"]), min_size=1, max_size=4), max_size=12)

REGEXES = (
    "a",
    "b+",
    "^a",
    "a$",
    "^$",
    "a|b",
    "a.b",
    "(ab)+",
    "[^a]",
    r"\s",
    r"a\s*b",
    "x*",
    "^",
    "$",
    "é",
    "[é€]b",
    r"\ba",
)
texts = st.text(alphabet="ab é€\n\r\t", max_size=60)


def naive(pattern: list[str], path: list[str]) -> bool:
    """The rules of glob, one name after the other."""
    if not pattern or not path:
        return not pattern and not path
    if pattern[0] == "**":
        last = len(pattern) == 1
        return last or naive(pattern[1:], path) or naive(pattern, path[1:])
    return fnmatchcase(path[0], pattern[0]) and naive(pattern[1:], path[1:])


@given(trees, patterns)
def test_glob_finds_what_the_rules_say(tree: list[list[str]], pattern: str) -> None:
    filesystem = InMemoryFilesystem()
    for names in tree:
        try:
            filesystem.write("/".join(names), "")
        except OSError:
            continue  # a file is where a directory should be
    everything = [match.path for match in filesystem.glob("**")]
    wanted = [name for name in pattern.split("/") if name != "."]
    expected = [path for path in everything if naive(wanted, path.split("/"))]
    assert [match.path for match in filesystem.glob(pattern)] == expected
    assert [path for path in everything if path_filter(f"./{pattern}")(path)] == expected


@pytest.mark.parametrize(
    ("pattern", "path", "wanted"),
    [
        ("*.py", "a.py", True),
        ("*.py", "deep/down/a.py", True),
        ("*.py", "a.pyc", False),
        ("d/*.py", "d/a.py", True),
        ("d/*.py", "e/d/a.py", False),
        ("**/d/*.py", "e/d/a.py", True),
        ("**", "e/d/a.py", True),
        ("d/**", "d/e/f", True),
        ("d/**", "d", False),
        ("[[:digit:]]*", "1.txt", True),
        ("caf?", "caf\udce9", True),
        ("ca[\udce0-\udcef]*", "ca\udce9", True),
    ],
)
def test_a_filter_without_a_slash_is_for_names(pattern: str, path: str, wanted: bool) -> None:
    assert path_filter(pattern)(path) is wanted


def naive_grep(text: str, regex: str) -> Iterator[tuple[int, str, int, int]]:
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        ended = number < len(lines)
        if found := re.search(regex, line.removesuffix("\r") if ended else line, re.ASCII):
            yield number, found.string, found.start(), found.end()


@given(texts, st.sampled_from(REGEXES), st.sampled_from([200, AT_ONCE]))
def test_grep_finds_what_a_search_line_by_line_finds(text: str, regex: str, at_once: int) -> None:
    found = grep_files([("a.txt", text.encode())], regex, at_once=at_once)
    places = [(match.line_number, match.line_content, match.match_start, match.match_end) for match in found]
    assert places == list(naive_grep(text, regex))


@given(texts, st.text(alphabet="ab é.*", min_size=1, max_size=3))
def test_a_literal_is_found_wherever_it_stands(text: str, literal: str) -> None:
    found = grep_files([("a.txt", text.encode())], literal, literal=True)
    places = [(match.line_number, match.line_content, match.match_start, match.match_end) for match in found]
    assert places == list(naive_grep(text, re.escape(literal)))


def test_files_are_taken_only_until_enough_is_found() -> None:
    taken: list[str] = []

    def files() -> Iterator[tuple[str, bytes]]:
        for number in range(10):
            taken.append(str(number))
            yield str(number), b"x\nx\nx\n"

    assert len(grep_files(files(), "x", max_matches=4)) == 4
    assert taken == ["0", "1"]


def test_a_bad_pattern_is_refused_before_a_file_is_taken() -> None:
    def files() -> Iterator[tuple[str, bytes]]:
        raise AssertionError("a file was asked for")
        yield "a.txt", b""

    with pytest.raises(ValueError, match="missing"):
        grep_files(files(), "(")


def test_a_search_that_takes_longer_than_a_minute_is_given_up() -> None:
    clock = map(float, range(0, 1000, 20)).__next__
    files = [(f"{number}.txt", b"x\n") for number in range(9)]
    with pytest.raises(TimeoutError, match=r"given up after 60 seconds \(in 4\.txt\): look in fewer files"):
        grep_files(files, "y$", clock=clock)


def test_a_line_that_could_take_longer_is_not_looked_at() -> None:
    files = [("a.min.js", b"short\n" + b"x" * 3_000_000)]
    with pytest.raises(TimeoutError, match=r"too large for a line of 3,000,000 bytes \(in a\.min\.js\)"):
        grep_files(files, ".{1000}.{1000}z")
    assert grep_files(files, ".{20}z") == []
    assert len(grep_files(files, ".{1000}.{1000}z|^s", max_matches=1)) == 1


def test_a_byte_order_mark_is_not_part_of_the_first_line() -> None:
    [match] = grep_files([("a.txt", b"\xef\xbb\xbfimport os\n")], "^import")
    assert (match.line_content, match.match_start) == ("import os", 0)


def test_a_file_with_a_nul_far_from_its_beginning_is_text() -> None:
    assert len(grep_files([("a.txt", b"needle\n" + b"x" * 8192 + b"\0")], "needle")) == 1
    assert len(grep_files([("a.txt", b"needle\n" + b"x" * 8000 + b"\0")], "needle")) == 0


def test_the_reason_why_a_pattern_is_refused_is_re2_s_own() -> None:
    for pattern, reason in (("(?=a)", r"\(\?="), (r"(a)\1", r"\\1"), ("[z-a]", "z-a"), ("a{1001}", "1001")):
        with pytest.raises(ValueError, match=reason):
            grep_files([], pattern)


def test_a_class_without_line_ends_is_no_line_end() -> None:
    for pattern in (r"[^\n]", r"[\n]x|y", r"\\n", r"[^]\n]+", r"[[:alpha:]\n]"):
        grep_files([], pattern)
    for pattern in (r"\n", r"a\n", r"[x]\n", r"\\\n", r"(a|\n)", r"[]]\n"):
        with pytest.raises(ValueError, match="within one line"):
            grep_files([], pattern)
