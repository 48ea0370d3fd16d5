"""Making a fork, and removing it: whatever moment a kill comes at, the source stays as it is, and the fork is whole or
named as unfinished."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ringfence.errors import WorkspaceLockedError
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
    own_fork,
    record_file,
    save_fork,
    save_own_fork,
)
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
from ringfence_workspace.locking import describe_holder
from ringfence_workspace.transaction.step_history import STAT_CACHE, StepHistory
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import birth_ns, failpoint, filesystem_type, free_bytes, sync_filesystem
from ringfence_workspace.tree.places import made_outside
from ringfence_workspace.tree.removal import remove_tree

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
    source: ForkSource, name: str, record: CommitRecord, step: int, into: str | None, *, secrets: bool
) -> Fork:
    """Make a fork that begins with a commit of the source.

    Raises:
        ValueError: the name is none, the place is inside of the source, or the source's `.git` is a file.
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
        git_branch=branch,
        git_commit=commit,
    )
    for place in (root, fork.unfinished_root):
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, "a fork needs a place of its own, and something is there", place)
    check_room(source, 1, into)
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


def check_room(source: ForkSource, copies: int, into: str | None) -> None:
    """Raise OSError (ENOSPC) where there is no room for so many forks of a source, each with all of its bytes."""
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
    needed, free = copies * _tree_bytes(source), free_bytes(place)
    if needed > free:
        which = "a fork" if copies == 1 else f"{copies} forks"
        bytes_of = f"{needed:,} bytes, and {free:,} are free"
        words = f"{which} of {source.root} would need {bytes_of}: make room, or fork into another place"
        raise OSError(errno.ENOSPC, words, place)


def _tree_bytes(source: ForkSource) -> int:
    """About how many bytes the files take, without a look at those that are known."""
    known = source.history.known(source.tip)
    sizes = (stamp[1] for names in known.values() for name, stamp in names.items() if name)
    total = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)
    for path in source.history.left_out:
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
            left_out=dict(sorted(copied.left_out.items())),
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
        if unknown.why(path, there=after is not None) is None
    }


def _take_external_changes(source: ForkSource, fork: Fork, copied: CopiedTree, target: int) -> None:
    """Have the fork begin with what was copied, where somebody changed the source between the look and the copy: else
    that would be a change of the fork."""
    states, hidden, device = source.commits.states, source.history.hidden, os.fstat(target).st_dev
    unknown = states.unknown(fork.commit)
    for path in copied.unsure:
        found = os.lstat(path, dir_fd=target)
        if unknown.why(path, there=True) is not None or found.st_size > _MOST_BYTES:
            continue
        is_link = stat.S_ISLNK(found.st_mode)
        content = os.fsencode(os.readlink(path, dir_fd=target)) if is_link else _content(path, target)
        head = content[:HEAD_BYTES]
        if hidden is not None and (hidden.hides(path) or hidden.rule.hides(path, lambda head=head: head)):
            continue
        copied.contents.append(content)
        meta = Meta.of(found, link_number(found, device))
        copied.changes[path] = Entry("symlink" if is_link else "file", meta, blob_id(content))
        above, _, name = path.rpartition("/")
        copied.stamps[above][name] = stamp_of(found)
    for folder in copied.unsure_directories:
        if states.entry(fork.commit, folder) is None and unknown.why(folder, there=True) is None:
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
        there = {path: why for path, why in unknown.reasons.items() if path not in copied.left_out}
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


# Removing it.


def discard_fork(fork: Fork) -> None:
    """Delete a fork: its files and its history. Its source may be gone. It can be repeated where it was interrupted.

    Raises:
        WorkspaceLockedError: a process has it open.
        ValueError: there are forks of it.
        OSError: something of it cannot be removed.
    """
    living = borrowing_forks(fork.store)
    if living:
        raise ValueError(
            f"the fork {fork.name!r} has forks of its own, which borrow from it: first discard these of {fork.root}: "
            f"{', '.join(living)}"
        )
    with ExitStack() as locks:
        for place in (fork.root, os.path.join(fork.store, "holder")):
            _lock(fork, place, locks)
        remove_fork(fork)


def _lock(fork: Fork, place: str, locks: ExitStack) -> None:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WorkspaceLockedError(fork.root, describe_holder(fork.store)) from None


def remove_fork(fork: Fork) -> None:
    """Remove what there is of a fork. OSError: something of it stays, and its record says so."""
    fork = fork if fork.inode else own_fork(fork.store) or fork
    if record_file(fork.source_store, fork.name).exists():
        save_fork(replace(fork, state="unfinished"))
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(fork.store, "fork.json"))
    failpoint("discard files")
    remove_tree(fork.unfinished_root)
    if fork.is_there:
        remove_tree(fork.root)
    failpoint("discard history")
    remove_tree(fork.store)
    failpoint("discard record")
    record_file(fork.source_store, fork.name).unlink(missing_ok=True)


def drop_gone(store: Store, place: str) -> Sequence[str]:
    """Forget the forks whose directory is gone, and what was kept for them. What other forks borrow stays."""
    dropped: list[str] = []
    borrowing = borrowing_forks(place)
    for fork in forks_of(place):
        if fork.state == "gone" and fork.name not in borrowing:
            with suppress(OSError):
                remove_fork(fork)
                dropped.append(fork.name)
    names = {fork.name for fork in forks_of(place)}
    for name in store.kept():
        above, _, last = name.partition("/")
        if above == FORKS and last not in names:
            store.unkeep(name)
    return dropped
