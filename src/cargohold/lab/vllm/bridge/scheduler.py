"""The scheduler side of a connector of vLLM's: our requests, steps and reports in vLLM's terms."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, Final

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput as VllmOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cargohold.lab.vllm.bridge.worker import Message, WorkerReports
from cargohold.lab.vllm.requests import ENDS, from_vllm
from cargohold.protocol import (
    MEDIUM_HOST,
    NULL_BLOCK_ID,
    BlockIds,
    CacheReport,
    KVCacheLayout,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVEvent,
    RequestView,
    ScheduledRequest,
    Stats,
    StepView,
    TurnEnd,
)

_MOST_TOKENS: Final = 1 << 20
"""What requests may generate, as far as the class is told: an engine of ours does not say."""
_HASHED: Final = b"hashed"
_ENDS: Final[Mapping[TurnEnd, RequestStatus]] = {
    TurnEnd.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    TurnEnd.ABORT: RequestStatus.FINISHED_ABORTED,
    TurnEnd.ERROR: RequestStatus.FINISHED_ERROR,
}


class MirroredRequest:
    """One of our requests as vLLM has it.

    Args:
        view: our request.

    Attributes:
        vllm: vLLM's request.
        num_told: blocks per group that the class knows from steps; ``None`` before its first step, and when it has lost them.
        has_run: whether it has been in a step.
        num_local: tokens that were on the device when a load was looked for.
        is_async: whether the load that was found is asynchronous.
        num_loaded: tokens of its longest load.
        loaded: the blocks of its last load.
    """

    def __init__(self, view: RequestView) -> None:
        self._view = view
        sampling = SamplingParams(max_tokens=_MOST_TOKENS, temperature=0.0)
        self.vllm: Any = Request(
            request_id=view.request_id,
            prompt_token_ids=list(view.all_token_ids[: view.num_prompt_tokens]),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=LoRARequest(view.adapter.name, view.adapter.number, "unknown") if view.adapter else None,
            cache_salt=view.salt,
        )
        if view.kv_transfer_params is not None:
            self.vllm.kv_transfer_params = dict(view.kv_transfer_params)
        self.num_told: tuple[int, ...] | None = None
        self.has_run = False
        self.num_local = 0
        self.is_async = False
        self.num_loaded = 0
        self.loaded: frozenset[int] = frozenset()

    def follow(self) -> Any:
        """VLLM's request, with all tokens that are known by now, and their hashes."""
        new = self._view.all_token_ids[self.vllm.num_tokens : self._view.num_tokens]
        if new:
            self.vllm.append_output_token_ids(list(new))
        self.vllm.block_hashes += self._view.block_hashes[len(self.vllm.block_hashes) :]
        return self.vllm

    def lose_blocks(self) -> None:
        """Note that it starts over."""
        self.num_told = None
        self.vllm.status = RequestStatus.PREEMPTED
        self.vllm.num_computed_tokens = 0
        self.vllm.num_preemptions += 1


