"""Commands as they are asked for, how they end, and what became of their changes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

if TYPE_CHECKING:
    from ringfence.participants import Change, Step
    from ringfence.receipts import NetworkUse, Outcome, Receipt

LONGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes of one argument, or of one variable with its name: what Linux takes."""
LONGEST_SECONDS = 24 * 3600.0
LONGEST_TITLE = 100
"""Characters of a command in the line of its step in a log."""
_SHELL = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class ShellEnvironment:
    """What one shell hands on to the next: where it begins, and how its variables differ from the container's own.

    A value, since no shell outlives its call: it can be kept, and rolled back.
    """

    cwd: str = ""
    """A directory of the workspace, relative to its root."""
    variables: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """None is a variable of the container that is taken out."""


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """``argv`` is what to run, ``environment`` what it begins with where that is kept from one command to the next."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes | None
    timeout_seconds: float
    environment: ShellEnvironment | None

    @property
    def text(self) -> str | None:
        """What the shell is given; None where a program was asked for."""
        return self.argv[2] if self.argv[:2] == _SHELL and len(self.argv) == 3 else None

    @property
    def title(self) -> str:
        """The command on one line, without control characters and shortened."""
        text = shlex.join(self.argv) if self.text is None else self.text
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 1]}…"

    @classmethod
    def of(
        cls,
        command: object,
        *,
        cwd: object,
        env: object,
        stdin: object,
        timeout_seconds: object,
        environment: ShellEnvironment | None,
    ) -> Self:
        """
        Raises:
            TypeError, ValueError: it cannot be asked for so; says how.
        """
        words: Any = [*_SHELL, command] if isinstance(command, str) else command
        if isinstance(words, bytes | bytearray) or not isinstance(words, Sequence):
            raise TypeError(
                f"the command is {_kind(command)}: give text for the shell, or a list of texts, a program and its "
                "arguments"
            )
        what = "the command" if isinstance(command, str) else "argument {} of the command"
        argv = tuple(_text(what.format(number), word) for number, word in enumerate(cast("Sequence[object]", words)))
        if not argv or not argv[0] or (isinstance(command, str) and not command.strip()):
            raise ValueError("the command is empty: give text for the shell, or a program and its arguments")
        if not isinstance(cwd, str):
            raise TypeError(f"cwd is a text, the path of a directory of the workspace, not {_kind(cwd)}")
        if not isinstance(env, Mapping):
            raise TypeError(f"env is a mapping of names to values, not {_kind(env)}")
        if stdin is not None and not isinstance(stdin, str | bytes):
            raise TypeError(f"stdin is a text or bytes, not {_kind(stdin)}")
        variables = dict(_variable(name, value) for name, value in cast("Mapping[object, object]", env).items())
        given = stdin.encode() if isinstance(stdin, str) else stdin
        return cls(argv, cwd, variables, given, _seconds(timeout_seconds), environment)


def _seconds(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout_seconds is a number of seconds, not {_kind(timeout)}")
    if not 0 < timeout <= LONGEST_SECONDS:  # nor `nan`
        raise ValueError(f"timeout_seconds is above 0 and at most {LONGEST_SECONDS:g}, not {timeout}")
    return float(timeout)


def _variable(name: object, value: object) -> tuple[str, str]:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} cannot be the name of a variable: it is a text without '=' and zero characters")
    return name, _text(f"the variable {name}", value, besides=len(os.fsencode(name)) + 1)


def _text(what: str, value: object, *, besides: int = 0) -> str:
    if not isinstance(value, str):
        said = f"{what} is a text, not {_kind(value)}"
        said += "; decode it, with os.fsdecode if it is a path" if isinstance(value, bytes) else ""
        raise TypeError(said + ("; write str(...)" if isinstance(value, int | float | os.PathLike) else ""))
    if "\0" in value:
        raise ValueError(f"{what} has a zero character, where a program would see its end: give it as stdin")
    size = besides + len(os.fsencode(value))
    if size > LONGEST_ARGUMENT:
        raise ValueError(
            f"{what} has {size:,} bytes, and Linux takes {LONGEST_ARGUMENT:,}: give it as stdin, or write it to a file"
        )
    return value


def _kind(value: object) -> str:
    return f"{value!r:.50} ({type(value).__name__})" if value is not None else "None"


@dataclass(frozen=True, slots=True)
class CommandExit:
    """How a command ended. Every process that it started has ended with it.

    ``exit_code`` is the main process's: 128 + N where signal N ended it, 124 after a timeout, 127 where there is no
    such program, 126 where it could not be started for another reason; ``problem`` says which, and is empty where it
    was started. ``killed_by_oom``: the out-of-memory killer took a process of the container, not always the main one.
    ``leftovers``: about how many other processes had to be ended.
    """

    exit_code: int
    timed_out: bool = False
    killed_by_oom: bool = False
    duration_seconds: float = 0.0
    leftovers: int = 0
    problem: str = ""
    unended: int = 0
    """How many processes could not be ended on this machine: another user's, or such as hang in the kernel."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended, what it printed, and what became of its changes.

    ``exit_code`` is 124 after a timeout and 128 + N where signal N ended the command. ``stdout`` and ``stderr`` are
    text of up to 32 KiB, bytes that are not UTF-8 replaced; of more, both ends are shown, and between them where the
    rest is. ``changed_paths`` is known when the transaction has ended: empty in the middle of a tool call. They
    are relative to the root, which is "" itself.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    duration_seconds: float
    changed_paths: tuple[str, ...] = ()
    failure: str = ""
    """Why it was not let come to its end: a timeout, a full disk, a container that was lost. What it did is to be
    rolled back. Empty otherwise, whatever the exit code."""
    out_of_memory: bool = False
    """Whether the out-of-memory killer took any of its processes."""
    leftovers: int = 0
    """About how many of its processes were still running when the main one had ended, and were ended then."""
    environment: ShellEnvironment | None = None
    """What the next command begins with, where this one was given an environment to begin with."""
    network: NetworkUse | None = None
    """What it exchanged with allowed hosts; None in a sandbox without such."""
    outcome: Outcome = "committed"
    """What became of its changes. In the middle of a tool call that is not known yet, and this is "committed"."""
    changes: Sequence[Change] = ()
    """What it changed, also if that was rolled back."""
    step: Step | None = None
    """The step of its changes. None where it changed nothing, where they were rolled back, and in a call around it."""
    receipt: Receipt | None = None
    """The record of it. None in the middle of a tool call, whose receipt has it."""
    notes: Sequence[str] = ()
    """Of a rollback, in words: where what it took away is kept, and what it could not bring back."""
    not_started: str = ""
    """Why it could not be started, where ``exit_code`` is 126 or 127 for that. Empty otherwise."""
    output_files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of "stdout" and "stderr", if it is not whole here: the file on this machine with all of it. The newest 100 such
    files of a workspace are kept."""

    rollback_refused: bool = False
    """Whether it failed, and its changes stay: of what a rollback would have removed, no copy could be kept. The notes
    name it."""

    @property
    def kept(self) -> bool:
        """Whether what it did was kept."""
        return self.outcome == "committed"

    def render(self) -> str:
        """What it printed, for a person who is asked about it."""
        parts = [f"exit code: {self.exit_code}", *(one for one in (self.stdout, self.stderr) if one)]
        return "\n".join(parts)
