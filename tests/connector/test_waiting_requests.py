"""Requests that wait: for another's load that fails, for an answer, for a place, or behind a connector that was not asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cargohold.connector.multi import MultiConnectorFactory
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import (
    BlockIds,
    ClassFactory,
    NullConnectorScheduler,
    NullConnectorWorker,
    RequestView,
    TransferOutcome,
)
from cargohold.transfer import Direction
from tests.connector.common import alone, evict_everything, finish, prompt, serve_and_lose


@pytest.mark.parametrize(
    ("outcome", "restored"), [(TransferOutcome.FAILED, {}), (TransferOutcome.ABANDONED, {"host": 40})]
)
def test_a_request_that_waits_for_a_load_which_fails_goes_on_with_what_is_left(
    outcome: TransferOutcome, restored: dict[str, int]
) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    for name, token in (("loads", 1), ("waits", 2)):
        engine.add(name, [*prompt(0, 40), token], 2)
    engine.step()
    (load,) = transfers.pending
    assert [request.request_id for request in engine.scheduler.waiting_requests()] == ["waits"]
    transfers.complete(load, outcome)
    engine.step()
    transfers.auto = True
    finish(engine, offloading)
    for name, token in (("loads", 1), ("waits", 2)):
        assert engine.tokens(name) == alone([*prompt(0, 40), token], 2)
    assert engine.outputs["loads"].cache_report.restored_tokens == {}, "a failed load is not tried again"
    assert engine.outputs["waits"].cache_report.restored_tokens == restored, "what is bad is gone, what was late is not"
    assert engine.scheduler.num_deferred_lookups == 1, "however often it was asked"


class Hesitant(NullConnectorScheduler):
    """Answers "not yet" for as long as a test says, and notes who is asked and who is admitted."""

    def __init__(self) -> None:
        self.hesitates = True
        self.asked: list[str] = []
        self.admitted: list[str] = []

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        return (None if self.hesitates else 0), False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        self.admitted.append(request.request_id)


@pytest.mark.parametrize("policy", QueuePolicy)
def test_deferred_requests_keep_their_order_before_those_that_come_later(policy: QueuePolicy) -> None:
    connector = Hesitant()
    factory = ClassFactory(lambda _: connector, lambda _: NullConnectorWorker())
    engine = SimulatedEngine(simulated_layout(60), factory, policy=policy, max_num_seqs=3)
    for name in ("a", "b", "c"):
        engine.add(name, prompt(ord(name), 9), 2)
    for _ in range(3):
        connector.asked.clear()
        engine.step()
        assert connector.asked == ["a", "b", "c"]
    engine.add("later", prompt(9, 9), 2)
    engine.step()
    connector.hesitates = False
    engine.run()
    assert connector.admitted == ["a", "b", "c", "later"]
    assert engine.scheduler.num_deferred_lookups == 4


def test_chunks_that_are_evicted_between_look_up_and_admission_are_computed() -> None:
    """A look-up protects nothing: only the load does, once the request is admitted."""
    offloading = SimulatedOffloading(12, policy="lru")
    engine = SimulatedEngine(simulated_layout(14), offloading)
    serve_and_lose(engine, offloading, prompt(0, 33), 1)
    assert offloading.manager.num_ready == 8
    engine.add("runs", prompt(1, 17), 24)  # leaves no room for nine blocks, and fills the tier meanwhile
    engine.step()
    engine.add("second", prompt(0, 33), 1)
    engine.step()
    connector = engine.scheduler.connector
    found, _ = connector.get_num_new_matched_tokens(engine.requests["second"], 0)
    assert found == 32 and [request.request_id for request in engine.scheduler.waiting_requests()] == ["second"]
    finish(engine, offloading)
    assert connector.broken is None
    assert sum(engine.outputs["second"].cache_report.restored_tokens.values()) < 32
    assert engine.tokens("second") == alone(prompt(0, 33), 1)


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse-index"])
def test_what_was_found_for_a_request_that_waits_for_room_on_the_device_is_not_evicted_meanwhile(policy: str) -> None:
    """Found by use: others' stores evicted what the request had found, so it was computed after all."""
    tier = SimulatedOffloading(30, policy=policy)
    engine = SimulatedEngine(simulated_layout(21), tier, max_num_batched_tokens=64)
    for name, seed in (("found", 0), ("old", 1)):
        engine.add(name, prompt(seed, 41), 1)
        finish(engine, tier)
        evict_everything(engine)
    engine.add("long", prompt(2, 41), 38)
    engine.step()
    engine.add("waits", prompt(0, 41), 1)
    finish(engine, tier)
    assert tier.manager.num_removed["evicted"] > 0
    assert engine.outputs["waits"].cache_report.restored_tokens == {"host": 40}


def test_waiting_for_room_on_the_device_is_one_use_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(21), tier, max_num_batched_tokens=64)
    serve_and_lose(engine, tier, prompt(0, 41), 1)
    engine.add("long", prompt(2, 41), 38)
    engine.step()
    touched: list[int] = []
    touch = tier.manager.touch

    def noted(keys: Sequence[bytes]) -> int:
        touched.append(len(keys))
        return touch(keys)

    monkeypatch.setattr(tier.manager, "touch", noted)
    engine.add("waits", prompt(0, 41), 1)
    finish(engine, tier)
    assert touched == [10]


def test_a_child_that_was_not_asked_stores_what_another_child_loads() -> None:
    tiers = [SimulatedOffloading(60), SimulatedOffloading(60)]
    engine = SimulatedEngine(simulated_layout(60), MultiConnectorFactory(tuple(tiers)))
    engine.add("first", prompt(0, 30), 1)
    finish(engine, *tiers)
    evict_everything(engine)
    assert tiers[1].manager.reset() and tiers[1].manager.num_ready == 0
    loads: list[int] = []
    for at, tier in enumerate(tiers):
        tier.transfers[0].on_copy = lambda job, at=at: loads.append(at) if job.direction is Direction.LOAD else None
    engine.add("second", prompt(0, 30), 1)
    finish(engine, *tiers)
    assert loads == [0], "the first has all of it, so the second is not asked"
    assert engine.tokens("second") == alone(prompt(0, 30), 1)
    assert [tier.manager.num_ready for tier in tiers] == [7, 7], "and it has what it lacked"
