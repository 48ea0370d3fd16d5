from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from effort import PROVING, SEED
from killing import killed_at_call

from ringfence_sandbox.store.commit_messages import CommitInfo
from ringfence_sandbox.store.entries import Entry, Meta, Pending
from ringfence_sandbox.store.exports import mailbox, unified
from ringfence_sandbox.store.history_gc import gc
from ringfence_sandbox.store.history_objects import MOST_PACKS
from ringfence_sandbox.store.store import Store

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

NOW = datetime(2026, 11, 22, 10, 30, tzinfo=UTC)
META = Meta(0o644, 0, 0, 1_700_000_000_123_456_789)
DIRECTORY = Pending("directory", Meta(0o755, 0, 0, 1_700_000_000_123_456_789))
ODD = ("caf\udce9.txt", "tab\tand\nline", '"quoted" \\ back', " blank ", "-dash", "ünï", "a" * 255, "~rf~x", "%25")
DOTGIT = (".git", ".GIT", "git~1", ".git ", "x\\.git", ".g\u200cit")


def file(content: bytes, mode: int = 0o644) -> Pending:
    return Pending("file", Meta(mode, 0, 0, META.mtime_ns), content)


def git(folder: Path, *arguments: str, given: bytes | None = None, **environment: str) -> bytes:
    clean = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **environment}
    done = subprocess.run(["git", "-C", str(folder), *arguments], env=clean, input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    return done.stdout + done.stderr


def step(store: Store, changes: dict[str, Entry | Pending | None], kind: str = "step", tool: str = "edit_file") -> str:
    assert kind in ("baseline", "step", "external")
    info = CommitInfo(kind, NOW, tool, "call-7", "session-1", "receipt-9")
    prepared = store.prepare(changes, info)
    store.publish(prepared)
    return prepared.commit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        step(store, {"": DIRECTORY, "src": DIRECTORY, "src/a.py": file(b"x = 1\n")}, "baseline")
        yield store


def assert_clean(store: Store) -> None:
    store.seal()
    assert git(store.folder, "fsck", "--full", "--strict", "--no-dangling") == b""


def test_git_finds_nothing_wrong_with_a_store_of_odd_things(store: Store) -> None:
    changes: dict[str, Entry | Pending | None] = {}
    for name in (*ODD, *DOTGIT):
        changes |= {
            f"d-{name}"[:255]: file(b"1"),
            name: DIRECTORY,
            f"{name}/{name}": file(b"2"),
            f"{name}/e": DIRECTORY,
        }
    for n, name in enumerate((".gitmodules", ".gitattributes", ".gitignore", ".mailmap")):
        for place, state in enumerate((file(b"[broken\n\0" + b"x" * 5000), Pending("symlink", META, b"/etc/passwd"))):
            changes |= {f"p{n}{place}": DIRECTORY, f"p{n}{place}/{name}": state}
        changes |= {f"q{n}": DIRECTORY, f"q{n}/{name}": DIRECTORY, f"q{n}/{name}/x": file(b"")}
    changes["p00/.gitmodules"] = file(b'[submodule "../x"]\n\tpath = -a\n\turl = -u\n\tupdate = !rm\n')
    commit = step(store, changes)
    assert_clean(store)
    kept = store.states.files(commit)
    assert set(kept) == {"", "src", "src/a.py", *changes}
    names = git(store.folder, "ls-tree", "-r", "-z", "--name-only", "HEAD").split(b"\0")
    assert not any(
        part.lower().startswith(b".git") and part.lower().strip() == b".git"
        for name in names
        for part in name.split(b"/")
    )


def test_modes_in_files_are_only_what_git_has(store: Store) -> None:
    step(store, {"s": file(b"", 0o4755), "w": file(b"", 0o666), "n": file(b"", 0), "l": Pending("symlink", META, b"s")})
    assert_clean(store)
    modes = {line.split()[0] for line in git(store.folder, "ls-tree", "-r", "HEAD:files").splitlines()}
    assert modes == {b"100644", b"100755", b"120000"}


def test_an_empty_workspace_is_clean(tmp_path: Path) -> None:
    with Store.open(tmp_path / "empty") as store:
        step(store, {"": DIRECTORY}, "baseline")
        step(store, {"e": DIRECTORY, "e/f": DIRECTORY})
        assert_clean(store)
        assert store.tip is not None
        assert set(store.states.files(store.tip)) == {"", "e", "e/f"}


def test_the_log_shows_who_did_what(store: Store) -> None:
    step(store, {"src/a.py": file(b"x = 2\n")})
    store.seal()
    text = git(store.folder, "log", "-p", "-1").decode()
    assert "edit_file: src/a.py" in text
    assert "    Call-Id: call-7\n    Session-Id: session-1\n    Receipt-Id: receipt-9\n" in text
    assert "-x = 1\n+x = 2\n" in text
    assert "meta/" not in text
    trailers = git(store.folder, "log", "-1", "--format=%(trailers:key=Tool,valueonly)%(trailers:key=Step,valueonly)")
    assert trailers.split() == [b"edit_file", b"1"]


def test_packs_of_deltas_are_clean_and_read_back_after_git_packed_them_anew(store: Store) -> None:
    many: dict[str, Entry | Pending | None] = {f"src/f{n}": file(os.urandom(30)) for n in range(100)}
    commits = [step(store, many)]
    commits += [step(store, {f"src/f{n}": file(b"%d" % n)}) for n in range(80)]
    before = [store.states.files(commit) for commit in commits]
    assert_clean(store)
    store.close()
    git(store.folder, "gc", "-q", "--aggressive", "--prune=now")
    with Store.open(store.folder) as again:
        assert [again.states.files(commit) for commit in commits] == before
        step(again, {"src/f1": file(b"on")})
        gc(again, 5)
        assert again.states.files(commits[-1]) == before[-1]
        assert_clean(again)


def test_a_store_made_small_is_clean(store: Store) -> None:
    commits = [step(store, {"src/a.py": file(b"x = %d\n" % n)}) for n in range(10)]
    store.keep("release", commits[2])
    gc(store, 3)
    assert_clean(store)
    assert len(git(store.folder, "log", "--oneline").splitlines()) == 4
    assert git(store.folder, "show", "refs/ringfence/release:files/src/a.py") == b"x = 2\n"


def test_no_git_configuration_or_hook_is_ever_consulted(tmp_path: Path) -> None:
    home, ran = tmp_path / "home", tmp_path / "ran"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    script = f"#!/bin/sh\ntouch {ran}\ncat\n"
    for name in ("run", "hooks/post-commit", "hooks/pre-commit", "hooks/reference-transaction"):
        (home / name).write_text(script)
        (home / name).chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n\tautocrlf = true\n\thooksPath = {hooks}\n\tfsmonitor = {home}/run\n"
        f"\tattributesFile = {home}/attributes\n"
        f'[filter "evil"]\n\tclean = {home}/run\n\tsmudge = {home}/run\n\trequired = true\n'
        "[user]\n\tname = Somebody Else\n\temail = else@example.org\n[i18n]\n\tcommitEncoding = latin1\n"
    )
    (home / "attributes").write_text("* filter=evil text eol=crlf\n")
    program = (
        "import sys\nfrom datetime import UTC, datetime\n"
        "from ringfence_sandbox.store.commit_messages import CommitInfo\n"
        "from ringfence_sandbox.store.entries import Meta, Pending\n"
        "from ringfence_sandbox.store.store import Store\n"
        "meta, now = Meta(0o644, 0, 0, 0), datetime(2026, 11, 22, tzinfo=UTC)\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    file = lambda content: Pending('file', meta, content)\n"
        "    store.publish(store.prepare({'': Pending('directory', meta), '.gitattributes': file(b'* filter=evil\\n'),"
        " 'crlf': file(b'a\\r\\nb\\r\\n'), 'lf': file(b'a\\nb\\n')}, CommitInfo('baseline', now)))\n"
        "    print(store.tip)\n"
    )
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
    commits: list[bytes] = []
    for name, environment in (("plain", {}), ("hostile", hostile)):
        made = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / name)],
            env=os.environ | environment,
            capture_output=True,
            check=True,
        )
        commits.append(made.stdout)
    assert commits[0] == commits[1]
    assert not ran.exists()
    assert git(tmp_path / "hostile", "show", "HEAD:files/crlf") == b"a\r\nb\r\n"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "plain", "hostile"}


