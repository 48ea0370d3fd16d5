"""The networks that a sandbox may have: the hosts that commands reach by name, and what they exchanged with them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from ringfence.receipts import HostTraffic


Network: TypeAlias = str
"""``none``, ``bridge``, ``slirp4netns``, ``pasta`` or ``allow:HOST[:PORT],*.HOST``."""
NETWORKS = ("none", "bridge", "slirp4netns", "pasta")
PREFIX = "allow:"
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""From a name and a port to addresses. Raises OSError for a name that has none. It may block."""

USUAL_PORTS = frozenset({80, 443})
_LONGEST_NAME = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(?::([0-9]{1,5}))?", re.ASCII)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_ROUTED = tuple(
    map(
        ipaddress.IPv6Network,
        # A network's own NAT64, Teredo, 6to4, IPv4-compatible addresses, site-local ones.
        ("64:ff9b:1::/48", "2001::/32", "2002::/16", "::/96", "fec0::/10"),
    )
)


def normalise_host(text: str) -> str:
    """Return a host's name in lower case, as DNS has it, without the dot at its end; or an address without brackets.

    Raises ValueError for what is neither: also for an address in a form that only some programs read, such as 127.1.
    """
    if text.startswith("[") and text.endswith("]"):
        return str(ipaddress.IPv6Address(text[1:-1]))
    name = text.lower().removesuffix(".")
    if not name.isascii():
        plain = name.encode("idna")
        if plain.decode("idna") != name:  # such as with a sharp s, which names another host to newer programs
            raise ValueError(f"{text!r} can be read in two ways: write its form that begins with xn--")
        name = plain.decode()
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text!r} is not the name of a host")
    return str(ipaddress.IPv4Address(name)) if _NUMBER.fullmatch(labels[-1]) else name


def split_authority(text: str, usual_port: int = 0) -> tuple[str, int]:
    """Return the host and the port of ``HOST[:PORT]``. Raises ValueError, also for a port above 65535 and for 0."""
    found = _AUTHORITY.fullmatch(text)
    port = int(found[2] or usual_port) if found else 0
    if found is None or not (0 < port < 1 << 16 or (usual_port == 0 and found[2] is None)):
        raise ValueError(f"{text!r} is not HOST or HOST:PORT")
    return normalise_host(found[1]), port


def as_address(host: str) -> Address | None:
    """Return the address that a host is given by; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_routable(address: Address) -> bool:
    """Whether an address is one of the public internet, and not another one in disguise."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_routable(address.ipv4_mapped)
        if address in _NAT64:
            return is_routable(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if any(address in network for network in _NOT_ROUTED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def resolve_name(name: str, port: int) -> Sequence[str]:
    """Ask the resolver of this machine."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


@dataclass(frozen=True, slots=True)
class _AllowedHost:
    host: str
    with_subdomains: bool
    """Whether it is for all names below the host, and not for the host itself."""
    port: int
    """0 for the usual ones."""

    def fits(self, host: str) -> bool:
        return host.endswith(f".{self.host}") if self.with_subdomains else host == self.host

    @property
    def ports(self) -> frozenset[int]:
        return frozenset({self.port}) if self.port else USUAL_PORTS


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """What ``allow:HOST[:PORT],*.HOST`` names. Without a port, 80 and 443 are meant."""

    rules: tuple[_AllowedHost, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for a text that is not of this form; the message says why."""
        return cls(tuple(_rule(word.strip()) for word in text.removeprefix(PREFIX).split(",")))

    def allows(self, host: str, port: int) -> bool:
        """Whether a host is named, as `normalise_host` has it."""
        return port in self.ports(host)

    def ports(self, host: str) -> frozenset[int]:
        """Return the ports of a host, as `normalise_host` has it; none if it is not named."""
        return frozenset[int]().union(*(rule.ports for rule in self.rules if rule.fits(host)))

    def names_address(self, text: str, port: int) -> bool:
        """Whether an address is named for names that lead to it: without a port, it is named for all of their ports."""
        address = as_address(text)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        host = str(mapped or address)
        return any(rule.fits(host) and rule.port in (0, port) for rule in self.rules)

    def allows_address(self, text: str, port: int) -> bool:
        """Whether a name may lead to this address: it is of the public internet, or named itself."""
        address = as_address(text)
        return address is not None and (is_routable(address) or self.names_address(text, port))


def allowed_hosts(network: Network) -> AllowedHosts | None:
    """Return the hosts that a network is made of; None for one of the usual kinds. Raises ValueError for no network."""
    if network.startswith(PREFIX):
        return AllowedHosts.parse(network)
    if network not in NETWORKS:
        raise ValueError(f"the network is one of {', '.join(NETWORKS)} and {PREFIX}HOST, not {network!r}")
    return None


def _rule(word: str) -> _AllowedHost:
    host = word.removeprefix("*.")
    try:
        name, port = split_authority(host)
        if host != word and as_address(name) is not None:
            raise ValueError("an address has no subdomains")
    except ValueError as error:
        raise ValueError(
            f"{word!r} names no host: {error}. Write {PREFIX}HOST, {PREFIX}HOST:PORT or {PREFIX}*.HOST, several with "
            "commas between them"
        ) from None
    return _AllowedHost(name, host != word, port)


@dataclass(slots=True)
class Traffic:
    """`HostTraffic` while it goes on."""

    host: str
    port: int
    connections: int = 0
    sent: int = 0
    received: int = 0
    refused: int = 0
    reason: str = ""

    def record(self) -> HostTraffic:
        # Imported here: who only says what a network may reach needs no runtime.
        from ringfence.receipts import HostTraffic

        return HostTraffic(*astuple(self))


def count_bypasses(pid: int) -> int:
    """Return how often there was no route in the network namespace of a process; 0 where that is not known."""
    count = 0
    with suppress(OSError, ValueError):
        with open(f"/proc/{pid}/net/snmp", encoding="ascii") as file:
            names, values = (line.split() for line in file if line.startswith("Ip:"))
        count += int(values[names.index("OutNoRoutes")])
        with open(f"/proc/{pid}/net/snmp6", encoding="ascii") as file:
            count += sum(int(line.split()[1]) for line in file if line.startswith("Ip6OutNoRoutes"))
    return count
