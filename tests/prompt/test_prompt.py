"""Templates and prompts: how they are put together, bound, rendered, and what they bring along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import PromptValidationError
from ringfence.errors import PromptRenderError, SectionPath
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    Section,
    SectionVisibility,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
    ToolsSection,
)
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime import Session


@dataclass
class Task:
    what: str


@dataclass
class Style:
    tone: str = "dry"
    seen: list[str] = field(default_factory=list[str])


@dataclass
class Unused:
    pass


@dataclass
class Answer:
    text: str


@dataclass(frozen=True)
class LookupParams:
    entity_id: str = field(metadata={"description": "Global identifier to fetch"})
    include_related: bool = False


@dataclass(frozen=True)
class LookupResult:
    url: str


def lookup(params: LookupParams, *, context: ToolContext) -> ToolResult[LookupResult]:
    return ToolResult.ok(LookupResult(url="https://example.com"))


def tool(name: str) -> Tool[LookupParams, LookupResult]:
    return Tool[LookupParams, LookupResult](name=name, description="Fetch.", handler=lookup)


def text(title: str, template: str = "", **arguments: Any) -> MarkdownSection[Any]:
    return MarkdownSection(title=title, template=template, **arguments)


def prompt(*sections: Section[Any], **arguments: Any) -> Prompt[Any]:
    return Prompt(ns="test", key="prompt", sections=sections, **arguments)


# Templates


def test_a_prompt_for_text_may_say_so() -> None:
    assert Prompt[None](PromptTemplate(ns="n", key="k")).structured_output is None
    assert Prompt[None](PromptTemplate[None](ns="n", key="k")).structured_output is None


@pytest.mark.parametrize("missing", ["ns", "key"])
def test_a_template_needs_a_namespace_and_a_key(missing: str) -> None:
    given = {"ns": "n", "key": "k"}
    with pytest.raises(PromptValidationError, match=missing):
        PromptTemplate(**(given | {missing: "  "}))
    del given[missing]
    with pytest.raises(TypeError, match=missing):
        PromptTemplate(**given)
    with pytest.raises(TypeError, match=missing):
        Prompt(**given)


def test_a_template_strips_its_names_and_cannot_be_changed() -> None:
    template = PromptTemplate(ns=" a/b ", key=" k ", sections=[text("One")])
    assert (template.ns, template.key, template.name) == ("a/b", "k", None)
    assert isinstance(template.sections, tuple)
    with pytest.raises(FrozenInstanceError):
        template.ns = "other"


@pytest.mark.parametrize(
    ("sections", "said", "path"),
    [
        ([text("One"), text("One")], "two sections are called one", ("one",)),
        ([text("Top", children=[text("A", key="x"), text("B", key="x")])], "top.x", ("top", "x")),
        ([MarkdownSection[int](title="One", template="")], "must be a dataclass, not <class 'int'>", ("one",)),
        ([MarkdownSection[Task](title="One", template="", default_params=Style())], "must be of type Task", ("one",)),
        ([text("One", tools=[tool("a"), tool("a")])], "taken", ("one",)),
        ([text("One", tools=[tool("read_section")])], "reserved", ("one",)),
        ([text("One", tools=[tool("open_sections")])], "reserved", ("one",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tree_that_cannot_be_right_is_refused(sections: list[Section[Any]], said: str, path: SectionPath) -> None:
    with pytest.raises(PromptValidationError, match=said) as caught:
        PromptTemplate(ns="n", key="k", sections=sections)
    assert caught.value.section_path == path


def test_a_tool_that_is_there_twice_is_named_with_its_section_and_params() -> None:
    twins = text("Top", children=[text("One", tools=[tool("a")]), text("Two", tools=[tool("a")])])
    with pytest.raises(PromptValidationError, match=r"top\.two.*top\.one") as caught:
        PromptTemplate(ns="n", key="k", sections=[twins])
    error = caught.value
    assert (error.section_path, error.placeholder, error.dataclass_type) == (("top", "two"), "a", LookupParams)


def test_what_is_no_tool_is_named_with_its_section_and_params() -> None:
    wrong: Any = lookup
    with pytest.raises(PromptValidationError) as caught:
        prompt(text("Top", children=[text("In", tools=[tool("a"), wrong], default_params=Style())]))
    error = caught.value
    assert (error.section_path, error.placeholder, error.dataclass_type) == (("top", "in"), "lookup", Style)


def test_a_policy_needs_a_tool_in_its_section_or_below() -> None:
    policy = ReadBeforeWritePolicy()
    with pytest.raises(PromptValidationError, match=policy.name) as caught:
        prompt(text("Top", children=[text("Empty", policies=[policy])], tools=[tool("a")]))
    assert caught.value.section_path == ("top", "empty")
    prompt(text("Top", children=[text("Below", tools=[tool("a")])], policies=[policy]))
    prompt(text("Top"), policies=[policy])


@pytest.mark.parametrize("wrong", [Prompt(ns="n", key="k"), [text("T")], "n:k"], ids=lambda one: type(one).__name__)
def test_a_prompt_is_made_of_a_template(wrong: Any) -> None:
    with pytest.raises(TypeError, match="PromptTemplate"):
        Prompt(wrong)


@pytest.mark.parametrize("wrong", [{"sections": ["text"]}, {"policies": ["read first"]}], ids=str)
def test_a_part_of_the_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        PromptTemplate(ns="n", key="k", **wrong)


@pytest.mark.parametrize("where", ["template", "section"])
def test_a_policy_must_fit_the_prompts_tools(where: str) -> None:
    policies = [SequentialDependencyPolicy({"deploy": {"test"}})]
    on_section, on_template = (policies, ()) if where == "section" else ((), policies)
    with pytest.raises(PromptValidationError, match="deploy, test"):
        prompt(text("T", tools=[tool("build")], policies=on_section), policies=on_template)


def test_a_policy_of_a_section_may_depend_on_another_sections_tools() -> None:
    policy = SequentialDependencyPolicy({"deploy": {"test"}})
    both = text("A", tools=[tool("deploy")], policies=[policy]), text("B", tools=[tool("test")])
    assert prompt(*both).policies_for_tool("deploy") == (policy,)
    assert prompt(*both).policies_for_tool("test") == ()
    assert prompt(*both).result_policies("test") == (policy,)


def test_a_template_knows_its_placeholders_and_params() -> None:
    inner = MarkdownSection[Style](title="Inner", template="", summary="$tone")
    template = PromptTemplate(
        ns="n", key="k", sections=[MarkdownSection[Task](title="T", template="$what", children=[inner])]
    )
    assert template.placeholders == {("t",): {"what"}, ("t", "inner"): {"tone"}}
    assert template.params_types == {Task, Style}


def test_sections_are_found_by_type_depth_first() -> None:
    tools = ToolsSection(title="Tools", tools=[])
    markdown = text("T", children=[tools])
    template = PromptTemplate(ns="n", key="k", sections=[markdown, ToolsSection(title="Later", tools=[])])
    assert template.find_section(ToolsSection) is tools
    assert Prompt(template).find_section((ToolsSection, MarkdownSection)) is markdown


def test_a_section_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="ToolsSection"):
        prompt(text("T")).find_section(ToolsSection)
    with pytest.raises(TypeError):
        prompt(text("T")).find_section(())


# Prompts


def test_a_prompt_is_made_of_a_template_or_all_at_once() -> None:
    template = PromptTemplate(ns="n", key="k", name="name", sections=[text("T")])
    once = Prompt(ns="n", key="k", name="name", sections=[text("T")])
    assert Prompt(template).render() == once.render()
    assert (once.ns, once.key, once.name) == (template.ns, template.key, template.name)
    assert Prompt(template).sections == template.sections


def test_a_template_and_parts_of_one_are_too_much() -> None:
    arguments: dict[str, Any] = {"name": "other"}
    with pytest.raises(TypeError, match="name"):
        Prompt(PromptTemplate(ns="n", key="k"), **arguments)


def test_the_answers_type_is_that_of_the_template() -> None:
    template = PromptTemplate[Answer](ns="n", key="k")
    assert Prompt(template).structured_output == Prompt[Answer](ns="n", key="k").structured_output
    assert Prompt[Answer](template).render().output_type is Answer
    with pytest.raises(PromptValidationError):
        Prompt[Task](template)


# Numbers and headings


def test_sections_are_numbered_in_order_and_named_by_their_path() -> None:
    tree = (
        text("First", "One.", children=[text("Child", children=[text("Grandchild")]), text("Twin", "T.")]),
        text("Second"),
    )
    assert prompt(*tree).render().text == (
        "## 1. First (first)\n\nOne.\n\n"
        "### 1.1. Child (first.child)\n\n"
        "#### 1.1.1. Grandchild (first.child.grandchild)\n\n"
        "### 1.2. Twin (first.twin)\n\nT.\n\n"
        "## 2. Second (second)"
    )


def test_a_disabled_section_leaves_a_gap_in_the_numbers() -> None:
    sections = text("A"), text("B", enabled=lambda: False), text("C", children=[text("D")])
    assert prompt(*sections).render().text == "## 1. A (a)\n\n## 3. C (c)\n\n### 3.1. D (c.d)"


def trees() -> st.SearchStrategy[list[Any]]:
    return st.recursive(st.just([]), lambda below: st.lists(st.tuples(st.booleans(), below), max_size=4), max_leaves=12)


@given(trees())
def test_disabling_sections_only_ever_removes_text(tree: list[Any]) -> None:
    def build(tree: list[Any], all_on: bool) -> list[Section[Any]]:
        return [
            text(f"S{n}", enabled=lambda on=on: on or all_on, children=build(below, all_on))
            for n, (on, below) in enumerate(tree)
        ]

    def headings(tree: list[Any], numbers: tuple[str, ...] = ()) -> list[str]:
        return [
            heading
            for n, (on, below) in enumerate(tree, 1)
            if on
            for heading in (".".join((*numbers, str(n))), *headings(below, (*numbers, str(n))))
        ]

    shown = prompt(*build(tree, all_on=False)).render().text.splitlines()
    everything = prompt(*build(tree, all_on=True)).render().text.splitlines()
    assert [line for line in everything if line and line in shown] == [line for line in shown if line]
    assert [line.split(" ")[1].rstrip(".") for line in shown if line] == headings(tree)


# Params


def test_bound_values_win_over_defaults() -> None:
    section = text("T", "Be $tone.", default_params=Style("default"))
    assert prompt(section).bind(Style("bound")).render().text.endswith("Be bound.")


def test_a_default_serves_other_sections_of_its_type() -> None:
    sections = MarkdownSection[Task](title="A", template="$what"), text("B", default_params=Task("from b"))
    assert "from b" in prompt(*sections).render().text


def test_its_own_default_comes_before_another_sections() -> None:
    sections = text("A", "$what", default_params=Task("mine")), text("B", "$what", default_params=Task("yours"))
    assert prompt(*sections).render().text == "## 1. A (a)\n\nmine\n\n## 2. B (b)\n\nyours"


def test_params_whose_fields_all_have_defaults_need_not_be_given() -> None:
    assert prompt(MarkdownSection[Style](title="T", template="Be $tone.")).render().text.endswith("Be dry.")


def test_missing_params_are_a_render_error_that_says_what_to_bind() -> None:
    section = MarkdownSection[Task](title="T", template="$what")
    with pytest.raises(PromptRenderError, match=r"what.*bind\(Task") as caught:
        prompt(section).render()
    assert caught.value.dataclass_type is Task
    assert caught.value.section_path == ("t",)


def test_params_that_cannot_be_made_are_a_render_error() -> None:
    @dataclass
    class Picky:
        value: int = 0

        def __post_init__(self) -> None:
            raise ValueError("no")

    with pytest.raises(PromptRenderError, match="ValueError: no"):
        prompt(MarkdownSection[Picky](title="T", template="")).render()


@pytest.mark.parametrize(
    "above",
    [{"enabled": lambda: False}, {"summary": "Short.", "visibility": SectionVisibility.SUMMARY}],
    ids=["disabled", "summarised"],
)
def test_params_of_what_is_not_shown_are_not_required(above: dict[str, Any]) -> None:
    needy = MarkdownSection[Task](title="Needy", template="$what")
    assert "Needy" not in prompt(text("T", children=[needy], **above)).render().text


def test_params_of_a_section_are_not_required_while_its_summary_mentions_none() -> None:
    section = MarkdownSection[Task](title="T", template="$what", summary="Short.", visibility=SectionVisibility.SUMMARY)
    assert "Short.\n\nThis is a summary." in prompt(section).render().text
    section = MarkdownSection[Task](
        title="T", template="", summary="About $what.", visibility=SectionVisibility.SUMMARY
    )
    with pytest.raises(PromptRenderError, match="needs its params"):
        prompt(section).render()


def test_a_selector_that_asks_for_params_needs_them() -> None:
    section = MarkdownSection[Task](
        title="T", template="", summary="Short.", visibility=lambda params: SectionVisibility.SUMMARY
    )
    with pytest.raises(PromptRenderError, match="needs its params"):
        prompt(section).render()


def test_a_disabled_section_needs_params_only_for_its_predicate() -> None:
    assert prompt(MarkdownSection[Task](title="T", template="$what", enabled=lambda: False)).render().text == ""
    section = MarkdownSection[Task](title="T", template="", enabled=lambda params: params.what == "on")
    with pytest.raises(PromptRenderError, match="needs its params"):
        prompt(section).render()
    assert prompt(section).bind(Task("off")).render().text == ""


def test_binding_again_replaces_the_value_of_that_type_only() -> None:
    bound = prompt(text("A", "$what", default_params=Task("x")), text("B", "$tone", default_params=Style()))
    assert bound.bind(Task("1"), Style("s")).bind(Task("2")) is bound
    assert bound.params == (Task("2"), Style("s"))
    assert "2" in bound.render().text


@pytest.mark.parametrize(
    ("values", "kind"), [([Unused()], Unused), ([Task("1"), Task("2")], Task), (["text"], str), ([Task], type)]
)
def test_what_cannot_be_bound_is_refused_and_leaves_the_prompt_as_it_was(values: list[Any], kind: type) -> None:
    bound = prompt(MarkdownSection[Task](title="T", template="Do $what.")).bind(Task("this"))
    before = bound.render()
    with pytest.raises(PromptValidationError) as caught:
        bound.bind(*values, resources={Client: Client("wrong")})
    assert caught.value.dataclass_type is kind
    assert bound.render() == before
    assert source_of(bound) is None
    assert bound.bind(Task("that")).render().text.endswith("Do that.")


def test_a_section_cannot_change_a_default_for_the_next_rendering() -> None:
    class Careless(MarkdownSection[Style]):
        def render_body(self, params: Style, **how: Any) -> str:
            params.tone += "!"
            return params.tone

    careless = prompt(Careless(title="T", template="", default_params=Style("dry")))
    assert careless.render() == careless.render()


# Rendering


def test_a_rendering_has_the_tools_of_the_enabled_sections_in_order() -> None:
    sections = (
        text("A", tools=[tool("a"), tool("b")], children=[text("C", tools=[tool("c")])]),
        text("Off", tools=[tool("off")], enabled=lambda *, session: session is None),
        text("D", tools=[tool("d")]),
    )
    rendered = prompt(*sections).render(session=Session())
    assert [one.name for one in rendered.tools] == ["a", "b", "c", "d"]
    assert prompt(*sections).tools(session=Session()) == rendered.tools
    assert [one.name for one in prompt(*sections).tools()] == ["a", "b", "c", "off", "d"]


def test_a_rendering_describes_the_params_of_its_tools() -> None:
    def stop(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None)

    silent = Tool[None, None](name="stop", description="Stop.", handler=stop)
    rendered = prompt(text("T", tools=[tool("lookup"), silent])).render()
    assert rendered.tool_param_descriptions == {"lookup": {"entity_id": "Global identifier to fetch"}}
    changeable: Any = rendered.tool_param_descriptions
    with pytest.raises(TypeError):
        changeable["lookup"]["entity_id"] = "other"
    with pytest.raises(TypeError):
        changeable["other"] = {}


def test_a_rendering_is_a_value() -> None:
    one = prompt(text("T", "Text.", tools=[tool("a")]))
    rendered = one.render()
    assert rendered == one.render()
    assert str(rendered) == rendered.text
    with pytest.raises(FrozenInstanceError):
        rendered.text = ""
    assert (rendered.output_type, rendered.container, rendered.allow_extra_keys) == (None, None, False)


def test_a_rendering_says_what_the_answer_must_be() -> None:
    rendered = Prompt[list[Answer]](ns="n", key="k", allow_extra_keys=True).render()
    assert (rendered.output_type, rendered.container, rendered.allow_extra_keys) == (Answer, "array", True)


def test_a_body_gets_the_session_and_its_path() -> None:
    class Curious(Section[None]):
        def render_body(
            self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
        ) -> str:
            assert session is not None
            return f"{'/'.join(path)} {visibility.value} {session.session_id}"

    session = Session()
    rendered = prompt(text("Top", children=[Curious(title="C")])).render(session=session)
    assert rendered.text.endswith(f"top/c full {session.session_id}")


def test_a_body_that_raises_is_a_render_error_that_names_the_section() -> None:
    class Broken(Section[None]):
        def render_body(self, params: None, **how: Any) -> str:
            raise LookupError("gone")

    with pytest.raises(PromptRenderError, match=r"section top\.b: .*LookupError: gone") as caught:
        prompt(text("Top", children=[Broken(title="B")])).render()
    assert caught.value.section_path == ("top", "b")


# Policies


def test_a_tool_is_governed_by_its_section_and_then_by_the_prompt() -> None:
    above, own, whole = (SequentialDependencyPolicy({}) for _ in range(3))
    inner = text("Inner", tools=[tool("a")], policies=[own])
    governed = prompt(text("T", children=[inner], tools=[tool("b")], policies=[above]), policies=[whole])
    assert governed.policies_for_tool("a") == (own, whole)
    assert governed.policies_for_tool("b") == (above, whole)


def test_a_tool_that_no_section_has_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        prompt(text("T"), policies=[ReadBeforeWritePolicy()]).policies_for_tool("a")


# Resources


class Client:
    def __init__(self, source: str) -> None:
        self.source = source


ParamsT = TypeVar("ParamsT")


class Bringing(MarkdownSection[ParamsT]):
    """A section that brings a client along."""

    def resources(self) -> ResourceRegistry:
        return ResourceRegistry.build({Client: Client(self.title)})


def bringing(title: str, **arguments: Any) -> Section[Any]:
    return Bringing(title=title, template="", **arguments)


def source_of(client_prompt: Prompt[Any]) -> str | None:
    with client_prompt.resources as resources:
        client = resources.get_optional(Client)
        return client.source if client else None


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda registry: prompt(resources=registry), "template"),
        (lambda registry: prompt(bringing("A"), resources=registry), "A"),
        (lambda registry: prompt(bringing("A", children=[bringing("B")]), resources=registry), "B"),
        (lambda registry: prompt(bringing("A", children=[bringing("B")]), bringing("C")), "C"),
        (lambda registry: prompt(bringing("A")).bind(resources={Client: Client("bound")}), "bound"),
        (lambda registry: prompt().bind(resources={Client: Client("1")}).bind(resources={Client: Client("2")}), "2"),
        (lambda registry: prompt().bind(resources={Client: Client("1")}).bind(resources={Client: None}), "1"),
    ],
)
def test_resources_are_collected_and_the_later_one_wins(
    make: Callable[[ResourceRegistry], Prompt[Any]], source: str
) -> None:
    assert source_of(make(ResourceRegistry.build({Client: Client("template")}))) == source


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        ({"enabled": lambda: False}, None),
        ({"enabled": lambda params: False, "default_params": Style()}, None),
        ({"enabled": lambda *, session: session.tags["x"]}, "A"),
        ({"visibility": SectionVisibility.SUMMARY, "summary": "Short."}, "A"),
    ],
    ids=["disabled", "disabled by params", "a session will tell", "summarised"],
)
def test_a_disabled_section_brings_nothing_along(arguments: dict[str, Any], source: str | None) -> None:
    assert source_of(prompt(bringing("A", **arguments))) == source
    assert source_of(prompt(text("Above", children=[bringing("A")], **arguments))) == source


def test_a_section_with_a_rule_of_its_own_brings_its_resources_along() -> None:
    class Ruled(Bringing[None]):
        def is_enabled(self, params: None, *, session: Session | None) -> bool:
            return session is not None

    assert source_of(prompt(Ruled(title="A", template="", enabled=lambda: True))) == "A"


def test_a_section_whose_params_are_still_missing_brings_its_resources_along() -> None:
    section = Bringing[Task](title="A", template="", enabled=lambda params: params.what == "on")
    assert source_of(prompt(section)) == "A"
    assert source_of(prompt(section).bind(Task("off"))) is None


def test_resources_are_there_inside_the_block_only() -> None:
    bound = prompt().bind(resources={Client: Client("x")})
    for use in (lambda: bound.resources.get(Client), lambda: bound.resources.context, bound.filesystem):
        with pytest.raises(RuntimeError, match=r"with prompt\.resources"):
            use()
    with bound.resources:
        assert bound.resources.context.get(Client) is bound.resources.get(Client)


def test_the_outer_block_owns_the_resources() -> None:
    built = list[Client]()
    bound = prompt().bind(resources={Client: Binding(Client, lambda r: built.append(Client("x")) or built[-1])})
    with bound.resources:
        with bound.resources as inner:
            client = inner.get(Client)
        assert bound.resources.get(Client) is client
    with bound.resources as again:
        assert again.get(Client) is not client


def test_eager_resources_may_ask_the_prompt_itself() -> None:
    bound = prompt().bind(
        resources={Client: Client("x"), list: Binding(list, lambda r: [bound.resources.get(Client)], eager=True)}
    )
    with bound.resources as resources:
        assert resources.get(list) == [resources.get(Client)]


def test_resources_cannot_be_bound_too_late() -> None:
    bound = prompt(text("T", default_params=Style()))
    with bound.resources:
        with pytest.raises(RuntimeError, match="before"):
            bound.bind(resources={Client: Client("late")})
        bound.bind(Style("params are welcome"))


def test_the_filesystem_is_a_resource_like_another() -> None:
    files = InMemoryFilesystem()
    with_files, without = prompt().bind(resources={Filesystem: files}), prompt()
    with with_files.resources, without.resources:
        assert with_files.filesystem() is files
        assert without.filesystem() is None
