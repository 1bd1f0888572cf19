"""An engine in 150 lines that runs any connector of the contract: one request at a time, one layer of attention, one worker.

It shows the host's side of the contract and nothing else: no batching, no prefix cache of its own, no GPU.
"""

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from cargohold import protocol
from cargohold.blocks import extend_hashes, root_hash

BLOCK_TOKENS, WIDTH, VOCABULARY = 16, 32, 512


@dataclass
class Request:
    """What a connector sees of a request (``protocol.RequestView``)."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    adapter: None = None
    tenant: None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    turn_end: protocol.TurnEnd = protocol.TurnEnd.UNKNOWN

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, *token_ids: int) -> None:
        self.all_token_ids += token_ids
        extend_hashes(self.block_hashes, self.all_token_ids, BLOCK_TOKENS, root_hash())

    def extra_keys(self, start: int, end: int) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class Share:
    """One request's part of a step (``protocol.ScheduledRequest``)."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: protocol.BlockIds


@dataclass(frozen=True)
class Step:
    """The plan of a step (``protocol.StepView``)."""

    scheduled: Sequence[Share] = ()
    finished_req_ids: AbstractSet[str] = frozenset()
    preempted_req_ids: AbstractSet[str] = frozenset()

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {share.request_id: share.num_scheduled_tokens for share in self.scheduled}


class Engine:
    """Generates tokens with a random one-layer model, and asks a connector for KV before it computes any."""

    def __init__(self, factory: protocol.KVConnectorFactory, num_blocks: int = 64) -> None:
        group = protocol.KVCacheGroup(0, protocol.AttentionKind.FULL, BLOCK_TOKENS, ("layer",))
        block_bytes = BLOCK_TOKENS * 2 * WIDTH * 4  # a key and a value of float32 per token
        layout = protocol.KVCacheLayout((group,), num_blocks, block_bytes, hash_block_tokens=BLOCK_TOKENS)
        # What this engine cannot do, it says: it keeps no blocks for reuse, and takes no locks.
        environment = protocol.SchedulerEnvironment(
            layout, time.monotonic, prefix_caching=False, applies_locks=False, full_hits=False
        )
        self.scheduler_side = factory.make_scheduler_side(environment)
        self.worker_side = factory.make_worker_side(protocol.WorkerEnvironment(layout, 0, time.monotonic))
        self.aggregator = protocol.OutputAggregator(1)
        # The paged KV: row ``block_id`` is the block. Connectors copy bytes; the model sees numbers.
        self.kv_bytes = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        self.kv = self.kv_bytes.view(torch.float32).view(num_blocks, BLOCK_TOKENS, 2, WIDTH)
        self.worker_side.register_kv_caches([[self.kv_bytes]])
        self.free_blocks = list(range(1, num_blocks))  # block 0 is the null block
        self.kept: dict[str, list[int]] = {}  # blocks of ended requests that the connector still reads
        self.num_computed_tokens = 0
        torch.manual_seed(7)
        self.embedding, self.mix = torch.randn(VOCABULARY, WIDTH), torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5

    # --- the life of a request ----------------------------------------------------------------------------------------

    def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        request = Request(request_id, [], len(prompt))
        request.append(*prompt)
        self.scheduler_side.on_new_request(request)
        while (match := self.scheduler_side.get_num_new_matched_tokens(request, 0))[0] is None:
            self.step(Step())  # "not yet": the connector is asking a slower tier. Go on, and ask again
        num_matched, is_async = match
        blocks = self.allocate(-(-(len(prompt) + max_tokens) // BLOCK_TOKENS))
        self.scheduler_side.update_state_after_alloc(request, (blocks,), num_matched or 0)
        computed = num_matched or 0
        if computed and is_async:
            computed = self.wait_for_load(request, blocks, computed)
        while len(request.all_token_ids) < len(prompt) + max_tokens:
            share = Share(request_id, computed, request.num_tokens - computed, (blocks,))
            self.num_computed_tokens += share.num_scheduled_tokens
            next_token = self.step(Step([share]), request)
            computed = request.num_tokens
            request.append(next_token)
        keeps_blocks, _ = self.scheduler_side.request_finished(request, (blocks,))
        if keeps_blocks:
            self.kept[request_id] = blocks
        else:
            self.free_blocks += blocks
        self.step(Step(finished_req_ids={request_id}))
        return request.all_token_ids[len(prompt) :]

    def allocate(self, count: int) -> list[int]:
        while len(self.free_blocks) < count:
            assert self.kept, "the prompt is longer than the pool"
            self.step(Step())  # blocks come back when their copies have ended
        return [self.free_blocks.pop() for _ in range(count)]

    def wait_for_load(self, request: Request, blocks: list[int], num_matched: int) -> int:
        """Make empty steps until the load has ended; returns how many tokens it has brought."""
        num_good = num_matched
        while True:
            self.step(Step())
            for at, block_id in enumerate(blocks):
                if block_id in self.output.invalid_block_ids:  # everything from the first bad block on is computed
                    num_good = min(num_good, at * BLOCK_TOKENS)
            if request.request_id in self.output.finished_recving:
                self.scheduler_side.update_state_after_alloc(request, (blocks,), 0)
                return 0 if request.request_id in self.output.failed_recving else num_good

    # --- a step: plan, worker, report ---------------------------------------------------------------------------------

    def step(self, step: Step, request: Request | None = None) -> int:
        metadata, worker, next_token = self.scheduler_side.build_connector_meta(step), self.worker_side, -1
        worker.bind_connector_metadata(metadata)
        try:
            worker.handle_preemptions()
            worker.start_load_kv()
            worker.wait_for_layer_load("layer")
            if request is not None:
                next_token = self.forward(request, step.scheduled[0])
            worker.save_kv_layer("layer")
            worker.wait_for_save()
            report = protocol.KVConnectorOutput.of(
                worker.get_transfer_results(step.finished_req_ids),
                worker.get_block_ids_with_load_errors(),
                worker.build_connector_worker_meta(),
                worker.get_kv_connector_stats(),
            )
        finally:
            worker.clear_connector_metadata()  # always last, also when the forward pass has raised
        self.output = self.aggregator.aggregate([report])  # with several workers: their reports, in rank order
        if not self.output.is_empty():
            self.scheduler_side.update_connector_output(self.output)
        for request_id in self.output.finished_sending:
            self.free_blocks += self.kept.pop(request_id)
        if not step.scheduled:
            time.sleep(0.001)  # nothing to compute: let the copies run
        return next_token

    def forward(self, request: Request, share: Share) -> int:
        """Compute keys and values of the new tokens into their blocks, then attend to all tokens from the last one."""
        blocks = share.block_ids[0]
        end = share.num_computed_tokens + share.num_scheduled_tokens
        for position in range(share.num_computed_tokens, end):
            hidden = self.embedding[request.all_token_ids[position]]
            row = self.kv[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
            row[0], row[1] = self.mix[0] @ hidden, self.mix[1] @ hidden
        seen = self.kv[list(blocks)].flatten(0, 1)[:end]
        query = self.mix[2] @ self.embedding[request.all_token_ids[end - 1]]
        weights = torch.softmax(seen[:, 0] @ query / WIDTH**0.5, 0)
        return int((self.embedding @ (weights @ seen[:, 1])).argmax())

    def close(self) -> None:
        while self.scheduler_side.has_pending_work() or self.kept:
            self.step(Step())
        self.scheduler_side.shutdown()
        self.worker_side.shutdown()
