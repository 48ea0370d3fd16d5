"""What the records of a journal amount to: the call that is open, its deeds, and what was committed before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from ringfence_sandbox.calls.deed_rollback import RolledBack, Undone
from ringfence_sandbox.calls.journal import Record
from ringfence_sandbox.calls.power_loss import CommittedCall
from ringfence_sandbox.disk.call_process import CallProcess
from ringfence_sandbox.disk.kernel import boot_id
from ringfence_sandbox.disk.places import root_record
from ringfence_sandbox.disk.records import Deed


@dataclass(slots=True)
class Replay:
    """As `of` reads it from the records, oldest first."""

    root: Sequence[object] | None = None
    holdings: list[str] = field(default_factory=list[str])
    """All holding directories that the journal names; the deeds of the open call hold in the last."""
    in_hand: tuple[str, tuple[int, int]] | None = None
    """A holding directory about to come or to go when the journal ends, and the times that the root is to keep."""
    call: tuple[str, str] | None = None
    ended: tuple[str, str] | None = None
    """The last call, where it has ended and was committed as a step: who made it has not closed the workspace since."""
    at: datetime | None = None
    """When the last call began to change files."""
    committed: bool = False
    doubtful: bool = False
    """Whether records of the open call may be lost, so that nobody knows all of its deeds."""
    deeds: list[Deed] = field(default_factory=list[Deed])
    noted: list[Deed] = field(default_factory=list[Deed])
    """All that the open call has noted, those that are undone already too."""
    met: Undone = field(default_factory=Undone)
    """The conflicts that the undoing of the open call has met, and what is still to be kept of them."""
    done: list[CommittedCall] = field(default_factory=list[CommittedCall])
    more: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Of opaque deeds, what else was known before them."""
    became: dict[int, dict[int, int]] = field(default_factory=dict[int, "dict[int, int]"])
    """Of opaque deeds, the inodes since then that others have taken the place of."""
    kept: dict[int, str | None] = field(default_factory=dict[int, "str | None"])
    """Of those that are being taken back, the commit that has what they had changed."""
    processes: list[CallProcess] = field(default_factory=list[CallProcess])
    commits: list[Record] = field(default_factory=list[Record])

    @property
    def lost_power(self) -> bool:
        """Whether the machine was started anew since: then what was not waited for may not be on the disk."""
        return self.root is not None and self.root[3] != boot_id()

    def is_of(self, root: int) -> bool:
        """Whether the journal is about an opened root, as far as it says."""
        if self.root is None:
            return True
        inode, born, device, boot = self.root
        now = root_record(root)["root"]
        assert isinstance(now, list)
        return now[:2] == [inode, born] and (now[2] == device or boot != boot_id())

    @classmethod
    def of(cls, records: Sequence[Record]) -> Replay:
        replay = cls()
        for record in records:
            replay._add(record)
        return replay

    def _add(self, record: Record) -> None:
        self.in_hand = None
        match record.values:
            case {"root": [int(inode), (int() | None) as born, int(device), str(boot)]}:
                self.root = [inode, born, device, boot]
            case {"holding": str(name), "times": [int(atime_ns), int(mtime_ns)]}:
                self.holdings.append(name)
                self.in_hand = (name, (atime_ns, mtime_ns))
            case {"dropping": str(name), "times": [int(atime_ns), int(mtime_ns)]}:
                self.in_hand = (name, (atime_ns, mtime_ns))
            case {"begin": str(call_id), "tool": str(tool)}:
                self._begin((call_id, tool))
                self.doubtful = False
                at_ns = record.values.get("at")  # an earlier version had none
                self.at = datetime.fromtimestamp(at_ns / 1e9, UTC) if isinstance(at_ns, int) else None
            case {"damaged": int()}:
                self.doubtful = True
            case {"do": str()}:
                if self.call is None or self.committed:  # its begin was damaged
                    self._begin(("", ""))
                deed = Deed.from_json(record.values)
                if self.noted and deed.seq <= self.noted[-1].seq:  # the times that somebody else has given meanwhile
                    self.deeds = [deed if one.seq == deed.seq else one for one in self.deeds]
                    return
                self.deeds.append(deed)
                self.noted.append(deed)
                if deed.kind == "opaque":
                    self.more[deed.seq] = record.blob
            case {"undone": int(seq), "conflict": str(path)}:
                for deed in [deed for deed in self.deeds if deed.seq == seq]:
                    self.met.met(path, deed)
                    self.deeds.remove(deed)
            case {"undone": int(seq)}:
                self.met.conflicts.update(cast("list[str]", record.values.get("conflicts", [])))
                self.met.displaced.update(cast("dict[str, int]", record.values.get("displaced", {})))
                behind = any(deed.seq == seq and deed.kind == "opaque" for deed in self.deeds)
                self.deeds = [deed for deed in self.deeds if deed.seq != seq and not (behind and deed.seq > seq)]
                if behind:
                    self._know_again(seq, dict(cast("list[tuple[int, int]]", record.values.get("became", []))))
            case {"copied": [int(old), int(new)], "before": int(seq)}:
                self._know_again(seq, {old: new})
            case {"undone": list()}:
                seqs = set(cast("list[int]", record.values["undone"]))
                self.deeds = [deed for deed in self.deeds if deed.seq not in seqs]
            case {"taking back": int(seq), "kept": (str() | None) as commit}:
                self.kept[seq] = commit
            case {"process": [str(name), int(pid), int(ticks), str(boot)]}:
                self.processes.append(CallProcess(name, pid, ticks, boot))
            case {"commit": str()}:
                self.committed = True
                self.done.append(CommittedCall(tuple(self.deeds), record.payload))
                if record.payload is not None:
                    self.commits.append(record)
            case {"end": str()}:
                self.ended = self.call if self.committed and self.done[-1].payload is not None else None
                self.call, self.deeds = None, []
            case _:  # of a later version, which does not change the meaning of those above
                pass

    def _begin(self, call: tuple[str, str]) -> None:
        self.call, self.committed, self.deeds, self.noted, self.processes = call, False, [], [], []
        self.met = Undone()

    def _know_again(self, seq: int, became: Mapping[int, int]) -> None:
        """A way back to where an opaque deed began has put other inodes in the place of these."""
        for deed in self.deeds:
            if deed.kind == "opaque" and deed.seq <= seq:
                earlier = self.became.get(deed.seq, {})
                self.became[deed.seq] = {**became, **{old: became.get(new, new) for old, new in earlier.items()}}
        RolledBack(became={**became}).settle([deed for deed in self.deeds if deed.seq < seq])
