"""The part of the filesystem contract that is about files and directories."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

from ringfence.filesystem.protocol import Filesystem
from ringfence.testing.looking import FilesystemAbilities, paths, refused

ODD_TEXTS = (
    b"",
    b"\n",
    b"no end",
    b"one\ntwo\n",
    b"dos\r\nend\r\n",
    b"mixed\r\nends\nhere\rand no end",
    b"\r",
    "form\x0cfeed \x0b \x1c \x85 \u2028 \u2029\n".encode(),
    "\ufeffmark\n".encode(),
    "ünïcödé 🦊\n".encode(),
)


class FilesContract(FilesystemAbilities):
    # Reading

    def test_lines_end_at_a_newline_only(self, fs: Filesystem) -> None:
        for content in ODD_TEXTS:
            fs.write_bytes("a.txt", content)
            lines = [f"{line}\n" for line in content.decode().split("\n")]
            lines[-1] = lines[-1][:-1]
            lines = lines if lines[-1] else lines[:-1]
            result = fs.read("a.txt", limit=-1)
            assert (result.total_lines, result.limit) == (len(lines), len(lines))
            assert [fs.read("a.txt", offset=n, limit=1).content for n in range(len(lines))] == lines

    def test_a_window_of_lines_says_where_it_is(self, fs: Filesystem) -> None:
        lines = [f"line {number}\r\n" for number in range(700)]
        fs.write("a.txt", "".join(lines))
        for offset in (0, 1, 255, 256, 257, 511, 699, 700, 900):
            for limit in (0, 1, 2, 256, 443, 444, 700, 1000, -1):
                result = fs.read("a.txt", offset=offset, limit=limit)
                expected = lines[offset:] if limit == -1 else lines[offset : offset + limit]
                assert result.content == "".join(expected)
                assert (result.path, result.offset, result.limit) == ("a.txt", offset, len(expected))
                assert (result.total_lines, result.truncated) == (700, offset + len(expected) < 700)

    def test_without_a_limit_a_read_gives_2000_lines(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x\n" * 2001)
        result = fs.read("a.txt")
        assert (result.limit, result.total_lines, result.truncated) == (2000, 2001, True)
        assert fs.read("a.txt", offset=2000).content == "x\n"
        assert fs.read("a.txt", limit=-1).content == "x\n" * 2001

    def test_a_window_does_not_stand_for_the_whole_nor_one_encoding_for_another(self, fs: Filesystem) -> None:
        fs.write_bytes("a.txt", "é\nü\n".encode())
        for _ in range(2):
            assert fs.read("a.txt", limit=1).content == "é\n"
            assert fs.read("a.txt", encoding="latin-1").content == "Ã©\nÃ¼\n"
            assert fs.read("a.txt", offset=1).content == "ü\n"
            assert fs.read("a.txt").content == "é\nü\n"
            assert fs.read_bytes("a.txt", offset=1, limit=2).content == b"\xa9\n"
            assert fs.read_bytes("a.txt").content == "é\nü\n".encode()

    def test_a_window_that_cannot_be_is_a_value_error(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x")
        for offset, limit in ((-1, None), (0, -2), (-5, 3)):
            with refused(ValueError):
                fs.read("a.txt", offset=offset, limit=limit)
        for offset, limit in ((-1, None), (0, -1), (-5, 3)):
            with refused(ValueError):
                fs.read_bytes("a.txt", offset=offset, limit=limit)

    def test_what_does_not_decode_is_a_value_error_that_says_what_to_do(self, fs: Filesystem) -> None:
        fs.write_bytes("a.bin", b"caf\xe9\n")
        with refused(ValueError, saying="read_bytes"):
            fs.read("a.bin")
        with refused(ValueError):
            fs.read("a.bin", encoding="no such encoding")

    def test_text_in_other_encodings_is_read_by_lines_too(self, fs: Filesystem) -> None:
        for encoding in ("latin-1", "utf-16", "utf-8-sig", "shift_jis"):
            fs.write_bytes("a.txt", "one\ntwo\r\nthree".encode(encoding))
            assert fs.read("a.txt", offset=1, limit=1, encoding=encoding).content == "two\r\n"
            assert fs.read("a.txt", encoding=encoding).total_lines == 3

    def test_bytes_are_read_in_windows(self, fs: Filesystem) -> None:
        content = bytes(range(256))
        fs.write_bytes("a.bin", content)
        for offset in (0, 1, 255, 256, 300):
            for limit in (0, 1, 255, 256, 1000, None):
                result = fs.read_bytes("a.bin", offset=offset, limit=limit)
                expected = content[offset:][:limit]
                assert result.content == expected
                assert (result.path, result.size_bytes, result.offset) == ("a.bin", 256, offset)
                assert (result.limit, result.truncated) == (len(expected), offset + len(expected) < 256)

    def test_the_content_hash_is_the_sha256_of_the_bytes(self, fs: Filesystem) -> None:
        fs.write_bytes("a.bin", b"\x00\xff")
        assert fs.content_hash("a.bin") == hashlib.sha256(b"\x00\xff").hexdigest()
        fs.write_bytes("a.bin", b"!", mode="append")
        assert fs.content_hash("a.bin") == hashlib.sha256(b"\x00\xff!").hexdigest()

    # Writing

    def test_what_is_written_is_there_byte_for_byte(self, fs: Filesystem) -> None:
        for content in (*ODD_TEXTS, bytes(range(256)), b"x" * (1 << 20)):
            result = fs.write_bytes("d/a", content)
            assert (result.path, result.bytes_written, result.mode) == ("d/a", len(content), "overwrite")
            assert fs.read_bytes("d/a").content == content
            assert b"\xff" in content or fs.read("d/a", limit=-1).content.encode() == content
            assert fs.stat("d/a").size_bytes == len(content)

    def test_text_is_written_as_utf_8_with_its_newlines_as_they_are(self, fs: Filesystem) -> None:
        assert fs.write("a.txt", "é\r\n\r🦊\n").bytes_written == 10
        assert fs.read_bytes("a.txt").content == "é\r\n\r🦊\n".encode()
        with refused(ValueError, saying="write_bytes"):
            fs.write("a.txt", "lone \ud800")

    def test_append_adds_and_create_never_replaces(self, fs: Filesystem) -> None:
        fs.write("a.txt", "one", mode="append")
        assert fs.write("a.txt", "two", mode="append").bytes_written == 3
        fs.write("b.txt", "three", mode="create")
        fs.mkdir("d")
        for path in ("a.txt", "b.txt", "d"):
            with refused(FileExistsError):
                fs.write(path, "four", mode="create")
        assert (fs.read("a.txt").content, fs.read("b.txt").content) == ("onetwo", "three")

    def test_a_path_and_a_content_of_another_type_are_a_type_error(self, fs: Filesystem) -> None:
        wrong: Any
        for wrong in (None, 5, b"a.txt", PurePosixPath("a.txt")):
            for use in (fs.read, fs.list, fs.mkdir):
                with refused(TypeError, saying="a path is a text"):
                    use(wrong)
        for wrong in (None, 5, b"x"):
            with refused(TypeError):
                fs.write("a.txt", wrong)
        for wrong in (None, 5, "x"):
            with refused(TypeError):
                fs.write_bytes("a.txt", wrong)
        assert not fs.list("")

    def test_a_write_makes_the_parents_by_default(self, fs: Filesystem) -> None:
        with refused(FileNotFoundError):
            fs.write("a/b/c.txt", "x", create_parents=False)
        assert len(fs.list()) == 0
        fs.write("a/b/c.txt", "x")
        fs.write("a/b/d.txt", "x", create_parents=False)
        assert paths(fs.glob("**")) == ["a", "a/b", "a/b/c.txt", "a/b/d.txt"]

    def test_a_refused_write_leaves_nothing_behind(self, fs: Filesystem) -> None:
        fs.write("file", "x")
        fs.mkdir("d")
        before = fs.snapshot()
        with refused(NotADirectoryError):
            fs.write("file/new/a.txt", "y")
        with refused(IsADirectoryError):
            fs.write("d", "y")
        with refused(ValueError):
            fs.write("new/a.txt", "y", mode="truncate")  # pyright: ignore[reportArgumentType]  # the bad input
        with refused(ValueError):
            fs.write("new/lone.txt", "\ud800")
        with refused(FileNotFoundError):
            fs.move("missing", "new/place")
        assert len(fs.changes(before)) == 0

    def test_permission_bits_are_set_and_stay_when_a_file_is_overwritten_or_moved(self, fs: Filesystem) -> None:
        self.need(self.permission_bits, "permission bits")
        fs.write("d/run.sh", "x")
        fs.chmod("d", 0o700)
        fs.chmod("d/run.sh", 0o750)
        for mode in (-1, 0o10000):
            with refused(ValueError):
                fs.chmod("d/run.sh", mode)
        with refused(TypeError):
            fs.chmod("d/run.sh", 1.5)  # pyright: ignore[reportArgumentType]
        fs.write("d/run.sh", "y")
        fs.write("d/run.sh", "z", mode="append")
        fs.move("d/run.sh", "d/go.sh")
        assert (fs.stat("d").mode, fs.stat("d/go.sh").mode) == (0o700, 0o750)

    def test_a_write_moves_the_time_forward(self, fs: Filesystem) -> None:
        fs.write("a.txt", "x")
        before = fs.stat("a.txt")
        fs.write("a.txt", "y")
        after = fs.stat("a.txt")
        assert after.modified_at >= before.modified_at >= before.created_at
        assert after.modified_at.utcoffset() == timedelta(0)

    # Directories

    def test_list_has_kinds_and_sizes_sorted_by_code_point(self, fs: Filesystem) -> None:
        for path in ("b", "a.txt", "a/x", "B", "é", "a-", "10", "9"):
            fs.write(path, path)
        entries = fs.list()
        assert [entry.name for entry in entries] == ["10", "9", "B", "a", "a-", "a.txt", "b", "é"]
        directory, file = entries[3], entries[5]
        assert (directory.is_directory, directory.is_file, directory.size_bytes) == (True, False, 0)
        assert (file.is_directory, file.is_file, file.size_bytes, file.is_symlink) == (False, True, 5, False)
        assert paths(fs.list("a")) == ["a/x"]

    def test_list_shows_every_change(self, fs: Filesystem) -> None:
        fs.write("d/a", "x")
        assert [entry.size_bytes for entry in fs.list("d")] == [1]
        fs.write("d/a", "xy")
        fs.write("d/b", "")
        assert [(entry.name, entry.size_bytes) for entry in fs.list("d")] == [("a", 2), ("b", 0)]
        fs.delete("d/a")
        fs.move("d", "e")
        assert paths(fs.list("e")) == ["e/b"]

    def test_mkdir_makes_what_is_missing_and_replaces_nothing(self, fs: Filesystem) -> None:
        with refused(FileNotFoundError):
            fs.mkdir("a/b", parents=False)
        fs.mkdir("a/b/c")
        fs.mkdir("a/b/c")
        fs.mkdir("a/b/d", parents=False)
        fs.write("file", "x")
        assert paths(fs.glob("**")) == ["a", "a/b", "a/b/c", "a/b/d", "file"]
        for path in ("a/b", "", "file"):
            with refused(FileExistsError):
                fs.mkdir(path, exist_ok=False)
        with refused(FileExistsError):
            fs.mkdir("file")

    def test_delete_removes_a_full_directory_only_if_recursive(self, fs: Filesystem) -> None:
        fs.write("d/e/a.txt", "x")
        fs.write("empty/a.txt", "x")
        fs.delete("empty/a.txt")
        assert len(fs.list("empty")) == 0
        fs.delete("empty")
        with refused(IsADirectoryError):
            fs.delete("d")
        assert paths(fs.list()) == ["d"]
        fs.delete("d", recursive=True)
        assert len(fs.list()) == 0

    # Moving

    def test_move_renames_files_and_directories_and_makes_parents(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "x")
        fs.write("d/e/b.txt", "y")
        fs.move("d/a.txt", "new/place/a.txt")
        fs.move("d", "new/d")
        assert paths(fs.glob("**")) == ["new", "new/d", "new/d/e", "new/d/e/b.txt", "new/place", "new/place/a.txt"]
        assert fs.read("new/d/e/b.txt").content == "y"

    def test_move_replaces_a_file_only_with_overwrite(self, fs: Filesystem) -> None:
        fs.write("a", "a")
        fs.write("b", "b")
        for target in ("b", "./a"):
            with refused(FileExistsError):
                fs.move("a", target)
        fs.move("a", "./a", overwrite=True)
        assert (fs.read("a").content, fs.read("b").content) == ("a", "b")
        fs.move("a", "b", overwrite=True)
        assert fs.read("b").content == "a"
        assert not fs.exists("a")

    def test_move_never_replaces_a_directory(self, fs: Filesystem) -> None:
        fs.write("a", "a")
        fs.mkdir("d")
        fs.mkdir("e")
        for source in ("a", "e"):
            with refused(FileExistsError):
                fs.move(source, "d")
            with refused(IsADirectoryError):
                fs.move(source, "d", overwrite=True)
        with refused(NotADirectoryError):
            fs.move("d", "a", overwrite=True)
        assert paths(fs.list()) == ["a", "d", "e"]

    def test_a_directory_is_not_moved_into_itself(self, fs: Filesystem) -> None:
        fs.write("d/a.txt", "x")
        before = fs.snapshot()
        for target in ("d/e", "d/e/f", "d/../d/e"):
            with refused(ValueError):
                fs.move("d", target)
        assert len(fs.changes(before)) == 0
        fs.move("d", "de")
        assert fs.exists("de/a.txt")

    def test_the_root_is_not_moved(self, fs: Filesystem) -> None:
        fs.write("a", "x")
        for source, target in (("", "b"), ("a", ""), ("/", "/")):
            with refused(PermissionError):
                fs.move(source, target, overwrite=True)
