"""The part of the filesystem contract that is about glob and grep."""

from __future__ import annotations

from ringfence.filesystem.protocol import Filesystem
from ringfence.testing.looking import FilesystemAbilities, paths, refused

TREE = (".hidden.py", "a.py", "b.txt", "d/.git/config.py", "d/a.py", "d/e/a.py", "d/e/b.py", "d-x/c.py", "d.py")
GLOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("*.py", "", (".hidden.py", "a.py", "d.py")),
    ("**/*.py", "", tuple(path for path in sorted(TREE) if path.endswith(".py"))),
    ("d/*.py", "", ("d/a.py",)),
    ("d/**/*.py", "", ("d/.git/config.py", "d/a.py", "d/e/a.py", "d/e/b.py")),
    ("**/e/*", "", ("d/e/a.py", "d/e/b.py")),
    ("**/d/**/a.py", "", ("d/a.py", "d/e/a.py")),
    ("**/**/a.py", "", ("a.py", "d/a.py", "d/e/a.py")),
    ("d**/c.py", "", ("d-x/c.py",)),
    ("*/*/a.py", "", ("d/e/a.py",)),
    ("?.py", "", ("a.py", "d.py")),
    ("[ab].*", "", ("a.py", "b.txt")),
    ("[!a].py", "", ("d.py",)),
    ("[^a].py", "", ("d.py",)),
    ("[a-c].p?", "", ("a.py",)),
    ("*", "d", ("d/.git", "d/a.py", "d/e")),
    ("*/", "", ("d", "d-x")),
    ("d/**", "", ("d/.git", "d/.git/config.py", "d/a.py", "d/e", "d/e/a.py", "d/e/b.py")),
    ("**/", "d", ("d/.git", "d/e")),
    ("e/*.py", "d", ("d/e/a.py", "d/e/b.py")),
    ("a.py", "", ("a.py",)),
    ("/d/./a.py", "", ("d/a.py",)),
    ("A.PY", "", ()),
    ("*[t]", "", ("b.txt",)),
    ("d*?/c.py", "", ("d-x/c.py",)),
    ("{a,d}.py", "", ()),
    ("d/a.py/*", "", ()),
    ("*", "missing", ()),
    ("*", "a.py", ()),
    ("*/a.py", "d", ("d/e/a.py",)),
)


