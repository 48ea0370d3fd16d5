"""Extended attributes, which are neither among the bytes of a file nor in its status."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from typing import TypeAlias

from ringfence_workspace.tree.kernel import failpoint

_OF_THE_SYSTEM = frozenset({"security.selinux", "system.nfs4_acl"})
"""Those that everything may have, of which a new file gets its own."""

Attributes: TypeAlias = dict[str, bytes]
"""Extended attributes."""


def attributes_of(target: int | str, *, but: Set[str] = _OF_THE_SYSTEM) -> Attributes:
    """The extended attributes of an open file or directory, or of what is at a path, ``but`` these; none where its
    filesystem has none."""
    follow = isinstance(target, int)  # a link is one itself
    try:
        names = set(os.listxattr(target, follow_symlinks=follow)) - but
        return {name: os.getxattr(target, name, follow_symlinks=follow) for name in names}
    except OSError:
        return {}


def give_attributes(target: int | str, wanted: Mapping[str, bytes], *, but: Set[str] = _OF_THE_SYSTEM) -> bool:
    """Give something these extended attributes and no others; whether it had not just these. OSError: some are only
    root's to give."""
    has, follow = attributes_of(target, but=but), isinstance(target, int)
    if has == wanted:
        return False
    failpoint("setxattr")
    for name in has.keys() - wanted.keys():  # of the directory's default ACL, say
        os.removexattr(target, name, follow_symlinks=follow)
    for name, value in sorted(wanted.items(), reverse=True):  # an ACL of the system may take rights away
        os.setxattr(target, name, value, follow_symlinks=follow)
    return True
