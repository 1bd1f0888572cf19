"""Prefetches that hints ask for, in a simulated engine with tiers below host memory."""

from __future__ import annotations

import pytest

from cargohold.blocks import ABSENT, READY, extend_hashes, root_hash
from cargohold.cache.manager import offload_key
from cargohold.connector.offloading import HintConfig, OffloadingScheduler, TenantQuota
from cargohold.lab.simulation import SimulatedEngine, VirtualClock
from cargohold.protocol import MEDIUM_HOST, BlockStored, Hint, HintEnd, HintOutcome, HintStatus, Prefix
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side.prefetch import MAX_AHEAD
from tests.connector.common import prompt
from tests.connector.offloading import ends, keys_of
from tests.connector.tiering import finish, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering

TOKENS = prompt(0, 44)


def prefix(tokens: list[int], salt: str | None = None) -> Prefix:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, root_hash(salt=salt))
    return Prefix(hashes, tokens, len(tokens), salt, salt)


def give(engine: SimulatedEngine, hint: Hint, tokens: list[int] = TOKENS, salt: str | None = None) -> HintOutcome:
    (outcome,) = engine.scheduler.hint(prefix(tokens, salt), [hint])
    return outcome


def restarted(tiering: SimulatedTiering) -> SimulatedEngine:
    """An engine that finds the chunks of ``TOKENS`` on disk only."""
    serve(make_engine(tiering), tiering, "first", TOKENS)
    return make_engine(tiering)


@pytest.mark.parametrize(("hint", "how"), [(Hint.prefetch(), [HintEnd.DONE]), (Hint.share(), [])])
def test_a_prefetch_brings_chunks_up_before_the_request_comes(hint: Hint, how: list[HintEnd]) -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    outcome = give(engine, hint)
    assert (outcome.status, outcome.num_tokens) == (HintStatus.DEFERRED, 44)
    assert engine.scheduler.has_work(), "the engine goes on for it"
    finish(engine, tiering)
    assert list(tiering.manager.lookup(keys_of(TOKENS, 11))) == [READY] * 11
    assert ends(engine) == how, "what is shared is retained until its time is over"
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD, JobKind.PROBE})
    engine.add("second", [*TOKENS, 5], 3)
    for _ in range(30):
        engine.step()
    assert restored(engine, "second") == {"host": 44}, "nothing was waited for"
    queue.held = frozenset()
    finish(engine, tiering)


def test_what_a_prefetch_brings_up_is_announced() -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering, emit_events=True), tiering, "first", TOKENS)
    engine = make_engine(tiering, emit_events=True)
    give(engine, Hint.prefetch())
    finish(engine, tiering)
    stored = [event for event in engine.scheduler.take_events() if isinstance(event, BlockStored)]
    in_host = [event for event in stored if event.medium == MEDIUM_HOST]
    assert [token for event in in_host for token in event.token_ids] == TOKENS


def test_a_prefetch_of_what_nobody_has_fails_and_of_what_host_memory_has_is_done() -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    assert give(engine, Hint.prefetch(), prompt(7, 44)).status is HintStatus.DEFERRED
    finish(engine, tiering)
    assert ends(engine) == [HintEnd.FAILED]
    give(engine, Hint.prefetch())
    finish(engine, tiering)
    assert give(engine, Hint.prefetch()).status is HintStatus.ACCEPTED
    assert give(engine, Hint.prefetch(), prompt(0, 3)).status is HintStatus.MISSING


def test_a_prefetch_right_after_an_answer_finds_what_is_on_its_way_into_host_memory() -> None:
    tiering = SimulatedTiering(60)
    engine = make_engine(tiering)
    (transfers,) = tiering.transfers
    transfers.auto = False
    engine.add("first", TOKENS, 1)
    while engine.scheduler.num_unfinished:
        engine.step()
    outcome = give(engine, Hint.prefetch())
    assert (outcome.status, outcome.num_tokens) == (HintStatus.ACCEPTED, 44)
    transfers.auto = True
    finish(engine, tiering)
    assert list(tiering.manager.lookup(keys_of(TOKENS, 11))) == [READY] * 11
    assert not ends(engine)


def test_a_prefetch_that_a_tier_does_not_answer_ends_at_its_deadline() -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    assert give(engine, Hint.prefetch(deadline_s=2.0)).status is HintStatus.DEFERRED
    assert isinstance(engine.clock, VirtualClock)
    for _ in range(10):
        engine.step()
        engine.clock.advance(1.0)
    assert ends(engine) == [HintEnd.FAILED]
    queue.auto = True
    finish(engine, tiering)


