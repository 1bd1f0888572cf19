"""Lower tiers in trouble: breakers, trials, and how long a tier takes."""

from __future__ import annotations

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.protocol import Outage, TransferOutcome, metrics
from cargohold.tiers import BreakerState, JobKind, TierHealth
from cargohold.tiers.scheduler_side import UNKNOWN, Chain, Fetch, fetches
from tests.tiers.scheduler_side.world import KEYS, World, breaker_state, fail_load, fail_loads, follow, key_of, written


def test_a_tier_that_keeps_failing_is_suspended_and_tried_again() -> None:
    world = World()
    for at in range(3):
        world.lower.probe([KEYS[at]])
        (probe,) = world.step()
        world.end(probe, [False], TransferOutcome.FAILED)
    assert world.lower.lookup([KEYS[5]])[0] == ABSENT, "at once, without asking"
    world.wait(11)
    assert world.lower.lookup([KEYS[8]])[0] == UNKNOWN
    world.lower.probe([KEYS[8]])
    (trial,) = world.step()
    assert world.lower.lookup([KEYS[9]])[0] == ABSENT, "nobody else waits for it"
    world.end(trial, [True])
    assert world.lower.lookup(KEYS[8:10]) == bytes([READY, UNKNOWN])


@pytest.mark.parametrize(("num_done", "is_left_alone"), [(1, True), (2, False)])
def test_an_expired_load_of_which_most_has_arrived_is_no_failure(num_done: int, is_left_alone: bool) -> None:
    # A tier that begins each load and then hangs must be left alone.
    world = World(capacity=16)
    for _ in range(4):
        world.learn(KEYS[:4])
        fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
        assert fetch is not None
        (load,) = world.step()
        fetch.give_up()
        world.end(load, [at < num_done for at in range(4)], TransferOutcome.ABANDONED)
        world.host.remove(KEYS[:4])
        if world.lower.lookup([KEYS[11]])[0] == ABSENT:
            break
    assert (world.lower.lookup([KEYS[11]])[0] == ABSENT) is is_left_alone


