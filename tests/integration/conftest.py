"""A small system that several tests ask: two versions published, a gateway, two replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch.trainer.publisher import Publisher
from tests.support.cluster import POLICY, RUN, Cluster
from tests.support.engines import reference_models


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Versions 0 and 1 of run r1; replicas `replica-a` and `replica-b` serve the second."""
    folder: Path = tmp_path_factory.mktemp("system")
    models = reference_models(folder, (1, 2))
    with Cluster(folder) as cluster:
        cluster.gateway()
        with Publisher.open(policy=POLICY, run=RUN, log=cluster.log, store=cluster.store, base=models[0]) as publisher:
            publisher.publish(models[1])
        for name in ("replica-a", "replica-b"):
            cluster.replica(name)
        for name in ("replica-a", "replica-b"):
            cluster.wait_serving(name, f"{RUN}/weight_v000001")
        cluster.wait_routed(2)
        yield cluster
