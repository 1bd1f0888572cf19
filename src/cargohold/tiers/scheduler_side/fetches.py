"""Chunks of lower tiers on their way into host memory: slots reserved, jobs begun, and what has arrived pinned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cargohold.cache.manager import ChunkPins, OffloadKey, OffloadManager, SlotReservation, StoreOffer
from cargohold.deadlines import FETCHED
from cargohold.protocol import Clock, metrics
from cargohold.tiers.port import JobKind
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import TierState

BATCH_CHUNKS = 128
"""Maximum number of chunks in one job: a job that fails costs no more than that."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive chunks of one prefix, absent in host memory and all in the same tier.

    Attributes:
        tier: index of the tier, from 0.
        keys: the chunks, in prefix order.
        parent: the chunk before the first; ``None`` at the start of a prompt.
        first_token: the first token that it stands for.
    """

    tier: int
    keys: Sequence[OffloadKey]
    parent: OffloadKey | None
    first_token: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """Brings chunks into host memory, and pins them there until it is released.

    Attributes:
        started_at: time at which it began.
        expires_at: time at which it is released at the latest.
        on_release: called when it is released.
        running: by tier, the number of its jobs that have not ended.
        failed: tiers with a job that was not carried out as a whole.
        sources: index of the tier that each arrived chunk came from.
        took_s: by tier, the seconds that its slowest job took.
        num_reserved: number of chunks that it has reserved slots for.
        pins: pins on its chunks in host memory.
        is_released: whether it was released.
        is_given_up: whether it was released because its jobs took too long.
    """

    started_at: float
    expires_at: float
    on_release: Callable[[Fetch], None]
    running: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    took_s: dict[int, float] = field(default_factory=dict)
    num_reserved: int = 0
    pins: list[ChunkPins] = field(default_factory=list)
    is_released: bool = False
    is_given_up: bool = False

    @property
    def num_running(self) -> int:
        """Number of its jobs that have not ended."""
        return self.running.total()

    def num_measured(self, tier: int) -> int | None:
        """Return how many chunks came from a tier since the beginning, if that says how fast it is; else ``None``.

        It does so once all jobs of the tier have ended: whether they found all chunks or not, for a tier may be slow to say
        that it lacks a chunk; and even if the request has given up waiting meanwhile, or a tier whose loads always take too
        long would never be known to be slow. The jobs of a request that needs its chunks no more are cut short.
        """
        num_arrived = list(self.sources.values()).count(tier)
        is_cut_short = self.is_released and not self.is_given_up
        if self.running[tier] or is_cut_short or (tier in self.failed and not (self.is_given_up and num_arrived)):
            return None
        return num_arrived

    def release(self) -> None:
        """Give back the pins and cancel the jobs: the request has its chunks, or needs none. May be called repeatedly."""
        if not self.is_released:
            self.is_released = True
            self.drop_pins()
            self.on_release(self)

    def drop_pins(self) -> None:
        """Give back the pins."""
        pins, self.pins = self.pins, []
        for handle in pins:
            handle.release()

    def give_up(self) -> None:
        """Give back the pins: the request has waited long enough. The jobs end by themselves, or at their deadlines.

        A tier is judged by how its jobs end. If they were cancelled, one that hangs would never be blamed.
        """
        self.is_given_up = True
        self.release()


class Fetches:
    """Reserves slots of host memory for chunks of lower tiers, and pins the chunks that have arrived.

    Args:
        host: the manager of host memory.
        tiers: the tiers; they learn what their loads have brought, and how long that took.
        tasks: the table that load jobs are added to.
        clock: time in which the engine steps.
        timeout_s: maximum time that a request waits; afterwards it has the same time to be admitted.
        on_arrived: called with the tier's index and the chunks that have come from there, each with the one before it.

    Attributes:
        live: the fetches that have not been released.
        arriving: chunks that are being brought up.
        num_never_there: number of chunks that host memory counts as removed although they had never arrived.
    """

    def __init__(
        self,
        host: OffloadManager,
        tiers: Sequence[TierState],
        tasks: TaskTable,
        clock: Clock,
        timeout_s: float,
        on_arrived: Callable[[int, Mapping[OffloadKey, OffloadKey | None]], None],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._tasks = tasks
        self._clock = clock
        self._held_s = FETCHED.seconds(timeout_s)
        self._on_arrived = on_arrived
        self.live: set[Fetch] = set()
        self.arriving: set[OffloadKey] = set()
        self.num_never_there = 0

    @property
    def num_held(self) -> int:
        """Number of chunks pinned for fetches, counted once per fetch."""
        return sum(len(pins.keys) for fetch in self.live for pins in fetch.pins)

    def begin(self, chains: Sequence[Chain], kept: Sequence[OffloadKey], tenant: str | None = None) -> Fetch | None:
        """Fetch chunks into host memory, as far as slots can be had, and pin ``kept``, which are there already.

        Returns:
            The fetch to wait for, and to release in the end; nothing is on its way for it if ``kept`` fill host memory.
            ``None`` if there is no slot as long as others use them, and then nothing is pinned.
        """
        num_wanted = sum([len(chain.keys) for chain in chains])
        is_shared = self._host.num_pins + self._host.num_writing > 0
        fits_as_whole = num_wanted + len(kept) <= self._host.capacity
        # A part would leave the rest to be computed, although the slots for it will be free in a moment.
        if is_shared and fits_as_whole and self._host.num_obtainable < num_wanted:
            return None
        pins = self._host.prepare_load(kept)
        parts, has_to_wait = self._reserve(chains, tenant)
        # If nothing else uses slots, none becomes free while the request waits: its own chunks fill host memory.
        if has_to_wait and is_shared and (fits_as_whole or not parts):
            for _, handle in parts:
                handle.forfeit()
            pins.release()  # no request was kept waiting by them
            return None
        now = self._clock()
        fetch = Fetch(now, now + self._held_s, self._forget, pins=[pins])
        self.live.add(fetch)
        for chain, handle in parts:
            self._load(chain, handle, fetch)
        return fetch

    def release_expired(self) -> None:
        """Release fetches that have expired, so that no request pins chunks for ever."""
        now = self._clock()
        for fetch in [fetch for fetch in self.live if fetch.expires_at <= now]:
            fetch.release()

    def release_all(self) -> None:
        for fetch in list(self.live):
            fetch.release()

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        loads = [task for task in self._tasks if task.kind is JobKind.LOAD]
        assert self.arriving == {key for task in loads for key in task.keys}, "brought up by nobody"
        assert len(self.arriving) <= self._host.num_writing, "a slot is filled that is not reserved"
        for fetch in self.live:
            assert not fetch.is_released, "held for nobody"
            num_running = sum(task.owner is fetch for task in loads)
            assert fetch.num_running == num_running, "waits for a job that does not exist"

    def _reserve(self, chains: Sequence[Chain], tenant: str | None) -> tuple[list[tuple[Chain, SlotReservation]], bool]:
        """Reserve slots for chains' leading chunks, a batch at a time. Mutates host memory.

        Returns:
            The chain and slots of each batch; and whether slots for further chunks become free when others give back theirs.
        """
        parts: list[tuple[Chain, SlotReservation]] = []
        has_to_wait = False
        for chain in chains:
            parent = chain.parent
            for start in range(0, len(chain.keys), BATCH_CHUNKS):
                keys = chain.keys[start : start + BATCH_CHUNKS]
                handle = self._host.prepare_stores([StoreOffer(keys, parent, tenant)])
                has_to_wait |= bool(handle.deferred)
                if not handle.keys:
                    handle.commit()
                    break
                parts.append((chain, handle))
                if len(handle.keys) < len(keys):
                    break
                parent = keys[-1]
        return parts, has_to_wait

    def _load(self, chain: Chain, handle: SlotReservation, fetch: Fetch) -> None:
        """Add the job that fills reserved slots."""
        self.arriving.update(handle.keys)
        fetch.running[chain.tier] += 1
        fetch.num_reserved += len(handle.keys)
        before = dict(zip(chain.keys, (chain.parent, *chain.keys), strict=False))
        parents = [before[key] for key in handle.keys]
        on_end = partial(self._end_load, handle, fetch)
        self._tasks.want(TierTask(JobKind.LOAD, chain.tier, handle.keys, on_end, parents, handle.slots, fetch))

    def _end_load(
        self, handle: SlotReservation, fetch: Fetch, task: TierTask, succeeded: Sequence[bool], is_done: bool
    ) -> None:
        """End a load job: chunks that arrived on all workers become ready and are pinned, the others are removed.

        ``is_done`` says whether the job was carried out as a whole, whatever it found.
        """
        tier = self._tiers[task.tier]
        self.arriving.difference_update(task.keys)
        if is_done:
            tier.note_presence(task.keys, succeeded)
        elif not task.is_cancelled:
            tier.lookup_cache.forget(task.keys)
        good = [key for key, is_good in zip(task.keys, succeeded, strict=True) if is_good]
        bad = [key for key, is_good in zip(task.keys, succeeded, strict=True) if not is_good]
        tier.stats[metrics.OTHER.of(f"{tier.name}_loaded_chunks")] += len(good)
        tier.stats[metrics.NOT_LOADED.of(tier.name)] += len(bad)
        fetch.running[task.tier] -= 1
        fetch.sources.update(dict.fromkeys(good, task.tier))
        if not is_done:
            fetch.failed.add(task.tier)
        self._note_pace(task, fetch)
        if not good:
            handle.forfeit()
            return
        # A handle commits all its chunks or none, so chunks that did not arrive are ready until the next line. Nothing looks
        # them up in between.
        handle.commit()
        self._host.remove(bad)
        self.num_never_there += len(bad)
        if not fetch.is_released:
            fetch.pins.append(self._host.prepare_load(good))
        parents = dict(zip(task.keys, task.parents, strict=True))
        self._on_arrived(task.tier, {key: parents[key] for key in good})

    def _note_pace(self, task: TierTask, fetch: Fetch) -> None:
        """Let a tier learn how long it took to bring up its chunks, if the job that has ended was the last and tells that."""
        took_s = fetch.took_s[task.tier] = max(task.took_s, fetch.took_s.get(task.tier, 0.0))
        num_chunks = fetch.num_measured(task.tier)
        if num_chunks is not None:
            self._tiers[task.tier].pace.note(num_chunks, took_s or self._clock() - fetch.started_at)

    def _forget(self, fetch: Fetch) -> None:
        self.live.discard(fetch)
        if fetch.num_running:  # seldom: its request mostly waits until all jobs have ended
            self._tasks.cancel(lambda task: task.owner is fetch, in_flight=not fetch.is_given_up)
