"""Faults: which there are, when they strike, and how often; and virtual time. ``fault_wrappers`` makes them happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from cargohold.errors import ConfigError
from cargohold.protocol import Clock


class Fault(Enum):
    """One kind of fault; its value is its name on the command line."""

    FAILED = "failed"
    """A copy fails, and leaves garbage behind: in all of its blocks, or in those that it names."""
    TORN = "torn"
    """A store below host memory writes only part of its bytes and reports success; checksums notice when it is read."""
    CORRUPT = "corrupt"
    """Bytes below host memory change; checksums notice when they are read."""
    LATE = "late"
    """A completion is reported some time after the copy has ended."""
    LOST = "lost"
    """A completion is never reported, as if the copy never ended: its blocks and slots must stay out of service."""
    DUPLICATED = "duplicated"
    """A completion is reported twice. The transfer port forbids that."""
    SLOW = "slow"
    """For a while everything takes far longer, so that deadlines pass."""
    GONE = "gone"
    """For a while the tier is away: nothing is found, nothing can be stored, and copies in flight fail."""
    FULL = "full"
    """The tier cannot take anything at the moment."""
    UNDECIDED = "undecided"
    """A look-up does not know yet."""
    LATE_WORKER = "late-worker"
    """One worker reports ended transfers some steps after the others."""
    RAISES = "raises"
    """The connector raises, before or after any of its hooks: on a worker or in the scheduler. It must be turned off."""
    HANGS = "hangs"
    """For a minute, look-ups, loads or writes of a tier below host memory do not end before their deadlines."""
    RESTART = "restart"
    """The process dies and comes back; the tier outlives it."""
    STALLS = "stalls"
    """The process stands still between two readings of its clock, also within one call, sometimes past a deadline."""


BREAKING = frozenset({Fault.DUPLICATED, Fault.RAISES})
"""Faults that end with the connector turned off, because it, or its copies, have broken a rule of the contract."""

_RARE = BREAKING | {Fault.LOST}
"""Faults after which little else can be found."""

RATES: Mapping[Fault, tuple[float, float]] = {
    Fault.FAILED: (0.01, 0.3),
    Fault.TORN: (0.01, 0.2),
    Fault.CORRUPT: (0.01, 0.2),
    Fault.LATE: (0.05, 0.5),
    Fault.LOST: (0.003, 0.05),
    Fault.DUPLICATED: (0.003, 0.05),
    Fault.SLOW: (0.05, 0.3),
    Fault.GONE: (0.05, 0.3),
    Fault.FULL: (0.02, 0.5),
    Fault.UNDECIDED: (0.05, 0.6),
    Fault.LATE_WORKER: (0.05, 0.5),
    Fault.RAISES: (0.0003, 0.003),
    Fault.HANGS: (0.1, 0.6),
    Fault.RESTART: (0.1, 0.6),
    Fault.STALLS: (0.001, 0.02),
}
"""Range of each fault's rate, its probability at every occasion: per copy, per look-up, per stretch of time, per reading of the
clock.

The rate is drawn again for every seed.
"""


def parse_faults(text: str) -> frozenset[Fault]:
    """Parse ``all``, ``none``, or names separated by commas. Raises ``ConfigError`` for a name that is unknown."""
    if text == "all":
        return frozenset(Fault)
    if text == "none":
        return frozenset()
    by_name = {fault.value: fault for fault in Fault}
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(
            "faults", text, f"it must be all, none, or some of {', '.join(sorted(by_name))}, separated by commas"
        )
    return frozenset(by_name[name] for name in names)


def draw_rates(allowed: Collection[Fault], random: Random) -> dict[Fault, float]:
    """Draw some of the allowed faults, each with a rate. Runs with few kinds of faults find more than runs with all of them."""
    chosen = [fault for fault in Fault if fault in allowed and random.random() < 0.4]
    kept = [fault for fault in chosen if fault not in _RARE or random.random() < 0.4]
    return {fault: random.uniform(*RATES[fault]) for fault in kept}


@dataclass(slots=True)
class FaultSource:
    """Decides when a fault strikes.

    Attributes:
        rates: probability of each fault, wherever it could strike.
        random: source of random numbers.
        clock: virtual time.
        until: time from which on no fault strikes, so that everything must settle.
        struck: how often each fault has struck.
    """

    rates: Mapping[Fault, float]
    random: Random
    clock: Clock
    until: float
    struck: Counter[Fault] = field(default_factory=Counter)

    def strikes(self, fault: Fault) -> bool:
        rate = self.rates.get(fault)
        if rate is None or self.clock() >= self.until or self.random.random() >= rate:
            return False
        self.struck[fault] += 1
        return True

    def is_possible(self, faults: Iterable[Fault]) -> bool:
        """Whether one of ``faults`` may strike in this run."""
        return any(fault in self.rates for fault in faults)


class Spells:
    """A fault that comes and goes: for each stretch of virtual time it is drawn again whether the fault is on.

    Args:
        source: decides whether it is.
        fault: the fault.
        length_s: length of a stretch in virtual seconds.
    """

    def __init__(self, source: FaultSource, fault: Fault, length_s: float = 0.5) -> None:
        self._source = source
        self._fault = fault
        self._length_s = length_s
        self._stretch = -1
        self._is_on = False

    def __call__(self) -> bool:
        """Whether the fault is on now."""
        if self._fault not in self._source.rates:
            return False
        stretch = int(self._source.clock() / self._length_s)
        if stretch != self._stretch:
            self._stretch = stretch
            self._is_on = self._source.strikes(self._fault)
        return self._is_on


STALLS_S = (0.001, 0.01, 0.05, 0.2, 1.0)
"""Longest seconds of a stall, of which one is drawn for each: a thread waits its turn, or the process is stopped."""
TICK_S = 1e-6
"""Longest seconds between two readings of a clock that stalls now and then: no two of them are equal."""


class Stalls:
    """Draws the seconds that pass before a reading of the clock.

    Args:
        source: decides when the process stalls.
    """

    def __init__(self, source: FaultSource) -> None:
        self._source = source

    def __call__(self) -> float:
        """Seconds until the next reading."""
        random = self._source.random
        longest_s = random.choice(STALLS_S) if self._source.strikes(Fault.STALLS) else TICK_S
        return longest_s * random.random()


class VirtualClock:
    """A clock of virtual time. Satisfies ``cargohold.protocol.Clock``.

    Attributes:
        now: seconds since the start. Reading it lets no time pass, unlike a call.
        before_reading: gives the seconds that pass before each call returns; ``None`` if none do.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.before_reading: Callable[[], float] | None = None

    def __call__(self) -> float:
        """The current time."""
        if self.before_reading is not None:
            self.advance(self.before_reading())
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Let time pass until ``time``, unless it is past already."""
        self.now = max(self.now, time)
