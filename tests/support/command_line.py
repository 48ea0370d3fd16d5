"""The command `ringfence`, run for its exit code and its output.

`ringfence` runs it in this process, which is quick. `ringfence_process` starts a process: for signals, kills and pipes,
for a lock that another process holds, and for what is read when Python starts (the locale, ``PYTHON...``).
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from agent_runs import Signals

from ringfence_cli.main import execute

READ_AT_START = ("PYTHON", "LANG", "LC_")


def ringfence(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    for name in {*os.environ, *environment}:
        if name.startswith(READ_AT_START) and os.environ.get(name) != environment.get(name):
            raise ValueError(f"{name} is read when Python starts: use ringfence_process")
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        with _standard_streams(stdout, stderr), _environment(environment, cwd or Path.cwd()), Signals() as signals:
            arguments_before, sys.argv = sys.argv, ["ringfence", *words]
            try:
                exit_code = execute(signals)
            finally:
                sys.argv = arguments_before
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(words, exit_code, stdout.read(), stderr.read())


def ringfence_text(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = ringfence(*arguments, cwd=cwd, env=env)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def ringfence_process(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ringfence_cli", *arguments]
    return subprocess.run(command, capture_output=True, cwd=cwd, env=env, timeout=timeout_seconds, check=False)


def served_once(*arguments: str | Path, timeout_seconds: float = 60) -> subprocess.CompletedProcess[bytes]:
    """`ringfence serve` with a client that calls ``ls`` and goes, which opens the workspace. Standard output is the
    answer to the call."""
    command = [sys.executable, "-m", "ringfence_cli", "serve", *arguments]
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "once", "version": "1"}}
    sent = (
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "ls", "arguments": {}}},
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as server:  # pyright: ignore[reportCallIssue, reportArgumentType, reportUnknownVariableType]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("".join(json.dumps({"jsonrpc": "2.0", **one}) + "\n" for one in sent).encode())
        server.stdin.flush()
        answer = b""
        while b'"id":2' not in answer.replace(b" ", b""):
            answer = server.stdout.readline()
            assert answer, "the server has ended without an answer"
        _, stderr = server.communicate(timeout=timeout_seconds)
    return subprocess.CompletedProcess(command, server.returncode, answer, stderr)


@contextmanager
def _standard_streams(stdout: IO[bytes], stderr: IO[bytes]) -> Generator[None]:
    """Point the descriptors there as well: the command writes to them, and so do the programs that it starts."""
    with ExitStack() as stack, open(os.devnull, "rb") as nothing:
        streams = sys.stdin, sys.stdout, sys.stderr
        for stream in streams[1:]:
            stream.flush()
        for descriptor, file in enumerate((nothing, stdout, stderr)):
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            os.dup2(file.fileno(), descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(descriptor, mode, closefd=False), "utf-8", "backslashreplace", write_through=True
            )
            for descriptor, mode in enumerate(("r", "w", "w"))
        )
        try:
            yield
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams


@contextmanager
def _environment(environment: Mapping[str, str], directory: Path) -> Generator[None]:
    before, here = dict(os.environ), os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.fchdir(here)
        os.close(here)
