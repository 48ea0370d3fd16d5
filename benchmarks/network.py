"""What a network by name costs: `python benchmarks/network.py`, where Podman works.

One program asks a server on this machine, directly and through the proxy from a container, in turns. It says how long a
connection with a small answer takes, and how fast a large answer and a large request are.
"""

from __future__ import annotations

import json
import socketserver
import statistics
import subprocess
import sys
import threading

from measure import scratch_directory

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox import PodmanSandbox, SandboxLimits

SIZE = 512 << 20
ROUNDS = 5
PROGRAM = """
import json, socket, ssl, sys, time
port, size, proxy = map(int, sys.argv[1:])
outgoing = ssl.MemoryBIO()
try: ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="one.test").do_handshake()
except ssl.SSLWantReadError: hello = outgoing.read()
def connect(kind):
    connection = socket.create_connection(("127.0.0.1", proxy or port))
    if proxy:
        connection.sendall(b"CONNECT one.test:%d HTTP/1.1\\r\\n\\r\\n" % port)
        connection.recv(100)
    connection.sendall(hello + kind)
    return connection
def small():
    with connect(b"S") as connection:
        while connection.recv(65536): pass
def download():
    with connect(b"D") as connection:
        while connection.recv(1 << 20): pass
def upload():
    with connect(b"U") as connection:
        data, left = bytes(1 << 20), size
        while left > 0:
            connection.sendall(data)
            left -= len(data)
        connection.recv(1)
def took(way):
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun
small()
print(json.dumps([[took(small) for _ in range(100)], took(download), took(upload)]))
"""


class Handler(socketserver.BaseRequestHandler):
    """Reads a ClientHello and a letter: S is answered at once, D with much, and U when much has come."""

    def handle(self) -> None:
        head = self._exactly(5)
        self._exactly(int.from_bytes(head[3:], "big"))
        kind = self._exactly(1)
        if kind == b"D":
            data = bytes(1 << 20)
            for _ in range(SIZE >> 20):
                self.request.sendall(data)
        elif kind == b"U":
            left = SIZE
            while left > 0:
                left -= len(self.request.recv(1 << 20))
        self.request.sendall(b".")

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.request.recv(count - len(data))
        return data


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def main() -> None:
    found: dict[str, list[list[float]]] = {"direct": [], "through the proxy": []}
    with scratch_directory() as place, Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port: int = server.server_address[1]
        with PodmanSandbox(
            place,
            limits=SandboxLimits(cpus=2.0),
            network=f"allow:one.test:{port},127.0.0.1:{port}",
            resolve=lambda _name, _port: ["127.0.0.1"],
            strict=False,
        ) as sandbox:
            for _ in range(ROUNDS):
                argv = ["-c", PROGRAM, str(port), str(SIZE)]
                direct = subprocess.run([sys.executable, *argv, "0"], capture_output=True, text=True, check=True)
                proxied = sandbox.run(["python3", *argv, "3128"], timeout_seconds=120)
                for way, printed in (("direct", direct.stdout), ("through the proxy", proxied.stdout)):
                    small, download, upload = json.loads(printed)
                    found[way].append([statistics.median(small), download, upload])
        server.shutdown()
    floor = [statistics.median(column) for column in zip(*found["direct"], strict=True)]
    for way, rows in found.items():
        small, download, upload = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{way:20} a connection {small * 1000:7.2f} ms ({small / floor[0]:.1f} x)"
            f"   down {SIZE / download / 1e6:6.0f} MB/s ({floor[1] / download:.2f} x)"
            f"   up {SIZE / upload / 1e6:6.0f} MB/s ({floor[2] / upload:.2f} x)"
        )


if __name__ == "__main__":
    try:
        main()
    except SandboxUnavailableError as error:
        raise SystemExit(f"{error}") from None
