"""Tasks of batches whose agents are scripted, and what a batch has left behind."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ringfence_batch import Batch, BatchTask

EDIT = {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "one", "new_string": "two"}}
READ = {"name": "read_file", "arguments": {"file_path": "a.txt"}}
TURNS: tuple[Mapping[str, object], ...] = ({"tool_calls": [READ, EDIT]}, {"text": "Done."})


def script(repo: Path, name: str, *turns: Mapping[str, object]) -> str:
    path = repo.parent / f"{name}.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return f"script:{path}"


def task(repo: Path, task_id: str, *turns: Mapping[str, object], **options: Any) -> BatchTask:
    return BatchTask(task_id, str(repo), "Mend it.", script(repo, task_id, *(turns or TURNS)), **options)


def outcomes(batch: Batch) -> dict[str, str | None]:
    return {task_id: result and result.outcome for task_id, result in batch.ledger.results()}


def scratch_place(batch: Batch) -> Path:
    """Return where this machine has the copies of a batch's workspaces."""
    name = sha256(os.fsencode(os.path.realpath(batch.ledger.out))).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"ringfence-batch-{os.getuid()}", name)


def scratch(batch: Batch) -> list[str]:
    """Return what is left of the copies of workspaces."""
    place = scratch_place(batch)
    return [str(path) for path in (place, *place.rglob("*"))] if place.exists() else []


SLEEP = """
import time
from ringfence import MarkdownSection, Tool, ToolResult
def nap(params, *, context):
    time.sleep({seconds})
    return ToolResult.ok(None, "slept")
tool = Tool[None, None](name="nap", description="Sleeps.", handler=nap, read_only=True)
section = MarkdownSection(title="Nap", key="nap", template="", tools=[tool])
"""
NAP = {"name": "nap", "arguments": {}}


def sleepy(repo: Path, task_id: str, seconds: float) -> BatchTask:
    file = repo.parent / f"{task_id}.py"
    file.write_text(SLEEP.format(seconds=seconds))
    return task(repo, task_id, {"tool_calls": [NAP, READ, EDIT]}, {"text": "Done."}, sections=(f"{file}:section",))


def workers_of(out: Path) -> list[int]:
    found = list[int]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ringfence_batch" in words and os.fsencode(out) in words:
                found.append(int(name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
