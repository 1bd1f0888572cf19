"""Prompts, reference answers, and ways to end a test that connector tests share."""

from __future__ import annotations

import random
from functools import lru_cache

from hypothesis import strategies as st

from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import TransferOutcome


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens; equal seeds give equal beginnings."""
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(length)]


@lru_cache(maxsize=4096)
def _alone(tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    engine = SimulatedEngine(simulated_layout(200), prefix_caching=False)
    engine.add("alone", tokens, max_tokens)
    engine.run()
    return tuple(engine.tokens("alone"))


def alone(tokens: list[int], max_tokens: int) -> list[int]:
    """The tokens that a request gets when it has the engine to itself, without any reuse."""
    return list(_alone(tuple(tokens), max_tokens))


def evict_everything(engine: SimulatedEngine) -> None:
    """Take every free block of the device pool once, so that it is evicted, and overwrite its KV."""
    pool = engine.scheduler.kv.pool
    blocks = pool.allocate(pool.num_free_blocks)
    engine.runner.memory[1:] = 0
    pool.free_ids([block.block_id for block in blocks])


def finish(engine: SimulatedEngine, *tiers: SimulatedOffloading) -> None:
    """Run until all work is done, and verify that engine and tiers have nothing left behind."""
    engine.run()
    engine.scheduler.check_settled()
    for tier in tiers:
        tier.manager.check()
        assert tier.manager.num_writing == tier.manager.num_pins == 0


def serve_and_lose(engine: SimulatedEngine, tier: SimulatedOffloading, tokens: list[int], max_tokens: int) -> None:
    """Serve a request named ``first`` to its end, and evict it from the device, so that only the tier has its KV."""
    engine.add("first", tokens, max_tokens)
    finish(engine, tier)
    evict_everything(engine)


def play_any_schedule(data: st.DataObject, engine: SimulatedEngine, *tiers: SimulatedOffloading) -> None:
    """Serve requests with equal beginnings while copies end in any order and way, and compare their tokens."""
    held = [transfers for tier in tiers for transfers in tier.transfers]
    for transfers in held:
        transfers.auto = False
    requests: dict[str, tuple[list[int], int]] = {}
    for at in range(data.draw(st.integers(2, 8))):
        tokens = prompt(0, 30)[: data.draw(st.integers(0, 30))] + prompt(at % 3, data.draw(st.integers(1, 12)))
        requests[f"r{at}"] = tokens, data.draw(st.integers(1, 8))
        engine.add(f"r{at}", *requests[f"r{at}"])
        for _ in range(data.draw(st.integers(0, 12))):
            if engine.scheduler.has_work():
                engine.step()
            for transfers in held:
                for job in list(transfers.pending):
                    if data.draw(st.booleans()):
                        transfers.complete(job, data.draw(st.sampled_from(TransferOutcome)))
    for transfers in held:
        transfers.auto = True
    finish(engine, *tiers)
    assert {name: engine.tokens(name) for name in requests} == {name: alone(*asked) for name, asked in requests.items()}
