"""Questions of `ringfence run --ask` that are answered on the page of `--view`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from page_requests import asked, until
from terminals import Terminal

WRITING = '''
import pathlib
from ringfence.adapters import LoopAdapter, ToolCall, Turn

class Writing(LoopAdapter):
    """Makes a call, and keeps what it was told of that."""

    def respond(self, request):
        if len(request.messages) == 1:
            return Turn("", (ToolCall("1", *CALL),))
        pathlib.Path(__file__).with_name("heard").write_text(str(request.messages[-1]))
        return Turn("done")
'''
WRITE = ("write_file", {"file_path": "a", "content": "<b>new</b>\x1b\n"})
YES = {"number": "1", "choice": "yes"}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))


def words(tmp_path: Path, *options: str, call: object = WRITE) -> list[str]:
    (tmp_path / "tree").mkdir(exist_ok=True)
    (tmp_path / "writing.py").write_text(WRITING.replace("CALL", repr(call)))
    model = f"{tmp_path / 'writing.py'}:Writing"
    run = ["run", str(tmp_path / "tree"), "--task", "x", "--model", model, "--view", "--ask", "writes", *options]
    return [sys.executable, "-m", "ringfence_cli", *run]


def answered(
    tmp_path: Path, answer: Callable[[str, subprocess.Popen[str]], Any], *options: str, call: object = WRITE
) -> str:
    """Run without a terminal until it ends, with this answer. Return what is said and what the model was told."""
    command = words(tmp_path, *options, call=call)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as process, ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(process.kill)
        assert process.stderr is not None
        address = process.stderr.readline()
        assert address.startswith("the page: "), "nobody says that nobody can answer"
        address = address.removeprefix("the page: ")
        until(address, "question", "keep it?")
        answer(address, process)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said
    return said + (tmp_path / "heard").read_text()


def test_a_yes_keeps_the_call_and_a_second_answer_is_refused(tmp_path: Path) -> None:
    def answer(address: str, _: object) -> None:
        shown = asked(address, "question")[1]
        assert "+&lt;b&gt;new&lt;/b&gt;" in shown
        assert "runs as you on this machine can answer" in shown
        assert asked(address.partition("#")[0], "answer", YES)[0] == 401
        assert asked(address, "answer", {**YES, "choice": "perhaps"})[0] == 409
        assert asked(address, "answer", {**YES, "number": "2"})[0] == 409
        found: list[int] = []
        both = [Thread(target=lambda: found.append(asked(address, "answer", YES)[0])) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        statuses.extend(found)

    statuses: list[int] = []
    answered(tmp_path, answer)
    assert sorted(statuses) == [200, 409]
    assert (tmp_path / "tree/a").read_text().startswith("<b>new</b>")


def test_a_no_rolls_back_and_the_model_reads_why(tmp_path: Path) -> None:
    given = {"number": "1", "choice": "no", "reason": "use tabs"}
    heard = answered(tmp_path, lambda address, _: asked(address, "answer", given))
    assert "a person said no: use tabs" in heard
    assert not (tmp_path / "tree/a").exists()


def test_nobody_answers_the_page_in_time(tmp_path: Path) -> None:
    command = words(tmp_path, "--ask-timeout", "1s")
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=100, check=True)
    assert "nobody answered within 1 s" in (tmp_path / "heard").read_text()
    assert not (tmp_path / "tree/a").exists()


def page_process(command: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    return next(int(one) for one in children if b"page_server" in Path(f"/proc/{one}/cmdline").read_bytes())


def test_a_page_that_is_killed_is_a_no_at_once(tmp_path: Path) -> None:
    heard = answered(tmp_path, lambda _, command: os.kill(page_process(command), signal.SIGKILL), "--ask-timeout", "9m")
    assert "no terminal and the page has ended" in heard
    assert "the page had ended" in heard
    assert not (tmp_path / "tree/a").exists()


def test_a_question_that_is_too_long_says_how_much_is_left_out(tmp_path: Path) -> None:
    def answer(address: str, _: object) -> None:
        shown = asked(address, "question")[1]
        assert "more characters are not shown here" in shown
        assert "+2 -0 lines" in shown
        assert "last" not in shown
        assert "\u202e" not in shown
        assert asked(address, "answer", {**YES, "choice": "always"})[0] == 200

    call = ("write_file", {"file_path": "a", "content": "\u202e" * 47_000 + "\nlast\n"})
    answered(tmp_path, answer, call=call)
    assert (tmp_path / "tree/a").exists()


@pytest.mark.parametrize("at_page", [True, False])
def test_at_a_terminal_the_first_answer_counts_and_the_other_place_is_told(tmp_path: Path, at_page: bool) -> None:
    with Terminal(words(tmp_path), columns=200) as terminal:
        terminal.wait_for("the page: ")
        address = terminal.wait_for("\n")
        terminal.wait_for("keep it?")
        until(address, "question", "keep it?")
        if at_page:
            assert json.loads(asked(address, "answer", YES)[1]) == {"lines": ["answered: yes"]}
            terminal.wait_for("answered on the page: yes")
        else:
            terminal.type("no\n")
            terminal.wait_for("why?")
            assert asked(address, "answer", YES) == (409, "it was answered at the terminal")
            terminal.type("use tabs\n")
        terminal.wait_for("the page stays until Ctrl-C")
        assert asked(address, "question") == (200, "")
        terminal.type("\x03")
        terminal.end()
    assert (tmp_path / "tree/a").exists() == at_page
    assert ("use tabs" in (tmp_path / "heard").read_text()) != at_page
