"""The part of the filesystem contract that is about how paths are spelled, and what cannot be done."""

from __future__ import annotations

from collections.abc import Callable

from ringfence.filesystem.protocol import Filesystem
from ringfence.testing.looking import (
    BAD_BYTE_NAME,
    CHANGES,
    FOLLOWING,
    FilesystemAbilities,
    kinds,
    paths,
    refused,
    tree_of,
)

SPELLINGS = ("d/a.txt", "/d/a.txt", "./d/a.txt", "d//a.txt", "d/./a.txt", "d/a.txt/", "d/x/../a.txt", "x/../d/a.txt")
ROOTS = ("", ".", "/", "./", "//", "a/..")
OUTSIDE = ("..", "../a.txt", "/..", "a/../../a.txt", "../../../../etc/passwd", "d/../../d")
EVERYTHING: dict[str, Callable[[Filesystem, str], object]] = {
    **FOLLOWING,
    "readlink": lambda fs, path: fs.readlink(path),
    "grep": lambda fs, path: fs.grep("x", path=path),
    "delete": lambda fs, path: fs.delete(path),
    "move from": lambda fs, path: fs.move(path, "elsewhere"),
}
MAKING: dict[str, Callable[[Filesystem, str], object]] = {
    "resolve": lambda fs, path: fs.resolve(path),
    "write": lambda fs, path: fs.write(path, "x"),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "symlink": lambda fs, path: fs.symlink(path, "a.txt"),
}


class PathsContract(FilesystemAbilities):
    # Paths

    def test_every_spelling_of_a_path_is_one_path(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "x")
        for spelling in SPELLINGS:
            assert fs.exists(spelling), spelling
            assert fs.read(spelling).content == "x", spelling
            assert fs.resolve(spelling) == "d/a.txt", spelling
            assert fs.stat(spelling).path == fs.read(spelling).path == "d/a.txt", spelling

    def test_the_root_has_many_spellings_and_is_a_directory_that_is_always_there(self, fs: Filesystem) -> None:
        for spelling in ROOTS:
            assert fs.resolve(spelling) == "", spelling
            assert fs.stat(spelling).is_directory, spelling
            assert fs.stat(spelling).path == "/", spelling
            assert fs.list(spelling) == fs.list(""), spelling
            fs.mkdir(spelling)
            with refused(PermissionError):
                fs.delete(spelling, recursive=True)
            with refused(ValueError):
                fs.write(spelling, "x")

    def test_what_leaves_the_root_is_a_permission_error_everywhere(self, fs: Filesystem) -> None:
        fs.write("a.txt", "a")
        for path in OUTSIDE:
            assert not fs.exists(path), path
            self.all_refuse(PermissionError, EVERYTHING | MAKING, fs, path)
            with refused(PermissionError):
                fs.glob("*", path=path)
            with refused(PermissionError):
                fs.move("a.txt", path)
        assert paths(fs.list()) == ["a.txt"]

    def test_what_no_path_can_be_is_a_value_error(self, fs: Filesystem) -> None:
        for path in ("a\0b", "n" * 256, "é" * 128, "d/" * 2100 + "a", "lone \ud800 surrogate"):
            assert not fs.exists(path)
            self.all_refuse(ValueError, EVERYTHING | MAKING, fs, path)
        assert len(fs.list()) == 0

    def test_a_name_may_have_255_bytes(self, fs: Filesystem) -> None:
        for name in ("n" * 255, "é" * 127 + "n"):
            fs.write(f"d/{name}", "x")
            assert fs.read(f"d/{name}").content == "x"

    def test_names_are_kept_as_they_are(self, fs: Filesystem) -> None:
        names = sorted(
            [" blanks  around ", "new\nline", "tab\t", "-dash", "*?[a]", "back\\slash", "~", "ünï", ".hidden"]
        )
        for name in names:
            fs.write(f"d/{name}", name)
        assert [entry.name for entry in fs.list("d")] == names
        assert [fs.read(path).content for path in paths(fs.list("d"))] == names

    def test_a_name_that_is_not_utf_8_is_a_name_like_any_other(self, fs: Filesystem) -> None:
        self.need(self.any_bytes_in_names, "names that are not UTF-8")
        before = fs.snapshot()
        fs.write(f"d/{BAD_BYTE_NAME}", "x")
        assert paths(fs.list("d")) == paths(fs.glob("**/c*.txt")) == paths(fs.grep("x")) == [f"d/{BAD_BYTE_NAME}"]
        assert ("created", f"d/{BAD_BYTE_NAME}") in kinds(fs.changes(before))
        fs.move(f"d/{BAD_BYTE_NAME}", f"e/{BAD_BYTE_NAME}")
        assert fs.read(f"e/{BAD_BYTE_NAME}").content == "x"
        fs.delete(f"e/{BAD_BYTE_NAME}")
        assert len(fs.list("e")) == 0

    def test_surrogates_that_spell_utf_8_are_the_character(self, fs: Filesystem) -> None:
        self.need(self.any_bytes_in_names, "names that are not UTF-8")
        fs.write("é.txt", "x")
        assert fs.read("\udcc3\udca9.txt").content == "x"
        if self.symlinks:
            fs.symlink("link", "\udcc3\udca9.txt")
            assert (fs.readlink("link"), fs.resolve("link"), fs.read("link").content) == ("é.txt", "é.txt", "x")
        assert fs.resolve("\udcc3\udca9.txt") == "é.txt"

    def test_paths_may_be_deep(self, fs: Filesystem) -> None:
        before = fs.snapshot()
        deep = "/".join(["d"] * self.depth) + "/a.txt"
        fs.write(deep, "needle")
        assert paths(fs.grep("needle")) == paths(fs.glob("**/a.txt")) == [deep]
        assert len(fs.changes(before)) == self.depth + 1
        fs.delete("d", recursive=True)
        assert len(fs.list()) == 0

    # Errors

    def test_what_is_missing_is_a_file_not_found_error(self, fs: Filesystem) -> None:
        for path in ("missing", "missing/below"):
            self.all_refuse(FileNotFoundError, EVERYTHING, fs, path)
            assert not fs.exists(path)

    def test_nothing_is_below_a_file(self, fs: Filesystem) -> None:
        fs.write("file", "x")
        self.all_refuse(NotADirectoryError, EVERYTHING, fs, "file/below")
        for change in (
            lambda: fs.write("file/below", "x"),
            lambda: fs.mkdir("file/a/b"),
            lambda: fs.move("file", "file/b"),
        ):
            with refused(NotADirectoryError, ValueError):
                change()
        with refused(NotADirectoryError):
            fs.list("file")
        assert not fs.exists("file/below")
        assert fs.read("file").content == "x"

    def test_a_directory_is_not_read_or_written(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "x")
        for use in (fs.read, fs.read_bytes, fs.content_hash):
            with refused(IsADirectoryError):
                use("d")
        with refused(IsADirectoryError):
            fs.write("d", "x")

    def test_a_read_only_filesystem_is_read_and_never_changed(self, read_only_fs: Filesystem) -> None:
        before = tree_of(read_only_fs)
        assert read_only_fs.read_only
        assert read_only_fs.read("a.txt").content == "a\n"
        self.all_refuse(PermissionError, CHANGES, read_only_fs)
        assert tree_of(read_only_fs) == before
