"""What of git a fork and its source have to do with each other: new objects, and where a branch stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dulwich.errors import NotGitRepository
from dulwich.graph import can_fast_forward
from dulwich.objects import S_ISGITLINK, Commit, ObjectID, ShaFile, Tree
from dulwich.refs import Ref, check_ref_format
from dulwich.repo import Repo

from ringfence.errors import format_error
from ringfence_workspace.forks.fork_records import Fork
from ringfence_workspace.history.packs import pack_entry, write_pack
from ringfence_workspace.tree.linked_worktrees import GIT

_HEAD = Ref(b"HEAD")
CANDIDATES = "refs/ringfence/candidates/"
PACK_SUFFIXES = (".pack", ".idx")


def checked_out(root: str) -> tuple[str, str]:
    """The branch that is checked out in a repository, as a full ref, and the commit. Empty for what there is not."""
    try:
        with Repo(root) as repo:
            chain, commit = repo.refs.follow(_HEAD)
    except (NotGitRepository, OSError, ValueError, KeyError, NotImplementedError):
        return "", ""
    branch = chain[-1].decode("utf-8", "surrogateescape") if len(chain) > 1 else ""
    return branch, "" if commit is None else commit.decode()


@dataclass(frozen=True, slots=True)
class GitChanges:
    """The commits that a fork made, as files below the source's `.git`."""

    ref: str
    """The ref that is to have them."""
    commit: str
    files: Mapping[str, bytes]
    branch: str
    """The branch that is checked out in the fork. Empty: none is."""


def git_changes(fork: Fork, *, with_git: bool) -> GitChanges | None:
    """What git in a fork has and its source has not: a pack of new objects, and the ref that names them. None: nothing.

    With ``with_git`` that is the branch of the fork, if it stands in the source where it stood at the fork; else
    `refs/ringfence/candidates/NAME`. Each object is checked by its id. Nothing of the fork's configuration is used.

    Raises ValueError where git's data cannot be read, in words."""
    own, source = Path(fork.root, GIT), Path(fork.source, GIT)
    if not (_is_directory(own) and _is_directory(source)):
        return None
    branch, commit = checked_out(fork.root)
    if not commit or commit == fork.git_commit:
        return None
    try:
        with Repo(fork.root) as there, Repo(fork.source) as here:
            moves = with_git and branch and _stands(there, here, branch, fork)
            ref = branch if moves else f"{CANDIDATES}{fork.name}"
            missing = _missing(there, here, ObjectID(commit.encode()))
            files = {f"{GIT}/{ref}": commit.encode() + b"\n"}
            if missing:
                files = _packed(there, missing) | files
    except (OSError, ValueError, KeyError, AssertionError, NotImplementedError, NotGitRepository) as error:
        raise ValueError(f"the commits of the fork cannot be read ({format_error(error)})") from error
    return GitChanges(ref, commit, files, branch)


def _stands(there: Repo, here: Repo, branch: str, fork: Fork) -> bool:
    """Whether a branch of the source is where it was at the fork (nowhere, if it is new in the fork), or between there
    and the fork, as after an earlier promotion. The name comes from the fork, and becomes a path."""
    ref = Ref(branch.encode("utf-8", "surrogateescape"))
    if not branch.startswith("refs/heads/") or not check_ref_format(ref):
        return False
    began = ObjectID(fork.git_commit.encode()) if branch == fork.git_branch else None
    try:
        now = here.refs[ref]
    except KeyError:
        return not began
    if now == began:
        return True
    if now not in there.object_store:
        return False
    return can_fast_forward(there, now, there.refs[ref]) and (not began or can_fast_forward(there, began, now))


def _missing(there: Repo, here: Repo, commit: ObjectID) -> Set[ObjectID]:
    """The objects that a commit needs and a repository has not. What it has, it has whole."""
    missing: set[ObjectID] = set()
    left, shallow = [commit], there.get_shallow()
    while left:
        oid = left.pop()
        if oid in missing or oid in here.object_store:
            continue
        missing.add(oid)
        found = there.object_store[oid]
        if isinstance(found, Commit):
            left += [found.tree, *(() if oid in shallow else found.parents)]
        elif isinstance(found, Tree):
            left += [entry.sha for entry in found.iteritems() if not S_ISGITLINK(entry.mode)]
    return missing


def _packed(there: Repo, missing: Iterable[ObjectID]) -> dict[str, bytes]:
    objects = [there.object_store.get_raw(sha) for sha in missing]
    named = {object_id_of(number, raw): pack_entry(number, raw) for number, raw in objects}
    if {oid.hex().encode() for oid in named} != {*missing}:
        raise ValueError("an object is not what its id says")

    def entries(take: Callable[[bytes, bytes], None]) -> None:
        for oid, entry in named.items():
            take(oid, entry)

    with TemporaryDirectory() as place:
        pack = write_pack(Path(place), len(named), entries)
        return {
            f"{GIT}/objects/pack/{pack.name}{suffix}": pack.with_suffix(suffix).read_bytes() for suffix in PACK_SUFFIXES
        }


def object_id_of(type_number: int, raw: bytes) -> bytes:
    """The id of an object of git, of any type."""
    return ShaFile.from_raw_string(type_number, raw).sha().digest()


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
