from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import write_back
from effort import kill_points
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mounts import mount_all

from ringfence.errors import WorkspaceConflictError
from ringfence.filesystem import FilesystemSnapshot, InMemoryFilesystem, ReadBytesResult
from ringfence.runtime import Change, FileVersion, Step
from ringfence_sandbox import Workspace, is_reserved
from ringfence_tools import HostMount

NOT_UTF8 = os.fsdecode(b"caf\xe9.txt")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "host")


def make_tree(directory: Path) -> Path:
    directory.mkdir()
    for path in ("a.txt", "src/b.py", "src/deep/c.py", "docs/d.md", "docs/e.md"):
        write(directory / path, f"{path}\n")
    (directory / "link").symlink_to("src/b.py")
    (directory / "empty").mkdir()
    return directory


class Meddling(InMemoryFilesystem):
    """Lets something happen at the moment when the new bytes of `path` are asked for: in the middle of a write-back."""

    path = ""
    meddle: Callable[[], object] = staticmethod(lambda: None)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        if path == self.path:
            self.meddle()
        return super().read_bytes(path, offset=offset, limit=limit)


class Mounted:
    def __init__(self, host: Path, exclude_glob: tuple[str, ...] = ()) -> None:
        self.host = host
        self.files = Meddling()
        mount_all(self.files, [HostMount(host, exclude_glob=exclude_glob)], None)
        self.since: FilesystemSnapshot = self.files.snapshot()

    def back(self) -> Step | None:
        return write_back(self.files, self.host, self.files.changes(self.since))


@pytest.fixture
def mounted(host: Path) -> Mounted:
    return Mounted(host)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogateescape"))


