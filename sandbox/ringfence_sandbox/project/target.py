"""The Python and the Node.js of an image, as they are found from inside of a container of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.connection import Connection
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
_NODE = (
    'node -p "JSON.stringify({os: process.platform, cpu: process.arch, libc: '
    "process.report.getReport().header.glibcVersionRuntime ? 'glibc' : 'musl'})\" && npm config get registry"
)


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


def probe(connection: Connection, image: str, *, node: bool) -> tuple[PythonTarget | None, NodeTarget | None]:
    """What an image has. ``node``: whether to look for that.

    Raises:
        SandboxUnavailableError: a container of it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ringfence-probe-") as place:
        container = Container.start(
            connection, place, image=image, limits=SandboxLimits(), network="none", strict=False
        )
        try:
            python = _printed(container, ["python3", "-c", _PYTHON])
            npm = _printed(container, ["/bin/sh", "-c", _NODE]) if node else ""
        finally:
            container.close()
    try:
        return _python(python), _node(npm)
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxUnavailableError(
            f"what the Python or the npm of {image} says of itself is not understood"
        ) from error


def _printed(container: Container, argv: Sequence[str]) -> str:
    """What a program of the image prints, if it ends well. Of an image that floods us, only the beginning."""
    printed = bytearray()

    def take(stream: str, data: bytes) -> None:
        if stream == "stdout" and len(printed) < _MOST_BYTES:
            printed.extend(data)

    ended = container.channel.run(argv, cwd="/", env={}, stdin=None, timeout_seconds=_SECONDS, on_output=take)
    return printed.decode(errors="replace") if ended.exit_code == 0 else ""


def _python(printed: str) -> PythonTarget | None:
    if not printed:
        return None
    found: dict[str, Any] = json.loads(printed)
    environment = {str(name): str(value) for name, value in found["environment"].items()}
    return PythonTarget([str(tag) for tag in found["tags"]], environment, str(found["index"]))


def _node(printed: str) -> NodeTarget | None:
    if not printed:
        return None
    about, registry = printed.splitlines()[:2]
    found: dict[str, str] = json.loads(about)
    return NodeTarget(found["os"], found["cpu"], found["libc"], registry)
