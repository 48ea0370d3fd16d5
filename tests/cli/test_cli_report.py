"""`ringfence run --report`: a page for who was not there, which nothing that a model or a file says can act in."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from agent_runs import RunStats, render_call, render_patch
from command_line import ringfence
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ModelTurn, Turn
from ringfence.runtime import Change, FileVersion, PolicyVerdict, Receipt, RejectedToolParams
from ringfence_sandbox import Workspace
from ringfence_tools.runs import report as pages
from ringfence_tools.runs.report import ReportFile, render_turn

VOID = frozenset({"meta", "img", "br", "link"})
HOSTILE = [
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "</pre></details></table></style><style>*{display:none}</style><base href=//evil>",
    "<!-- --><![CDATA[ ]]><?php ?>&lt;b&gt;&#60;b&#62;&amp",
    "' onmouseover='x' \" autofocus onfocus=\"x\" javascript:x",
    "\x00\x1b[2J\x1b]8;;http://evil\x07\x9b31m\x08",
    "\u202egnp.exe\u2066\u200b\ufeff\u2028\u2029\U000e0041",
    "\ud800\udc80\udfff",
]
ACTIVE = frozenset("\u061c\u180e\u200b\u200e\u200f\ufeff") | {
    chr(code) for code in (*range(0x2028, 0x202F), *range(0x2060, 0x2070))
}


class Parsed(HTMLParser):
    """The elements of a page as a browser makes them, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.said.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    unknown_decl = handle_pi = handle_comment

    @property
    def text(self) -> str:
        return "".join(self.said)


def parsed(page: str) -> Parsed:
    """Nothing is left open, and nothing in the text acts or hides."""
    found = Parsed(page)
    assert found.open == []
    odd = {c for c in found.text if (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t") or c in ACTIVE}
    assert odd == set()
    return found


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def calls(*asked: Mapping[str, object], text: str = "", **usage: int) -> dict[str, Any]:
    return {"text": text, "tool_calls": list(asked), "usage": usage}


DONE = {"text": "All done."}
TURNS = [
    calls(
        call("planning_setup_plan", objective="Mend it", initial_steps=["Look first"]),
        call("write_file", file_path="a.txt", content="x"),
        text="Let me see.",
        input_tokens=1000,
    ),
    calls(
        call("read_file", file_path="a.txt"),
        call("edit_file", file_path="a.txt", old_string="two", new_string="2"),
        call("edit_file", file_path="a.txt", old_string="nowhere", new_string="2"),
        {"name": "fly", "arguments": "{not json"},
        call("write_file", file_path="new.txt", content="new\n"),
    ),
    DONE,
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\ntwo\nthree\n")
    return tmp_path / "tree"


def command(tree: Path, turns: Sequence[Mapping[str, Any]], *options: str, kind: str = "disk") -> list[str]:
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    start = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--workspace", kind]
    return [*start, "--model", f"script:{script}", "--report", str(tree.parent / "report.html"), *options]


def run(
    tree: Path, turns: Sequence[Mapping[str, Any]], *options: str, task: str = "Do it.", kind: str = "disk"
) -> subprocess.CompletedProcess[str]:
    done = ringfence(*command(tree, turns, "--task", task, *options, kind=kind)[3:])
    output, errors = (stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, output, errors)


def report(tree: Path) -> Parsed:
    return parsed((tree.parent / "report.html").read_bytes().decode())


def test_the_page_tells_what_was_asked_done_denied_taken_back_and_changed(tree: Path) -> None:
    assert run(tree, TURNS).returncode == 0
    text = report(tree).text
    for said in (
        "The task was done",
        "Do it.",
        "All done.",
        "Let me see.",
        "Look first",
        "1,000 in",
        "read_before_write",
        "failed and rolled back",
        "rejected: ",
        "{not json",
        "1 | one\n2 | two",
        "+2\n",
        "-two\n",
        f"ringfence undo {tree} 2",
        f"ringfence undo {tree} --step 1",
    ):
        assert said in text
    with Workspace.open(tree) as disk:
        assert all(step.commit in text for step in disk.steps())


def test_the_page_is_alone_runs_nothing_and_links_nowhere(tree: Path) -> None:
    run(tree, TURNS)
    elements = report(tree).elements
    assert {tag for tag, _ in elements} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "pre", "code", "span", "div"),
        *("table", "tbody", "tr", "th", "td", "details", "summary"),
    }
    assert {name for _, attributes in elements for name, _ in attributes} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "open"),
    }
    policy = dict(elements[3][1])["content"] or ""
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def elements_of_a_run_that_says(tree: Path, texts: Sequence[str]) -> set[tuple[str, Any]]:
    """What a page is made of when everything that can be is one of these."""
    turns = [
        calls(
            call("planning_setup_plan", objective=text, initial_steps=[text]),
            {"name": text, "arguments": {text: text}},
            {"name": "read_file", "arguments": text},
            {"name": "ls", "arguments": {"path": text}, "id": text},
            call("write_file", file_path=text.replace("/", "|").replace("\x00", ""), content=text),
            call("write_file", file_path="content.txt", content="x"),
            call("edit_file", file_path="content.txt", old_string="x", new_string=f"{text}\nx"),
            text=text,
        )
        for text in texts
    ]
    task = "".join(texts).replace("\x00", "")
    assert run(tree, [*turns, {"text": "".join(texts)}], task=task, kind="memory").returncode == 0
    return {element for element in report(tree).elements if element[0] != "meta"}


