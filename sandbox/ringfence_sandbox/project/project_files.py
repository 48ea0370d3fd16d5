"""The files of a project that say what it needs: its locks and its devcontainer.json. No link is followed."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shlex
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence_workspace.tree.confined import Confined, open_file
from ringfence_workspace.tree.kernel import abilities

UV_LOCK = "uv.lock"
NPM_LOCK = "package-lock.json"
_MOST_BYTES = 64 << 20
PLACES = (".devcontainer/devcontainer.json", ".devcontainer.json")
_HONOURED = {"image", "build", "dockerFile", "dockerfile", "context", "postCreateCommand"}
_HONOURED_OF_BUILD = {"dockerfile", "context"}
_WITHOUT_EFFECT = {"$schema", "name", "customizations"}
# Strings first, so that no comment and no comma begins in one.
_JSONC = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_REQUIRES = re.compile(rb"^[ \t]*[^#\s]", re.MULTILINE)
_TRAILING = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)


class LockError(SandboxUnavailableError):
    """A project that cannot be installed; the message names what in its files is the reason."""


def read_project_file(root: str, path: str) -> bytes | None:
    """The content of a file of the project; None where there is none.

    Raises:
        LockError: it or a directory on the way is a symbolic link, or it is no regular file, or too large.
    """
    place, top = str(inside(path)), os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with Confined(top, abilities()).parent(place) as (directory, name):
            descriptor, found = open_file(directory, name, place)
        with open(descriptor, "rb") as file:
            if found.st_size > _MOST_BYTES:
                raise LockError(f"{escape_path(path)} has more than {_MOST_BYTES >> 20} MiB")
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(
            f"{escape_path(path)} cannot be read: {error.strerror}. Symbolic links are not followed: put the file there"
        ) from None
    finally:
        os.close(top)


@contextmanager
def parsing(file: str, advice: str) -> Generator[None]:
    """Have what is malformed in a file of the project be a LockError, which says what to do about it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # of json, tomllib or packaging
        raise LockError(f"{file} is malformed ({error}): {advice}") from error


def inside(path: str) -> PurePosixPath:
    """A relative path of the project. LockError: it leads out."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or not found.parts or "\0" in path:
        raise LockError(f"{escape_path(path)!r} is not a path inside of the project")
    return found


def locks(root: str) -> Sequence[str]:
    """The names of the locks at the top of a project: uv's or, without it, requirements with hashes; and npm's."""
    names = sorted(name for name in os.listdir(root) if name.startswith("requirements") and name.endswith(".txt"))
    contents = {name: read_project_file(root, name) or b"" for name in names}
    hashed = [name for name in names if b"--hash=" in contents[name]]
    # Nothing needs no hashes. One that names packages beside it needs them.
    empty = [] if any(map(_REQUIRES.search, contents.values())) else names
    python = [UV_LOCK] if os.path.lexists(os.path.join(root, UV_LOCK)) else hashed or empty
    return [*python, *([NPM_LOCK] if os.path.lexists(os.path.join(root, NPM_LOCK)) else [])]


def unlocked(root: str, locks: Sequence[str]) -> Sequence[str]:
    """The files that say what the project needs without naming hashes, beside its locks."""
    python = [name for name in locks if name != NPM_LOCK]
    files = {"requirements.txt": python, "package.json": NPM_LOCK in locks}
    return [name for name, locked in files.items() if not locked and os.path.lexists(os.path.join(root, name))]


def fingerprints(root: str, more: Iterable[str] = ()) -> Mapping[str, str]:
    """The hash of each file that the image of a project depends on, and of ``more`` files; "" for one that is not there
    or cannot be read."""
    found = dict.fromkeys([*more, *PLACES], "")
    with suppress(LockError):
        found.update(dict.fromkeys(locks(root), ""))
    for path in found:
        with suppress(LockError):
            content = read_project_file(root, path)
            found[path] = "" if content is None else hashlib.sha256(content).hexdigest()
    return found


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
            with parsing(file, "mend it, or name an image with --image"):
                text = _TRAILING.sub(_string, _JSONC.sub(_string, content.decode("utf-8-sig")))
                return _parsed(file, json.loads(text))
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
