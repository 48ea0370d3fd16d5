"""Python's locks, uv.lock and requirements with hashes: from them the files to fetch for one Python and platform.

The project's own packages are a path into the workspace and the metadata of pyproject.toml. No build backend runs for
them, so that what an agent edits is what is imported.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from ringfence.escapes import escape_path
from ringfence_sandbox.container.images import DEFAULT_RECIPE, recipe
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_sandbox.project.fetching import Artefact, Fetcher, Registries, basename, strong
from ringfence_sandbox.project.project_files import UV_LOCK, LockError, inside, parsing, read_project_file
from ringfence_sandbox.project.target import PythonTarget

_AT_ONCE = 4
_PYTHONS = ("3.13", "3.12", "3.14", "3.11", "3.10", "3.9")
"""Versions to advise, the most usual first."""
_LOCAL = ("editable", "virtual", "directory")
Record = Mapping[str, Any]
_REFERENCE = re.compile(r"([\w.]+)(?::([\w.]+))?(?: *\[[\w, ]*\])?")
_ENTRY = re.compile(r"[\w.-]+")
_SCRIPT = "#!/usr/bin/env python3\nimport sys\nfrom {module} import {first}\n\nsys.exit({attribute}())\n"


@dataclass(frozen=True, slots=True)
class Pin:
    """One version of a package, with the hashes of the files that it may be installed from."""

    name: str
    version: str
    hashes: frozenset[str]
    files: Sequence[tuple[str, str, frozenset[str]]] = ()
    """Name, URL and hashes of each file, where the lock names them."""
    registry: bool = True
    """Whether an index has it, too."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def uv_pins(root: str, target: PythonTarget) -> tuple[Sequence[Pin], Sequence[str]]:
    """What uv.lock installs on a Python, with all extras and groups; and the directories of the project's own packages.

    Raises:
        LockError: it cannot be read, or has what cannot be fetched as a file with a hash.
    """
    with parsing(UV_LOCK, "make it anew with `uv lock`"):
        lock = tomllib.loads((read_project_file(root, UV_LOCK) or b"").decode())
        needed = str(lock.get("requires-python", ""))
        if not SpecifierSet(needed).contains(target.environment["python_full_version"], prereleases=True):
            raise LockError(f"{UV_LOCK} is for Python {needed}, and the image has {target}. {_another_python(needed)}")
        return _DependencyWalk(lock, target.environment).installed()


def _another_python(needed: str) -> str:
    """Advice to begin with an image that has a Python of these versions."""
    fitting = [version for version in _PYTHONS if SpecifierSet(needed).contains(f"{version}.99")]
    if not fitting:
        return "Name an image that has it: `ringfence sandbox build DIR --image NAME`"
    image = f"{recipe(DEFAULT_RECIPE).base.partition(':')[0]}:{fitting[0]}-slim"
    return f"Begin with another: `podman pull {image}`, then `ringfence sandbox build DIR --image {image}`"