def test_whatever_is_said_the_elements_are_those_of_a_run_that_says_nothing_odd(tree: Path) -> None:
    plain = elements_of_a_run_that_says(tree, ["plain", "missing/"])
    assert elements_of_a_run_that_says(tree, HOSTILE[:-1]) - plain == set()
    text = report(tree).text
    assert all(said in text for said in ("<script>alert(1)</script>", "\\x1b[2J", "\\u202egnp.exe"))


def receipt(text: str, params: object, outcome: Any = "denied") -> Receipt:
    version = FileVersion("symlink", 0o777, 1, target=text)
    return Receipt(
        receipt_id=text,
        call_id=text,
        tool=text,
        params=params,
        outcome=outcome,
        message=text,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        duration_seconds=0.1,
        session_id=text,
        prompt_name=text,
        policies=[PolicyVerdict(text, True), PolicyVerdict(text, False, text)],
        changes=[Change(text, version, None)],
        conflicts=[text],
        commit=text,
    )


@dataclass(frozen=True)
class Params:
    one: object


ODD = st.text(st.characters(exclude_categories=())) | st.sampled_from(HOSTILE)


@given(ODD)
def test_any_text_is_text(text: str) -> None:
    def pieces(said: str) -> str:
        shapes = [Params(said), Params([said]), {said: said}, RejectedToolParams(said, said), said]
        called = "".join(render_call(receipt(said, params), f"x{said}", Path()) for params in shapes)
        turn = render_turn(ModelTurn("run", 1, Turn(f"x{said}")))
        return called + turn

    assert parsed(pieces(text)).elements == parsed(pieces("plain")).elements


