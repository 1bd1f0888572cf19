"""A connector that misbehaves is turned off with one log line, and nothing else happens."""

from __future__ import annotations

import logging
from dataclasses import replace
from inspect import isfunction
from typing import Any

import numpy as np
import pytest

from cargohold.engine.core.block_pool import BlockPool
from cargohold.errors import BlockNotHeldError, NullBlockError, RequestError
from cargohold.protocol import (
    MEDIUM_HOST,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockIds,
    BlockRemoved,
    BlockStored,
    CacheReport,
    ConnectorGuard,
    EmptyMetadata,
    Hint,
    KeptPrefix,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorSchedulerOutput,
    KVEvent,
    NullConnectorScheduler,
    Outage,
    RequestView,
    SchedulerContext,
    Stats,
    StepView,
    Tally,
    TierContents,
    TurnEnd,
    metrics,
)

NUM_BLOCKS = 6
NUM_GROUPS = 2


class Context:
    """A pool and no requests."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.touch_ids = self.pool.touch_ids
        self.free_ids = self.pool.free_ids
        self.next_victims, self.contents = self.pool.next_victims, self.pool.contents
        self.prefixes_of = self.pool.prefixes_of

    def get_request_blocks(self, request_id: str) -> tuple[()]:
        return ()

    def waiting_requests(self) -> tuple[()]:
        return ()


class Request:
    request_id = "r"
    num_prompt_tokens = 8
    num_tokens = 8
    all_token_ids = tuple(range(8))
    block_hashes = ()
    kv_transfer_params = None
    adapter = None
    salt = None

    tenant = None
    turn_end = TurnEnd.UNKNOWN

    def extra_keys(self, start: int, end: int) -> tuple[()]:
        return ()


class Scripted(KVConnectorScheduler):
    """Does what the test says."""

    name = "scripted"

    def __init__(self) -> None:
        self.context: SchedulerContext | None = None
        self.matched: Any = (0, False)
        self.report: KVConnectorSchedulerOutput | None = None
        self.raises: Exception | None = None
        self.events: list[KVEvent] = []
        self.stats: Stats = {}

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context

    def on_new_request(self, request: RequestView) -> None:
        if self.raises:
            raise self.raises

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.raises:
            raise self.raises
        return self.matched  # type: ignore[no-any-return]  # nonsense on purpose

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        if self.raises:
            raise self.raises
        return EmptyMetadata()

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        return self.report

    def take_events(self) -> list[KVEvent]:
        if self.raises:
            raise self.raises
        return self.events

    def get_kv_connector_stats(self) -> Stats:
        return self.stats

    def shutdown(self) -> None:
        if self.raises:
            raise self.raises


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def inner() -> Scripted:
    return Scripted()


@pytest.fixture
def guard(inner: Scripted, context: Context) -> ConnectorGuard:
    guard = ConnectorGuard(inner, NUM_BLOCKS, NUM_GROUPS)
    guard.bind_scheduler_context(context)
    return guard


@pytest.mark.parametrize("answer", [(-1, True), (5, True), 3, None, ("4", False), (4,)])
def test_an_impossible_answer_turns_it_off(
    guard: ConnectorGuard, inner: Scripted, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    inner.matched = answer
    assert guard.get_num_new_matched_tokens(Request(), 4) == (0, False)
    assert guard.broken is not None
    inner.matched = (4, True)
    assert guard.get_num_new_matched_tokens(Request(), 4) == (0, False), "it stays off"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "scripted" in caplog.text


def test_possible_answers_pass(guard: ConnectorGuard, inner: Scripted) -> None:
    for answer in ((4, True), (4, False), (0, False), (None, False)):
        inner.matched = answer
        assert guard.get_num_new_matched_tokens(Request(), 4) == answer
    inner.matched = (0, True)
    assert guard.get_num_new_matched_tokens(Request(), 4) == (0, False), "nothing does not load asynchronously"
    assert guard.broken is None


EVENT_FIELDS_OF_OTHER_TYPES: list[dict[str, Any]] = [
    {"block_hashes": ("a",)},
    {"parent_block_hash": 7},
    {"token_ids": tuple(np.arange(2))},
    {"block_tokens": "4"},
    {"group": NUM_GROUPS},
    {"group": -1},
    {"medium": None},
    {"locality": "HERE"},
    {"adapter": "french"},
    {"extra_keys": ((object(),),)},
]
"""What a publisher could make no bytes of; it ran in the engine's step, and the engine ended."""

