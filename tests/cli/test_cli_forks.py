"""The commands for forks: what they print, their exit codes and their JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence, ringfence_text

from ringfence_sandbox import Workspace


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("a\n")
    (tree / "b.txt").write_text("b\n")
    return tree


def answer(*words: str | Path) -> dict[str, Any]:
    return json.loads(ringfence(*words, "--json").stdout)


def fork(tree: Path, name: str, *options: str | Path) -> Path:
    done = ringfence_text("fork", tree, name, *options)
    assert done.returncode == 0, done.stderr
    assert f"`ringfence promote {tree} {name}` makes its changes here, too" in done.stderr
    return Path(done.stdout.rstrip("\n"))


def test_a_fork_is_made_promoted_undone_and_discarded(tree: Path) -> None:
    place = fork(tree, "first")
    assert (place / "a.txt").read_text() == "a\n"
    (place / "a.txt").write_text("of the fork\n")
    done = ringfence_text("promote", tree, "first", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "applied   a.txt\n")
    assert "nothing was changed; it would be 1 applied" in done.stderr
    assert (tree / "a.txt").read_text() == "a\n"
    done = ringfence_text("promote", tree, "first")
    assert (done.returncode, done.stdout) == (0, "applied   a.txt\n")
    assert f"step 1: `ringfence undo {tree}` reverses it" in done.stderr
    assert (tree / "a.txt").read_text() == "of the fork\n"
    assert ringfence("undo", tree).returncode == 0
    assert (tree / "a.txt").read_text() == "a\n"
    listed = ringfence_text("forks", tree)
    assert str(place) in listed.stdout
    done = ringfence_text("discard", tree, "first")
    assert (done.returncode, place.exists()) == (0, False)
    assert done.stderr == f"the fork first is gone, with {place}\nso is what was not promoted: a.txt\n"
    assert ringfence_text("forks", tree).stderr == "0 forks\n"


def test_a_fork_that_shares_a_directory_runs_nothing_on_this_machine(tree: Path) -> None:
    (tree / "modules").mkdir()
    (tree / "modules/m").touch()
    done = ringfence_text("fork", tree, "one", "--share", "modules")
    place = Path(done.stdout.rstrip("\n"))
    assert list((place / "modules").iterdir()) == []
    assert "empty, and only there for commands with --workspace podman: modules" in done.stderr
    (found,) = answer("forks", tree)["forks"]
    assert (found["shared"], found["left_out"]) == ({"modules": str(tree)}, {})
    (tree.parent / "model.jsonl").write_text('{"text": "Done."}\n')
    run = ("run", place, "--task", "x", "--model", f"script:{tree.parent}/model.jsonl")
    for words in (("exec", place, "--", "touch", "made"), run):
        done = ringfence_text(*words)
        assert done.returncode != 0
        assert "this fork shares modules, which only a container of it shows" in " ".join(done.stderr.split())
    assert not (place / "made").exists()
    done = ringfence_text("fork", tree, "two", "--share", "gone")
    assert done.returncode == 2
    assert "'gone' cannot be shared: it is no directory" in " ".join(done.stderr.split())


def test_a_fork_whose_directory_is_gone_or_another_one_is_not_promoted(tree: Path) -> None:
    place = fork(tree, "one")
    shutil.rmtree(place)
    for is_there in (False, True):
        if is_there:
            place.mkdir()
        for words in (["promote", tree, "one"], ["promote", tree, "one", "--dry-run"]):
            done = ringfence_text(*words)
            assert done.returncode == 2
            assert ("another directory than the fork" if is_there else "is gone") in " ".join(done.stderr.split())
            assert (tree / "a.txt").read_text() == "a\n"
    assert ringfence("discard", tree, "one").returncode == 0
    assert place.exists()


def test_a_conflict_is_exit_code_1_and_changes_nothing_unless_the_rest_is_asked_for(tree: Path) -> None:
    place = fork(tree, "one")
    (place / "a.txt").write_text("there\n")
    (place / "b.txt").write_text("there\n")
    (tree / "a.txt").write_text("here\n")
    done = ringfence_text("promote", tree, "one")
    assert done.returncode == 1
    assert done.stdout == "conflict  a.txt  (changed since by somebody else)\napplied   b.txt\n"
    assert "--on-conflict keep promotes the rest" in done.stderr
    assert (tree / "b.txt").read_text() == "b\n"
    found = answer("promote", tree, "one", "--on-conflict", "keep")
    assert [(path["path"], path["outcome"]) for path in found["paths"]] == [("a.txt", "conflict"), ("b.txt", "applied")]
    assert (found["step"]["number"], found["git_ref"]) == (1, "")
    assert [(tree / name).read_text() for name in ("a.txt", "b.txt")] == ["here\n", "there\n"]


def test_json_says_all_of_a_fork(tree: Path, tmp_path: Path) -> None:
    (tree / "here").symlink_to(tree / "a.txt")
    (tree / "build").mkdir()
    (tree / "build/CMakeCache.txt").write_text(f"HOME={tree}\n")
    os.mkfifo(tree / "pipe")
    (tree / ".env").write_text("KEY=secret\n")
    made = answer("fork", tree, "one", "--into", tmp_path / "there", "--no-secrets")["fork"]
    assert (made["name"], made["root"], made["state"], made["step"]) == ("one", str(tmp_path / "there"), "ready", 0)
    assert (made["score"], made["source_is_gone"]) == (None, False)
    assert (made["points_back"], made["rewritten"]) == (["build/CMakeCache.txt"], ["here"])
    assert made["left_out"]["pipe"] == "special file"
    assert answer("forks", tree)["forks"] == [made]
    assert answer("discard", tree, "one")["discarded"] == made
    done = ringfence_text("fork", tree, "two")
    assert f"still named {tree} in: build/CMakeCache.txt" in done.stderr
    assert "links that lead into the fork now: here" in done.stderr
    assert "left out: pipe (special file)" in done.stderr


def test_a_fork_of_a_step_has_its_files(tree: Path) -> None:
    with Workspace.open(tree) as workspace:
        for text in ("one\n", "two\n"):
            with workspace.transaction("write", opaque=False):
                workspace.filesystem.write("a.txt", text)
    assert (fork(tree, "then", "--at", "1") / "a.txt").read_text() == "one\n"
    assert ringfence("fork", tree, "never", "--at", "9").returncode == 2


def test_what_cannot_be_done_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert ringfence_text("forks").returncode == 1
    place = fork(tree, "one")
    for words, expected in (
        (("promote", "two"), "there is no fork 'two'; there are: one"),
        (("discard", "two"), "there is no fork 'two'; there are: one"),
        (("fork", "a/b"), "cannot be the name of a fork"),
        (("fork", "one"), "there is a fork 'one'"),
    ):
        done = ringfence_text(*words[:1], ".", *words[1:])
        assert done.returncode != 0
        assert expected in done.stderr
    with Workspace.open(place):
        done = ringfence_text("promote", "one")
        assert done.returncode not in (0, 1)
        assert str(place) in done.stderr
        assert ringfence("discard", "one").returncode == done.returncode
    assert ringfence("discard", "one").returncode == 0


def test_two_forks_are_compared_also_if_they_began_at_different_steps(tree: Path) -> None:
    first = fork(tree, "first")
    with Workspace.open(tree) as workspace, workspace.transaction("write", opaque=False):
        workspace.filesystem.write("b.txt", "later\n")
    second = fork(tree, "second")
    (first / "a.txt").write_text("of the first\n")
    for place in (first, second):
        (place / "same.txt").write_text("the same\n")
    done = ringfence_text("forks", tree, "--diff", "first", "second")
    assert done.returncode == 0
    changed = [line for line in done.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-of the first", "+a", "-b", "+later"]
    assert answer("forks", tree, "--diff", "first", "second")["patch"] == done.stdout
    assert ringfence("forks", tree, "--diff", "first", "first").returncode != 0


def test_the_usual_files_with_secrets_are_hidden_in_a_directory_without_a_history(tree: Path, tmp_path: Path) -> None:
    (tree / ".env").write_text("K=1\n")
    made = fork(tree, "one", "--into", tmp_path / "one")
    (made / ".env").write_text("K=2\n")
    (made / "a.txt").write_text("changed\n")
    done = ringfence_text("promote", tree, "one")
    assert done.returncode == 0
    assert done.stdout == "applied   a.txt\nleft out  .env  (hidden files are never promoted)\n"
    assert "1 change of the fork left out: `ringfence discard` would delete it" in " ".join(done.stderr.split())
    found = answer("promote", tree, "one")
    assert found["left_out"] == [{"path": ".env", "reason": "hidden files are never promoted"}]
    assert ((tree / ".env").read_text(), (tree / "a.txt").read_text()) == ("K=1\n", "changed\n")
    assert not (fork(tree, "clean", "--no-secrets", "--into", tmp_path / "clean") / ".env").exists()


def gone(tree: Path) -> Path:
    shutil.rmtree(tree)
    return tree


def test_the_forks_of_a_directory_that_is_gone_are_listed_and_discarded(tree: Path) -> None:
    place = fork(tree, "one")
    gone(tree)
    assert f"{place}  (source gone)" in ringfence_text("forks", tree).stdout
    (listed,) = answer("forks", tree)["forks"]
    assert (listed["name"], listed["state"], listed["source_is_gone"]) == ("one", "ready", True)
    assert "there is no fork 'two'; there are: one" in ringfence_text("discard", tree, "two").stderr
    done = ringfence_text("discard", tree, "one")
    assert (done.returncode, done.stderr) == (0, f"the fork one is gone, with {place}\n")
    assert not place.exists()
    assert answer("forks", tree)["forks"] == []
    assert ringfence("stores", "forget", tree).returncode == 0
    done = ringfence_text("forks", tree)
    assert (done.returncode, "is gone, and so is its history" in done.stderr) == (2, True)


def test_forget_gone_discards_forks_without_unpromoted_changes_and_goes_on_after_others(
    tree: Path, tmp_path: Path
) -> None:
    (tree / ".env").write_text("KEY=1\n")
    shutil.copytree(tree, tmp_path / "other")
    promoted, clean = fork(tree, "promoted"), fork(tmp_path / "other", "clean", "--into", tmp_path / "clean")
    (promoted / "a.txt").write_text("promoted\n")
    assert ringfence("promote", tree, "promoted").returncode == 0
    assert answer("fork", promoted, "below")["fork"]["source"] == str(promoted)
    changed = fork(tree, "changed")
    (changed / "a.txt").write_text("not promoted\n")
    gone(tree)
    gone(tmp_path / "other")
    assert f"(fork of {tree}, which is gone)" in ringfence_text("stores").stdout
    done = ringfence_text("stores", "forget", "--gone")
    assert done.returncode == 2
    words = " ".join(done.stderr.split())
    assert f"the fork changed of {tree} (gone) holds what was not promoted, in {changed}: a.txt." in words
    assert f"with the fork clean, {clean}" in words
    assert (clean.exists(), promoted.exists(), changed.exists()) == (False, True, True)
    found = answer("stores", "forget", "--gone", "--discard-forks")
    assert [one["root"] for one in found["forgotten"]] == [str(tree)]
    assert [one["name"] for one in found["discarded"]] == ["changed", "below", "promoted"]
    assert not promoted.exists()
    assert json.loads(ringfence("stores", "--json").stdout)["stores"] == []


def test_a_fork_whose_history_was_deleted_is_only_to_be_discarded(tree: Path) -> None:
    place = fork(tree, "one")
    assert ringfence("stores", "forget", place).returncode == 0
    assert answer("forks", tree)["forks"][0]["state"] == "forgotten"
    done = ringfence_text("promote", tree, "one")
    words = " ".join(done.stderr.split())
    assert (done.returncode, "the history of the fork 'one' was deleted: copy what you need from" in words) == (2, True)
    assert ringfence("fork", tree, "one").returncode != 0
    assert ringfence("discard", tree, "one").returncode == 0
    assert not place.exists()
