"""A command as somebody asked for it, checked before anything is done for it."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ringfence_sandbox.container.channel import Ended
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_sandbox.container.shell_environment import ShellEnvironment

LONGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes of one argument, or of one variable with its name: what Linux takes."""
LONGEST_SECONDS = 24 * 3600.0
_NOT_FOUND = 127
_SHELL = ("/bin/sh", "-c")


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
        argv = (*_SHELL, _text("the command", command)) if isinstance(command, str) else _arguments(command)
        if not argv or not argv[0] or (isinstance(command, str) and not command.strip()):
            raise ValueError("the command is empty: give text for the shell, or a program and its arguments")
        if not isinstance(cwd, str):
            raise TypeError(f"cwd is a text, the path of a directory of the workspace, not {_kind(cwd)}")
        if stdin is not None and not isinstance(stdin, str | bytes):
            raise TypeError(f"stdin is a text or bytes, not {_kind(stdin)}")
        if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float):
            raise TypeError(f"timeout_seconds is a number of seconds, not {_kind(timeout_seconds)}")
        if not 0 < timeout_seconds <= LONGEST_SECONDS or not math.isfinite(timeout_seconds):
            raise ValueError(f"timeout_seconds is above 0 and at most {LONGEST_SECONDS:g}, not {timeout_seconds}")
        given = stdin.encode() if isinstance(stdin, str) else stdin
        return cls(argv, cwd, _variables(env), given, float(timeout_seconds), environment)


def _arguments(command: object) -> tuple[str, ...]:
    if isinstance(command, bytes | bytearray) or not isinstance(command, Sequence):
        raise TypeError(
            f"the command is {_kind(command)}: give text for the shell, or a list of texts, a program and its arguments"
        )
    words: Sequence[object] = command  # pyright: ignore[reportUnknownVariableType]  # of what, is to be seen
    return tuple(_text(f"argument {number} of the command", word) for number, word in enumerate(words))


def _variables(env: object) -> Mapping[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env is a mapping of names to values, not {_kind(env)}")
    known: Mapping[Any, Any] = env  # pyright: ignore[reportUnknownVariableType]  # of what, is to be seen
    checked: dict[str, str] = {}
    for name, value in known.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} cannot be the name of a variable: it is a text without '=' and zero characters")
        checked[name] = _text(f"the variable {name}", value, besides=len(os.fsencode(name)) + 1)
    return checked


def _text(what: str, value: object, *, besides: int = 0) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is a text, not {_kind(value)}{_advice(value)}")
    if "\0" in value:
        raise ValueError(f"{what} has a zero character, where a program would see its end: give it as stdin")
    size = besides + len(os.fsencode(value))
    if size > LONGEST_ARGUMENT:
        raise ValueError(
            f"{what} has {size:,} bytes, and Linux takes {LONGEST_ARGUMENT:,}: give it as stdin, or write it to a file"
        )
    return value


def _advice(value: object) -> str:
    if isinstance(value, bytes):
        return "; decode it, with os.fsdecode if it is a path"
    return "; write str(...)" if isinstance(value, int | float | os.PathLike) else ""


def _kind(value: object) -> str:
    return f"{value!r:.50} ({type(value).__name__})" if value is not None else "None"


def explained(request: CommandRequest, ended: Ended) -> str:
    """Why a command could not be started, and what to do; empty where it was."""
    if not ended.problem or ended.exit_code != _NOT_FOUND:
        return ended.problem
    program = request.argv[0]
    if " " in program and len(request.argv) == 1:
        return f"{ended.problem}; a line for the shell is one text, not a list; of a list each argument is an item"
    if "/" in program:
        return f"{ended.problem}; that, or the interpreter which its first line names, is not in the container"
    return f"{ended.problem}; the container's PATH has no such program: take an image that has it, or give its path"


def timed_out(request: CommandRequest) -> str:
    seconds = request.timeout_seconds
    return f"timed out after {seconds:g} second{'' if seconds == 1 else 's'}"


def no_directory(cwd: str, error: OSError | ValueError) -> OSError | ValueError:
    """The same kind of error, with what a cwd may be. What says nothing about the path stays as it is."""
    why = str(error)
    if isinstance(error, OSError):
        why = error.strerror or why
        if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
            if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
                return error
            error = NotADirectoryError()
    return type(error)(
        f"cwd is {cwd!r}, which is no directory of the workspace ({why}): it is a path from the root, such as 'src', "
        f"or below {WORKSPACE}"
    )