ANSWERS_OF_OTHER_TYPES: list[tuple[str, object]] = [
    ("explain", None),
    ("explain", {"restored_tokens": {}}),
    ("explain", CacheReport({"vault": "many"})),  # type: ignore[dict-item]  # that is the point
    ("explain", CacheReport({}, None)),  # type: ignore[arg-type]  # that is the point
    ("explain", CacheReport({}, "one note")),  # type: ignore[arg-type]  # that is the point
    ("get_num_new_matched_tokens", (4.0, False)),
    ("request_finished", (False, 7)),
    ("request_finished", (False, {1: 2})),
    *(
        ("request_finished", (False, {"told": [{"x": value}]}))
        for value in (object(), {1}, b"\xff", {5: 1}, 2**70, float("nan"), "\ud800", {"\ud800": 1})
    ),
    ("report_to_scheduler", KVConnectorSchedulerOutput((1.0,), ())),  # type: ignore[arg-type]  # that is the point
    ("report_to_scheduler", KVConnectorSchedulerOutput((), ("1",))),  # type: ignore[arg-type]  # that is the point
    ("report_to_scheduler", ((1,), ())),
    ("get_kv_connector_stats", None),
    ("get_kv_connector_stats", {metrics.READY_CHUNKS: "many"}),
    ("get_kv_connector_stats", {3: 1}),
    ("get_kv_connector_stats", {metrics.STORED.of("host"): -1}),
    ("get_kv_connector_stats", {metrics.READY_CHUNKS: float("nan")}),
    ("take_events", None),
    ("take_events", [("stored", 1)]),
    *(
        ("take_events", [replace(BlockStored((b"a",), None, (), 4, 0, MEDIUM_HOST), **wrong)])
        for wrong in EVENT_FIELDS_OF_OTHER_TYPES
    ),
    ("take_events", [BlockRemoved((b"a",), NUM_GROUPS, MEDIUM_HOST)]),
    ("take_events", [AllBlocksCleared(None)]),  # type: ignore[arg-type]  # that is the point
    ("get_outages", None),
    ("get_outages", ["disk"]),
    ("get_outages", [Outage("disk", "loads", None, 1.0)]),  # type: ignore[arg-type]  # that is the point
    ("get_outages", [Outage("disk", "loads", "gone", "noon")]),  # type: ignore[arg-type]  # that is the point
    ("get_contents", None),
    ("get_contents", ["host"]),
    ("get_contents", [TierContents("host", pins=[None])]),  # type: ignore[list-item]  # that is the point
    ("get_contents", [TierContents("host", prefixes=[KeptPrefix(None, 1, 1, "long")])]),  # type: ignore[arg-type]  # as above
    ("get_contents", [TierContents("host", tenants=3)]),  # type: ignore[arg-type]  # that is the point
    ("get_finished_count", "all"),
]


