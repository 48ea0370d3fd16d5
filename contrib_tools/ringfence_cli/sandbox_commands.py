"""The commands about where commands run, as they are typed."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Literal

import click

from ringfence_cli.options import AS_JSON, Interruptible, Invocation
from ringfence_tools.runs.command_errors import UNAVAILABLE

IMAGES = ("base", "node", "python")
"""The images that come with ringfence. A directory of such a name is written ./NAME."""


@click.group(cls=Interruptible)
def sandbox() -> None:
    """Containers for the commands of an agent: what works here, and their images."""


@sandbox.command()
@click.option("--image", metavar="NAME", help="Look with this image; by default that of `ringfence sandbox build`.")
@AS_JSON
@click.pass_obj
def doctor(invocation: Invocation, image: str | None) -> int:
    """Try what a sandbox promises, from inside a container, and say what to do about what does not work.

    Exit codes: 0 everything works, 4 something does not.
    """
    from ringfence_sandbox import Finding, examine_sandbox
    from ringfence_tools.printable import printable
    from ringfence_tools.runs.outputs import put_line

    findings: list[Finding] = []
    for finding in examine_sandbox(image):
        findings.append(finding)
        if not invocation.wants_json:
            put_line(printable(f"{'works' if finding.works else 'FAILS':6} {finding.name}: {finding.found}"))
            if not finding.works and finding.advice:
                put_line(printable(f"       -> {finding.advice}"))
    everything = all(finding.works for finding in findings)
    if invocation.wants_json:
        invocation.put_json({"works": everything, "findings": [asdict(finding) for finding in findings]})
    return 0 if everything else UNAVAILABLE


@sandbox.command()
@click.argument("names", nargs=-1, metavar="[DIR | NAME...]")
@click.option(
    "--from",
    "source",
    type=click.Choice(["registry", "debian"]),
    help="Build on what a registry has, or from Debian's packages.  [default: the first that works]",
)
@click.option("--image", metavar="NAME", help="For DIR: begin with this image, whatever devcontainer.json says.")
@click.option("--file", "containerfile", metavar="FILE", help="For DIR: begin with this Containerfile of it.")
def build(
    names: tuple[str, ...],
    source: Literal["registry", "debian"] | None,
    image: str | None,
    containerfile: str | None,
) -> int:
    """Build the image for the project in DIR, with what its locks name, or images that come with ringfence.

    For DIR (such as . or ./python) it reads uv.lock or requirements*.txt with hashes, package-lock.json and
    devcontainer.json. `run` and `serve` use the image for DIR from then on. NAME is python (the default image), node
    (with Node.js, too) or base (a shell, no Python); built ones are left as they are. Prints the names of images.
    """
    from ringfence_sandbox import build_images, build_project_image
    from ringfence_tools.runs.outputs import ErrorStream, put_line

    progress = ErrorStream().say
    directory = names[0] if len(names) == 1 and os.path.isdir(names[0]) and names[0] not in IMAGES else None
    if directory is None and (image or containerfile):
        raise click.UsageError("--image and --file are for the image of a project: name its DIR")
    if image and containerfile:
        raise click.UsageError("--image and --file are two beginnings of one image: give one of them")
    if directory is not None and source is not None:
        raise click.UsageError("--from is for the images that come with ringfence, not for that of a project")
    if directory is not None:
        put_line(build_project_image(directory, image=image, containerfile=containerfile, progress=progress))
        return 0
    try:
        for built in build_images(names, source, progress):
            put_line(built)
    except ValueError as error:
        raise click.UsageError(f"{error}; and there is no such directory") from None
    return 0
