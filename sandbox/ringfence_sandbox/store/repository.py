"""The files of a store's git repository besides its objects: made once, and refs and boundaries rewritten whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path

from dulwich.objects import ObjectID
from dulwich.refs import Ref, read_packed_refs, write_packed_refs

from ringfence_sandbox.disk.state_files import replacing, sync_directory

# What a workspace's own files of these names may be and contain is no fault of the store. (Only what git 2.39 knows:
# git ends at a name that it does not know.)
_TOLERATED = (
    *(
        f"gitmodules{what}"
        for what in ("Blob", "Large", "Missing", "Name", "Parse", "Path", "Symlink", "Update", "Url")
    ),
    *(f"gitattributes{what}" for what in ("Blob", "Large", "LineLength", "Missing", "Symlink")),
    "gitignoreSymlink",
    "mailmapSymlink",
)
_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
\tlogAllRefUpdates = false
[gc]
\tauto = 0
[fsck]
""" + "".join(f"\t{problem} = ignore\n" for problem in _TOLERATED)
# The lines of `meta` are for programs: without this they would be most of what `git log -p` shows.
_ATTRIBUTES = "meta/** -diff\n"


def create_repository(folder: Path) -> None:
    for name in ("objects/pack", "objects/info", "refs/heads", "refs/tags", "info"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    # HEAD last: with it, this is a store.
    files = {"config": _CONFIG, "info/attributes": _ATTRIBUTES, "HEAD": "ref: refs/heads/main\n"}
    for name, text in files.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    sync_directory(folder)


def read_refs(folder: Path) -> dict[bytes, str]:
    """Commits by the names of their refs."""
    try:
        with open(folder / "packed-refs", "rb") as file:
            return {bytes(name): oid.decode() for oid, name in read_packed_refs(file)}
    except FileNotFoundError:
        return {}


def write_refs(folder: Path, refs: Mapping[bytes, str]) -> None:
    with replacing(folder / "packed-refs") as file:
        write_packed_refs(file, {Ref(name): ObjectID(oid.encode()) for name, oid in refs.items()})
    sync_directory(folder)


def read_shallow(folder: Path) -> set[str]:
    """The commits whose parents were dropped."""
    try:
        return set((folder / "shallow").read_text().split())
    except FileNotFoundError:
        return set()


def write_shallow(folder: Path, commits: Set[str]) -> None:
    with replacing(folder / "shallow") as file:
        file.write("".join(f"{commit}\n" for commit in sorted(commits)).encode())
    sync_directory(folder)