def worktree(folder: Path, files: dict[str, bytes]) -> Path:
    git(folder.parent, "init", "-q", str(folder))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    git(folder, "add", "-A")
    git(folder, *AUTHOR, "commit", "-qm", "start")
    return folder


AUTHOR = ("-c", "user.name=n", "-c", "user.email=e@example.org")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def three_steps(store: Store) -> None:
    step(store, {"src/a.py": file(b"x = 2\n"), "new dir": DIRECTORY, "new dir/ünï \udce9": file(b"no newline")})
    step(store, {"crlf": file(b"a\r\nb\r\n"), "bin": file(bytes(range(256)) * 20), "run": file(b"#!/bin/sh\n", 0o755)})
    step(store, {"src/a.py": file(b"x = 3\n"), ".git": DIRECTORY, ".git/HEAD": file(b"ref")}, "external")
    step(store, {"only": DIRECTORY}, tool="mkdir")
    step(
        store, {"run": None, "crlf": file(b"a\r\nc\r\n"), "From x": file(b"From me\ndiff --git\n---\n")}, tool="sh\n---"
    )


WANTED = {
    "src/a.py": b"x = 3\n",
    "new dir/ünï \udce9": b"no newline",
    "crlf": b"a\r\nc\r\n",
    "bin": bytes(range(256)) * 20,
    "From x": b"From me\ndiff --git\n---\n",
}


