"""What of a devcontainer.json is honoured: its image or its Containerfile, and postCreateCommand."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from ringfence.filesystem.paths import escape_path
from ringfence_sandbox.project.artefacts import LockError
from ringfence_sandbox.project.project_files import inside, read_project_file

PLACES = (".devcontainer/devcontainer.json", ".devcontainer.json")
_HONOURED = {"image", "build", "dockerFile", "dockerfile", "context", "postCreateCommand"}
_HONOURED_OF_BUILD = {"dockerfile", "context"}
_WITHOUT_EFFECT = {"$schema", "name", "customizations"}
# Strings first, so that no comment and no comma begins in one.
_JSONC = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Devcontainer:
    """Paths are relative to the project."""

    file: str = ""
    image: str = ""
    containerfile: str = ""
    context: str = "."
    post_create: str = ""
    """A command of the shell."""
    not_honoured: Sequence[str] = ()


def devcontainer(root: str) -> Devcontainer | None:
    """That of a project, if it has one. LockError: it cannot be read."""
    for file in PLACES:
        if (content := read_project_file(root, file)) is not None:
            try:
                text = _TRAILING.sub(_string, _JSONC.sub(_string, content.decode("utf-8-sig")))
                return _parsed(file, json.loads(text))
            except LockError:
                raise
            except (AttributeError, TypeError, ValueError, RecursionError) as error:
                raise LockError(f"{file} is malformed ({error}): mend it, or name an image with --image") from error
    return None


def _string(match: re.Match[str]) -> str:
    return match[1] or ""


def _parsed(file: str, found: dict[str, Any]) -> Devcontainer:
    build: dict[str, Any] = found.get("build") or {}
    folder = PurePosixPath(file).parent
    dockerfile = build.get("dockerfile") or found.get("dockerFile") or found.get("dockerfile")
    context = build.get("context") or found.get("context") or "."
    unknown = sorted(found.keys() - _HONOURED - _WITHOUT_EFFECT)
    unknown += [f"build.{name}" for name in sorted(build.keys() - _HONOURED_OF_BUILD)]
    image = str(found.get("image") or "")
    if not image and not dockerfile:
        unknown.append("neither image nor build.dockerfile: the default image is used")
    return Devcontainer(
        file,
        image=image,
        containerfile=_below(folder, str(dockerfile)) if dockerfile else "",
        context=_below(folder, str(context)),
        post_create=_command(found.get("postCreateCommand")),
        not_honoured=[escape_path(one) for one in unknown],
    )


def _below(folder: PurePosixPath, path: str) -> str:
    """A path that is relative to the folder of the file, as one that is relative to the project."""
    found = posixpath.normpath(folder / path)
    return found if found == "." else str(inside(found))


def _command(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return shlex.join(map(str, cast("list[object]", value)))
    if isinstance(value, dict):
        return "\n".join(["set -e", *(_command(one) for one in cast("dict[str, object]", value).values())])
    return ""
