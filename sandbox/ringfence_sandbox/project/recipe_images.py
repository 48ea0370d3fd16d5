"""The images that come with ringfence, built for a person, who is told what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.connection import connect
from ringfence_sandbox.container.images import DEFAULT_RECIPE, SOURCES, Progress, Source, build, recipe, silent
from ringfence_sandbox.project.target import describe_image


def build_images(names: Sequence[str] = (), source: Source | None = None, progress: Progress = silent) -> Iterator[str]:
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
            image = build(connection, wanted, SOURCES if source is None else (source,), progress)
            with suppress(SandboxUnavailableError):  # one without Python needs that of the default image
                progress(f"the image {wanted.name!r} has {describe_image(connection, image)}")
            yield image
