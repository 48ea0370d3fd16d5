"""The message for a missing package of an extra, with the command that installs the extra where this program runs."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

NAME = "ringfence"


def missing(module: str, extra: str, prefix: Path | None = None) -> str:
    """Describe a package that is not installed: its extra, and the command that installs what the extra needs.

    ``prefix`` is the environment, by default that of this program.
    """
    package = module.partition(".")[0]
    message = f"the package {package} is not installed, which {NAME}'s extra {extra!r} needs"
    try:
        source = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # the sources alone, with nothing that says what they need
        return f"{message}; pyproject.toml says what else that needs"
    return f"{message}: {install_command(prefix or Path(sys.prefix), source, extra=extra)}"


def install_command(
    prefix: Path, source: str | None = None, *, extra: str | None = None, packages: Sequence[str] = ()
) -> str:
    """Return the command that adds an extra, or packages, to an installation in the environment ``prefix``.

    ``source`` is its direct_url.json: where it was installed from, if not by its name.
    """
    if (prefix / "uv-receipt.toml").is_file():  # a new installation takes the place of the one that is there
        extras = sorted({*_extras_of(prefix / "uv-receipt.toml"), *filter(None, [extra])})
        more = [word for package in packages for word in ("--with", package)]
        return shlex.join(["uv", "tool", "install", *_requirement(extras, source), *more])
    requirement = _requirement([extra], source) if extra else []
    if (prefix / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "inject", prefix.name, *requirement[-1:], *packages])
    return shlex.join(["pip", "install", *requirement, *packages])


def _extras_of(receipt: Path) -> Sequence[str]:
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # of another form
        requirements = tomllib.loads(receipt.read_text())["tool"]["requirements"]
        return [extra for one in requirements if one["name"] == NAME for extra in one.get("extras", ())]
    return []


def _requirement(extras: Sequence[str], source: str | None) -> list[str]:
    """Return the requirement, after the option that it needs."""
    brackets = f"[{','.join(extras)}]" if extras else ""
    named = f"{NAME}{brackets}"
    if source is None:
        return [named]
    origin = cast("dict[str, Any]", json.loads(source))
    url = str(origin["url"])
    if (vcs := origin.get("vcs_info")) is not None:
        return [f"{named} @ {vcs['vcs']}+{url}@{vcs.get('requested_revision') or vcs['commit_id']}"]
    if "dir_info" not in origin:
        return [f"{named} @ {url}"]
    path = f"{unquote(urlsplit(url).path)}{brackets}"
    return ["-e", path] if origin["dir_info"].get("editable") else [path]
