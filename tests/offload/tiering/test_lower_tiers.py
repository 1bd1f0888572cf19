"""Lower tiers as a state machine: any operations in any order, against what must always hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.offload.manager import (
    ChunksStored,
    LoadHandle,
    OffloadManager,
    StoreHandle,
    StoreOffer,
    make_manager,
)
from cargohold.offload.tier import (
    Answer,
    BreakerConfig,
    BreakerState,
    JobKind,
    JobStatus,
    LoadOutcome,
    StoreOutcome,
    TierHealth,
    TierJob,
)
from cargohold.offload.tier.health import MediumHealth
from cargohold.offload.tiering import (
    UNKNOWN,
    Admission,
    Chain,
    Fetch,
    LowerTiers,
    TierCommand,
    TieringConfig,
    TieringManager,
    TierOptions,
    WriteMode,
    fetches,
)
from cargohold.offload.tiering.tier_state import MIN_ANSWERS, TierState
from cargohold.protocol import TransferOutcome
from cargohold.simulation import VirtualClock
from tests.effort import examples

NUM_CHUNKS = 12
STATUSES = {
    TransferOutcome.DONE: JobStatus.DONE,
    TransferOutcome.FAILED: JobStatus.FAILED,
    TransferOutcome.ABANDONED: JobStatus.EXPIRED,
}
ANSWERS: dict[JobKind, tuple[Answer, Answer]] = {
    JobKind.PROBE: (False, True),
    JobKind.TOUCH: (False, True),
    JobKind.LOAD: (LoadOutcome.ABSENT, LoadOutcome.LOADED),
    JobKind.STORE: (StoreOutcome.REFUSED, StoreOutcome.STORED),
}


def key_of(prefix: int, at: int) -> bytes:
    return bytes([prefix, at]) * 16 + bytes(4)


class World:
    """A manager, and workers that are told what to answer."""

    def __init__(
        self,
        capacity: int = 8,
        num_tiers: int = 1,
        num_workers: int = 1,
        *,
        max_inflight_chunks: int = 64,
        max_chunks: int | None = None,
        max_daily_chunks: int | None = None,
        admission: Admission = Admission.ALL,
        write_mode: WriteMode = WriteMode.THROUGH,
        has_index: bool = True,
        max_asked_chunks: int = 65536,
        num_asked_at_once: int | None = None,
        host: OffloadManager | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.epochs: Iterator[bytes] = (bytes([at]) * 16 for at in range(1, 256))
        self.host = make_manager("lru", capacity) if host is None else host
        self.lower = LowerTiers(
            self.host,
            [
                TierOptions(
                    name=f"tier{at}",
                    admission=admission,
                    write_mode=write_mode,
                    max_inflight_chunks=max_inflight_chunks,
                    max_chunks=max_chunks,
                    max_daily_chunks=max_daily_chunks,
                    has_index=has_index,
                    max_asked_chunks=max_asked_chunks,
                    num_asked_at_once=num_asked_at_once,
                )
                for at in range(num_tiers)
            ],
            self.clock,
            TieringConfig(num_workers=num_workers, restore_timeout_s=2.0, store_timeout_s=5.0, record_events=True),
            new_epoch=lambda: next(self.epochs),
        )
        self.lower.clock.begin_step()  # so that time passes
        self.manager = TieringManager(self.host, self.lower)
        self.ids: Iterator[int] = iter(range(1, 10**9))
        self.running: dict[int, TierCommand] = {}
        self.jobs: dict[int, TierJob] = {}
        self.media = [
            MediumHealth(tier.name, self.clock, BreakerConfig(), has_index=has_index) for tier in self.lower.tiers
        ]

    def step(self) -> list[TierCommand]:
        self.report()
        commands = self.lower.take_commands(lambda: next(self.ids))
        self.running |= {command.job_id: command for command in commands}
        for command in commands:
            assert self.media[command.tier].admit(command.kind), "a job that workers would refuse"
            job = self.jobs[command.job_id] = TierJob(command.job_id, command.kind, command.keys, 0.0)
            job.queued_at = self.clock()
        return list(commands)

    def wait(self, seconds: float) -> None:
        """Let time pass in which workers report."""
        self.clock.advance(seconds)
        self.report()

    def report(self) -> None:
        """Let a worker report the health of the tiers, as it does with every step."""
        for at, medium in enumerate(self.media):
            if not self.lower.tiers[at].is_off and medium.report() != self.lower.tiers[at].health:
                self.lower.note_health(0, at, medium.report())

    def end(self, command: TierCommand, answers: list[bool], outcome: TransferOutcome = TransferOutcome.DONE) -> None:
        assert len(answers) == len(command.keys)
        del self.running[command.job_id]
        self._judge(command, answers, outcome)
        self.report()
        self.lower.note_answers(command.job_id, bytes(answers), self.lower.config.num_workers)
        assert self.lower.end(command.job_id, outcome)

    def _judge(self, command: TierCommand, answers: list[bool], outcome: TransferOutcome) -> None:
        job, medium = self.jobs.pop(command.job_id), self.media[command.tier]
        task = self.lower._tasks.get(command.job_id)
        job.status = STATUSES[outcome] if task is not None and not task.is_cancelled else JobStatus.CANCELLED
        for at, is_good in enumerate(answers):
            if is_good or job.status is JobStatus.DONE:
                answer = job.answers[at] = ANSWERS[command.kind][is_good]
                medium.note_answers(job, [answer])
        medium.note_end(job)

    def keep(self, keys: list[bytes], parent: bytes | None = None) -> None:
        handle = self.manager.prepare_store(keys, parent)
        handle.commit()

    def learn(self, keys: list[bytes], tier: int = 0) -> None:
        """Let a tier say that it has these chunks."""
        self.lower.probe(keys)
        for _ in range(tier + 1):
            for command in self.step():
                if command.kind is JobKind.PROBE:
                    self.end(command, [command.tier == tier] * len(command.keys))
            self.lower.probe([key for key in keys if self.lower.lookup([key])[0] == UNKNOWN])


KEYS = [key_of(0, at) for at in range(NUM_CHUNKS)]


def test_look_up_says_what_is_known() -> None:
    world = World(num_tiers=2)
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:2])
    assert world.lower.lookup([KEYS[0]])[0] == NOT_YET
    (probe,) = world.step()
    assert (probe.kind, probe.tier, probe.keys) == (JobKind.PROBE, 0, tuple(KEYS[:2]))
    world.end(probe, [True, False])
    assert list(world.lower.lookup(KEYS[:2])) == [READY, UNKNOWN], "the next tier was not asked yet"
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert (probe.tier, probe.keys) == (1, (KEYS[1],))
    world.end(probe, [False])
    assert list(world.lower.lookup(KEYS[:2])) == [READY, ABSENT]


def test_a_probe_is_not_repeated_while_it_runs() -> None:
    world = World()
    world.lower.probe(KEYS[:2])
    world.lower.probe(KEYS[:3])
    assert [command.keys for command in world.step()] == [tuple(KEYS[:2]), (KEYS[2],)]
    assert world.step() == []


def test_a_question_about_more_than_a_tier_takes_at_a_time_is_several() -> None:
    world = World(max_asked_chunks=5)
    world.keep([key_of(1, at) for at in range(8)])
    while commands := world.step():
        for command in commands:
            world.end(command, [True] * len(command.keys))
    probes = world.lower.probe(KEYS)
    asked = []
    while commands := world.step():
        assert len(commands) == 1, "what is written does not count, and what is asked for does"
        for command in commands:
            asked.append(command.keys)
            world.end(command, [True] * len(command.keys))
    assert asked == [tuple(KEYS[:5]), tuple(KEYS[5:10]), tuple(KEYS[10:])]
    assert all(probe.has_ended for probe in probes)
    assert list(world.lower.lookup(KEYS)) == [READY] * NUM_CHUNKS


def test_who_waits_for_a_full_tier_is_not_overtaken_and_nothing_is_too_large_for_an_idle_one() -> None:
    world = World(max_asked_chunks=5)
    world.lower.probe(KEYS[:4])
    (first,) = world.step()
    world.lower.probe(KEYS[4:9])
    world.lower.probe(KEYS[9:10])
    assert world.step() == [], "the last would have room"
    world.end(first, [True] * 4)
    (second,) = world.step()
    assert second.keys == tuple(KEYS[4:9])
    world.end(second, [True] * 5)
    (third,) = world.step()
    world.end(third, [True])
    fetch = world.lower.fetch([Chain(0, KEYS[:6], None)], ())
    (load,) = world.step()
    assert load.keys == tuple(KEYS[:6])
    world.end(load, [True] * 6)
    assert isinstance(fetch, Fetch)
    fetch.release()


def test_a_fetch_is_not_ready_before_all_workers_are_done() -> None:
    world = World(num_workers=3)
    world.learn(KEYS[:4])
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    assert list(world.lower.lookup(KEYS[:4])) == [NOT_YET] * 4
    world.lower.note_answers(load.job_id, bytes([1, 1, 0, 1]), 2)
    world.lower.note_answers(load.job_id, bytes([1, 1, 1, 1]), 1)
    assert world.manager.num_ready == 0
    assert world.lower.end(load.job_id, TransferOutcome.DONE)
    assert list(world.manager.lookup(KEYS[:4])) == [READY, READY, ABSENT, READY]
    assert list(fetch.sources) == [KEYS[0], KEYS[1], KEYS[3]]
    assert world.manager.num_pins == 3
    world.manager.check()
    fetch.release()
    assert world.manager.num_pins == 0


def test_answers_of_too_few_workers_count_for_nothing() -> None:
    world = World(num_workers=2)
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    world.lower.note_answers(probe.job_id, bytes([1, 1]), 1)
    world.lower.end(probe.job_id, TransferOutcome.DONE)
    assert world.lower.lookup([KEYS[0]])[0] == ABSENT


def test_chunks_of_several_prefixes_are_written_down_behind_their_own_parents() -> None:
    world = World(capacity=16)
    others = [key_of(1, at) for at in range(2)]
    world.keep(KEYS[:1])
    for write in world.step():
        world.end(write, [True] * len(write.keys))
    handle = world.manager.prepare_stores(
        [StoreOffer(KEYS[1:2], KEYS[0]), StoreOffer(others, None), StoreOffer(KEYS[:1], None)]
    )
    assert world.step() == [], "nothing is there yet"
    handle.commit()
    (write,) = world.step()  # one job for all
    assert dict(zip(write.keys, write.parents, strict=True)) == {
        KEYS[1]: KEYS[0],
        others[0]: None,
        others[1]: others[0],
    }
    slots = world.host.prepare_load(write.keys)
    assert list(write.slots) == list(slots.slots)
    slots.release()
    world.end(write, [True] * len(write.keys))
    assert world.step() == []


def test_when_no_slot_can_be_had_nothing_is_held() -> None:
    world = World(capacity=4)
    world.learn(KEYS)
    busy = world.manager.prepare_store([key_of(1, at) for at in range(4)])
    assert world.lower.fetch([Chain(0, KEYS, None)], ()) is None
    assert world.step() == [] and world.lower.is_idle
    before = world.manager.generation
    busy.forfeit()
    fetch = world.lower.fetch([Chain(0, KEYS, None)], ())
    assert isinstance(fetch, Fetch) and world.manager.num_writing == 4
    assert world.manager.generation >= before


def test_a_fetch_that_found_slots_for_one_of_its_chains_goes_on_with_that() -> None:
    world = World(capacity=4)
    others = [key_of(1, at) for at in range(3)]
    world.learn([*KEYS[:4], *others])
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None), Chain(0, others, None)], ())
    assert isinstance(fetch, Fetch) and not fetch.is_released
    (load,) = world.step()
    world.end(load, [True] * 4)
    assert list(world.manager.lookup(KEYS[:4])) == [READY] * 4 and world.manager.num_pins == 4
    fetch.release()


def test_a_long_chain_is_brought_up_in_several_jobs_as_far_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(capacity=300)
    keys = [at.to_bytes(32, "big") + bytes(4) for at in range(400)]
    world.learn(keys)
    prepare_stores = world.host.prepare_stores
    parents: list[bytes | None] = []

    def noted(offers: Sequence[StoreOffer]) -> StoreHandle:
        parents.extend(offer.parent for offer in offers)
        return prepare_stores(offers)

    monkeypatch.setattr(world.host, "prepare_stores", noted)
    fetch = world.lower.fetch([Chain(0, keys, None)], ())
    assert isinstance(fetch, Fetch) and fetch.num_running == 3
    loads = world.step()
    assert [load.keys for load in loads] == [tuple(keys[:128]), tuple(keys[128:256]), tuple(keys[256:300])]
    assert parents == [None, keys[127], keys[255]]
    for load in loads:
        world.end(load, [True] * len(load.keys))
    assert fetch.num_running == 0 and list(world.manager.lookup(keys[:301])) == [*[READY] * 300, ABSENT]
    fetch.release()


def test_what_is_on_its_way_already_is_not_asked_for_again() -> None:
    world = World()
    world.learn(KEYS[:2])
    first = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    second = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    assert isinstance(first, Fetch) and isinstance(second, Fetch)
    assert (first.num_running, second.num_running) == (1, 0)
    (load,) = world.step()
    world.end(load, [True, True])
    first.release()
    second.release()
    assert world.manager.num_pins == 0 and world.lower.is_idle


def test_what_is_kept_for_a_fetch_is_not_evicted_by_it() -> None:
    world = World(capacity=4)
    world.keep(KEYS[:2])
    world.learn(KEYS[2:6])
    fetch = world.lower.fetch([Chain(0, KEYS[2:6], KEYS[1])], KEYS[:2])
    assert isinstance(fetch, Fetch)
    loads = [command for command in world.step() if command.kind is JobKind.LOAD]
    assert [command.keys for command in loads] == [tuple(KEYS[2:4])]
    assert list(world.manager.lookup(KEYS[:2])) == [READY, READY]


def test_a_released_fetch_is_cancelled_and_others_can_have_the_slots() -> None:
    world = World(capacity=4)
    world.learn(KEYS[:4])
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    before = world.manager.generation
    fetch.release()
    assert world.manager.generation != before, "whoever waits for the same chunks looks again"
    assert world.lower.take_cancelled() == (load.job_id,)
    assert world.lower.take_cancelled() == ()
    assert world.manager.num_writing == 4, "until the workers have let go of them"
    world.end(load, [False] * 4, TransferOutcome.ABANDONED)
    assert (world.manager.num_writing, world.manager.num_free) == (0, 4)
    assert list(world.lower.lookup(KEYS[:4])) == [READY] * 4, "the tier still has them"
    assert world.lower.tiers[0].stats["failures"] == 0, "and is not to blame"


def test_what_arrives_for_a_released_fetch_is_ready_and_held_by_nobody() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    (load,) = world.step()
    fetch.release()
    world.end(load, [True] * 4)
    assert list(world.manager.lookup(KEYS[:4])) == [READY] * 4
    assert world.manager.num_pins == 0


def test_a_fetch_that_never_got_to_the_workers_is_forgotten() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
    assert isinstance(fetch, Fetch)
    fetch.release()
    assert world.step() == []
    assert world.lower.is_idle and world.manager.num_free == 8


def test_what_was_released_before_it_was_handed_out_is_not_wanted_again_when_others_are_released() -> None:
    world = World()
    world.learn(KEYS[:4])
    fetches = [world.lower.fetch([Chain(0, [key], None)], ()) for key in KEYS[:4]]
    for fetch in fetches:
        assert isinstance(fetch, Fetch)
        fetch.release()
    assert world.step() == []
    assert world.lower.is_idle and world.manager.num_free == 8


def test_workers_hear_once_of_a_job_that_is_cancelled_and_not_of_one_that_has_ended() -> None:
    world = World(capacity=16)
    world.keep(KEYS[:2])
    (store,) = world.step()
    assert world.manager.reset()
    assert world.lower.take_cancelled() == (store.job_id,)
    world.keep(KEYS[:2])
    (other,) = world.step()
    assert world.manager.reset()
    assert world.lower.take_cancelled() == (other.job_id,), "of the first they know"
    for job in (store, other):
        world.end(job, [False] * 2, TransferOutcome.ABANDONED)
    world.keep(KEYS[:2])
    (ended,) = world.step()
    assert world.manager.reset()
    world.end(ended, [True] * 2)
    assert world.lower.take_cancelled() == ()


def test_nobody_holds_chunks_for_ever() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    (load,) = world.step()
    world.end(load, [True, True])
    assert world.manager.num_pins == 2
    world.clock.advance(3.9)
    world.step()
    assert world.manager.num_pins == 2, "after the time to wait there is as much to be admitted"
    world.clock.advance(0.2)
    world.step()
    assert isinstance(fetch, Fetch) and fetch.is_released
    assert world.manager.num_pins == 0


def test_a_tier_that_keeps_failing_is_left_alone_and_tried_again() -> None:
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
def test_a_load_of_which_most_has_come_in_time_is_no_failure(num_done: int, is_left_alone: bool) -> None:
    # A tier that begins each load and then hangs must be left alone.
    world = World(capacity=16)
    for _ in range(4):
        world.learn(KEYS[:4])
        fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
        assert fetch is not None
        (load,) = world.step()
        fetch.give_up()
        world.end(load, [at < num_done for at in range(4)], TransferOutcome.ABANDONED)
        world.host.remove(KEYS[:4])
        if world.lower.lookup([KEYS[11]])[0] == ABSENT:
            break
    assert (world.lower.lookup([KEYS[11]])[0] == ABSENT) is is_left_alone


@pytest.mark.parametrize(("num_done", "is_left_alone"), [(0, True), (1, False)])
def test_a_tier_that_was_asked_for_more_than_it_can_do_in_time_is_not_left_alone(
    num_done: int, is_left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a review: the first load of a long prompt was more than a disk brings up in time, and was held against it."""
    monkeypatch.setattr(fetches, "BATCH_CHUNKS", 2)
    world = World(capacity=16)
    world.learn(KEYS[:10])
    fetch = world.lower.fetch([Chain(0, KEYS[:10], None)], ())
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


