"""Helpers of several tests of the disk tier."""

from __future__ import annotations

from pathlib import Path

from cargohold.tiers import StoreOutcome
from cargohold.tiers.disk import DiskTier
from tests.tiers.common import (
    key,
    payload,
)

MIB = 1024**2


def store(tier: DiskTier, number: int, parent: int | None = None) -> StoreOutcome:
    return tier.store(key(number), memoryview(payload(number)), None if parent is None else key(parent))


def present(tier: DiskTier, count: int) -> list[int]:
    return [number for number, is_there in enumerate(tier.probe([key(n) for n in range(count)])) if is_there]


def fill(tier: DiskTier, count: int) -> list[StoreOutcome]:
    return [store(tier, number) for number in range(count)]


def delete(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
