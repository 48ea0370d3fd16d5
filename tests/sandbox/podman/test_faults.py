"""What fails around a command: it is said, the tree is exact, and the next command works."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured_tree import names_in
from killing import session_of
from podman_parts import (
    OWNER_LABEL,
    WORKSPACE_LABEL,
    OwnService,
    PodmanConnection,
    answers,
    connect,
    image_of,
    own_label,
    remove_orphans,
)

from ringfence.runtime import Cancellation
from ringfence_sandbox import CallProcess, PodmanSandbox, SandboxLimits, SandboxUnavailableError, examine_sandbox

MakeSandbox = Callable[..., PodmanSandbox]


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def works_on(sandbox: PodmanSandbox, files: dict[str, str]) -> None:
    """The next command runs, and the tree is what it was."""
    assert sandbox.run("echo next").stdout == "next\n"
    root = Path(sandbox.filesystem.root)
    assert {name: (root / name).read_text() for name in names_in(root)} == files


def test_a_container_that_is_killed_during_a_command_is_said_and_replaced(sandbox: PodmanSandbox) -> None:
    Path(sandbox.filesystem.root, "a").write_text("a\n")
    first = sandbox.start()
    timer = later(0.5, lambda: os.kill(first.process.pid, signal.SIGKILL))
    result = sandbox.run("echo changed > a; echo new > b; sleep 30")
    timer.join()
    assert result.exit_code == 137
    assert "the container was lost" in result.failure
    assert result.failure in result.stderr
    assert sandbox.start() is not first
    works_on(sandbox, {"a": "a\n"})


def test_a_command_whose_root_is_renamed_still_ends_on_time(sandbox: PodmanSandbox, tmp_path: Path) -> None:
    root = Path(sandbox.filesystem.root)
    sandbox.start()
    moved = later(0.2, lambda: root.rename(tmp_path / "elsewhere"))
    assert sandbox.run("echo new > new; sleep 30", timeout_seconds=1).timed_out
    moved.join()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "elsewhere").rename(root)
    cancellation = Cancellation()
    cancelled = later(0.2, cancellation.cancel)
    assert "cancelled" in sandbox.run("sleep 30", cancellation=cancellation).failure
    cancelled.join()


def test_a_process_that_was_forked_off_leaves_the_container_to_its_parent(sandbox: PodmanSandbox) -> None:
    first = sandbox.start()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ValueError, match="was forked from"):
                sandbox.run("echo from the child")
            sandbox.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (sandbox.run("echo here").stdout, sandbox.start()) == ("here\n", first)


def test_a_container_that_is_killed_between_commands_is_replaced(sandbox: PodmanSandbox) -> None:
    sandbox.start().process.end()
    result = sandbox.run("echo here")
    assert (result.exit_code, result.stdout) == (0, "here\n")
    assert "this is a new one" in result.stderr
    assert sandbox.run("echo again").stderr == ""


def test_a_container_that_is_removed_by_podman_is_replaced(sandbox: PodmanSandbox, podman: PodmanConnection) -> None:
    podman.client.containers.get(sandbox.start().name).remove(force=True)
    assert sandbox.run("echo here").stdout == "here\n"


def test_a_command_survives_the_end_of_the_service(tmp_path: Path, podman: PodmanConnection, limiting: bool) -> None:
    (tmp_path / "workspace").mkdir()
    service = OwnService()
    connection = PodmanConnection(service.url, "a test's", service)
    with connection, PodmanSandbox(tmp_path / "workspace", connection=connection, strict=limiting) as sandbox:
        sandbox.start()
        timer = later(0.3, lambda: os.killpg(service.process.pid, signal.SIGKILL))
        result = sandbox.run("echo one; sleep 1; echo two")
        timer.join()
        assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
        assert not answers(service.url)
        works_on(sandbox, {})
        # What needs the service starts it again.
        sandbox.start().process.end()
        assert sandbox.run("echo three").stdout == "three\n"
        assert connection.url != service.url
    assert list_of(podman, tmp_path / "workspace") == []


def list_of(podman: PodmanConnection, root: Path) -> list[Any]:
    found: list[Any] = podman.client.containers.list(all=True, filters={"label": f"{WORKSPACE_LABEL}={root}"})
    return found


CLIENT = """
import sys, threading
from ringfence_sandbox import PodmanSandbox
sandbox = PodmanSandbox(sys.argv[1], url=sys.argv[2] or None, strict=sys.argv[3] == "True")
container = sandbox.start()
print(container.process.pid, flush=True)
sandbox.run("(trap '' TERM; while :; do echo x >> late; done) & sleep 60", timeout_seconds=60)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("own_service", [False, True])
def test_a_killed_client_leaves_nothing(
    podman: PodmanConnection, limiting: bool, tmp_path: Path, own_service: bool
) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, root, "" if own_service else podman.url, str(limiting)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with client:
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, "the client has started no container"
        first = CallProcess.running(int(line), "the container")
        assert wait_until(lambda: (root / "late").exists() and (root / "late").stat().st_size > 0)
        client.kill()
    assert wait_until(lambda: not first.lives, 5)
    size = (root / "late").stat().st_size
    time.sleep(0.2)
    assert (root / "late").stat().st_size == size
    # The next one removes what is left of the container, takes back what the command did, and works.
    with PodmanSandbox(root, connection=podman, strict=limiting) as sandbox:
        assert list(root.iterdir()) == []
        assert sandbox.run("echo next").stdout == "next\n"
        assert wait_until(lambda: len(list_of(podman, root)) == 1)
    assert list_of(podman, root) == []


