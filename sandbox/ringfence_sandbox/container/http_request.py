"""The head of a request to a proxy, read strictly: what two programs could read in two ways is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringfence_sandbox.container.allowed_hosts import split_authority

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
