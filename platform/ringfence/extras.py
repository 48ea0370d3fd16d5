"""The message for a missing package of an extra. It names packages, which any environment can install."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires


def missing(module: str, extra: str) -> str:
    """Describe a package that is not installed: its extra, and the command that installs what the extra needs."""
    package = module.partition(".")[0]
    message = f"the package {package} is not installed, which ringfence's extra {extra!r} needs"
    try:
        needed = [need.partition(";") for need in requires("ringfence") or ()]
    except PackageNotFoundError:  # the sources alone, with nothing that says what they need
        return f"{message}; pyproject.toml says what else that needs"
    names = [name.strip() for name, _, marker in needed if f"extra == '{extra}'" in marker.replace('"', "'")]
    return f"{message}: pip install {shlex.join(names)}"
