"""The image of a project: built from what it says it needs, and remembered for its directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from podman.errors import APIError

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.filesystem.hidden import HiddenFiles
from ringfence_sandbox.container.connection import UNREADABLE, PodmanConnection, connect
from ringfence_sandbox.container.images import (
    CONTAINERFILE,
    DEFAULT_RECIPE,
    Context,
    Progress,
    build,
    build_image,
    existing,
    recipe,
    ticking,
)
from ringfence_sandbox.project.fetching import Artefact, Fetcher, configured
from ringfence_sandbox.project.npm_lock import npm_project
from ringfence_sandbox.project.project_files import (
    NPM_LOCK,
    UV_LOCK,
    Devcontainer,
    LockError,
    devcontainer,
    fingerprints,
    inside,
    locks,
    read_project_file,
    unlocked,
)
from ringfence_sandbox.project.python_locks import artefacts_of, own_packages, requirement_pins, uv_pins
from ringfence_sandbox.project.target import NodeTarget, PythonTarget, probe
from ringfence_workspace.history.hidden_rule import remembered_hidden
from ringfence_workspace.host import HostFilesystem
from ringfence_workspace.tree.places import StateDirectoryError, replacing, state_directory

PROJECT_LABEL = "io.ringfence.project"
_NOTE = "ringfence: "
"""Begins a line of a build that is for the user."""
_HOW_TO_LOCK = {
    "poetry.lock": "`poetry self add poetry-plugin-export`, then `poetry export --all-extras --all-groups "
    "-o requirements-lock.txt`",
    "pdm.lock": "`pdm export -G :all -o requirements-lock.txt`",
    "pyproject.toml": "`uv lock`, or `uv pip compile pyproject.toml --all-extras --generate-hashes "
    "-o requirements-lock.txt`",
    "requirements.in": "`uv pip compile requirements.in --generate-hashes -o requirements-lock.txt`",
    "requirements.txt": "`uv pip compile requirements.txt --generate-hashes -o requirements-lock.txt`",
    "pnpm-lock.yaml": "`rm -rf node_modules`, which npm misreads, then `npm install --package-lock-only`",
    "yarn.lock": "`npm install --package-lock-only`",
    "package.json": "`npm install --package-lock-only`",
}
"""By the file that says what a project needs. No command overwrites a requirements.txt, which may be the user's own.
What comes first says what the others of its language do."""
_OF_NODE = ("pnpm-lock.yaml", "yarn.lock", "package.json")

_CONTINUED = re.compile(rb"[\\`][ \t]*\r?\n(?:[ \t]*#[^\n]*\n)*")
# The engine fetches such a source itself, with the network of the host. A variable or an escape may hide an address.
_FETCHES = re.compile(rb"^\s*(?:ONBUILD\s+)?ADD\s(?:.*(?:://|[$\\]|git@|github\.com))", re.IGNORECASE | re.MULTILINE)

# Podman has been seen to take an option and not to do what it says.
_ALONE = """
set -e
[ "$(ls /sys/class/net)" = lo ] || { echo "ringfence: this Podman gives a build a network"; exit 1; }
"""

_RUN = "RUN --mount=type=bind,source={},target=/run/ringfence-build,rw sh /run/ringfence-build/install.sh"

_INSTALL_PYTHON = """
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
install() { python3 -m pip install --quiet --no-index --no-deps --no-cache-dir --no-compile --no-build-isolation "$@"; }
cd "$(dirname "$0")"
set -- wheels/*.whl; [ ! -e "$1" ] || install "$@"
for source in sources/*; do
    [ ! -e "$source" ] || install "./$source" || {
        echo "ringfence: $source cannot be built without a network"; exit 1; }
done
place() { python3 -c "import sysconfig; print(sysconfig.get_path('$1'))"; }
# Where pip has installed nothing yet, neither directory need be there.
copy() { mkdir -p "$2" && cp -R "$1/." "$2"; }
copy own/site "$(place purelib)"
[ ! -d own/scripts ] || copy own/scripts "$(place scripts)"
"""

_INSTALL_NPM = """
from=$(cd "$(dirname "$0")" && pwd)
mkdir -p /workspace
cp -R "$from/project/." /workspace
cd /workspace
export npm_config_cache="$from/cache" npm_config_audit=false npm_config_fund=false npm_config_update_notifier=false
# What npm says of packages that it could install is for their authors.
quiet() { "$@" >"$from/said" 2>&1; }
quiet npm ci --offline --ignore-scripts || quiet npm ci --offline --ignore-scripts --legacy-peer-deps || {
    cat "$from/said"; exit 1; }
! grep -q hasInstallScript package-lock.json || quiet npm rebuild --offline || {
    cat "$from/said"; echo "ringfence: an install script failed: it has no network here"; }
mkdir -p node_modules
rm -rf /node_modules
mv node_modules /node_modules
sh "$from/links.sh"
cd /
find /workspace -mindepth 1 -delete
"""

_POST_CREATE = """
cd /workspace
sh ./.ringfence-post-create || echo "ringfence: postCreateCommand failed (exit code $?): it has no network here"
"""


@dataclass(frozen=True, slots=True)
class ProjectImage:
    """The image that was built for a directory."""

    root: str
    image: str
    """Its id."""
    inputs: Mapping[str, str]
    """The hash of each file that the image depends on, "" where there is none."""


def remembered_image(root: str | os.PathLike[str]) -> ProjectImage | None:
    """The image that `ringfence sandbox build` made for a directory, if it did. StateDirectoryError as elsewhere."""
    real = os.path.realpath(root)
    with suppress(OSError, *UNREADABLE):
        found = ProjectImage(**json.loads(_record(real).read_bytes()))
        return found if found.root == real else None
    return None


def describe_stale_image(root: str | os.PathLike[str]) -> str | None:
    """A line for a person, if files have changed since the image of a directory was built from them, or if there are
    such files and no image."""
    if (remembered := remembered_image(root)) is None:
        real = os.path.realpath(root)
        there = ", ".join(escape_path(path) for path, value in fingerprints(real).items() if value)
        build = f"`ringfence sandbox build {shlex.quote(real)}` builds one"
        return f"no image has what {there} of {real} names: {build}" if there else None
    now = fingerprints(remembered.root, remembered.inputs)
    changed = [escape_path(path) for path, value in now.items() if remembered.inputs.get(path, "") != value]
    again = f"`ringfence sandbox build {shlex.quote(remembered.root)}` builds it anew"
    return f"{', '.join(changed)} changed since the image of {remembered.root} was built: {again}" if changed else None


def _how_to_lock(root: str, file: str = "") -> str:
    """The advice for a project, or for one of its files that has no lock."""
    there = [name for name in _HOW_TO_LOCK if Path(root, name).exists()]
    node = [name for name in there if name in _OF_NODE][:1]
    python = [name for name in there if name not in _OF_NODE][:1]
    ways = (node if file in _OF_NODE else python if file else [*python, *node]) or ["pyproject.toml"]
    commands = " and ".join(_HOW_TO_LOCK[name] for name in ways)
    return f"Make a lock and build again: {commands}. Or name a Containerfile (--file) or an image (--image)"


def _record(real: str) -> Path:
    return Path(state_directory(), "images", f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json")


def build_project_image(
    root: str | os.PathLike[str], *, image: str | None = None, containerfile: str | None = None, progress: Progress
) -> str:
    """Build the image of a project and remember it for its directory; the image's name.

    It begins with ``image``, a ``containerfile`` of the project, what its devcontainer.json says, or the default image;
    to which come what its locks name. Nothing of the project or of a package runs outside of a container, and no
    container has a network. ``progress`` gets a line at a time.

    Raises:
        SandboxUnavailableError: it cannot be built. LockError, which is one, where the project's files are the reason.
    """
    real = os.path.realpath(root)
    with connect() as connection:
        try:
            return _Build(connection, real, progress).build(image, containerfile)
        except StateDirectoryError:
            raise
        except (APIError, OSError, *UNREADABLE) as error:
            raise SandboxUnavailableError(f"the image of {real} cannot be built: {error}") from error


class _Build:
    def __init__(self, connection: PodmanConnection, root: str, progress: Progress) -> None:
        self._connection = connection
        self._root = root
        self._progress = progress
        self._registries = configured()
        self._fetcher = Fetcher(self._registries, progress)
        self._notes: list[str] = []

    def build(self, image: str | None, containerfile: str | None) -> str:
        if lacking := self._connection.host.describe_unlimited():
            self._progress(f"note: {lacking}")
        named = Devcontainer(image=image or "", containerfile=containerfile or "")
        own = named if image or containerfile else devcontainer(self._root)
        if own is not None and own.not_honoured:
            self._note(f"{own.file}: not honoured: {', '.join(own.not_honoured)}")
        names = locks(self._root)
        for file in unlocked(self._root, names):
            self._note(
                f"{file} has no lock with hashes, so nothing is installed for it. {_how_to_lock(self._root, file)}"
            )
        if not names and own is None:
            raise LockError(
                f"{self._root} has no {UV_LOCK}, no requirements.txt with hashes, no {NPM_LOCK}, no devcontainer.json. "
                + _how_to_lock(self._root)
            )
        own = own or named
        inputs = fingerprints(self._root, filter(None, [own.containerfile]))
        base = self._base(own, names)
        found = probe(self._connection, base, node=NPM_LOCK in names)
        self._progress(f"it begins with {base}: {found.system}")
        parts = (self._root, base, *inputs, *inputs.values())
        tag = f"localhost/ringfence-project:{hashlib.sha256(os.fsencode(chr(0).join(parts))).hexdigest()[:16]}"
        with Context() as context, tempfile.TemporaryDirectory(prefix="ringfence-artefacts-") as place:
            steps = [
                *self._python([name for name in names if name != NPM_LOCK], found.python, context, Path(place)),
                *(self._npm(found.node, context, Path(place)) if NPM_LOCK in names else ()),
                *(self._post_create(own.post_create, context) if own.post_create else ()),
            ]
            lines = ["ARG BASE", "FROM ${BASE}", "USER root", *steps, "WORKDIR /workspace", ""]
            context.add(CONTAINERFILE, "\n".join(lines))
            self._progress("installing them in a container without network")
            labels, args = {PROJECT_LABEL: self._root}, {"BASE": base}
            with ticking(self._progress, "installing"):
                build_image(self._connection, context, tag, labels=labels, args=args, output=self._output)
        self._remember(str(self._connection.client.images.get(tag).id), inputs)
        for note in self._notes:
            self._progress(note)
        return tag

    def _note(self, words: str) -> None:
        self._notes.append(f"note: {words}")

    def _output(self, line: str) -> None:
        if line.startswith(_NOTE):
            self._note(line.removeprefix(_NOTE))
        elif not line.startswith("STEP "):
            self._progress(f"  {line}")

    def _base(self, own: Devcontainer, names: Sequence[str]) -> str:
        if own.containerfile:
            return self._from_containerfile(own.containerfile, own.context)
        if own.image:
            return existing(self._connection, own.image)
        default = recipe("node" if NPM_LOCK in names else DEFAULT_RECIPE)
        return build(self._connection, default, progress=self._progress)

    def _from_containerfile(self, file: str, context: str) -> str:
        content = read_project_file(self._root, file)
        if content is None:
            raise LockError(f"there is no {escape_path(file)} in {self._root}")
        if fetching := _FETCHES.search(_CONTINUED.sub(b"", content)):
            line = fetching[0].decode(errors="replace").strip()[:200]
            raise LockError(
                f"{escape_path(file)} is built without a network, and {escape_path(line)!r} may fetch something: "
                "put the file into the project and COPY it, or build the image yourself and name it with --image"
            )
        tag = f"localhost/ringfence-project-base:{hashlib.sha256(os.fsencode(self._root)).hexdigest()[:16]}"
        self._progress(f"building {escape_path(file)} without network")
        directory = self._root if context == "." else os.path.join(self._root, inside(context))
        if os.path.realpath(directory) != directory:
            raise LockError(f"{escape_path(context)} is a symbolic link, or below one")
        with Context() as packed:
            self._add_project(packed, directory)
            packed.add(CONTAINERFILE, content)
            try:
                labels = {PROJECT_LABEL: self._root}
                build_image(self._connection, packed, tag, labels=labels, output=self._progress)
            except SandboxUnavailableError as error:
                raise SandboxUnavailableError(
                    f"{error}\nA Containerfile is built without a network, on images that are here. If it needs more, "
                    f"build it: `podman build -t NAME -f {shlex.quote(file)} .`, then `ringfence sandbox build "
                    f"{shlex.quote(self._root)} --image NAME`"
                ) from error
        return tag

    def _python(
        self, names: Sequence[str], target: PythonTarget | None, context: Context, place: Path
    ) -> Iterator[str]:
        if not names:
            return
        if target is None:
            self._note(f"{', '.join(names)} is not installed: the image has no python3 with pip")
            return
        if names == [UV_LOCK]:
            pins, own = uv_pins(self._root, target)
        else:
            pins, notes = requirement_pins(self._root, names, target)
            own = [""]
            for note in notes:
                self._note(note)
        directory = place / "python"
        self._progress(f"looking for {len(pins)} packages for {target}")
        artefacts = artefacts_of(pins, target, self._registries, self._fetcher)
        self._fetcher.fetch_all(artefacts, directory, "Python packages")
        for artefact in artefacts:
            kind = "wheels" if artefact.filename.endswith(".whl") else "sources"
            context.add_file(f"python/{kind}/{artefact.filename}", directory / artefact.filename)
        for name, content in own_packages(self._root, own).items():
            context.add(f"python/own/{name}", content, 0o755 if name.startswith("scripts/") else 0o644)
        context.add("python/install.sh", _ALONE + _INSTALL_PYTHON)
        yield _RUN.format("python")

    def _npm(self, target: NodeTarget | None, context: Context, place: Path) -> Iterator[str]:
        if target is None:
            self._note(f"{NPM_LOCK} is not installed: the image has no node with npm")
            return
        project = npm_project(self._root, target, self._registries)
        for note in project.notes:
            self._note(note)
        directory = place / "npm"
        self._fetcher.fetch_all(project.artefacts, directory, "npm packages")
        for artefact in project.artefacts:
            context.add_file(_in_npms_cache(artefact), directory / artefact.filename)
        for path, content in project.files.items():
            context.add(f"npm/project/{path}", content)
        context.add("npm/links.sh", project.links)
        context.add("npm/install.sh", _ALONE + _INSTALL_NPM)
        yield _RUN.format("npm")
        yield "ENV PATH=/node_modules/.bin:$PATH"

    def _post_create(self, command: str, context: Context) -> Iterator[str]:
        self._add_project(context, self._root, "project")
        context.add("project/.ringfence-post-create", command + "\n")
        context.add("post-create/install.sh", _ALONE + _POST_CREATE)
        workspace = "RUN --mount=type=bind,source=project,target=/workspace,rw"
        yield _RUN.format("post-create").replace("RUN", workspace, 1)

    def _add_project(self, context: Context, directory: str, name: str = "") -> None:
        rule = remembered_hidden(self._root) or HiddenFiles()
        with HostFilesystem(self._root, read_only=True, hide=rule) as view:
            left_out = context.add_project(
                directory, name, hidden=lambda path: view.hides(os.path.relpath(path, self._root))
            )
        if left_out:
            self._note(f"not in the build, since hidden: {', '.join(map(escape_path, left_out))}")

    def _remember(self, image: str, inputs: Mapping[str, str]) -> None:
        """Have the project use an image, and remove the one before."""
        before, record = remembered_image(self._root), _record(self._root)
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(record) as file:
            file.write(json.dumps(asdict(ProjectImage(self._root, image, inputs))).encode())
        if before is not None and before.image != image:
            with suppress(APIError, OSError):  # a container may still use it
                self._connection.client.images.remove(before.image)


def _in_npms_cache(artefact: Artefact) -> str:
    """Where npm looks for a tarball with this hash: then it asks no registry."""
    ((algorithm, digest),) = (one.split(":") for one in artefact.hashes)
    return f"npm/cache/_cacache/content-v2/{algorithm}/{digest[:2]}/{digest[2:4]}/{digest[4:]}"