class _DependencyWalk:
    """From the project's own packages along the dependencies that hold on the target."""

    def __init__(self, lock: Record, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._everything = not lock.get("conflicts")  # else not all extras and groups can be installed together
        self._packages: dict[str, list[Record]] = {}
        for package in lock.get("package", ()):
            self._packages.setdefault(package["name"], []).append(package)
        self._seen: set[tuple[str, str, str]] = set()
        self._found: dict[str, Record] = {}
        self._own: list[str] = []

    def installed(self) -> tuple[Sequence[Pin], Sequence[str]]:
        for package in [one for several in self._packages.values() for one in several if _local(one) is not None]:
            self._visit(package, "")
            if self._everything:
                for extra in package.get("optional-dependencies", {}):
                    self._visit(package, extra)
            groups: Mapping[str, Any] = package.get("dev-dependencies", {})
            for name in groups if self._everything else groups.keys() & {"dev"}:
                self._follow(groups[name])
        return [_uv_pin(package) for package in self._found.values()], sorted(set(self._own))

    def _visit(self, package: Record, extra: str) -> None:
        key = (str(package["name"]), str(package.get("version", "")), extra)
        if key in self._seen:
            return
        self._seen.add(key)
        if (path := _local(package)) is not None:
            self._own.append("" if path == "." else str(inside(path)))
        else:
            other = self._found.setdefault(key[0], package)
            if other.get("version") != package.get("version"):
                raise LockError(f"{UV_LOCK} has two versions of {key[0]} for this Python")
        self._follow(
            package.get("optional-dependencies", {}).get(extra, ()) if extra else package.get("dependencies", ())
        )

    def _follow(self, dependencies: Sequence[Record]) -> None:
        for dependency in dependencies:
            if not self._holds(dependency.get("marker")):
                continue
            package = self._one(dependency)
            for extra in ("", *dependency.get("extra", ())):
                self._visit(package, extra)

    def _one(self, dependency: Record) -> Record:
        name, version = dependency["name"], dependency.get("version")
        fitting = [one for one in self._packages.get(name, ()) if version is None or one.get("version") == version]
        if len(fitting) > 1:
            fitting = [one for one in fitting if any(map(self._holds, one.get("resolution-markers", ())))]
        if len(fitting) != 1:
            raise LockError(
                f"{UV_LOCK} has no package {escape_path(str(name))} {version or ''} for this Python: make it anew with "
                "`uv lock`"
            )
        return fitting[0]

    def _holds(self, marker: str | None) -> bool:
        return marker is None or Marker(marker).evaluate({**self._environment, "extra": ""})


def _local(package: Record) -> str | None:
    source: Mapping[str, Any] = package.get("source", {})
    return next((str(source[kind]) for kind in _LOCAL if kind in source), None)


def _uv_pin(package: Record) -> Pin:
    name, source = canonicalize_name(package["name"], validate=True), package["source"]
    if not source.keys() & {"registry", "url"}:
        kind = next(iter(source))
        raise LockError(
            f"{UV_LOCK}: {name} comes from {kind} {escape_path(str(source[kind]))}: only files of an index or at a URL "
            "are installed"
        )
    files: list[tuple[str, str, frozenset[str]]] = []
    for file in [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]:
        url = str(file.get("url") or source.get("url") or "")
        if not url:
            raise LockError(
                f"{UV_LOCK}: {name} names the path {escape_path(str(file.get('path')))}: only URLs are fetched"
            )
        files.append((basename(url), url, strong([file["hash"]])))
    hashes = frozenset[str]().union(*(hashes for _, _, hashes in files))
    return Pin(name, str(package["version"]), hashes, files, "registry" in source)


def requirement_pins(root: str, names: Sequence[str], target: PythonTarget) -> tuple[Sequence[Pin], Sequence[str]]:
    """What requirements files with hashes install on a Python, and a line for each option that is not honoured.

    Raises:
        LockError: a line has no hash, or no version, or two files want two versions.
    """
    pins: dict[str, Pin] = {}
    notes: list[str] = []
    for file in names:
        for line in _lines((read_project_file(root, file) or b"").decode(errors="replace")):
            text, hashes = line.partition(" --hash=")[0].strip(), re.findall(r"\s--hash=(\S+)", line)
            if text.startswith("-"):
                if (included := re.fullmatch(r"(?:-r|-c|--requirement|--constraint)[ =]?\s*(\S+)", text)) is None:
                    notes.append(f"{file}: {text.split()[0]} is not honoured")
                elif included[1] not in names:
                    raise LockError(f"{file} includes {escape_path(included[1])}, which is no file of hashes beside it")
                continue
            try:
                wanted = Requirement(text)
                if wanted.marker is not None and not wanted.marker.evaluate({**target.environment, "extra": ""}):
                    continue
                pin = _requirement_pin(wanted, strong(hashes))
            except ValueError as error:
                raise LockError(f"{file}: {text[:200]!r}: {error}") from error
            earlier = pins.setdefault(pin.name, pin)
            if earlier.version != pin.version:
                raise LockError(f"{file} wants {pin}, and another file {earlier}")
            pins[pin.name] = replace(pin, hashes=pin.hashes | earlier.hashes)
    return list(pins.values()), notes


def _lines(text: str) -> Iterator[str]:
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if stripped := re.sub(r"(^|\s)#.*$", "", line).strip():
            yield stripped


def _requirement_pin(wanted: Requirement, hashes: frozenset[str]) -> Pin:
    name = canonicalize_name(wanted.name, validate=True)
    if not hashes:
        raise ValueError("it has no hash: make the file with `uv pip compile --generate-hashes`")
    if wanted.url is not None:
        return Pin(name, wanted.url, hashes, [(basename(wanted.url), wanted.url, hashes)], registry=False)
    exact = [one for one in wanted.specifier if one.operator in ("==", "===") and not one.version.endswith("*")]
    if len(exact) != 1:
        raise ValueError("it names no version: `NAME==VERSION`")
    return Pin(name, exact[0].version, hashes)


def artefacts_of(
    pins: Sequence[Pin], target: PythonTarget, registries: Registries, fetcher: Fetcher
) -> Sequence[Artefact]:
    """The best file of each pin for a Python: of its wheels the first whose tag fits, else its source.

    An index that the user configured is asked first, which is how a mirror stands in for the lock's address.

    Raises:
        LockError: there is no such file, or no index has it.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(partial(_artefact, target=target, registries=registries, fetcher=fetcher), pins))


def _artefact(pin: Pin, target: PythonTarget, registries: Registries, fetcher: Fetcher) -> Artefact:
    files = [*pin.files]
    if pin.registry and (registries.python or not files):
        indexes = [registries.python or target.index.rstrip("/"), *registries.python_extra]
        served = [file for index in indexes for file in fetcher.index_files(index, pin.name)]
        known = {name: hashes for name, _, hashes in files}
        files = [(name, url, known.get(name, pin.hashes)) for name, url in served if not known or name in known] + files
    ranks = {name: rank for name, _, _ in files if (rank := _rank(name, pin, target)) is not None}
    if not ranks:
        raise LockError(f"{pin} has neither a wheel for {target} nor a source that is known here")
    best = min(ranks, key=ranks.__getitem__)
    same = [(url, hashes) for name, url, hashes in files if name == best]
    return Artefact(str(pin), same[0][1], [url for url, _ in same], best)


def _rank(filename: str, pin: Pin, target: PythonTarget) -> int | None:
    """How well a file fits, the least being the best. None: it is not of this package, or not for this Python."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", filename):
        return None
    try:
        if filename.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(filename)
            ranks = [target.tags.index(str(tag)) for tag in tags if str(tag) in target.tags]
        else:
            name, version = parse_sdist_filename(filename)
            ranks = [len(target.tags)]
        same = name == pin.name and (not pin.registry or version == Version(pin.version))
    except ValueError:
        return None
    return min(ranks, default=None) if same else None


