"""Evaluations, model calls and tool calls as OpenTelemetry's own SDK gets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ringfence.adapters import PromptEvaluationError, ScriptedAdapter, ToolExecutor
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import MarkdownSection, PathPolicy, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Receipt, Session, ToolCallStarted
from ringfence.telemetry import Telemetry
from ringfence_sandbox import Workspace
from ringfence_tools import Delegate, DelegatedTask, DelegationSection, VfsToolsSection

SECRET = "the secret words"


@dataclass
class Collected:
    """A telemetry, and what came of it."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)
    provider: TracerProvider = field(default_factory=TracerProvider)

    def telemetry(self, **options: Any) -> Telemetry:
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        meters = MeterProvider(metric_readers=[self.reader])
        return Telemetry(tracer_provider=self.provider, meter_provider=meters, **options)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: (span.start_time, -span.end_time))

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> Mapping[str, Any]:
        """Names, each above those of the spans within it."""

        def below(parent: int | None) -> dict[str, Any]:
            return {
                span.name: below(span.context.span_id)
                for span in self.spans
                if (span.parent.span_id if span.parent else None) == parent
            }

        return below(None)

    def points(self, metric: str) -> list[HistogramDataPoint]:
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for found in scope.metrics
            if found.name == metric
            for point in found.data.data_points
        ]


@pytest.fixture
def collected() -> Collected:
    return Collected()


def files_prompt(session: Session, name: str = "coder", **options: Any) -> Prompt[Any]:
    files = InMemoryFilesystem()
    files.write("a.txt", "one\n")
    section = VfsToolsSection(session=session, filesystem=files)
    return Prompt(PromptTemplate(ns="tests", key="otel", name=name, sections=[section], **options))


def calls(*asked: tuple[str, Any], text: str = "", **usage: int) -> dict[str, Any]:
    return {"text": text, "tool_calls": [{"name": n, "arguments": a} for n, a in asked], "usage": usage}


READ = ("read_file", {"file_path": "a.txt"})
WRITE = ("write_file", {"file_path": "a.txt", "content": SECRET})


def evaluate(collected: Collected, *turns: Any, prompt: Any = files_prompt, **options: Any) -> Session:
    session = Session()
    collected.telemetry(**options).observe(session)
    ScriptedAdapter(list(turns)).evaluate(prompt(session), session=session)
    return session


def test_an_evaluation_is_a_tree_of_spans_with_what_the_conventions_name(collected: Collected) -> None:
    evaluate(collected, calls(READ, WRITE, input_tokens=9, output_tokens=2, cached_tokens=4), {"text": "Done."})
    assert [span.name for span in collected.spans] == [
        "invoke_agent coder",
        "chat",
        "execute_tool read_file",
        "execute_tool write_file",
        "chat",
    ]
    agent = collected.spans[0]
    assert {span.parent.span_id for span in collected.spans[1:]} == {agent.context.span_id}
    assert [span.kind for span in collected.spans[:3]] == [SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL]
    assert agent.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert (agent.attributes["gen_ai.agent.name"], agent.attributes["gen_ai.usage.input_tokens"]) == ("coder", 9)
    chat = collected.spans[1].attributes
    assert chat["gen_ai.provider.name"] == "scripted"
    assert chat["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert (chat["gen_ai.usage.output_tokens"], chat["gen_ai.usage.cache_read.input_tokens"]) == (2, 4)
    assert collected.spans[4].attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert all(span.status.status_code is StatusCode.UNSET for span in collected.spans)


def test_a_tool_call_s_span_says_what_its_receipt_says(collected: Collected) -> None:
    session = evaluate(collected, calls(READ, WRITE), {"text": "Done."})
    receipt, span = session[Receipt].all()[1], collected.named("execute_tool write_file")
    assert span.attributes["gen_ai.tool.call.id"] == receipt.call_id == "call_2"
    assert span.attributes["ringfence.receipt.id"] == receipt.receipt_id
    assert span.attributes["ringfence.outcome"] == "committed"
    assert span.attributes["ringfence.files.changed"] == 1
    assert span.attributes["ringfence.diff.bytes_before"] == 4
    assert span.attributes["ringfence.diff.bytes_after"] == receipt.diff_bytes[1] > 4
    assert collected.named("execute_tool read_file").attributes["ringfence.files.read"] == 1
    assert abs(span.start_time / 1e9 - receipt.started_at.timestamp()) < 1e-5
    assert abs((span.end_time - span.start_time) / 1e9 - receipt.duration_seconds) < 1e-5


def test_a_step_on_disk_is_named_by_its_commit(collected: Collected, tmp_path: Path) -> None:
    session = Session()
    collected.telemetry().observe(session)
    with Workspace.open(tmp_path) as disk:
        section = VfsToolsSection(session=session, filesystem=disk.filesystem)
        prompt = Prompt(PromptTemplate(ns="tests", key="disk", sections=[section]))
        with prompt.resources:
            call = ToolExecutor(prompt=prompt, session=session).call
            assert call("write_file", {"file_path": "b.txt", "content": "x"}).success
        (step,) = disk.steps()
    assert collected.named("execute_tool write_file").attributes["ringfence.commit.id"] == step.commit


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (WRITE, "policy_denied"),
        (("write_file", {"file_path": 1}), "validation_error"),
        (("write_file", "{not json"), "validation_error"),
        (("fly", {}), "unknown_tool"),
        (("read_file", {"file_path": "missing"}), "tool_error"),
    ],
)
def test_a_failed_call_has_one_of_few_words_and_no_content(collected: Collected, call: Any, error: str) -> None:
    evaluate(collected, calls(call), {"text": "Done."})
    span = collected.spans[2]
    assert span.name == ("execute_tool" if error == "unknown_tool" else f"execute_tool {call[0]}")
    assert (span.attributes["error.type"], span.status.status_code) == (error, StatusCode.ERROR)
    assert (span.status.description, span.events) == (None, ())
    assert collected.spans[0].status.status_code is StatusCode.UNSET