class BridgedScheduler(KVConnectorScheduler):
    """Calls a connector of vLLM's as vLLM's scheduler does.

    Args:
        inner: the connector.
        layout: the paged KV cache.
    """

    worker_metadata_type = WorkerReports

    def __init__(self, inner: Any, layout: KVCacheLayout) -> None:
        self.name = type(inner).__name__
        self._inner = inner
        self._groups = layout.groups
        self._world_size = layout.world_size
        self._requests: dict[str, MirroredRequest] = {}
        self._loads_first = False
        self._in_step: dict[str, frozenset[int]] = {}

    # --- requests -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Tell of a new request."""
        mirrored = self._requests[request.request_id] = MirroredRequest(request)
        self._inner.on_new_request(mirrored.follow())

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the class has found."""
        mirrored = self._requests[request.request_id]
        found, is_async = self._inner.get_num_new_matched_tokens(mirrored.follow(), num_computed_tokens)
        if found and not is_async and num_computed_tokens + found >= request.num_tokens:
            raise AssertionError("it would load all tokens within the step: vLLM asserts that one is left to compute")
        mirrored.num_local, mirrored.is_async = num_computed_tokens, bool(is_async)
        return found, bool(found and is_async)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Hand over the blocks. Those that were found on the device have hashes, as in vLLM."""
        mirrored = self._requests[request.request_id]
        self._loads_first |= bool(num_external_tokens) and not mirrored.is_async
        tables = tuple(
            [_block(block_id, at < mirrored.num_local // group.block_tokens) for at, block_id in enumerate(table)]
            for group, table in zip(self._groups, blocks, strict=True)
        )
        self._inner.update_state_after_alloc(mirrored.follow(), KVCacheBlocks(tables), num_external_tokens)
        if num_external_tokens:
            mirrored.num_loaded = max(mirrored.num_loaded, num_external_tokens)
            mirrored.loaded = self._between(blocks, mirrored.num_local, mirrored.num_local + num_external_tokens)
            if mirrored.is_async:
                mirrored.vllm.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Tell that a request has ended."""
        vllm = self._requests[request.request_id].follow()
        vllm.status = _ENDS.get(request.turn_end, RequestStatus.FINISHED_STOPPED)
        tables = tuple(list(table) for table in block_ids)
        if supports_hma(self._inner):
            is_kept, params = self._inner.request_finished_all_groups(vllm, tables)
        else:
            is_kept, params = self._inner.request_finished(vllm, tables[0])
        return bool(is_kept), params

    def explain(self, request_id: str) -> CacheReport:
        """What was loaded for a request, by the engine's own count: the class explains nothing. It is forgotten."""
        num_loaded = self._requests.pop(request_id).num_loaded
        return CacheReport({self.name: num_loaded} if num_loaded else {})

    # --- steps --------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> Message:
        """The class's metadata for a step."""
        for request_id in step.preempted_req_ids:
            if request_id in self._requests:
                self._requests[request_id].lose_blocks()
        output = self._scheduler_output(step)
        self._in_step = {
            share.request_id: self._between(
                share.block_ids, share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
            )
            for share in step.scheduled
        }
        meta = self._inner.build_connector_meta(output)
        message = Message(pickle.dumps(meta), self._loads_first)
        self._loads_first = False
        return message

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers have reported.

        That a step has failed, vLLM's interface has no word for: the class is told that the blocks which the step wrote are
        invalid, as after a failed load.
        """
        spoiled: Iterable[str] = ()
        if connector_output.step_failed:
            spoiled = connector_output.spoiled_requests or self._in_step
        invalid = connector_output.invalid_block_ids.union(*(self._in_step.get(name, ()) for name in spoiled))
        for request_id, mirrored in self._requests.items():
            if request_id in connector_output.failed_recving or not mirrored.loaded.isdisjoint(invalid):
                mirrored.num_loaded = 0
        report = self._merged(connector_output.kv_connector_worker_meta)
        for name in ENDS:
            setattr(report, name, set(getattr(connector_output, name)))
        report.invalid_block_ids = set(invalid)
        self._inner.update_connector_output(report)

    def take_events(self) -> list[KVEvent]:
        """The class's events."""
        return [from_vllm(event, MEDIUM_HOST) for event in self._inner.take_events()]

    def has_pending_work(self) -> bool:
        """Whether the engine must go on for the class."""
        return bool(self._inner.has_pending_push_work())

    def reset_cache(self) -> bool:
        """Forget everything. A class without that hook keeps what it has, so the answer is no."""
        return bool(self._inner.reset_cache())

    def get_kv_connector_stats(self) -> Stats:
        """Nothing; see the worker side."""
        self._inner.get_kv_connector_stats()
        return {}

    def get_finished_count(self) -> int | None:
        """How many workers report each transfer."""
        count = self._inner.get_finished_count()
        return None if count is None else int(count)

    def shutdown(self) -> None:
        """Stop the class."""
        self._inner.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _scheduler_output(self, step: StepView) -> Any:
        output = SchedulerOutput.make_empty()
        for share in step.scheduled:
            self._add(output, share)
        output.num_scheduled_tokens = dict(step.num_scheduled_tokens)
        output.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        output.finished_req_ids = set(step.finished_req_ids)
        output.preempted_req_ids = set(step.preempted_req_ids)
        output.has_sync_kv_loads = self._loads_first
        return output

    def _add(self, output: Any, share: ScheduledRequest) -> None:
        """Add a request's share of a step: all of its blocks if they are new to the class, or those that have come."""
        mirrored = self._requests[share.request_id]
        request, told = mirrored.follow(), mirrored.num_told
        request.num_computed_tokens, request.status = share.num_computed_tokens, RequestStatus.RUNNING
        mirrored.num_told = tuple(map(len, share.block_ids))
        begins = told or (0,) * len(share.block_ids)
        tables = tuple(list(table[at:]) for at, table in zip(begins, share.block_ids, strict=True))
        if not mirrored.has_run:
            mirrored.has_run = True
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, tables))
            return
        cached: CachedRequestData = output.scheduled_cached_reqs
        cached.req_ids.append(share.request_id)
        cached.new_block_ids.append(tables if any(tables) else None)
        cached.num_computed_tokens.append(share.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)
        if told is None:
            cached.resumed_req_ids.add(share.request_id)
            cached.all_token_ids[share.request_id] = list(request.all_token_ids)

    def _between(self, tables: BlockIds, start: int, end: int) -> frozenset[int]:
        """The blocks of a request's tables that hold these of its tokens."""
        return frozenset(
            block_id
            for group, table in zip(self._groups, tables, strict=True)
            for block_id in table[start // group.block_tokens : -(-end // group.block_tokens)]
            if block_id != NULL_BLOCK_ID
        )

    def _merged(self, reports: Any) -> Any:
        """One report of all workers, merged by vLLM's own code."""
        outputs = []
        for pickled in reports.pickled if isinstance(reports, WorkerReports) else ():
            meta, events = pickle.loads(pickled)  # noqa: S301  # our own bytes
            report = VllmOutput(kv_connector_worker_meta=meta, kv_cache_events=events)
            outputs.append(ModelRunnerOutput.with_kv_conn_output_only(report))
        if len(outputs) > 1:
            outputs = [KVOutputAggregator(self._world_size).aggregate(outputs)]
        merged = outputs[0].kv_connector_output if outputs else None
        return VllmOutput() if merged is None else merged


def _block(block_id: int, is_hashed: bool) -> Any:
    block = KVCacheBlock(block_id, ref_cnt=1, is_null=block_id == NULL_BLOCK_ID)
    if is_hashed and not block.is_null:
        block.set_block_hash(_HASHED)
    return block
