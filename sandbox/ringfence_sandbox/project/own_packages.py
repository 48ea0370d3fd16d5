"""The project's own Python packages in its image: a path into the workspace, and the metadata of pyproject.toml.

No build backend runs for them, so that what an agent edits is what is imported.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_sandbox.project.project_files import read_project_file

_REFERENCE = re.compile(r"([\w.]+)(?::([\w.]+))?(?:\s*\[[\w, ]*\])?")
_ENTRY = re.compile(r"[\w.-]+")
_SCRIPT = "#!/usr/bin/env python3\nimport sys\nfrom {module} import {first}\n\nsys.exit({attribute}())\n"


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
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "ringfence\n",
    }
    for group, entries in groups.items():
        lines.append(f"[{group}]")
        lines += [
            f"{entry} = {reference}"
            for entry, reference in entries.items()
            if _ENTRY.fullmatch(entry) and _REFERENCE.fullmatch(reference)
        ]
    files[f"{info}/entry_points.txt"] = "".join(f"{line}\n" for line in lines if "\n" not in line)
    for script, reference in scripts.items():
        match = _REFERENCE.fullmatch(reference)
        if match is not None and match[2] and _ENTRY.fullmatch(script) and script.strip("."):
            first = match[2].partition(".")[0]
            files[f"scripts/{script}"] = _SCRIPT.format(module=match[1], first=first, attribute=match[2])
    return files
