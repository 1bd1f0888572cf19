"""Stores where host memory and the device pool are one cache: what the device holds is stored when it would be lost.

While host memory has room, chunks are stored as they are computed. After that, a chunk that the device computes is only listed.
When the device evicts it, its bytes are there until the next forward pass: the manager decides whether it is worth a slot, and
takes one from chunks that the device holds, too, before it evicts any. Where copies take long, compared with computing, the
step does not wait for them: what is evicted next is stored ahead of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, SlotReservation
from cargohold.cache.rows import rows_to_store
from cargohold.connector.kernel.answers import KEPT_SHARE
from cargohold.connector.kernel.device import DeviceChunks
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.offers import end_store, start_store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.connector.kernel.stores import EagerStores
from cargohold.protocol import AttentionKind, BlockIds, StepView, TransferOutcome
from cargohold.transfer import CopyJob

IN_STEP_SHARE: Final = 0.03
"""A step waits for what was evicted for it to be copied if that takes no more than this part of computing as much."""
COPY_PRICE: Final = 0.2
"""Slots of copies are taken if to copy a chunk once more takes no more than this part of computing it."""
_LOOK_AGAIN: Final = 256
"""Steps after which it is looked again what copies cost."""


class PooledStores(EagerStores):
    """Stores what the device is about to lose, or has just lost. Where the engine shows no pool, all that is computed.

    Args:
        shared: the state that the connector's parts share.
        requests: the connector's requests, by id.
        lookahead: number of blocks ahead of eviction that are kept stored; ``None`` for as many as the cost of copies asks for.
        is_lazy: whether only what the device is about to lose is stored, although there is room for more, and copies keep their
            slots.
    """

    def __init__(
        self,
        shared: Shared,
        requests: Mapping[str, RequestState],
        *,
        lookahead: int | None = None,
        is_lazy: bool = False,
    ) -> None:
        super().__init__(shared, requests)
        self._lookahead, self._is_lazy = lookahead, is_lazy
        self._group_tokens = [group.block_tokens for group in shared.layout.groups]
        # Groups whose blocks the device's prefix cache keeps: of others, chunks are stored as they are computed.
        self._cached = [shared.caches_all or group.kind is AttentionKind.FULL for group in shared.layout.groups]
        # What a copy costs, in the time that computing as much takes, and in how many steps to look again.
        self._copy_cost, self._look_in = 0.0, 0
        # Blocks evicted for one step, at most, lately, and those that may be for the next one; and chunks that were not worth a
        # slot when they came near eviction.
        self._peak, self._num_next = 0.0, 0
        self._refused: set[OffloadKey] = set()
        # Requests that are loaded, and do not run yet: the rest of their prompts follows, perhaps long after the load.
        self._loaded: set[str] = set()
        # What paused requests go on from, until nothing more of it is to be saved, and how many chunks of it still may be;
        # ``None`` while nothing is paused.
        self._paused: Sequence[OffloadKey] | None = None
        self._num_to_save = self._num_paused_tokens = 0

    def use_context(self) -> None:
        """Make the device pool part of the cache, if the manager can."""
        shared = self._shared
        may_pool = shared.config.blocks_per_chunk == 1 and shared.prefix_caching and shared.context is not None
        if may_pool and shared.manager.pool_with_device(shared.layout.num_blocks, self._may_take):
            assert shared.context is not None
            shared.device = DeviceChunks(shared.context, len(shared.layout.groups), shared.namespace)

    # --- requests -----------------------------------------------------------------------------------------------------

    def expect(self, state: RequestState, num_hit_tokens: int, *, is_loaded: bool = False) -> None:
        """Watch what may be evicted for the request, whose hit is loaded, or computed on from there."""
        if is_loaded:
            self._loaded.add(state.request.request_id)
        if (device := self._listing) is not None:
            # Blocks that it has hit may be among the next victims, until it takes them out of the queue.
            num_tokens = min(state.request.num_tokens, num_hit_tokens + self._shared.pace.max_step_tokens)
            device.watch_more(self._num_blocks(num_tokens))

    def end_request(self, state: RequestState, block_ids: BlockIds) -> None:
        """List what the request leaves on the device, or else remember it."""
        offers = self._unoffered(state, block_ids)
        if offers and not self._must_store(sum([offer.end - offer.first for offer in offers])):
            self._offering.list_on_device(offers)
        super().end_request(state, block_ids)
        self._loaded.discard(state.request.request_id)
        if (listing := self._listing) is not None:
            for table in block_ids:
                listing.watch_ended(table)

    def _first_hole(self, keys: ChunkKeys, num_ready: int, num_computed_tokens: int) -> int | None:
        """As for eager stores, but what is listed is no hole."""
        if self._shared.device is None:
            return super()._first_hole(keys, num_ready, num_computed_tokens)
        known, end = self._shared.manager.num_known, num_computed_tokens // keys.chunk_tokens
        first = num_ready if num_ready >= end else known(keys.keys[:end])
        num_behind = keys.group.num_skipped_tokens(num_computed_tokens) // keys.chunk_tokens
        if first < num_behind:
            first = num_behind + known(keys.keys[num_behind:end])
        return first if first < end else None

    def _store(self, offers: Sequence[Offer]) -> list[CopyJob]:
        """Return the store of chunks that are awaited, or that host memory has room for; list the others."""
        if self._shared.device is None or self._must_store(sum([offer.end - offer.first for offer in offers])):
            return super()._store(offers)
        listed, jobs = [offer for offer in offers if self._cached[offer.group] and not offer.is_urgent], list[CopyJob]()
        if listed and self._offering.list_on_device(listed):
            jobs = self._shared.checker.compare(listed, self._shared.jobs.num_storable_chunks)
        rest = [offer for offer in offers if offer not in listed]
        return jobs + super()._store(rest) if rest else jobs

    def _must_store(self, num_chunks: int) -> bool:
        """Whether so many chunks are stored as they are computed: there is room, or they would be lost, or a tier wants all."""
        shared = self._shared
        is_roomy = not self._is_lazy and num_chunks <= shared.manager.num_free
        return is_roomy or shared.below.wants_all or self._is_pressed()

    # --- steps --------------------------------------------------------------------------------------------------------

    def plan_saves(self) -> tuple[CopyJob, ...]:
        """Return the stores of what was evicted since the last step, as far as it is worth a slot."""
        # Even if nothing is listed by now: what was watched must not be taken for new later.
        device = self._shared.device
        if device is None or not (lost := device.take_lost()):
            return ()
        self._peak = max(0.9 * self._peak, len(lost))
        self._refused.clear()
        keys, manager = list(lost), self._shared.manager
        handle = manager.prepare_saves(keys)
        manager.note_lost(keys)
        return tuple(self._save(handle, [lost[key] for key in handle.keys], is_held=False))

    def plan(self, step: StepView) -> list[CopyJob]:
        """Return the stores of what this step completes, and of what is evicted next if there is no time for that later."""
        jobs = super().plan(step)
        if self._paused is not None:
            jobs += self._save_paused(step)
        if (device := self._listing) is not None:
            self._num_next, num_ahead = self._num_blocks_next(step), self._num_ahead()
            saves = self._save_ahead(device, num_ahead, self._num_next) if num_ahead else []
            # What is held now is no next victim any more.
            (device.watch_more if saves else device.watch)(self._num_next)
            jobs += saves
        return jobs

    def end_step(self) -> None:
        """Watch what the engine has given back since the step was planned, if less was free then than the next one may need."""
        if (device := self._listing) is not None:
            device.watch(self._num_next)

    def end(self, store: Store, outcome: TransferOutcome) -> None:
        """End a store. Blocks that were saved ahead go back to the head of the free queue, where they were."""
        if not store.is_save:
            super().end(store, outcome)
            return
        end_store(self._shared, store, outcome)
        context = self._shared.context
        if context is not None:
            context.free_ids(store.block_ids, evict_first=True)

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks of ended or paused requests are still to be stored."""
        return super().has_pending_work or bool(self._paused)

    def pause(self, states: Iterable[RequestState]) -> None:
        """Save what only the device holds of requests that are paused, as far as a share of the tier goes."""
        context, states = self._shared.context, tuple(states)
        num_tokens = sum([state.request.num_tokens for state in states])
        # Steps that were under way when the pause began complete chunks.
        if num_tokens == self._num_paused_tokens or self._shared.device is None or context is None:
            return
        self._num_paused_tokens = num_tokens
        wanted: dict[OffloadKey, None] = {}
        for state in states:
            state.extend_keys()
            if offers := self._unoffered(state, context.get_request_blocks(state.request.request_id)):
                self._offering.list_on_device(offers)  # stores were at their limit, or waited for others
            for keys in state.keys:  # windows and states: what is needed to go on from one of the last two chunks
                num_kept = max(0, state.request.num_tokens - keys.chunk_tokens)
                wanted |= dict.fromkeys(keys.keys[keys.group.num_skipped_tokens(num_kept) // keys.chunk_tokens :])
        if self._paused is None:
            self._num_to_save = int(KEPT_SHARE * self._shared.manager.capacity)
        self._paused = list(wanted)

    def coming(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are being stored, or will be when the device would lose them."""
        device = self._shared.device
        held = () if device is None else (key for key, is_held in zip(keys, device.holds(keys), strict=True) if is_held)
        return super().coming(keys) | frozenset(held)

    def give_up(self) -> None:
        """Let go of pending stores, and forget what the device held: its cache was reset."""
        super().give_up()
        self.use_namespace()

    def use_namespace(self) -> None:
        """Forget what the device held: chunks have other keys from now on."""
        if (device := self._shared.device) is not None:
            self._shared.manager.note_lost(device.clear(self._shared.namespace))

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _listing(self) -> DeviceChunks | None:
        """The device pool, if it holds chunks that nothing else does."""
        return self._shared.device if self._shared.manager.num_listed else None

    def _may_take(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        device = self._shared.device
        if device is None or self._paused or self._is_lazy or self._cost() > COPY_PRICE:
            return [False] * len(keys)
        wanted = self._shared.below.still_wants(keys)
        return [is_held and key not in wanted for key, is_held in zip(keys, device.holds(keys), strict=True)]

    def _cost(self) -> float:
        """Return how long to copy a block takes, in the time that computing its tokens takes; 0 if that is not known."""
        self._look_in -= 1
        if self._look_in <= 0:
            pace, block_s = self._shared.pace, self._shared.block_s.get("store", 0.0)
            num_tokens = min(pace.max_step_tokens, self._group_tokens[0] * _LOOK_AGAIN)
            step_s = pace.predict(num_tokens)
            self._copy_cost = block_s * self._num_blocks(num_tokens) / step_s if step_s else 0.0
            self._look_in = _LOOK_AGAIN
        return self._copy_cost

    def _num_ahead(self) -> int:
        """Return how many blocks ahead of eviction are to be stored: as many as a step evicts, if it cannot wait for them."""
        if self._lookahead is not None:
            return self._lookahead
        return int(self._peak) + 1 if self._cost() > IN_STEP_SHARE else 0

    def _is_pressed(self) -> bool:
        """Whether so little is free that what is computed now may be gone before it comes near eviction."""
        num_ahead, context = self._num_ahead(), self._shared.context
        if not num_ahead or context is None or self._lookahead is not None:
            return False
        return len(context.next_victims(num_ahead)) < num_ahead

    def _save_ahead(self, device: DeviceChunks, num_ahead: int, num_kept_free: int) -> list[CopyJob]:
        """Return the store of what is evicted next. So many blocks stay free as the step's requests need in the next one."""
        shared, context = self._shared, self._shared.context
        limit = shared.jobs.num_storable_blocks
        next_lost = device.next_lost(num_ahead)
        wanted = shared.manager.listed([key for key in next_lost if key not in self._refused])
        if not wanted or not limit or context is None:
            return []
        num_free = len(context.next_victims(len(wanted) + num_kept_free))
        keys = wanted[: max(0, min(limit, num_free - num_kept_free))]
        if not keys:
            return []
        handle = shared.manager.prepare_saves(keys)
        self._refused.update(set(keys).difference(handle.keys))
        block_ids = [next_lost[key] for key in handle.keys]
        shared.holder.hold(block_ids)
        return self._save(handle, block_ids, is_held=True)

    def _save_paused(self, step: StepView) -> list[CopyJob]:
        """Return the store of what only the device holds of paused requests, over whatever nothing waits for."""
        shared, manager, device = self._shared, self._shared.manager, self._shared.device
        assert device is not None
        if step.num_scheduled_tokens:
            self._paused, self._num_paused_tokens = None, 0  # the pause is over
        if not self._paused or (not shared.jobs.num_storable_blocks and shared.jobs.num_awaited):
            return []
        limit = min(self._num_to_save, shared.jobs.num_storable_blocks)
        block_of = device.blocks_of(manager.listed(self._paused)[:limit])
        states = manager.lookup(self._paused)
        pins = manager.prepare_load([key for key, state in zip(self._paused, states, strict=True) if state == READY])
        handle = manager.prepare_saves(list(block_of)[::-1], at_any_cost=True)
        pins.release()
        manager.note_copies(handle.keys)  # if nothing resets the device after all
        self._num_to_save -= len(handle.keys)
        if not handle.keys and not shared.jobs.num_awaited:  # else loads in flight may pin what can go
            # What else the device alone holds, and sleep would lose, keeps its beginnings in host memory.
            others = manager.listed(device.besides(self._paused)) if block_of else []
            manager.note_lost(others)
            if not others:
                self._paused = ()
        block_ids = [block_of[key] for key in handle.keys]
        shared.holder.hold(block_ids)
        return self._save(handle, block_ids, is_held=True)

    def _save(self, handle: SlotReservation, block_ids: Sequence[int], *, is_held: bool) -> list[CopyJob]:
        shared = self._shared
        if not handle.keys:
            handle.commit()
            return []
        sources, rows, groups = rows_to_store(block_ids, range(len(block_ids)), handle.keys, handle.slots, 1)
        store = Store(shared.jobs.new_id(), frozenset(), handle, sources if is_held else (), is_save=True)
        shared.guests.store_begins(store, ())
        return [start_store(shared, store, rows, groups, sources)]

    def _unoffered(self, state: RequestState, block_ids: BlockIds) -> list[Offer]:
        """Return what a request has on the device and did not offer yet."""
        device = self._shared.device
        num_tokens = min(state.request.num_tokens, state.max_computed_tokens, state.store_limit)
        if device is None or state.is_awaited or num_tokens < state.due_tokens or not any(block_ids):
            return []
        offers = []
        for group, (keys, first) in enumerate(zip(state.keys, state.next_chunk, strict=True)):
            table, end = block_ids[group], num_tokens // keys.chunk_tokens
            end = first + device.num_held(keys.keys[first:end], table[first:end])
            if first < end and self._cached[group]:
                offers.append(Offer(state, group, table, first, end))
        return offers

    def _num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens of one request may take."""
        return sum([-(-num_tokens // block_tokens) + 1 for block_tokens in self._group_tokens])

    def _num_blocks_next(self, step: StepView) -> int:
        """Return how many blocks may be allocated for requests that run, or whose load ends, before the next step."""
        counts = step.num_scheduled_tokens
        num_tokens = sum(counts.values())
        if self._loaded:
            self._loaded.difference_update(counts)
        if not self._requests:
            return 0
        is_quiet = 0 < num_tokens <= 2 * len(counts)  # else there are prompts among them, or a pause, which may end
        if self._loaded or not is_quiet:
            num_tokens = self._shared.pace.max_step_tokens
        num_blocks = sum([num_tokens // block_tokens for block_tokens in self._group_tokens])
        return num_blocks + (len(counts or self._requests) + 1) * len(self._group_tokens)
