"""Shared tiers by URL, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cargohold.tiers import SharedTierConfig, StoreOutcome, Tier
from cargohold.tiers.opening import open_tier
from tests.tiers.common import CHUNK, NAMESPACE, key, payload

WAIT_S = 30.0


def shared(url: str, timeout_s: float = 10.0, **options: object) -> Tier:
    config = SharedTierConfig(url=url, **options)  # type: ignore[arg-type]  # by name
    return open_tier(config, NAMESPACE, [CHUNK], request_s=timeout_s)


def store(tier: Tier, number: int) -> StoreOutcome:
    return tier.store(key(number), memoryview(payload(number)))


def bytes_of_files(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
