"""Commands in a container whose network is a list of hosts, and hosts on this machine that they may reach or not."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ringfence import Prompt, Receipt, Session, ToolExecutor
from ringfence_sandbox import PodmanSandbox
from ringfence_tools import PodmanSandboxSection

MIB = 1 << 20


class Site:
    """A web site on this machine."""

    def __init__(self, certificate: Path | None = None) -> None:
        site = self
        self.hosts: list[str] = []
        self.posted = 0
        self.ended = threading.Event()
        """Set when a connection of ``/wait`` has ended."""

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                site.hosts.append(self.headers["Host"])
                self.send_response(200)
                if self.path == "/endless":
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"x" * MIB)
                    except OSError:
                        site.ended.set()
                    return
                if self.path == "/wait":
                    self.end_headers()
                    self.wfile.write(b"begun\n")
                    try:
                        while self.connection.recv(1):
                            pass
                    except OSError:
                        pass
                    site.ended.set()
                    return
                body = b"x" * (int(self.path[1:]) if self.path[1:].isdigit() else 5)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                left = int(self.headers["Content-Length"])
                while left:
                    left -= len(self.rfile.read(min(left, MIB)))
                site.posted += int(self.headers["Content-Length"])
                self.send_response(204)
                self.end_headers()

        class Threads(http.server.ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self._server = Threads(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "one.test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("one.test")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    place = tmp_path_factory.mktemp("tls") / "one.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return place


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with closing(Site()) as found:
        yield found


@pytest.fixture(scope="module")
def secure(certificate: Path) -> Iterator[Site]:
    with closing(Site(certificate)) as found:
        yield found


@pytest.fixture(scope="module")
def named(
    podman: Any, limiting: bool, site: Site, secure: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodmanSandbox]:
    rules = [f"{host}:{one.port}" for one in (site, secure) for host in ("one.test", "127.0.0.1")]
    with PodmanSandbox(
        tmp_path_factory.mktemp("named"),
        connection=podman,
        strict=limiting,
        network=f"allow:{','.join(rules)}",
        resolve=lambda _name, _port: ["127.0.0.1"],
    ) as sandbox:
        yield sandbox


PROGRAM = """
import os, socket, ssl, sys, time, urllib.request
trusting = ssl.create_default_context()
trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
def get(url):
    try:
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusting)).open(url, timeout=20).read()
    except OSError as error:
        return str(error)
