"""What a person at a terminal sees while the first opening of a large directory takes its time."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from agent_runs import CLEARED, recording

from ringfence_sandbox import Workspace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_terminal_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def said(stream: io.StringIO, *, quiet: bool = False) -> str:
    """What is written of a scan that looks at a thousand files in every fifth of a second, for two seconds."""
    times = iter([n / 5 for n in range(11)])
    with recording(quiet=quiet, stream=stream, clock=times.__next__) as show:
        for n in range(10):
            show(1000 * (n + 1))
    return stream.getvalue()


def test_after_a_second_a_terminal_is_told_how_far_it_is_and_nothing_stays_of_that() -> None:
    written = said(Terminal())
    lines = written.split(CLEARED)
    assert lines == ["", *(f"recording the tree: {n},000 files so far" for n in range(5, 11)), ""]


def test_an_opening_that_takes_no_time_says_nothing() -> None:
    stream = Terminal()
    with recording(stream=stream, clock=lambda: 0.0) as show:
        show(1)
    assert stream.getvalue() == ""


def test_nothing_is_written_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(io.StringIO()) == ""
    assert said(Terminal(), quiet=True) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert said(Terminal()) == ""


def test_an_opening_tells_of_every_file_that_takes_long(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(bytes(1 << 20))
    told: list[int] = []
    Workspace.open(tmp_path, progress=told.append).close()
    assert told == [0, 1, 2, 3]


def test_an_opening_tells_how_many_files_it_has_looked_at_and_later_looks_tell_nothing(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}").touch()
    (tmp_path / "below/it").mkdir(parents=True)
    told: list[int] = []
    with Workspace.open(tmp_path, progress=told.append) as workspace:
        assert told == [0, 128, 256, 300, 300]
        workspace.checkpoint("here")
        assert len(told) == 5
