"""The images that come with ringfence: recipes, built where they are wanted and found again by their hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podman.errors import APIError, ImageNotFound

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.image_build import CONTAINERFILE, Context, build_image
from ringfence_sandbox.container.podman_connection import UNREADABLE, Connection, connect
from ringfence_sandbox.disk.places import podman_directory

Source = Literal["registry", "debian"]
SOURCES: tuple[Source, ...] = ("registry", "debian")
DEFAULT_RECIPE = "python"
Progress = Callable[[str], None]
"""Gets a line for a person."""
_WORDS = {"registry": "a registry", "debian": "Debian's packages"}
RECIPE_LABEL = "io.ringfence.recipe"
_BUILD_SECONDS = 900.0
_TICK_SECONDS = 5.0

# Packages are only unpacked: their own scripts, which need privileges and time, would have done this.
_UNPACKED = """
cp -n "$1/usr/share/base-passwd/passwd.master" "$1/etc/passwd"
cp -n "$1/usr/share/base-passwd/group.master" "$1/etc/group"
[ -e "$1/bin/sh" ] || ln -s dash "$1/bin/sh"
[ -e "$1/usr/bin/awk" ] || [ ! -e "$1/usr/bin/gawk" ] || ln -s gawk "$1/usr/bin/awk"
[ -e "$1/usr/bin/cc" ] || [ ! -e "$1/usr/bin/gcc" ] || ln -s gcc "$1/usr/bin/cc"
[ -e "$1/usr/bin/pager" ] || ln -s less "$1/usr/bin/pager"
rm -rf "$1/usr/share/doc" "$1/usr/share/man" "$1/usr/share/locale" "$1/usr/share/info" "$1/var/cache/apt"
""".strip()


def _silent(_line: str) -> None:
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
            parts += [*self.packages, _UNPACKED]
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


def built(connection: Connection, wanted: Recipe, sources: Sequence[Source] = SOURCES) -> str | None:
    """The image of a recipe, where it has been built."""
    return next((tag for source in sources if connection.client.images.exists(tag := wanted.tag(source))), None)


def existing(connection: Connection, image: str) -> str:
    """An image by its name. SandboxUnavailableError: it is not there. It is never fetched."""
    if not connection.client.images.exists(image):
        raise SandboxUnavailableError(
            f"there is no image {image!r} here, and none is fetched unasked: `podman pull {shlex.quote(image)}`, "
            "or leave the image out to use that of `ringfence sandbox build`"
        )
    return image


def build_images(
    names: Sequence[str] = (), source: Source | None = None, progress: Progress = _silent
) -> Iterator[str]:
    """Build the images that come with ringfence, and yield the name of each. One that exists is left as it is.

    ``names`` are folders of `images/`, by default that of the default image. ``source`` is the only one to try.
    ``progress`` gets lines for a person.

    Raises:
        ValueError: no recipe has that name. Nothing is built then.
        SandboxUnavailableError: Podman does not answer, or no source works.
    """
    recipes = [recipe(name) for name in names or (DEFAULT_RECIPE,)]
    with connect() as connection:
        if lacking := connection.host.describe_unlimited():
            progress(f"note: {lacking}")
        for wanted in recipes:
            yield build(connection, wanted, SOURCES if source is None else (source,), progress)


def build(
    connection: Connection, wanted: Recipe, sources: tuple[Source, ...] = SOURCES, progress: Progress = _silent
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


def _pulled(connection: Connection, wanted: Recipe) -> str:
    """The base image, fetched if it is not there."""
    images = connection.client.images
    if not images.exists(wanted.base):
        repository, _, tag = wanted.base.rpartition(":")
        with suppress(ImageNotFound):
            images.pull(repository, tag=tag)
        if not images.exists(wanted.base):  # a pull that fails may say nothing
            raise OSError(f"{wanted.base} cannot be fetched")
    return wanted.base


def _unpacked(connection: Connection, wanted: Recipe, progress: Progress) -> str:
    """A base image of Debian's packages, as the machine's own apt gets them."""
    if shutil.which("mmdebstrap") is None:
        raise FileNotFoundError("there is no mmdebstrap on this machine")
    tag = f"{wanted.tag('debian')}-base"
    if connection.client.images.exists(tag):
        return tag
    with tempfile.TemporaryDirectory(prefix="ringfence-image-") as place:
        tar = os.path.join(place, "base.tar")
        sources = Path(place, "sources")
        sources.write_bytes(_apt_sources())
        said = ""
        with (
            sources.open("rb") as given,
            subprocess.Popen(
                [
                    "mmdebstrap",
                    "--variant=extract",
                    f"--include={','.join(('base-passwd', *wanted.packages))}",
                    f"--extract-hook={_UNPACKED}",
                    _codename(),
                    tar,
                    "-",
                ],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                errors="replace",
            ) as process,
        ):
            assert process.stderr is not None
            for line in process.stderr:
                said = (said + line)[-600:]
                if line.startswith("I: ") and "hook" not in line:
                    progress(f"  {line[3:].strip()}")
        if process.returncode != 0:
            raise OSError(f"mmdebstrap: {said.strip()}")
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


def _codename() -> str:
    try:
        return platform.freedesktop_os_release()["VERSION_CODENAME"]
    except KeyError:
        raise FileNotFoundError("/etc/os-release names no release: this is not Debian or a child of it") from None


def _apt_sources() -> bytes:
    for name in ("sources.list.d/ubuntu.sources", "sources.list.d/debian.sources", "sources.list"):
        with suppress(FileNotFoundError):
            if content := Path("/etc/apt", name).read_bytes().strip():
                return content + b"\n"
    raise FileNotFoundError("apt has no sources on this machine")


def _finish(connection: Connection, wanted: Recipe, source: Source, base: str, progress: Progress) -> None:
    with Context() as context:
        context.add(CONTAINERFILE, wanted.containerfile)
        build_image(
            connection,
            context,
            wanted.tag(source),
            labels={RECIPE_LABEL: wanted.name},
            args={"BASE": base},
            output=lambda line: progress(f"  {line}"),
            network=source == "registry",
        )