"""


def run(sandbox: PodmanSandbox, code: str, **options: Any) -> Any:
    return sandbox.run(["python3", "-c", PROGRAM + code], **options)


def test_a_program_reaches_the_named_host_and_no_other(named: PodmanSandbox, site: Site, secure: Site) -> None:
    urls = (f"http://one.test:{site.port}/", f"https://one.test:{secure.port}/", f"http://two.test:{site.port}/")
    result = run(named, f"for url in {urls!r}: print(get(url))")
    assert result.stdout.splitlines() == [
        "b'xxxxx'",
        "b'xxxxx'",
        f"HTTP Error 403: ringfence: two.test:{site.port} is not allowed by --network",
    ]
    assert result.stderr == f"[network refused: two.test:{site.port} is not allowed by --network (1 x)]"
    used = {(host.host, host.port): host for host in result.network.hosts}
    assert {place: (one.connections, one.refused) for place, one in used.items()} == {
        ("one.test", site.port): (1, 0),
        ("one.test", secure.port): (1, 0),
        ("two.test", site.port): (0, 1),
    }
    assert used["one.test", secure.port].received > 500
    assert result.network.bypasses == 0


def test_the_container_has_no_network_and_nothing_else_listens_in_it(named: PodmanSandbox) -> None:
    assert {one.name: one.holds for one in named.properties}["no network"]
    result = run(
        named,
        "print(os.listdir('/sys/class/net'))\n"
        "print([line.split()[1] for line in open('/proc/net/tcp') if line.split()[3] == '0A'])\n"
        "print(sum(1 for line in open('/proc/net/unix')))",
    )
    first, second, third = result.stdout.splitlines()
    assert first == "['lo']"
    assert second == "['0100007F:0C38']"
    assert third in ("1", "2", "3")


def test_a_program_that_ignores_the_proxy_reaches_nothing_and_the_answer_says_so(named: PodmanSandbox) -> None:
    for place in ("('192.0.2.1', 443)", "('2001:db8::1', 443)", "('169.254.169.254', 80)"):
        result = run(named, f"socket.create_connection({place}, 5)")
        assert "Network is unreachable" in result.stderr
        assert "did not use the proxy of HTTP_PROXY and HTTPS_PROXY" in result.stderr
        assert result.network.bypasses > 0
    assert "proxy" not in named.run("true").stderr


def test_a_request_to_the_containers_own_host_stays_there(named: PodmanSandbox) -> None:
    result = run(
        named,
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "import threading\n"
        "def serve():\n"
        "    with listener.accept()[0] as client:\n"
        "        client.recv(1000); client.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\nown')\n"
        "threading.Thread(target=serve).start()\n"
        "print(get(f'http://localhost:{listener.getsockname()[1]}/'))",
    )
    assert result.stdout == "b'own'\n"
    assert result.network.hosts == ()


def test_a_loopback_address_that_is_named_is_this_machines(named: PodmanSandbox, site: Site) -> None:
    result = run(named, f"print(os.environ['NO_PROXY'], get('http://127.0.0.1:{site.port}/'))")
    assert result.stdout == "localhost,::1 b'xxxxx'\n"


def test_tls_for_another_site_of_the_host_is_refused(named: PodmanSandbox, secure: Site) -> None:
    before = len(secure.hosts)
    result = run(
        named,
        "proxied = socket.create_connection(('127.0.0.1', 3128), 20)\n"
        f"proxied.sendall(b'CONNECT one.test:{secure.port} HTTP/1.1\\r\\n\\r\\n')\n"
        "print(proxied.recv(100))\n"
        "try: trusting.wrap_socket(proxied, server_hostname='two.test')\n"
        "except ssl.SSLError as error: print(error)",
    )
    assert "200" in result.stdout
    assert "unrecognized name" in result.stdout.lower().replace("_", " ")
    assert "TLS asks for two.test, not for one.test" in result.stderr
    assert len(secure.hosts) == before


def test_inside_of_tls_another_site_cannot_be_told(named: PodmanSandbox, secure: Site) -> None:
    """SECURITY.md says so."""
    run(
        named,
        "proxied = socket.create_connection(('127.0.0.1', 3128), 20)\n"
        f"proxied.sendall(b'CONNECT one.test:{secure.port} HTTP/1.1\\r\\n\\r\\n')\n"
        "proxied.recv(100)\n"
        "tls = trusting.wrap_socket(proxied, server_hostname='one.test')\n"
        "tls.sendall(b'GET / HTTP/1.1\\r\\nHost: two.test\\r\\n\\r\\n')\n"
        "print(tls.recv(100))",
    )
    assert secure.hosts[-1] == "two.test"


def test_a_connection_of_a_background_process_ends_with_the_command(named: PodmanSandbox, site: Site) -> None:
    site.ended.clear()
    code = f"held = urllib.request.urlopen('http://one.test:{site.port}/wait'); held.read(6); time.sleep(99)"
    result = named.run(f'python3 -c "{PROGRAM}{code}" & sleep 1')
    assert result.exit_code == 0
    assert site.ended.wait(5)
    assert [host.connections for host in result.network.hosts] == [1]  # type: ignore[union-attr]


def test_a_slow_reader_delays_neither_output_nor_the_end(named: PodmanSandbox, site: Site) -> None:
    site.ended.clear()
    result = run(
        named,
        f"held = urllib.request.urlopen('http://one.test:{site.port}/endless'); held.read(1)\n"
        "for _ in range(100): print('x' * 100000)\n"
        "sys.stdout.flush(); time.sleep(99)",
        timeout_seconds=2,
    )
    assert result.timed_out
    assert result.stdout.count("x") > 30_000
    assert site.ended.wait(5)
    assert result.network.hosts[0].received < 64 * MIB


def test_a_hundred_connections_of_a_command_are_served(named: PodmanSandbox, site: Site) -> None:
    result = run(
        named,
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"urls = ['http://one.test:{site.port}/20000'] * 100\n"
        "with ThreadPoolExecutor(100) as pool: print(sum(map(len, pool.map(get, urls))))",
    )
    assert result.stdout == "2000000\n", result
    assert result.network.hosts[0].connections == 100


def test_a_receipt_has_the_hosts_and_what_was_exchanged(named: PodmanSandbox, site: Site) -> None:
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=named)
    prompt = Prompt[None](ns="test", key="network", sections=[section])
    code = f"{PROGRAM}print(get('http://one.test:{site.port}/'), get('http://two.test/'))"
    with prompt.resources:
        text = prompt.render(session=session).text
        assert f"no network but one.test:{site.port}," in text
        result = ToolExecutor(prompt=prompt, session=session).call("evaluate_python", {"code": code})
    assert "two.test:80 is not allowed" in str(result.value)
    assert "network: 1 connection, " in result.message
    assert "; refused: two.test:80" in result.message
    (receipt,) = session[Receipt].all()
    hosts = json.loads(json.dumps(receipt.to_json()))["network"]
    assert [(one["host"], one["port"], one["connections"], one["refused"]) for one in hosts] == [
        ("one.test", site.port, 1, 0),
        ("two.test", 80, 0, 1),
    ]
    assert hosts[0]["sent"] > 50 < hosts[0]["received"]


def test_the_descriptor_of_the_listener_is_not_a_commands(named: PodmanSandbox) -> None:
    result = run(
        named,
        "print(os.listdir('/proc/self/fd'))\n"
        "try: socket.create_server(('127.0.0.1', 3128))\n"
        "except OSError as error: print(error.errno)\n"
        "try: os.listdir('/proc/1/fd')\n"
        "except OSError as error: print(error.errno)",
    )
    assert result.stdout.splitlines()[1:] == ["98", "13"]


OWNER = """
import sys
from ringfence_sandbox import PodmanSandbox
root, network = sys.argv[1:]
with PodmanSandbox(root, network=network, strict=False, resolve=lambda name, port: ["127.0.0.1"]) as sandbox:
    sandbox.run(["python3", "-c", sys.stdin.read()], timeout_seconds=60)
