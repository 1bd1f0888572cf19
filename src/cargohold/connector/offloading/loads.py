"""Loads: planned when a request gets its blocks, ended when all workers have reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import chain, islice

from cargohold.connector.offloading.chunks import blocks_to_load, rows_to_load
from cargohold.connector.offloading.jobs import Load, Origins
from cargohold.connector.offloading.messages import LoadJob
from cargohold.connector.offloading.prefetch import Prefetcher
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.shared import Shared
from cargohold.offload.manager.base import OffloadKey
from cargohold.protocol import BlockIds, KVConnectorOutput, TransferOutcome


class Loads:
    """Plans loads, and handles their ends."""

    def __init__(
        self, shared: Shared, requests: Mapping[str, RequestState], prefetcher: Prefetcher | None = None
    ) -> None:
        self._shared = shared
        self._prefetcher = prefetcher
        self._requests = requests
        self._planned: list[LoadJob] = []
        # Blocks that some worker reported as bad, of loads that have not ended on all workers.
        self._invalid_block_ids: set[int] = set()

    def plan(
        self, state: RequestState, blocks: BlockIds, num_computed_tokens: int, num_hit_tokens: int
    ) -> Counter[str]:
        """Plan the load of the tokens between the computed ones and the end of the hit into the request's ``blocks``.

        Pins the chunks and holds the blocks until the load has ended.

        Returns:
            The number of tokens to be loaded, by the tier they came from.
        """
        shared = self._shared
        per_chunk = shared.config.blocks_per_chunk
        parts = [
            (
                keys.keys,
                blocks_to_load(
                    blocks[keys.group.index], keys.group.block_tokens, per_chunk, num_computed_tokens, num_hit_tokens
                ),
            )
            for keys in state.keys
        ]
        handle = shared.manager.prepare_load([keys[chunk] for keys, part in parts for chunk in part.chunks])
        slots = iter(handle.slots)
        rows: list[int] = []
        for _, part in parts:
            rows += rows_to_load(part, list(islice(slots, len(part.chunks))), per_chunk)
        block_ids = tuple(chain.from_iterable(part.block_ids for _, part in parts))
        block_keys = [keys[number // per_chunk] for keys, part in parts for number in part.numbers]
        block_starts = [
            number * keys.group.block_tokens
            for keys, (_, part) in zip(state.keys, parts, strict=True)
            for number in part.numbers
        ]
        if self._prefetcher is not None:
            origins = self._prefetcher.origins(state, num_computed_tokens, num_hit_tokens, shared.tier)
        else:
            origins = Origins((shared.tier,), bytes(num_hit_tokens - num_computed_tokens))
        shared.holder.hold(block_ids)
        request_id = state.request.request_id
        load = Load(
            shared.jobs.new_id(),
            request_id,
            handle,
            num_computed_tokens,
            block_ids,
            block_keys,
            block_starts,
            origins,
            is_first=not state.was_admitted,
        )
        shared.jobs.add_load(load)
        self._planned.append(LoadJob(load.job_id, request_id, block_ids, tuple(rows), shared.config.transfer_timeout_s))
        shared.stats["loads"] += 1
        shared.stats["loaded_blocks"] += len(block_ids)
        return origins.count(len(origins.tiers))

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call."""
        if not self._planned:
            return ()
        planned, self._planned = tuple(self._planned), []
        return planned

    def note_invalid(self, block_ids: frozenset[int]) -> None:
        """Remember blocks that some worker could not fill. Blocks of no load in flight are another connector's: ignored."""
        if block_ids:
            for load in self._shared.jobs.loads():
                self._invalid_block_ids |= block_ids.intersection(load.block_ids)

    def end_stuck(self, load: Load) -> None:
        """Release the pins and blocks of a load that its request has not waited for."""
        self._invalid_block_ids.difference_update(load.block_ids)
        load.handle.release()
        self._shared.holder.release(load.block_ids)

    def end(self, load: Load, outcome: TransferOutcome, output: KVConnectorOutput) -> None:
        """Release the load's pins and blocks. Chunks that could not be read are removed: they are misses from now on."""
        bad_blocks = self._invalid_block_ids.intersection(load.block_ids)
        self._invalid_block_ids -= bad_blocks
        if outcome is TransferOutcome.FAILED and load.request_id in output.finished.failed_recving:
            bad_blocks = set(load.block_ids)
        bad_keys = {
            key for block_id, key in zip(load.block_ids, load.block_keys, strict=True) if block_id in bad_blocks
        }
        load.handle.release(bad_keys)
        self._shared.holder.release(load.block_ids)
        num_restored = len(load.origins.tiers)
        if outcome is not TransferOutcome.DONE:
            num_restored = self._num_usable_tokens(load, bad_blocks, output)
            self._note_failure(load, outcome, bad_keys, num_restored)
        self._note_restored(load, num_restored)

    def _num_usable_tokens(self, load: Load, bad_blocks: AbstractSet[int], output: KVConnectorOutput) -> int:
        """Return how many leading tokens of a load that failed the engine uses nevertheless."""
        is_whole = not bad_blocks or load.request_id in output.finished.failed_recving
        if is_whole or not self._shared.keeps_partial_loads:
            return 0
        starts = zip(load.block_ids, load.block_starts, strict=True)
        first_bad = min(start for block_id, start in starts if block_id in bad_blocks)
        return max(0, first_bad - load.num_computed_tokens)

    def _note_restored(self, load: Load, num_tokens: int) -> None:
        counts = load.origins.count(num_tokens)
        if load.is_first:
            self._shared.stats.update({f"{tier}_hit_tokens": count for tier, count in counts.items()})
        state = self._requests.get(load.request_id)
        if state is not None:
            state.restored_tokens.update(counts)

    def _note_failure(self, load: Load, outcome: TransferOutcome, bad_keys: set[OffloadKey], num_kept: int) -> None:
        tier = self._shared.tier
        self._shared.stats["loads_failed"] += 1
        too_late = outcome is TransferOutcome.ABANDONED
        reason = "came too late" if too_late else f"failed: {len(bad_keys)} of {len(load.handle.keys)} chunks are bad"
        self._shared.failures.warning("a load of %d blocks from %s %s", len(load.block_ids), tier, reason)
        state = self._requests.get(load.request_id)
        if state is not None:
            num_lost = len(load.origins.tiers) - num_kept
            state.notes.append(f"the load from {tier} {reason}; {num_lost} tokens are computed instead")
            state.offer_again_from(load.num_computed_tokens)
