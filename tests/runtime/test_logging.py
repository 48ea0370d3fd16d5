"""What a program that sets no logging up sees on standard error: mistakes, not what a model is told and can mend."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringfence import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Session,
    Tool,
    ToolContext,
    ToolExecutor,
    ToolResult,
    ToolValidationError,
)
from ringfence.errors import TransactionError
from ringfence.filesystem import InMemoryFilesystem
from ringfence.runtime import Append
from ringfence_sandbox import HostFilesystem
from ringfence_tools import AstevalSection, VfsToolsSection


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (ToolValidationError("no"), None),
        (FileNotFoundError(errno.ENOENT, "gone", "a"), logging.DEBUG),
        (OSError(errno.ESTALE, "was changed by somebody else", "a"), logging.DEBUG),
        (OSError(errno.ELOOP, "goes round in circles", "a"), logging.DEBUG),
        (OSError(errno.ENOSPC, "full", "a"), logging.WARNING),
        (KeyError("a mistake"), logging.WARNING),
    ],
)
def test_what_a_model_can_mend_is_no_warning(
    error: Exception, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        raise error

    tool = Tool[None, None](name="a", description="d", handler=handler)
    section = MarkdownSection(title="T", template="x", tools=[tool])
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[section]))
    with prompt.resources, caplog.at_level(logging.DEBUG, logger="ringfence"):
        assert not ToolExecutor(prompt=prompt, session=Session()).call("a", {}).success
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert all(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {"file_path": "%/a"}),
        ("write_file", {"file_path": "%", "content": "x"}),
        ("edit_file", {"file_path": "%/a", "old_string": "a", "new_string": "b"}),
        ("apply_patch", {"patch": "--- /dev/null\n+++ b/%/a\n@@ -0,0 +1 @@\n+b\n"}),
        ("move", {"source": "f", "target": "%/a"}),
        ("rm", {"path": "%"}),
    ],
)
def test_a_name_that_ringfence_keeps_for_itself_is_told_and_is_no_warning(
    tool: str, arguments: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "f").touch()
    session = Session()
    with HostFilesystem(tmp_path) as files:
        files.write("made", "")
        (reserved,) = (path.name for path in tmp_path.glob(".ringfence-hold-*"))
        prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[VfsToolsSection(session=session, filesystem=files)]))
        asked = {name: value.replace("%", reserved) for name, value in arguments.items()}
        with prompt.resources, caplog.at_level(logging.INFO, logger="ringfence"):
            call = ToolExecutor(prompt=prompt, session=session).call
            call("read_file", {"file_path": "f"})
            message = call(tool, asked).message
    assert (reserved in message, "a name that displaced files wait under, and no path" in message) == (True, True)
    assert ("could not decide" in message, caplog.records) == (False, [])


@dataclass(frozen=True)
class Counted:
    by: int


def test_what_a_reducer_raises_in_a_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def failing(view: object, event: Counted, *, context: object) -> Append[Counted]:
        raise ZeroDivisionError

    def handler(params: Counted, *, context: ToolContext) -> ToolResult[None]:
        context.session.dispatch(params)
        return ToolResult.ok(None, "counted")

    session = Session()
    session[Counted].register(Counted, failing)
    tool = Tool[Counted, None](name="a", description="d", handler=handler)
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[MarkdownSection(title="T", template="x", tools=[tool])]))
    with prompt.resources:
        assert "cannot be kept" in ToolExecutor(prompt=prompt, session=session).call("a", {"by": 1}).message
    assert [(record.name, record.levelname) for record in caplog.records] == [("ringfence.session.slices", "ERROR")]


def test_what_a_handler_raises_itself_is_logged_whatever_its_cause_is(caplog: pytest.LogCaptureFixture) -> None:
    def handler(params: Counted, *, context: ToolContext) -> ToolResult[None]:
        raise TransactionError("the books do not balance") from ZeroDivisionError()

    tool = Tool[Counted, None](name="a", description="d", handler=handler)
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[MarkdownSection(title="T", template="x", tools=[tool])]))
    with prompt.resources:
        ToolExecutor(prompt=prompt, session=Session()).call("a", {"by": 1})
    assert [record.message for record in caplog.records] == ["a failed"]


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("read_file", {"file_path": "a\0b"}, "a path cannot have a NUL"),
        ("ls", {"path": "x" * 300}, "a name in a path has at most 255 bytes"),
        ("grep", {"pattern": "a", "path": "\ud800"}, "the arguments of grep do not fit"),
        ("move", {"source": "d", "target": "d/e"}, "a directory cannot be moved into itself"),
        ("evaluate_python", {"code": "1", "reads": [{"path": "binary"}]}, "binary is not utf-8 text"),
    ],
)
def test_what_a_model_writes_wrongly_is_no_warning(
    tool: str, arguments: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session()
    files = InMemoryFilesystem()
    files.mkdir("d")
    files.write_bytes("binary", b"\xff")
    sections = [VfsToolsSection(session=session, filesystem=files), AstevalSection(session=session)]
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=sections))
    with prompt.resources, caplog.at_level(logging.DEBUG, logger="ringfence"):
        result = ToolExecutor(prompt=prompt, session=session).call(tool, arguments)
    assert result.message.startswith(said)
    assert caplog.records == []