def test_a_tier_whose_writes_keep_failing_still_gives_back_what_it_has() -> None:
    """Found by reading: what was on a full disk could not be loaded while its writes were suspended."""
    world = World(capacity=12)
    world.learn(KEYS[:2])
    for at in range(4, 7):
        world.keep(KEYS[at : at + 1])
        (store,) = world.step()
        world.end(store, [False], TransferOutcome.FAILED)
    world.keep(KEYS[8:12])  # more than may be written at the same time
    assert world.step() == []
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
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


def test_writes_and_look_ups_that_succeed_do_not_make_up_for_loads_that_fail() -> None:
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


def test_a_tier_that_a_worker_will_not_use_any_more_is_asked_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
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
        world.lower.note_health(worker, 0, TierHealth(is_off=True))
    assert follow(world, known) == set(), "nobody can load anything from it"
    assert list(world.lower.lookup([KEYS[0], KEYS[11], key_of(1, 0)])) == [ABSENT] * 3
    world.lower.probe([key_of(1, 0)])
    world.manager.touch(KEYS[:8])
    world.keep([key_of(1, 0)])
    assert not world.lower.tiers[0].backlog and world.step() == []
    for job in jobs:
        world.end(job, [True] * len(job.keys), TransferOutcome.DONE if job is jobs[-1] else TransferOutcome.FAILED)
    assert follow(world, set()) == set(), "what it wrote last is of no use"
    assert world.lower.take_stats()["tier0_off"] == 1
    assert caplog.text.count("tier tier0 is off") == 1
    assert "for a while" not in caplog.text, "for it is not tried again"
    world.manager.check()


