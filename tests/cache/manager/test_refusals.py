"""What is impossible is refused by name, at start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold import OffloadConfig
from cargohold.cache import TierManager, make_manager
from cargohold.cache.policies import POLICIES, find_policy
from cargohold.cache.policies.base import LRUPolicy
from cargohold.errors import ConfigError
from cargohold.tiers import DiskTierConfig
from examples.own_policy.oldest_ends import OldestEnds

OLDEST_ENDS = "examples.own_policy.oldest_ends:OldestEnds"


@pytest.mark.parametrize("name", ["", "LRU", "belady", "lru "])
def test_an_unknown_policy_names_those_there_are(name: str) -> None:
    makers: tuple[Callable[[], object], ...] = (lambda: find_policy(name), lambda: make_manager(name, 8))
    for make in makers:
        with pytest.raises(ConfigError) as raised:
            make()
        assert (raised.value.key, raised.value.value) == ("policy", name)
        assert (
            raised.value.expected
            == "it must be one of arc, fifo, lru, reuse-index, or MODULE:CLASS for a class of your own"
        )
    with pytest.raises(ConfigError, match="arc, fifo, lru, reuse-index"):
        OffloadConfig(host_bytes=10000, policy=name)


def test_a_policy_beside_a_manager_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^policy='arc' .* its own eviction: remove this option"):
        OffloadConfig(host_bytes=10000, manager="examples.own_manager.least_recent:LeastRecent", policy="arc")


def test_a_policy_of_ones_own_is_named_by_where_it_is() -> None:
    assert find_policy(OLDEST_ENDS) is OldestEnds
    assert isinstance(make_manager(OLDEST_ENDS, 8).policy, OldestEnds)
    assert OffloadConfig(host_bytes=10000, policy=OLDEST_ENDS).policy == OLDEST_ENDS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:Mine", "it cannot be imported from here (ModuleNotFoundError: No module named 'no')"),
        (":Mine", "cannot be imported"),
        (".policies:Mine", "cannot be imported"),
        ("examples.own_policy.oldest_ends:", "cannot be imported"),
        ("examples.own_policy.oldest_ends:Mine", "has no attribute 'Mine'"),
        ("examples.own_policy.oldest_ends:OrderedDict", "derived from cargohold.cache.policies.ReplacementPolicy"),
        ("examples.own_policy.oldest_ends:Sequence", "derived from cargohold.cache.policies.ReplacementPolicy"),
        ("examples.own_policy.oldest_ends:ReplacementPolicy", "lacks add, check, clear, drop, make_room, touch"),
        ("broken_policies:Mine", "RuntimeError: not today"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_with_the_reason(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policies.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    makers: tuple[Callable[[str], object], ...] = (
        find_policy,
        lambda name: DiskTierConfig(directory="/", max_bytes="1GiB", policy=name),
    )
    for make in makers:
        with pytest.raises(ConfigError, match=re.escape(message)) as raised:
            make(name)
        assert (raised.value.key, raised.value.value) == ("policy", name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_tier_has_at_least_one_slot(policy: str, capacity: int) -> None:
    with pytest.raises(ConfigError) as raised:
        make_manager(policy, capacity)
    assert (raised.value.key, raised.value.value) == ("capacity", capacity)


def test_a_manager_without_slots_is_refused_whoever_makes_it() -> None:
    with pytest.raises(ConfigError, match="capacity=0"):
        TierManager(0, LRUPolicy)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", 3),
        ("policy", ["lru"]),
        ("blocks_per_chunk", 0),
        ("blocks_per_chunk", 1.5),
        ("blocks_per_chunk", True),
        ("blocks_per_chunk", "2"),
        ("host_bytes", "lots"),
        ("host_bytes", 0),
        ("host_bytes", "1PiB"),
        ("store_generated", "yes"),
        ("store_within_steps", -1),
        ("store_within_steps", True),
        ("store_within_steps", 10**30),
        ("max_inflight_fraction", 0),
        ("max_inflight_fraction", 1.1),
        ("max_inflight_fraction", "half"),
        ("max_inflight_fraction", float("nan")),
        ("transfer_timeout_s", 0),
        ("transfer_timeout_s", "soon"),
        ("job_timeout_s", 1),
        ("transfer_timeout_s", 10**400),
    ],
)
def test_an_impossible_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        OffloadConfig(**{"host_bytes": 1 << 20, option: value})
    assert raised.value.key == option
    assert raised.value.value is value
