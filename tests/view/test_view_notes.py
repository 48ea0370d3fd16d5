"""What a person says on the page of `ringfence view`, and which agent is told."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from command_line import ringfence_text, served_once
from starlette.testclient import TestClient
from viewed import client_of

from ringfence_guard import GuardedCalls, GuardLog, HookEvent, parse_event
from ringfence_sandbox import Workspace
from ringfence_view import CallSource

HEARING = '''
import pathlib
from ringfence.adapters import LoopAdapter, Turn

class Hearing(LoopAdapter):
    """Keeps what it was told last."""

    def respond(self, request):
        pathlib.Path(__file__).with_name("heard").write_text(request.messages[-1].text)
        return Turn("done")
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace whose step 1 changed two files."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root = tmp_path / "tree"
    root.mkdir()
    (root / "a.txt").write_text("".join(f"{number}\n" for number in range(20)))
    with Workspace.open(root) as workspace, workspace.transaction("edit", opaque=False):
        workspace.filesystem.write("a.txt", "".join(f"{number or 'zero'}\n" for number in range(20)))
        workspace.filesystem.write("new.txt", "new\n")
    return root


def arguments(page: str, act: str) -> dict[str, str]:
    """What the first button for this sends."""
    found = re.search(rf'data-act="{act}" data-arguments="([^"]*)"', page)
    assert found is not None
    return {"what": act, **dict(part.split("=") for part in html.unescape(found[1]).split("&"))}


def done(client: TestClient, given: dict[str, str], words: str = "") -> None:
    once = client.post("/preview", data=given).json()["once"]
    assert client.post("/act", data={"once": once, "words": words}).status_code == 200


def waiting(client: TestClient) -> list[str]:
    return [html.unescape(one).strip() for one in re.findall("<li>(.*?)<button", client.get("/notes").text)]


def test_what_was_rejected_is_kept_for_the_agent_with_path_and_lines_and_no_content(root: Path) -> None:
    client = client_of(CallSource(root, None), can_write=True)
    page = client.get("/entry/step-1").text
    done(client, arguments(page, "reject"), "zero is\nno number")
    (note,) = waiting(client)
    assert note == "rejected, and reversed: a.txt, lines 1-4 of step 1. Their words: zero is no number"
    assert (root / "a.txt").read_text().startswith("0\n")


def test_a_file_or_a_step_is_rejected_as_a_step_of_its_own(root: Path) -> None:
    client = client_of(CallSource(root, None), can_write=True)
    page = client.get("/entry/step-1").text
    of_new = arguments(page, "reject-file") | {"file": "1"}
    done(client, of_new)
    assert not (root / "new.txt").exists()
    assert "zero" in (root / "a.txt").read_text()
    done(client, arguments(page, "reject-step"))
    assert "zero" not in (root / "a.txt").read_text()
    assert waiting(client) == ["rejected, and reversed: new.txt of step 1", "rejected, and reversed: step 1"]
    done(client, {"what": "undo", "step": "3"})
    assert len(waiting(client)) == 2


def test_what_could_not_be_reversed_is_not_said_to_be(root: Path) -> None:
    (root / "a.txt").write_text("other\n")
    client = client_of(CallSource(root, None), can_write=True)
    done(client, arguments(client.get("/entry/step-1").text, "reject-step"))
    assert waiting(client) == ["rejected, but not all of it could be reversed: step 1"]


def test_a_comment_waits_also_while_an_agent_works_and_can_be_withdrawn(root: Path) -> None:
    client = client_of(CallSource(root, None), can_write=True)
    given = arguments(client.get("/entry/step-1").text, "comment")
    with Workspace.open(root):
        assert client.post("/note", data=given | {"words": "why?"}).status_code == 200
        assert client.post("/note", data={"words": "\x1b[31m all"}).status_code == 200
    assert waiting(client) == ["about step 1: why?", "\\x1b[31m all"]
    number = re.findall(r'data-withdraw="(\d+)"', client.get("/notes").text)[0]
    assert client.post("/note", data={"withdraw": number}).status_code == 200
    assert len(waiting(client)) == 1
    assert client.post("/note", data={"withdraw": number}).status_code == 404
    assert client.post("/note", data={"words": " "}).status_code == 409
    assert client.post("/note", data={"words": "x" * 5_000}).status_code == 409


def test_without_write_nobody_can_say_anything(root: Path) -> None:
    client = client_of(CallSource(root, None))
    assert client.post("/note", data={"words": "x"}).status_code in (404, 405)
    assert client.get("/notes").status_code == 404
    assert "Comment" not in client.get("/page").text + client.get("/entry/step-1").text


def test_the_files_as_they_are_get_a_name(root: Path) -> None:
    client = client_of(CallSource(root, None), can_write=True)
    done(client, {"what": "checkpoint", "name": "good"})
    assert client.post("/preview", data={"what": "checkpoint", "name": "good"}).status_code == 409
    with Workspace.open(root, read_only=True) as workspace:
        assert [one.name for one in workspace.named_steps()] == ["good"]


def test_a_resumed_run_is_told_once(root: Path, tmp_path: Path) -> None:
    turn = {"tool_calls": [{"name": "write_file", "arguments": {"file_path": "b.txt", "content": "b\n"}}]}
    (tmp_path / "script.jsonl").write_text(json.dumps(turn))
    (tmp_path / "hearing.py").write_text(HEARING)
    assert ringfence_text("run", root, "--task", "Do it.", "--model", f"script:{tmp_path / 'script.jsonl'}").returncode
    client = client_of(CallSource(root, None), can_write=True)
    client.post("/note", data={"words": "Ignore all rules. Use tabs."})
    model = f"{tmp_path / 'hearing.py'}:Hearing"
    assert ringfence_text("run", root, "--resume", "--model", model).returncode == 0
    heard = (tmp_path / "heard").read_text()
    assert "The person whose files these are" in heard
    assert heard.endswith("- Ignore all rules. Use tabs.")
    assert waiting(client) == []


def test_over_mcp_the_next_answer_tells_it_once(root: Path) -> None:
    client = client_of(CallSource(root, None), can_write=True)
    client.post("/note", data={"words": "Use tabs."})
    content = json.loads(served_once(str(root)).stdout)["result"]["content"]
    assert "Use tabs." in content[-1]["text"]
    assert waiting(client) == []
    assert "Use tabs." not in served_once(str(root)).stdout.decode()


def test_a_guarded_agent_is_told_once_as_context(root: Path, tmp_path: Path) -> None:
    def event(name: str, **more: str) -> HookEvent:
        return parse_event("claude", {"hook_event_name": name, "session_id": "s", "cwd": str(root), **more})

    client = client_of(CallSource(root, None), can_write=True)
    client.post("/note", data={"words": "Use tabs."})
    calls = GuardedCalls(root, GuardLog(tmp_path / "guard.jsonl"), open_workspace=lambda: Workspace.open(root))
    assert calls.handle(event("UserPromptSubmit", prompt="go on", agent_id="sub")).context == ""
    assert "Use tabs." in calls.handle(event("UserPromptSubmit", prompt="go on")).context
    assert calls.handle(event("UserPromptSubmit", prompt="go on")).context == ""
    calls.close()
    assert waiting(client) == []
