"""The engine of one machine: worker processes that are kept, with one task at a time each."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from ringfence_batch.engine import AttemptEnded, AttemptRequest
from ringfence_batch.ledger import LedgerError
from ringfence_batch.worker import PATIENCE_SECONDS, reap
from ringfence_tools.printable import why


def scratch_directory(out: Path) -> Path:
    """The directory of this machine for the copies of a batch's workspaces, made if it is not there."""
    name = sha256(os.fsencode(os.path.realpath(out))).hexdigest()[:16]
    place = Path(tempfile.gettempdir(), f"ringfence-batch-{os.getuid()}", name)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    found = place.parent.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{place.parent} can be written by others: name another directory in TMPDIR")
    place.mkdir(mode=0o700, exist_ok=True)
    return place


class _Worker:
    def __init__(self, out: Path, scratch: Path, log: Path) -> None:
        self.task_id = ""
        try:
            said = log.open("ab")
        except OSError as error:
            raise LedgerError(f"{log} cannot be written ({why(error)}): remove it") from None
        with said:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ringfence_batch", str(out), str(scratch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # so that all of its processes can be ended, and Ctrl-C is for the driver
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def send(self, request: AttemptRequest) -> None:
        self.task_id = request.id
        self.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        self.stdin.flush()

    def end(self, patience_seconds: float) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


class LocalEngine:
    """Runs attempts in processes of this machine. A worker that dies is replaced."""

    def __init__(self, out: Path, jobs: int) -> None:
        """``jobs`` is the number of workers. What dead workers of this batch left here is removed first."""
        self.slots = jobs
        self._out = out
        self._scratch = scratch_directory(out)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        reap(self._scratch)

    def start(self, request: AttemptRequest) -> None:
        worker = next((worker for worker in self._workers if not worker.task_id), None)
        if worker is None:
            worker = _Worker(self._out, self._scratch, self._out / "workers.log")
            self._workers.append(worker)
            self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        with suppress(BrokenPipeError):  # it has just died: `poll` tells of it
            worker.send(request)

    def poll(self, seconds: float) -> Sequence[AttemptEnded]:
        return [self._ended(key.data) for key, _ in self._selector.select(seconds)]

    def _ended(self, worker: _Worker) -> AttemptEnded:
        line, task_id = worker.stdout.readline(), worker.task_id
        worker.task_id = ""
        if line.endswith(b"\n"):
            answer = json.loads(line)
            return AttemptEnded(task_id, answer.get("outcome", ""), answer.get("cause", ""), answer["published"])
        self._drop(worker, 0)
        reap(self._scratch)
        return AttemptEnded(task_id, "infra-failed", f"its worker ended: {worker.process.returncode}", is_lost=True)

    def _drop(self, worker: _Worker, patience_seconds: float) -> None:
        self._selector.unregister(worker.stdout)
        self._workers.remove(worker)
        worker.end(patience_seconds)

    def cancel(self, task_id: str) -> None:
        for worker in self._workers:
            if worker.task_id == task_id:
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)

    def close(self) -> None:
        for worker in self._workers:
            worker.process.terminate()  # all at once, so that they end side by side
        for worker in list(self._workers):
            self._drop(worker, PATIENCE_SECONDS)
        reap(self._scratch)
        shutil.rmtree(self._scratch, ignore_errors=True)
        with suppress(OSError):  # another batch has its own there
            self._scratch.parent.rmdir()
