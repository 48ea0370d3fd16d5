"""One command between the environment that it begins with and the one that it leaves to the next."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringfence.runtime.secrets import Secrets
from ringfence_sandbox.container.command_request import CommandRequest
from ringfence_sandbox.container.executor import REPORT
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_sandbox.container.shell_environment import ShellEnvironment

LONGEST_REPORT = 64 * 1024
"""Bytes of a directory and all exported variables. A longer report is none."""
UNKNOWN = "what it exported is not known, so that the next command begins as this one did"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_OF_EACH_SHELL = frozenset({"_", "OLDPWD", "PWD", "SHLVL"})
# On the line of the command, so that the shell counts its lines right. `set +ex`: what a command asks for is not for
# what follows it. The directory and each variable end with a zero byte, and the whole with one more.
_REPORTING = (
    "trap '{ set +ex; } 2>/dev/null; "
    '{ command pwd -P && command printf "\\0" && command -p env -0 && command printf "\\0"; } '
    f"2>/dev/null >/proc/self/fd/{REPORT}' EXIT; "
)


class Handover:
    """Where no environment is to be kept, the command is run as it was asked for.

    A shell says at its end where it is and what it exports, unless the command replaces it (``exec``), is killed, or
    sets a trap of its own on EXIT. A program leaves the environment as it was.
    """

    def __init__(
        self, request: CommandRequest, directory: str, own: Mapping[str, str], secrets: Secrets | None = None
    ) -> None:
        """``directory`` is where in the container it begins, ``own`` the container's variables. The variables of
        ``secrets`` are never handed on."""
        self._secrets = secrets or Secrets()
        self._before = request.environment
        self._directory = directory
        self._own = own
        self._received = bytearray()
        text = request.text if request.environment is not None else None
        self.reports = text is not None
        """Whether what it leaves is to be reported."""
        self.argv = request.argv if text is None else (*request.argv[:2], _REPORTING + text)
        self.env: Mapping[str, str | None] = {
            **self._secrets.variables,
            **(request.environment or ShellEnvironment()).variables,
            **request.env,
        }

    def take(self, data: bytes) -> None:
        """A piece of the report."""
        self._received += data[: LONGEST_REPORT + 1 - len(self._received)]

    def left(self) -> ShellEnvironment | None:
        """What the next command begins with; None where a report that should be there is none, or not a whole one.

        A report may be forged, which gains what ``export`` does. What the command itself changed is handed on, not the
        directory and the variables that it was given for itself; of directories, only those of the workspace, of
        variables, those with the name of a shell's variable and a value that is UTF-8 and has no secret in it.
        """
        if self._before is None or not self.reports:
            return self._before
        report = bytes(self._received)
        place, ended, rest = report.partition(b"\n\0")
        if len(report) > LONGEST_REPORT or not ended or not (rest == b"\0" or rest.endswith(b"\0\0")):
            return None
        changed = {name: value for name, value in self._changed(rest).items() if self._secrets.mask(value) is value}
        variables = {**self._before.variables, **changed}
        own = self._own
        return ShellEnvironment(
            self._place(place),
            {name: variables[name] for name in sorted(variables) if variables[name] != own.get(name)},
        )

    def _place(self, place: bytes) -> str:
        assert self._before is not None
        found = place.decode(errors="surrogateescape")
        if found == self._directory:
            return self._before.cwd
        before, inside, cwd = f"{found}/".partition(f"{WORKSPACE}/")
        return cwd.rstrip("/") if inside and not before else ""

    def _changed(self, words: bytes) -> Mapping[str, str | None]:
        given = {**self._own, **self.env}
        pairs = (word.partition("=") for word in words.decode(errors="surrogateescape").split("\0"))
        exported = {name: value for name, equals, value in pairs if equals}
        return {
            name: exported.get(name)
            for name in given.keys() | exported.keys()
            if exported.get(name) != given.get(name)
            and name not in _OF_EACH_SHELL
            and _NAME.match(name)
            and _is_text(exported.get(name, ""))
        }


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