"""


def test_a_kill_of_this_process_leaves_no_connection(podman: Any, site: Site, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    site.ended.clear()
    network = f"allow:one.test:{site.port},127.0.0.1:{site.port}"
    code = f"{PROGRAM}\nheld = urllib.request.urlopen('http://one.test:{site.port}/wait'); held.read(6)\n"
    code += "open('/workspace/begun', 'w').close(); time.sleep(99)"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root), network], stdin=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    owner.stdin.write(code)
    owner.stdin.close()
    limit = time.monotonic() + 60
    while not (root / "begun").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert site.ended.wait(10)
    with PodmanSandbox(root, connection=podman, strict=False) as sandbox:
        assert sandbox.run("ls").stdout == ""


def test_the_address_of_a_name_is_asked_for_on_the_host_each_time(make_sandbox: Any, site: Site) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["169.254.169.254"], ["::ffff:10.0.0.1"], ["127.0.0.1"]])

    def answer(_name: str, _port: int) -> list[str]:
        return next(answers)

    sandbox = make_sandbox(network=f"allow:one.test:{site.port},127.0.0.1:{site.port}", resolve=answer)
    result = run(sandbox, f"for _ in range(5): print(get('http://one.test:{site.port}/')[:14])")
    assert result.stdout.splitlines() == ["b'xxxxx'", *["HTTP Error 403"] * 3, "b'xxxxx'"]
    assert "no address of one.test is public" in result.stderr


def test_a_network_that_names_no_host_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for network in ("allow:", "allow:*", "allow:10.0.0.0/8", "allow", "deny:a"):
        with pytest.raises(ValueError, match="allow:HOST"):
            PodmanSandbox(tmp_path, network=network)


def test_a_command_line_takes_hosts(podman: Any, site: Site, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    program = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{site.port}/').read())"
    command = f'NO_PROXY= no_proxy= python3 -c "{program}"'
    call = {"name": "shell_execute", "arguments": {"command": command}}
    turns = ({"tool_calls": [call]}, {"text": "Done."})
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    receipts = tmp_path / "receipts.jsonl"
    words = ["run", str(root), "--workspace", "podman", "--task", "x", "--model", f"script:{tmp_path}/script.jsonl"]
    words += ["--receipts", str(receipts), "--network"]
    ended = subprocess.run(
        [sys.executable, "-m", "ringfence_cli", *words, f"allow:127.0.0.1:{site.port}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 0, ended
    (host,) = json.loads(receipts.read_text())["network"]
    assert (host["host"], host["connections"]) == ("127.0.0.1", 1)
    refused = subprocess.run(
        [sys.executable, "-m", "ringfence_cli", *words, "allow:*"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "names no host" in refused.stderr


def test_the_proxy_costs_no_connection_while_no_command_runs(named: PodmanSandbox) -> None:
    named.run("true")
    names = [thread.name for thread in threading.enumerate()]
    assert "ringfence-proxy" not in names
