"""The disk tier: its budget, what is evicted, and options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError
from cargohold.tiers import DiskTierConfig, StoreOutcome
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.opening import open_tier
from tests.tiers.common import (
    CHUNK,
    NAMESPACE,
    codec,
    disk_tier,
    key,
    load,
    payload,
    spoil_reads,
)
from tests.tiers.disks import MIB, fill, present, store


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_budget_is_kept_at_every_moment_by_evicting_the_oldest(tmp_path: Path, policy: str) -> None:
    tier = disk_tier(tmp_path, 1 * MIB, policy=policy)
    usage = tier.usage()
    assert usage.capacity_bytes is not None and 0.8 * MIB < usage.capacity_bytes <= 1 * MIB
    for number in range(150):
        assert store(tier, number) is not StoreOutcome.PRESENT
        assert bytes_in(tmp_path) <= 1 * MIB
        tier.check()
    kept = present(tier, 150)
    assert 60 <= len(kept) < 90
    assert tier.usage().num_bytes <= usage.capacity_bytes
    assert all(load(tier, number) == payload(number) for number in kept)
    if policy in {"lru", "fifo"}:
        assert kept == list(range(150 - len(kept), 150))


def test_a_touched_chunk_is_evicted_last(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 1 * MIB)
    fill(tier, 60)
    for number in range(60, 150):
        tier.touch([key(3), key(5)])
        store(tier, number)
    assert {3, 5} <= set(present(tier, 150)) and 4 not in present(tier, 150)


def test_a_chunk_is_never_evicted_for_its_own_child(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 1 * MIB)
    number = 0
    while store(tier, number, number - 1 if number else None) is StoreOutcome.STORED:
        number += 1
    assert 60 <= number < 90
    assert present(tier, 150) == list(range(number))
    assert store(tier, 1000) is StoreOutcome.STORED, "another prefix may have the place of the last"
    assert present(tier, 150) == list(range(number - 1))


def open_both_shards(root: Path, max_bytes: int) -> list[DiskTier]:
    """Those of an engine with two workers."""
    return [disk_tier(root, max_bytes, using=codec(split=f"rank {rank} of 2"), num_shards=2) for rank in range(2)]


def test_shards_share_the_budget(tmp_path: Path) -> None:
    tiers = open_both_shards(tmp_path, 2 * MIB)
    for number in range(150):
        for tier in tiers:
            store(tier, number)
        assert bytes_in(tmp_path) <= 2 * MIB
    assert all(len(present(tier, 150)) > 50 for tier in tiers)


def test_a_smaller_budget_takes_effect_at_the_next_start(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, 4 * MIB)
    fill(tier, 300)
    tier.close()
    tier = disk_tier(tmp_path, 1 * MIB)
    assert bytes_in(tmp_path) <= 1 * MIB
    kept = present(tier, 300)
    assert 20 < len(kept) < 90
    assert all(load(tier, number) == payload(number) for number in kept)
    tier.check()


def test_a_smaller_budget_holds_for_leftovers_of_other_engines_too(tmp_path: Path) -> None:
    for weights in ("other", "w"):
        tier = disk_tier(tmp_path, 6 * MIB, using=codec(weights=weights))
        fill(tier, 150)
        tier.close()
    tier = disk_tier(tmp_path, 3 * MIB)
    assert bytes_in(tmp_path) <= 3 * MIB
    assert len(present(tier, 150)) > 100


def test_a_smaller_budget_makes_all_workers_give_up_their_share(tmp_path: Path) -> None:
    """Found by reading: the first to start deleted all that the others had, and with it the use of its own."""
    for tier in open_both_shards(tmp_path, 4 * MIB):
        fill(tier, 145)
        tier.close()
    tiers = open_both_shards(tmp_path, 3 * MIB)
    assert bytes_in(tmp_path) <= 3 * MIB
    assert all(len(present(tier, 145)) > 90 for tier in tiers)


def test_a_smaller_budget_spares_nothing_of_an_engine_with_another_number_of_workers(tmp_path: Path) -> None:
    """Nobody will open that again, and give up what is above its share."""
    alone = disk_tier(tmp_path, 4 * MIB)
    fill(alone, 290)
    alone.close()
    disk_tier(tmp_path, 3 * MIB, using=codec(split="rank 0 of 2"), num_shards=2)
    assert bytes_in(tmp_path) <= 3 * MIB


def test_a_smaller_budget_deletes_no_shard_of_which_cannot_be_read_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: it counted as another engine's, and went as a whole though a part of it was too much."""
    for tier in open_both_shards(tmp_path, 4 * MIB):
        fill(tier, 100)
        tier.close()
    other = tmp_path / codec(split="rank 1 of 2").namespace.id
    with monkeypatch.context() as patch:
        spoil_reads(patch, other / "shard.json")
        disk_tier(tmp_path, 2 * MIB, using=codec(split="rank 0 of 2"), num_shards=2).close()
    assert all(len(present(tier, 100)) > 50 for tier in open_both_shards(tmp_path, 2 * MIB))


def test_a_tier_that_could_not_be_opened_holds_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one chunk of one worker needs") as caught:
        disk_tier(tmp_path, "8KiB")
    assert store(disk_tier(tmp_path), 1) is StoreOutcome.STORED
    del caught


def test_chunks_of_another_size_make_the_shard_start_anew(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    fill(tier, 3)
    tier.close()
    tier = disk_tier(tmp_path, chunk_bytes=3 * CHUNK)
    assert present(tier, 3) == []
    assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


@pytest.mark.parametrize(
    ("options", "key_of_error"),
    [
        ({"directory": ""}, "directory"),
        ({"directory": "/dev/null/kv"}, "directory"),
        ({"directory": "/dev/null"}, "directory"),
        ({"directory": "kv\0"}, "directory"),
        ({"max_bytes": "lots"}, "max_bytes"),
        ({"max_bytes": "8KiB"}, "max_bytes"),
        ({"policy": "magic"}, "policy"),
        ({"reserve_bytes": "much"}, "reserve_bytes"),
        ({"num_threads": 0}, "num_threads"),
        ({"encryption_key": "password"}, "encryption_key"),
        ({"encryption_key": "file:key\0"}, "encryption_key"),
    ],
)
def test_impossible_options_are_refused_by_name(tmp_path: Path, options: dict[str, object], key_of_error: str) -> None:
    given = {"directory": str(tmp_path), "max_bytes": "2MiB", "reserve_bytes": 0, **options}
    with pytest.raises(ConfigError) as caught:
        open_tier(DiskTierConfig(**given), NAMESPACE, [CHUNK])  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key_of_error


def test_tiers_in_one_directory_may_have_shares_of_different_sizes(tmp_path: Path) -> None:
    config = DiskTierConfig(directory=tmp_path, max_bytes="64MiB", reserve_bytes=0)
    sizes = []
    for layout, share in (("large", 0.75), ("small", 0.25)):
        tier = open_tier(config, replace(NAMESPACE, layout=layout), [CHUNK], share=share)
        sizes.append(tier.usage().capacity_bytes or 0)
        tier.close()
    assert 2.8 < sizes[0] / sizes[1] < 3.2
    assert 0.9 * 64 * 2**20 < sum(sizes) <= 64 * 2**20