@pytest.mark.parametrize(("num_done", "is_left_alone"), [(0, True), (1, False)])
def test_an_expired_job_that_was_too_large_does_not_suspend_its_tier(
    num_done: int, is_left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a review: the first load of a long prompt was more than a disk brings up in time, and was held against it."""
    monkeypatch.setattr(fetches, "BATCH_CHUNKS", 2)
    world = World(capacity=16)
    world.learn(KEYS[:10])
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:10], None)], ())
    assert fetch is not None
    loads = world.step()
    assert len(loads) == 5
    world.clock.advance(0.5)
    for load in loads[:num_done]:
        world.end(load, [True, True])
    fetch.give_up()
    for load in loads[num_done:]:
        world.end(load, [False, False], TransferOutcome.ABANDONED)
    assert (world.lower.lookup([KEYS[11]])[0] == ABSENT) is is_left_alone


def test_failing_writes_do_not_suspend_loads() -> None:
    """Found by reading: what was on a full disk could not be loaded while its writes were suspended."""
    world = World(capacity=12)
    world.learn(KEYS[:2])
    for at in range(4, 7):
        world.keep(KEYS[at : at + 1])
        (store,) = world.step()
        world.end(store, [False] * len(store.keys), TransferOutcome.FAILED)
    world.keep(KEYS[8:12])  # more than may be written at the same time
    assert world.step() == []
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:2], None)], ())
    (load,) = world.step()
    world.end(load, [True, True])
    assert fetch is not None and set(fetch.sources) == set(KEYS[:2])
    fetch.release()
    assert world.step() == [], "that loads succeed says nothing of writes"
    world.clock.advance(11)
    (trial,) = world.step()
    assert trial.kind is JobKind.STORE
    assert world.step() == [], "one job finds out"
    world.end(trial, [True] * len(trial.keys))
    assert [command.kind for command in world.step()] == [JobKind.STORE], "and the others follow"


def test_successful_writes_and_look_ups_do_not_make_up_for_failing_loads() -> None:
    """Found by reading: a tier whose loads were all late was used for ever if something was written in between."""
    world = World(capacity=16, has_index=False)
    world.learn(KEYS[:1])
    for at in range(3):
        assert world.lower.lookup(KEYS[:1])[0] == READY
        written(world, KEYS[4 + at : 5 + at])
        (answered,) = world.lower.probe([KEYS[8 + at]])
        (probe,) = world.step()
        world.end(probe, [False])
        assert answered.has_ended
        fail_load(world, KEYS[0])
        world.learn(KEYS[:1])
    assert world.lower.lookup(KEYS[:1])[0] == ABSENT


def test_a_tier_that_is_off_on_a_worker_gets_no_job(caplog: pytest.LogCaptureFixture) -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.keep(KEYS[2:8])
    for at in range(8, 12):
        world.lower.probe([KEYS[at]])
    jobs = world.step()
    assert [job.kind for job in jobs] == [JobKind.PROBE] * 4 + [JobKind.STORE]
    known = follow(world, set())
    assert known == set(KEYS[:2])
    for worker in range(2):
        world.lower.note_report({}, {(worker, 0): TierHealth(is_off=True)})
    assert follow(world, known) == set(), "nobody can load anything from it"
    assert list(world.lower.lookup([KEYS[0], KEYS[11], key_of(1, 0)])) == [ABSENT] * 3
    world.lower.probe([key_of(1, 0)])
    world.manager.touch(KEYS[:8])
    world.keep([key_of(1, 0)])
    assert not world.lower.writes[0].backlog and world.step() == []
    for job in jobs:
        world.end(job, [True] * len(job.keys), TransferOutcome.DONE if job is jobs[-1] else TransferOutcome.FAILED)
    assert follow(world, set()) == set(), "what it wrote last is of no use"
    assert world.lower.take_stats()[metrics.OTHER.of("tier0_off")] == 1
    assert caplog.text.count("tier tier0 is off") == 1
    assert "for a while" not in caplog.text, "for it is not tried again"
    world.manager.check()


@pytest.mark.parametrize("state", [BreakerState.HALF_OPEN, BreakerState.OPEN])
@pytest.mark.parametrize("access", ["look_up", "load", "write"])
def test_a_tier_is_used_as_far_as_the_breakers_of_all_workers_allow(access: str, state: BreakerState) -> None:
    world = World(capacity=16, num_workers=2)
    (tier,) = world.lower.tiers
    for worker, suspended in ((1, True), (0, False), (1, False)):
        news = TierHealth(**{access: state}, reason="gone") if suspended else TierHealth()  # type: ignore[arg-type]  # by name
        world.lower.note_report({}, {(worker, 0): news})
        is_suspended = (worker, suspended) != (1, False)
        assert tier.health == (TierHealth(**{access: state}, reason="gone") if is_suspended else TierHealth())  # type: ignore[arg-type]  # by name
        is_open = is_suspended and state is BreakerState.OPEN
        assert tier.is_writable is not (is_open and access == "write")
        assert tier.is_readable is not (is_open and access != "write")
        assert tier.takes(JobKind.TOUCH) is not (is_suspended and access == "look_up"), "which is no trial"


def test_a_cancelled_trial_leaves_the_trial_to_another_job() -> None:
    world = World(capacity=16)
    fail_loads(world)
    world.wait(1.0)
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:1], None)], ())
    (load,) = world.step()
    (tier,) = world.lower.tiers
    assert fetch is not None and not tier.is_readable, "one job finds out"
    fetch.release()
    world.end(load, [False], TransferOutcome.ABANDONED)
    assert tier.is_readable


def test_the_measured_time_of_a_tier_expires_and_is_measured_again() -> None:
    world = World()
    world.learn(KEYS[:4])
    assert world.lower.estimate_s({0: 4}) == 0.0
    fetch = world.lower.fetches.begin([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    world.clock.advance(1.5)
    world.end(load, [True] * 4)
    fetch.release()
    world.clock.advance(29)
    assert world.lower.estimate_s({0: 4}) == pytest.approx(1.5)
    world.clock.advance(2)
    assert world.lower.estimate_s({0: 4}) == 0.0


@pytest.mark.parametrize(
    ("happens", "estimate_s"),
    [
        ("nothing", 0.5),
        ("a miss", 0.5),
        ("only misses", 0.5),
        ("another tier", 0.5),
        ("a failure", 0.0),
        ("a release", 0.0),
        ("giving up", 0.5),
    ],
)
def test_the_measured_time_of_a_tier_comes_from_jobs_that_were_not_cut_short(happens: str, estimate_s: float) -> None:
    world = World(num_tiers=2)
    world.learn(KEYS[:2])
    world.learn(KEYS[2:3], tier=1)
    chains = [Chain(0, KEYS[:2], None), Chain(1, KEYS[2:3], KEYS[1])]
    fetch = world.lower.fetches.begin(chains if happens == "another tier" else chains[:1], ())
    assert fetch is not None
    loads = world.step()
    world.clock.advance(0.5)
    if happens == "a release":
        fetch.release()
    if happens == "giving up":
        fetch.give_up()
    first, second = happens not in {"a miss", "only misses"}, happens != "only misses"
    outcome = TransferOutcome.FAILED if happens == "a failure" else TransferOutcome.DONE
    for load in loads:
        world.end(load, [first, second][: len(load.keys)], outcome)
    assert world.lower.estimate_s({0: 2}) == estimate_s


def test_tiers_are_measured_each_by_itself_and_work_side_by_side() -> None:
    """Found by simulation: a slow disk was never known to be slow while a part of each prompt came from elsewhere."""
    world = World(num_tiers=2)
    world.learn(KEYS[:2])
    world.learn(KEYS[2:4], tier=1)
    assert world.lower.fetches.begin([Chain(0, KEYS[:2], None), Chain(1, KEYS[2:4], KEYS[1])], ()) is not None
    fast, slow = world.step()
    for load, seconds in ((fast, 0.5), (slow, 1.0)):
        world.clock.advance(seconds)
        world.end(load, [True, True])
        if load is fast:
            assert world.lower.estimate_s({0: 2, 1: 2}) == 0.5, "as far as that is known"
    assert [world.lower.estimate_s({at: 2}) for at in range(2)] == [0.5, 1.5]
    assert world.lower.estimate_s({0: 2, 1: 2}) == 1.5


def test_a_touch_is_no_trial_and_no_failure_of_a_tier() -> None:
    world = World(capacity=16)
    written(world, KEYS[:4])
    for at in range(4):
        world.clock.advance(11)
        world.manager.touch(KEYS[at : at + 1])
        (touch,) = world.step()
        world.end(touch, [False], TransferOutcome.ABANDONED)
    assert breaker_state(world) is BreakerState.CLOSED
    for at in range(3):
        world.lower.probe([KEYS[5 + at]])
        (probe,) = world.step()
        world.end(probe, [False], TransferOutcome.FAILED)
    assert breaker_state(world) is BreakerState.OPEN
    world.clock.advance(11)
    world.manager.touch(KEYS[:4])
    assert world.step() == []
    assert breaker_state(world) is BreakerState.HALF_OPEN, "another job may try"
    assert world.lower.tiers[0].takes(JobKind.PROBE)


def test_a_trial_of_a_tier_keeps_no_other_job_waiting() -> None:
    world = World(has_index=False)
    for at in range(3):
        world.lower.probe([KEYS[at]])
        (probe,) = world.step()
        world.end(probe, [False], TransferOutcome.FAILED)
    world.wait(11)
    (trial,) = world.lower.probe([KEYS[5]])
    (other,) = world.lower.probe([KEYS[6]])
    (probe,) = world.step()
    assert probe.keys == (KEYS[5],)
    assert (trial.has_ended, other.has_ended) == (False, True)
    assert list(world.lower.lookup(KEYS[6:8])) == [ABSENT, ABSENT]
    world.end(probe, [True])
    assert list(world.lower.lookup(KEYS[5:7])) == [READY, UNKNOWN], "what was not asked is not known"


def test_a_tier_with_an_index_is_tried_by_loads() -> None:
    """Else a dead disk would be taken for alive with every probe, and cost a deadline of loads each time."""
    world = World()
    fail_loads(world)
    cooldown = 1.0
    for key in KEYS[4:7]:
        world.clock.advance(cooldown - 0.1)
        assert breaker_state(world) is BreakerState.OPEN, "one load was enough, and the pauses get longer"
        world.wait(0.1)
        world.lower.probe([key])
        (probe,) = world.step()
        world.end(probe, [True])
        assert breaker_state(world) is BreakerState.HALF_OPEN
        fail_load(world, key)
        cooldown *= 2


def test_an_outage_says_what_why_since_when_and_when_it_is_tried_again() -> None:
    world = World(num_workers=2)
    (tier,) = world.lower.tiers
    assert world.lower.outages() == []
    world.clock.advance(3)
    tier.note_health(0, TierHealth(load=BreakerState.OPEN, reason="gone", retry_s=1.0))
    assert world.lower.outages() == [Outage(tier.name, "loads", "gone", since=3.0, retry_at=4.0)]
    world.clock.advance(1)
    tier.note_health(1, TierHealth(write=BreakerState.OPEN, reason="full", retry_s=2.0))
    tier.note_health(0, TierHealth(load=BreakerState.HALF_OPEN, reason="gone"))
    (outage,) = world.lower.outages()
    assert (outage.what, outage.reason, outage.since, outage.retry_at) == ("loads and writes", "full", 3.0, 6.0)
    tier.note_health(0, TierHealth())
    assert [outage.what for outage in world.lower.outages()] == ["writes"]
    tier.note_health(1, TierHealth())
    assert world.lower.outages() == []
    tier.note_health(1, TierHealth(is_off=True))
    (outage,) = world.lower.outages()
    assert (outage.what, outage.since, outage.retry_at) == ("everything", 4.0, None)
