"""Changes of git's index that are none: what git knows of files again, and has cached."""

from __future__ import annotations

import io

from ringfence.filesystem.paths import is_dotgit

_CHECKSUM_BYTES = 20


def is_index(path: str) -> bool:
    """Whether a path is the index of a repository, a worktree or a submodule."""
    *above, name = path.encode("utf-8", "surrogateescape").split(b"/")
    return name == b"index" and any(map(is_dotgit, above))


def has_same_entries(one: bytes, other: bytes) -> bool:
    """Whether two indexes have the same entries, but for the stat data of the files.

    Those that cannot be read differ. So do those whose entries are in part in another file.
    """
    found = _entries(one)
    return found is not None and found == _entries(other)


def _entries(content: bytes) -> object:
    from dulwich.index import IndexEntry, read_index_dict_with_version

    file = io.BytesIO(content)
    try:
        entries, _, _ = read_index_dict_with_version(file)
    except Exception:  # of a format that dulwich does not read
        return None
    if file.tell() != len(content) - _CHECKSUM_BYTES:  # an extension that is more than a cache
        return None
    found: dict[bytes, object] = {}
    for path, entry in entries.items():
        stages = [entry] if isinstance(entry, IndexEntry) else [entry.ancestor, entry.this, entry.other]
        found[path] = [one and (one.mode, one.sha, one.flags, one.extended_flags) for one in stages]
    return found
