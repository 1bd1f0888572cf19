"""Verification: what host memory keeps of chunks that were computed again is compared with what was computed.

A step computes chunks that host memory has, too: after a preemption, for the last tokens of a hit, or because the request was
chosen to compute what could be restored. When a step has completed such a chunk, the workers copy its blocks into spare rows,
and compare these with the kept ones::

    completed, not kept   --store-->    host memory
    completed, kept       --compare-->  equal, or close: it is true
                                        different: it is dropped, with all that continues it

Until all workers have compared them, blocks are held and kept chunks are pinned: a comparison costs what a store costs. There
is none while loads or stores wait. What requests read is never changed by it. It costs nothing in steps that complete no chunk
that is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import Final, NamedTuple

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkPins, OffloadKey, Slot, SlotReservation
from cargohold.cache.rows import rows_to_store
from cargohold.connector.config import OffloadConfig
from cargohold.connector.kernel.guest import Checker
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.errors import ContractError, SparingLog
from cargohold.protocol import NULL_BLOCK_ID, BlockIds, KVConnectorOutput, TransferOutcome, metrics
from cargohold.tiers.messages import Gap, TierReport
from cargohold.tiers.scheduler_side import LowerTiers
from cargohold.transfer import CopyJob, Direction
from cargohold.transfer.compare import CLOSE

logger = logging.getLogger(__name__)

MAX_DIFFERENT: Final = 3
"""So many comparisons in a row that find chunks to differ turn offloading off: the engine is wrong, or we are."""
_FARTHEST: Final = 10.0
"""Larger distances count as this one in the histogram, also infinite ones."""


class Chunk(NamedTuple):
    """A chunk that was computed although host memory keeps it.

    Attributes:
        state: the request that has computed it.
        group: its group.
        number: its number in the request.
        block_ids: its blocks on the device.
        tier: where it came from: a lower tier if it was brought up for this request.
    """

    state: RequestState
    group: int
    number: int
    block_ids: Sequence[int]
    tier: str

    @property
    def key(self) -> OffloadKey:
        return self.state.keys[self.group].keys[self.number]

    @property
    def first_token(self) -> int:
        return self.number * self.state.keys[self.group].chunk_tokens


@dataclass(slots=True)
class Comparison(Store):
    """A comparison in flight: a store of chunks into spare slots, where nothing can be found.

    Attributes:
        chunks: what is compared.
        pins: pins on what is kept of them.
        spare: numbers of the spare slots.
        chunk_of: the chunk of each block of the job.
        gaps: how blocks differ, as far as workers have reported it.
    """

    chunks: Sequence[Chunk] = ()
    pins: ChunkPins = field(kw_only=True)
    spare: Sequence[int] = ()
    chunk_of: Mapping[int, Chunk] = field(kw_only=True)
    gaps: list[Gap] = field(default_factory=list)

    def largest_gaps(self) -> dict[OffloadKey, Gap]:
        """Return the largest gap of each chunk that differs."""
        return {self.chunk_of[gap.block_id].key: gap for gap in sorted(self.gaps, key=lambda gap: gap.distance)}


class Verifier(Checker):
    """Chooses what is compared, and acts on what is found.

    It is also a guest where requests are to compute what could be restored.

    Args:
        shared: the state that the connector's parts share.
        config: options.
        lower: the tiers below, if there are any.
        num_spare: number of spare slots of host memory, after those of its manager.
    """

    name = "verification"

    def __init__(self, shared: Shared, config: OffloadConfig, lower: LowerTiers | None, num_spare: int) -> None:
        self._shared = shared
        self._lower = lower
        self._threshold = (config.verified_share or 0.0) * 2**64
        self._secret = token_bytes(16)  # clients must not choose these requests
        self._spare = list(range(num_spare))
        layout, plan = shared.layout, shared.config.plan_rows(shared.layout)
        self._slot_rows = plan.most * shared.config.blocks_per_chunk
        self._chunk_bytes = plan.row_bytes * self._slot_rows * layout.num_shards
        # Where blocks are padded, what else lies in a row is not known.
        self._limit_of = [
            CLOSE.get(group.number_type) if count > 1 or size == plan.row_bytes else None
            for group, count, size in zip(layout.groups, plan.per_block, layout.group_bytes, strict=True)
        ]
        self._bytes_per_s = config.num_verify_bytes_per_s
        self._bytes, self._at = float(self._bytes_per_s), shared.clock()
        self.comparing: dict[int, Comparison] = {}
        # By chosen request, the first of the tokens that it computes instead of restoring them, and where they come from.
        self._origins: dict[str, tuple[int, bytes]] = {}
        self._num_compared = self._num_different = 0
        self._log = SparingLog(logger)

    # --- which requests compute what is kept --------------------------------------------------------------------------

    def request_new(self, state: RequestState) -> None:
        """Choose whether it computes what could be restored."""
        digest = blake2b(state.request.request_id.encode(), digest_size=8, key=self._secret).digest()
        state.is_recomputed = int.from_bytes(digest) < self._threshold

    def chunks_found(self, state: RequestState, num_computed_tokens: int, num_found_tokens: int) -> None:
        """Note from where a request that was chosen could have been restored."""
        origins = self._shared.below.origins(state, num_computed_tokens, num_found_tokens)
        self._origins[state.request.request_id] = num_computed_tokens, origins
        state.note_once(f"{len(origins)} tokens that are kept are computed all the same, to verify what is kept")

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Forget where its tokens could have come from."""
        self._origins.pop(state.request.request_id, None)

    # --- what is compared ---------------------------------------------------------------------------------------------

    def compare(self, offers: Sequence[Offer], num_allowed: int) -> list[CopyJob]:
        """Return the job that compares some of the chunks that a step completes; none while requests wait for loads."""
        # Loads of this very step have ended before its stores begin.
        are_waiting = any(not load.is_in_step for load in self._shared.jobs.loads())
        limit = min(len(self._spare), num_allowed // 2, self._num_allowed())
        if are_waiting or limit <= 0:
            return []
        chunks = list({chunk.key: chunk for chunk in self._kept(offers)}.values())
        start = self._num_compared % max(1, len(chunks))  # over time, all places of a step are compared
        chosen = (chunks[start:] + chunks[:start])[:limit]
        self._num_compared += len(chosen)
        self._bytes -= len(chosen) * self._chunk_bytes
        return [self._begin(chosen)] if chosen else []

    def _num_allowed(self) -> int:
        """Return how many chunks may be compared now. What was not used adds up for a second."""
        now = self._shared.clock()
        grown = self._bytes + (now - self._at) * self._bytes_per_s
        self._bytes, self._at = min(grown, max(self._bytes_per_s, self._chunk_bytes)), now
        return int(self._bytes // self._chunk_bytes)

    def _kept(self, offers: Sequence[Offer]) -> Iterator[Chunk]:
        """Yield the chunks that were computed, and are kept."""
        per_chunk = self._shared.config.blocks_per_chunk
        for offer in offers:
            if offer.state.is_awaited or self._limit_of[offer.group] is None:
                continue
            keys, ids = offer.of_group, offer.block_ids
            is_there = self._shared.manager.lookup(offer.keys)
            for at, number in enumerate(offer.chunks):
                if is_there[at] == READY and number * keys.chunk_tokens >= offer.state.hit_tokens:
                    # What a window has left behind within the chunk may not have been there when it was stored.
                    last_token = (number + 1) * keys.chunk_tokens - 1
                    num_skipped = keys.group.num_skipped_tokens(last_token) // keys.group.block_tokens
                    num_null = max(0, num_skipped - number * per_chunk)
                    block_ids = ids[at * per_chunk + num_null : (at + 1) * per_chunk]
                    tier = self._tier_of(offer.state, number * keys.chunk_tokens)
                    yield Chunk(offer.state, offer.group, number, [*[NULL_BLOCK_ID] * num_null, *block_ids], tier)

    def _tier_of(self, state: RequestState, token: int) -> str:
        first, origins = self._origins.get(state.request.request_id, (0, b""))
        return self._shared.tiers[origins[token - first] if 0 <= token - first < len(origins) else 0]

    def _begin(self, chunks: Sequence[Chunk]) -> CopyJob:
        shared, keys, per_chunk = self._shared, [chunk.key for chunk in chunks], self._shared.config.blocks_per_chunk
        pins = shared.manager.prepare_load(keys)
        spare, self._spare = self._spare[: len(chunks)], self._spare[len(chunks) :]
        slots = [self._spare_slot(number, kept) for number, kept in zip(spare, pins.slots, strict=True)]
        ids = [block_id for chunk in chunks for block_id in chunk.block_ids]
        starts = range(0, len(ids), per_chunk)
        block_ids, rows, _ = rows_to_store(ids, starts, keys, slots, per_chunk)
        _, kept, _ = rows_to_store(ids, starts, keys, pins.slots, per_chunk)
        chunk_of = {block_id: chunks[at // per_chunk] for at, block_id in enumerate(ids) if block_id != NULL_BLOCK_ID}
        shared.holder.hold(block_ids)
        names = frozenset([chunk.state.request.request_id for chunk in chunks])
        nothing = SlotReservation([], [], lambda *_: pins.release())  # if it ends with its engine
        job_id, compared = shared.jobs.new_id(), dict(zip(rows, kept, strict=True))
        self.comparing[job_id] = Comparison(
            job_id, names, nothing, block_ids, chunks=chunks, pins=pins, spare=spare, chunk_of=chunk_of
        )
        shared.jobs.add_store(self.comparing[job_id])
        groups = tuple([chunk_of[block_id].group for block_id in block_ids])
        return CopyJob(job_id, Direction.STORE, block_ids, rows, shared.start_s, groups, compared)

    def _spare_slot(self, number: int, like: Slot) -> Slot:
        """Return a spare slot in the form of another one."""
        slot = self._shared.manager.capacity + number
        return slot if isinstance(like, int) else tuple([slot * self._slot_rows + at for at in range(len(like))])

    # --- what was found -----------------------------------------------------------------------------------------------

    def note_compared(self, output: KVConnectorOutput) -> None:
        """Take in what workers report, and end what all of them have compared.

        Raises ``ContractError`` if so many chunks differ that nothing that is kept can be trusted any more.
        """
        is_spoiled, report = output.step_failed or bool(output.invalid_block_ids), output.kv_connector_worker_meta
        gaps = report.gaps if isinstance(report, TierReport) else {}
        for job_id, comparison in list(self.comparing.items()):
            comparison.gaps += gaps.get(job_id, ())
            comparison.is_spoiled |= is_spoiled  # what was computed may be wrong
            if job_id in output.jobs:
                del self.comparing[job_id]
                self._end(comparison, output.jobs[job_id])

    def _end(self, comparison: Comparison, outcome: TransferOutcome) -> None:
        shared = self._shared
        shared.jobs.end(comparison.job_id)
        shared.holder.release(comparison.block_ids)
        self._spare += comparison.spare
        if outcome is not TransferOutcome.DONE or comparison.is_spoiled:
            comparison.pins.release()
            return
        different = self._judge(comparison)
        comparison.pins.release([chunk.key for chunk, _ in different])
        for chunk, gap in {id(chunk.state): (chunk, gap) for chunk, gap in reversed(different)}.values():
            self._drop(chunk, gap)
        self._num_different = self._num_different + 1 if different else 0
        if self._num_different == MAX_DIFFERENT:
            rule = f"{MAX_DIFFERENT} comparisons in a row have found that what is kept is not what the engine computes"
            raise ContractError("offloading", f"{rule}: one of both is wrong; the lines before say what differs")

    def _judge(self, comparison: Comparison) -> list[tuple[Chunk, Gap]]:
        """Count how chunks compare; return those that are different, in order of their tokens."""
        stats, gaps, different = self._shared.stats, comparison.largest_gaps(), []
        for chunk in comparison.chunks:
            outcome = "equal"
            if (gap := gaps.get(chunk.key)) is not None:
                outcome = "close" if gap.distance <= (self._limit_of[chunk.group] or 0.0) else "different"
                metrics.DISTANCE.of().note(min(gap.distance, _FARTHEST), stats)
                if outcome == "different":
                    different.append((chunk, gap))
            stats[metrics.VERIFIED.of(outcome, chunk.tier)] += 1
        return sorted(different, key=lambda found: found[0].first_token)

    def _drop(self, chunk: Chunk, gap: Gap) -> None:
        """Drop a chunk from all tiers that may be written, with all that continues it, and say so."""
        state, shared = chunk.state, self._shared
        first = chunk.first_token
        if state.restored:  # what the request has read may have been wrong already
            first = min(first, state.restored.start)
        keys = [key for of in state.keys for key in of.keys[first // of.chunk_tokens :]]
        keys += shared.manager.continuations(keys)
        is_there = zip(keys, shared.manager.lookup(keys), strict=True)
        shared.manager.remove([*[key for key, ready in is_there if ready == READY], *shared.manager.listed(keys)])
        if self._lower is not None:
            self._lower.remove(keys)
        # Nothing more of the request is stored: which of both is wrong is not known.
        for store in shared.jobs.stores():
            store.is_spoiled |= state.request.request_id in store.request_ids
        state.store_limit = min(state.store_limit, first)
        state.offer_again_from(first)
        group = state.keys[chunk.group].group
        state.notes.append(
            f"what {chunk.tier} kept of the tokens from {chunk.first_token} on is not what was computed: "
            f"{group.layer_names[gap.layer]} is {gap.distance:.2g} of its largest number away, where rounding explains "
            f"{self._limit_of[chunk.group]:g}; it was dropped, with all that continues token {first}"
        )
        self._log.warning("request %s, namespace %d: %s", state.request.request_id, shared.namespace, state.notes[-1])