def test_a_denied_call_names_the_policy(collected: Collected) -> None:
    def guarded(session: Session) -> Prompt[Any]:
        return files_prompt(session, policies=[PathPolicy(allow=["src/**"])])

    evaluate(
        collected, calls(("write_file", {"file_path": "b.txt", "content": "x"})), {"text": "Done."}, prompt=guarded
    )
    found = collected.named("execute_tool write_file").attributes
    assert (found["ringfence.outcome"], found["ringfence.policy.denied_by"]) == ("denied", PathPolicy(allow=["x"]).name)


def test_nothing_that_a_model_or_a_tool_said_is_in_a_span_unless_asked_for(collected: Collected) -> None:
    evaluate(collected, calls(READ, WRITE, text=SECRET), {"text": SECRET})
    everything = repr([(span.name, dict(span.attributes)) for span in collected.spans])
    assert "secret" not in everything
    assert "a.txt" not in everything
    assert "one" not in [value for span in collected.spans for value in span.attributes.values()]


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_content_is_captured_on_request_as_text_that_can_be_sent(
    collected: Collected, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY" if way == "environment" else ""
    )
    options = {"capture_content": True} if way == "argument" else {}
    odd = ("write_file", {"file_path": "b.txt", "content": "\ud800"})
    evaluate(collected, calls(READ, odd, text=SECRET), {"text": "Done."}, **options)
    arguments = collected.named("execute_tool write_file").attributes["gen_ai.tool.call.arguments"]
    assert json.loads(arguments) == {"file_path": "b.txt", "content": "\\ud800"}
    assert "one" in collected.named("execute_tool read_file").attributes["gen_ai.tool.call.result"]
    (said,) = json.loads(collected.spans[1].attributes["gen_ai.output.messages"])
    assert [part["type"] for part in said["parts"]] == ["text", "tool_call", "tool_call"]
    assert all(str(value).encode() for span in collected.spans for value in span.attributes.values())


def test_captured_content_is_bounded(collected: Collected) -> None:
    write = ("write_file", {"file_path": "b.txt", "content": "x" * 1_000_000})
    evaluate(collected, calls(write), {"text": "Done."}, capture_content=True)
    captured = collected.named("execute_tool write_file").attributes["gen_ai.tool.call.arguments"]
    assert len(captured) < 40_000
    assert captured.endswith("more characters]")


def delegating(session: Session) -> Prompt[Any]:
    section = MarkdownSection(title="Task", key="task", template="$task", default_params=DelegatedTask("x"))
    files = VfsToolsSection(session=session, filesystem=InMemoryFilesystem())
    child = PromptTemplate(ns="tests", key="child", name="helper", sections=[section, files])
    delegation = DelegationSection([Delegate("helper", "Helps.", child)])
    return Prompt(PromptTemplate(ns="tests", key="parent", name="boss", sections=[delegation]))