class SearchContract(FilesystemAbilities):
    # glob

    def test_glob_follows_the_rules_of_the_shell(self, fs: Filesystem) -> None:
        for path in TREE:
            fs.write(path, "x")
        for pattern, base, expected in GLOBS:
            assert tuple(paths(fs.glob(pattern, path=base))) == expected, (pattern, base)
        assert [(match.path, match.is_file) for match in fs.glob("d-x/**")] == [("d-x/c.py", True)]
        assert [match.is_file for match in fs.glob("d*")] == [False, False, True]

    def test_magic_is_taken_from_a_character_and_a_newline_has_none(self, fs: Filesystem) -> None:
        for name in ("a*b", "axb", "[x]", "x", "a.py\n", "b\n.py"):
            fs.write(name, "")
        assert paths(fs.glob(r"a\*b")) == ["a*b"]
        assert paths(fs.glob(r"\[x]")) == paths(fs.glob("[[]x]")) == ["[x]"]
        assert paths(fs.glob("*.py")) == paths(fs.glob("?*.[p]y")) == ["b\n.py"]

    def test_a_glob_that_cannot_match_anything_is_a_value_error(self, fs: Filesystem) -> None:
        for pattern in ("", "/", "./", "../*", "d/../*", "a\0b", "*\0", "\ud800"):
            with refused(ValueError):
                fs.glob(pattern)

    def test_a_glob_of_many_stars_is_quick(self, fs: Filesystem) -> None:
        fs.write("a" * 250, "")
        assert len(fs.glob("*a" * 40 + "*b")) == 0
        assert len(fs.glob("**/" * 30 + "*a" * 40)) == 1

    # grep

    def test_grep_gives_the_first_match_of_a_line_with_its_place(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "nothing\nthe fox and the ox\n\nox")
        found = [(m.path, m.line_number, m.line_content, m.match_start, m.match_end) for m in fs.grep("f?ox")]
        assert found == [("d/a.txt", 2, "the fox and the ox", 4, 7), ("d/a.txt", 4, "ox", 0, 2)]

    def test_grep_goes_by_path_and_line(self, fs: Filesystem) -> None:
        for path in ("b", "a/z", "a.txt", "a-b/c", "a/b/c", "B"):
            fs.write(path, "x\nx\n")
        found = [(match.path, match.line_number) for match in fs.grep("x")]
        assert found == sorted(found)
        assert len(found) == 12

    def test_grep_counts_characters(self, fs: Filesystem) -> None:
        fs.write("a.txt", "ünï 🦊 fox\n")
        for literal in (True, False):
            [match] = fs.grep("fox", literal=literal)
            assert match.line_content[match.match_start : match.match_end] == "fox"
        [match] = fs.grep("^.{3} .")
        assert match.match_end == 5

    def test_line_ends_belong_to_no_match(self, fs: Filesystem) -> None:
        fs.write("a.txt", "one\r\ntwo\r\n")
        assert [(m.line_number, m.line_content) for m in fs.grep("e$")] == [(1, "one")]
        assert [m.line_content for m in fs.grep(r"[^x]+")] == ["one", "two"]
        assert [m.line_content for m in fs.grep(r"o\s*")] == ["one", "two"]
        assert [m.line_content for m in fs.grep("^")] == ["one", "two"]

    def test_empty_lines_match_and_what_is_after_the_last_does_not(self, fs: Filesystem) -> None:
        fs.write("a.txt", "\nx\n\n")
        fs.write("empty.txt", "")
        assert [match.line_number for match in fs.grep("^$")] == [1, 3]
        assert [match.line_number for match in fs.grep("x*")] == [1, 2, 3]

    def test_a_literal_is_no_pattern_and_flags_stand_in_one(self, fs: Filesystem) -> None:
        fs.write("a.txt", "a.b(c\nAxb\n")
        assert [match.line_number for match in fs.grep("a.b(c", literal=True)] == [1]
        assert [match.line_number for match in fs.grep("a.b")] == [1]
        assert [match.line_number for match in fs.grep("(?i)a.b")] == [1, 2]

    def test_a_pattern_that_does_not_parse_is_a_value_error_that_says_why(self, fs: Filesystem) -> None:
        for pattern in ("(", "a**", "[z-a]", r"(a)\1", "(?=a)", "(?<!a)b", "a{2000}"):
            with refused(ValueError, saying="literal=True"):
                fs.grep(pattern)
        for pattern in ("", "a\nb", r"a\nb", r"(\n|b)"):
            with refused(ValueError):
                fs.grep(pattern)
        with refused(ValueError):
            fs.grep("a\nb", literal=True)
        fs.write("a.txt", "x")
        assert len(fs.grep(r"[^\n]")) == 1

    def test_grep_cannot_hang(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x" * 5000 + "\n")
        for pattern in ("(x+x+)+y", "(x|xx)*y", "(.*)*y", "^(([x])+.)+y"):
            assert len(fs.grep(pattern)) == 0

    def test_grep_stops_at_max_matches(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x\n" * 10)
        fs.write("b.txt", "x\n" * 10)
        for limit in (0, 1, 9, 10, 11, 20):
            assert len(fs.grep("x", max_matches=limit)) == limit
        assert len(fs.grep("x", max_matches=99)) == 20
        fs.write("c.txt", "y\n" * 1200)
        assert len(fs.grep("y")) == 1000
        with refused(ValueError):
            fs.grep("x", max_matches=-1)

    def test_a_long_line_is_cut_around_its_match(self, fs: Filesystem) -> None:
        for before, after in ((0, 5000), (5000, 0), (5000, 5000), (100, 450), (450, 100), (0, 0)):
            fs.write("a.txt", "é" * before + "needle" + "-" * after)
            [match] = fs.grep("needle")
            assert match.line_content[match.match_start : match.match_end] == "needle"
            assert len(match.line_content) == min(500, before + after + 6)
        fs.write("a.txt", "-" * 9000)
        [match] = fs.grep("-+")
        assert (match.match_start, match.match_end, len(match.line_content)) == (0, 500, 500)

    def test_binary_files_are_passed_over(self, fs: Filesystem) -> None:
        fs.write_bytes("a.bin", b"needle\0")
        fs.write_bytes("b.bin", b"\0needle")
        fs.write_bytes("b.txt", b"needle")
        assert paths(fs.grep("needle")) == ["b.txt"]

    def test_text_that_is_not_utf_8_is_searched(self, fs: Filesystem) -> None:
        fs.write_bytes("a.txt", b"caf\xe9 needle \xff\n")
        [match] = fs.grep("f. needle")
        assert match.line_content == "caf\ufffd needle \ufffd"
        assert match.line_content[match.match_start : match.match_end] == "f\ufffd needle"

    def test_text_in_utf_16_and_utf_32_is_searched(self, fs: Filesystem) -> None:
        for encoding in ("utf-16", "utf-32", "utf-16-le", "utf-16-be"):
            fs.write_bytes("a.txt", "first line\r\ncafé needle\r\n".encode(encoding))
            [match] = fs.grep("é needle$")
            assert (match.line_number, match.line_content, match.match_start) == (2, "café needle", 3)

    def test_grep_takes_a_file_or_a_directory_as_path(self, fs: Filesystem) -> None:
        for path in ("a.txt", "d/a.txt", "d/e/a.txt"):
            fs.write(path, "needle")
        assert paths(fs.grep("needle", path="d")) == ["d/a.txt", "d/e/a.txt"]
        assert paths(fs.grep("needle", path="/d/a.txt")) == ["d/a.txt"]

    def test_the_glob_of_a_grep_is_for_names_or_for_paths(self, fs: Filesystem) -> None:
        for path in ("a.py", "a.txt", "d/a.py", "d/e/b.py"):
            fs.write(path, "needle")
        assert paths(fs.grep("needle", glob="*.py")) == ["a.py", "d/a.py", "d/e/b.py"]
        assert paths(fs.grep("needle", glob="a.*", path="d")) == ["d/a.py"]
        assert paths(fs.grep("needle", glob="e/*.py", path="d")) == ["d/e/b.py"]
        assert paths(fs.grep("needle", glob="**/a.*")) == ["a.py", "a.txt", "d/a.py"]
        assert paths(fs.grep("needle", glob="*.py", path="d/a.py")) == ["d/a.py"]
        assert paths(fs.grep("needle", glob="*.txt", path="d/a.py")) == []
        with refused(ValueError):
            fs.grep("needle", glob="")
