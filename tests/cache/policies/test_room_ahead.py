"""Room that is made once for all that comes in together leaves the same chunks as room made for one prefix after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from cargohold.cache import StoreOffer, TierManager
from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import POLICIES, Newcomers, ReplacementPolicy, find_policy
from cargohold.cache.policies.reuse_index import ReuseIndexPolicy
from tests.cache.common import numbered

CAPACITY = 48
NUM_PROMPTS = 24
STEPS = 60


def one_by_one(policy: type[ReplacementPolicy]) -> Callable[[ChunkTable], ReplacementPolicy]:
    """The policy, asked for room for each prefix on its own."""

    def make(table: ChunkTable) -> ReplacementPolicy:
        made = policy(table)
        made.make_room_ahead = lambda newcomers, num_slots: None  # type: ignore[method-assign]  # what it is compared with
        return made

    return make


def step(manager: TierManager, requests: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Let requests be admitted, and what is missing of them be stored in one call; returns what was stored."""
    offers = []
    for keys in requests:
        length = manager.touch(keys)
        offers.append(StoreOffer(keys[length:], keys[length - 1] if length else None))
    handle = manager.prepare_stores(offers)
    stored = list(handle.keys)
    handle.commit()
    manager.check()
    return stored


@pytest.mark.parametrize(
    "name", sorted(POLICIES.keys() - {ReuseIndexPolicy.name})
)  # its time goes on between two prefixes
def test_the_same_chunks_stay(name: str) -> None:
    random = Random(name)
    prompts = [numbered(*range(100 * prompt, 100 * prompt + random.randint(1, 9))) for prompt in range(NUM_PROMPTS)]
    every_key = [key for keys in prompts for key in keys]
    policy = find_policy(name)
    together, apart = TierManager(CAPACITY, policy), TierManager(CAPACITY, one_by_one(policy))
    for _ in range(STEPS):
        requests = random.sample(prompts, random.randint(2, 4))
        assert step(together, requests) == step(apart, requests)
        assert together.lookup(every_key) == apart.lookup(every_key)


@pytest.mark.parametrize("name", POLICIES)
def test_room_for_all_prefixes_is_made_in_one_call(name: str) -> None:
    asked: list[int] = []

    class Watched(find_policy(name)):  # type: ignore[misc]  # a class that is found by name
        def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
            raise AssertionError("there is room")

        def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:
            asked.append(num_slots)
            super().make_room_ahead(newcomers, num_slots)

    manager = TierManager(CAPACITY, Watched)
    manager.prepare_store(numbered(*range(CAPACITY - 1))).commit()
    handle = manager.prepare_stores([StoreOffer(numbered(1_000 * prompt, 1_000 * prompt + 1)) for prompt in (1, 2, 3)])
    assert (len(handle.keys), asked) == (6, [5])
    handle.commit()
    manager.check()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("capacity", "num_spare"), [(1_023, 0), (2_048, 2), (70_000, 64)])
def test_for_one_chunk_a_large_tier_makes_a_few_slots_more_free(name: str, capacity: int, num_spare: int) -> None:
    manager = TierManager(capacity, find_policy(name))
    manager.prepare_store(numbered(*range(capacity))).commit()
    stored = []
    for number in range(num_spare + 2):
        handle = manager.prepare_store(numbered(1_000_000 + number))
        handle.commit()
        stored.append((len(handle.keys), manager.num_removed["evicted"]))
    removed_at_once = [(1, 1 + num_spare)] * (1 + num_spare)
    assert stored == [*removed_at_once, (1, 2 * (1 + num_spare))]
    manager.check()
