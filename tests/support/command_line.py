"""The command `ringfence`, run for its exit code and what it says.

Each run is a process of its own, but a fork of one that has imported all it needs: a start of Python and its imports
take longer than what most tests have it do. What only shows at a start (the locale, ``PYTHON...``), and what needs a
process to send signals or input to, is for `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

LONGEST_REQUEST_BYTES = 1 << 20
ONLY_AT_THE_START = ("PYTHON", "LANG", "LC_")


def ringfence(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """As `subprocess.run`, with nothing to read and what it says captured."""
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    for name in {*os.environ, *environment}:
        if name.startswith(ONLY_AT_THE_START) and os.environ.get(name) != environment.get(name):
            raise ValueError(f"{name} is read when Python starts: use subprocess")
    request = json.dumps((words, str(cwd or Path.cwd()), environment)).encode()
    receiving, sending = os.pipe()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, open(receiving) as ended:
        try:
            socket.send_fds(_starter(), [request], [stdout.fileno(), stderr.fileno(), sending])
        finally:
            os.close(sending)
        pid = int(ended.readline())
        if not select.select([ended], [], [], timeout_seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout_seconds)
        exit_code = int(ended.readline())
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(words, exit_code, stdout.read(), stderr.read())


def ringfence_text(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    done = ringfence(*arguments, cwd=cwd, env=env, timeout_seconds=timeout_seconds)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def _starter() -> socket.socket:
    """Where requests go to the process that forks; it ends when nobody holds this end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _start(connection: socket.socket) -> None:
    """Returns in each process that is to be the command, and when there are no requests any more."""
    import ringfence_cli

    for module in pkgutil.iter_modules(ringfence_cli.__path__, "ringfence_cli."):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()
    while True:
        request, descriptors, *_ = socket.recv_fds(connection, LONGEST_REQUEST_BYTES, 3)
        if not request:
            sys.exit()
        watching = os.fork()
        if watching == 0:
            connection.close()
            _become(json.loads(request), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(watching, 0)


def _become(asked: tuple[Sequence[str], str, Mapping[str, str]], descriptors: Sequence[int]) -> None:
    words, directory, environment = asked
    *outputs, ended = descriptors
    if os.fork():  # so that the next request does not wait for this one
        os._exit(0)
    child = os.fork()
    if child:
        for descriptor in outputs:
            os.close(descriptor)
        os.write(ended, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(ended, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(ended)
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ringfence", *words]


if __name__ == "__main__":
    _start(socket.socket(fileno=int(sys.argv[1])))
    from ringfence_cli.main import main

    main()
