"""What a command in a container costs: `python benchmarks/sandbox.py`, or as rows of `make bench` where Podman works.

Each way runs ``true``, interleaved with the others. A container of `podman exec` and of podman-py's `exec_run` is the
sandbox's own.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from measure import scratch_directory

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox import HostFilesystem, PodmanSandbox
from ringfence_sandbox.container.connection import connect

TRUE = shutil.which("true") or "/bin/true"


def milliseconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1000


def on_the_host() -> None:
    os.waitpid(os.posix_spawn(TRUE, ["true"], {}), 0)


def main(rounds: int = 200) -> None:
    with scratch_directory() as place:
        root = place / "workspace"
        root.mkdir()
        begun = time.perf_counter()
        with connect() as connection, HostFilesystem(root, store=place / "store") as files:
            connected = (time.perf_counter() - begun) * 1000
            with PodmanSandbox(root, filesystem=files, connection=connection) as sandbox:
                first = milliseconds(lambda: sandbox.run(["true"]))
                container = sandbox.start()
                exec_run = connection.client.containers.get(container.name).exec_run

                def executor() -> None:
                    container.channel.run(
                        ["true"], cwd="/", env={}, stdin=None, timeout_seconds=9, on_output=lambda _stream, _data: None
                    )

                ways: dict[str, Callable[[], object]] = {
                    "fork and exec on the host": on_the_host,
                    "the executor": executor,
                    "run, its transaction included": lambda: sandbox.run(["true"]),
                }
                slow: dict[str, Callable[[], object]] = {
                    "podman-py's exec_run": lambda: exec_run(["true"]),
                    "podman exec": lambda: subprocess.run(["podman", "exec", container.name, "true"], check=True),
                }
                took: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(rounds):
                    for name, way in ways.items():
                        took[name].append(milliseconds(way))
                for name, way in slow.items():
                    took[name] = [milliseconds(way) for _ in range(15)]
                floor = statistics.median(took["fork and exec on the host"])
                for name, times in took.items():
                    median = statistics.median(times)
                    print(f"{name:34} {median:9.2f} ms {median / floor:8.1f} x")
                flood = milliseconds(lambda: sandbox.run("head -c 500M /dev/zero", timeout_seconds=60))
                print(f"{'500 MB of output':34} {500 / flood * 1000:9.0f} MB/s")
                container.process.end()
                print(f"{'a container lost and replaced':34} {milliseconds(lambda: sandbox.run(['true'])):9.0f} ms")
            print(f"{'the service, found or started':34} {connected:9.0f} ms")
            print(f"{'the first command of a sandbox':34} {first:9.0f} ms")
        for count in (1_000, 10_000):
            scanned(place, count)


def scanned(place: Path, count: int) -> None:
    root = place / f"tree{count}"
    for number in range(count):
        path = root / f"d{number // 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    with connect() as connection, PodmanSandbox(root, connection=connection) as sandbox:
        sandbox.run(["true"])
        nothing = statistics.median(milliseconds(lambda: sandbox.run(["true"])) for _ in range(20))
        one = statistics.median(milliseconds(lambda: sandbox.run("echo $$ >> d0/f0")) for _ in range(20))
        print(f"{f'run over {count:,} files':34} {nothing:9.1f} ms, with one of them changed {one:.1f} ms")
    shutil.rmtree(root)


if __name__ == "__main__":
    try:
        main()
    except SandboxUnavailableError as error:
        raise SystemExit(f"{error}") from None
