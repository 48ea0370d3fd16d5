"""`ringfence run` and `ringfence serve` under OpenTelemetry's environment variables, before a real collector."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
READ = {"tool_calls": [{"name": "read_file", "arguments": {"file_path": "a.txt"}}]}
DONE = {"text": "Done."}


@dataclass
class Collector:
    """An OTLP collector over HTTP, and what it was sent."""

    status: int = 200
    bodies: dict[str, list[bytes]] = field(default_factory=dict)
    endpoint: str = ""

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                unzipped = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                collector.bodies.setdefault(self.path, []).append(unzipped)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    @property
    def spans(self) -> dict[str, Span]:
        """By their names."""
        return {
            span.name: span
            for body in self.bodies.get("/v1/traces", [])
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    @property
    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for body in self.bodies["/v1/traces"]
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }

    @property
    def metrics(self) -> set[str]:
        return {
            metric.name
            for body in self.bodies["/v1/metrics"]
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in (READ, DONE)))
    return tmp_path / "tree"


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "no_proxy": "127.0.0.1", **variables}


def run(tree: Path, *start: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(start or ("-m", "ringfence_cli")), "run", str(tree), "--workspace", "memory"]
    return subprocess.run(
        [*command, "--task", "x", "--model", f"script:{tree.parent / 'script.jsonl'}"],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_endpoint_in_the_environment_gets_the_spans_and_metrics_of_a_run(tree: Path) -> None:
    with Collector().listening() as collector:
        ended = run(tree, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, TRACEPARENT=TRACEPARENT)
    assert (ended.returncode, "telemetry" in ended.stderr) == (0, False)
    assert sorted(collector.spans) == ["chat", "execute_tool read_file", "invoke_agent ringfence:run"]
    assert {span.trace_id.hex() for span in collector.spans.values()} == {TRACE}
    assert collector.spans["invoke_agent ringfence:run"].parent_span_id.hex() == PARENT
    assert collector.services == {"ringfence"}
    assert "gen_ai.execute_tool.duration" in collector.metrics


def test_the_environment_names_the_service_and_what_is_exported(tree: Path) -> None:
    with Collector().listening() as collector:
        endpoint = f"{collector.endpoint}/v1/traces"
        run(tree, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint, OTEL_SERVICE_NAME="mine")
        assert (collector.services, [*collector.bodies]) == ({"mine"}, ["/v1/traces"])
        collector.bodies.clear()
        run(tree, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_SDK_DISABLED="true")
        assert collector.bodies == {}


def test_a_collector_that_refuses_is_told_and_costs_the_run_nothing(tree: Path) -> None:
    with Collector(status=400).listening() as collector:
        ended = run(tree, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    assert ended.returncode == 0
    assert "telemetry is not complete" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "ringfence speaks http/protobuf"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "x", "OTEL_TRACES_SAMPLER": "never"}, ""),
    ],
)
def test_variables_that_make_no_sense_stop_no_work(tree: Path, variables: dict[str, str], said: str) -> None:
    none = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"}
    ended = run(tree, **none, OTEL_TRACES_EXPORTER="none", **variables)
    assert ended.returncode == 0
    assert said in ended.stderr


START = "import sys; {before}; from ringfence_cli.main import main; main()"


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry"])
def test_a_missing_package_is_named_with_how_to_get_it(tree: Path, missing: str) -> None:
    program = START.format(before=f"sys.modules[{missing!r}] = None")
    ended = run(tree, "-c", program, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert ended.returncode == 0
    assert "no telemetry: opentelemetry" in ended.stderr
    assert "pip install" in ended.stderr


def test_unasked_nothing_of_opentelemetry_is_loaded(tree: Path) -> None:
    check = "import atexit; atexit.register(lambda: print([n for n in sys.modules if n.startswith('opentel')]))"
    assert run(tree, "-c", START.format(before=check)).stdout == "[]\n"


def test_a_program_that_has_set_opentelemetry_up_is_heard_by_its_own_providers(tree: Path) -> None:
    before = (
        "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider; "
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter; "
        "p = TracerProvider(); p.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter("
        "formatter=lambda span: 'span: ' + span.name + chr(10)))); trace.set_tracer_provider(p)"
    )
    ended = run(tree, "-c", START.format(before=before))
    assert ended.returncode == 0, ended.stderr
    spans = [line for line in ended.stdout.splitlines() if line.startswith("span: ")]
    assert spans == ["span: chat", "span: execute_tool read_file", "span: chat", "span: invoke_agent ringfence:run"]


def test_a_served_call_is_within_its_request_and_that_within_the_client_s_trace(tree: Path) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    call = {"name": "read_file", "arguments": {"file_path": "a.txt"}, "_meta": {"traceparent": TRACEPARENT}}
    asked = [
        {"id": 0, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/call", "params": call},
    ]
    with (
        Collector().listening() as collector,
        subprocess.Popen(
            [sys.executable, "-m", "ringfence_cli", "serve", str(tree), "--workspace", "memory"],
            env=environment(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        for message in asked:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
            if "id" in message:
                assert "result" in json.loads(server.stdout.readline())
        server.stdin.close()
        assert server.wait(60) == 0
    request, inner = collector.spans["tools/call read_file"], collector.spans["execute_tool read_file"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert (inner.trace_id, inner.parent_span_id) == (request.trace_id, request.span_id)
    assert request.kind == Span.SPAN_KIND_SERVER