def tree(directory: Path) -> dict[str, tuple[object, ...]]:
    """What is below a directory: kinds, permission bits and contents, and what would tell that it was written."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (directory, *directory.rglob("*")):
        info = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        name = str(path.relative_to(directory))
        if is_reserved(name):
            continue
        found[name] = (stat.filemode(info.st_mode), content, info.st_ino, info.st_mtime_ns)
    return found


def contents(directory: Path) -> dict[str, tuple[object, ...]]:
    return {path: found[:2] for path, found in tree(directory).items()}


# -- what is written


def test_only_what_changed_is_written(mounted: Mounted, host: Path) -> None:
    before = tree(host)
    assert mounted.back() is None
    assert tree(host) == before
    mounted.files.write("src/b.py", "changed\n")
    result = mounted.back()
    after = tree(host)
    assert result is not None
    assert result.paths == ("src/b.py",)
    assert (host / "src/b.py").read_text() == "changed\n"
    touched = {path for path in before if before[path] != after[path]}
    assert touched == {"src", "src/b.py"}
    assert before.keys() == after.keys()


def test_new_files_and_directories_appear(mounted: Mounted, host: Path) -> None:
    mounted.files.write(f"new/{NOT_UTF8}", "odd\n")
    mounted.files.symlink("new/link", "deep/file.txt")
    mounted.back()
    assert (host / "new" / NOT_UTF8).read_text() == "odd\n"
    assert os.readlink(host / "new/link") == "deep/file.txt"


def test_an_absolute_link_into_the_tree_can_be_replaced(host: Path) -> None:
    (host / "absolute").symlink_to(host / "a.txt")
    mounted = Mounted(host)
    mounted.files.delete("absolute")
    mounted.back()
    assert not (host / "absolute").is_symlink()


def test_the_root_may_be_given_as_a_link(mounted: Mounted, host: Path) -> None:
    (host.parent / "alias").symlink_to(host)
    mounted.files.write("a.txt", "changed\n")
    write_back(mounted.files, host.parent / "alias", mounted.files.changes(mounted.since))
    assert (host / "a.txt").read_text() == "changed\n"


# -- permission bits and what else belongs to a file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_changed_permission_bits_are_written_without_the_content(mounted: Mounted, host: Path) -> None:
    before = tree(host)
    mounted.files.chmod("src/b.py", 0o755)
    mounted.files.chmod("docs", 0o700)
    mounted.back()
    assert (mode(host / "src/b.py"), mode(host / "docs")) == (0o755, 0o700)
    assert tree(host)["src/b.py"][1:] == before["src/b.py"][1:]


def test_the_root_has_permission_bits_too(mounted: Mounted, host: Path) -> None:
    mounted.files.chmod("", 0o700)
    mounted.back()
    assert mode(host) == 0o700


def test_content_and_permission_bits_can_change_together(mounted: Mounted, host: Path) -> None:
    mounted.files.write("a.txt", "changed\n")
    mounted.files.chmod("a.txt", 0o500)
    mounted.back()
    assert ((host / "a.txt").read_text(), mode(host / "a.txt")) == ("changed\n", 0o500)


def test_what_is_new_has_the_permission_bits_of_the_workspace_less_the_umask(mounted: Mounted, host: Path) -> None:
    mounted.files.write("run.sh", "#!/bin/sh\n")
    mounted.files.chmod("run.sh", 0o775)
    mounted.files.mkdir("closed")
    mounted.files.chmod("closed", 0o500)
    mounted.files.write("closed/inside", "x")
    umask = os.umask(0o027)
    try:
        mounted.back()
    finally:
        os.umask(umask)
    assert (mode(host / "run.sh"), mode(host / "closed"), mode(host / "closed/inside")) == (0o750, 0o500, 0o640)


def test_nobody_gets_a_set_user_id_bit(mounted: Mounted, host: Path) -> None:
    mounted.files.write("new", "x")
    mounted.files.chmod("new", 0o4755)
    mounted.files.chmod("a.txt", 0o6755)
    mounted.back()
    assert (mode(host / "new"), mode(host / "a.txt")) == (0o755, 0o755)


# -- conflicts


def edit(mounted: Mounted) -> None:
    """A change of every kind."""
    files = mounted.files
    files.write("a.txt", "mine\n")
    files.write("new/file", "mine\n")
    files.delete("docs", recursive=True)
    files.delete("link")
    files.symlink("link", "a.txt")
    files.chmod("src/b.py", 0o700)
    files.delete("src/deep/c.py")


def replaced(path: Path) -> Callable[[Path], None]:
    def act(host: Path) -> None:
        (host / path).unlink()
        (host / path).write_text("theirs\n")

    return act


CONFLICTS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("other bytes", lambda host: write(host / "a.txt", "theirs\n"), ["a.txt"]),
    ("gone", lambda host: (host / "a.txt").unlink(), ["a.txt"]),
    ("appeared", lambda host: write(host / "new/file", "theirs\n"), ["new", "new/file"]),
    ("a directory where one is to be", lambda host: (host / "new").mkdir(), ["new"]),
    ("a file where a directory is to be", lambda host: write(host / "new", "theirs\n"), ["new"]),
    ("a link where a directory is to be", lambda host: (host / "new").symlink_to("src"), ["new"]),
    ("other target", lambda host: [(host / "link").unlink(), (host / "link").symlink_to("docs")], ["link"]),
    ("a file instead of the link", replaced(Path("link")), ["link"]),
    ("other permission bits", lambda host: (host / "src/b.py").chmod(0o600), ["src/b.py"]),
    ("deleted, and different", lambda host: write(host / "docs/d.md", "theirs\n"), ["docs/d.md"]),
    ("deleted, and not empty", lambda host: write(host / "docs/theirs", "theirs\n"), ["docs/theirs"]),
    ("deleted, and deleted", lambda host: (host / "docs/e.md").unlink(), ["docs/e.md"]),
    ("several", lambda host: [write(host / p, "x") for p in ("a.txt", "docs/e.md")], ["a.txt", "docs/e.md"]),
    (
        "a link for a directory on the way",
        lambda host: [(host / "src").rename(host / "moved"), (host / "src").symlink_to("moved")],
        ["src/b.py", "src/deep/c.py"],
    ),
]


@pytest.mark.parametrize(("act", "paths"), [c[1:] for c in CONFLICTS], ids=[c[0] for c in CONFLICTS])
def test_what_changed_on_disk_meanwhile_is_a_conflict_and_nothing_is_written(
    mounted: Mounted, host: Path, act: Callable[[Path], object], paths: list[str]
) -> None:
    edit(mounted)
    act(host)
    before = tree(host)
    with pytest.raises(WorkspaceConflictError) as raised:
        mounted.back()
    assert list(raised.value.paths) == paths
    assert tree(host) == before


def test_what_changed_on_disk_elsewhere_is_no_conflict(mounted: Mounted, host: Path) -> None:
    edit(mounted)
    write(host / "src/unrelated.py", "theirs\n")
    (host / "a.txt").chmod(0o600)
    mounted.back()
    assert (host / "src/unrelated.py").read_text() == "theirs\n"
    assert ((host / "a.txt").read_text(), mode(host / "a.txt")) == ("mine\n", 0o600)
    assert (host / "new/file").read_text() == "mine\n"


def test_nothing_is_written_into_what_was_not_mounted(host: Path) -> None:
    write(host / ".git/config", "mine\n")
    mounted = Mounted(host, exclude_glob=(".git",))
    mounted.files.write(".git/hooks/pre-commit", "#!/bin/sh\n")
    with pytest.raises(WorkspaceConflictError, match=r"\.git$"):
        mounted.back()
    assert not (host / ".git/hooks").exists()


def test_files_that_were_not_mounted_keep_their_directory(host: Path) -> None:
    os.mkfifo(host / "docs/fifo")
    mounted = Mounted(host)
    mounted.files.delete("docs", recursive=True)
    with pytest.raises(WorkspaceConflictError, match="docs/fifo"):
        mounted.back()


MEDDLING: list[tuple[str, Callable[[Path], object]]] = [
    ("written in place", lambda host: (host / "a.txt").write_text("their\n")),
    ("replaced", replaced(Path("a.txt"))),
    ("deleted", lambda host: (host / "a.txt").unlink()),
    ("a file where one is to be made", lambda host: write(host / "zz.txt", "theirs\n")),
    ("in a directory that goes", lambda host: write(host / "docs/theirs", "theirs\n")),
    ("a deleted file, written", lambda host: write(host / "docs/d.md", "theirs\n")),
]


@pytest.mark.parametrize("meddle", [m[1] for m in MEDDLING], ids=[m[0] for m in MEDDLING])
def test_what_changes_on_disk_during_the_writing_is_a_conflict_too(
    mounted: Mounted, host: Path, meddle: Callable[[Path], object]
) -> None:
    edit(mounted)
    mounted.files.write("zz.txt", "mine\n")
    after_meddling: list[dict[str, tuple[object, ...]]] = []
    mounted.files.path = "zz.txt"
    mounted.files.meddle = lambda: [meddle(host), after_meddling.append(contents(host))]
    with pytest.raises(WorkspaceConflictError):
        mounted.back()
    theirs = {path: what for path, what in after_meddling[0].items() if ".ringfence-" not in path and path != "new"}
    assert contents(host) == theirs


def test_a_link_swapped_in_for_a_directory_leads_nothing_out(mounted: Mounted, host: Path) -> None:
    outside = host.parent / "outside"
    write(outside / "deep/c.py", "theirs\n")
    before = tree(outside)
    mounted.files.write("src/deep/c.py", "mine\n")
    mounted.files.write("src/new.py", "mine\n")

    def swap() -> None:
        (host / "src").rename(host / "elsewhere")
        (host / "src").symlink_to(outside)

    mounted.files.path, mounted.files.meddle = "src/new.py", swap
    with pytest.raises((WorkspaceConflictError, PermissionError)):
        mounted.back()
    assert tree(outside) == before


# -- failure


def test_a_failure_in_the_middle_puts_everything_back(mounted: Mounted, host: Path) -> None:
    edit(mounted)
    mounted.files.write("zz.txt", "mine\n")
    before = tree(host)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    mounted.files.path, mounted.files.meddle = "zz.txt", fail
    with pytest.raises(OSError, match="No space left on device"):
        mounted.back()
    assert tree(host) == before


def test_an_interrupt_puts_everything_back(mounted: Mounted, host: Path) -> None:
    edit(mounted)
    before = tree(host)

    mounted.files.path, mounted.files.meddle = "new/file", lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        mounted.back()
    assert tree(host) == before


def test_a_kill_in_the_middle_leaves_the_tree_before_or_after_the_step(tmp_path: Path) -> None:
    """The process dies at its n-th change of the disk, until n is past its end."""
    outcomes: set[tuple[str, ...]] = set()
    for n in kill_points(3, start=1):
        host = make_tree(tmp_path / str(n))
        before = contents(host)
        mounted = Mounted(host)
        edit(mounted)
        child = os.fork()
        if child == 0:
            kill_at_change(n)
            mounted.back()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with Workspace.open(host) as workspace:
            steps = tuple(step.tool for step in workspace.steps())
            outcomes.add(steps)
            if steps:
                assert (host / "new/file").read_text() == "mine\n"
                assert not (host / "docs").exists()
                workspace.undo()
            assert contents(host) == before
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert outcomes == {(), ("apply",)}


def kill_at_change(n: int) -> None:
    changes = itertools.count(1)
    kinds = {"os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "os.symlink", "os.chmod"}

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        is_change = event in kinds or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT)
        if is_change and next(changes) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


LAST_MOMENT = """
import os, sys
from ringfence.errors import WorkspaceConflictError
from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools.mounts import mount_all
from ringfence_tools import HostMount
from ringfence_tools.runs.write_back import write_back
files = InMemoryFilesystem()
mount_all(files, [HostMount(sys.argv[1])], None)
since = files.snapshot()
files.write("new/file", "mine\\n")
waiting = [sys.argv[1] + "/new"]
def audit(event, arguments):
    if event == "os.mkdir" and waiting:
        os.mkdir(waiting.pop())