def own_packages(root: str, directories: Sequence[str]) -> Mapping[str, str]:
    """The files for the packages in ``directories`` ("" is the project): packages below ``site``, programs below
    ``scripts``."""
    files: dict[str, str] = {}
    paths: list[str] = []
    for directory in directories:
        below = f"{directory}/" if directory else ""
        with suppress(AttributeError, TypeError, ValueError):  # its tools say it better
            content = (read_project_file(root, f"{below}pyproject.toml") or b"").decode()
            files.update(_metadata(tomllib.loads(content).get("project", {})))
        source = "src" if Path(root, below, "src").is_dir() else ""
        paths.append(str(PurePosixPath(WORKSPACE, directory, source)))
    files["site/ringfence_workspace.pth"] = "".join(f"{path}\n" for path in paths if "\n" not in path)
    return files


def _metadata(project: Mapping[str, Any]) -> Mapping[str, str]:
    if "name" not in project:
        return {}
    name = canonicalize_name(str(project["name"]), validate=True)
    version = str(Version(str(project.get("version", "0"))))
    info = f"site/{name.replace('-', '_')}-{version}.dist-info"
    scripts = {**project.get("gui-scripts", {}), **project.get("scripts", {})}
    groups: dict[str, Mapping[str, str]] = {"console_scripts": scripts, **project.get("entry-points", {})}
    lines: list[str] = []
    for group in filter(_ENTRY.fullmatch, groups):
        valid = filter(lambda item: _ENTRY.fullmatch(item[0]) and _REFERENCE.fullmatch(item[1]), groups[group].items())
        lines += [f"[{group}]", *map(" = ".join, valid)]
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "ringfence\n",
        f"{info}/entry_points.txt": "".join(f"{line}\n" for line in lines),
    }
    for script, reference in scripts.items():
        match = _REFERENCE.fullmatch(reference)
        if match is not None and match[2] and _ENTRY.fullmatch(script) and script.strip("."):
            first = match[2].partition(".")[0]
            files[f"scripts/{script}"] = _SCRIPT.format(module=match[1], first=first, attribute=match[2])
    return files