REFUSED = {"text": "I must not.", "ended": "refused"}
DELEGATE = ("delegate", {"to": "helper", "task": "help"})


def test_a_child_s_evaluation_is_within_the_call_that_made_it(collected: Collected) -> None:
    evaluate(collected, calls(DELEGATE), calls(("ls", {})), {"text": "helped"}, {"text": "Done."}, prompt=delegating)
    inner = {"chat": {}, "execute_tool ls": {}}
    assert collected.tree() == {
        "invoke_agent boss": {"chat": {}, "execute_tool delegate": {"invoke_agent helper": inner}}
    }
    assert len({span.context.trace_id for span in collected.spans}) == 1


def test_only_the_child_that_fails_and_its_call_have_an_error_and_each_call_is_measured_once(
    collected: Collected,
) -> None:
    evaluate(collected, calls(DELEGATE), calls(("ls", {})), REFUSED, {"text": "Done."}, prompt=delegating)
    failed = [span.name for span in collected.spans if span.status.status_code is StatusCode.ERROR]
    assert failed == ["execute_tool delegate", "invoke_agent helper"]
    assert collected.named("invoke_agent helper").attributes["error.type"] == "PromptEvaluationError"
    assert [span.name for span in collected.spans if span.name == "execute_tool ls"] == ["execute_tool ls"]
    points = collected.points("gen_ai.execute_tool.duration")
    assert sorted(point.count for point in points) == [1, 1]


def test_a_model_that_fails_is_an_error_of_its_call_and_of_the_evaluation(collected: Collected) -> None:
    with pytest.raises(PromptEvaluationError):
        evaluate(collected, calls(READ))
    ended = [(span.name, span.attributes.get("error.type")) for span in collected.spans]
    assert ended[0] == ("invoke_agent coder", "PromptEvaluationError")
    assert ended[-1] == ("chat", "PromptEvaluationError")


def test_evaluations_on_threads_do_not_get_into_each_other_s_traces(collected: Collected) -> None:
    telemetry = collected.telemetry()

    def work(number: int) -> None:
        session = Session()
        telemetry.observe(session)
        turns = [calls(("ls", {})), calls(("ls", {})), {"text": "Done."}]
        ScriptedAdapter(turns).evaluate(files_prompt(session, f"agent-{number}"), session=session)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    traces: dict[int, list[str]] = {}
    for span in collected.spans:
        traces.setdefault(span.context.trace_id, []).append(str(span.attributes.get("gen_ai.agent.name", "")))
    assert len(traces) == 24
    assert all(len(found) == 6 and len(set(found) - {""}) == 1 for found in traces.values())


