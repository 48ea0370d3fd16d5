"""What `ringfence view` shows, over HTTP."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from viewed import HOSTILE, LONG, client_of, viewed_workspace

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace
from ringfence_view import CallSource, export_page


def keys(page: str) -> list[str]:
    return re.findall(r'<li id="([\w-]+)"', page)


def shown(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_the_timeline_has_each_call_once_newest_first_and_what_others_changed(source: CallSource) -> None:
    page = client_of(source).get("/page").text
    found = keys(page)
    external = next(key for key in found if key.startswith("change-"))
    rolled_back = next(key for key in found if key.startswith("call-"))
    assert found == ["step-5", "step-4", external, "step-3", rolled_back, "step-2", "step-1", "step-0"]
    assert "no receipt" not in page
    assert "1 line of the receipts could not be read" in page


def test_what_was_rolled_back_is_there_with_its_diff_and_reason(source: CallSource) -> None:
    client = client_of(source)
    (key,) = keys(client.get("/rows", params={"outcome": "rolled_back"}).text)
    assert source.entry(key).is_rolled_back
    assert "tests failed" in client.get(f"/row/{key}").text
    detail = client.get(f"/entry/{key}").text
    assert "import nothing" in shown(detail)
    assert 'class="files gone"' in detail


def test_a_call_that_a_policy_denied_for_what_it_had_changed_says_that_it_was_rolled_back(
    source: CallSource, tmp_path: Path
) -> None:
    assert source.records is not None
    *_, line = (one for one in source.records.path.read_text().splitlines() if '"wrong.py"' in one)
    verdict = {"policy": "paths", "allowed": False, "reason": "wrong.py must not be created"}
    denied = json.loads(line) | {"outcome": "denied", "policies": [verdict]}
    before = {"receipt_id": "before", "call_id": "before", "params": {"file_path": "x", "encoding": None}}
    lines = [denied, denied | before | {"changes": []}]
    (tmp_path / "calls.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    client = client_of(CallSource(source.directory, tmp_path / "calls.jsonl"))
    found = keys(client.get("/rows", params={"outcome": "not_kept"}).text)
    assert found == keys(client.get("/rows", params={"outcome": "denied"}).text)
    changed, refused = sorted(found, key=lambda key: key == "call-before")
    assert "What it had changed, and was rolled back" in client.get(f"/entry/{changed}").text
    assert "rolled back" not in client.get(f"/entry/{refused}").text
    assert "encoding" not in client.get(f"/row/{refused}").text


def test_a_call_opens_with_what_it_changed_and_has_its_arguments_below(source: CallSource) -> None:
    detail = client_of(source).get("/entry/step-1").text
    assert detail.index("What it changed") < detail.index("<h2>content</h2>") < detail.index("Began")


def test_a_row_leaves_out_the_directories_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    with Workspace.open(tmp_path / "tree") as workspace, workspace.transaction("write", opaque=False):
        workspace.filesystem.write("a/b/c.txt", "c\n")
    source = CallSource(tmp_path / "tree", None)
    assert source.entry("step-1").paths == ("a/b/c.txt",)


@pytest.mark.parametrize(
    ("query", "said"),
    [({"q": "nowhere"}, "No entry matches."), ({"q": "x", "after": "step-0"}, "No further entry matches.")],
)
def test_where_nothing_is_found_the_page_says_so(source: CallSource, query: dict[str, str], said: str) -> None:
    assert said in client_of(source).get("/rows", params=query).text


def test_a_history_alone_has_what_was_rolled_back_too(source: CallSource) -> None:
    client = client_of(CallSource(source.directory, None))
    (key,) = keys(client.get("/rows", params={"outcome": "rolled_back"}).text)
    assert key == "aborted-1"
    assert "import nothing" in shown(client.get(f"/entry/{key}").text)


def test_receipts_alone_show_calls_with_their_arguments_and_answers(source: CallSource) -> None:
    assert source.records is not None
    client = client_of(CallSource(None, source.records.path))
    found = keys(client.get("/page").text)
    assert len(found) == 6
    assert "return a + b" in shown(client.get(f"/entry/{found[-1]}").text)
    assert client.get("/changes").status_code == 404


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "long.txt"}, ["step-4"]),
        ({"q": "RETURN a"}, ["step-1"]),
        ({"q": "app.py", "outcome": "committed"}, ["step-1"]),
        ({"q": "nowhere"}, []),
        ({"outcome": "denied"}, []),
        ({"q": "app.py", "outcome": "not_kept"}, []),
    ],
)
def test_a_search_looks_through_arguments_and_answers(
    source: CallSource, query: dict[str, str], found: list[str]
) -> None:
    assert keys(client_of(source).get("/rows", params=query).text) == found


def test_pages_follow_one_another(source: CallSource) -> None:
    first = source.page(size=3)
    rest = source.page(first.next_key)
    assert [entry.key for entry in (*first.entries, *rest.entries)] == [entry.key for entry in source.page().entries]
    assert rest.next_key is None


def test_what_a_model_or_a_file_wrote_is_text_and_no_character_of_it_acts(source: CallSource) -> None:
    client = client_of(source)
    pages = [client.get("/page").text, *(client.get(f"/entry/step-{step}").text for step in (1, 2))]
    pages += [client.get("/changes").text, export_page(source, contents=True)]
    for page in pages:
        assert "<img" not in page
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
    assert "\\x1b[31m\\u202egpj" in shown(pages[2])
    assert HOSTILE.partition("\x1b")[0] in shown(pages[2])


def test_a_value_of_a_hidden_file_is_masked_everywhere(source: CallSource) -> None:
    client = client_of(source)
    pages = [client.get(path).text for path in ("/page", "/entry/step-3", "/changes", "/blame?path=notes.txt")]
    assert all("correct-horse" not in page for page in (*pages, export_page(source, contents=True)))
    assert "[API_TOKEN]" in pages[1]


def test_a_diff_marks_the_changed_words_and_has_line_numbers(source: CallSource) -> None:
    detail = client_of(source).get("/entry/step-1").text
    assert '<span class="word">-</span>' in detail
    assert '<span class="word">+</span>' in detail
    assert '<span class="tk">return</span>' in detail
    row = next(row for row in re.findall("<tr.*?</tr>", detail) if 'class="add"' in row)
    assert re.findall(r'<td class="n">(\d*)</td>', row) == ["", "2"]


def test_a_long_diff_and_a_long_line_come_in_pieces(source: CallSource) -> None:
    client = client_of(source)
    long, many = client.get("/entry/step-4").text, client.get("/entry/step-5").text
    assert len(long) + len(many) < 200_000
    (wide,) = re.findall(r'data-row="([^"]+)"', long)
    assert "x" * 50_000 in client.get(f"/{html.unescape(wide)}").text
    (folded,) = re.findall(r'data-load="(entry/step-5/diff[^"]+)"', many)
    first = client.get(f"/{html.unescape(folded)}").text
    (more,) = re.findall(r'data-row="([^"]+)"', first)
    second = client.get(f"/{html.unescape(more)}").text
    lines = [int(line) for line in re.findall(r"line (\d+)</td>", first + second)]
    assert lines == [*range(lines[-1] + 1)]
    assert len(lines) > 3_000
    (text,) = re.findall(r'data-load="(entry/step-4/text[^"]+)"', long)
    assert client.get(f"/{html.unescape(text)}").text.count("x") > LONG // 10


def test_the_difference_between_two_steps_has_only_what_is_between_them(source: CallSource) -> None:
    client = client_of(source)
    assert "notes.txt" in client.get("/changes").text
    between = client.get("/changes", params={"a": "3", "b": "4"}).text
    assert "long.txt" in between
    assert "notes.txt" not in between
    assert client.get("/changes", params={"a": "99"}).status_code == 404
    assert client.get("/changes", params={"a": "4", "b": "3"}).status_code == 409


def test_lock_files_and_what_a_ci_job_runs_are_to_be_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    with (
        Workspace.open(tmp_path / "tree") as workspace,
        workspace.transaction("write_file", opaque=False),
    ):
        for path in ("a/uv.lock", ".github/workflows/test.yml", "plain.yml"):
            workspace.filesystem.write(path, "x\n")
    found = CallSource(tmp_path / "tree", None).difference().look_first
    assert [one.path for one in found] == [".github/workflows/test.yml", "a/uv.lock"]


def test_blame_names_the_step_or_whoever_wrote_a_line(source: CallSource) -> None:
    rows = re.findall("<tr.*?</tr>", client_of(source).get("/blame", params={"path": "app.py"}).text)
    writers = [re.search(r'class="who">(.*?)</td>', row)[1] for row in rows]  # type: ignore[index]
    assert "as it was found" in writers[0]
    assert 'href="#step-1"' in writers[1]
    assert "somebody else" in writers[4]


def test_the_export_loads_nothing_and_has_every_call(source: CallSource) -> None:
    page = export_page(source, contents=True)
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "default-src 'none'" in html.unescape(page)
    assert len(re.findall(r"<template data-path=\"entry/", page)) == len(keys(page)) == 8
    assert "import nothing" in shown(page)
    without = export_page(source, contents=False)
    assert "import nothing" not in without
    assert "wrong.py" in without


def test_news_are_seen_while_somebody_else_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root, receipts = viewed_workspace(tmp_path)
    source = CallSource(root, receipts)
    before = source.version
    assert not source.refresh()
    with Workspace.open(root) as workspace:
        with workspace.transaction("write_file", opaque=False):
            workspace.filesystem.write("new.txt", "new\n")
        assert source.refresh()
    assert source.version != before
    assert source.page().entries[0].paths == ("new.txt",)
    with receipts.open("a") as file:
        file.write(json.dumps({"half": "a line"})[:5])
    source.refresh()
    assert source.records is not None
    assert source.records.unreadable == 1


def test_no_cut_no_encoding_and_no_later_value_shows_what_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    (root / ".env").write_text("API_TOKEN=correct-horse\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        done = workspace.run("cat .env >> notes.txt; iconv -t UTF-16 .env > wide.txt", shell=True, title="")
        assert done.kept
        cut = workspace.run("printf '%495s' x > line.txt; cut -d= -f2 .env >> line.txt", shell=True)
        assert cut.kept
    source = CallSource(root, None)
    client = client_of(source)
    (root / ".env").write_text("API_TOKEN=correct-horse\nDB_PASSWORD=battery-staple\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        assert workspace.run("tail -n 1 .env > more.txt", shell=True).kept
    source.refresh()
    paths = ["/page", "/changes", *(f"/entry/step-{step}" for step in (1, 2, 3)), "/blame?path=line.txt"]
    pages = [client.get(path).text for path in paths]
    for page in (*pages, export_page(source, contents=True)):
        assert "correct-h" not in page
        assert "battery" not in page
    assert client.get("/blame?path=.env").status_code == 404


def test_a_new_value_of_a_known_hidden_file_is_masked_though_nobody_looked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    settings = tmp_path / "tree/.env"
    settings.write_text("API_TOKEN=correct-horse\n")
    with Workspace.open(tmp_path / "tree", hide=HiddenFiles()) as workspace:
        assert workspace.run("echo battery-staple > notes.txt", shell=True).kept
    source = CallSource(tmp_path / "tree", None)
    client = client_of(source)
    paths = ["/entry/step-1", "/entry/step-1/diff?file=0", "/changes", "/blame?path=notes.txt"]
    assert all("battery-staple" in client.get(path).text for path in paths)
    settings.write_text("API_TOKEN=battery-staple\n")
    for path in paths:
        assert "[API_TOKEN]" in client.get(path).text
        assert "battery" not in client.get(path).text
    assert not source.refresh()
    settings.write_text("API_TOKEN=something-else\n")
    assert source.refresh()  # what is open is masked, too


def test_an_export_without_contents_has_no_arguments(source: CallSource) -> None:
    assert "return a + b" in shown(export_page(source, contents=True))
    page = export_page(source, contents=False)
    assert "return a + b" not in shown(page)
    assert all(entry.summary not in page for entry in source.page().entries if entry.summary)


def test_who_wrote_a_line_is_found_for_names_that_git_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    with Workspace.open(root) as workspace, workspace.transaction("write", opaque=False):
        workspace.filesystem.write('\u00e9 "q.txt', "one\n")
    client = client_of(CallSource(root, None))
    (link,) = re.findall(r'data-load="(blame[^"]*)"', client.get("/changes").text)
    assert "step 1" in shown(client.get(f"/{html.unescape(link)}").text)


@pytest.mark.prove
def test_a_file_of_100_000_receipts_opens_by_pages_and_a_line_of_10_mb_comes_in_pieces(tmp_path: Path) -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    call = {"tool": "write_file", "outcome": "committed", "message": "", "duration_seconds": 0.01}
    with (tmp_path / "calls.jsonl").open("w") as file:
        for number in range(100_000):
            names = {"receipt_id": f"r{number}", "call_id": f"c{number}", "params": {"file_path": f"{number}.txt"}}
            at = (began + timedelta(seconds=number)).isoformat()
            file.write(json.dumps(call | names | {"started_at": at}) + "\n")
        long = {"receipt_id": "long", "call_id": "long", "params": {"command": "y" * 10_000_000}}
        file.write(json.dumps(call | long | {"started_at": (began + timedelta(days=9)).isoformat()}) + "\n{\n\n3\n")
    client = client_of(CallSource(None, tmp_path / "calls.jsonl"))
    page = client.get("/page").text
    assert len(page) < 200_000
    assert keys(page)[:2] == ["call-long", "call-r99999"]
    assert "3 lines of the receipts could not be read" in page
    assert len(client.get("/entry/call-long").text) < 100_000
    assert "0.txt" in client.get("/row/call-r0").text
    assert len(keys(client.get("/rows?after=call-r500").text)) == 200


@pytest.mark.prove
def test_a_diff_of_50_000_lines_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    with Workspace.open(tmp_path / "tree") as workspace, workspace.transaction("write", opaque=False):
        workspace.filesystem.write("long.txt", "".join(f"line {number}\n" for number in range(50_000)))
    client = client_of(CallSource(tmp_path / "tree", None))
    assert len(client.get("/entry/step-1").text) < 20_000
    assert len(client.get("/entry/step-1/diff?file=0&from=40000&count=2000").text) < 1_000_000
