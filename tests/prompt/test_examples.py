"""The shapes in which people write tools, prompts, policies and resources, each as it stands in a guide."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolHandler,
    ToolRenderableResult,
    ToolResult,
    ToolsSection,
)
from ringfence.resources import Binding, Scope
from ringfence.runtime import Session, ToolInvoked


@dataclass(slots=True, frozen=True)
class MyParams:
    query: str


@dataclass(slots=True, frozen=True)
class MyResult:
    answer: str

    def render(self) -> str:
        return self.answer


def handler(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
    return ToolResult.ok(MyResult(answer="42"), message="ok")


def failing(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
    return ToolResult.error("Something went wrong")


def my_tool(name: str = "my_tool", run: ToolHandler[MyParams, MyResult] | None = handler) -> Tool[MyParams, MyResult]:
    return Tool[MyParams, MyResult](name=name, description="Do a thing.", handler=run)


def call(prompt: Prompt[Any], name: str, arguments: dict[str, Any], session: Session | None = None) -> ToolResult[Any]:
    with prompt.resources:
        return ToolExecutor(prompt=prompt, session=session or Session()).call(name, arguments)


def test_the_skeleton_of_a_tool() -> None:
    section = MarkdownSection(title="Work", key="work", template="Use it.", tools=[my_tool()])
    result = call(Prompt(PromptTemplate(ns="guide", key="skeleton", sections=[section])), "my_tool", {"query": "?"})
    assert (result.value, result.message, result.success) == (MyResult("42"), "ok", True)


def test_a_result_that_renders_itself_is_what_the_model_reads() -> None:
    assert isinstance(MyResult("42"), ToolRenderableResult)
    assert ToolResult.ok(MyResult("42")).text() == "OK\n\n42"


def test_a_handler_reaches_the_filesystem_both_ways() -> None:
    def read(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
        files = context.resources.get(Filesystem)
        assert files == context.filesystem
        return ToolResult.ok(MyResult(files.read("config.yaml").content))

    files = InMemoryFilesystem()
    files.write("config.yaml", "a: 1")
    section = MarkdownSection(title="W", key="w", template="x", tools=[my_tool(run=read)])
    prompt = Prompt(PromptTemplate(ns="guide", key="files", sections=[section])).bind(resources={Filesystem: files})
    assert call(prompt, "my_tool", {"query": "?"}).value == MyResult("a: 1")


@dataclass(frozen=True)
class Guidance:
    audience: str


def test_tools_and_policies_live_on_sections() -> None:
    section = MarkdownSection[Guidance](
        title="Guidance",
        key="guidance",
        template="Use tools when needed, $audience.",
        tools=[my_tool("lookup"), my_tool("search")],
        policies=[ReadBeforeWritePolicy()],
    )
    prompt = Prompt(PromptTemplate(ns="guide", key="sections", sections=[section])).bind(Guidance("friend"))
    rendered = prompt.render()
    assert [tool.name for tool in rendered.tools] == ["lookup", "search"]
    assert "Use tools when needed, friend." in rendered.text


def test_policies_of_sections_and_of_the_template() -> None:
    deploy_policy = SequentialDependencyPolicy(
        dependencies={"deploy": frozenset({"test", "build"}), "build": frozenset({"lint"})}
    )
    template = PromptTemplate(
        ns="guide",
        key="policies",
        sections=[
            MarkdownSection(
                title="Files",
                key="files",
                template="Files.",
                tools=[my_tool("read_file"), my_tool("write_file")],
                policies=[ReadBeforeWritePolicy()],
            ),
            MarkdownSection(
                title="Deployment",
                key="deployment",
                template="Deploy the application after testing.",
                tools=(my_tool("lint"), my_tool("test"), my_tool("build"), my_tool("deploy")),
                policies=(deploy_policy,),
            ),
        ],
        policies=[SequentialDependencyPolicy({"lint": {"read_file"}})],
    )
    prompt, session = Prompt(template), Session()
    order = [
        ("deploy", False),
        ("build", False),
        ("lint", False),
        ("read_file", True),
        ("lint", True),
        ("build", True),
        ("test", True),
        ("deploy", True),
    ]
    assert [(name, call(prompt, name, {"query": "?"}, session).success) for name, _ in order] == order


@dataclass
class Config:
    url: str = "https://api.example.com"

    @staticmethod
    def from_env() -> Config:
        return Config()


@dataclass
class HTTPClient:
    base_url: str


@dataclass
class Tracer:
    spans: list[str] = field(default_factory=list[str])


def test_resources_bound_lazily_with_dependencies_and_scopes() -> None:
    seen: list[tuple[HTTPClient, Tracer]] = []

    def use(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
        seen.append((context.resources.get(HTTPClient), context.resources.get(Tracer)))
        return ToolResult.ok(MyResult("x"))

    section = MarkdownSection[Guidance](title="W", key="w", template="$audience", tools=[my_tool(run=use)])
    prompt = Prompt(PromptTemplate(ns="guide", key="resources", sections=[section])).bind(
        Guidance("you"),
        resources={
            Config: Binding(Config, lambda r: Config.from_env()),
            HTTPClient: Binding(HTTPClient, lambda r: HTTPClient(r.get(Config).url)),
            Tracer: Binding(Tracer, lambda r: Tracer(), scope=Scope.TOOL_CALL),
        },
    )
    adapter = ScriptedAdapter(
        [{"tool_calls": [{"name": "my_tool", "arguments": {"query": "a"}}] * 2}, {"text": "done"}]
    )
    with prompt.resources:
        response = adapter.evaluate(prompt, session=Session())
    assert response.text == "done"
    (client, tracer), (same_client, other_tracer) = seen
    assert client is same_client
    assert client.base_url == "https://api.example.com"
    assert tracer is not other_tracer


def test_events_of_tools_are_published_through_the_session() -> None:
    @dataclass(frozen=True)
    class Custom:
        text: str

    def publish(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
        assert context.event_bus is context.session.dispatcher
        context.session.dispatcher.dispatch(Custom(params.query))
        return ToolResult.ok(MyResult("x"))

    session, heard = Session(), list[object]()
    session.dispatcher.subscribe(Custom, heard.append)
    section = MarkdownSection(title="W", key="w", template="x", tools=[my_tool(run=publish)])
    call(Prompt(PromptTemplate(ns="guide", key="events", sections=[section])), "my_tool", {"query": "hi"}, session)
    assert heard == [Custom("hi")]


@dataclass
class LookupParams:
    entity_id: str = field(metadata={"description": "Global identifier to fetch"})
    include_related: bool = field(default=False)


@dataclass
class LookupResult:
    entity_id: str
    document_url: str


def lookup_handler(params: LookupParams, *, context: ToolContext) -> ToolResult[LookupResult]:
    result = LookupResult(entity_id=params.entity_id, document_url="https://example.com")
    message = f"Fetched entity {result.entity_id}."
    return ToolResult(message=message, value=result)


lookup_tool = Tool[LookupParams, LookupResult](
    name="lookup_entity",
    description="Fetch structured information for a given entity id.",
    handler=lookup_handler,
)


def test_a_one_off_prompt_needs_no_template_and_a_section_no_key() -> None:
    prompt = Prompt(
        ns="examples/tooling",
        key="tools_overview",
        name="tools_overview",
        sections=[
            MarkdownSection(
                title="Guidance",
                template="Use tools when you need up-to-date context.",
                tools=[lookup_tool],
            )
        ],
    )
    rendered = prompt.render()
    assert "Use tools when you need up-to-date context." in rendered.text
    tools = rendered.tools
    assert tools[0].name == "lookup_entity"
    assert rendered.tool_param_descriptions["lookup_entity"]["entity_id"] == "Global identifier to fetch"
    assert call(prompt, "lookup_entity", {"entity_id": "7"}).message == "Fetched entity 7."


def test_the_event_of_a_call_has_the_text_that_the_model_read_also_when_it_failed() -> None:
    session = Session()
    section = MarkdownSection(title="W", key="w", template="x", tools=[my_tool(), my_tool("broken", failing)])
    prompt = Prompt(PromptTemplate(ns="guide", key="telemetry", sections=[section]))
    call(prompt, "my_tool", {"query": "a"}, session)
    call(prompt, "broken", {"query": "a"}, session)
    good, bad = session[ToolInvoked].all()
    assert (good.result.success, good.rendered_output) == (True, "42")
    assert (bad.result.success, bad.result.value, bad.rendered_output) == (False, None, "")


def test_a_handler_delegates_to_a_child_prompt_through_its_adapter() -> None:
    child = Prompt(ns="guide", key="child", sections=[MarkdownSection(title="Sub", template="Sum up.")])

    def delegate(params: MyParams, *, context: ToolContext) -> ToolResult[MyResult]:
        assert context.adapter is not None
        response = context.adapter.evaluate(child, session=context.session)
        return ToolResult(message="Delegated work to sub-agent", value=MyResult(response.text or ""))

    section = MarkdownSection(title="W", key="w", template="x", tools=[my_tool("delegate", delegate)])
    prompt = Prompt(PromptTemplate(ns="guide", key="outer", sections=[section]))
    turns = [{"tool_calls": [{"name": "delegate", "arguments": {"query": "?"}}]}, {"text": "inner"}, {"text": "outer"}]
    adapter, session = ScriptedAdapter(turns), Session()
    assert adapter.evaluate(prompt, session=session).text == "outer"
    assert session[MyResult].latest() == MyResult("inner")


@dataclass
class GuidanceParams:
    primary_tool: str


def test_a_tools_section_carries_tools_and_lists_none_in_its_text() -> None:
    overview = Prompt(
        ns="guide",
        key="tools",
        name="tools_overview",
        sections=[
            MarkdownSection[GuidanceParams](
                title="Guidance",
                template="Prefer ${primary_tool} for critical lookups.",
                children=[
                    ToolsSection[GuidanceParams](
                        title="Available Tools",
                        tools=[lookup_tool],
                        description="Invoke ${primary_tool} whenever you need fresh entity context.",
                    )
                ],
            )
        ],
    )
    rendered = overview.bind(GuidanceParams(primary_tool="lookup_entity")).render()
    assert "Invoke lookup_entity whenever" in rendered.text
    assert lookup_tool.description not in rendered.text
    assert overview.tools()[0].name == "lookup_entity"
