"""Tiers that are slower than computing, stall or are off, in a simulated engine: nobody waits in vain for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation import SimulatedEngine, VirtualClock
from cargohold.protocol import MEDIUM_STORAGE, BlockRemoved, BlockStored, metrics
from cargohold.tiers import JobKind, TierJob
from cargohold.tiers.scheduler_side import TierOptions, fetches
from tests.connector.common import alone, evict_everything, prompt
from tests.connector.tiering import DISK, SHARED, finish, make_engine, measured_engine, restored, serve
from tests.held_tiers import SimulatedTiering

BUCKET = TierOptions(name="shared", has_index=False)


@pytest.mark.parametrize("trouble", ["is_gone", "stalls"])
def test_a_tier_in_trouble_is_suspended_and_used_again_when_it_is_back(trouble: str) -> None:
    tiering = SimulatedTiering(60)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering)
    medium = tiering.media[0][0]
    setattr(medium, trouble, True)
    for at in range(6):
        engine.add(f"in trouble {at}", prompt(at, 45), 3)
        engine.run()
        assert engine.tokens(f"in trouble {at}") == alone(prompt(at, 45), 3)
        assert restored(engine, f"in trouble {at}") == {}
    setattr(medium, trouble, False)
    assert isinstance(engine.clock, VirtualClock)
    for _ in range(2):  # what was asked for in the meantime has come too late
        engine.clock.advance(120)
        engine.step()
    serve(engine, tiering, "new", prompt(9, 45))
    engine = make_engine(tiering)
    serve(engine, tiering, "back", prompt(9, 45))
    assert restored(engine, "back") == {"disk": 44}


def waits_of(engine: SimulatedEngine, prompts: Sequence[list[int]]) -> list[float]:
    """Serve prompts, one after the other; how long each took."""
    waited = []
    for tokens in prompts:
        name, began = f"r{len(engine.outputs)}", engine.clock()
        engine.add(name, tokens, 1)
        while name not in engine.outputs:
            engine.step()
        waited.append(engine.clock() - began)
    return waited


def test_a_stalled_tier_delays_one_request_up_to_its_timeout_and_the_next_ones_not_at_all() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=2.0, restore="always")
    engine = make_engine(tiering)
    tiering.media[0][0].stalls = True
    waited = waits_of(engine, [prompt(at, 20) for at in range(8)])
    assert max(waited) < 1.1, "half of the time is for look-ups"
    assert max(waited[4:]) < 0.1, "it is suspended by now"
    began = engine.clock()
    engine.run()
    assert engine.clock() - began < 4.1, "nor does anybody wait long for what is to be written"
    engine.add("next", prompt(20, 20), 1)
    while "next" not in engine.outputs:
        engine.step()
    assert not engine.connector.has_pending_work(), "and not again"


@pytest.mark.parametrize(
    ("num_new_tokens", "has_index"),
    [
        (0, True),
        (16, False),
        pytest.param(0, False, marks=pytest.mark.long),
        pytest.param(16, True, marks=pytest.mark.long),
    ],
)
def test_a_tier_whose_loads_never_end_is_suspended(num_new_tokens: int, has_index: bool) -> None:
    """Found by a soak: each request cancelled its load a moment before that was late, so every one of them waited in vain.

    And found by reading: if prompts had new tokens, they were written, and each write that succeeded ended the row of loads
    that did not. So did look-ups of a tier without an index.
    """
    tiering = SimulatedTiering(400, [replace(DISK, has_index=has_index)], restore_timeout_s=2.0, restore="always")
    prompts = [prompt(at, 20) for at in range(80)]
    for at, tokens in enumerate(prompts):
        serve(make_engine(tiering), tiering, f"first {at}", tokens)
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    longer = [tokens + [7] * num_new_tokens for tokens in prompts]
    waited = waits_of(engine, longer[:8])
    assert max(waited) < 2.5 < sum(waited), "they waited, but not for long"
    assert max(waited[4:]) < 0.1, "it is suspended by now"
    told = "tier disk: loads are suspended: simulated: expired"
    assert told in engine.outputs["r7"].cache_report.notes and told not in engine.outputs["r0"].cache_report.notes

    num_trials = 0
    for number, tokens in enumerate(longer[8:70]):
        engine.clock.advance(1.0)
        (again,) = waits_of(engine, [tokens])
        assert again < 0.1, f"request {number} paid for trying whether it is back"
        num_trials += any(job.kind is JobKind.LOAD for job in queue.pending)
    assert num_trials > 3, "it was tried"

    queue.held = frozenset()
    engine.clock.advance(60.0)
    waits_of(engine, longer[70:72])
    assert restored(engine, "r71") == {"disk": 20}, "it is used again after one load has succeeded"


def test_a_request_waits_only_once_for_a_tier_that_is_always_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: only loads that were done in time told how fast it is, so it was never known to be slower."""
    monkeypatch.setattr(fetches, "BATCH_CHUNKS", 2)
    tiering = SimulatedTiering(200, restore_timeout_s=2.0)
    for at in range(9):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 41))
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LOAD})
    waited = []
    for at in range(9):
        engine.clock.advance(0.0 if at < 8 else 30.0)
        assert not queue.pending
        began = done_at = engine.clock()
        engine.add(f"r{at}", prompt(at, 41), 1)
        while f"r{at}" not in engine.outputs:
            engine.step()
            if queue.pending and engine.clock() >= done_at + 0.5:  # three of five batches are done in time
                queue.complete(queue.pending[0])
                done_at = engine.clock()
        waited.append(engine.clock() - began)
    assert restored(engine, "r0") == {"disk": 24}, "with what has come, the request goes on"
    assert 2.0 < waited[0] < 2.5
    assert max(waited[1:8]) < 0.1, "computing is faster"
    assert queue.pending, "after a while it is tried again"
    assert waited[8] < 0.1, "and nobody waits for it longer than computing takes"


