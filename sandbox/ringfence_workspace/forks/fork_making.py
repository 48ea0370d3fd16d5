"""Making a fork: whatever moment a kill comes at, the source stays as it is, and the fork is whole or
named as unfinished."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ringfence.filesystem.hidden import HEAD_BYTES, HiddenFiles
from ringfence_workspace.forks.fork_git import checked_out
from ringfence_workspace.forks.fork_records import (
    BASE,
    FORKS,
    Fork,
    borrowing_forks,
    check_fork_name,
    fork_places,
    forks_of,
    save_fork,
    save_own_fork,
)
from ringfence_workspace.forks.fork_removal import remove_fork
from ringfence_workspace.forks.shared_directories import SHARED, directories_to_share, is_in
from ringfence_workspace.forks.tree_copy import CopiedTree, EarlierState, TreeCopy
from ringfence_workspace.forks.what_points_back import git_file_target, points_back
from ringfence_workspace.history.commits import CommitInfo, CommitRecord, PreparedStep
from ringfence_workspace.history.entries import NOTHING, Entry, Meta, Unknown, blob_id, link_number
from ringfence_workspace.history.hidden_rule import remember_rule, remembered_rule
from ringfence_workspace.history.objects import create_repository, read_alternates, write_alternates
from ringfence_workspace.history.stat_cache import FINE_TICK_NS, Stamp, StatCache, stamp_of
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.history.store import FOLDER, Store
from ringfence_workspace.history.store_roots import note_format
from ringfence_workspace.transaction.step_history import STAT_CACHE, StepHistory
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import birth_ns, failpoint, filesystem_type, free_bytes, sync_filesystem
from ringfence_workspace.tree.places import made_outside

_SHARES_BLOCKS = frozenset({0x9123683E, 0x58465342, 0xCA451A4E})
"""Btrfs, XFS and bcachefs: a copy there takes no room for bytes."""
_BLOCK_BYTES = 4096
_MOST_BYTES = 16 << 20
"""Of a file that somebody changed while it was copied. A larger one is a change of the fork."""


@dataclass(frozen=True, slots=True)
class ForkSource:
    """An opened workspace, of which a fork is made: its lock is held, and its history has the tree as it is."""

    root: str
    store: str
    history: StepHistory

    @property
    def files(self) -> Confined:
        return self.history.files

    @property
    def power(self) -> bool:
        return self.commits.objects.log.power

    @property
    def commits(self) -> Store:
        return self.history.store

    @property
    def tip(self) -> str:
        tip = self.history.store.tip
        assert tip is not None, "an opened workspace has a baseline"
        return tip


def make_fork(
    source: ForkSource,
    name: str,
    record: CommitRecord,
    step: int,
    into: str | None,
    share: Collection[str],
    *,
    secrets: bool,
) -> Fork:
    """Make a fork that begins with a commit of the source.

    Raises:
        ValueError: the name is none, the place is inside of the source, the source's `.git` is a file, or a directory
            cannot be shared.
        FileExistsError: there is a fork of this name, or something is at its place.
        OSError: it cannot be written, or there is no room. Nothing of it is left.
    """
    check_fork_name(name)
    for earlier in forks_of(source.store):
        if earlier.name == name and earlier.state in ("ready", "forgotten"):
            raise FileExistsError(
                errno.EEXIST, f"there is a fork {name!r}: discard it, or choose another name", earlier.root
            )
        if earlier.name == name and name in borrowing_forks(source.store):
            raise FileExistsError(
                errno.EEXIST, f"there is a fork {name!r}, whose directory is away, or which has forks", earlier.root
            )
        if earlier.name == name:
            remove_fork(earlier)
    _check_git(source.root)
    root, store = fork_places(source.root, source.store, name, into)
    if f"{root}/".startswith(f"{source.root}/"):
        raise ValueError(f"a fork cannot be inside of its source: {root} is in {source.root}")
    shared = directories_to_share(share, source.root, source.store, source.history)
    branch, commit = checked_out(source.root)
    fork = Fork(
        name,
        root,
        store,
        source.root,
        source.store,
        record.commit,
        step,
        datetime.now(UTC),
        shared=shared,
        git_branch=branch,
        git_commit=commit,
    )
    for place in (root, fork.unfinished_root):
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, "a fork needs a place of its own, and something is there", place)
    check_room(source, 1, into, shared)
    save_fork(fork)
    try:
        # Behind the record, so that what is kept is kept for somebody; before the fork, which borrows it.
        source.commits.keep(f"{FORKS}/{name}", record.commit)
        source.commits.seal()
        return _fill(source, fork, secrets=secrets)
    except BaseException:
        with suppress(OSError):
            remove_fork(fork)
            source.commits.unkeep(f"{FORKS}/{name}")
        raise


def check_room(source: ForkSource, copies: int, into: str | None, shared: Collection[str]) -> None:
    """Raise OSError (ENOSPC) where there is no room for so many forks of a source, each with all of its bytes but for
    those of shared directories."""
    place = fork_places(source.root, source.store, "a", into)[0]
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_shared = os.fstat(descriptor).st_dev == os.fstat(source.files.root).st_dev
        if is_shared and filesystem_type(descriptor) in _SHARES_BLOCKS:
            return
    finally:
        os.close(descriptor)
    needed, free = copies * _tree_bytes(source, shared), free_bytes(place)
    if needed > free:
        which = "a fork" if copies == 1 else f"{copies} forks"
        bytes_of = f"{needed:,} bytes, and {free:,} are free"
        words = f"{which} of {source.root} would need {bytes_of}: make room, or fork into another place"
        raise OSError(errno.ENOSPC, words, place)


def _tree_bytes(source: ForkSource, shared: Collection[str]) -> int:
    """About how many bytes the files take, without a look at those that are known."""
    known = source.history.known(source.tip)
    copied = (names for folder, names in known.items() if not is_in(folder, shared))
    sizes = (stamp[1] for names in copied for name, stamp in names.items() if name)
    total = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)
    for path in source.history.left_out:
        if is_in(path, shared):
            continue
        place = os.path.join(source.root, path)
        with suppress(OSError):
            total += os.lstat(place).st_blocks * 512
        for directory, _, names in os.walk(place):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _check_git(root: str) -> None:
    target = git_file_target(root)
    if target is not None:
        raise ValueError(
            f"{root} cannot be forked: its .git leads to {target}, so that git in the fork would change branches and "
            "index of the source. Fork the repository that it belongs to, or a clone of it"
        )


def _fill(source: ForkSource, fork: Fork, *, secrets: bool) -> Fork:
    os.makedirs(os.path.dirname(fork.root), mode=0o700, exist_ok=True)
    made_outside(fork.root, fork.store)
    failpoint("fork directory")
    os.mkdir(fork.unfinished_root, 0o700)
    target = os.open(fork.unfinished_root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        copied = _copied(source, fork, target, secrets=secrets)
        _take_external_changes(source, fork, copied, target)
        base = _begin_history(source, fork, copied)
        found = points_back(fork.unfinished_root, copied.files, source.root)
        done = replace(
            fork,
            state="ready",
            inode=os.fstat(target).st_ino,
            born_ns=birth_ns(target),
            copied_ns=time.time_ns(),
            base=base,
            points_back=tuple(found),
            rewritten=tuple(sorted(copied.rewritten)),
            left_out={path: why for path, why in sorted(copied.left_out.items()) if why != SHARED},
        )
        save_own_fork(done)
        if source.power:
            sync_filesystem(target)
        # What changes from here on has another time of change than what the stat cache has.
        time.sleep(2 * FINE_TICK_NS / 1e9)
    finally:
        os.close(target)
    failpoint("fork rename")
    os.rename(fork.unfinished_root, fork.root)
    failpoint("fork record")
    save_fork(done)
    return done


def _copied(source: ForkSource, fork: Fork, target: int, *, secrets: bool) -> CopiedTree:
    history, states = source.history, source.commits.states
    hidden = history.hidden
    mounted = {path for path, (reason, _) in history.left_out.items() if reason == "mounted"}

    def is_left_out(directory: int, name: str, path: str, status: os.stat_result) -> str | None:
        if source.files.is_reserved(path):
            return "reserved"
        if path in fork.shared:
            return SHARED
        if path in mounted:
            return "mounted"
        if not secrets and hidden is not None and hidden.sees(directory, name, path, status):
            return "hidden"
        return None

    copy = TreeCopy(
        source.files.root,
        target,
        known=history.known(source.tip),
        entry=lambda path: states.entry(fork.commit, path),
        is_left_out=is_left_out,
        moved=(source.root, fork.root),
        earlier=EarlierState(_differences(source, fork), states.content),
    )
    made = copy.copy()
    made.left_out = {path: why for path, why in made.left_out.items() if why != "reserved"}
    for path in fork.shared:
        if path not in made.left_out:
            raise ValueError(f"{path!r} cannot be shared: what it is in was no directory at step {fork.step}")
        made.changes.update((f"{path}/{name}", None) for name in states.names(fork.commit, path))
    return made


def _differences(source: ForkSource, fork: Fork) -> Mapping[str, Entry | None]:
    """What of the tree is not now as the commit has it that the fork begins with. What that does not know stays."""
    if fork.commit == source.tip:
        return {}
    states = source.commits.states
    unknown = states.unknown(fork.commit)
    return {
        path: after
        for path, _, after in states.differences(source.tip, fork.commit)
        if unknown.why(path, there=after is not None) is None and not is_in(path, fork.shared)
    }


def _take_external_changes(source: ForkSource, fork: Fork, copied: CopiedTree, target: int) -> None:
    """Have the fork begin with what was copied, where somebody changed the source between the look and the copy: else
    that would be a change of the fork."""
    unknown = source.commits.states.unknown(fork.commit)
    for path in copied.unsure:
        if unknown.why(path, there=True) is None:
            _take_file(source, copied, path, target)
    for folder in copied.unsure_directories:
        _take_directory(source, fork, copied, folder, target)


def _take_file(source: ForkSource, copied: CopiedTree, path: str, target: int) -> None:
    """Have the fork begin with the file or link at a path as it was copied, unless it is hidden or large."""
    hidden, found = source.history.hidden, os.lstat(path, dir_fd=target)
    if found.st_size > _MOST_BYTES:
        return
    is_link = stat.S_ISLNK(found.st_mode)
    content = os.fsencode(os.readlink(path, dir_fd=target)) if is_link else _content(path, target)
    if hidden is not None and (hidden.hides(path) or hidden.rule.hides(path, lambda: content[:HEAD_BYTES])):
        return
    copied.contents.append(content)
    meta = Meta.of(found, link_number(found, os.fstat(target).st_dev))
    copied.changes[path] = Entry("symlink" if is_link else "file", meta, blob_id(content))
    above, _, name = path.rpartition("/")
    copied.stamps[above][name] = stamp_of(found)


def _take_directory(source: ForkSource, fork: Fork, copied: CopiedTree, folder: str, target: int) -> None:
    """Have the fork begin with a directory as it was copied: it may be new, and something in it may be gone."""
    states = source.commits.states
    if states.entry(fork.commit, folder) is None and states.unknown(fork.commit).why(folder, there=True) is None:
        copied.changes[folder] = Entry("directory", Meta.of(os.lstat(folder, dir_fd=target)))
    for name in states.names(fork.commit, folder):
        path = f"{folder}/{name}" if folder else name
        if path not in copied.left_out and path not in copied.changes and not _is_there(path, target):
            copied.changes.update(dict.fromkeys(_all_below(states, fork.commit, path)))


def _all_below(states: CommitStates, commit: str, path: str) -> Iterator[str]:
    """A path of a commit, and what is below it."""
    yield path
    for name in states.names(commit, path):
        yield from _all_below(states, commit, f"{path}/{name}")


def _content(path: str, directory: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
        return file.read()


def _is_there(path: str, directory: int) -> bool:
    try:
        os.lstat(path, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _begin_history(source: ForkSource, fork: Fork, copied: CopiedTree) -> str:
    """Make the store of a fork, which borrows the source's objects, and its stat cache. The first commit."""
    note_format(fork.store)
    rule = remembered_rule(source.store)
    remember_rule(fork.store, rule or HiddenFiles(usual=False))
    folder, borrowed = Path(fork.store, FOLDER), source.commits.folder
    create_repository(folder)
    write_alternates(folder, [borrowed / "objects", *read_alternates(borrowed)])
    with Store.open(folder, power=source.power) as store:
        for content in copied.contents:
            store.add_blob(content)
        states = store.states
        unknown = states.unknown(fork.commit)
        start = PreparedStep(fork.commit, None, None, 0, states.root(fork.commit), (), unknown)
        there = {
            path: why
            for path, why in unknown.reasons.items()
            if path not in copied.left_out and not is_in(path, fork.shared)
        }
        info = CommitInfo("baseline", fork.created_at)
        prepared = store.prepare(copied.changes, info, after=start, unknown=Unknown(there) if there else NOTHING)
        store.begin_with(prepared)
        store.keep(BASE, prepared.commit)
    _stat_cache(prepared.commit, copied).save(folder / STAT_CACHE)
    return prepared.commit


def _stat_cache(commit: str, copied: CopiedTree) -> StatCache:
    """The stamps of the copy, but those by a clock of whole seconds: another change could have the same."""
    folders = {
        path: {name: stamp for name, stamp in names.items() if _is_fine(stamp)} for path, names in copied.stamps.items()
    }
    return StatCache(commit, folders, copied.attributes)


def _is_fine(stamp: Stamp) -> bool:
    return stamp[3] % 10_000_000 != 0
