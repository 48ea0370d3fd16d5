"""The page of `ringfence view` in a real Chromium."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from batches import task
from viewed import viewed_workspace

from ringfence_batch import Batch, Ledger, TaskResult
from ringfence_sandbox import Workspace
from ringfence_view import CallSource, export_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and os.environ.get("RINGFENCE_REQUIRE_CHROMIUM") != "1":
    pytest.skip("needs Chromium on PATH; RINGFENCE_REQUIRE_CHROMIUM=1 requires it", allow_module_level=True)

expect = pytest.importorskip("playwright.sync_api").expect
ROLLED_BACK = "li[data-outcome=rolled_back]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "RINGFENCE_REQUIRE_CHROMIUM=1, and there is none on PATH"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a page that may write, of a workspace in `tmp_path / "tree"`."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root, receipts = viewed_workspace(tmp_path)
    yield from served("view", root, "--receipts", receipts, "--write")


@pytest.fixture
def batch_address(tmp_path: Path) -> Iterator[str]:
    """The address of the page of a batch, of which a task is done, one failed, and one has no result."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.txt").write_text("one\n")
    fails = {"tool_calls": [{"name": "read_file", "arguments": {"file_path": "none"}}]}
    tasks = [task(tmp_path / "repo", "good"), task(tmp_path / "repo", "bad", fails)]
    Batch(tasks, out=tmp_path / "out").run(jobs=1)
    Ledger.create(tmp_path / "out", [task(tmp_path / "repo", "later")])
    yield from served("view", tmp_path / "out")