@pytest.mark.parametrize("restore", ["if_faster", "always"])
@pytest.mark.parametrize("kind", [JobKind.PROBE, JobKind.LOAD])
def test_no_request_waits_much_longer_for_a_tier_than_computing_takes(kind: JobKind, restore: str) -> None:
    """Found by simulation: until a tier that hangs was known to, requests of some steps waited for it for seconds."""
    tiering = SimulatedTiering(60, restore_timeout_s=2.0, restore=restore)
    serve(make_engine(tiering), tiering, "first", prompt(0, 48))
    engine, queue = measured_engine(tiering)
    queue.held = frozenset({kind})
    (waited,) = waits_of(engine, [prompt(0, 48)])
    notes = engine.outputs["r1"].cache_report.notes
    if kind is JobKind.PROBE:
        limit_s, reason = 0.06 if restore == "if_faster" else 1.0, "there was not enough time to ask disk"
    elif restore == "if_faster":
        limit_s, reason = 0.12, "lower tiers took longer than 0.12 s, and computing is expected to take 0.06 s"
    else:
        limit_s, reason = 2.0, "lower tiers took longer than 2 s"
    assert 0.0 < waited - limit_s < 0.11, (
        "twice as long as computing takes, half of it for look-ups; then it is computed"
    )
    assert any(note.startswith(reason) for note in notes)
    finish(engine, tiering)


def test_a_waiting_request_goes_on_as_soon_as_computing_is_known_to_be_faster() -> None:
    tiering = SimulatedTiering(60, restore_timeout_s=2.0)
    serve(make_engine(tiering), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, max_num_batched_tokens=8)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.PROBE})
    engine.add("known", prompt(0, 45), 1)
    while engine.clock() < 0.5:
        engine.step()
    assert "known" not in engine.outputs, "nothing was ever computed"
    engine.add("other", prompt(1, 3), 1)  # less than a chunk needs no tier
    while "known" not in engine.outputs:
        engine.step()
    assert engine.clock() < 0.75
    finish(engine, tiering)


def test_a_load_that_ends_after_its_deadline_is_measured() -> None:
    tiering = SimulatedTiering(60)
    for at in range(2):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 45))
    engine, queue = measured_engine(tiering)
    queue.held = frozenset({JobKind.LOAD})
    waits_of(engine, [prompt(0, 45)])
    while engine.clock() < 1.0:
        engine.step()
    queue.complete(queue.pending[0])
    finish(engine, tiering)
    (waited,) = waits_of(engine, [prompt(1, 45)])
    assert waited < 0.1
    notes = engine.outputs["r2"].cache_report.notes
    assert any("computing was expected to be faster than loading from disk: 0.06" in note for note in notes), notes