def test_slots_of_a_job_that_is_not_reported_stay_reserved_until_it_is() -> None:
    world = World(num_workers=2)
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    world.lower.note_answers(load.job_id, bytes([1, 1]), 1)
    for _ in range(9):
        world.clock.advance(9.0)
        world.step()
    assert fetch.is_released, "nobody waits any more"
    assert load.job_id in world.lower.take_cancelled()
    assert world.manager.num_writing == 2 and not world.manager.num_pins
    world.jobs.clear()
    assert world.lower.end(load.job_id, TransferOutcome.FAILED)
    assert world.manager.num_writing == 0


@pytest.mark.parametrize("state", [BreakerState.HALF_OPEN, BreakerState.OPEN])
@pytest.mark.parametrize("access", ["look_up", "load", "write"])
def test_a_tier_is_used_as_far_as_all_workers_can(access: str, state: BreakerState) -> None:
    world = World(capacity=16, num_workers=2)
    (tier,) = world.lower.tiers
    for worker, suspended in ((1, True), (0, False), (1, False)):
        news = TierHealth(**{access: state}, reason="gone") if suspended else TierHealth()  # type: ignore[arg-type]  # by name
        world.lower.note_health(worker, 0, news)
        is_suspended = (worker, suspended) != (1, False)
        assert tier.health == (TierHealth(**{access: state}, reason="gone") if is_suspended else TierHealth())  # type: ignore[arg-type]  # by name
        is_open = is_suspended and state is BreakerState.OPEN
        assert tier.is_writable is not (is_open and access == "write")
        assert tier.is_readable is not (is_open and access != "write")
        assert tier.takes(JobKind.TOUCH) is not (is_suspended and access == "look_up"), "which is no trial"


def test_chunks_are_written_in_prefix_order_with_their_parents() -> None:
    world = World(max_inflight_chunks=2)
    world.keep(KEYS[:3])
    world.keep(KEYS[3:5], KEYS[2])
    written = []
    while commands := world.step():
        for command in commands:
            written.append((command.keys, command.parents))
            assert len(command.slots) == len(command.keys)
            world.end(command, [True] * len(command.keys))
    assert written == [
        (tuple(KEYS[:2]), (None, KEYS[0])),
        (tuple(KEYS[2:4]), tuple(KEYS[1:3])),
        ((KEYS[4],), (KEYS[3],)),
    ]
    assert list(world.lower.lookup(KEYS[:5])) == [READY] * 5


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_a_host_memory_of_few_chunks_is_written_down_too(capacity: int) -> None:
    world = World(capacity)
    world.keep(KEYS[:capacity])
    written = []
    while commands := world.step():
        (command,) = commands
        written.append(command.keys)
        world.end(command, [True])
    assert written == [(key,) for key in KEYS[:capacity]], "one at a time"


def test_what_is_written_back_waits_until_host_memory_is_nearly_full_of_it_and_the_least_used_goes_first() -> None:
    world = World(write_mode=WriteMode.BACK)
    for first in (0, 3):
        world.keep(KEYS[first : first + 3])
        assert world.step() == []
    world.manager.touch(KEYS[:2])
    world.keep(KEYS[6:7])
    (store,) = world.step()
    assert (store.kind, store.keys) == (JobKind.STORE, (KEYS[2],))
    world.end(store, [True])
    assert [command for command in world.step() if command.kind is JobKind.STORE] == []


