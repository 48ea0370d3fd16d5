"""What a program that sets no logging up sees on standard error: mistakes, not what a model is told and can mend."""

from __future__ import annotations

import errno
import logging

import pytest

from ringfence import MarkdownSection, Prompt, PromptTemplate, Session, Tool, ToolContext, ToolExecutor, ToolResult
from ringfence.errors import ToolValidationError


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (ToolValidationError("no"), None),
        (FileNotFoundError(errno.ENOENT, "gone", "a"), logging.DEBUG),
        (OSError(errno.ESTALE, "was changed by somebody else", "a"), logging.DEBUG),
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
