"""Images: recipes that ship with the package, built once; and what a container of one must offer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from command_line import ringfence_text
from podman_parts import (
    SOURCES,
    Context,
    PodmanConnection,
    Recipe,
    answers,
    build,
    build_image,
    image_of,
    recipe,
    recipe_names,
    socket_path,
)

from ringfence_sandbox import PodmanSandbox, SandboxUnavailableError, examine_sandbox


def test_an_image_that_is_built_is_not_built_again(podman: PodmanConnection) -> None:
    sources = ("debian",) if image_of(podman, "python") else SOURCES
    tag = build(podman, recipe("python"), sources)
    can_look = SimpleNamespace(images=SimpleNamespace(exists=podman.client.images.exists))  # and do nothing else
    assert tag == build(cast("PodmanConnection", SimpleNamespace(client=can_look)), recipe("python"), sources)
    assert tag == image_of(podman, "python")


def test_recipes_have_a_name_a_base_and_packages() -> None:
    assert recipe_names() == ["base", "node", "python"]
    assert recipe("python").base == "docker.io/library/python:3.12-slim"
    assert {"git", "ripgrep", "python3"} <= set(recipe("python").packages)
    tags = {recipe(name).tag(source) for name in recipe_names() for source in SOURCES}
    assert len(tags) == 6
    with pytest.raises(ValueError, match="only base, node, python"):
        recipe("../etc")


def test_the_default_image_has_what_an_agent_uses(sandbox: PodmanSandbox) -> None:
    Path(sandbox.filesystem.root, "test_it.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    done = sandbox.run(
        "python3 -m pytest -q test_it.py && git --version && rg -c assert . && make --version && awk 1 /dev/null"
    )
    assert done.exit_code == 0, done
    assert "1 passed" in done.stdout
    # Compiled files go elsewhere than into the workspace.
    assert not Path(sandbox.filesystem.root, "__pycache__").exists()


CERTIFICATES = """
import os, ssl
context = ssl.create_default_context()
assert context.cert_store_stats()["x509_ca"] > 100, context.cert_store_stats()
assert context.verify_mode == ssl.CERT_REQUIRED
"""


def test_the_default_image_knows_programs_by_their_usual_names_and_has_certificates(shared: PodmanSandbox) -> None:
    done = shared.run("python -c 'import pytest; print(1)' && which python python3 pip3 git curl && curl --version")
    assert done.exit_code == 0, done
    done = shared.run(["python", "-c", CERTIFICATES])
    assert done.exit_code == 0, done
    # Nobody listens there: what is told apart is a bundle that cannot be read.
    for command in ("curl -sS https://127.0.0.1:1/", "git ls-remote https://127.0.0.1:1/x"):
        done = shared.run(command)
        assert done.exit_code != 0
        assert "onnect" in done.stderr
        assert "certificate" not in done.stderr.lower()
    found = shared.start().system
    assert re.fullmatch(r".+, Python 3\.\d+\.\d+", found), found


def test_the_image_works_for_other_programs_too(podman: PodmanConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    # As testcontainers starts it, over the same service: nothing of ours is in the way.
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket_path(podman.url)}")
    monkeypatch.setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
    monkeypatch.setenv("TESTCONTAINERS_CONNECTION_MODE", "docker_host")
    from docker.types import Ulimit
    from testcontainers.core.container import DockerContainer

    limits = [Ulimit(name=name, soft=512, hard=512) for name in ("nofile", "nproc")]
    container = DockerContainer(image_of(podman, "python") or "").with_command("sleep 60")
    container.with_kwargs(ulimits=limits, stop_signal="SIGKILL", network_mode="none", labels={"io.ringfence.test": "1"})
    with container as started:
        code, output = started.exec(["python3", "-c", "import os, pytest; print(os.getcwd(), os.environ['LANG'])"])
        assert (code, output) == (0, b"/workspace C.UTF-8\n")
        assert started.exec(["grep", "-c", ":1000:", "/etc/passwd"]).output == b"1\n"
    assert podman.client.containers.list(all=True, filters={"label": "io.ringfence.test=1"}) == []


@pytest.mark.usefixtures("limits_hold")
def test_ringfence_says_what_works_here(podman: PodmanConnection) -> None:
    findings = list(examine_sandbox(url=podman.url))
    assert [finding for finding in findings if not finding.works] == []
    assert {"refused: the network", "files belong to the tree's owner", "memory is limited"} <= {
        f.name for f in findings
    }


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ringfence_text(*arguments, env={**os.environ, **environment})


@pytest.mark.usefixtures("limits_hold")
def test_the_doctor_is_a_command(podman: PodmanConnection) -> None:
    done = cli("sandbox", "doctor", CONTAINER_HOST=podman.url)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "works  refused: a user namespace" in done.stdout
    assert re.search(r"works  what the image has: .+, Python 3\.\d+", done.stdout)
    assert "FAILS" not in done.stdout
    assert "works  limit of memory, in this trial: 268435456" in done.stdout
    assert "works  /tmp of 32 MiB, in this trial: " in done.stdout
    assert "for this trial with lower limits than usual" in done.stdout


def test_without_podman_commands_end_with_exit_code_4(tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    if Path("/run/podman/podman.sock").exists():
        pytest.skip("the system's own service would be found")
    looked = cli("sandbox", "doctor", **bare)
    assert looked.returncode == 4
    assert "apt-get install" in looked.stdout
    tried = cli("sandbox", "build", **bare)
    assert tried.returncode == 4
    assert "apt-get install" in tried.stderr


@pytest.mark.parametrize("name", ["build", "doctor"])
def test_where_there_is_no_place_for_what_containers_need_that_is_said(name: str) -> None:
    ended = cli("sandbox", name, RINGFENCE_STATE_DIR="/dev/null")
    assert ended.returncode == 2
    assert "cannot be there (Not a directory): see to that, or name another place" in ended.stderr


def test_a_build_says_which_base_and_which_python_an_image_has(podman: PodmanConnection) -> None:
    source = next(source for source in SOURCES if podman.client.images.exists(recipe("python").tag(source)))
    done = cli("sandbox", "build", "--from", source, "python", CONTAINER_HOST=podman.url)
    assert (done.returncode, done.stdout) == (0, f"{recipe('python').tag(source)}\n"), done
    assert re.search(r"the image 'python' has .+, Python 3\.\d+\.\d+", done.stderr)


def test_an_image_of_no_recipe_is_a_mistake_of_usage() -> None:
    assert cli("sandbox", "build", "nonsense").returncode == 2


def test_a_failed_build_says_why(podman: PodmanConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    other = Recipe("other", containerfile="ARG BASE=docker.io/library/debian:bookworm-slim\n", packages=("dash",))
    with pytest.raises(SandboxUnavailableError) as refused:
        build(podman, other, ("debian",))
    assert "no mmdebstrap" in str(refused.value)
    assert "podman pull docker.io/library/debian" in str(refused.value)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["npm", " warn", " deprecated x\nnext", "\n"], ["npm warn deprecated x", "next"]),
        (["one\n\n", "two\r\n", "the end"], ["one", "two", "the end"]),
        (["10 %\r50 %\r", "100 %\n"], ["100 %"]),
        (["Copying blob 1\n", "--> 2\n", "said"], ["said"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_build_prints_whole_lines(pieces: list[str], lines: list[str], fails: bool) -> None:
    messages = [{"stream": piece} for piece in pieces] + [{"error": "broken"}] * fails
    response = SimpleNamespace(
        raise_for_status=lambda: None, iter_lines=lambda: [json.dumps(one).encode() for one in messages]
    )
    client = SimpleNamespace(api=SimpleNamespace(post=lambda *_, **__: response))
    service = cast("PodmanConnection", SimpleNamespace(client=client, host=SimpleNamespace(unlimited=("memory",))))
    printed: list[str] = []
    with Context() as context, pytest.raises(SandboxUnavailableError) if fails else nullcontext():
        build_image(service, context, "x", labels={}, output=printed.append, network=True)
    assert printed == lines


@pytest.fixture
def rootless_without_limits() -> Iterator[str]:
    """The URL of a Podman of an ordinary user, where such a one can limit nothing."""
    if os.getuid() != 0 or shutil.which("setpriv") is None or Path("/sys/fs/cgroup/cgroup.controllers").exists():
        pytest.skip("an ordinary user's Podman can limit containers here, or there is none")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # where the user may go
        os.chown(place, NOBODY, NOBODY)
        url = f"unix://{place}/podman.sock"
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        places = {"HOME": place, "XDG_RUNTIME_DIR": place, "PATH": os.environ["PATH"]}
        command = [*user, "podman", "system", "service", "--time=0", url]
        service = subprocess.Popen(command, cwd=place, env=places, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            deadline = time.monotonic() + 20
            while not answers(url) and time.monotonic() < deadline:
                time.sleep(0.02)
            yield url
        finally:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait(20)
            # It keeps the user's namespace for a next command.
            os.kill(int(Path(place, "libpod/tmp/pause.pid").read_text()), signal.SIGKILL)


NOBODY = 65534


def test_a_limit_that_is_missing_is_found_before_an_image_is_built(
    rootless_without_limits: str, tmp_path: Path
) -> None:
    said: list[str] = []
    with (
        PodmanSandbox(tmp_path, url=rootless_without_limits, progress=said.append) as sandbox,
        pytest.raises(SandboxUnavailableError, match="cannot limit memory, processes, processor time") as refused,
    ):
        sandbox.start()
    assert "the system's Podman (CONTAINER_HOST=" in str(refused.value)
    assert "--workspace disk" in str(refused.value)
    assert said == []
    tried = cli("sandbox", "build", "base", "--from", "registry", CONTAINER_HOST=rootless_without_limits)
    assert tried.stderr.startswith("note: this Podman cannot limit memory")
