"""Sections: what they take, and what they render to."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import PromptValidationError
from ringfence.errors import PromptRenderError
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Section,
    SectionVisibility,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolExample,
    ToolResult,
    ToolsSection,
)
from ringfence.runtime import ClearVisibilityOverride, Session, SetVisibilityOverride

SUMMARY = SectionVisibility.SUMMARY


@dataclass
class Task:
    what: str = "it"
    count: int = 3


@dataclass
class Needed:
    name: str


@dataclass(frozen=True)
class Query:
    text: str


@dataclass(frozen=True)
class Found:
    lines: tuple[str, ...]

    def render(self) -> str:
        return "\n".join(self.lines)


def find(params: Query, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(()))


def finder(name: str = "find", *examples: ToolExample[Query, Found]) -> Tool[Query, Found]:
    return Tool[Query, Found](name=name, description="Find text.", handler=find, examples=examples)


def rendered(*sections: Section[Any], bound: tuple[object, ...] = (), session: Session | None = None) -> str:
    return Prompt(ns="test", key="sections", sections=sections).bind(*bound).render(session=session).text


def body(template: str, *bound: object, **arguments: Any) -> str:
    section = MarkdownSection(title="T", template=template, **arguments)
    return rendered(section, bound=bound).removeprefix("## 1. T (t)").lstrip("\n")


# Keys and titles


@pytest.mark.parametrize(
    ("title", "key"),
    [
        ("Guidance", "guidance"),
        ("What to do, and how", "what-to-do-and-how"),
        ("  Café №5 ", "cafe-no5"),
        ("x" * 100, "x" * 64),
        ("--a--", "a"),
    ],
)
def test_a_key_is_made_from_the_title(title: str, key: str) -> None:
    assert MarkdownSection(title=title, template="").key == key


def test_a_key_is_stripped_and_put_in_lower_case() -> None:
    assert MarkdownSection(title="T", key=" Tools.V1 ", template="").key == "tools.v1"


@pytest.mark.parametrize("key", ["", "-a", ".a", "a b", "a/b", "é", "a\nb", "x" * 65], ids=repr)
def test_a_key_that_cannot_be_one_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="section key"):
        MarkdownSection(title="T", key=key, template="")


@pytest.mark.parametrize("title", ["", "  ", "two\nlines"], ids=repr)
def test_a_title_is_one_line(title: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        MarkdownSection(title=title, key="k", template="")


def test_a_title_that_makes_no_key_asks_for_one() -> None:
    with pytest.raises(ValueError, match="key="):
        MarkdownSection(title="任务", template="")


@pytest.mark.parametrize(
    "arguments",
    [
        {"policies": ["read first"]},
        {"default_params": "text"},
        {"default_params": Task},
        {"enabled": True},
        {"enabled": lambda params, other: True},
        {"visibility": lambda *, depth: SUMMARY},
        {"visible": SUMMARY},
    ],
    ids="-".join,
)
def test_an_argument_of_the_wrong_type_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        MarkdownSection(title="T", template="", **arguments)


def test_a_section_declared_without_params_takes_no_default() -> None:
    with pytest.raises(TypeError, match="takes no params"):
        MarkdownSection[None](title="T", template="", default_params=Task())  # the checker refuses it too


def test_a_section_needs_a_body_of_its_own() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Section(title="T")


# Which params


def test_the_params_come_from_the_type_argument() -> None:
    section = MarkdownSection[Task](title="T", template="Do $what.")
    assert section.params_type is Task
    assert isinstance(section, MarkdownSection)


def test_the_params_come_from_the_default_where_there_is_no_type_argument() -> None:
    assert MarkdownSection(title="T", template="", default_params=Task()).params_type is Task
    assert MarkdownSection[Any](title="T", template="", default_params=Task()).params_type is Task


OtherT = TypeVar("OtherT")


class Quoted(MarkdownSection[OtherT], Generic[OtherT]):
    pass


class TaskSection(MarkdownSection[Task]):
    pass


def test_subclasses_know_their_type_argument() -> None:
    assert TaskSection(title="T", template="").params_type is Task
    assert Quoted[Task](title="T", template="").params_type is Task
    with pytest.raises(TypeError):
        TaskSection[Task]


# Bodies


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Do $what.", "Do it."),
        ("Do ${what}s ${count} times.", "Do its 3 times."),
        ("Costs $$5, says $$what.", "Costs $5, says $what."),
        ("\n    Do:\n      $what\n    ", "Do:\n  it"),
        ("  \n ", ""),
        ("", ""),
    ],
)
def test_a_body_is_a_dedented_template_over_the_params(template: str, text: str) -> None:
    assert body(template, default_params=Task()) == text


def test_blanks_around_a_body_are_stripped_after_its_values_are_in() -> None:
    assert body("$what", Task(what="\n  x \n"), default_params=Task()) == "x"


@given(st.text().map(str.strip))
def test_any_value_is_inserted_as_it_is(value: str) -> None:
    assert body("[$what]", Task(what=value), default_params=Task()) == f"[{value}]"


@pytest.mark.parametrize("template", ["costs $5", "100 $", "${what", "${ what }"])
def test_a_dollar_that_begins_no_placeholder_is_a_render_error(template: str) -> None:
    with pytest.raises(PromptRenderError, match=r"\$\$") as caught:
        body(template, default_params=Task())
    assert caught.value.section_path == ("t",)


@pytest.mark.parametrize("texts", [{"template": "$nothing"}, {"template": "", "summary": "$nothing"}], ids=str)
@pytest.mark.parametrize("params", [None, Task()], ids=["no params", "params"])
def test_a_placeholder_that_is_no_field_is_found_when_the_prompt_is_put_together(
    texts: dict[str, str], params: Task | None
) -> None:
    section = MarkdownSection(title="T", default_params=params, **texts)
    with pytest.raises(PromptValidationError, match="nothing") as caught:
        PromptTemplate(ns="n", key="k", sections=[section])
    assert caught.value.placeholder == "nothing"
    assert caught.value.section_path == ("t",)
    assert caught.value.dataclass_type is (Task if params else None)


def test_a_section_rendered_by_itself_names_an_unknown_placeholder() -> None:
    section = MarkdownSection(title="T", template="$nothing")
    with pytest.raises(PromptRenderError, match="nothing") as caught:
        section.render(Task(), 0, "1")
    assert caught.value.placeholder == "nothing"


# Headings


def test_a_section_by_itself_renders_its_heading_and_body() -> None:
    section = MarkdownSection(title="Title", template="Text.")
    assert section.render(None, 0, "1", path=("key",)) == "## 1. Title (key)\n\nText."
    assert section.render(None, 1, "1.1") == "### 1.1. Title\n\nText."


def test_a_section_without_body_is_its_heading() -> None:
    assert rendered(MarkdownSection(title="Group", template="")) == "## 1. Group (group)"


# Tool sections


def test_a_tools_section_describes_but_does_not_list_its_tools() -> None:
    section = ToolsSection(title="Available Tools", tools=[finder()], description="Use $what.", default_params=Task())
    assert rendered(section) == "## 1. Available Tools (available-tools)\n\nUse it."
    assert [tool.name for tool in section.tools()] == ["find"]


# Examples of tools


def test_examples_of_tools_follow_the_body() -> None:
    example = ToolExample(description="Find a word.", input=Query("é"), output=Found(("a", "b")))
    section = MarkdownSection(title="T", template="Text.", tools=[finder("plain"), finder("find", example)])
    assert rendered(section) == (
        """\
