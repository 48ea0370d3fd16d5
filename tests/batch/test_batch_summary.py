"""What a batch tells people and CI jobs: counts, causes, JUnit XML, Markdown, and a page where nothing hostile acts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringfence_batch import BatchTask, Ledger, TaskResult, summarize
from ringfence_batch.ledger import Outcome
from ringfence_batch.summary_files import write_summary

HOSTILE = "</script><script>alert(1)</script> \u202e | `x` [a](javascript:1) \x1b[31m \x00 \uffff <b>&amp;"
RESULTS: tuple[tuple[str, Outcome | None, str], ...] = (
    ("a", "done", ""),
    ("b", "checks-failed", "pytest: exit code 1"),
    ("c", "checks-failed", "pytest: exit code 1"),
    ("d", "task-failed", HOSTILE),
    ("e", "infra-failed", "its worker ended: -9"),
    ("f", "cancelled", "cancelled"),
    ("g", None, ""),
)


def ledger_of(out: Path, results: tuple[tuple[str, Outcome | None, str], ...] = RESULTS) -> Ledger:
    tasks = [BatchTask(task_id, "/repo", f"Mend it. {HOSTILE}", "script:/model") for task_id, _, _ in results]
    ledger = Ledger.create(out, tasks)
    for task_id, outcome, cause in results:
        if outcome is not None and (attempt := ledger.claim(task_id)) is not None:
            (attempt.directory / "patch.diff").write_text("--- a\n")
            (attempt.directory / "report.html").write_text("")  # nothing to look at
            attempt.publish(TaskResult(task_id, outcome, cause, attempt.number, seconds=1.5, tokens=1000))
    return ledger


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: dict[str, list[str]] = {"script": [], "style": []}
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        assert not any(name.startswith("on") for name in given)
        assert "javascript:" not in (given.get("href") or "")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in self.text:
            self.text[self.tags[-1]].append(data)


def test_counts_and_causes_are_those_of_the_results(tmp_path: Path) -> None:
    summary = summarize(ledger_of(tmp_path / "out"))
    assert summary.counts[-1] == ("no result", 1)
    assert sum(count for _, count in summary.counts) == len(RESULTS)
    assert summary.causes[0] == ("checks-failed", "pytest: exit code 1", 2)
    assert summary.exit_code == 4


def test_causes_that_differ_only_in_ids_hashes_and_sizes_are_one(tmp_path: Path) -> None:
    said = "/work/{id} has no commit {hash}: 0.{number} s"
    results = tuple(
        (f"t{number}", "task-failed", said.format(id=f"t{number}", hash=f"{number:040x}", number=number))
        for number in range(3)
    )
    (cause,) = summarize(ledger_of(tmp_path / "out", results)).causes
    assert cause[2] == 3


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("cancelled", 1), ("checks-failed", 1), (None, 1)])
def test_only_a_batch_with_all_tasks_done_succeeds(tmp_path: Path, outcome: Outcome | None, code: int) -> None:
    ledger = ledger_of(tmp_path / "out", (("a", "done", ""), ("b", outcome, "")))
    assert summarize(ledger).exit_code == code


def test_junit_tells_failures_from_errors_and_is_xml_whatever_a_cause_is(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "out")
    write_summary(ledger)
    suite = ElementTree.parse(ledger.out / "junit.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["7", "3", "2", "1"]
    assert {case.get("name"): [child.tag for child in case] for case in suite} == {
        "a": [],
        "b": ["failure"],
        "c": ["failure"],
        "d": ["failure"],
        "e": ["error"],
        "f": ["skipped"],
        "g": ["error"],
    }


def test_markdown_has_no_markup_from_a_task(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "out")
    write_summary(ledger)
    text = (ledger.out / "summary.md").read_text()
    assert text.startswith("## 1 of 7 tasks done\n")
    assert not re.search(r"(?<!\\)(<script|\]\(|</script)", text)
    assert all(re.search(r"(?<!\\)\|$", line) for line in text.splitlines() if line.startswith("|"))
    assert not set("\x1b\x00\u202e") & set(text)


def test_the_page_runs_nothing_but_its_own_script_and_loads_nothing(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "out")
    write_summary(ledger)
    text = (ledger.out / "index.html").read_text()
    page = Parsed(text)
    data, script = page.text["script"]
    assert page.tags.count("script") == 2
    assert page.policy.startswith("default-src 'none'")
    for own in (script, page.text["style"][0]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'" in page.policy
    assert not re.search(r"https?://|url\(|@import|innerHTML", text)
    rows = json.loads(data)["rows"]
    assert [row[0] for row in rows] == [task_id for task_id, _, _ in RESULTS]
    assert json.loads(data)["files"][rows[0][10]] == [["patch", "patch.diff"]]


def test_a_batch_without_any_result_has_a_page(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "out", (("a", None, ""),))
    assert write_summary(ledger).without_result == 1
    assert "0 of 1 task done" in (ledger.out / "index.html").read_text()


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_tasks_and_nothing_hostile_acts(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "out")
    write_summary(ledger)
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    address = (ledger.out / "index.html").as_uri()
    done = subprocess.run([*words, "--dump-dom", address], capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout.partition("<tbody>")[2] and re.findall(r'<span class="id">(\w+)</span>', done.stdout)
    assert shown == [task_id for task_id, _, _ in RESULTS]
    assert Parsed(done.stdout).tags.count("script") == 2
    assert 'href="tasks/a/1/attempts/1/patch.diff"' in done.stdout