def test_use_does_not_postpone_what_is_written_at_once() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    world.manager.touch(KEYS[:1])
    assert [command.keys for command in world.step()] == [(KEYS[0],)]


def test_of_chunks_seen_once_the_latest_are_remembered_and_written_when_they_come_again() -> None:
    world = World(capacity=2, admission=Admission.REUSED)
    for key in KEYS[:9]:  # one more than are remembered
        world.keep([key])
        assert world.step() == []
    world.keep(KEYS[:1])
    assert world.step() == [], "the first was forgotten"
    world.keep(KEYS[2:3])
    assert [(command.keys, command.parents) for command in world.step()] == [((KEYS[2],), (None,))]


def test_a_chunk_counts_as_seen_also_while_the_tier_has_it() -> None:
    tier = TierState(TierOptions(name="tier", admission=Admission.REUSED), 8, VirtualClock(), TieringConfig())
    for is_there in (True, False):
        tier.note_presence(KEYS[:1], [is_there])
        tier.note_new_in_host(KEYS[:1], {KEYS[0]: None})
        assert len(tier.backlog) == (0 if is_there else 1)


def test_what_could_not_be_written_is_not_tried_again_with_every_use() -> None:
    """A disk that is full, or has a bad place, would be written to all the time."""
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [True, False])
    for _ in range(3):
        world.manager.touch(KEYS[:2])
        assert world.step() == []


def test_what_is_used_is_written_once_each_chunk_with_its_parent() -> None:
    world = World(capacity=16, admission=Admission.REUSED)
    world.keep(KEYS[:4])
    world.manager.touch(KEYS[:6])
    assert len(world.lower.tiers[0].backlog) == 4, "what host memory has"
    (store,) = world.step()
    assert (store.kind, store.keys, store.parents) == (JobKind.STORE, tuple(KEYS[:4]), (None, *KEYS[:3]))
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is being written"
    world.end(store, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert len(world.lower.tiers[0].backlog) == 0
    assert world.step() == []
    stats = world.lower.take_stats()
    assert (stats["tier0_stored_chunks"], stats["tier0_not_stored_chunks"]) == (4, 0)


def test_what_the_tier_has_is_not_written_again() -> None:
    world = World()
    world.learn(KEYS[:2])
    world.keep(KEYS[:3])
    assert len(world.lower.tiers[0].backlog) == 1, "nor does it wait for its turn, and keep the engine stepping"
    assert [command.keys for command in world.step()] == [(KEYS[2],)]


def test_a_daily_budget_is_kept() -> None:
    world = World(max_daily_chunks=48)
    world.keep(KEYS[:6])
    (store,) = world.step()
    assert len(store.keys) == 1, "a start is given little"
    world.end(store, [True])
    assert world.step() == []
    world.clock.advance(1801)
    assert [len(command.keys) for command in world.step()] == [1]


def test_a_large_daily_budget_lets_no_more_be_written_at_the_same_time() -> None:
    world = World(max_daily_chunks=48_000, max_inflight_chunks=1)
    world.keep(KEYS[:3])
    assert [len(command.keys) for command in world.step()] == [1]
    assert world.step() == []


def test_after_a_reset_chunks_have_other_names() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [True, True])
    assert world.manager.reset()
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert [len(key) for key in probe.keys] == [36, 36] and all(key[-4:] == bytes(4) for key in probe.keys)
    world.end(probe, [False, False])
    assert world.manager.reset()
    world.lower.probe(KEYS[:2])
    (again,) = world.step()
    assert len({*store.keys, *probe.keys, *again.keys}) == 6, (
        "each chunk has one of its own, and another after each reset"
    )


@pytest.mark.parametrize("outcome", [TransferOutcome.DONE, TransferOutcome.ABANDONED])
def test_a_reset_does_not_wait_for_a_slow_medium_that_still_writes(outcome: TransferOutcome) -> None:
    world = World(host=make_manager("lru", 8))
    world.keep(KEYS[:3])
    (store,) = world.step()
    assert world.manager.reset()
    assert world.manager.lookup(KEYS[:3]) == bytes([ABSENT] * 3)
    assert world.lower.take_cancelled() == (store.job_id,)
    assert len(store.keys) == 2 and world.manager.num_free == 6, "what workers may still read must not be overwritten"
    world.manager.check()
    world.keep(KEYS[:3])
    assert world.manager.num_free == 3
    world.end(store, [outcome is TransferOutcome.DONE] * 2, outcome)
    assert world.manager.num_free == 5
    world.manager.check()
    assert list(world.lower.lookup(KEYS[:3])) == [UNKNOWN] * 3, "it was written under names that nobody uses any more"


def test_what_comes_again_after_a_reset_is_written_though_its_old_name_still_is() -> None:
    """Before, it was taken for what was being written, and not in the tier when host memory had evicted it."""
    world = World(capacity=16)
    world.keep(KEYS[:2])
    (old,) = world.step()
    assert world.manager.reset()
    world.keep(KEYS[:4])
    (new,) = world.step()
    assert len(new.keys) == 2 and not set(new.keys) & set(old.keys), "as many at a time, whatever their names"
    world.manager.check()
    world.end(old, [True] * 2)
    world.manager.touch(KEYS[:2])
    (rest,) = world.step()  # what is being written is neither written again nor asked for
    for store in (new, rest):
        world.end(store, [True] * 2)
    world.manager.check()
    assert list(world.lower.lookup(KEYS[:4])) == [READY] * 4
    assert world.step() == []


@pytest.mark.parametrize("admission", Admission)
def test_a_reset_forgets_what_waits_to_be_written_and_what_was_seen_once(admission: Admission) -> None:
    world = World(capacity=16, admission=admission)
    world.keep(KEYS[:4])
    assert world.manager.reset()
    assert not world.lower.is_settling and world.step() == []
    world.keep(KEYS[:4])
    assert [command.kind for command in world.step()] == ([JobKind.STORE] if admission is Admission.ALL else [])


def test_of_what_is_written_under_old_names_each_job_counts_until_it_has_ended() -> None:
    world = World(capacity=16)
    olds = []
    for first in (0, 2):
        world.keep(KEYS[first : first + 2])
        olds += world.step()
    assert world.manager.reset()
    world.keep(KEYS[:6])
    for old in olds:
        assert sum(len(job.keys) for job in world.running.values()) == 4 and world.step() == []
        world.end(old, [True] * 2)
        world.manager.check()
        assert [len(new.keys) for new in world.step()] == [2]


def test_a_reset_is_refused_while_chunks_are_held_for_somebody() -> None:
    world = World()
    world.keep(KEYS[:2])
    fetch = world.lower.fetch([], KEYS[:2])
    assert fetch is not None
    refused = world.manager.reset()
    fetch.release()
    assert (refused, world.manager.reset()) == (False, True)


def test_a_reset_is_refused_while_chunks_are_brought_up() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], [])
    assert fetch is not None and not world.manager.reset()
    (load,) = world.step()
    fetch.release()
    assert not world.manager.reset(), "workers may still write there"
    world.end(load, [False, False], TransferOutcome.ABANDONED)
    assert world.manager.reset()


def test_a_reset_does_not_wait_for_answers_and_ignores_them() -> None:
    world = World()
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    assert world.manager.reset()
    assert world.lower.take_cancelled() == (probe.job_id,)
    world.end(probe, [True, True])
    assert list(world.lower.lookup(KEYS[:2])) == [UNKNOWN, UNKNOWN]


