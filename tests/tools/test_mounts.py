from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mounts import mount_all

from ringfence import ToolValidationError
from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools import HostMount, HostMountPreview

NOT_UTF8 = os.fsdecode(b"caf\xe9.txt")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A directory whose real path is as it is spelled."""
    directory = tmp_path.resolve() / "host"
    directory.mkdir()
    return directory


@pytest.fixture
def filesystem() -> InMemoryFilesystem:
    return InMemoryFilesystem()


def write(path: Path, content: str | bytes = "x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def mounted(filesystem: InMemoryFilesystem, *mounts: HostMount) -> tuple[HostMountPreview, ...]:
    return mount_all(filesystem, mounts, None)


def files(filesystem: InMemoryFilesystem) -> list[str]:
    return [match.path for match in filesystem.glob("**") if match.is_file]


def reasons(preview: HostMountPreview) -> dict[str, str]:
    return {left_out.path: left_out.reason for left_out in preview.left_out}


def test_a_directory_is_mounted_at_the_root(host: Path, filesystem: InMemoryFilesystem) -> None:
    write(host / "README.md", "hello\n")
    write(host / "src/a.py", "a = 1\n")
    (preview,) = mounted(filesystem, HostMount(str(host)))
    assert filesystem.read("src/a.py").content == "a = 1\n"
    mounted(filesystem, HostMount(host, mount_path="/vendor/lib/"))
    assert files(filesystem) == ["README.md", "src/a.py", "vendor/lib/README.md", "vendor/lib/src/a.py"]
    with pytest.raises(ToolValidationError, match="'README.md' would come from both what the workspace has"):
        mounted(filesystem, HostMount(host))
    assert preview == HostMountPreview(str(host), str(host), "", ("README.md", "src/"), True, files=2, size=12)


@pytest.mark.parametrize(
    ("mount_path", "path"),
    [(None, "notes.txt"), ("docs/today.txt", "docs/today.txt"), ("docs/", "docs/notes.txt"), ("/", "notes.txt")],
)
def test_a_single_file_can_be_mounted(
    host: Path, filesystem: InMemoryFilesystem, mount_path: str | None, path: str
) -> None:
    write(host / "notes.txt", "note\n")
    (preview,) = mounted(filesystem, HostMount(host / "notes.txt", mount_path=mount_path))
    assert filesystem.read(path).content == "note\n"
    assert not preview.is_directory
    assert preview.entries == (path.rpartition("/")[2],)
    (host / "current.txt").symlink_to("notes.txt")
    (preview,) = mounted(filesystem, HostMount(host / "current.txt"))  # which keeps the link's own name
    assert (preview.entries, preview.resolved_host) == (("current.txt",), str(host / "notes.txt"))


def test_all_of_a_directory_is_kept(host: Path, filesystem: InMemoryFilesystem) -> None:
    contents = {"empty": b"", "binary": b"\x00\xff" * 10, "crlf": b"a\r\nb", "big": b"y" * 3_000_000}
    names = [NOT_UTF8, " blank ", "new\nline", "größe", "a" * 255, "back\\slash", "*", "..."]
    for name, content in {**contents, **dict.fromkeys(names, b"x")}.items():
        write(host / name, content)
    (host / "a/b").mkdir(parents=True)
    script = write(host / "bin/run.sh")
    script.chmod(0o751)
    os.utime(script, ns=(0, 1_500_000_000_123_456_000))
    (host / "bin").chmod(0o711)
    os.utime(host / "bin", ns=(0, 1_400_000_000_000_000_000))
    mounted(filesystem, HostMount(host))
    assert [entry.name for entry in filesystem.list("")] == sorted([*contents, *names, "a", "bin"])
    assert {name: filesystem.read_bytes(name).content for name in contents} == contents
    assert filesystem.stat("a/b").is_directory
    file, directory = filesystem.stat("bin/run.sh"), filesystem.stat("bin")
    assert (file.mode, file.modified_at.timestamp()) == (0o751, 1_500_000_000.123456)
    assert (directory.mode, directory.modified_at.timestamp()) == (0o711, 1_400_000_000)


def test_host_and_workspace_do_not_change_each_other(host: Path, filesystem: InMemoryFilesystem) -> None:
    path = write(host / "a.txt", "before\n")
    before = path.stat()
    mounted(filesystem, HostMount(host))
    filesystem.write("a.txt", "of the workspace\n")
    filesystem.write("b.txt", "")
    assert path.read_text() == "before\n"
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    write(path, "after\n")
    assert filesystem.read("a.txt").content == "of the workspace\n"
    assert os.listdir(host) == ["a.txt"]


def test_directories_deeper_than_200_are_left_out(host: Path, filesystem: InMemoryFilesystem) -> None:
    deep = host / "/".join("d" * 202)
    write(deep / "f")
    (preview,) = mounted(filesystem, HostMount(host))
    assert [(left.path.count("/"), "deep" in left.reason) for left in preview.left_out] == [(200, True)]


# -- patterns


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), ["a.py", "b.txt", "pkg/c.py", "pkg/deep/d.py", "pkg/e.txt"]),
        (("*.py",), (), ["a.py"]),
        (("**/*.py",), (), ["a.py", "pkg/c.py", "pkg/deep/d.py"]),
        (("pkg/*",), (), ["pkg/c.py", "pkg/e.txt"]),
        (("**/*.py",), ("pkg/deep/**",), ["a.py", "pkg/c.py"]),
        ((), ("**/*.txt",), ["a.py", "pkg/c.py", "pkg/deep/d.py"]),
        ((), ("pkg",), ["a.py", "b.txt"]),
        ((), ("**/deep",), ["a.py", "b.txt", "pkg/c.py", "pkg/e.txt"]),
        ((), ("a.py/",), ["a.py", "b.txt", "pkg/c.py", "pkg/deep/d.py", "pkg/e.txt"]),
        (("nothing",), (), []),
    ],
)
@pytest.mark.parametrize("url", [False, True])
def test_patterns_choose_what_is_mounted(
    host: Path,
    filesystem: InMemoryFilesystem,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    expected: list[str],
    url: bool,
) -> None:
    for path in ("a.py", "b.txt", "pkg/c.py", "pkg/e.txt", "pkg/deep/d.py"):
        write(host / path)
    where = zipped(host) if url else str(host)
    mounted(filesystem, HostMount(where, include_glob=include, exclude_glob=exclude))
    assert files(filesystem) == expected


NAMES = st.sampled_from(["a", "b", "a.py", ".b", "ab"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATTERNS = st.lists(st.sampled_from(["a", "*", "**", "*.py", "?b", "[ab]"]), min_size=1, max_size=3).map("/".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(paths=st.lists(PATHS, max_size=6), include=PATTERNS)
def test_an_include_pattern_takes_the_files_that_glob_finds(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str], include: str
) -> None:
    host = tmp_path_factory.mktemp("tree")
    for path in paths:
        try:
            write(host / path)
        except OSError:
            continue  # a file where a directory is, or the other way round
    whole, part = InMemoryFilesystem(), InMemoryFilesystem()
    mounted(whole, HostMount(host))
    mounted(part, HostMount(host, include_glob=(include,)))
    assert files(part) == [match.path for match in whole.glob(include) if match.is_file]


def test_what_patterns_keep_out_is_counted_and_not_listed(host: Path, filesystem: InMemoryFilesystem) -> None:
    for path in ("a.py", "b.pyc", "node_modules/x/y.js", "node_modules/z.js"):
        write(host / path)
    (host / "secret").mkdir(mode=0)
    (preview,) = mounted(filesystem, HostMount(host, exclude_glob=("**/*.pyc", "node_modules", "secret")))
    assert (preview.excluded, preview.left_out) == (3, ())


def test_directories_without_an_included_file_are_not_mounted(host: Path, filesystem: InMemoryFilesystem) -> None:
    write(host / "src/a.py")
    write(host / "docs/b.md")
    mounted(filesystem, HostMount(host, include_glob=("**/*.py",)))
    assert [entry.path for entry in filesystem.list("")] == ["src"]


@pytest.mark.parametrize("url", [False, True])
def test_the_byte_budget_is_of_all_files_together(host: Path, filesystem: InMemoryFilesystem, url: bool) -> None:
    write(host / "a", b"1234")
    with (host / "b").open("wb") as file:
        file.truncate(4 if url else 1 << 40)  # which must not be read
    where = zipped(host) if url else str(host)
    with pytest.raises(ToolValidationError, match="more than the 7 bytes"):
        mounted(filesystem, HostMount(where, max_bytes=7))
    assert files(filesystem) == []
    os.truncate(host / "b", 4)
    mounted(filesystem, HostMount(where, max_bytes=8))
    assert files(filesystem) == ["a", "b"]


# -- links


@pytest.fixture
def linked(host: Path) -> Path:
    write(host / "real/a.txt", "a\n")
    write(host.parent / "outside/secret.txt", "secret\n")
    (host / "file").symlink_to("real/a.txt")
    (host / "absolute").symlink_to(host / "real/a.txt")
    (host / "directory").symlink_to("real")
    (host / "real/up").symlink_to("../real/a.txt")
    (host / "around").symlink_to("../host/real/a.txt")
    (host / "out").symlink_to("../outside/secret.txt")
    (host / "out_directory").symlink_to(host.parent / "outside")
    (host / "through_out").symlink_to("out")
    (host / "nowhere").symlink_to("missing")
    (host / "loop").symlink_to("loop")
    return host


OUT = {"out", "out_directory", "through_out"}


@pytest.mark.parametrize("at", ["", "deep/down/"])
def test_links_that_stay_inside_are_links(linked: Path, filesystem: InMemoryFilesystem, at: str) -> None:
    (preview,) = mounted(filesystem, HostMount(linked, mount_path=at))
    assert filesystem.readlink(f"{at}file") == "real/a.txt"
    assert filesystem.readlink(f"{at}real/up") == "../real/a.txt"
    assert filesystem.readlink(f"{at}directory") == "real"
    for link in ("file", "absolute", "around", "real/up", "directory/a.txt"):
        assert filesystem.read(f"{at}{link}").content == "a\n"
    assert {entry.name for entry in filesystem.list(at)}.isdisjoint(OUT)
    assert preview.files == 1


@pytest.mark.parametrize("follow_symlinks", [False, True])
def test_links_that_lead_out_or_nowhere_are_left_out_and_listed(
    linked: Path, filesystem: InMemoryFilesystem, follow_symlinks: bool
) -> None:
    (preview,) = mounted(filesystem, HostMount(linked, follow_symlinks=follow_symlinks))
    said = reasons(preview)
    assert {path for path, reason in said.items() if "leads out" in reason} == OUT
    assert {path for path, reason in said.items() if "nowhere" in reason} == {"nowhere", "loop"}
    assert not any("secret" in filesystem.read(path).content for path in files(filesystem))


def test_links_can_be_followed_inside(linked: Path, filesystem: InMemoryFilesystem) -> None:
    mounted(filesystem, HostMount(linked, follow_symlinks=True))
    assert filesystem.read("directory/a.txt").content == "a\n"
    assert not filesystem.stat("file").is_symlink
    assert not any(entry.is_symlink for entry in filesystem.list(""))


def test_followed_links_do_not_go_round_in_circles(host: Path, filesystem: InMemoryFilesystem) -> None:
    write(host / "a/b/file")
    (host / "a/b/back").symlink_to("../../a")
    (host / "self").symlink_to(".")
    (preview,) = mounted(filesystem, HostMount(host, follow_symlinks=True))
    assert "a/b/file" in files(filesystem)
    assert {path for path, reason in reasons(preview).items() if "that it is in" in reason} >= {"self", "a/b/back"}


# -- what cannot be read


def test_special_files_are_listed_and_never_opened(host: Path, filesystem: InMemoryFilesystem) -> None:
    os.mkfifo(host / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(host / "socket"))
        (preview,) = mounted(filesystem, HostMount(host))
    assert set(reasons(preview)) == {"fifo", "socket"}
    assert filesystem.list("") == ()
    with pytest.raises(ToolValidationError, match="neither a file nor a directory"):
        mounted(filesystem, HostMount(host / "fifo"))


UNREADABLE = """
import sys, os
from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools.mounts import mount_all
from ringfence_tools import HostMount
if os.geteuid() == 0:  # who may read everything
    os.setuid(65534)
