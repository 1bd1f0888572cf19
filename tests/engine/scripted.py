"""A connector that does what a test says: locks, loads, keeps blocks, or defers its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np

from cargohold.lab.simulation import SimulatedEngine
from cargohold.protocol import (
    NULL_BLOCK_ID,
    BlockIds,
    ClassFactory,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorSchedulerOutput,
    KVConnectorTransferResults,
    NullConnectorScheduler,
    NullConnectorWorker,
    RequestView,
    SchedulerContext,
    StepView,
)


@dataclass(frozen=True, slots=True)
class Load:
    """A load of tokens ``[start, end)`` of a request into its blocks."""

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    start: int
    end: int


def fill(engine: SimulatedEngine, load: Load) -> None:
    """Put the right KV into the blocks of a load."""
    for group, table in zip(engine.layout.groups, load.blocks, strict=True):
        coded = engine.chains.coded(load.request_id, load.end, engine.runner.salts[group.index])
        fingerprints = np.frombuffer(bytes(coded), dtype=np.uint64)
        for at in range(load.start, load.end):
            number, offset = divmod(at, group.block_tokens)
            if table[number] != NULL_BLOCK_ID:
                engine.runner.memory[table[number], offset] = fingerprints[at]


class Script:
    """What the connector has to do, and what the engine has told it.

    Args:
        fill: puts the right KV into the blocks of a load.
    """

    def __init__(self, fill: Callable[[Load], None] = lambda _: None) -> None:
        self.fill = fill
        self.context: SchedulerContext | None = None
        self.locks: list[int] = []
        self.unlocks: list[int] = []
        self.num_stuck = 0  # blocks that it holds for copies that may never end
        self.hesitates = False
        self.offers: dict[str, tuple[int, bool]] = {}  # tokens from the start of the prompt; whether asynchronously
        self.keeps: set[str] = set()
        self.in_step: list[Load] = []
        self.loading: dict[str, Load] = {}
        self.sending: set[str] = set()
        self.ended = KVConnectorTransferResults()
        self.invalid: set[int] = set()

    def end_load(self, request_id: str, *, failed: bool) -> None:
        """Let an asynchronous load end in the next step."""
        load = self.loading.pop(request_id)
        if not failed:
            self.fill(load)
        self.ended = KVConnectorTransferResults(
            finished_sending=self.ended.finished_sending,
            finished_recving=self.ended.finished_recving | {request_id},
            failed_recving=self.ended.failed_recving | ({request_id} if failed else set()),
        )

    def end_send(self, request_id: str) -> None:
        """Let go of an ended request's blocks in the next step."""
        self.sending.remove(request_id)
        self.ended = KVConnectorTransferResults(
            finished_sending=self.ended.finished_sending | {request_id},
            finished_recving=self.ended.finished_recving,
            failed_recving=self.ended.failed_recving,
        )


class ScriptedScheduler(NullConnectorScheduler):
    """Scheduler side."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self._script.context = context

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._script.hesitates:
            return None, False
        offered, is_async = self._script.offers.get(request.request_id, (0, False))
        return max(0, offered - num_computed_tokens), is_async

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        offered, is_async = self._script.offers[request.request_id]
        tables = tuple(tuple(table) for table in blocks)
        load = Load(request.request_id, tables, offered - num_external_tokens, offered)
        if is_async:
            self._script.loading[request.request_id] = load
        else:
            self._script.in_step.append(load)

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        return EmptyMetadata()

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        report = KVConnectorSchedulerOutput(tuple(self._script.locks), tuple(self._script.unlocks))
        self._script.locks.clear()
        self._script.unlocks.clear()
        return report

    def num_stuck_references(self) -> int:
        return self._script.num_stuck

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        if request.request_id in self._script.keeps:
            self._script.sending.add(request.request_id)
            return True, None
        return False, None

    def has_pending_work(self) -> bool:
        script = self._script
        return script.hesitates or bool(script.loading or script.sending or script.locks)


class ScriptedWorker(NullConnectorWorker):
    """Worker side."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def start_load_kv(self) -> None:
        for load in self._script.in_step:
            self._script.fill(load)
        self._script.in_step.clear()

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        ended, self._script.ended = self._script.ended, KVConnectorTransferResults()
        return ended

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        invalid, self._script.invalid = self._script.invalid, set()
        return invalid


def scripted_connector(script: Script) -> ClassFactory:
    """The connector of a script."""
    return ClassFactory(lambda _: ScriptedScheduler(script), lambda _: ScriptedWorker(script))


def counted(*block_ids: int) -> Counter[int]:
    """The given references on blocks, counted."""
    return Counter(block_ids)
