"""A Ray cluster for tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of two CPUs, for all tests."""
    ray = pytest.importorskip("ray", reason="the Ray executor needs the extra cargohold[ray]")
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with not_tidied_up():
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": paths},
        )
    yield
    with not_tidied_up():
        ray.shutdown()
        gc.collect()


@contextmanager
def not_tidied_up() -> Iterator[None]:
    """Ignore resource warnings: Ray 2.40 leaves its log files and processes to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
