"""What a client of the proxy asks for: the head of an HTTP request, and the ClientHello of a TLS connection.

Both are read strictly: what two programs could read in two ways is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringfence_sandbox.network.network import split_authority

HANDSHAKE = 22
LONGEST_RECORD = 16384
LONGEST_HELLO = 64 * 1024
UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
"""The alert for a client that asks for another host."""
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0


class _Reader:
    """Takes fields off a message. Raises ValueError where it is too short."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        if count > len(self.data):
            raise ValueError("a field of the ClientHello is cut off")
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """A field after its length, which has ``size`` bytes."""
        return self.take(self.number(size))


def record_length(head: bytes) -> int:
    """The bytes in a record of a handshake after its five bytes of head. Raises ValueError for any other record."""
    length = int.from_bytes(head[3:], "big")
    if head[0] != HANDSHAKE or head[1] != 3 or not 0 < length <= LONGEST_RECORD:
        raise ValueError("the connection is not TLS")
    return length


def is_cut(message: bytearray) -> bool:
    """Whether more of a ClientHello is to come. Raises ValueError for another message, or a very long one."""
    if message[0] != _CLIENT_HELLO:
        raise ValueError("the connection does not begin with a ClientHello")
    length = int.from_bytes(message[1:4], "big")
    if len(message) >= 4 and length > LONGEST_HELLO:
        raise ValueError("the ClientHello is too long")
    return len(message) < 4 + length


def server_name(message: bytes) -> str:
    """The name in a ClientHello; "" if it has none. Raises ValueError where it is malformed, or has more than one."""
    outer = _Reader(message[1:])
    hello = _Reader(outer.vector(3))
    if outer.data:
        raise ValueError("something follows the ClientHello")
    hello.take(2 + 32)  # version and random
    hello.vector(1)  # session
    hello.vector(2)  # ciphers
    hello.vector(1)  # compression
    names: list[bytes] = []
    extensions = _Reader(hello.vector(2) if hello.data else b"")
    while extensions.data:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        listed = _Reader(_Reader(content).vector(2))
        if len(listed.data) + 2 != len(content):
            raise ValueError("the list of names is malformed")
        while listed.data:
            is_host = listed.number(1) == _HOST_NAME
            names.append(listed.vector(2) if is_host else b"")
    if len(names) > 1 or b"" in names:
        raise ValueError("the ClientHello names more than one host")
    return names[0].decode("ascii") if names else ""


LONGEST_HEAD = 64 * 1024
LONGEST_LINE = 256
"""Bytes of the line before a chunk."""
END_OF_HEAD = b"\r\n\r\n"
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\x20-\x7e\x80-\xff\t]*)")
_TARGET = re.compile(r"http://([^/?#]+)([/?][^#]*)?", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\x20-\x7e\x80-\xff\t]*)?")
_OF_ONE_CONNECTION = frozenset(
    (
        b"connection",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
    )
)
"""Headers that are not handed on. The one of the host is written anew from the URL."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that can be answered."""

    host: str
    port: int
    is_tunnel: bool
    """Whether it is CONNECT."""
    head: bytes = b""
    """What the host gets of a plain request."""
    body_bytes: int = 0
    is_chunked: bool = False


def parse_request(head: bytes) -> HttpRequest:
    """Raises ValueError for a request that is no request to a proxy, or has no clear end."""
    first, *lines = head.removesuffix(END_OF_HEAD).split(b"\r\n")
    asked = _REQUEST.fullmatch(first)
    if asked is None:
        raise ValueError("not a request of HTTP/1.1")
    method, target, version = asked[1], asked[2].decode("ascii"), asked[3]
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise ValueError("a header is malformed")
        headers.append((found[1].lower(), found[2].strip(b" \t")))
    if method == b"CONNECT":
        return HttpRequest(*split_authority(target, 443), is_tunnel=True)
    place = _TARGET.fullmatch(target)
    if place is None:
        raise ValueError("this is a proxy: ask it for http://HOST/PATH or for CONNECT HOST:PORT")
    host, port = split_authority(place[1], 80)
    body_bytes, is_chunked = _body(headers, version)
    path = place[2] or "/"
    shown = f"[{host}]" if ":" in host else host
    sent = [
        b"%s %s %s" % (method, (path if path.startswith("/") else f"/{path}").encode(), version),
        b"Host: " + (shown if port == 80 else f"{shown}:{port}").encode(),
        *(b"%s: %s" % (name, value) for name, value in headers if name not in _OF_ONE_CONNECTION),
        b"Connection: close",
    ]
    return HttpRequest(host, port, False, b"\r\n".join(sent) + END_OF_HEAD, body_bytes, is_chunked)


def _body(headers: list[tuple[bytes, bytes]], version: bytes) -> tuple[int, bool]:
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise ValueError("the end of the body can be read in two ways")
    if codings and (codings[0].lower() != b"chunked" or version != b"HTTP/1.1"):
        raise ValueError("a Transfer-Encoding other than chunked")
    if lengths and not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
        raise ValueError("a Content-Length that is no number")
    return int(lengths[0]) if lengths else 0, bool(codings)


def chunk_length(line: bytes) -> int:
    """The length in the line before a chunk, which ends with CR LF. Raises ValueError."""
    found = _CHUNK.fullmatch(line.removesuffix(b"\r\n"))
    if found is None:
        raise ValueError("a chunk is malformed")
    return int(found[1], 16)