@pytest.mark.prove
def test_a_command_of_a_stopped_client_is_rolled_back(podman: PodmanConnection, limiting: bool, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    program = CLIENT.replace("while :;", "for n in 1 2 3 4 5 6 7 8 9; do sleep 1; date > made-$n; done; while :;")
    client = subprocess.Popen(
        [sys.executable, "-c", program, root, podman.url, str(limiting)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with client:
        assert wait_until((root / "made-1").exists)
        client.send_signal(signal.SIGSTOP)
        assert wait_until((root / "late").exists)
        client.kill()
    with PodmanSandbox(root, connection=podman, strict=limiting):
        assert list(root.iterdir()) == []


def test_containers_of_dead_owners_are_removed_and_no_others(podman: PodmanConnection, tmp_path: Path) -> None:
    image = image_of(podman, "python")
    pid, ticks, boot = own_label().split("-", 2)
    made = [
        podman.client.containers.create(
            image=image, command=["true"], labels={OWNER_LABEL: owner, WORKSPACE_LABEL: str(tmp_path)}
        )
        for owner in (f"{pid}-{int(ticks) - 1}-{boot}", "1-1-another-boot", own_label())
    ]
    try:
        removed = remove_orphans(podman)
        assert {made[0].name, made[1].name} <= set(removed)
        assert [container.id for container in list_of(podman, tmp_path)] == [made[2].id]
    finally:
        for container in list_of(podman, tmp_path):
            container.remove(force=True)


def test_an_image_that_is_not_there_is_never_fetched(make_sandbox: MakeSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as registry:
        image = f"127.0.0.1:{registry.getsockname()[1]}/nothing:1"
        with pytest.raises(SandboxUnavailableError, match=f"podman pull {image}"):
            make_sandbox(image=image).run("true")
        registry.setblocking(False)
        with pytest.raises(BlockingIOError):
            registry.accept()


def test_a_removed_image_is_missed_by_the_next_container(make_sandbox: MakeSandbox, podman: PodmanConnection) -> None:
    image = podman.client.images.get(image_of(podman, "python"))
    name = f"localhost/ringfence-test:{os.getpid()}"
    image.tag("localhost/ringfence-test", str(os.getpid()))
    sandbox = make_sandbox(image=name)
    sandbox.run("true")
    podman.client.images.remove(name)
    assert sandbox.run("echo still").stdout == "still\n"
    sandbox.start().process.end()
    with pytest.raises(SandboxUnavailableError, match="there is no image"):
        sandbox.run("true")


def test_an_image_without_python_works_too(make_sandbox: MakeSandbox, podman: PodmanConnection, limiting: bool) -> None:
    base = image_of(podman, "base")
    assert base is not None, "`ringfence sandbox build base`"
    sandbox = make_sandbox(image=base)
    result = sandbox.run("command -v python3; echo made > made; cat made; sleep 60 & exit 3")
    assert (result.exit_code, result.stdout, result.changed_paths) == (3, "made\n", ("made",))
    assert sandbox.run("sleep 20", timeout_seconds=0.5).timed_out
    assert {found.name for found in sandbox.properties if not found.holds and (found.essential or limiting)} == set()
    assert [finding for finding in examine_sandbox(base, podman.url) if not finding.works and limiting] == []


def test_a_missing_podman_is_said_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match=r"apt-get install .*podman"):
        connect(environment={"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_service_that_the_environment_names_and_that_does_not_answer_is_said(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match="CONTAINER_HOST names"):
        connect(environment={"CONTAINER_HOST": f"unix://{tmp_path}/none.sock"})


def test_a_service_on_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match="not a unix socket"):
        connect("ssh://core@localhost:22/run/podman.sock")


def test_a_service_that_is_named_is_used_and_not_ended(podman: PodmanConnection) -> None:
    with connect(environment={"CONTAINER_HOST": podman.url}) as found:
        assert found.how == "CONTAINER_HOST"
    assert answers(podman.url)


def test_our_own_service_ends_with_us(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom ringfence_sandbox.container.connection import OwnService\n"
        "service = OwnService(); print(service.process.pid, service.url, flush=True); time.sleep(60)"
    )
    for ending in (signal.SIGKILL, signal.SIGINT):
        client = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        with client:
            assert client.stdout is not None
            pid, url = client.stdout.readline().split()
            assert len(session_of(int(pid))) >= 2
            client.send_signal(ending)
        assert wait_until(lambda pid=pid: session_of(int(pid)) == [])
        assert wait_until(lambda url=url: not Path(url.removeprefix("unix://")).parent.exists())


def test_our_own_service_does_not_stay_where_we_are_killed_before_it_answers() -> None:
    program = (
        "import os, sys\nfrom ringfence_sandbox.container.connection import OwnService\n"
        "def kill(event, _):\n"
        "    if event == 'socket.connect':\n"
        "        print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True); os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(kill)\nOwnService()"
    )
    client = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert wait_until(lambda: session_of(int(client.stdout)) == [])


FIRST_PODMAN_OF_A_USER = """#!/bin/sh
# Goes on in a child, and does not hand on the signal that ends it.
{python} - "${{4#unix://}}" <<'END' &
import http.server, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass
socketserver.UnixStreamServer(sys.argv[1], Handler).serve_forever()
END
wait
"""


def test_a_service_that_goes_on_in_a_child_ends_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "podman"
    program.write_text(FIRST_PODMAN_OF_A_USER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    service = OwnService()
    assert len(session_of(service.process.pid)) >= 3
    service.close()
    assert wait_until(lambda: session_of(service.process.pid) == [])
    assert not Path(service.url.removeprefix("unix://")).parent.exists()


def test_limits_are_numbers_above_zero() -> None:
    with pytest.raises(ValueError, match="memory_bytes"):
        SandboxLimits(memory_bytes=0)


def test_two_sandboxes_work_beside_each_other(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    one, two = make_sandbox(tmp_path / "one"), make_sandbox(tmp_path / "two")
    one.run("echo one > file; echo one > /tmp/file")
    assert two.run("cat file /tmp/file 2>&1 | wc -l; ls -A").stdout == "2\n"
