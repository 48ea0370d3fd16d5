"""A Podman for the tests: found or started once a session. What each test makes is gone when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from podman_parts import WORKSPACE_LABEL, PodmanConnection, connect, image_of

from ringfence_sandbox import PodmanSandbox, SandboxLimits, SandboxUnavailableError

MIB = 1 << 20
SMALL = SandboxLimits(memory_bytes=256 * MIB, tmp_bytes=32 * MIB, processes=64, file_bytes=64 * MIB, open_files=256)

MakeSandbox = Callable[..., PodmanSandbox]


def _lacking(why: str) -> Any:
    if os.environ.get("RINGFENCE_REQUIRE_PODMAN") == "1":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def podman() -> Iterator[PodmanConnection]:
    try:
        connection = connect()
    except SandboxUnavailableError as error:
        _lacking(str(error))
        return
    with connection:
        if image_of(connection) is None:
            _lacking("the default image is not built: `ringfence sandbox build`")
        yield connection


@pytest.fixture(scope="session")
def limiting(podman: PodmanConnection) -> bool:
    """Whether this Podman can limit memory and processor time: a rootless one cannot without cgroups of version 2."""
    return not podman.host.rootless or podman.host.cgroup_version == "v2"


@pytest.fixture
def limits_hold(limiting: bool) -> None:
    if not limiting:
        pytest.skip("this Podman is rootless and has no cgroups of version 2: it limits neither memory nor processes")


def containers_over(podman: PodmanConnection, root: str | os.PathLike[str]) -> list[Any]:
    found: list[Any] = podman.client.containers.list(all=True, filters={"label": f"{WORKSPACE_LABEL}={root}"})
    return found


@pytest.fixture
def make_sandbox(podman: PodmanConnection, limiting: bool, tmp_path: Path) -> Iterator[MakeSandbox]:
    made: list[PodmanSandbox] = []

    def make(root: Path | None = None, **options: Any) -> PodmanSandbox:
        place = root or tmp_path / "workspace"
        place.mkdir(exist_ok=True)
        sandbox = PodmanSandbox(place, **{"limits": SMALL, "connection": podman, "strict": limiting, **options})
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        sandbox.close()
        assert containers_over(podman, sandbox.filesystem.root) == []


@pytest.fixture
def sandbox(make_sandbox: MakeSandbox) -> PodmanSandbox:
    return make_sandbox()


@pytest.fixture(scope="module")
def shared(
    podman: PodmanConnection, limiting: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodmanSandbox]:
    """One container for tests that only look at what a command can do in it."""
    root = tmp_path_factory.mktemp("shared")
    with PodmanSandbox(root, limits=SMALL, connection=podman, strict=limiting) as sandbox:
        yield sandbox
