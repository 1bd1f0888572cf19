"""A request that waits for tiers below host memory: its phase, as a table, and its one deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from cargohold.cache.manager import OffloadKey
from cargohold.tiers.scheduler_side import Chain, Fetch, TierTask


class Phase(Enum):
    """What a request does about lower tiers. It waits in the first two phases."""

    ASK = "asks which of its chunks they have"
    BRING = "stands in line for slots in host memory, then waits until its chunks are there"
    HELD = "is looked up in host memory, where its chunks are held until it is admitted"
    OVER = "is looked up in host memory as it is"


class Event(Enum):
    """What happens to a request that waits."""

    FOUND = "there are chunks that are worth waiting for"
    NOTHING = "there are none"
    ARRIVED = "all jobs that fetch its chunks have ended"
    LATE = "its deadline has passed"


NEXT: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.ASK, Event.FOUND): Phase.BRING,
        (Phase.ASK, Event.NOTHING): Phase.OVER,
        (Phase.ASK, Event.LATE): Phase.OVER,
        (Phase.BRING, Event.ARRIVED): Phase.HELD,
        (Phase.BRING, Event.NOTHING): Phase.OVER,
        (Phase.BRING, Event.LATE): Phase.OVER,
    }
)
"""The phase after each event. All other events are impossible. Once the request is admitted or ends, its wait is forgotten."""


class Plan(NamedTuple):
    """What to fetch for a request.

    Attributes:
        num_tokens: number of leading tokens that host memory then has, computed tokens included.
        chains: the chunks to fetch.
        first_tokens: for each tier that chunks are fetched from, the first token that one of them stands for.
        load_s: estimated seconds that takes; 0 if that is not known.
    """

    num_tokens: int
    chains: Sequence[Chain]
    first_tokens: Mapping[int, int]
    load_s: float


class Wish(NamedTuple):
    """What a request wants to be done: to ask the tiers, or to fetch chunks.

    Attributes:
        unknown: chunks that tiers must be asked for; if there are none, and no plan, other requests' chunks are waited for.
        plan: what to fetch; ``None`` while that is not known.
        version: the state of host memory and tiers that it was made for.
    """

    unknown: Sequence[OffloadKey]
    plan: Plan | None
    version: int


@dataclass(slots=True, eq=False)
class Waiting:
    """A request's wait for lower tiers, from its first look-up until it is admitted.

    Attributes:
        begun_at: time at which it began; put off with the deadline.
        deadline: time at which the request stops waiting; put off while the engine has no place for the request.
        excuse: what to note for the request if it stops at the deadline.
        asked_in: number of the step before which the engine asked for the request last.
        has_place: whether the engine could have admitted the request then.
        max_tokens: maximum number of tokens that one look-up may be about, so that all answers are remembered until the last.
        num_computed_tokens: number of leading tokens that were on the device then.
        limit_tokens: maximum length in tokens of a hit then, computed tokens included.
        phase: see ``NEXT``.
        wish: what it wants to be done in the next ``build_connector_meta``, if that is known already.
        probes: questions to the tiers that the request waits for.
        num_found: by tier, the number of chunks that earlier questions have found there.
        skipped: indices of tiers that are not asked, because that would take too long.
        look_at: time before which it is not looked at again if it awaits no answer, because looking costs time.
        fetch: its chunks on their way; ``None`` before slots were reserved for them.
        is_limited: whether its deadline was compared with the time that computing takes.
        num_announced: number of leading tokens that another engine has announced and that have not been given up.
        num_come: number of leading tokens that had come when it was looked at last.
    """

    begun_at: float
    deadline: float
    excuse: str
    asked_in: int
    has_place: bool
    max_tokens: int
    num_computed_tokens: int = 0
    limit_tokens: int = 0
    phase: Phase = Phase.ASK
    wish: Wish | None = None
    probes: Sequence[TierTask] = ()
    num_found: Counter[int] = field(default_factory=Counter)
    skipped: set[int] = field(default_factory=set)
    look_at: float = 0.0
    fetch: Fetch | None = None
    is_limited: bool = False
    num_announced: int = 0
    num_come: int = 0

    def go(self, event: Event) -> None:
        """Go on to the next phase."""
        self.phase = NEXT[self.phase, event]

    def must_wait(self) -> bool:
        """Whether the answer to the engine is "not yet"."""
        return self.phase is Phase.ASK or self.phase is Phase.BRING

    @property
    def is_in_line(self) -> bool:
        """Whether it waits for slots in host memory."""
        return self.phase is Phase.BRING and self.fetch is None

    @property
    def is_answered(self) -> bool:
        """Whether no question to a tier is open that it waits for."""
        return all(probe.has_ended for probe in self.probes)

    @property
    def ask_until(self) -> float:
        """Time at which it stops asking: the first half of a wait is for questions, the second for loads."""
        return (self.begun_at + self.deadline) / 2

    @property
    def has_arrived(self) -> bool:
        """Whether all jobs that fetch its chunks have ended."""
        return self.fetch is not None and not self.fetch.num_running

    @property
    def excuse_now(self) -> str:
        """What to note for the request if it stops waiting now."""
        return "host memory had no room for what lower tiers have" if self.is_in_line else self.excuse

    @property
    def has_expired(self) -> bool:
        """Whether its chunks were released before the request was admitted, although it has not given up."""
        return self.fetch is not None and self.fetch.is_released and self.phase is not Phase.OVER

    def note_asked(self, num_computed_tokens: int, limit_tokens: int) -> None:
        """Note what the engine asks for. A wish for something else is void."""
        limit_tokens = min(limit_tokens, num_computed_tokens + self.max_tokens)
        if (self.num_computed_tokens, self.limit_tokens) != (num_computed_tokens, limit_tokens):
            self.num_computed_tokens, self.limit_tokens, self.wish = num_computed_tokens, limit_tokens, None

    def misses_announced(self, num_tokens: int, chunk_tokens: int) -> bool:
        """Whether chunks that were announced have not come yet, if ``num_tokens`` leading tokens have; note this number."""
        self.num_come = num_tokens
        return num_tokens + chunk_tokens <= min(self.num_announced, self.limit_tokens)

    def put_off(self, seconds: float) -> None:
        """Put off the deadline: for so long the request did not wait for lower tiers."""
        self.begun_at += seconds
        self.deadline += seconds

    def bring_forward(self, deadline: float, excuse: str) -> None:
        """Wait no longer than until ``deadline``, and note ``excuse`` for the request if it stops then."""
        if deadline < self.deadline:
            self.deadline, self.excuse = deadline, excuse

    def release(self) -> None:
        """Release the chunks held for the request. Jobs of a request that was late end by themselves, and are measured."""
        if self.fetch is not None and self.phase is Phase.OVER:
            self.fetch.give_up()
        elif self.fetch is not None:
            self.fetch.release()
