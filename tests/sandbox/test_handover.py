"""What a shell is asked to say at its end, with the shells that images have as /bin/sh, run on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ringfence_sandbox import ShellEnvironment
from ringfence_sandbox.container.commands import KeptEnvironment
from ringfence_sandbox.container.executor import REPORT
from ringfence_workspace.commands import CommandRequest

OWN = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "a.b": "x"}
BEFORE = ShellEnvironment("", {"A": "1"})


def left(shell: str, command: str) -> tuple[int, bytes, ShellEnvironment | None]:
    """The exit code, what was printed, and the environment that is left."""
    request = CommandRequest.of(command, cwd="", env={}, stdin=None, timeout_seconds=5, environment=BEFORE)
    kept = KeptEnvironment(request, "/usr", OWN)
    reading, writing = os.pipe()
    child = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {REPORT}>&$0', str(writing), *shell.split(), *kept.argv[1:]],
        env={**OWN, **{name: value for name, value in kept.env.items() if value is not None}},
        cwd="/usr",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[writing],
    )
    os.close(writing)
    with open(reading, "rb") as report:
        kept.take(report.read())
    said, _ = child.communicate(timeout=5)
    return child.returncode, said, kept.next_environment()


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
@pytest.mark.parametrize(
    ("command", "code", "said", "kept"),
    [
        ("exit 3", 3, b"", {"A": "1"}),
        ("export B='x\ny'; A=2; C=3; (exit 5)", 5, b"", {"A": "2", "B": "x\ny"}),
        ("set -eu; false; echo no", 1, b"", {"A": "1"}),
        ("set -x; true", 0, b"+ true\n", {"A": "1"}),
        ("export PATH=/nope; unset HOME A", 0, b"", {"HOME": None, "PATH": "/nope"}),
        ("env() { echo x; }; pwd() { echo x; }; printf() { echo x; }; cd /", 0, b"", {"A": "1"}),
        ("cat <<x\n$A\nx\n# end", 0, b"1\n", {"A": "1"}),
        ("exec true", 0, b"", None),
        ("trap 'echo mine' EXIT; export A=2", 0, b"mine\n", None),
    ],
)
def test_a_shell_says_what_it_exports_and_ends_as_it_would(
    shell: str, command: str, code: int, said: bytes, kept: dict[str, str | None] | None
) -> None:
    if shutil.which(shell.split(maxsplit=1)[0]) is None:
        pytest.skip(f"there is no {shell} here")
    expected = None if kept is None else ShellEnvironment("", kept)
    assert left(shell, command) == (code, said, expected)


def test_where_nothing_is_asked_for_a_command_is_left_as_it_is() -> None:
    request = CommandRequest.of("echo", cwd="", env={"A": "1"}, stdin=None, timeout_seconds=5, environment=None)
    kept = KeptEnvironment(request, "/workspace", {})
    assert (kept.argv, kept.env, kept.reports) == (
        ("/bin/sh", "-c", "echo"),
        {"A": "1"},
        False,
    )
    assert kept.next_environment() is None
