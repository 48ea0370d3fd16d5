"""Texts of a prompt replaced from outside: what takes effect, what is stale, what is kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import capture_tree
from hypothesis import given
from hypothesis import strategies as st

from ringfence import serde
from ringfence.adapters import ScriptedAdapter
from ringfence.prompt import (
    LocalPromptOverridesStore,
    MarkdownSection,
    Prompt,
    PromptOverridesError,
    PromptTemplate,
    SectionOverride,
    SectionVisibility,
    Tool,
    ToolContext,
    ToolExample,
    ToolOverride,
    ToolsSection,
)
from ringfence.runtime import PromptRendered, Session, SetVisibilityOverride


@dataclass(frozen=True)
class Find:
    what: str = field(metadata={"description": "What to find."})
    deep: bool = False


@dataclass(frozen=True)
class Found:
    path: str

    def render(self) -> str:
        return self.path


@dataclass(frozen=True)
class Style:
    tone: str = "kind"


def find(params: Find, *, context: ToolContext) -> Any:
    raise AssertionError


TOOL = Tool[Find, list[Found]](
    name="find",
    description="Find things.",
    handler=find,
    examples=(
        ToolExample("One.", Find("a"), [Found("x")]),
        ToolExample("Two.", Find("b"), [Found("y")]),
    ),
)
FIXED = Tool[Find, Found](name="fixed", description="Not to be changed.", handler=find, accepts_overrides=False)


def template(*, tool: Tool[Any, Any] = TOOL, body: str = "Be $tone.", ns: str = "team/app") -> PromptTemplate[Any]:
    return PromptTemplate(
        ns=ns,
        key="main",
        sections=[
            MarkdownSection[Style](title="Style", template=body, summary="Style."),
            ToolsSection(title="Tools", tools=[tool, FIXED], description="Use them."),
            MarkdownSection(title="Closed", template="Not to be changed.", accepts_overrides=False),
        ],
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalPromptOverridesStore:
    return LocalPromptOverridesStore(tmp_path / "overrides")


def write(store: LocalPromptOverridesStore, *overrides: SectionOverride | ToolOverride, tag: str = "latest") -> None:
    """Write a file as a person would."""
    sections = [serde.dump(one) for one in overrides if isinstance(one, SectionOverride)]
    tools = [serde.dump(one) for one in overrides if isinstance(one, ToolOverride)]
    path = store.path("team/app", "main", tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"version": 3, "ns": "team/app", "prompt_key": "main", "tag": tag, "sections": sections, "tools": tools}
    path.write_text(json.dumps(parts))


def section_of(one: PromptTemplate[Any], key: str = "style", **texts: Any) -> SectionOverride:
    known = {each.path: each.content_hash for each in one.descriptor.sections}
    return SectionOverride((key,), known[(key,)], **texts)


def tool_of(one: PromptTemplate[Any], **texts: Any) -> ToolOverride:
    (known,) = one.descriptor.tools
    return ToolOverride("find", known.contract_hash, **texts)


def rendered(store: Any, one: PromptTemplate[Any] | None = None, session: Session | None = None) -> Any:
    return Prompt(one or template(), overrides_store=store).render(session=session)


def test_a_descriptor_names_what_accepts_overrides_with_hashes() -> None:
    found = template().descriptor
    assert [(one.path, one.number) for one in found.sections] == [(("style",), "1"), (("tools",), "2")]
    assert [(one.path, one.name) for one in found.tools] == [(("tools",), "find")]
    hashes = [found.sections[0].content_hash, found.tools[0].contract_hash]
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in hashes)
    assert found == template().descriptor


@pytest.mark.parametrize(
    "changed",
    [
        replace(TOOL, description="Find other things."),
        Tool[Style, list[Found]](name="find", description="Find things.", handler=None),
        Tool[Find, Found](name="find", description="Find things.", handler=find),
    ],
    ids=["description", "params", "result"],
)
def test_a_contract_is_description_params_and_result(changed: Tool[Any, Any]) -> None:
    one = PromptTemplate[Any](ns="n", key="k", sections=[ToolsSection(title="T", tools=[changed])])
    assert one.descriptor.tools[0].contract_hash != template().descriptor.tools[0].contract_hash


def test_without_overrides_a_prompt_is_what_it_is(store: LocalPromptOverridesStore) -> None:
    assert rendered(store) == rendered(None)


def test_a_section_s_text_is_replaced_and_is_a_template(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, body="Be very $tone, for $$1."))
    assert "## 1. Style (style)\n\nBe very kind, for $1." in rendered(store).text


def test_a_section_s_summary_and_visibility_are_replaced(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, body="Long.", summary="In short.", visibility=SectionVisibility.SUMMARY))
    assert "In short.\n\nThis is a summary." in rendered(store).text
    assert "Long." not in rendered(store).text
    session = Session()
    session.dispatch(SetVisibilityOverride(("style",), SectionVisibility.FULL))
    assert "Long." in rendered(store, session=session).text


def test_a_section_without_a_summary_gets_one(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, "tools", summary="T.", visibility=SectionVisibility.SUMMARY))
    assert [tool.name for tool in rendered(store).tools] == ["open_sections"]


def test_what_a_model_reads_of_a_summarised_section_is_the_override(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, body="Other.", visibility=SectionVisibility.SUMMARY))
    turns = [{"tool_calls": [{"name": "read_section", "arguments": {"section_key": "style"}}]}, {"text": "done"}]
    adapter = ScriptedAdapter(turns)
    adapter.evaluate(Prompt(one, overrides_store=store), session=Session())
    assert "Other." in adapter.requests[1]["messages"][-1]["content"]


def test_a_tool_s_texts_reach_the_provider(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, tool_of(one, description="Look around.", param_descriptions={"deep": "How deep."}))
    adapter, session = ScriptedAdapter([{"text": "done"}]), Session()
    adapter.evaluate(Prompt(one, overrides_store=store), session=session)
    sent = {tool["function"]["name"]: tool["function"] for tool in adapter.requests[0]["tools"]}
    assert sent["find"]["description"] == "Look around."
    assert sent["find"]["parameters"]["properties"]["what"]["description"] == "What to find."
    assert sent["find"]["parameters"]["properties"]["deep"]["description"] == "How deep."
    assert "description" not in sent["fixed"]["parameters"]["properties"]["deep"]
    assert "- find: Look around." in adapter.requests[0]["messages"][0]["content"]
    event = session[PromptRendered].latest()
    assert event is not None
    assert event.descriptor == one.descriptor


# Stale and wrong


def stale(store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture, now: PromptTemplate[Any]) -> Any:
    write(store, section_of(ONE, body="Old."), tool_of(ONE, description="Old."))
    with caplog.at_level(logging.WARNING):
        return rendered(store, now)


def test_what_is_stale_is_left_out_with_a_log_and_the_rest_takes_effect(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    result = stale(store, caplog, template(body="Be $tone, now."))
    assert "Be kind, now." in result.text
    assert result.tools[0].description == "Old."
    assert "section style: it has changed since" in caplog.text


def test_a_changed_tool_keeps_its_own_texts(store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture) -> None:
    result = stale(store, caplog, template(tool=replace(TOOL, description="New.")))
    assert result.tools[0].description == "New."
    assert "tool find: it has changed since" in caplog.text


def test_a_log_is_written_once_and_not_with_every_rendering(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Prompt(template(body="New."), overrides_store=store)
    stale(store, caplog, prompt.template)
    for _ in range(3):
        prompt.render()
    assert caplog.text.count("section style") == 1


ONE = template()
HASH = "0" * 64


@pytest.mark.parametrize(
    "override",
    [
        SectionOverride(("style",), HASH, "x"),
        SectionOverride(("closed",), HASH, "x"),
        SectionOverride(("nowhere",), HASH, "x"),
        section_of(ONE, body="It costs 5 $."),
        section_of(ONE, summary="${"),
        section_of(ONE, body="Be $nothing."),
        section_of(ONE, "tools", visibility=SectionVisibility.SUMMARY, body="Not these."),
        ToolOverride("find", HASH),
        ToolOverride("fixed", HASH),
        tool_of(ONE, description=""),
        tool_of(ONE, description="x" * 201),
        tool_of(ONE, description="caf\u00e9"),
        tool_of(ONE, param_descriptions={"nothing": "x"}),
        tool_of(ONE, param_descriptions={"what": "x" * 201}),
    ],
    ids=lambda override: type(override).__name__,
)
def test_what_does_not_fit_is_left_out(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture, override: SectionOverride | ToolOverride
) -> None:
    write(store, override)
    assert rendered(store) == rendered(None)
    assert "is left out: " in caplog.text


# The files


@dataclass(frozen=True)
class Wordy:
    what: str = field(metadata={"description": "x" * 201})
    where: str = field(metadata={"description": "In which caf\u00e9."})
    deep: bool = field(default=False, metadata={"description": "How deep."})


def test_all_that_is_seeded_fits(store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool[Wordy, None](name="find", description="Find things.", handler=None)
    prompt = Prompt(PromptTemplate(ns="a", key="b", sections=[ToolsSection(title="Tools", tools=[tool])]))
    seeded = store.seed(prompt)
    assert store.resolve(prompt.descriptor) == seeded
    assert caplog.text == ""
    assert seeded.tools[0].param_descriptions == {"deep": "How deep."}


def test_seeding_writes_the_prompt_s_own_texts_once(store: LocalPromptOverridesStore) -> None:
    prompt = Prompt(template(), overrides_store=store)
    plain = rendered(None)
    seeded = store.seed(prompt)
    assert [one.body for one in seeded.sections] == ["Be $tone.", "Use them."]
    assert seeded.tools[0].param_descriptions == {"what": "What to find."}
    assert prompt.render() == plain
    write(store, section_of(ONE, body="Edited."))
    before = store.path("team/app", "main", "latest").read_bytes()
    assert [one.body for one in store.seed(prompt).sections] == ["Edited."]
    assert store.path("team/app", "main", "latest").read_bytes() == before


def test_a_file_that_a_person_edits_takes_effect_at_the_next_rendering(store: LocalPromptOverridesStore) -> None:
    prompt = Prompt(template(), overrides_store=store)
    store.seed(prompt)
    path = store.path("team/app", "main", "latest")
    assert path == store.root / "team" / "app" / "main" / "latest.json"
    assert "Be kind." in prompt.render().text
    path.write_text(path.read_text().replace("Be $tone.", "Stay $tone, please."))
    assert "Stay kind, please." in prompt.render().text
    path.unlink()
    assert "Be kind." in prompt.render().text


def test_an_edit_that_leaves_size_and_time_as_they_were_takes_effect(store: LocalPromptOverridesStore) -> None:
    prompt = Prompt(template(), overrides_store=store)
    store.seed(prompt)
    path = store.path("team/app", "main", "latest")
    found = path.stat()
    assert "Be kind." in prompt.render().text
    path.write_text(path.read_text().replace("Be $tone.", "Ho $tone."))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert "Ho kind." in prompt.render().text


def test_the_same_object_is_resolved_while_nothing_changes(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, body="New."))
    first = store.resolve(one.descriptor)
    assert store.resolve(one.descriptor) is first
    os.utime(store.path("team/app", "main", "latest"), (0, 0))
    assert store.resolve(one.descriptor) is store.resolve(one.descriptor) is first


def test_tags_are_apart(store: LocalPromptOverridesStore) -> None:
    one = template()
    write(store, section_of(one, body="Stable."), tag="stable")
    assert "Be kind." in rendered(store).text
    assert "Stable." in Prompt(one, overrides_store=store, overrides_tag="stable").render().text
    assert "Be kind." in Prompt(one, overrides_store=store, overrides_tag="").render().text


@pytest.mark.parametrize(
    ("ns", "key", "tag"), [("..", "k", "t"), ("a//b", "k", "t"), ("n", "../x", "t"), ("n", "k", ""), ("N", "k", "t")]
)
def test_names_that_make_no_path_are_refused(store: LocalPromptOverridesStore, ns: str, key: str, tag: str) -> None:
    with pytest.raises(PromptOverridesError):
        store.path(ns, key, tag)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 1, "ns": "team/app", "prompt_key": "main"}',
        '{"version": 3, "ns": "team/app", "prompt_key": "main", "more": 1}',
        '{"version": 3, "ns": "team/app", "prompt_key": "main", "sections": [{"path": "style"}]}',
    ],
)
def test_a_file_that_cannot_be_understood_is_an_error_that_names_it(
    store: LocalPromptOverridesStore, content: str
) -> None:
    path = store.path("team/app", "main", "latest")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(PromptOverridesError, match=r"latest\.json"):
        rendered(store)


@pytest.mark.parametrize(
    "made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
)
def test_what_is_no_file_is_an_error_and_not_waited_for(store: LocalPromptOverridesStore, made: Any) -> None:
    path = store.path("team/app", "main", "latest")
    path.parent.mkdir(parents=True)
    made(path)
    with pytest.raises(PromptOverridesError, match="cannot be read"):
        rendered(store)


@pytest.mark.parametrize("link", ["team", "team/app", "team/app/main", "team/app/main/latest.json"])
def test_nothing_is_read_or_written_where_a_link_leads_out(
    store: LocalPromptOverridesStore, tmp_path: Path, link: str
) -> None:
    elsewhere = LocalPromptOverridesStore(tmp_path / "elsewhere")
    write(elsewhere, section_of(ONE, body="Theirs."))
    before = capture_tree(elsewhere.root)
    (store.root / link).parent.mkdir(parents=True)
    (store.root / link).symlink_to(elsewhere.root / link)
    for work in (lambda: rendered(store), lambda: store.seed(Prompt(ONE))):
        with pytest.raises(PromptOverridesError, match="a link leads out of"):
            work()
    assert capture_tree(elsewhere.root) == before


def test_the_root_in_a_repository_is_not_led_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository/.git").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "repository/.ringfence").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "repository")
    with pytest.raises(PromptOverridesError, match="a link leads out of"):
        LocalPromptOverridesStore().seed(Prompt(ONE))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_link_that_stays_below_the_root_is_followed(store: LocalPromptOverridesStore) -> None:
    write(store, section_of(ONE, body="Kept."), tag="v2")
    store.path("team/app", "main", "latest").symlink_to("v2.json")
    assert "Kept." in rendered(store).text


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(store: LocalPromptOverridesStore) -> None:
    store.root.mkdir()
    (store.root / "team").write_text("")
    with pytest.raises(PromptOverridesError, match=r"latest\.json"):
        store.seed(Prompt(ONE))
    assert [path.name for path in store.root.iterdir()] == ["team"]


def test_without_a_root_the_git_repository_around_has_them(tmp_path: Path) -> None:
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "sub").mkdir()
    program = "from ringfence.prompt import LocalPromptOverridesStore as S; print(S().root)"
    run = [sys.executable, "-c", program]
    inside = subprocess.run(run, cwd=tmp_path / "repo" / "sub", capture_output=True, text=True)
    assert inside.stdout.strip() == str(tmp_path / "repo" / ".ringfence" / "prompts" / "overrides")
    outside = subprocess.run(run, cwd="/", capture_output=True, text=True)
    assert "in no git repository" in outside.stderr


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda text: text.replace("$", "$$"))


@given(TEXTS, TEXTS)
def test_any_text_comes_back_from_the_file_as_it_was(body: str, summary: str) -> None:
    with tempfile.TemporaryDirectory(prefix="overrides-") as directory:
        store = LocalPromptOverridesStore(directory)
        write(store, section_of(ONE, body=body, summary=summary))
        resolved = LocalPromptOverridesStore(directory).resolve(ONE.descriptor)
        assert resolved is not None
        (one,) = resolved.sections
        assert (one.body, one.summary) == (body, summary)
        assert body.replace("$$", "$").strip() in rendered(store).text
        assert json.loads(store.path("team/app", "main", "latest").read_text())["version"] == 3
