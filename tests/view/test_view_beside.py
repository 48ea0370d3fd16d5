"""The page of `--view`, which follows a command while it works."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ringfence_text
from page_requests import asked, until
from terminals import Terminal

WAITING = '''
import pathlib, time
from ringfence.adapters import LoopAdapter, ToolCall, Turn

class Waiting(LoopAdapter):
    """Writes a file, and waits until another one is there before it ends."""

    def respond(self, request):
        if len(request.messages) == 1:
            return Turn("", (ToolCall("1", "write_file", {"file_path": "made.txt", "content": "a line\\n"}),))
        while not pathlib.Path(__file__).with_name("go").exists():
            time.sleep(0.05)
        return Turn("done")
'''


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "tree").mkdir()
    (tmp_path / "waiting.py").write_text(WAITING)


def words(tmp_path: Path, *options: str) -> list[str]:
    model = f"{tmp_path / 'waiting.py'}:Waiting"
    start = [sys.executable, "-m", "ringfence_cli", "run", str(tmp_path / "tree"), "--task", "Do it.", "--model", model]
    return [*start, "--view", *options]


def test_the_page_of_a_run_follows_it_and_stays_for_a_person_until_ctrl_c(tmp_path: Path) -> None:
    with Terminal(words(tmp_path, "--write"), columns=200) as terminal:
        terminal.wait_for("the page: ")
        address = terminal.wait_for("\n")
        assert "write_file" in until(address, "page", 'id="step-1"')
        assert "a line" in asked(address, "entry/step-1")[1]
        refused = asked(address, "preview", {"what": "undo", "step": "1"})
        assert refused[0] == 409
        (tmp_path / "go").touch()
        terminal.wait_for("the page stays until Ctrl-C")
        assert asked(address, "preview", {"what": "undo", "step": "1"})[0] == 200
        terminal.type("\x03")
        assert terminal.end() == 0
    with pytest.raises(OSError, match="refused"):
        asked(address, "page")


def test_without_a_person_the_page_ends_with_the_run(tmp_path: Path) -> None:
    command = words(tmp_path, "--quiet", "--workspace", "memory", "--receipts", str(tmp_path / "calls.jsonl"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("the page: ")
        until(address, "page", "write_file")
        assert asked(address, "preview", {"what": "undo", "step": "1"})[0] in (404, 405)
        (tmp_path / "go").touch()
        assert process.wait(30) == 0
    with pytest.raises(OSError, match="refused"):
        asked(address, "page")


def test_a_page_whose_run_is_killed_ends(tmp_path: Path) -> None:
    with subprocess.Popen(words(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("the page: ")
        until(address, "page", "write_file")
        process.kill()
    end, said = time.monotonic() + 30, ""
    while time.monotonic() < end and "refused" not in said:
        try:
            asked(address, "page")
        except OSError as error:  # an answer may break off first
            said = str(error)
    assert "refused" in said


def test_what_is_about_a_page_needs_one(tmp_path: Path) -> None:
    done = ringfence_text("run", tmp_path / "tree", "--task", "x", "--model", "script:x", "--write")
    assert (done.returncode, "--write is for --view" in done.stderr) == (2, True)


def test_without_the_extra_nothing_is_begun(tmp_path: Path) -> None:
    start = "import sys; sys.modules['starlette'] = None; from ringfence_cli.main import main; main()"
    command = [sys.executable, "-c", start, *words(tmp_path)[3:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "extra 'view'" in done.stderr) == (2, True)
    assert not (tmp_path / "state").exists()
