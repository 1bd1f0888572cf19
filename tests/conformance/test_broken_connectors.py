"""The suite fails for connectors that break the contract: one way each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pickle import PicklingError
from typing import ClassVar, cast

import pytest

from cargohold.lab.conformance import ConnectorConformance
from cargohold.lab.conformance.strict import Failure, StrictScheduler
from cargohold.lab.simulation import SimulatedEngine, WrongTokenError, simulated_layout
from cargohold.protocol import (
    BlockIds,
    CacheReport,
    ClassFactory,
    KVConnectorFactory,
    KVConnectorOutput,
    NullConnectorScheduler,
    RequestView,
    SchedulerContext,
    SchedulerEnvironment,
    Stats,
    StepView,
    WorkerEnvironment,
)
from cargohold.protocol.metrics import counter, gauge
from examples.own_connector.shelf import Orders, ShelfScheduler, ShelfWorker


class Suite(ConnectorConformance):
    __test__ = False
    scheduler_side: ClassVar[Callable[[SchedulerEnvironment], ShelfScheduler]] = ShelfScheduler
    worker_side: ClassVar[Callable[[WorkerEnvironment], ShelfWorker]] = ShelfWorker

    def factory(self) -> KVConnectorFactory:
        return ClassFactory(type(self).scheduler_side, type(self).worker_side)


def suite(
    scheduler_side: type[ShelfScheduler] = ShelfScheduler, worker_side: type[ShelfWorker] = ShelfWorker
) -> ConnectorConformance:
    sides = {"scheduler_side": scheduler_side, "worker_side": worker_side}
    made: ConnectorConformance = type("SuiteOfBroken", (Suite,), sides)()
    return made


class Promising(ShelfScheduler):
    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return min(found + self._size, (request.num_tokens - num_computed_tokens) // self._size * self._size), is_async

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_new: int) -> None:
        super().update_state_after_alloc(request, blocks, max(0, num_new - self._size))


def test_promises_are_kept() -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite(Promising).test_tokens_blocks_and_endings_are_right("shared-prefix")


class Fickle(ShelfScheduler):
    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        if self._first[request.request_id]:
            return 0, False
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._first[request.request_id] += 1
        return answer


def test_asking_twice_changes_nothing() -> None:
    with pytest.raises(AssertionError, match="and asked again"):
        suite(Fickle).test_tokens_blocks_and_endings_are_right("shared-prefix")


class Unsettling(NullConnectorScheduler):
    """What it has found for one request goes as soon as it looks another one up, with an event or a reference."""

    def __init__(self, meddles: Callable[[SchedulerContext], object] = lambda _: None) -> None:
        self.asked: list[str] = []
        self.context: SchedulerContext | None = None
        self.meddles = meddles

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        if self.context is not None:
            self.meddles(self.context)
        return (4 if self.asked[0] == self.asked[-1] and len(set(self.asked)) == 1 else 0), False


def test_a_look_up_changes_no_other_request_s_answer() -> None:
    engine = SimulatedEngine(simulated_layout(24))
    first, second = (engine.add(name, list(range(9)), 1) for name in "ab")
    strict = StrictScheduler(Unsettling(), plans_early=False)
    assert strict.get_num_new_matched_tokens(first, 0) == (4, False)
    with pytest.raises(AssertionError, match="changed another request's answer from \\(4, False\\) to \\(0, False\\)"):
        strict.get_num_new_matched_tokens(second, 0)


def test_a_look_up_takes_no_references() -> None:
    engine = SimulatedEngine(simulated_layout(24))
    strict = StrictScheduler(Unsettling(lambda context: context.touch_ids([1])), plans_early=False)
    strict.bind_scheduler_context(cast("SchedulerContext", engine.scheduler.kv.pool))
    with pytest.raises(AssertionError, match="get_num_new_matched_tokens called touch"):
        strict.get_num_new_matched_tokens(engine.add("a", list(range(9)), 1), 0)


class Meddling(ShelfScheduler):
    def build_connector_meta(self, step: StepView) -> Orders:
        orders = super().build_connector_meta(step)
        for share in step.scheduled:
            table = share.block_ids[0]
            assert isinstance(table, list)
            table.append(1)
        return orders


def test_steps_are_read_only() -> None:
    with pytest.raises(AssertionError, match="changed the step"):
        suite(Meddling).test_tokens_blocks_and_endings_are_right("shared-prefix")


class Clinging(ShelfScheduler):
    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, None]:
        if block_ids and block_ids[0]:
            self.context.touch_ids([block_ids[0][-1]])
        return False, None


def test_references_are_given_back() -> None:
    broken = suite(Clinging)
    type(broken).needs_context = True
    with pytest.raises(AssertionError, match="liveness"):
        broken.test_tokens_blocks_and_endings_are_right("shared-prefix")


class Unforgetting(ShelfScheduler):
    def reset_cache(self) -> bool:
        if not hasattr(self, "_places"):
            super().reset_cache()
        return True


def test_a_reset_forgets() -> None:
    with pytest.raises(AssertionError):
        suite(Unforgetting).test_a_reset_forgets_everything()


class Trusting(ShelfScheduler):
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        pass


@pytest.mark.parametrize("failure", Failure)
def test_what_a_failed_step_computed_is_forgotten(failure: Failure) -> None:
    with pytest.raises(WrongTokenError, match="does not hold the KV"):
        suite(Trusting).test_what_a_failed_step_computed_is_never_found(failure)


@pytest.mark.parametrize("failure", [Failure.STEP, Failure.BLOCKS])
def test_what_failed_steps_computed_is_forgotten_under_traffic(failure: Failure) -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite(Trusting).test_what_failed_steps_computed_is_never_found_under_traffic("small", failure)


class HalfTrusting(ShelfScheduler):
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.step_failed:
            self.reset_cache()


def test_invalid_blocks_spoil_what_was_stored_behind_them() -> None:
    suite(HalfTrusting).test_what_a_failed_step_computed_is_never_found(Failure.STEP)
    with pytest.raises(WrongTokenError, match="does not hold the KV"):
        suite(HalfTrusting).test_what_a_failed_step_computed_is_never_found(Failure.BLOCKS)


class Forgetful(ShelfScheduler):
    def build_connector_meta(self, step: StepView) -> Orders:
        return Orders(super().build_connector_meta(step).loads)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


def test_a_connector_without_use_is_noticed() -> None:
    with pytest.raises(AssertionError, match="nothing was restored"):
        suite(Forgetful).test_it_gives_back_what_it_has_stored()


class Boasting(ShelfScheduler):
    def explain(self, request_id: str) -> CacheReport:
        super().explain(request_id)
        return CacheReport({"shelf": 1000})


def test_reports_are_true() -> None:
    with pytest.raises(AssertionError):
        suite(Boasting).test_it_explains_what_it_has_restored()


class Remembering(ShelfScheduler):
    def __init__(self, environment: SchedulerEnvironment) -> None:
        super().__init__(environment)
        self.ended: set[str] = set()

    def explain(self, request_id: str) -> CacheReport:
        self.ended.add(request_id)
        return super().explain(request_id)


class RememberingTheAborted(Remembering):
    def explain(self, request_id: str) -> CacheReport:
        if self._requests[request_id].num_tokens == self._requests[request_id].num_prompt_tokens:
            return super().explain(request_id)
        return ShelfScheduler.explain(self, request_id)


@pytest.mark.parametrize("broken", [Remembering, RememberingTheAborted])
def test_ended_requests_are_forgotten(broken: type[ShelfScheduler]) -> None:
    forgetful = suite(broken)
    type(forgetful).max_remembered = 200  # it is told sooner
    with pytest.raises(AssertionError, match="288 requests have come and gone, and it holds"):
        forgetful.test_it_forgets_requests_that_have_ended()


class BoundedlyRemembering(ShelfScheduler):
    def __init__(self, environment: SchedulerEnvironment) -> None:
        super().__init__(environment)
        self.ended: deque[str] = deque(maxlen=250)

    def explain(self, request_id: str) -> CacheReport:
        self.ended.append(request_id)
        return super().explain(request_id)


def test_a_connector_may_keep_something_of_so_many_requests_as_it_says() -> None:
    bounded = suite(BoundedlyRemembering)
    bounded.test_it_forgets_requests_that_have_ended()
    type(bounded).max_remembered = 200
    with pytest.raises(AssertionError, match="288 requests have come and gone"):
        bounded.test_it_forgets_requests_that_have_ended()


class Foreseeing(ShelfScheduler):
    def build_connector_meta(self, step: StepView) -> Orders:
        for share in step.scheduled:
            end = share.num_computed_tokens + share.num_scheduled_tokens
            assert len(self._requests[share.request_id].block_hashes) >= end // self._size, "a hash is not there"
        return super().build_connector_meta(step)


def test_steps_may_be_planned_before_all_tokens_are_known() -> None:
    with pytest.raises(AssertionError, match="a hash is not there"):
        suite(Foreseeing).test_tokens_blocks_and_endings_are_right("shared-prefix")


class Shrinking(ShelfScheduler):
    series = counter("saved_blocks", "blocks", "Saved.").of()

    def get_kv_connector_stats(self) -> Stats:
        return {self.series: -1}


class Owing(Shrinking):
    series = gauge("saved_blocks_now", "blocks", "Saved.").of()


@pytest.mark.parametrize(("broken", "message"), [(Shrinking, "for counters from 0 on"), (Owing, "less than nothing")])
def test_counters_add_up(broken: type[ShelfScheduler], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        suite(broken).test_its_counters_add_up()


@dataclass(frozen=True)
class Opaque:
    loads: object = ()
    stores: object = ()


class Undeclared(ShelfWorker):
    metadata_type = Opaque  # type: ignore[assignment]  # that is what is wrong with it


def test_messages_are_what_their_types_say() -> None:
    with pytest.raises(AssertionError):
        suite(worker_side=Undeclared).test_messages_survive_the_way_to_another_process()


class Local(Suite):
    def factory(self) -> KVConnectorFactory:
        def scheduler_side(environment: SchedulerEnvironment) -> ShelfScheduler:
            return ShelfScheduler(environment)

        return ClassFactory(scheduler_side, ShelfWorker)


def test_factories_survive_spawn() -> None:
    with pytest.raises((AttributeError, PicklingError), match="local object"):  # the latter since CPython 3.14
        Local().test_the_factory_survives_spawn()


class Late(ShelfWorker):
    def start_load_kv(self) -> None:
        pass

    def wait_for_save(self) -> None:
        super().start_load_kv()
        super().wait_for_save()


def test_loads_come_before_the_forward_pass() -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite(worker_side=Late).test_tokens_blocks_and_endings_are_right("small")