def test_one_load_that_took_long_on_a_busy_machine_does_not_make_a_fast_tier_slow() -> None:
    tiering = SimulatedTiering(400)
    for at in range(8):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 45))
    engine, queue = measured_engine(tiering)
    for at in range(8):
        evict_everything(engine)
        queue.held = frozenset({JobKind.LOAD} if at == 5 else ())
        engine.add(f"r{at}", prompt(at, 45), 1)
        began = engine.clock()
        while queue.held and engine.clock() < began + 0.3:
            engine.step()
        if queue.pending:
            queue.complete(queue.pending[0])
        finish(engine, tiering)
    assert [restored(engine, f"r{at}") for at in (4, 6, 7)] == [{"disk": 44}] * 3


@pytest.mark.parametrize("timeout_s", [60.0, 1.5])
def test_the_slower_of_two_tiers_is_left_out_when_it_is_too_slow(timeout_s: float) -> None:
    """What is not worth loading is computed, not all of the prompt, even if the slow tier would not be done in time."""
    tiering = SimulatedTiering(200, [DISK, SHARED], restore_timeout_s=timeout_s)
    for at in range(3):
        serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 60))
    on_disk = list(tiering.media[0][0].chunks)
    for key in on_disk[:15] + on_disk[40:]:  # the first prompt, and the end of the last one, are only in the store
        del tiering.media[0][0].chunks[key]
    engine = make_engine(tiering, max_num_batched_tokens=8)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    serve(engine, tiering, "measured", prompt(1000, 8), 1)
    _, store = tiering.all_queues()
    store.on_job = lambda job: clock.advance(1.0 if job.kind is JobKind.LOAD else 0.0)
    for at, restored_from in enumerate([{"shared": 60}, {"disk": 60}, {"disk": 40}]):
        serve(engine, tiering, f"r{at}", prompt(at, 60))
        assert restored(engine, f"r{at}") == restored_from
    notes = [note for note in engine.outputs["r2"].cache_report.notes if "was expected" in note]
    assert len(notes) == 1 and "faster than loading from shared: 0.0" in notes[0]


