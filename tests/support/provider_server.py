"""A model provider on this machine: real HTTP, the real protocols, answers and failures that are written down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import provider_shapes as shapes

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer with an error's status, or one that is not what it should be."""

    status: int = 200
    body: object = None
    """A value that is sent as JSON, or bytes that are sent as they are."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    content_type: str = JSON_TYPE


@dataclass(frozen=True, slots=True)
class Broken:
    """A turn whose stream, or body, breaks off: after so many events, or in the middle."""

    turn: shapes.Turn
    after: int = 0
    politely: bool = False
    """The stream ends as if it were whole, where else the connection breaks."""
    then: bytes = b""
    """Written before the end."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A turn that comes after so many seconds, or with so many between two of its events."""

    turn: shapes.Turn
    before: float = 0.0
    between: float = 0.0


Reply = shapes.Turn | Failure | Broken | Slow


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    path: str
    headers: Mapping[str, str]
    body: Any


class ProviderServer:
    """Answers requests of Chat Completions, Responses, Messages and Gemini's API with ``replies``, one after the other;
    ``repeat`` begins again after the last. One that does not ``stream`` answers in one piece, whatever it is asked for.
    A turn is as of a `ScriptedAdapter`. Used by ``with``.
    """

    def __init__(self, replies: Sequence[Reply], *, repeat: bool = False, stream: bool = True) -> None:
        self.asked: list[Asked] = []
        self._replies = replies
        self._repeat = repeat
        self.streams = stream
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.provider = self
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        """For Anthropic's SDK."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def reply(self, asked: Asked) -> Reply:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
        if self._repeat:
            number %= len(self._replies)
        if number >= len(self._replies):
            return Failure(400, {"error": {"message": "the script has no reply left", "type": "invalid_request_error"}})
        return self._replies[number]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    provider: ProviderServer
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        reply = self.server.provider.reply(Asked(self.path, dict(self.headers.items()), body))
        asked_to = bool(body.get("stream")) or self._kind.startswith("stream")
        streamed = asked_to and self.server.provider.streams
        if isinstance(reply, Failure):
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self._whole(reply.status, data, reply.content_type, reply.headers)
        elif isinstance(reply, Broken):
            self._break(reply, streamed)
        else:
            slow = reply if isinstance(reply, Slow) else Slow(reply)
            if self.server.provider.stopped.wait(slow.before):
                return
            if not streamed:
                self._whole(200, json.dumps(self._shape(slow.turn)).encode(), JSON_TYPE, {})
                return
            self._begin_events()
            for event in self._events(slow.turn):
                self._chunk(event)
                if slow.between and self.server.provider.stopped.wait(slow.between):
                    return
            self._chunk(b"")

    def _break(self, reply: Broken, streamed: bool) -> None:
        self.close_connection = not reply.politely
        if not streamed:
            data = json.dumps(self._shape(reply.turn)).encode()
            self._whole(200, data[: len(data) // 2], JSON_TYPE, {"content-length": str(len(data))})
            return
        self._begin_events()
        for _, event in zip(range(reply.after), self._events(reply.turn), strict=False):
            self._chunk(event)
        if reply.then:
            self._chunk(reply.then)
        if reply.politely:
            self._chunk(b"")

    def _shape(self, turn: shapes.Turn) -> object:
        whole = {
            "completions": shapes.chat,
            "responses": shapes.responses,
            "messages": shapes.messages,
            "generateContent": shapes.contents,
        }
        return whole[self._kind](turn)

    def _events(self, turn: shapes.Turn) -> Iterator[bytes]:
        events = {
            "completions": shapes.chat_events,
            "responses": shapes.responses_events,
            "messages": shapes.messages_events,
            "streamGenerateContent": shapes.contents_events,
        }
        for name, data in events[self._kind](turn):
            text = data if isinstance(data, str) else json.dumps(data)
            yield f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n".encode()

    @property
    def _kind(self) -> str:
        return self.path.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2]

    def _whole(self, status: int, data: bytes, content_type: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": content_type, "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _begin_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", EVENTS_TYPE)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        """One chunk of the body; an empty one is its end."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
