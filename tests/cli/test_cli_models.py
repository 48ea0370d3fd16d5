"""`ringfence run` with the models of providers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_runs import RunStats
from command_line import ringfence_text
from provider_server import Failure, ProviderServer, Reply, Slow
from rich.console import Console

from ringfence.adapters import ModelText, ModelTurn, Turn
from ringfence_cli.live import View

EDIT = {
    "text": "I read it, then I change it.",
    "tool_calls": [
        {"name": "read_file", "arguments": {"file_path": "a.txt"}},
        {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "two", "new_string": "2"}},
    ],
    "usage": {"input_tokens": 1000, "output_tokens": 20},
}
DONE = {"text": "Two is 2 now.", "usage": {"input_tokens": 1100, "output_tokens": 9}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\ntwo\n")
    return tmp_path / "tree"


def run(tree: Path, spec: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    keys = ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    env = {**{name: value for name, value in os.environ.items() if name not in keys}, **environment}
    given = ("--task", "Do it.", "--model", spec, *arguments)
    return ringfence_text("run", tree, *given, env=env)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ("openai:m@{url}/v1", "/v1/chat/completions"),
        ("anthropic:m@{url}", "/v1/messages"),
    ],
)
def test_a_compatible_server_does_the_task(tree: Path, spec: str, path: str) -> None:
    with ProviderServer([EDIT, DONE]) as server:
        done = run(tree, spec.format(url=server.url))
    assert done.returncode == 0, done.stderr
    assert "+2" in done.stdout
    assert (tree / "a.txt").read_text() == "one\n2\n"
    assert "2,129 tokens" in done.stderr
    assert "Two is 2 now." in done.stderr
    assert {asked.path for asked in server.asked} == {path}


@pytest.mark.parametrize(
    ("spec", "variables", "path"),
    [
        ("openai:m", {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "of-mine"}, "/v1/responses"),
        ("anthropic:m", {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "of-mine"}, "/v1/messages"),
    ],
)
def test_keys_and_places_are_those_of_the_sdk(tree: Path, spec: str, variables: dict[str, str], path: str) -> None:
    with ProviderServer([EDIT, DONE]) as server:
        done = run(tree, spec, **{name: value.format(url=server.url) for name, value in variables.items()})
    assert done.returncode == 0, done.stderr
    assert {asked.path for asked in server.asked} == {path}
    assert "of-mine" in str(server.asked[0].headers)


@pytest.mark.parametrize("reply", [Failure(401, {"error": {"message": "who are you"}}), Failure(200, b"<html>")])
def test_a_provider_that_fails_is_exit_code_3(tree: Path, reply: Reply) -> None:
    with ProviderServer([EDIT, reply]) as server:
        done = run(tree, f"openai:m@{server.openai_url}")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert (tree / "a.txt").read_text() == "one\n2\n"  # what was committed before stays, and is in the history
    assert "ringfence undo" in done.stderr


def test_a_run_waits_as_long_as_its_provider_asks_and_says_so(tree: Path) -> None:
    busy = {"type": "error", "error": {"message": "slow down", "type": "rate_limit_error"}}
    with ProviderServer([Failure(429, busy, {"retry-after": "1"}), DONE]) as server:
        done = run(tree, f"anthropic:m@{server.url}")
    assert (done.returncode, "attempt 2 in 1 s" in done.stderr) == (0, True), done.stderr
    with ProviderServer([Failure(429, busy, {"retry-after": "45"})]) as server:
        done = run(tree, f"anthropic:m@{server.url}", "--deadline", "40s")
    assert (done.returncode, "in 45.0 s, after the deadline" in done.stderr) == (3, True), done.stderr


def test_a_budget_that_is_used_up_is_exit_code_5(tree: Path) -> None:
    with ProviderServer([EDIT, DONE]) as server:
        done = run(tree, f"anthropic:m@{server.url}", "--max-tokens", "500")
    assert done.returncode == 5


def test_a_provider_that_is_silent_is_exit_code_5_at_the_deadline(tree: Path) -> None:
    with ProviderServer([Slow(DONE, before=60)]) as server:
        done = run(tree, f"openai:m@{server.openai_url}", "--deadline", "3s")
    assert done.returncode == 5, done.stderr


def test_ctrl_c_while_a_model_writes_is_exit_code_130(tree: Path) -> None:
    slow = Slow({"text": "la " * 500}, between=0.1)
    with ProviderServer([EDIT, slow]) as server:
        spec = f"anthropic:m@{server.url}"
        command = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--task", "x", "--model", spec]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
            while len(server.asked) < 2 and running.poll() is None:
                time.sleep(0.05)
            time.sleep(0.3)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert (tree / "a.txt").read_text() == "one\n2\n"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("openai:m", "set the environment variable OPENAI_API_KEY"),
        ("anthropic:m", "set the environment variable ANTHROPIC_API_KEY"),
        ("openai:m@localhost:8080", "http://"),
        ("openai:@http://localhost:8080", "MODEL@BASE_URL"),
        ("openai:m@http://localhost:port", "https://HOST:PORT"),
        ("anthropic:m@http://localhost:65536", "https://HOST:PORT"),
        ("openai:m@http://\x1b", "https://HOST"),
        ("anthropic:m@https://", "https://HOST"),
        ("openai:", "openai:MODEL"),
        ("gemini:m", "openai:MODEL"),
    ],
)
def test_what_is_missing_is_said_before_anything_happens(tree: Path, spec: str, said: str) -> None:
    done = run(tree, spec)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "api_key" not in done.stderr, "a command line has none"


def test_a_package_that_is_missing_is_named(tree: Path) -> None:
    code = "import sys; sys.modules['openai'] = None; from ringfence_cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", str(tree), "--task", "x", "--model", "openai:m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ringfence's extra 'openai' needs: pip install" in " ".join(done.stderr.split())


def shown(view: View) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(view._region())
    return out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_model_still_writes_is_in_the_live_view() -> None:
    view = View(Terminal(), RunStats(), Path())  # type: ignore[arg-type]
    for text in ("Let me ", "look\x1b[2J at", " it"):
        view.text(ModelText("p", 1, text))
    assert "Let me look" in shown(view)
    assert "\x1b[2J" not in shown(view)
    view.text(ModelText("p", 1, "Again", attempt=2))
    assert "Again" in shown(view)
    assert "Let me" not in shown(view)
    view.text(ModelText("p", 1, "x\n" * 100_000, attempt=2))
    assert len(shown(view).splitlines()) < 6
    view.turn(ModelTurn("p", 1, Turn("Again.")))
    assert "Again" not in shown(view)
