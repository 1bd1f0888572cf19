"""Brings chunks of lower tiers up into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cargohold.offload.manager.base import OffloadKey, OffloadManager, StoreHandle
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.promotion import Chain, Promotion
from cargohold.offload.tiering.tasks import TaskTable, TierTask
from cargohold.offload.tiering.tier_state import TierState
from cargohold.protocol import Clock

BATCH_CHUNKS = 128
"""Maximum number of chunks in one job: a job that fails costs no more than that."""


class Promotions:
    """Reserves slots of host memory for chunks of lower tiers, and pins the chunks that have arrived.

    Args:
        host: the manager of host memory.
        tiers: the tiers; they learn how long their loads take.
        tasks: the table that load jobs are added to.
        clock: time in which the engine steps.
        timeout_s: maximum time that a request waits; afterwards it has the same time to be admitted.

    Attributes:
        arriving: chunks that are being brought up.
        num_released: number of promotions released so far. Grows when other requests may find slots.
        num_never_there: number of chunks that host memory counts as removed although they had never arrived.
    """

    def __init__(
        self, host: OffloadManager, tiers: Sequence[TierState], tasks: TaskTable, clock: Clock, timeout_s: float
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._tasks = tasks
        self._clock = clock
        self._timeout_s = timeout_s
        self._live: set[Promotion] = set()
        self.arriving: set[OffloadKey] = set()
        self.num_released = 0
        self.num_never_there = 0

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def num_held(self) -> int:
        """Number of chunks pinned for promotions, counted once per promotion."""
        return sum(len(pins.keys) for promotion in self._live for pins in promotion.pins)

    def begin(self, chains: Sequence[Chain], kept: Sequence[OffloadKey]) -> Promotion | None:
        """See ``LowerTiers.promote``."""
        now = self._clock()
        promotion = Promotion(now, now + 2 * self._timeout_s, self._forget)
        self._live.add(promotion)
        is_shared = self._host.num_pins + self._host.num_writing > 0
        promotion.pins.append(self._host.prepare_load(kept))
        is_busy = False
        for chain in chains:
            is_busy |= not self._reserve(chain, promotion)
        # If nobody else uses slots, none becomes free while the request waits: its own chunks fill host memory.
        if is_busy and is_shared and not promotion.num_running:
            self._live.discard(promotion)
            promotion.drop_pins()  # nobody was kept waiting by them
            return None
        return promotion

    def _end_load(
        self, handle: StoreHandle, promotion: Promotion, task: TierTask, succeeded: Sequence[bool], is_done: bool
    ) -> None:
        """End a load job: chunks that arrived on all workers become ready and are pinned, the others are removed.

        ``is_done`` says whether the job was carried out as a whole, whatever it found.
        """
        self.arriving.difference_update(task.keys)
        good = [key for key, is_good in zip(task.keys, succeeded, strict=True) if is_good]
        promotion.end_job(task.tier, good, is_done=is_done)
        self._note_pace(task, promotion)
        if not good:
            handle.forfeit()
            return
        # A handle commits all its chunks or none, so chunks that did not arrive are ready until the next line. Nobody looks
        # them up in between.
        handle.commit()
        self._host.remove([key for key, is_good in zip(task.keys, succeeded, strict=True) if not is_good])
        self.num_never_there += len(task.keys) - len(good)
        if not promotion.is_released:
            promotion.pins.append(self._host.prepare_load(good))

    def release_expired(self) -> None:
        """Release promotions that have expired, so that no request pins chunks for ever."""
        now = self._clock()
        for promotion in [promotion for promotion in self._live if promotion.expires_at <= now]:
            promotion.release()

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        loads = [task for task in self._tasks if task.kind is JobKind.LOAD]
        assert self.arriving == {key for task in loads for key in task.keys}, "brought up by nobody"
        assert len(self.arriving) <= self._host.num_writing, "a slot is filled that is not reserved"
        for promotion in self._live:
            assert not promotion.is_released, "held for nobody"
            num_running = sum(task.owner is promotion for task in loads)
            assert promotion.num_running == num_running, "waits for a job that does not exist"

    def _reserve(self, chain: Chain, promotion: Promotion) -> bool:
        """Reserve slots for a chain's leading chunks, and add the jobs that fill them. Mutates host memory and ``promotion``.

        Returns:
            ``False`` if there was no slot for a batch of chunks and it is worth trying again later; else ``True``.
        """
        parent = chain.parent
        for start in range(0, len(chain.keys), BATCH_CHUNKS):
            keys = chain.keys[start : start + BATCH_CHUNKS]
            handle = self._host.prepare_store(keys, parent)
            if not handle.keys:
                handle.commit()
                return not handle.deferred
            self.arriving.update(handle.keys)
            promotion.begin_job(chain.tier)
            before = dict(zip(keys, (parent, *keys), strict=False))
            parents = [before[key] for key in handle.keys]
            on_end = partial(self._end_load, handle, promotion)
            self._tasks.want(TierTask(JobKind.LOAD, chain.tier, handle.keys, parents, handle.slots, promotion, on_end))
            if len(handle.keys) < len(keys):
                break
            parent = keys[-1]
        return True

    def _note_pace(self, task: TierTask, promotion: Promotion) -> None:
        """Let a tier learn how long it took to bring up its chunks, if the job that has ended was the last and tells that."""
        num_chunks = promotion.num_measured(task.tier)
        if num_chunks is not None:
            self._tiers[task.tier].pace.note(num_chunks, self._clock() - promotion.started_at)

    def _forget(self, promotion: Promotion) -> None:
        self._live.discard(promotion)
        if promotion.num_running:  # seldom: its request mostly waits until all jobs have ended
            self._tasks.cancel(
                lambda task: task.owner is promotion,
                in_flight=not promotion.is_given_up,
            )
        self.num_released += 1