def test_the_engine_steps_on_for_a_while_to_have_things_written() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    while world.lower.is_settling:
        for command in world.step():
            world.end(command, [True])
    assert len(world.lower.tiers[0].backlog) == 0
    world.keep(KEYS[3:5])
    world.step()
    before = world.lower.is_settling
    world.clock.advance(3.1)
    assert (before, world.lower.is_settling) == (True, False), "the tier does nothing, so nobody waits for it"
    world.keep(KEYS[5:6])
    world.step()
    still = world.lower.is_settling
    world.end(next(iter(world.running.values())), [True])
    assert (still, world.lower.is_settling) == (False, True), "until it does something"


def test_the_engine_steps_on_no_longer_than_a_while_however_much_is_to_be_written() -> None:
    world = World(capacity=16, max_inflight_chunks=1)
    world.keep(KEYS)
    num_steps = 0
    while world.lower.is_settling:
        (store,) = world.step()
        world.clock.advance(1.0)
        world.end(store, [True])
        num_steps += 1
    assert num_steps == 5 and world.lower.tiers[0].backlog


def test_who_was_idle_for_long_steps_on_as_well() -> None:
    world = World()
    world.clock.advance(60.0)
    world.step()
    world.keep(KEYS[:2])
    assert world.step() and world.lower.is_settling


def test_the_engine_steps_on_to_have_written_what_was_used_but_not_to_tell_of_use() -> None:
    world = World(admission=Admission.REUSED)
    world.keep(KEYS[:2])
    settling = []
    for _ in range(2):
        world.clock.advance(60.0)
        settling.append(world.lower.is_settling)
        world.manager.touch(KEYS[:2])
        settling.append(world.lower.is_settling)
        if len(settling) == 2:
            for command in world.step():
                world.end(command, [True] * len(command.keys))
    assert settling == [False, True, False, False], "its second use makes it worth writing, and further ones nothing"
    assert [command.kind for command in world.step()] == [JobKind.TOUCH], "that waits for somebody who steps"


def test_answers_of_a_job_that_is_not_in_flight_are_ignored() -> None:
    world = World()
    world.learn(KEYS[:1])
    known = world.lower.lookup(KEYS[:2])
    world.lower.note_answers(10**9, b"\1", 1)
    assert not world.lower.end(10**9, TransferOutcome.DONE)
    assert world.lower.lookup(KEYS[:2]) == known


def test_nothing_is_on_its_way_or_held_in_an_idle_tier() -> None:
    world = World()
    seen = []

    def note() -> None:
        seen.append((world.lower.is_idle, world.lower.is_fetching))

    world.lower.probe(KEYS[:2])
    note()
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    note()
    (load,) = world.step()
    world.end(load, [True, False])
    note()
    fetch.release()
    note()
    world.keep(KEYS[2:3])
    world.step()
    note()
    assert seen == [(True, False), (False, True), (False, True), (True, False), (False, False)]
    stats = world.lower.take_stats()
    assert (stats["tier0_loaded_chunks"], stats["tier0_not_loaded_chunks"]) == (1, 1)
    assert not world.lower.take_stats(), "since the last time"


def test_what_is_loading_for_a_released_fetch_is_still_being_brought_up() -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    fetch.release()
    before = (world.lower.is_fetching, world.lower.is_settling, world.manager.reset())
    world.end(load, [False, False], TransferOutcome.ABANDONED)
    assert before == (True, True, False)
    assert (world.lower.is_fetching, world.manager.reset()) == (False, True)


def test_a_look_up_is_repeated_when_something_may_have_changed_and_only_then() -> None:
    world = World(capacity=16)
    changes = [world.lower.num_changes]

    def changed() -> bool:
        changes.append(world.lower.num_changes)
        return changes[-1] > changes[-2]

    world.clock.advance(2.0)
    assert not changed()
    written(world, KEYS[:2])
    assert changed()
    world.clock.advance(11.0)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    world.end(touch, [True, True])
    assert touch.kind is JobKind.TOUCH and not changed()
    fetch = world.lower.fetch([], KEYS[:2])
    assert fetch is not None
    fetch.release()
    assert changed(), "others may find slots"
    world.lower.note_health(0, 0, TierHealth(load=BreakerState.OPEN))
    assert changed(), "loads are suspended"
    world.lower.note_health(0, 0, TierHealth())
    world.lower.probe(KEYS[2:3])
    (probe,) = world.step()
    changed()
    world.end(probe, [False])
    assert changed()


def test_a_look_up_up_to_the_first_absent_chunk_says_nothing_of_those_behind() -> None:
    world = World()
    world.lower.probe(KEYS[:4])
    (probe,) = world.step()
    assert list(world.lower.lookup(KEYS[:4], up_to_absent=True)) == [NOT_YET] * 4
    world.end(probe, [True, True, False, True])
    assert list(world.lower.lookup(KEYS[:4])) == [READY, READY, ABSENT, READY]
    assert list(world.lower.lookup(KEYS[:4], up_to_absent=True)) == [READY, READY]


@pytest.mark.parametrize(
    ("outcome", "is_reset", "state"),
    [
        (TransferOutcome.DONE, False, READY),
        (TransferOutcome.FAILED, False, UNKNOWN),
        (TransferOutcome.DONE, True, UNKNOWN),
    ],
)
def test_answers_to_touches_count_unless_they_failed_or_came_after_a_reset(
    outcome: TransferOutcome, *, is_reset: bool, state: int
) -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.kind is JobKind.TOUCH
    assert not is_reset or world.manager.reset()
    world.end(touch, [True, True], outcome)
    assert list(world.lower.lookup(KEYS[:2])) == [state] * 2


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_failed_load_wanted_is_asked_for_again_but_not_what_nobody_wanted_any_more(
    *, is_cancelled: bool
) -> None:
    world = World()
    world.learn(KEYS[:2])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    assert fetch is not None
    (load,) = world.step()
    if is_cancelled:
        fetch.release()
    world.end(load, [True, False], TransferOutcome.FAILED)
    assert list(world.lower.lookup(KEYS[:2])) == [READY if is_cancelled else UNKNOWN] * 2


def test_of_what_came_from_further_away_nearer_tiers_get_what_arrived() -> None:
    world = World(num_tiers=2)
    world.learn(KEYS[:3], tier=1)
    world.lower.fetch([Chain(1, KEYS[:3], None)], ())
    (load,) = world.step()
    world.end(load, [True, False, True])
    assert [(job.tier, job.keys, job.parents) for job in world.step()] == [(0, (KEYS[0], KEYS[2]), (None, KEYS[1]))]


def test_a_chunk_counts_as_what_all_workers_say_together() -> None:
    world = World(num_workers=3)
    world.lower.probe(KEYS[:4])
    (probe,) = world.step()
    for answers, num_workers in ((b"\1\1\0\1", 1), (b"\1\0\1\1", 2)):
        world.lower.note_answers(probe.job_id, answers, num_workers)
    assert world.lower.end(probe.job_id, TransferOutcome.DONE)
    assert list(world.lower.lookup(KEYS[:4])) == [READY, ABSENT, ABSENT, READY]


def test_host_memory_hears_of_use_and_what_changes_in_either_is_a_change() -> None:
    world = World(capacity=2)
    generations = [world.manager.generation]
    written(world, KEYS[:1])
    generations.append(world.manager.generation)
    world.keep(KEYS[1:2])
    generations.append(world.manager.generation)
    world.lower.note_health(0, 0, TierHealth(is_off=True))
    generations.append(world.manager.generation)
    assert sorted(set(generations)) == generations
    world.manager.touch(KEYS[:1])
    world.keep(KEYS[2:3])
    assert list(world.manager.lookup(KEYS[:3])) == [READY, ABSENT, READY], "what was used last stays"


