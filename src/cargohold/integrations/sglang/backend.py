"""The class that SGLang instantiates.

SGLang calls it in threads of its own: one looks up what is there, one fetches, one stores; its scheduler's thread starts,
clears and closes. Only there something is raised: elsewhere, what cannot be done is a miss, or is not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from cargohold.cache.manager import OffloadKey
from cargohold.errors import ConfigError, SparingLog, TierError
from cargohold.integrations.sglang.identity import Identity
from cargohold.integrations.sglang.pages import Pages, pages_of
from cargohold.integrations.sglang.plugin import watch
from cargohold.integrations.sglang.settings import BackendSettings
from cargohold.option_values import format_bytes
from cargohold.tiers import BreakerState, JobKind, Namespace, QueueConfig, TierConfig, TierJob, TierQueue, open_tier
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.memory import Buffer
from cargohold.tiers.opening import namespace_in
from cargohold.tiers.port import LISTED_AT_ONCE

logger = logging.getLogger(__name__)

_KV: Final = str(PoolName.KV)
LOCAL: Final = "LOCAL"


class CargoholdStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's storage over our tiers.

    Pools are known only when SGLang has registered them all; then the tiers are opened.

    Args:
        storage_config: which rank this is, and the user's options.
        kwargs: nothing, today.

    Raises:
        ConfigError: the options cannot work.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        del kwargs
        settings = BackendSettings.parse(storage_config.extra_config)
        self._identity = Identity(storage_config)
        self._settings = settings
        self._pools: dict[str, Any] = {}
        self._pages: dict[str, Pages] = {}
        self._page_stores: dict[str, PageStore] = {}
        self._page_tokens = 1
        self._stats_lock = threading.Lock()
        self._stats = StorageMetrics()
        self._misuse = SparingLog(logger)

    # --- the start and the end ----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of attention, which gives the others their pace."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[_KV] = mem_pool_host
        self._page_tokens = int(mem_pool_host.page_size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further host pool, or one that SGLang adds later."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.setdefault(str(host_pool_name), host_pool)
        if self._page_stores:
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Open the tiers for the pools. Raises ``ConfigError``, and then none is open."""
        try:
            for name, pool in self._pools.items():
                if name not in self._pages:
                    self._pages[name] = pages_of(name, pool)
            total = sum(pages.pool_bytes for pages in self._pages.values())
            for name in self._pages.keys() - self._page_stores.keys():
                self._page_stores[name] = self._open(name, self._pages[name], total)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, pages: Pages, total_bytes: int) -> PageStore:
        """Open the tiers for a pool. Their limits are divided as SGLang divides host memory among its pools."""
        identity, settings = self._identity, self._settings
        if identity.is_replicated(name):
            for at, tier in enumerate(settings.tiers):
                if tier.locality == LOCAL:
                    expected = (
                        "several ranks read what one writes here, and it serves one process only; use a shared tier"
                    )
                    raise ConfigError(
                        f"tiers[{at}].kind", tier.kind, f'{expected}, such as "url": "file:///var/cache/kv"'
                    )
        share = pages.pool_bytes / total_bytes
        tiers = tuple(tier.of_replica(identity.replica) for tier in settings.tiers)
        namespace, num_shards = identity.namespace(name, pages), identity.ranks_here(name)
        page_store = PageStore(replace(settings, tiers=tiers), namespace, pages, num_shards, share)
        where = "; ".join(tier.describe() for tier in tiers)
        message = "cargohold keeps pages of %s of %s (%s), as %s, in %s"
        logger.info(message, format_bytes(pages.num_bytes), name, namespace.id[:8], pages.form, where)
        return page_store

    def close(self) -> None:
        """Close the tiers; what they hold stays. SGLang calls this when the storage is detached, and when the server ends."""
        page_stores, self._page_stores = self._page_stores, {}
        for page_store in page_stores.values():
            page_store.close()

    def clear(self) -> None:
        """Delete everything that this rank may find. Raises ``TierError`` if that fails, which SGLang logs."""
        config = self._identity.config
        for name, page_store in self._page_stores.items():
            if config.tp_rank == 0 or not self._identity.is_replicated(name):
                page_store.clear()

    def get_stats(self) -> StorageMetrics | None:
        """Return what was moved since the last call, for SGLang's own metrics."""
        if not self._identity.config.enable_storage_metrics:
            return None
        with self._stats_lock:
            stats, self._stats = self._stats, StorageMetrics()
        return stats

    # --- what is there ------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page of attention is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages of attention are there, from the first on."""
        del extra_info
        page_store = self._page_store(_KV)
        return 0 if page_store is None else page_store.run_length([key_of(key) for key in keys])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes can be restored: those of which every pool has what it must have."""
        num_pages = self.batch_exists(keys, extra_info)
        found = {PoolName.KV: num_pages} if num_pages else {}
        lengths = set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS or not lengths:
                continue  # such groups never decide what can be restored
            of_pool = self._restorable(transfer, keys[:num_pages])
            if of_pool:
                found[transfer.name] = max(of_pool)
            lengths &= of_pool
        return PoolTransferResult(max(lengths, default=0), found, sorted(lengths))

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str]) -> set[int]:
        """The lengths of prefixes, in pages, for which a pool has its part."""
        page_store = self._page_store(str(transfer.name))
        if page_store is None:
            return set()
        wanted = [key_of(key) for key in keys]
        if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
            return set(range(1, page_store.run_length(wanted) + 1))
        window, run, lengths = max(1, len(transfer.keys or ())), 0, set()
        for length, is_there in enumerate(page_store.has(wanted), start=1):
            run = run + 1 if is_there else 0
            if run >= min(window, length):
                lengths.add(length)
        return lengths

    # --- in place, or by pages ----------------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of attention into SGLang's host memory; return which hold what was stored."""
        del extra_info
        return self._get(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of attention from SGLang's host memory; return which are there now."""
        return self._set(_KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools."""
        del extra_info
        return {of.name: self._get(str(of.name), of.keys or [], of.host_indices) for of in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {of.name: self._set(str(of.name), of.keys or [], of.host_indices, extra_info) for of in transfers}

    def _get(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        page_store, pages = self._page_store(name), self._pages.get(name)
        slots = None if page_store is None or pages is None or not keys else self._slots(pages, keys, host_indices)
        if page_store is None or pages is None or slots is None:
            return [False] * len(keys)
        began, targets = time.monotonic(), pages.targets(slots)
        timeout_s = self._settings.load_s(len(keys) * self._page_tokens)
        is_loaded = page_store.load([key_of(key) for key in keys], targets, timeout_s)
        pages.settle(slots, targets, is_loaded)
        self._note(loaded=is_loaded, page_bytes=pages.num_bytes, began=began)
        return is_loaded

    def _set(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        page_store, pages = self._page_store(name), self._pages.get(name)
        slots = None if page_store is None or pages is None or not keys else self._slots(pages, keys, host_indices)
        if page_store is None or pages is None or slots is None:
            return [False] * len(keys)
        began, ours = time.monotonic(), [key_of(key) for key in keys]
        before = key_of(extra_info.prefix_keys[-1]) if extra_info and extra_info.prefix_keys else None
        is_stored = page_store.store(ours, pages.sources(slots), list(parents_of(ours, before)))
        self._note(stored=is_stored, page_bytes=pages.num_bytes, began=began)
        return is_stored

    # --- what SGLang does not call with "interface_v1" -----------------------------------------------------------------

    def get(self, *_: Any, **__: Any) -> None:
        """Return nothing: pages are moved by ``batch_get_v1``."""

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[None]:
        """Return nothing of each page: pages are moved by ``batch_get_v1``."""
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """Return that nothing was stored: pages are moved by ``batch_set_v1``."""
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        """Return that nothing was stored: pages are moved by ``batch_set_v1``."""
        return False

    # --- common -------------------------------------------------------------------------------------------------------

    def _page_store(self, name: str) -> PageStore | None:
        """Return a pool's pages; ``None`` if they are not kept, or not any more because the weights were changed in place."""
        return None if watch.change else self._page_stores.get(name)

    def _slots(self, pages: Pages, keys: Sequence[str], host_indices: torch.Tensor | None) -> torch.Tensor | None:
        """Return the slots of pages; ``None`` if there is not one for each of their tokens."""
        if host_indices is not None and host_indices.numel() == len(keys) * pages.num_tokens:
            return host_indices
        num_slots = 0 if host_indices is None else host_indices.numel()
        self._misuse.warning("cargohold was given %d slots for %d pages; nothing is done", num_slots, len(keys))
        return None

    def _note(self, *, loaded: Sequence[bool] = (), stored: Sequence[bool] = (), page_bytes: int, began: float) -> None:
        """Count what was moved."""
        num_pages = sum(loaded) + sum(stored)
        gb_per_s = num_pages * page_bytes / 1e9 / max(1e-9, time.monotonic() - began)
        with self._stats_lock:
            stats = self._stats
            pages, rates = (
                (stats.prefetch_pgs, stats.prefetch_bandwidth) if loaded else (stats.backup_pgs, stats.backup_bandwidth)
            )
            pages.append(num_pages)
            rates.append(gb_per_s)


# --- the pages of one host pool, in all tiers --------------------------------------------------------------------------


STORED_AT_ONCE: Final = 256
"""Pages in one job: a queue takes some jobs of this size, of several callers, and refuses what is more."""
_CLEAR_S: Final = 60.0


class PoolTier:
    """One tier for the pages of a pool.

    Args:
        config: the tier's options.
        namespace: identity of the pages.
        pages: the pages.
        num_shards: number of ranks that share its limits.
        share: part of its limits that the pool gets.
    """

    def __init__(  # made in one place
        self, config: TierConfig, namespace: Namespace, pages: Pages, num_shards: int, share: float
    ) -> None:
        self.config = config
        self.namespace = namespace_in(config, namespace)
        types = [pages.number_type]
        self._open = partial(
            open_tier, config, namespace, [pages.num_bytes], num_shards, share=share, number_types=types
        )
        self.queue = TierQueue(self._open(), time.monotonic, QueueConfig(num_threads=config.num_threads))
        self._ids = count()

    def run(self, kind: JobKind, keys: Sequence[OffloadKey], deadline: float, **more: Sequence[object]) -> list[bool]:
        """Carry out a job until the deadline; return whether each chunk succeeded."""
        job = TierJob(next(self._ids), kind, keys, deadline, **more)  # type: ignore[arg-type]  # buffers and parents
        return job.succeeded if self.queue.perform(job) else [False] * len(keys)

    def has(self, keys: Sequence[OffloadKey], deadline: float) -> list[bool]:
        """Return whether each chunk is there. Nothing is while loads are suspended: it could not be fetched."""
        if self.queue.health().load is BreakerState.OPEN:
            return [False] * len(keys)
        if not self.queue.tier.has_index:
            return self.run(JobKind.PROBE, keys, deadline)
        try:
            return self.queue.tier.probe(keys)  # from memory: it waits for no medium, so neither for its threads
        except TierError:
            return [False] * len(keys)

    def clear(self) -> None:
        """Delete all chunks. Raises ``TierError``."""
        if not self.config.is_listed:
            open_inventory(str(getattr(self.config, "url", ""))).remove(self.namespace.id)
            self._open().close()  # which describes the namespace again, for people
            return
        tier, deadline = self.queue.tier, time.monotonic() + _CLEAR_S
        while keys := tier.list_chunks(b"", LISTED_AT_ONCE[JobKind.LIST], with_details=False).keys:
            for begin in range(0, len(keys), STORED_AT_ONCE):
                if not all(self.run(JobKind.REMOVE, keys[begin : begin + STORED_AT_ONCE], deadline)):
                    raise TierError(tier.name, "not everything could be deleted")


class PageStore:
    """The pages of one host pool. Any thread may use it, and waits for at most the time that ``settings`` allow.

    Args:
        settings: tiers and times.
        namespace: identity of the pages.
        pages: the pages.
        num_shards: number of ranks that share the tiers' limits.
        share: part of these limits that the pool gets.

    Raises:
        ConfigError: a tier cannot be opened; none is left open then.
    """

    def __init__(  # made in one place
        self, settings: BackendSettings, namespace: Namespace, pages: Pages, num_shards: int, share: float = 1.0
    ) -> None:
        self._settings = settings
        self._places: list[PoolTier] = []
        with ExitStack() as opened:
            for config in settings.tiers:
                self._places.append(PoolTier(config, namespace, pages, num_shards, share))
                opened.callback(self._places[-1].queue.shutdown)
            opened.pop_all()

    def has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each page is in one of the tiers."""
        deadline = time.monotonic() + self._settings.look_up_timeout_s
        return self._from_first(len(keys), lambda place, at: place.has([keys[index] for index in at], deadline))

    def run_length(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many pages from the first on are there. Stores that answer one by one are asked for a few at a time."""
        step = min(place.config.num_asked_at_once or max(1, len(keys)) for place in self._places)
        for begin in range(0, len(keys), step):
            found = self.has(keys[begin : begin + step])
            if not all(found):
                return begin + found.index(False)
        return len(keys)

    def load(self, keys: Sequence[OffloadKey], targets: Sequence[Buffer], timeout_s: float) -> list[bool]:
        """Load pages, each from the first tier that has it; return which were loaded, verified."""
        deadline = time.monotonic() + timeout_s

        def load_from(place: PoolTier, at: Sequence[int]) -> list[bool]:
            return place.run(
                JobKind.LOAD, [keys[index] for index in at], deadline, buffers=[targets[index] for index in at]
            )

        return self._from_first(len(keys), load_from)

    def store(
        self, keys: Sequence[OffloadKey], sources: Sequence[Buffer], parents: Sequence[OffloadKey | None]
    ) -> list[bool]:
        """Store pages in all tiers; return which are in one of them now."""
        deadline, is_kept = time.monotonic() + self._settings.store_timeout_s, [False] * len(keys)
        for place in self._places:
            for begin in range(0, len(keys), STORED_AT_ONCE):
                part = slice(begin, begin + STORED_AT_ONCE)
                done = place.run(JobKind.STORE, keys[part], deadline, buffers=sources[part], parents=parents[part])
                is_kept[part] = [old or new for old, new in zip(is_kept[part], done, strict=True)]
        return is_kept

    def clear(self) -> None:
        """Delete all pages, in all tiers. Raises ``TierError``."""
        for place in self._places:
            place.clear()

    def close(self) -> None:
        """Close the tiers; what they hold stays. Waits for a few seconds at most."""
        closing = [threading.Thread(target=place.queue.shutdown, daemon=True) for place in self._places]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _from_first(self, num: int, ask: Callable[[PoolTier, Sequence[int]], list[bool]]) -> list[bool]:
        """Ask each tier for what those before it could not do; ``ask`` gets the indices of that."""
        is_done = [False] * num
        for place in self._places:
            left = [index for index in range(num) if not is_done[index]]
            if left:
                for index, done in zip(left, ask(place, left), strict=True):
                    is_done[index] = done
        return is_done


def key_of(name: str) -> OffloadKey:
    """Return our key for one of SGLang's: its SHA-256, and the group, of which each pool is one by itself."""
    return bytes.fromhex(name) + bytes(4)


def parents_of(keys: Sequence[OffloadKey], before: OffloadKey | None) -> Iterator[OffloadKey | None]:
    """Yield the page before each of consecutive ones."""
    for key in keys:
        yield before
        before = key
