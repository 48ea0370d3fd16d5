"""A socket that is named as Podman's, and behind which something else answers."""

from __future__ import annotations

import json
import os
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import ringfence_text

INFO = {
    "host": {"security": {"rootless": False}, "cgroupVersion": "v2", "ociRuntime": {"name": "crun"}},
    "version": {"Version": "4.3.1"},
}
Answer = Callable[[bytes], bytes]


def http(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def always(answer: bytes) -> Answer:
    return lambda asked: answer


def after_info(answer: bytes) -> Answer:
    """Like Podman, up to what it says of itself."""
    known = http("200 OK", json.dumps(INFO).encode())
    return lambda asked: known if b"/info" in asked or b"/_ping" in asked else answer


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of a socket at which this answers every request."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked = self.request.recv(65536)
            said = answer(asked)
            self.request.sendall(said.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if asked.startswith(b"HEAD") else said)

    with (
        tempfile.TemporaryDirectory(dir="/tmp") as place,  # where its path is short enough for a socket
        socketserver.ThreadingUnixStreamServer(f"{place}/s", Handler) as server,
    ):
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"unix://{place}/s"
        finally:
            server.shutdown()
            serving.join()


BROKEN, PAGE = "500 Internal Server Error", b"<html>Welcome</html>"
OTHER = "is not a working Podman"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (always(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "start it, or leave that out"),
        (always(http(BROKEN, b"broken")), "start it, or leave that out"),
        (always(http("200 OK", PAGE)), OTHER),
        (always(http("200 OK", b"{}")), OTHER),
        (always(http("200 OK", b"[]")), OTHER),
        (always(http("200 OK", b"null")), OTHER),
        (after_info(b""), OTHER),
        (after_info(http("200 OK", PAGE)), "the container does not start"),
        (after_info(http("200 OK", b"{}")), "the container does not start"),
        (after_info(http("200 OK", b'["x"]')), "the container does not start"),
        (after_info(http("200 OK", b"null")), "the container does not start"),
        (after_info(http(BROKEN, b"broken")), "there is no image"),
    ],
)
def test_a_service_that_answers_nonsense_is_no_sandbox(tmp_path: Path, answer: Answer, words: str) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "script.jsonl").write_text('{"text": "Done."}\n')
    options = ("--task", "x", "--model", f"script:{tmp_path}/script.jsonl", "--image", "x", "--json")
    with answering(answer) as url:
        environment = {**os.environ, "CONTAINER_HOST": url}
        done = ringfence_text("run", tmp_path / "tree", "--workspace", "podman", *options, env=environment)
    record = json.loads(done.stdout)
    assert (done.returncode, record["outcome"], words in record["error"]) == (4, "no_sandbox", True), done
