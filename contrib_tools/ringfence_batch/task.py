"""A task of a batch, and the files that tasks come from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from ringfence import serde

_ID = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,99}")
_MOST_BYTES = 1 << 20
"""The most that one task may have, as a line or a file."""

MAX_CANDIDATES = 100
Kind = Literal["memory", "disk", "podman"]


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The limits of one task. ``seconds`` begin when its workspace is ready. None is no limit, or the usual one."""

    seconds: float | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    turns: int | None = None
    repeats: int | None = None
    memory_bytes: int | None = None
    cpus: float | None = None
    command_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is a number above 0, not {value}")


@dataclass(frozen=True, slots=True)
class BatchTask:
    """A task: what an agent is to do, and on what. The keys of a task file are the names of these fields.

    ``workspace`` is a directory, an archive (``.tar``, ``.tar.gz``, ``.zip``), a git repository with a ``revision``, or
    a URL that fsspec opens. The task works on a fresh copy of it. ``model``, ``sections`` and ``policies`` are SPECs as
    of `ringfence run`. ``checks`` are commands that must exit with 0 in the workspace afterwards. ``secrets`` are names
    of variables; their values come from the environment of the worker. ``hide`` adds to the files that are always
    hidden. With ``allow_git``, commands may change git's own data. ``score`` is a command that must exit with 0, too:
    of so many ``candidates``, each a run of its own, the best by it is the result.
    """

    id: str
    workspace: str
    task: str
    model: str
    kind: Kind = "memory"
    revision: str | None = None
    sections: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    limits: TaskLimits = field(default_factory=TaskLimits)
    image: str | None = None
    network: str = "none"
    hide: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    allow_git: bool = False
    candidates: int = 1
    score: str | None = None

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id) or self.id in (".", ".."):
            raise ValueError(
                f"id is 1 to 100 of the characters A-Z a-z 0-9 . _ -, without - at its begin, and neither . nor .., "
                f"not {self.id!r}"
            )
        for name in ("workspace", "task", "model"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty")
        if self.revision is not None and urlsplit(self.workspace).scheme not in ("", "file"):
            raise ValueError("revision: of a git repository on disk, not of a URL")
        if not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ValueError(f"candidates is a number from 1 to {MAX_CANDIDATES}, not {self.candidates}")
        if self.candidates > 1 and not self.score:
            raise ValueError("candidates: give a score, too, by which one of them is the best")
        if self.kind != "podman" and (
            needs := [name for name in ("image", "checks", "secrets", "score") if getattr(self, name)]
        ):
            raise ValueError(f"{', '.join(needs)}: for the kind podman, where commands run")

    def to_json(self) -> dict[str, Any]:
        return serde.dump(self)

    @property
    def hash(self) -> str:
        """The SHA-256 of all fields, by which a changed task is told from the one that a batch was begun with."""
        text = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


class TaskFileError(ValueError):
    """Tasks that cannot be used. ``problems`` has one line for each, with its file and line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(f"{count} task{'s' if count > 1 else ''} cannot be used:\n" + "\n".join(self.problems))


def read_tasks(path: str | os.PathLike[str]) -> Sequence[BatchTask]:
    """Return the tasks of a file, or of all such files in a directory, in order.

    A ``.jsonl`` file has a task on each line, a ``.toml`` or ``.json`` file has one task. Without an ``id``, a file's
    name is that. Relative paths in a task are from the directory of its file.

    Raises:
        TaskFileError: tasks that are wrong, or have one id. It names all of them.
        OSError: a file cannot be read.
    """
    path = Path(path)
    files = sorted(one for one in path.iterdir() if one.suffix in _READERS) if path.is_dir() else [path]
    tasks, problems, seen = list[BatchTask](), list[str](), dict[str, str]()
    for file in files:
        reader = _READERS.get(file.suffix)
        if reader is None:
            raise TaskFileError([f"{file}: tasks are in files that end in {', '.join(_READERS)}"])
        for place, record in reader(file):
            try:
                if isinstance(record, ValueError):
                    raise record
                task = _located(serde.parse(BatchTask, record, extra="forbid", coerce=False), file.parent)
            except (ValueError, RecursionError) as error:
                problems.append(f"{place}: {' '.join(str(error).split())}")
                continue
            # Names of directories, which may be the same on a filesystem that does not tell case.
            if (other := seen.setdefault(task.id.casefold(), place)) != place:
                problems.append(f"{place}: the id {task.id!r} is that of {other}, too")
            tasks.append(task)
    if not tasks and not problems:
        problems = [f"{path}: there are no tasks"]
    if problems:
        raise TaskFileError(problems)
    return tasks


def _lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | ValueError]]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(_MOST_BYTES + 1):
            number += 1
            if len(line) > _MOST_BYTES:
                while not line.endswith(b"\n") and (line := lines.readline(_MOST_BYTES)):
                    pass
                yield f"{file}:{number}", ValueError(f"the line has more than {_MOST_BYTES:,} bytes")
            elif line.strip():
                yield f"{file}:{number}", _json(line)


def _json(text: bytes) -> Mapping[str, Any] | ValueError:
    try:
        record: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ValueError(f"it is no JSON: {error}")
    return cast("dict[str, Any]", record) if isinstance(record, dict) else ValueError("it is no JSON object")


def _whole(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | ValueError]]:
    with file.open("rb") as opened:
        text = opened.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        yield str(file), ValueError(f"the file has more than {_MOST_BYTES:,} bytes")
        return
    try:
        record = _json(text) if file.suffix == ".json" else tomllib.loads(text.decode())
    except ValueError as error:
        yield str(file), ValueError(f"it is no TOML: {error}")
        return
    yield str(file), {"id": file.stem, **record} if isinstance(record, Mapping) else record


_READERS = {".jsonl": _lines, ".toml": _whole, ".json": _whole}


def _located(task: BatchTask, base: Path) -> BatchTask:
    """Return the task with absolute paths, so that it means the same wherever a worker is."""
    changes: dict[str, Any] = {
        "sections": tuple(_code(spec, base) for spec in task.sections),
        "policies": tuple(_code(spec, base) for spec in task.policies),
    }
    if not urlsplit(task.workspace).scheme:
        changes["workspace"] = os.path.normpath(base.absolute() / os.path.expanduser(task.workspace))
    kind, colon, name = task.model.partition(":")
    if kind == "script":
        changes["model"] = f"{kind}{colon}{os.path.normpath(base.absolute() / name)}"
    elif kind not in ("openai", "anthropic"):
        changes["model"] = _code(task.model, base)
    return replace(task, **changes)


def _code(spec: str, base: Path) -> str:
    """Return a SPEC of a Python or TOML file with the absolute path of the file."""
    place, colon, name = (spec, "", "") if spec.endswith(".toml") else spec.rpartition(":")
    if not place.endswith((".py", ".toml")) or spec.partition(":")[0] in ("allow", "deny", "tests", "deletions"):
        return spec
    return f"{os.path.normpath(base.absolute() / place)}{colon}{name}"
