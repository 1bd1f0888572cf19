"""A wait for chunks of lower tiers, from the first look-up of a request until it is admitted.

::

    ASK ----> ask the tiers about what host memory does not have, unless it is known what they have
     |          | all have answered
     |          v
     |        how much is it worth while to fetch? --nothing--> OVER: host memory's answer counts
     v          | some leading chunks
    BRING --> wait for slots, fetch these chunks, hold those that host memory has
     |          | all have arrived or failed
     v          v
    HELD ---> host memory's answer counts, with the chunks held until the request is admitted

While the engine has no place for it, a request may lose what it was to continue: its beginning on the device, or chunks of host
memory that nobody held. Lower tiers may have that: then it begins again, with the time that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from cargohold.cache.manager import OffloadKey
from cargohold.tiers.scheduler_side.fetches import Fetch
from cargohold.tiers.scheduler_side.plan import FetchPlanner, Wanted
from cargohold.tiers.scheduler_side.tasks import TierTask

MAX_AGAIN: Final = 3
"""A request that loses what it was to begin with begins again at most so many times."""


class Phase(Enum):
    """What a request does about lower tiers. It waits in the first two phases."""

    ASK = "asks which of its chunks they have"
    BRING = "waits for slots in host memory, then until its chunks are there"
    HELD = "is looked up in host memory, where its chunks are held until it is admitted"
    OVER = "is looked up in host memory as it is"


class Event(Enum):
    """What happens to a request that waits."""

    FOUND = "there are chunks that are worth waiting for"
    NOTHING = "there are none"
    ARRIVED = "all jobs that fetch its chunks have ended"
    LATE = "its time is up"
    LOST = "the device or host memory has lost what it was to begin with"


NEXT: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.ASK, Event.FOUND): Phase.BRING,
        (Phase.ASK, Event.NOTHING): Phase.OVER,
        (Phase.ASK, Event.LATE): Phase.OVER,
        (Phase.BRING, Event.ARRIVED): Phase.HELD,
        (Phase.BRING, Event.NOTHING): Phase.OVER,
        (Phase.BRING, Event.LATE): Phase.OVER,
        (Phase.HELD, Event.LOST): Phase.ASK,
        (Phase.OVER, Event.LOST): Phase.ASK,
    }
)
"""The phase after each event. All other events are impossible. Once the request is admitted or ends, its wait is forgotten."""


def tell_nobody() -> None:
    """Do nothing: there is no listener."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A wait for chunks of lower tiers, from the first look-up until the request is admitted.

    Attributes:
        wanted: what is wanted, as of the last look-up.
        notes: takes lines for the request that waits.
        planner: decides what is worth fetching.
        limit_s: seconds that it may take.
        timeout_note: what to note if it ends because its time is up.
        waited_s: seconds that it has taken, without those in which it was not asked or the engine had no place.
        has_place: whether the engine could have admitted the request when it asked last.
        phase: see ``NEXT``.
        probes: questions to the tiers that are waited for.
        num_found: by tier, the number of chunks that earlier questions have found there.
        skipped: indices of tiers that are not asked, because that would take too long.
        look_at: time before which it is not looked at again.
        fetch: the chunks on their way; ``None`` before slots were reserved for them.
        planned: what was wanted when it was decided what to fetch.
        num_to_have: number of leading tokens that device and host memory are to have when it is over.
        num_again: number of times that it has begun again.
        fetched: the tier that each chunk came from that was fetched before it began again.
        is_limited: whether its time was compared with that of computing.
        in_host: how many leading tokens host memory had when it was looked up last, and what that depended on.
        num_announced: number of leading tokens that another engine has announced and that have not been given up.
        num_come: number of leading tokens that had come when it was looked at last.
        on_ask: called before tiers are asked for its chunks, or chunks are fetched.
    """

    wanted: Wanted
    notes: MutableSequence[str]
    planner: FetchPlanner
    limit_s: float
    timeout_note: str
    waited_s: float = 0.0
    has_place: bool = True
    phase: Phase = Phase.ASK
    probes: Sequence[TierTask] = ()
    num_found: Counter[int] = field(default_factory=Counter)
    skipped: set[int] = field(default_factory=set)
    look_at: float = 0.0
    fetch: Fetch | None = None
    planned: Wanted | None = None
    num_to_have: int = 0
    num_again: int = 0
    fetched: dict[OffloadKey, int] = field(default_factory=dict)
    is_limited: bool = False
    in_host: tuple[tuple[int, int, int], int] | None = None
    num_announced: int = 0
    num_come: int = 0
    on_ask: Callable[[], None] = tell_nobody

    def go(self, event: Event) -> None:
        self.phase = NEXT[self.phase, event]

    @property
    def must_wait(self) -> bool:
        """Whether the answer is "not yet"."""
        return self.phase is Phase.ASK or self.phase is Phase.BRING

    @property
    def needs_slots(self) -> bool:
        """Whether it waits for slots in host memory."""
        return self.phase is Phase.BRING and self.fetch is None

    @property
    def has_arrived(self) -> bool:
        """Whether all jobs that fetch its chunks have ended."""
        return self.phase is Phase.BRING and self.fetch is not None and not self.fetch.num_running

    @property
    def has_expired(self) -> bool:
        """Whether its chunks were released before the request was admitted, although its time was not up."""
        return self.fetch is not None and self.fetch.is_released and self.phase is not Phase.OVER

    @property
    def sources(self) -> Mapping[OffloadKey, int]:
        """The tier that each chunk came from."""
        return self.fetched if self.fetch is None else {**self.fetched, **self.fetch.sources}

    @property
    def asking_s(self) -> float:
        """Seconds that are left for questions."""
        return (self.limit_s if self.needs_slots else self.limit_s / 2) - self.waited_s

    def limit(self, left_s: float, timeout_note: str) -> None:
        """Wait no longer than for ``left_s`` more seconds, and note ``timeout_note`` if it ends then."""
        if self.waited_s + left_s < self.limit_s:
            self.limit_s, self.timeout_note = self.waited_s + left_s, timeout_note

    def give_up(self) -> None:
        """End the wait because its time is up. Jobs end by themselves, or at their deadlines, and are measured."""
        no_room = "host memory had no room for chunks of lower tiers"
        self.notes.append(no_room if self.needs_slots else self.timeout_note)
        self.go(Event.LATE)
        if self.fetch is not None:
            self.fetch.give_up()

    def arrive(self) -> None:
        """Be over, with what has come: of what could not be loaded, no more is expected."""
        if self.planned is not None:
            self.num_to_have = self.planner.host_hit(self.planned, self.num_to_have)
        if self.fetch is not None and self.fetch.failed:
            self.notes.append("lower tiers did not deliver all their chunks: loads failed, or took too long")
        self.go(Event.ARRIVED)

    def has_lost(self, num_tokens: int) -> bool:
        """Whether device and host memory have fewer leading tokens than they were to have, and time is left."""
        chunk_tokens = min([keys.chunk_tokens for keys in self.wanted.keys])
        is_over = not self.must_wait and self.waited_s < self.limit_s
        return is_over and num_tokens + chunk_tokens <= self.num_to_have and self.num_again < MAX_AGAIN

    def begin_again(self) -> None:
        """Give back what was fetched, to fetch it together with what has been lost."""
        if self.fetch is not None:
            self.fetched.update(self.fetch.sources)
            self.fetch.release()
            self.fetch = None

    def end(self) -> None:
        """Release the chunks: the request was admitted, or has ended."""
        self.phase = Phase.OVER
        if self.fetch is not None:
            self.fetch.release()
