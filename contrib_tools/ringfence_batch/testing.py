"""The contract suite of engines, for engines of one's own, too. This module does not import pytest.

It is here and not in `ringfence.testing`, since the core does not know batches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic

from ringfence_batch.engine import AttemptEnded, AttemptRequest, Engine
from ringfence_batch.ledger import Ledger
from ringfence_batch.task import BatchTask

SECONDS = 120.0
"""How long a test waits for an attempt: the nodes of a cluster take their time."""
CODE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from ringfence import MarkdownSection, Tool, ToolResult

@dataclass(frozen=True)
class Act:
    name: str

def act(params, *, context):
    Path(__file__).with_name(params.name).write_text(str(os.getpid()))
    if params.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while params.name in ("waits", "waits-too"):
        time.sleep(0.05)
    return ToolResult.ok(None, "done")

tool = Tool[Act, None](name="act", description="Acts.", handler=act, read_only=True)
section = MarkdownSection(title="Act", key="act", template="", tools=[tool])
"""
END = {"text": "Done."}


class EngineContract:
    """Subclass it in a test, as ``class TestMyEngine(EngineContract)``, with `engine`."""

    def engine(self, out: Path, slots: int) -> Engine:
        """An engine for the ledger in `out` that can run so many attempts at once. The test closes it."""
        raise NotImplementedError

    def test_an_attempt_publishes_its_result_and_what_has_one_does_not_run_again(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, ends=[END])
        with closing(self.engine(ledger.out, 1)) as engine:
            for _ in range(2):
                _start(engine, AttemptRequest("ends", is_last=False))
                (ended,) = _ended(engine, 1)
                assert (ended.id, ended.is_published, ended.is_lost) == ("ends", True, False)
        result = ledger.result("ends")
        assert result is not None
        assert (result.outcome, result.attempt, ledger.attempts("ends")) == ("done", 1, 1)

    def test_attempts_run_side_by_side(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, **{name: [_act(name), END] for name in ("waits", "waits-too")})
        with closing(self.engine(ledger.out, 2)) as engine:
            for running, name in enumerate(("waits", "waits-too")):
                _start(engine, AttemptRequest(name, is_last=False), running)
            pids = [_pid(tmp_path, engine, name) for name in ("waits", "waits-too")]
        assert len(set(pids)) == 2

    def test_a_failure_of_the_infrastructure_is_a_result_at_the_last_attempt_only(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, fails=[_act("acts")])  # the script of the model ends too early
        with closing(self.engine(ledger.out, 1)) as engine:
            _start(engine, AttemptRequest("fails", is_last=False))
            (first,) = _ended(engine, 1)
            assert (first.outcome, first.is_published, first.is_lost) == ("infra-failed", False, False)
            assert ledger.result("fails") is None
            _start(engine, AttemptRequest("fails", is_last=True))
            assert _ended(engine, 1)[0].is_published
        result = ledger.result("fails")
        assert result is not None
        assert (result.outcome, result.attempt) == ("infra-failed", 2)

    def test_an_attempt_whose_worker_dies_is_lost_and_its_slot_is_free_again(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, dies=[_act("dies"), END], ends=[END])
        with closing(self.engine(ledger.out, 1)) as engine:
            _start(engine, AttemptRequest("dies", is_last=True))
            (lost,) = _ended(engine, 1)
            assert (lost.id, lost.is_lost, lost.is_published) == ("dies", True, False)
            _start(engine, AttemptRequest("ends", is_last=False))
            assert _ended(engine, 1)[0].is_published
        assert ledger.result("dies") is None

    def test_a_cancelled_attempt_ends_with_its_processes(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, waits=[_act("waits"), END])
        with closing(self.engine(ledger.out, 1)) as engine:
            _start(engine, AttemptRequest("waits", is_last=False))
            pid = _pid(tmp_path, engine, "waits")
            engine.cancel("waits")
            assert _ended(engine, 1)[0].is_lost
            assert not os.path.exists(f"/proc/{pid}")
        assert ledger.result("waits") is None

    def test_close_ends_attempts(self, tmp_path: Path) -> None:
        ledger = _ledger(tmp_path, waits=[_act("waits"), END])
        with closing(self.engine(ledger.out, 1)) as engine:
            _start(engine, AttemptRequest("waits", is_last=False))
            pid = _pid(tmp_path, engine, "waits")
        assert not os.path.exists(f"/proc/{pid}")
        assert ledger.result("waits") is None


def _act(name: str) -> Mapping[str, object]:
    return {"tool_calls": [{"name": "act", "arguments": {"name": name}}]}


def _ledger(place: Path, **scripts: Sequence[Mapping[str, object]]) -> Ledger:
    (place / "repo").mkdir()
    (place / "code.py").write_text(CODE)
    tasks = list[BatchTask]()
    for name, turns in scripts.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        model, sections = f"script:{place / name}.jsonl", (f"{place / 'code.py'}:section",)
        tasks.append(BatchTask(name, str(place / "repo"), "Do it.", model, sections=sections))
    return Ledger.create(place / "out", tasks)


def _start(engine: Engine, request: AttemptRequest, running: int = 0) -> None:
    """Start an attempt as a driver does: once there is a slot for it."""
    end = monotonic() + SECONDS
    while engine.slots <= running:
        assert monotonic() < end, "there is no slot"
        assert not [one for one in engine.poll(0.1) if one.id], "an attempt ended"
    engine.start(request)


def _ended(engine: Engine, count: int) -> Sequence[AttemptEnded]:
    end, ended = monotonic() + SECONDS, list[AttemptEnded]()
    while len(ended) < count:
        assert monotonic() < end, "no attempt ended"
        ended += [one for one in engine.poll(0.5) if one.id]
    return ended


def _pid(place: Path, engine: Engine, name: str) -> int:
    """Wait until the tool of a task is at work. Return its process."""
    end = monotonic() + SECONDS
    while not (place / name).exists() or not (text := (place / name).read_text()):
        assert monotonic() < end, "no attempt began"
        assert not list(engine.poll(0.1)), "the attempt ended"
    return int(text)
