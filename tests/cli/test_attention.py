"""What a reviewer has to see comes first in a report, and nothing there hides the rest."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_runs import outcome_words, render_call, render_patch
from command_line import ringfence

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.filesystem.paths import GIT_ADVICE
from ringfence.limits import utc_now
from ringfence.runtime import Change, FileVersion, PolicyVerdict, Receipt
from ringfence_tools.runs.attention import attention, with_moves

FILE = FileVersion("file", 0o644, 3, content_hash="a")


def reasons(*changes: Change, ignored: tuple[Change, ...] = (), patch: bytes = b"") -> dict[str, str]:
    paths = IgnoredPaths({".gitignore": b"node_modules/\n"}.get)
    return {one.path: one.reason for one in attention(changes, ignored, patch, paths)}


def link(target: str) -> FileVersion:
    return FileVersion("symlink", 0o777, len(target), target=target)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "../sub/../../x", ".."])
def test_a_link_out_of_the_tree_comes_first(target: str) -> None:
    path = "sub/l" if target != ".." else "l"
    assert target in reasons(Change(path, None, link(target)))[path]


@pytest.mark.parametrize("target", ["x", "../x", "./a/../b", "..x"])
def test_a_link_within_the_tree_does_not(target: str) -> None:
    assert reasons(Change("sub/l", None, link(target))) == {}


def test_a_changed_mode_and_a_special_one_come_first() -> None:
    executable, special = FileVersion("file", 0o755, 3, content_hash="a"), FileVersion("file", 0o4755, 3)
    found = reasons(Change("run.sh", FILE, executable), Change("new", None, executable), Change("su", None, special))
    assert found == {"run.sh": "mode 644 -> 755", "su": "made with mode 4755"}


def test_an_ignore_file_comes_first_also_if_it_is_ignored_itself_but_not_in_an_ignored_directory() -> None:
    deep = Change("node_modules/x/.gitignore", None, FILE)
    found = reasons(Change("lib/.gitignore", None, FILE), ignored=(deep, Change(".gitignore", FILE, None)))
    assert found.keys() == {"lib/.gitignore", ".gitignore"}


def test_a_huge_diff_comes_first() -> None:
    def part(path: str, lines: int) -> bytes:
        return b"diff --git a/%s b/%s\n@@ -0,0 +1,%d @@\n" % (path.encode(), path.encode(), lines) + b"+x\n" * lines

    changes = [Change(path, None, FILE) for path in ("a b", "c")]
    assert reasons(*changes, patch=part("a b", 401) + part("c", 400)) == {"a b": "a huge diff of 401 lines"}


def test_a_move_is_a_move() -> None:
    (moved,) = with_moves([Change("old", FILE, None), Change("new", None, FILE)])
    assert (moved.kind, moved.path) == ("moved", "new")
    page = render_patch(b"diff --git a/old b/new\nsimilarity index 100%\nrename from old\nrename to new\n")
    assert "<code>old -&gt; new</code>" in page


def receipt(**given: Any) -> Receipt:
    return replace(Receipt("r", "c", "t", None, "committed", "m", utc_now(), 0.1, "s", "p"), **given)


def test_a_call_names_each_policy_once_with_its_denial() -> None:
    policies = (
        PolicyVerdict("one", allowed=True),
        PolicyVerdict("two", allowed=True),
        PolicyVerdict("one", allowed=False, reason="because of its effect"),
        PolicyVerdict("two", allowed=True),
    )
    page = render_call(receipt(outcome="denied", policies=policies), "", Path("."))
    assert re.findall(r"<th>(\w+)</th><td>(\w+)</td>", page) == [("one", "denied"), ("two", "allowed")]


def test_a_call_that_changed_no_file_is_ok() -> None:
    assert outcome_words(receipt(), Path(".")) == "ok: m"
    assert outcome_words(receipt(changes=(Change("a", None, FILE),)), Path(".")) == "committed: m"
    assert outcome_words(receipt(outcome="failed"), Path(".")).startswith("failed")


def test_a_person_reads_which_option_lets_commands_commit() -> None:
    verdict = PolicyVerdict("off_limits", allowed=False, reason=f".git/index is git's own data: {GIT_ADVICE}")
    denied = receipt(outcome="denied", policies=(verdict,))
    command = replace(denied, exit_code=0)
    assert outcome_words(command, Path(".")).endswith("(`--allow-git` lets commands do it)")
    assert "--allow-git" not in outcome_words(denied, Path(".")), "a file tool never may"
    assert "--allow-git" not in outcome_words(command, None), "a batch has no such option"
    other = replace(verdict, policy="protected_files")
    assert "--allow-git" not in outcome_words(replace(command, policies=(other,)), Path("."))


def test_a_long_file_does_not_fold_the_diffs_after_it() -> None:
    parts = [b"diff --git a/%s b/%s\n@@ -0,0 +1,%d @@\n" % (n, n, c) + b"+x\n" * c for n, c in ((b"a", 999), (b"b", 3))]
    assert re.findall(r"<details( open)?><summary><code>(\w)", render_patch(b"".join(parts))) == [
        ("", "a"),
        (" open", "b"),
    ]


def test_a_page_and_the_object_of_a_run_begin_with_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "build").mkdir(parents=True)
    (tree / ".gitignore").write_text("build/\n")
    calls = [
        {"name": "write_file", "arguments": {"file_path": path, "content": "x\n"}}
        for path in ("a.txt", "build/b", "lib/.gitignore")
    ]
    turns = [{"text": "", "tool_calls": calls}, {"text": "Done."}]
    (tmp_path / "s").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    page = tmp_path / "r.html"
    done = ringfence("run", tree, "--task", "x", "--model", f"script:{tmp_path / 's'}", "--report", page, "--json")
    found = json.loads(done.stdout)
    assert [one["path"] for one in found["look_first"]] == ["lib/.gitignore"]
    text = page.read_text()
    assert text.index("Look here first") < text.index("Exit code") < text.index("1 ignored path changed")
    assert b"look here first: lib/.gitignore" in done.stderr
