"""What a command did in a network of allowed hosts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import astuple, dataclass

from ringfence.runtime.receipts import HostTraffic

_MOST_LINES = 10


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
        return HostTraffic(*astuple(self))


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """What the processes of one command did in a network of allowed hosts."""

    hosts: tuple[HostTraffic, ...] = ()
    bypasses: int = 0
    """How often one of them wanted to send something without the proxy. It had no network."""

    def refusals(self) -> list[str]:
        """Return a line for each host that there was no connection to, and one for programs without the proxy."""
        refused = [f"{host.reason} ({host.refused} x)" for host in self.hosts if host.refused]
        lines = [f"network refused: {reason}" for reason in refused[:_MOST_LINES]]
        if len(refused) > _MOST_LINES:
            lines.append(f"network refused: and {len(refused) - _MOST_LINES} more hosts")
        if self.bypasses:
            lines.append(
                "network: a program did not use the proxy of HTTP_PROXY and HTTPS_PROXY; there is no other way out"
            )
        return lines


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
