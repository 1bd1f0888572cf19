"""The pages of one host pool, in all tiers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Final

from cargohold.cache.manager import OffloadKey
from cargohold.errors import TierError
from cargohold.integrations.sglang.pages import Pages
from cargohold.integrations.sglang.settings import BackendSettings
from cargohold.tiers import BreakerState, JobKind, Namespace, QueueConfig, TierConfig, TierJob, TierQueue, open_tier
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.memory import Buffer
from cargohold.tiers.opening import namespace_in
from cargohold.tiers.port import LISTED_AT_ONCE

logger = logging.getLogger(__name__)

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
