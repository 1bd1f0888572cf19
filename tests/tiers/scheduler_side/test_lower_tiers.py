"""Lower tiers as a state machine: any operations in any order, against what must always hold."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import READY
from cargohold.cache import ChunkPins, SlotReservation
from cargohold.protocol import TransferOutcome
from cargohold.tiers.scheduler_side import Chain, Fetch
from tests.effort import examples
from tests.tiers.scheduler_side.world import NUM_CHUNKS, World, key_of


class Traffic:
    """Random moves, one method each."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.stores: list[SlotReservation] = []
        self.loads: list[ChunkPins] = []
        self.fetches: list[Fetch] = []

    def chain(self) -> list[bytes]:
        first = self.random.randrange(NUM_CHUNKS)
        prefix = self.random.randrange(3)
        return [key_of(prefix, at) for at in range(first, self.random.randrange(first, NUM_CHUNKS) + 1)]

    def is_ready(self, key: bytes) -> bool:
        return self.world.manager.lookup([key])[0] == READY

    def store(self) -> None:
        self.stores.append(self.world.manager.prepare_store(self.chain()))

    def end_store(self) -> None:
        if self.stores:
            handle = self.stores.pop(self.random.randrange(len(self.stores)))
            if self.random.random() < 0.7:
                handle.commit()
            else:
                handle.forfeit()

    def load(self) -> None:
        self.loads.append(self.world.manager.prepare_load([key for key in self.chain() if self.is_ready(key)]))

    def end_load(self) -> None:
        if self.loads:
            self.loads.pop(self.random.randrange(len(self.loads))).release()

    def probe(self) -> None:
        self.world.lower.probe(self.chain())

    def fetch(self) -> None:
        keys, lower = self.chain(), self.world.lower
        kept = [key for key in keys if self.is_ready(key)]
        known = [key for key in keys if key not in kept and lower.lookup([key])[0] == READY]
        fetch = lower.fetches.begin([Chain(lower.tiers_of([key])[0], [key], None) for key in known], kept)
        if isinstance(fetch, Fetch):
            self.fetches.append(fetch)

    def release(self) -> None:
        if self.fetches:
            self.fetches.pop(self.random.randrange(len(self.fetches))).release()

    def end_job(self) -> None:
        if self.world.running:
            command = self.random.choice(list(self.world.running.values()))
            answers = [self.random.random() < 0.7 for _ in command.keys]
            self.world.end(command, answers, self.random.choice(list(TransferOutcome)))

    def touch(self) -> None:
        self.world.manager.touch(self.chain())

    def reset(self) -> None:
        if self.world.manager.reset():
            assert all(fetch.is_released for fetch in self.fetches)
            assert READY not in self.world.lower.lookup(self.chain()), "nothing is known any more"

    def pass_time(self) -> None:
        self.world.clock.advance(self.random.choice([0.1, 1.0, 10.0]))

    def step(self) -> None:
        self.world.step()

    def settle(self) -> None:
        """Give everything back, and let all jobs end."""
        for load in self.loads:
            load.release()
        for store in self.stores:
            store.forfeit()
        for fetch in self.fetches:
            fetch.release()
        for _ in range(200):
            for command in list(self.world.running.values()):
                self.world.end(command, [True] * len(command.keys))
            self.world.clock.advance(1.0)
            if not self.world.step() and not self.world.running:
                break


@examples(60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 2), st.integers(1, 2))
def test_under_random_traffic_no_slot_is_lost_and_no_pin_is_kept(
    seed: int, capacity: int, num_tiers: int, num_workers: int
) -> None:
    world = World(capacity, num_tiers, num_workers, max_inflight_chunks=1 + seed % 5)
    traffic = Traffic(world, seed)
    moves = [
        traffic.store,
        traffic.end_store,
        traffic.load,
        traffic.end_load,
        traffic.probe,
        traffic.fetch,
        traffic.release,
        traffic.end_job,
        traffic.end_job,
        traffic.touch,
        traffic.reset,
        traffic.pass_time,
        traffic.step,
    ]
    for _ in range(80):
        traffic.random.choice(moves)()
        world.manager.check()
        assert world.manager.num_pins >= sum(len(load.keys) for load in traffic.loads)
    traffic.settle()
    world.manager.check()
    assert world.lower.is_idle
    assert (world.manager.num_pins, world.manager.num_writing, world.manager.num_leaving) == (0, 0, 0)
    assert world.manager.reset()
