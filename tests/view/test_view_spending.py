"""What the page of `ringfence view` says of tokens and cost."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from command_line import ringfence_text
from viewed import client_of

from ringfence_view import CallSource


def written(*paths: str, **usage: float) -> str:
    calls = [{"name": "write_file", "arguments": {"file_path": path, "content": "x\n"}} for path in paths]
    return json.dumps({"tool_calls": calls, "usage": usage} if calls else {"text": "Done.", "usage": usage})


TURNS = (
    written("a", "b", input_tokens=1_000, output_tokens=50, cached_tokens=400, cost_usd=0.5),
    written("c", input_tokens=2_000, output_tokens=50),
    written(input_tokens=3_000, output_tokens=9, cost_usd=1.25),
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which a run with three turns has made three calls."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    run(tmp_path)
    return tmp_path / "tree"


def run(tmp_path: Path, *options: str) -> None:
    (tmp_path / "turns.jsonl").write_text("\n".join(TURNS))
    given = ("--task", "x", "--model", f"script:{tmp_path / 'turns.jsonl'}", "--quiet", *options)
    done = ringfence_text("run", tmp_path / "tree", "--receipts", tmp_path / "calls.jsonl", *given)
    assert done.returncode == 0, done.stderr


def text(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_the_tokens_of_a_turn_stand_at_its_first_call_and_count_once(tree: Path) -> None:
    client = client_of(CallSource(tree, tree.parent / "calls.jsonl"))
    rows = {key: text(client.get(f"/row/{key}").text) for key in ("step-1", "step-2", "step-3")}
    assert "1,050 tokens, $0.5000" in rows["step-1"]
    assert "tokens" not in rows["step-2"]
    assert "2,050 tokens" in rows["step-3"]
    assert "$" not in rows["step-3"]
    detail = text(client.get("/entry/step-2").text)
    assert "Turn 1: 1,050 tokens, $0.5000 (1,000 in, 400 of them cached, 50 out)" in detail


def test_a_run_says_what_all_its_turns_have_used_and_what_has_no_price(tree: Path) -> None:
    page = text(client_of(CallSource(tree, tree.parent / "calls.jsonl")).get("/page").text)
    assert (
        "Turns with calls in the receipts: 2 turns, 3,100 tokens, $0.5000, without 1 turn whose price is unknown."
        in page
    )
    assert "1 run here: 3 turns, 6,109 tokens, $1.75." in page


def test_runs_are_added_up_while_the_page_is_open_and_receipts_alone_have_their_turns(tree: Path) -> None:
    source = CallSource(tree, None)
    assert not source.refresh()
    run(tree.parent)
    assert source.refresh()
    assert "2 runs here: 6 turns, 12,218 tokens, $3.50." in text(client_of(source).get("/spending").text)
    alone = text(client_of(CallSource(None, tree.parent / "calls.jsonl")).get("/page").text)
    assert "in the receipts: 4 turns, 6,200 tokens, $1.00" in alone
    assert "here:" not in alone


def test_the_table_of_the_prices_is_named(tmp_path: Path) -> None:
    usage = {"input_tokens": 10, "output_tokens": 1, "cost_usd": 0.25, "prices": "table <b> 1.2"}
    call = {"receipt_id": "r", "call_id": "c", "tool": "t", "outcome": "committed", "params": {}, "message": ""}
    turns = [{"number": 1, **usage}, {"number": 2, "input_tokens": "many"}, {"number": 3}]
    lines = [
        {**call, "receipt_id": f"r{at}", "started_at": f"2026-01-01T00:00:0{at}+00:00", "turn": turn}
        for at, turn in enumerate(turns)
    ]
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = client_of(CallSource(None, tmp_path / "calls.jsonl"))
    assert "11 tokens, $0.2500 by table <b> 1.2" in text(client.get("/row/call-r0").text)
    page = client.get("/page").text
    assert "<b> 1.2" not in page
    assert "3 turns, 11 tokens, $0.2500 by table" in text(page)


def test_a_candidate_says_what_it_has_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    (tmp_path / "turns.jsonl").write_text("\n".join(TURNS))
    given = ("--task", "x", "--model", f"script:{tmp_path / 'turns.jsonl'}", "--candidates", "2", "--quiet")
    assert ringfence_text("run", tmp_path / "tree", *given).returncode == 0
    client = client_of(CallSource(tmp_path / "tree", None))
    forks = client.get("/forks").text
    assert re.findall(r'data-name="Used">(.*?)<', forks) == ["6,109 tokens, $1.75"] * 2
    name = re.findall(r'<th scope="row"><code>([\w-]+)', forks)[0]
    assert "1 run here: 3 turns" in text(client.get(f"/fork/{name}/page").text)
