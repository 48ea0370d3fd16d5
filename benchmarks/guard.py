"""What a guard adds to a call of an agent's own tools: its process, and the client that each hook starts.

In processor time: of the guard's process and of the one that asks it, beside the same round trips to a server that does
nothing; of the client, beside the interpreter that it runs in.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from measure import Row, Side, Spread, alternated, flat, less, report, scratch_directory
from trees import sample, written

from ringfence_guard import HookCommand, guard_directory, save_launcher

TARGETS_US = {1_000: 6_000, 10_000: 8_000, 50_000: 12_000}
"""By the number of files: of a command, both events."""
FILE_TOOL_US = 3_000
CLIENT_US = 10_000
"""Of a client, beyond the start of its interpreter."""
BARE = "two round trips to a server that does nothing"
BARE_SERVER = """\
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
while True:
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"0 0\\n")
"""


class Server:
    """A process that answers on a socket."""

    def __init__(self, directory: Path, process: int) -> None:
        self.process = process
        self._directory = os.open(directory, os.O_PATH)

    def ask(self, question: Mapping[str, object]) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{self._directory}/socket")
            connection.sendall(json.dumps(question).encode() + b"\n")
            return connection.makefile("rb").read()

    def seconds(self) -> float:
        """The processor time of both sides. The clock of another process is numbered as in `clock_getcpuclockid`."""
        return time.clock_gettime((~self.process << 3) | 2) + time.process_time()

    def close(self) -> None:
        os.close(self._directory)


class Agent:
    """Claude Code, as far as its hooks are concerned, at work in one tree."""

    def __init__(self, root: Path, state: Path) -> None:
        self._root, self._number = root, 0
        directory = guard_directory(root)
        save_launcher(state)
        command = HookCommand(sys.executable, "ringfence", str(state), str(root))
        self.client = [*command.words("claude")]
        subprocess.run(self.client, input=self.event("SessionStart"), check=True, text=True)
        self.server = Server(directory, 0)
        self.server.process = json.loads(self.server.ask({"kind": "status"}))["status"]["process"]
        for _ in range(2):  # the second finds nothing that is too new to be told
            self.command()
            time.sleep(0.05)

    def event(self, name: str, **more: object) -> str:
        return json.dumps({"hook_event_name": name, "session_id": "s", "cwd": str(self._root), **more})

    def tell(self, name: str, **more: object) -> None:
        payload = json.loads(self.event(name, **more))
        asked = {"kind": "event", "agent": "claude", "process": os.getpid(), "payload": payload}
        answer = self.server.ask(asked)
        assert answer == b"0 0\n", answer

    def call(self, tool: str, arguments: dict[str, str], work: Callable[[], object]) -> None:
        self._number += 1
        given = {"tool_name": tool, "tool_input": arguments, "tool_use_id": str(self._number)}
        self.tell("PreToolUse", **given)
        work()
        self.tell("PostToolUse", **given, tool_response={})

    def command(self) -> None:
        self.call("Bash", {"command": "true"}, lambda: None)

    def changing_command(self, file: Path) -> None:
        self.call("Bash", {"command": "change"}, partial(self._change, file))

    def edit(self, file: Path) -> None:
        self.call("Edit", {"file_path": str(file)}, partial(self._change, file))

    def _change(self, file: Path) -> None:
        with file.open("r+") as opened:  # truncated, it would wait for the disk on some filesystems
            opened.write(f"change {self._number:09}\n")

    def close(self) -> None:
        self.server.ask({"kind": "stop"})
        self.server.close()


@contextmanager
def bare_server(scratch: Path) -> Generator[Server]:
    with subprocess.Popen([sys.executable, "-I", "-c", BARE_SERVER, scratch / "socket"]) as process:
        while not (scratch / "socket").exists():
            time.sleep(0.01)
        server = Server(scratch, process.pid)
        yield server
        server.close()
        process.send_signal(signal.SIGTERM)


def served(server: Server, work: Callable[[], object]) -> Side:
    def side(number: int) -> float:
        started = server.seconds()
        for _ in range(number):
            work()
        return (server.seconds() - started) / number

    return side


def ended(command: list[str], event: str) -> Side:
    """In the processor time of processes that have ended."""

    def side(number: int) -> float:
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(number):
            subprocess.run(command, input=event, check=True, text=True)
        done = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (done.ru_utime + done.ru_stime - started.ru_utime - started.ru_stime) / number

    return side


def beyond(ours: Spread, alone: Spread) -> Spread:
    return Spread(ours.median - alone.median, ours.low - alone.median, ours.high - alone.median)


def rows(scratch: Path) -> Iterator[Row]:
    os.environ["RINGFENCE_STATE_DIR"] = str(scratch / "state")
    small: dict[str, Spread] = {}
    with ExitStack() as stack:
        bare = stack.enter_context(bare_server(scratch))
        for number, target in TARGETS_US.items():
            area, files = f"guard, {number:,}", sample(number)
            root = written(scratch / f"tree-{number}", files)
            agent = Agent(root, scratch / "state")
            file = root / next(iter(files))
            sides: dict[str, tuple[Callable[[], object], int]] = {
                "command that changes nothing, both events": (agent.command, target),
                "command that changes a file, both events": (partial(agent.changing_command, file), target),
                "edit of a named file, both events": (partial(agent.edit, file), FILE_TOOL_US),
            }
            for what, (work, most_us) in sides.items():
                twice = served(bare, lambda: [bare.ask({"kind": "event"}) for _ in range(2)])
                ours, alone = alternated(served(agent.server, work), twice, seconds=2)
                yield less(area, what, BARE, (ours, alone), at_most_us=most_us)
                if what in small:
                    yield flat(area, what, "in 1,000 files", (ours, small[what]), at_most=2)
                small.setdefault(what, ours)
            if number == min(TARGETS_US):
                event = agent.event("Notification")
                started = ended([sys.executable, "-I", "-S", "-c", "pass"], "")
                ours, alone = alternated(ended(agent.client, event), started, seconds=4, at_least=20)
                what = "hook's client, beyond the start of its interpreter"
                yield less("guard", what, "python -I -S -c pass", (beyond(ours, alone), alone), at_most_us=CLIENT_US)
            agent.close()


def main() -> None:
    with scratch_directory() as scratch:
        report(rows(scratch))


if __name__ == "__main__":
    main()