def test_of_several_fetches_the_released_one_is_cancelled_and_that_counts_once() -> None:
    world = World(capacity=16)
    world.learn(KEYS[:4])
    fetches = [world.lower.fetch([Chain(0, KEYS[at : at + 2], None)], ()) for at in (0, 2)]
    loads = world.step()
    before = world.lower.num_changes
    for _ in range(2):
        if fetches[0] is not None:
            fetches[0].release()
    assert world.lower.num_changes == before + 1
    assert world.lower.take_cancelled() == (loads[0].job_id,)
    world.end(loads[1], [True, False])
    world.end(loads[0], [False, False], TransferOutcome.ABANDONED)
    assert (world.manager.num_pins, world.manager.num_removed) == (1, 0), "what did not arrive was never there"


def test_what_waits_for_a_tier_that_is_off_is_turned_away() -> None:
    world = World()
    probes = world.lower.probe(KEYS[:2])
    world.lower.note_health(0, 0, TierHealth(is_off=True))
    assert world.step() == [] and all(probe.has_ended for probe in probes)
    assert list(world.lower.lookup(KEYS[:2])) == [ABSENT, ABSENT]


def test_what_a_tier_turned_out_to_have_is_not_written_in_its_turn() -> None:
    world = World(max_inflight_chunks=1)
    world.keep(KEYS[:3])
    (store,) = world.step()
    world.lower.probe(KEYS[1:2])
    (probe,) = world.step()
    world.end(probe, [True])
    world.end(store, [True])
    assert [job.keys for job in world.step()] == [(KEYS[2],)]


def test_as_much_is_remembered_of_a_tier_as_is_good_for_host_memory() -> None:
    tier = TierState(TierOptions(name="tier"), 10, VirtualClock(), TieringConfig())
    tier.note_presence([at.to_bytes(36) for at in range(MIN_ANSWERS + 2)], [True] * (MIN_ANSWERS + 2))
    assert len(tier.presence) == MIN_ANSWERS
    many = TierState(TierOptions(name="tier"), 2**30, VirtualClock(), TieringConfig())
    many.note_presence([at.to_bytes(36) for at in range(2**18 + 2)], [True] * (2**18 + 2))
    assert len(many.presence) == 2**18


def test_a_trial_that_nobody_needs_any_more_leaves_it_to_another() -> None:
    world = World(capacity=16)
    fail_loads(world)
    world.wait(1.0)
    fetch = world.lower.fetch([Chain(0, KEYS[:1], None)], ())
    (load,) = world.step()
    (tier,) = world.lower.tiers
    assert fetch is not None and not tier.is_readable, "one job finds out"
    fetch.release()
    world.end(load, [False], TransferOutcome.ABANDONED)
    assert tier.is_readable


def test_who_waits_is_told_when_a_tier_is_off_or_all_is_forgotten() -> None:
    world = World()
    before = world.lower.num_changes
    world.lower.note_health(0, 0, TierHealth(is_off=True))
    off = world.lower.num_changes
    world.lower.reset()
    assert before < off < world.lower.num_changes


def test_events_tell_what_is_known_of_a_tier() -> None:
    world = World()
    world.learn(KEYS[:3])
    world.keep(KEYS[3:5])
    (store,) = world.step()
    world.end(store, [True, False])
    fetch = world.lower.fetch([Chain(0, KEYS[:2], None)], ())
    (load,) = world.step()
    world.end(load, [True, False])
    assert isinstance(fetch, Fetch)
    fetch.release()
    assert follow(world, set()) == {KEYS[0], KEYS[2], KEYS[3]}


def test_where_nobody_listens_nothing_is_noted_for_them() -> None:
    tier = TierState(TierOptions(name="tier"), 8, VirtualClock(), TieringConfig())
    tier.note_presence(KEYS[:4], [True] * 4)
    tier.note_presence(KEYS[:4], [False] * 4)
    assert tier.take_events() == []


def test_what_was_announced_goes_and_comes_with_what_is_known_and_ends_with_a_reset() -> None:
    world = World()
    world.keep(KEYS[:2])
    (store,) = world.step()
    world.end(store, [True, False])
    stats = world.lower.take_stats()
    assert (stats["tier0_stored_chunks"], stats["tier0_not_stored_chunks"]) == (1, 1)
    known = follow(world, set())
    assert known == {KEYS[0]}
    for is_there in (False, True):
        world.lower.tiers[0].note_presence(KEYS[:1], [is_there])
        known = follow(world, known)
        assert known == ({KEYS[0]} if is_there else set())
    assert world.manager.reset()
    assert follow(world, known) == set()


def follow(world: World, known: set[bytes]) -> set[bytes]:
    """An index that was built from events, with what became of it since."""
    for event in world.lower.tiers[0].take_events():
        known = known.union(event.keys) if isinstance(event, ChunksStored) else known.difference(event.keys)
    return known


def test_what_a_tier_holds_that_is_left_alone_is_announced_as_gone_and_again_when_it_is_found() -> None:
    world = World(capacity=16)
    written(world, KEYS[:4])
    known = follow(world, set())
    assert known == set(KEYS[:4])
    for at in range(3):
        assert known == set(KEYS[:4]), "a failure is not the end"
        world.lower.probe([KEYS[5 + at]])
        (probe,) = world.step()
        world.end(probe, [False], TransferOutcome.FAILED)
        known = follow(world, known)
    assert known == set(), "nobody can load anything from it"
    for cooldown in (11, 120):  # it stays away
        world.wait(cooldown)
        world.lower.probe(KEYS[:2])
        (probe,) = world.step()
        world.end(probe, [False] * 2, TransferOutcome.ABANDONED)
        known = follow(world, known)
        assert known == set()
    world.wait(120)
    world.lower.probe(KEYS[:2])
    (probe,) = world.step()
    world.end(probe, [True, False])
    known = follow(world, known)
    assert known == {KEYS[0]}
    written(world, KEYS[8:9])
    known.add(KEYS[8])
    world.manager.touch(KEYS[:4])
    (touch,) = (command for command in world.step() if command.kind is JobKind.TOUCH)
    world.end(touch, [key in {KEYS[0], KEYS[3]} for key in touch.keys])
    assert follow(world, known) == {KEYS[0], KEYS[3], KEYS[8]}, "of what is asked for, what is there"


