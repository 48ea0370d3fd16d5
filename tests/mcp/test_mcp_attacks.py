"""`ringfence serve --http` under clients that vanish, crowd, guess and never end, over real sockets."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp_servers import ERAS, HEADERS, HELLO, MODERN, PATIENT, TOKEN, Bench, HttpServer, http_server, message, result
from served import MAX_CLIENTS

HEARD = 1.0
"""In which a server on a busy machine has heard of the end of a connection."""


@pytest.fixture
def limits(request: pytest.FixtureRequest) -> dict[str, Any]:
    return getattr(request, "param", {})


def limited(**limits: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limits", [limits], indirect=True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def served(bench: Bench, limits: dict[str, Any]) -> Iterator[HttpServer]:
    with http_server(bench.workspace, **limits) as server:
        yield server
        bench.released.set()


@pytest.mark.parametrize("era", ERAS)
def test_a_call_whose_client_vanishes_is_rolled_back(served: HttpServer, bench: Bench, era: str) -> None:
    connection = served.calling("slow", served.session_of(era))
    assert bench.started.wait(PATIENT)
    connection.close()
    time.sleep(HEARD)
    bench.released.set()
    served.wait_for_receipt()
    assert [receipt.outcome for receipt in served.receipts] == ["interrupted"]
    assert not bench.filesystem.exists("slow.txt")


@pytest.mark.parametrize("era", ERAS)
def test_a_call_that_waits_when_its_client_vanishes_changes_nothing(served: HttpServer, bench: Bench, era: str) -> None:
    first = served.calling("slow", served.session())
    assert bench.started.wait(PATIENT)
    second = served.calling("write_file", served.session_of(era), file_path="waited.txt", content="x")
    time.sleep(0.2)
    second.close()
    time.sleep(HEARD)
    bench.released.set()
    assert not result(first)["isError"]
    assert not served.call("ls", served.session())["isError"]  # in the turn after it
    assert not bench.filesystem.exists("waited.txt")
    assert bench.filesystem.read("slow.txt").content == "whole\n"


def test_a_session_that_ends_in_the_middle_of_its_call_takes_the_call_with_it(served: HttpServer, bench: Bench) -> None:
    session = served.session()
    call = served.calling("slow", session)
    assert bench.started.wait(PATIENT)
    with closing(served.connection()) as connection:
        connection.request("DELETE", "/mcp", headers={**HEADERS, "mcp-session-id": session})
        assert connection.getresponse().status == 200
    time.sleep(HEARD)
    bench.released.set()
    served.wait_for_receipt()
    call.close()
    assert [receipt.outcome for receipt in served.receipts] == ["interrupted"]
    assert not bench.filesystem.exists("slow.txt")
    with closing(served.calling("ls", session)) as connection:
        assert connection.getresponse().status == 404


def test_nobody_cancels_the_call_of_another_by_its_number(served: HttpServer, bench: Bench) -> None:
    one, other = served.session(), served.session()
    call = served.calling("slow", one)
    assert bench.started.wait(PATIENT)
    cancel = json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
    for headers in ({"mcp-session-id": other}, {"MCP-Protocol-Version": MODERN}):
        with closing(served.connection()) as connection:
            connection.request("POST", "/mcp", cancel, {**HEADERS, **headers})
            connection.getresponse().read()
    bench.released.set()
    assert not result(call)["isError"]
    assert bench.filesystem.read("slow.txt").content == "whole\n"


def test_two_clients_with_one_number_get_each_its_own_answer(served: HttpServer, bench: Bench) -> None:
    one, other = served.session(), served.session()
    slow = served.calling("slow", one)
    assert bench.started.wait(PATIENT)
    listing = served.calling("ls", other)
    bench.released.set()
    assert not result(listing)["isError"]
    assert result(slow)["structuredContent"] == {"message": "OK"}


def test_a_client_that_waits_is_not_forgotten_for_those_that_come(served: HttpServer, bench: Bench) -> None:
    slow = served.calling("slow", served.session())
    assert bench.started.wait(PATIENT)
    sessions = [served.session() for _ in range(MAX_CLIENTS + 10)]
    with ThreadPoolExecutor(len(sessions)) as pool:
        answers = pool.map(partial(served.call, "ls"), sessions)
        time.sleep(0.5)  # so that they all wait
        bench.released.set()
        assert not any(answer["isError"] for answer in answers)
    assert not result(slow)["isError"], "its resources were closed in the middle of the call"
    assert bench.filesystem.read("slow.txt").content == "whole\n"


@limited(max_connections=100, request_seconds=1.0)
def test_connections_that_ask_for_nothing_are_few_and_end(served: HttpServer) -> None:
    half = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\n"
    before = len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT) for _ in range(150)]
    try:
        for number, connection in enumerate(idle):
            if number % 2:
                with suppress(ConnectionError):
                    connection.sendall(half)
        time.sleep(0.3)
        assert len(os.listdir("/proc/self/fd")) - before <= len(idle) + 100 + 20
        for connection in idle:
            assert ended(connection)
    finally:
        for connection in idle:
            connection.close()
    assert not served.call("ls", served.session())["isError"]


@limited(request_seconds=0.3)
def test_a_connection_that_trickles_after_its_first_request_ends(served: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        connection.sendall(f"GET /none HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        assert b" 404 " in connection.recv(1000)
        assert keeps_on_until_refused(connection, b"P", 0.05)


@limited(request_seconds=0.1)
def test_a_call_that_takes_longer_than_a_connection_may_be_idle_is_answered(served: HttpServer, bench: Bench) -> None:
    call = served.calling("slow", served.session())
    assert bench.started.wait(PATIENT)
    time.sleep(0.5)
    bench.released.set()
    assert not result(call)["isError"]


@limited(request_seconds=0.3)
@pytest.mark.parametrize("known", [False, True])
def test_a_body_without_end_is_not_read_for_ever(served: HttpServer, known: bool) -> None:
    authorised = f"Authorization: Bearer {TOKEN}\r\n" if known else ""
    head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\n{authorised}Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT) as connection:
        connection.sendall(head.encode())
        assert keeps_on_until_refused(connection, b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert not served.call("ls", served.session())["isError"]


@limited(request_seconds=0.3)
def test_a_body_that_does_not_come_is_not_waited_for(served: HttpServer) -> None:
    head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    kind = "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(f"{head}{kind}Content-Length: 1000\r\n\r\n{{".encode())
        assert ended(connection)
    assert not served.call("ls", served.session())["isError"]


@limited(max_sessions=3)
def test_there_is_room_for_so_many_sessions_and_those_that_are_go_on(served: HttpServer) -> None:
    sessions = [served.session() for _ in range(3)]
    with closing(served.asked("initialize", HELLO, None)) as connection:
        assert connection.getresponse().status == 503
    assert not served.call("ls", sessions[0])["isError"]


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (f"POST /mcp?token={TOKEN}", [], 401),
        ("POST /mcp", [f"Authorization: Bearer {TOKEN[:-1]}"], 401),
        ("POST /mcp", [f"Authorization: Bearer {TOKEN}x"], 401),
        ("POST /mcp", [f"Authorization: Bearer {TOKEN.upper()}"], 401),
        ("POST /mcp", ["Authorization: Bearer"], 401),
        ("POST /mcp", ["Authorization: Bearer \xff\xfe"], 401),
        ("POST /mcp", [f"Cookie: token={TOKEN}"], 401),
        ("OPTIONS /mcp", ["Origin: http://localhost:3000", "Access-Control-Request-Method: POST"], 401),
        ("GET /", [], 401),
        ("POST http://evil.example/mcp", [], 401),
        ("POST /mcp", [f"Authorization: Bearer {TOKEN}", "Host: evil.example"], 400),  # two of them
    ],
)
def test_there_is_no_other_way_in(served: HttpServer, line: str, headers: list[str], status: int) -> None:
    head = [f"{line} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 0", *headers]
    said = served.status(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
    assert said.split()[1] == str(status).encode()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Origin", "null", 403),
        ("Origin", "http://localhost.evil.example", 403),
        ("Origin", "http://127.0.0.1.evil.example:80", 403),
        ("Origin", "http://localhost@evil.example", 403),
        ("Host", "127.0.0.1.evil.example", 421),
        ("Host", "localhost.evil.example:80", 421),
        ("Host", "localhost,evil.example", 421),
        ("Host", "[::1].evil.example:80", 421),
        ("Host", "0.0.0.0", 421),
        ("Host", "2130706433", 421),
        ("Host", "", 421),
        ("Host", "[::1]:99", 200),
    ],
)
def test_a_page_of_another_site_is_refused_even_with_the_token(
    served: HttpServer, name: str, value: str, status: int
) -> None:
    assert served.post(message("initialize", HELLO), **{name: value})[0] == status


def keeps_on_until_refused(connection: socket.socket, data: bytes, pause: float = 0.0) -> bool:
    until = time.monotonic() + PATIENT
    try:
        while time.monotonic() < until:
            connection.sendall(data)
            time.sleep(pause)
    except ConnectionError:
        return True
    return False


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
