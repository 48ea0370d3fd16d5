"""Texts of a prompt replaced from outside: what takes effect, what is stale, what is kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.adapters import ScriptedAdapter
from ringfence.prompt import (
    LocalPromptOverridesStore,
    MarkdownSection,
    Prompt,
    PromptOverride,
    PromptOverridesError,
    PromptTemplate,
    Section,
    SectionOverride,
    SectionVisibility,
    TaskExample,
    TaskExampleOverride,
    TaskExamplesSection,
    TaskStep,
    Tool,
    ToolContext,
    ToolExample,
    ToolExampleOverride,
    ToolOverride,
    ToolsSection,
)
from ringfence.prompt.overrides import descriptor_of, problems
from ringfence.runtime import PromptRendered, Session
from ringfence.runtime.reducers import SetVisibilityOverride
from ringfence.testing.printed import capture_tree


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
TASK = TaskExample(key="first", objective="Do it.", outcome="Done so.", steps=[TaskStep("find", TOOL.examples[0])])


def template(*, tool: Tool[Any, Any] = TOOL, body: str = "Be $tone.", ns: str = "team/app") -> PromptTemplate[Any]:
    return PromptTemplate(
        ns=ns,
        key="main",
        sections=[
            MarkdownSection[Style](title="Style", template=body, summary="Style."),
            ToolsSection(title="Tools", tools=[tool, FIXED], description="Use them."),
            MarkdownSection(title="Closed", template="Not to be changed.", accepts_overrides=False),
            TaskExamplesSection(examples=[TASK]),
        ],
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalPromptOverridesStore:
    return LocalPromptOverridesStore(tmp_path / "overrides")


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
    assert [(one.name, len(one.example_hashes)) for one in found.tools] == [("find", 2)]
    assert [(one.path, one.index) for one in found.task_examples] == [(("task-examples",), 0)]
    hashes = [found.sections[0].content_hash, found.tools[0].contract_hash, found.task_examples[0].content_hash]
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in hashes)
    assert found == descriptor_of(template())


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
    before = template().descriptor.tools[0].contract_hash
    assert (
        descriptor_of(PromptTemplate(ns="n", key="k", sections=[ToolsSection(title="T", tools=[changed])]))
        .tools[0]
        .contract_hash
        != before
    )


def test_without_overrides_a_prompt_is_what_it_is(store: LocalPromptOverridesStore) -> None:
    assert rendered(store) == rendered(None)


def test_a_section_s_text_is_replaced_and_is_a_template(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(one.descriptor, section_of(one, body="Be very $tone, for $$1."))
    assert "## 1. Style (style)\n\nBe very kind, for $1." in rendered(store).text


def test_a_section_s_summary_and_visibility_are_replaced(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(
        one.descriptor, section_of(one, body="Long.", summary="In short.", visibility=SectionVisibility.SUMMARY)
    )
    assert "In short.\n\nThis is a summary." in rendered(store).text
    assert "Long." not in rendered(store).text
    session = Session()
    session.dispatch(SetVisibilityOverride(("style",), SectionVisibility.FULL))
    assert "Long." in rendered(store, session=session).text


def test_a_section_without_a_summary_gets_one(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(one.descriptor, section_of(one, "tools", summary="T.", visibility=SectionVisibility.SUMMARY))
    assert [tool.name for tool in rendered(store).tools] == ["open_sections"]


def test_what_a_model_reads_of_a_summarised_section_is_the_override(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(one.descriptor, section_of(one, body="Other.", visibility=SectionVisibility.SUMMARY))
    turns = [{"tool_calls": [{"name": "read_section", "arguments": {"section_key": "style"}}]}, {"text": "done"}]
    adapter = ScriptedAdapter(turns)
    adapter.evaluate(Prompt(one, overrides_store=store), session=Session())
    assert "Other." in adapter.requests[1]["messages"][-1]["content"]


def test_a_tool_s_texts_reach_the_provider(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(one.descriptor, tool_of(one, description="Look around.", param_descriptions={"deep": "How deep."}))
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


def test_examples_are_changed_removed_and_added(store: LocalPromptOverridesStore) -> None:
    one = template()
    first, second = one.descriptor.tools[0].example_hashes
    changes = (
        ToolExampleOverride(0, first, description="Another.", input={"what": "z", "deep": True}),
        ToolExampleOverride(1, second, remove=True),
        ToolExampleOverride(description="Third.", input={"what": "c"}, output=[{"path": "p"}, {"path": "q"}]),
    )
    store.store(one.descriptor, tool_of(one, examples=changes))
    (tool, _) = rendered(store).tools
    assert [example.description for example in tool.examples] == ["Another.", "Third."]
    assert tool.examples[0].input == Find("z", deep=True)
    assert tool.examples[1].output == (Found("p"), Found("q"))
    assert "Third." in rendered(store).text
    assert "Two." not in rendered(store).text


def test_a_task_example_is_changed_or_removed(store: LocalPromptOverridesStore) -> None:
    one = template()
    (known,) = one.descriptor.task_examples
    change = TaskExampleOverride(known.path, 0, known.content_hash, objective="Do that.", outcome="So it $is.")
    store.store(one.descriptor, change)
    assert "Objective: Do that." in rendered(store).text
    assert "So it $is." in rendered(store).text
    store.store(one.descriptor, replace(change, remove=True))
    assert "Objective" not in rendered(store).text


# Stale and wrong


def stale(store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture, now: PromptTemplate[Any]) -> Any:
    one = template()
    store.store(one.descriptor, section_of(one, body="Old."))
    store.store(one.descriptor, tool_of(one, description="Old."))
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


def test_a_file_with_a_text_that_is_no_template_keeps_nothing_from_being_rendered(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.seed(Prompt(ONE))
    path = store.path("team/app", "main", "latest")
    path.write_text(path.read_text().replace("Be $tone.", "Be $ $tone."))
    assert "Be kind." in rendered(store).text
    assert "section style: a $ in it begins no name; write $$" in caplog.text


def test_a_section_without_a_summary_is_not_summarised(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.store(ONE.descriptor, section_of(ONE, "tools", visibility=SectionVisibility.SUMMARY, body="Not these."))
    assert "Use them." in rendered(store).text
    assert "section tools is left out: it is to be summarised, but there is no summary" in caplog.text


def test_a_log_is_written_once_and_not_with_every_rendering(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Prompt(template(body="New."), overrides_store=store)
    stale(store, caplog, prompt.template)
    for _ in range(3):
        prompt.render()
    assert caplog.text.count("section style") == 1


def test_what_only_shows_itself_in_use_is_left_out_too(
    store: LocalPromptOverridesStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = template()
    store.store(one.descriptor, section_of(one, body="Be $nothing."))
    example = ToolExampleOverride(description="Bad.", input={"nothing": 1}, output=[])
    store.store(one.descriptor, tool_of(one, examples=(example,)))
    result = rendered(store)
    assert "Be kind." in result.text
    assert len(result.tools[0].examples) == 2
    assert "its params have no nothing" in caplog.text


ONE = template()
HASH = "0" * 64


@pytest.mark.parametrize(
    "override",
    [
        SectionOverride(("style",), HASH, "x"),
        SectionOverride(("closed",), HASH, "x"),
        SectionOverride(("nowhere",), HASH, "x"),
        ToolOverride("find", HASH),
        ToolOverride("fixed", HASH),
        section_of(ONE, body="It costs 5 $."),
        section_of(ONE, summary="${"),
        tool_of(ONE, description=""),
        tool_of(ONE, description="x" * 201),
        tool_of(ONE, description="caf\u00e9"),
        tool_of(ONE, param_descriptions={"nothing": "x"}),
        tool_of(ONE, param_descriptions={"what": "x" * 201}),
        tool_of(ONE, examples=(ToolExampleOverride(7, HASH),)),
        tool_of(ONE, examples=(ToolExampleOverride(0, HASH),)),
        tool_of(ONE, examples=(ToolExampleOverride(remove=True),)),
        TaskExampleOverride(("task-examples",), 1, HASH),
        TaskExampleOverride(("task-examples",), 0, HASH),
        replace(
            TaskExampleOverride(("task-examples",), 0, ONE.descriptor.task_examples[0].content_hash), objective="\u00e9"
        ),
    ],
    ids=lambda override: type(override).__name__,
)
def test_what_does_not_fit_is_refused_when_it_is_stored(store: LocalPromptOverridesStore, override: Any) -> None:
    with pytest.raises(PromptOverridesError):
        store.store(ONE.descriptor, override)
    with pytest.raises(PromptOverridesError):
        store.upsert(ONE.descriptor, PromptOverride("team/app", "main").with_one(override))
    assert store.resolve(ONE.descriptor) is None


def test_overrides_of_another_prompt_are_refused(store: LocalPromptOverridesStore) -> None:
    with pytest.raises(PromptOverridesError, match="not of team/app:main"):
        store.upsert(ONE.descriptor, PromptOverride("team/app", "other"))


# The files


@dataclass(frozen=True)
class Wordy:
    what: str = field(metadata={"description": "x" * 201})
    where: str = field(metadata={"description": "In which caf\u00e9."})
    deep: bool = field(default=False, metadata={"description": "How deep."})


def test_all_that_is_seeded_fits(store: LocalPromptOverridesStore) -> None:
    tool = Tool[Wordy, None](name="find", description="Find things.", handler=None)
    prompt = Prompt(PromptTemplate(ns="a", key="b", sections=[ToolsSection(title="Tools", tools=[tool])]))
    seeded = store.seed(prompt)
    assert problems(prompt.descriptor, seeded) == {}
    assert seeded.tools[0].param_descriptions == {"deep": "How deep."}


def test_seeding_writes_the_prompt_s_own_texts_once(store: LocalPromptOverridesStore) -> None:
    prompt = Prompt(template(), overrides_store=store)
    plain = rendered(None)
    seeded = store.seed(prompt)
    assert [one.body for one in seeded.sections] == ["Be $tone.", "Use them."]
    assert seeded.tools[0].param_descriptions == {"what": "What to find."}
    assert prompt.render() == plain
    store.store(ONE.descriptor, section_of(ONE, body="Edited."))
    before = store.path("team/app", "main", "latest").read_bytes()
    assert [one.body for one in store.seed(prompt).sections] == ["Edited.", "Use them."]
    assert store.path("team/app", "main", "latest").read_bytes() == before


def test_a_file_that_a_person_edits_takes_effect_at_the_next_rendering(store: LocalPromptOverridesStore) -> None:
    prompt = Prompt(template(), overrides_store=store)
    store.seed(prompt)
    path = store.path("team/app", "main", "latest")
    assert path == store.root / "team" / "app" / "main" / "latest.json"
    assert "Be kind." in prompt.render().text
    path.write_text(path.read_text().replace("Be $tone.", "Stay $tone, please."))
    assert "Stay kind, please." in prompt.render().text
    store.delete(ns="team/app", prompt_key="main")
    store.delete(ns="team/app", prompt_key="main")
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
    store.store(one.descriptor, section_of(one, body="New."))
    first = store.resolve(one.descriptor)
    assert store.resolve(one.descriptor) is first
    os.utime(store.path("team/app", "main", "latest"), (0, 0))
    assert store.resolve(one.descriptor) is store.resolve(one.descriptor) is first


def test_storing_one_leaves_what_is_stale_in_the_file(store: LocalPromptOverridesStore) -> None:
    old, new = template(), template(body="Be very $tone.")
    store.store(old.descriptor, section_of(old, body="Somebody's work."))
    store.store(new.descriptor, tool_of(new, description="Another."))
    resolved = store.resolve(new.descriptor)
    assert resolved is not None
    assert (resolved.sections, len(resolved.tools)) == ((), 1)
    back = LocalPromptOverridesStore(store.root).resolve(old.descriptor)
    assert back is not None
    assert [each.body for each in back.sections] == ["Somebody's work."]


def test_tags_are_apart(store: LocalPromptOverridesStore) -> None:
    one = template()
    store.store(one.descriptor, section_of(one, body="Stable."), "stable")
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
        '{"version": 2, "ns": "team/app", "prompt_key": "main", "more": 1}',
        '{"version": 2, "ns": "team/app", "prompt_key": "main", "sections": [{"path": "style"}]}',
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


def test_the_lock_is_made_through_no_link(store: LocalPromptOverridesStore, tmp_path: Path) -> None:
    store.root.mkdir(parents=True, exist_ok=True)
    (store.root / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PromptOverridesError, match="cannot be kept"):
        store.seed(Prompt(ONE))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("link", ["team", "team/app", "team/app/main", "team/app/main/latest.json"])
def test_nothing_is_read_written_or_deleted_where_a_link_leads_out(
    store: LocalPromptOverridesStore, tmp_path: Path, link: str
) -> None:
    elsewhere = LocalPromptOverridesStore(tmp_path / "elsewhere")
    elsewhere.store(ONE.descriptor, section_of(ONE, body="Theirs."))
    before = capture_tree(elsewhere.root)
    (store.root / link).parent.mkdir(parents=True)
    (store.root / link).symlink_to(elsewhere.root / link)
    for work in (
        lambda: rendered(store),
        lambda: store.store(ONE.descriptor, section_of(ONE, body="Mine.")),
        lambda: store.seed(Prompt(ONE)),
    ):
        with pytest.raises(PromptOverridesError, match="a link leads out of .*; put what it leads to in its place"):
            work()
    with suppress(PromptOverridesError):  # the link itself is in the root
        store.delete(ns="team/app", prompt_key="main")
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
    store.store(ONE.descriptor, section_of(ONE, body="Kept."), "v2")
    store.path("team/app", "main", "latest").symlink_to("v2.json")
    assert "Kept." in rendered(store).text


def test_a_write_that_fails_leaves_what_there_was_and_no_file_of_its_own(store: LocalPromptOverridesStore) -> None:
    store.store(ONE.descriptor, section_of(ONE, body="Kept."))
    folder = store.path("team/app", "main", "latest").parent
    broken = section_of(ONE, body="\udcff")  # kept as an escape, so this one is written
    store.store(ONE.descriptor, broken)
    os.mkdir(store.path("team/app", "main", "other"))
    with pytest.raises(PromptOverridesError):
        store.upsert(ONE.descriptor, PromptOverride("team/app", "main", "other"))
    assert sorted(path.name for path in folder.iterdir()) == ["latest.json", "other.json"]


def test_many_writers_lose_nothing(store: LocalPromptOverridesStore) -> None:
    sections: list[Section[Any]] = [MarkdownSection(title=f"S{n}", template=f"Text {n}.") for n in range(20)]
    one = PromptTemplate[None](ns="n", key="k", sections=sections)
    hashes = {each.path: each.content_hash for each in one.descriptor.sections}

    def write(number: int) -> None:
        own = LocalPromptOverridesStore(store.root)
        own.store(one.descriptor, SectionOverride((f"s{number}",), hashes[(f"s{number}",)], f"New {number}."))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    resolved = store.resolve(one.descriptor)
    assert resolved is not None
    assert {each.body for each in resolved.sections} == {f"New {n}." for n in range(20)}


SECTIONS = PromptTemplate[None](
    ns="n", key="k", sections=[MarkdownSection(title=f"S{n}", template=f"Text {n}.") for n in range(3)]
)
WRITES = st.lists(st.sampled_from(["s0", "s1", "s2", "delete"]), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(st.lists(WRITES, min_size=2, max_size=4))
def test_writers_at_once_come_to_what_one_after_the_other_could(plans: list[list[str]]) -> None:
    """Every writer says in each text whose it is and the how many-th."""
    hashes = {each.path: each.content_hash for each in SECTIONS.descriptor.sections}
    problems: list[BaseException] = []
    done = threading.Event()

    def write(root: str, writer: int, plan: Sequence[str]) -> None:
        own = LocalPromptOverridesStore(root)
        for number, key in enumerate(plan):
            if key == "delete":
                own.delete(ns="n", prompt_key="k")
            else:
                body = f"{writer}.{number}."
                own.store(SECTIONS.descriptor, SectionOverride((key,), hashes[(key,)], body))

    def bodies(one: PromptOverride | None) -> dict[str, str | None]:
        return {} if one is None else {each.path[0]: each.body for each in one.sections}

    def read(root: str) -> None:
        own = LocalPromptOverridesStore(root)
        while not done.is_set():
            for key, body in bodies(own.resolve(SECTIONS.descriptor)).items():
                writer, number, _ = str(body).split(".")
                assert plans[int(writer)][int(number)] == key

    def caught(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            problems.append(error)

    with tempfile.TemporaryDirectory(prefix="overrides-") as root:
        reader = threading.Thread(target=caught, args=(read, root))
        writers = [threading.Thread(target=caught, args=(write, root, n, plan)) for n, plan in enumerate(plans)]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        reader.join()
        assert problems == []
        final = bodies(LocalPromptOverridesStore(root).resolve(SECTIONS.descriptor))
        assert [path.name for path in Path(root).rglob(".*.json.*")] == []
    deleted = any("delete" in plan for plan in plans)
    for key in ("s0", "s1", "s2"):
        last = {f"{w}.{max(n for n, k in enumerate(p) if k == key)}." for w, p in enumerate(plans) if key in p}
        if key in final:
            assert final[key] in last
        else:
            assert deleted or not last


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
        store.store(ONE.descriptor, section_of(ONE, body=body, summary=summary))
        resolved = LocalPromptOverridesStore(directory).resolve(ONE.descriptor)
        assert resolved is not None
        (one,) = resolved.sections
        assert (one.body, one.summary) == (body, summary)
        assert body.replace("$$", "$").strip() in rendered(store).text
        assert json.loads(store.path("team/app", "main", "latest").read_text())["version"] == 2
