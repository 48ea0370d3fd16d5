"""Somebody exchanges a file and a link in the very instant in which a call looks at it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfence import Prompt, PromptTemplate, Session, ToolExecutor
from ringfence_sandbox import HostFilesystem
from ringfence_tools import VfsToolsSection


@contextmanager
def just_before(called: object, turn: int, do: Callable[[], object]) -> Iterator[None]:
    """Have somebody act when a function of the system is about to be called for the `turn`-th time."""
    left = turn

    def on_event(frame: object, event: str, function: object) -> None:
        nonlocal left
        if event == "c_call" and function is called:
            left -= 1
            if left == 0:
                do()

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)


def to_link(root: Path) -> None:
    (root / "new").symlink_to("x")
    os.rename(root / "new", root / "f")


def to_file(root: Path) -> None:
    (root / "new").write_text("own")
    os.rename(root / "new", root / "f")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "x").write_text("of x")
    return tmp_path


def test_a_link_that_becomes_a_file_as_it_is_followed_is_that_file(root: Path) -> None:
    (root / "f").symlink_to("x")
    with HostFilesystem(root) as files, just_before(os.readlink, 1, lambda: to_file(root)):
        assert files.resolve("f") == "f"


def test_a_link_that_becomes_a_file_as_it_is_asked_for_its_target_has_none(root: Path) -> None:
    (root / "f").symlink_to("x")
    with (
        HostFilesystem(root) as files,
        just_before(os.readlink, 1, lambda: to_file(root)),
        pytest.raises(ValueError, match="not a symlink"),
    ):
        files.readlink("f")


def test_a_file_that_becomes_a_link_as_it_is_opened_is_to_be_read_again(root: Path) -> None:
    raised: list[OSError] = []
    with HostFilesystem(root) as files:
        for turn in range(1, 5):
            to_file(root)
            try:
                with just_before(os.open, turn, lambda: to_link(root)):
                    files.content_hash("f")
            except OSError as error:
                raised.append(error)
    assert {error.errno for error in raised} == {errno.ESTALE}
    assert all("read it again" in error.strerror for error in raised)


CALLS = {
    "read_file": {"file_path": "f"},
    "write_file": {"file_path": "f", "content": "new"},
    "edit_file": {"file_path": "f", "old_string": "o", "new_string": "n"},
    "apply_patch": {"patch": "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-own\n\\ No newline at end of file\n+new\n"},
    "move": {"source": "f", "target": "g"},
    "rm": {"path": "f"},
    "ls": {},
}


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("tool", CALLS)
@pytest.mark.parametrize("become", [to_file, to_link])
@pytest.mark.parametrize("called", [os.open, os.readlink])
def test_a_model_is_told_to_read_again_and_nobody_of_a_mistake(
    root: Path,
    tool: str,
    turn: int,
    become: Callable[[Path], None],
    called: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (to_link if become is to_file else to_file)(root)
    session = Session()
    with HostFilesystem(root) as files:
        prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[VfsToolsSection(session=session, filesystem=files)]))
        with prompt.resources, caplog.at_level(logging.INFO, logger="ringfence"):
            call = ToolExecutor(prompt=prompt, session=session).call
            call("read_file", {"file_path": "f"})
            with just_before(called, turn, lambda: become(root)):
                message = call(tool, CALLS[tool]).message
    assert all(words not in message for words in ("Too many levels", "Invalid argument", "could not decide"))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
