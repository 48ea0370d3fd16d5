"""The candidates on the page of `ringfence view`: side by side, compared, and promoted."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import ringfence_text
from viewed import client_of

from ringfence_sandbox import Workspace
from ringfence_view import CallSource, export_page


def shown(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CallSource:
    """A workspace with two forks, which change one file in two ways."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    with Workspace.open(root) as workspace:
        for name in ("small", "large"):
            with workspace.fork(name) as fork, fork.transaction("edit", opaque=False):
                fork.filesystem.write("a.txt", f"{name} change\n")
        with Workspace.open(workspace.fork_named("small").root) as fork:
            fork.keep_score("passed, 12 <b>")
    return CallSource(root, None)


def test_a_step_of_a_command_shows_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    with Workspace.open(tmp_path / "tree") as workspace:
        workspace.run(["touch", "new.txt"])
    source = CallSource(tmp_path / "tree", None)
    assert "touch new.txt" in shown(client_of(source).get("/page").text)
    assert "touch new.txt" not in shown(export_page(source, contents=False))


def test_the_forks_stand_side_by_side_with_their_scores(source: CallSource) -> None:
    client = client_of(source)
    assert 'id="tab-forks" aria-selected="false" aria-controls="forks" tabindex="-1">' in client.get("/page").text
    page = client.get("/forks").text
    assert re.findall(r'<th scope="row"><code>(\w+)', page) == ["large", "small"]
    assert "passed, 12 <b>" in shown(page)
    assert "promote" not in page
    assert "passed, 12" in shown(export_page(source, contents=True))


def test_what_a_fork_has_changed_and_the_difference_between_two(source: CallSource) -> None:
    client = client_of(source)
    changes = shown(client.get("/fork-difference", params={"a": "small"}).text)
    assert "one" in changes
    assert "small change" in changes
    between = shown(client.get("/fork-difference", params={"a": "small", "b": "large"}).text)
    assert "one" not in between
    assert "large change" in between
    assert client.get("/fork-difference/rows?a=small&b=large&file=0&from=0&count=9").status_code == 200
    assert client.get("/fork-difference", params={"a": "none"}).status_code == 404
    assert client.get("/fork-difference", params={"a": "small", "b": "small"}).status_code == 409


def test_a_difference_changes_no_fork_and_is_there_while_an_agent_works(source: CallSource) -> None:
    for fork in source.forks:
        (Path(fork.root) / "theirs.txt").write_text("theirs\n")
    client, queries = client_of(source), ({"a": "small"}, {"a": "small", "b": "large"})
    with Workspace.open(source.forks[0].root) as working:
        seen = len(working.log())
        answers = [client.get("/fork-difference", params=query) for query in queries]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(working.log()) == seen
    with Workspace.open(source.forks[1].root, read_only=True) as other:
        assert "theirs.txt" not in {path for entry in other.log() for path in entry.paths}


def test_each_fork_leads_to_its_own_calls(source: CallSource) -> None:
    client = client_of(source)
    page = client.get("/fork/small/page").text
    assert 'id="step-1"' in page
    assert "small change" in client.get("/fork/small/entry/step-1").text
    assert client.get("/fork/none/page").status_code == 404
    closed = client_of(source, token="wrong")
    for path in ("/fork/small/page", "/fork/none/page", "/forks", "/fork-difference?a=small"):
        assert closed.get(path).status_code == 401
    assert closed.get("/fork/small/").text == closed.get("/fork/none/").text


def test_a_promotion_is_previewed_and_is_a_step_that_can_be_undone(source: CallSource) -> None:
    client, file = client_of(source, can_write=True), Path(str(source.directory)) / "a.txt"
    asked = client.post("/preview", data={"what": "promote", "name": "small"}).json()
    assert asked["lines"] == ["1 applied", "applied: a.txt"]
    assert file.read_text() == "one\n"
    assert client.post("/act", data={"once": asked["once"]}).status_code == 200
    assert file.read_text() == "small change\n"
    conflict = client.post("/preview", data={"what": "promote", "name": "large"}).json()
    assert any("conflict: a.txt" in line for line in conflict["lines"])
    assert client.post("/act", data={"once": conflict["once"]}).status_code == 200
    assert file.read_text() == "small change\n"
    assert client.post("/preview", data={"what": "promote", "name": "none"}).status_code == 404


def test_forks_come_and_go_while_the_page_is_open(source: CallSource) -> None:
    client = client_of(source)
    assert not source.refresh()
    with Workspace.open(str(source.directory)) as workspace:
        workspace.discard_fork("large")
    assert source.refresh()
    assert "large" not in client.get("/forks").text
    shutil.rmtree(source.forks[0].root)
    assert source.refresh()
    assert "gone" in client.get("/forks").text
    assert client.get("/fork/small/page").status_code == 404


def test_candidates_are_served_while_they_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    (tmp_path / "script.jsonl").write_text(json.dumps({"text": "done"}))
    given = ("--task", "x", "--model", f"script:{tmp_path / 'script.jsonl'}", "--candidates", "2")
    done = ringfence_text("run", tmp_path / "tree", *given, "--view", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "the page: http://127.0.0.1:" in done.stderr