class Traffic:
    """Random moves, one method each."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.stores: list[StoreHandle] = []
        self.loads: list[LoadHandle] = []
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
        fetch = lower.fetch([Chain(lower.tiers_of([key])[0], [key], None) for key in known], kept)
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


@examples(150)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 2), st.integers(1, 2))
def test_whatever_happens_nothing_is_lost_or_held_for_ever(
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


def test_a_handle_of_a_fetch_is_given_back_once() -> None:
    world = World()
    world.keep(KEYS[:2])
    fetch = world.lower.fetch([], KEYS[:2])
    assert isinstance(fetch, Fetch)
    assert world.manager.num_pins == 2
    fetch.release()
    fetch.release()
    assert world.manager.num_pins == 0


def test_how_long_a_tier_takes_is_known_for_a_while_and_measured_again_then() -> None:
    world = World()
    world.learn(KEYS[:4])
    assert world.lower.estimate_s({0: 4}) == 0.0
    fetch = world.lower.fetch([Chain(0, KEYS[:4], None)], ())
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
def test_how_long_a_tier_takes_is_judged_by_jobs_that_were_not_cut_short(happens: str, estimate_s: float) -> None:
    world = World(num_tiers=2)
    world.learn(KEYS[:2])
    world.learn(KEYS[2:3], tier=1)
    chains = [Chain(0, KEYS[:2], None), Chain(1, KEYS[2:3], KEYS[1])]
    fetch = world.lower.fetch(chains if happens == "another tier" else chains[:1], ())
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


def test_each_tier_is_measured_by_itself_and_they_work_side_by_side() -> None:
    """Found by simulation: a slow disk was never known to be slow while a part of each prompt came from elsewhere."""
    world = World(num_tiers=2)
    world.learn(KEYS[:2])
    world.learn(KEYS[2:4], tier=1)
    assert world.lower.fetch([Chain(0, KEYS[:2], None), Chain(1, KEYS[2:4], KEYS[1])], ()) is not None
    fast, slow = world.step()
    for load, seconds in ((fast, 0.5), (slow, 1.0)):
        world.clock.advance(seconds)
        world.end(load, [True, True])
        if load is fast:
            assert world.lower.estimate_s({0: 2, 1: 2}) == 0.5, "as far as that is known"
    assert [world.lower.estimate_s({at: 2}) for at in range(2)] == [0.5, 1.5]
    assert world.lower.estimate_s({0: 2, 1: 2}) == 1.5


def test_how_much_look_ups_find_is_averaged_and_one_success_counts_for_a_while() -> None:
    world = World(has_index=False)
    gain = world.lower.tiers[0].look_up_gain
    assert gain.expected == 1.0, "before anything is known"
    for at in range(60):
        world.lower.probe([key_of(at, 0), key_of(at, 1)])
        (probe,) = world.step()
        world.end(probe, [at == 40, False])
    assert 0.03 < gain.expected < 0.07, "half of what one of sixty asked for, and what is left of the beginning"
    world.lower.probe([key_of(99, 0)])
    (probe,) = world.step()
    world.end(probe, [True])
    assert gain.expected > 0.5


def test_what_a_look_up_in_several_rounds_finds_counts_once_and_of_all_that_it_wanted() -> None:
    in_rounds, at_once = World(has_index=False, num_asked_at_once=2), World(has_index=False)
    for found in (0, 1, 2, 5, 7, 3):
        keys = [key_of(found, at) for at in range(NUM_CHUNKS)]
        at_once.lower.probe(keys)
        (probe,) = at_once.step()
        at_once.end(probe, [at < found for at in range(len(keys))])
        num_asked = num_found = 0
        while UNKNOWN in in_rounds.lower.lookup(keys, up_to_absent=True):
            (task,) = in_rounds.lower.probe(keys, num_found={0: num_found})
            (probe,) = in_rounds.step()
            assert list(probe.keys) == keys[num_asked : num_asked + len(probe.keys)]
            in_rounds.end(probe, [num_asked + at < found for at in range(len(probe.keys))])
            num_asked += len(probe.keys)
            num_found += task.num_found
        assert num_found == found
        assert num_asked <= max(2, 5 * found)
        gain, expected = (world.lower.tiers[0].look_up_gain.expected for world in (in_rounds, at_once))
        assert gain == pytest.approx(expected)


def test_a_look_up_is_expected_to_take_what_its_first_question_takes_and_a_part_of_the_rest() -> None:
    tier = World(has_index=False, num_asked_at_once=2).lower.tiers[0]
    assert tier.look_up_s(10, 0, 0.5) is None, "before anything is known"
    for num_chunks in (2, 10):
        tier.look_up_pace.note(num_chunks, 0.1 * num_chunks)
    assert tier.look_up_s(10, 0, 0.0) == pytest.approx(0.2)
    assert tier.look_up_s(10, 0, 0.5) == pytest.approx(0.6)
    assert tier.look_up_s(10, 0, 1.0) == pytest.approx(1.0)
    assert tier.look_up_s(10, 2, 0.0) == pytest.approx(0.8), "four times as many as before"
    assert tier.look_up_s(1, 0, 0.0) == pytest.approx(0.1)


def test_a_tier_that_is_skipped_is_not_asked_and_has_what_it_is_known_to_have() -> None:
    world = World(num_tiers=2, has_index=False)
    world.learn(KEYS[:1], tier=1)
    assert list(world.lower.lookup(KEYS[:2], skipped={1})) == [READY, UNKNOWN]
    (probe,) = world.lower.probe(KEYS[:2], skipped={1})
    assert (probe.tier, list(probe.keys)) == (0, KEYS[1:2])
    assert list(world.lower.lookup(KEYS[:2], skipped={0, 1})) == [READY, ABSENT]


def test_a_tier_is_asked_for_what_another_could_not_give() -> None:
    """A chunk that turns out to be gone is looked for further down the next time."""
    world = World(num_tiers=2)
    world.learn(KEYS[:1])
    fetch = world.lower.fetch([Chain(0, KEYS[:1], None)], ())
    (load,) = world.step()
    world.end(load, [False])
    assert isinstance(fetch, Fetch) and not fetch.sources
    assert world.lower.lookup([KEYS[0]])[0] == UNKNOWN
    world.lower.probe(KEYS[:1])
    (probe,) = world.step()
    assert probe.tier == 1


def test_what_is_in_use_is_looked_after() -> None:
    """A tier sees nothing of chunks that host memory gives back, so it evicts them; a restart would not find them."""
    world = World(capacity=16)
    world.keep(KEYS[:4])
    world.manager.touch(KEYS[:4])
    (store,) = world.step()
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is on its way there"
    world.end(store, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it was there a moment ago"
    world.clock.advance(601)
    world.manager.touch(KEYS[:6])
    (probe,) = world.step()
    assert (probe.kind, probe.keys) == (JobKind.PROBE, tuple(KEYS[:4])), "what host memory has, and no more"
    world.manager.touch(KEYS[:6])
    assert world.step() == [], "it is being asked"
    world.end(probe, [True, True, False, False])
    (store,) = world.step()
    assert (store.kind, store.keys, store.parents) == (JobKind.STORE, tuple(KEYS[2:4]), tuple(KEYS[1:3]))
    world.end(store, [True, True])
    world.manager.touch(KEYS[:4])
    assert world.step() == []


def test_who_does_not_say_whether_it_has_what_is_in_use_is_not_written_to() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(601)
    world.manager.touch(KEYS[:2])
    (probe,) = world.step()
    world.end(probe, [False, False], TransferOutcome.FAILED)
    assert world.step() == []


def written(world: World, keys: list[bytes]) -> None:
    """The tier has these chunks, and so has host memory."""
    world.keep(keys)
    (store,) = world.step()
    world.end(store, [True] * len(keys))


def test_a_tier_hears_of_the_use_of_what_host_memory_gives_back() -> None:
    world = World(capacity=16)
    written(world, KEYS[:4])
    world.manager.touch(KEYS[:3])
    assert world.step() == [], "it had them a moment ago"
    world.clock.advance(11)
    world.manager.touch(KEYS[:5])
    (touch,) = world.step()
    assert (touch.kind, touch.keys) == (JobKind.TOUCH, tuple(KEYS[:4])), "what both have, in prefix order"
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it is being told"
    assert world.lower.is_idle, "nobody waits for that"
    world.end(touch, [True] * 4)
    world.manager.touch(KEYS[:4])
    assert world.step() == [], "it was told"
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    assert touch.keys == tuple(KEYS[:2])


@pytest.mark.parametrize(("after_s", "kind"), [(11, JobKind.TOUCH), (601, JobKind.PROBE)])
def test_of_a_prefix_longer_than_a_tier_takes_at_a_time_the_end_is_used_before_the_start(
    after_s: float, kind: JobKind
) -> None:
    """Found by reading: workers refused it all, which was held against their medium."""
    world = World(capacity=32, max_asked_chunks=3)
    written(world, KEYS[:8])
    world.clock.advance(after_s)
    world.manager.touch(KEYS[:8])
    told = []
    while commands := world.step():
        for command in commands:
            told.append((command.kind, command.keys))
            world.end(command, [True] * len(command.keys))
    assert told == [(kind, tuple(KEYS[6:8])), (kind, tuple(KEYS[3:6])), (kind, tuple(KEYS[:3]))]


def test_a_tier_that_is_asked_chunk_by_chunk_is_looked_after_a_few_chunks_at_a_time() -> None:
    """Found by a review: a probe of all chunks of a long prompt came too late, and a healthy store was left alone for that."""
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.clock.advance(601)
    for _ in range(2):
        world.manager.touch(KEYS[:8])
    asked = []
    while commands := world.step():
        (probe,) = commands
        asked.append(probe.keys)
        if len(asked) == 1:
            # A request wants to know of some of them meanwhile.
            world.lower.probe(KEYS[5:7])
            (own,) = world.step()
            world.end(own, [True] * 2)
        world.manager.touch(KEYS[:8])
        world.end(probe, [True] * len(probe.keys))
    assert asked == [tuple(KEYS[:3]), tuple(KEYS[3:5]), (KEYS[7],)]


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.ABANDONED])
def test_what_a_tier_does_not_say_of_chunks_in_use_is_not_held_for_gone(outcome: TransferOutcome) -> None:
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.lower.tiers[0].take_events()
    world.clock.advance(601)
    world.manager.touch(KEYS[:8])
    (probe,) = world.step()
    world.end(probe, [False] * 3, outcome)
    assert world.step() == [], "the others are not asked for either"
    assert world.lower.tiers[0].take_events() == []
    world.manager.touch(KEYS[:8])
    (probe,) = world.step()
    assert probe.keys == tuple(KEYS[:3]), "but at the next use"


def test_after_a_reset_nothing_that_waited_to_be_looked_after_is() -> None:
    world = World(capacity=32, has_index=False, num_asked_at_once=3)
    written(world, KEYS[:8])
    world.clock.advance(601)
    world.manager.touch(KEYS[:8])
    (probe,) = world.step()
    assert world.manager.reset()
    world.end(probe, [True] * 3, TransferOutcome.ABANDONED)
    assert world.step() == []


def in_use_after(world: World, after_s: float) -> list[JobKind]:
    """What a tier is asked to do when chunks that it has are used so much later."""
    world.keep(KEYS[:8])
    while stores := world.step():
        for store in stores:
            world.end(store, [True] * len(store.keys))
    world.clock.advance(after_s)
    world.manager.touch(KEYS[:8])
    return [command.kind for command in world.step()]


def test_who_has_no_index_is_not_told_of_use_and_what_is_written_back_is_not_looked_for() -> None:
    assert in_use_after(World(), 11) == [JobKind.TOUCH]
    assert in_use_after(World(has_index=False), 11) == []
    assert in_use_after(World(), 601) == [JobKind.PROBE]
    assert in_use_after(World(write_mode=WriteMode.BACK), 601) == [JobKind.TOUCH]


def test_a_tier_hears_of_the_start_of_a_prefix_whenever_it_hears_of_its_end() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.clock.advance(8)
    world.manager.touch(KEYS[:2])
    world.keep(KEYS[2:4], KEYS[1])
    (store,) = world.step()
    world.end(store, [True] * 2)
    world.clock.advance(4)
    world.manager.touch(KEYS[:4])
    (touch,) = world.step()
    assert touch.keys == tuple(KEYS[:4])


def test_what_a_touch_finds_gone_is_written_again_in_its_time_and_not_at_once() -> None:
    world = World(capacity=16)
    written(world, KEYS[:2])
    world.lower.tiers[0].take_events()
    world.clock.advance(11)
    world.manager.touch(KEYS[:2])
    (touch,) = world.step()
    world.end(touch, [True, False])
    (removed,) = world.lower.tiers[0].take_events()
    assert tuple(removed.keys) == (KEYS[1],), "who listens hears of it"
    world.manager.touch(KEYS[:2])
    assert [command.kind for command in world.step()] == [JobKind.TOUCH], "a full disk is not written to all the time"
    world.clock.advance(590)
    world.manager.touch(KEYS[:2])
    (probe,) = (command for command in world.step() if command.kind is JobKind.PROBE)
    world.end(probe, [False])
    (store,) = world.step()
    assert (store.kind, store.keys) == (JobKind.STORE, (KEYS[1],))


def test_what_is_written_while_loads_are_suspended_is_announced_when_it_can_be_loaded() -> None:
    world = World(capacity=16)
    fail_loads(world)
    known = follow(world, set())
    written(world, KEYS[4:6])
    known = follow(world, known)
    assert known == set(), "nobody can load it"
    world.wait(1.0)
    fetch = world.lower.fetch([Chain(0, KEYS[:1], None)], ())
    (trial,) = world.step()
    world.end(trial, [True])
    assert fetch is not None
    fetch.release()
    assert follow(world, known) == {KEYS[0]}
    world.clock.advance(11.0)
    world.manager.touch(KEYS[4:6])
    (touch,) = world.step()
    world.end(touch, [True, True])
    assert follow(world, {KEYS[0]}) == {KEYS[0], KEYS[4], KEYS[5]}, "they were found"


def breaker_state(world: World) -> BreakerState:
    world.report()
    return world.lower.tiers[0].health.worst


def fail_loads(world: World) -> None:
    """Let three loads fail."""
    for _ in range(3):
        world.learn(KEYS[:1])
        fail_load(world, KEYS[0])
    assert breaker_state(world) is BreakerState.OPEN


def fail_load(world: World, key: bytes) -> None:
    """Let a load of one chunk fail."""
    fetch = world.lower.fetch([Chain(0, [key], None)], ())
    assert fetch is not None
    (load,) = world.step()
    world.end(load, [False], TransferOutcome.FAILED)
    fetch.release()


def test_a_touch_neither_tries_nor_blames_a_tier() -> None:
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


def test_while_one_job_finds_out_whether_a_tier_is_back_nobody_else_waits_for_it() -> None:
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


def test_a_tier_that_answers_from_memory_is_tried_by_loads() -> None:
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


def test_what_was_known_may_grow_old_between_two_questions() -> None:
    world = World()
    world.learn(KEYS[:2])
    world.clock.advance(10.5)
    assert world.lower.tiers_of(KEYS[:2]) == [-1, -1]


def test_what_was_written_is_not_written_again_with_every_use() -> None:
    world = World(capacity=16, admission=Admission.REUSED)
    world.keep(KEYS[:4])
    assert world.step() == []
    for _ in range(3):
        world.manager.touch(KEYS[:4])
        for command in world.step():
            assert command.kind is not JobKind.STORE or world.clock() == 0
            world.end(command, [True] * 4)
        world.clock.advance(60)
    assert world.lower.tiers[0].stats["stored_chunks"] == 4


@pytest.mark.parametrize("max_chunks", [None, 5])
def test_no_more_is_announced_than_can_be_remembered_or_be_there(
    monkeypatch: pytest.MonkeyPatch, max_chunks: int | None
) -> None:
    """Found by reading: a disk evicts by itself, and all that was ever written to it was remembered for ever.

    And in a long run: of a disk for a dozen chunks, thousands were announced at the same time.
    """
    if max_chunks is None:
        monkeypatch.setattr("cargohold.offload.tiering.tier_state.MAX_ANNOUNCED", 5)
    world = World(max_chunks=max_chunks)
    (tier,) = world.lower.tiers
    index: set[bytes] = set()

    def follow() -> None:
        for event in tier.take_events():
            (index.update if isinstance(event, ChunksStored) else index.difference_update)(event.keys)

    for first in range(0, 12, 3):
        tier.note_presence(KEYS[first : first + 3], [True] * 3)
        follow()
        assert len(index) <= 5 and index >= set(KEYS[first : first + 3])
    tier.note_presence(KEYS[7:8], [True])  # heard of again, so it is not the next to be given up
    tier.note_presence(KEYS[:3], [True] * 3)
    follow()
    assert index == {KEYS[0], KEYS[1], KEYS[2], KEYS[7], KEYS[11]}
    tier.note_presence(KEYS, [True] * len(KEYS))
    follow()
    assert index == set(KEYS[-5:]), "also if a single answer is longer"