def test_git_am_takes_the_mailbox(store: Store, tmp_path: Path) -> None:
    three_steps(store)
    records = [record for record in store.commits() if record.number != 0][::-1]
    export = mailbox(store, records)
    tree = worktree(tmp_path / "tree", {"src/a.py": b"x = 1\n"})
    git(tree, *AUTHOR, "am", given=export.text)
    assert contents(tree) == WANTED
    assert export.left_out == (".git", ".git/HEAD")
    log = git(tree, "log", "--format=%s|%an|%aI", "--reverse").decode().splitlines()[1:]
    assert log[0] == "edit_file: 3 paths|ringfence|2026-11-22T10:30:00+00:00"
    assert len(log) == 4


def test_git_apply_takes_the_diff_over_all_steps(store: Store, tmp_path: Path) -> None:
    baseline = store.tip
    three_steps(store)
    assert store.tip is not None
    export = unified(store, baseline, store.tip)
    tree = worktree(tmp_path / "tree", {"src/a.py": b"x = 1\n"})
    git(tree, "apply", "--whitespace=nowarn", "-", given=export.text)
    assert contents(tree) == WANTED
    assert unified(store, None, store.tip).text.count(b"\ndiff --git") == len(WANTED) - 1


# Killed while it writes.

DEEDS = ("write", "fsync", "replace", "unlink", "ftruncate", "open", "close")


def sealing(folder: Path) -> None:
    with Store.open(folder) as store:
        step(store, {"src/a.py": file(b"new"), "src/b.py": file(b"B")})


def shrinking(folder: Path) -> None:
    with Store.open(folder) as store:
        gc(store, 2)


def repacking(folder: Path) -> None:
    with Store.open(folder) as store:
        for n in range(MOST_PACKS):
            step(store, {"src/a.py": file(b"new %d" % n)})
            store.seal()


@pytest.mark.parametrize("work", [sealing, shrinking, repacking])
def test_killed_anywhere_the_history_is_whole_and_clean(tmp_path: Path, work: Callable[[Path], None]) -> None:
    start = tmp_path / "start"
    with Store.open(start) as store:
        step(store, {"": DIRECTORY, "src": DIRECTORY, "src/a.py": file(b"x = 1\n")}, "baseline")
        for n in range(4):
            step(store, {"src/a.py": file(b"x = %d\n" % n)})
            store.seal()
        kept = {record.commit: store.states.files(record.commit) for record in store.commits()}
        last = store.tip
        store.keep("release", list(kept)[3])
    stride = 29 if work is repacking else 7 if work is shrinking else 3
    deed, stride = (0, 1) if PROVING else (SEED % stride, stride)
    while True:
        folder = tmp_path / f"at-{deed}"
        shutil.copytree(start, folder)
        if not killed_at_call(deed, DEEDS, lambda folder=folder: work(folder)):
            break
        with Store.open(folder, writable=False) as reader:
            assert_whole(reader, kept, last, least=3)
        with Store.open(folder) as again:
            assert_whole(again, kept, last, least=3)
            step(again, {"src/a.py": file(b"goes on")})
            if deed % 4 == 0:
                assert_clean(again)
        left = {path.name.split("-")[0].split(".")[0] for path in folder.rglob("*") if path.is_file()}
        assert left <= {"HEAD", "config", "attributes", "packed", "shallow", "objects", "pack"}
        shutil.rmtree(folder)
        deed += stride
    assert deed > 20


def assert_whole(store: Store, kept: dict[str, dict[str, Entry]], last: str | None, least: int) -> None:
    history = [record.commit for record in store.commits()]
    assert last in history
    assert len(history) >= least
    for commit in (*history, *store.kept().values()):
        files = store.states.files(commit)
        assert files == kept.get(commit, files)
        for entry in files.values():
            if entry.oid is not None:
                store.states.content(entry.oid)
