"""Ray clusters of this machine alone: a head without slots, and nodes that a test may kill."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STORE_BYTES = 80 << 20


class RayCluster:
    """A cluster. Each node has its own raylet, and actors are children of those."""

    def __init__(self, cluster: Any, nodes: int, slots: int) -> None:
        self._cluster = cluster
        self._slots = slots
        self.nodes = [self.add_node() for _ in range(nodes)]
        self.address: str = cluster.address

    def add_node(self) -> Any:
        return self._cluster.add_node(
            num_cpus=1,
            resources={"ringfence": self._slots},
            object_store_memory=STORE_BYTES,
        )

    def raylets(self) -> list[int]:
        return [node.all_processes["raylet"][0].process.pid for node in self.nodes]

    def actors(self) -> list[int]:
        """The processes of actors, of all drivers."""
        return [pid for pid in _processes() if b"_Slot" in _words(pid) and _parent(pid) in self.raylets()]

    def kill_node(self, node: Any) -> None:
        """End a node as a lost machine does, without a word to anybody."""
        self.nodes.remove(node)
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)


@contextmanager
def ray_cluster(*, nodes: int = 2, slots: int = 2) -> Generator[RayCluster]:
    """A cluster of so many nodes with so many slots each, beside a head that has none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    place = tempfile.mkdtemp(prefix="rf-ray-", dir="/tmp")  # short, since names of sockets are
    notes = Path(tempfile.gettempdir(), "ray")  # of the newest address, whatever a cluster's directory is
    is_mine = not notes.exists()
    notes.mkdir(exist_ok=True)
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": place}
    cluster: Any = Cluster()
    try:
        cluster.add_node(**head, object_store_memory=STORE_BYTES)
        yield RayCluster(cluster, nodes, slots)
    finally:
        cluster.shutdown()
        shutil.rmtree(place, ignore_errors=True)
        if is_mine:
            shutil.rmtree(notes, ignore_errors=True)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _words(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
