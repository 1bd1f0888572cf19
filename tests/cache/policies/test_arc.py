"""ARC against the paper, and its arithmetic for many chunks against that for one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import READY
from cargohold.cache import TierManager
from cargohold.cache.policies.arc import ARCPolicy, Balance, Ghosts
from tests.cache.common import numbered
from tests.cache.policies.naive_arc import PaperARC
from tests.effort import examples


@examples(25)
@given(capacity=st.integers(1, 12), generator=st.randoms(use_true_random=False), length=st.integers(0, 400))
def test_does_what_the_paper_says_where_chunks_come_alone(capacity: int, generator: Random, length: int) -> None:
    # Some chunks come often, others in phases: both ghost lists are hit, at different lengths.
    requests = [
        generator.choice([generator.randrange(6), generator.randrange(6, 13) + at // 60 % 2 * 7])
        for at in range(length)
    ]
    manager, paper = TierManager(capacity, ARCPolicy), PaperARC(capacity)
    for number in requests:
        (key,) = keys = numbered(number)
        is_hit = manager.lookup(keys) == bytes([READY])
        assert is_hit == paper.request(key)
        if is_hit:
            manager.touch(keys)
        else:
            handle = manager.prepare_store(keys)
            handle.commit()
        manager.check()
        for other in numbered(*range(21)):
            assert (manager.lookup([other]) == bytes([READY])) == (other in paper.t1 or other in paper.t2)


def test_a_chunk_used_twice_outlives_a_scan() -> None:
    manager = TierManager(8, ARCPolicy)
    often = numbered(0, 1)
    for _ in range(2):
        store(manager, often)
        manager.touch(often)
    for number in range(100, 200):
        store(manager, numbered(number))
    assert manager.lookup(often) == bytes([READY]) * 2


def test_what_it_regrets_gets_more_room() -> None:
    """Keys that come back soon after their eviction from the first list make that list larger."""
    manager = TierManager(4, ARCPolicy)
    store(manager, numbered(0, 1))
    manager.touch(numbered(0, 1))
    store(manager, numbered(2, 3))
    store(manager, numbered(4))
    (evicted,) = (key for key in numbered(2, 3) if manager.lookup([key]) != bytes([READY]))
    store(manager, [evicted])
    assert isinstance(manager.policy, ARCPolicy) and manager.policy._target == 1.0


@pytest.mark.parametrize("num_free", [0, 2])
@given(
    sizes=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    target=st.floats(0, 20),
    num_chunks=st.integers(0, 12),
)
def test_strangers_are_admitted_at_once_as_one_by_one(
    num_free: int, sizes: tuple[int, int], target: float, num_chunks: int
) -> None:
    if num_chunks - num_free > sum(sizes):
        return
    at_once = Balance(20, target, list(sizes), [3, 4], num_free)
    one_by_one = Balance(20, target, list(sizes), [3, 4], num_free)
    wanted = at_once.admit([None] * num_chunks)
    each = [one_by_one.admit([None]) for _ in range(num_chunks)]
    assert wanted == [sum(first for first, _ in each), sum(second for _, second in each)]
    assert at_once == one_by_one


@examples(30)
@given(capacity=st.integers(1, 6), data=st.data())
def test_ghosts_are_two_lists_of_keys(capacity: int, data: st.DataObject) -> None:
    ghosts = Ghosts(capacity)
    lists: tuple[list[bytes], list[bytes]] = ([], [])
    for _ in range(data.draw(st.integers(0, 25))):
        which = data.draw(st.integers(0, 1))
        keys = numbered(*data.draw(st.lists(st.integers(0, 12), unique=True, max_size=8)))
        operation = data.draw(st.sampled_from(["remember", "drop", "forget"]))
        if operation == "remember":
            keys = [key for key in keys if key not in lists[0] and key not in lists[1]]
            ghosts.remember(keys, which)
            lists[which].extend(keys)
        elif operation == "drop":
            num_dropped = data.draw(st.integers(0, 3))
            assert ghosts.drop_oldest(which, num_dropped) == min(num_dropped, len(lists[which]))
            del lists[which][:num_dropped]
        else:
            ghosts.forget(keys)
            for remembered in lists:
                remembered[:] = [key for key in remembered if key not in keys]
        ghosts.check()
        assert ghosts.sizes == [len(lists[0]), len(lists[1])]
        everything = numbered(*range(13))
        assert ghosts.find(everything) == [
            0 if key in lists[0] else 1 if key in lists[1] else None for key in everything
        ]


def store(manager: TierManager, keys: list[bytes]) -> None:
    handle = manager.prepare_store([key for key in keys if manager.lookup([key]) != bytes([READY])])
    handle.commit()
