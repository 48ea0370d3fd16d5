"""The Python and the Node.js of an image, as they are found from inside of a container of it."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.connection import PodmanConnection
from ringfence_sandbox.container.container import Container
from ringfence_sandbox.container.isolation import SandboxLimits

_MOST_BYTES = 1 << 20
_SECONDS = 60.0

# pip knows its own default index, and which wheels fit: nothing of that is repeated here.
_PYTHON = """
import json
from pip._vendor.packaging import markers, tags
from pip._internal.models.index import PyPI
tags = [str(tag) for tag in tags.sys_tags()]
print(json.dumps({"tags": tags, "environment": markers.default_environment(), "index": PyPI.simple_url}))
"""
_NODE = """
const libc = process.report.getReport().header.glibcVersionRuntime ? "glibc" : "musl"
const registry = require("child_process").execSync("npm config get registry").toString().trim()
console.log(JSON.stringify({os: process.platform, cpu: process.arch, libc, registry}))
"""
_Target = TypeVar("_Target")


@dataclass(frozen=True, slots=True)
class PythonTarget:
    """What an image's Python installs: the tags of wheels, best first, the values of markers, and pip's own index."""

    tags: Sequence[str]
    environment: Mapping[str, str]
    index: str

    def __str__(self) -> str:
        return f"Python {self.environment['python_full_version']} on {self.environment['platform_machine']}"


@dataclass(frozen=True, slots=True)
class NodeTarget:
    """What an image's npm installs, in the words of npm's locks, and its own registry."""

    os: str
    cpu: str
    libc: str
    registry: str


@dataclass(frozen=True, slots=True)
class Targets:
    """What an image has: its distribution and Python in words, and what its pip and its npm install."""

    system: str
    python: PythonTarget | None
    node: NodeTarget | None


def probe(connection: PodmanConnection, image: str, *, node: bool) -> Targets:
    """What an image has. ``node``: whether to look for that.

    Raises:
        SandboxUnavailableError: a container of it does not start.
    """
    with _container(connection, image) as container:
        try:
            return Targets(
                container.system,
                _run_probe(container, ["python3", "-c", _PYTHON], PythonTarget),
                _run_probe(container, ["node", "-e", _NODE], NodeTarget) if node else None,
            )
        except ValueError as error:
            raise SandboxUnavailableError(
                f"what the Python or the npm of {image} says of itself is not understood"
            ) from error


def describe_image(connection: PodmanConnection, image: str) -> str:
    """The distribution and the Python of an image, in words. SandboxUnavailableError as `probe`."""
    with _container(connection, image) as container:
        return container.system


@contextmanager
def _container(connection: PodmanConnection, image: str) -> Generator[Container]:
    with tempfile.TemporaryDirectory(prefix="ringfence-probe-") as place:
        container = Container.start(
            connection, place, image=image, limits=SandboxLimits(), network="none", strict=False
        )
        try:
            yield container
        finally:
            container.close()


def _run_probe(container: Container, argv: Sequence[str], kind: type[_Target]) -> _Target | None:
    """What a program of the image prints, if it ends well. Of an image that floods us, only the beginning is read."""
    printed = bytearray()

    def take(stream: str, data: bytes) -> None:
        if stream == "stdout" and len(printed) < _MOST_BYTES:
            printed.extend(data)

    ended = container.channel.run(argv, cwd="/", env={}, stdin=None, timeout_seconds=_SECONDS, on_output=take)
    return TypeAdapter(kind).validate_json(bytes(printed)) if ended.exit_code == 0 else None
