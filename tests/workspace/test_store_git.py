"""The history of a workspace is a git repository: a real git reads it, and takes what is exported of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree, lasting
from real_git import fsck, git, git_bytes, needs_git, repository

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

pytestmark = needs_git

ODD = ("caf\udce9.txt", "tab\tand\nline", '"quoted" \\ back', " blank ", "-dash", "ünï", "a" * 255, "~rf~x", "%25")
DOTGIT = (".git", ".GIT", ".Git ", "git~1", ".git. .", ".git::$INDEX", "x\\.git", ".g\u200cit", ".git\udcff")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/src").mkdir(parents=True)
    (tmp_path / "root/src/a.py").write_text("x = 1\n")
    return tmp_path / "root"


def opened(root: Path, **options: bool) -> Workspace:
    return Workspace.open(root, store=root.parent / "store", **options)


def history(root: Path) -> Path:
    return root.parent / "store/history"


def step(workspace: Workspace, change: Callable[[HostFilesystem], object], *, opaque: bool = False) -> None:
    with held_call(workspace.filesystem, call_id="call-7", opaque=opaque) as held:
        change(workspace.filesystem.for_call(held))
        held.commit()


def make(place: Path, content: bytes = b"x") -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)


def odd_things(root: Path) -> None:
    for name in (*ODD, *DOTGIT):
        make(root / f"d-{name}"[:255])
        make(root / name / name)
        (root / name / "e").mkdir()
    for number, name in enumerate((".gitmodules", ".gitattributes", ".gitignore", ".mailmap")):
        make(root / f"p{number}" / name, b"[broken\n\0" + b"x" * 5000)
        make(root / f"q{number}" / name / "x")
        (root / f"l{number}").mkdir()
        (root / f"l{number}" / name).symlink_to("/etc/passwd")
    make(root / "m/.gitmodules", b'[submodule "../x"]\n\tpath = -a\n\turl = -u\n\tupdate = !rm\n')


def test_git_finds_nothing_wrong_with_a_history_of_odd_things_and_they_come_back(root: Path) -> None:
    before = lasting(capture_tree(root))
    with opened(root) as workspace:
        step(workspace, lambda fs: odd_things(root), opaque=True)
        after = lasting(capture_tree(root))
        assert set(workspace.steps()[0].paths) == after.keys() - before.keys()
    fsck(history(root))
    names = git_bytes(history(root), "ls-tree", "-r", "-z", "--name-only", "HEAD").split(b"\0")
    assert not [name for name in names if b".git" in name.lower().replace(b" ", b"").split(b"/")]
    with opened(root) as workspace:
        workspace.restore(0)
        assert lasting(capture_tree(root)) == before
        workspace.undo()
        assert lasting(capture_tree(root)) == after


def test_modes_in_files_are_only_what_git_has(root: Path) -> None:
    for name, mode in (("s", 0o4755), ("w", 0o666), ("n", 0)):
        (root / name).touch()
        (root / name).chmod(mode)
    (root / "l").symlink_to("s")
    opened(root).close()
    fsck(history(root))
    modes = {line.split()[0] for line in git(history(root), "ls-tree", "-r", "HEAD:files").splitlines()}
    assert modes == {"100644", "100755", "120000"}


def test_a_history_of_directories_alone_is_clean(root: Path) -> None:
    shutil.rmtree(root / "src")
    with opened(root) as workspace:
        step(workspace, lambda fs: fs.mkdir("e/f", parents=True))
    fsck(history(root))
    with opened(root) as workspace:
        workspace.undo()
        workspace.undo()
    assert [path.name for path in root.rglob("*")] == ["e", "f"]


def test_the_log_shows_who_did_what(root: Path) -> None:
    with opened(root) as workspace:
        step(workspace, lambda fs: fs.write("src/a.py", "x = 2\n"))
    (root / "src/a.py").write_text("x = 3\n")
    with opened(root) as workspace:
        workspace.undo()
    titles = git(history(root), "log", "--format=%s").splitlines()
    assert titles == ["changed by somebody else: src/a.py", "a test: src/a.py", "the workspace as it was found"]
    text = git(history(root), "log", "-p", "-1", "HEAD~1")
    assert "    Call-Id: call-7\n    Session-Id: a session\n    Receipt-Id: receipt of call-7\n" in text
    assert "-x = 1\n+x = 2\n" in text
    trailers = "%(trailers:key=Tool,valueonly)%(trailers:key=Step,valueonly)"
    assert git(history(root), "log", "-1", f"--format={trailers}", "HEAD~1").split() == ["a", "test", "1"]


def test_a_history_that_git_packed_anew_goes_on(root: Path) -> None:
    for number in range(100):
        (root / f"src/f{number}").write_bytes(os.urandom(30))
    states = list[object]()
    with opened(root) as workspace:
        for number in range(40):
            states.append(lasting(capture_tree(root)))
            step(workspace, lambda fs, number=number: fs.write(f"src/f{number}", f"{number}"))
    fsck(history(root))
    git(history(root), "gc", "-q", "--aggressive", "--prune=now")
    with opened(root) as workspace:
        for number in (0, 17, 39):
            workspace.restore(number)
            assert lasting(capture_tree(root)) == states[number]
        workspace.gc(5)
        workspace.restore(39)
    assert lasting(capture_tree(root)) == states[39]
    fsck(history(root))


def test_a_history_made_small_is_clean_and_has_the_steps_with_names(root: Path) -> None:
    with opened(root) as workspace:
        for number in range(10):
            step(workspace, lambda fs, number=number: fs.write("src/a.py", f"x = {number}\n"))
            if number == 2:
                workspace.checkpoint("release")
        workspace.gc(3)
    fsck(history(root))
    assert len(git(history(root), "log", "--oneline").splitlines()) == 4
    [name] = git(history(root), "for-each-ref", "--format=%(refname)", "refs/ringfence").splitlines()
    assert git(history(root), "show", f"{name}:files/src/a.py") == "x = 2\n"


def test_a_history_stays_small(root: Path) -> None:
    for number in range(1000):
        (root / f"file{number}").write_text(f"{number}")

    def size() -> int:
        return sum(path.stat().st_size for path in history(root).rglob("*") if path.is_file())

    with opened(root) as workspace:
        before = size()
        for number in range(100):
            step(workspace, lambda fs, number=number: fs.write(f"file{number}", f"edit {number}"))
        assert (size() - before) / 100 < 4.5 * 1024
    for number in range(30):
        with opened(root) as workspace:
            step(workspace, lambda fs, number=number: fs.write("src/a.py", f"{number}\n"))
    assert sum(1 for path in history(root).rglob("*") if path.is_file()) < 40


def test_a_reader_keeps_what_it_had_while_the_history_is_written_packed_and_made_small(root: Path) -> None:
    with opened(root) as workspace:
        step(workspace, lambda fs: fs.write("src/a.py", "x = 2\n"))
        with opened(root, read_only=True) as reader:
            step(workspace, lambda fs: fs.write("src/a.py", "x = 3\n"))
            workspace.gc(0)
            assert [one.number for one in reader.steps()] == [1]
            assert b"+x = 2" in reader.show(1).patch
        with opened(root, read_only=True) as reader:
            assert reader.log(1)[0].number == 2


HOSTILE_CALL = """
import sys
from ringfence.testing import held_call
from ringfence_sandbox import Workspace
with Workspace.open(sys.argv[1], store=sys.argv[2]) as workspace, held_call(workspace.filesystem, opaque=True) as held:
    for name, content in (("crlf", b"a\\r\\nb\\r\\n"), ("lf", b"a\\nb\\n")):
        with open(f"{sys.argv[1]}/{name}", "wb") as file:
            file.write(content)
    held.commit()
