"""The tasks of all runs in a directory, by session. Apart from `resume`, so that history commands load no prompts."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from ringfence_sandbox import store_directory
from ringfence_tools.runs.outputs import OutputFile

TASKS_NAME = "tasks.jsonl"


def record_task(directory: Path, session_id: str, task: str, earlier_sessions: Sequence[str] = ()) -> None:
    """Record the task of a session. ``earlier_sessions`` are the earlier parts of its run, oldest first.

    The workspace must be open. Raises OSError if it cannot be written.
    """
    with closing(OutputFile(_tasks_file(directory), append=True)) as file:
        file.write(_line(session_id, task, next(iter(earlier_sessions), session_id)))


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
        beside = path.with_name(f"tmp_{path.name}")
        beside.write_bytes(b"".join(kept))
        beside.replace(path)


def _read_tasks(path: Path) -> Iterator[tuple[str, str, str]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
            yield record["session"], record["task"], record.get("run", record["session"])
        except (ValueError, LookupError, TypeError):
            continue  # torn: only that run has no name then


def _tasks_file(directory: Path) -> Path:
    return store_directory(directory) / TASKS_NAME


def _line(session_id: str, task: str, run: str) -> bytes:
    return json.dumps({"session": session_id, "task": task, "run": run}).encode() + b"\n"