def test_children_on_threads_that_have_the_context_are_within_the_call_that_started_them(collected: Collected) -> None:
    child = ScriptedAdapter(lambda conversation: {"text": "helped"})

    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        def help_out(number: int) -> None:
            section = MarkdownSection(title="Help", key="help", template="Help.")
            prompt = Prompt(PromptTemplate(ns="tests", key="help", name=f"helper-{number}", sections=[section]))
            child.evaluate(prompt, session=context.session)

        threads = [Thread(target=copy_context().run, args=(help_out, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ToolResult.ok(None, message="helped")

    evaluate(collected, calls(("own", {})), {"text": "Done."}, prompt=lambda session: with_tool(handler))
    helpers = {f"invoke_agent helper-{number}": {"chat": {}} for number in range(3)}
    assert collected.tree() == {"invoke_agent owner": {"chat": {}, "execute_tool own": helpers}}


@dataclass(frozen=True)
class Nothing:
    pass


def with_tool(handler: Any) -> Prompt[Any]:
    tool = Tool(name="own", description="One's own.", handler=handler)
    section = MarkdownSection(title="Own", key="own", template="Use it.", tools=[tool])
    return Prompt(PromptTemplate(ns="tests", key="own", name="owner", sections=[section]))


def test_spans_of_other_libraries_are_within_the_call_that_they_happen_in(collected: Collected) -> None:
    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        with collected.provider.get_tracer("other").start_as_current_span("GET"):
            return ToolResult.ok(None, message="got")

    with collected.provider.get_tracer("other").start_as_current_span("request"):
        evaluate(collected, calls(("own", {})), {"text": "Done."}, prompt=lambda session: with_tool(handler))
    assert collected.tree() == {"request": {"invoke_agent owner": {"chat": {}, "execute_tool own": {"GET": {}}}}}


@dataclass(frozen=True)
class Ran:
    exit_code: int


def test_a_command_s_exit_code_is_said(collected: Collected) -> None:
    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[Ran]:
        return ToolResult.ok(Ran(3), message="ran")

    evaluate(collected, calls(("own", {})), {"text": "Done."}, prompt=lambda session: with_tool(handler))
    span = collected.named("execute_tool own")
    assert (span.attributes["process.exit.code"], span.status.status_code) == (3, StatusCode.UNSET)


def test_an_interrupt_ends_all_spans_and_leaves_no_context_behind(collected: Collected) -> None:
    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(collected, calls(("own", {})), prompt=lambda session: with_tool(handler))
    assert [span.attributes.get("error.type") for span in collected.spans] == ["interrupted", None, "interrupted"]
    assert not trace.get_current_span().get_span_context().is_valid


def test_what_an_interrupt_kept_from_being_told_ends_with_what_is_around_it(collected: Collected) -> None:
    def lost(event: ToolCallStarted) -> None:
        raise KeyboardInterrupt

    session = Session()
    collected.telemetry().observe(session)
    session.dispatcher.subscribe(ToolCallStarted, lost)  # after the span has begun, before the call can end
    with pytest.raises(KeyboardInterrupt):
        ScriptedAdapter([calls(READ)]).evaluate(files_prompt(session), session=session)
    assert [span.name for span in collected.spans] == ["invoke_agent coder", "chat", "execute_tool read_file"]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_session_that_is_observed_twice_makes_each_span_once(collected: Collected) -> None:
    session, telemetry = Session(), collected.telemetry()
    telemetry.observe(session)
    telemetry.observe(session)
    ScriptedAdapter([{"text": "Done."}]).evaluate(files_prompt(session), session=session)
    assert len(collected.spans) == 2


def test_durations_and_tokens_are_measured_without_names_that_a_model_made_up(collected: Collected) -> None:
    evaluate(collected, calls(READ, READ, ("fly", {}), input_tokens=9, output_tokens=2), {"text": "Done."})
    tools = {
        (point.attributes["gen_ai.tool.name"], point.attributes.get("error.type")): point.count
        for point in collected.points("gen_ai.execute_tool.duration")
    }
    assert tools == {("read_file", None): 2, ("_OTHER", "unknown_tool"): 1}
    (models,) = collected.points("gen_ai.client.operation.duration")
    assert (models.count, models.attributes["gen_ai.operation.name"]) == (2, "chat")
    used = {point.attributes["gen_ai.token.type"]: point.sum for point in collected.points("gen_ai.client.token.usage")}
    assert used == {"input": 9, "output": 2}


def test_a_broken_exporter_never_fails_a_call(collected: Collected) -> None:
    class Broken(SimpleSpanProcessor):
        def on_start(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

    collected.provider.add_span_processor(Broken(collected.exporter))
    session = evaluate(collected, calls(READ), {"text": "Done."})
    assert [receipt.outcome for receipt in session[Receipt].all()] == ["committed"]
    assert not trace.get_current_span().get_span_context().is_valid


def test_without_an_observer_no_event_is_made_and_opentelemetry_is_not_loaded() -> None:
    program = (
        "import sys\nfrom ringfence import *\nfrom ringfence.runtime import ToolCallStarted\n"
        "from ringfence.runtime import tool_executor\n"
        "def made(*a, **k): raise AssertionError('made')\n"
        "tool_executor.ToolCallStarted.__init__ = made\n"
        "from ringfence_tools import VfsToolsSection\n"
        "session = Session()\n"
        "section = VfsToolsSection(session=session, filesystem=InMemoryFilesystem())\n"
        "adapter = ScriptedAdapter([{'tool_calls': [{'name': 'ls', 'arguments': {}}]}, {'text': 'x'}])\n"
        "adapter.evaluate(Prompt(PromptTemplate(ns='a', key='b', sections=[section])), session=session)\n"
        "assert [r.outcome for r in session[Receipt].all()] == ['committed']\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "try:\n    import ringfence.telemetry\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.search(r"ringfence's extra 'otel' needs: pip install .*\[otel\]", done.stdout)