@pytest.mark.parametrize(("method", "answer"), ANSWERS_OF_OTHER_TYPES)
def test_an_answer_of_another_type_turns_it_off(
    guard: ConnectorGuard, inner: Scripted, method: str, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a third party: a forgotten ``return`` in ``explain`` ended the engine; and by attack: what vLLM's engine core
    cannot send to its API server held every request up, and a counter that fell ended that server.
    """
    arguments = ARGUMENTS.get(method, ())
    expected = getattr(ConnectorGuard(NullConnectorScheduler(), NUM_BLOCKS), method)(*arguments)
    monkeypatch.setattr(inner, method, lambda *_: answer)
    answered = getattr(guard, method)(*arguments)
    assert guard.broken is not None and method in guard.broken.rule
    if method == "explain":
        assert answered.notes == (str(guard.broken),)
    elif method == "get_kv_connector_stats":
        assert answered == {metrics.FAILURES.of("connector_off"): 1}
    elif method == "get_outages":
        assert [outage.what for outage in answered] == ["everything"]
    else:
        assert answered == expected or (list(answered), list(expected)) == ([], [])


def test_an_exception_turns_it_off_and_keeps_its_cause(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.raises = OSError("disk gone")
    assert isinstance(guard.build_connector_meta(None), EmptyMetadata)  # type: ignore[arg-type]  # never looked at
    assert guard.broken is not None
    assert guard.broken.connector == "scripted"
    assert guard.broken.__cause__ is inner.raises
    assert "disk gone" in guard.broken.rule


def test_refusing_a_request_is_not_misbehaviour(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.raises = RequestError("no such option", "r")
    with pytest.raises(RequestError, match="no such option"):
        guard.on_new_request(Request())
    assert guard.broken is None


def test_refusing_a_request_anywhere_else_is(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.raises = RequestError("too late", "r")
    assert guard.get_num_new_matched_tokens(Request(), 4) == (0, False)
    assert guard.broken is not None


def test_shutdown_is_contained_and_reaches_a_broken_connector(guard: ConnectorGuard, inner: Scripted) -> None:
    guard.break_off("a rule")
    inner.raises = ValueError()
    guard.shutdown()
    assert guard.broken is not None
    assert guard.broken.rule == "a rule", "only the first time counts"


def test_a_connector_can_free_only_what_it_holds(guard: ConnectorGuard, inner: Scripted, context: Context) -> None:
    (mine, theirs) = context.pool.allocate(2)
    assert inner.context is not None
    inner.context.touch_ids([mine.block_id, mine.block_id])
    assert (mine.ref_cnt, guard.num_held_references) == (3, 2)
    with pytest.raises(BlockNotHeldError) as raised:
        inner.context.free_ids([mine.block_id, theirs.block_id])
    assert (raised.value.block_id, raised.value.held) == (theirs.block_id, 0)
    assert (mine.ref_cnt, theirs.ref_cnt, guard.num_held_references) == (3, 1, 2), "nothing was changed"
    for unknown, error in ((0, NullBlockError), (-1, IndexError), (NUM_BLOCKS, IndexError)):
        with pytest.raises(error):
            inner.context.touch_ids([mine.block_id, unknown])
    assert (mine.ref_cnt, guard.num_held_references) == (3, 2), "nothing was changed"
    inner.context.free_ids([mine.block_id, mine.block_id])
    assert (mine.ref_cnt, guard.num_held_references) == (1, 0)


def test_what_the_pool_does_not_take_back_is_still_held(
    guard: ConnectorGuard, inner: Scripted, context: Context
) -> None:
    (block,) = context.pool.allocate(1)
    assert inner.context is not None
    inner.context.touch_ids([block.block_id])
    context.pool.free_ids([block.block_id])
    context.pool.free_ids([block.block_id])  # another's mistake
    with pytest.raises(BlockNotHeldError):
        inner.context.free_ids([block.block_id])
    assert guard.held_references() == {block.block_id: 1}


def test_locks_are_references_that_add_up(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.report = KVConnectorSchedulerOutput(block_ids_to_lock=(2, 2))
    assert guard.report_to_scheduler() == inner.report
    assert guard.num_held_references == 2
    assert guard.has_pending_work()
    inner.report = KVConnectorSchedulerOutput(block_ids_to_unlock=(2,))
    assert guard.report_to_scheduler() == inner.report
    guard.break_off("a rule")
    assert guard.release() == KVConnectorSchedulerOutput(block_ids_to_unlock=(2,)), "what is still locked"
    assert guard.num_held_references == 0


def test_a_block_may_be_locked_and_unlocked_in_one_report(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.report = KVConnectorSchedulerOutput((2,), (2,))
    assert guard.report_to_scheduler() == inner.report
    assert guard.broken is None
    assert not guard.has_pending_work()


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (KVConnectorSchedulerOutput(block_ids_to_unlock=(3,)), "block 3"),
        (KVConnectorSchedulerOutput(block_ids_to_lock=(0,)), "null block"),
        (KVConnectorSchedulerOutput(block_ids_to_lock=(NUM_BLOCKS,)), f"block {NUM_BLOCKS}"),
        (KVConnectorSchedulerOutput(block_ids_to_lock=(-1,)), "block -1"),
        (KVConnectorSchedulerOutput((1,), (1, 2)), "block 2"),
    ],
)
def test_an_impossible_lock_or_unlock_names_the_block(
    guard: ConnectorGuard, inner: Scripted, report: KVConnectorSchedulerOutput, named: str
) -> None:
    inner.report = report
    assert guard.report_to_scheduler() is None
    assert guard.broken is not None
    assert named in guard.broken.rule
    assert guard.num_held_references == 0


def test_references_outlive_the_break_until_they_are_released(
    guard: ConnectorGuard, inner: Scripted, context: Context
) -> None:
    assert inner.context is not None
    inner.context.touch_ids([1, 2])
    guard.break_off("a rule")
    assert context.pool.num_free_blocks == 3, "a copy may still read them"
    assert guard.release() == KVConnectorSchedulerOutput()
    assert context.pool.num_free_blocks == 5
    context.pool.check()


CONTRACT = [name for name, value in vars(KVConnectorScheduler).items() if isfunction(value)]


def stored(*names: bytes, medium: str = MEDIUM_HOST, group: int = 0) -> BlockStored:
    return BlockStored(names, None, (), 4, group, medium)


def test_what_a_connector_announced_is_removed_when_it_is_turned_off(guard: ConnectorGuard, inner: Scripted) -> None:
    """Before, routers sent prompts for ever to an engine that could load nothing any more."""
    inner.events = [
        stored(b"a", b"b", b"c"),
        stored(b"a"),
        stored(b"d", group=1),
        stored(b"e", medium=MEDIUM_STORAGE),
        replace(stored(b"e", medium=MEDIUM_STORAGE), locality="REMOTE"),
    ]
    assert list(guard.take_events()) == inner.events
    inner.events = [BlockRemoved((b"b", b"a"), 0, MEDIUM_HOST), stored(b"f", medium="tape"), AllBlocksCleared("tape")]
    assert list(guard.take_events()) == inner.events
    inner.events = [stored(b"never said")]
    guard.break_off("it did something")
    removed = [
        BlockRemoved((b"a", b"c"), 0, MEDIUM_HOST),
        BlockRemoved((b"d",), 1, MEDIUM_HOST),
        BlockRemoved((b"e",), 0, MEDIUM_STORAGE),
        BlockRemoved((b"e",), 0, MEDIUM_STORAGE, "REMOTE"),
    ]
    assert list(guard.take_events()) == removed
    assert list(guard.take_events()) == [], "once"


def test_a_connector_that_breaks_while_it_tells_has_its_announcements_removed_at_once(
    guard: ConnectorGuard, inner: Scripted
) -> None:
    inner.events = [stored(b"a")]
    assert guard.take_events()
    inner.raises = ZeroDivisionError()
    assert list(guard.take_events()) == [BlockRemoved((b"a",), 0, MEDIUM_HOST)]


def test_a_connector_that_is_turned_off_holds_nothing_that_a_reset_could_forget(
    guard: ConnectorGuard, inner: Scripted
) -> None:
    """Before, an engine could never again say that its caches were reset."""
    guard.break_off("it did something")
    assert guard.reset_cache()


def test_levels_of_a_connector_that_is_turned_off_are_taken_back(guard: ConnectorGuard, inner: Scripted) -> None:
    stores, ready, held = (
        metrics.PLANNED.of("store"),
        metrics.READY_CHUNKS,
        metrics.STUCK_COPIES._replace(connector="child"),
    )
    told = Tally()
    given: tuple[Stats, ...] = {stores: 2, ready: 5}, {ready: -2, held: 1}
    for inner.stats in given:
        told.add(guard.get_kv_connector_stats())
    assert told == {stores: 2, ready: 3, held: 1}
    guard.break_off("made for this test")
    told.add(guard.get_kv_connector_stats())
    assert told == {stores: 2, ready: 0, held: 0, metrics.FAILURES.of("connector_off"): 1}
    assert guard.get_kv_connector_stats() == {}, "once"


def test_a_connector_that_is_turned_off_is_out_of_use(guard: ConnectorGuard, inner: Scripted) -> None:
    assert guard.get_outages() == ()
    guard.break_off("made for this test")
    (outage,) = guard.get_outages()
    assert (outage.tier, outage.what, outage.reason) == (inner.name, "everything", "made for this test")
    assert outage.retry_at is None, "only a restart helps"


def test_stats_that_are_none_turn_a_connector_off(guard: ConnectorGuard, inner: Scripted) -> None:
    inner.stats = {metrics.READY_CHUNKS: "many"}  # type: ignore[dict-item]  # nonsense on purpose
    assert guard.get_kv_connector_stats() == {metrics.FAILURES.of("connector_off"): 1}
    assert guard.broken is not None


def test_workers_are_told_once_and_until_they_have_stopped_that_is_work(guard: ConnectorGuard) -> None:
    assert not guard.stop_workers(), "a connector that is on"
    guard.break_off("made for this test")
    assert stage(guard) == {"winding up", "busy"}
    assert guard.stop_workers()
    assert not guard.stop_workers(), "again"
    assert stage(guard) == {"winding up", "stopping", "busy"}
    guard.release()
    assert stage(guard) == set()
    assert not guard.stop_workers()


def stage(guard: ConnectorGuard) -> set[str]:
    answers = {"winding up": guard.is_winding_up, "stopping": guard.is_stopping, "busy": guard.has_pending_work()}
    return {name for name, answer in answers.items() if answer}


def raising(name: str) -> KVConnectorScheduler:
    def fail(*_: object) -> None:
        raise RuntimeError("of its own")

    kind = type("Raising", (NullConnectorScheduler,), {name: fail})
    connector = kind()
    assert isinstance(connector, KVConnectorScheduler)
    return connector


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "bind_scheduler_context": (Context(),),
    "on_new_request": (Request(),),
    "on_hints": (Request(), [Hint.retain()]),
    "get_num_new_matched_tokens": (Request(), 0),
    "get_shared_prefix_end": (Request(),),
    "expect_tokens": (Request(), 4),
    "update_state_after_alloc": (Request(), (), 0),
    "build_connector_meta": (None,),
    "update_connector_output": (None,),
    "request_finished": (Request(), ()),
    "explain": ("r",),
    "on_pause": (["r"],),
    "use_weights": ("others",),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_whatever_method_raises_the_caller_goes_on(name: str, context: Context) -> None:
    guard = ConnectorGuard(raising(name), NUM_BLOCKS)
    answer = getattr(guard, name)(*ARGUMENTS.get(name, ()))
    assert guard.broken is not None
    assert guard.broken.rule.startswith(f"{name} raised")
    if name == "explain":
        assert answer == CacheReport(notes=(str(guard.broken),))
    elif name == "on_hints":
        assert [outcome.status for outcome in answer] == ["rejected"]
    elif name == "take_events":
        assert not list(answer)
    elif name == "get_kv_connector_stats":
        assert answer == {metrics.FAILURES.of("connector_off"): 1}
    elif name == "get_outages":
        assert [outage.what for outage in answer] == ["everything"]
    elif name == "has_pending_work":
        assert answer, "its workers have still to be stopped"
    else:
        assert answer == getattr(NullConnectorScheduler(), name)(*ARGUMENTS.get(name, ()))
