"""The part of the filesystem contract that is about symlinks."""

from __future__ import annotations

from collections.abc import Callable

from ringfence.filesystem.protocol import Filesystem
from ringfence.testing.looking import FOLLOWING, FilesystemAbilities, kinds, paths, refused, tree_of

THROUGH: dict[str, Callable[[Filesystem, str], object]] = {
    **FOLLOWING,
    "write": lambda fs, path: fs.write(path, "x"),
    "append": lambda fs, path: fs.write(path, "x", mode="append"),
}


class LinksContract(FilesystemAbilities):
    def test_a_link_is_read_written_and_described_as_what_it_leads_to(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("d/a.txt", "one\n")
        fs.symlink("link", "d/a.txt")
        fs.write("link", "two\n", mode="append")
        assert fs.read("d/a.txt").content == fs.read("link").content == "one\ntwo\n"
        assert (fs.readlink("link"), fs.resolve("link")) == ("d/a.txt", "d/a.txt")
        stat = fs.stat("link")
        assert (stat.path, stat.is_file, stat.is_symlink, stat.size_bytes) == ("link", True, True, 8)
        assert not fs.stat("d/a.txt").is_symlink
        assert fs.content_hash("link") == fs.content_hash("d/a.txt")
        if self.permission_bits:
            fs.chmod("link", 0o600)
            assert fs.stat("d/a.txt").mode == 0o600

    def test_a_target_is_relative_to_the_directory_of_the_link(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("a.txt", "top")
        fs.write("d/a.txt", "below")
        fs.symlink("d/e/up", "../../a.txt")
        fs.symlink("d/e/near", "../a.txt")
        fs.symlink("d/e/odd", ".././/../d/e/../a.txt")
        assert [fs.read(f"d/e/{name}").content for name in ("up", "near", "odd")] == ["top", "below", "below"]
        assert fs.resolve("d/e/odd") == "d/a.txt"

    def test_a_link_to_a_directory_is_a_way_into_it(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.mkdir("real/deep")
        fs.symlink("way", "real")
        fs.symlink("again", "way/deep")
        fs.write("again/new/a.txt", "x")
        assert paths(fs.list("real/deep/new")) == ["real/deep/new/a.txt"]
        assert paths(fs.list("way/deep/new")) == ["way/deep/new/a.txt"]
        assert fs.resolve("again/new/a.txt") == "real/deep/new/a.txt"
        assert fs.resolve("again/not/yet") == "real/deep/not/yet"
        fs.mkdir("way")
        fs.delete("way/deep/new/a.txt")
        assert len(fs.list("again/new")) == 0

    def test_the_way_up_out_of_a_linked_directory_is_that_of_the_spelling(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("a.txt", "top")
        fs.write("real/a.txt", "inner")
        fs.mkdir("real/deep")
        fs.symlink("way", "real/deep")
        assert fs.read("way/../a.txt").content == "top"
        fs.symlink("physical", "way/../a.txt")
        assert fs.read("physical").content == "inner"

    def test_a_link_out_of_the_root_is_a_permission_error(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.mkdir("d")
        for number, target in enumerate(("/etc/passwd", "/", "..", "../../etc", "d/../../x", "/d", "missing/../../x")):
            link = f"link{number}"
            fs.symlink(link, target)
            assert fs.readlink(link) == target
            assert fs.exists(link)
            for path in (link, f"{link}/below"):
                self.all_refuse(PermissionError, THROUGH, fs, path)
                with refused(PermissionError):
                    fs.resolve(path)

    def test_a_link_out_of_the_root_spoils_nothing_else(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.symlink("out", "/etc")
        fs.symlink("dangling", "nowhere")
        fs.write("a.txt", "needle")
        entries = {entry.name: entry for entry in fs.list()}
        for name in ("out", "dangling"):
            assert entries[name].is_symlink
            assert not entries[name].is_file
            assert not entries[name].is_directory
        assert [match.path for match in fs.glob("*") if match.is_file] == ["a.txt"]
        assert paths(fs.grep("needle")) == ["a.txt"]

    def test_a_dangling_link_is_a_file_not_found_error_and_writes_make_nothing(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        for number, target in enumerate(("d/missing", "missing")):
            link = f"link{number}"
            fs.symlink(link, target)
            before = tree_of(fs)
            for path in (link, f"{link}/below"):
                self.all_refuse(FileNotFoundError, THROUGH, fs, path)
            with refused(FileNotFoundError):
                fs.mkdir(f"{link}/below")
            with refused(FileExistsError):
                fs.write(link, "x", mode="create")
            with refused(FileExistsError):
                fs.mkdir(link)
            assert fs.exists(link)
            assert fs.resolve(link) == target
            assert tree_of(fs) == before

    def test_links_in_a_circle_and_more_than_forty_in_a_row_are_an_error(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.symlink("a", "b")
        fs.symlink("b", "a")
        fs.symlink("self", "self/x")
        for path in ("a", "b/x", "self"):
            with refused(OSError):
                fs.read(path)
            with refused(OSError):
                fs.write(path, "x")
        assert [entry.is_file for entry in fs.list()] == [False, False, False]
        for name in ("a", "b", "self"):
            fs.delete(name)
        fs.write("link0", "x")
        for number in range(1, 42):
            fs.symlink(f"link{number}", f"link{number - 1}")
        assert fs.read("link40").content == "x"
        with refused(OSError):
            fs.read("link41")

    def test_delete_and_move_act_on_the_link(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("d/a.txt", "x")
        for number, target in enumerate(("d", "d/a.txt", "nowhere", "/etc")):
            fs.symlink(f"link{number}", target)
            fs.move(f"link{number}", f"e/{number}")
            assert fs.readlink(f"e/{number}") == target
            fs.delete(f"e/{number}")
        fs.symlink("e/again", "../d")
        fs.delete("e", recursive=True)
        assert paths(fs.glob("**")) == ["d", "d/a.txt"]

    def test_move_replaces_a_link_and_not_what_it_leads_to(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("a", "a")
        fs.write("b", "b")
        fs.symlink("link", "b")
        with refused(FileExistsError):
            fs.move("a", "link")
        fs.move("a", "link", overwrite=True)
        assert (fs.read("link").content, fs.read("b").content) == ("a", "b")
        with refused(ValueError):
            fs.readlink("link")

    def test_a_link_replaces_nothing_and_leads_to_what_can_be(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("a", "a")
        fs.mkdir("d")
        fs.symlink("link", "a")
        fs.symlink("dangling", "nowhere")
        for path in ("a", "d", "link", "dangling", ""):
            with refused(FileExistsError):
                fs.symlink(path, "elsewhere")
        for target in ("", "a\0b", "x" * 5000, "\ud800"):
            with refused(ValueError):
                fs.symlink("new/place/link", target)
        fs.symlink("new/place/link", "../../a")
        assert fs.read("new/place/link").content == "a"

    def test_what_a_link_leads_to_is_looked_up_every_time(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.symlink("d/link", "../a")
        for make, expected in (
            (lambda: fs.write("a", "xyz"), (True, False, 3)),
            (lambda: fs.delete("a"), (False, False, 0)),
            (lambda: fs.mkdir("a"), (False, True, 0)),
        ):
            make()
            [entry] = fs.list("d")
            assert (entry.is_file, entry.is_directory, entry.size_bytes) == expected
            [match] = fs.glob("d/*")
            assert match.is_file is expected[0]

    def test_a_search_follows_a_link_only_where_it_begins(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("d/a.txt", "needle")
        fs.symlink("d/loop", ".")
        fs.symlink("way", "d")
        assert paths(fs.glob("**/*.txt")) == ["d/a.txt"]
        assert paths(fs.glob("*/*.txt")) == ["d/a.txt"]
        assert paths(fs.grep("needle")) == ["d/a.txt"]
        fs.symlink("file", "d/a.txt")
        assert paths(fs.glob("*")) == ["d", "file", "way"]
        assert paths(fs.glob("*.txt", path="way")) == paths(fs.grep("needle", path="way")) == ["way/a.txt"]
        assert paths(fs.grep("needle", path="file")) == ["file"]

    def test_a_changed_link_is_a_change_of_the_link(self, fs: Filesystem) -> None:
        self.need(self.symlinks, "symlinks")
        fs.write("a", "x")
        fs.symlink("link", "a")
        before = fs.snapshot()
        fs.write("link", "y")
        fs.delete("link")
        fs.symlink("link", "a")
        assert kinds(fs.changes(before)) == [("modified", "a")]
        fs.delete("link")
        fs.symlink("link", "b")
        [_, change] = fs.changes(before)
        assert change.before is not None
        assert change.after is not None
        assert (change.before.kind, change.before.target, change.after.target) == ("symlink", "a", "b")
        fs.restore(before)
        assert fs.readlink("link") == "a"
