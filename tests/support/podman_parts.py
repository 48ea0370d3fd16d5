"""What a sandbox is made of: Podman's service, the images of ringfence, and the labels of containers."""

from __future__ import annotations

from ringfence_sandbox.container.connection import OwnService, PodmanConnection, answers, connect, socket_path
from ringfence_sandbox.container.container import WORKSPACE_LABEL, remove_orphans
from ringfence_sandbox.container.images import (
    DEFAULT_RECIPE,
    SOURCES,
    Context,
    Recipe,
    build,
    build_image,
    built,
    recipe,
    recipe_names,
)
from ringfence_sandbox.container.users import FIRST_ID, MOUNTS, swapped_ids
from ringfence_sandbox.project.project_image import PROJECT_LABEL, remembered_image
from ringfence_workspace.call_process import OWNER_LABEL, own_label

__all__ = [
    "FIRST_ID",
    "MOUNTS",
    "OWNER_LABEL",
    "PROJECT_LABEL",
    "SOURCES",
    "WORKSPACE_LABEL",
    "Context",
    "OwnService",
    "PodmanConnection",
    "Recipe",
    "answers",
    "build",
    "build_image",
    "connect",
    "image_of",
    "own_label",
    "recipe",
    "recipe_names",
    "remembered_image",
    "remove_orphans",
    "socket_path",
    "swapped_ids",
]


def image_of(podman: PodmanConnection, name: str = DEFAULT_RECIPE) -> str | None:
    """The tag of the image of ringfence's own of that name, where it is built."""
    return built(podman, recipe(name))