@given(st.binary() | ODD.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_diff(content: bytes) -> None:
    lines = content.replace(b"\n", b"\n+")
    found = parsed(render_patch(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+" + lines + b"\n"))
    assert [tag for tag, _ in found.elements].count("span") == 5 + lines.count(b"\n")
    assert {tag for tag, _ in found.elements} == {"details", "summary", "code", "pre", "span"}


def test_a_name_that_is_not_utf_8_is_shown(tree: Path) -> None:
    (tree / os.fsdecode(b"caf\xe9")).write_bytes(b"\xe9\r\n")
    turns = [calls(call("read_file", file_path="caf\\xe9"), call("rm", path="caf\\xe9")), DONE]
    assert run(tree, turns).returncode == 0
    assert "caf\\xe9" in report(tree).text
    assert "-\\udce9\\x0d\n" in report(tree).text


def test_a_run_that_could_not_be_applied_says_so_on_its_page(tree: Path) -> None:
    # The receipts go into a file of the tree, which so changes while the agent works.
    ended = run(tree, TURNS, "--apply", "--receipts", str(tree / "a.txt"), kind="memory")
    assert ended.returncode == 1
    assert "nothing was applied:a.txt" in report(tree).text


def test_an_interrupted_run_has_its_page_with_the_calls_until_then(tree: Path) -> None:
    receipts = tree.parent / "receipts.jsonl"
    turns = [*([calls(call("ls"), call("write_file", file_path="b.txt", content="x"))] * 150), DONE]
    line = command(tree, turns, "--task", "x", "--receipts", str(receipts))
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 30
        while time.monotonic() < until and not (receipts.exists() and receipts.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    text = report(tree).text
    assert "The run was interrupted" in text
    assert text.count("ok: /: ") > 2
    assert "--resume" in text


def test_a_report_takes_the_place_of_the_old_one_and_leaves_nothing_beside_it(tree: Path) -> None:
    (tree.parent / "report.html").write_text("old" * 10_000)
    run(tree, TURNS)
    assert "The task was done" in report(tree).text
    assert sorted(os.listdir(tree.parent)) == ["report.html", "script.jsonl", "tree"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing/report.html", "cannot be written"),
        ("tree", "no regular file"),
        ("/dev/null", "no regular file"),
        ("link", "no regular file"),
        ("patch", "--patch and --report name the same file"),
    ],
)
def test_a_place_where_no_report_can_be_is_wrong_usage(tree: Path, path: str, said: str) -> None:
    (tree.parent / "link").symlink_to("elsewhere")
    ended = run(tree, TURNS, "--patch", str(tree.parent / "patch"), "--report", str(tree.parent / path))
    assert (ended.returncode, said in ended.stderr) == (2, True)
    assert (tree / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert not (tree.parent / "elsewhere").exists()


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_report_in_the_workspace_is_no_change_of_the_agent_s(tree: Path, kind: str) -> None:
    place = tree / "out" / "report.html"
    place.parent.mkdir()
    asked = [calls(call("write_file", file_path="out/report.html", content="mine")), *TURNS]
    ended = run(tree, asked, "--report", str(place), "--patch", str(tree.parent / "patch"), kind=kind)
    assert ended.returncode == 0
    assert "the report of this run comes there" in parsed(place.read_text()).text
    assert "report.html" not in ended.stdout + (tree.parent / "patch").read_text()
    if kind == "disk":
        with Workspace.open(tree) as disk:
            assert {path for step in disk.steps() for path in step.paths} == {"a.txt", "new.txt"}


@pytest.mark.parametrize("option", ["--patch", "--receipts"])
def test_what_a_run_writes_in_the_workspace_is_not_the_agent_s_to_change(tree: Path, option: str) -> None:
    place = tree / "out" / "file"
    place.parent.mkdir()
    (tree.parent / "link").symlink_to(place)
    mine = [call("write_file", file_path="out/file", content="mine"), call("rm", path="out", recursive=True)]
    asked = [*mine, call("read_file", file_path="out/file"), *mine, call("write_file", file_path="new", content="x")]
    ended = run(tree, [calls(*asked), DONE], option, str(tree.parent / "link"), "--json")
    assert json.loads(ended.stdout)["tool_calls"]["denied"] >= 2
    told = place.read_text()
    assert "+++ b/new" in told if option == "--patch" else told.count("\n") == len(asked)


def test_what_becomes_of_the_directory_s_name_meanwhile_does_not_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "private").mkdir()
    file = ReportFile(tmp_path / "out" / "r.html", tmp_path)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").symlink_to("private")
    file.write(b"page")
    file.close()
    assert (tmp_path / "moved" / "r.html").read_bytes() == b"page"
    assert os.listdir(tmp_path / "private") == []


def test_a_page_that_cannot_be_put_in_its_place_leaves_nothing(tmp_path: Path) -> None:
    file = ReportFile(tmp_path / "r.html", tmp_path)
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OSError, match=r"r\.html"):
        file.write(b"page")
    file.close()
    assert os.listdir(tmp_path) == ["r.html"]


def test_a_page_that_there_is_no_room_for_is_told_by_its_own_name_and_leaves_nothing(tmp_path: Path) -> None:
    file = ReportFile(tmp_path / "r.html", tmp_path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, most))
    try:
        with pytest.raises(OSError, match=f"'{tmp_path}/r.html'"):
            file.write(b"page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        file.close()
    assert os.listdir(tmp_path) == []


def test_what_a_message_has_between_backticks_is_code_and_what_stands_there_is_text() -> None:
    denied = PolicyVerdict("mine", False, "run `a<b>` first")
    told = replace(receipt("x", None), message="run `a<b>` first", policies=[denied])
    page = str(render_call(told, "`answer`", Path("/r")))
    shown = parsed(page)
    assert "<code>a&lt;b&gt;</code>" in page
    assert "run `" not in page
    assert "`answer`" in shown.said, "what a model or a tool has written stays as it is"


def test_no_number_breaks_in_the_column_of_sizes() -> None:
    file, link = FileVersion("file", 0o644, 2_420), FileVersion("symlink", 0o777, 99, target="x" * 99)
    changed = receipt("done", None, "committed")
    page = str(
        render_call(replace(changed, changes=(Change("a", None, file), Change("b", None, link))), "", Path("/r"))
    )
    assert '<td class="size">2,420 bytes, mode 644</td>' in page
    assert "<td>a link to " in page, "a long target may break anywhere"
    template = Path(pages.__file__).parent / "templates/report.html.j2"
    assert ".size { overflow-wrap: normal; }" in template.read_text()


def test_a_long_value_is_cut_and_says_so() -> None:
    piece = parsed(render_call(receipt("x", Params("<" * 1_000_000)), "", Path())).text
    assert "[... 996,000 more characters]" in piece
    assert len(piece) < 10_000


def test_of_a_long_list_the_rest_is_counted() -> None:
    changed = [Change(f"{number}.txt", None, FileVersion("file", 0o644, 1)) for number in range(1_000)]
    found = parsed(render_call(replace(receipt("x", None), policies=[], conflicts=[], changes=changed), "", Path()))
    assert [tag for tag, _ in found.elements].count("tr") == 200
    assert "and 800 more" in found.text


def test_of_a_long_answer_both_ends_are_there() -> None:
    piece = parsed(render_call(receipt("x", None), f"begin {'<' * 1_000_000} exit code 3", Path())).text
    assert all(said in piece for said in ("begin <<<", "996,018 characters left out", "<<< exit code 3"))
    assert len(piece) < 10_000


def test_a_run_of_any_length_has_a_page_of_a_bounded_size(tmp_path: Path) -> None:
    file = ReportFile(tmp_path / "r.html", tmp_path)
    long = receipt("<", Params("<" * 4_000))
    for number in range(2_000):
        file.turn(ModelTurn("run", number, Turn("x")))
        file.call(long, None, "")
    file.close()
    record = file.record(RunStats())
    assert len(record) < pages.MAX_RECORD_CHARACTERS + 1_000
    assert "more tool calls; --receipts FILE.jsonl has every call" in parsed(record).text


def test_a_patch_of_any_size_is_cut_and_says_so() -> None:
    part = b"diff --git a/%d b/%d\n@@ -0,0 +1,3000 @@\n" + b"+<line>\n" * 3_000
    page = parsed(render_patch(b"".join(part % (n, n) for n in range(50))))
    assert "and 1,002 more lines" in page.text
    assert "There is no room for" in page.text
    assert len(page.text) < pages.MAX_PATCH_CHARACTERS
