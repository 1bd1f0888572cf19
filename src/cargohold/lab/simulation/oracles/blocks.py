"""Oracles of the device pool's blocks: none leaks, is counted twice, or is reused while a copy uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cargohold.blocks import READY, extend_hashes, root_hash
from cargohold.cache.manager import namespace_of_key, offload_key, split_key
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.guests.events import contents_in
from cargohold.connector.kernel.jobs import Load, Store
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import guards_of, live_sides, offloading_sides
from cargohold.lab.simulation.fault_wrappers import FaultyManager
from cargohold.lab.simulation.replica import Oracle, Replica
from cargohold.lab.simulation.tiers import ListedMedium
from cargohold.protocol import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from cargohold.tiers.chunk_format import Note


class PoolOracle(Oracle):
    """Checks that references on blocks are exactly those that requests and connectors hold.

    Args:
        engine: the replica.
    """

    name = "pool"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine

    def inspect(self) -> None:
        """Count all references."""
        scheduler = self._engine.scheduler
        scheduler.kv.check()
        held = scheduler.connector.held_references()
        expected = scheduler.kv.reference_counts() + held
        pool = scheduler.kv.pool
        for block_id in range(1, pool.num_blocks):
            count = pool.get_block(block_id).ref_cnt
            self.require(
                count == expected[block_id],
                f"block {block_id} has {count} reference(s); requests and connectors hold {expected[block_id]}",
            )
        if scheduler.connector.broken is None:
            self._check_held(held)

    def at_end(self) -> None:
        """Every block is free."""
        self._engine.scheduler.check_settled()

    def _check_held(self, held: Counter[int]) -> None:
        """Check that each offloading connector holds exactly the blocks that its jobs in flight copy, and what is promised."""
        for side, guards in offloading_sides(self._engine.scheduler.connector):
            if any(guard.broken is not None for guard in guards):
                continue
            jobs: list[Load | Store] = [*side.shared.jobs.loads(), *side.shared.jobs.stores()]
            copied = Counter(block_id for job in jobs for block_id in job.block_ids)
            copied.update(side.stores.held_blocks)
            own = guards[-1].held_references()
            self.require(
                own == (copied if side.holds_outlive_requests else Counter()),
                f"connector {side.name} holds {dict(own)}; its jobs copy {dict(copied)}",
            )
            self.require(own <= held, f"connector {side.name} holds references that the engine knows nothing of")


class CopyOracle(Oracle):
    """Checks that no block that a copy reads or writes is free, or is given out again.

    Conflicts of copies with forward passes are found elsewhere: ``FingerprintRunner`` checks every access.

    Args:
        engine: the replica; from now on, every allocation of its pool is watched.
        holds: whether copies hold their blocks. Where they cannot, workers end copies before a step overwrites a block.
    """

    name = "copies"

    def __init__(self, engine: Replica, *, holds: bool) -> None:
        self._copies = engine.copies
        self._pool = engine.scheduler.kv.pool
        self._holds = holds
        self._connector = engine.scheduler.connector
        self._guards = guards_of(engine.scheduler.connector)
        self._num_broken = 0
        self._is_stopping = False
        self._give_up = self._connector.give_up_transfers
        vars(self._connector)["give_up_transfers"] = self._give_up_watched
        if holds:
            self._allocate = self._pool.allocate
            vars(self._pool)["allocate"] = self._allocate_watched

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Blocks being copied are not free."""
        if not self._holds:
            return
        # Locks that a connector asked for just before it was turned off are lost. Its workers end all copies at the beginning
        # of the next step, before anything is overwritten; so nothing is checked until then.
        num_broken = len([guard for guard in self._guards if guard.broken is not None])
        self._is_stopping = num_broken > self._num_broken
        self._num_broken = num_broken
        for copies in self._copies:
            if copies.num_jobs and not self._is_stopping:
                get_block = self._pool.get_block
                free = [block_id for block_id in copies.block_ids() if not get_block(block_id).ref_cnt]
                copies.check_free(free, "there is in the free queue")

    def at_end(self) -> None:
        """No block is being copied any more, except those that stuck copies keep out of service."""
        held = set(self._connector.held_references())
        for copies in self._copies:
            left = sorted(copies.block_ids() - held)
            self.require(not left, f"blocks {left} are still being copied, and not held for that")

    def _give_up_watched(self) -> None:
        sides = [side for side, _ in offloading_sides(self._connector)]
        job_ids = [store.job_id for side in sides for store in side.shared.jobs.stores()]
        self._give_up()
        for copies in self._copies:
            copies.give_up_reads(job_ids)

    def _allocate_watched(self, num_blocks: int) -> Sequence[Any]:
        blocks = self._allocate(num_blocks)
        for copies in self._copies:
            if copies.num_jobs and not self._is_stopping:
                copies.check_free([block.block_id for block in blocks], "somebody was given")
        return blocks


