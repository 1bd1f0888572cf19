"""Tiers below host memory: requests wait for what they have, and what host memory gets is written down to them.

``LowerTiers`` knows what is in the tiers and on its way from and to them; ``Prefetcher`` knows which requests wait for what.
``LowerTierGuest`` calls both when the kernel does something, and carries their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from cargohold.blocks import NOT_YET
from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.connector.kernel.guest import AdmissionReport, Below
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.protocol import (
    BlockIds,
    Episode,
    KVConnectorOutput,
    RequestView,
    SchedulerEnvironment,
    Stats,
    StepView,
    TransferOutcome,
)
from cargohold.tiers.messages import TierCommand, TierReport
from cargohold.tiers.scheduler_side import LowerTiers, Prefetcher, Waiting, Wanted, sources_per_token


class LowerTierGuest(Below):
    """Lets requests wait for chunks of lower tiers, and tells these what host memory gets and gives back.

    Args:
        lower: the tiers; ``lower.host`` is the kernel's manager.
        prefetcher: fetches chunks for requests that wait.
        new_id: makes an id for a job, which no other job of the connector has.
        environment: facts about the engine.

    Attributes:
        want: returns what a request wants, from the fields of ``Wanted``.
        num_announced: returns how many leading tokens of a request will come to the tiers if they are not there yet.
        on_ask: called with a request's chunks before tiers are asked for them; ``None`` without a listener.
    """

    name = "lower tiers"

    def __init__(
        self, lower: LowerTiers, prefetcher: Prefetcher, new_id: Callable[[], int], environment: SchedulerEnvironment
    ) -> None:
        lower.host.admit_all()  # what host memory refused would be missing in the tiers, too
        self._lower = lower
        self._prefetcher = prefetcher
        self._new_id = new_id
        self._clock, self._observe = environment.clock, environment.observe
        self.tiers = [tier.name for tier in lower.tiers]
        self.num_announced: Callable[[RequestState], int] = lambda _: 0
        self.on_ask: Callable[[RequestView, Sequence[ChunkKeys]], None] | None = None
        self.want: Callable[..., Wanted] = Wanted
        # By request, its wait from the first look-up until it is admitted; by store, the chunks that it brings.
        self.waiting: dict[str, Waiting] = {}
        self._storing: dict[int, Sequence[Offer]] = {}

    # --- requests wait ------------------------------------------------------------------------------------------------

    @property
    def wants_all(self) -> bool:
        """Whether a tier is written as chunks are computed."""
        return any(writes.writes_through for writes in self._lower.writes)

    def still_wants(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return the chunks that wait to be written down."""
        waiting = [writes.backlog for writes in self._lower.writes if writes.writes_through and writes.backlog]
        return {key for key in keys if any(key in backlog for backlog in waiting)}

    def must_wait(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, num_found_tokens: int | None
    ) -> bool:
        """Whether a request still waits for the tiers, or, once it was looked up in host memory, begins to."""
        wanted = self.want(state.keys, state.request.num_tokens, num_computed_tokens, limit_tokens, state.tenant)
        waiting = self.waiting.get(state.request.request_id)
        if num_found_tokens is not None:
            if waiting is not None:
                return self._prefetcher.begins_again(waiting, wanted, num_found_tokens)
            return self._begins_to_wait(state, wanted, num_found_tokens)
        if waiting is not None and waiting.has_expired:
            waiting = None
            del self.waiting[state.request.request_id]
            state.notes.append("lower tiers were asked again: the request waited long for the engine")
        if waiting is not None and waiting.num_announced:
            # The first request of an engine waits before a worker has said what the engine's namespace is.
            waiting.num_announced = self.num_announced(state)
        return self._prefetcher.must_wait(waiting, wanted)

    def _begins_to_wait(self, state: RequestState, wanted: Wanted, num_found_tokens: int) -> bool:
        if wanted.limit_tokens - num_found_tokens < state.chunk_tokens:
            return False
        found = num_found_tokens, self.num_announced(state) if state.request.kv_transfer_params else 0
        if self.on_ask is None:
            waiting = self._prefetcher.begin(wanted, state.notes, *found)
        else:
            on_ask = partial(self.on_ask, state.request, state.keys)
            waiting = self._prefetcher.begin(wanted, state.notes, *found, on_ask)
        self.waiting[state.request.request_id] = waiting
        return waiting.must_wait

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> bytes:
        """Return the tier that each token was fetched from for this request."""
        waiting = self.waiting.get(state.request.request_id)
        wanted = Wanted(state.keys, state.request.num_tokens, num_computed_tokens, num_hit_tokens)
        return sources_per_token(wanted, {} if waiting is None else waiting.sources, num_hit_tokens)

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """Release the chunks that were held for it: its load holds them now."""
        waiting = self.waiting.pop(state.request.request_id, None)
        if waiting is None:
            return
        if waiting.fetch is not None and self._observe is not None:
            self._tell_fetched(state.request.request_id, waiting)
        waiting.end()

    def _tell_fetched(self, request_id: str, waiting: Waiting) -> None:
        assert waiting.fetch is not None and self._observe is not None
        now = self._clock()
        began_at = now - (self._lower.clock() - waiting.fetch.started_at)
        facts = {"chunks": len(waiting.fetch.sources)}
        self._observe(Episode("prefetch", (request_id,), began_at, now, facts))

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """End its wait."""
        if (waiting := self.waiting.pop(state.request.request_id, None)) is not None:
            waiting.end()

    def where_is(self, key: OffloadKey) -> str:
        """Whether a tier has a chunk, or it is on its way from there."""
        if self._lower.lookup([key]) == bytes([NOT_YET]):
            return "is still on its way from a lower tier"
        (at,) = self._lower.tiers_of([key])
        return f"was not fetched from {self.tiers[at]}" if at >= 0 else ""

    def take_stats(self) -> Stats:
        """Return the tiers' counters since the last call."""
        return self._lower.take_stats()

    # --- chunks come into host memory and are used --------------------------------------------------------------------

    def chunks_used(self, state: RequestState) -> None:
        """Let the tiers know of the use."""
        for keys in state.keys:
            self._lower.note_used(keys.keys)

    def store_begins(self, store: Store, offers: Sequence[Offer]) -> None:
        """Remember which chunks come before those that are stored."""
        self._storing[store.job_id] = offers

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Let chunks be written down that have come into host memory."""
        offers = self._storing.pop(store.job_id, ())
        if outcome is not TransferOutcome.DONE or store.is_spoiled:
            return
        parents: dict[OffloadKey, OffloadKey | None] = {} if offers else self._lower.host.parents(store.handle.keys)
        for offer in offers:
            parents.update(offer.parents())
        self._lower.note_new_in_host(store.handle.keys, parents)

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, step: StepView) -> None:
        """Do what waiting requests need."""
        self._prefetcher.begin_step(step)

    def worker_message(self) -> Sequence[TierCommand]:
        """Return the jobs for the tiers' queues on the workers."""
        return (*self._lower.take_commands(self._new_id), *self._lower.tasks.take_cancelled())

    def worker_reported(self, output: KVConnectorOutput) -> None:
        """Take in how jobs have gone, and what tiers have lost: chunks of jobs that ended count as lost after these jobs."""
        report = output.kv_connector_worker_meta if isinstance(output.kv_connector_worker_meta, TierReport) else None
        if report is not None:
            self._lower.note_emptied(at for at, losses in report.losses.items() if losses.is_all)
            self._lower.note_report(report.answers, report.health, report.namespace, report.listings, report.seconds)
        for job_id, outcome in output.jobs.items():
            self._lower.end(job_id, outcome)
        for at, losses in report.losses.items() if report is not None else ():
            self._lower.note_lost(at, losses.keys)

    def step_ends(self) -> None:
        """Do what answers that have come allow."""
        self._prefetcher.end_step()

    def is_busy(self) -> bool:
        """Whether chunks are still to be written down, or are being fetched."""
        return self._lower.is_settling

    # --- the end ------------------------------------------------------------------------------------------------------

    def may_reset(self) -> bool:
        """Not while chunks are on their way: they would be remembered under the wrong name."""
        return not self._lower.is_fetching

    def reset(self) -> None:
        """Forget what the tiers have: from now on, chunks have other names there."""
        self._lower.reset()

    def use_namespace(self, namespace: int, weights: str) -> None:
        """End all waits: they are for chunks of another namespace than that in which requests have theirs from now on.

        With a lasting name of their ``weights``, later engines find them, too.
        """
        self._end_waits()
        self._lower.use_namespace(namespace, weights)

    def _end_waits(self) -> None:
        for waiting in self.waiting.values():
            waiting.end()
        self.waiting.clear()

    def shutdown(self) -> None:
        """End all waits, and use the tiers no more."""
        self._end_waits()
        self._storing.clear()
        self._lower.retire()
