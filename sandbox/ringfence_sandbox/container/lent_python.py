"""The Python that runs a container's executor: that of its image, or one that the default image lends."""

from __future__ import annotations

import os
import platform
import re
import tarfile
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ringfence_sandbox.container.connection import PodmanConnection
from ringfence_sandbox.container.images import DEFAULT_RECIPE, SOURCES, recipe
from ringfence_workspace.call_process import OWNER_LABEL, own_label
from ringfence_workspace.tree.places import podman_directory

_OPTIONS = ("-I", "-S", "-B")
LENT = "/run/python"
"""Where it is in the container."""
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_FILTER: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # not in the first versions of 3.11
_PROGRAMS = {"debian": "usr/bin/python3", "registry": "usr/local/bin/python3"}


@dataclass(frozen=True, slots=True)
class Python:
    """How it is started, and the directory of the host that has to be mounted for it at `LENT`, if any."""

    argv: tuple[str, ...]
    directory: str = ""


IN_THE_IMAGE = Python(("python3", *_OPTIONS))


class NoPythonError(Exception):
    """An image has no python3."""


def lacks_python(error: str) -> bool:
    """Whether a runtime says that it found no python3 to start."""
    return "python3" in error and ("not found" in error or "no such file" in error)


def lent_python(connection: PodmanConnection) -> Python | None:
    """The default image's Python, for containers of other images: to be mounted read-only, and started by its own
    loader, since nothing of it is where it would look for it. None where that image is not built."""
    machine = platform.machine()
    for source in SOURCES:
        image = recipe(DEFAULT_RECIPE).tag(source)
        if machine in _LOADERS and connection.client.images.exists(image):
            places = [f"{LENT}/{place}/{machine}-linux-gnu" for place in ("lib", "usr/lib")]
            libraries = ":".join([*places, f"{LENT}/usr/local/lib"])
            loader = f"{places[0]}/{_LOADERS[machine]}"
            argv = (loader, "--library-path", libraries, f"{LENT}/{_PROGRAMS[source]}", *_OPTIONS)
            return Python(argv, _copied(connection, image, machine))
    return None


def _copied(connection: PodmanConnection, image: str, machine: str) -> str:
    """A directory of the host with the image's Python, made once. (An image itself cannot be mounted into a container
    with users of its own.)"""
    parent = podman_directory()
    place = os.path.join(parent, f"python-{image.rpartition(':')[2]}")
    if os.path.isdir(place):
        return place
    wanted = re.compile(
        rf"(lib|usr/lib)/{machine}-linux-gnu/[^/]+|usr/(local/)?(bin/python3[^/]*|lib/(python3\.\d+/.*|libpython[^/]*))"
    )
    unwanted = re.compile(r".*/(site-packages|dist-packages|test|tests|__pycache__)/.*")
    container = connection.client.containers.create(image=image, command=["true"], labels={OWNER_LABEL: own_label()})
    try:
        with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory(dir=parent) as new:
            for chunk in container.export():
                file.write(chunk)
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                for member in tar:
                    name = member.name.removeprefix("./")
                    if ".." in name.split("/"):
                        continue
                    if (member.isreg() or member.issym()) and wanted.fullmatch(name) and not unwanted.fullmatch(name):
                        member.mode, member.uid, member.gid = 0o755, os.getuid(), os.getgid()
                        tar.extract(member, new, **_FILTER)
            for directory, _, _ in os.walk(new):
                os.chmod(directory, 0o755)  # noqa: S103 - for the container's users
            with suppress(OSError):  # somebody else was quicker
                os.rename(new, place)
                os.mkdir(new)
    finally:
        container.remove(force=True)
    return place
