"""Composed connectors: who loads, who stores, who is done, and who is turned off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.connector.multi import MultiConnectorFactory, MultiConnectorScheduler
from cargohold.connector.multi_worker import MultiConnectorWorker, MultiMetadata
from cargohold.connector.offloading import OffloadingWorker
from cargohold.errors import ConfigError, RequestError
from cargohold.lab.conformance.strict import CodedExecutor
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, VirtualClock, simulated_layout
from cargohold.protocol import (
    BlockIds,
    BlockRemoved,
    CacheReport,
    ClassFactory,
    EmptyMetadata,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVEvent,
    NullConnectorScheduler,
    NullConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    Stats,
    StepView,
    TransferOutcome,
    WorkerEnvironment,
    add_stats,
    metrics,
)
from cargohold.tiers import StoreOutcome
from cargohold.tiers.scheduler_side import Admission, TierOptions
from tests.connector.common import alone, evict_everything, finish, play_any_schedule, prompt
from tests.effort import examples
from tests.held_tiers import SimulatedTiering

SHAPES: dict[str, Callable[[Sequence[SimulatedOffloading]], KVConnectorFactory]] = {
    "flat": lambda tiers: MultiConnectorFactory(tuple(tiers)),
    "nested": lambda tiers: MultiConnectorFactory((tiers[0], MultiConnectorFactory(tuple(tiers[1:])))),
    "deep": lambda tiers: MultiConnectorFactory((MultiConnectorFactory((MultiConnectorFactory(tuple(tiers)),)),)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_context", [True, False])
@examples(10)
@given(data=st.data())
def test_tokens_are_those_without_offloading(shape: str, with_context: bool, data: st.DataObject) -> None:
    tiers = [
        SimulatedOffloading(data.draw(st.integers(1, 40))),
        SimulatedOffloading(data.draw(st.integers(1, 40)), blocks_per_chunk=2),
        SimulatedOffloading(data.draw(st.integers(1, 40)), lookahead=8 if with_context else None),
    ]
    windows = data.draw(st.sampled_from([(None,), (6,), (None, 6)]))
    engine = SimulatedEngine(
        simulated_layout(1 + data.draw(st.integers(14, 30)) * len(windows), windows=windows),
        SHAPES[shape](tiers),
        max_num_batched_tokens=data.draw(st.integers(4, 64)),
        with_context=with_context,
    )
    play_any_schedule(data, engine, *tiers)
    assert engine.scheduler.connector.broken is None


def test_loads_come_from_the_first_that_has_something_and_stores_go_to_all() -> None:
    tiers = [SimulatedOffloading(60), SimulatedOffloading(60)]
    engine = SimulatedEngine(simulated_layout(60), MultiConnectorFactory(tuple(tiers)))
    engine.add("first", prompt(0, 30), 1)
    finish(engine, *tiers)
    assert [tier.manager.num_ready for tier in tiers] == [7, 7]
    evict_everything(engine)
    tiers[0].manager.reset()
    engine.add("second", prompt(0, 30), 1)
    loads: list[int] = []
    for at, tier in enumerate(tiers):
        tier.transfers[0].on_copy = lambda job, at=at: loads.append(at) if job.direction.value == "load" else None
    finish(engine, *tiers)
    assert loads == [1], "the first had nothing"
    evict_everything(engine)
    engine.add("third", prompt(0, 30), 1)
    finish(engine, *tiers)
    assert loads in ([1, 1], [1, 0])
    assert engine.tokens("third") == engine.tokens("first")


@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_uses_are_reported_to_children_behind_the_one_that_loads(shape: str) -> None:
    """Found by use: behind a child that loads, ``admission="reused"`` never wrote, and what was refused stayed so."""
    reused = SimulatedTiering(60, [TierOptions(name="disk", admission=Admission.REUSED)])
    refusing = SimulatedTiering(60, [TierOptions(name="disk")])
    tiers: list[Any] = [SimulatedOffloading(60), reused, refusing]
    engine = SimulatedEngine(simulated_layout(60), SHAPES[shape](tiers))
    refusing.media[0][0].not_now = [StoreOutcome.REFUSED] * 7
    engine.add("first", prompt(0, 30), 1)
    finish(engine, *tiers)
    assert [len(tier.media[0][0].chunks) for tier in (reused, refusing)] == [0, 0]
    evict_everything(engine)
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(100.0)
    engine.add("second", prompt(0, 30), 1)
    finish(engine, *tiers)
    assert [len(tier.media[0][0].chunks) for tier in (reused, refusing)] == [7, 7]


@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_what_the_device_loses_to_another_childs_load_is_kept(shape: str) -> None:
    """Nothing is asked of the children behind the one that loads, nor do they load: the notice is all that they have."""
    loading, worker = Scripted("loading"), ScriptedWorker("loading")
    tier = SimulatedOffloading(24, lookahead=1)
    children: list[Any] = [ClassFactory(lambda _: loading, lambda _: worker), SimulatedOffloading(1), tier]
    engine = SimulatedEngine(simulated_layout(30), SHAPES[shape](children))
    for name, tokens in (("kept", prompt(0, 100)), ("short", prompt(2, 5))):
        engine.add(name, tokens, 1)
        finish(engine, tier)
    assert tier.manager.num_listed == 26 and not tier.manager.num_ready, "they are on the device, and nowhere else"
    loading.matched = (80, True)
    engine.add("loaded", prompt(1, 110), 1)
    engine.step()
    loading.matched = (0, False)
    of_load = frozenset({"loaded"})
    worker.finished = KVConnectorTransferResults(finished_recving=of_load, failed_recving=of_load)
    finish(engine, tier)
    engine.add("again", prompt(0, 100), 1)
    finish(engine, tier)
    assert engine.outputs["again"].cache_report.restored_tokens["host"] == 96, "all but the first and the last chunk"


# --- scripted children ------------------------------------------------------------------------------------------------


class Scripted(NullConnectorScheduler):
    """Answers what the test says and remembers what it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.matched: tuple[int | None, bool] = (0, False)
        self.keeps = False
        self.params: Mapping[str, Any] | None = None
        self.report: KVConnectorSchedulerOutput | None = None
        self.pending = False
        self.can_reset = True
        self.finished_count: int | None = None
        self.events: list[KVEvent] = []
        self.stats: Stats = {}
        self.refuses = False
        self.told: list[tuple[Any, ...]] = []
        self.outputs: list[KVConnectorOutput] = []

    def on_new_request(self, request: RequestView) -> None:
        if self.refuses:
            raise RequestError("refused", request.request_id)
        self.told.append(("new", request.request_id))

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.told.append(("asked", request.request_id))
        return self.matched

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        self.told.append(("alloc", request.request_id, num_external_tokens))

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        self.told.append(("step",))
        return EmptyMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.outputs.append(connector_output)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        return self.report

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        self.told.append(("finished", request.request_id))
        return self.keeps, self.params

    def explain(self, request_id: str) -> CacheReport:
        self.told.append(("explain", request_id))
        return CacheReport({"tier": 4}, (f"a note of {self.name}",))

    def take_events(self) -> list[KVEvent]:
        return self.events

    def has_pending_work(self) -> bool:
        return self.pending

    def reset_cache(self) -> bool:
        self.told.append(("reset",))
        return self.can_reset

    def get_kv_connector_stats(self) -> Stats:
        return self.stats

    def get_finished_count(self) -> int | None:
        return self.finished_count

    def shutdown(self) -> None:
        self.told.append(("shutdown",))


