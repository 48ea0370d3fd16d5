"""Which commits a store keeps when it is made small."""

from __future__ import annotations

from collections.abc import Iterable

from ringfence_sandbox.store.store import Store


def gc(store: Store, keep_steps: int, *, protect: Iterable[str] = ()) -> int:
    """Drop what neither the newest `keep_steps` steps nor the kept commits need; the bytes that this gave back.

    The newest step stays even of none, since the numbers go on from it. The state before the oldest of these steps
    stays, so that it can be undone, and so do the commits in ``protect``: whatever a restore is about to go back to, or
    was interrupted in.

    Raises:
        ValueError: `keep_steps` is negative.
        LookupError: a commit to protect is not in the store.
    """
    if keep_steps < 0:
        raise ValueError(f"keep_steps is the number of steps to keep, so it cannot be {keep_steps}")
    needed = {*store.kept().values(), *(store.commit(commit).commit for commit in protect)}
    # What was taken back is shown as what differs from the state that it was made from.
    made_from = (store.commit(commit).parent for commit in store.aborted().values())
    needed.update(parent for parent in made_from if parent is not None)
    steps, numbered = 0, False
    for record in store.commits():
        needed.add(record.commit)
        numbered = numbered or record.number is not None
        if steps >= keep_steps and numbered:
            break
        steps += record.number is not None and record.number > 0
    return store.retain(needed)
