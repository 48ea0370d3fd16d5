"""The images that come with ringfence: recipes, built where they are wanted and found again by their hash."""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podman.errors import APIError, ImageNotFound

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.connection import UNREADABLE, PodmanConnection
from ringfence_sandbox.container.seccomp import profile_path
from ringfence_workspace.tree.places import podman_directory

CONTAINERFILE = ".ringfence-containerfile"
_SILENCE_SECONDS = 1800.0
_MEMORY_BYTES = 4 << 30
_LAST_CHARACTERS = 1500
_LINE_CHARACTERS = 1000
_OF_THE_ENGINE = re.compile(
    r"(Copying (blob|config)|Getting image|Writing manifest|Storing sig|COMMIT|-->|Successfully tagged|[0-9a-f]{64}$)"
)
# Podman takes "none" here and gives the build the host's own network: these are the words of its own client.
_WITHOUT_NETWORK = {
    "networkmode": "1",
    "nsoptions": json.dumps([{"Name": "network", "Host": False, "Path": ""}]),
    "isolation": "1",
    "dropcaps": json.dumps(["CAP_MKNOD", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_AUDIT_WRITE"]),
}


class Context:
    """The files that a build gets, in a temporary file on disk. Nothing of them belongs to anybody."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ringfence-context-")  # noqa: SIM115
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._file.close()

    def add(self, name: str, content: bytes | str, mode: int = 0o644) -> None:
        data = content.encode() if isinstance(content, str) else content
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), mode
        self._tar.addfile(info, io.BytesIO(data))

    def add_file(self, name: str, path: Path) -> None:
        self._tar.add(path, name, recursive=False, filter=_of_nobody)

    def add_project(self, directory: str, name: str = "", *, hidden: Callable[[str], bool]) -> Sequence[str]:
        """Add a directory of the project, less git's data, what its .containerignore or .dockerignore names, and what
        is ``hidden``. Return the paths of the last: an image that had them would show them to every command."""
        patterns, left_out = [".git", *_ignored(directory)], list[str]()

        def taken(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            path = os.path.relpath(info.name or ".", name or ".")
            if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
                return None
            if hidden(os.path.join(directory, path)):
                left_out.append(path)
                return None
            return _of_nobody(info) if info.isreg() or info.isdir() or info.issym() else None

        self._tar.add(directory, name or ".", filter=taken)
        return left_out

    def finished(self) -> Any:
        self._tar.close()
        self._file.seek(0)
        return self._file


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    return info


def _ignored(directory: str) -> Sequence[str]:
    for name in (".containerignore", ".dockerignore"):
        file = Path(directory, name)
        if file.is_file() and not file.is_symlink():
            lines = [line.strip().strip("/") for line in file.read_text(errors="replace").splitlines()]
            return [line.removeprefix("**/") for line in lines if line and not line.startswith(("#", "!"))]
    return []


def build_image(
    connection: PodmanConnection,
    context: Context,
    tag: str,
    *,
    labels: Mapping[str, str],
    args: Mapping[str, str] | None = None,
    output: Callable[[str], None],
    network: bool = False,
) -> None:
    """Build the Containerfile `CONTAINERFILE` of a context without fetching an image. Its commands have no network
    unless it is asked for, no device, no raw socket, and the system calls of a sandbox.

    Raises:
        SandboxUnavailableError: it cannot be built; with the last lines of the build.
    """
    params: dict[str, Any] = {
        "dockerfile": CONTAINERFILE,
        "t": tag,
        "pull": "false",
        "pullpolicy": "never",
        "rm": "true",
        "forcerm": "true",
        "layers": "false",
        "httpproxy": "false",
        "labels": json.dumps(dict(labels)),
        "buildargs": json.dumps(dict(args or {})),
    }
    if not connection.host.unlimited:
        params.update(memory=_MEMORY_BYTES, memswap=_MEMORY_BYTES)
    if not network:
        params.update(_WITHOUT_NETWORK, seccomp=profile_path())
    last, unfinished = "", ""
    response = connection.client.api.post(
        "/build",
        params=params,
        data=context.finished(),
        headers={"Content-Type": "application/x-tar"},
        stream=True,
        timeout=_SILENCE_SECONDS,
    )
    response.raise_for_status()
    for line in response.iter_lines():
        found: dict[str, Any] = json.loads(line)
        if text := str(found.get("stream") or ""):
            last = (last + text)[-_LAST_CHARACTERS:]
            # A piece may end in the middle of a line, and what a program prints before a return is written over.
            *lines, unfinished = (unfinished + text.replace("\r\n", "\n")).split("\n")
            unfinished = unfinished[-_LINE_CHARACTERS:]
            _print(lines, output)
        if "error" in found:
            _print([unfinished], output)
            raise SandboxUnavailableError(f"the image cannot be built: {str(found['error'])[-500:]}\n{last.strip()}")
    _print([unfinished], output)


def _print(lines: Iterable[str], output: Callable[[str], None]) -> None:
    for line in lines:
        shown = line.rstrip("\r").rpartition("\r")[2]
        if shown.strip() and not _OF_THE_ENGINE.match(shown):
            output(shown[:_LINE_CHARACTERS])


Source = Literal["registry", "debian"]
SOURCES: tuple[Source, ...] = ("registry", "debian")
DEFAULT_RECIPE = "python"
Progress = Callable[[str], None]
"""Gets a line for a person."""
_WORDS = {"registry": "a registry", "debian": "Debian's packages"}
RECIPE_LABEL = "io.ringfence.recipe"
_BUILD_SECONDS = 900.0
_TICK_SECONDS = 5.0


def silent(_line: str) -> None:
    """Show nothing."""


@contextmanager
def ticking(progress: Progress, words: str) -> Generator[None]:
    """A block that may take long and say nothing: every few seconds a line tells that it goes on."""
    ended, begun = threading.Event(), time.monotonic()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            progress(f"  {words}: {time.monotonic() - begun:.0f} s so far")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        ended.set()
        ticker.join()


def _recipes() -> Path:
    """The recipes of the wheel, or those of the checkout."""
    installed = Path(__file__).parents[1] / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "images"


def _unpacked_hook() -> str:
    """What is done to a base of Debian's packages, in which none of their own scripts has run."""
    return (_recipes() / "debian" / "unpacked.sh").read_text().strip()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is made of: a Containerfile, and the Debian packages of its base where there is no registry."""

    name: str
    containerfile: str
    packages: tuple[str, ...]

    @property
    def base(self) -> str:
        """What the Containerfile begins with by default."""
        (line,) = (line for line in self.containerfile.splitlines() if line.startswith("ARG BASE="))
        return line.removeprefix("ARG BASE=")

    def tag(self, source: Source) -> str:
        """The image's name; another recipe has another."""
        parts = [source, self.containerfile]
        if source == "debian":
            parts += [*self.packages, _unpacked_hook()]
        recipe = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"localhost/ringfence-{self.name}:{recipe}"


def recipe_names() -> list[str]:
    return sorted(folder.name for folder in _recipes().iterdir() if (folder / "Containerfile").is_file())


def recipe(name: str) -> Recipe:
    """The recipe in a folder of `images/`. ValueError for a name that none has."""
    if name not in recipe_names():
        raise ValueError(f"there is no recipe {name!r}, only {', '.join(recipe_names())}")
    folder = _recipes() / name
    packages = (folder / "packages").read_text().split()
    return Recipe(name, (folder / "Containerfile").read_text(), tuple(packages))


def built(connection: PodmanConnection, wanted: Recipe, sources: Sequence[Source] = SOURCES) -> str | None:
    """The image of a recipe, where it has been built."""
    return next((tag for source in sources if connection.client.images.exists(tag := wanted.tag(source))), None)


def existing(connection: PodmanConnection, image: str) -> str:
    """An image by its name. SandboxUnavailableError: it is not there. It is never fetched."""
    if not connection.client.images.exists(image):
        raise SandboxUnavailableError(
            f"there is no image {image!r} here, and none is fetched unasked: `podman pull {shlex.quote(image)}`, "
            "or leave the image out to use that of `ringfence sandbox build`"
        )
    return image


def build(
    connection: PodmanConnection, wanted: Recipe, sources: tuple[Source, ...] = SOURCES, progress: Progress = silent
) -> str:
    """Build a recipe from the first source that works, unless it is built already; the image's name.

    Raises:
        SandboxUnavailableError: no source works; each says why.
    """
    if tag := built(connection, wanted, sources):
        return tag
    failed: list[str] = []
    with image_lock():
        if tag := built(connection, wanted, sources):  # by another build meanwhile
            return tag
        for source in sources:
            try:
                progress(f"building the image {wanted.name!r} from {_WORDS[source]}; this takes a minute, once")
                with ticking(progress, f"building {wanted.name!r}"):
                    is_pulled = source == "registry"
                    base = _pulled(connection, wanted) if is_pulled else _unpacked(connection, wanted, progress)
                    progress("finishing it in a container")
                    _finish(connection, wanted, source, base, progress)
            except (APIError, SandboxUnavailableError, OSError, subprocess.SubprocessError, *UNREADABLE) as error:
                failed.append(f"from {source}: {str(error).strip()[-800:]}")
                progress(f"it cannot be built from {_WORDS[source]}")
            else:
                return wanted.tag(source)
    raise SandboxUnavailableError(
        f"the image {wanted.name!r} cannot be built.\n"
        + "\n".join(failed)
        + f"\nWith a registry: `podman pull {wanted.base}`; without one, on Debian: `apt-get install mmdebstrap`. Then "
        "`ringfence sandbox build`"
    )


@contextmanager
def image_lock() -> Generator[None]:
    """Two builds of one image are one build and one look."""
    with open(os.path.join(podman_directory(), "build.lock"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too


def _pulled(connection: PodmanConnection, wanted: Recipe) -> str:
    """The base image, fetched if it is not there."""
    images = connection.client.images
    if not images.exists(wanted.base):
        repository, _, tag = wanted.base.rpartition(":")
        with suppress(ImageNotFound):
            images.pull(repository, tag=tag)
        if not images.exists(wanted.base):  # a pull that fails may say nothing
            raise OSError(f"{wanted.base} cannot be fetched")
    return wanted.base


def _unpacked(connection: PodmanConnection, wanted: Recipe, progress: Progress) -> str:
    """A base image of Debian's packages, as the machine's own apt gets them."""
    tag = f"{wanted.tag('debian')}-base"
    if connection.client.images.exists(tag):
        return tag
    with tempfile.TemporaryDirectory(prefix="ringfence-image-") as place:
        tar, said = os.path.join(place, "base.tar"), ""
        packages = ",".join(("base-passwd", *wanted.packages))
        command = ["/bin/sh", _recipes() / "debian" / "base.sh", tar, _unpacked_hook(), packages]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace"
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                said = (said + line)[-600:]
                if line.startswith("I: ") and "hook" not in line:
                    progress(f"  {line[3:].strip()}")
        if process.returncode != 0:
            raise OSError(said.strip())
        with open(tar, "rb") as file:
            response = connection.client.api.post(
                "/images/import",
                params={"reference": tag},
                data=file,
                headers={"Content-Type": "application/x-tar"},
                timeout=_BUILD_SECONDS,
            )
        response.raise_for_status()
    return tag


def _finish(connection: PodmanConnection, wanted: Recipe, source: Source, base: str, progress: Progress) -> None:
    with Context() as context:
        context.add(CONTAINERFILE, wanted.containerfile)
        build_image(
            connection,
            context,
            wanted.tag(source),
            labels={RECIPE_LABEL: wanted.name},
            args={"BASE": base},
            output=lambda line: None if line.startswith("STEP ") else progress(f"  {line}"),
            network=source == "registry",
        )