def on_storage(engine: SimulatedEngine, kind: type[BlockStored | BlockRemoved]) -> set[bytes]:
    """Blocks in events of a kind since the last look, for lower tiers."""
    events = [event for event in engine.scheduler.take_events() if isinstance(event, kind)]
    return {name for event in events if event.medium == MEDIUM_STORAGE for name in event.block_hashes}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tier_that_is_off_on_a_worker_is_not_used_any_more(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before, each request of a quiet engine asked it, waited a step, and was warned that it is left alone for a while."""
    tiering = SimulatedTiering(60, world_size=world_size)
    engine = make_engine(tiering, emit_events=True)
    serve(engine, tiering, "first", prompt(0, 45))
    announced = on_storage(engine, BlockStored)
    asked: list[TierJob] = []
    for queues in tiering.queues:
        queues[0].on_job = asked.append
    tiering.queues[-1][0].is_off = True
    engine.add("second", prompt(1, 45), 3)
    finish(engine, tiering)
    asked.clear()
    assert isinstance(engine.clock, VirtualClock)
    for at in range(2, 6):
        engine.clock.advance(120)
        serve(engine, tiering, f"r{at}", prompt(at, 45))
        assert "tier disk is off" in engine.outputs[f"r{at}"].cache_report.notes[0]
    assert not asked and not tiering.lower.writes[0].backlog
    assert caplog.text.count("tier disk is off") == 1 and "left alone" not in caplog.text
    assert on_storage(engine, BlockRemoved) == announced
    assert engine.connector.get_kv_connector_stats()[metrics.OTHER.of("disk_off")] == 1


def compute_slowly(engine: SimulatedEngine, clock: VirtualClock, step_s: float) -> None:
    """Let computing 32 tokens take ``step_s``."""
    execute = engine.executor.execute

    def slow(step: SchedulerStep) -> StepOutput:
        if step.scheduled:
            clock.advance(step_s * step.num_tokens / 32)
        return execute(step)

    engine.executor.execute = slow  # type: ignore[method-assign]  # time must pass somewhere


class TestDoNoHarm:
    """Virtual time: a step of the engine takes 0.01 s, a job as long as the test lets it."""

    def measure(self, step_s: float, job_s: float, **options: Any) -> tuple[SimulatedEngine, SimulatedTiering]:
        """An engine that has measured both: computing 32 tokens takes ``step_s``, bringing up chunks ``job_s`` each."""
        tiering = SimulatedTiering(200, **options)
        first = make_engine(tiering)
        for at in range(6):
            serve(first, tiering, f"first {at}", prompt(at, 60 + 4 * at))
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        clock = engine.clock
        (queue,) = tiering.all_queues()
        queue.on_job = lambda job: clock.advance(job_s * len(job.keys) if job.kind is JobKind.LOAD else 0)
        compute_slowly(engine, clock, step_s)
        for at in range(3):
            serve(engine, tiering, f"measured {at}", prompt(at, 60 + 4 * at))
        return engine, tiering

    def test_a_fast_tier_is_used(self) -> None:
        engine, tiering = self.measure(step_s=0.5, job_s=0.001)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def test_a_tier_slower_than_computing_is_left_alone_and_the_request_is_told(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {}
        assert any("faster than loading from disk" in note for note in engine.outputs["now"].cache_report.notes)

    def test_what_host_memory_has_does_not_count_as_computing_that_a_tier_saves(self) -> None:
        """Computing all of it would take longer than loading what host memory lacks; computing that alone would not."""
        engine, tiering = self.measure(step_s=0.8, job_s=0.2)
        serve(engine, tiering, "its start", prompt(5, 41))
        evict_everything(engine)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"host": 40}
        assert any("faster than loading from disk" in note for note in engine.outputs["now"].cache_report.notes)

    def test_what_was_decided_holds_while_the_request_waits_for_room(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        engine.add("large", prompt(9, 210), 20)
        while engine.requests["large"].times.first_token is None:
            engine.step()
        engine.add("now", prompt(5, 60), 3)
        while "large" not in engine.outputs:
            engine.step()
            assert engine.requests["now"].times.first_scheduled is None
        finish(engine, tiering)
        notes = engine.outputs["now"].cache_report.notes
        assert sum("faster than loading from disk" in note for note in notes) == 1
        assert restored(engine, "now") == {} and engine.tokens("now") == alone(prompt(5, 60), 3)

    def test_unless_it_is_to_be_used_always(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2, restore="always", restore_timeout_s=60.0)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def test_a_slow_tier_is_tried_again_after_a_while(self) -> None:
        engine, tiering = self.measure(step_s=0.001, job_s=0.2)
        (queue,) = tiering.all_queues()
        queue.on_job = lambda _: None
        assert isinstance(engine.clock, VirtualClock)
        engine.clock.advance(31)
        serve(engine, tiering, "now", prompt(5, 60))
        assert restored(engine, "now") == {"disk": 60}

    def ask_slowly(self, step_s: float, look_up_s: float, **options: Any) -> tuple[SimulatedEngine, SimulatedTiering]:
        """An engine over a disk and a shared store: the store has needed ``look_up_s`` to say that it lacks a prompt."""
        tiering = SimulatedTiering(200, [DISK, replace(SHARED, has_index=False)], **options)
        for at in range(5):
            serve(make_engine(tiering), tiering, f"first {at}", prompt(at, 60))
        shared = tiering.media[1][0].chunks
        on_disk = list(tiering.media[0][0].chunks)
        # The first prompt is only in the store; of the second, the start is on disk.
        for key in on_disk[:15] + on_disk[20:30]:
            del tiering.media[0][0].chunks[key]
        assert len(shared) == 75
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        clock = engine.clock
        _, store = tiering.all_queues()
        store.on_job = lambda job: clock.advance(look_up_s if job.kind is JobKind.PROBE else 0)
        compute_slowly(engine, clock, step_s)
        serve(engine, tiering, "new", prompt(9, 60))
        return engine, tiering

    def test_a_store_that_is_slow_to_say_what_it_has_is_not_asked_for_what_is_computed_sooner(self) -> None:
        """Found by reading: each new prompt waited for every chunk to be looked up, however long that took."""
        engine, tiering = self.ask_slowly(step_s=0.1, look_up_s=1.0)
        assert isinstance(engine.clock, VirtualClock)
        (waited,) = waits_of(engine, [prompt(10, 60)])
        assert waited < 0.3
        (note,) = [note for note in next(reversed(engine.outputs.values())).cache_report.notes if "asking" in note]
        assert note == "asking shared was expected to take 1.000 s, and to save 0.197 s"
        serve(engine, tiering, "there", prompt(0, 60))
        assert restored(engine, "there") == {}
        serve(engine, tiering, "partly on disk", prompt(1, 60))
        assert restored(engine, "partly on disk") == {"disk": 20}, "that is known without asking the store"
        engine.clock.advance(31.0)
        serve(engine, tiering, "later", prompt(0, 60)[:48] + prompt(11, 12))
        assert engine.requests["later"].times.load_wait_s > 1.0, "it was asked again"

    @pytest.mark.parametrize(
        ("step_s", "look_up_s", "options"), [(0.1, 0.01, {}), (2.0, 1.0, {}), (0.1, 1.0, {"restore": "always"})]
    )
    def test_a_store_is_asked_if_that_is_faster_or_wanted(
        self, step_s: float, look_up_s: float, options: dict[str, Any]
    ) -> None:
        engine, tiering = self.ask_slowly(step_s=step_s, look_up_s=look_up_s, **options)
        serve(engine, tiering, "there", prompt(0, 60))
        assert restored(engine, "there") == {"shared": 60}

    def serve_stored(self, num_asked_at_once: int | None, gain: float, ask_s: float) -> dict[str, int]:
        """What is restored of a prompt that a store has; computing it takes 0.56 s.

        The store has taken ``ask_s`` for each chunk that it was asked for, and has had a part of ``gain`` of these.
        """
        tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=num_asked_at_once)])
        serve(make_engine(tiering), tiering, "first", prompt(0, 60))
        engine = make_engine(tiering)
        assert isinstance(engine.clock, VirtualClock)
        compute_slowly(engine, engine.clock, step_s=0.3)
        for at in (10, 11):
            serve(engine, tiering, f"new {at}", prompt(at, 60))
        (store,) = tiering.lower.tiers
        for _ in range(200):
            store.look_up_gain.note(gain)
        for num_chunks in (1, 15) * 20:
            store.look_up_pace.note(num_chunks, ask_s * num_chunks)
        serve(engine, tiering, "there", prompt(0, 60))
        return restored(engine, "there")

    @pytest.mark.parametrize(("num_asked_at_once", "expected"), [(None, {}), (1, {"shared": 60})])
    def test_asking_for_a_few_chunks_first_may_be_worth_it_where_asking_for_all_is_not(
        self, num_asked_at_once: int | None, expected: dict[str, int]
    ) -> None:
        # All answers take 0.45 s, the first 0.03 s; of the time for computing, six tenths are saved on average.
        assert self.serve_stored(num_asked_at_once, gain=0.6, ask_s=0.03) == expected

    def test_of_a_store_that_has_the_first_chunks_more_is_expected_than_of_one_that_was_not_asked_yet(self) -> None:
        # The next four chunks take 0.06 s: more than a tenth of the time that computing takes, and less than all of it.
        assert self.serve_stored(1, gain=0.1, ask_s=0.015) == {"shared": 60}

    def test_only_what_comes_in_time_is_brought_up_behind_what_the_device_has(self) -> None:
        engine, tiering = self.measure(step_s=9.0, job_s=0.2, restore_timeout_s=3.0)
        serve(engine, tiering, "its start", prompt(5, 17))
        serve(engine, tiering, "now", prompt(5, 60))
        assert engine.requests["now"].num_first_device_tokens == 16
        assert 4 <= restored(engine, "now")["disk"] <= 28, "half of 3 s is enough for seven chunks of eleven"

    def test_only_what_comes_in_time_is_brought_up(self) -> None:
        engine, tiering = self.measure(step_s=9.0, job_s=0.2, restore_timeout_s=3.0)
        serve(engine, tiering, "now", prompt(5, 60))
        assert 4 <= restored(engine, "now")["disk"] <= 40


def sizes_of_probes(tiering: SimulatedTiering) -> list[int]:
    """A list that from now on gets the size of each question to the slowest tier of the engine made last."""
    sizes: list[int] = []

    def note(job: TierJob) -> None:
        if job.kind is JobKind.PROBE:
            sizes.append(len(job.keys))

    tiering.all_queues()[-1].on_job = note
    return sizes


@pytest.mark.parametrize(
    ("tokens", "expected", "num_restored"),
    [
        (prompt(9, 60), [2], 0),
        (prompt(0, 60), [2, 8, 5], 60),
        (prompt(0, 4) + prompt(9, 56), [2], 4),
        (prompt(0, 12) + prompt(9, 48), [2, 8], 12),
        (prompt(0, 11), [2], 8),
    ],
)
def test_a_store_that_answers_one_by_one_is_asked_for_the_first_chunks_first(
    tokens: list[int], expected: list[int], num_restored: int
) -> None:
    """Of a new prompt, all other questions would be asked in vain: at an object store, each is a request of its own."""
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=2)])
    serve(make_engine(tiering), tiering, "first", prompt(0, 60))
    engine = make_engine(tiering)
    sizes = sizes_of_probes(tiering)
    serve(engine, tiering, "now", tokens)
    assert sizes == expected
    assert sum(restored(engine, "now").values()) == num_restored


@pytest.mark.parametrize("restore", ["if_faster", "always"])
def test_a_long_prompt_is_restored_as_far_as_it_can_be_looked_up_in_time(restore: str) -> None:
    """Found by a review: if looking up all of it took longer than a request may wait, it waited in vain at every visit."""
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=2)], restore_timeout_s=1.0, restore=restore)
    serve(make_engine(tiering, num_blocks=200), tiering, "first", prompt(0, 241))
    engine = make_engine(tiering, num_blocks=200)
    assert isinstance(engine.clock, VirtualClock)
    clock = engine.clock
    compute_slowly(engine, clock, step_s=1.0)
    (queue,) = tiering.all_queues()
    queue.on_job = lambda job: clock.advance(0.02 * len(job.keys) if job.kind is JobKind.PROBE else 0)
    for number in range(4):
        tiering.manager.reset()
        evict_everything(engine)
        clock.advance(11.0)
        serve(engine, tiering, f"visit {number}", prompt(0, 241), 1)
        assert 40 <= restored(engine, f"visit {number}")["shared"] <= 100, "half a second is enough for 25 chunks of 60"
        assert engine.requests[f"visit {number}"].times.load_wait_s < 0.7
    assert tiering.lower.tiers[0].stats[metrics.TIER_FAILURES.of("shared")] == 0


def test_answers_of_some_tiers_count_when_another_does_not_answer_in_time() -> None:
    tiering = SimulatedTiering(60, [DISK, replace(BUCKET, num_asked_at_once=4)], restore_timeout_s=1.0)
    serve(make_engine(tiering), tiering, "first", prompt(0, 61))
    on_disk = tiering.media[0][0].chunks
    for key in list(on_disk)[6:]:
        del on_disk[key]
    engine = make_engine(tiering)
    assert isinstance(engine.clock, VirtualClock)
    compute_slowly(engine, engine.clock, step_s=3.0)
    _, store = tiering.all_queues()
    store.held = frozenset({JobKind.PROBE})
    serve(engine, tiering, "second", prompt(0, 61), 1)
    assert restored(engine, "second") == {"disk": 24}
    notes = engine.outputs["second"].cache_report.notes
    assert "there was not enough time to ask shared for more chunks" in notes


def test_a_store_below_a_disk_is_asked_for_the_first_chunks_that_the_disk_lacks() -> None:
    tiering = SimulatedTiering(200, [DISK, replace(BUCKET, num_asked_at_once=2)])
    serve(make_engine(tiering), tiering, "first", prompt(0, 60))
    on_disk = tiering.media[0][0].chunks
    for key in list(on_disk)[6:]:
        del on_disk[key]
    engine = make_engine(tiering)
    sizes = sizes_of_probes(tiering)
    serve(engine, tiering, "now", prompt(0, 60))
    assert sizes[:2] == [2, 7], "of nine; later it is asked whether it has what came from the disk"
    assert restored(engine, "now") == {"disk": 24, "shared": 36}


@pytest.mark.parametrize("windows", [(6,), (None, 6), (9, None, 3)])
def test_with_windows_all_chunks_that_are_needed_are_found_in_the_end(windows: tuple[int | None, ...]) -> None:
    tiering = SimulatedTiering(200, [replace(BUCKET, num_asked_at_once=1)])
    serve(make_engine(tiering, windows=windows, num_blocks=100), tiering, "first", prompt(0, 45))
    engine = make_engine(tiering, windows=windows, num_blocks=100)
    serve(engine, tiering, "second", prompt(0, 45))
    assert restored(engine, "second") == {"shared": 44}
