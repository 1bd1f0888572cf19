"""Fixtures: models that several workers can divide, and a Ray cluster."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.executor.split import MakeModel


@pytest.fixture(scope="module")
def model_with_heads(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Path of a tiny random model with so many KV heads, and a vocabulary that two workers divide."""
    from tests.models import save_model  # noqa: PLC0415  # imports torch

    def make(kind: str, num_kv_heads: int, vocab_size: int = 200) -> str:
        directory = tmp_path_factory.mktemp("models")
        return save_model(kind, directory, num_key_value_heads=num_kv_heads, vocab_size=vocab_size)

    return make


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A local cluster of two CPUs. It ends with its tests, because its processes work also when nobody uses it."""
    ray = pytest.importorskip("ray", reason="the Ray executor needs the extra cargohold[ray]")
    root = Path(__file__).parents[2]
    paths = {"PYTHONPATH": f"{root}:{root / 'src'}"}
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
