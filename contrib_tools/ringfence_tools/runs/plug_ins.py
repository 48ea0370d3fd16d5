"""Plug-ins: what an installed package registers as an entry point of ringfence."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from pathlib import Path


def plug_ins(group: str, directory: Path | None = None) -> Mapping[str, str]:
    """Return the plug-ins of a group: MODULE:NAME by name. Nothing is imported.

    One that is registered inside of ``directory`` does not count: the agent could change it.
    """
    found = dict[str, str]()
    for entry in entry_points(group=group):
        place = os.path.realpath(str(entry.dist.locate_file(""))) if entry.dist is not None else ""
        if directory is None or not Path(place).is_relative_to(os.path.realpath(directory)):
            found.setdefault(entry.name, entry.value)
    return found


def describe_plug_ins(names: Collection[str]) -> str:
    """Say which plug-ins a name could be."""
    return f"a plug-in ({', '.join(sorted(names))})" if names else "a plug-in, of which none is installed"