def test_the_deadline_of_a_prefetch_may_be_shorter_than_tiers_may_take() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=60.0)
    engine = restarted(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    assert isinstance(engine.clock, VirtualClock)
    given_at = engine.clock()
    give(engine, Hint.prefetch(deadline_s=2.0))
    ended: list[HintEnd] = []
    while not ended:
        assert engine.clock() < given_at + 2.2
        engine.step()
        ended = ends(engine)
        engine.clock.advance(0.1)
    assert ended == [HintEnd.FAILED]
    assert engine.clock() > given_at + 2.0
    queue.auto = True
    finish(engine, tiering)


@pytest.mark.parametrize("windows", [(6,), (None, 6)])
def test_of_a_window_a_prefetch_brings_up_what_the_end_of_the_prefix_needs(windows: tuple[int | None, ...]) -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering, windows=windows), tiering, "first", TOKENS)
    engine = make_engine(tiering, windows=windows)
    give(engine, Hint.prefetch())
    finish(engine, tiering)
    assert ends(engine) == [HintEnd.DONE]
    last = len(windows) - 1
    hashes = prefix(TOKENS).block_hashes
    there = tiering.manager.lookup([offload_key(block_hash, last) for block_hash in hashes])
    assert list(there) == [ABSENT] * 9 + [READY] * 2


def test_what_a_prefetch_has_brought_up_is_kept_until_its_deadline() -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    give(engine, Hint.prefetch(deadline_s=20.0))
    finish(engine, tiering)
    assert isinstance(engine.connector, OffloadingScheduler)
    (grant,) = engine.connector.hints.grants
    assert grant.ends_at - engine.clock() == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize(("hint", "level"), [(Hint.prefetch(), 100), (Hint.share(), Hint.share().priority)])
def test_what_a_prefetch_has_brought_up_outlives_all_that_is_only_retained_and_what_is_shared_does_not(
    hint: Hint, level: int
) -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    give(engine, hint)
    finish(engine, tiering)
    assert isinstance(engine.connector, OffloadingScheduler)
    assert level < 100 or hint.kind == "prefetch"
    assert {engine.connector.hints.grants.level_of(one) for one in keys_of(TOKENS, 11)} == {level}


def test_a_reset_voids_a_prefetch() -> None:
    tiering = SimulatedTiering(60)
    engine = restarted(tiering)
    give(engine, Hint.prefetch())
    assert engine.scheduler.reset_cache()
    assert ends(engine) == [HintEnd.VOID]
    finish(engine, tiering)
    serve(engine, tiering, "again", TOKENS)
    assert restored(engine, "again") == {}


def test_prefetches_are_limited_and_tell_so() -> None:
    tiering = SimulatedTiering(60, hints=HintConfig(retain_fraction=0.1))
    engine = restarted(tiering)
    outcome = give(engine, Hint.prefetch())
    assert (outcome.status, outcome.num_tokens) == (HintStatus.CLIPPED, 24)
    statuses = [give(engine, Hint.prefetch(), prompt(100 + at, 8)).status for at in range(70)]
    assert statuses[-1] is HintStatus.REJECTED
    finish(engine, tiering)


def test_a_tenant_has_half_of_the_places_for_prefetches() -> None:
    tiering = SimulatedTiering(60, hints=HintConfig(retain_fraction=1.0))
    engine = restarted(tiering)
    (queue,) = tiering.all_queues()
    queue.auto = False
    told = {
        tenant: [give(engine, Hint.prefetch(), prompt(100 + at, 8), tenant).status for at in range(MAX_AHEAD)]
        for tenant in ("ann", "bob")
    }
    for statuses in told.values():
        assert statuses.count(HintStatus.DEFERRED) == MAX_AHEAD // 2 == statuses.index(HintStatus.REJECTED)
    queue.auto = True
    finish(engine, tiering)


def test_what_is_fetched_for_a_tenant_counts_for_that_tenant() -> None:
    tiering = SimulatedTiering(60, quotas=[TenantQuota(tenant="ann", reserved="50%")])
    engine = make_engine(tiering)
    engine.add("first", TOKENS, 3, salt="ann")
    finish(engine, tiering)
    engine = make_engine(tiering)
    give(engine, Hint.prefetch(), TOKENS, "ann")
    finish(engine, tiering)
    assert tiering.manager.usage() == {"others": 0, "ann": 11}
