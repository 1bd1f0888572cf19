"""Admission: decides whether a waiting request may start now, and how much of its KV is already there."""

from __future__ import annotations

from enum import Enum, auto
from itertools import islice

from cargohold.engine.core.kv_cache_manager import KVCacheManager, LocalHit
from cargohold.engine.core.request import Request, StepPlan
from cargohold.engine.core.roster import Roster
from cargohold.protocol import Clock, ConnectorGuard


class Verdict(Enum):
    """The result of an attempt to admit a request."""

    RUNS = auto()
    """The request has its blocks and is part of the step."""
    LOADS = auto()
    """The request has its blocks and waits for a connector to fill them."""
    DEFERRED = auto()
    """A connector does not know yet what it has, or has broken while it was told of the blocks; try again in the next step.

    Requests behind this one may go first.
    """
    NO_ROOM = auto()
    """There are not enough blocks. Requests behind this one must wait too, or it would never get them."""


class Admission:
    """Admits waiting requests.

    Looks up the device pool first, then asks the connector for more; allocates; tells the connector.

    Attributes:
        num_deferred_lookups: number of requests that the connector has answered "not yet" so far.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        connector: ConnectorGuard,
        clock: Clock,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._connector = connector
        self._clock = clock
        self.num_deferred_lookups = 0
        # When requests were deferred, by id: those of this step, and those of the step before.
        self._deferred: dict[str, float] = {}
        self._deferred_before: dict[str, float] = {}

    def begin_step(self, num_places: int) -> None:
        """Begin to plan a step. A deferred request that is not tried in it waits for a place, no longer for the connector.

        So do those that were behind ``num_places`` others.
        """
        self._deferred_before, self._deferred = dict(islice(self._deferred.items(), max(0, num_places))), {}

    def try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Admit ``request`` if possible; mutates pool, roster and plan unless the verdict is DEFERRED or NO_ROOM."""
        deferred_at = self._deferred_before.pop(request.request_id, None)
        if deferred_at is not None:
            request.times.load_wait_s += self._clock() - deferred_at
        verdict = self._try_admit(request, plan)
        if verdict is Verdict.DEFERRED:
            self._deferred[request.request_id] = self._clock()
        return verdict

    def _try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        # One spare block per running request and group for the next token, or the newcomer would soon cause a preemption.
        num_spare = len(self._roster.running) * len(self._kv.layout.groups)
        if self._kv.holds_blocks(request):
            return self._start_loaded(request, plan, num_spare)
        hit = self._kv.find_local_hit(request)
        num_external, is_async = 0, False
        if request.ask_connector:
            answer, is_async = self._connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if answer is None:
                self.num_deferred_lookups += not request.was_deferred
                request.was_deferred = True
                return Verdict.DEFERRED
            num_external = answer
        if is_async:
            return self._start_loading(request, hit, num_external, num_spare)
        return self._start(request, plan, hit, num_external, num_spare)

    def _start(self, request: Request, plan: StepPlan, hit: LocalHit, num_external: int, num_spare: int) -> Verdict:
        # The last token is computed even if its KV is there: generation starts from its logits.
        num_computed = min(hit.num_tokens + num_external, request.num_tokens - 1)
        num_new = min(request.num_tokens - num_computed, plan.num_tokens_left)
        if not self._kv.allocate_first(request, hit, num_external, num_computed + num_new, num_spare):
            return Verdict.NO_ROOM
        self._note_admission(request, hit, num_external)
        request.num_computed_tokens = num_computed
        if not self._tell_connector(request, num_external):
            return Verdict.DEFERRED
        plan.add(request, num_new, self._kv.block_ids(request), loads_in_step=num_external > 0)
        self._roster.run(request)
        return Verdict.RUNS

    def _start_loading(self, request: Request, hit: LocalHit, num_external: int, num_spare: int) -> Verdict:
        if not self._kv.allocate_first(request, hit, num_external, hit.num_tokens + num_external, num_spare):
            return Verdict.NO_ROOM
        self._note_admission(request, hit, num_external)
        if not self._tell_connector(request, num_external):
            return Verdict.DEFERRED
        request.times.loading_since = self._clock()
        self._roster.load(request)
        self._roster.transfers.start_load(request, self._clock())
        return Verdict.LOADS

    def _start_loaded(self, request: Request, plan: StepPlan, num_spare: int) -> Verdict:
        num_new = min(request.num_tokens - request.num_computed_tokens, plan.num_tokens_left)
        if not self._kv.allocate_more(request, request.num_computed_tokens + num_new, num_spare):
            return Verdict.NO_ROOM
        self._tell_connector(request, 0)
        plan.add(request, num_new, self._kv.block_ids(request))
        self._roster.run(request)
        return Verdict.RUNS

    def _note_admission(self, request: Request, hit: LocalHit, num_external: int) -> None:
        request.num_device_tokens = hit.num_tokens
        request.num_external_tokens = num_external
        if request.times.first_scheduled is None:
            request.times.first_scheduled = self._clock()
            request.num_first_device_tokens = hit.num_tokens

    def _tell_connector(self, request: Request, num_external: int) -> bool:
        """Tell the connector of the allocation. If it breaks and so will not load, take the blocks back; return ``False``."""
        self._connector.update_state_after_alloc(request, self._kv.block_ids(request), num_external)
        if num_external == 0 or self._connector.broken is None:
            return True
        self._kv.free(request)
        request.num_computed_tokens = request.num_device_tokens = request.num_external_tokens = 0
        return False
