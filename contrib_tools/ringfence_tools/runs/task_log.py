"""The tasks of all runs in a directory and what they have used, by session. It loads no prompts."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ringfence import serde
from ringfence.limits import TokenUsage
from ringfence_sandbox import store_directory
from ringfence_tools.runs.outputs import OutputFile

TASKS_NAME = "tasks.jsonl"


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What a run has used, or several together."""

    turns: int = 0
    usage: TokenUsage = TokenUsage()

    def __add__(self, other: RunUsage) -> RunUsage:
        return RunUsage(self.turns + other.turns, self.usage + other.usage)


def record_task(directory: Path, session_id: str, task: str, earlier_sessions: Sequence[str] = ()) -> None:
    """Record the task of a session. ``earlier_sessions`` are the earlier parts of its run, oldest first.

    The workspace must be open. Raises OSError if it cannot be written.
    """
    with closing(OutputFile(_tasks_file(directory), append=True)) as file:
        file.write(_line(session_id, task, next(iter(earlier_sessions), session_id)))


def record_usage(directory: Path, session_id: str, turns: int, usage: TokenUsage) -> None:
    """Record what a run has used up to the end of a session, with its earlier parts. Raises OSError."""
    with closing(OutputFile(_tasks_file(directory), append=True)) as file:
        file.write(_used_line(session_id, RunUsage(turns, usage)))


def recorded_usage(store: Path) -> dict[str, RunUsage]:
    """Return what each run in the directory of a store has used, by the session id of its first part."""
    path = store / TASKS_NAME
    runs = {session: run for session, _, run in _read_tasks(path)}
    return {runs[session]: used for session, used in _read_usage(path) if session in runs}


def recorded_size(store: Path) -> int:
    """Return the size of what is recorded in the directory of a store, which changes with it."""
    with suppress(FileNotFoundError):
        return (store / TASKS_NAME).stat().st_size
    return 0


def recorded_tasks(directory: Path) -> dict[str, str]:
    """Return the recorded tasks by session id."""
    return {session: task for session, task, _ in _read_tasks(_tasks_file(directory))}


def recorded_runs(directory: Path) -> dict[str, str]:
    """Map the session id of each part of a run to that of the first part."""
    return {session: run for session, _, run in _read_tasks(_tasks_file(directory))}


def forget_tasks(directory: Path, *, but: Container[str]) -> None:
    """Delete all tasks but those of the sessions `but`. The workspace must be open. Raises OSError."""
    path = _tasks_file(directory)
    if path.exists():
        kept = [_line(*recorded) for recorded in _read_tasks(path) if recorded[0] in but]
        kept += [_used_line(session, used) for session, used in _read_usage(path) if session in but]
        beside = path.with_name(f"tmp_{path.name}")
        beside.write_bytes(b"".join(kept))
        beside.replace(path)


def _read_tasks(path: Path) -> Iterator[tuple[str, str, str]]:
    for record in _records(path):
        with suppress(LookupError, TypeError):
            yield record["session"], record["task"], record.get("run", record["session"])


def _read_usage(path: Path) -> Iterator[tuple[str, RunUsage]]:
    for record in _records(path):
        with suppress(LookupError, TypeError, ValueError):
            yield record["session"], RunUsage(int(record["turns"]), serde.parse(TokenUsage, record["usage"]))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        with suppress(ValueError):  # torn: only that run has no name then
            if isinstance(record := json.loads(line), dict):
                yield cast("dict[str, Any]", record)


def _tasks_file(directory: Path) -> Path:
    return store_directory(directory) / TASKS_NAME


def _used_line(session_id: str, used: RunUsage) -> bytes:
    record = {"session": session_id, "turns": used.turns, "usage": serde.dump(used.usage)}
    return json.dumps(record).encode() + b"\n"


def _line(session_id: str, task: str, run: str) -> bytes:
    return json.dumps({"session": session_id, "task": task, "run": run}).encode() + b"\n"
