"""`ringfence view` of a batch: its table, and the calls of each task."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from batches import task
from command_line import ringfence_text
from starlette.testclient import TestClient
from viewed import HOST, TOKEN

from ringfence_batch import Batch, Ledger, TaskResult
from ringfence_view import BatchSource, batch_app

FAILING = {"tool_calls": [{"name": "read_file", "arguments": {"file_path": "none"}}]}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two tasks, one of which failed."""
    directory = tmp_path_factory.mktemp("batch")
    (directory / "repo").mkdir()
    (directory / "repo/a.txt").write_text("one\n")
    tasks = [task(directory / "repo", "good"), task(directory / "repo", "bad", FAILING)]
    Batch(tasks, out=directory / "out").run(jobs=1)
    return directory / "out"


def client_of(out: Path, token: str = TOKEN) -> TestClient:
    return TestClient(
        batch_app(BatchSource(out), TOKEN),
        base_url=f"http://{HOST}",
        headers={"authorization": f"Bearer {token}"},
    )


def test_the_page_has_each_task_and_why_some_are_not_done(out: Path) -> None:
    client = client_of(out)
    assert "1 of 2 tasks done" in client.get("/summary").text
    assert "Why not done" in client.get("/summary").text
    data = client.get("/data").json()
    assert [(row[0], data["outcomes"][row[1]]) for row in data["rows"]] == [("bad", "infra-failed"), ("good", "done")]


def test_each_task_leads_to_the_calls_of_its_run_and_what_came_of_them(out: Path) -> None:
    client = client_of(out)
    page = client.get("/tasks/good/page").text
    assert "good, attempt 1" in page
    keys = re.findall(r'<li id="([\w-]+)"', page)
    assert len(keys) == 2
    assert "edit_file" in page
    assert "two" in client.get(f"/tasks/good/entry/{keys[0]}").text
    changes = html.unescape(re.sub("<[^>]*>", "", client.get("/tasks/good/changes").text))
    assert "two" in changes
    assert client.get("/tasks/good/changes/diff?file=0&from=0&count=9").status_code == 200
    for wrong in ("/tasks/none/page", "/tasks/../page", "/tasks/good%2f..%2fbad/page"):
        assert client.get(wrong).status_code == 404


@pytest.mark.parametrize(
    "path", ["/summary", "/data", "/events", "/tasks/good/page", "/tasks/good/events", "/tasks/x/page"]
)
def test_without_the_token_nothing_of_a_batch_is_served(out: Path, path: str) -> None:
    answer = client_of(out, "wrong").get(path)
    assert (answer.status_code, "good" in answer.text) == (401, False)


@pytest.mark.parametrize(
    "path", ["/", "/index.js", "/index.css", "/tasks/good/", "/tasks/none/", "/tasks/none/view.js"]
)
def test_the_files_of_its_pages_have_nothing_of_it_and_do_not_say_which_tasks_there_are(out: Path, path: str) -> None:
    answer = client_of(out, "wrong").get(path)
    assert (answer.status_code, "repo" in answer.text) == (200, False)


def test_another_page_in_the_browser_gets_nothing(out: Path) -> None:
    client = client_of(out)
    assert client.get("/data", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/tasks/good/page", headers={"host": "evil.example"}).status_code == 421


def test_the_page_follows_a_batch_that_runs(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.txt").write_text("one\n")
    ledger = Ledger.create(tmp_path / "out", [task(tmp_path / "repo", "one"), task(tmp_path / "repo", "two")])
    source = BatchSource(tmp_path / "out")
    assert not source.refresh()
    with ledger.driving():
        ledger.keep_running(["one"])
        assert source.refresh()
        client = TestClient(batch_app(source, TOKEN), base_url=f"http://{HOST}")
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert "it runs" in client.get("/summary").text
        data = client.get("/data").json()
        assert [data["outcomes"][row[1]] for row in data["rows"]] == ["running", "no result"]
        assert client.get("/tasks/one/page").status_code == 404
        attempt = ledger.claim("one")
        assert attempt is not None
        (attempt.directory / "receipts.jsonl").touch()
        assert client.get("/tasks/one/page").status_code == 200
        attempt.publish(TaskResult("one", "done", attempt=1))
        assert source.refresh()
    assert "1 of 2 tasks done" in client.get("/summary").text


def test_the_export_is_the_page_of_the_batch_wherever_it_is(out: Path, tmp_path: Path) -> None:
    (tmp_path / "#sub").mkdir()
    done = ringfence_text("view", out, "--export", tmp_path / "#sub/page.html")
    assert (done.returncode, done.stdout) == (0, "")
    page = (tmp_path / "#sub/page.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found is not None
    places = [row[9] for row in json.loads(found[1])["rows"]]
    assert all((tmp_path / "#sub" / place / "receipts.jsonl").exists() for place in places)
    for option in ("--write", "--no-contents"):
        assert ringfence_text("view", out, option).returncode == 2


def test_batch_run_serves_its_page_while_it_works(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.txt").write_text("one\n")
    made = task(tmp_path / "repo", "one")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(made.to_json()) + "\n")
    done = ringfence_text("batch", "run", tmp_path / "tasks.jsonl", "--out", tmp_path / "out", "--view", "--jobs", "1")
    assert done.returncode == 0
    assert "the page: http://127.0.0.1:" in done.stderr
