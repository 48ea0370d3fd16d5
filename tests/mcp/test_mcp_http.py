"""`ringfence serve --http`: who may call it, and what becomes of their calls."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest
from command_line import ringfence_text
from effort import one_in
from mcp_servers import ERAS, HEADERS, HELLO, MODERN, TOKEN, HttpServer, http_server, many_files, message
from served import is_loopback, open_served, parse_address

from ringfence_sandbox import Workspace

ENDED = 60.0


@contextmanager
def serving(root: Path, host: str = "127.0.0.1", names: tuple[str, ...] = ()) -> Iterator[HttpServer]:
    workspace = open_served(root)
    with closing(workspace), http_server(workspace, host=host, names=names) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with serving(tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": TOKEN}, 401),
        ({}, 200),
        ({"Authorization": f"bearer {TOKEN}"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example", "MCP-Protocol-Version": MODERN}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Content-Type": "text/plain"}, 400),
    ],
)
def test_only_who_has_the_token_and_comes_from_here_is_heard(
    guarded: HttpServer, headers: dict[str, str], status: int
) -> None:
    assert guarded.post(message("initialize", HELLO), **headers)[0] == status


@pytest.mark.parametrize("version", ERAS)
def test_a_malformed_message_is_refused_and_the_next_one_answered(guarded: HttpServer, version: str) -> None:
    for body in [b"", b"not json", b"[]", b"7", b'{"jsonrpc": "2.0"}', b"[" * 100_000]:
        status, said = guarded.post(body, MCP_Protocol_Version=version)
        assert (status, "error" in said) == (400, True), body
    assert guarded.post(b"x" * (5 << 20), MCP_Protocol_Version=version)[0] == 413
    assert guarded.post(message("initialize", HELLO))[0] == 200


@pytest.mark.anyio
@pytest.mark.parametrize("era", one_in(2, ["auto", "legacy"]))
async def test_a_call_that_its_client_gives_up_leaves_all_or_nothing(root: Path, era: str) -> None:
    with serving(root) as server:
        for delay in (0.02, 0.1, 0.2):
            async with server.client(era) as client:
                with anyio.move_on_after(delay):
                    await client.call_tool("apply_patch", {"patch": many_files(900)})
                listed = await client.call_tool("glob", {"pattern": "m/*"})
                count = listed.content[0].model_dump()["text"].count("\nm/")
                assert count in (0, 900)
                if count:
                    steps = (await client.call_tool("history", {})).structured_content or {}
                    newest = steps["entries"][0]["step"]
                    assert not (await client.call_tool("undo", {"step": newest})).is_error


def test_a_client_that_vanishes_in_the_middle_of_a_call_leaves_all_or_nothing(root: Path) -> None:
    with serving(root) as server:
        for delay in (0.0, 0.05, 0.15):
            with closing(server.calling("apply_patch", None, patch=many_files(900))):
                time.sleep(delay)
    with Workspace.open(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


@pytest.mark.parametrize(
    ("options", "token", "said"),
    [
        (["--http", "0.0.0.0:0"], None, "--allow-host NAME"),
        (["--http", "[::]:0"], None, "--allow-host NAME"),
        (["--http", "example.org:80"], None, "--allow-host NAME"),
        (["--http", "127.0.0.1"], None, "write HOST:PORT"),
        (["--http", "127.0.0.1:99999"], None, "write HOST:PORT"),
        (["--http", "127.0.0.1:0"], "short", "16 or more"),
        (["--http", "127.0.0.1:0"], "with blanks in it, this one", "without blanks"),
        (["--http", "127.0.0.1:0"], "", "16 or more"),
        (["--allow-host", "example.org"], None, "is for --http"),
    ],
)
def test_what_would_be_open_to_others_or_cannot_be_is_refused(
    root: Path, options: list[str], token: str | None, said: str
) -> None:
    environment = dict(os.environ) if token is None else {**os.environ, "RINGFENCE_MCP_TOKEN": token}
    done = ringfence_text("serve", root, *options, env=environment)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
        (":80", ("127.0.0.1", 80)),
        ("80", ("127.0.0.1", 80)),
    ],
)
def test_an_address_is_of_this_machine_unless_it_says_otherwise(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert is_loopback(address[0])


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
def test_an_address_of_this_machine_is_called_by_itself(root: Path, host: str) -> None:
    with serving(root, host) as server:
        assert server.post(message("initialize", HELLO))[0] == 200


def test_with_a_name_the_server_is_called_by_that_name_and_no_other(root: Path) -> None:
    with serving(root, names=("Build.example", "FD00::1")) as server:
        hosts = [f"build.example:{server.port}", "build.example", "[fd00::1]:80", "other.example"]
        statuses = [server.post(message("initialize", HELLO), Host=host)[0] for host in hosts]
    assert statuses == [200, 200, 200, 421]


@contextmanager
def process(root: Path, token: str | None = TOKEN) -> Iterator[tuple[subprocess.Popen[bytes], HttpServer, str]]:
    """The command, its server, and what it printed. It ends at a signal."""
    environment = {name: value for name, value in os.environ.items() if name != "RINGFENCE_MCP_TOKEN"}
    if token is not None:
        environment["RINGFENCE_MCP_TOKEN"] = token
    with subprocess.Popen(
        [sys.executable, "-m", "ringfence_cli", "serve", str(root), "--http", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stderr is not None
        said = (process.stderr.readline() + process.stderr.readline()).decode()
        found = re.search(r"http://127.0.0.1:(\d+)/mcp", said)
        assert found is not None, said
        try:
            yield process, HttpServer(int(found[1])), said
        finally:
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=ENDED)
            assert (out, process.returncode) == (b"", 130)


def test_a_token_is_made_and_printed_if_none_is_given(root: Path) -> None:
    with process(root, token=None) as (_, server, said):
        found = re.search(r"Authorization: Bearer (\S{40,})$", said, re.MULTILINE)
        assert found is not None
        assert server.post(message("initialize", HELLO), Authorization=f"Bearer {found[1]}")[0] == 200
        assert server.post(message("initialize", HELLO))[0] == 401


@pytest.mark.parametrize("era", one_in(2, ERAS))
def test_a_signal_in_the_middle_of_a_call_ends_the_server_and_rolls_it_back(root: Path, era: str) -> None:
    with process(root) as (server_process, server, said):
        assert TOKEN not in said
        session = server.session()
        # A stream that stays open for what the server has to say does not keep it from its end.
        listening = server.connection()
        listening.request("GET", "/mcp", headers={**HEADERS, "mcp-session-id": session})
        assert listening.getresponse().status == 200
        call = server.calling("apply_patch", None if era == MODERN else session, patch=many_files(900))
        time.sleep(0.1)
        server_process.send_signal(signal.SIGINT)
        assert server_process.wait(ENDED) == 130
        call.close()
        listening.close()
    with Workspace.open(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


@pytest.mark.parametrize("delay", one_in(2, [0.0, 0.003]))
def test_a_signal_that_comes_before_the_server_runs_ends_it(root: Path, delay: float) -> None:
    with process(root) as (server_process, _, _):
        time.sleep(delay)
        server_process.send_signal(signal.SIGTERM)
        assert server_process.wait(ENDED) == 130
        assert server_process.stderr is not None
        assert server_process.stderr.read() == b""