class ScriptedWorker(NullConnectorWorker):
    """Reports what the test says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.finished = KVConnectorTransferResults()
        self.invalid: AbstractSet[int] = frozenset()
        self.meta: KVConnectorWorkerMetadata | None = None
        self.calls: list[str] = []

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        finished, self.finished = self.finished, KVConnectorTransferResults()
        return finished

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        invalid, self.invalid = self.invalid, frozenset()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        meta, self.meta = self.meta, None
        return meta

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Pair:
    """Two scripted children, composed, in an engine."""

    def __init__(self, **options: Any) -> None:
        self.left, self.right = Scripted("left"), Scripted("right")
        self.left_worker, self.right_worker = ScriptedWorker("left"), ScriptedWorker("right")
        factory = MultiConnectorFactory(
            (
                ClassFactory(lambda _: self.left, lambda _: self.left_worker),
                ClassFactory(lambda _: self.right, lambda _: self.right_worker),
            )
        )
        self.engine = SimulatedEngine(simulated_layout(30), factory, **options)
        connector = self.engine.connector
        assert isinstance(connector, MultiConnectorScheduler)
        self.multi = connector

    @property
    def children(self) -> tuple[Scripted, Scripted]:
        return self.left, self.right


def test_not_yet_from_a_preferred_child_is_honoured() -> None:
    pair = Pair()
    pair.left.matched, pair.right.matched = (None, False), (8, True)
    pair.engine.add("r", prompt(0, 12), 1)
    pair.engine.step()
    assert ("asked", "r") not in pair.right.told
    assert [request.request_id for request in pair.engine.scheduler.waiting_requests()] == ["r"]
    pair.left.matched, pair.right.matched = (0, False), (0, False)
    finish(pair.engine)


def test_the_unchosen_are_told_that_there_is_nothing_to_load() -> None:
    pair = Pair()
    pair.right.matched = (8, True)
    pair.engine.add("r", prompt(0, 12), 1)
    pair.engine.step()
    assert ("alloc", "r", 0) in pair.left.told
    assert ("alloc", "r", 8) in pair.right.told
    pair.right_worker.finished = KVConnectorTransferResults(
        finished_recving=frozenset({"r"}), failed_recving=frozenset({"r"}), jobs={7: TransferOutcome.FAILED}
    )
    pair.right_worker.invalid = frozenset({1})
    pair.engine.step()
    assert pair.left.outputs == [KVConnectorOutput(invalid_block_ids=frozenset({1}))], (
        "the other learns which blocks are bad, for it may have stored from the same step"
    )
    (output,) = pair.right.outputs
    assert output.failed_recving == {"r"}
    assert output.jobs == {7: TransferOutcome.FAILED}
    assert output.invalid_block_ids == {1}
    pair.right.matched = (0, False)
    finish(pair.engine)
    assert pair.engine.tokens("r") == alone(prompt(0, 12), 1)


@pytest.mark.parametrize("first", ["left", "right"])
def test_a_request_that_both_keep_is_released_when_both_are_done(first: str) -> None:
    pair = Pair()
    pair.left.keeps = pair.right.keeps = True
    pair.engine.add("r", prompt(0, 12), 1)
    pair.engine.step()
    pool = pair.engine.scheduler.kv.pool
    workers = [pair.left_worker, pair.right_worker]
    for worker in workers if first == "left" else reversed(workers):
        assert pool.num_free_blocks < pool.num_usable_blocks
        pair.engine.step()
        worker.finished = KVConnectorTransferResults(finished_sending=frozenset({"r"}))
        pair.engine.step()
    finish(pair.engine)
    assert [output.finished_sending for output in pair.left.outputs] == [{"r"}]


def test_a_request_that_one_keeps_waits_for_that_one_alone() -> None:
    pair = Pair()
    pair.right.keeps = True
    pair.engine.add("r", prompt(0, 12), 1)
    pair.engine.step()
    pair.right_worker.finished = KVConnectorTransferResults(finished_sending=frozenset({"r"}))
    finish(pair.engine)
    assert pair.left.outputs == []


def test_locks_are_merged_into_fresh_lists() -> None:
    pair = Pair()
    pair.left.report = left = KVConnectorSchedulerOutput((3,), ())
    pair.right.report = KVConnectorSchedulerOutput((3, 4), (4,))
    merged = pair.multi.report_to_scheduler()
    assert merged == KVConnectorSchedulerOutput((3, 3, 4), (4,))
    assert left == KVConnectorSchedulerOutput((3,), ())
    pair.left.report = pair.right.report = None
    assert pair.multi.report_to_scheduler() is None


def test_a_child_cannot_unlock_what_another_has_locked() -> None:
    pair = Pair(with_context=False)
    pair.left.report = KVConnectorSchedulerOutput((3,), ())
    pair.engine.step()
    pair.left.report, pair.right.report = None, KVConnectorSchedulerOutput((), (3,))
    pair.engine.step()
    assert pair.engine.scheduler.kv.pool.get_block(3).ref_cnt == 1
    assert pair.multi.children[0].broken is None
    broken = pair.multi.children[1].broken
    assert broken is not None
    assert "block 3" in broken.rule
    pair.left.report = KVConnectorSchedulerOutput((), (3,))
    pair.engine.step()
    pair.left.report = None
    finish(pair.engine)


def test_reports_events_stats_and_answers_are_merged() -> None:
    pair = Pair()
    loads = metrics.PLANNED.of("load")
    pair.left.stats, pair.right.stats = {loads: 1}, {loads: 2}
    assert pair.multi.get_kv_connector_stats() == {
        loads._replace(connector="left"): 1,
        loads._replace(connector="right"): 2,
    }
    pair.multi.children[1].name = "left"
    assert pair.multi.get_kv_connector_stats() == {loads._replace(connector="left"): 3}, (
        "counters of one name are summed, as on the workers"
    )
    pair.multi.children[1].name = "right"
    pair.left.events = [BlockRemoved((b"l",), 0, "left")]
    pair.right.events = [BlockRemoved((b"r",), 0, "right")]
    assert [event.medium for event in pair.multi.take_events()] == ["left", "right"]
    assert pair.multi.explain("r") == CacheReport({"tier": 8}, ("left: a note of left", "right: a note of right"))
    pair.left.params, pair.right.params = {"a": 1, "b": 1}, {"b": 2, "c": 2}
    assert pair.multi.request_finished(pair.engine.add("r", [1], 1), ()) == (False, {"a": 1, "b": 1, "c": 2})
    for left, right in ((False, True), (True, False)):
        pair.left.pending, pair.right.pending = left, right
        assert pair.multi.has_pending_work()
    pair.left.pending = pair.right.pending = False
    assert not pair.multi.has_pending_work()


def test_reset_asks_everyone_and_answers_truthfully() -> None:
    pair = Pair()
    assert pair.multi.reset_cache()
    pair.left.can_reset = False
    assert not pair.multi.reset_cache()
    assert [told for told in pair.right.told if told == ("reset",)] == [("reset",)] * 2
    pair.multi.shutdown()
    assert ("shutdown",) in pair.left.told
    assert ("shutdown",) in pair.right.told


def test_a_worker_forgets_the_loads_that_have_ended() -> None:
    """Found by reading: a request aborted while it was loaded was remembered for ever."""
    child = ScriptedWorker("child")
    worker = MultiConnectorWorker([child])

    def step(*, loads: tuple[str, ...] = (), fail: tuple[str, ...] = (), ended: str = "", gone: str = "") -> set[str]:
        child.finished = KVConnectorTransferResults(finished_recving=frozenset(filter(None, [ended])))
        worker.bind_connector_metadata(MultiMetadata((EmptyMetadata(),), new_loads=loads, fail_loads=fail))
        finished = worker.get_transfer_results(frozenset(filter(None, [gone])))
        worker.clear_connector_metadata()
        return set(finished.finished_recving)

    before = held_by(worker)
    for at in range(3):
        step(loads=(f"aborted{at}",))
        step(gone=f"aborted{at}")
        assert step(ended=f"aborted{at}") == {f"aborted{at}"}
    assert held_by(worker) == before
    step(loads=("ended", "runs"))
    assert step(ended="ended") == {"ended"}
    assert step(fail=("ended", "runs")) == {"runs"}, "on other workers both may still run"
    assert held_by(worker) == before


def held_by(worker: MultiConnectorWorker) -> int:
    """Ids of requests that a worker remembers."""
    return sum(len(value) for value in vars(worker).values() if isinstance(value, set | dict))


def test_the_number_of_reports_must_be_agreed_upon() -> None:
    pair = Pair()
    assert pair.multi.get_finished_count() is None
    pair.left.finished_count = 1
    with pytest.raises(ConfigError, match="equally many"):
        pair.multi.get_finished_count()


def test_a_refused_request_is_taken_back_from_those_who_were_told() -> None:
    pair = Pair()
    pair.right.refuses = True
    with pytest.raises(RequestError, match="refused"):
        pair.engine.add("r", prompt(0, 12), 1)
    assert pair.left.told == [("new", "r"), ("finished", "r"), ("explain", "r")]
    assert pair.multi.children[1].broken is None


def test_nothing_to_compose_is_refused() -> None:
    with pytest.raises(ConfigError, match="the list is empty; to offload nothing, pass None"):
        MultiConnectorScheduler([], SchedulerEnvironment(simulated_layout(20), lambda: 0.0))


# --- misbehaviour -----------------------------------------------------------------------------------------------------


class Misbehaving(NullConnectorScheduler):
    """Does one thing wrong, once a request runs."""

    name = "misbehaving"

    def __init__(self, what: str) -> None:
        self.what = what
        self.context: Any = None

    def bind_scheduler_context(self, context: Any) -> None:
        self.context = context

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        match self.what:
            case "negative":
                return -1, True
            case "too many":
                return request.num_tokens + 1, True
            case "raises when asked":
                raise OSError("the store is gone")
            case "never loads" | "raises after alloc" | "raises after alloc, sync" | "raises in meta, sync":
                return 4, not self.what.endswith("sync")
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        if self.what.startswith("raises after alloc") and num_external_tokens:
            raise OSError("the store is gone")

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        if step.scheduled:
            match self.what:
                case "touches null":
                    self.context.touch_ids([0])
                case "frees what it does not hold":
                    self.context.free_ids([step.scheduled[0].block_ids[0][0]])
                case "raises in meta" | "raises in meta, sync":
                    raise OSError("the store is gone")
                case "holds and raises":
                    self.context.touch_ids([step.scheduled[0].block_ids[0][0]])
                    raise OSError("the store is gone")
        return EmptyMetadata()

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        match self.what:
            case "locks null":
                return KVConnectorSchedulerOutput((0,))
            case "unlocks what it did not lock":
                return KVConnectorSchedulerOutput((), (2,))
        return None


class MisbehavingWorker(NullConnectorWorker):
    name = "misbehaving"

    def __init__(self, what: str) -> None:
        self.what = what
        self.num_steps = 0

    def start_load_kv(self) -> None:
        if self.what == "worker raises":
            raise OSError("the link is gone")

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        self.num_steps += 1
        if self.what == "unknown request" and self.num_steps == 1:
            return KVConnectorTransferResults(finished_recving=frozenset({"nobody"}))
        if self.what == "unknown sender" and self.num_steps == 1:
            return KVConnectorTransferResults(finished_sending=frozenset({"nobody"}))
        return KVConnectorTransferResults()


MISBEHAVIOUR = {
    "negative": "promised -1 tokens",
    "too many": "promised 42 tokens",
    "raises when asked": "the store is gone",
    "raises after alloc": "the store is gone",
    "raises after alloc, sync": "the store is gone",
    "raises in meta": "the store is gone",
    "raises in meta, sync": "the store is gone",
    "holds and raises": "the store is gone",
    "touches null": "null block",
    "frees what it does not hold": "block 1",
    "locks null": "null block",
    "unlocks what it did not lock": "block 2",
    "worker raises": "the link is gone",
    "never loads": "did not end the load of request r",
    "unknown request": "nobody",
    "unknown sender": "nobody",
}
ALONE_ONLY = {"never loads", "unknown request", "unknown sender"}
"""Rules that the engine watches over: it cannot tell which child of a composed connector broke them."""


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_misbehaving_connector_is_contained(what: str, caplog: pytest.LogCaptureFixture) -> None:
    factory = ClassFactory(lambda _: Misbehaving(what), lambda _: MisbehavingWorker(what))
    engine = SimulatedEngine(simulated_layout(30), factory, load_timeout_s=1.0)
    for name in ("r", "s"):
        engine.add(name, prompt(0, 41), 6)
    finish(engine)
    assert engine.scheduler.connector.broken is not None
    assert MISBEHAVIOUR[what] in engine.scheduler.connector.broken.rule
    assert len([record for record in caplog.records if "turned off" in record.message]) == 1
    for name in ("r", "s"):
        assert engine.tokens(name) == alone(prompt(0, 41), 6)


@pytest.mark.parametrize("what", sorted(MISBEHAVIOUR.keys() - ALONE_ONLY))
@pytest.mark.parametrize("first", [True, False])
def test_a_misbehaving_child_does_not_take_the_others_with_it(what: str, first: bool) -> None:
    tier = SimulatedOffloading(60)
    bad = ClassFactory(lambda _: Misbehaving(what), lambda _: MisbehavingWorker(what))
    factory = MultiConnectorFactory((bad, tier) if first else (tier, bad))
    engine = SimulatedEngine(simulated_layout(40), factory)
    for name in ("a", "b", "c"):
        engine.add(name, prompt(0, 41), 6)
        finish(engine, tier)
        evict_everything(engine)
        assert engine.tokens(name) == alone(prompt(0, 41), 6)
    assert engine.scheduler.connector.broken is None
    connector = engine.connector
    assert isinstance(connector, MultiConnectorScheduler)
    broken = connector.children[0 if first else 1].broken
    assert broken is not None
    assert MISBEHAVIOUR[what] in broken.rule
    assert engine.outputs["c"].cache_report.restored_tokens == {"host": 40}, "the other still works"
    assert (
        connector.get_kv_connector_stats()[metrics.FAILURES.of("connector_off")._replace(connector=broken.connector)]
        == 1
    )


class Speechless(SimulatedOffloading):
    """Its workers raise when they should say which blocks a load could not fill."""

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        worker = super().make_worker_side(environment)
        bad_blocks = worker.get_block_ids_with_load_errors

        def raise_if_any() -> AbstractSet[int]:
            if bad_blocks():
                raise OSError("the link is gone")
            return frozenset()

        worker.get_block_ids_with_load_errors = raise_if_any  # type: ignore[method-assign]  # misbehaves on purpose
        return worker


def test_a_load_whose_bad_blocks_a_child_could_not_name_is_not_read() -> None:
    """Found by reading: the engine went on with whatever was in those blocks."""
    tier, other = Speechless(60), SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(40), MultiConnectorFactory((tier, other)))
    engine.add("first", prompt(0, 30), 1)
    finish(engine, tier, other)
    evict_everything(engine)
    transfers = tier.transfers[0]
    transfers.auto = False
    engine.add("second", prompt(0, 30), 5)
    while not transfers.pending:
        engine.step()
    transfers.complete(transfers.pending[0], TransferOutcome.FAILED, bad_blocks=transfers.pending[0].block_ids)
    transfers.auto = True
    engine.run()
    assert engine.tokens("second") == alone(prompt(0, 30), 5)
    connector = engine.connector
    assert isinstance(connector, MultiConnectorScheduler)
    assert [child.broken is not None for child in connector.children] == [True, False]


class Undeclared(SimulatedOffloading):
    """Its worker sides declare no messages, and are sent some."""

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        worker = super().make_worker_side(environment)
        worker.metadata_type = EmptyMetadata  # type: ignore[assignment]  # that is what is wrong with it
        return worker


@dataclass(frozen=True)
class Note:
    """What a worker says."""

    text: str = "something"

    def aggregate(self, other: Note) -> Note:
        return other


def served_over_bytes(children: Sequence[KVConnectorFactory]) -> MultiConnectorScheduler:
    """Serve a few requests on two workers in other processes, as far as messages can tell."""
    engine = SimulatedEngine(simulated_layout(40, world_size=2), MultiConnectorFactory(tuple(children)))
    engine.executor = CodedExecutor(engine)
    for name in ("a", "b"):
        engine.add(name, prompt(0, 41), 6)
        engine.run()
        evict_everything(engine)
        assert engine.tokens(name) == alone(prompt(0, 41), 6)
    assert engine.scheduler.connector.broken is None
    assert engine.outputs["b"].cache_report.restored_tokens["host"] == 40, "the other still works"
    connector = engine.connector
    assert isinstance(connector, MultiConnectorScheduler)
    return connector


def test_a_child_whose_workers_declare_no_messages_is_turned_off_alone_where_it_is_sent_some() -> None:
    """Found by reading: in another process they saw empty ones, and what was to be loaded was missing."""
    connector = served_over_bytes((Undeclared(60), SimulatedOffloading(60)))
    undeclared, other = connector.children
    assert undeclared.broken is not None and "declares no metadata_type" in undeclared.broken.rule
    assert other.broken is None


def test_a_child_that_declares_no_messages_of_its_workers_is_turned_off_alone_where_they_send_some() -> None:
    def talkative(_: WorkerEnvironment) -> ScriptedWorker:
        worker = ScriptedWorker("talkative")
        worker.meta = Note()
        return worker

    children = (ClassFactory(lambda _: Scripted("talkative"), talkative), SimulatedOffloading(60))
    deaf, other = served_over_bytes(children).children
    assert deaf.broken is not None and "declares no worker_metadata_type" in deaf.broken.rule
    assert other.broken is None


def test_a_child_that_has_nothing_to_say_may_say_so_to_another_process() -> None:
    def polite(_: WorkerEnvironment) -> ScriptedWorker:
        worker = ScriptedWorker("polite")
        worker.meta = EmptyMetadata()
        return worker

    children = (ClassFactory(lambda _: Scripted("polite"), polite), SimulatedOffloading(60))
    assert all(child.broken is None for child in served_over_bytes(children).children)


def test_what_a_child_holds_that_is_turned_off_is_not_counted() -> None:
    tiers = [SimulatedOffloading(60), SimulatedOffloading(60)]
    engine = SimulatedEngine(simulated_layout(60), MultiConnectorFactory(tuple(tiers)))
    connector = engine.connector
    assert isinstance(connector, MultiConnectorScheduler)
    engine.add("r", prompt(0, 30), 1)
    finish(engine, *tiers)
    told, ready = (
        engine.scheduler.connector.get_kv_connector_stats(),
        metrics.READY_CHUNKS._replace(connector="offloading"),
    )
    assert told[ready] == 14
    connector.children[0].break_off("made for this test")
    told = add_stats(told, engine.scheduler.connector.get_kv_connector_stats())
    assert told[ready] == tiers[1].manager.num_ready == 7
    engine.scheduler.connector.break_off("made for this test")
    told = add_stats(told, engine.scheduler.connector.get_kv_connector_stats())
    assert told[ready] == 0