## 1. T (t)

Text.

Examples of tool calls:

- find: Find text.
  - Find a word.
    input:
    ```json
    {
      "text": "é"
    }
    ```
    output:
    ```
    a
    b
    ```"""
    )


def test_an_example_without_params_and_result_shows_null() -> None:
    def stop(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None)

    examples = (ToolExample(description="Stop.", input=None, output=None),)
    tool = Tool[None, None](name="stop", description="Stop it.", handler=stop, examples=examples)
    assert rendered(MarkdownSection(title="T", template="", tools=[tool])).endswith(
        "  - Stop.\n    input:\n    ```json\n    null\n    ```"
    )


@given(st.lists(st.sampled_from(["```", "````\n", "`", "text", "\n"])).map("".join))
def test_nothing_in_an_example_ends_its_fence(text: str) -> None:
    example = ToolExample(description="Find.", input=Query(text), output=Found((text, "last")))
    lines = rendered(MarkdownSection(title="T", template="", tools=[finder("find", example)])).splitlines()
    opening = lines.index("    output:") + 1
    fence = lines[opening].strip()
    assert set(fence) == {"`"}
    assert not any(line.strip().startswith(fence) for line in lines[opening + 1 : -1])
    assert lines[-1].strip() == fence


# Enabled


@pytest.mark.parametrize(
    "predicate",
    [
        lambda: False,
        lambda params: params.count > 3,
        lambda *, session: session is None,
        lambda session: session is None,
        lambda params, session: session is None or params.count > 3,
        lambda params, *, session: session is None or params.count > 3,
        lambda *args, **keywords: keywords["session"] is None or args[0].count > 3,
        lambda answer=False: answer,
    ],
)
def test_a_predicate_gets_what_its_signature_asks_for(predicate: Any) -> None:
    section = MarkdownSection(title="T", template="", default_params=Task(), enabled=predicate)
    assert rendered(section, session=Session()) == ""


def test_a_section_says_whether_it_is_enabled_for_params_alone() -> None:
    section = MarkdownSection(title="T", template="", default_params=Task(), enabled=lambda params: params.count > 3)
    assert section.is_enabled(Task(count=4))
    assert not section.is_enabled(Task(count=3), session=Session())


def test_a_predicate_that_raises_is_a_render_error() -> None:
    section = MarkdownSection(title="T", template="", default_params=Task(), enabled=lambda params: params.missing)
    with pytest.raises(PromptRenderError, match=r"section t: .*predicate.*AttributeError") as caught:
        rendered(section)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert caught.value.section_path == ("t",)


# Visibility


def hidden(visibility: Any = SUMMARY, **arguments: Any) -> Section[Any]:
    below = MarkdownSection(title="Below", template="Secret.", tools=[finder("below")])
    return MarkdownSection(
        title="T",
        template="Long text.",
        tools=[finder()],
        children=[below],
        visibility=visibility,
        **({"summary": "Short."} | arguments),
    )


def test_a_summarised_section_shows_its_summary_and_hides_its_tools_and_what_is_below() -> None:
    prompt = Prompt(ns="n", key="k", sections=[hidden()])
    heading, summary, how = prompt.render().text.split("\n\n")
    assert (heading, summary) == ("## 1. T (t)", "Short.")
    assert "open_sections" in how
    assert "t.below" in how
    assert [tool.name for tool in prompt.render().tools] == ["open_sections"]
    assert prompt.tools() == prompt.render().tools


@pytest.mark.parametrize(
    "selector",
    [
        lambda: SUMMARY,
        lambda params: SUMMARY if params.count == 3 else SectionVisibility.FULL,
        lambda *, session: SUMMARY if session else SectionVisibility.FULL,
    ],
)
def test_a_selector_decides_about_the_visibility(selector: Any) -> None:
    assert "Short." in rendered(hidden(selector, default_params=Task()), session=Session())


def test_a_session_opens_a_summarised_section_and_closes_it_again() -> None:
    session = Session()
    session.dispatch(SetVisibilityOverride(("t",), SectionVisibility.FULL))
    assert "Secret." in rendered(hidden(), session=session)
    session.dispatch(ClearVisibilityOverride(("t",)))
    assert "Secret." not in rendered(hidden(), session=session)


def test_a_summarised_section_needs_a_summary() -> None:
    with pytest.raises(PromptValidationError, match="summary="):
        hidden(summary=None)
    with pytest.raises(PromptValidationError, match="no summary"):
        rendered(hidden(lambda: SUMMARY, summary=None))


@pytest.mark.parametrize(("selector", "cause"), [(lambda: "summary", TypeError), (lambda: 1 / 0, ZeroDivisionError)])
def test_a_selector_that_chooses_nothing_is_a_render_error(selector: Any, cause: type[Exception]) -> None:
    with pytest.raises(PromptRenderError, match="section t: .*visibility selector") as caught:
        rendered(hidden(selector))
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.section_path == ("t",)


# Clones


def test_a_clone_has_all_that_the_section_has_and_children_of_its_own() -> None:
    policy = SequentialDependencyPolicy({})
    section = hidden(
        lambda: SUMMARY, default_params=Task(), enabled=lambda params: params.count == 3, policies=[policy]
    )
    twin = section.clone(session=Session())
    assert type(twin) is type(section)
    assert rendered(twin) == rendered(section)
    assert twin.tools() == section.tools()
    assert twin.policies() == (policy,)
    assert twin.children[0] is not section.children[0]


class SessionSection(MarkdownSection[None]):
    session: Session | None = None

    def clone(self, **changes: Any) -> SessionSection:
        twin = copy.copy(self)
        twin.session = changes.get("session")
        return twin


def test_what_a_clone_is_for_reaches_the_children_that_know_it() -> None:
    session = Session()
    child = SessionSection(title="Child", template="")
    twin = MarkdownSection(title="T", template="", children=[child]).clone(session=session)
    assert isinstance(twin.children[0], SessionSection)
    assert twin.children[0].session is session
    assert child.session is None
