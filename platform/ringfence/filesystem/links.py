"""Following links in the tree of a filesystem in memory."""

from __future__ import annotations

import errno
from typing import TypeAlias

from ringfence.filesystem.nodes import Directory, Link, Node
from ringfence.filesystem.paths import os_error, outside

MAX_LINK_HOPS = 40
"""As in Linux."""

Found: TypeAlias = tuple[str, Node | None, OSError | None]
"""A resolved path, what is there, and why nothing can be made there: a file in the way, or a dangling link."""


def find_along_links(root: Directory, path: str, follow: bool) -> Found:
    pending = path.split("/")[::-1]
    own = len(pending)  # below this, what is pending is the caller's; above it, it came out of a link
    names: list[str] = []
    above = [root]
    hops = 0
    while pending:
        out_of_link = len(pending) > own
        name = pending.pop()
        own = min(own, len(pending))
        if name == "..":
            if not names:
                raise outside(path)
            names.pop()
            above.pop()
            continue
        node = above[-1].entries.get(name)
        if type(node) is Directory:
            names.append(name)
            above.append(node)
        elif type(node) is Link and (pending or follow):
            hops += 1
            if hops > MAX_LINK_HOPS:
                raise os_error(errno.ELOOP, path)
            if node.target.startswith("/"):
                raise outside(path)
            pending.extend(part for part in reversed(node.target.split("/")) if part not in ("", "."))
        elif node is not None and not pending:
            return "/".join([*names, name]), node, None
        else:
            obstacle = None
            if node is not None:
                obstacle = os_error(errno.ENOTDIR, path)
            elif out_of_link:
                obstacle = FileNotFoundError(errno.ENOENT, "is a link that leads nowhere", path)
            return _as_far_as_it_goes(path, names, [name, *reversed(pending)]), None, obstacle
    return "/".join(names), above[-1], None


def _as_far_as_it_goes(path: str, names: list[str], rest: list[str]) -> str:
    for name in rest:
        if name != "..":
            names.append(name)
        elif names:
            names.pop()
        else:
            raise outside(path)
    return "/".join(names)
