"""Best of n: run each task n times, and keep the patch that most candidates agree on.

    python best_of_n.py tasks.jsonl --candidates 3 --out out

Of patches that as many agree on, it is the one with the fewest tokens. A task whose checks failed in all candidates has
no patch. The patches are in OUT/best. Run it again after a crash: candidates with a result do not run again.
"""

import argparse
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

from ringfence_batch import Batch, read_tasks, summarize


def main() -> None:
    parser = argparse.ArgumentParser(description="Run each task n times, and keep the best patch.")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int)
    given = parser.parse_args()

    tasks = read_tasks(given.tasks)
    candidates = [replace(task, id=f"{task.id}.{number}") for task in tasks for number in range(given.candidates)]
    batch = Batch(candidates, out=given.out)
    batch.run(jobs=given.jobs)

    found = defaultdict[str, list[tuple[bytes, int]]](list)
    for row in summarize(batch.ledger).rows:
        if row.outcome == "done":
            patch = (given.out / row.directory / "patch.diff").read_bytes()
            found[row.id.rpartition(".")[0]].append((patch, row.tokens or 0))

    best = given.out / "best"
    best.mkdir(exist_ok=True)
    for task in tasks:
        votes = Counter(patch for patch, _ in found[task.id])
        if not votes:
            print(f"{task.id}: none of {given.candidates} is done")
            continue
        patch, _ = max(found[task.id], key=lambda one: (votes[one[0]], -one[1]))
        (best / f"{task.id}.patch").write_bytes(patch)
        print(f"{task.id}: {votes[patch]} of {given.candidates} agree")


if __name__ == "__main__":
    main()
