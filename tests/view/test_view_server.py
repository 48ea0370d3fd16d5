"""Who may ask the server of `ringfence view`, and what may be done there."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from viewed import HOST, client_of, viewed_workspace

from ringfence_sandbox import Workspace
from ringfence_view import CallSource

OPEN = ("/", "/view.js", "/view.css")
CLOSED = ("/page", "/rows", "/row/step-1", "/entry/step-1", "/changes", "/events", "/blame?path=app.py", "/nowhere")


@pytest.fixture
def writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CallSource:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    return CallSource(*viewed_workspace(tmp_path))


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("token", ["", "wrong", "a token of the test", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_without_the_token_nothing_is_served(source: CallSource, path: str, token: str) -> None:
    client = client_of(source)
    answer = client.get(path, headers={b"authorization": f"Bearer {token}".encode()})
    assert (answer.status_code, "app.py" in answer.text) == (401, False)


@pytest.mark.parametrize("path", OPEN)
def test_the_files_of_the_page_have_nothing_of_a_workspace(source: CallSource, path: str) -> None:
    client = client_of(source, token="wrong")
    answer = client.get(path)
    assert (answer.status_code, "app.py" in answer.text) == (200, False)


@pytest.mark.parametrize("path", ["/", "/page", "/events"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:1234"}, 421),
        ({"host": "127.0.0.1.evil.example:1234"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "evil@127.0.0.1:1234"}, 421),
        ({"host": "127.0.0.2:1234"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:4321"}, 403),
        ({"origin": "http://localhost:1234"}, 403),
        ({"origin": "https://127.0.0.1:1234"}, 403),
        ({"host": "127.0.0.1:9999", "origin": "http://127.0.0.1:1234"}, 403),
    ],
)
def test_another_page_in_the_same_browser_gets_nothing(
    source: CallSource, path: str, headers: dict[str, str], status: int
) -> None:
    assert client_of(source).get(path, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/", "/page", "/entry/none", "/view.js"])
def test_no_answer_is_kept_and_none_runs_what_is_not_ours(source: CallSource, path: str) -> None:
    headers = client_of(source).get(path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "script-src 'self';" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "set-cookie" not in headers
    assert "access-control-allow-origin" not in headers


def test_without_write_nothing_can_be_changed(source: CallSource) -> None:
    client = client_of(source)
    assert client.post("/preview", data={"what": "undo", "step": "1"}).status_code in (404, 405)
    assert 'class="act"' not in client.get("/entry/step-1").text
    with pytest.raises(ValueError, match="name the directory"):
        assert source.records is not None
        client_of(CallSource(None, source.records.path), can_write=True)


def test_an_undo_is_previewed_and_done_once(writable: CallSource) -> None:
    client, path = client_of(writable, can_write=True), Path(str(writable.directory)) / "notes.txt"
    asked = client.post("/preview", data={"what": "undo", "step": "3"}).json()
    assert "removed: notes.txt" in asked["lines"]
    assert path.exists()
    assert client.post("/act", data={"once": asked["once"]}).status_code == 200
    assert not path.exists()
    assert client.post("/act", data={"once": asked["once"]}).status_code == 404
    assert client.post("/act", data={"once": ""}).status_code == 404
    assert writable.page().entries[0].title == "undo"


def test_a_restore_brings_the_files_back(writable: CallSource) -> None:
    client, root = client_of(writable, can_write=True), Path(str(writable.directory))
    asked = client.post("/preview", data={"what": "restore", "step": "1"}).json()
    assert client.post("/act", data={"once": asked["once"]}).status_code == 200
    assert sorted(path.name for path in root.iterdir()) == [".env", "app.py"]


def offered_hunks(detail: str) -> list[dict[str, str]]:
    """What the buttons of a step ask for that reject a hunk."""
    found = re.findall(r'data-act="reject" data-arguments="([^"]*)"', detail)
    return [{"what": "reject", **dict(parse_qsl(html.unescape(one)))} for one in found]


def test_one_hunk_is_rejected_as_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    lines = [f"{number}\n" for number in range(40)]
    (root / "a.txt").write_text("".join(lines))
    lines[2], lines[35] = "two\n", "thirty-five\n"
    with Workspace.open(root) as workspace, workspace.transaction("edit", opaque=False):
        workspace.filesystem.write("a.txt", "".join(lines))
    source = CallSource(root, None)
    client = client_of(source, can_write=True)
    detail = client.get("/entry/step-1").text
    first, second = offered_hunks(detail)
    assert first != second
    asked = client.post("/preview", data=second).json()
    assert (root / "a.txt").read_text() == "".join(lines)
    with Workspace.open(root, read_only=True) as workspace:
        assert workspace.aborted() == []
    client.post("/act", data={"once": asked["once"]})
    lines[35] = "35\n"
    assert (root / "a.txt").read_text() == "".join(lines)
    assert [(entry.number, entry.title) for entry in source.page(size=1).entries] == [(2, "reject")]


def test_a_hunk_from_the_first_line_is_rejected_below_lines_that_came_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    lines = [f"{number}\n" for number in range(9)]
    (root / "a.txt").write_text("".join(lines))
    with Workspace.open(root) as workspace:
        for text in (["0\n", "one\n", *lines[2:]], ["above\n", "0\n", "one\n", *lines[2:]]):
            with workspace.transaction("edit", opaque=False):
                workspace.filesystem.write("a.txt", "".join(text))
    client = client_of(CallSource(root, None), can_write=True)
    (given,) = offered_hunks(client.get("/entry/step-1").text)
    asked = client.post("/preview", data=given).json()
    client.post("/act", data={"once": asked["once"]})
    assert (root / "a.txt").read_text() == "".join(["above\n", *lines])
    again = client.post("/preview", data=given)
    assert again.status_code == 409
    assert "\\x" not in again.text
    assert "To reject the file, or to undo the step, may do" in again.text


@pytest.mark.parametrize(
    "given",
    [
        {"what": "rm"},
        {"what": "undo"},
        {"what": "undo", "step": "x"},
        {"what": "undo", "step": "99"},
        {"what": "reject", "key": "step-2", "file": "0", "row": "1"},
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_words(writable: CallSource, given: dict[str, str]) -> None:
    answer = client_of(writable, can_write=True).post("/preview", data=given)
    assert answer.status_code in (404, 409)
    assert answer.text


def test_while_an_agent_has_the_workspace_it_can_be_seen_and_not_changed(writable: CallSource) -> None:
    client = client_of(writable, can_write=True)
    with Workspace.open(str(writable.directory)):
        assert client.get("/entry/step-1").status_code == 200
        refused = client.post("/preview", data={"what": "undo", "step": "3"})
    assert refused.status_code == 409


@pytest.mark.parametrize("host", [HOST, "127.0.0.1:9999", "localhost:9999", "[::1]:9999", "localhost"])
def test_a_port_that_is_forwarded_may_be_another_one(source: CallSource, host: str) -> None:
    client = client_of(source, host=host)
    assert client.get("/page", headers={"origin": f"http://{host}"}).status_code == 200
    assert client_of(source, host=host, token="wrong").get("/page").status_code == 401


def test_another_page_of_this_machine_can_change_nothing(writable: CallSource) -> None:
    client = client_of(writable, can_write=True)
    for path in ("/preview", "/act", "/note"):
        given = {"what": "undo", "step": "3", "once": "x", "words": "x"}
        for origin in ("http://127.0.0.1:8000", "http://localhost:1234", "null"):
            assert client.post(path, data=given, headers={"origin": origin}).status_code == 403
        assert client_of(writable, can_write=True, token="").post(path, data=given).status_code == 401
    assert (Path(str(writable.directory)) / "notes.txt").exists()
