"""Sections that a model sees in summary, and how it gets the rest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptRenderError,
    PromptTemplate,
    PromptValidationError,
    Section,
    SectionVisibility,
    Tool,
    ToolContext,
    ToolResult,
    VisibilityExpansionRequired,
)
from ringfence.runtime import (
    ClearAllVisibilityOverrides,
    ClearVisibilityOverride,
    PromptRendered,
    Receipt,
    Session,
    SetVisibilityOverride,
    ToolInvoked,
    VisibilityOverrides,
)

FULL, SUMMARY = SectionVisibility.FULL, SectionVisibility.SUMMARY


@dataclass(frozen=True)
class Note:
    text: str = "n"

    def render(self) -> str:
        return self.text


@dataclass(frozen=True)
class Style:
    tone: str


def note(params: Note, *, context: ToolContext) -> ToolResult[Note]:
    return ToolResult.ok(params, message="noted")


def tool(name: str) -> Tool[Any, Any]:
    return Tool[Note, Note](name=name, description="Note.", handler=note)


def section(key: str, body: str = "", **how: Any) -> Section[Any]:
    return MarkdownSection(title=key.title(), key=key, template=body or f"All of {key}.", **how)


def summarised(key: str, **how: Any) -> Section[Any]:
    return section(key, summary=f"About {key}.", visibility=SUMMARY, **how)


def prompt(*sections: Section[Any], **how: Any) -> Prompt[Any]:
    return Prompt(PromptTemplate(ns="tests", key="disclosure", sections=sections, **how))


def world() -> Prompt[Any]:
    """One section in full; one summarised with tools, another one summarised inside; one summarised without tools."""
    inner = summarised("inner", tools=[tool("deep")])
    docs = summarised("docs", children=[section("a"), section("b", enabled=lambda: False), summarised("c")])
    return prompt(
        section("task", tools=[tool("plain")]), summarised("ops", tools=[tool("ship")], children=[inner]), docs
    )


def names(rendered: Any) -> list[str]:
    return [tool.name for tool in rendered.tools]


def opening(*keys: str, **more: Any) -> dict[str, Any]:
    return {"name": "open_sections", "arguments": {"section_keys": list(keys), "reason": "needed", **more}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_the_tools_that_open_and_read_come_after_the_declared_ones_where_there_is_something_for_them() -> None:
    assert names(world().render()) == ["plain", "open_sections", "read_section"]
    assert names(prompt(section("a", tools=[tool("t")])).render()) == ["t"]
    assert names(prompt(summarised("a", tools=[tool("t")])).render()) == ["open_sections"]
    assert names(prompt(summarised("a", children=[section("b", tools=[tool("t")])])).render()) == ["open_sections"]
    assert names(prompt(summarised("a")).render()) == ["read_section"]
    off = section("b", tools=[tool("t")], enabled=lambda: False)
    assert names(prompt(summarised("a", children=[off])).render()) == ["read_section"]


def test_a_summary_ends_with_how_to_get_the_rest() -> None:
    text = world().render().text
    assert 'call `open_sections` with "ops". Below it: `ops.inner`.' in text
    assert 'call `read_section` with "docs". Below it: `docs.a`, `docs.c`.' in text
    assert "All of ops." not in text


def opened(*keys: str, session: Session | None = None) -> dict[tuple[str, ...], SectionVisibility]:
    one = world()
    with one.resources, pytest.raises(VisibilityExpansionRequired) as asked:
        ToolExecutor(prompt=one, session=session or Session()).call(
            "open_sections", {"section_keys": keys, "reason": "r"}
        )
    assert (asked.value.reason, asked.value.section_keys) == ("r", keys)
    return asked.value.requested_overrides


def test_a_call_asks_its_host_to_open_what_is_closed_and_all_above_it() -> None:
    assert opened("ops") == {("ops",): FULL}
    assert opened("ops.inner") == {("ops",): FULL, ("ops", "inner"): FULL}
    assert opened("ops", "docs.a", "task") == {("ops",): FULL, ("docs",): FULL}
    assert opened(" `Ops` ") == {("ops",): FULL}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"section_keys": ["nowhere"], "reason": "r"}, "there is no section 'nowhere'; summarised are: ops, ops.inner"),
        ({"section_keys": ["docs.b"], "reason": "r"}, "there is no section"),
        ({"section_keys": ["task"], "reason": "r"}, "open already: task"),
        ({"section_keys": [], "reason": "r"}, "section_keys"),
        ({"section_keys": ["ops"]}, "reason"),
    ],
)
def test_what_cannot_be_opened_is_an_answer(arguments: dict[str, Any], said: str) -> None:
    one = world()
    with one.resources:
        result = ToolExecutor(prompt=one, session=Session()).call("open_sections", arguments)
    assert not result.success
    assert said in result.message


def read(key: str, one: Prompt[Any] | None = None) -> ToolResult[Any]:
    one = one or world()
    session = Session()
    with one.resources:
        result = ToolExecutor(prompt=one, session=session).call("read_section", {"section_key": key})
    assert session[VisibilityOverrides].latest() is None
    return result


def test_reading_shows_a_section_and_what_is_enabled_below_as_it_is_visible_by_itself() -> None:
    result = read("docs")
    assert result.render().startswith("## 3. Docs (docs)\n\nAll of docs.\n\n### 3.1. A (docs.a)\n\nAll of a.")
    assert "### 3.3. C (docs.c)\n\nAbout c.\n\nThis is a summary." in result.render()
    assert "All of b." not in result.render()
    assert read("docs.c").render() == "### 3.3. C (docs.c)\n\nAll of c."
    assert read("docs.a").render() == "### 3.1. A (docs.a)\n\nAll of a."


@pytest.mark.parametrize("key", ["task", "nowhere", "docs.b", ""])
def test_what_is_not_summarised_is_not_read(key: str) -> None:
    assert not read(key).success


def test_a_section_with_params_is_read_with_them_and_without_them_it_is_an_answer() -> None:
    styled = MarkdownSection[Style](title="S", template="Be $tone.", summary="Style.", visibility=SUMMARY)
    assert "Be kind." in read("s", prompt(styled).bind(Style("kind"))).render()
    assert "needs its params" in read("s", prompt(styled)).message


def test_the_loop_opens_sections_and_goes_on_with_their_tools() -> None:
    adapter = ScriptedAdapter(
        [{"tool_calls": [opening("ops.inner")]}, {"tool_calls": [call("deep"), call("ship")]}, {"text": "done"}]
    )
    session = Session()
    assert adapter.evaluate(world(), session=session).text == "done"
    first, second, _ = adapter.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["plain", "open_sections", "read_section"]
    assert [tool["function"]["name"] for tool in second["tools"]] == ["plain", "ship", "deep", "read_section"]
    assert "All of inner." in second["messages"][0]["content"]
    assert second["messages"][-1]["content"].startswith("opened: ops, ops.inner")
    assert [one.name for one in session[ToolInvoked].all() if one.result.success] == ["open_sections", "deep", "ship"]
    assert {receipt.outcome for receipt in session[Receipt].all()} == {"committed"}
    assert len(session[PromptRendered].all()) == 2


def test_in_a_mixed_turn_sections_are_opened_first_and_every_other_call_runs_once_in_its_place() -> None:
    adapter = ScriptedAdapter(
        [
            {"tool_calls": [call("plain"), call("ship"), opening("ops"), call("plain", text="2")]},
            {"text": "done"},
        ]
    )
    session = Session()
    adapter.evaluate(world(), session=session)
    assert [one.name for one in session[ToolInvoked].all()] == ["open_sections", "plain", "ship", "plain"]
    answers = [message["content"] for message in adapter.requests[1]["messages"][2:]]
    assert answers == [
        "noted\n\nn",
        "noted\n\nn",
        "opened: ops; your instructions and tools have them now",
        "noted\n\n2",
    ]


def test_what_is_opened_stays_open_for_the_session_and_for_no_other() -> None:
    session, one = Session(), world()
    ScriptedAdapter([{"tool_calls": [opening("ops")]}, {"text": "done"}]).evaluate(one, session=session)
    assert "ship" in names(one.render(session=session))
    assert "ship" not in names(one.render(session=Session()))
    session.dispatch(ClearVisibilityOverride(("ops",)))
    assert "ship" not in names(one.render(session=session))
    session.dispatch(SetVisibilityOverride(("docs",), FULL))
    session.dispatch(ClearAllVisibilityOverrides())
    assert one.render(session=session) == one.render()


def test_an_open_section_can_be_closed_by_the_session() -> None:
    session = Session()
    one = prompt(section("a", summary="Short.", tools=[tool("t")]))
    session.dispatch(SetVisibilityOverride(("a",), SUMMARY))
    assert names(one.render(session=session)) == ["open_sections"]


def test_a_section_that_cannot_be_rendered_in_full_stays_closed() -> None:
    styled = MarkdownSection[Style](
        title="S", template="$tone", summary="Style.", visibility=SUMMARY, tools=[tool("t")]
    )
    adapter, session = ScriptedAdapter([{"tool_calls": [opening("s")]}, {"text": "done"}]), Session()
    assert adapter.evaluate(prompt(styled), session=session).text == "done"
    assert "cannot be shown" in adapter.requests[1]["messages"][-1]["content"]
    assert names(prompt(styled).render(session=session)) == ["open_sections"]


def test_a_tool_that_asks_again_and_again_leaves_the_loop_in_the_end() -> None:
    def ask(params: None, *, context: ToolContext) -> ToolResult[None]:
        raise VisibilityExpansionRequired("more", requested_overrides={}, reason="r", section_keys=("a",))

    asking = Tool[None, None](name="ask", description="Ask.", handler=ask)
    adapter = ScriptedAdapter(lambda conversation: {"tool_calls": [{"name": "ask"}]})
    with pytest.raises(VisibilityExpansionRequired):
        adapter.evaluate(prompt(section("a", tools=[asking])), session=Session())
    assert len(adapter.requests) == 2


def test_the_prompt_s_policies_govern_opening_and_reading_too() -> None:
    class Shut:
        name = "shut"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.deny("closed") if tool.name == "open_sections" else PolicyDecision.allow()

        def on_result(self, *values: Any, context: ToolContext) -> None: ...

    adapter, session = ScriptedAdapter([{"tool_calls": [opening("ops")]}, {"text": "done"}]), Session()
    adapter.evaluate(prompt(summarised("ops", tools=[tool("ship")]), policies=[Shut()]), session=session)
    receipt = session[Receipt].latest()
    assert receipt is not None
    assert receipt.outcome == "denied"


@pytest.mark.parametrize("name", ["open_sections", "read_section"])
def test_the_names_of_the_two_tools_are_taken(name: str) -> None:
    with pytest.raises(PromptValidationError, match="reserved"):
        prompt(section("a", tools=[tool(name)]))


def test_two_sections_whose_dotted_keys_are_the_same_are_both_meant() -> None:
    outer = section("a", children=[summarised("b", tools=[tool("one")])])
    one = prompt(outer, summarised("a.b", tools=[tool("two")]))
    session = Session()
    ScriptedAdapter([{"tool_calls": [opening("a.b")]}, {"text": "done"}]).evaluate(one, session=session)
    assert names(one.render(session=session)) == ["one", "two"]


def test_a_predicate_that_raises_is_named_wherever_it_is_asked() -> None:
    broken = section("broken", enabled=lambda: bool(1 / 0))
    for there in (prompt(summarised("about", children=[broken])), prompt(broken)):
        for ask in (there.render, there.resources.__enter__, there.locate_sections):
            with pytest.raises(
                PromptRenderError, match="broken: its enabled predicate raised: ZeroDivisionError"
            ) as got:
                ask()
            assert isinstance(got.value.__cause__, ZeroDivisionError)
