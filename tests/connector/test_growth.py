"""What connectors remember does not grow with the number of requests."""

from __future__ import annotations

import gc
from collections import deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest

from cargohold.connector.multi import MultiConnectorFactory
from cargohold.lab.simulation import SimulatedEngine, simulated_layout
from cargohold.lab.simulation.connectors import SimulatedOffloading
from cargohold.protocol import KVConnectorFactory
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import prompt
from tests.held_tiers import SimulatedTiering

REQUESTS_PER_ROUND = 12
DISK, SHARED = TierOptions(name="disk"), TierOptions(name="shared")
NOT_FOLLOWED = (ModuleType, type, FunctionType, BuiltinFunctionType)
COUNTED = (dict, list, set, frozenset, tuple, deque)
FACTORIES: dict[str, Any] = {
    "eager": lambda: SimulatedOffloading(12),
    "lazy": lambda: SimulatedOffloading(12, lookahead=4),
    "tiered": lambda: SimulatedTiering(12, [DISK, SHARED], restore_timeout_s=0.2),
    "multi": lambda: MultiConnectorFactory(
        (SimulatedTiering(12, [DISK], restore_timeout_s=0.2), SimulatedOffloading(12, lookahead=4))
    ),
}


def size(root: object) -> int:
    """How many objects can be reached, with what is in containers of them."""
    total = 0
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, NOT_FOLLOWED):
            continue
        seen.add(id(one))
        total += len(one) if isinstance(one, COUNTED) else gc.is_tracked(one)
        waiting += gc.get_referents(one)
    return total


def play_round(engine: SimulatedEngine, number: int) -> None:
    """Requests that share beginnings, some of which are aborted, in a pool that has no room for all of them."""
    for at in range(REQUESTS_PER_ROUND):
        name = f"round {number} request {at}"
        engine.add(name, [*prompt(at % 5, 20 + at), at], 6)
        for _ in range(at % 4):
            engine.step()
        if at % 3 == 0:
            engine.abort(name)
    engine.run()
    engine.scheduler.take_events()
    engine.scheduler.connector.get_kv_connector_stats()


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_remembered_does_not_grow_with_the_number_of_requests(name: str) -> None:
    factory: KVConnectorFactory = FACTORIES[name]()
    engine = SimulatedEngine(simulated_layout(30), factory, emit_events=True)
    totals = []
    for number in range(16):
        play_round(engine, number)
        totals.append(size(engine.scheduler))
    assert engine.scheduler.connector.broken is None
    # Less than one thing for each request of a round; the rounds compared have dozens.
    assert max(totals[12:]) < max(totals[4:12]) + REQUESTS_PER_ROUND, totals
