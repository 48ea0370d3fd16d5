"""Ctrl-C at random instants of calls that change files on disk."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree
from effort import amount

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem
from ringfence.prompt import MarkdownSection, Prompt, Tool, ToolContext, ToolResult
from ringfence.runtime import Session
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem
from ringfence_workspace.transaction.heartbeat import LivenessFile

ROUNDS = amount(prove=20_000, test=120)


def act(params: None, *, context: ToolContext) -> ToolResult[None]:
    files = context.resources.get(Filesystem)
    for number in range(5):
        files.write(f"d{number}/a.txt", "x")
        files.move(f"d{number}", f"e{number}")
    files.write("kept.txt", "after")
    files.delete("e0", recursive=True)
    return ToolResult.error("and back")


@pytest.fixture
def swallowed() -> Iterator[None]:
    """An interrupt may land in a callback of the garbage collector or of a weak reference: Python only reports it."""
    reporting = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    yield
    sys.unraisablehook = reporting


@pytest.mark.usefixtures("swallowed")
def test_an_interrupted_call_leaves_nothing_behind(tmp_path: Path) -> None:
    root, store = tmp_path / "root", tmp_path / "store"
    root.mkdir()
    (root / "kept.txt").write_text("before")
    before, main, interrupted = capture_tree(root), threading.get_ident(), 0
    for number in range(ROUNDS):
        with HostFilesystem(root, store=store) as files:
            tool = Tool[None, None](name="act", description="Act.", handler=act)
            section = MarkdownSection(title="T", template="x", tools=[tool])
            prompt = Prompt(ns="t", key="t", sections=[section]).bind(resources={Filesystem: files})
            with prompt.resources:
                executor = ToolExecutor(prompt=prompt, session=Session())
                timer = threading.Timer(0.0001 + (number % 60) * 0.00006, signal.pthread_kill, (main, signal.SIGINT))
                try:
                    timer.start()
                    executor.call("act", {})
                    timer.join()  # inside, since it may come as late as here
                except KeyboardInterrupt:
                    interrupted += 1
                    timer.join()
        assert capture_tree(root) == before
    assert interrupted


def test_a_rollback_that_was_interrupted_at_its_end_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path / "root").mkdir()
    (root / "kept.txt").write_text("before")
    before, pause = (root / "kept.txt").stat().st_mtime_ns, LivenessFile.pause
    with HostFilesystem(root, store=tmp_path / "store") as files, held_call(files, opaque=True) as call:
        (root / "kept.txt").write_text("after")

        def interrupted(heartbeat: LivenessFile) -> None:
            monkeypatch.setattr(LivenessFile, "pause", pause)
            raise KeyboardInterrupt

        monkeypatch.setattr(LivenessFile, "pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call.rollback()
        assert call.rollback().conflicts == ()
    assert (root / "kept.txt").read_text() == "before"
    assert (root / "kept.txt").stat().st_mtime_ns == before
