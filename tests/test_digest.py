"""The workspace in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.adapters import ScriptedAdapter
from ringfence.prompt import LocalPromptOverridesStore, Prompt
from ringfence.runtime import Session
from ringfence_tools import (
    WorkspaceDigest,
    WorkspaceDigestSection,
    clear_workspace_digest,
    latest_workspace_digest,
    set_workspace_digest,
)

KEY = "workspace-digest"


def prompt(session: Session, **options: Any) -> Prompt[Any]:
    one: Prompt[Any] = Prompt(ns="n", key="k", sections=[WorkspaceDigestSection(session=session)])
    return Prompt(one.template, **options) if options else one


def test_without_a_digest_there_is_a_placeholder_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rendered = prompt(Session()).render()
    assert "There is no digest of the workspace yet" in rendered.text
    assert rendered.tools == ()
    assert "no digest" in caplog.text


def test_a_digest_is_shown_in_short_and_read_as_it_is() -> None:
    session = Session()
    set_workspace_digest(session, KEY, "Costs $5.\n# ${all} of it", summary="A $mall one.")
    one = prompt(session)
    assert "A $mall one.\n\nThis is a summary." in one.render(session=session).text
    turns = [{"tool_calls": [{"name": "read_section", "arguments": {"section_key": KEY}}]}, {"text": "done"}]
    adapter = ScriptedAdapter(turns)
    adapter.evaluate(one, session=session)
    assert "Costs $5.\n# ${all} of it" in adapter.requests[1]["messages"][-1]["content"]


def test_a_key_has_one_digest_at_a_time() -> None:
    session = Session()
    set_workspace_digest(session, " Workspace-Digest ", "one")
    set_workspace_digest(session, "other", "two")
    latest = set_workspace_digest(session, KEY, "three")
    assert latest_workspace_digest(session, KEY) == latest
    assert "5 characters" in latest.summary
    assert len(session[WorkspaceDigest].all()) == 2
    clear_workspace_digest(session, KEY)
    assert latest_workspace_digest(session, KEY) is None
    assert latest_workspace_digest(session, "other") is not None
    with pytest.raises(ValueError, match="section key"):
        set_workspace_digest(session, "no key!", "x")


def test_a_section_shows_its_own_session_s_digest_and_a_clone_its_own() -> None:
    mine, other = Session(), Session()
    section = WorkspaceDigestSection(session=mine)
    set_workspace_digest(mine, KEY, "mine", summary="Of mine.")
    cloned: Prompt[Any] = Prompt(ns="n", key="k", sections=[section.clone(session=other)])
    assert "no digest" in cloned.render(session=mine).text
    assert "Of mine." in prompt(mine).render(session=other).text


def test_an_override_counts_while_there_is_no_digest(tmp_path: Path) -> None:
    session, store = Session(), LocalPromptOverridesStore(tmp_path)
    one = prompt(session, overrides_store=store)
    store.seed(one)
    path = store.path(one.ns, one.key, "latest")
    path.write_text(path.read_text().replace(one.find_section(WorkspaceDigestSection).placeholder, "Ask somebody."))
    assert "Ask somebody." in one.render(session=session).text
    set_workspace_digest(session, KEY, "known", summary="In short.")
    assert "In short." in one.render(session=session).text
    assert "Ask somebody." not in one.render(session=session).text