sys.addaudithook(audit)
try:
    write_back(files, sys.argv[1], files.changes(since))
except WorkspaceConflictError as error:
    print(error.paths)
"""


def test_a_directory_that_appears_at_the_last_moment_is_a_conflict_and_stays(host: Path) -> None:
    before = contents(host)
    done = subprocess.run([sys.executable, "-c", LAST_MOMENT, str(host)], capture_output=True, text=True, check=True)
    assert done.stdout == "('new',)\n"
    assert contents(host).keys() - before.keys() == {"new"}


def test_other_bytes_than_the_changes_say_are_refused(mounted: Mounted, host: Path) -> None:
    mounted.files.write("a.txt", "shown\n")
    changes = mounted.files.changes(mounted.since)
    mounted.files.write("a.txt", "slipped in\n")
    with pytest.raises(ValueError, match="take them again"):
        write_back(mounted.files, host, changes)
    assert (host / "a.txt").read_text() == "a.txt\n"


@pytest.mark.parametrize("path", ["../out.txt", "/etc/x", "a/../../out.txt", "a//b", "./a"])
def test_a_path_that_could_lead_out_is_refused(mounted: Mounted, host: Path, path: str) -> None:
    change = Change(path, None, FileVersion("directory", 0o755, 0))
    with pytest.raises(ValueError, match="not a path"):
        write_back(mounted.files, host, [change])


# -- the property


NAMES = st.sampled_from(["a", "b", "c", "docs", "src", "link"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
EDITS = st.one_of(
    st.tuples(st.just("write"), PATHS, st.sampled_from(["", "one\n", "two\n"])),
    st.tuples(st.just("delete"), PATHS, st.none()),
    st.tuples(st.just("mkdir"), PATHS, st.none()),
    st.tuples(st.just("move"), PATHS, PATHS),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o700, 0o755, 0o644])),
    st.tuples(st.just("symlink"), PATHS, st.sampled_from(["a", "docs/d.md", "missing"])),
)


def do(files: InMemoryFilesystem, edits: list[tuple[str, str, str | int | None]]) -> None:
    for what, path, argument in edits:
        try:
            if what == "delete":
                files.delete(path, recursive=True)
            else:
                getattr(files, what)(path, *(() if argument is None else (argument,)))
        except (OSError, ValueError):
            continue


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(first=st.lists(EDITS, max_size=8), second=st.lists(EDITS, max_size=8))
def test_the_disk_is_what_the_workspace_is(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[tuple[str, str, str | int | None]],
    second: list[tuple[str, str, str | int | None]],
) -> None:
    host = tmp_path_factory.mktemp("property")
    files = InMemoryFilesystem()
    since = files.snapshot()
    for edits in (first, second):
        do(files, edits)
        write_back(files, host, files.changes(since))
        since = files.snapshot()
        on_disk = {path: (kind[0], content) for path, (kind, content) in contents(host).items() if path != "."}
        assert on_disk == dict(described(files))
        assert not [path for path in on_disk if ".ringfence-" in path]


def described(files: InMemoryFilesystem) -> list[tuple[str, tuple[str, object]]]:
    found: list[tuple[str, tuple[str, object]]] = []
    for match in files.glob("**"):
        entry = next(e for e in files.list(match.path.rpartition("/")[0]) if e.path == match.path)
        if entry.is_symlink:
            found.append((match.path, ("l", files.readlink(match.path))))
        elif entry.is_directory:
            found.append((match.path, ("d", None)))
        else:
            found.append((match.path, ("-", files.read_bytes(match.path).content)))
    return found
