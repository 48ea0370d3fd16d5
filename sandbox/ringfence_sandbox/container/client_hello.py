"""The first message of a TLS connection: for which host it is."""

from __future__ import annotations

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
