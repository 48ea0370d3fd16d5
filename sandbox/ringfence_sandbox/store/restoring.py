"""The order in which a tree becomes what a commit has: a plan of what to write, for whoever writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringfence_sandbox.store.entries import Entry, is_directory


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """To be done in the order of the fields.

    ``removals``: paths to remove, what is in a directory before it, so that each directory is empty by then.
    ``directories``: to make, or to make writable for the moment, from the top. ``files``: with their bytes by object
    id, modes, owners and times. ``links``: the groups of paths that are one file, with those that are there already.
    ``finish``: the modes, owners and times of all directories touched, from the bottom.
    """

    removals: tuple[str, ...]
    directories: tuple[str, ...]
    files: tuple[tuple[str, Entry], ...]
    links: tuple[tuple[str, ...], ...]
    finish: tuple[tuple[str, Entry], ...]


def plan_restore(
    differences: Iterable[tuple[str, Entry | None, Entry | None]],
    directories: Mapping[str, Entry],
    linked: Mapping[int, Sequence[str]],
) -> RestorePlan:
    """From the state now to the wanted one; ``differences`` has both for each path.

    ``directories`` are the wanted states of the directories above the differences: their times change with what is
    done in them. ``linked`` has all wanted paths of the hard-link groups that occur in them.
    """
    found = sorted(differences)
    removals = [path for path, now, wanted in found if now is not None and (wanted is None or now.kind != wanted.kind)]
    wanted = [(path, entry) for path, _, entry in found if entry is not None]
    made = [path for path, now, entry in found if is_directory(entry) and not is_directory(now)]
    numbers = {entry.meta.link for _, entry in wanted if not is_directory(entry)}
    groups = (tuple(paths) for number, paths in linked.items() if number in numbers and len(paths) > 1)
    finish = dict(directories) | {path: entry for path, entry in wanted if is_directory(entry)}
    return RestorePlan(
        tuple(reversed(removals)),
        tuple(made),
        tuple((path, entry) for path, entry in wanted if not is_directory(entry)),
        tuple(groups),
        tuple(sorted(finish.items(), reverse=True)),
    )
