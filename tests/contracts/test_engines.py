"""The contract of engines, for the two that there are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence_batch import Engine
from ringfence_batch.local import LocalEngine
from ringfence_batch.testing import EngineContract


class TestLocalEngine(EngineContract):
    def engine(self, out: Path, slots: int) -> Engine:
        return LocalEngine(out, slots)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")  # of Ray itself
class TestRayEngine(EngineContract):
    cluster: Any

    @pytest.fixture(scope="class", autouse=True)
    def _cluster(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("ray")
            from ray_clusters import ray_cluster

            with ray_cluster(nodes=1) as cluster:
                request.cls.cluster = cluster
                yield

    def engine(self, out: Path, slots: int) -> Engine:
        from ringfence_batch.ray import RayEngine

        return RayEngine(out, slots, address=self.cluster.address)
