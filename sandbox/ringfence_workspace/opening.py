"""Opening a workspace on disk: its root, its store, its lock, and what a killed opener left behind."""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from ringfence.filesystem.paths import check_names_are_utf8
from ringfence.participants import CallLock
from ringfence_workspace.history.hidden_rule import note_new_store, remember_rule, remembered_rule
from ringfence_workspace.history.scan import DEFAULT_LIMITS, Progress, ScanLimits, no_progress
from ringfence_workspace.history.store import FOLDER, Store
from ringfence_workspace.history.store_roots import check_format, note_format, record_root, replaced
from ringfence_workspace.locking import RootLock, check_locks, lock_root
from ringfence_workspace.outputs import KeptOutputs
from ringfence_workspace.transaction.detection import Detect, DetectionLimits, Detector
from ringfence_workspace.transaction.heartbeat import STAMP, LivenessFile
from ringfence_workspace.transaction.hidden_copies import HiddenCopies
from ringfence_workspace.transaction.opaque_calls import OpaqueCalls
from ringfence_workspace.transaction.recovery import Recovered, Recovery
from ringfence_workspace.transaction.scans import Scans
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.transaction.transactions import Transactions
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.hidden_tree import HiddenTree
from ringfence_workspace.tree.kernel import IS_LINUX, OVERLAY, Abilities, Renames, abilities
from ringfence_workspace.tree.places import made_outside, store_of

if TYPE_CHECKING:
    from ringfence.filesystem.hidden import HiddenFiles


"""In a store, where what conflicts keep from their paths goes."""


def _check_system(root: str) -> None:
    if not IS_LINUX:
        raise OSError(
            errno.ENOTSUP,
            "files on disk are changed under Linux alone: work on a copy in memory, or in a virtual machine with Linux",
            root,
        )


