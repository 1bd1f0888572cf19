"""What hints ask reaches disks, with the chunks or after them, and ends there when the hint ends."""

from __future__ import annotations

import pytest

from cargohold.cache.retention import HELD, NO_RETENTION, NORMAL
from cargohold.lab.simulation import SimulatedEngine
from cargohold.lab.simulation.campaign import Recipe, play_seed
from cargohold.protocol import Hint, HintStatus
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import prompt
from tests.connector.test_hints import later, prefix
from tests.connector.tiering import finish, make_engine, serve
from tests.held_tiers import SimulatedTiering

DISK = TierOptions(name="disk", is_listed=True)
TOKENS = prompt(0, 41)
PIN = Hint.pin(ttl_s=300, lease="agent")


def engine_on(tiering: SimulatedTiering) -> SimulatedEngine:
    return make_engine(tiering)


def retained(tiering: SimulatedTiering, engine: SimulatedEngine) -> set[tuple[int, bool]]:
    """The levels of all chunks on disk, and whether they hold for more than the next minute."""
    retained = tiering.media[0][0].retained
    assert len(retained) == 10
    return {(retention.level, retention.until_s > engine.clock() + 60) for retention in retained.values()}


def hint(engine: SimulatedEngine, tiering: SimulatedTiering, one: Hint) -> None:
    (outcome,) = engine.scheduler.hint(prefix(TOKENS), [one])
    assert outcome.status is HintStatus.ACCEPTED
    finish(engine, tiering)


def test_chunks_are_written_down_with_what_hints_ask() -> None:
    tiering = SimulatedTiering(100, [DISK])
    engine = engine_on(tiering)
    engine.add("pinned", TOKENS, 1, hints=[PIN])
    finish(engine, tiering)
    assert retained(tiering, engine) == {(HELD, True)}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (PIN, (HELD, True)),
        (Hint.retain(priority=80, ttl_s=300), (80, True)),
        (Hint.retain(priority=10), (10, False)),
        (Hint.demote("nowhere"), (0, False)),
        (Hint.demote(), (NORMAL, False)),
    ],
)
def test_hints_that_come_later_reach_the_disk_and_their_release_too(one: Hint, expected: tuple[int, bool]) -> None:
    tiering = SimulatedTiering(100, [DISK])
    engine = engine_on(tiering)
    serve(engine, tiering, "first", TOKENS, 1)
    assert retained(tiering, engine) == {(NORMAL, False)}
    hint(engine, tiering, one)
    assert retained(tiering, engine) == {expected}
    hint(engine, tiering, Hint.release())
    assert set(tiering.media[0][0].retained.values()) == {NO_RETENTION}


def test_a_lease_that_is_used_is_renewed_on_disk_before_it_ends_there() -> None:
    tiering = SimulatedTiering(100, [DISK])
    engine = engine_on(tiering)
    serve(engine, tiering, "first", TOKENS, 1)
    hint(engine, tiering, PIN)
    for at in range(6):
        later(engine, 100.0)
        engine.add(f"again {at}", TOKENS, 1)
        finish(engine, tiering)
        assert retained(tiering, engine) == {(HELD, True)}
    later(engine, 400.0)
    assert retained(tiering, engine) == {(HELD, False)}


@pytest.mark.parametrize("seed", [38, 55])
def test_a_leased_chunk_that_comes_up_for_a_request_that_leaves_is_held(seed: int) -> None:
    """Found by simulation: only the admission of a request gave the chunks that came for it their leases."""
    assert play_seed(Recipe("hints", "tiered", frozenset()), seed).failure is None


def test_every_worker_s_disk_knows_what_hints_ask() -> None:
    tiering = SimulatedTiering(100, [DISK], 2)
    engine = make_engine(tiering)
    engine.add("pinned", TOKENS, 1, hints=[PIN])
    finish(engine, tiering)
    for medium in tiering.media[0]:
        assert len(medium.retained) == 10
        assert all(retention.level_at(engine.clock() + 60) == HELD for retention in medium.retained.values())