# --- oracle -----------------------------------------------------------------------------------------------------------

Index = dict[str, Counter[tuple[bytes, int]]]
"""Per medium, how often each prefix of a group is held. Several tiers may share the name of a medium."""


class EventOracle(Oracle):
    """Follows the events after every step, and compares the resulting index with what the media hold.

    Args:
        engine: the replica; it must emit events.
        knows_tiers: whether the oracle can look into all tiers. Chunks of an earlier engine that are in host memory are not
            announced again, so it is not compared if it was not empty.
        media: yields each tier that lists its chunks and tells which it loses, with what its scheduler side knows and the
            shards of its medium. In the end, what is announced must be there, whatever has happened; and all that is there must
            be announced, also what earlier engines have left. After a fault, only what the engine knows to be there must be.
        is_excused: whether a fault has struck: then it may not have become known that a chunk is there.
    """

    name = "events"

    def __init__(
        self,
        engine: Replica,
        *,
        knows_tiers: bool = True,
        media: Callable[[], Iterable[ListedMedium]] = tuple,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._media = media
        self._is_excused = is_excused
        # Per shared or local storage, how often each prefix of a group is held.
        self._stored: Index = {}
        self._index: Index = {MEDIUM_DEVICE: Counter(), MEDIUM_HOST: Counter()}
        sides = offloading_sides(engine.scheduler.connector)
        self._knows_tiers = knows_tiers and not any(side.shared.manager.num_ready for side, _ in sides)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Follow the step's events."""
        for event in self._engine.scheduler.take_events():
            self._follow(event)

    def inspect(self) -> None:
        """Compare with the device pool, and with the tiers unless one was turned off that held something before."""
        for event in self._engine.scheduler.take_events():
            self._follow(event)
        cached = self._engine.cached_prefixes() - self._unpublished()
        self.require(self._index[MEDIUM_DEVICE].keys() == cached, "the events of the device pool do not add up to it")
        if self._knows_tiers:
            self._compare_tiers()

    def at_end(self) -> None:
        """Compare once more, and compare storage, which is quiet now."""
        self.inspect()
        if self._engine.has_own_hashes:
            for medium in self._media():
                self._compare_storage(medium)

    def _compare_storage(self, medium: ListedMedium) -> None:
        announced = {offload_key(*prefix) for prefix in self._stored.get("LOCAL", Counter())}
        sides = live_sides(self._engine.scheduler.connector)
        if not any(side.lower is medium.lower for side in sides) or not medium.tier.can_be_relied_on:
            self.require(not announced, f"{len(announced)} blocks are announced in a tier that is unusable")
            return
        there = medium.find({*announced, *self._keys_of_requests()})
        if medium.blocks_per_chunk == 1:
            gone = announced - there.keys()
            self.require(not gone, f"{len(gone)} blocks are announced that are not in storage")
        hidden = {offload_key(*prefix) for prefix in self._unpublished()}
        described = {key for key, note in there.items() if key not in hidden and self._is_described(key, note)}
        if not medium.is_certain or self._is_excused():
            # After a fault, some may be unknown; but what the engine itself would look for there was announced. Of a list
            # that kept failing, the chunks were never read: then only what the tier has answered to questions was.
            order, tier = sorted(described), medium.tier
            known = tier.lookup_cache.last(order) if tier.list_failed else tier.last_known(order)
            described = {key for key, is_there in zip(order, known, strict=True) if is_there}
        missing = described - announced
        self.require(not missing, f"{len(missing)} of {len(described)} chunks in storage are not announced")

    def _keys_of_requests(self) -> set[bytes]:
        groups = range(len(self._engine.layout.groups))
        requests = self._engine.requests.values()
        return {offload_key(h, group) for request in requests for h in request.block_hashes for group in groups}

    def _is_described(self, key: bytes, note: Note) -> bool:
        """Whether a chunk's content was written down with it, and may be published."""
        contents = contents_in(note.details, self._engine.layout.groups[split_key(key)[1]].block_tokens)
        return contents is not None and (self._engine.config.emit_salted_events or not contents.is_salted)

    def _compare_tiers(self) -> None:
        # A connector that is turned off has taken back what it announced, because nothing can load its chunks any more.
        announced = self._index[MEDIUM_HOST]
        unpublished = self._unpublished()
        num_found = num_ready = 0
        for side in live_sides(self._engine.scheduler.connector):
            manager, now = (
                side.shared.manager.inner if isinstance(side.shared.manager, FaultyManager) else side.shared.manager,
                side.shared.namespace,
            )
            hidden = [offload_key(*prefix, now) for prefix in unpublished]
            if isinstance(manager, TierManager):
                hidden += [key for key in manager.table.keys if key is not None and namespace_of_key(key) != now]
            # Of a chunk of several blocks, the key has the hash of the last.
            num_found += manager.lookup([offload_key(*prefix, now) for prefix in announced]).count(READY)
            num_ready += manager.num_ready - manager.lookup(hidden).count(READY)
        self.require(num_found == num_ready, f"{num_found} chunks announced, {num_ready} held")
        if all(side.shared.config.blocks_per_chunk == 1 for side in live_sides(self._engine.scheduler.connector)):
            self.require(announced.total() == num_ready, f"{announced.total()} blocks announced, {num_ready} held")

    def _unpublished(self) -> set[tuple[bytes, int]]:
        """The prefixes of salted requests, which must not be announced unless that is wanted."""
        if self._engine.config.emit_salted_events:
            return set()
        salted = [request for request in self._engine.requests.values() if request.salt is not None]
        groups = range(len(self._engine.layout.groups))
        return {(block_hash, group) for request in salted for block_hash in request.block_hashes for group in groups}

    def _follow(self, event: KVEvent) -> None:
        held = self._index.setdefault(event.medium, Counter())
        if isinstance(event, BlockStored | BlockRemoved) and event.locality is not None:
            stored = self._stored.setdefault(event.locality, Counter())
            change = Counter((block_hash, event.group) for block_hash in event.block_hashes)
            stored.update(change) if isinstance(event, BlockStored) else stored.subtract(change)
            self._stored[event.locality] = +stored
        match event:
            case AllBlocksCleared():
                held.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    prefix = (block_hash, event.group)
                    self.require(held[prefix] > 0, f"{block_hash.hex()[:8]} was removed, and never stored")
                    held[prefix] -= 1
                    if not held[prefix]:
                        del held[prefix]
            case BlockStored():
                held.update((block_hash, event.group) for block_hash in event.block_hashes)
                if event.medium == MEDIUM_DEVICE and self._engine.dedupes_blocks:
                    self.require(
                        max(held[h, event.group] for h in event.block_hashes) == 1, "stored twice on the device"
                    )
                self._check_contents(event)

    def _check_contents(self, event: BlockStored) -> None:
        """Check that the event describes itself: tokens, parent and salt give the hashes of its blocks."""
        if not self._engine.has_own_hashes:
            return
        num_blocks, per_block = len(event.block_hashes), event.block_tokens // self._engine.layout.hash_block_tokens
        is_engine_block = event.block_tokens == self._engine.layout.groups[event.group].block_tokens
        is_whole = is_engine_block and len(event.token_ids) == num_blocks * event.block_tokens
        self.require(
            is_whole and len(event.extra_keys) == num_blocks, "an event that does not describe all of its blocks"
        )
        parent = event.parent_block_hash
        if parent is None:
            salt = next(iter(event.extra_keys[0]), None)
            assert salt is None or isinstance(salt, str), "simulated requests have neither media nor embeddings"
            parent = root_hash(salt=salt)
        hashes: list[bytes] = []
        extend_hashes(hashes, event.token_ids, self._engine.layout.hash_block_tokens, parent)
        is_right = tuple(hashes[per_block - 1 :: per_block]) == event.block_hashes
        self.require(is_right, "tokens, parent and salt do not give the hashes")
