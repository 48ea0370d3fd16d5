"""Replacing text in a file's bytes: what is replaced, what stays, and what is said where nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringfence.filesystem.edits import replace_exact
from ringfence.filesystem.near_misses import MAX_COUNTED, best_place, describe_difference


def error(content: bytes | str, old: str, new: str = "something else", *, replace_all: bool = False) -> str:
    with pytest.raises(ValueError) as raised:
        replace_exact(content.encode() if isinstance(content, str) else content, old, new, replace_all=replace_all)
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "old", "new", "expected"),
    [
        (b"one two three", "two", "2", b"one 2 three"),
        (b"a\nb\nc", "b", "", b"a\n\nc"),
        (b"a\nb\nc", "b\n", "", b"a\nc"),
        (b"no end", "end", "final newline", b"no final newline"),
        (b"\xef\xbb\xbfimport a\n", "import a", "import b", b"\xef\xbb\xbfimport b\n"),
        (b"caf\xe9 = 1\n", " = 1", " = 2", b"caf\xe9 = 2\n"),
        ("größe = 1\r\n".encode(), "größe", "länge", "länge = 1\r\n".encode()),
        (b"a\rb\rc", "b", "x", b"a\rx\rc"),
        (b"a\x00b", "b", "c", b"a\x00c"),
    ],
    ids=repr,
)
def test_only_the_match_changes(content: bytes, old: str, new: str, expected: bytes) -> None:
    assert replace_exact(content, old, new).content == expected


@pytest.mark.parametrize(
    ("content", "old", "new", "expected"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz", b"x\r\ny\r\nz\r\nc\r\n"),
        (b"a\r\nb\r\nc", "b", "x\ny", b"a\r\nx\r\ny\r\nc"),
        (b"a\r\nb", "b", "x\ny", b"a\r\nx\r\ny"),
        (b"a\nb\r\nc\n", "a", "x\ny", b"x\ny\nb\r\nc\n"),
        (b"a\r\nb\r\n", "\nb\n", "\n", b"a\r\n"),
        (b"alone", "alone", "x\ny", b"x\ny"),
        (b"a\r\nb\nc\nd", "a\nb\nc\nd", "a\nX\nY\nc\nd", b"a\r\nX\nY\nc\nd"),
        (b"a\r\nb\nc", "a\nb\nc", "a\nc", b"a\r\nc"),
        (b"a\nb\r\nc", "a\nb\nc", "x\nb\nc", b"x\nb\r\nc"),
        # With a \r of its own the text says which line ends it means.
        (b"a\r\nb\n", "a\r\nb", "a\nb", b"a\nb\n"),
        (b"a\nb\n", "a\nb", "a\r\nb", b"a\r\nb\n"),
        (b"a\nb\n", "a\r\nb", "x\r\ny", b"x\ny\n"),
        (b"a\r\nb\r\n", "a\nb", "x\r\ny", b"x\r\ny\r\n"),
        (b"a\r\r\nb", "a\r\r\nb", "c", b"c"),
    ],
    ids=repr,
)
def test_line_ends_are_those_of_the_file_there(content: bytes, old: str, new: str, expected: bytes) -> None:
    assert replace_exact(content, old, new).content == expected


def test_every_occurrence_is_replaced_with_the_line_ends_it_has() -> None:
    edit = replace_exact(b"a\nb\n-\na\r\nb\r\n", "a\nb", "x\ny\nz", replace_all=True)
    assert edit.content == b"x\ny\nz\n-\nx\r\ny\r\nz\r\n"
    assert (edit.count, edit.lines) == (2, (1, 5))


@given(
    before=st.binary(max_size=30),
    old=st.text("ab\n", min_size=1, max_size=4),
    new=st.text("abc\n", max_size=4),
    after=st.binary(max_size=30),
)
def test_one_exact_match_is_spliced(before: bytes, old: str, new: str, after: bytes) -> None:
    content = before + old.encode() + after
    assume(b"\r" not in content and old != new and content.find(old.encode()) == content.rfind(old.encode()))
    assert replace_exact(content, old, new).content == before + new.encode() + after


@given(lines=st.lists(st.sampled_from(["a", "b", "xy", ""]), max_size=12), old=st.text("abx\n", min_size=1, max_size=4))
def test_a_crlf_file_is_edited_as_its_lf_twin(lines: list[str], old: str) -> None:
    twin = "\n".join(lines)
    try:
        edited = replace_exact(twin.encode(), old, "N\nM", replace_all=True)
    except ValueError:
        assert old not in twin
        with pytest.raises(ValueError):
            replace_exact(twin.replace("\n", "\r\n").encode(), old, "N\nM", replace_all=True)
        return
    crlf = replace_exact(twin.replace("\n", "\r\n").encode(), old, "N\nM", replace_all=True)
    assert crlf.lines == edited.lines
    if "\n" in twin:
        assert crlf.content == edited.content.replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    ("content", "old", "lines"),
    [
        ("a\nb\na\n", "a", "lines 1, 3"),
        ("}\n}\n}\n", "}\n}\n", "lines 1, 2"),
        ("aaa", "aa", "lines 1, 1"),
        ("a\nb\n-\na\r\nb\r\n", "a\nb", "lines 1, 4"),
    ],
)
def test_an_ambiguous_match_is_refused_with_its_lines(content: str, old: str, lines: str) -> None:
    message = error(content, old)
    assert "occurs 2 times" in message
    assert lines in message
    assert "replace_all" in message


def test_the_lines_of_very_many_matches_are_not_all_listed() -> None:
    message = error(b"x\n" * (MAX_COUNTED + 5), "x")
    assert "more than 10,000 times" in message
    assert len(message) < 400


@pytest.mark.parametrize(("old", "new", "said"), [("", "x", "empty"), ("x", "x", "same"), ("\ud800", "x", "surrogate")])
def test_an_edit_that_cannot_be_meant_is_refused(old: str, new: str, said: str) -> None:
    assert said in error("x", old, new)


def test_an_edit_that_leaves_the_file_as_it_is_is_refused() -> None:
    assert "stands there already" in error("a\nb\n", "a\r\nb", "a\nb")


@pytest.mark.parametrize(
    ("content", "old", "words"),
    [
        ("def f():\n\treturn 1\n", "def f():\n    return 1\n", "tabs against spaces"),
        ("def f():\n    return 1\n", "def f():\n  return 1", "the indentation"),
        ("a\u00a0b = 1\n", "a b = 1", "(NO-BREAK SPACE)"),
        ("a\u200bb = 1\n", "ab = 1", "(ZERO WIDTH SPACE)"),
        ("x = \u201chi\u201d\n", 'x = "hi"', "(LEFT DOUBLE QUOTATION MARK, RIGHT DOUBLE QUOTATION MARK)"),
        ("1\u20132\n", "1-2", "(EN DASH)"),
        ("foo(a, b)\n", "foo( a,b )", "blanks inside a line"),
        ("a = 1   \nb = 2\n", "a = 1\nb = 2", "blanks at the end of a line"),
        ("Hello World\n", "hello world", "upper and lower case"),
    ],
)
def test_a_near_miss_is_shown_with_what_differs(content: str, old: str, words: str) -> None:
    message = error(f"first\n{content}", old)
    assert words in message
    assert "ine" in message
    assert "2" in message
    assert content.split("\n", maxsplit=1)[0] in message


@pytest.mark.parametrize(
    ("content", "old", "said"),
    [
        ("foo\nbar\n", "  1 | foo\n  2 | bar", "without the line numbers"),
        ("foo\nbar\n", "     1\tfoo\n     2\tbar", "without the line numbers"),
        ("foo\nbar\n", "foo\\nbar", "as two characters"),
        ('say("x")\n', 'say(\\"x\\")', "as two characters"),
        ("something else\n", "missing", "in the file already"),
        ("caf\udce9\n", "caf\u00e9", "not UTF-8"),
    ],
)
def test_a_usual_mistake_is_named(content: str, old: str, said: str) -> None:
    assert said in error(content.encode("utf-8", "surrogateescape"), old)


def test_the_best_place_for_several_lines_is_shown_with_the_first_that_differs() -> None:
    message = error("one\ntwo\nthree\nfour\nfive\n", "two\nthreee\nfour")
    assert "Lines 2 to 4" in message
    assert "2 of 3 lines" in message
    assert "Line 3 is\n'three'\nwhere old_string has\n'threee'" in message


def test_the_nearest_lines_are_shown_for_one_that_is_unlike_any() -> None:
    message = error(
        "import os\nif current is not None and not (current.a == b):\n    pass\n",
        "if current is not None and current.a != b:",
    )
    assert "2: 'if current is not None and not (current.a == b):'" in message


def test_nothing_near_is_said_plainly() -> None:
    assert "Read the file again" in error("abc\n", "zzzzzzzz")


@pytest.mark.parametrize(
    ("content", "old"),
    [
        (b"a" * 3_000_000, "a" * 100_000 + "b"),
        (b"a\n" * 1_500_000, "a\n" * 50_000 + "b"),
        (b"".join(b"    some text, number %d\n" % n for n in range(100_000)), "some text, numbre 777"),
        (b"\r\n" * 1_000_000, "a\n\n"),
    ],
    ids=["one letter", "one line", "many lines", "line ends"],
)
def test_a_miss_in_a_large_file_is_told(content: bytes, old: str) -> None:
    # A fraction of a second; a search by regular expression takes so many minutes that the run would be ended.
    assert "old_string" in error(content, old)


def test_texts_that_do_not_look_alike_differ_in_nothing_that_has_a_name() -> None:
    assert describe_difference("foo", "bar") == ""
    assert describe_difference("foo", "foo") == ""


def test_the_best_place_of_several_is_the_nearest() -> None:
    lines = ["a", "b", "x", "a", "b", "y"]
    assert best_place(lines, ["a", "b", "z"]) == (0, 2)
    assert best_place(lines, ["a", "b", "z"], near=4) == (3, 2)
    assert best_place(lines, ["", "q"]) is None