class Opened:
    """One opened workspace, which all handles of it have in common. A read-only one has neither lock nor history."""

    def __init__(
        self,
        root: str,
        store: str | None,
        *,
        power: bool,
        read_only: bool,
        can: Abilities | None,
        limits: ScanLimits | None,
        progress: Progress | None,
        only_this_host: bool,
        patience_seconds: float,
        hide: HiddenFiles | None,
        detect: Detect,
        detection_limits: DetectionLimits,
    ) -> None:
        check_names_are_utf8()
        self.root = os.path.realpath(root)
        self.read_only = read_only
        self.can = can or abilities()
        self.recovered: Recovered | None = None
        self.store = ""
        """The real path of its store; of one that only looks, nothing."""
        self.lock = CallLock(f"the workspace {self.root}", patience_seconds=patience_seconds)
        self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._power = power
        self._detect: Detect = detect
        self._detection_limits = detection_limits
        self.history: StepHistory | None = None
        self.outputs: KeptOutputs | None = None
        self._lock: RootLock | None = None
        self._closed = False
        try:
            self.files = Confined(self._descriptor, self.can)
            self.hidden: HiddenTree | None = None
            place = store or store_of(self.root)
            if not read_only:
                _check_system(self.root)
                place = self.store = made_outside(self.root, place)
                self._open_to_change(place, only_this_host, limits or DEFAULT_LIMITS, progress or no_progress, hide)
            elif rule := remembered_rule(place) if hide is None else hide:
                self.hidden = HiddenTree(self.files, rule)
            self.transactions = Transactions(
                self.files,
                self.can,
                self.history and self.history.store.objects.log,
                store=place,
                history=self.history,
                opaque=self._opaque_calls,
                power=power,
            )
        except BaseException:
            self._release()
            raise
        _all_opened.add(self)

    def _open_to_change(
        self, store: str, only_this_host: bool, limits: ScanLimits, progress: Progress, hide: HiddenFiles | None
    ) -> None:
        """Take the lock, open the history, and recover what a killed opener left."""
        if not only_this_host:
            check_locks(self._descriptor, self.root, store, self.can.filesystem_type)
        self.outputs = KeptOutputs(os.path.join(store, "outputs"))
        check_format(store)
        self.files.holds = set()
        self._lock = lock_root(self._descriptor, self.root, store)
        self._copy_up_root()
        note_format(store)
        if hide is None:
            note_new_store(store)
        rule = remembered_rule(store)
        is_replaced = replaced(self.root, store)
        opened = Store.open(os.path.join(store, FOLDER), power=self._power)
        detector = Detector(self.files, store, self._detect, self.can.filesystem_type, self._detection_limits)
        self.history = StepHistory(self.files, opened, limits=limits, detector=detector)
        self.history.progress = progress
        self.history.replaced = is_replaced
        record_root(self.root, store, opened=True)
        if rule is not None:  # a recovery goes by what was hidden when the call was killed
            self.hidden = HiddenTree(self.files, rule)
        self.history.hidden = self.hidden
        recovery = Recovery(
            self.files,
            self.can,
            opened.objects.log,
            store=store,
            history=self.history,
            opaque=self._opaque_calls,
        )
        self.recovered = recovery.run()
        if hide is not None:
            remember_rule(store, hide)
            rule = hide or None
        # What a recovery has brought back is looked for again.
        if self.hidden is None or self.hidden.rule != rule or self.recovered is not None:
            self.history.hidden = self.hidden = None if rule is None else HiddenTree(self.files, rule)

    def _copy_up_root(self) -> None:
        """A directory of a lower layer of an overlay is another one, by its time of birth, after the first change in
        it: have it be that from the start, or the log would not know it again."""
        if self.can.filesystem_type(self._descriptor) == OVERLAY:
            root = os.fstat(self._descriptor)
            with suppress(OSError):  # another user's: then it is what it is
                os.utime(self._descriptor, ns=(root.st_atime_ns, root.st_mtime_ns))

    @property
    def is_open(self) -> bool:
        return not self._closed and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that opened it to change it."""
        return self._lock is not None and self._lock.forked

    def _opaque_calls(self) -> OpaqueCalls:
        assert self.history is not None, "it was opened to change it"
        history = self.history
        stamp = LivenessFile(os.path.join(self.store, STAMP), sync=self._power)
        scans = Scans(self.files, history, power=self._power)
        copies = HiddenCopies(self.files, self.store, sync=self._power)
        return OpaqueCalls(self.files, Renames(self.can), scans, stamp, copies)

    def check_open(self) -> None:
        """Raises ValueError once it is closed, and in a process that was forked off."""
        if self._closed:
            raise ValueError(f"the workspace {self.root} is closed")
        if self._lock is not None and self._lock.forked:
            raise ValueError(f"the workspace {self.root} belongs to the process that this one was forked from")

    def check_there(self) -> None:
        """Raises FileNotFoundError where the directory was removed, which leaves an empty one that nothing can be made
        in, or where programs and people would work in another one that has come in its place."""
        root = os.fstat(self.files.root)
        if root.st_nlink == 0:
            said = f"{self.root} was removed while it was open"
        else:
            try:
                there = os.stat(self.root)
            except OSError:  # it was moved away, and nobody works in another one yet
                return
            if os.path.samestat(root, there):
                return
            said = f"{self.root} was moved away while it was open, and something else is in its place"
        raise FileNotFoundError(errno.ENOENT, f"{said}: close it, and open what is there now")

    def close(self) -> None:
        if self._closed:
            return
        if self.is_forked:
            self._release()
            return
        try:
            self.transactions.close()
        except OSError as error:
            error.add_note(f"{self.root} stays open: close it again when that is mended, or end the process")
            raise
        if self.history is not None:
            head = self.history.store.objects.log.head
            if "holding" not in head:  # which is still to be removed
                head.clear()
            self.history.seal()
        self._release()

    def _release(self) -> None:
        self._closed = True
        if self.history is not None:
            self.history.detector.close()
            self.history.store.objects.close()
        if self._lock is not None:
            self._lock.close()
        os.close(self._descriptor)


_all_opened: weakref.WeakSet[Opened] = weakref.WeakSet()


def _after_fork() -> None:
    for opened in list(_all_opened):
        opened.lock.free_mutex()


os.register_at_fork(after_in_child=_after_fork)
