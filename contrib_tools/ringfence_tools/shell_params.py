"""What a model sends to run a command, and what it is told of how that ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from ringfence.errors import ToolValidationError
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change
from ringfence_tools.file_params import check_length

SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 120.0
"""Between them every time limit is put, where a section has no other one for the longest."""
COMMAND_SECONDS = 30.0
PYTHON_SECONDS = 5.0
MAX_VARIABLES, MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS = 64, 80, 512
MAX_CHANGES = 100
"""Changed paths in one answer; of the rest there is the number."""

_SECONDS = (
    f"How long it may take, from {SHORTEST_SECONDS:g} to what commands may take here; a value outside that range is "
    "set to the nearest limit."
)


@dataclass(frozen=True, slots=True)
class ShellExecute:
    command: str | None = field(default=None, metadata={"description": "Text for the shell. Give it, or argv."})
    argv: tuple[str, ...] = field(
        default=(), metadata={"description": "A program and its arguments, taken as they are: no shell reads them."}
    )
    cwd: str = field(default="", metadata={"description": "The directory to run it in; empty for the root."})
    env: Mapping[str, str] = field(
        default_factory=dict[str, str], metadata={"description": "Environment variables to add."}
    )
    stdin: str | None = field(default=None, metadata={"description": "Its standard input; empty if left out."})
    timeout_seconds: float = field(default=COMMAND_SECONDS, metadata={"description": _SECONDS})
    rollback_on_error: bool = field(
        default=False, metadata={"description": "Take back what it changed if its exit code is not 0."}
    )

    def __post_init__(self) -> None:
        if (self.command is None) == (not self.argv):
            raise ToolValidationError("give either command, a text for the shell, or argv, a program and its arguments")
        words = self.argv if self.command is None else (self.command,)
        if not words[0].strip():
            raise ToolValidationError("the command is empty")
        check_length("the command", sum(map(len, words)), "write a script with write_file and run that")
        check_length("stdin", len(self.stdin or ""), "write a file and redirect it")
        if any("\0" in word for word in (*words, *self.env, *self.env.values())):
            raise ToolValidationError("a command and its environment have no zero characters")
        _check_variables(self.env)
        _check_number(self.timeout_seconds)


@dataclass(frozen=True, slots=True)
class EvaluatePython:
    code: str = field(metadata={"description": "A program. What it prints is the answer."})
    timeout_seconds: float = field(default=PYTHON_SECONDS, metadata={"description": _SECONDS})

    def __post_init__(self) -> None:
        if not self.code.strip():
            raise ToolValidationError("code is empty")
        check_length("code", len(self.code), "write it with write_file and run that with shell_execute")
        if any(character < " " and character not in "\n\t" for character in self.code):
            raise ToolValidationError("code has control characters other than newlines and tabs")
        _check_number(self.timeout_seconds)


def _check_variables(env: Mapping[str, str]) -> None:
    if len(env) > MAX_VARIABLES:
        raise ToolValidationError(f"env has {len(env):,} variables, one call takes {MAX_VARIABLES}")
    for name, value in env.items():
        if not name or "=" in name or len(name) > MAX_NAME_CHARACTERS:
            raise ToolValidationError(
                f"env: {name[:100]!r} is no name of a variable: 1 to {MAX_NAME_CHARACTERS} characters, none of them '='"
            )
        if len(value) > MAX_VALUE_CHARACTERS:
            raise ToolValidationError(
                f"env: the value of {name} has {len(value):,} characters, one call takes {MAX_VALUE_CHARACTERS}: set "
                "it in the command"
            )


def _check_number(seconds: float) -> None:
    if math.isnan(seconds):
        raise ToolValidationError("timeout_seconds is not a number")


@dataclass(frozen=True, slots=True)
class ChangedPath:
    path: str
    """As `ringfence.filesystem.paths.escape_path` has it; empty for the root."""
    kind: Literal["created", "modified", "deleted"]


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended. ``stdout`` and ``stderr`` are bounded; where they are cut, they say how to read the rest."""

    exit_code: int
    """124 after a timeout; 128 + N where signal N ended it."""
    stdout: str
    stderr: str
    timed_out: bool = False
    duration_seconds: float = 0.0
    out_of_memory: bool = False
    """Whether the out-of-memory killer took any of its processes."""
    leftovers: int = 0
    """About how many of its processes were still running when it had ended, and were ended too."""
    changed: tuple[ChangedPath, ...] = ()
    """What it changed, less what is counted in ``changes_left_out``; empty where that was taken back."""
    changes_left_out: int = 0
    began_in: str = ""
    """The directory that was asked for, or else where the command before had ended; empty, or ".", for the root."""

    @property
    def changed_paths(self) -> tuple[str, ...]:
        return tuple(change.path for change in self.changed)

    def with_changes(self, changes: Sequence[Change]) -> Self:
        listed = tuple(ChangedPath(escape_path(change.path), change.kind) for change in changes[:MAX_CHANGES])
        return replace(self, changed=listed, changes_left_out=len(changes) - len(listed))

    def render(self) -> str:
        parts = [f"{name}:\n{text}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        lines = [f"{change.kind} {change.path or 'the root'}" for change in self.changed]
        if self.changes_left_out:
            lines.append(f"[and {self.changes_left_out:,} more]")
        if lines:
            parts.append("\n".join(("changed:", *lines)))
        return "\n".join(part.rstrip("\n") for part in parts) or "it printed nothing, and changed no file"

    def summary(self) -> str:
        """On one line, what is not in the output."""
        said = [f"exit code {self.exit_code} after {self.duration_seconds:.1f} s"]
        if self.out_of_memory:
            said.append("out of memory: a process of it was killed")
        if self.leftovers:
            left = "a process" if self.leftovers == 1 else f"{self.leftovers} processes"
            said.append(f"{left} that it left running had to be ended")
        return "; ".join(said)
