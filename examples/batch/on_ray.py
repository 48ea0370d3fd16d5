"""A batch on a Ray cluster: python on_ray.py TASKS --out OUT [--address HOST:PORT] [--slots N]"""

from __future__ import annotations

import argparse
import sys

from ringfence_batch import Batch, Progress, read_tasks
from ringfence_batch.ray import RayEngine


def show(progress: Progress) -> None:
    sys.stderr.write(f"\r{progress.ended} of {progress.total} tasks have ended, {len(progress.running)} run")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks")
    parser.add_argument("--out", required=True, help="a directory that all nodes share")
    parser.add_argument("--address", help="the default is RAY_ADDRESS, or a cluster of this machine")
    parser.add_argument("--slots", type=int, help="the default is what the cluster has")
    given = parser.parse_args()
    batch = Batch(read_tasks(given.tasks), out=given.out)
    progress = batch.run(engine=RayEngine(batch.ledger.out, given.slots, address=given.address), show=show)
    sys.stderr.write("\n")
    return 0 if progress.outcomes["done"] == progress.total else 1


if __name__ == "__main__":
    sys.exit(main())
