"""npm's lock: the tarballs that it names, and the copy of it that is installed from without a network."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.escapes import escape_path
from ringfence_sandbox.project.fetching import Artefact, Registries, integrity
from ringfence_sandbox.project.project_files import NPM_LOCK, LockError, inside, parsing, read_project_file
from ringfence_sandbox.project.target import NodeTarget

_NAME = r"(?:@[A-Za-z0-9~][A-Za-z0-9._~-]*/)?[A-Za-z0-9~_-][A-Za-z0-9._~-]*"
_MODULES = re.compile(rf"((?:(?!node_modules/)[^/]+/)*)node_modules/{_NAME}(?:/node_modules/{_NAME})*")
_VERSION = re.compile(r"[0-9A-Za-z.+-]+")
_TARBALL = re.compile(r"https?://[^/]+/.*/-/[^/]+\.tgz")
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class NpmProject:
    """What is installed of an npm project."""

    artefacts: Sequence[Artefact]
    files: Mapping[str, bytes]
    """The lock and the manifests, by path."""
    links: str
    """Shell commands that let its own packages lead into the workspace."""
    notes: Sequence[str]


def npm_project(root: str, target: NodeTarget, registries: Registries) -> NpmProject:
    """
    Raises:
        LockError: the lock cannot be read, or has what cannot be fetched as a file with a hash.
    """
    with parsing(NPM_LOCK, "make it anew with `npm install --package-lock-only`"):
        return _project(root, target, registries)


def _project(root: str, target: NodeTarget, registries: Registries) -> NpmProject:
    lock: dict[str, Any] = json.loads(read_project_file(root, NPM_LOCK) or b"")
    if lock.get("lockfileVersion") not in _VERSIONS:
        raise LockError(
            f"{NPM_LOCK} is of version {lock.get('lockfileVersion')}, not 2 or 3: make it anew with npm 7 or newer"
        )
    packages: dict[str, dict[str, Any]] = lock["packages"]
    files, artefacts, links, notes = dict[str, bytes](), dict[str, Artefact](), list[str](), list[str]()
    for place, package in packages.items():
        match = _MODULES.fullmatch(place)
        if match is None:
            manifest = str(inside(f"{place}/package.json" if place else "package.json"))
            if (content := read_project_file(root, manifest)) is None:
                raise LockError(f"{NPM_LOCK} names {escape_path(manifest)}, which is not there")
            files[manifest] = content
        elif package.get("link"):
            own = shlex.quote(f"/workspace/{inside(str(package['resolved']))}")
            links.append(f"ln -sfn {own} {shlex.quote(f'/{place}')}")
        elif not package.get("inBundle") and (not package.get("optional") or _fits(package, target)):
            if match[1]:
                notes.append(f"{place} is not installed: its own directory of the workspace would hide it")
            artefact = _artefact(place, package, target, registries)
            artefacts[artefact.filename] = artefact
            # What npm takes from its cache needs an address, which locks without one do not have.
            package["resolved"] = artefact.urls[0]
    lock.pop("dependencies", None)  # the same once more, for npm 6
    files[NPM_LOCK] = json.dumps(lock).encode()
    return NpmProject(list(artefacts.values()), files, "\n".join(links), notes)


def _artefact(place: str, package: Mapping[str, Any], target: NodeTarget, registries: Registries) -> Artefact:
    name, version = str(package.get("name") or place.rpartition("node_modules/")[2]), str(package["version"])
    resolved = str(package.get("resolved") or "")
    if not re.fullmatch(_NAME, name) or not _VERSION.fullmatch(version):
        raise LockError(f"{NPM_LOCK}: {escape_path(name)} {escape_path(version)} is no package of a registry")
    if resolved and not resolved.startswith(("https://", "http://")):
        raise LockError(
            f"{NPM_LOCK}: {name} comes from {escape_path(resolved)[:200]}: only files of a registry are fetched"
        )
    if "integrity" not in package:
        raise LockError(
            f"{NPM_LOCK}: {name} has no hash (integrity): make it anew with `npm install --package-lock-only`"
        )
    hashes = integrity(str(package["integrity"]))
    usual = f"{registries.npm or target.registry.rstrip('/')}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    urls = [resolved] if resolved else [usual]
    if registries.npm and _TARBALL.fullmatch(resolved):
        urls.insert(0, usual)
    algorithm, _, digest = min(hashes).partition(":")
    return Artefact(f"{name} {version}", frozenset({f"{algorithm}:{digest}"}), urls, f"{algorithm}-{digest}")


def _fits(package: Mapping[str, Any], target: NodeTarget) -> bool:
    for key, value in (("os", target.os), ("cpu", target.cpu), ("libc", target.libc)):
        wanted: Sequence[str] | str = package.get(key) or []
        words = [wanted] if isinstance(wanted, str) else wanted
        if f"!{value}" in words or (value not in words and not all(word.startswith("!") for word in words)):
            return False
    return True
