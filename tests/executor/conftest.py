"""A Ray cluster for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of two CPUs, for all tests."""
    ray = pytest.importorskip("ray", reason="the Ray executor needs the extra cargohold[ray]")
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": paths}
    )
    yield
    ray.shutdown()
