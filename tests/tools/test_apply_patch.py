"""Unified diffs: how they are read, how they fit a file, and the tool that applies them to many files or to none."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from patches import EXECUTABLE, FilePatch, Patched, apply_patch, parse_patch

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate, ToolResult
from ringfence.runtime import Session
from ringfence_tools import VfsToolsSection

NUMBERS = "".join(f"{n}\n" for n in range(1, 21))


def applied(patch: str | bytes, content: str | bytes | None) -> Patched:
    (file,) = parse_patch(patch)
    return apply_patch(file, content.encode() if isinstance(content, str) else content)


def result(patch: str | bytes, content: str | bytes | None) -> bytes:
    patched = applied(patch, content)
    assert patched.problems == ()
    return patched.content


def hunk(text: str) -> str:
    return f"--- a/f\n+++ b/f\n{text}"


# Reading


@pytest.mark.parametrize(
    ("header", "source", "target"),
    [
        ("--- a/x\n+++ b/x\n", "x", "x"),
        ("--- x\n+++ x\n", "x", "x"),
        ("--- a/x\n+++ a/x\n", "a/x", "a/x"),
        ("--- a/d/x y\t\n+++ b/d/x y\t\n", "d/x y", "d/x y"),
        ("--- a/x\t2026-01-01 10:00:00.0 +0100\n+++ b/x\t2026-01-02 10:00:00.0 +0100\n", "x", "x"),
        ("--- a/x\t2026-01-01 10:00:00.0 +0100\n+++ /dev/null\t1970-01-01 01:00:00.0 +0100\n", "x", None),
        ("--- /dev/null\n+++ b/x\n", None, "x"),
        ('--- "a/\\303\\244\\t\\"x"\n+++ "b/\\303\\244\\t\\"x"\n', 'ä\t"x', 'ä\t"x'),
        ('--- "a/caf\\351"\n+++ "b/caf\\351"\n', "caf\udce9", "caf\udce9"),
        ("diff --git a/x b/x\nindex 1234567..89abcde 100644\n--- a/x\n+++ b/x\n", "x", "x"),
        ("diff --git b/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n", None, "b/x"),
        ("diff --git i/x w/x\n--- i/x\n+++ w/x\n", "x", "x"),
        ("diff --git a/x y b/x y\n--- a/x y\t\n+++ b/x y\t\n", "x y", "x y"),
        ("diff --git a/o b/n\nsimilarity index 90%\nrename from o\nrename to n\n--- a/o\n+++ b/n\n", "o", "n"),
        ("From: somebody\n\n---\n f | 2 +-\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n", "x", "x"),
        ("Index: x\n=====\n--- x\t(revision 1)\n+++ x\t(working copy)\n", "x", "x"),
        ("```diff\n--- a/x\n+++ b/x\n", "x", "x"),
    ],
)
def test_the_names_of_a_header(header: str, source: str | None, target: str | None) -> None:
    (file,) = parse_patch(f"{header}@@ -1 +1 @@\n-a\n+b\n")
    assert (file.source, file.target) == (source, target)
    assert len(file.hunks) == 1


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("new file mode 100755\nindex 0000000..e69de29\n", FilePatch(None, "x", new_mode=EXECUTABLE)),
        ("deleted file mode 100755\nindex e69de29..0000000\n", FilePatch("x", None, old_mode=EXECUTABLE)),
        ("old mode 100755\nnew mode 100644\n", FilePatch("x", "x", (), EXECUTABLE, 0o100644)),
        ("rename from x\nrename to d/y\n", FilePatch("x", "d/y")),
        ("copy from x\ncopy to y\n", FilePatch("x", "y", copy=True)),
    ],
)
def test_a_header_of_git_that_says_it_all(header: str, expected: FilePatch) -> None:
    assert parse_patch(f"diff --git a/x b/x\n{header}") == (expected,)


@pytest.mark.parametrize("after", ["", "\n", "\n\n", "-- \n2.39.5\n\n", "```\n", "\nSome text.\n", "   \n"])
def test_what_follows_a_counted_hunk_is_passed_over(after: str) -> None:
    assert result(hunk(f"@@ -1,2 +1,2 @@\n a\n-b\n+c\n{after}"), "a\nb\n") == b"a\nc\n"


@pytest.mark.parametrize(
    "header",
    [
        "@@ -1,3 +1,3 @@",
        "@@ -1,9 +1,9 @@",
        "@@ -1,1 +1,1 @@",
        "@@ -1 +1 @@",
        "@@ -1,3 +1,3 @@ def f():",
        "@@",
        "@@ def f():",
        "@@ ... @@",
        pytest.param(f"@@ -{'9' * 5000},3 +1,3 @@", id="5,000 digits"),
    ],
)
@pytest.mark.parametrize("after", ["", "\n", "```\n", "\n--- a/g\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n"])
def test_counts_that_are_wrong_or_missing_are_counted_anew(header: str, after: str) -> None:
    first = parse_patch(hunk(f"{header}\n a\n-b\n+x\n c\n{after}"))[0]
    assert apply_patch(first, b"a\nb\nc\n").content == b"a\nx\nc\n"


def test_lines_that_look_like_headers_are_lines_where_they_are_counted() -> None:
    patch = hunk("@@ -1,3 +1,3 @@\n \n--- a/g\n+++ b/g\n \n@@ -7 +7 @@\n-7\n+8\n")
    assert result(patch, "\n-- a/g\n\n4\n5\n6\n7\n") == b"\n++ b/g\n\n4\n5\n6\n8\n"


def test_an_empty_line_is_a_line_that_stays() -> None:
    assert result(hunk("@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n"), "a\n\nb\n") == b"a\n\nc\n"
    assert result(hunk("@@ -1,3 +1,3 @@\n a\r\n\r\n-b\r\n+c\r\n"), "a\r\n\r\nb\r\n") == b"a\r\n\r\nc\r\n"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "names no file"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 of the patch: this hunk belongs to no file"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "two different files"),
        ("diff --git a/x b/x\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "different files"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "cannot be told which file"),
        ("--- a/x\n+++ b/x\n", "nothing is said about what to change in x"),
        ("diff --git a/x b/x\nindex 1..2 100644\n", "nothing is said"),
        (hunk("@@ -1,3 +1,3 @@\n a\nb\n-c\n+d\n"), "line 5 of the patch: each line of a hunk begins with"),
        (hunk("@@ -1,2 +1,2 @@\n a\n-b\n+c\nd\n-e\n+f\n"), "line 8 of the patch: this line is in no hunk"),
        (hunk("@@ -1 +1 @@\n"), "no lines"),
        (hunk("@@ -1 +1 @@\n\\ No newline at end of file\n-a\n+b\n"), "line 4 of the patch: .* belongs below"),
        (hunk("@@ -1 +1,2 @@\n-a\n+b\n\\ No newline at end of file\n+c\n"), "line 6 of the patch: .* belongs below"),
        (hunk("@@ -1 +1 @@\n-a\n+b\n\\ No newline\n\\ No newline\n"), "line 7 of the patch: .* stands here twice"),
        (hunk("@@ -1,2 +1,2 @@\n\\begin{a}\n-a\n+b\n"), "line 4 of the patch: each line of a hunk begins with"),
        (hunk("@@@ -1 -1 +1 @@@\n  a\n"), "merge"),
        ("diff --cc x\n--- a/x\n+++ b/x\n", "merge"),
        ("diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIc${kh\n\n", "binary"),
        ("diff --git a/x b/x\nindex 1..2\nBinary files a/x and b/x differ\n", "binary"),
        ("Binary files a/x and b/x differ\n", "binary"),
        ("diff --git a/m b/m\nindex 1..2 160000\n--- a/m\n+++ b/m\n@@ -1 +1 @@\n-S\n+T\n", "submodule"),
        ("diff --git a/m b/m\nold mode x\nnew mode y\n", "not a file mode"),
        (hunk("@@ -1 +1 @@\n-a\n+\ud800\n"), "surrogate"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(patch: str, said: str) -> None:
    with pytest.raises(ValueError, match="(?s).*" + said):
        parse_patch(patch)


FIRST, SECOND = (f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-a\n+b\n" for name in "fg")
ENVELOPE = "*** Begin Patch\n*** Update File: g\n@@\n-a\n+b\n*** End Patch\n"
MAIL = "From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001\n\n-v is new\n---\n f | 2 +-\n\n"


@pytest.mark.parametrize(
    "text",
    [
        FIRST + ENVELOPE,
        ENVELOPE + "Then:\n" + ENVELOPE,
        ENVELOPE + SECOND,
        f"- a list\n---\n```diff\n{FIRST}```\n- one\n* two\n```diff\n{SECOND}```\n- three\n",
        f"{MAIL}diff --git a/f b/f\n{FIRST}-- \n2.39.5\n\n{MAIL}diff --git a/g b/g\n{SECOND}--\n2.39.5 (git)\n",
        FIRST.replace("-1 +1", "-1,9 +1,9") + "-- \n2.39.5\n\n" + SECOND,
        FIRST + "Then this one:\n\ndiff --git a/g b/g\n" + SECOND,
        FIRST.replace("-1 +1", "-1,9 +1,9") + "\nThen this one:\n\ndiff --git a/g b/g\n" + SECOND,
    ],
)
def test_text_may_stand_around_every_file_of_a_patch(text: str) -> None:
    files = parse_patch(text)
    assert len(files) == 2
    assert all((file.count("-"), file.count("+")) == (1, 1) for file in files)


FENCE = "--- a/f\n+++ b/f\n@@ -1,5 +1,5 @@\n text\n```\n-old\n+new\n more\n end\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ENVELOPE + "+x\n", 7),
        (ENVELOPE + "@@\n-c\n+d\n", 7),
        (ENVELOPE + "*** Move to: x\n", 7),
        (FENCE, 6),
        (f"```diff\n{FENCE}```\n", 7),
        (f"```diff\n{FENCE.replace('-old', '- old').replace('+new', '+ new')}```\n", 7),
        (FIRST + "\nText\n- a list\n", 8),
        (FIRST + "\nText\n--- a/g\n", 8),
        (FIRST + "old mode 100644\nnew mode 100755\n", 6),
        (FIRST + "\nText\n\\ No newline at end of file\n", 8),
        ("rename from g\nrename to h\n" + FIRST, 1),
        ("+x\n" + FIRST, 1),
    ],
)
def test_a_part_of_a_change_that_is_in_no_file_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"^line {line} of the patch: this (line|header|hunk)"):
        parse_patch(text)


def test_a_removed_line_of_dashes_is_no_signature() -> None:
    assert result(hunk("@@ -1,9 +1,9 @@\n-a\n+b\n-- \n+c\n"), "a\n- \n") == b"b\nc\n"


SOME_LINES = st.lists(st.sampled_from([" a\n", " b\n", "-a\n", "-b\n", "+a\n", "+1\n"]), max_size=5).map("".join)


@given(SOME_LINES | st.text(alphabet=" -+@\\\nab/,1", max_size=120))
@example(" a\n-b\n+1\n")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        files = parse_patch(f"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n{text}")
    except ValueError as error:
        assert str(error)
        return
    assert files
    for file in files:
        patched = apply_patch(file, b"a\nb\n")
        assert (patched.content == b"a\nb\n") if patched.problems else (b"".join(file.hunks[0].new) in patched.content)


# Fitting


@pytest.mark.parametrize(
    ("patch", "before", "after"),
    [
        ("@@ -1,2 +1,2 @@\n a\n-b\n+c\n", "a\nb\n", "a\nc\n"),
        ("@@ -0,0 +1,2 @@\n+a\n+b\n", "", "a\nb\n"),
        ("@@ -0,0 +1,2 @@\n+a\n+b\n", None, "a\nb\n"),
        ("@@ -1 +0,0 @@\n-a\n", "a\n", ""),
        ("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n", "a", "a\n"),
        ("@@ -1 +1 @@\n-a\n+a\n\\ No newline at end of file\n", "a\n", "a"),
        ("@@ -1,2 +1,2 @@\n-a\n+x\n b\n\\ No newline at end of file\n", "a\nb", "x\nb"),
        (
            "@@ -1,2 +1,3 @@\n a\n-b\n\\ No newline at end of file\n+b\n+c\n\\ No newline at end of file\n",
            "a\nb",
            "a\nb\nc",
        ),
        # The model's lines end with \n; the file's own ends stay, and new lines get them.
        ("@@ -1,2 +1,3 @@\n a\n-b\n+c\n+d\n", "a\r\nb\r\n", "a\r\nc\r\nd\r\n"),
        ("@@ -1,2 +1,3 @@\n+x\n a\n b\n", "a\r\nb\n", "x\r\na\r\nb\n"),
        ("@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n+b\n+c\n\\ No newline at end of file\n", "a", "b\nc"),
        (
            "@@ -2 +2,2 @@\n-b\n\\ No newline at end of file\n+b\n+c\n\\ No newline at end of file\n",
            "a\r\nb",
            "a\r\nb\r\nc",
        ),
        ("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\r\n+c\n", "a", "b\r\nc\n"),
        # A hunk without a mark leaves it as it is whether the file ends with a newline.
        ("@@ -1 +1 @@\n-a\n+b\n", "a", "b"),
        ("@@ -1,2 +1,3 @@\n a\n b\n+c\n", "a\nb", "a\nb\nc"),
        ("@@ -1,2 +1,3 @@\n a\n b\n+c\n", "a\r\nb", "a\r\nb\r\nc"),
        ("@@ -1,2 +1,3 @@\n a\n b\n+c\n", "a\rb", "a\rb\rc"),
        ("@@ -1,2 +1,3 @@\n a\n b\n+c\n", "a\nx\r\na\r\nb", "a\nx\r\na\r\nb\r\nc"),
        ("@@ -1,2 +1 @@\n a\n-b\n", "a\nb", "a\n"),
        # Below the last old line, a mark speaks of the old file; below the last new one, of the new file.
        ("@@ -1,2 +1,3 @@\n a\n b\n\\ No newline at end of file\n+c\n", "a\nb", "a\nb\nc\n"),
        ("@@ -1,2 +1 @@\n a\n\\ No newline at end of file\n-b\n", "a\nb\n", "a"),
        ("@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n", "a\nb", "a\nc"),
        ("@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n", "a\nb\n", "a\nc\n"),
        ("@@ -1,2 +1,2 @@\n a\r\n-b\r\n+b\n", "a\r\nb\r\n", "a\r\nb\n"),
        ("@@ -1,2 +1,2 @@\n a\rx\n-b\n+c\n", "a\rx\nb\n", "a\rx\nc\n"),
    ],
)
def test_a_hunk_that_fits(patch: str, before: str | None, after: str) -> None:
    assert result(hunk(patch), before) == after.encode()


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ("@@ -1,2 +1,2 @@\n-a\n+x\n b\n", b"\xef\xbb\xbfx\nb\n"),
        ("@@ -1,2 +1,2 @@\n-\ufeffa\n+a\n b\n", b"a\nb\n"),
        ("@@ -1,2 +0,0 @@\n-a\n-b\n", b""),
    ],
)
def test_a_byte_order_mark_stays_unless_the_patch_has_it(patch: str, after: bytes) -> None:
    assert result(hunk(patch), "\ufeffa\nb\n") == after


def test_a_patch_that_came_with_other_line_ends_fits_all_the_same() -> None:
    patch = hunk("@@ -1,2 +1,2 @@\n a\n-b\n+c\n").replace("\n", "\r\n")
    assert result(patch, "a\nb\n") == b"a\nc\n"
    assert result(patch, "a\r\nb\r\n") == b"a\r\nc\r\n"


@pytest.mark.parametrize(("stated", "shift"), [(9, 0), (1, 8), (15, -6)])
def test_a_hunk_is_found_where_its_lines_are(stated: int, shift: int) -> None:
    patched = applied(hunk(f"@@ -{stated},3 +{stated},3 @@\n 9\n-10\n+ten\n 11\n"), NUMBERS)
    assert patched.content == NUMBERS.replace("10", "ten").encode()
    assert patched.shifts == (shift,)


@pytest.mark.parametrize(("stated", "expected"), [(1, "x----a"), (6, "a----x")])
def test_of_several_places_the_stated_one_is_taken(stated: int, expected: str) -> None:
    content = result(hunk(f"@@ -{stated} +{stated} @@\n-a\n+x\n"), "a\n-\n-\n-\n-\na\n")
    assert content.decode().split() == list(expected)


@pytest.mark.parametrize("header", ["@@ -2 +2 @@", "@@ -5 +5 @@", "@@ -100 +100 @@", "@@"])
def test_several_places_without_the_stated_one_are_listed(header: str) -> None:
    (problem,) = applied(hunk(f"{header}\n-a\n+x\n"), "a\n-\n-\n-\n-\na\n").problems
    assert "fits at lines 1, 6" in problem


def test_a_stated_place_counts_for_nothing_below_a_hunk_that_is_elsewhere() -> None:
    patch = hunk("@@ -1 +1 @@\n-first\n+x\n@@ -5 +5 @@\n-a\n+y\n")
    (problem,) = applied(patch, "new\nfirst\n-\n-\na\na\n").problems
    assert "hunk 2 (@@ -5 +5 @@) fits at lines 5, 6" in problem
    assert result(patch, "first\n-\n-\n-\na\na\n") == b"x\n-\n-\n-\ny\na\n"


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ("@@ -0,0 +1 @@\n+x\n", "x\n1\n2\n"),
        ("@@ -1,0 +2 @@\n+x\n", "1\nx\n2\n"),
        ("@@ -2,0 +3,2 @@\n+x\n+y\n", "1\n2\nx\ny\n"),
        ("@@ -1 +0,0 @@\n-1\n@@ -2,0 +2 @@\n+x\n", "2\nx\n"),
        ("@@ -2,0 +3 @@\n+x\n\\ No newline at end of file\n", "1\n2\nx"),
    ],
)
def test_a_hunk_without_context_goes_where_its_numbers_say(patch: str, after: str) -> None:
    assert result(hunk(patch), "1\n2\n") == after.encode()
    assert result(hunk(patch), "1\r\n2\r\n") == after.replace("\n", "\r\n").encode()


def test_hunks_after_a_shifted_one_are_expected_as_far_away() -> None:
    before = "new\n" * 3 + "a\nb\nx\na\nb\n"
    patch = hunk("@@ -1,3 +1,3 @@\n-a\n+A\n b\n x\n@@ -4,2 +4,2 @@\n a\n-b\n+B\n")
    assert result(patch, before) == b"new\nnew\nnew\nA\nb\nx\na\nB\n"


def test_every_hunk_that_does_not_fit_is_named_and_nothing_is_applied() -> None:
    patch = hunk("@@ -1 +1 @@\n-1\n+one\n@@ -9,3 +9,3 @@\n 9\n-1O\n+ten\n 11\n@@ -15 +15 @@\n-fifteen\n+15\n")
    patched = applied(patch, NUMBERS)
    assert patched.content == NUMBERS.encode()
    first, second = patched.problems
    assert first.startswith(
        "hunk 2 (@@ -9,3 +9,3 @@) does not fit, expected at line 9. Lines 9 to 11 of the file would match best (2 of 3"
    )
    assert "Line 10 is\n'10'\nwhere the patch has\n'1O'" in first
    assert "hunk 3" in second
    assert "Read the file again" in second


def test_only_the_first_of_very_many_misfits_are_looked_for() -> None:
    patch = hunk("".join(f"@@ -{n} +{n} @@\n-{n}O\n+x\n" for n in range(10, 40)))
    problems = applied(patch, NUMBERS).problems
    assert (len(problems), "nearest" in problems[9]) == (30, True)
    assert problems[-1].endswith("does not fit, expected at line 39")


@pytest.mark.parametrize(
    ("content", "old", "said"),
    [
        ("def f():\n\treturn 1\n", "    return 1", "Line 2 of the file would match but for tabs against spaces"),
        ("if x:\n    return 1\n", "return 1", "Line 2 of the file would match but for the indentation"),
        ("-\na\u00a0b\n", "a b", "(NO-BREAK SPACE)"),
        ("-\nx = \u201chi\u201d\n", 'x = "hi"', "(LEFT DOUBLE QUOTATION MARK, RIGHT DOUBLE QUOTATION MARK)"),
        ("-\na  \n", "a", "blanks at the end of a line"),
        ("-\nfoo\n", "  2 | foo", "without the line numbers"),
        ("-\nabcd\n", "abc", "nearest lines to 'abc' are\n2: 'abcd'"),
        ("-\nnew!\n", "old!", "Its result is in the file already"),
    ],
)
@pytest.mark.parametrize("form", ["--- a/f\n+++ b/f\n@@ -9 +9 @@\n{}", "*** Update File: f\n@@\n{}*** End Patch\n"])
def test_lines_that_nearly_match_are_shown_with_what_differs(form: str, content: str, old: str, said: str) -> None:
    (problem,) = applied(form.format(f"-{old}\n+new!\n"), content).problems
    assert said in problem


@pytest.mark.parametrize(
    ("patch", "content", "said"),
    [
        (hunk("@@ -1,2 +1,2 @@\n a\n-  b\n+  c\n"), "a\n\tb\n", "tabs against spaces"),
        (hunk("@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n"), "a\nb\n", "its lines are at line 1"),
        (hunk("@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n"), "a\n", "ends with a newline"),
        (hunk("@@ -1,2 +1,2 @@\n a\n-b\n+c\n"), "a\n", "the end of the file"),
        (hunk("@@ -2 +2,2 @@\n+new\n"), "a\nb\n", "only adds lines"),
        (hunk("@@\n+new\n"), "a\nb\n", "only adds lines"),
        (hunk("@@ -3,0 +4 @@\n+new\n"), "a\nb\n", "the file has 2 lines"),
        (hunk("@@ -1,0 +2 @@\n+new\n\\ No newline at end of file\n"), "a\nb\n", "the file has 2 lines"),
        (hunk("@@ -1 +1 @@\n-b\n+c\n@@ -2,0 +3 @@\n+new\n"), "a\nb\n", "nothing shows where"),
        (hunk("@@ -2 +2 @@\n-b\n+c\n@@ -1,0 +2 @@\n+new\n"), "a\nb\n", "above the hunk before it"),
        (hunk("@@ -1 +1 @@\n-a\n+b\n"), None, "no such file"),
        (hunk("@@\n-a\n+x\n"), "a\nb\na\n", "fits at lines 1, 3"),
        (hunk("@@ -1,2 +1,2 @@\n a\n-b\n+c\n@@ -1,2 +1,2 @@\n-a\n+x\n b\n"), "a\nb\n", "above the hunk before it"),
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n", "", "exists already"),
        ("--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "a\nb\n", "1 line more"),
    ],
)
def test_what_does_not_fit_is_said(patch: str, content: str | None, said: str) -> None:
    (problem,) = applied(patch, content).problems
    assert said in problem


FILES = st.lists(st.sampled_from(["a", "b", "", "-- x", "++ y", "long line"]), max_size=15).flatmap(
    lambda lines: st.sampled_from(["\n", "\r\n"]).map(lambda end: "".join(line + end for line in lines))
)


def diff(old: str, new: str, context: int) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/f", "b/f", n=context)
    return "".join(lines)


@given(old=FILES, new=FILES, context=st.integers(1, 4))
def test_what_difflib_writes_applies(old: str, new: str, context: int) -> None:
    # difflib ends every header with \n, so that is no sign of how the patch came here.
    if patch := diff(old, new, context):
        assert result(patch, old) == new.encode()


@given(old=FILES, new=FILES)
def test_a_shifted_file_is_patched_in_the_right_place(old: str, new: str) -> None:
    head, tail = "".join(f"top {n}\n" for n in range(9)), "".join(f"end {n}\n" for n in range(9))
    if patch := diff(head + old + tail, head + new + tail, 40):
        assert result(patch, "first\n" * 5 + head + old + tail) == ("first\n" * 5 + head + new + tail).encode()


OLD = {
    "f.py": NUMBERS.encode(),
    "crlf": b"a\r\nb\r\n",
    "gone": b"x\n",
    "latin": b"caf\xe9\n",
    "no end": b"a\nb",
    "d/ä": b"1\n",
    "moved from": NUMBERS.encode(),
    "emptied": b"x\n",
}
NEW = {
    "f.py": NUMBERS.replace("3\n", "").replace("18", "x").encode(),
    "crlf": b"a\r\nc\r\n",
    "latin": b"caf\xe9s\n",
    "no end": b"a\nb\n",
    "d/ä": b"1\n2",
    "new": b"n\n",
    "moved/to": NUMBERS.replace("7", "seven").encode(),
    "emptied": b"",
    "new and empty": b"",
}


def put(root: Path, tree: dict[str, bytes]) -> None:
    for path, content in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def output_of(directory: Path, *command: str) -> bytes:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(command, cwd=directory, capture_output=True, check=False, env=environment).stdout


def made_of(old: dict[str, bytes], patch: bytes, *, strip: int = 0) -> dict[str, bytes]:
    made = dict(old)
    for file in parse_patch(patch):
        source, target = (path and path.split("/", strip)[-1] for path in (file.source, file.target))
        patched = apply_patch(file, old.get(source or target or ""))
        assert patched.problems == ()
        if source is not None:
            made.pop(source, None)
        if target is not None:
            made[target] = patched.content
    return made


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    "options",
    [[], ["-M"], ["--no-prefix"], ["--function-context"], ["--unified=1"], ["--unified=0"], ["--patience"]],
)
def test_what_git_writes_applies(tmp_path: Path, options: list[str]) -> None:
    put(tmp_path, OLD)
    output_of(tmp_path, "git", "init", "--quiet")
    output_of(tmp_path, "git", "add", "--all")
    before = output_of(tmp_path, "git", "write-tree").decode().strip()
    for path in OLD:
        (tmp_path / path).unlink()
    put(tmp_path, NEW)
    output_of(tmp_path, "git", "add", "--all")
    patch = output_of(tmp_path, "git", "diff", *options, "--cached", before)
    assert made_of(OLD, patch) == NEW


@pytest.mark.skipif(shutil.which("diff") is None, reason="diff is not installed")
@pytest.mark.parametrize("options", ["-ruN", "-ruNp", "-rNU1", "-rNU0"])
def test_what_diff_writes_applies(tmp_path: Path, options: str) -> None:
    put(tmp_path / "a", OLD)
    put(tmp_path / "b", NEW)
    patch = output_of(tmp_path, "diff", options, "a", "b")
    # It cannot say that an empty file is new.
    assert made_of(OLD, patch) == {path: content for path, content in NEW.items() if path != "new and empty"}


# The tool


@pytest.fixture
def files() -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    filesystem.write("a.txt", "one\ntwo\nthree\n")
    filesystem.write("b/b.txt", "1\r\n2\r\n3\r\n")
    return filesystem


@pytest.fixture
def executor(files: InMemoryFilesystem) -> Iterator[ToolExecutor]:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="tests", key="patches", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        for path in ("a.txt", "b/b.txt"):
            executor.call("read_file", {"file_path": path})
        yield executor


def patch_with(executor: ToolExecutor, patch: str) -> ToolResult[object]:
    return executor.call("apply_patch", {"patch": patch})


CHANGE_A = "--- a/a.txt\n+++ b/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+zwei\n three\n"
CHANGE_B = "--- a/b/b.txt\n+++ b/b/b.txt\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n"
CREATE_C = "--- /dev/null\n+++ b/new/c.txt\n@@ -0,0 +1,2 @@\n+c\n+d\n\\ No newline at end of file\n"


def text_of(files: InMemoryFilesystem, path: str) -> bytes:
    return files.read_bytes(path).content


def test_a_patch_changes_creates_and_deletes_in_one_call(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    delete = "--- a/a.txt\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-one\n-two\n-three\n"
    done = patch_with(executor, CHANGE_B + CREATE_C + delete)
    assert done.success
    assert text_of(files, "b/b.txt") == b"1\r\ntwo\r\n3\r\n"
    assert text_of(files, "new/c.txt") == b"c\nd"
    assert not files.exists("a.txt")
    assert done.render() == "modified b/b.txt (+1 -1)\ncreated new/c.txt (+2 -0)\ndeleted a.txt (+0 -3)"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (CHANGE_B.replace("-2", "-zwei"), "b/b.txt: hunk 1"),
        (CHANGE_B.replace("b.txt", "c.txt"), "there is no b/c.txt"),
        ("--- /dev/null\n+++ b/a.txt\n@@ -0,0 +1 @@\n+x\n", "exists already"),
        ("diff --git a/b/b.txt b/a.txt\nrename from b/b.txt\nrename to a.txt\n", "exists already"),
        ("--- a/b\n+++ b/b\n@@ -1 +1 @@\n-x\n+y\n", "\n- b is a directory: only files can be patched"),
        ("diff --git a/b/b.txt b/b\nrename from b/b.txt\nrename to b\n", "\n- b is a directory"),
        (CREATE_C.replace("new/c.txt", "a.txt/x"), "\n- a.txt/x: a.txt is a file, where it would"),
        (CREATE_C.replace("c.txt", "c.txt/x"), "\n- new/c.txt/x: new/c.txt is a file, where it"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-x\n+y\n", "outside"),
    ],
)
def test_all_of_a_patch_or_nothing(executor: ToolExecutor, files: InMemoryFilesystem, second: str, said: str) -> None:
    before = files.snapshot()
    done = patch_with(executor, CHANGE_A + CREATE_C + second)
    assert not done.success
    assert said in done.message
    assert files.changes(before) == []


def test_everything_that_does_not_fit_is_told_at_once(executor: ToolExecutor) -> None:
    done = patch_with(executor, CHANGE_A.replace("-two", "-2") + CHANGE_B.replace("-2", "-zwei"))
    assert done.message.startswith("the patch does not apply, and nothing was changed:\n- a.txt: hunk 1")
    assert "\n- b/b.txt: hunk 1" in done.message


def test_a_malformed_patch_is_refused_before_anything_is_looked_at(executor: ToolExecutor) -> None:
    answer = executor.execute("apply_patch", {"patch": "not a patch"})
    assert answer.receipt.outcome == "rejected"
    assert "names no file" in answer.text


def test_a_patch_of_a_file_that_was_not_read_is_denied(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("secret.txt", "x\n")
    done = patch_with(executor, CHANGE_A + "--- a/secret.txt\n+++ b/secret.txt\n@@ -1 +1 @@\n-x\n+y\n")
    assert "secret.txt exists and has not been read" in done.message
    assert text_of(files, "a.txt") == b"one\ntwo\nthree\n"


def test_a_file_may_be_patched_twice_and_what_a_patch_wrote_need_not_be_read(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    change_again = CHANGE_A.replace("-two", "-zwei").replace("+zwei", "+deux")
    assert patch_with(executor, CHANGE_A + change_again).success
    assert text_of(files, "a.txt") == b"one\ndeux\nthree\n"
    assert patch_with(executor, change_again.replace("-zwei", "-deux").replace("+deux", "+dos")).success
    assert text_of(files, "a.txt") == b"one\ndos\nthree\n"


def test_a_file_is_renamed_and_changed(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.chmod("a.txt", 0o755)
    rename = "diff --git a/a.txt b/d/e.txt\nrename from a.txt\nrename to d/e.txt\n"
    done = patch_with(executor, rename + CHANGE_A.replace("b/a.txt", "b/d/e.txt"))
    assert done.render() == "renamed d/e.txt from a.txt (+1 -1)"
    assert text_of(files, "d/e.txt") == b"one\nzwei\nthree\n"
    assert not files.exists("a.txt")
    assert files.stat("d/e.txt").mode == 0o755


def test_a_copy_is_one_of_the_file_before_the_patch(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    done = patch_with(executor, CHANGE_A + "diff --git a/a.txt b/c.txt\ncopy from a.txt\ncopy to c.txt\n")
    assert done.render() == "modified a.txt (+1 -1)\ncopied c.txt from a.txt (+0 -0)"
    assert text_of(files, "a.txt") == b"one\nzwei\nthree\n"
    assert text_of(files, "c.txt") == b"one\ntwo\nthree\n"


def test_the_executable_bit_comes_and_goes(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.chmod("a.txt", 0o640)
    assert patch_with(executor, "diff --git a/a.txt b/a.txt\nold mode 100644\nnew mode 100755\n").success
    assert files.stat("a.txt").mode == 0o750
    assert patch_with(executor, "diff --git a/a.txt b/a.txt\nold mode 100755\nnew mode 100644\n").success
    assert files.stat("a.txt").mode == 0o640
    for name, mode in (("run", "100755"), ("run-as-well", "100775")):
        header = f"diff --git a/{name} b/{name}\nnew file mode {mode}\n--- /dev/null\n+++ b/{name}\n"
        assert patch_with(executor, f"{header}@@ -0,0 +1 @@\n+#!\n").success
        assert files.stat(name).mode == 0o755


END = "\\ No newline at end of file\n"


def deletion_of_link(name: str, target: str) -> str:
    lines = f"--- a/{name}\n+++ /dev/null\n@@ -1 +0,0 @@\n-{target}\n{END}"
    return f"diff --git a/{name} b/{name}\ndeleted file mode 120000\n{lines}"


def test_symlinks_come_change_and_go(executor: ToolExecutor, files: InMemoryFilesystem) -> None:
    created = f"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+a.txt\n{END}"
    assert patch_with(executor, created).success
    assert files.readlink("l") == "a.txt"
    change = f"diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-a.txt\n{END}+b/b.txt\n{END}"
    assert patch_with(executor, change).success
    assert files.readlink("l") == "b/b.txt"
    # Neither has to be read: what they lead to stays.
    files.write("unread", "x\n")
    files.symlink("to-unread", "unread")
    files.symlink("circle", "circle")
    for name, target in (("l", "b/b.txt"), ("to-unread", "unread"), ("circle", "circle")):
        assert patch_with(executor, deletion_of_link(name, target)).success
        assert not files.exists(name)
    assert files.exists("b/b.txt")
    assert files.exists("unread")


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_patch_that_makes_a_file_of_a_symlink_leaves_what_that_led_to(
    executor: ToolExecutor, files: InMemoryFilesystem, mode: int
) -> None:
    files.symlink("l", "a.txt")
    before = files.content_hash("a.txt")
    lines = f"--- a/l\n+++ b/l\n@@ -1 +1 @@\n-a.txt\n{END}+one\n"
    header = f"diff --git a/l b/l\nold mode 120000\nnew mode 100{mode:o}\n"
    assert patch_with(executor, header + lines).success
    assert (text_of(files, "l"), files.stat("l").mode, files.stat("l").is_symlink) == (b"one\n", mode, False)
    assert files.content_hash("a.txt") == before


def test_a_patch_goes_through_a_link_and_neither_removes_nor_renames_one(
    executor: ToolExecutor, files: InMemoryFilesystem
) -> None:
    files.symlink("link.txt", "a.txt")
    files.symlink("dangling", "nowhere")
    assert patch_with(executor, CHANGE_A.replace("a.txt", "link.txt")).success
    assert text_of(files, "a.txt") == b"one\nzwei\nthree\n"
    for patch in (
        "--- a/link.txt\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-one\n-zwei\n-three\n",
        "--- a/dangling\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
        "diff --git a/dangling b/x\nsimilarity index 100%\nrename from dangling\nrename to x\n",
    ):
        assert "it is a symlink: remove or move it with rm or move" in patch_with(executor, patch).message
    assert files.exists("a.txt")


def test_where_a_shifted_hunk_was_applied_is_told(executor: ToolExecutor) -> None:
    done = patch_with(executor, CHANGE_A.replace("@@ -1,3 +1,3 @@", "@@ -9,3 +9,3 @@"))
    assert done.render() == "modified a.txt (+1 -1; found hunk 1 8 lines above the line in its header)"


def test_a_patch_changes_something_and_is_bounded(executor: ToolExecutor) -> None:
    assert "changes nothing" in patch_with(executor, CHANGE_A.replace("+zwei", "+two")).message
    assert "48,000" in patch_with(executor, CHANGE_A + "+x\n" * 20_000).message
