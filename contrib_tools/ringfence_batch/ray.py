"""The engine of a Ray cluster: an actor for each slot, with a worker process of its own beside it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

from ringfence.extras import missing
from ringfence_batch.engine import AttemptEnded, AttemptRequest
from ringfence_batch.ledger import Ledger, LedgerError, check_filesystem
from ringfence_batch.local import LocalEngine
from ringfence_batch.sources import SourceError, local_source, pack_source
from ringfence_batch.worker import PATIENCE_SECONDS

try:
    import ray as _ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
except ImportError as error:
    raise ModuleNotFoundError(missing("ray", "ray"), name="ray") from error

ray = cast("Any", _ray)  # its decorators and references have types that say less than they take

RESOURCE = "ringfence"
"""The resource of a cluster that has one for each slot. Without it, a slot is a CPU."""
RECOUNT_SECONDS = 1.0


class RayEngine:
    """Runs attempts on the nodes of a Ray cluster. What it knows is lost with its process, and the ledger is not.

    ``OUT`` is on a filesystem that all nodes share. A node where it is not is refused. Each node has this version of
    ringfence. Directories, archives and repositories on the disk of the driver are packed once, into ``OUT/sources``.
    """

    def __init__(self, out: Path, slots: int | None = None, *, address: str | None = None) -> None:
        """
        Args:
            slots: How many attempts run at once. The default is what the cluster has, also when that changes.
            address: The cluster. The default is ``RAY_ADDRESS``, else one that runs on this machine, else a new one.

        Raises:
            LedgerError: `out` is no ledger, or nothing answers at `address`.
        """
        self.slots = 0
        self._out = Path(os.path.realpath(out))
        self._ledger = Ledger(self._out)
        self._wanted = slots
        self._counted_at = -RECOUNT_SECONDS
        self._new: dict[Any, Any] = {}
        """Actors by the reference to their answer. Ray may not have found a place for them yet."""
        self._free: list[Any] = []
        self._busy: dict[Any, tuple[str, Any]] = {}
        """The id of a task and its actor by the reference to the end of the attempt."""
        self._packs: dict[tuple[str, str | None], str | None] = {}
        self._is_own = not ray.is_initialized()
        if self._is_own:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is begun here
            _reach(address or os.environ.get("RAY_ADDRESS", ""))
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        self._nonce = self._out / f".driver-{secrets.token_hex(8)}"
        self._nonce.write_text(self._nonce.name)
        resources: Mapping[str, float] = ray.cluster_resources()
        self._unit = RESOURCE if RESOURCE in resources else "CPU"
        needs: dict[str, Any] = {"resources": {RESOURCE: 1}, "num_cpus": 0} if self._unit == RESOURCE else {}
        self._actor = ray.remote(**({"num_cpus": 1} | needs), max_concurrency=2)(_Slot)

    def start(self, request: AttemptRequest) -> None:
        actor = self._free.pop()
        reference = actor.run.remote(replace(request, source=self._pack(request.id)))
        self._busy[reference] = (request.id, actor)

    def _pack(self, task_id: str) -> str | None:
        """Return the pack of a workspace that is on this machine. None: the worker finds the workspace, or says why
        there is none."""
        task = self._ledger.task(task_id)
        key = task.workspace, task.revision
        if key not in self._packs:
            self._packs[key] = None
            if local_source(task) is not None:
                pack = self._out / "sources" / sha256(repr(key).encode()).hexdigest()[:16]
                pack.parent.mkdir(exist_ok=True)
                with suppress(SourceError):
                    if not pack.exists():
                        pack_source(task, pack)
                    self._packs[key] = str(pack)
        return self._packs[key]

    def poll(self, seconds: float) -> Sequence[AttemptEnded]:
        self._hire()
        references = [*self._new, *self._busy]
        if not references:
            sleep(seconds)
            return []
        if not ray.wait(references, timeout=seconds)[0]:
            return []
        ready = ray.wait(references, num_returns=len(references), timeout=0)[0]
        for reference in ready:
            if reference in self._new:
                self._welcome(reference)
        ended = [self._ended(reference) for reference in ready if reference in self._busy]
        self.slots = len(self._free) + len(self._busy)
        return ended

    def _hire(self) -> None:
        """Have as many actors as the cluster has slots: nodes come, and nodes die."""
        if (now := monotonic()) - self._counted_at >= RECOUNT_SECONDS:
            self._counted_at = now
            wanted = self._wanted or int(ray.cluster_resources().get(self._unit, 0))
            for _ in range(wanted - len(self._new) - len(self._free) - len(self._busy)):
                self._ask(self._actor.remote(str(self._out)))

    def _ask(self, actor: Any) -> None:
        """Give an actor no task before it has answered."""
        self._new[actor.refusal.remote(self._nonce.name)] = actor

    def _welcome(self, reference: Any) -> None:
        actor = self._new.pop(reference)
        try:
            refusal = ray.get(reference, timeout=PATIENCE_SECONDS)
        except GetTimeoutError:
            return  # its node has died with the answer
        except RayActorError as error:
            if not error.actor_init_failed:
                return  # its node has died before it was there
            refusal = f"a node cannot begin a worker: {str(error).strip().splitlines()[-1]}"
        if refusal:
            raise LedgerError(refusal)
        self._free.append(actor)

    def _ended(self, reference: Any) -> AttemptEnded:
        task_id, actor = self._busy.pop(reference)
        try:
            ended: AttemptEnded = ray.get(reference, timeout=PATIENCE_SECONDS)
        except RayActorError as error:
            while self._free:  # those of its node have died, too, and would use up the retries of a task
                self._ask(self._free.pop())
            cause = "its node died" if error.preempted else "its worker, or its node, died"
            return AttemptEnded(task_id, "infra-failed", cause, is_lost=True)
        except RayError as error:  # its node has no room for a process, or for its log
            ended = AttemptEnded(task_id, "infra-failed", str(error).strip().splitlines()[-1])
        self._free.append(actor)
        return ended

    def cancel(self, task_id: str) -> None:
        for busy, actor in self._busy.values():
            if busy == task_id:
                actor.cancel.remote(task_id)

    def close(self) -> None:
        for task_id, actor in self._busy.values():
            actor.cancel.remote(task_id)
        if self._busy:
            ray.wait(list(self._busy), num_returns=len(self._busy), timeout=PATIENCE_SECONDS)
        actors = [*self._free, *(actor for _, actor in self._busy.values())]
        if actors:
            closed = [actor.close.remote() for actor in actors]
            ray.wait(closed, num_returns=len(closed), timeout=PATIENCE_SECONDS)
        for actor in [*actors, *self._new.values()]:
            ray.kill(actor)
        self._new, self._free, self._busy = {}, [], {}
        self._nonce.unlink(missing_ok=True)
        if self._is_own:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise LedgerError if nothing answers at HOST:PORT, where Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), 10).close()
    except OSError as error:
        raise LedgerError(
            f"no Ray cluster answers at {address} ({error}): RAY_ADDRESS is HOST:PORT of its head"
        ) from None


class _Slot:
    """An actor. The worker is a process of its own, so that all that an attempt has started can be ended at once."""

    def __init__(self, out: str) -> None:
        self._out = Path(out)
        self._engine: LocalEngine | None = None

    def refusal(self, nonce: str) -> str:
        """Return why this node cannot have workers, or nothing."""
        try:
            if (self._out / nonce).read_text() != nonce:
                raise FileNotFoundError
            check_filesystem(self._out)
        except (OSError, LedgerError) as error:
            host = socket.gethostname()
            cause = str(error) if isinstance(error, LedgerError) else f"the driver's {self._out} is not there"
            return (
                f"the node {host} cannot have workers: {cause}; put OUT on a filesystem that all nodes share, "
                f"or give the resource {RESOURCE!r} to those nodes only that have it"
            )
        self._engine = self._engine or LocalEngine(self._out, 1)
        return ""

    def run(self, request: AttemptRequest) -> AttemptEnded:
        assert self._engine is not None
        self._engine.start(request)
        while True:
            for ended in self._engine.poll(60):
                if ended.id == request.id:
                    return ended

    def cancel(self, task_id: str) -> None:
        """End the attempt while `run` waits for its end."""
        assert self._engine is not None
        self._engine.cancel(task_id)

    def close(self) -> None:
        assert self._engine is not None
        self._engine.close()