def served(*words: str | Path) -> Iterator[str]:
    """Run a command that prints the address of its page, and end it afterwards."""
    command = [sys.executable, "-m", "ringfence_cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)


def opened(browser: Browser, address: str, rows: str = "#rows > li", **context: object) -> tuple[Page, list[str]]:
    """A page, and what goes wrong in it."""
    page, wrong = browser.new_page(**context), list[str]()  # type: ignore[arg-type]
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector(rows)
    return page, wrong


def test_a_person_reads_searches_and_acts_with_the_keyboard_while_an_agent_works(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    page, wrong = opened(browser, address)
    assert "token" not in page.url
    for key in ("j", "j", "k", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("#step-5.open .entry dl")
    assert page.url.endswith("#step-5")
    page.keyboard.press("u")
    assert page.locator("#step-5 .entry").is_hidden()
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("nothing")
    expect(page.locator("#rows > li[id]")).to_have_count(1)
    page.locator(f"{ROLLED_BACK} .row").click()
    code = page.locator(f"{ROLLED_BACK} tr.add .c")
    assert "import nothing" in code.inner_text()
    assert code.evaluate("cell => getComputedStyle(cell).textDecorationLine") == "line-through"
    page.fill("#find input", "")
    page.wait_for_selector("#step-3")
    with Workspace.open(tmp_path / "tree") as workspace, workspace.transaction("write_file", opaque=False):
        workspace.filesystem.write("live.txt", "live\n")
    page.wait_for_selector("#step-6")
    page.locator("#step-6 .row").click()
    page.locator("#step-6 .act", has_text="Undo").click()
    page.locator("#do").click()
    page.wait_for_selector("#step-7")
    assert not (tmp_path / "tree/live.txt").exists()
    page.goto(f"{page.url.partition('#')[0]}#step-1")
    page.wait_for_selector("#step-1.open table.diff")
    assert wrong == []
    page.close()


def test_without_the_token_the_page_says_what_to_open(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address.partition("#")[0])
    expect(page.locator("#status")).to_contain_text("ringfence view")
    assert page.locator("#rows").count() == 0
    page.close()


def test_an_exported_page_works_from_a_file(browser: Browser, source: CallSource, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(export_page(source, contents=True))
    page, wrong = opened(browser, file.as_uri())
    page.fill("#find input", "import nothing")
    expect(page.locator("#rows > li[id]:visible")).to_have_count(1)
    page.locator(f"{ROLLED_BACK} .row").click()
    assert "import nothing" in page.locator(f"{ROLLED_BACK} tr.add .c").inner_text()
    page.locator("#tab-changes").click()
    page.wait_for_selector("#changes .files table")
    assert wrong == []
    page.close()


def violations(page: Page) -> list[str]:
    """What axe finds."""
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(f"{axe};0")
    return page.evaluate("axe.run().then(found => found.violations.map(one => one.id + ' ' + one.nodes[0].html))")


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_everybody_can_use_the_page(browser: Browser, address: str, width: int, scheme: str) -> None:
    page, wrong = opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for key in ("#step-1", "#step-2", ROLLED_BACK):
        page.locator(f"{key} .row").click()
        page.wait_for_selector(f"{key} table.diff")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = violations(page)
    for button in ("#split", "#tab-changes", "#changes [data-into=blame]"):
        page.locator(button).first.click()
        page.wait_for_timeout(500)
        found += violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (found, wrong) == ([], [])
    page.close()


def test_a_batch_is_filtered_and_leads_to_the_calls_of_a_task_with_the_keyboard(
    browser: Browser, batch_address: str, tmp_path: Path
) -> None:
    page, wrong = opened(browser, batch_address, "#tasks tbody tr")
    assert "token" not in page.url
    expect(page.locator("#tasks tbody tr")).to_have_count(3)
    page.locator(".cause").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#tasks tbody tr")).to_have_count(1)
    page.locator("#outcomes [data-outcome='']").press("Enter")
    later = Ledger(tmp_path / "out").claim("later")
    assert later is not None
    later.publish(TaskResult("later", "done", attempt=1, tokens=9_000, cost_usd=1.5))
    expect(page.locator("#outcomes [data-outcome=done]")).to_have_text("done 2")
    expect(page.locator("#tasks [data-name=cost]")).to_have_text("$1.50")
    page.get_by_label("calls of good").press("Enter")
    page.wait_for_selector("#rows > li")
    page.locator("#tab-changes").click()
    expect(page.locator("#changes tr.add .c")).to_have_text("two")
    page.locator(".up a").press("Enter")
    page.wait_for_selector("#tasks tbody tr")
    assert wrong == []
    page.close()


def test_a_person_rejects_a_hunk_and_comments_with_the_keyboard(browser: Browser, address: str, tmp_path: Path) -> None:
    page, wrong = opened(browser, address)
    page.locator("#step-2 .row").press("Enter")
    page.locator("#step-2 [data-act=reject-file]").press("Enter")
    page.locator("#words textarea").fill("No such names.")
    page.locator("#do").press("Enter")
    expect(page.locator("#notes li")).to_contain_text("No such names.")
    page.locator("#acting [data-act=comment]").press("Enter")
    page.locator("#words textarea").fill("<b>Use tabs.</b>")
    page.locator("#do").press("Enter")
    expect(page.locator("#notes li")).to_have_count(2)
    assert violations(page) == []
    page.locator("#notes button").first.press("Enter")
    expect(page.locator("#notes li")).to_have_count(1)
    expect(page.locator("#notes li")).to_have_text("<b>Use tabs.</b> withdraw")
    page.locator("#checkpoint input").fill("good")
    page.keyboard.press("Enter")
    expect(page.locator("#preview")).to_contain_text("good")
    assert page.locator("#words").is_hidden()
    page.locator("#do").press("Enter")
    expect(page.locator("#status")).to_contain_text("good")
    assert not [path for path in (tmp_path / "tree").iterdir() if "onerror" in path.name]
    assert wrong == []
    page.close()


def test_a_person_answers_a_question_of_a_run_with_the_keyboard(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    writes = [
        {"tool_calls": [{"name": "write_file", "arguments": {"file_path": name, "content": "<b>new</b>\n"}}]}
        for name in ("a", "b")
    ]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in [*writes, {"text": "Done."}]))
    run = ["run", tmp_path / "tree", "--task", "x", "--model", f"script:{tmp_path / 'script.jsonl'}"]
    command = [sys.executable, "-m", "ringfence_cli", *run, "--view", "--ask", "writes"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as process, ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(process.kill)
        assert process.stderr is not None
        page, wrong = opened(browser, process.stderr.readline().removeprefix("the page: ").strip(), "#asked")
        expect(page.locator("#question pre .green")).to_have_text("  | +<b>new</b>")
        expect(page.locator("#question [data-answer=yes]")).to_be_enabled()
        assert violations(page) == []
        page.keyboard.press("a")
        for key in ("Tab", "Tab", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#asked[data-number='2']")
        expect(page.locator("#question [data-answer=no]")).to_be_enabled()
        for key in ("a", "Tab", "Tab", "Tab", "Tab"):
            page.keyboard.press(key)
        page.keyboard.type("use tabs")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert process.wait(30) == 0
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["a"]
    assert [one for one in wrong if "Failed to load" not in one and "ERR_" not in one] == []
    page.close()


@pytest.mark.prove
def test_a_diff_of_50_000_lines_and_a_line_of_10_mb_leave_the_page_small(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    with Workspace.open(tmp_path / "tree") as workspace:
        for path, content in (("long.txt", "line\n" * 50_000), ("wide.txt", "w" * 10_000_000)):
            with workspace.transaction("write", opaque=False):
                workspace.filesystem.write(path, content)
    for address in served("view", tmp_path / "tree"):
        page, wrong = opened(browser, address)
        rows = page.locator("#step-1 tr")
        for step in (1, 2):
            page.locator(f"#step-{step} .row").press("Enter")
            page.wait_for_selector(f"#step-{step} details.file")
        assert page.locator("tr").count() < 20, "the long file is closed, and the line is cut"
        page.locator("#step-1 summary").click()
        page.wait_for_selector("#step-1 tr.rest")
        assert rows.count() <= 2_001
        page.locator("#step-1 tr.rest button").click()
        expect(page.locator("#step-1 tr.rest")).to_contain_text("of 46,0")
        assert 2_001 < rows.count() <= 4_001
        page.locator("#step-2 tr.add button[data-row]").click()
        expect(page.locator("#step-2 tr.add .c")).to_contain_text("9,800,000 more characters")
        page.locator("#split").click()
        expect(page.locator("#step-1 tbody.split tr").last).to_contain_text("of 46,0")
        assert rows.count() <= 8_002
        assert page.evaluate("document.body.innerHTML.length") < 4_000_000
        page.locator("#split").click()
        expect(page.locator("tbody.split")).to_have_count(0)
        page.keyboard.press("k")
        page.keyboard.press("u")
        expect(page.locator("li.open")).to_have_count(1)
        page.keyboard.press("?")
        assert page.locator("#keys").is_visible()
        assert wrong == []
        page.close()


@pytest.fixture
def forked(address: str, tmp_path: Path) -> str:
    """The address of a page with two forks."""
    with Workspace.open(tmp_path / "tree") as workspace:
        for name in ("small", "large"):
            with workspace.fork(name) as fork, fork.transaction("edit", opaque=False):
                fork.filesystem.write("app.py", f"{name}\n")
    return address


def test_candidates_are_compared_and_one_is_promoted_with_the_keyboard(
    browser: Browser, forked: str, tmp_path: Path
) -> None:
    page, wrong = opened(browser, forked)
    page.locator("#tab-timeline").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#fork-table tbody tr")
    page.locator("#compare button").press("Enter")
    expect(page.locator("#fork-difference tr.add .c")).to_have_text("small")
    page.get_by_label("Calls of small").press("Enter")
    page.wait_for_selector("#step-1")
    page.locator(".up a").press("Enter")
    page.locator("#tab-forks").click()
    page.get_by_label("Promote small").press("Enter")
    expect(page.locator("#preview")).to_contain_text("applied: app.py")
    page.locator("#do").press("Enter")
    expect(page.locator("#status")).to_contain_text("applied")
    assert (tmp_path / "tree/app.py").read_text() == "small\n"
    assert wrong == []
    page.close()


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_everybody_can_use_the_candidates(browser: Browser, forked: str, width: int, scheme: str) -> None:
    page, wrong = opened(browser, forked, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.locator("#tab-forks").click()
    page.get_by_label("Changes of small").click()
    page.wait_for_selector("#fork-difference table.diff")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (violations(page), wrong) == ([], [])
    page.close()


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_everybody_can_use_the_page_of_a_batch(browser: Browser, batch_address: str, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900}
    page, wrong = opened(browser, batch_address, "#tasks tbody tr", viewport=size, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (violations(page), wrong) == ([], [])
    page.close()


def tab_to(page: Page, text: str) -> None:
    """Press Tab until something with this text has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == text:
            return
    raise AssertionError(f"no {text} can be reached")


def test_a_hunk_is_rejected_with_nothing_but_keys(browser: Browser, address: str, tmp_path: Path) -> None:
    with Workspace.open(tmp_path / "tree") as workspace, workspace.transaction("edit", opaque=False):
        workspace.filesystem.write("notes.txt", "two\n")
    page, wrong = opened(browser, address)
    while "step-6" not in page.evaluate("document.activeElement.parentElement?.id ?? ''"):
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#step-6.open table.diff")
    tab_to(page, "Reject this hunk")
    page.keyboard.press("Enter")
    page.wait_for_selector("#act[open]")
    assert violations(page) == []
    while page.evaluate("document.activeElement.tagName") != "TEXTAREA":
        page.keyboard.press("Tab")
    page.keyboard.type("Keep the token.")
    tab_to(page, "Reject this hunk")
    page.keyboard.press("Enter")
    expect(page.locator("#notes li")).to_contain_text("Keep the token.")
    assert "the token is" in (tmp_path / "tree/notes.txt").read_text()
    assert wrong == []
    page.close()


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_everybody_can_act(browser: Browser, address: str, width: int, scheme: str) -> None:
    page, wrong = opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = list[str]()
    page.locator("#step-3 .row").click()
    page.wait_for_selector("#step-3 table.diff")
    for button in ("#step-3 [data-act=reject-step]", "#step-3 [data-act=undo]", "#acting [data-act=comment]"):
        page.locator(button).first.click()
        page.wait_for_selector("#act[open]")
        found += violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.keyboard.press("Escape")
    page.locator("#acting [data-act=comment]").click()
    page.locator("#words textarea").fill("long-word-" * 60)
    page.locator("#do").click()
    page.wait_for_selector("#notes li")
    found += violations(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (found, wrong) == ([], [])
    page.close()


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_everybody_can_answer(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, scheme: str
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    call = {"name": "write_file", "arguments": {"file_path": "a", "content": "new-" * 200 + "\n"}}
    (tmp_path / "script.jsonl").write_text(json.dumps({"tool_calls": [call]}) + "\n" + json.dumps({"text": "Done."}))
    run = ["run", tmp_path / "tree", "--task", "x", "--model", f"script:{tmp_path / 'script.jsonl'}"]
    command = [sys.executable, "-m", "ringfence_cli", *run, "--view", "--ask", "writes"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as process, ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(process.kill)
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("the page: ").strip()
        size = {"width": width, "height": 900}
        page, wrong = opened(browser, address, "#asked", viewport=size, color_scheme=scheme)
        expect(page.locator("#question [data-answer=yes]")).to_be_enabled()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert (violations(page), wrong) == ([], [])
        page.close()