"""


def test_no_git_configuration_or_hook_is_ever_consulted(root: Path, tmp_path: Path) -> None:
    home, ran = tmp_path / "home", tmp_path / "ran"
    (home / "hooks").mkdir(parents=True)
    for name in ("run", "hooks/post-commit", "hooks/pre-commit", "hooks/reference-transaction"):
        (home / name).write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
        (home / name).chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n\tautocrlf = true\n\thooksPath = {home}/hooks\n\tfsmonitor = {home}/run\n"
        f"\tattributesFile = {home}/attributes\n"
        f'[filter "evil"]\n\tclean = {home}/run\n\tsmudge = {home}/run\n\trequired = true\n'
        "[user]\n\tname = Somebody Else\n\temail = else@example.org\n[i18n]\n\tcommitEncoding = latin1\n"
    )
    for place in (home / "attributes", root / ".gitattributes"):
        place.write_text("* filter=evil text eol=crlf\n")
    hostile = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "GIT_DIR": str(tmp_path / "nowhere"),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "GIT_OBJECT_DIRECTORY": str(tmp_path / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(tmp_path / "alternates"),
        "GIT_AUTHOR_NAME": "Somebody Else",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.compression",
        "GIT_CONFIG_VALUE_0": "9",
    }
    there = {*os.listdir(tmp_path), "store"}
    command = [sys.executable, "-c", HOSTILE_CALL, str(root), str(tmp_path / "store")]
    subprocess.run(command, env=os.environ | hostile, check=True, timeout=60)
    assert not ran.exists()
    assert {*os.listdir(tmp_path)} == there
    fsck(history(root))
    for name in ("crlf", "lf"):
        assert git_bytes(history(root), "show", f"HEAD:files/{name}") == (root / name).read_bytes()
    assert "Else" not in git(history(root), "log", "--format=%an %ae %cn")


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("fmt", ["diff", "mbox"])
def test_git_takes_what_is_exported(root: Path, tmp_path: Path, fmt: str) -> None:
    (root / "link").symlink_to("src")
    copy = repository(Path(shutil.copytree(root, tmp_path / "copy", symlinks=True)))
    with opened(root) as workspace:
        step(workspace, lambda fs: (fs.write("src/a.py", "x = 2\n"), fs.write("new dir/ünï \udce9", "no newline")))
        step(
            workspace,
            lambda fs: (
                fs.write_bytes("crlf", b"a\r\nb\r\n"),
                fs.write_bytes("bin", bytes(range(256)) * 20),
                fs.write("run", "#!/bin/sh\n"),
                fs.chmod("run", 0o755),
            ),
        )
        (root / "src/a.py").write_text("x = 3\n")
        step(
            workspace,
            lambda fs: (
                fs.write("src/a.py", "x = 4\n"),
                fs.write(".git/HEAD", "ref"),
                fs.mkdir("only"),
                fs.delete("link"),
                fs.symlink("src/.gitmodules", "x"),
            ),
        )
        step(workspace, lambda fs: (fs.write_bytes("crlf", b"a\r\nc\r\n"), fs.write("From x", "From me\ndiff --git\n")))
        exported = workspace.export("mbox" if fmt == "mbox" else "diff")
    assert set(exported.left_out) == {".git", ".git/HEAD", "src/.gitmodules"}
    git(copy, *(["am", "--keep-cr"] if fmt == "mbox" else ["apply", "--whitespace=nowarn"]), given=exported.text)
    assert contents(copy) == contents(root)
    assert (copy / "run").stat().st_mode & 0o100
    assert not os.path.lexists(copy / "link")


LINES = "a\nb\nc\nd\n"


@pytest.mark.parametrize(
    ("before", "theirs", "merged"),
    [
        ("A\nb\nc\nd\n", "a\nb\nc\nD\n", "A\nb\nc\nD\n"),
        ("a\nb\nc\nd\ne\n", "x\na\nb\nc\nd\n", "x\na\nb\nc\nd\ne\n"),
        ("a\nd\n", "a\nb\nc\nd\n\n", "a\nd\n\n"),
        ("a\nb\nc\nd", "A\nb\nc\nd\n", "A\nb\nc\nd"),
        ("A\nb\nc\nd\n", "X\nb\nc\nd\n", None),
        ("a\nB\nc\nd\n", "a\nb\nC\nd\n", None),
        ("a\nc\nd\n", "a\nB\nc\nd\n", None),
        ("a\0b\n", "a\nb\nc\nD\n", None),
    ],
)
def test_an_undo_merges_texts_where_it_is_clear_how(root: Path, before: str, theirs: str, merged: str | None) -> None:
    (root / "text").write_text(before)
    with opened(root) as workspace:
        step(workspace, lambda fs: fs.write("text", LINES))
        (root / "text").write_text(theirs)
        assert workspace.undo().outcomes == {"text": "conflict" if merged is None else "restored"}
    assert (root / "text").read_text() == (theirs if merged is None else merged)
