"""`ringfence view` over a port that is forwarded, as `ssh -L` does it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from page_requests import asked
from viewed import viewed_workspace

# A process, as ssh is one: what it gets on one port it passes on to another.
FORWARDING = """
import asyncio, sys

async def passed(reader, writer):
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()

async def connected(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(passed(reader, there[1]), passed(there[0], writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def printing(*words: str | Path) -> Iterator[str]:
    """Run a process, and give the first line that it prints."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_the_page_works_over_a_forwarded_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    root, _ = viewed_workspace(tmp_path)
    with printing("-m", "ringfence_cli", "view", root, "--write") as address:
        place, _, token = address.partition("/#token=")
        with printing("-c", FORWARDING, place.rpartition(":")[2]) as port:
            for name in ("127.0.0.1", "localhost"):
                assert "app.py" in asked(f"http://{name}:{port}/#token={token}", "page")[1]
            there = f"http://127.0.0.1:{port}/#token={token}"
            assert asked(there, "preview", {"what": "undo", "step": "3"})[0] == 200
            assert asked(f"http://127.0.0.1:{port}/#token=wrong", "page")[0] == 401
