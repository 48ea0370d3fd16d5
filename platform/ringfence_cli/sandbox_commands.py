"""The commands about where commands run, as they are typed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import click

from ringfence_cli.options import AS_JSON, UNAVAILABLE, Interruptible, Invocation


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

    findings: list[Finding] = []
    for finding in examine_sandbox(image):
        findings.append(finding)
        if not invocation.wants_json:
            click.echo(printable(f"{'works' if finding.works else 'FAILS':6} {finding.name}: {finding.found}"))
            if not finding.works and finding.advice:
                click.echo(printable(f"       -> {finding.advice}"))
    everything = all(finding.works for finding in findings)
    if invocation.wants_json:
        invocation.put_json({"works": everything, "findings": [asdict(finding) for finding in findings]})
    return 0 if everything else UNAVAILABLE


@sandbox.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--from",
    "source",
    type=click.Choice(["registry", "debian"]),
    help="Build on what a registry has, or from Debian's packages.  [default: the first that works]",
)
def build(names: tuple[str, ...], source: Literal["registry", "debian"] | None) -> int:
    """Build the images that come with ringfence, by default that for commands; print their names.

    NAME is python (the default image) or base (a shell, no Python). Built ones are left as they are.
    """
    from ringfence_sandbox import build_images

    try:
        for image in build_images(names, source):
            click.echo(image)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return 0