fs = InMemoryFilesystem()
(preview,) = mount_all(fs, [HostMount(sys.argv[1])], None)
print([entry.path for entry in fs.list("")], [(one.path, one.reason) for one in preview.left_out])
"""


def test_what_may_not_be_read_is_listed() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories cannot be entered by another user
        host = Path(name)
        host.chmod(0o755)
        write(host / "open.txt").chmod(0o644)
        write(host / "closed.txt").chmod(0)
        (host / "closed").mkdir(mode=0)
        command = [sys.executable, "-c", UNREADABLE, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
        (host / "closed").chmod(0o700)
    assert done.stdout == (
        "['open.txt'] [('closed', 'cannot be read: Permission denied'),"
        " ('closed.txt', 'cannot be read: Permission denied')]\n"
    )


def test_a_file_that_changes_meanwhile_is_mounted_as_it_was_read(host: Path) -> None:
    path = write(host / "busy", b"0" * 1000)
    over = threading.Event()

    def grow_and_shrink() -> None:
        while not over.is_set():
            with path.open("wb") as file:
                file.write(b"1" * 5000)
            with path.open("wb") as file:
                file.write(b"2" * 10)

    changing = threading.Thread(target=grow_and_shrink)
    changing.start()
    try:
        for _ in range(200):
            filesystem = InMemoryFilesystem()
            (preview,) = mounted(filesystem, HostMount(host))
            assert len(filesystem.read_bytes("busy").content) == preview.size <= 5000
    finally:
        over.set()
        changing.join()


# -- what is refused


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (HostMount(""), "is empty"),
        (HostMount("a\0b"), "NUL"),
        (HostMount("/no/such/directory"), "does not exist"),
        (HostMount("/", mount_path="../x"), "outside"),
        (HostMount("/", include_glob=("../*",)), "cannot have '..'"),
        (HostMount("nosuchstorage://x"), "nosuchstorage"),
        (HostMount("memory://no/such/thing"), "nothing at"),
        (HostMount("zip://::/no/such/archive.zip"), "archive.zip"),
    ],
)
def test_bad_mounts_are_refused_with_the_reason(filesystem: InMemoryFilesystem, mount: HostMount, said: str) -> None:
    with pytest.raises(ToolValidationError, match=said):
        mounted(filesystem, mount)


def test_one_bad_mount_is_none_at_all(host: Path, filesystem: InMemoryFilesystem) -> None:
    write(host / "a.txt")
    with pytest.raises(ToolValidationError):
        mounted(filesystem, HostMount(host), HostMount(host / "missing", mount_path="x"))
    assert filesystem.list("") == ()


@pytest.mark.parametrize(
    ("second", "path"),
    [
        (HostMount("two"), "a.txt"),
        (HostMount("two/a.txt", mount_path="dir/"), "dir/a.txt"),
        (HostMount("two/a.txt", mount_path="dir"), "dir"),
        (HostMount("two", mount_path="a.txt"), "a.txt"),
        (HostMount("two", mount_path="a.txt/below"), "a.txt"),
        (HostMount("two", mount_path="link"), "link"),
    ],
)
def test_mounts_that_meet_at_a_path_are_refused(
    host: Path,
    filesystem: InMemoryFilesystem,
    second: HostMount,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(host)
    write(host / "one/a.txt")
    write(host / "one/dir/a.txt")
    (host / "one/link").symlink_to("dir")
    write(host / "two/a.txt")
    with pytest.raises(ToolValidationError, match=f"'{path}' would come from both one and two"):
        mounted(filesystem, HostMount("one"), second)
    assert filesystem.list("") == ()


def test_mounts_may_share_directories_also_of_a_read_only_workspace(host: Path) -> None:
    write(host / "one/src/a.py")
    write(host / "two/src/b.py")
    (host / "two/src").chmod(0o700)
    filesystem = InMemoryFilesystem(read_only=True)
    mounted(filesystem, HostMount(host / "one"), HostMount(host / "two"))
    assert files(filesystem) == ["src/a.py", "src/b.py"]
    assert filesystem.stat("src").mode == stat.S_IMODE((host / "one/src").stat().st_mode)


# -- allowed roots


@pytest.mark.parametrize(
    "where", ["host2", "host/../host2", "host/link", "", "file:{}/host2", "zip://::{}/host2/a.zip"]
)
def test_a_mount_outside_of_the_allowed_roots_is_refused(
    host: Path, filesystem: InMemoryFilesystem, where: str
) -> None:
    write(host.parent / "host2/a.txt")
    zipped(host.parent / "host2")
    (host / "link").symlink_to("../host2")
    where = where.replace("file:", "file://").format(host.parent) if ":" in where else f"{host.parent}/{where}"
    with pytest.raises(ToolValidationError, match="not below an allowed host root"):
        mount_all(filesystem, [HostMount(where)], allowed_host_roots=[host])


@pytest.mark.parametrize(
    "url", ["memory://other", "memory://area/../other", "memory://areaers", "simplecache::memory://area"]
)
def test_a_url_outside_of_the_allowed_roots_is_refused(filesystem: InMemoryFilesystem, url: str) -> None:
    with pytest.raises(ToolValidationError, match="not below an allowed host root"):
        mount_all(filesystem, [HostMount(url)], allowed_host_roots=["/tmp", "memory://area"])


def test_allowed_roots_allow_what_is_below_them(host: Path, filesystem: InMemoryFilesystem) -> None:
    write(host / "repo/a.txt")
    mount_all(filesystem, [HostMount(host / "repo")], allowed_host_roots=["/usr", host])
    assert files(filesystem) == ["a.txt"]
    with pytest.raises(ToolValidationError, match="there are none"):
        mount_all(filesystem, [HostMount(host)], allowed_host_roots=())
    with pytest.raises(ToolValidationError, match="the allowed host root .* does not exist"):
        mount_all(filesystem, [HostMount(host)], allowed_host_roots=[host / "missing"])


# -- other storage


@pytest.fixture
def stored() -> Iterator[str]:
    storage = fsspec.filesystem("memory")
    storage.pipe({"/area/data/a.csv": b"x,y\n1,2\n", "/area/data/deep/b.bin": b"\x00\xff", "/area/c.txt": b"c\n"})
    storage.mkdir("/area/empty")
    yield "memory://area"
    storage.rm("/area", recursive=True)


def zipped(directory: Path) -> str:
    path = directory.parent / f"{directory.name}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(directory.rglob("*")):
            archive.write(file, file.relative_to(directory))
    return f"zip://::{path}"


def test_a_url_is_mounted(stored: str, filesystem: InMemoryFilesystem) -> None:
    (preview,) = mounted(filesystem, HostMount(stored, mount_path="in"))
    assert files(filesystem) == ["in/c.txt", "in/data/a.csv", "in/data/deep/b.bin"]
    assert filesystem.read_bytes("in/data/deep/b.bin").content == b"\x00\xff"
    assert filesystem.stat("in/empty").is_directory
    assert (preview.resolved_host, preview.entries) == (stored, ("c.txt", "data/", "empty/"))
    (preview,) = mount_all(filesystem, [HostMount(f"{stored}/data/a.csv")], allowed_host_roots=["memory://area/"])
    assert filesystem.read("a.csv").content == "x,y\n1,2\n"
    assert not preview.is_directory


def test_an_archive_is_mounted_with_its_modes_and_times(host: Path, filesystem: InMemoryFilesystem) -> None:
    script = write(host / "bin/run.sh")
    script.chmod(0o755)
    os.utime(script, (0, 1_500_000_000))
    write(host / "bin2/other.sh")
    mounted(filesystem, HostMount(zipped(host).replace("zip://", "zip://bin")))  # a part of it
    found = filesystem.stat("run.sh")
    assert (found.mode, found.modified_at.timestamp()) == (0o755, 1_500_000_000)
    assert files(filesystem) == ["run.sh"]


def test_an_archive_cannot_write_beside_its_mount(host: Path, filesystem: InMemoryFilesystem) -> None:
    with zipfile.ZipFile(host / "evil.zip", "w") as archive:
        archive.writestr("../evil.txt", "evil")
        archive.writestr("fine.txt", "fine")
    (preview,) = mounted(filesystem, HostMount(f"zip://::{host}/evil.zip", mount_path="in"))
    assert files(filesystem) == ["in/fine.txt"]
    assert any("cannot be a path" in reason for reason in reasons(preview).values())


def test_links_in_an_archive_are_listed(host: Path, filesystem: InMemoryFilesystem) -> None:
    with zipfile.ZipFile(host / "links.zip", "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    (preview,) = mounted(filesystem, HostMount(f"zip://::{host}/links.zip"))
    assert (files(filesystem), set(reasons(preview))) == ([], {"link"})


@pytest.mark.parametrize("start", ["file://", "local://"])
def test_a_file_url_is_a_host_path(host: Path, filesystem: InMemoryFilesystem, start: str) -> None:
    os.mkfifo(host / "fifo")
    write(host / "a.txt")
    (preview,) = mounted(filesystem, HostMount(f"{start}{host}"))
    assert (files(filesystem), set(reasons(preview))) == (["a.txt"], {"fifo"})


MOUNTING = """
import sys
from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools.mounts import mount_all
from ringfence_tools import HostMount
print("fsspec" in sys.modules)
for source in (sys.argv[1], f"file://{sys.argv[1]}", f"zip://::{sys.argv[1]}/a.zip"):
    mount_all(InMemoryFilesystem(), [HostMount(source)], None)
    print("fsspec" in sys.modules)
"""


def test_fsspec_is_loaded_only_for_urls_of_what_is_no_directory(host: Path) -> None:
    with zipfile.ZipFile(host / "a.zip", "w") as archive:
        archive.writestr("a.txt", "x\n")
    done = subprocess.run([sys.executable, "-c", MOUNTING, str(host)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]
