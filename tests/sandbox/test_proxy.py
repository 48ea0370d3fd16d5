"""The proxy of a container, asked by raw sockets: what it lets through, and what it refuses."""

from __future__ import annotations

import os
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pytest

from ringfence.receipts import NetworkUse
from ringfence_sandbox.network.network import AllowedHosts, as_address, is_routable, normalise_host
from ringfence_sandbox.network.proxy import MOST_CONNECTIONS, Proxy

SECONDS = 20


class Server:
    """A host at an address of this machine. It keeps what each connection sent, and answers each piece with ``OK``."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.received: list[bytearray] = []
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK"
        self.stays = False
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                kept = bytearray()
                server.received.append(kept)
                while data := self.request.recv(65536):
                    kept.extend(data)
                    with suppress(OSError):
                        self.request.sendall(server.answer)
                    if not server.stays:
                        time.sleep(0.05)  # for what is smuggled behind
                        self.request.setblocking(False)
                        with suppress(OSError):
                            kept.extend(self.request.recv(65536))
                        return

        class Threads(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            request_queue_size = 256

        self._server = Threads((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Proxied:
    """A proxy in front of servers, and what its resolver says: for each name, the answers one after the other."""

    def __init__(self, rules: str, answers: dict[str, list[Sequence[str]]]) -> None:
        self.asked: list[str] = []

        def resolve(name: str, port: int) -> Sequence[str]:
            self.asked.append(name)
            found = answers.get(name)
            if not found:
                raise OSError("no such name")
            return found.pop(0) if len(found) > 1 else found[0]

        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.place: tuple[str, int] = listener.getsockname()
        self.proxy = Proxy(listener, AllowedHosts.parse(rules), resolve, os.getpid())
        self.proxy.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, SECONDS)

    def ask(self, *pieces: bytes) -> bytes:
        """All that comes back."""
        with closing(self.connect()) as connection:
            for piece in pieces:
                connection.sendall(piece)
            return everything(connection)

    def use(self) -> NetworkUse:
        return self.proxy.stop()


def everything(connection: socket.socket) -> bytes:
    found = bytearray()
    with suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return bytes(found)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as found:
        yield found


@pytest.fixture
def proxied(server: Server) -> Iterator[Proxied]:
    port = server.port
    made = Proxied(
        f"allow:one.test:{port},*.wild.test:{port},127.0.0.1:{port}",
        {name: [["127.0.0.1"]] for name in ("one.test", "a.wild.test", "b.a.wild.test", "wild.test", "two.test")},
    )
    yield made
    made.proxy.close()


def hello(name: str | None) -> bytes:
    """A ClientHello of OpenSSL."""
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.check_hostname = False
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def tunnel(proxied: Proxied, place: str, *pieces: bytes) -> bytes:
    return proxied.ask(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode(), *pieces)


def get(url: str, *headers: str) -> bytes:
    return "\r\n".join((f"GET {url} HTTP/1.1", *headers, "", "")).encode()


def test_a_plain_request_reaches_its_host_in_the_form_of_an_origin(server: Server, proxied: Proxied) -> None:
    url = f"http://ONE.test.:{server.port}/a?b=http://x/"
    answer = proxied.ask(get(url, "Host: one.test", "Proxy-Authorization: x", "Connection: keep-alive", "X-Y:  z "))
    assert answer.endswith(b"\r\n\r\nOK")
    assert server.received == [
        f"GET /a?b=http://x/ HTTP/1.1\r\nHost: one.test:{server.port}\r\nx-y: z\r\nConnection: close\r\n\r\n".encode()
    ]
    (host,) = proxied.use().hosts
    assert (host.host, host.port, host.connections, host.refused) == ("one.test", server.port, 1, 0)
    assert (host.sent, host.received) == (len(server.received[0]), len(answer))


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("one.test", True),
        ("a.wild.test", True),
        ("b.a.wild.test", True),
        ("wild.test", False),
        ("awild.test", False),
        ("one.test.evil.test", False),
        ("two.test", False),
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("[::1]", False),
        ("[::ffff:127.0.0.1]", False),
        ("127.1", False),
        ("2130706433", False),
        ("0x7f000001", False),
        ("localhost", False),
        ("one.test@two.test", False),
        ("one.test%00.two.test", False),
        ("", False),
    ],
)
def test_only_hosts_that_are_named_are_reached(server: Server, proxied: Proxied, host: str, is_allowed: bool) -> None:
    answer = proxied.ask(get(f"http://{host}:{server.port}/"))
    assert (b"200 OK" in answer) == is_allowed
    assert bool(server.received) == is_allowed
    name = host if "." in host else "one.test"
    answer = tunnel(proxied, f"{host}:{server.port}", hello(name if as_address(name) is None else None))
    assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n") == is_allowed
    assert len(server.received) == 2 * is_allowed
    assert sum(one.refused for one in proxied.use().hosts) == 2 * (not is_allowed)
    assert "two.test" not in proxied.asked  # what is refused by name is not resolved either


def test_other_ports_are_refused(server: Server, proxied: Proxied) -> None:
    other = server.port % 65535 + 1
    for asked in (
        get(f"http://one.test:{other}/"),
        get("http://one.test/"),
        get("http://one.test:99999/"),
        get("http://one.test:0/"),
        f"CONNECT one.test:{other} HTTP/1.1\r\n\r\n".encode(),
        b"CONNECT one.test HTTP/1.1\r\n\r\n",
    ):
        assert proxied.ask(asked).split()[1] in (b"400", b"403"), asked
    assert server.received == []


def test_a_refused_port_is_named_beside_the_ports_that_are_allowed() -> None:
    made = Proxied("allow:one.test,two.test:8080", {})
    try:
        assert b"one.test:22 is not allowed by --network, only its port 80 and 443" in tunnel(made, "one.test:22")
        assert b"two.test:80 is not allowed by --network, only its port 8080" in made.ask(get("http://two.test/"))
        assert b"three.test:80 is not allowed by --network\n" in made.ask(get("http://three.test/"))
    finally:
        made.proxy.close()


@pytest.mark.parametrize(("address", "is_reached"), [("127.0.0.1", True), ("127.0.0.1:1", False), ("127.0.0.2", False)])
def test_an_address_without_a_port_is_named_for_the_ports_of_its_names(
    server: Server, address: str, is_reached: bool
) -> None:
    made = Proxied(f"allow:one.test:{server.port},{address}", {"one.test": [["127.0.0.1"]]})
    try:
        assert (b"200 OK" in made.ask(get(f"http://one.test:{server.port}/"))) == is_reached
        assert b"200 OK" not in made.ask(get(f"http://127.0.0.1:{server.port}/"))  # by itself it has the usual ports
    finally:
        made.proxy.close()


def test_the_host_header_does_not_choose_the_site(server: Server, proxied: Proxied) -> None:
    url = f"http://one.test:{server.port}/"
    proxied.ask(get(url, "Host: two.test", "host: three.test", "Connection: host"))
    assert b"two.test" not in server.received[0]
    assert b"three.test" not in server.received[0]
    assert server.received[0].lower().count(b"host:") == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_request_of_a_connection_goes_nowhere(server: Server, proxied: Proxied, apart: bool) -> None:
    first, second = (get(f"http://{host}:{server.port}/{host}", "Host: x") for host in ("one.test", "two.test"))
    answer = proxied.ask(first, second) if apart else proxied.ask(first + second)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"two.test" not in b"".join(server.received)


def test_an_answer_comes_whole_to_a_client_that_has_sent_more(server: Server, proxied: Proxied) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (8 << 20)
    with closing(proxied.connect()) as connection:
        connection.sendall(get(f"http://one.test:{server.port}/") + b"x" * 500_000)
        time.sleep(0.3)
        assert len(everything(connection)) == len(server.answer)


BODIES = {
    b"Content-Length: 3\r\n\r\nabc": b"abc",
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n": b"3\r\nabc\r\n0\r\n\r\n",
    b"Transfer-Encoding: Chunked\r\n\r\n003;x=y\r\nabc\r\n0\r\nHost: two.test\r\n\r\n": b"3\r\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_handed_on_up_to_its_end_and_no_further(server: Server, proxied: Proxied, body: bytes) -> None:
    smuggled = get("http://two.test/", "Host: two.test")
    proxied.ask(f"POST http://one.test:{server.port}/ HTTP/1.1\r\n".encode() + body + smuggled)
    assert bytes(server.received[0]).partition(b"\r\n\r\n")[2] == BODIES[body]


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 3\r\nContent-Length: 4",
        b"Content-Length: 3\r\nContent-Length: 3",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Content-Length: +3",
        b"Content-Length: 3, 3",
        b"Content-Length: 0x3",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Content-Length : 3",
        b" Content-Length: 3",
        b"X: y\r\n Content-Length: 3",
        b"X: y\nContent-Length: 3",
        b"X: y\rContent-Length: 3",
        b"X: \x00",
        b"no colon",
        b": empty",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_refused(server: Server, proxied: Proxied, headers: bytes) -> None:
    answer = proxied.ask(f"POST http://one.test:{server.port}/ HTTP/1.1\r\n".encode() + headers + b"\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.received == []


@pytest.mark.parametrize(
    "line",
    [
        "GET / HTTP/1.1",
        "GET one.test:{} HTTP/1.1",
        "GET https://one.test:{}/ HTTP/1.1",
        "GET ftp://one.test:{}/ HTTP/1.1",
        "GET  http://one.test:{}/ HTTP/1.1",
        "GET http://one.test:{}/ HTTP/2.0",
        "GET http://one.test:{}/ HTTP/1.1 x",
        "GET http://one.test:{}/a b HTTP/1.1",
        "GET http://one.test:{}/#x HTTP/1.1",
        "GET http://one.test:{}\\@two.test/ HTTP/1.1",
        "GET http://one.test:{}",
        "CONNECT http://one.test:{}/ HTTP/1.1",
        "CONNECT one.test:{}/x HTTP/1.1",
        "PRI * HTTP/2.0",
        "",
        "\x16\x03\x01\x02",
    ],
)
def test_what_is_no_request_to_a_proxy_is_refused(server: Server, proxied: Proxied, line: str) -> None:
    answer = proxied.ask(f"{line.format(server.port)}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.received == []
    assert proxied.use().refusals()


def test_a_chunk_that_is_malformed_ends_the_connection(server: Server, proxied: Proxied) -> None:
    for chunk in (b"-1\r\n", b"0x3\r\nabc\r\n", b"3\r\nabcd\r\n", b"\r\n", b"f" * 16 + b"\r\n", b"3;" + b"x" * 300):
        head = f"POST http://one.test:{server.port}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        proxied.ask(head.encode() + chunk + b"GET / HTTP/1.1\r\nHost: two.test\r\n\r\n")
    assert b"two.test" not in b"".join(server.received)


def test_huge_headers_are_refused(server: Server, proxied: Proxied) -> None:
    for headers in (b"X: " + b"a" * 100_000, b"a: b\r\n" * 50_000, b"x: " + b" " * 65_000):
        answer = proxied.ask(f"GET http://one.test:{server.port}/ HTTP/1.1\r\n".encode() + headers + b"\r\n\r\n")
        assert answer[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 200", b"")
    assert sum(map(len, server.received)) < 70_000


def record(data: bytes, kind: int = 22) -> bytes:
    return bytes([kind, 3, 1]) + len(data).to_bytes(2, "big") + data


def in_records(message: bytes, size: int) -> bytes:
    """A ClientHello, broken into records."""
    inner = message[5:]
    return b"".join(record(inner[at : at + size]) for at in range(0, len(inner), size))


def with_name(message: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return message.replace(old, new)


@pytest.mark.parametrize("size", [1, 7, 100, 16384])
def test_a_client_hello_in_pieces_is_read_whole(server: Server, proxied: Proxied, size: int) -> None:
    whole = in_records(hello("ONE.test"), size)
    pieces = [whole[at : at + 3] for at in range(0, len(whole), 3)] if size != 1 else [whole]
    assert tunnel(proxied, f"one.test:{server.port}", *pieces).endswith(b"OK")
    assert bytes(server.received[0])[:5] == whole[:5]
    other = in_records(hello("two.test"), size)
    assert not tunnel(proxied, f"one.test:{server.port}", other).endswith(b"OK")
    assert b"two.test" not in b"".join(server.received)


def test_a_client_hello_that_comes_with_the_request_is_read(server: Server, proxied: Proxied) -> None:
    asked = f"CONNECT one.test:{server.port} HTTP/1.1\r\n\r\n".encode() + hello("one.test")
    assert proxied.ask(asked).endswith(b"OK")


def doubled(message: bytes) -> bytes:
    """The same with a second name behind the first."""
    name = b"\x00\x00\x08one.test"
    inner = message[5:]
    at = inner.index(name)
    second = b"\x00\x00\x08two.test"
    grown = bytearray(inner[:at] + name + second + inner[at + len(name) :])
    extensions = at - 6  # of the extension: kind, length, length of the list

    def add(place: int, size: int) -> None:
        value = int.from_bytes(grown[place : place + size], "big") + len(second)
        grown[place : place + size] = value.to_bytes(size, "big")

    add(extensions + 4, 2)
    add(extensions + 2, 2)
    add(1, 3)
    session = 4 + 2 + 32
    ciphers = session + 1 + grown[session]
    compression = ciphers + 2 + int.from_bytes(grown[ciphers : ciphers + 2], "big")
    add(compression + 1 + grown[compression], 2)
    return record(bytes(grown))


ONE = hello("one.test")


@pytest.mark.parametrize(
    "sent",
    [
        hello("two.test"),
        hello(None),
        hello("one.test.two.test"),
        doubled(ONE),
        with_name(ONE, b"one.test", b"one.tes\0"),
        with_name(ONE, b"one.test", b"one.tes\xff"),
        with_name(ONE, b"\x00\x08one.test", b"\x00\x09one.test"),
        ONE[:5] + ONE[5:6] + b"\xff\xff\xff" + ONE[9:],
        record(b"", 22) + ONE,
        record(ONE[5:], 23),
        record(ONE[5:] + ONE[5:]),
        record(b"\x02" + ONE[6:]),
        b"GET / HTTP/1.1\r\nHost: two.test\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\x80\x2e\x01\x03\x01" + b"\0" * 50,
    ],
)
def test_a_tunnel_begins_with_tls_for_its_own_host(server: Server, proxied: Proxied, sent: bytes) -> None:
    answer = tunnel(proxied, f"one.test:{server.port}", sent)
    assert b"OK" not in answer
    assert b"".join(server.received) == b""
    (host,) = proxied.use().hosts
    assert (host.refused, host.sent) == (1, 0)
    assert host.reason


def test_an_address_that_is_named_needs_no_name_in_tls(server: Server, proxied: Proxied) -> None:
    assert tunnel(proxied, f"127.0.0.1:{server.port}", hello(None)).endswith(b"OK")
    assert not tunnel(proxied, f"127.0.0.1:{server.port}", hello("one.test")).endswith(b"OK")


def test_the_address_that_was_checked_is_the_one_connected_to(server: Server) -> None:
    answers: list[Sequence[str]] = [["10.1.2.3"], ["127.0.0.2"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.2"], []]
    proxied = Proxied(f"allow:turning.test:{server.port},127.0.0.1:{server.port}", {"turning.test": answers})
    asked = get(f"http://turning.test:{server.port}/")
    said = [proxied.ask(asked).split()[1] for _ in range(5)]
    assert said == [b"403", b"403", b"200", b"403", b"403"]
    assert proxied.asked == ["turning.test"] * 5  # once a connection
    assert len(server.received) == 1
    proxied.proxy.close()


def test_a_host_of_ipv6_is_reached_by_a_name_and_by_its_address() -> None:
    with closing(Server("::1")) as server:
        proxied = Proxied(f"allow:six.test:{server.port},[::1]:{server.port}", {"six.test": [["::1"]]})
        for host in ("six.test", "[::1]", "[0:0::1]"):
            assert proxied.ask(get(f"http://{host}:{server.port}/")).endswith(b"OK")
        assert f"Host: [::1]:{server.port}\r\n".encode() in server.received[1]
        assert proxied.ask(get(f"http://[::1%25lo]:{server.port}/")).startswith(b"HTTP/1.1 400")
        proxied.proxy.close()


def test_a_name_that_does_not_resolve_and_a_host_that_does_not_answer_are_named(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port: int = closed.getsockname()[1]
    proxied = Proxied(f"allow:gone.test,shut.test:{port},127.0.0.1:{port}", {"shut.test": [["127.0.0.1"]]})
    assert b"gone.test was not resolved" in proxied.ask(get("http://gone.test/"))
    assert b"Connection refused" in proxied.ask(get(f"http://shut.test:{port}/"))
    assert len(proxied.use().refusals()) == 2
    proxied.proxy.close()


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::808:808",
        "2002:7f00:1::1",
        "2001:0:1234::1",
        "fe80::1",
        "fe80::1%1",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
    ],
)
def test_an_address_that_is_not_public_has_no_disguise(address: str) -> None:
    found = as_address(address)
    assert found is not None
    assert not is_routable(found)
    assert not AllowedHosts.parse("allow:one.test").allows_address(address, 443)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_a_public_address_is_taken(address: str) -> None:
    assert AllowedHosts.parse("allow:one.test").allows_address(address, 443)


def test_an_address_is_not_given_by_hand(proxied: Proxied) -> None:
    assert not AllowedHosts.parse("allow:one.test").allows("8.8.8.8", 443)
    assert not AllowedHosts.parse("allow:one.test").allows_address("one.test", 443)


def test_names_are_compared_as_dns_has_them() -> None:
    assert normalise_host("Bücher.Example.") == "xn--bcher-kva.example"
    rules = AllowedHosts.parse("allow:Example.COM., *.bücher.example:8443,[2606:4700:0::1]")
    assert rules.allows("example.com", 443)
    assert rules.allows("example.com", 80)
    assert not rules.allows("example.com", 8443)
    assert rules.allows("a.xn--bcher-kva.example", 8443)
    assert not rules.allows("a.xn--bcher-kva.example", 443)
    assert rules.allows("2606:4700::1", 443)


@pytest.mark.parametrize(
    "rules",
    [
        "allow:",
        "allow:*",
        "allow:*.",
        "allow:a,,b",
        "allow:*.127.0.0.1",
        "allow:127.1",
        "allow:a.*.b",
        "allow:http://a",
        "allow:a:0",
        "allow:a:65536",
        "allow:a/b",
        "allow:a b",
        "allow:::1",
        "allow:straße.example",
        f"allow:{'a' * 64}",
        "allow:10.0.0.0/8",
    ],
)
def test_a_rule_that_names_no_host_is_refused(rules: str) -> None:
    with pytest.raises(ValueError, match="names no host"):
        AllowedHosts.parse(rules)


def test_a_hundred_connections_at_once_are_served(server: Server, proxied: Proxied) -> None:
    server.stays = True
    answers: list[bytes] = []
    connections = [proxied.connect() for _ in range(100)]
    for connection in connections:
        connection.sendall(f"CONNECT one.test:{server.port} HTTP/1.1\r\n\r\n".encode() + ONE)
    for connection in connections:
        answer = b""
        while not answer.endswith(server.answer):
            answer += connection.recv(65536)
        answers.append(answer)
    for connection in connections:
        connection.close()
    assert len(answers) == 100
    assert proxied.use().hosts[0].connections == 100


def test_connections_that_say_nothing_keep_nobody_out(server: Server, proxied: Proxied) -> None:
    silent = [proxied.connect() for _ in range(MOST_CONNECTIONS - 1)]
    for connection in silent:
        connection.sendall(b"GET http://one.")
    assert proxied.ask(get(f"http://one.test:{server.port}/")).endswith(b"OK")
    proxied.proxy.stop()  # which ends them, whatever they wait for
    assert [everything(connection) for connection in silent] == [b""] * len(silent)
    for connection in silent:
        connection.close()


def test_a_reader_that_reads_nothing_costs_no_memory_and_delays_no_end(server: Server, proxied: Proxied) -> None:
    server.stays = True
    server.answer = b"x" * (64 << 20)
    connection = proxied.connect()
    connection.sendall(f"CONNECT one.test:{server.port} HTTP/1.1\r\n\r\n".encode() + ONE)
    assert connection.recv(1)
    assert tunnel_of(proxied, server)
    (host,) = proxied.use().hosts
    assert host.received < 32 << 20  # what the kernel's buffers take
    connection.close()


def tunnel_of(proxied: Proxied, server: Server) -> bytes:
    """Another connection meanwhile."""
    with closing(proxied.connect()) as connection:
        connection.sendall(f"CONNECT one.test:{server.port} HTTP/1.1\r\n\r\n".encode() + ONE)
        return connection.recv(100)


def test_a_resolver_that_takes_long_does_not_delay_the_end(server: Server) -> None:
    released = threading.Event()

    def resolve(name: str, port: int) -> Sequence[str]:
        released.wait(30)
        return ["127.0.0.1"]

    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listener, AllowedHosts.parse("allow:slow.test"), resolve, os.getpid())
    proxy.start()
    with closing(socket.create_connection(listener.getsockname(), SECONDS)) as connection:
        connection.sendall(get("http://slow.test/"))
        time.sleep(0.1)
        proxy.stop()
        assert not released.is_set()
        assert everything(connection) == b""
    released.set()
    proxy.close()


def test_a_connection_that_waits_ends_with_the_command(server: Server, proxied: Proxied) -> None:
    silent = [proxied.connect() for _ in range(MOST_CONNECTIONS)]
    with closing(proxied.connect()) as waiting:
        waiting.sendall(get(f"http://one.test:{server.port}/"))
        proxied.proxy.stop()
        proxied.proxy.start()
        assert everything(waiting) == b""
        assert server.received == []
        assert proxied.ask(get(f"http://one.test:{server.port}/")).endswith(b"OK")
    for connection in silent:
        connection.close()


# In a network of its own, where an address of the public internet is that of this machine.
OWN_ADDRESS = """
import os, socket, subprocess
from ringfence.receipts import NetworkUse
from ringfence_sandbox.network.network import AllowedHosts
from ringfence_sandbox.network.proxy import Proxy
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "add", "9.9.9.9/32", "dev", "lo"], check=True)
service = socket.create_server(("0.0.0.0", 80))
for rules in ("allow:one.test", "allow:one.test,9.9.9.9"):
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listener, AllowedHosts.parse(rules), lambda _name, _port: ["9.9.9.9"], os.getpid())
    proxy.start()
    with socket.create_connection(listener.getsockname(), 20) as client:
        client.sendall(b"GET http://one.test/ HTTP/1.1\\r\\n\\r\\n")
        if "9" in rules:
            service.accept()[0].close()  # of the first time
            host = service.accept()[0]
            print(host.recv(5))
            host.close()
        print(client.recv(100))
    proxy.close()
"""


def test_a_public_address_of_this_machine_is_refused_unless_it_is_named() -> None:
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*alone, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no network of one's own can be made here")
    ended = subprocess.run([*alone, sys.executable, "-c", OWN_ADDRESS], capture_output=True, text=True, check=False)
    refused, first, answer = ended.stdout.splitlines()
    assert "9.9.9.9 is this machine" in refused, ended
    assert (first, answer) == ("b'GET /'", "b''")


def test_many_hosts_that_are_refused_are_counted(proxied: Proxied) -> None:
    for number in range(120):
        proxied.ask(get(f"http://host{number}.test/"))
    use = proxied.use()
    assert len(use.hosts) == 101
    assert sum(host.refused for host in use.hosts) == 120
    assert len(use.refusals()) == 11


def test_a_forked_child_holds_no_connection(server: Server, proxied: Proxied) -> None:
    server.stays = True
    with closing(proxied.connect()) as connection:
        connection.sendall(f"CONNECT one.test:{server.port} HTTP/1.1\r\n\r\n".encode() + ONE)
        assert connection.recv(100)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        proxied.proxy.stop()
        connection.settimeout(5)
        everything(connection)  # it comes to an end, although the child lives
        os.close(writing)
        os.waitpid(child, 0)
